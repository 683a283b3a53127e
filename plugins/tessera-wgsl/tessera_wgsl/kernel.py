"""Kernels: one tile function as a WGSL shader, whose invocations are its programs.

Blocks are arrays in function memory, or expressions of an element's index that are computed where they are used. All
global memory is one buffer of words; parameters are byte offsets in it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tessera.codegen.contract import check_default_policy, static_shape
from tessera.codegen.coverage import make_refusal_error
from tessera.core.errors import UNKNOWN, TesseraError, UnsupportedOpError
from tessera.core.types import DType, RefType, bool_, int64
from tessera.ir.analysis import UNBOUNDED, Interval, IntervalAnalysis
from tessera.ir.core import Block, Function, Node, Value
from tessera.ir.rules import Rules
from tessera.ops.dialects import control_flow, tile
from tessera.ops.tensor import basic, reduce, shape
from tessera_wgsl.pointwise import (
    NARROW,
    REFUSED,
    define_functions,
    format_literal,
    keep_sums,
    name_type,
    pointwise_row,
    round_narrow,
)

TARGET = "wgsl"
WORKGROUP = 64
ARENA_ELEMENTS = 32  # larger blocks are in the buffer: drivers compile arrays in function memory slowly
INT32: Interval = (-(2**31), 2**31 - 1)
# row(kernel, node) emits the statements of an op.
statement_row = Rules("wgsl statements")


@dataclass
class Array:
    """A block in function memory, or from a word of the program's part of the buffer on."""

    name: str
    shape: tuple[int, ...]
    dtype: DType
    arena: int = -1


@dataclass
class Lazy:
    """A block whose elements are computed where they are used: `element(kernel, index)` is an expression."""

    shape: tuple[int, ...]
    dtype: DType
    element: Callable[[Kernel, str], str]


@dataclass
class Memory:
    """A ref: a parameter in the buffer, at the byte offset that its name holds, or an allocated array."""

    name: str
    type: RefType
    array: Array | None = None


class Intervals(IntervalAnalysis):
    """Intervals, where narrower integers have those of their type, and loaded ones of 64 bits are checked."""

    def of(self, v: Value) -> Interval:
        """The interval of a value."""
        low, high = super().of(v)
        node, dtype = self.producers.get(v), v.type.dtype
        if dtype == int64:
            checked = node is not None and node.op in (tile.load, tile.gather)
            first, last = INT32 if checked else UNBOUNDED
            if node is not None and node.op in (reduce.sum, reduce.argmax, reduce.argmin):
                first, last = self._bound_reduction(node)
        elif dtype.is_integer:
            bits = dtype.bits
            first, last = (-(1 << bits - 1), (1 << bits - 1) - 1) if dtype.kind == "int" else (0, (1 << bits) - 1)
        else:
            return low, high
        return max(low, first), min(high, last)

    def _bound_reduction(self, node: Node) -> Interval:
        (x,) = node.args
        count = math.prod(static_shape(x.type))
        if node.op is not reduce.sum:
            return 0, max(count - 1, 0)
        low, high = (0, 1) if x.type.dtype == bool_ else self.of(x)
        return min(low * count, 0), max(high * count, 0)


@dataclass
class Kernel:
    """The text of one kernel; names are numbered in order."""

    function: Function
    grid: Sequence[int] | None
    sites: list[dict[str, Any]]
    lines: list[str] = field(default_factory=list)
    values: dict[Value, Any] = field(default_factory=dict)
    depth: int = 1
    count: int = 0
    arena: int = 0  # words of the buffer for blocks of each program
    atomic: bool = False

    def __post_init__(self) -> None:
        producers = {v: n for n in self.function.body.walk() for v in n.results}
        self.intervals = Intervals(producers, self.grid)
        self.users: dict[Value, list[tuple[Block, Node | None]]] = {}
        self._find_users(self.function.body)
        refs = [p.type for p in self.function.params if isinstance(p.type, RefType)]
        packed = any(t.dtype == bool_ or t.dtype.bits < 32 for t in refs)
        effects = (tile.atomic, tile.compare_exchange, shape.check_index)
        wide = any(t.dtype == int64 for t in refs)
        self.atomic = packed or wide or any(n.op in effects for n in self.function.body.walk())

    def _find_users(self, block: Block) -> None:
        for node in block.nodes:
            for v in node.args:
                self.users.setdefault(v, []).append((block, node))
            for region in node.regions:
                self._find_users(region)
        for v in block.results:
            self.users.setdefault(v, []).append((block, None))

    # Text.

    def put(self, line: str) -> None:
        """A line at the current depth."""
        self.lines.append("  " * self.depth + line)

    def name(self, letter: str) -> str:
        """A new name."""
        self.count += 1
        return f"{letter}{self.count}"

    def let(self, text: str, letter: str = "t") -> str:
        """A new immutable value of an expression; a name or a number is itself."""
        if text.replace("_", "").isalnum():
            return text
        name = self.name(letter)
        self.put(f"let {name} = {text};")
        return name

    @contextmanager
    def nested(self, head: str) -> Iterator[None]:
        """A block of statements behind a head, as of a loop."""
        self.put(f"{head} {{")
        self.depth += 1
        yield
        self.depth -= 1
        self.put("}")

    @contextmanager
    def loop(self, count: int) -> Iterator[str]:
        """A loop over the elements of a block; gives the index. One element needs no loop."""
        if count == 1:
            with self.nested(""):
                yield "0"
            return
        i = self.name("e")
        with self.nested(f"for (var {i}: i32 = 0; {i} < {count}; {i}++)"):
            yield i

    # Values.

    def scalar(self, v: Value) -> str:
        """The expression of a scalar."""
        found = self.values[v]
        return found if isinstance(found, str) else self.element(v, "0")

    def element(self, v: Value, index: str) -> str:
        """An element of a block as an expression; a scalar is the same for all."""
        return self.read(self.values[v], index)

    def read(self, block: Any, index: str) -> str:
        """An element of a block."""
        if isinstance(block, str):
            return block
        if isinstance(block, Lazy):
            return block.element(self, index)
        if block.arena < 0:
            return f"{block.name}[{index}]"
        return self.decode(block.dtype, self.load_word(f"arena + u32({block.arena} + {index}) * args.words[1].x"))

    def write(self, array: Array, index: str, value: str) -> None:
        """Set an element of an array."""
        if array.arena < 0:
            self.put(f"{array.name}[{index}] = {value};")
        else:
            at = f"arena + u32({array.arena} + {index}) * args.words[1].x"
            self.put(f"{self.store_word(at, self.encode(array.dtype, value))};")

    def load_word(self, index: str) -> str:
        """A word of the buffer."""
        return f"atomicLoad(&mem[{index}])" if self.atomic else f"mem[{index}]"

    def store_word(self, index: str, value: str) -> str:
        """The statement that sets a word of the buffer."""
        return f"atomicStore(&mem[{index}], {value})" if self.atomic else f"mem[{index}] = {value}"

    def decode(self, dtype: DType, word: str) -> str:
        """A word as an element."""
        kind = name_type(dtype)
        return f"({word} != 0u)" if kind == "bool" else word if kind == "u32" else f"bitcast<{kind}>({word})"

    def encode(self, dtype: DType, value: str) -> str:
        """An element as a word."""
        kind = name_type(dtype)
        return f"select(0u, 1u, {value})" if kind == "bool" else value if kind == "u32" else f"bitcast<u32>({value})"

    def new_array(self, shape: Sequence[int], dtype: DType) -> Array:
        """A new array for a block."""
        count = math.prod(shape)
        if count > ARENA_ELEMENTS:
            self.arena += count
            return Array("", tuple(shape), dtype, self.arena - count)
        name = self.name("a")
        self.put(f"var {name}: array<{name_type(dtype)}, {max(count, 1)}>;")
        return Array(name, tuple(shape), dtype)

    def define(self, node: Node, element: Callable[[Kernel, str], str], cheap: bool = False) -> None:
        """Give a node's result by its elements: at once, or where they are used if that is once, or if it is cheap."""
        v = node.out
        if not v.type.shape:
            self.values[v] = self.let(element(self, "0"))
            return
        lazy = Lazy(static_shape(v.type), v.type.dtype, element)
        self.values[v] = lazy if cheap or self._is_used_once(v) else self.store_block(lazy)

    def _is_used_once(self, v: Value) -> bool:
        users = self.users.get(v, [])
        if len(users) != 1 or users[0][1] is None:
            return False
        block, user = users[0]
        at_once = user.op in pointwise_row or user.op in (tile.store, shape.reshape, *REDUCTIONS)
        return at_once and any(v in n.results for n in block.nodes)

    def store_block(self, block: Any) -> Array:
        """The elements of a block in an array of its own."""
        array = self.new_array(block.shape, block.dtype)
        with self.loop(math.prod(block.shape)) as i:
            self.write(array, i, self.read(block, i))
        return array

    def split(self, index: str, sizes: Sequence[int]) -> list[str]:
        """The index along each axis of an element, of its index in row-major order."""
        found, inner = [], 1
        for axis, size in reversed([*enumerate(sizes)]):
            part = index if inner == 1 else f"({index} / {inner})"
            outermost = all(n == 1 for n in sizes[:axis])
            found.append("0" if size == 1 else self.let(part if outermost else f"{part} % {size}", "j"))
            inner *= size
        return found[::-1]

    def join(self, indices: Sequence[str], sizes: Sequence[int]) -> str:
        """The index in row-major order of an element, of its indices along the axes."""
        terms, inner = [], 1
        for index, size in zip(reversed(indices), reversed(sizes), strict=True):
            if index != "0":
                terms.append(index if inner == 1 else f"{index} * {inner}")
            inner *= size
        return self.let(" + ".join(reversed(terms)) or "0", "j")

    # Emission.

    def emit_block(self, block: Block) -> None:
        """The statements of a block; an error has the line of its op."""
        for node in block.nodes:
            try:
                check_default_policy(node, TARGET)
                self.emit_node(node)
            except TesseraError as error:
                if error.location == UNKNOWN:
                    error.location = node.loc
                raise

    def emit_node(self, node: Node) -> None:
        """The statements of an op.

        Raises:
            UnsupportedOpError: it has no row, or an integer of 64 bits that may not fit in 32.
        """
        if node.op in statement_row:
            statement_row.of(node.op)(self, node)
        elif node.op in pointwise_row and node.op not in REFUSED:
            row = pointwise_row.of(node.op)
            known = self.intervals.producers
            self.define(
                node,
                lambda k, i: k.let(
                    round_narrow(node, row(node, *keep_sums(node, [k.element(v, i) for v in node.args], known)))
                ),
            )
        else:
            raise make_refusal_error(TARGET, node, REFUSED)
        if not node.regions:
            for v in node.results:
                self._check_interval(node, v)

    def _check_interval(self, node: Node, v: Value) -> None:
        low, high = self.intervals.of(v) if v.type.dtype == int64 else (0.0, 0.0)
        if low < INT32[0] or high > INT32[1]:
            raise UnsupportedOpError(
                f"{node.op.name} on int64 cannot be emitted: WGSL has no integers of 64 bits, and this one may not fit "
                f"in 32 on the target {TARGET}", location=node.loc, expected="indices, or int32",
                received=f"int64 from {low} to {high}", suggestion="cast to ts.int32 first, or run on another target",
            )  # fmt: skip

    def text(self) -> str:
        """The shader."""
        for number, p in enumerate(self.function.params):
            self._bind_parameter(number, p)
        self.emit_block(self.function.body)
        body = "\n".join(self.lines)
        slots = HEADER_SLOTS + len(self.function.params)
        head = HEAD.format(
            word="atomic<u32>" if self.atomic else "u32", vectors=-(-slots // 4), workgroup=WORKGROUP,
        )  # fmt: skip
        watch = WATCH.format(fail=FAIL[self.atomic].format(site=CUT_SITE)) if LOOP.search(body) else ""
        return f"{define_functions(body)}{head}{body}{watch}\n}}\n"

    def _bind_parameter(self, number: int, p: Value) -> None:
        slot = HEADER_SLOTS + number
        word = f"args.words[{slot // 4}].{'xyzw'[slot % 4]}"
        if isinstance(p.type, RefType):
            self.put(f"let p{number} = {word};")
            self.values[p] = Memory(f"p{number}", p.type)
        else:
            narrow = NARROW.get(p.type.dtype)
            value = f"widen_{narrow}({word} & 0xffffu)" if narrow else self.decode(p.type.dtype, word)
            self.values[p] = self.let(value, "s")


# A driver on the processor (Mesa's llvmpipe) ends all loops of an invocation after 65,535 rounds. A last loop, of
# a length that no compiler knows, shows whether it did.
CUT_SITE = 0xFFFFFFFE
LOOP = re.compile(r"^\s*(for|loop)\b", re.MULTILINE)
FAIL = {True: "atomicMax(&mem[0], {site}u);", False: "mem[0] = {site}u;"}
WATCH = """
  let rounds = 2u + min(args.words[0].x, 1u);
  var round = 0u;
  loop {{ if (round >= rounds) {{ break; }} round++; }}
  if (round < rounds) {{ {fail} }}"""
REDUCTIONS = (reduce.sum, reduce.max, reduce.min, reduce.argmax, reduce.argmin)
# The words before the parameters: three axes of the grid, the first program, programs of this dispatch, the arena, the
# 0 of `pointwise.keep`, the fourth axis of the grid.
HEADER_SLOTS, GRID_AXES = 8, 4
HEAD = """\
struct Arguments {{ words: array<vec4<u32>, {vectors}> }}
@group(0) @binding(0) var<storage, read_write> mem: array<{word}>;
@group(0) @binding(1) var<uniform> args: Arguments;

@compute @workgroup_size({workgroup})
fn main(@builtin(global_invocation_id) at: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>) {{
  let here = at.x + at.y * groups.x * {workgroup}u;
  if (here >= args.words[1].x) {{ return; }}
  let program = here + args.words[0].w;
  let arena = args.words[1].y + here;
  let grid0 = i32(args.words[0].x);
  let grid1 = i32(args.words[0].y);
  let grid2 = i32(args.words[0].z);
  let grid3 = i32(args.words[1].w);
  let pid0 = i32(program) / (grid1 * grid2 * grid3);
  let pid1 = (i32(program) / (grid2 * grid3)) % grid1;
  let pid2 = (i32(program) / grid3) % grid2;
  let pid3 = i32(program) % grid3;
"""


@statement_row(tile.program_id, tile.grid_size)
def _(kernel, node):
    kernel.values[node.out] = f"{'pid' if node.op is tile.program_id else 'grid'}{node.attrs['axis']}"


@statement_row(basic.full)
def _(kernel, node):
    literal = format_literal(node.out.type.dtype, node.attrs["value"])
    kernel.values[node.out] = literal if not node.out.type.shape else _make_constant(node, literal)


def _make_constant(node: Node, literal: str) -> Lazy:
    return Lazy(static_shape(node.out.type), node.out.type.dtype, lambda k, i: literal)


@statement_row(shape.iota)
def _(kernel, node):
    sizes = static_shape(node.out.type)
    kind, axis = name_type(node.out.type.dtype), node.attrs["axis"]
    kernel.define(node, lambda k, i: f"{kind}({k.split(i, sizes)[axis]})", cheap=True)


@statement_row(shape.reshape)
def _(kernel, node):
    (x,) = node.args
    kernel.define(node, lambda k, i: k.element(x, i), cheap=_is_in_place(kernel, x))


def _is_in_place(kernel: Kernel, v: Value) -> bool:
    """Whether an element costs nothing: that of an array, or of a scalar."""
    return isinstance(kernel.values[v], (Array, str))


def _keep(kernel: Kernel, v: Value) -> Any:
    """A block whose elements are used more than once: in an array, unless each costs nothing."""
    found = kernel.values[v]
    if isinstance(found, Lazy):
        found = kernel.values[v] = kernel.store_block(found)
    return found


@statement_row(basic.broadcast_to)
def _(kernel, node):
    (x,) = node.args
    inner, outer = static_shape(x.type), static_shape(node.out.type)
    source = _keep(kernel, x)

    def element(k: Kernel, i: str) -> str:
        if math.prod(inner) == 1:
            return k.read(source, "0")
        indices = k.split(i, outer)[len(outer) - len(inner) :]
        return k.read(source, k.join(["0" if n == 1 else j for j, n in zip(indices, inner, strict=True)], inner))

    kernel.define(node, element, cheap=True)


@statement_row(shape.permute)
def _(kernel, node):
    (x,) = node.args
    inner, outer, axes = static_shape(x.type), static_shape(node.out.type), node.attrs["axes"]
    source = _keep(kernel, x)

    def element(k: Kernel, i: str) -> str:
        indices = dict(zip(axes, k.split(i, outer), strict=True))
        return k.read(source, k.join([indices[a] for a in range(len(inner))], inner))

    kernel.define(node, element, cheap=True)


# Control flow.


def _carry(kernel: Kernel, values: Sequence[Value]) -> list[Any]:
    """Variables that begin as these values."""
    return [_copy(kernel, kernel.values[v], v) for v in values]


def _copy(kernel: Kernel, found: Any, v: Value) -> Any:
    if v.type.shape:
        return kernel.store_block(found if not isinstance(found, str) else _spread(v, found))
    name = kernel.name("c")
    kernel.put(f"var {name}: {name_type(v.type.dtype)} = {kernel.read(found, '0')};")
    return name


def _spread(v: Value, text: str) -> Lazy:
    return Lazy(static_shape(v.type), v.type.dtype, lambda k, i: text)


def _assign(kernel: Kernel, targets: Sequence[Any], results: Sequence[Value]) -> None:
    """Set variables to the results of a region, all of which are computed before."""
    ready = [_settle(kernel, v, len(results) > 1) for v in results]
    for target, found in zip(targets, ready, strict=True):
        if isinstance(target, str):
            kernel.put(f"{target} = {found};")
        elif target is not found:
            with kernel.loop(math.prod(target.shape)) as i:
                kernel.write(target, i, kernel.read(found, i))


def _settle(kernel: Kernel, v: Value, several: bool) -> Any:
    found = kernel.values[v]
    if not v.type.shape:
        name = kernel.name("n")
        kernel.put(f"let {name} = {kernel.scalar(v)};")
        return name
    if isinstance(found, Array) and not several:
        return found
    return kernel.store_block(found)


@statement_row(control_flow.for_)
def _(kernel, node):
    lower, upper, step = (kernel.scalar(v) for v in node.args[:3])
    kernel.intervals.loop(node)
    (body,) = node.regions
    carried = _carry(kernel, node.args[3:])
    index = kernel.name("e")
    for v in (*node.args[:3], body.params[0]):
        kernel._check_interval(node, v)
    first = kernel.intervals.of(node.args[2])[0]
    more = f"{index} < {upper}" if first > 0 else f"select({index} > {upper}, {index} < {upper}, {step} > 0)"
    with kernel.nested(f"for (var {index}: i32 = {lower}; {more}; {index} += {step})"):
        kernel.values.update(zip(body.params, [index, *carried], strict=True))
        kernel.emit_block(body)
        _assign(kernel, carried, body.results)
    kernel.values.update(zip(node.results, carried, strict=True))


@statement_row(control_flow.while_)
def _(kernel, node):
    test, body = node.regions
    carried = _carry(kernel, node.args)
    with kernel.nested("loop"):
        kernel.values.update(zip(test.params, carried, strict=True))
        kernel.emit_block(test)
        kernel.put(f"if (!{kernel.scalar(test.results[0])}) {{ break; }}")
        kernel.values.update(zip(body.params, carried, strict=True))
        kernel.emit_block(body)
        _assign(kernel, carried, body.results)
    kernel.values.update(zip(node.results, carried, strict=True))


@statement_row(control_flow.if_)
def _(kernel, node):
    found = []
    for v in node.results:
        if v.type.shape:
            found.append(kernel.new_array(static_shape(v.type), v.type.dtype))
        else:
            found.append(kernel.name("c"))
            kernel.put(f"var {found[-1]}: {name_type(v.type.dtype)};")
    for head, region in zip((f"if ({kernel.scalar(node.args[0])})", "else"), node.regions, strict=True):
        with kernel.nested(head):
            kernel.emit_block(region)
            _assign(kernel, found, region.results)
    kernel.values.update(zip(node.results, found, strict=True))

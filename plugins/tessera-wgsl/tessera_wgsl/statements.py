"""Statements: loads and stores, atomics, reductions and products as loops of WGSL."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tessera.codegen.artifact import describe_size
from tessera.codegen.contract import static_shape
from tessera.codegen.diagnostics import describe_location
from tessera.core.errors import UnsupportedOpError
from tessera.core.types import DType, RefType, bool_, f32, int64
from tessera.ir.core import Node, Value
from tessera.ops.dialects import tile
from tessera.ops.tensor import contractions, reduce, shape
from tessera_wgsl.kernel import Kernel, Memory, _keep, statement_row
from tessera_wgsl.pointwise import NARROW, format_literal, name_type, round_narrow, wrap

STATUS = "mem[0]"  # the least number of a failed site, from the last on: 0 is none


# Elements of memory.


def read_element(kernel: Kernel, memory: Memory, index: str) -> str:
    """An element of memory as an expression."""
    if memory.array is not None:
        return kernel.read(memory.array, index)
    dtype, base = memory.type.dtype, memory.name
    if dtype == int64:
        return _read_wide(kernel, base, index)
    if _is_packed(dtype):
        at, shift = _locate(kernel, dtype, base, index)
        bits = kernel.let(f"(atomicLoad(&mem[{at}]) >> {shift}) & {_mask(dtype)}u")
        if dtype == bool_:
            return f"({bits} != 0u)"
        if dtype in NARROW:
            return f"widen_{NARROW[dtype]}({bits})"
        return wrap(dtype, f"bitcast<i32>({bits})") if dtype.kind == "int" else bits
    return kernel.decode(dtype, kernel.load_word(f"({base} >> 2u) + u32({index})"))


def write_element(kernel: Kernel, memory: Memory, index: str, value: str) -> None:
    """Set an element of memory."""
    if memory.array is not None:
        kernel.write(memory.array, index, value)
        return
    dtype, base = memory.type.dtype, memory.name
    if dtype == int64:
        at = kernel.let(f"({base} >> 2u) + 2u * u32({index})")
        kernel.put(f"{kernel.store_word(at, f'bitcast<u32>({value})')};")
        kernel.put(f"{kernel.store_word(f'{at} + 1u', f'bitcast<u32>({value} >> 31u)')};")
    elif _is_packed(dtype):
        at, shift = _locate(kernel, dtype, base, index)
        word = f"narrow_{NARROW[dtype]}({value})" if dtype in NARROW else kernel.encode(dtype, value)
        bits = kernel.let(f"({word} & {_mask(dtype)}u) << {shift}")
        kernel.put(f"atomicAnd(&mem[{at}], ~({_mask(dtype)}u << {shift}));")
        kernel.put(f"atomicOr(&mem[{at}], {bits});")
    else:
        kernel.put(f"{kernel.store_word(f'({base} >> 2u) + u32({index})', kernel.encode(dtype, value))};")


def _is_packed(dtype: DType) -> bool:
    return dtype == bool_ or dtype.bits < 32


def _mask(dtype: DType) -> int:
    return (1 << 8 * dtype.numpy.itemsize) - 1


def _locate(kernel: Kernel, dtype: DType, base: str, index: str) -> tuple[str, str]:
    """The word of an element of 8 or 16 bits, and its first bit there."""
    byte = kernel.let(f"{base} + {dtype.numpy.itemsize}u * u32({index})")
    return kernel.let(f"{byte} >> 2u"), kernel.let(f"8u * ({byte} & 3u)")


def _read_wide(kernel: Kernel, base: str, index: str) -> str:
    """An integer of 64 bits that fits in 32; another one ends the program with an error."""
    at = kernel.let(f"({base} >> 2u) + 2u * u32({index})")
    low = kernel.let(f"bitcast<i32>({kernel.load_word(at)})")
    high = kernel.let(f"bitcast<i32>({kernel.load_word(f'{at} + 1u')})")
    kernel.put(f"if ({high} != ({low} >> 31u)) {{ atomicMax(&{STATUS}, {WIDE_SITE}u); }}")
    return low


WIDE_SITE = 0xFFFFFFFF


# Loads and stores of blocks.


def _access(node: Node, operands: Sequence[Value], first: int) -> tuple[list[Value], list[Value]]:
    """The indices of an access, and what follows them: mask and other."""
    rank = len(node.args[0].type.shape)
    return list(operands[first : first + rank]), list(operands[first + rank :])


def _find_condition(
    kernel: Kernel, node: Node, starts: Sequence[Value], sizes: Sequence[int], block: Sequence[int],
    places: Sequence[str], mask: str | None,
) -> str:  # fmt: skip
    """Where an element of a block is accessed: inside memory, and where the mask is true."""
    parts = [] if mask is None else [mask]
    if node.attrs.get("edge") == "clip":
        for axis in kernel.intervals.find_unproven_axes(starts, block, sizes):
            parts.append(f"{places[axis]} >= 0 && {places[axis]} < {sizes[axis]}")
    return " && ".join(parts)


def _place(kernel: Kernel, starts: Sequence[Value], block: Sequence[int], i: str) -> list[str]:
    indices = kernel.split(i, block)
    return [kernel.let(_add(kernel.scalar(s), j), "j") for s, j in zip(starts, indices, strict=True)]


def _add(a: str, b: str) -> str:
    return a if b == "0" else b if a in ("0", "i32(0)") else f"{a} + {b}"


def _emit_guarded_read(kernel: Kernel, dtype: DType, other: str, condition: str, memory: Memory, at: Any) -> str:
    """An element where the condition holds, else another value."""
    if not condition:
        return kernel.let(read_element(kernel, memory, at()))
    name = kernel.name("t")
    kernel.put(f"var {name}: {name_type(dtype)} = {other};")
    with kernel.nested(f"if ({condition})"):
        kernel.put(f"{name} = {read_element(kernel, memory, at())};")
    return name


@statement_row(tile.load)
def _(kernel, node):
    memory, block = kernel.values[node.args[0]], static_shape(node.out.type)
    sizes, dtype = static_shape(memory.type), node.out.type.dtype
    starts, rest = _access(node, node.args, 1)

    def element(i):
        places = _place(kernel, starts, block, i)
        mask = kernel.element(rest[0], i) if rest else None
        other = kernel.element(rest[1], i) if len(rest) > 1 else format_literal(dtype, 0)
        condition = _find_condition(kernel, node, starts, sizes, block, places, mask)
        return _emit_guarded_read(kernel, dtype, other, condition, memory, lambda: kernel.join(places, sizes))

    _define_at_once(kernel, node, element)


def _define_at_once(kernel: Kernel, node: Node, element: Any) -> None:
    """A result whose elements are computed here and now, as of memory that may change."""
    if not node.out.type.shape:
        name = kernel.name("c")
        kernel.put(f"var {name}: {name_type(node.out.type.dtype)};")
        with kernel.nested(""):
            kernel.put(f"{name} = {element('0')};")
        kernel.values[node.out] = name
        return
    array = kernel.new_array(static_shape(node.out.type), node.out.type.dtype)
    with kernel.loop(math.prod(array.shape)) as i:
        kernel.write(array, i, element(i))
    kernel.values[node.out] = array


@statement_row(tile.store)
def _(kernel, node):
    memory, value = kernel.values[node.args[0]], node.args[1]
    block, sizes = static_shape(value.type), static_shape(memory.type)
    starts, rest = _access(node, node.args, 2)
    with kernel.loop(math.prod(block)) as i:
        places = _place(kernel, starts, block, i)
        mask = kernel.element(rest[0], i) if rest else None
        condition = _find_condition(kernel, node, starts, sizes, block, places, mask)
        _emit_guarded_write(kernel, condition, lambda: write_element(
            kernel, memory, kernel.join(places, sizes), kernel.element(value, i)))  # fmt: skip


def _emit_guarded_write(kernel: Kernel, condition: str, write: Any) -> None:
    if not condition:
        write()
        return
    with kernel.nested(f"if ({condition})"):
        write()


# Gathers, scatters and atomics.


def _project(kernel: Kernel, v: Value, outer: tuple[int, ...], i: str) -> str:
    """The element of an operand that is broadcast to a shape."""
    inner = static_shape(v.type)
    if not inner:
        return kernel.scalar(v)
    if inner == outer:
        return kernel.let(kernel.element(v, i))
    indices = kernel.split(i, outer)[len(outer) - len(inner) :]
    parts = ["0" if n == 1 else j for j, n in zip(indices, inner, strict=True)]
    return kernel.let(kernel.element(v, kernel.join(parts, inner)))


@statement_row(tile.gather)
def _(kernel, node):
    memory, block = kernel.values[node.args[0]], static_shape(node.out.type)
    indices, rest = _access(node, node.args, 1)
    dtype = node.out.type.dtype

    def element(i):
        mask = _project(kernel, rest[0], block, i) if rest else ""
        other = _project(kernel, rest[1], block, i) if len(rest) > 1 else format_literal(dtype, 0)
        places = [_project(kernel, v, block, i) for v in indices]
        at = lambda: kernel.join(places, static_shape(memory.type))  # noqa: E731
        return _emit_guarded_read(kernel, dtype, other, mask, memory, at)

    _define_at_once(kernel, node, element)


def _scattered_shape(node: Node, operands: Sequence[Value]) -> tuple[int, ...]:
    from tessera.core.shapes import broadcast

    return tuple(int(n) for n in broadcast(*(static_shape(v.type) for v in operands)))


@statement_row(tile.scatter)
def _(kernel, node):
    memory, value = kernel.values[node.args[0]], node.args[1]
    indices, rest = _access(node, node.args, 2)
    block = _scattered_shape(node, [*indices, *rest[:1], value])
    with kernel.loop(math.prod(block)) as i:
        places = [_project(kernel, v, block, i) for v in indices]
        mask = _project(kernel, rest[0], block, i) if rest else ""
        _emit_guarded_write(kernel, mask, lambda: write_element(
            kernel, memory, kernel.join(places, static_shape(memory.type)),
            _project(kernel, value, block, i)))  # fmt: skip


ATOMICS = {"add": "atomicAdd", "max": "atomicMax", "min": "atomicMin", "and": "atomicAnd", "or": "atomicOr",
           "xor": "atomicXor", "exchange": "atomicExchange"}  # fmt: skip


@statement_row(tile.atomic)
def _(kernel, node):
    memory, value = kernel.values[node.args[0]], node.args[1]
    kind, dtype = node.attrs["kind"], memory.type.dtype
    if memory.array is not None or dtype.bits != 32 or (dtype.kind == "int" and kind in ("max", "min")):
        raise UnsupportedOpError(
            f"the target wgsl cannot emit tile.atomic {kind} of {dtype} here", location=node.loc,
            expected="f32, int32 or uint32 in global memory, max and min of uint32 and f32",
        )  # fmt: skip
    indices, rest = _access(node, node.args, 2)
    block = static_shape(node.out.type)

    def element(i):
        places = [_project(kernel, v, block, i) for v in indices]
        old = kernel.name("t")
        kernel.put(f"var {old}: u32 = 0u;")
        mask = _project(kernel, rest[0], block, i) if rest else ""
        word = lambda: kernel.let(  # noqa: E731
            f"({memory.name} >> 2u) + u32({kernel.join(places, static_shape(memory.type))})")  # fmt: skip
        _emit_guarded_write(kernel, mask, lambda: _emit_update(
            kernel, dtype, kind, old, word(), _project(kernel, value, block, i)))  # fmt: skip
        return kernel.decode(dtype, old)

    _define_at_once(kernel, node, element)


def _emit_update(kernel: Kernel, dtype: DType, kind: str, old: str, at: str, value: str) -> None:
    if dtype != f32 or kind == "exchange":
        kernel.put(f"{old} = {ATOMICS[kind]}(&mem[{at}], {kernel.encode(dtype, value)});")
        return
    combined = {"add": "(x + {})", "max": "maximum_f32(x, {})", "min": "minimum_f32(x, {})"}[kind].format(value)
    kernel.put(f"{old} = atomicLoad(&mem[{at}]);")
    with kernel.nested("loop"):
        kernel.put(f"let x = from_bits({old});")
        kernel.put(f"let done = atomicCompareExchangeWeak(&mem[{at}], {old}, bitcast<u32>({combined}));")
        kernel.put("if (done.exchanged) { break; }")
        kernel.put(f"{old} = done.old_value;")


# Memory of a program, and copies into it, which are complete at once.


@statement_row(tile.local_id, tile.group_size)
def _(kernel, node):
    kernel.values[node.out] = f"i32({int(node.op is tile.group_size)})"


@statement_row(tile.alloc)
def _(kernel, node):
    type: RefType = node.out.type
    array = kernel.new_array(static_shape(type), type.dtype)
    kernel.values[node.out] = Memory("", type, array)


@statement_row(tile.async_commit, tile.async_wait, tile.barrier)
def _(kernel, node):
    """A group of one tile waits for nobody, and its copies are complete."""


@statement_row(tile.async_copy)
def _(kernel, node):
    to, source = (kernel.values[v] for v in node.args[:2])
    block, starts = tuple(node.attrs["shape"]), node.args[2:]
    to_sizes, sizes = static_shape(to.type), static_shape(source.type)
    to_starts, from_starts = starts[: len(to_sizes)], starts[len(to_sizes) :]
    with kernel.loop(math.prod(block)) as i:
        indices = kernel.split(i, block)
        there, here = (
            [
                kernel.let(_add(kernel.scalar(s), j), "j")
                for s, j in zip(at, indices[len(indices) - len(at) :], strict=True)
            ]
            for at in (to_starts, from_starts)
        )
        own = block[len(block) - len(sizes) :]
        condition = _find_condition(kernel, node, from_starts, sizes, own, here, None)
        zero = format_literal(source.type.dtype, 0)
        found = _emit_guarded_read(kernel, source.type.dtype, zero, condition, source, lambda: kernel.join(here, sizes))
        write_element(kernel, to, kernel.join(there, to_sizes), found)


# Checked indices.


@statement_row(shape.check_index)
def _(kernel, node):
    (x,) = node.args
    a = node.attrs
    kernel.sites.append({
        "kind": "index", "size": describe_size(a["size"]), "along": a["along"], "what": a["what"], "wrap": a["wrap"],
        "place": describe_location(node.loc),
    })  # fmt: skip
    number = len(kernel.sites)

    def element(i):
        given = kernel.let(f"i32({kernel.element(x, i)})")
        moved = kernel.let(f"select({given}, {given} + {a['size']}, {given} < 0)") if a["wrap"] else given
        outside = kernel.let(f"({moved} < 0 || {moved} >= {a['size']})")
        kernel.put(f"if ({outside}) {{ atomicMax(&{STATUS}, {number}u); }}")
        return f"select({moved}, 0, {outside})"

    _define_at_once(kernel, node, element)


# Reductions and products.


def _split_axes(node: Node, inner: tuple[int, ...]) -> tuple[list[int], list[int]]:
    axis = node.attrs["axis"]
    axes = sorted({a % len(inner) for a in (axis if isinstance(axis, (tuple, list)) else (axis,))})
    return axes, [a for a in range(len(inner)) if a not in axes]


def _reduce(kernel: Kernel, node: Node, begin: Any, step: Any) -> None:
    """Each result: `begin()` gives its variables, `step(variables, x, number)` adds an element; the first is it."""
    (x,) = node.args
    inner = static_shape(x.type)
    axes, kept = _split_axes(node, inner)
    counts = [math.prod(inner[a] for a in part) for part in (kept, axes)]
    block = kernel.values[x]
    array = kernel.new_array((counts[0],), node.out.type.dtype) if node.out.type.shape else None
    result = begin() if array is None else None
    with kernel.loop(counts[0]) as o:
        outer = kernel.split(o, [inner[a] for a in kept])
        state = result or begin()
        with kernel.loop(counts[1]) as r:
            along = kernel.split(r, [inner[a] for a in axes])
            at = dict(zip((*kept, *axes), (*outer, *along), strict=True))
            step(state, kernel.let(kernel.read(block, kernel.join([at[a] for a in range(len(inner))], inner))), r)
        if array is not None:
            kernel.write(array, o, round_narrow(node, state[0]))
    if array is None:
        kernel.values[node.out] = round_narrow(node, result[0])
    else:
        array.shape = static_shape(node.out.type)
        kernel.values[node.out] = array


def _variable(kernel: Kernel, kind: str, value: str) -> str:
    name = kernel.name("c")
    kernel.put(f"var {name}: {kind} = {value};")
    return name


@statement_row(reduce.sum)
def _(kernel, node):
    source, to = node.args[0].type.dtype, node.out.type.dtype
    convert = "" if name_type(source) == name_type(to) else name_type(to)

    def step(state, x, r):
        kernel.put(f"{state[0]} = {wrap(to, f'{state[0]} + {convert}({x})' if convert else f'{state[0]} + {x}')};")

    _reduce(kernel, node, lambda: [_variable(kernel, name_type(to), format_literal(to, 0))], step)


@statement_row(reduce.max, reduce.min)
def _(kernel, node):
    dtype, name = node.out.type.dtype, node.op.__name__
    first = _find_identity(dtype, name == "max")

    def step(state, x, r):
        acc = state[0]
        if dtype == bool_:
            combined = f"{acc} {'|' if name == 'max' else '&'} {x}"
        else:
            combined = f"{name}imum_f32({acc}, {x})" if dtype.is_float else f"{name}({acc}, {x})"
        kernel.put(f"{acc} = {combined};")

    _reduce(kernel, node, lambda: [_variable(kernel, name_type(dtype), first)], step)


def _find_identity(dtype: DType, lowest: bool) -> str:
    """The least or the greatest number of a type."""
    if dtype == bool_:
        return "false" if lowest else "true"
    if dtype.is_float:
        return format_literal(dtype, -math.inf if lowest else math.inf)
    bits = min(dtype.bits, 32)
    if dtype.kind != "int":
        return "0u" if lowest else f"{(1 << bits) - 1}u"
    return format_literal(dtype, -(1 << bits - 1) if lowest else (1 << bits - 1) - 1)


@statement_row(reduce.argmax, reduce.argmin)
def _(kernel, node):
    dtype, larger = node.args[0].type.dtype, node.op is reduce.argmax
    kind = name_type(dtype)

    def begin():
        return [_variable(kernel, "i32", "0"), _variable(kernel, kind, _find_identity(dtype, larger))]

    def step(state, x, r):
        best = f"{x} {'>' if larger else '<'} {state[1]}"
        if dtype == bool_:
            best = f"{x} && !{state[1]}" if larger else f"!{x} && {state[1]}"
        if dtype.is_float:
            best = f"(is_nan({x}) && !is_nan({state[1]})) || {best}"
        kernel.put(f"if ({best}) {{ {state[0]} = {r}; {state[1]} = {x}; }}")

    _reduce(kernel, node, begin, step)


@statement_row(contractions.dot)
def _(kernel, node):
    a, b = node.args
    (*batch, m, k), n = static_shape(a.type), static_shape(b.type)[-1]
    left, right = _keep(kernel, a), _keep(kernel, b)
    dtype = node.out.type.dtype
    kind = name_type(dtype)
    array = kernel.new_array(static_shape(node.out.type), dtype)
    with kernel.loop(math.prod(batch) * m) as row, kernel.loop(n) as column:
        total = _variable(kernel, kind, format_literal(dtype, 0))
        start = kernel.let(f"({row} / {m}) * {k * n}") if batch else "0"
        with kernel.loop(k) as step:
            x = kernel.read(left, kernel.let(f"{row} * {k} + {step}", "j"))
            y = kernel.read(right, kernel.let(_add(start, f"{step} * {n} + {column}"), "j"))
            kernel.put(f"{total} += {kind}({x}) * {kind}({y});")
        kernel.write(array, kernel.let(f"{row} * {n} + {column}", "j"), round_narrow(node, total))
    kernel.values[node.out] = array

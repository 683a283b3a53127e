"""Kernel emitter: a Tile module as LLVM IR and a host plan; the walk over each tile function, its loops and branches.

A tile function becomes `@k`, one program, `@k.range`, a range of them, and `@k.task`, which reads its parameters from a
table:

    void @k(<params>, i64 pid0, pid1, pid2, grid0, grid1, grid2, ptr scratch)
    void @k.range(<params>, i64 begin, i64 end, i64 grid0, grid1, grid2, ptr scratch)
    void @k.task(ptr slots, i64 begin, i64 end, ptr scratch)

A ref is a pointer, a scalar is itself. Programs are numbered in row-major order: the last grid axis varies fastest.
`slots` holds 8 bytes for each parameter (scalars in the first bytes) and then the three grid sizes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tessera.codegen.coverage import make_refusal_error
from tessera.codegen.host_plan import find_aliased_parameters, plan_launches
from tessera.codegen.llvm.passes.bufferisation import is_block, is_fusible
from tessera.codegen.llvm.table import (
    REFUSED,
    index_checks,  # noqa: F401
    inline_instructions,  # noqa: F401  (its rows fill the tables)
    narrow_integers,  # noqa: F401
    reductions,  # noqa: F401
    scalar_functions,
)
from tessera.codegen.llvm.table.emission import statement_rule
from tessera.codegen.llvm.table.loop_fusion import (
    allocate_block,
    allocate_new,
    emit_element,
    materialise_block,
    move_block,
)
from tessera.codegen.llvm.table.matmul import accumulate_product
from tessera.codegen.llvm.table.program_ops import GRID_RANK, MAX_UNCHECKED_ITERATIONS, emit_stop_check
from tessera.codegen.llvm.table.reduction_combiners import COMBINERS
from tessera.codegen.llvm.table.reductions import find_visited
from tessera.codegen.llvm.table.transposes import keep_turned
from tessera.codegen.llvm.text import protocol
from tessera.codegen.llvm.text.builder import (
    DebugMetadata,
    LineSection,
    LlvmBuilder,
    LoopBody,
    get_register_type,
    is_number,
)
from tessera.codegen.llvm.text.kernel_context import FunctionLibrary, LlvmKernelContext, name_size_parameter
from tessera.codegen.llvm.text.memory import StridedMemRef, make_row_major_strides
from tessera.core.errors import UnsupportedOpError
from tessera.core.symbolic_dim import Size, find_size_bounds
from tessera.core.types import RefType, TensorType, bool_
from tessera.ir.core import Block, Function, Module, Node, Value, find_size_names
from tessera.ops.dialects import control_flow, host
from tessera.ops.dialects.tile import uses_grid_barrier
from tessera.ops.tensor import shape
from tessera.ops.tensor.random import round_by_chance

if TYPE_CHECKING:
    from tessera.codegen.llvm.text.kernel_context import LlvmKernelContext


# The walk over a tile function: each node is a statement, a fused dot, a scalar, or a block.


def emit_block(kernel: LlvmKernelContext, block: Block) -> None:
    """Emit the nodes of a block in order."""
    for node in block.nodes:
        for v in node.results:
            kernel.producers[v] = node
        with kernel.at_node(node):
            _emit_node(kernel, node)
    store_pending(kernel)


def _emit_node(kernel: LlvmKernelContext, node: Node) -> None:
    _check_policy(node)
    rule = statement_rule.get(node.op)
    if node.op in COMBINERS:
        with join_pending(kernel, node):
            statement_rule.of(node.op)(kernel, node)
        return
    if not is_fusible(node.op) or node.op is shape.permute or any(is_block(a) for a in node.args) > is_block(node.out):
        store_pending(kernel)
    if node.results and node.results[0] in kernel.plan.fused_dots:
        accumulate_product(kernel, node, kernel.plan.fused_dots[node.out])
    elif rule is not None:
        rule(kernel, node)
    elif not is_fusible(node.op):
        raise make_refusal_error("llvm", node, REFUSED)
    elif not is_block(node.out):
        kernel.scalars[node.out] = emit_element(LoopBody(kernel), node.out, ()).name
    elif node.op is shape.permute and keep_turned(kernel, node):
        return
    elif node.out in kernel.plan.stored:
        kernel.pending[node.out] = None
        if node.out in kernel.plan.target:
            store_pending(kernel)


# Pending blocks: a block to be stored waits for the next statement. If that is a reduction which visits each of its
# elements, its loops compute and store them; else a loop of its own does.


def store_pending(kernel: LlvmKernelContext) -> None:
    """Compute the blocks that wait into memory."""
    for v in list(kernel.pending):
        target = allocate_block(kernel, v)
        del kernel.pending[v]
        with kernel.at_node(kernel.producers[v]):
            materialise_block(kernel, v, target)
        kernel.buffers[v] = target


@contextmanager
def join_pending(kernel: LlvmKernelContext, node: Node) -> Iterator[None]:
    """The loops of a reduction, within the `with` block, store the blocks that wait; others are stored before."""
    if not kernel.pending.keys() <= find_visited(kernel, node.args[0]):
        store_pending(kernel)
    kernel.joined = {v: allocate_block(kernel, v) for v in kernel.pending}
    _record_accesses(kernel)
    yield
    _record_accesses(kernel)  # they are live through all of the loops
    kernel.buffers |= kernel.joined
    kernel.joined, kernel.pending = {}, {}


def _record_accesses(kernel: LlvmKernelContext) -> None:
    for memory in kernel.joined.values():
        kernel.scratch.record_access(memory)


def _check_policy(node: Node) -> None:
    if node.op is round_by_chance:
        return  # its own row rounds from f64, once
    operands = tuple(t.dtype for t in node.types)
    for v in node.results:
        if isinstance(v.type, TensorType) and (value := scalar_functions.find_unsupported_policy(v.type, operands)):
            raise scalar_functions.make_policy_error(value, node.loc)


# Loops and branches: scalars are carried by phis, blocks stay in memory.


class LoopCarriedValues:
    """The values that a loop carries: a memory for each block, a phi for each scalar."""

    def __init__(self, kernel: LlvmKernelContext, node: Node, inits: Sequence[Value]) -> None:
        self.kernel, self.node, self.inits = kernel, node, inits
        self.memories = [allocate_block(kernel, v) if is_block(v) else None for v in node.results]
        for v, memory in zip(inits, self.memories, strict=True):
            if memory is not None:
                move_block(kernel, v, memory)
        self.first = [kernel.scalars.get(v, "") for v in inits]
        self.names = ["" if m else kernel.text.new_name("c") for m in self.memories]

    def begin_header(self) -> None:
        """Begin the header block; its phis are filled in when the latch is known."""
        text = self.kernel.text
        self.before, self.label = text.label, text.new_label("head")
        text.branch_to(self.label)
        self.first_clock = text.clock
        self.phis: LineSection = text.new_section()

    def bind(self, values: Sequence[Value]) -> None:
        """Bind values to what is carried."""
        for v, memory, name in zip(values, self.memories, self.names, strict=True):
            if memory is not None:
                self.kernel.buffers[v] = memory
            else:
                self.kernel.scalars[v] = name

    def emit_latch(self, results: Sequence[Value], *more: tuple[str, str, str]) -> None:
        """Pass the next values on and branch to the header; `more` are further i64 phis (name, first, next)."""
        move_blocks(self.kernel, list(zip(results, self.memories, strict=True)))
        text, tail = self.kernel.text, self.kernel.text.label
        text.line(f"br label %{self.label}")
        text.loops.append((self.first_clock, text.clock))
        with text.insert_into(self.phis):
            for name, first, last in more:
                self._emit_phi(name, "i64", first, last, tail)
            for v, name, first in zip(results, self.names, self.first, strict=True):
                if name:
                    self._emit_phi(name, str(get_register_type(v.type.dtype)), first, self.kernel.scalars[v], tail)

    def _emit_phi(self, name: str, kind: str, first: str, last: str, tail: str) -> None:
        self.kernel.text.line(f"{name} = phi {kind} [ {first}, %{self.before} ], [ {last}, %{tail} ]")


def move_blocks(kernel: LlvmKernelContext, moves: list[tuple[Value, StridedMemRef | None]]) -> None:
    """Move blocks to their memories in parallel: a block in a memory that another moves to is copied first."""
    targets = {id(m) for _, m in moves if m is not None}
    pending = [(v, m) for v, m in moves if m is not None and kernel.buffers.get(v) is not m]
    copies = {v: kernel.buffers[v] for v, _ in pending if id(kernel.buffers.get(v)) in targets}
    for v in copies:
        spare = allocate_new(kernel, v)
        materialise_block(kernel, v, spare)
        kernel.buffers[v] = spare
    for v, m in pending:
        materialise_block(kernel, v, m)
    kernel.buffers.update(copies)


@statement_rule(control_flow.for_)
def _(kernel, node):
    text = kernel.text
    lower, upper, step = (kernel.scalars[v] for v in node.args[:3])
    kernel.ranges.loop(node)
    carried = LoopCarriedValues(kernel, node, node.args[3:])
    carried.begin_header()
    index, more = text.new_name("i"), text.new_name("i")
    body_label, exit_label = text.new_label("body"), text.new_label("done")
    text.line(f"br i1 {_emit_loop_condition(kernel, index, upper, step)}, label %{body_label}, label %{exit_label}")
    text.begin_block(body_label)
    body = node.regions[0]
    kernel.scalars[body.params[0]] = index
    carried.bind(body.params[1:])
    if not _is_short(kernel, node):
        emit_stop_check(kernel)
    emit_block(kernel, body)
    text.line(f"{more} = add i64 {index}, {step}")
    carried.emit_latch(body.results, (index, lower, more))
    text.begin_block(exit_label)
    carried.bind(node.results)


def _is_short(kernel: LlvmKernelContext, node: Node) -> bool:
    """Whether a loop has few iterations and no loop inside, so that it needs no stop check of its own."""
    bounds = [kernel.scalars[v] for v in node.args[:3]]
    if not all(is_number(b) for b in bounds) or any(
        n.op in (control_flow.for_, control_flow.while_) for n in node.regions[0].walk()
    ):
        return False
    return len(range(*(int(b) for b in bounds))) <= MAX_UNCHECKED_ITERATIONS


def _emit_loop_condition(kernel: LlvmKernelContext, index: str, upper: str, step: str) -> str:
    """The loop condition: index below its end, or above it for a negative step."""
    text = kernel.text
    if is_number(step):
        return text.let(f"icmp {'slt' if int(step) > 0 else 'sgt'} i64 {index}, {upper}", "b")
    up = text.let(f"icmp sgt i64 {step}, 0", "b")
    below, above = (text.let(f"icmp {word} i64 {index}, {upper}", "b") for word in ("slt", "sgt"))
    return text.let(f"select i1 {up}, i1 {below}, i1 {above}", "b")


@statement_rule(control_flow.while_)
def _(kernel, node):
    text = kernel.text
    condition, body = node.regions
    carried = LoopCarriedValues(kernel, node, node.args)
    carried.begin_header()
    carried.bind(condition.params)
    emit_block(kernel, condition)
    body_label, exit_label = text.new_label("body"), text.new_label("done")
    text.line(f"br i1 {kernel.scalars[condition.results[0]]}, label %{body_label}, label %{exit_label}")
    text.begin_block(body_label)
    carried.bind(body.params)
    emit_stop_check(kernel)
    emit_block(kernel, body)
    carried.emit_latch(body.results)
    text.begin_block(exit_label)
    carried.bind(node.results)


@statement_rule(control_flow.if_)
def _(kernel, node):
    text = kernel.text
    yes, no, done = (text.new_label(hint) for hint in ("then", "else", "done"))
    memories = [allocate_block(kernel, v) if is_block(v) else None for v in node.results]
    text.line(f"br i1 {kernel.scalars[node.args[0]]}, label %{yes}, label %{no}")
    ends = []
    for label, region in zip((yes, no), node.regions, strict=True):
        text.begin_block(label)
        emit_block(kernel, region)
        move_blocks(kernel, list(zip(region.results, memories, strict=True)))
        ends.append((text.label, [kernel.scalars.get(v, "") for v in region.results]))
        text.line(f"br label %{done}")
    text.begin_block(done)
    for number, (v, memory) in enumerate(zip(node.results, memories, strict=True)):
        if memory is not None:
            kernel.buffers[v] = memory
            continue
        sources = ", ".join(f"[ {names[number]}, %{label} ]" for label, names in ends)
        kernel.scalars[v] = text.let(f"phi {get_register_type(v.type.dtype)} {sources}", "c")


# The module: the functions of each kernel, their parameters, and the host plan.


PROGRAM_ID_NAMES = ("%pid0", "%pid1", "%pid2")
GRID_SIZE_NAMES = ("%grid0", "%grid1", "%grid2")


@dataclass(frozen=True)
class EmittedFunction:
    """The text of a tile function, and the bytes of scratch memory of one program."""

    lines: tuple[str, ...]
    scratch: int


@dataclass(frozen=True)
class LlvmOptions:
    """Options that change the text.

    The vector width, whether lines have debug locations, whether products of bf16 multiply pairs of elements, and
    how many elements those of 8-bit integers multiply at a time.
    """

    vector_bytes: int
    debug: bool = True
    pair_products: bool = False
    byte_products: int = 1

    @property
    def products(self) -> tuple[bool, int]:
        """Whether pairs of bf16 are multiplied, and how many bytes."""
        return self.pair_products, self.byte_products


def emit_function(
    function: Function,
    library: FunctionLibrary,
    debug: DebugMetadata | None,
    options: LlvmOptions,
    grid: Sequence[float] | None,
    aliases: Mapping[tuple[int, int], bool] | None,
) -> EmittedFunction:
    """A tile function; `aliases` are the pairs of refs that share memory (`BufferisationPlan`)."""
    scope = debug.subprogram(function.name, function.loc) if debug is not None else 0
    text = LlvmBuilder(debug, scope)
    text.set_location(function.loc)
    kernel = LlvmKernelContext(function, text, library, options.vector_bytes, grid, aliases, *options.products)
    names = [f"%a{i}" for i in range(len(function.params))]
    for v, name in zip(function.params, names, strict=True):
        _bind_parameter(kernel, v, name)
    emit_block(kernel, function.body)
    text.line("ret void")
    scratch_bytes, offsets = kernel.scratch.assign_offsets()
    suffix = f" !dbg !{scope}" if debug is not None else ""
    sizes = [name_size_parameter(n) for n in find_size_names(function)]
    params = [*_format_parameters(function, names, noalias=aliases == {}), *(f"i64 {name}" for name in sizes)]
    arguments = _format_list(params, PROGRAM_ID_NAMES, GRID_SIZE_NAMES)
    head = f"define void @{function.name}({arguments}, ptr noalias %scratch) #0{suffix} {{"
    buffers = [f"  {name} = getelementptr i8, ptr %scratch, i64 {offset}" for name, offset in offsets]
    body = [head, "entry:", *buffers, *kernel.sizes.lines, *text.flatten(), "}", ""]
    return EmittedFunction(
        (*body, *_emit_range_function(function, params), *_emit_task_function(function, names, sizes)), scratch_bytes
    )


def _bind_parameter(kernel: LlvmKernelContext, v: Value, name: str) -> None:
    if not isinstance(v.type, RefType):
        kernel.scalars[v] = name
        return
    sizes = tuple(v.type.shape)
    kernel.memrefs[v] = StridedMemRef(v.type.dtype, name, sizes, make_row_major_strides(sizes))


def _format_parameters(function: Function, names: Sequence[str], noalias: bool) -> list[str]:
    kinds = [
        _get_parameter_type(v) + (" noalias" if noalias and isinstance(v.type, RefType) else "")
        for v in function.params
    ]
    return [f"{memory_type} {name}" for memory_type, name in zip(kinds, names, strict=True)]


def _get_parameter_type(v: Value) -> str:
    return "ptr" if isinstance(v.type, RefType) else str(get_register_type(v.type.dtype))


def _format_list(params: Sequence[str], *integers: Sequence[str]) -> str:
    return ", ".join([*params, *(f"i64 {name}" for names in integers for name in names)])


def _emit_range_function(function: Function, params: Sequence[str]) -> Iterator[str]:
    """The function that loops over a range of programs, until the launch stops or an earlier program has failed."""
    plain = [p.replace(" noalias", "") for p in params]
    bounds = ("%begin", "%end")
    arguments = _format_list(params, bounds, GRID_SIZE_NAMES)
    yield f"define void @{function.name}.range({arguments}, ptr noalias %scratch) #0 {{"
    yield "entry:"
    yield "  %some = icmp slt i64 %begin, %end"
    yield "  br i1 %some, label %loop, label %done"
    yield "loop:"
    yield "  %n = phi i64 [ %begin, %entry ], [ %next, %latch ]"
    yield "  %pid2 = urem i64 %n, %grid2"
    yield "  %rest = udiv i64 %n, %grid2"
    yield "  %pid1 = urem i64 %rest, %grid1"
    yield "  %pid0 = udiv i64 %rest, %grid1"
    yield f"  call void @{function.name}({_format_list(plain, PROGRAM_ID_NAMES, GRID_SIZE_NAMES)}, ptr %scratch)"
    yield "  %next = add i64 %n, 1"
    yield f"  %word = load volatile i64, ptr @{protocol.FAILURE_WORD}, align 8"
    yield f"  %quiet = icmp eq i64 %word, {protocol.NO_FAILURE}"
    yield "  br i1 %quiet, label %latch, label %asked"
    yield "asked:"
    yield f"  call void @{protocol.POLL_FUNCTION}(ptr @{protocol.FAILURE_WORD})"
    yield f"  %after = load volatile i64, ptr @{protocol.FAILURE_WORD}, align 8"
    yield "  %number = add i64 %next, 1"
    yield f"  %key = shl i64 %number, {protocol.FAILURE_PROGRAM_BIT}"
    yield "  %stopped = icmp ult i64 %after, %key"
    yield "  br i1 %stopped, label %done, label %latch"
    yield "latch:"
    yield "  %more = icmp slt i64 %next, %end"
    yield "  br i1 %more, label %loop, label %done"
    yield "done:"
    yield "  ret void"
    yield "}"
    yield ""


def _emit_task_function(function: Function, names: Sequence[str], sizes: Sequence[str]) -> Iterator[str]:
    """The function that loads its parameters from memory, so that every kernel has the same signature."""
    yield f"define void @{function.name}.task(ptr %slots, i64 %begin, i64 %end, ptr %scratch) #0 {{"
    yield "entry:"
    params = []
    for slot, (v, name) in enumerate(zip(function.params, names, strict=True)):
        yield f"  {name}.p = getelementptr i64, ptr %slots, i64 {slot}"
        memory_type = "i8" if v.type.dtype == bool_ and _get_parameter_type(v) == "i1" else _get_parameter_type(v)
        yield f"  {name}.v = load {memory_type}, ptr {name}.p, align 8"
        register_type = _get_parameter_type(v)
        cast = "trunc i8" if memory_type != register_type else f"bitcast {memory_type}"
        yield f"  {name} = {cast} {name}.v to {register_type}"
        params.append(f"{_get_parameter_type(v)} {name}")
    for slot, name in enumerate([*sizes, *GRID_SIZE_NAMES], len(names)):
        yield f"  {name}.p = getelementptr i64, ptr %slots, i64 {slot}"
        yield f"  {name} = load i64, ptr {name}.p, align 8"
    params += [f"i64 {name}" for name in sizes]
    arguments = _format_list(params, ("%begin", "%end"), GRID_SIZE_NAMES)
    yield f"  call void @{function.name}.range({arguments}, ptr %scratch)"
    yield "  ret void"
    yield "}"
    yield ""


@dataclass(frozen=True)
class LlvmModuleText:
    """The text of a module and its launch plan."""

    text: str
    plan: dict[str, Any]


def emit_module(module: Module, options: LlvmOptions) -> LlvmModuleText:
    """Every tile function that the entry launches, its groups vectorised, with the functions they call.

    Raises:
        UnsupportedOpError: an op has no emission row; it names the op, the target and the line.
    """
    library, debug = FunctionLibrary(), DebugMetadata() if options.debug else None
    lines, scratch = _emit_functions(module, library, debug, options)
    lines += library.text()
    lines += scalar_functions.define_called_functions(lines)
    head = ["; Tessera: LLVM", f'source_filename = "{module.main.name}"', ""]
    head += [f"@{protocol.FAILURE_WORD} = global i64 {protocol.NO_FAILURE}", ""]
    head += [f"@{protocol.REPORT_CONTEXT} = global i64 0", ""] if library.sites else []
    cooperative = [f.name for f in module.functions[1:] if uses_grid_barrier(f.body)]
    head += [f"@{protocol.BARRIER_CONTEXT} = global i64 0", ""] if cooperative else []
    tail = [*declare_externals(lines), "", _format_attributes(options.vector_bytes * 8)]
    text = "\n".join([*head, *lines, *tail, *(debug.text() if debug else ())]) + "\n"
    return LlvmModuleText(
        text,
        {
            **plan_launches(module, scratch),
            "reports": library.sites,
            **({"meeting": cooperative} if cooperative else {}),
        },
    )


def _emit_functions(
    module: Module, library: FunctionLibrary, debug: DebugMetadata | None, options: LlvmOptions
) -> tuple[list[str], dict[str, int]]:
    """The text of every tile function, and its bytes of scratch memory."""
    launches = [n for n in module.main.body.walk() if n.op is host.launch]
    aliased = find_aliased_parameters(module)
    lines: list[str] = []
    scratch: dict[str, int] = {}
    for function in module.functions[1:]:
        grids = [_pad_grid(n) for n in launches if n.attrs["kernel"] == function.name]
        # A grid barrier orders writes of other programs, which `noalias` would rule out.
        aliases = None if uses_grid_barrier(function.body) else aliased.get(function.name, {})
        emitted = emit_function(function, library, debug, options, _find_largest_grid(grids), aliases)
        lines += emitted.lines
        scratch[function.name] = emitted.scratch
    return lines, scratch


def _format_attributes(bits: int) -> str:
    """The function attributes; without them LLVM splits the widest vectors on processors that prefer narrower ones.

    The stack is aligned to the registers that are spilled to it: else each lies in two lines of a cache, or in one, as
    the caller's stack happens to begin.
    """
    widths = f'"min-legal-vector-width"="{bits}" "prefer-vector-width"="{bits}"'
    return f'attributes #0 = {{ nounwind "stackrealign" {widths} }}'


def _pad_grid(node: Node) -> tuple[Size, ...]:
    grid = tuple(node.attrs["grid"])
    if len(grid) > GRID_RANK:
        raise UnsupportedOpError(
            f"the target llvm has grids of at most {GRID_RANK} axes", location=node.loc, received=f"{len(grid)} axes"
        )
    return (*grid, 1, 1, 1)[:GRID_RANK]


def _find_largest_grid(grids: Sequence[tuple[Size, ...]]) -> tuple[float, ...] | None:
    """The most programs along each axis; infinite where nothing bounds a symbolic size."""
    return tuple(max(find_size_bounds(n)[1] for n in sizes) for sizes in zip(*grids, strict=True)) if grids else None


# Declarations of the functions that the text calls and does not define.

_DEFINE_PATTERN = re.compile(r"define .*?@(?P<name>[\w.]+)\(")
_CALL_PATTERN = re.compile(r"call (?P<result>[^@]*?) @(?P<name>[\w.]+)\((?P<args>.*)\)")


def declare_externals(lines: Iterable[str]) -> Iterator[str]:
    """A declaration for each intrinsic or C function that is called and not defined."""
    listed = list(lines)
    defined = {value["name"] for line in listed if (value := _DEFINE_PATTERN.match(line))}
    needed: dict[str, str] = {}
    for line in listed:
        call = _CALL_PATTERN.search(line) if " call " in line else None
        if call is not None and call["name"] not in defined:
            needed.setdefault(
                call["name"], f"declare {call['result']} @{call['name']}({_parse_argument_types(call['args'])})"
            )
    return (needed[name] for name in sorted(needed))


def _parse_argument_types(args: str) -> str:
    return ", ".join(_parse_type(each) for each in _split_arguments(args))


def _split_arguments(args: str) -> list[str]:
    """Arguments, split at the commas that are not within < > or ( )."""
    result, depth, start = [], 0, 0
    for place, char in enumerate(args):
        depth += (char in "<([") - (char in ">)]")
        if char == "," and depth == 0:
            result.append(args[start:place].strip())
            start = place + 1
    return [*result, args[start:].strip()] if args.strip() else []


def _parse_type(operand: str) -> str:
    return operand[: operand.index(">") + 1] if operand.startswith("<") else operand.split()[0]

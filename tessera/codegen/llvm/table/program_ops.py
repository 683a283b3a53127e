"""Program ops: ids, allocations, the grid barrier, and the reports of assertions and prints; scatters, copies and
atomics: one loop nest each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from tessera.codegen.artifact import describe_size
from tessera.codegen.contract import static_shape
from tessera.codegen.diagnostics import describe_location
from tessera.codegen.grouped.diagnostics import report_op
from tessera.codegen.llvm.passes.bufferisation import is_block
from tessera.codegen.llvm.table import scalar_functions
from tessera.codegen.llvm.table.emission import statement_rule
from tessera.codegen.llvm.table.loop_fusion import (
    allocate_block,
    cast_to_index,
    choose_vector_width,
    element_rule,
    emit_bounds_mask,
    emit_broadcast_element,
    emit_element,
    emit_loop_nest,
    emit_optional_operand,
    materialise_block,
    offset_index,
)
from tessera.codegen.llvm.text import memory
from tessera.codegen.llvm.text.builder import (
    ELEMENT_BYTES,
    LaneIndex,
    LaneValue,
    LlvmBuilder,
    LoopBody,
    RegisterType,
    format_step_vector,
    get_register_type,
)
from tessera.codegen.llvm.text.memory import StridedMemRef, make_row_major_strides, store_lane
from tessera.codegen.llvm.text.protocol import (
    BARRIER_CONTEXT,
    BARRIER_FUNCTION,
    FAILURE_PROGRAM_BIT,
    FAILURE_WORD,
    FIRST_KEY,
    NO_FAILURE,
    POLL_FUNCTION,
    REPORT_CONTEXT,
    REPORT_FUNCTION,
)
from tessera.core.errors import UnsupportedOpError
from tessera.core.symbolic_dim import proves_less
from tessera.core.types import DType, int64
from tessera.ir.core import Node, Value
from tessera.ops.dialects import tile
from tessera.ops.tensor import shape

if TYPE_CHECKING:
    from tessera.codegen.llvm.text.kernel_context import LlvmKernelContext


# The stop word: whether programs go on.

MAX_UNCHECKED_ITERATIONS = 1024


def emit_stop_check(kernel: LlvmKernelContext) -> None:
    """End the program if its launch is interrupted."""
    text = kernel.text
    word = text.let(f"load volatile i64, ptr @{FAILURE_WORD}, align 8")
    quiet = text.let(f"icmp eq i64 {word}, {NO_FAILURE}", "b")
    asked, end, going = (text.new_label(hint) for hint in ("asked", "stopped", "going"))
    text.line(f"br i1 {quiet}, label %{going}, label %{asked}")
    text.begin_block(asked)
    text.line(f"call void @{POLL_FUNCTION}(ptr @{FAILURE_WORD})")
    after = text.let(f"load volatile i64, ptr @{FAILURE_WORD}, align 8")
    stopped = text.let(f"icmp ult i64 {after}, {FIRST_KEY}", "b")
    text.line(f"br i1 {stopped}, label %{end}, label %{going}")
    text.begin_block(end)
    text.line("ret void")
    text.begin_block(going)


# Grid barrier: a call of the runtime.


@statement_rule(tile.grid_barrier)
def _(kernel, node):
    text = kernel.text
    context = text.let(f"load i64, ptr @{BARRIER_CONTEXT}, align 8")
    text.line(f"call void @{BARRIER_FUNCTION}(i64 {context})")
    emit_stop_check(kernel)


# Ids, allocations, and ops that need no code on a processor.


GRID_RANK = 3


@statement_rule(tile.program_id)
def _(kernel, node):
    kernel.scalars[node.out] = f"%pid{_check_grid_axis(node)}" if node.attrs["axis"] < GRID_RANK else "0"


@statement_rule(tile.grid_size)
def _(kernel, node):
    kernel.scalars[node.out] = f"%grid{_check_grid_axis(node)}" if node.attrs["axis"] < GRID_RANK else "1"


def _check_grid_axis(node):
    if node.attrs["axis"] < 0:
        raise UnsupportedOpError("a grid axis is negative", location=node.loc)
    return node.attrs["axis"]


@statement_rule(tile.local_id)
def _(kernel, node):
    kernel.scalars[node.out] = "0"


@statement_rule(tile.group_size)
def _(kernel, node):
    kernel.scalars[node.out] = str(kernel.function.attrs.get("group", 1))


@statement_rule(tile.alloc)
def _(kernel, node):
    type = node.out.type
    shape = tuple(int(n) for n in type.shape)
    rows = (*shape[:-1], shape[-1] + node.attrs["padding"]) if shape else ()
    kernel.memrefs[node.out] = kernel.scratch.allocate(type.dtype, shape, make_row_major_strides(rows))
    kernel.scratch.record_access(kernel.memrefs[node.out])  # live from here: a loop may write it before it reads


@statement_rule(tile.barrier, tile.async_commit, tile.async_wait)
def _(kernel, node):
    """No code: a program is one thread, and copies are synchronous."""


# Assertions and prints: operands are stored in scratch memory and passed to the runtime.


@statement_rule(report_op)
def _(kernel, node):
    text = kernel.text
    table = kernel.scratch.allocate(int64, (len(node.args),), (1,))
    kernel.scratch.record_access(table)
    memrefs = [_materialise_operand(kernel, v) for v in node.args]
    for number, memref in enumerate(memrefs):
        kernel.scratch.record_access(memref)
        slot = text.let(f"getelementptr i64, ptr {table.base}, i64 {number}", "p")
        text.line(f"store ptr {memref.base}, ptr {slot}, align 8")
    context = text.let(f"load i64, ptr @{REPORT_CONTEXT}, align 8")
    site = kernel.library.add_site(_describe_site(kernel, node))
    kernel.scratch.record_access(table)
    text.line(
        f"call void @{REPORT_FUNCTION}(i64 {context}, i64 {site}, i64 {_emit_program_number(kernel)}, ptr {table.base})"
    )
    if node.attrs["kind"] != "print":  # the program ends here
        text.line("ret void")
        text.begin_block(text.new_label("unreached"))


def _materialise_operand(kernel: LlvmKernelContext, v: Value) -> StridedMemRef:
    """A value in memory, row-major."""
    shape = static_shape(v.type)
    memory: StridedMemRef = kernel.scratch.allocate(v.type.dtype, shape, make_row_major_strides(shape))
    if is_block(v):
        materialise_block(kernel, v, memory)
    else:
        store_lane(LoopBody(kernel), memory, (), LaneValue(kernel.scalars[v]))
    return memory


def _emit_program_number(kernel: LlvmKernelContext) -> str:
    """The linear program id, in row-major order."""
    text = kernel.text
    rows = text.let("mul i64 %pid0, %grid1", "i")
    row = text.let(f"add i64 {rows}, %pid1", "i")
    first = text.let(f"mul i64 {row}, %grid2", "i")
    return text.let(f"add i64 {first}, %pid2", "i")


def _describe_site(kernel: LlvmKernelContext, node: Node) -> dict[str, Any]:
    """A report as JSON data for the manifest."""
    attrs = kernel.function.attrs
    return {
        **node.attrs,
        "grid": [describe_size(n) for n in attrs.get("grid", ())],
        "group": int(attrs.get("tiles", 1)),
        "place": describe_location(node.loc),
        "operands": [{"shape": list(static_shape(v.type)), "dtype": v.type.dtype.name} for v in node.args],
    }


@statement_rule(tile.line)
def _(kernel, node):
    """No code: a stop for the debugger alone."""


@statement_rule(tile.pause)
def _(kernel, node):
    raise UnsupportedOpError(
        "the target llvm has no breakpoints", location=node.loc,
        suggestion='run this kernel with target="interp", or remove breakpoint()',
    )  # fmt: skip


# Checked indices: the first failure of a launch, by program and then by site, is reported.


_PROGRAM_PARAMETERS = "i64 %pid0, i64 %pid1, i64 %pid2, i64 %grid1, i64 %grid2"


@element_rule(shape.check_index)
def _(body, node, index):
    (v,), size = node.args, node.attrs["size"]
    lane = cast_to_index(body, v, emit_element(body, v, index))
    low, high = body.kernel.ranges.of(v)
    if low >= 0 and proves_less(high, size):
        return lane
    bound = body.kernel.sizes.find(size)
    t = RegisterType("i64", body.width_of(lane))
    library = body.kernel.library
    name = library.require(f"ts.check_index.{t.suffix}", lambda: _define_check(t))
    library.require(f"ts.wrap_index.{t.suffix}", lambda: _define_wrap(t))
    library.require(f"ts.report_index.{t.suffix}", lambda: _define_report(t))
    site = _add_index_site(body.kernel, node)
    counted = (body.mask if t.width > 1 else None) or t.truth.const(1)
    with body.hoist(lane):
        found = body.text.let(
            f"call {t} @{name}({t} {body.broadcast_lane(lane, t)}, {t.truth} {counted}, i64 {bound}, "
            f"i64 {bound if node.attrs['wrap'] else 0}, i64 {site}, {_PROGRAM_PARAMETERS})",
            "i",
        )
    return LaneValue(found, body.kind_of(lane))


def _add_index_site(kernel: LlvmKernelContext, node: Node) -> int:
    """The number of a check's site; one node that several loops compute has one."""
    if node not in kernel.index_sites:
        described = {**_describe_site(kernel, node), "kind": "index", "operands": [{"shape": [], "dtype": "int64"}]}
        described["size"] = describe_size(node.attrs["size"])
        kernel.index_sites[node] = kernel.library.add_site(described)
    return kernel.index_sites[node]


def _define_check(t: RegisterType) -> Iterator[str]:
    """The function that checks a register of indices; inlined up to the first index that is not in bounds as it is."""
    parameters = f"{t} %x, {t.truth} %counted, i64 %size, i64 %add, i64 %site, {_PROGRAM_PARAMETERS}"
    yield f"define internal {t} @ts.check_index.{t.suffix}({parameters}) alwaysinline #0 {{"
    yield "entry:"
    yield from _define_splat(t, "size")
    yield f"  %beyond = icmp uge {t} %x, %size.v"
    yield f"  %other = and {t.truth} %beyond, %counted"
    yield f"  %any = {_format_any(t, '%other')}"
    yield "  br i1 %any, label %rare, label %leave"
    yield "rare:"
    yield f"  %wrapped = call {t} @ts.wrap_index.{t.suffix}({parameters})"
    yield "  br label %leave"
    yield "leave:"
    yield f"  %place = phi {t} [ %x, %entry ], [ %wrapped, %rare ]"
    yield f"  ret {t} %place"
    yield "}"


def _format_any(t: RegisterType, mask: str) -> str:
    """Whether a lane of a mask is true."""
    if t.width == 1:
        return f"and i1 {mask}, true"
    return f"call i1 @llvm.vector.reduce.or.{t.truth.suffix}({t.truth} {mask})"


def _define_wrap(t: RegisterType) -> Iterator[str]:
    """The function for a register with negative indices, or with indices out of bounds: they become 0."""
    yield f"define internal {t} @ts.wrap_index.{t.suffix}({t} %x, {t.truth} %counted, i64 %size, i64 %add, i64 %site, "
    yield f"    {_PROGRAM_PARAMETERS}) cold noinline #0 {{"
    yield "entry:"
    for name in ("size", "add"):
        yield from _define_splat(t, name)
    yield f"  %negative = icmp slt {t} %x, {t.const(0)}"
    yield f"  %moved = add {t} %x, %add.v"
    yield f"  %place = select {t.truth} %negative, {t} %moved, {t} %x"
    yield f"  %outside = icmp uge {t} %place, %size.v"
    yield f"  %bad = and {t.truth} %outside, %counted"
    yield f"  %any = {_format_any(t, '%bad')}"
    yield "  br i1 %any, label %failed, label %passed"
    yield "failed:"
    yield f"  call void @ts.report_index.{t.suffix}({t} %x, {t.truth} %bad, i64 %site, {_PROGRAM_PARAMETERS})"
    yield "  br label %passed"
    yield "passed:"
    yield f"  %safe = select {t.truth} %outside, {t} {t.const(0)}, {t} %place"
    yield f"  ret {t} %safe"
    yield "}"


def _define_splat(t: RegisterType, name: str) -> Iterator[str]:
    """The register %name.v of a scalar parameter."""
    if t.width == 1:
        yield f"  %{name}.v = add i64 %{name}, 0"
        return
    yield f"  %{name}.s = insertelement {t} poison, i64 %{name}, i64 0"
    yield f"  %{name}.v = shufflevector {t} %{name}.s, {t} poison, <{t.width} x i32> zeroinitializer"


def _define_report(t: RegisterType) -> Iterator[str]:
    """The function that reports the first bad index of a register, unless an earlier failure is known."""
    yield f"define internal void @ts.report_index.{t.suffix}({t} %x, {t.truth} %bad, i64 %site,"
    yield f"    {_PROGRAM_PARAMETERS}) cold noinline #0 {{"
    yield "entry:"
    yield "  %rows = mul i64 %pid0, %grid1"
    yield "  %row = add i64 %rows, %pid1"
    yield "  %base = mul i64 %row, %grid2"
    yield "  %program = add i64 %base, %pid2"
    yield "  %number = add i64 %program, 1"
    yield f"  %high = shl i64 %number, {FAILURE_PROGRAM_BIT}"
    yield "  %key = or i64 %high, %site"
    yield f"  %old = atomicrmw umin ptr @{FAILURE_WORD}, i64 %key monotonic"
    yield "  %new = icmp ult i64 %key, %old"
    yield "  br i1 %new, label %report, label %known"
    yield "report:"
    yield "  %slot = alloca i64, align 8"
    yield "  %table = alloca ptr, align 8"
    yield from _extract_first(t)
    yield "  store i64 %first, ptr %slot, align 8"
    yield "  store ptr %slot, ptr %table, align 8"
    yield f"  %context = load i64, ptr @{REPORT_CONTEXT}, align 8"
    yield f"  call void @{REPORT_FUNCTION}(i64 %context, i64 %site, i64 %program, ptr %table)"
    yield "  br label %known"
    yield "known:"
    yield "  ret void"
    yield "}"


def _extract_first(t: RegisterType) -> Iterator[str]:
    """The register %first: the element of %x in the first lane of %bad."""
    if t.width == 1:
        yield "  %first = add i64 %x, 0"
        return
    yield f"  %lanes = select {t.truth} %bad, {t} {format_step_vector(t)}, {t} {t.const(t.width)}"
    yield f"  %lane = call i64 @llvm.vector.reduce.umin.{t.suffix}({t} %lanes)"
    yield f"  %first = extractelement {t} %x, i64 %lane"


# Scatters, copies and atomics.


@statement_rule(tile.scatter)
def _(kernel, node):
    ref, value, *rest = node.args
    m, rank, shape = kernel.memrefs[ref], ref.type.rank, _broadcast_shapes(*(v.type.shape for v in node.args[1:]))

    def emit_element_store(body: LoopBody, index: LaneIndex) -> None:
        position = tuple(cast_to_index(body, v, emit_broadcast_element(body, v, index)) for v in rest[:rank])
        memory.store_lane(
            body,
            m,
            position,
            emit_broadcast_element(body, value, index),
            emit_optional_operand(body, rest[rank:], 0, index),
        )

    emit_loop_nest(kernel, shape, choose_vector_width(kernel, value.type.dtype), emit_element_store)


def _broadcast_shapes(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that a scatter's indices, value and mask broadcast to."""
    rank = max((len(s) for s in shapes), default=0)
    level = [(1,) * (rank - len(s)) + tuple(s) for s in shapes]
    return tuple(next((n for n in sizes if n != 1), 1) for sizes in zip(*level, strict=True))


@statement_rule(tile.async_copy)
def _(kernel, node):
    # The copy is synchronous, which the memory model allows.
    dst, src, *starts = node.args
    dst_rank, src_rank, block = dst.type.rank, src.type.rank, tuple(node.attrs["shape"])
    rank = max(dst_rank, src_rank, len(block))
    full = (1,) * (rank - len(block)) + block
    target, source = kernel.memrefs[dst], kernel.memrefs[src]

    def emit_element_store(body: LoopBody, index: LaneIndex) -> None:
        position = offset_index(body, starts[dst_rank:], index[rank - src_rank :])
        mask = None
        if node.attrs["edge"] == "clip":
            mask = emit_bounds_mask(body, source, starts[dst_rank:], full[rank - src_rank :], position)
        lane = memory.load_lane(body, source, position, mask)
        memory.store_lane(body, target, offset_index(body, starts[:dst_rank], index[rank - dst_rank :]), lane)

    emit_loop_nest(kernel, full, choose_vector_width(kernel, dst.type.dtype), emit_element_store)


ATOMIC_OPERATIONS = {
    ("add", "float"): "fadd", ("max", "float"): "fmaximum", ("min", "float"): "fminimum",
    ("add", "int"): "add", ("max", "int"): "max", ("min", "int"): "min",
    ("add", "uint"): "add", ("max", "uint"): "umax", ("min", "uint"): "umin",
    **{(word, kind): word for word in ("and", "or", "xor") for kind in ("int", "uint")},
}  # fmt: skip


@statement_rule(tile.atomic)
def _(kernel, node):
    dtype = node.args[0].type.dtype
    word = "xchg" if node.attrs["kind"] == "exchange" else ATOMIC_OPERATIONS.get((node.attrs["kind"], dtype.kind))
    if scalar_functions.has_memory_format(dtype) and dtype.is_float and word in CAS_LOOP_OPERATIONS:
        return _emit_atomic(
            kernel, node, 1, lambda text, *at: _emit_cas_loop(text, dtype, CAS_LOOP_OPERATIONS[word], *at)
        )
    if word is None or scalar_functions.has_memory_format(dtype):
        raise UnsupportedOpError(f"the target llvm has no atomic {node.attrs['kind']} on {dtype}")
    t = get_register_type(dtype)

    def update(text: LlvmBuilder, pointer: str, value: str) -> str:
        return text.let(f"atomicrmw {word} ptr {pointer}, {t} {value} monotonic, align {ELEMENT_BYTES[t.element]}")

    _emit_atomic(kernel, node, 1, update)


# Compare-and-swap loops: the new value of an update without an instruction, computed in f32 registers.
CAS_LOOP_OPERATIONS = {
    "fadd": "fadd float {0}, {1}", "fmaximum": "call float @llvm.maximum.f32(float {0}, float {1})",
    "fminimum": "call float @llvm.minimum.f32(float {0}, float {1})", "xchg": "fadd float {1}, -0.0",
}  # fmt: skip


def _emit_cas_loop(text: LlvmBuilder, dtype: DType, combine: str, pointer: str, value: str) -> str:
    """An atomic update of a narrow float: a compare-and-swap loop around decode, compute, round and encode."""
    m, bits = memory.get_memory_type(dtype), f"i{8 * memory.get_element_bytes(dtype)}"
    align = f"align {memory.get_element_bytes(dtype)}"
    first = text.let(f"load atomic {bits}, ptr {pointer} monotonic, {align}")
    again, done, before = text.new_label("again"), text.new_label("updated"), text.label
    text.branch_to(again)
    result_memory, reloaded = text.new_name(), text.new_name()
    text.line(f"{result_memory} = phi {bits} [ {first}, %{before} ], [ {reloaded}, %{again} ]")
    raw = result_memory if m.element == bits else text.let(f"bitcast {bits} {result_memory} to {m}")
    old, new, stored = text.new_name(), text.new_name(), text.new_name()
    text.lines(scalar_functions.decode_from_memory(dtype, 1, old, raw))
    text.lines(scalar_functions.round_to_format(dtype, 1, new, text.let(combine.format(old, value))))
    text.lines(scalar_functions.encode_to_memory(dtype, 1, stored, new))
    desired = stored if m.element == bits else text.let(f"bitcast {m} {stored} to {bits}")
    pair = text.let(f"cmpxchg ptr {pointer}, {bits} {result_memory}, {bits} {desired} monotonic monotonic, {align}")
    text.line(f"{reloaded} = extractvalue {{ {bits}, i1 }} {pair}, 0")
    succeeded = text.let(f"extractvalue {{ {bits}, i1 }} {pair}, 1")
    text.line(f"br i1 {succeeded}, label %{done}, label %{again}")
    text.begin_block(done)
    return old


@statement_rule(tile.compare_exchange)
def _(kernel, node):
    t = get_register_type(node.args[0].type.dtype)

    def update(text: LlvmBuilder, pointer: str, value: str, expected: str) -> str:
        operands = f"ptr {pointer}, {t} {expected}, {t} {value}"
        pair = text.let(f"cmpxchg {operands} monotonic monotonic, align {ELEMENT_BYTES[t.element]}")
        return text.let(f"extractvalue {{ {t}, i1 }} {pair}, 0")

    _emit_atomic(kernel, node, 2, update)


def _emit_atomic(kernel: LlvmKernelContext, node: Node, count: int, update: Callable[..., str]) -> None:
    """A loop over elements; `update(text, pointer, *operands)` emits one update and gives the old value."""
    ref, operands, rest = node.args[0], node.args[1 : 1 + count], node.args[1 + count :]
    m, rank, shape = kernel.memrefs[ref], ref.type.rank, static_shape(node.out.type)
    result_memory = allocate_block(kernel, node.out) if shape else None

    def emit_element_store(body: LoopBody, index: LaneIndex) -> None:
        position = tuple(cast_to_index(body, v, emit_broadcast_element(body, v, index)) for v in rest[:rank])
        values = [emit_broadcast_element(body, v, index).name for v in operands]
        mask = emit_optional_operand(body, rest[rank:], 0, index)
        kernel.scratch.record_access(m)
        pointer = memory.emit_pointer(body, m, memory.compute_address(body, m, position))
        old = _emit_guarded(body.text, get_register_type(m.dtype), mask, lambda: update(body.text, pointer, *values))
        if result_memory is None:
            kernel.scalars[node.out] = old.name
        else:
            memory.store_lane(body, result_memory, index, old)

    emit_loop_nest(kernel, shape, 1, emit_element_store)
    if result_memory is not None:
        kernel.buffers[node.out] = result_memory


def _emit_guarded(text: LlvmBuilder, t: RegisterType, mask: LaneValue | None, update: Callable[[], str]) -> LaneValue:
    """One update, behind a branch if there is a mask."""
    if mask is None:
        return LaneValue(update())
    yes, done = text.new_label("then"), text.new_label("done")
    before = text.label
    text.line(f"br i1 {mask.name}, label %{yes}, label %{done}")
    text.begin_block(yes)
    old, last = update(), text.label  # a compare-and-swap loop ends in another basic block
    text.branch_to(done)
    return LaneValue(text.let(f"phi {t} [ {old}, %{last} ], [ {t.const(0)}, %{before} ]"))

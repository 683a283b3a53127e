"""Program ops: ids, allocations, the grid barrier, and the reports of assertions and prints; stores, scatters, copies
and atomics: one loop nest each. Rows of a few elements, as of a stack along the last axis, are computed a register of
rows at a time and interleaved."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tessera.codegen.artifact import describe_size
from tessera.codegen.contract import static_shape
from tessera.codegen.diagnostics import describe_location
from tessera.codegen.grouped.diagnostics import report_op
from tessera.codegen.llvm.passes.bufferisation import is_block
from tessera.codegen.llvm.table import index_sets, scalar_functions
from tessera.codegen.llvm.table.emission import statement_rule
from tessera.codegen.llvm.table.loop_fusion import (
    allocate_block,
    cast_to_index,
    choose_vector_width,
    emit_bounds_mask,
    emit_broadcast_element,
    emit_element,
    emit_loop_nest,
    emit_optional_operand,
    emit_row_loops,
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
    get_register_type,
)
from tessera.codegen.llvm.text.memory import StridedMemRef, make_row_major_strides, store_lane
from tessera.codegen.llvm.text.protocol import (
    BARRIER_CONTEXT,
    BARRIER_FUNCTION,
    FAILURE_WORD,
    FIRST_KEY,
    NO_FAILURE,
    POLL_FUNCTION,
    REPORT_CONTEXT,
    REPORT_FUNCTION,
)
from tessera.core.errors import UnsupportedOpError
from tessera.core.types import DType, int64
from tessera.ir.core import Node, Value
from tessera.ops.dialects import tile

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
    site = kernel.library.add_site(describe_site(kernel, node))
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


def describe_site(kernel: LlvmKernelContext, node: Node) -> dict[str, Any]:
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


# Stores of blocks: one loop nest for the stores that one loop computes, without masks where tiles lie within bounds.


MIN_UNSWITCHED = 512  # elements of a block whose loops have a form without masks


@statement_rule(tile.store)
def _(kernel, node):
    group = kernel.plan.store_groups.get(node, (node,))
    if node is not group[-1]:
        return  # stored with the last one of the group
    value = node.args[1]

    def emit_element_stores(body: LoopBody, index: LaneIndex) -> None:
        # All elements are computed before one is stored.
        lanes = [emit_element(body, each.args[1], index) for each in group]
        for each, lane in zip(group, lanes, strict=True):
            _store_element(body, each, index, lane)

    def emit_loops(counts: Mapping[int, str]) -> None:
        width, block = choose_vector_width(kernel, value.type.dtype), static_shape(value.type)
        if not counts and all(_has_short_rows(kernel, each, width) for each in group):
            emit_row_loops(
                kernel, block, width, lambda body, rows: _interleave_rows(body, group, rows), emit_element_stores
            )
        else:
            emit_loop_nest(kernel, block, width, emit_element_stores, counts)

    _emit_by_region(kernel, group, emit_loops)


def _emit_by_region(
    kernel: LlvmKernelContext, group: Sequence[Node], emit_loops: Callable[[Mapping[int, str]], None]
) -> None:
    """Loops for tiles on one side of all comparisons of their positions with constants; others have them, too.

    The parts of a concatenation are copied, however its tiles lie.
    """
    start, regions = _find_regions(kernel, group)
    text, body = kernel.text, LoopBody(kernel)
    done = text.new_label("placed") if regions else ""
    for low, last in regions:
        lane = cast_to_index(body, start, emit_element(body, start, ()))
        after, under = (text.let(f"icmp {c} i64 {lane.name}, {n}", "b") for c, n in (("sge", low), ("sle", last)))
        inside, within, other = (
            text.let(f"and i1 {after}, {under}", "b"),
            text.new_label("part"),
            text.new_label("rest"),
        )
        text.line(f"br i1 {inside}, label %{within}, label %{other}")
        text.begin_block(within)
        with kernel.assume({start: (low, last)}):
            _emit_unswitched(kernel, group, _find_whole_tiles(kernel, group), emit_loops)
        text.line(f"br label %{done}")
        text.begin_block(other)
    _emit_unswitched(kernel, group, _find_whole_tiles(kernel, group), emit_loops)
    if regions:
        text.branch_to(done)


def _find_regions(kernel: LlvmKernelContext, group: Sequence[Node]) -> tuple[Any, list[tuple[int, int]]]:
    """The first start of a stored block whose positions are compared, and where comparisons do not change."""
    ref, value, *starts = group[0].args
    block, sizes = static_shape(value.type), kernel.memrefs[ref].shape
    if math.prod(block) < MIN_UNSWITCHED or kernel.is_long:
        return None, []
    for start, n, size in zip(starts, block, sizes, strict=False):
        if isinstance(size, int) and n <= size and (found := index_sets.find_regions(kernel, start, n, size)):
            return start, found
    return None, []


def _find_whole_tiles(kernel: LlvmKernelContext, group: Sequence[Node]) -> dict[Value, int]:
    """The starts of clipped stores, and up to which number each a whole tile is within bounds; {}: not worth it.

    A masked store of narrow elements takes some processors as long as a hundred plain ones.
    """
    if math.prod(static_shape(group[0].args[1].type)) < MIN_UNSWITCHED or kernel.is_long:
        return {}
    found: dict[Value, int] = {}
    for node in (n for n in group if n.attrs["edge"] == "clip"):
        ref, value, *rest = node.args
        starts, block, sizes = rest[: ref.type.rank], static_shape(value.type), kernel.memrefs[ref].shape
        for axis in kernel.ranges.find_unproven_axes(starts, block, sizes):
            if not isinstance(sizes[axis], int) or kernel.ranges.of(starts[axis])[0] < 0:
                return {}
            limit = sizes[axis] - block[axis]
            found[starts[axis]] = min(found.get(starts[axis], limit), limit)
    return found if all(limit >= 0 for limit in found.values()) else {}


def _emit_unswitched(
    kernel: LlvmKernelContext,
    group: Sequence[Node],
    limits: Mapping[Value, int],
    emit_loops: Callable[[Mapping[int, str]], None],
) -> None:
    """Loop unswitching: loops without masks for tiles that lie within bounds, and with them for the last ones.

    The latter end with the last element that is stored: a masked store of no lane may take hundreds of cycles.
    """
    if not limits:
        emit_loops({})
        return
    text, body, inside = kernel.text, LoopBody(kernel), ""
    for start, limit in limits.items():
        lane = cast_to_index(body, start, emit_element(body, start, ()))
        test = text.let(f"icmp sle i64 {lane.name}, {limit}", "b")
        inside = text.let(f"and i1 {inside}, {test}", "b") if inside else test
    whole, partial, done = (text.new_label(hint) for hint in ("whole", "partial", "done"))
    text.line(f"br i1 {inside}, label %{whole}, label %{partial}")
    text.begin_block(whole)
    with kernel.assume({v: (int(kernel.ranges.of(v)[0]), limit) for v, limit in limits.items()}):
        emit_loops({})
    text.line(f"br label %{done}")
    text.begin_block(partial)
    emit_loops(_count_stored(kernel, group, limits))
    text.branch_to(done)


def _count_stored(kernel: LlvmKernelContext, group: Sequence[Node], limits: Mapping[Value, int]) -> dict[int, str]:
    """For each axis along which all stores of a group may end within the block, how many indices any stores at."""
    block, counts, text = static_shape(group[0].args[1].type), dict[int, str](), kernel.text
    for axis, n in enumerate(block):
        starts = [each.args[2 + axis] for each in group]
        if n == 1 or any(v not in limits for v in starts):
            continue  # one of them stores at all
        count = ""
        for each, start in zip(group, starts, strict=True):
            lane = cast_to_index(LoopBody(kernel), start, emit_element(LoopBody(kernel), start, ()))
            own = text.let(f"sub i64 {kernel.memrefs[each.args[0]].shape[axis]}, {lane.name}", "i")
            count = text.let(f"call i64 @llvm.smax.i64(i64 {count}, i64 {own})", "i") if count else own
        counts[axis] = text.let(f"call i64 @llvm.smin.i64(i64 {count}, i64 {n})", "i")
    return counts


def _store_element(body: LoopBody, node: Node, index: LaneIndex, lane: LaneValue) -> None:
    ref, value, *rest = node.args
    m, rank = memory.fetch_rows_ahead(body.kernel.memrefs[ref], static_shape(value.type)), ref.type.rank
    position = offset_index(body, rest[:rank], index)
    mask = emit_optional_operand(body, rest[rank:], 0, index)
    if node.attrs["edge"] == "clip":
        mask = memory.intersect_masks(
            body, mask, emit_bounds_mask(body, m, rest[:rank], static_shape(value.type), position)
        )
    memory.store_lane(body, m, position, lane, mask)


# Rows of a few elements.


def _has_short_rows(kernel: LlvmKernelContext, node: Node, width: int) -> bool:
    """Whether a block has whole rows of memory, of a few elements each, all of them within bounds."""
    ref, value, *rest = node.args
    m, rank, block = kernel.memrefs[ref], ref.type.rank, static_shape(value.type)
    if rank < 2 or len(rest) > rank or width == 1 or block[-2] < width:
        return False
    columns = block[-1]
    if not 2 <= columns <= min(memory.MAX_SHUFFLED_STRIDE, width - 1):  # those of a register are one store
        return False
    if m.shape[-1] != columns or m.strides[-2:] != (columns, 1):
        return False
    starts = rest[:rank]
    unproven = kernel.ranges.find_unproven_axes(starts, block, m.shape) if node.attrs["edge"] == "clip" else ()
    return not unproven and kernel.ranges.of(starts[-1]) == (0, 0)


def _interleave_rows(body: LoopBody, group: Sequence[Node], rows: Sequence[LaneIndex]) -> None:
    """Compute and store as many rows as a register has lanes; `rows` has an index for each element of a row."""
    lanes = [[emit_element(body, node.args[1], index) for index in rows] for node in group]
    for node, found in zip(group, lanes, strict=True):
        ref, _, *starts = node.args
        memory.store_interleaved(body, body.kernel.memrefs[ref], offset_index(body, starts, rows[0]), found)

"""Stores of blocks: one loop nest for the stores that one loop computes, without masks where tiles lie within bounds.

Rows of a few elements, as of a stack along the last axis, are computed a register of rows at a time and interleaved.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from tessera.codegen.contract import static_shape
from tessera.codegen.llvm.table.emission import statement_rule
from tessera.codegen.llvm.table.loop_fusion import (
    cast_to_index,
    choose_vector_width,
    emit_bounds_mask,
    emit_element,
    emit_loop_nest,
    emit_optional_operand,
    emit_row_loops,
    offset_index,
)
from tessera.codegen.llvm.text import memory
from tessera.codegen.llvm.text.builder import LaneIndex, LaneValue, LoopBody
from tessera.ir.core import Node, Value
from tessera.ops.dialects import tile

if TYPE_CHECKING:
    from tessera.codegen.llvm.text.kernel_context import LlvmKernelContext

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

    _emit_unswitched(kernel, group, _find_whole_tiles(kernel, group), emit_loops)


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
    with kernel.ranges.assume({v: (kernel.ranges.of(v)[0], limit) for v, limit in limits.items()}):
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
    if not 2 <= columns <= memory.MAX_SHUFFLED_STRIDE or m.shape[-1] != columns or m.strides[-2:] != (columns, 1):
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

"""Indexed operands: matrices gathered at sums of an index of the row and one of the column, read in place.

The windows of a convolution are such a matrix: the address of an element is the address of its window plus the offset
of its tap. A product reads it through two short tables of offsets, and writes no window to memory (Dukhan 2019, the
indirect convolution).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tessera.codegen.contract import static_shape
from tessera.codegen.llvm.table.loop_fusion import (
    add_indices,
    cast_to_index,
    emit_element,
    emit_loop_nest,
    scale_index,
)
from tessera.codegen.llvm.text import memory
from tessera.codegen.llvm.text.builder import (
    ZERO_LANE,
    LaneIndex,
    LaneKind,
    LaneValue,
    LoopBody,
    get_element_bytes,
    get_memory_type,
    get_register_type,
)
from tessera.codegen.llvm.text.memory import StridedMemRef
from tessera.core.symbolic_dim import Dim
from tessera.core.types import DType, int64
from tessera.ir.core import Node, Value
from tessera.ops.dialects import tile
from tessera.ops.tensor import basic, elementwise, shape

if TYPE_CHECKING:
    from tessera.codegen.llvm.text.kernel_context import LlvmKernelContext

Axes = tuple[int | None, ...]  # for each axis of a value the axis of the matrix that it runs along


@dataclass(frozen=True)
class IndexTerm:
    """A part of an index: the value times a stride in bytes."""

    value: Value
    axes: Axes
    stride: int


@dataclass(frozen=True)
class IndexedMatrix:
    """Element (r, k) of `memory` is at `base` + rows[r] + depths[k] bytes."""

    memory: StridedMemRef
    base: str
    rows: StridedMemRef
    depths: StridedMemRef


@dataclass(frozen=True)
class IndexedRows:
    """Row k of `memory` begins at `base` + depths[k] bytes; its elements are contiguous."""

    memory: StridedMemRef
    base: str
    depths: StridedMemRef


@dataclass(frozen=True)
class SplitIndex:
    """The memory of a gathered matrix, and the parts of its index that run along the rows and along the columns."""

    memory: StridedMemRef
    parts: tuple[list[IndexTerm], list[IndexTerm]]


def find_indexed_matrix(kernel: LlvmKernelContext, v: Value, dtype: DType, ahead: int) -> IndexedMatrix | None:
    """The tables of a gathered matrix of this type in memory, or None.

    The table of the rows goes on for `ahead` rows after the last one: those that a tile fetches for the next one.
    """
    found = _split_index(kernel, v, dtype)
    if found is None:
        return None
    sizes = static_shape(v.type)[-2:]
    rows, depths = (_emit_table(kernel, *each) for each in zip(sizes, found.parts, (ahead, 0), strict=True))
    return IndexedMatrix(found.memory, found.memory.base, rows, depths)


def find_indexed_rows(kernel: LlvmKernelContext, v: Value, dtype: DType) -> IndexedRows | None:
    """The table of a gathered matrix of this type in memory whose rows are contiguous, or None."""
    found = _split_index(kernel, v, dtype)
    if found is None:
        return None
    count, columns = static_shape(v.type)[-2:]
    body = LoopBody(kernel, columns)
    ramp = LaneValue("0", LaneKind.RAMP, columns)
    total = _sum_terms(body, found.parts[1], ramp)
    if total.kind is not LaneKind.RAMP or total.step != get_element_bytes(dtype):
        return None
    base = kernel.text.let(f"getelementptr i8, ptr {found.memory.base}, i64 {total.name}", "p")
    return IndexedRows(found.memory, base, _emit_table(kernel, count, found.parts[0]))


def _split_index(kernel: LlvmKernelContext, v: Value, dtype: DType) -> SplitIndex | None:
    """A gathered matrix whose index is a sum of one of the rows and one of the columns; None for others."""
    sizes = static_shape(v.type)
    long: Axes = tuple(a - len(sizes) + 2 if a >= len(sizes) - 2 else None for a in range(len(sizes)))
    found = _find_gather(kernel, v, long) if math.prod(sizes[:-2]) == 1 else None
    if found is None or v.type.dtype != dtype:  # type: ignore[union-attr]
        return None
    node, axes = found
    m = kernel.memrefs[node.args[0]]
    indices = node.args[1:]
    # With a mask, or where other elements take the place of some, an element is not its place in memory alone.
    if len(indices) != len(m.shape) or any(isinstance(s, Dim) for s in m.strides):
        return None
    if get_memory_type(dtype).element != get_register_type(dtype).element:
        return None
    parts: tuple[list[IndexTerm], list[IndexTerm]] = ([], [])
    for index, stride in zip(indices, m.strides, strict=True):
        own = axes[len(axes) - index.type.rank :]  # type: ignore[union-attr]
        if not _split_sum(kernel, index, own, int(stride) * get_element_bytes(dtype), parts):
            return None
    return SplitIndex(m, parts)


def _find_gather(kernel: LlvmKernelContext, v: Value, axes: Axes) -> tuple[Node, Axes] | None:
    """The gather below views of a block, and the axis of the matrix that each of its axes is."""
    node = kernel.producers.get(v)
    if node is None or v in kernel.buffers:
        return None
    if node.op is tile.gather:
        return node, axes
    if node.op is shape.permute:
        inner: list[int | None] = [None] * len(axes)
        for place, axis in enumerate(node.attrs["axes"]):
            inner[axis] = axes[place]
        return _find_gather(kernel, node.args[0], tuple(inner))
    if node.op is shape.reshape:
        moved = _move_axes(static_shape(v.type), static_shape(node.args[0].type), axes)
        return None if moved is None else _find_gather(kernel, node.args[0], moved)
    return None


def _move_axes(sizes: Sequence[int], to: Sequence[int], axes: Axes) -> Axes | None:
    """The axes after a reshape that adds or drops axes of one element; None after others."""
    if [n for n in sizes if n != 1] != [n for n in to if n != 1]:
        return None
    long = iter(a for a, n in zip(axes, sizes, strict=True) if n != 1)
    return tuple(next(long) if n != 1 else None for n in to)


def _split_sum(
    kernel: LlvmKernelContext, v: Value, axes: Axes, stride: int, parts: tuple[list[IndexTerm], list[IndexTerm]]
) -> bool:
    """Divide an index into terms along the rows and terms along the columns; False where one runs along both."""
    sizes = static_shape(v.type)
    along = {a for a, n in zip(axes, sizes, strict=True) if n != 1}
    if len(along) < 2:
        parts[1 if along == {1} else 0].append(IndexTerm(v, axes, stride))
        return True
    node = kernel.producers.get(v)
    if node is None or v in kernel.buffers:
        return False
    if node.op is elementwise.add and v.type.dtype == int64:  # type: ignore[union-attr]
        return all(_split_sum(kernel, x, axes, stride, parts) for x in node.args)
    if node.op is basic.broadcast_to:
        inner = static_shape(node.args[0].type)
        kept = tuple(None if n == 1 else a for a, n in zip(axes[len(axes) - len(inner) :], inner, strict=True))
        return _split_sum(kernel, node.args[0], kept, stride, parts)
    if node.op is shape.reshape:
        moved = _move_axes(sizes, static_shape(node.args[0].type), axes)
        return moved is not None and _split_sum(kernel, node.args[0], moved, stride, parts)
    return False


def _emit_table(kernel: LlvmKernelContext, count: int, terms: Sequence[IndexTerm], more: int = 0) -> StridedMemRef:
    """The sums of the terms for each index of an axis, in memory, and then `more` zeros."""
    width = kernel.vector_bytes // 8
    table = kernel.scratch.allocate_block(int64, (count + more,), width)

    def visit(body: LoopBody, index: LaneIndex) -> None:
        total = _sum_terms(body, terms, index[0])
        name = body.broadcast_lane(total, get_register_type(int64, body.width))
        memory.store_lane(body, table, index, LaneValue(name, LaneKind.VARYING))

    emit_loop_nest(kernel, (count,), width, visit)

    def clear(body: LoopBody, index: LaneIndex) -> None:
        zeros = LaneValue(get_register_type(int64, body.width).const(0), LaneKind.VARYING)
        memory.store_lane(body, table, (add_indices(body, index[0], LaneValue(str(count))),), zeros)

    emit_loop_nest(kernel, (more,), width, clear)
    return table


def _sum_terms(body: LoopBody, terms: Sequence[IndexTerm], index: LaneValue) -> LaneValue:
    """The sum of the terms, in bytes, at an index of their axis."""
    total = ZERO_LANE
    for term in terms:
        place = tuple(ZERO_LANE if a is None else index for a in term.axes)
        lane = cast_to_index(body, term.value, emit_element(body, term.value, place))
        total = add_indices(body, total, scale_index(body, lane, term.stride))
    return total

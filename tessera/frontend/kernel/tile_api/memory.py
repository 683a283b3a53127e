"""Memory operations: buffers, loads, stores, asynchronous copies, barriers and atomic updates.

Atomic updates of one element by several tiles happen one after the other, in an order that nothing defines.
"""

from __future__ import annotations

import math
from typing import Any

from tessera.core.errors import ArgumentError, DTypeError, ShapeError
from tessera.core.shapes import format_shape
from tessera.core.types import GLOBAL, REGISTER, SHARED, DType, as_dtype, f32
from tessera.frontend.kernel.conversions import broadcast_to_shape, convert_to_dtype, convert_to_mask
from tessera.frontend.kernel.memref import (
    MemRef,
    MemRefAccess,
    MemRefView,
    load_if_memref,
    subscript_view,
    takes_memrefs,
    view_whole,
)
from tessera.frontend.kernel.tile_api.ids import BlockIndex, axis_start
from tessera.frontend.kernel.trace import add_indices, current_trace, emit_op
from tessera.ir.tensor import Tensor
from tessera.ops.dialects import tile

# Loads, stores and atomics: between memory and blocks of values.


@takes_memrefs
def load(
    place: Any, *index: Any, shape: Any = None, rows: int | None = None, cols: int | None = None, mask: Any = None,
    other: Any = None, edge: str | None = None, vector: int | None = None, prefetch: int | None = None,
) -> Tensor:  # fmt: skip
    """The block at a place: `load(A[m : m + BM, :])`, `load(A, offsets)`, `load(A, shape=(BM, BK))`.

    With `shape` (or `rows` and `cols`) a whole tensor gives the block of this program: along each
    axis of the grid the program's number times the size. A BlockIndex names a block of rows.
    Elements whose `mask` is false, or outside the tensor with `edge="clip"`, read as `other` (0);
    `other` implies "clip". `vector` and `prefetch` are hints.
    """
    current_trace("tile.load")
    found = locate_access(place, index, _requested_shape(shape, rows, cols, index))
    clip = other is not None if edge is None else _check_edge(edge)
    return found.load(load_if_memref(mask), load_if_memref(other), "clip" if clip else "error")


@takes_memrefs
def store(place: Any, *args: Any, mask: Any = None, edge: str | None = None) -> None:
    """Write a block to a place: `store(A[m : m + BM, :], block)`, `store(A, offsets, block)`, `store(A, block)`.

    The last writes the block of this program, as `load(A, shape=...)` reads it. With
    `edge="clip"` elements outside the tensor are dropped.
    """
    current_trace("tile.store")
    if not args:
        raise ArgumentError("store needs a value", expected="tile.store(place, value)")
    *index, block = args
    block = load_if_memref(block)
    named = index or (isinstance(place, MemRefView) and not place.is_whole)  # a part has a shape of its own
    shape: Any = block.shape if isinstance(block, Tensor) and block.ndim and not named else None
    locate_access(place, tuple(index), shape).store(
        block, load_if_memref(mask), "clip" if _check_edge(edge) else "error"
    )


def _check_edge(edge: str | None) -> bool:
    if edge not in (None, "error", "clip"):
        raise ArgumentError(f'"{edge}" is not an edge', expected='"error" or "clip"')
    return edge == "clip"


def _requested_shape(shape: Any, rows: int | None, cols: int | None, index: tuple) -> tuple[int, ...] | None:
    if shape is not None:
        return (shape,) if isinstance(shape, int) else tuple(shape)
    if rows is None and index and isinstance(index[0], BlockIndex):
        rows = index[0].size
    found = tuple(n for n in (rows, cols) if n is not None)
    return found or None


def locate_access(place: Any, index: tuple, shape: tuple[int, ...] | None) -> MemRefAccess:
    """The place that a load or store means."""
    if not isinstance(place, MemRefAccess):
        raise ArgumentError(
            "this is a value, not a place in memory", expected="a tensor parameter, a buffer, or part of one",
            received=str(place.type) if isinstance(place, Tensor) else repr(place),
            suggestion="name the elements by slices or by blocks of indices: A[i : i + BLOCK], A[offsets]",
        )  # fmt: skip
    row = index[0] if index and isinstance(index[0], BlockIndex) else None
    if index and row is None:
        if not isinstance(place, MemRefView):
            raise ArgumentError("a place named by blocks of indices takes no more indices")
        return subscript_view(place, tuple(index))
    if shape is None or not isinstance(place, MemRefView):
        return place
    return _narrow_view(place, shape, row)


def _narrow_view(view: MemRefView, shape: tuple[int, ...], row: BlockIndex | None) -> MemRefView:
    """The part of a view that has this shape: this program's where the view is a whole tensor, else the first."""
    kept = [axis for axis in range(len(view.sizes)) if axis not in view.dropped]
    if row is not None and len(shape) == 1 < len(kept):  # rows alone: all of each
        shape = (*shape, view.sizes[kept[-1]])
    if len(shape) > len(kept):
        name = view.memory.name
        raise ShapeError(
            f"a block of shape {format_shape(shape)} does not lie in {name}", received=format_shape(view.shape)
        )
    sizes = (1,) * (len(kept) - len(shape)) + shape
    own = view.is_whole and view.memory.type.space == GLOBAL
    starts, lengths, dropped = list(view.starts), list(view.sizes), set(view.dropped)
    first_row = kept[-2] if len(shape) > 1 else kept[-1]
    for axis, size in zip(kept, sizes, strict=True):
        if size > view.sizes[axis] and not own and row is None:
            raise ShapeError(
                f"a block of shape {format_shape(shape)} does not fit into this part of {view.memory.name}",
                expected=f"at most {format_shape(view.shape)}", received=format_shape(shape),
            )  # fmt: skip
        start = axis_start(axis, view.memory.dims, size) if own else 0
        start = row.start if row is not None and axis == first_row else start
        starts[axis], lengths[axis] = add_indices(starts[axis], start), size
    dropped |= set(kept[: len(kept) - len(shape)])
    return MemRefView(view.memory, tuple(starts), tuple(lengths), frozenset(dropped))


@takes_memrefs
def load_vector(place: Any, width: int) -> Tensor:
    """The first `width` elements of a row, read as one vector: they begin at a multiple of `width` (rule M11)."""
    return _first_elements(place, width).load()


@takes_memrefs
def store_vector(place: Any, vector: Any) -> None:
    """Write a vector to the beginning of a row: at a multiple of its width (rule M11)."""
    block = load_if_memref(vector)
    _first_elements(place, block.shape[-1]).store(block)


def _first_elements(place: Any, width: int) -> MemRefAccess:
    found = locate_access(place, (), None)
    if not isinstance(found, MemRefView) or not found.shape:
        raise ArgumentError("a vector is part of a row", expected="a row, such as A[i]", received=repr(place))
    return _vector_part(found, width)


def _vector_part(view: MemRefView, width: int) -> MemRefView:
    axis = max(a for a in range(len(view.sizes)) if a not in view.dropped)
    sizes = tuple(width if a == axis else n for a, n in enumerate(view.sizes))
    return MemRefView(view.memory, view.starts, sizes, view.dropped, width)


def _convert_operand(place: MemRefAccess, operand: Any) -> Tensor:
    """An operand of the type and shape of the place."""
    name = place.memory.name
    return broadcast_to_shape(convert_to_dtype(load_if_memref(operand), place.dtype, name), place.shape, name)


def _index_operands(place: MemRefAccess, mask: Any) -> list[Tensor]:
    """The indices of a place, and the mask if there is one."""
    try:
        given = convert_to_mask(load_if_memref(mask), place.shape)
    except DTypeError as error:
        error.suggestion = "an element is named by subscripts: tile.atomic_add(A[index], value); a mask is a comparison"
        raise
    return [*place.indices(), *([] if given is None else [given])]


def _emit_atomic(kind: str, place: Any, operand: Any, mask: Any) -> Tensor:
    found = locate_access(place, (), None)
    return emit_op(
        tile.atomic, [found.memory.ref(), _convert_operand(found, operand), *_index_operands(found, mask)], kind=kind
    )


@takes_memrefs
def atomic_add(place: Any, operand: Any, mask: Any = None) -> Tensor:
    """Add to memory without losing an update of another tile; gives what was there."""
    return _emit_atomic("add", place, operand, mask)


@takes_memrefs
def atomic_max(place: Any, operand: Any, mask: Any = None) -> Tensor:
    """Raise memory to at least the operand; gives what was there."""
    return _emit_atomic("max", place, operand, mask)


@takes_memrefs
def atomic_min(place: Any, operand: Any, mask: Any = None) -> Tensor:
    """Lower memory to at most the operand; gives what was there."""
    return _emit_atomic("min", place, operand, mask)


@takes_memrefs
def atomic_exchange(place: Any, operand: Any, mask: Any = None) -> Tensor:
    """Replace what is in memory; gives what was there."""
    return _emit_atomic("exchange", place, operand, mask)


@takes_memrefs
def atomic_and(place: Any, operand: Any, mask: Any = None) -> Tensor:
    """Keep in memory only the bits that the operand has; gives what was there."""
    return _emit_atomic("and", place, operand, mask)


@takes_memrefs
def atomic_or(place: Any, operand: Any, mask: Any = None) -> Tensor:
    """Set in memory the bits that the operand has; gives what was there."""
    return _emit_atomic("or", place, operand, mask)


@takes_memrefs
def atomic_xor(place: Any, operand: Any, mask: Any = None) -> Tensor:
    """Flip in memory the bits that the operand has; gives what was there."""
    return _emit_atomic("xor", place, operand, mask)


@takes_memrefs
def atomic_cas(place: Any, expected: Any, operand: Any, mask: Any = None) -> Tensor:
    """Replace an integer in memory if it is `expected`, at once; gives what was there."""
    found = locate_access(place, (), None)
    values = [_convert_operand(found, operand), _convert_operand(found, expected)]
    return emit_op(tile.compare_exchange, [found.memory.ref(), *values, *_index_operands(found, mask)])


def alloc_shared(
    shape: Any, dtype: Any = f32, swizzle: str | None = None, alignment: int = 16, padding: int = 0
) -> MemRefView:
    """Memory that the tiles of a group share, without initial value.

    It begins at a multiple of `alignment` bytes. Two ways to lay it out avoid bank conflicts, and change no
    value: `swizzle="xor"` permutes the places within rows, and `padding` leaves so many elements unused after each row.

    Raises:
        ArgumentError: a shape not known while compiling, an alignment that is no power of two, or an unknown swizzle.
    """
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise ArgumentError("an alignment is a power of two", expected="16", received=repr(alignment))
    if swizzle not in (None, "", "none", "xor"):
        raise ArgumentError(f'"{swizzle}" is not a swizzle', expected='"xor" or None')
    if not isinstance(padding, int) or padding < 0:
        raise ArgumentError("padding is a number of elements", expected="0 or more", received=repr(padding))
    return _allocate(shape, dtype, SHARED, alignment, "xor" if swizzle == "xor" else "", padding)


def alloc_register(shape: Any = (), dtype: Any = f32) -> MemRefView:
    """Memory of one tile's own, without initial value: `alloc_register((8, 8), ts.f32)`, or one element: `(ts.f32)`."""
    if isinstance(shape, DType):
        shape, dtype = (), shape
    return _allocate(shape, dtype, REGISTER)


def _allocate(
    shape: Any, dtype: Any, space: str, alignment: int = 16, swizzle: str = "", padding: int = 0
) -> MemRefView:
    sizes = (shape,) if not isinstance(shape, (tuple, list)) else tuple(shape)
    if not all(isinstance(n, int) and n > 0 for n in sizes):
        raise ArgumentError(
            "the shape of a buffer is not known while compiling", expected="positive ints", received=str(sizes),
            suggestion="size it by a constant, such as the block size",
        )  # fmt: skip
    current_trace(f"alloc_{space}")
    attrs = {"shape": sizes, "dtype": as_dtype(dtype), "space": space, "alignment": alignment, "swizzle": swizzle}
    if padding:
        attrs["padding"] = padding
    return view_whole(MemRef(emit_op(tile.alloc, [], **attrs), f"the {space} buffer"))


@takes_memrefs
def cp_async(dst: Any, src: Any, edge: str = "error", barrier: Any = None) -> None:
    """Begin to copy the block at `src` to `dst`; a later cp_wait_group says that it has arrived.

    With `edge="clip"` what lies outside the source arrives as 0. With a `barrier` (`tile.mbarrier`) the bytes
    of the block count there when it has arrived: `barrier.expect(bytes)` before, `barrier.wait(parity)` after.
    """
    to, source = locate_access(dst, (), None), locate_access(src, (), None)
    if to.shape != source.shape and isinstance(source, MemRefView):
        source = locate_access(src, (), to.shape)
    if to.dtype != source.dtype:
        raise DTypeError(
            f"cannot copy {source.dtype} into {to.memory.name}, which holds {to.dtype}",
            expected=str(to.type), received=str(source.type), suggestion="load, cast and store instead",
        )  # fmt: skip
    if isinstance(to, MemRefView) and isinstance(source, MemRefView) and _axes_match(to, source):
        _begin_copy(to, source, edge)
    else:
        to.store(source.load(edge=edge))  # no target copies such a shape by itself: at once, then
    if barrier is not None:
        barrier.copied(math.prod(to.shape) * to.dtype.bits // 8)
        current_trace().uncommitted = False


def _axes_match(dst: MemRefView, src: MemRefView) -> bool:
    """Whether the blocks have the same axes, but for leading ones of size 1."""
    one, other = sorted((dst.full_sizes, src.full_sizes), key=len)
    extra = len(other) - len(one)
    return other[extra:] == one and all(n == 1 for n in other[:extra])


def _begin_copy(dst: MemRefView, src: MemRefView, edge: str) -> None:
    for view in (dst, src) if edge == "error" else (dst,):
        view.check()
    shape = max((dst.full_sizes, src.full_sizes), key=len)
    emit_op(tile.async_copy, [dst.memory.ref(), src.memory.ref(), *dst.origin(), *src.origin()], shape=shape, edge=edge)
    current_trace().uncommitted = True


@takes_memrefs
def async_copy(src: Any, dst: Any, size: Any = None, stage: int = 0) -> None:
    """Begin to copy from `src` to `dst`, the first `size` elements of each axis if given; `stage` is a hint."""
    cp_async(locate_access(dst, (), size), locate_access(src, (), size))


def cp_commit_group() -> None:
    """Make a group of the copies begun since the last commit."""
    emit_op(tile.async_commit, [])
    current_trace().uncommitted = False


def cp_wait_group(pending: int = 0) -> None:
    """Wait until at most `pending` committed groups are under way; copies not committed are so first."""
    if current_trace("tile.cp_wait_group").uncommitted:
        cp_commit_group()
    emit_op(tile.async_wait, [], pending=pending)


def wait_async(stage: int = 0) -> None:
    """Wait until at most `stage` groups of copies are under way."""
    cp_wait_group(stage)


def barrier() -> None:
    """Wait for every tile of the group; what they wrote before is then seen by all."""
    current_trace("tile.barrier")
    emit_op(tile.barrier, [])


def grid_barrier() -> None:
    """Wait for every tile of every group of the launch; what they wrote before is then seen by all.

    All programs reach it, or none: not under a condition that differs between them. They must all be under way at
    once, so that a target refuses grids larger than it can hold (in the interpreter there is no such limit):
    `for i in tile.range(tile.linear_id(), n, total)` lets a few programs do the work of many.
    """
    current_trace("tile.grid_barrier")
    emit_op(tile.grid_barrier, [])

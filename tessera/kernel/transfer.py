"""Loads, stores and atomics: between memory and blocks of values."""

from __future__ import annotations

from typing import Any

from tessera.errors import ArgumentError, ShapeError
from tessera.kernel.ids import axis_start
from tessera.kernel.marks import takes_places
from tessera.kernel.place import Place, View, value
from tessera.kernel.ranges import BlockIndex
from tessera.kernel.subscript import subscript
from tessera.kernel.trace import current, plus
from tessera.shapes.rules import show
from tessera.tensor import Tensor
from tessera.types import GLOBAL


@takes_places
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
    current("tile.load")
    found = locate(place, index, _block_shape(shape, rows, cols, index))
    clip = other is not None if edge is None else _edge(edge)
    return found.load(value(mask), value(other), "clip" if clip else "error")


@takes_places
def store(place: Any, *args: Any, mask: Any = None, edge: str | None = None) -> None:
    """Write a block to a place: `store(A[m : m + BM, :], block)`, `store(A, offsets, block)`, `store(A, block)`.

    The last writes the block of this program, as `load(A, shape=...)` reads it. With
    `edge="clip"` elements outside the tensor are dropped.
    """
    current("tile.store")
    if not args:
        raise ArgumentError("store needs a value", expected="tile.store(place, value)")
    *index, block = args
    block = value(block)
    shape: Any = block.shape if isinstance(block, Tensor) and block.ndim else None
    locate(place, tuple(index), None if index else shape).store(block, value(mask), "clip" if _edge(edge) else "error")


def _edge(edge: str | None) -> bool:
    if edge not in (None, "error", "clip"):
        raise ArgumentError(f'"{edge}" is not an edge', expected='"error" or "clip"')
    return edge == "clip"


def _block_shape(shape: Any, rows: int | None, cols: int | None, index: tuple) -> tuple[int, ...] | None:
    if shape is not None:
        return (shape,) if isinstance(shape, int) else tuple(shape)
    if rows is None and index and isinstance(index[0], BlockIndex):
        rows = index[0].size
    found = tuple(n for n in (rows, cols) if n is not None)
    return found or None


def locate(place: Any, index: tuple, shape: tuple[int, ...] | None) -> Place:
    """The place that a load or store means."""
    if not isinstance(place, Place):
        raise ArgumentError(
            "this is a value, not a place in memory", expected="a tensor parameter, a buffer, or part of one",
            received=str(place.type) if isinstance(place, Tensor) else repr(place),
        )  # fmt: skip
    row = index[0] if index and isinstance(index[0], BlockIndex) else None
    if index and row is None:
        if not isinstance(place, View):
            raise ArgumentError("a place named by blocks of indices takes no more indices")
        return subscript(place, tuple(index))
    if shape is None or not isinstance(place, View):
        return place
    return _narrowed(place, shape, row)


def _narrowed(view: View, shape: tuple[int, ...], row: BlockIndex | None) -> View:
    """The part of a view that has this shape: this program's where the view is a whole tensor, else the first."""
    kept = [axis for axis in range(len(view.sizes)) if axis not in view.dropped]
    if row is not None and len(shape) == 1 < len(kept):  # rows alone: all of each
        shape = (*shape, view.sizes[kept[-1]])
    if len(shape) > len(kept):
        name = view.memory.name
        raise ShapeError(f"a block of shape {show(shape)} does not lie in {name}", received=show(view.shape))
    sizes = (1,) * (len(kept) - len(shape)) + shape
    own = view.is_whole and view.memory.type.space == GLOBAL
    starts, lengths, dropped = list(view.starts), list(view.sizes), set(view.dropped)
    first_row = kept[-2] if len(shape) > 1 else kept[-1]
    for axis, size in zip(kept, sizes, strict=True):
        if size > view.sizes[axis] and not own and row is None:
            raise ShapeError(
                f"a block of shape {show(shape)} does not fit into this part of {view.memory.name}",
                expected=f"at most {show(view.shape)}", received=show(shape),
            )  # fmt: skip
        start = axis_start(axis, view.memory.dims, size) if own else 0
        start = row.start if row is not None and axis == first_row else start
        starts[axis], lengths[axis] = plus(starts[axis], start), size
    dropped |= set(kept[: len(kept) - len(shape)])
    return View(view.memory, tuple(starts), tuple(lengths), frozenset(dropped))


@takes_places
def load_vector(place: Any, width: int) -> Tensor:
    """The first `width` elements of a row, read as one vector: they begin at a multiple of `width` (rule M11)."""
    return _first(place, width).load()


@takes_places
def store_vector(place: Any, vector: Any) -> None:
    """Write a vector to the beginning of a row: at a multiple of its width (rule M11)."""
    block = value(vector)
    _first(place, block.shape[-1]).store(block)


def _first(place: Any, width: int) -> Place:
    found = locate(place, (), None)
    if not isinstance(found, View) or not found.shape:
        raise ArgumentError("a vector is part of a row", expected="a row, such as A[i]", received=repr(place))
    return _part(found, width)


def _part(view: View, width: int) -> View:
    axis = max(a for a in range(len(view.sizes)) if a not in view.dropped)
    sizes = tuple(width if a == axis else n for a, n in enumerate(view.sizes))
    return View(view.memory, view.starts, sizes, view.dropped, width)

"""What `A[i, m:m+BM, rows]` names: part of a view, or elements by blocks of indices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tessera.errors import DTypeError, OutOfBoundsError, ShapeError
from tessera.kernel import affine
from tessera.kernel.cells import Cells
from tessera.kernel.place import Memory, View, value
from tessera.kernel.trace import Index, as_index, is_traced, plus
from tessera.ops.shape import iota, reshape
from tessera.shapes.rules import show
from tessera.tensor import Tensor


def whole(memory: Memory) -> View:
    """All of a memory."""
    return View(memory, (0,) * len(memory.shape), memory.shape)


def subscript(view: View, index: Any) -> Any:
    """The part of a view that an index names; with None among it, a block that was read."""
    items = list(index) if isinstance(index, tuple) else [index]
    if any(i is None for i in items):
        return view.load()[index]  # type: ignore[index]
    items = _completed(view, [value(i) for i in items])
    if any(isinstance(i, Tensor) and i.ndim for i in items):
        return _cells(view, items)
    starts, sizes, dropped = list(view.starts), list(view.sizes), set(view.dropped)
    for axis, item in zip(_kept(view), items, strict=True):
        start, size = _span(view, axis, item)
        starts[axis], sizes[axis] = plus(starts[axis], start), size
        if not isinstance(item, slice):
            dropped.add(axis)
    return View(view.memory, tuple(starts), tuple(sizes), frozenset(dropped))


def _kept(view: View) -> list[int]:
    return [axis for axis in range(len(view.sizes)) if axis not in view.dropped]


def _completed(view: View, items: list[Any]) -> list[Any]:
    """One item for each axis: `...` and axes not mentioned are taken whole."""
    used = sum(i is not Ellipsis for i in items)
    if used > len(view.shape):
        raise ShapeError(
            f"{used} indices for {view.memory.name}, which has rank {len(view.shape)}", received=show(view.shape)
        )
    fill = [slice(None)] * (len(view.shape) - used)
    at = next((n for n, i in enumerate(items) if i is Ellipsis), len(items))
    return [*items[:at], *fill, *items[at + 1 :]]


def _span(view: View, axis: int, item: Any) -> tuple[Index, int]:
    """Where an item starts in its axis of the view, and how many elements it takes."""
    rule = _ITEMS.get(type(item))
    if rule is None:
        raise DTypeError(
            f"{item!r} is not an index into {view.memory.name}",
            expected="an int, a slice or a block of ints",
            received=type(item).__name__,
        )
    return rule(view, axis, item)


def _number(view: View, axis: int, item: int) -> tuple[Index, int]:
    _check(view, axis, item, "index", view.sizes[axis] - 1)
    return item, 1


def _scalar(view: View, axis: int, item: Tensor) -> tuple[Index, int]:
    if not item.dtype.is_integer:
        raise DTypeError(
            f"an index into {view.memory.name} is not an integer", expected="int64", received=str(item.type),
            suggestion="cast it: int(x)",
        )  # fmt: skip
    return item, 1


def _slice(view: View, axis: int, item: slice) -> tuple[Index, int]:
    lower, upper = (value(x) for x in (item.start, item.stop))
    if item.step not in (None, 1):
        raise ShapeError(
            "a slice of memory has no step", received=f"step {item.step}",
            suggestion="use a block of indices: A[start + step * tile.arange(0, n)]"
            + ("; tile.flip(A[0:n]) turns a block round" if item.step == -1 else ""),
        )  # fmt: skip
    lower = 0 if lower is None else lower
    upper = view.sizes[axis] if upper is None else upper
    for bound in (lower, upper):
        if not is_traced(bound):
            _check(view, axis, bound, "bound", None)
    size = affine.difference(upper, lower)
    if size is None:
        raise ShapeError(
            f"the size of this slice of {view.memory.name} is not known while compiling",
            expected="bounds whose difference is a constant",
            suggestion='A[start : start + BLOCK]; at an edge tile.load(A[start : start + BLOCK], edge="clip")',
        )
    if size < 0:
        raise ShapeError(f"a slice of {view.memory.name} ends before it starts", received=f"{size} elements")
    return lower, size


def _check(view: View, axis: int, bound: int, what: str, last: int | None) -> None:
    if bound < 0 or (last is not None and bound > last):
        name, size = view.memory.name, view.sizes[axis]
        raise OutOfBoundsError(
            f"{what} {bound} is outside axis {axis} of {name}, which has size {size}",
            expected=f"{what}es from 0 to {size - 1}" if last is not None else "bounds from 0 on",
            suggestion=f"count from the start: {size + bound}" if -size <= bound < 0 else None,
        )


_ITEMS: dict[type, Callable[..., tuple[Index, int]]] = {int: _number, Tensor: _scalar, slice: _slice}


def _cells(view: View, items: Sequence[Any]) -> Cells:
    """The elements that blocks of indices name; beside a slice each block walks an axis of its own."""
    kept = dict(zip(_kept(view), items, strict=True))
    outer = any(isinstance(i, slice) for i in items)
    axes = [a for a, i in kept.items() if isinstance(i, slice) or (isinstance(i, Tensor) and i.ndim)]
    given: list[Any] = []
    for axis, start in enumerate(view.starts):
        item = kept.get(axis, 0)
        block: Any = _ramp(view, axis, item) if isinstance(item, slice) else _integers(view, item)
        if outer and block.ndim == 1:
            block = reshape(block, shape=(-1,) + (1,) * (len(axes) - axes.index(axis) - 1))
        given.append(block if isinstance(start, int) and start == 0 else block + start)
    return Cells(view.memory, tuple(given))


def _ramp(view: View, axis: int, item: slice) -> Any:
    start, size = _slice(view, axis, item)
    return iota(shape=(size,)) + start


def _integers(view: View, item: Any) -> Tensor:
    return _scalar(view, 0, item)[0] if isinstance(item, Tensor) else as_index(item)  # type: ignore[return-value]

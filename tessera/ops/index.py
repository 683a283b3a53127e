"""Subscripts: `x[1:3, ..., None, -1]` as slice, reshape and gather."""

from __future__ import annotations

from typing import Any

from tessera.errors import OutOfBoundsError, ShapeError, here
from tessera.ops.shape import expand_dims, gather, slice_, squeeze
from tessera.shapes.rules import show
from tessera.tensor import Tensor, as_tensor


def subscript(x: Tensor, index: Any) -> Tensor:
    """What `x[index]` means: integers, slices with positive step, None, `...`, or one integer tensor."""
    items = list(index) if isinstance(index, tuple) else [index]
    used = len([i for i in items if i is not None and i is not Ellipsis])
    if used > x.ndim:
        raise ShapeError(f"{used} indices for a tensor of rank {x.ndim}", location=here(), received=show(x.shape))
    fill = [slice(None)] * (x.ndim - used)
    at = next((n for n, i in enumerate(items) if i is Ellipsis), len(items))
    items[at : at + 1] = fill
    out, axis = _sliced(x, [i for i in items if i is not None]), 0
    for item in items:
        out, axis = _take(out, item, axis)
    return out


def _sliced(x: Tensor, items: list[Any]) -> Tensor:
    bounds = [_bounds(item, size, axis) for axis, (item, size) in enumerate(zip(items, x.shape, strict=True))]
    if all(b == (0, s, 1) for b, s in zip(bounds, x.shape, strict=True)):
        return x
    start, stop, step = (tuple(b[i] for b in bounds) for i in range(3))
    return slice_(x, start=start, stop=stop, step=step)


def _bounds(item: Any, size: Any, axis: int) -> tuple[Any, Any, int]:
    if isinstance(item, slice):
        if item == slice(None):
            return 0, size, 1
        low, high, step = item.indices(int(size))
        if step < 1:
            raise ShapeError("a slice step must be positive", location=here(), received=str(step))
        return low, max(low, high), step
    if isinstance(item, int):
        place = item + size if item < 0 else item
        if isinstance(size, int) and not 0 <= place < size:
            raise OutOfBoundsError(
                f"index {item} is outside axis {axis} of size {size}",
                location=here(),
                expected=f"an index from {-size} to {size - 1}",
            )
        return place, place + 1, 1
    return 0, size, 1


def _take(x: Tensor, item: Any, axis: int) -> tuple[Tensor, int]:
    if item is None:
        return expand_dims(x, axis), axis + 1
    if isinstance(item, slice):
        return x, axis + 1
    if isinstance(item, int):
        return squeeze(x, axis), axis
    indices = as_tensor(item)
    return gather(x, indices, axis=axis), axis + indices.ndim

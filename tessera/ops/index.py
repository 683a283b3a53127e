"""Subscripts: `x[1:3, ..., None, -1, mask, places]` as slice, reshape, flip and gather."""

from __future__ import annotations

from types import EllipsisType
from typing import Any

import numpy as np

from tessera.errors import OutOfBoundsError, ShapeError, here
from tessera.ops.arrange import flip
from tessera.ops.elementwise import less, where
from tessera.ops.shape import count, expand_dims, gather, permute, reshape, slice_, squeeze
from tessera.shapes import broadcast
from tessera.shapes.rules import show
from tessera.tensor import Tensor, as_tensor

KINDS = (int, slice, type(None), EllipsisType)


def subscript(x: Tensor, index: Any) -> Tensor:
    """What `x[index]` means: NumPy's rules for integers, slices, None, `...`, integer and bool arrays.

    Bool arrays choose a number of elements only values tell, so they are refused while tracing.

    Raises:
        OutOfBoundsError: an index lies outside its axis.
        ShapeError: there are more indices than axes.
    """
    items = [part for item in (index if isinstance(index, tuple) else (index,)) for part in _plain(item)]
    used = len([i for i in items if i is not None and i is not Ellipsis])
    if used > x.ndim:
        raise ShapeError(f"{used} indices for a tensor of rank {x.ndim}", location=here(), received=show(x.shape))
    fill = [slice(None)] * (x.ndim - used)
    at = next((n for n, i in enumerate(items) if i is Ellipsis), len(items))
    items[at : at + 1] = fill
    if _joined(items):
        return _several(x, items)
    out, axis = _sliced(x, [i for i in items if i is not None]), 0
    for item in items:
        out, axis = _take(out, item, axis)
    return out


def _plain(item: Any) -> list[Any]:
    """An item of a subscript as integers, slices and integer tensors; a bool array names the places it holds at."""
    if item is None or item is Ellipsis or isinstance(item, slice):
        return [item]
    if isinstance(item, (int, np.integer)) and not isinstance(item, bool):
        return [int(item)]
    tensor = as_tensor(np.asarray(item, np.int64) if isinstance(item, list) and not item else item)
    if tensor.dtype.kind == "bool":
        return [Tensor(places) for places in np.nonzero(tensor.numpy())]
    return [tensor]


def _sliced(x: Tensor, items: list[Any]) -> Tensor:
    bounds = [_bounds(item, size, axis) for axis, (item, size) in enumerate(zip(items, x.shape, strict=True))]
    backward = [axis for axis, b in enumerate(bounds) if b[2] < 0]
    bounds = [_forward(*b) if b[2] < 0 else b for b in bounds]
    if not all(b == (0, s, 1) for b, s in zip(bounds, x.shape, strict=True)):
        start, stop, step = (tuple(b[i] for b in bounds) for i in range(3))
        x = slice_(x, start=start, stop=stop, step=step)
    return flip(x, backward) if backward else x


def _forward(low: int, high: int, step: int) -> tuple[int, int, int]:
    """The same places as low:high:step, from the least on."""
    places = range(low, high, step)
    return (places[-1], low + 1, -step) if places else (0, 0, 1)


def _bounds(item: Any, size: Any, axis: int) -> tuple[Any, Any, int]:
    if isinstance(item, slice):
        if item == slice(None):
            return 0, size, 1
        if item.step == 0:
            raise ShapeError("a slice step cannot be zero", location=here())
        low, high, step = item.indices(int(size))
        return low, max(low, high) if step > 0 else high, step
    if isinstance(item, int):
        place = item + size if item < 0 else item
        if isinstance(size, int) and not 0 <= place < size:
            raise _outside(item, axis, size)
        return place, place + 1, 1
    return 0, size, 1


def _outside(item: int, axis: int, size: int) -> OutOfBoundsError:
    return OutOfBoundsError(
        f"index {item} is outside axis {axis} of size {size}",
        location=here(),
        expected=f"an index from {-size} to {size - 1}",
    )


def _take(x: Tensor, item: Any, axis: int) -> tuple[Tensor, int]:
    if item is None:
        return expand_dims(x, axis), axis + 1
    if isinstance(item, slice):
        return x, axis + 1
    if isinstance(item, int):
        return squeeze(x, axis), axis
    indices = _counted(item, x.shape[axis], axis)
    return gather(x, indices, axis=axis), axis + indices.ndim


def _counted(places: Tensor, size: Any, axis: int) -> Tensor:
    """Indices counted from the start; those known already are checked."""
    if places.is_traced:
        return where(less(places, 0), places + size, places) if places.dtype.kind == "int" else places
    array = places.numpy()
    wrong = array[(array < -size) | (array >= size)] if array.dtype.kind in "iu" else array[:0]
    if wrong.size:
        raise _outside(int(wrong.flat[0]), axis, size)
    return Tensor(np.where(array < 0, array + size, array)) if (array < 0).any() else places


def _joined(items: list[Any]) -> bool:
    """Whether indices on several axes make up one: several arrays, or an array and an integer apart from it."""
    arrays = [n for n, i in enumerate(items) if not isinstance(i, KINDS)]
    spots = [n for n, i in enumerate(items) if n in arrays or isinstance(i, int)]
    return len(arrays) > 1 or (len(arrays) == 1 and len(spots) != spots[-1] - spots[0] + 1)


def _several(x: Tensor, items: list[Any]) -> Tensor:
    """Arrays on more than one axis: those axes made one, and one gather along it at the joint places."""
    spots = [n for n, i in enumerate(items) if isinstance(i, int) or not isinstance(i, KINDS)]
    together = spots == list(range(spots[0], spots[-1] + 1))
    basic = [slice(None) if n in spots else i for n, i in enumerate(items)]
    out, axis, axes = _sliced(x, [i for i in basic if i is not None]), 0, []
    for n, item in enumerate(basic):
        axes += [axis] if n in spots else []
        out, axis = _take(out, item, axis)
    sizes = [out.shape[a] for a in axes]
    linear = _joint([items[n] for n in spots], sizes)
    rest = [a for a in range(out.ndim) if a not in axes]
    first = axes[0] if together else 0  # where NumPy puts the axes of the indices
    order = [*rest[:first], *axes, *rest[first:]]
    shape = (*(out.shape[a] for a in rest[:first]), count(sizes), *(out.shape[a] for a in rest[first:]))
    return gather(reshape(permute(out, axes=tuple(order)), shape=shape), linear, axis=first)


def _joint(items: list[Any], sizes: list[Any]) -> Tensor:
    """Places on several axes as places on the one axis they make together."""
    tensors = [_counted(as_tensor(i), size, axis) for axis, (i, size) in enumerate(zip(items, sizes, strict=True))]
    broadcast(*(t.shape for t in tensors))  # a mismatch is told in terms of the indices
    linear: Any = 0
    for tensor, size in zip(tensors, sizes, strict=True):
        linear = linear * size + tensor
    return linear

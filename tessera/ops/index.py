"""Subscripts: `x[1:3, ..., None, -1, mask, places]` as slice, reshape, flip and gather."""

from __future__ import annotations

import functools
from types import EllipsisType
from typing import Any, NamedTuple

import numpy as np

from tessera.errors import DTypeError, OutOfBoundsError, ShapeError, here
from tessera.ops.arrange import flip
from tessera.ops.elementwise import less, where
from tessera.ops.shape import count, expand_dims, gather, permute, reshape, slice_, squeeze
from tessera.shapes import Dim, Size, broadcast
from tessera.shapes.dim import known
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
    key = basic_key(index if isinstance(index, tuple) else (index,))
    if key is not None:
        return _basic(x, key)
    items = [_plain(item) for item in (index if isinstance(index, tuple) else (index,))]
    items = _chosen(filled(items, x.shape), x.shape)
    if _joined(items):
        return _several(x, items)
    out, axis = _sliced(x, [i for i in items if i is not None]), 0
    for item in items:
        out, axis = _take(out, item, axis)
    return out


class Recipe(NamedTuple):
    """A subscript of integers and slices: what is cut, which axes are turned around, the shape that is left."""

    cut: tuple[tuple[Size, ...], ...] | None
    backward: tuple[int, ...]
    shape: tuple[Size, ...]


def basic_key(items: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """The items with slices as tuples, which have a hash; None if one is neither integer, slice, None nor `...`."""
    key: list[Any] = []
    for item in items:
        if item.__class__ is slice:
            key.append((known(item.start), known(item.stop), item.step))
        elif item is None or item is Ellipsis or item.__class__ is int:
            key.append(item)
        else:
            return None
    return tuple(key)


def _basic(x: Tensor, key: tuple[Any, ...]) -> Tensor:
    try:
        recipe = recipe_of(x.shape, key)
    except TypeError:  # a bound without a hash, such as a tensor that knows its value
        recipe = recipe_of.__wrapped__(x.shape, key)
    if recipe.cut is not None:
        start, stop, step = recipe.cut
        x = slice_(x, start=start, stop=stop, step=step)
    if recipe.backward:
        x = flip(x, recipe.backward)
    return x if x.shape == recipe.shape else reshape(x, shape=recipe.shape)


@functools.lru_cache(maxsize=4096)
def recipe_of(shape: tuple[Size, ...], key: tuple[Any, ...]) -> Recipe:
    """How the elements that a basic subscript names are cut out of a tensor of `shape`."""
    items = filled([slice(*i) if isinstance(i, tuple) else i for i in key], shape)
    parts = [_bounds(i, n, a) for a, (i, n) in enumerate(zip([i for i in items if i is not None], shape, strict=True))]
    backward = tuple(axis for axis, b in enumerate(parts) if b[2] < 0)
    forward = [_forward(*b) if b[2] < 0 else b for b in parts]
    whole = all(b == (0, n, 1) for b, n in zip(forward, shape, strict=True))
    sizes = iter((hi - lo + by - 1) // by for lo, hi, by in forward)
    left: list[Size] = []
    for item in items:
        size: Size = 1 if item is None else next(sizes)
        left += [] if isinstance(item, int) else [size]
    return Recipe(None if whole else tuple(zip(*forward, strict=True)), backward, tuple(left))


def filled(items: list[Any], shape: tuple[Size, ...]) -> list[Any]:
    """A subscript with one item for each axis, None apart; `...` and what is left out are whole slices."""
    used = sum(_covers(i) for i in items)
    if used > len(shape):
        raise ShapeError(f"{used} indices for a tensor of rank {len(shape)}", location=here(), received=show(shape))
    dots = [n for n, i in enumerate(items) if i is Ellipsis]
    if len(dots) > 1:
        raise ShapeError("a subscript has more than one `...`", location=here(), received=f"{len(dots)} of them")
    at = dots[0] if dots else len(items)
    return [*items[:at], *[slice(None)] * (len(shape) - used), *items[at + 1 :]]


def _covers(item: Any) -> int:
    """How many axes an item of a subscript stands for: a bool array for as many as it has."""
    if item is None or item is Ellipsis:
        return 0
    return item.ndim if isinstance(item, Tensor) and item.dtype.kind == "bool" else 1


def _plain(item: Any) -> Any:
    """An item of a subscript as None, `...`, an integer, a slice, or a tensor of integers or bools."""
    if item is None or item is Ellipsis or isinstance(item, slice):
        return item
    if isinstance(item, (int, np.integer)) and not isinstance(item, bool):
        return int(item)
    tensor = as_tensor(np.asarray(item, np.int64) if isinstance(item, list) and not item else item)
    if tensor.dtype.kind == "bool" and not tensor.ndim:
        raise ShapeError("a single bool is no index", location=here(), suggestion="use ts.where")
    if tensor.dtype.is_float:
        raise DTypeError(
            "indices are not integers", location=here(), received=str(tensor.type),
            expected="integers, slices, None, ..., or tensors of integers or bools",
        )  # fmt: skip
    return tensor


def _chosen(items: list[Any], shape: tuple[Size, ...]) -> list[Any]:
    """The items with each bool array as the places at which it holds, one vector for each axis it covers."""
    found: list[Any] = []
    axis = 0
    for item in items:
        if isinstance(item, Tensor) and item.dtype.kind == "bool":
            covered = shape[axis : axis + item.ndim]
            if item.shape != covered and all(isinstance(n, int) for n in covered):
                raise ShapeError(
                    "a bool array does not fit the axes it chooses from", location=here(),
                    expected=f"shape {show(covered)}", received=show(item.shape),
                )  # fmt: skip
            found += [Tensor(places) for places in np.nonzero(item.numpy())]
            axis += item.ndim
        else:
            found.append(item)
            axis += item is not None
    return found


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
        named = [b for b in (size, item.start, item.stop) if isinstance(b, Dim)]
        if named and (item.step is None or item.step > 0):
            return _named_bounds(item, size)
        low, high, step = item.indices(int(size))
        return low, max(low, high) if step > 0 else high, step
    if isinstance(item, int):
        place = item + size if item < 0 else item
        if isinstance(size, int) and not 0 <= place < size:
            raise _outside(item, axis, size)
        return place, place + 1, 1
    return 0, size, 1


def _named_bounds(item: slice, size: Size) -> tuple[Size, Size, int]:
    """The bounds where a size is known only by name: an axis is taken to have the elements that are counted off."""
    low = 0 if item.start is None else _counted_off(item.start, size)
    high = size if item.stop is None else _counted_off(item.stop, size)
    if isinstance(size, Dim) and isinstance(item.stop, int) and item.stop >= 0:
        int(size)  # how many of the first elements there are, nobody knows: this tells so
    return low, high, item.step or 1


def _counted_off(bound: Size, size: Size) -> Size:
    return size + bound if isinstance(bound, int) and bound < 0 else bound


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

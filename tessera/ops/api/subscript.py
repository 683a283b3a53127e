"""Subscripts: `x[...]` as slice, reshape, flip and gather (NumPy indexing), and functional updates `x.at[...]` (as in
JAX)."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from types import EllipsisType
from typing import Any, NamedTuple

import numpy as np

from tessera.core.errors import DTypeError, OutOfBoundsError, ShapeError, TesseraError, user_location
from tessera.core.shapes import broadcast, format_shape
from tessera.core.size_guards import assume_at_most
from tessera.core.symbolic_dim import SIZE_GUARDS, Dim, Size, proves_at_most, proves_less, resolve_size
from tessera.core.types import bool_, int64
from tessera.ir.tensor import Tensor, as_tensor
from tessera.ops.tensor.basic import broadcast_to, dim_value, full
from tessera.ops.tensor.coercion import find_common_type, unify_dtypes
from tessera.ops.tensor.elementwise import equal, greater_equal, less, maximum, minimum, mul, where
from tessera.ops.tensor.rearrange import flip
from tessera.ops.tensor.scatter import scatter, scatter_add
from tessera.ops.tensor.shape import (
    check_index,
    concatenate,
    count_elements,
    expand_dims,
    gather,
    iota,
    permute,
    reshape,
    slice_,
    squeeze,
)
from tessera.ops.tensor.sorting import find_true_places

# Subscripts: `x[1:3, ..., None, -1, mask, indices]` as slice, reshape, flip and gather.


BASIC_ITEM_TYPES = (int, slice, type(None), EllipsisType)


def subscript(x: Tensor, index: Any) -> Tensor:
    """`x[index]` by NumPy's rules for integers, slices, None, `...`, integer and bool arrays.

    The size of a selection by a bool array depends on its values, so it is refused while tracing.

    Raises:
        OutOfBoundsError: an index is outside its axis.
        ShapeError: there are more indices than axes.
    """
    key = make_hashable_key(index if isinstance(index, tuple) else (index,))
    if key is not None:
        return _apply_basic_index(x, key)
    items = [_normalise_item(item) for item in (index if isinstance(index, tuple) else (index,))]
    split = _has_dots_between(items)
    items = _expand_masks(fill_subscript(items, x.shape), x.shape)
    if split or _has_joint_indices(items):
        return _gather_jointly(x, items, split)
    out, axis = _slice_axes(x, [i for i in items if i is not None]), 0
    for item in items:
        out, axis = _take_along(out, item, axis)
    return out


class SlicePlan(NamedTuple):
    """A subscript of integers and slices: the slice, the axes that are flipped, and the shape of the result."""

    cut: tuple[tuple[Size, ...], ...] | None
    backward: tuple[int, ...]
    shape: tuple[Size, ...]


def make_hashable_key(items: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """The items with slices as tuples, which are hashable; None if an item is not an integer, slice, None or `...`."""
    key: list[Any] = []
    for item in items:
        if item.__class__ is slice:
            key.append((resolve_size(item.start), resolve_size(item.stop), item.step))
        elif item is None or item is Ellipsis or item.__class__ is int:
            key.append(item)
        else:
            return None
    return tuple(key)


def _apply_basic_index(x: Tensor, key: tuple[Any, ...]) -> Tensor:
    try:  # what is planned for symbolic sizes holds for one trace, whose guards state it
        recipe = (plan_slices.__wrapped__ if _names_sizes(x.shape, key) else plan_slices)(x.shape, key)
    except TypeError:  # an unhashable bound, such as a tensor with a known value
        recipe = plan_slices.__wrapped__(x.shape, key)
    if recipe.cut is not None:
        start, stop, step = recipe.cut
        x = slice_(x, start=start, stop=stop, step=step)
    if recipe.backward:
        x = flip(x, recipe.backward)
    return x if x.shape == recipe.shape else reshape(x, shape=recipe.shape)


def _names_sizes(shape: tuple[Size, ...], key: tuple[Any, ...]) -> bool:
    """Whether a size or a bound is symbolic."""
    bounds = (b for item in key if isinstance(item, tuple) for b in item)
    return any(isinstance(n, Dim) for n in (*shape, *key, *bounds))


@functools.lru_cache(maxsize=4096)
def plan_slices(shape: tuple[Size, ...], key: tuple[Any, ...]) -> SlicePlan:
    """The slice, flips and reshape of a basic subscript of a tensor of `shape`."""
    items = fill_subscript([slice(*i) if isinstance(i, tuple) else i for i in key], shape)
    parts = [
        _slice_bounds(i, n, a) for a, (i, n) in enumerate(zip([i for i in items if i is not None], shape, strict=True))
    ]
    backward = tuple(axis for axis, b in enumerate(parts) if b[2] < 0)
    forward = [_reverse_range(*b) if b[2] < 0 else b for b in parts]
    whole = all(b == (0, n, 1) for b, n in zip(forward, shape, strict=True))
    sizes = iter((hi - lo + by - 1) // by for lo, hi, by in forward)
    left: list[Size] = []
    for item in items:
        size: Size = 1 if item is None else next(sizes)
        left += [] if isinstance(item, int) else [size]
    return SlicePlan(None if whole else tuple(zip(*forward, strict=True)), backward, tuple(left))


def fill_subscript(items: list[Any], shape: tuple[Size, ...]) -> list[Any]:
    """A subscript with one item for each axis, besides None; `...` and missing items become full slices."""
    used = sum(_count_covered_axes(i) for i in items)
    if used > len(shape):
        raise ShapeError(
            f"{used} indices for a tensor of rank {len(shape)}", location=user_location(), received=format_shape(shape)
        )
    dots = [n for n, i in enumerate(items) if i is Ellipsis]
    if len(dots) > 1:
        raise ShapeError(
            "a subscript has more than one `...`", location=user_location(), received=f"{len(dots)} of them"
        )
    at = dots[0] if dots else len(items)
    return [*items[:at], *[slice(None)] * (len(shape) - used), *items[at + 1 :]]


def _count_covered_axes(item: Any) -> int:
    """The number of axes that an item of a subscript indexes: for a bool array, its rank."""
    if item is None or item is Ellipsis:
        return 0
    return item.ndim if isinstance(item, Tensor) and item.dtype.kind == "bool" else 1


def _normalise_item(item: Any) -> Any:
    """An item of a subscript as None, `...`, an integer, a slice, or a tensor of integers or bools."""
    if item is None or item is Ellipsis or isinstance(item, slice):
        return item
    if isinstance(item, (int, np.integer)) and not isinstance(item, bool):
        return int(item)
    tensor = as_tensor(np.asarray(item, np.int64) if isinstance(item, list) and not item else item)
    if tensor.dtype.kind == "bool" and not tensor.ndim:
        raise ShapeError("a single bool is not an index", location=user_location(), suggestion="use ts.where")
    if tensor.dtype.is_float:
        raise DTypeError(
            "indices are not integers", location=user_location(), received=str(tensor.type),
            expected="integers, slices, None, ..., or tensors of integers or bools",
        )  # fmt: skip
    return tensor


def _expand_masks(items: list[Any], shape: tuple[Size, ...]) -> list[Any]:
    """The items with each bool array replaced by the indices of its true elements, one vector for each of its axes."""
    found: list[Any] = []
    axis = 0
    for item in items:
        if isinstance(item, Tensor) and item.dtype.kind == "bool":
            covered = shape[axis : axis + item.ndim]
            if item.shape != covered and all(isinstance(n, int) for n in covered):
                raise ShapeError(
                    "the shape of a bool array differs from that of the axes it indexes", location=user_location(),
                    expected=f"shape {format_shape(covered)}", received=format_shape(item.shape),
                )  # fmt: skip
            found += find_true_places(item)
            axis += item.ndim
        else:
            found.append(item)
            axis += item is not None
    return found


def _slice_axes(x: Tensor, items: list[Any]) -> Tensor:
    bounds = [_slice_bounds(item, size, axis) for axis, (item, size) in enumerate(zip(items, x.shape, strict=True))]
    backward = [axis for axis, b in enumerate(bounds) if b[2] < 0]
    bounds = [_reverse_range(*b) if b[2] < 0 else b for b in bounds]
    if not all(b == (0, s, 1) for b, s in zip(bounds, x.shape, strict=True)):
        start, stop, step = (tuple(b[i] for b in bounds) for i in range(3))
        x = slice_(x, start=start, stop=stop, step=step)
    return flip(x, backward) if backward else x


def _reverse_range(low: int, high: int, step: int) -> tuple[int, int, int]:
    """The same indices as low:high:step, in ascending order."""
    places = range(low, high, step)
    return (places[-1], low + 1, -step) if places else (0, 0, 1)


def _slice_bounds(item: Any, size: Any, axis: int) -> tuple[Any, Any, int]:
    if isinstance(item, slice):
        if item == slice(None):
            return 0, size, 1
        if item.step == 0:
            raise ShapeError("a slice step cannot be zero", location=user_location())
        named = [b for b in (size, item.start, item.stop) if isinstance(b, Dim)]
        if named and (item.step is None or item.step > 0):
            return _symbolic_bounds(item, size)
        low, high, step = item.indices(int(size))
        return low, max(low, high) if step > 0 else high, step
    if isinstance(item, int):
        place = item + size if item < 0 else item
        if isinstance(size, int) and not 0 <= place < size:
            raise _make_bounds_error(item, axis, size)
        return place, place + 1, 1
    return 0, size, 1


def _symbolic_bounds(item: slice, size: Size) -> tuple[Size, Size, int]:
    """The bounds for a symbolic size: the axis is assumed to have the elements that are counted from its start."""
    low = 0 if item.start is None else _wrap_bound(item.start, size)
    high = size if item.stop is None else _wrap_bound(item.stop, size)
    if not (assume_at_most(0, low) and assume_at_most(low, high) and assume_at_most(high, size)):
        for n in (size, low, high):
            int(n)  # NumPy would cut the slice, so that its size is unknown: this raises the error
    if isinstance(size, Dim) and SIZE_GUARDS.get() is None and isinstance(item.stop, int) and item.stop >= 0:
        int(size)
    return low, high, item.step or 1


def _wrap_bound(bound: Size, size: Size) -> Size:
    """A bound counted from the start; where the sign of a symbolic one is not proven, the example's decides."""
    if isinstance(bound, int) or SIZE_GUARDS.get() is None or proves_at_most(0, bound):
        return size + bound if proves_less(bound, 0) else bound
    return size + bound if assume_at_most(bound, -1) else bound


def _make_bounds_error(item: int, axis: int, size: int) -> OutOfBoundsError:
    return OutOfBoundsError(
        f"index {item} is outside axis {axis} of size {size}",
        location=user_location(),
        expected=f"an index from {-size} to {size - 1}",
    )


def _take_along(x: Tensor, item: Any, axis: int) -> tuple[Tensor, int]:
    if item is None:
        return expand_dims(x, axis), axis + 1
    if isinstance(item, slice):
        return x, axis + 1
    if isinstance(item, int):
        return squeeze(x, axis), axis
    return gather(x, item, axis=axis), axis + item.ndim


def _has_joint_indices(items: list[Any]) -> bool:
    """Whether indices on several axes are combined: several arrays, or an array and an integer that is not adjacent."""
    arrays = [n for n, i in enumerate(items) if not isinstance(i, BASIC_ITEM_TYPES)]
    spots = [n for n, i in enumerate(items) if n in arrays or isinstance(i, int)]
    return len(arrays) > 1 or (len(arrays) == 1 and len(spots) != spots[-1] - spots[0] + 1)


def _has_dots_between(items: list[Any]) -> bool:
    """Whether `...` is between indices of which one is an array: the index axes go first, also if it covers no axis."""
    if not any(i is Ellipsis for i in items):
        return False
    at = next(n for n, i in enumerate(items) if i is Ellipsis)
    sides = [[i for i in side if isinstance(i, (int, Tensor))] for side in (items[:at], items[at + 1 :])]
    return all(sides) and any(isinstance(i, Tensor) for side in sides for i in side)


def _gather_jointly(x: Tensor, items: list[Any], split: bool) -> Tensor:
    """Arrays on more than one axis: the axes are merged, and one gather takes the linear indices."""
    spots = [n for n, i in enumerate(items) if isinstance(i, int) or not isinstance(i, BASIC_ITEM_TYPES)]
    together = not split and spots == list(range(spots[0], spots[-1] + 1))
    basic = [slice(None) if n in spots else i for n, i in enumerate(items)]
    out, axis, axes = _slice_axes(x, [i for i in basic if i is not None]), 0, []
    for n, item in enumerate(basic):
        axes += [axis] if n in spots else []
        out, axis = _take_along(out, item, axis)
    vectors = _find_vectors([items[n] for n in spots]) if together else None
    if vectors is not None:
        shape = broadcast(*(as_tensor(items[n]).shape for n in spots))
        for a, vector in zip(axes, vectors, strict=True):
            out = gather(out, vector, axis=a)
        return reshape(out, shape=(*out.shape[: axes[0]], *shape, *out.shape[axes[-1] + 1 :]))
    sizes = [out.shape[a] for a in axes]
    linear = _linearise_indices([items[n] for n in spots], sizes)
    rest = [a for a in range(out.ndim) if a not in axes]
    first = axes[0] if together else 0  # the position of the index axes in NumPy's rules
    order = [*rest[:first], *axes, *rest[first:]]
    shape = (*(out.shape[a] for a in rest[:first]), count_elements(sizes), *(out.shape[a] for a in rest[first:]))
    return gather(reshape(permute(out, axes=tuple(order)), shape=shape), linear, axis=first)


def _find_vectors(items: list[Any]) -> list[Tensor] | None:
    """Indices that select along one axis after the other, as `np.ix_` makes them: each in the form of a vector.

    None for others: an axis of the result then belongs to several of them.
    """
    tensors = [as_tensor(i) for i in items]
    long = [[a - t.ndim for a, n in enumerate(t.shape) if n != 1] for t in tensors]
    axes = [a for each in long for a in each]
    if any(len(each) != 1 for each in long) or axes != sorted(set(axes)) or len(axes) < 2:
        return None
    return [reshape(t, shape=(-1,)) for t in tensors]


def _linearise_indices(items: list[Any], sizes: list[Any], first: int = 0) -> Tensor:
    """Indices on several axes, from the first on, as linear indices on the merged axis."""
    pairs = enumerate(zip(items, sizes, strict=True), first)
    tensors = [check_index(as_tensor(i), size=size, along=axis) for axis, (i, size) in pairs]
    broadcast(*(t.shape for t in tensors))  # report a mismatch in terms of the indices
    linear = tensors[0]
    for tensor, size in zip(tensors[1:], sizes[1:], strict=True):
        linear = linear * size + tensor
    return linear


# `x.at[index]`: the tensor with some elements changed, `x` itself left as it was.


JoinFunction = Callable[[Any, Any], Any]
# For each update: how an old and a new element combine, and the op for updates at indices.
UPDATE_MODES: dict[str, tuple[JoinFunction, Callable[..., Any]]] = {
    "set": (lambda old, new: new, scatter),
    "add": (operator.add, scatter_add),
    "multiply": (mul, functools.partial(scatter, mode="multiply")),
    "min": (minimum, functools.partial(scatter, mode="min")),
    "max": (maximum, functools.partial(scatter, mode="max")),
}


@dataclass(frozen=True)
class IndexUpdateHelper:
    """`x.at`: a subscript gives the update methods."""

    tensor: Tensor

    def __getitem__(self, index: Any) -> IndexUpdateRef:
        return IndexUpdateRef(self.tensor, index)


@dataclass(frozen=True)
class IndexUpdateRef:
    """Elements of a tensor, selected by a subscript; each method returns a new tensor with them updated.

    The index is that of a subscript. With a traced bool mask, the values must be a scalar.

    >>> x = Tensor([1.0, 2.0, 3.0])
    >>> x.at[1:].add(10)
    Tensor([ 1., 12., 13.], f32)
    >>> x.at[[0, 0]].add(1)
    Tensor([3., 2., 3.], f32)

    Raises:
        ShapeError: the values do not broadcast to the selection.
        DTypeError: the values do not have the tensor's element type.
    """

    tensor: Tensor
    index: Any

    def get(self) -> Tensor:
        """The elements as they are."""
        return self.tensor[self.index]

    def set(self, values: Any) -> Tensor:
        """These elements replaced by `values`; the last of equal indices wins."""
        return self._changed("set", values)

    def add(self, values: Any) -> Tensor:
        """`values` added; equal indices add repeatedly."""
        return self._changed("add", values)

    def multiply(self, values: Any) -> Tensor:
        """These elements times `values`."""
        return self._changed("multiply", values)

    def min(self, values: Any) -> Tensor:
        """The smaller of these elements and `values`."""
        return self._changed("min", values)

    def max(self, values: Any) -> Tensor:
        """The larger of these elements and `values`."""
        return self._changed("max", values)

    def _changed(self, change: str, values: Any) -> Tensor:
        try:
            return apply_update(self.tensor, self.index, values, change)
        except TesseraError as error:
            raise error.at(user_location()) from None


def apply_update(x: Tensor, index: Any, values: Any, change: str) -> Tensor:
    """`x` with an update of the elements of a subscript."""
    new = _match_values(x, values)
    join, scattered = UPDATE_MODES[change]
    key = make_hashable_key(index if isinstance(index, tuple) else (index,))
    if key is not None:
        return _update_region(x, plan_slices(x.shape, key), new, join)
    mask = _find_mask(index)
    if mask is not None and new.ndim <= x.ndim - mask.ndim:
        wide = reshape(mask, shape=(*mask.shape, *(1 for _ in x.shape[mask.ndim :])))
        return where(broadcast_to(wide, shape=x.shape), join(x, broadcast_to(new, shape=x.shape)), x)
    along = _find_index_axes(index, x)
    if along is not None:
        return _update_along(x, *along, new, scattered)
    places = subscript(reshape(iota(shape=(count_elements(x.shape),)), shape=x.shape), index)
    flat = reshape(x, shape=(count_elements(x.shape),))
    return reshape(scattered(flat, places, broadcast_to(new, shape=places.shape)), shape=x.shape)


def _find_index_axes(index: Any, x: Tensor) -> tuple[int, list[Any]] | None:
    """The first of the axes that integers and their arrays index, and these; None if they are not side by side, or
    something else than whole axes is beside them."""
    items = [_normalise_item(i) for i in (index if isinstance(index, tuple) else (index,))]
    if _has_dots_between(items):
        return None
    items = fill_subscript(items, x.shape)
    spots = [n for n, i in enumerate(items) if isinstance(i, (int, Tensor))]
    found = items[spots[0] : spots[-1] + 1] if spots else []
    masks = any(isinstance(i, Tensor) and i.dtype.kind == "bool" for i in items)
    if len(found) != len(spots) or masks or any(i != slice(None) for n, i in enumerate(items) if n not in spots):
        return None
    return spots[0], found


def _update_along(x: Tensor, first: int, items: list[Any], new: Tensor, scattered: Callable[..., Any]) -> Tensor:
    """The update at indices of axes that are merged into one."""
    after = first + len(items)
    alone = as_tensor(items[0]) if len(items) == 1 else None  # which the op checks itself
    places = _linearise_indices(items, list(x.shape[first:after]), first) if alone is None else alone
    lead, rest = x.shape[:first], x.shape[after:]
    merged = reshape(x, shape=(*lead, count_elements(x.shape[first:after]), *rest))
    updates = broadcast_to(new, shape=(*lead, *places.shape, *rest))
    return reshape(scattered(merged, places, updates, axis=first), shape=x.shape)


def _match_values(x: Tensor, values: Any) -> Tensor:
    """The values with the element type of `x`."""
    new = values if isinstance(values, (bool, int, float)) else as_tensor(values)
    if find_common_type([x, new]).dtype != x.dtype:
        received = new.type if isinstance(new, Tensor) else repr(new)
        raise DTypeError("the values have another type", expected=str(x.dtype), received=str(received))
    return unify_dtypes([x, new])[1]


def _find_mask(index: Any) -> Tensor | None:
    """The bool tensor that an index is, if it is one."""
    if isinstance(index, (Tensor, list)) or hasattr(index, "dtype"):
        tensor = as_tensor(index)
        return tensor if tensor.dtype.kind == "bool" and tensor.ndim else None
    return None


def _update_region(x: Tensor, recipe: SlicePlan, new: Tensor, join: JoinFunction) -> Tensor:
    """The update at integers and slices: the values spread over the axes, and a mask of the updated elements."""
    spread = broadcast_to(new, shape=recipe.shape)
    if recipe.cut is None and not recipe.backward:
        return join(x, reshape(spread, shape=x.shape))
    start, stop, step = recipe.cut or ((0,) * x.ndim, x.shape, (1,) * x.ndim)
    sizes = tuple((hi - lo + by - 1) // by for lo, hi, by in zip(start, stop, step, strict=True))
    if 0 in sizes or any(not assume_at_most(1, n) and assume_at_most(n, 0) for n in sizes):
        return x
    spread, kept = reshape(spread, shape=sizes), []
    for axis, (low, by, size) in enumerate(zip(start, step, sizes, strict=True)):
        if size != x.shape[axis] or axis in recipe.backward:
            number, inside = _map_to_source(x.shape[axis], low, by, size, axis in recipe.backward)
            spread = gather(spread, number, axis=axis)
            kept.append(reshape(inside, shape=(-1, *(1 for _ in x.shape[axis + 1 :]))))
    if not kept:  # `[::2]` of one element
        return join(x, spread)
    mask = broadcast_to(functools.reduce(operator.and_, kept), shape=x.shape)
    return where(mask, join(x, spread), x)


def _map_to_source(length: Size, low: Size, step: Any, size: Size, backward: bool) -> tuple[Tensor, Tensor]:
    """For each index of an axis, the clamped index into the values, and whether the slice contains it."""
    symbolic = isinstance(size, Dim) or isinstance(low, Dim)
    if symbolic and step == 1:
        return _map_symbolic_sizes(length, low, size)
    first, count = (dim_value(size=n) if isinstance(n, Dim) else n for n in (low, size))
    offset = iota(shape=(length,)) - first
    number = offset // step if step > 1 else offset
    inside = greater_equal(number, 0) & less(number, count)
    inside = inside & equal(offset % step, 0) if step > 1 else inside
    number = minimum(maximum(number, 0), count - 1)
    return (count - 1 - number if backward else number), inside


def _map_symbolic_sizes(length: Size, low: Size, size: Size) -> tuple[Tensor, Tensor]:
    """As `_places` for symbolic sizes, by concatenation of the parts before, in and after the slice."""
    rest = length - low - size
    sides = [(n, full(shape=(n,), value=0, dtype=int64)) for n in (low, rest)]
    parts = [(size, iota(shape=(size,)))]
    listed = [p for p in (sides[0], *parts, sides[1]) if p[0] != 0]
    inside = [full(shape=(n,), value=part is parts[0][1], dtype=bool_) for n, part in listed]
    return concatenate([part for _, part in listed]), concatenate(inside)

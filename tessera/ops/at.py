"""`x.at[index]`: the tensor with some elements changed, `x` itself left as it was."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tessera.errors import DTypeError, TesseraError, here
from tessera.ops.basic import broadcast_to, full
from tessera.ops.coerce import common_type, same_dtype
from tessera.ops.elementwise import equal, greater_equal, less, maximum, minimum, mul, where
from tessera.ops.index import Recipe, basic_key, recipe_of, subscript
from tessera.ops.shape import concatenate, count, gather, iota, reshape
from tessera.ops.update import scatter, scatter_add
from tessera.shapes import Dim, Size
from tessera.tensor import Tensor, as_tensor
from tessera.types import bool_, int64

Join = Callable[[Any, Any], Any]
# For each change: how an old and a new element make the result, and the op for places that indices name.
CHANGES: dict[str, tuple[Join, Callable[..., Any]]] = {
    "set": (lambda old, new: new, scatter),
    "add": (operator.add, scatter_add),
    "multiply": (mul, functools.partial(scatter, mode="multiply")),
    "min": (minimum, functools.partial(scatter, mode="min")),
    "max": (maximum, functools.partial(scatter, mode="max")),
}


@dataclass(frozen=True)
class At:
    """`x.at`, to be subscripted."""

    tensor: Tensor

    def __getitem__(self, index: Any) -> Update:
        return Update(self.tensor, index)


@dataclass(frozen=True)
class Update:
    """Some places of a tensor, traced or not; each method gives a new tensor with them changed.

    The index is what a subscript takes. Beside a traced bool mask, values must be one for all places.

    >>> x = Tensor([1.0, 2.0, 3.0])
    >>> x.at[1:].add(10)
    Tensor([ 1., 12., 13.], f32)
    >>> x.at[[0, 0]].add(1)
    Tensor([3., 2., 3.], f32)

    Raises:
        ShapeError: the values do not broadcast to the places.
        DTypeError: the values do not have the tensor's element type.
    """

    tensor: Tensor
    index: Any

    def get(self) -> Tensor:
        """The elements as they are."""
        return self.tensor[self.index]

    def set(self, values: Any) -> Tensor:
        """These elements replaced by `values`; a place named twice takes the last."""
        return self._changed("set", values)

    def add(self, values: Any) -> Tensor:
        """`values` added; a place named twice is added to twice."""
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
            return changed(self.tensor, self.index, values, change)
        except TesseraError as error:
            raise error.at(here()) from None


def changed(x: Tensor, index: Any, values: Any, change: str) -> Tensor:
    """`x` with a change made where a subscript says."""
    new = _typed(x, values)
    join, scattered = CHANGES[change]
    key = basic_key(index if isinstance(index, tuple) else (index,))
    if key is not None:
        return _region(x, recipe_of(x.shape, key), new, join)
    mask = _mask(index)
    if mask is not None and new.ndim <= x.ndim - mask.ndim:
        wide = reshape(mask, shape=(*mask.shape, *(1 for _ in x.shape[mask.ndim :])))
        return where(broadcast_to(wide, shape=x.shape), join(x, broadcast_to(new, shape=x.shape)), x)
    places = subscript(reshape(iota(shape=(count(x.shape),)), shape=x.shape), index)
    flat = reshape(x, shape=(count(x.shape),))
    return reshape(scattered(flat, places, broadcast_to(new, shape=places.shape)), shape=x.shape)


def _typed(x: Tensor, values: Any) -> Tensor:
    """The values with the element type of `x`."""
    new = values if isinstance(values, (bool, int, float)) else as_tensor(values)
    if common_type([x, new]).dtype != x.dtype:
        received = new.type if isinstance(new, Tensor) else repr(new)
        raise DTypeError("the values have another type", expected=str(x.dtype), received=str(received))
    return same_dtype([x, new])[1]


def _mask(index: Any) -> Tensor | None:
    """The bool tensor that an index is, if it is one."""
    if isinstance(index, (Tensor, list)) or hasattr(index, "dtype"):
        tensor = as_tensor(index)
        return tensor if tensor.dtype.kind == "bool" and tensor.ndim else None
    return None


def _region(x: Tensor, recipe: Recipe, new: Tensor, join: Join) -> Tensor:
    """The change where integers and slices say: the values spread over the axes, and a mask of where they count."""
    spread = broadcast_to(new, shape=recipe.shape)
    if recipe.cut is None and not recipe.backward:
        return join(x, reshape(spread, shape=x.shape))
    start, stop, step = recipe.cut or ((0,) * x.ndim, x.shape, (1,) * x.ndim)
    sizes = tuple((hi - lo + by - 1) // by for lo, hi, by in zip(start, stop, step, strict=True))
    if 0 in sizes:
        return x
    spread, kept = reshape(spread, shape=sizes), []
    for axis, (low, by, size) in enumerate(zip(start, step, sizes, strict=True)):
        if size != x.shape[axis] or axis in recipe.backward:
            number, inside = _places(x.shape[axis], low, by, size, axis in recipe.backward)
            spread = gather(spread, number, axis=axis)
            kept.append(reshape(inside, shape=(-1, *(1 for _ in x.shape[axis + 1 :]))))
    mask = broadcast_to(functools.reduce(operator.and_, kept), shape=x.shape)
    return where(mask, join(x, spread), x)


def _places(length: Size, low: Size, step: Any, size: Size, backward: bool) -> tuple[Tensor, Tensor]:
    """For each place of an axis the number of the element cut there, brought into range, and whether one is."""
    if isinstance(size, Dim) or isinstance(low, Dim):
        return _named_places(length, low, size)
    offset = iota(shape=(length,)) - low
    number = offset // step if step > 1 else offset
    inside = greater_equal(number, 0) & less(number, size)
    inside = inside & equal(offset % step, 0) if step > 1 else inside
    number = minimum(maximum(number, 0), size - 1)
    return (size - 1 - number if backward else number), inside


def _named_places(length: Size, low: Size, size: Size) -> tuple[Tensor, Tensor]:
    """As `_places` where sizes are names, which are no numbers to calculate with: parts one after the other."""
    rest = length - low - size
    sides = [(n, full(shape=(n,), value=0, dtype=int64)) for n in (low, rest)]
    parts = [(size, iota(shape=(size,)))]
    listed = [p for p in (sides[0], *parts, sides[1]) if p[0] != 0]
    inside = [full(shape=(n,), value=part is parts[0][1], dtype=bool_) for n, part in listed]
    return concatenate([part for _, part in listed]), concatenate(inside)

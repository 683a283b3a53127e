"""Updates of some elements of a tensor: scatter_add, scatter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tessera.errors import ArgumentError, DTypeError, OutOfBoundsError, ShapeError
from tessera.op import ACCUMULATE, lower, op
from tessera.ops.basic import broadcast_to, cast, plain, splat
from tessera.ops.elementwise import equal, greater_equal, maximum, minimum, where
from tessera.ops.reduce import max, min, sum
from tessera.ops.shape import count, expand_dims, iota, permute, reshape
from tessera.ops.statistics import prod
from tessera.shapes import normalize_axis
from tessera.shapes.rules import show
from tessera.tensor import Tensor
from tessera.types import TensorType, int64


def _scatter_add_type(x: TensorType, indices: TensorType, updates: TensorType, *, axis: int) -> TensorType:
    if x.dtype.kind == "bool":
        raise DTypeError("updates are not added to bools", expected="numbers", received=f"{x} and {updates}")
    return _scatter_type(x, indices, updates, axis=axis)


def _scatter_type(
    x: TensorType, indices: TensorType, updates: TensorType, *, axis: int, mode: str = "set"
) -> TensorType:
    if not indices.dtype.is_integer:
        raise DTypeError("indices are not integers", expected="an integer tensor", received=str(indices))
    if x.dtype != updates.dtype:
        raise DTypeError("the updates have another type", expected=str(x.dtype), received=f"{x} and {updates}")
    at = axis + x.rank
    wanted = (*x.shape[:at], *indices.shape, *x.shape[at + 1 :])
    if updates.shape != wanted:
        raise ShapeError(
            "the updates do not fit the places", expected=show(wanted), received=show(updates.shape),
            suggestion="the axes of the indices stand where `axis` stood",
        )  # fmt: skip
    return x


@op(
    infer=_scatter_add_type,
    coerce=plain,
    canonical=lambda x, indices, updates, *, axis: {"axis": normalize_axis(axis, x.rank)},
    numerics=ACCUMULATE,
)
def scatter_add(x: Any, indices: Any, updates: Any, *, axis: int = 0) -> Any:
    """`x` with `updates` added to its slices along `axis` that `indices` name; a place named twice gets both.

    Shapes: as for `gather`, whose transpose this is: the axes of `indices` stand in `updates` where `axis` stood.
    """
    return _written(np.add.at, x, indices, updates, axis)


def _written(change: Callable[..., Any], x: Any, indices: Any, updates: Any, axis: int) -> Any:
    """A copy of `x` after change(slices along `axis`, indices, updates)."""
    size, at = x.shape[axis], axis + x.ndim
    if indices.size and not 0 <= indices.min() <= indices.max() < size:
        raise OutOfBoundsError(
            f"an index is outside axis {axis} of size {size}",
            expected=f"indices from 0 to {size - 1}",
            received=f"{indices.min()} to {indices.max()}",
        )
    out = np.moveaxis(x.copy(), at, 0)
    change(out, indices, np.moveaxis(updates, range(at, at + indices.ndim), range(indices.ndim)))
    return np.moveaxis(out, 0, at)


@lower(scatter_add)
def _(x, indices, updates, *, axis):
    # Each place sums the updates that name it. (A product with a one-hot matrix would spread an infinity.)
    parts, named = _aligned(x, indices, updates, axis)
    chosen = where(named, parts, splat(0, x.type.with_shape(named.shape)))
    return x + _back(cast(sum(chosen, axis=-1), dtype=x.dtype), axis)


def _aligned(x: Tensor, indices: Tensor, updates: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """The updates and which of them name each place, both [..., size, places]; `axis` of `x` is the last but one."""
    at, many, size = axis + x.ndim, indices.ndim, x.shape[axis]
    rest, places = (*x.shape[:at], *x.shape[at + 1 :]), count(indices.shape)
    order = (*range(at), *range(at + many, updates.ndim), *range(at, at + many))
    parts = reshape(permute(updates, axes=order), shape=(*rest, 1, places))
    shape = (*rest, size, places)
    named = equal(reshape(cast(indices, dtype=int64), shape=(1, places)), iota(shape=(size, 1), axis=0))
    return broadcast_to(parts, shape=shape), broadcast_to(named, shape=shape)


def _back(x: Tensor, axis: int) -> Tensor:
    """The last axis moved to where `axis` was."""
    at = axis + x.ndim
    return permute(x, axes=(*range(at), x.ndim - 1, *range(at, x.ndim - 1)))


def _set(out: Any, indices: Any, new: Any) -> None:
    out[indices] = new


MODES: dict[str, Callable[..., Any]] = {
    "set": _set,
    "multiply": np.multiply.at,
    "min": np.minimum.at,
    "max": np.maximum.at,
}


def _scatter_attrs(x: TensorType, indices: TensorType, updates: TensorType, *, axis: int, mode: str) -> dict[str, Any]:
    if mode not in MODES:
        raise ArgumentError(f"there is no scatter mode {mode!r}", expected=", ".join(MODES))
    return {"axis": normalize_axis(axis, x.rank), "mode": mode}


@op(infer=_scatter_type, coerce=plain, canonical=_scatter_attrs)
def scatter(x: Any, indices: Any, updates: Any, *, axis: int = 0, mode: str = "set") -> Any:
    """`x` with the slices along `axis` that `indices` name set to `updates` (or "multiply", "min", "max" with them).

    Shapes: as for `scatter_add`. A place named twice takes the last update; by the other modes, all of them.

    >>> import tessera as ts
    >>> ts.scatter(ts.Tensor([1.0, 2.0, 3.0]), ts.Tensor([2, 0]), ts.Tensor([9.0, 8.0]))
    Tensor([8., 2., 9.], f32)
    """
    return _written(MODES[mode], x, indices, updates, axis)


@lower(scatter)
def _(x, indices, updates, *, axis, mode):
    if 0 in (*indices.shape, *updates.shape):
        return x
    parts, named = _aligned(x, indices, updates, axis)
    if mode == "set":
        # The last update that names a place, by its number.
        number = where(named, broadcast_to(iota(shape=named.shape[-1:]), shape=named.shape), -1)
        last = max(number, axis=-1)
        hit = where(equal(number, expand_dims(last, -1)), parts, splat(0, parts.type))
        chosen = hit if x.dtype.kind != "bool" else cast(hit, dtype=int64)
        found = cast(sum(chosen, axis=-1), dtype=x.dtype)
        return where(_back(greater_equal(last, 0), axis), _back(found, axis), x)
    if mode == "multiply":
        return x * _back(cast(prod(where(named, parts, splat(1, parts.type)), axis=-1), dtype=x.dtype), axis)
    here = expand_dims(_last(x, axis), -1)
    least = JOINS[mode]
    return least(where(named, parts, broadcast_to(here, shape=named.shape)), x, axis)


def _last(x: Tensor, axis: int) -> Tensor:
    """`axis` moved to be the last one."""
    at = axis + x.ndim
    return permute(x, axes=(*range(at), *range(at + 1, x.ndim), at))


JOINS: dict[str, Callable[..., Any]] = {
    "min": lambda candidates, x, axis: minimum(x, _back(min(candidates, axis=-1), axis)),
    "max": lambda candidates, x, axis: maximum(x, _back(max(candidates, axis=-1), axis)),
}

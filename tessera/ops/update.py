"""Updates of some elements of a tensor: scatter_add."""

from __future__ import annotations

from typing import Any

import numpy as np

from tessera.errors import DTypeError, OutOfBoundsError, ShapeError
from tessera.op import ACCUMULATE, lower, op
from tessera.ops.basic import broadcast_to, cast, plain, splat
from tessera.ops.elementwise import equal, where
from tessera.ops.reduce import sum
from tessera.ops.shape import count, iota, permute, reshape
from tessera.shapes import normalize_axis
from tessera.shapes.rules import show
from tessera.types import TensorType


def _scatter_type(x: TensorType, indices: TensorType, updates: TensorType, *, axis: int) -> TensorType:
    if not indices.dtype.is_integer:
        raise DTypeError("indices are not integers", expected="an integer tensor", received=str(indices))
    if x.dtype != updates.dtype or x.dtype.kind == "bool":
        raise DTypeError(
            "updates are not added to this tensor", expected="numbers of one type", received=f"{x} and {updates}"
        )
    at = axis + x.rank
    wanted = (*x.shape[:at], *indices.shape, *x.shape[at + 1 :])
    if updates.shape != wanted:
        raise ShapeError(
            "the updates do not fit the places", expected=show(wanted), received=show(updates.shape),
            suggestion="the axes of the indices stand where `axis` stood",
        )  # fmt: skip
    return x


@op(
    infer=_scatter_type,
    coerce=plain,
    canonical=lambda x, indices, updates, *, axis: {"axis": normalize_axis(axis, x.rank)},
    numerics=ACCUMULATE,
)
def scatter_add(x: Any, indices: Any, updates: Any, *, axis: int = 0) -> Any:
    """`x` with `updates` added to its slices along `axis` that `indices` name; a place named twice gets both.

    Shapes: as for `gather`, whose transpose this is: the axes of `indices` stand in `updates` where `axis` stood.
    """
    size, at = x.shape[axis], axis + x.ndim
    if indices.size and not 0 <= indices.min() <= indices.max() < size:
        raise OutOfBoundsError(
            f"an index is outside axis {axis} of size {size}",
            expected=f"indices from 0 to {size - 1}",
            received=f"{indices.min()} to {indices.max()}",
        )
    out = np.moveaxis(x.copy(), at, 0)
    np.add.at(out, indices, np.moveaxis(updates, range(at, at + indices.ndim), range(indices.ndim)))
    return np.moveaxis(out, 0, at)


@lower(scatter_add)
def _(x, indices, updates, *, axis):
    # Each place sums the updates that name it. (A product with a one-hot matrix would spread an infinity.)
    at, many, size = axis + x.ndim, indices.ndim, x.shape[axis]
    before, after, places = x.shape[:at], x.shape[at + 1 :], count(indices.shape)
    order = (*range(at), *range(at + many, updates.ndim), *range(at, at + many))
    parts = reshape(permute(updates, axes=order), shape=(*before, *after, 1, places))
    shape = (*before, *after, size, places)
    named = equal(
        reshape(cast(indices, dtype=iota(shape=(1,)).dtype), shape=(1, places)), iota(shape=(size, 1), axis=0)
    )
    chosen = where(
        broadcast_to(named, shape=shape), broadcast_to(parts, shape=shape), splat(0, x.type.with_shape(shape))
    )
    added = cast(sum(chosen, axis=-1), dtype=x.dtype)
    back = (*range(at), added.ndim - 1, *range(at, added.ndim - 1))
    return x + permute(added, axes=back)

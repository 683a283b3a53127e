"""Choosing elements by index, mask or value: take, masked_fill, index_add, searchsorted, nonzero, unique."""

from __future__ import annotations

from typing import Any

import numpy as np

from tessera.errors import ArgumentError, ShapeError, here
from tessera.ops.arguments import typed
from tessera.ops.elementwise import less, less_equal, not_equal, where
from tessera.ops.reduce import sum
from tessera.ops.shape import expand_dims, gather
from tessera.ops.update import scatter_add
from tessera.shapes import normalize_axis
from tessera.tensor import Tensor, as_tensor


@typed
def take(x: Any, indices: Any, axis: int = 0) -> Tensor:
    """The slices of `x` along `axis` at `indices`, which may count from the end; their axes stand where it stood.

    >>> take([10, 20, 30], [-1, 0])
    Tensor([30, 10], int64)

    Raises:
        OutOfBoundsError: an index lies outside the axis.
        DTypeError: the indices are not integers.
    """
    x, at = as_tensor(x), as_tensor(indices)
    size = x.shape[normalize_axis(axis, x.ndim)]
    return gather(x, where(less(at, 0), at + size, at) if at.dtype.kind == "int" else at, axis=axis)


@typed
def index_add(x: Any, axis: int, indices: Any, source: Any, alpha: float = 1) -> Tensor:
    """`x` with alpha · `source` added to its slices along `axis` at `indices`; one named twice gets both.

    >>> index_add(Tensor([1.0, 1.0]), 0, Tensor([1, 1]), Tensor([2.0, 3.0]))
    Tensor([1., 6.], f32)
    """
    source = as_tensor(source)
    return scatter_add(as_tensor(x), as_tensor(indices), source if alpha == 1 else source * alpha, axis=axis)


@typed
def masked_fill(x: Any, mask: Any, value: Any) -> Tensor:
    """`x` with `value` where `mask` holds; both broadcast.

    >>> masked_fill([1.0, 2.0], [True, False], 0.0)
    Tensor([0., 2.], f32)
    """
    return where(mask, value, as_tensor(x))


@typed
def searchsorted(sorted_values: Any, values: Any, side: str = "left") -> Tensor:
    """For each of `values` the place (int64) in `sorted_values` [N] before which it keeps the order.

    Equal elements are after it with "left", before it with "right".

    >>> searchsorted([1, 3, 3, 5], [3, 0], side="right")
    Tensor([3, 0], int64)

    Raises:
        ShapeError: `sorted_values` is no vector.
        ArgumentError: `side` is neither "left" nor "right".
    """
    row, wanted = as_tensor(sorted_values), as_tensor(values)
    if row.ndim != 1:
        raise ShapeError("searchsorted takes a sorted vector", location=here(), received=str(row.type))
    if side not in ("left", "right"):
        raise ArgumentError(f"there is no side {side!r}", location=here(), expected='"left" or "right"')
    before = (less if side == "left" else less_equal)(row, expand_dims(wanted, -1))
    return sum(before, axis=-1)


@typed
def nonzero(x: Any) -> tuple[Tensor, ...]:
    """Where the elements that are not zero lie: one vector of places for each axis, in row-major order.

    Raises:
        TraceError: `x` is traced: how many there are depends on its values.

    >>> nonzero([[0, 5], [6, 0]])
    (Tensor([0, 1], int64), Tensor([1, 0], int64))
    """
    x = as_tensor(x)
    if not x.ndim:
        raise ShapeError("a scalar has no places", location=here(), received=str(x.type))
    return tuple(Tensor(places) for places in np.nonzero(not_equal(x, 0).numpy()))


@typed
def unique(x: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The distinct elements in order, which of them each element of `x` is, and how often each is there.

    Raises:
        TraceError: `x` is traced: how many there are depends on its values.

    >>> unique([3, 1, 3])
    (Tensor([1, 3], int64), Tensor([1, 0, 1], int64), Tensor([1, 2], int64))
    """
    x = as_tensor(x)
    array = x.numpy()
    wide = array if array.dtype.kind in "iufb" else array.astype(np.float64)
    _, first, which, counts = np.unique(wide.reshape(-1), return_index=True, return_inverse=True, return_counts=True)
    return gather(x.reshape(-1), Tensor(first), axis=0), Tensor(which.reshape(x.shape)), Tensor(counts)

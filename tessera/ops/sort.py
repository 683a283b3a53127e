"""Order along an axis: argsort, sort, topk."""

from __future__ import annotations

from typing import Any

import numpy as np

from tessera.errors import ArgumentError, here
from tessera.op import STORAGE, lower, op
from tessera.ops.arguments import typed
from tessera.ops.arrange import narrow, take_along_axis
from tessera.ops.basic import cast, plain
from tessera.ops.elementwise import equal, greater, less, not_equal, where
from tessera.ops.matrices import moveaxis
from tessera.ops.reduce import sum
from tessera.ops.shape import expand_dims, iota
from tessera.shapes import normalize_axis
from tessera.tensor import Tensor, as_tensor
from tessera.types import TensorType, int64


def _argsort_attrs(x: TensorType, *, axis: int, descending: bool) -> dict[str, Any]:
    return {"axis": normalize_axis(axis, x.rank), "descending": bool(descending)}


@op(infer=lambda x, *, axis, descending: x.with_dtype(int64), coerce=plain, canonical=_argsort_attrs, numerics=STORAGE)
def argsort(x, *, axis: int = -1, descending: bool = False):
    """The places (int64) along `axis` of the elements in order; equal ones keep theirs, NaN counts as the largest.

    >>> import tessera as ts
    >>> ts.argsort([30, 10, 20])
    Tensor([1, 2, 0], int64)
    """
    if not descending:
        return np.argsort(x, axis=axis, kind="stable")
    return x.shape[axis] - 1 - np.flip(np.argsort(np.flip(x, axis), axis=axis, kind="stable"), axis)


@lower(argsort)
def _(x, *, axis, descending):
    # The rank of an element is how many stand before it. n² comparisons, but only ops that every target has.
    rows = moveaxis(cast(x, dtype=int64) if x.dtype.kind == "bool" else x, axis, -1)
    mine, other = expand_dims(rows, -1), expand_dims(rows, -2)
    shape = (rows.shape[-1], rows.shape[-1])
    earlier = less(iota(shape=shape, axis=-1), iota(shape=shape, axis=-2))
    before = _before(other, mine, descending) | (_same(other, mine) & earlier)
    rank = sum(before, axis=-1)
    hit = equal(expand_dims(rank, -2), iota(shape=shape, axis=-2))
    return moveaxis(sum(where(hit, iota(shape=shape, axis=-1), 0), axis=-1), -1, axis)


def _before(a: Tensor, b: Tensor, descending: bool) -> Tensor:
    if not a.dtype.is_float:
        return greater(a, b) if descending else less(a, b)
    nan_a, nan_b = not_equal(a, a), not_equal(b, b)
    return (greater(a, b) | (nan_a & ~nan_b)) if descending else (less(a, b) | (nan_b & ~nan_a))


def _same(a: Tensor, b: Tensor) -> Tensor:
    same = equal(a, b)
    return same | (not_equal(a, a) & not_equal(b, b)) if a.dtype.is_float else same


@typed
def sort(x: Any, axis: int = -1, descending: bool = False) -> Tensor:
    """The elements in order along `axis`; equal ones keep theirs, NaN counts as the largest.

    >>> sort([3, 1, 2], descending=True)
    Tensor([3, 2, 1], int64)
    """
    x = as_tensor(x)
    return take_along_axis(x, argsort(x, axis=axis, descending=descending), axis)


@typed
def topk(x: Any, k: int, axis: int = -1, largest: bool = True) -> tuple[Tensor, Tensor]:
    """The `k` largest (or smallest) elements along `axis` in order, and their places (int64).

    >>> topk([1, 5, 3], 2)
    (Tensor([5, 3], int64), Tensor([1, 2], int64))

    Raises:
        ArgumentError: the axis does not have `k` elements.
    """
    x = as_tensor(x)
    size = x.shape[normalize_axis(axis, x.ndim)]
    if not 0 <= k <= size:
        raise ArgumentError(f"topk of {k} from {size} elements", location=here(), expected=f"k from 0 to {size}")
    places = narrow(argsort(x, axis=axis, descending=largest), axis, 0, k)
    return take_along_axis(x, places, axis), places

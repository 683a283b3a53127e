"""Sorting, searching and selecting: argsort, sort, topk, searchsorted, unique, nonzero, take, index_add,
masked_fill."""

from __future__ import annotations

from typing import Any

import numpy as np

from tessera.core.errors import ArgumentError, ShapeError, user_location
from tessera.core.shapes import normalize_axis
from tessera.core.types import TensorType, int32, int64
from tessera.ir.rules import STORAGE, lower, op
from tessera.ir.tensor import Tensor, as_tensor
from tessera.ops.tensor.argument_checks import check_arguments
from tessera.ops.tensor.basic import cast, coerce_plain, full
from tessera.ops.tensor.coercion import unify_dtypes
from tessera.ops.tensor.elementwise import equal, greater, greater_equal, less, less_equal, not_equal, where
from tessera.ops.tensor.matrices import moveaxis
from tessera.ops.tensor.rearrange import narrow, take_along_axis
from tessera.ops.tensor.reduce import sum
from tessera.ops.tensor.scatter import scatter_add
from tessera.ops.tensor.shape import expand_dims, gather, iota

MAX_COMPARED = 16  # searches in longer vectors are by halves

# Choosing elements by index, mask or value: take, masked_fill, index_add, searchsorted, nonzero, unique.


@check_arguments
def take(x: Any, indices: Any, axis: int = 0) -> Tensor:
    """The slices of `x` along `axis` at `indices`, which may be negative; the axes of the indices replace `axis`.

    >>> take([10, 20, 30], [-1, 0])
    Tensor([30, 10], int64)

    Raises:
        OutOfBoundsError: an index is outside the axis.
        DTypeError: the indices are not integers.
    """
    return gather(x, indices, axis=axis)


@check_arguments
def index_add(x: Any, axis: int, indices: Any, source: Any, alpha: float = 1) -> Tensor:
    """`x` with alpha · `source` added to its slices along `axis` at `indices`; one named twice gets both.

    A negative index counts from the end; an index outside the axis raises OutOfBoundsError.

    >>> index_add(Tensor([1.0, 1.0]), 0, Tensor([1, 1]), Tensor([2.0, 3.0]))
    Tensor([1., 6.], f32)
    """
    source = as_tensor(source)
    return scatter_add(as_tensor(x), as_tensor(indices), source if alpha == 1 else source * alpha, axis=axis)


@check_arguments
def masked_fill(x: Any, mask: Any, value: Any) -> Tensor:
    """`x` with `value` where `mask` holds; both broadcast.

    >>> masked_fill([1.0, 2.0], [True, False], 0.0)
    Tensor([0., 2.], f32)
    """
    return where(mask, value, as_tensor(x))


@check_arguments
def searchsorted(sorted_values: Any, values: Any, side: str = "left") -> Tensor:
    """For each of `values` the index (int64) in `sorted_values` [N] at which insertion keeps the order.

    With "left" the index is that of the first equal element, with "right" it follows the last. NaN counts as the
    largest. Rows [..., N] are searched for `values` [..., M] of their own.

    >>> searchsorted([1, 3, 3, 5], [3, 0], side="right")
    Tensor([3, 0], int64)

    Raises:
        ShapeError: `sorted_values` is a number, or has other leading axes than `values`.
        ArgumentError: `side` is neither "left" nor "right".
    """
    row, wanted = as_tensor(sorted_values), as_tensor(values)
    if row.ndim != 1 and (row.ndim == 0 or row.shape[:-1] != wanted.shape[:-1]):
        raise ShapeError(
            "searchsorted takes a sorted vector, or rows and their values", location=user_location(),
            expected="[N], or [..., N] and [..., M]", received=f"{row.type} and {wanted.type}",
        )  # fmt: skip
    if side not in ("left", "right"):
        raise ArgumentError(f"there is no side {side!r}", location=user_location(), expected='"left" or "right"')
    row, wanted = unify_dtypes([row, wanted])
    size = row.shape[-1]
    if isinstance(size, int) and size > MAX_COMPARED:
        return _search_by_halves(row, wanted, size, side)
    row = row if row.ndim == 1 else expand_dims(row, -2)
    return sum(_is_before(row, expand_dims(wanted, -1), side), axis=-1)


def _is_before(x: Tensor, wanted: Tensor, side: str) -> Tensor:
    """Whether elements of a sorted vector come before the place of insertion."""
    if not x.dtype.is_float:
        return less(x, wanted) if side == "left" else less_equal(x, wanted)
    if side == "left":  # NaN after all numbers
        return ~greater_equal(x, wanted) & equal(x, x)
    return less_equal(x, wanted) | not_equal(wanted, wanted)


def _search_by_halves(row: Tensor, wanted: Tensor, size: int, side: str) -> Tensor:
    """Binary search without branches: the number of elements before the place, which no step reads beyond the row."""
    count = full(shape=wanted.shape, value=0, dtype=int32 if size < 1 << 31 else int64)
    for step in list_search_steps(size):
        place = count + (step - 1)
        last = gather(row, place, axis=0) if row.ndim == 1 else take_along_axis(row, place, axis=-1)
        count = where(_is_before(last, wanted, side), count + step, count)
    return cast(count, dtype=int64)


def list_search_steps(size: int) -> list[int]:
    """How far a binary search of a row goes on in each step: at most about half of what is left.

    Powers of two would read places whose distances are powers of two too: those share few banks of a memory and sets
    of a cache, so that a vector of searches reads one after the other. So the first step leaves a number without such a
    pattern, in as many steps as there must be, or one more where only a row of 2**n - 1 would do.
    """
    most = (1 << (size.bit_length() - 1)) - 1  # what the steps after the first can search
    if most - size // 2 < size // 64:
        most = 2 * most + 1
    left = size // 2 + min(size // 11, (most - size // 2) // 3)
    steps = [size - left]
    while left:
        steps.append((left + 1) // 2)
        left //= 2
    return steps


@check_arguments
def nonzero(x: Any) -> tuple[Tensor, ...]:
    """The indices of the elements that are not zero: one vector for each axis, in row-major order.

    Raises:
        TraceError: `x` is traced: the size of the result depends on its values.

    >>> nonzero([[0, 5], [6, 0]])
    (Tensor([0, 1], int64), Tensor([1, 0], int64))
    """
    x = as_tensor(x)
    if not x.ndim:
        raise ShapeError("a scalar has no axes to index", location=user_location(), received=str(x.type))
    return find_true_places(not_equal(x, 0))


def find_true_places(mask: Tensor) -> tuple[Tensor, ...]:
    """The indices of the true elements: one vector for each axis, in row-major order.

    Raises:
        TraceError: `mask` is traced: the size of the result depends on its values.
    """
    mask.refuse_traced(
        "how many elements are chosen is known when the program runs: ts.where(mask, x, other) keeps the shape, "
        "x.at[mask].set(value) changes the chosen ones"
    )
    return tuple(Tensor(places) for places in np.nonzero(mask.numpy()))


@check_arguments
def unique(x: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The distinct elements in order, which of them each element of `x` is, and how often each is there.

    Raises:
        TraceError: `x` is traced: the size of the result depends on its values.

    >>> unique([3, 1, 3])
    (Tensor([1, 3], int64), Tensor([1, 0, 1], int64), Tensor([1, 2], int64))
    """
    x = as_tensor(x)
    array = x.numpy()
    wide = array if array.dtype.kind in "iufb" else array.astype(np.float64)
    _, first, which, counts = np.unique(wide.reshape(-1), return_index=True, return_inverse=True, return_counts=True)
    return gather(x.reshape(-1), Tensor(first), axis=0), Tensor(which.reshape(x.shape)), Tensor(counts)


# Order along an axis: argsort, sort, topk.


def _canonicalise_argsort(x: TensorType, *, axis: int, descending: bool) -> dict[str, Any]:
    return {"axis": normalize_axis(axis, x.rank), "descending": bool(descending)}


@op(
    infer=lambda x, *, axis, descending: x.with_dtype(int64),
    coerce=coerce_plain,
    canonical=_canonicalise_argsort,
    numerics=STORAGE,
)
def argsort(x, *, axis: int = -1, descending: bool = False):
    """The indices (int64) that sort the elements along `axis`, stably; NaN counts as the largest.

    >>> import tessera as ts
    >>> ts.argsort([30, 10, 20])
    Tensor([1, 2, 0], int64)
    """
    if x.dtype.isbuiltin != 1:  # NumPy does not order the NaNs of small floats
        x = x.astype(np.float32)
    if not descending:
        return np.argsort(x, axis=axis, kind="stable")
    return x.shape[axis] - 1 - np.flip(np.argsort(np.flip(x, axis), axis=axis, kind="stable"), axis)


@lower(argsort)
def _(x, *, axis, descending):
    # The rank of an element is the number of elements before it: n² comparisons, with ops that every target has.
    rows = moveaxis(cast(x, dtype=int64) if x.dtype.kind == "bool" else x, axis, -1)
    mine, other = expand_dims(rows, -1), expand_dims(rows, -2)
    shape = (rows.shape[-1], rows.shape[-1])
    earlier = less(iota(shape=shape, axis=-1), iota(shape=shape, axis=-2))
    before = _precedes(other, mine, descending) | (_ties(other, mine) & earlier)
    rank = sum(before, axis=-1)
    hit = equal(expand_dims(rank, -2), iota(shape=shape, axis=-2))
    return moveaxis(sum(where(hit, iota(shape=shape, axis=-1), 0), axis=-1), -1, axis)


def _precedes(a: Tensor, b: Tensor, descending: bool) -> Tensor:
    if not a.dtype.is_float:
        return greater(a, b) if descending else less(a, b)
    nan_a, nan_b = not_equal(a, a), not_equal(b, b)
    return (greater(a, b) | (nan_a & ~nan_b)) if descending else (less(a, b) | (nan_b & ~nan_a))


def _ties(a: Tensor, b: Tensor) -> Tensor:
    same = equal(a, b)
    return same | (not_equal(a, a) & not_equal(b, b)) if a.dtype.is_float else same


@check_arguments
def sort(x: Any, axis: int = -1, descending: bool = False) -> Tensor:
    """The elements sorted along `axis`, stably; NaN counts as the largest.

    >>> sort([3, 1, 2], descending=True)
    Tensor([3, 2, 1], int64)
    """
    x = as_tensor(x)
    return take_along_axis(x, argsort(x, axis=axis, descending=descending), axis)


@check_arguments
def topk(x: Any, k: int, axis: int = -1, largest: bool = True) -> tuple[Tensor, Tensor]:
    """The `k` largest (or smallest) elements along `axis` in order, and their indices (int64).

    >>> topk([1, 5, 3], 2)
    (Tensor([5, 3], int64), Tensor([1, 2], int64))

    Raises:
        ArgumentError: the axis does not have `k` elements.
    """
    x = as_tensor(x)
    size = x.shape[normalize_axis(axis, x.ndim)]
    if not 0 <= k <= size:
        raise ArgumentError(
            f"topk of {k} from {size} elements", location=user_location(), expected=f"k from 0 to {size}"
        )
    places = narrow(argsort(x, axis=axis, descending=largest), axis, 0, k)
    return take_along_axis(x, places, axis), places

"""Scatter ops: scatter, scatter_add and update_slice, with their rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tessera.core.errors import ArgumentError, DTypeError, ShapeError
from tessera.core.shapes import format_shape, normalize_axis
from tessera.core.symbolic_dim import Size, proves_less
from tessera.core.types import TensorType, bool_, int64
from tessera.ir.numerics import error_rules
from tessera.ir.rules import ACCUMULATE, batch, error, jvp, lower, op, transpose
from tessera.ir.tensor import Tensor
from tessera.ops.tensor.basic import (
    broadcast_to,
    cast,
    coerce_plain,
    full,
    instantiate_zero,
    is_undefined_primal,
    splat,
)
from tessera.ops.tensor.elementwise import equal, greater_equal, maximum, minimum, where
from tessera.ops.tensor.reduce import max, min, prod, sum
from tessera.ops.tensor.shape import (
    axes_first,
    axes_from_front,
    check_index,
    count_elements,
    expand_dims,
    gather,
    iota,
    merge_lanes,
    normalise_indices,
    offset_lane_indices,
    pad,
    permute,
    reshape,
)


def _infer_scatter_add(x: TensorType, indices: TensorType, updates: TensorType, *, axis: int) -> TensorType:
    if x.dtype.kind == "bool":
        raise DTypeError("scatter_add is not defined for bools", expected="numbers", received=f"{x} and {updates}")
    return _infer_scatter(x, indices, updates, axis=axis)


def _infer_scatter(
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
            "the updates do not fit the indices", expected=format_shape(wanted), received=format_shape(updates.shape),
            suggestion="the axes of the indices in place of `axis`",
        )  # fmt: skip
    return x


@op(
    infer=_infer_scatter_add,
    coerce=coerce_plain,
    canonical=lambda x, indices, updates, *, axis: {"axis": normalize_axis(axis, x.rank)},
    numerics=ACCUMULATE,
)
def scatter_add(x: Any, indices: Any, updates: Any, *, axis: int = 0) -> Any:
    """`x` with `updates` added to its slices at `indices` along `axis`; equal indices add repeatedly.

    Shapes: as for `gather`, whose transpose this is: in `updates` the axes of `indices` replace `axis`. A negative
    index counts from the end; an index outside the axis raises OutOfBoundsError.
    """
    return _scatter_reference(np.add.at, x, indices, updates, axis)


def _scatter_reference(change: Callable[..., Any], x: Any, indices: Any, updates: Any, axis: int) -> Any:
    """A copy of `x` after `change(slices along axis, indices, updates)`."""
    at = axis + x.ndim
    out = np.moveaxis(x.copy(), at, 0)
    change(
        out,
        normalise_indices(indices, x.shape[axis], at),
        np.moveaxis(updates, range(at, at + indices.ndim), range(indices.ndim)),
    )
    return np.moveaxis(out, 0, at)


error(scatter_add)(error_rules.bound_scatter_add)


@lower(scatter_add)
def _(x, indices, updates, *, axis):
    # Each slice sums its updates. (A product with a one-hot matrix would turn an infinity into NaNs elsewhere.)
    parts, named = _align_updates(x, indices, updates, axis)
    chosen = where(named, parts, splat(0, x.type.with_shape(named.shape)))
    total = _restore_axis(cast(sum(chosen, axis=-1), dtype=x.dtype), axis)
    # What has no update stays as it is, -0 too.
    return where(equal(total, 0), x, x + total) if x.dtype.is_float else x + total


def _align_updates(x: Tensor, indices: Tensor, updates: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """The updates, and the mask of those for each slice, both [..., size, updates]; `axis` is the last but one."""
    at, many, size = axis + x.ndim, indices.ndim, x.shape[axis]
    rest, places = (*x.shape[:at], *x.shape[at + 1 :]), count_elements(indices.shape)
    order = (*range(at), *range(at + many, updates.ndim), *range(at, at + many))
    parts = reshape(permute(updates, axes=order), shape=(*rest, 1, places))
    shape = (*rest, size, places)
    checked = check_index(indices, size=size, along=at)
    named = equal(reshape(checked, shape=(1, places)), iota(shape=(size, 1), axis=0))
    return broadcast_to(parts, shape=shape), broadcast_to(named, shape=shape)


def _restore_axis(x: Tensor, axis: int) -> Tensor:
    """The last axis moved to where `axis` was."""
    at = axis + x.ndim
    return permute(x, axes=(*range(at), x.ndim - 1, *range(at, x.ndim - 1)))


def _set_elements(out: Any, indices: Any, new: Any) -> None:
    out[indices] = new


def _multiply_elements(out: Any, indices: Any, new: Any) -> None:
    factors = np.ones_like(out)
    np.multiply.at(factors, indices, new)
    out *= factors  # the updates come first, as in the lowering: another order may leave its error bound


def _combine_extremes(ufunc: np.ufunc) -> Callable[..., None]:
    """`ufunc.at` for np.maximum or np.minimum, with -0 less than +0; NumPy keeps either of two zeros."""

    def combine(out: Any, indices: Any, new: Any) -> None:
        if out.dtype.kind in "iub":
            ufunc.at(out, indices, new)
            return
        wins = [(v == 0) & (np.signbit(v) == (ufunc is np.minimum)) for v in (out, new)]
        ufunc.at(out, indices, new)
        np.logical_or.at(wins[0], indices, wins[1])
        winner, loser = (-0.0, 0.0) if ufunc is np.minimum else (0.0, -0.0)
        out[...] = np.where(out == 0, np.where(wins[0], winner, loser).astype(out.dtype), out)

    return combine


SCATTER_MODES: dict[str, Callable[..., Any]] = {
    "set": _set_elements,
    "multiply": _multiply_elements,
    "min": _combine_extremes(np.minimum),
    "max": _combine_extremes(np.maximum),
}


def _canonicalise_scatter(
    x: TensorType, indices: TensorType, updates: TensorType, *, axis: int, mode: str
) -> dict[str, Any]:
    if mode not in SCATTER_MODES:
        raise ArgumentError(f"unknown scatter mode {mode!r}", expected=", ".join(SCATTER_MODES))
    return {"axis": normalize_axis(axis, x.rank), "mode": mode}


@op(infer=_infer_scatter, coerce=coerce_plain, canonical=_canonicalise_scatter)
def scatter(x: Any, indices: Any, updates: Any, *, axis: int = 0, mode: str = "set") -> Any:
    """`x` with its slices at `indices` along `axis` replaced by `updates`, or combined by "multiply", "min" or "max".

    Shapes and indices: as for `scatter_add`. For equal indices the last update wins; the other modes combine all.

    >>> import tessera as ts
    >>> ts.scatter(ts.Tensor([1.0, 2.0, 3.0]), ts.Tensor([2, 0]), ts.Tensor([9.0, 8.0]))
    Tensor([8., 2., 9.], f32)
    """
    return _scatter_reference(SCATTER_MODES[mode], x, indices, updates, axis)


@lower(scatter)
def _(x, indices, updates, *, axis, mode):
    if 0 in (*indices.shape, *updates.shape):
        return x
    if mode == "set":
        return _replace_slices(x, indices, updates, axis)
    parts, named = _align_updates(x, indices, updates, axis)
    if mode == "multiply":
        return x * _restore_axis(cast(prod(where(named, parts, splat(1, parts.type)), axis=-1), dtype=x.dtype), axis)
    here = expand_dims(_move_axis_last(x, axis), -1)
    least = SCATTER_JOINS[mode]
    return least(where(named, parts, broadcast_to(here, shape=named.shape)), x, axis)


def _replace_slices(x: Tensor, indices: Tensor, updates: Tensor, axis: int) -> Tensor:
    """Each slice of `x`, or the last update for it."""
    at, places = axis + x.ndim, count_elements(indices.shape)
    listed = reshape(updates, shape=(*x.shape[:at], places, *x.shape[at + 1 :]))
    return pick_updates(x, _find_last(indices, x.shape[axis], at), listed, axis)


def _find_last(indices: Tensor, size: Size, along: int) -> Tensor:
    """For each place of an axis the number of the last index that names it, or -1."""
    places = count_elements(indices.shape)
    checked = reshape(check_index(indices, size=size, along=along), shape=(places,))
    none = broadcast_to(full(shape=(), value=-1, dtype=int64), shape=(size,))
    return scatter(none, checked, iota(shape=(places,), axis=0), axis=0, mode="max")


def pick_updates(x: Tensor, chosen: Tensor, updates: Tensor, axis: int) -> Tensor:
    """Each slice of `x` along `axis`, or the update with its number in `chosen`, where that is not negative.

    It is a copy of the update's bits: a sum would lose the sign of -0.
    """
    found = gather(updates, maximum(chosen, 0), axis=axis)
    is_named = reshape(greater_equal(chosen, 0), shape=(x.shape[axis], *(1,) * (-axis - 1)))
    return where(broadcast_to(is_named, shape=x.shape), found, x)


def _move_axis_last(x: Tensor, axis: int) -> Tensor:
    """`axis` moved to be the last one."""
    at = axis + x.ndim
    return permute(x, axes=(*range(at), *range(at + 1, x.ndim), at))


SCATTER_JOINS: dict[str, Callable[..., Any]] = {
    "min": lambda candidates, x, axis: minimum(x, _restore_axis(min(candidates, axis=-1), axis)),
    "max": lambda candidates, x, axis: maximum(x, _restore_axis(max(candidates, axis=-1), axis)),
}


# Derivatives of `scatter`.


@jvp(scatter)
def _(out, primals, tangents, *, axis, mode):
    if mode not in SCATTER_JOINS:
        return NotImplemented  # the derivative of the lowering
    x, indices, updates = primals
    dx, du = (instantiate_zero(tangents[i], primals[i].type) for i in (0, 2))
    # Equal extrema share the gradient evenly (design 4).
    kept, reached = (
        cast(equal(v, w), dtype=x.dtype) for v, w in ((x, out), (updates, gather(out, indices, axis=axis)))
    )
    share = scatter_add(kept * dx, indices, reached * du, axis=axis)
    return share / scatter_add(kept, indices, reached, axis=axis)


# Derivatives and batching of `scatter_add`.


@jvp(scatter_add)
def _(out, primals, tangents, *, axis):
    x, indices, updates = primals
    return scatter_add(
        instantiate_zero(tangents[0], x.type), indices, instantiate_zero(tangents[2], updates.type), axis=axis
    )


@transpose(scatter_add)
def _(g, x, indices, updates, *, axis):
    return (
        (g if is_undefined_primal(x) else None),
        None,
        (gather(g, indices, axis=axis) if is_undefined_primal(updates) else None),
    )


@batch(scatter_add)
def _(lanes, *, axis):
    x, indices, updates = lanes.spread()
    if not lanes.batched[1]:
        return scatter_add(x, lanes.tensors[1], updates, axis=axis)
    at = axis + x.ndim
    front = axes_first(updates, 0, *range(at, at + indices.ndim - 1))
    out = scatter_add(merge_lanes(x, at), offset_lane_indices(indices, x.shape[at], at - 1), front, axis=0)
    split = reshape(out, shape=(lanes.size, x.shape[at], *out.shape[1:]))
    return axes_from_front(split, at, 2)


# A slice of a tensor replaced as a whole.


def _infer_update_slice(x: TensorType, new: TensorType, *, start: tuple) -> TensorType:
    if (x.dtype, x.policy) != (new.dtype, new.policy):
        raise DTypeError("the new elements have another type", expected=str(x.dtype), received=f"{x} and {new}")
    if not x.rank == new.rank == len(start):
        raise ShapeError(f"a slice of {x} needs {x.rank} axes and as many starts", received=f"{new} at {start}")
    for axis, (low, part, size) in enumerate(zip(start, new.shape, x.shape, strict=True)):
        if proves_less(low, 0) or proves_less(size, low + part):
            raise ShapeError(f"slice {low}:{low + part} is outside axis {axis} of {x}")
    return x


@op(infer=_infer_update_slice, coerce=coerce_plain, canonical=lambda x, new, *, start: {"start": tuple(start)})
def update_slice(x: Any, new: Any, *, start: tuple) -> Any:
    """`x` with the elements from `start` on replaced by those of `new` (XLA's dynamic-update-slice at fixed places).

    Where the result is one of a program's, and `x` one of its arguments, a kernel computes the slice alone: if `x` is
    donated, no other element is touched.

    >>> import tessera as ts
    >>> ts.update_slice(ts.zeros((2, 3)), ts.ones((1, 2)), start=(1, 0))
    Tensor([[0., 0., 0.],
            [1., 1., 0.]], f32)
    """
    out = x.copy()
    out[tuple(slice(low, low + n) for low, n in zip(start, new.shape, strict=True))] = new
    return out


@lower(update_slice)
def _(x, new, *, start):
    rest = tuple(n - low - part for n, low, part in zip(x.shape, start, new.shape, strict=True))
    inside = broadcast_to(full(shape=(), value=True, dtype=bool_), shape=new.shape)
    place = pad(new, low=start, high=rest, value=0)
    return where(pad(inside, low=start, high=rest, value=False), place, x)

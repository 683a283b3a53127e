"""Ops that move elements and compute nothing: reshape, permute, slice, pad, concatenate, gather, iota."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tessera.errors import ArgumentError, DTypeError, OutOfBoundsError, ShapeError, here
from tessera.numerics import bounds
from tessera.op import STORAGE, Op, error, op
from tessera.ops.arguments import shape_of, typed
from tessera.ops.basic import plain
from tessera.ops.coerce import same_dtype
from tessera.shapes import Size, as_size, normalize_axes, normalize_axis
from tessera.shapes.rules import show
from tessera.tensor import Tensor, as_tensor, bind
from tessera.types import DType, TensorType, as_dtype, int64


def count(shape: Sequence[Size]) -> Size:
    """The number of elements of a shape."""
    return math.prod(shape)  # type: ignore[type-var]


def _reshape_attrs(x: TensorType, *, shape: Any) -> dict[str, Any]:
    listed = list(shape_of(shape, as_size, least=-1))
    holes = [i for i, s in enumerate(listed) if s == -1]
    if len(holes) > 1:
        raise ShapeError("reshape can infer only one size", received=show(listed))
    if holes:
        rest = count([s for s in listed if s != -1])
        if rest == 0 or (isinstance(rest, int) and isinstance(count(x.shape), int) and count(x.shape) % rest):
            raise ShapeError(f"cannot reshape {show(x.shape)} to {show(listed)}")
        listed[holes[0]] = count(x.shape) // rest
    return {"shape": tuple(listed)}


def _reshape_type(x: TensorType, *, shape: tuple[Size, ...]) -> TensorType:
    if count(x.shape) != count(shape):
        raise ShapeError(
            f"cannot reshape {show(x.shape)} to {show(shape)}",
            expected=f"{count(x.shape)} elements",
            received=f"{count(shape)} elements",
        )
    return x.with_shape(shape)


@op(infer=_reshape_type, coerce=plain, canonical=_reshape_attrs, numerics=STORAGE)
def reshape(x, *, shape: Any):
    """The same elements in row-major order with another shape; one size may be -1."""
    return np.reshape(x, shape)


error(reshape)(bounds.structural)


def _permute_attrs(x: TensorType, *, axes: Any) -> dict[str, Any]:
    listed = tuple(normalize_axis(a, x.rank) + x.rank for a in axes)
    if sorted(listed) != list(range(x.rank)):
        raise ShapeError(f"{tuple(axes)} is not a permutation of the {x.rank} axes of {x}")
    return {"axes": listed}


@op(
    infer=lambda x, *, axes: x.with_shape(tuple(x.shape[a] for a in axes)),
    coerce=plain,
    canonical=_permute_attrs,
    numerics=STORAGE,
)
def permute(x, *, axes: Any):
    """`x` with its axes in another order: axis i of the result is axis `axes[i]` of `x`."""
    return np.transpose(x, axes)


error(permute)(bounds.structural)


def _slice_attrs(x: TensorType, *, start: Any, stop: Any, step: Any) -> dict[str, Any]:
    return {"start": tuple(start), "stop": tuple(stop), "step": tuple(step) if step else (1,) * x.rank}


def _slice_type(x: TensorType, *, start: tuple, stop: tuple, step: tuple) -> TensorType:
    if not len(start) == len(stop) == len(step) == x.rank:
        raise ShapeError(f"slice needs a start, stop and step for each of {x.rank} axes")
    for axis, (low, high, by, size) in enumerate(zip(start, stop, step, x.shape, strict=True)):
        inside = not isinstance(size, int) or (isinstance(high, int) and 0 <= low <= high <= size)
        if by < 1 or not inside:
            raise ShapeError(f"slice {low}:{high}:{by} does not lie in axis {axis} of {x}")
    return x.with_shape(tuple((hi - lo + by - 1) // by for lo, hi, by in zip(start, stop, step, strict=True)))


@op(infer=_slice_type, coerce=plain, canonical=_slice_attrs, numerics=STORAGE, name="slice")
def slice_(x, *, start: tuple, stop: tuple, step: tuple = ()):
    """The elements from `start` to before `stop` by `step` along each axis."""
    return x[tuple(slice(a, b, c) for a, b, c in zip(start, stop, step, strict=True))]


error(slice_)(bounds.structural)


def _pad_attrs(x: TensorType, *, low: Any, high: Any, value: Any) -> dict[str, Any]:
    number = float(value) if x.dtype.is_float else np.asarray(value).astype(x.dtype.numpy).item()
    return {"low": tuple(low), "high": tuple(high), "value": number}


def _pad_type(x: TensorType, *, low: tuple, high: tuple, value: Any) -> TensorType:
    if len(low) != x.rank or len(high) != x.rank or any(n < 0 for n in (*low, *high)):
        raise ShapeError(f"pad needs a count ≥ 0 before and after each of {x.rank} axes")
    return x.with_shape(tuple(a + s + b for a, s, b in zip(low, x.shape, high, strict=True)))


@op(infer=_pad_type, coerce=plain, canonical=_pad_attrs, numerics=STORAGE)
def pad(x, *, low: tuple, high: tuple, value: Any = 0):
    """`x` with `low` elements before and `high` after it along each axis, all of them `value`."""
    widths = list(zip(low, high, strict=True))
    return np.pad(x, widths, constant_values=np.asarray(value).astype(x.dtype))


error(pad)(bounds.padded)


def _variadic(op: Op, operands: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
    listed = operands[0] if operands and isinstance(operands[0], (list, tuple)) else operands
    if not listed:
        raise ArgumentError(f"{op.__name__} needs at least one tensor", location=here(), received="none")
    tensors = [as_tensor(x) for x in listed]
    first = tensors[0].dtype
    return bind(op, tensors if all(t.dtype is first for t in tensors) else same_dtype(tensors), attrs)


def _concatenate_type(*types: TensorType, axis: int) -> TensorType:
    first = types[0]
    for other in types[1:]:
        pairs = enumerate(zip(first.shape, other.shape, strict=False), start=-first.rank)
        same = [a == b or i == axis for i, (a, b) in pairs]
        if other.rank != first.rank or not all(same):
            raise ShapeError(
                f"cannot concatenate along axis {axis}",
                expected=f"shapes equal but for axis {axis}",
                received=" and ".join(str(t) for t in types),
            )
    total: Size = 0
    for each in types:
        total = total + each.shape[axis]
    shape = list(first.shape)
    shape[axis] = total
    return first.with_shape(tuple(shape))


@op(
    infer=_concatenate_type,
    coerce=_variadic,
    canonical=lambda *types, axis: {"axis": normalize_axis(axis, types[0].rank)},
    numerics=STORAGE,
)
def concatenate(*tensors, axis: int = 0):
    """Tensors one after the other along `axis`."""
    return np.concatenate(tensors, axis=axis)


error(concatenate)(bounds.structural)


def _gather_type(x: TensorType, indices: TensorType, *, axis: int) -> TensorType:
    if not indices.dtype.is_integer:
        raise DTypeError("indices are not integers", expected="an integer tensor", received=str(indices))
    at = axis + x.rank
    return x.with_shape((*x.shape[:at], *indices.shape, *x.shape[at + 1 :]))


@op(
    infer=_gather_type,
    coerce=plain,
    canonical=lambda x, indices, *, axis: {"axis": normalize_axis(axis, x.rank)},
    numerics=STORAGE,
)
def gather(x, indices, *, axis: int = 0):
    """The slices of `x` along `axis` that `indices` name; the index axes stand where `axis` stood."""
    size = x.shape[axis]
    low, high = (indices.min(), indices.max()) if indices.size else (0, -1)
    if low < 0 or high >= size:
        raise OutOfBoundsError(
            f"index {low if low < 0 else high} is outside axis {axis} of size {size}",
            expected=f"indices from 0 to {size - 1}",
        )
    return np.take(x, indices, axis=axis)


error(gather)(bounds.gathered)


def _iota_attrs(*, shape: Any, axis: int, dtype: Any) -> dict[str, Any]:
    sizes = shape_of(shape, as_size)
    return {"shape": sizes, "axis": normalize_axis(axis, len(sizes)), "dtype": as_dtype(dtype)}


@op(
    infer=lambda *, shape, axis, dtype: TensorType(tuple(shape), dtype),
    coerce=plain,
    canonical=_iota_attrs,
    numerics=STORAGE,
)
def iota(*, shape: Any, axis: int = -1, dtype: DType = int64):
    """0, 1, 2, … along `axis`, the same along the others."""
    along = [1] * len(shape)
    along[axis] = shape[axis]
    return np.broadcast_to(np.arange(shape[axis]).reshape(along).astype(dtype.numpy), shape)


error(iota)(bounds.constant)


@typed
def transpose(x: Any, dim0: int = -2, dim1: int = -1) -> Tensor:
    """`x` with two axes exchanged."""
    x = as_tensor(x)
    axes = list(range(x.ndim))
    a, b = normalize_axis(dim0, x.ndim), normalize_axis(dim1, x.ndim)
    axes[a], axes[b] = axes[b], axes[a]
    return permute(x, axes=tuple(axes))


@typed
def expand_dims(x: Any, axis: int) -> Tensor:
    """`x` with a new axis of size 1, which is `axis` of the result."""
    x = as_tensor(x)
    at = normalize_axis(axis, x.ndim + 1) + x.ndim + 1
    return reshape(x, shape=(*x.shape[:at], 1, *x.shape[at:]))


@typed
def squeeze(x: Any, axis: int | Sequence[int] | None = None) -> Tensor:
    """`x` without `axis`, one or several, each of size 1; without all axes of size 1 where it is None.

    >>> squeeze([[[1.0], [2.0]]])
    Tensor([1., 2.], f32)

    Raises:
        ShapeError: an axis has another size.
    """
    x = as_tensor(x)
    ones = [i for i, n in enumerate(x.shape) if n == 1]
    gone = ones if axis is None else [a + x.ndim for a in normalize_axes(axis, x.ndim)]
    for at in gone:
        if x.shape[at] != 1:
            raise ShapeError(f"axis {at} has size {x.shape[at]}, not 1", received=str(x.type))
    return reshape(x, shape=tuple(n for i, n in enumerate(x.shape) if i not in gone))


@typed
def flatten(x: Any, start_dim: int = 0, end_dim: int = -1) -> Tensor:
    """`x` with the axes from `start_dim` to `end_dim` made one; a scalar gets one of size 1."""
    x = as_tensor(x)
    if not x.ndim:
        return reshape(x, shape=(1,))
    first, last = (normalize_axis(d, x.ndim) + x.ndim for d in (start_dim, end_dim))
    return reshape(x, shape=(*x.shape[:first], count(x.shape[first : last + 1]), *x.shape[last + 1 :]))


@typed
def stack(tensors: Sequence[Any], axis: int = 0) -> Tensor:
    """Tensors of one shape along a new axis."""
    if not isinstance(tensors, (list, tuple)):
        raise ArgumentError("stack takes a list of tensors", location=here(), received=type(tensors).__name__)
    return concatenate([expand_dims(t, axis) for t in tensors], axis=axis)


def arange(start: int, end: int | None = None, step: int = 1, dtype: DType = int64) -> Tensor:
    """`start`, `start + step`, … before `end`; with one argument, from 0."""
    low, high = (0, start) if end is None else (start, end)
    index = iota(shape=(max(0, -(-(high - low) // step)),), dtype=dtype)
    return index if (low, step) == (0, 1) else index * step + low


@typed
def embedding(weight: Any, indices: Any) -> Tensor:
    """The rows of `weight` [V, D] that `indices` name."""
    return gather(weight, indices, axis=0)

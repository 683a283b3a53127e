"""Data movement ops: reshape, permute, slice, pad, concatenate, gather, iota and mesh_shift, with derivatives and
batching."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tessera.core.errors import ArgumentError, DTypeError, OutOfBoundsError, ShapeError, user_location
from tessera.core.shapes import as_size, format_shape, normalize_axes, normalize_axis
from tessera.core.size_guards import assume_divisible, assume_unequal, list_floor_divisions, suggest_divisor
from tessera.core.symbolic_dim import Size, find_size_bounds, proves_less
from tessera.core.types import DType, TensorType, as_dtype, int64
from tessera.ir.analysis import AffineForm, affine_rules, interval_rules, move_ramps
from tessera.ir.numerics import error_rules
from tessera.ir.rules import INTEGERS, STORAGE, AxisFactors, Op, batch, error, jvp, lower, op, sharding
from tessera.ir.rules import transpose as transpose_rule
from tessera.ir.tensor import Tensor, as_tensor, bind_op
from tessera.ops.tensor.argument_checks import check_arguments
from tessera.ops.tensor.basic import (
    broadcast_to,
    coerce_plain,
    is_undefined_primal,
    linear_jvp,
    parse_shape,
    round_number,
    splat,
    zero_jvp,
)
from tessera.ops.tensor.coercion import unify_parts


def count_elements(shape: Sequence[Size]) -> Size:
    """The number of elements of a shape."""
    return math.prod(shape)  # type: ignore[type-var]


def _canonicalise_reshape(x: TensorType, *, shape: Any) -> dict[str, Any]:
    listed = list(parse_shape(shape, as_size, least=-1))
    holes = [i for i, s in enumerate(listed) if s == -1]
    if len(holes) > 1:
        raise ShapeError("reshape can infer only one size", received=format_shape(listed))
    if holes:
        rest = count_elements([s for s in listed if s != -1])
        if rest == 0 or (
            isinstance(rest, int) and isinstance(count_elements(x.shape), int) and count_elements(x.shape) % rest
        ):
            raise ShapeError(f"cannot reshape {format_shape(x.shape)} to {format_shape(listed)}")
        assume_divisible(count_elements(x.shape), rest)
        listed[holes[0]] = count_elements(x.shape) // rest
    return {"shape": tuple(listed)}


def _infer_reshape(x: TensorType, *, shape: tuple[Size, ...]) -> TensorType:
    if count_elements(x.shape) != count_elements(shape):
        raise ShapeError(
            f"cannot reshape {format_shape(x.shape)} to {format_shape(shape)}",
            expected=f"{count_elements(x.shape)} elements",
            received=f"{count_elements(shape)} elements",
            suggestion=next(filter(None, (suggest_divisor(*pair) for pair in list_floor_divisions(shape))), None),
        )
    return x.with_shape(shape)


@op(infer=_infer_reshape, coerce=coerce_plain, canonical=_canonicalise_reshape, numerics=STORAGE)
def reshape(x, *, shape: Any):
    """The same elements in row-major order with another shape; one size may be -1."""
    return np.reshape(x, shape)


error(reshape)(error_rules.bound_structural)


@affine_rules(reshape)
def _(analysis, node):
    return move_ramps(analysis.find_form(node.args[0]), node.args[0], node.out)


def _canonicalise_permute(x: TensorType, *, axes: Any) -> dict[str, Any]:
    listed = tuple(normalize_axis(a, x.rank) + x.rank for a in axes)
    if sorted(listed) != list(range(x.rank)):
        raise ShapeError(f"{tuple(axes)} is not a permutation of the {x.rank} axes of {x}")
    return {"axes": listed}


@op(
    infer=lambda x, *, axes: x.with_shape(tuple(x.shape[a] for a in axes)),
    coerce=coerce_plain,
    canonical=_canonicalise_permute,
    numerics=STORAGE,
)
def permute(x, *, axes: Any):
    """`x` with its axes in another order: axis i of the result is axis `axes[i]` of `x`."""
    return np.transpose(x, axes)


error(permute)(error_rules.bound_structural)


def _canonicalise_slice(x: TensorType, *, start: Any, stop: Any, step: Any) -> dict[str, Any]:
    return {"start": tuple(start), "stop": tuple(stop), "step": tuple(step) if step else (1,) * x.rank}


def _infer_slice(x: TensorType, *, start: tuple, stop: tuple, step: tuple) -> TensorType:
    if not len(start) == len(stop) == len(step) == x.rank:
        raise ShapeError(f"slice needs a start, stop and step for each of {x.rank} axes")
    for axis, (low, high, by, size) in enumerate(zip(start, stop, step, x.shape, strict=True)):
        if by < 1 or proves_less(low, 0) or proves_less(high, low) or proves_less(size, high):
            raise ShapeError(f"slice {low}:{high}:{by} is outside axis {axis} of {x}")
    return x.with_shape(tuple((hi - lo + by - 1) // by for lo, hi, by in zip(start, stop, step, strict=True)))


@op(infer=_infer_slice, coerce=coerce_plain, canonical=_canonicalise_slice, numerics=STORAGE, name="slice")
def slice_(x, *, start: tuple, stop: tuple, step: tuple = ()):
    """The elements from `start` to before `stop` by `step` along each axis."""
    return x[tuple(slice(a, b, c) for a, b, c in zip(start, stop, step, strict=True))]


error(slice_)(error_rules.bound_structural)


def _infer_strided_view(x: TensorType, *, shape: tuple, start: tuple, strides: tuple) -> TensorType:
    if len(start) != x.rank or any(len(row) != len(shape) for row in strides) or len(strides) != x.rank:
        raise ShapeError(f"a strided view needs a start and {len(shape)} strides for each axis", received=str(x))
    for low, row, size in zip(start, strides, x.shape, strict=True):
        spans = [s * (n - 1) for s, n in zip(row, shape, strict=True)]
        least, most = low + sum(r for r in spans if r < 0), low + sum(r for r in spans if r > 0)
        if 0 not in shape and (least < 0 or most >= size):  # a view without elements reaches nothing
            raise ShapeError("a strided view reaches outside of its operand", received=f"{least} to {most} of {size}")
    return x.with_shape(tuple(shape))


@op(infer=_infer_strided_view, coerce=coerce_plain, numerics=STORAGE)
def strided_view(x, *, shape: tuple, start: tuple, strides: tuple):
    """The elements at affine indices: along axis a of `x` the index is start[a] + the sum of strides[a][j] · index[j].

    The lowering makes it of stacked slices: the windows of a convolution are one strided view.
    """
    index = np.indices(shape)
    return x[
        tuple(a + sum(s * i for s, i in zip(row, index, strict=True)) for a, row in zip(start, strides, strict=True))
    ]


error(strided_view)(error_rules.bound_structural)


def _canonicalise_pad(x: TensorType, *, low: Any, high: Any, value: Any) -> dict[str, Any]:
    number = round_number(value, x) if x.dtype.is_float else np.asarray(value).astype(x.dtype.numpy).item()
    return {"low": tuple(low), "high": tuple(high), "value": number}


def _infer_pad(x: TensorType, *, low: tuple, high: tuple, value: Any) -> TensorType:
    if len(low) != x.rank or len(high) != x.rank or any(n < 0 for n in (*low, *high)):
        raise ShapeError(f"pad needs a count ≥ 0 before and after each of {x.rank} axes")
    return x.with_shape(tuple(a + s + b for a, s, b in zip(low, x.shape, high, strict=True)))


@op(infer=_infer_pad, coerce=coerce_plain, canonical=_canonicalise_pad, numerics=STORAGE)
def pad(x, *, low: tuple, high: tuple, value: Any = 0):
    """`x` with `low` elements before and `high` after it along each axis, all of them `value`."""
    widths = list(zip(low, high, strict=True))
    return np.pad(x, widths, constant_values=np.asarray(value).astype(x.dtype))


error(pad)(error_rules.bound_pad)


def _coerce_variadic(op: Op, operands: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
    listed = operands[0] if operands and isinstance(operands[0], (list, tuple)) else operands
    if not listed:
        raise ArgumentError(f"{op.__name__} needs at least one tensor", location=user_location(), received="none")
    tensors = [as_tensor(x) for x in listed]
    first = tensors[0].type
    alike = all(t.dtype is first.dtype and t.type.policy == first.policy for t in tensors)
    return bind_op(op, tensors if alike else unify_parts(tensors), attrs)


def _infer_concatenate(*types: TensorType, axis: int) -> TensorType:
    first = types[0]
    for other in types[1:]:
        pairs = enumerate(zip(first.shape, other.shape, strict=False), start=-first.rank)
        same = [a == b or i == axis for i, (a, b) in pairs]
        if other.rank != first.rank or not all(same):
            raise ShapeError(
                f"cannot concatenate along axis {axis + first.rank}",
                expected=f"shapes equal but for axis {axis + first.rank}",
                received=" and ".join(str(t) for t in types),
            )
    total: Size = 0
    for each in types:
        total = total + each.shape[axis]
    shape = list(first.shape)
    shape[axis] = total
    return first.with_shape(tuple(shape))


@op(
    infer=_infer_concatenate,
    coerce=_coerce_variadic,
    canonical=lambda *types, axis: {"axis": normalize_axis(axis, types[0].rank)},
    numerics=STORAGE,
)
def concatenate(*tensors, axis: int = 0):
    """Tensors concatenated along `axis`."""
    return np.concatenate(tensors, axis=axis)


error(concatenate)(error_rules.bound_structural)


# Checked indices. `gather` and `scatter` check theirs; below Graph the check is an op of its own, `check_index`.


def normalise_indices(
    indices: Any, size: int, along: int, *, what: str = "index", wrap: bool = True, counted: Any = True
) -> np.ndarray:
    """Indices as int64 from 0 on: with `wrap`, a negative index counts from the end. Others than `counted` may be any.

    Raises:
        OutOfBoundsError: a counted index is not in the axis.
    """
    array = np.asarray(indices)
    array = array if array.dtype.kind in "iu" else array.astype(np.int64)
    low = -size if wrap else 0
    if array.size and (array.min() < low or array.max() >= size):
        outside = ((array < low) | (array >= size)) & counted
        if outside.any():
            found = np.broadcast_to(array, outside.shape)[outside][0]
            raise make_index_error(int(found), size, along, what=what, wrap=wrap)
    places = array.astype(np.int64, copy=False)
    return np.where(places < 0, places + size, places) if wrap and array.dtype.kind == "i" else places


def make_index_error(index: int | None, size: Size, along: int, *, what: str, wrap: bool) -> OutOfBoundsError:
    """The error of an index that is not in axis `along` of `size`; None: one of many, which nobody noted."""
    return OutOfBoundsError(
        f"{what} {'(one of many)' if index is None else index} is outside axis {along} of size {size}",
        expected=f"from {-size if wrap else 0} to {size - 1}" if size else "no index, since the axis is empty",
        suggestion="give the embedding more rows, or replace what its vocabulary lacks" if what == "token" else None,
    )


def _infer_check_index(indices: TensorType, *, size: Any, along: int, what: str, wrap: bool) -> TensorType:
    return TensorType(_check_integers(indices).shape, int64)


def _check_integers(indices: TensorType) -> TensorType:
    if not indices.dtype.is_integer:
        raise DTypeError("indices are not integers", expected="an integer tensor", received=str(indices))
    return indices


@op(
    infer=_infer_check_index,
    coerce=coerce_plain,
    canonical=lambda indices, *, size, along, what, wrap: {
        "size": size, "along": along, "what": what, "wrap": wrap and indices.dtype.kind == "int",
    },
    numerics=STORAGE,
    pointwise=True,
    kinds=INTEGERS,
)  # fmt: skip
def check_index(indices, *, size: Any, along: int = 0, what: str = "index", wrap: bool = True):
    """Indices of axis `along`, of `size`, as int64 from 0 on; with `wrap`, a negative index counts from the end.

    An index outside raises OutOfBoundsError, on each target once the launch has ended; `what` names it there. An index
    that no result depends on may be left unchecked.
    """
    return normalise_indices(indices, size, along, what=what, wrap=wrap)


error(check_index)(error_rules.bound_index)
jvp(check_index)(zero_jvp)


@interval_rules(check_index)
def _(analysis, node):
    return 0, max(find_size_bounds(node.attrs["size"])[1] - 1, 0)


def _infer_gather(x: TensorType, indices: TensorType, *, axis: int) -> TensorType:
    _check_integers(indices)
    at = axis + x.rank
    return x.with_shape((*x.shape[:at], *indices.shape, *x.shape[at + 1 :]))


@op(
    infer=_infer_gather,
    coerce=coerce_plain,
    canonical=lambda x, indices, *, axis: {"axis": normalize_axis(axis, x.rank)},
    numerics=STORAGE,
)
def gather(x, indices, *, axis: int = 0):
    """The slices of `x` at `indices` along `axis`; the axes of the indices replace `axis`.

    A negative index counts from the end; an index outside the axis raises OutOfBoundsError.
    """
    return np.take(x, normalise_indices(indices, x.shape[axis], axis + x.ndim), axis=axis)


error(gather)(error_rules.bound_gather)


def _canonicalise_iota(*, shape: Any, axis: int, dtype: Any) -> dict[str, Any]:
    sizes = parse_shape(shape, as_size)
    return {"shape": sizes, "axis": normalize_axis(axis, len(sizes)), "dtype": as_dtype(dtype)}


@op(
    infer=lambda *, shape, axis, dtype: TensorType(tuple(shape), dtype),
    coerce=coerce_plain,
    canonical=_canonicalise_iota,
    numerics=STORAGE,
)
def iota(*, shape: Any, axis: int = -1, dtype: DType = int64):
    """0, 1, 2, … along `axis`, the same along the others."""
    along = [1] * len(shape)
    along[axis] = shape[axis]
    return np.broadcast_to(np.arange(shape[axis]).reshape(along).astype(dtype.numpy), shape)


error(iota)(error_rules.bound_constant)


@affine_rules(iota)
def _(analysis, node):
    rank, axis = node.out.type.rank, node.attrs["axis"]
    return AffineForm(ramps={axis % rank - rank: 1} if node.out.type.shape[axis] != 1 else {})


@interval_rules(iota)
def _(analysis, node):
    size = node.attrs["shape"][node.attrs["axis"]]
    return 0, max(size - 1, 0)


@interval_rules(reshape, permute, slice_, broadcast_to)
def _(analysis, node):
    return analysis.of(node.args[0])


@check_arguments
def transpose(x: Any, dim0: int = -2, dim1: int = -1) -> Tensor:
    """`x` with two axes exchanged."""
    x = as_tensor(x)
    axes = list(range(x.ndim))
    a, b = normalize_axis(dim0, x.ndim), normalize_axis(dim1, x.ndim)
    axes[a], axes[b] = axes[b], axes[a]
    return permute(x, axes=tuple(axes))


@check_arguments
def expand_dims(x: Any, axis: int) -> Tensor:
    """`x` with a new axis of size 1, which is `axis` of the result."""
    x = as_tensor(x)
    at = normalize_axis(axis, x.ndim + 1) + x.ndim + 1
    return reshape(x, shape=(*x.shape[:at], 1, *x.shape[at:]))


@check_arguments
def squeeze(x: Any, axis: int | Sequence[int] | None = None) -> Tensor:
    """`x` without `axis`, one or several of size 1; None removes all axes of size 1.

    >>> squeeze([[[1.0], [2.0]]])
    Tensor([1., 2.], f32)

    Raises:
        ShapeError: an axis has another size.
    """
    x = as_tensor(x)
    ones = [i for i, n in enumerate(x.shape) if n == 1]
    for size in x.shape if axis is None else ():
        assume_unequal(size, 1)
    gone = ones if axis is None else [a + x.ndim for a in normalize_axes(axis, x.ndim)]
    for at in gone:
        if x.shape[at] != 1:
            raise ShapeError(f"axis {at} has size {x.shape[at]}, not 1", received=str(x.type))
    return reshape(x, shape=tuple(n for i, n in enumerate(x.shape) if i not in gone))


@check_arguments
def flatten(x: Any, start_dim: int = 0, end_dim: int = -1) -> Tensor:
    """`x` with the axes from `start_dim` to `end_dim` merged; a scalar becomes a vector of size 1."""
    x = as_tensor(x)
    if not x.ndim:
        return reshape(x, shape=(1,))
    first, last = (normalize_axis(d, x.ndim) + x.ndim for d in (start_dim, end_dim))
    return reshape(x, shape=(*x.shape[:first], count_elements(x.shape[first : last + 1]), *x.shape[last + 1 :]))


@check_arguments
def stack(tensors: Sequence[Any], axis: int = 0) -> Tensor:
    """Tensors of one shape stacked along a new axis."""
    if not isinstance(tensors, (list, tuple)):
        raise ArgumentError("stack takes a list of tensors", location=user_location(), received=type(tensors).__name__)
    given = [as_tensor(t) for t in tensors]
    try:
        return concatenate([expand_dims(t, axis) for t in given], axis=axis)
    except ShapeError:
        static = all(isinstance(n, int) for t in given for n in t.shape)
        if len({t.ndim for t in given}) > 1 or (static and len({t.shape for t in given}) > 1):
            shapes = ", ".join(format_shape(t.shape) for t in given)
            raise ShapeError("stack takes tensors of one shape", location=user_location(), received=shapes) from None
        raise


def arange(start: int, end: int | None = None, step: int = 1, dtype: DType = int64) -> Tensor:
    """`start`, `start + step`, … before `end`; with one argument, from 0."""
    low, high = (0, start) if end is None else (start, end)
    index = iota(shape=(max(0, -(-(high - low) // step)),), dtype=dtype)
    return index if (low, step) == (0, 1) else index * step + low


@check_arguments
def embedding(weight: Any, indices: Any) -> Tensor:
    """The rows of `weight` [V, D] at `indices`; a negative index counts from the end.

    Raises:
        OutOfBoundsError: an index is outside the rows.
    """
    return gather(weight, indices, axis=0)


# Shifts of whole tensors, for stencils.


def _canonicalise_mesh_shift(x: TensorType, *, axis: Any, shift: int) -> dict[str, Any]:
    return {"axis": normalize_axis(axis, x.rank), "shift": int(shift)}


@op(coerce=coerce_plain, canonical=_canonicalise_mesh_shift, numerics=STORAGE)
def mesh_shift(x, *, axis: int = 0, shift: int = 1):
    """`x` shifted by `shift` elements along `axis`, filled with 0; on a mesh, neighbours exchange halos.

    Shapes: that of `x`. Raises ShapeError for an axis that `x` does not have.

    >>> import tessera as ts
    >>> ts.mesh_shift([1.0, 2.0, 3.0], axis=0, shift=1)
    Tensor([0., 1., 2.], f32)
    """
    out = np.zeros_like(x)
    count, places = x.shape[axis], [slice(None)] * x.ndim
    here, there = list(places), list(places)
    here[axis], there[axis] = slice(max(shift, 0), count + min(shift, 0)), slice(max(-shift, 0), count - max(shift, 0))
    if abs(shift) < count:
        out[tuple(here)] = x[tuple(there)]
    return out


@lower(mesh_shift)
def _(x, *, axis, shift):
    low = tuple(max(shift, 0) if a - x.ndim == axis else 0 for a in range(x.ndim))
    high = tuple(max(-shift, 0) if a - x.ndim == axis else 0 for a in range(x.ndim))
    start = tuple(high)
    stop = tuple(h + n for h, n in zip(high, x.shape, strict=True))
    return slice_(pad(x, low=low, high=high), start=start, stop=stop, step=(1,) * x.ndim)


# Derivatives and batching of the ops that move elements.


jvp(iota)(zero_jvp)
jvp(reshape)(linear_jvp(reshape))
jvp(permute)(linear_jvp(permute))
jvp(slice_)(linear_jvp(slice_))
jvp(pad)(linear_jvp(pad, value=0))
jvp(concatenate)(linear_jvp(concatenate))


@jvp(gather)
def _(out, primals, tangents, *, axis):
    return gather(tangents[0], primals[1], axis=axis)


@transpose_rule(reshape)
def _(g, x, *, shape):
    return (reshape(g, shape=x.shape),)


@transpose_rule(permute)
def _(g, x, *, axes):
    return (permute(g, axes=tuple(axes.index(i) for i in range(len(axes)))),)


@transpose_rule(slice_)
def _(g, x, *, start, stop, step):
    for axis, by in enumerate(step):
        g = insert_zeros(g, axis, by)
    # The dilated cotangent ends up to `step - 1` elements after the last element that was taken.
    room = tuple(max(0, a + n - size) for a, n, size in zip(start, g.shape, x.shape, strict=True))
    g = slice_(g, start=(0,) * g.ndim, stop=tuple(n - r for n, r in zip(g.shape, room, strict=True)))
    return (pad(g, low=start, high=tuple(s - a - n for s, a, n in zip(x.shape, start, g.shape, strict=True))),)


def insert_zeros(g: Tensor, axis: int, by: int) -> Tensor:
    """`g` with `by - 1` zeros after each element along an axis."""
    if by == 1:
        return g
    wide = reshape(g, shape=(*g.shape[: axis + 1], 1, *g.shape[axis + 1 :]))
    high = tuple(by - 1 if i == axis + 1 else 0 for i in range(wide.ndim))
    out = pad(wide, low=(0,) * wide.ndim, high=high)
    return reshape(out, shape=(*g.shape[:axis], g.shape[axis] * by, *g.shape[axis + 1 :]))


@transpose_rule(pad)
def _(g, x, *, low, high, value):
    return (slice_(g, start=low, stop=tuple(a + s for a, s in zip(low, x.shape, strict=True))),)


@transpose_rule(concatenate)
def _(g, *parts, axis):
    found: list[Tensor | None] = []
    at, begin = axis + g.ndim, 0
    for part in parts:
        end = begin + part.shape[axis]
        start = tuple(begin if i == at else 0 for i in range(g.ndim))
        stop = tuple(end if i == at else s for i, s in enumerate(g.shape))
        found.append(slice_(g, start=start, stop=stop) if is_undefined_primal(part) else None)
        begin = end
    return tuple(found)


@transpose_rule(gather)
def _(g, x, indices, *, axis):
    return splat(0, x).scatter_add(indices, g, axis=axis), None


@batch(reshape)
def _(lanes, *, shape):
    return reshape(*lanes.tensors, shape=(lanes.size, *shape))


@batch(permute)
def _(lanes, *, axes):
    return permute(*lanes.tensors, axes=(0, *(a + 1 for a in axes)))


@batch(slice_)
def _(lanes, *, start, stop, step):
    return slice_(*lanes.tensors, start=(0, *start), stop=(lanes.size, *stop), step=(1, *step))


@batch(pad)
def _(lanes, *, low, high, value):
    return pad(*lanes.tensors, low=(0, *low), high=(0, *high), value=value)


@batch(concatenate)
def _(lanes, *, axis):
    return concatenate(lanes.spread(), axis=axis)


@batch(gather)
def _(lanes, *, axis):
    x, indices = lanes.tensors
    if not lanes.batched[1]:
        return gather(x, indices, axis=axis)
    if not lanes.batched[0]:
        return axes_first(gather(x, indices, axis=axis), axis + x.ndim)
    # One merged axis holds the slices of all lanes; each lane's indices are offset by the start of its slices.
    at = axis + x.ndim
    flat, low = merge_lanes(x, at), x.shape[at]
    out = gather(flat, offset_lane_indices(indices, low, at - 1), axis=0)
    return axes_from_front(out, at, indices.ndim)


def axes_first(x: Tensor, *axes: int) -> Tensor:
    """`x` with these axes first."""
    return permute(x, axes=(*axes, *(i for i in range(x.ndim) if i not in axes)))


def axes_from_front(x: Tensor, at: int, many: int) -> Tensor:
    """`x` with axes 1 to `many` moved to position `at`, after the other leading axes of the lanes."""
    rest = [i for i in range(x.ndim) if i == 0 or i >= many]
    order = [*rest[:at], *range(1, many), *rest[at:]]
    return permute(x, axes=tuple(order))


def merge_lanes(x: Tensor, at: int) -> Tensor:
    """`x` [lanes, ..., n at `at`, ...] as [lanes * n, ...]."""
    front = axes_first(x, 0, at)
    return reshape(front, shape=(math.prod(front.shape[:2]), *front.shape[2:]))


def offset_lane_indices(indices: Tensor, low: int, along: int) -> Tensor:
    """Each lane's indices of axis `along` moved to that lane's part of the flattened axis."""
    wide = check_index(indices, size=low, along=along)
    return wide + iota(shape=wide.shape, axis=0) * low


# Sharding: axes that are not touched keep their cuts.


@sharding(reshape)
def _(types, results, *, shape):
    """The first axes of two groups of axes with one product are cut alike: their parts are contiguous."""
    (x,), (out,) = types, results
    names: tuple[list, list] = ([None] * x.rank, [None] * out.rank)
    i = j = 0
    while i < x.rank and j < out.rank:
        first, a, b = (i, j), x.shape[i], out.shape[j]
        while a != b:
            if a < b:
                i += 1
                a *= x.shape[i] if i < x.rank else 0
            else:
                j += 1
                b *= out.shape[j] if j < out.rank else 0
            if not a or not b:
                return AxisFactors((tuple(names[0]),), (tuple(names[1]),))
        names[0][first[0]] = names[1][first[1]] = first[0]
        i, j = i + 1, j + 1
    return AxisFactors((tuple(names[0]),), (tuple(names[1]),))


@sharding(permute)
def _(types, results, *, axes):
    return AxisFactors((tuple(range(types[0].rank)),), (tuple(a % types[0].rank for a in axes),))


@sharding(slice_)
def _(types, results, *, start, stop, step):
    (x,), (out,) = types, results
    names = tuple(i if a == b else None for i, (a, b) in enumerate(zip(x.shape, out.shape, strict=True)))
    return AxisFactors((names,), (names,))


@sharding(pad)
def _(types, results, *, low, high, value):
    names = tuple(None if a or b else i for i, (a, b) in enumerate(zip(low, high, strict=True)))
    return AxisFactors((names,), (names,))


@sharding(concatenate)
def _(types, results, *, axis):
    names = tuple(None if i == axis % results[0].rank else i for i in range(results[0].rank))
    return AxisFactors((names,) * len(types), (names,))


@sharding(gather)
def _(types, results, *, axis):
    x, indices = types
    at = axis % x.rank
    own = tuple(None if i == at else ("x", i) for i in range(x.rank))
    places = tuple(("i", i) for i in range(indices.rank))
    return AxisFactors((own, places), ((*own[:at], *places, *own[at + 1 :]),))


@sharding(iota)
def _(types, results, *, shape, axis, dtype):
    return AxisFactors((), (tuple(None if i == axis % len(shape) else i for i in range(len(shape))),))

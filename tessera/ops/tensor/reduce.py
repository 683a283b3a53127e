"""Reductions: sum, extrema, arg-reductions, mean, variance, product, any, all, norms, compensated and cumulative
sums, with their rules."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

from tessera.core.errors import ArgumentError, ShapeError, user_location
from tessera.core.shapes import normalize_axes, normalize_axis
from tessera.core.symbolic_dim import Size
from tessera.core.types import DType, TensorType, as_dtype, bool_, f32, int64, to_python_numbers, uint8
from tessera.ir.analysis import interval_rules
from tessera.ir.numerics import error_rules, reference_kernels
from tessera.ir.numerics.reference_kernels import sum_compensated
from tessera.ir.rules import (
    ACCUMULATE,
    REGISTRY,
    STORAGE,
    AxisFactors,
    Op,
    batch,
    error,
    jvp,
    lower,
    op,
    sharding,
    transpose,
)
from tessera.ir.tensor import Tensor, as_tensor, bind_op
from tessera.ops.tensor import shape
from tessera.ops.tensor.basic import (
    broadcast_to,
    cast,
    check_operand_count,
    coerce_plain,
    linear_jvp,
    round_once,
    splat,
    stop_gradient,
    zero_jvp,
)
from tessera.ops.tensor.coercion import coerce_floating, composite
from tessera.ops.tensor.elementwise import abs, add, equal, exp, log, mul, not_equal, pow, sqrt, where
from tessera.ops.tensor.rearrange import flip, narrow
from tessera.ops.tensor.shape import count_elements, pad, permute, reshape, slice_

Axes = tuple[int, ...]


def reduce_shape(x: TensorType, axis: Axes, keepdims: bool) -> tuple[Size, ...]:
    """The shape left after reducing over `axis` (negative)."""
    sizes = [(1 if keepdims else None) if i - x.rank in axis else s for i, s in enumerate(x.shape)]
    return tuple(s for s in sizes if s is not None)


def canonicalise_axes(x: TensorType, *, axis: Any, keepdims: bool) -> dict[str, Any]:
    return {"axis": normalize_axes(axis, x.rank), "keepdims": bool(keepdims)}


def find_sum_dtype(dtype: DType) -> DType:
    """Sums of narrow integers give int64 (design 4)."""
    return int64 if dtype.kind == "bool" or (dtype.is_integer and dtype.bits < 64) else dtype


def infer_sum(x: TensorType, *, axis: Axes, keepdims: bool) -> TensorType:
    return x.with_shape(reduce_shape(x, axis, keepdims)).with_dtype(find_sum_dtype(x.dtype))


def _infer_extremum(x: TensorType, *, axis: Axes, keepdims: bool) -> TensorType:
    empty = [a for a in axis if x.shape[a] == 0]
    if empty:
        raise ShapeError(f"reducing axis {empty[0]} of size 0 has no value", received=str(x))
    return x.with_shape(reduce_shape(x, axis, keepdims))


def coerce_sum(op: Op, operands: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
    """As `coerce_plain`; compensated summation where the operand's policy has that clause."""
    check_operand_count(op, operands)
    x = as_tensor(operands[0])
    if not (x.type.policy and x.type.policy.compensated and x.dtype.is_float):
        return bind_op(op, [x], attrs)
    total = REGISTRY["ts.compensated_sum"]
    if op is sum:
        return bind_op(total, [x], attrs)
    wide = cast(x, dtype=x.type.accumulate) if x.dtype != x.type.accumulate else x
    found = bind_op(total, [wide], attrs)
    scaled = found * (int(found.size) / int(x.size))  # the reciprocal of the number of elements in each sum
    return scaled if scaled.dtype == x.dtype else cast(scaled, dtype=x.type.policy)


@op(infer=infer_sum, coerce=coerce_sum, canonical=canonicalise_axes, numerics=ACCUMULATE)
def sum(x, *, axis: Any = None, keepdims: bool = False):
    """The sum of the elements along `axis` (all axes when None); narrower integers and bools give int64."""
    if x.dtype.kind in "iub":
        return np.sum(x, axis=axis, keepdims=keepdims, dtype=np.int64)
    return reference_kernels.sum_rows(x, axis, keepdims)


error(sum)(error_rules.bound_sum)


@op(infer=_infer_extremum, coerce=coerce_plain, canonical=canonicalise_axes, numerics=STORAGE)
def max(x, *, axis: Any = None, keepdims: bool = False):
    """The largest element along `axis`; NaN if any is. Reducing nothing is an error."""
    return reference_kernels.reduce_extreme(np.maximum, x, axis, keepdims)


@op(infer=_infer_extremum, coerce=coerce_plain, canonical=canonicalise_axes, numerics=STORAGE)
def min(x, *, axis: Any = None, keepdims: bool = False):
    """The smallest element along `axis`; NaN if any is. Reducing nothing is an error."""
    return reference_kernels.reduce_extreme(np.minimum, x, axis, keepdims)


error(max, min)(error_rules.bound_selection)


@interval_rules(max, min)
def _(analysis, node):  # one of the elements
    return analysis.of(node.args[0])


def coerce_argreduce(op: Op, operands: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
    """As `coerce_plain`; without an axis, the tensor is flattened."""
    check_operand_count(op, operands)
    x = as_tensor(operands[0])
    if attrs["axis"] is not None and (x.ndim or attrs["axis"] not in (0, -1)):  # a scalar has one element, as in NumPy
        return bind_op(op, [x], attrs)
    place = bind_op(op, [shape.reshape(x, shape=(-1,))], {"axis": 0, "keepdims": False})
    return shape.reshape(place, shape=(1,) * x.ndim) if attrs["keepdims"] else place


def _canonicalise_one_axis(x: TensorType, *, axis: int, keepdims: bool) -> dict[str, Any]:
    return {"axis": normalize_axis(axis, x.rank), "keepdims": bool(keepdims)}


def _infer_argreduce(x: TensorType, *, axis: int, keepdims: bool) -> TensorType:
    return _infer_extremum(x, axis=(axis,), keepdims=keepdims).with_dtype(int64)


@op(infer=_infer_argreduce, coerce=coerce_argreduce, canonical=_canonicalise_one_axis, numerics=STORAGE)
def argmax(x, *, axis: int | None = None, keepdims: bool = False):
    """The index (int64) of the largest element along `axis` (None: of all): the first of equals, or of NaNs."""
    return np.argmax(x, axis=axis, keepdims=keepdims)


error(argmax)(error_rules.bound_argreduce(1))


@op(infer=_infer_argreduce, coerce=coerce_argreduce, canonical=_canonicalise_one_axis, numerics=STORAGE)
def argmin(x, *, axis: int | None = None, keepdims: bool = False):
    """The index (int64) of the least element along `axis` (None: of all): the first of equals, or of NaNs."""
    return np.argmin(x, axis=axis, keepdims=keepdims)


error(argmin)(error_rules.bound_argreduce(-1))


def _infer_mean(x: TensorType, *, axis: Axes, keepdims: bool) -> TensorType:
    return _infer_extremum(x, axis=axis, keepdims=keepdims).with_dtype(x.dtype if x.dtype.is_float else f32)


def coerce_mean(op: Op, operands: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
    """As `coerce_sum`; bools become f32 first."""
    check_operand_count(op, operands)
    x = as_tensor(operands[0])
    return coerce_sum(op, [cast(x, dtype=f32) if x.dtype.kind == "bool" else x], attrs)


@op(infer=_infer_mean, coerce=coerce_mean, canonical=canonicalise_axes, numerics=ACCUMULATE)
def mean(x, *, axis: Any = None, keepdims: bool = False):
    """The arithmetic mean along `axis`; integers give f32."""
    return np.mean(x, axis=axis, keepdims=keepdims, dtype=np.float64 if x.dtype.kind in "iu" else x.dtype)


@lower(mean)
def _(x, *, axis, keepdims):
    count = count_elements([x.shape[a] for a in axis])
    wide = x if x.dtype.is_float else cast(x, dtype=f32)
    total = sum(wide, axis=axis, keepdims=keepdims)
    return total * (1.0 / int(count)) if isinstance(count, int) else divide_by_count(total, count)


def reciprocal_count(count: float) -> float:
    """1 / `count`, by which a sum is multiplied for a mean; infinite for 0."""
    return 1.0 / count if count > 0 else math.inf


def divide_by_count(total: Tensor, count: Size, correction: float = 0.0) -> Tensor:
    """A sum divided by its number of elements minus `correction`; the number may be symbolic."""
    if isinstance(count, int):
        return total * reciprocal_count(count - correction)
    dtype = total.dtype if total.dtype.bits >= 32 else f32
    return cast(cast(total, dtype=dtype) / (splat(count, TensorType((), dtype)) - correction), dtype=total.dtype)


@op(
    coerce=coerce_plain,
    canonical=lambda x, *, correction, **a: {"correction": float(correction), **canonicalise_axes(x, **a)},
)
def var(x, *, axis: Any = None, keepdims: bool = False, correction: float = 0.0):
    """The variance along `axis`: the sum of squared distances from the mean, divided by n - `correction`.

    A divisor of 0 gives infinity, or NaN for equal elements.
    """
    count = math.prod(x.shape[a] for a in axis)
    return np.var(x, axis=axis, keepdims=keepdims) * x.dtype.type(count * reciprocal_count(count - correction))


@lower(var)
def _(x, *, axis, keepdims, correction):
    count = count_elements([x.shape[a] for a in axis])
    distance = x - mean(x, axis=axis, keepdims=True)
    return divide_by_count(sum(distance * distance, axis=axis, keepdims=keepdims), count, correction)


# Compensated summation (Kahan 1965): `sum` and `mean` under the policy clause `ts.compensated`.


def _next_power_of_two(size: int) -> int:
    """The least power of two from `size` on."""
    return 1 << (size - 1).bit_length() if size > 1 else 1


@op(infer=infer_sum, coerce=coerce_plain, canonical=canonicalise_axes, numerics=ACCUMULATE)
def compensated_sum(x, *, axis: Any = None, keepdims: bool = False):
    """The compensated sum along `axis`, with the rounding errors added at the end: within about 2 ulps for any count.

    >>> import tessera as ts
    >>> row = ts.Tensor([1e8, 1.0, -1e8, 1.0])
    >>> ts.compensated_sum(row)
    Tensor(2., f32)
    """
    if x.dtype.kind != "f":
        return np.sum(x, axis=axis, keepdims=keepdims, dtype=np.int64)
    kept = [a for a in range(-x.ndim, 0) if a not in axis]
    size = math.prod(x.shape[a] for a in axis)
    rows = np.transpose(x, (*kept, *axis)).reshape(math.prod(x.shape[a] for a in kept), size)
    rows = np.pad(rows, ((0, 0), (0, _next_power_of_two(size) - size)))
    total, lost = sum_compensated(rows, rows.shape[1], lambda r, begin, end: r[:, begin:end])
    out = total if lost is None else np.where(lost == lost, total + lost, total)
    shape = [(1 if keepdims else None) if i - x.ndim in axis else s for i, s in enumerate(x.shape)]
    return out.reshape([s for s in shape if s is not None])


@lower(compensated_sum)
def _(x: Tensor, *, axis: Axes, keepdims: bool):
    if not x.dtype.is_float:
        return sum(x, axis=axis, keepdims=keepdims)
    shape: tuple[Size, ...] = reduce_shape(x.type, axis, keepdims)
    kept = [a for a in range(-x.ndim, 0) if a not in axis]
    size = int(count_elements([x.shape[a] for a in axis]))
    rows = reshape(permute(x, axes=(*kept, *axis)), shape=(count_elements([x.shape[a] for a in kept]), size))
    rows = (
        pad(rows, low=(0, 0), high=(0, _next_power_of_two(size) - size)) if size != _next_power_of_two(size) else rows
    )
    total, lost = sum_compensated(rows, int(rows.shape[1]), _slice_columns)
    return reshape(total if lost is None else where(equal(lost, lost), total + lost, total), shape=shape)


def _slice_columns(rows: Tensor, begin: int, end: int) -> Tensor:
    return slice_(rows, start=(0, begin), stop=(rows.shape[0], end))


# Neutral elements: what a reduction of nothing gives.


def find_neutral_element(kind: str, dtype: DType) -> Any:
    """The neutral element of a reduction."""
    if kind == "sum":
        return 0.0 if dtype.is_float else 0
    low, high = _find_value_range(dtype)
    return low if kind in ("max", "argmax") else high


def _find_value_range(dtype: DType) -> tuple[Any, Any]:
    if dtype.is_float:
        return (-math.inf, math.inf) if _has_infinity(dtype) else _find_finite_range(dtype)
    if dtype.kind == "bool":
        return False, True
    info = ml_dtypes.iinfo(dtype.numpy)
    return int(info.min), int(info.max)


def _find_finite_range(dtype: DType) -> tuple[float, float]:
    top = float(ml_dtypes.finfo(dtype.numpy).max)
    return -top, top


def _has_infinity(dtype: DType) -> bool:
    return math.isinf(float(dtype.numpy.type(math.inf)))


# Prefix sums and products by recursive doubling: log2(n) steps (Hillis and Steele 1986).


def _infer_cumulative(x: TensorType, *, axis: int) -> TensorType:
    return x.with_dtype(find_sum_dtype(x.dtype))


def _canonicalise_scan_axis(x: TensorType, *, axis: int) -> dict[str, Any]:
    return {"axis": normalize_axis(axis, x.rank)}


@op(infer=_infer_cumulative, coerce=coerce_plain, canonical=_canonicalise_scan_axis, numerics=ACCUMULATE)
def cumsum(x, *, axis: int = -1):
    """The sums of the elements up to each along `axis`; narrower integers and bools give int64.

    >>> import tessera as ts
    >>> ts.cumsum([1, 2, 3])
    Tensor([1, 3, 6], int64)
    """
    return np.cumsum(x, axis=axis, dtype=np.int64 if x.dtype.kind in "iub" else x.dtype)


@op(infer=_infer_cumulative, coerce=coerce_plain, canonical=_canonicalise_scan_axis, numerics=ACCUMULATE)
def cumprod(x, *, axis: int = -1):
    """The products of the elements up to each along `axis`; narrower integers and bools give int64."""
    return np.cumprod(x, axis=axis, dtype=np.int64 if x.dtype.kind in "iub" else x.dtype)


def _scan_by_doubling(x: Tensor, axis: int, join: Callable[..., Any], neutral: float) -> Tensor:
    x = cast(x, dtype=find_sum_dtype(x.dtype))
    size, reach = int(x.shape[axis]), 1
    none, sides = [0] * x.ndim, [0] * x.ndim
    while reach < size:
        sides[axis] = reach
        earlier = pad(narrow(x, axis, 0, size - reach), low=tuple(sides), high=tuple(none), value=neutral)
        x, reach = join(x, earlier), 2 * reach
    return x


# The bound of the lowering alone would assume its order of additions and products.
error(cumsum)(error_rules.bound_cumulative_sum)
error(cumprod)(error_rules.bound_cumulative_product)


@lower(cumsum)
def _(x, *, axis):
    return _scan_by_doubling(x, axis, add, -0.0 if x.dtype.is_float else 0)  # -0 leaves every float unchanged


@lower(cumprod)
def _(x, *, axis):
    return _scan_by_doubling(x, axis, mul, 1)


# Derivatives and batching of reductions.


jvp(sum)(linear_jvp(sum))
jvp(cumsum)(linear_jvp(cumsum))
jvp(argmax, argmin)(zero_jvp)


def _broadcast_back(g: Tensor, like: TensorType, axis: tuple[int, ...]) -> Tensor:
    """The result of a reduction over `axis`, broadcast along it."""
    return broadcast_to(reshape(g, shape=reduce_shape(like, axis, True)), shape=like.shape)


@jvp(max, min)
def _(out, primals, tangents, *, axis, keepdims):
    # Equal extrema share the gradient evenly (design 4).
    (x,), (t,) = primals, tangents
    reached = cast(x == _broadcast_back(out, x.type, axis), dtype=x.dtype)
    share = sum(t * reached, axis=axis, keepdims=keepdims)
    return share / sum(reached, axis=axis, keepdims=keepdims)


@transpose(sum)
def _(g, x, *, axis, keepdims):
    return (_broadcast_back(g, x, axis),)


@transpose(cumsum)
def _(g, x, *, axis):
    return (flip(cumsum(flip(g, axis=(axis,)), axis=axis), axis=(axis,)),)


@batch(sum, max, min, argmax, argmin, mean, var, cumsum, cumprod)
def _(lanes, **attrs):
    # Axes count from the end, so the attributes hold with a leading axis too.
    return bind_op(lanes.op, lanes.tensors, attrs)


# Composite reductions: product, any, all, standard deviation, logsumexp, norms.


def _infer_product(x: TensorType, *, axis: Axes, keepdims: bool) -> TensorType:
    return x.with_shape(reduce_shape(x, axis, keepdims)).with_dtype(find_sum_dtype(x.dtype))


@op(infer=_infer_product, coerce=coerce_plain, canonical=canonicalise_axes)
def prod(x, *, axis: Any = None, keepdims: bool = False):
    """The product of the elements along `axis` (all when None); narrower integers and bools give int64.

    Compiled programs multiply in a tree of halves, whose partial products may overflow where those in order do not.

    >>> import tessera as ts
    >>> ts.prod([2, 3, 4])
    Tensor(24, int64)
    """
    return np.prod(x, axis=axis, keepdims=keepdims, dtype=find_sum_dtype(as_dtype(x.dtype)).numpy)


error(prod)(error_rules.bound_product)


@batch(prod)
def _(lanes, **attrs):
    return bind_op(lanes.op, lanes.tensors, attrs)


@lower(prod)
def _(x, *, axis, keepdims):
    shape = reduce_shape(x.type, axis, keepdims)
    kept = [a for a in range(-x.ndim, 0) if a not in axis]
    rows = permute(cast(x, dtype=find_sum_dtype(x.dtype)), axes=(*kept, *axis))
    rows = reshape(rows, shape=(count_elements([x.shape[a] for a in kept]), count_elements([x.shape[a] for a in axis])))
    n = int(rows.shape[1])
    whole = 1 << (n - 1).bit_length() if n else 1
    rows = pad(rows, low=(0, 0), high=(0, whole - n), value=1)
    while whole > 1:  # a binary tree: log2(n) products of halves
        whole //= 2
        left, right = ((0, 0), (rows.shape[0], whole)), ((0, whole), (rows.shape[0], 2 * whole))
        rows = slice_(rows, start=left[0], stop=left[1]) * slice_(rows, start=right[0], stop=right[1])
    return reshape(rows, shape=shape)


def _infer_truth_reduction(x: TensorType, *, axis: Axes, keepdims: bool) -> TensorType:
    return TensorType(reduce_shape(x, axis, keepdims), bool_)


def _has_true(x: Tensor, axis: Axes, keepdims: bool) -> Tensor:
    """Whether the greatest truth value along some axes is 1; that of no elements is not."""
    reduction = sum if 0 in [x.shape[a] for a in axis] else max
    return not_equal(reduction(cast(x, dtype=uint8), axis=axis, keepdims=keepdims), 0)


def _to_bool(x: Tensor) -> Tensor:
    return x if x.dtype is bool_ else not_equal(x, 0)


@op(infer=_infer_truth_reduction, coerce=coerce_plain, canonical=canonicalise_axes, numerics=STORAGE)
def any(x, *, axis: Any = None, keepdims: bool = False):
    """Whether any element along `axis` is true (not zero); False for none at all."""
    return np.any(x != 0, axis=axis, keepdims=keepdims)


@lower(any)
def _(x, *, axis, keepdims):
    return _has_true(_to_bool(x), axis, keepdims)


@op(infer=_infer_truth_reduction, coerce=coerce_plain, canonical=canonicalise_axes, numerics=STORAGE)
def all(x, *, axis: Any = None, keepdims: bool = False):
    """Whether every element along `axis` is true (not zero); True for none at all."""
    return np.all(x != 0, axis=axis, keepdims=keepdims)


@lower(all)
def _(x, *, axis, keepdims):
    return ~_has_true(~_to_bool(x), axis, keepdims)


@op(
    coerce=coerce_floating,
    canonical=lambda x, *, correction, **a: {"correction": float(correction), **canonicalise_axes(x, **a)},
)
def std(x, *, axis: Any = None, keepdims: bool = False, correction: float = 0.0):
    """The standard deviation along `axis`: the square root of `var`, whose divisor is n - `correction`."""
    count = math.prod(x.shape[a] for a in axis)
    return np.sqrt(np.var(x, axis=axis, keepdims=keepdims) * x.dtype.type(count * reciprocal_count(count - correction)))


@lower(std)
def _(x, *, axis, keepdims, correction):
    return sqrt(var(x, axis=axis, keepdims=keepdims, correction=correction))


@jvp(std)
@partial(round_once, result=std)
def _(out, primals, tangents, *, axis, keepdims, correction):
    # Equal elements have no derivative; 0 is the subgradient of least norm.
    (x,), (t,) = primals, tangents
    count = count_elements([x.shape[a] for a in axis])
    distance = x - mean(x, axis=axis, keepdims=True)
    moved = divide_by_count(sum(distance * t, axis=axis, keepdims=keepdims), count, correction)
    return moved / where(equal(out, 0.0), 1.0, out)


@op(coerce=coerce_floating, canonical=canonicalise_axes)
def logsumexp(x, *, axis: Any = None, keepdims: bool = False):
    """log of the sum of exp(x) along `axis`, without overflow.

    >>> import tessera as ts
    >>> ts.logsumexp([1000.0, 1000.0])
    Tensor(1000.6932, f32)
    """
    top = np.max(x, axis=axis, keepdims=True)
    shift = np.where(np.isinf(top), x.dtype.type(0), top)
    total = np.log(np.sum(np.exp(x - shift), axis=axis, keepdims=True)) + shift
    return total if keepdims else np.squeeze(total, axis=axis)


@lower(logsumexp)
def _(x, *, axis, keepdims):
    top = max(x, axis=axis, keepdims=True)
    shift = where(equal(abs(top), math.inf), 0.0, top)
    total = log(sum(exp(x - shift), axis=axis, keepdims=True)) + shift
    return total if keepdims else reshape(total, shape=reduce_shape(x.type, axis, False))


@jvp(logsumexp)
@partial(round_once, result=logsumexp)
def _(out, primals, tangents, *, axis, keepdims):
    # The derivative is the softmax; it is 0 where every element is -inf.
    (x,), (t,) = primals, tangents
    whole = _broadcast_back(where(equal(out, -math.inf), 0.0, out), x.type, axis)
    return sum(exp(x - whole) * t, axis=axis, keepdims=keepdims)


@composite
def norm(x: Any, ord: Any = 2, axis: Any = None, keepdims: bool = False) -> Tensor:
    """The `ord`-norm of the elements along `axis` (all of them when None) taken as vectors.

    `ord`: 0 counts the elements that are not zero, inf and -inf give the largest and smallest magnitude, any other p
    gives (Σ|x|^p)^(1/p). Of a matrix, 2 over both axes is the Frobenius norm. Scaled by the largest magnitude
    for p = 2, so that squares neither overflow nor vanish.

    >>> norm([3.0, 4.0])
    Tensor(5., f32)
    """
    x, ord = as_tensor(x), to_python_numbers(ord)
    if not isinstance(ord, (int, float)):
        raise ArgumentError(f"unknown norm {ord!r}", location=user_location(), expected="a number, inf or -inf")
    x = x if x.dtype.is_float else cast(x, dtype=f32)
    if ord == 2:
        return _euclidean_norm(x, axis, keepdims)
    size = abs(x)
    if ord in (math.inf, -math.inf):
        return (max if ord > 0 else min)(size, axis=axis, keepdims=keepdims)
    if ord == 0:
        return cast(sum(not_equal(size, 0), axis=axis, keepdims=keepdims), dtype=size.dtype)
    if ord == 1:
        return sum(size, axis=axis, keepdims=keepdims)
    powers = apply_root(lambda s: pow(s, float(ord)), size) if 0 < ord < 1 else pow(size, float(ord))
    total = sum(powers, axis=axis, keepdims=keepdims)
    return apply_root(lambda t: pow(t, 1.0 / ord), total) if ord > 0 else pow(total, 1.0 / ord)


def apply_root(root: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """A root of `x`. At 0 a norm has no derivative; it is 0 there, the subgradient of least norm."""
    none = equal(x, 0.0)
    return where(none, 0.0, root(where(none, 1.0, x)))


def _euclidean_norm(x: Tensor, axis: Any, keepdims: bool) -> Tensor:
    if 0 in x.shape:
        return sqrt(sum(x * x, axis=axis, keepdims=keepdims))
    top = max(abs(x), axis=axis, keepdims=True)
    # The norm does not depend on the scale.
    scale = stop_gradient(where(equal(top, 0.0) | equal(top, math.inf), 1.0, top))
    unit = x / scale
    total = apply_root(sqrt, sum(unit * unit, axis=axis, keepdims=True)) * scale
    return total if keepdims else reshape(total, shape=sum(x, axis=axis).shape)


# Sharding: a reduction along an axis that is cut gives partial results.


def _shard_reduction(kind: str) -> Callable[..., AxisFactors]:
    def rule(types: Any, results: Any, *, axis: Any, keepdims: bool) -> AxisFactors:
        (x,) = types
        gone = {a % x.rank for a in axis}
        kept = tuple(None if i in gone else i for i in range(x.rank) if keepdims or i not in gone)
        return AxisFactors((tuple(range(x.rank)),), (kept,), dict.fromkeys(gone, kind))

    return rule


for _op, _kind in ((sum, "sum"), (max, "max"), (min, "min"), (prod, "prod")):
    sharding(_op)(_shard_reduction(_kind))


@sharding(argmax, argmin)
def _(types, results, *, axis, keepdims):
    (x,) = types
    names = tuple(None if i == axis % x.rank else i for i in range(x.rank))
    return AxisFactors((names,), (names if keepdims else tuple(n for n in names if n is not None),))

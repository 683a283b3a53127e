"""The names of the array API standard (2023.12) for Tessera's functions: what `x.__array_namespace__()` gives.

Names and edge cases are the standard's. Where the language differs it keeps its own rules (docs/tensors.md): float
types do not mix, there are no complex numbers, and of unsigned integers only uint8.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tessera as ts
from tessera.tensor import Tensor, as_tensor
from tessera.types import DType

__array_api_version__ = "2023.12"

e, inf, nan, newaxis, pi = ts.e, ts.inf, ts.nan, ts.newaxis, ts.pi
bool, int8, int16, int32, int64, uint8 = ts.bool, ts.int8, ts.int16, ts.int32, ts.int64, ts.uint8
float32, float64 = ts.f32, ts.f64

asarray, empty, empty_like, eye, from_dlpack = ts.asarray, ts.empty, ts.empty_like, ts.eye, ts.from_dlpack
full_like, meshgrid, ones, ones_like = ts.full_like, ts.meshgrid, ts.ones, ts.ones_like
tril, triu, zeros, zeros_like = ts.tril, ts.triu, ts.zeros, ts.zeros_like
can_cast, finfo, iinfo, isdtype, result_type = ts.can_cast, ts.finfo, ts.iinfo, ts.isdtype, ts.result_type
abs, acos, acosh, add, asin, asinh = ts.abs, ts.acos, ts.acosh, ts.add, ts.asin, ts.asinh
atan, atan2, atanh, ceil, copysign, cos, cosh = ts.atan, ts.atan2, ts.atanh, ts.ceil, ts.copysign, ts.cos, ts.cosh
bitwise_and, bitwise_or, bitwise_xor, bitwise_invert = ts.bitwise_and, ts.bitwise_or, ts.bitwise_xor, ts.bitwise_not
bitwise_left_shift, bitwise_right_shift = ts.shift_left, ts.shift_right
clip, divide, equal, exp, expm1, floor, floor_divide = (
    ts.clip, ts.div, ts.equal, ts.exp, ts.expm1, ts.floor, ts.floor_divide,
)  # fmt: skip
greater, greater_equal, hypot, isfinite, isinf, isnan = (
    ts.greater, ts.greater_equal, ts.hypot, ts.isfinite, ts.isinf, ts.isnan,
)  # fmt: skip
less, less_equal, log, log1p, log2, log10, logaddexp = (
    ts.less, ts.less_equal, ts.log, ts.log1p, ts.log2, ts.log10, ts.logaddexp,
)  # fmt: skip
logical_and, logical_not, logical_or, logical_xor = ts.logical_and, ts.logical_not, ts.logical_or, ts.logical_xor
maximum, minimum, multiply, negative, not_equal, positive, pow = (
    ts.maximum, ts.minimum, ts.mul, ts.neg, ts.not_equal, ts.positive, ts.pow,
)  # fmt: skip
reciprocal, remainder, round, sign, signbit, sin, sinh = (
    ts.reciprocal, ts.remainder, ts.round, ts.sign, ts.signbit, ts.sin, ts.sinh,
)  # fmt: skip
sqrt, square, subtract, tan, tanh, trunc = ts.sqrt, ts.square, ts.sub, ts.tan, ts.tanh, ts.trunc
matmul, matrix_transpose, tensordot, vecdot = ts.matmul, ts.matrix_transpose, ts.tensordot, ts.vecdot
broadcast_arrays, moveaxis, roll, stack, flip = ts.broadcast_arrays, ts.moveaxis, ts.roll, ts.stack, ts.flip
all, any, max, mean, min, std, var = ts.all, ts.any, ts.max, ts.mean, ts.min, ts.std, ts.var
argsort, nonzero, searchsorted, sort, take, where = (
    ts.argsort, ts.nonzero, ts.searchsorted, ts.sort, ts.take, ts.where,
)  # fmt: skip


def astype(x: Any, dtype: DType, /, *, copy: Any = True) -> Tensor:
    """`x` with elements of another type."""
    return ts.cast(x, dtype=dtype)


def arange(
    start: float, /, stop: float | None = None, step: float = 1, *, dtype: Any = None, device: Any = None
) -> Any:
    """`start`, `start + step`, … before `stop`."""
    return ts.arange(start, stop, step, dtype=dtype, device=device)


def full(shape: Any, fill_value: Any, *, dtype: Any = None, device: Any = None) -> Tensor:
    """`fill_value` everywhere; its type is that of a Python number unless `dtype` is given."""
    return ts.full(shape=shape, value=fill_value, dtype=as_tensor(fill_value).dtype if dtype is None else dtype)


def linspace(start: float, stop: float, /, num: int, *, dtype: Any = None, device: Any = None, endpoint: Any = True):
    """`num` values at equal distances from `start` to `stop`."""
    return ts.linspace(start, stop, num, dtype=ts.f32 if dtype is None else dtype, device=device, endpoint=endpoint)


def broadcast_to(x: Any, /, shape: Any) -> Tensor:
    """`x` repeated until it has `shape`."""
    return ts.broadcast_to(x, shape=shape)


def concat(arrays: Sequence[Any], /, *, axis: int | None = 0) -> Tensor:
    """Tensors one after the other; flattened where `axis` is None."""
    listed = [as_tensor(a) for a in arrays]
    return (
        ts.concatenate([a.reshape(-1) for a in listed], axis=0) if axis is None else ts.concatenate(listed, axis=axis)
    )


def expand_dims(x: Any, /, *, axis: int = 0) -> Tensor:
    """`x` with a new axis of size 1."""
    return ts.expand_dims(x, axis)


def permute_dims(x: Any, /, axes: Any) -> Tensor:
    """`x` with its axes in another order."""
    return ts.permute(x, axes=axes)


def repeat(x: Any, repeats: Any, /, *, axis: int | None = None) -> Tensor:
    """Each element some times in a row."""
    return ts.repeat(x, repeats.tolist() if isinstance(repeats, Tensor) else repeats, axis)


def reshape(x: Any, /, shape: Any, *, copy: Any = None) -> Tensor:
    """The same elements with another shape."""
    return ts.reshape(x, shape=shape)


def squeeze(x: Any, /, axis: Any) -> Tensor:
    """`x` without axes of size 1."""
    x = as_tensor(x)
    for each in sorted([axis + x.ndim if axis < 0 else axis] if isinstance(axis, int) else axis, reverse=True):
        x = ts.squeeze(x, each)
    return x


def tile(x: Any, repetitions: Any, /) -> Tensor:
    """`x` side by side."""
    return ts.tiled(x, repetitions)


def unstack(x: Any, /, *, axis: int = 0) -> tuple[Tensor, ...]:
    """The slices along an axis."""
    return ts.unbind(x, axis)


def argmax(x: Any, /, *, axis: int | None = None, keepdims: Any = False) -> Tensor:
    """Where the largest element is; of the flattened tensor where `axis` is None."""
    return _place(ts.argmax, x, axis, keepdims)


def argmin(x: Any, /, *, axis: int | None = None, keepdims: Any = False) -> Tensor:
    """Where the smallest element is; of the flattened tensor where `axis` is None."""
    return _place(ts.argmin, x, axis, keepdims)


def _place(find: Any, x: Any, axis: int | None, keepdims: Any) -> Tensor:
    x = as_tensor(x)
    if axis is not None:
        return find(x, axis=axis, keepdims=keepdims)
    place = find(ts.reshape(x, shape=(-1,)), axis=0)
    return ts.reshape(place, shape=(1,) * x.ndim) if keepdims else place


def sum(x: Any, /, *, axis: Any = None, dtype: Any = None, keepdims: Any = False) -> Tensor:
    """The sum along axes, in `dtype` if given."""
    return ts.sum(x if dtype is None else ts.cast(x, dtype=dtype), axis=axis, keepdims=keepdims)


def prod(x: Any, /, *, axis: Any = None, dtype: Any = None, keepdims: Any = False) -> Tensor:
    """The product along axes, in `dtype` if given."""
    return ts.prod(x if dtype is None else ts.cast(x, dtype=dtype), axis=axis, keepdims=keepdims)


def cumulative_sum(x: Any, /, *, axis: int | None = None, dtype: Any = None, include_initial: Any = False) -> Tensor:
    """The running sums along an axis, after a 0 if `include_initial`."""
    x = as_tensor(x) if dtype is None else ts.cast(x, dtype=dtype)
    along = 0 if axis is None else axis
    out = ts.cumsum(x, axis=along)
    first = ts.zeros(tuple(1 if i == along % x.ndim else n for i, n in enumerate(x.shape)), dtype=out.dtype)
    return ts.concatenate([first, out], axis=along) if include_initial else out


def unique_values(x: Any, /) -> Tensor:
    """The distinct elements."""
    return ts.unique(x)[0]


def unique_counts(x: Any, /) -> tuple[Tensor, Tensor]:
    """The distinct elements and how often each is there."""
    values, _, counts = ts.unique(x)
    return values, counts


def unique_inverse(x: Any, /) -> tuple[Tensor, Tensor]:
    """The distinct elements and which of them each element is."""
    return ts.unique(x)[:2]

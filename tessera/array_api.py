"""The names of the array API standard (2024.12) for Tessera's functions: what `x.__array_namespace__()` gives.

Names and edge cases are the standard's. Where the language differs it keeps its own rules (docs/tensors.md): float
types do not mix, tensors do not change in place, sums of narrow integers are int64, and there are no complex numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import tessera as ts
from tessera.core.shapes import broadcast
from tessera.core.types import DType
from tessera.ir.tensor import Tensor, as_tensor

__array_api_version__ = "2024.12"

e, inf, nan, newaxis, pi = ts.e, ts.inf, ts.nan, ts.newaxis, ts.pi
bool, int8, int16, int32, int64 = ts.bool, ts.int8, ts.int16, ts.int32, ts.int64
uint8, uint16, uint32, uint64 = ts.uint8, ts.uint16, ts.uint32, ts.uint64
float32, float64 = ts.f32, ts.f64

asarray, empty, empty_like, eye, from_dlpack = ts.asarray, ts.empty, ts.empty_like, ts.eye, ts.from_dlpack
full_like, ones, ones_like = ts.full_like, ts.ones, ts.ones_like
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
maximum, minimum, multiply, negative, nextafter, not_equal, positive, pow = (
    ts.maximum, ts.minimum, ts.mul, ts.neg, ts.nextafter, ts.not_equal, ts.positive, ts.pow,
)  # fmt: skip
reciprocal, remainder, round, sign, signbit, sin, sinh = (
    ts.reciprocal, ts.remainder, ts.round, ts.sign, ts.signbit, ts.sin, ts.sinh,
)  # fmt: skip
sqrt, square, subtract, tan, tanh, trunc = ts.sqrt, ts.square, ts.sub, ts.tan, ts.tanh, ts.trunc
count_nonzero, diff, linalg, take_along_axis = ts.count_nonzero, ts.diff, ts.linalg, ts.take_along_axis
matmul, matrix_transpose, tensordot, vecdot = ts.matmul, ts.matrix_transpose, ts.tensordot, ts.vecdot
moveaxis, roll, stack, flip = ts.moveaxis, ts.roll, ts.stack, ts.flip
all, any, argmax, argmin, max, mean = ts.all, ts.any, ts.argmax, ts.argmin, ts.max, ts.mean
min, std, var = ts.min, ts.std, ts.var
nonzero, take, where = ts.nonzero, ts.take, ts.where


def astype(x: Any, dtype: DType, /, *, copy: Any = True, device: Any = None) -> Tensor:
    """`x` with elements of another type."""
    return ts.asarray(ts.cast(x, dtype=dtype), device=device)


def argsort(x: Any, /, *, axis: int = -1, descending: Any = False, stable: Any = True) -> Tensor:
    """The places along an axis of the elements in order; always stable."""
    return ts.argsort(x, axis=axis, descending=descending)


def sort(x: Any, /, *, axis: int = -1, descending: Any = False, stable: Any = True) -> Tensor:
    """The elements in order along an axis."""
    return ts.sort(x, axis, descending)


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


def broadcast_arrays(*arrays: Any) -> list[Tensor]:
    """All tensors with the shape that they broadcast to together."""
    return list(ts.broadcast_arrays(*arrays))


def meshgrid(*arrays: Any, indexing: str = "xy") -> list[Tensor]:
    """The coordinates of a grid, one tensor for each of its axes."""
    return list(ts.meshgrid(*arrays, indexing=indexing))


def broadcast_to(x: Any, /, shape: Any) -> Tensor:
    """`x` repeated until it has `shape`."""
    return ts.broadcast_to(x, shape=shape)


def concat(arrays: Sequence[Any], /, *, axis: int | None = 0) -> Tensor:
    """Tensors one after the other; flattened where `axis` is None."""
    listed = [as_tensor(a) for a in arrays]
    return (
        ts.concatenate([a.reshape(-1) for a in listed], axis=0) if axis is None else ts.concatenate(listed, axis=axis)
    )


def expand_dims(x: Any, /, axis: int = 0) -> Tensor:
    """`x` with a new axis of size 1."""
    return ts.expand_dims(x, axis)


def permute_dims(x: Any, /, axes: Any) -> Tensor:
    """`x` with its axes in another order."""
    return ts.permute(x, axes=axes)


def repeat(x: Any, repeats: Any, /, *, axis: int | None = None) -> Tensor:
    """Each element some times in a row."""
    counts: Any = repeats.numpy() if isinstance(repeats, Tensor) else repeats
    return ts.repeat(x, counts, axis)


def reshape(x: Any, /, shape: Any, *, copy: Any = None) -> Tensor:
    """The same elements with another shape."""
    return ts.reshape(x, shape=shape)


def squeeze(x: Any, /, axis: Any) -> Tensor:
    """`x` without axes of size 1."""
    return ts.squeeze(x, axis)


def tile(x: Any, repetitions: Any, /) -> Tensor:
    """`x` side by side."""
    return ts.tiled(x, repetitions)


def unstack(x: Any, /, *, axis: int = 0) -> tuple[Tensor, ...]:
    """The slices along an axis."""
    return ts.unbind(x, axis)


def sum(x: Any, /, *, axis: Any = None, dtype: Any = None, keepdims: Any = False) -> Tensor:
    """The sum along axes, in `dtype` if given."""
    return _reduce_in_dtype(ts.sum, x, axis, dtype, keepdims)


def prod(x: Any, /, *, axis: Any = None, dtype: Any = None, keepdims: Any = False) -> Tensor:
    """The product along axes, in `dtype` if given."""
    return _reduce_in_dtype(ts.prod, x, axis, dtype, keepdims)


def _reduce_in_dtype(total: Any, x: Any, axis: Any, dtype: Any, keepdims: Any) -> Tensor:
    if dtype is None:
        return total(x, axis=axis, keepdims=keepdims)
    return ts.cast(total(ts.cast(x, dtype=dtype), axis=axis, keepdims=keepdims), dtype=dtype)


def searchsorted(x1: Any, x2: Any, /, *, side: str = "left", sorter: Any = None) -> Tensor:
    """Where each of `x2` keeps the order of `x1`, which `sorter` brings into order."""
    return ts.searchsorted(x1 if sorter is None else ts.take(x1, sorter), x2, side)


def broadcast_shapes(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that tensors of these shapes broadcast to."""
    return tuple(int(n) for n in broadcast(*(tuple(s) for s in shapes)))


def isin(x1: Any, x2: Any, /, *, invert: Any = False) -> Tensor:
    """Whether each element of `x1` is one of `x2`'s."""
    wanted = as_tensor(x2).reshape(-1)
    found = ts.any(ts.equal(ts.expand_dims(as_tensor(x1), -1), wanted), axis=-1)
    return ts.logical_not(found) if invert else found


def cumulative_prod(x: Any, /, *, axis: int | None = None, dtype: Any = None, include_initial: Any = False) -> Tensor:
    """The running products along an axis, after a 1 if `include_initial`."""
    return _accumulate(ts.cumprod, ts.ones, x, axis, dtype, include_initial)


def cumulative_sum(x: Any, /, *, axis: int | None = None, dtype: Any = None, include_initial: Any = False) -> Tensor:
    """The running sums along an axis, after a 0 if `include_initial`."""
    return _accumulate(ts.cumsum, ts.zeros, x, axis, dtype, include_initial)


def _accumulate(total: Any, initial: Any, x: Any, axis: int | None, dtype: Any, include_initial: Any) -> Tensor:
    x = as_tensor(x) if dtype is None else ts.cast(x, dtype=dtype)
    along = 0 if axis is None else axis
    out = total(x, axis=along)
    first = initial(tuple(1 if i == along % x.ndim else n for i, n in enumerate(x.shape)), dtype=out.dtype)
    return ts.concatenate([first, out], axis=along) if include_initial else out


class UniqueAll(NamedTuple):
    """The distinct elements, where each is first, which of them each element is, and how often each is there."""

    values: Tensor
    indices: Tensor
    inverse_indices: Tensor
    counts: Tensor


def unique_all(x: Any, /) -> UniqueAll:
    """The distinct elements and all that is known of them."""
    x = as_tensor(x)
    values, inverse, counts = ts.unique(x)
    of_flat = ts.reshape(inverse, shape=(-1,))
    first = ts.argmax(ts.equal(ts.expand_dims(ts.arange(int(values.shape[0])), 1), of_flat), axis=1)
    return UniqueAll(values, first, ts.reshape(inverse, shape=x.shape), counts)


def unique_values(x: Any, /) -> Tensor:
    """The distinct elements."""
    return ts.unique(x)[0]


class UniqueCounts(NamedTuple):
    """The distinct elements and how often each is there."""

    values: Tensor
    counts: Tensor


def unique_counts(x: Any, /) -> UniqueCounts:
    """The distinct elements and how often each is there."""
    values, _, counts = ts.unique(x)
    return UniqueCounts(values, counts)


class UniqueInverse(NamedTuple):
    """The distinct elements and which of them each element is."""

    values: Tensor
    inverse_indices: Tensor


def unique_inverse(x: Any, /) -> UniqueInverse:
    """The distinct elements and which of them each element is."""
    x = as_tensor(x)
    values, inverse, _ = ts.unique(x)
    return UniqueInverse(values, ts.reshape(inverse, shape=x.shape))


class NamespaceInfo:
    """What this namespace can do: what the standard's `__array_namespace_info__` gives."""

    def capabilities(self) -> dict[str, Any]:
        """Of eager tensors: traced ones have shapes that do not depend on elements."""
        return {"boolean indexing": True, "data-dependent shapes": True, "max dimensions": None}

    def default_device(self) -> str:
        """Where tensors lie."""
        return "cpu"

    def devices(self) -> list[str]:
        """Where tensors can lie."""
        return ["cpu"]

    def default_dtypes(self, *, device: Any = None) -> dict[str, DType]:
        """The element types of Python's numbers, and of indices."""
        return {"real floating": ts.f32, "integral": ts.int64, "indexing": ts.int64}

    def dtypes(self, *, device: Any = None, kind: Any = None) -> dict[str, DType]:
        """The standard's element types by name, all or those of a kind."""
        names = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float32", "float64")
        found = {name: globals()[name] for name in names}
        return {k: t for k, t in found.items() if kind is None or ts.isdtype(t, kind)}


def __array_namespace_info__() -> NamespaceInfo:  # noqa: N807  (the standard's name)
    """What this namespace can do."""
    return NamespaceInfo()

"""Functions that stay right where their naive forms overflow, cancel or divide by zero.

Each computes in at least f32 and rounds once to the type of its operand.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from tessera.core.shapes import normalize_axes
from tessera.core.types import f32
from tessera.ir.tensor import Tensor, as_tensor
from tessera.ops.tensor import reduce
from tessera.ops.tensor.basic import cast
from tessera.ops.tensor.coercion import composite
from tessera.ops.tensor.contractions import matmul
from tessera.ops.tensor.elementwise import abs, equal, exp, less, rsqrt, where
from tessera.ops.tensor.rearrange import narrow
from tessera.ops.tensor.reduce import sum
from tessera.ops.tensor.shape import iota, reshape, transpose

__all__ = [
    "attention", "layer_norm", "layernorm_safe", "log_softmax", "logsumexp", "logsumexp_safe", "mean", "rms_norm",
    "rmsnorm_safe", "scaled_dot_product_attention", "softmax", "softmax_safe", "variance", "welford",
]  # fmt: skip


def _widen(x: Any) -> Tensor:
    """The operand in the type its formulas compute in: f32, or f64 as it is."""
    x = as_tensor(x)
    return x if x.dtype.is_float and x.dtype.bits >= 32 else cast(x, dtype=f32)


def _restore_dtype(out: Tensor, x: Any) -> Tensor:
    dtype = as_tensor(x).dtype
    return cast(out, dtype=dtype) if dtype.is_float and dtype != out.dtype else out


def softmax(x: Any, axis: int = -1) -> Tensor:
    """exp(x) over its sum along `axis`, for any size of `x`; a row of -inf alone gives zeros, not NaN.

    >>> softmax([1000.0, 1000.0]), softmax([-math.inf, -math.inf])
    (Tensor([0.5, 0.5], f32), Tensor([0., 0.], f32))
    """
    wide = _widen(x)
    top = reduce.max(wide, axis=axis, keepdims=True)
    weights = exp(wide - where(equal(top, -math.inf), 0.0, top))
    total = sum(weights, axis=axis, keepdims=True)
    return _restore_dtype(weights / where(equal(total, 0.0), 1.0, total), x)


def log_softmax(x: Any, axis: int = -1) -> Tensor:
    """The logarithm of softmax along `axis`: `x` less its `logsumexp`."""
    wide = _widen(x)
    return _restore_dtype(wide - reduce.logsumexp(wide, axis=axis, keepdims=True), x)


def logsumexp(x: Any, axis: Any = -1, keepdims: bool = False) -> Tensor:
    """log of the sum of exp(x) along `axis`, without overflow; a row of -inf alone gives -inf.

    >>> logsumexp([10000.0, 10000.0])
    Tensor(10000.693, f32)
    """
    return _restore_dtype(reduce.logsumexp(_widen(x), axis=axis, keepdims=keepdims), x)


def welford(x: Any, axis: Any = -1) -> tuple[Tensor, Tensor, int]:
    """The mean, the sum of squared distances from it (both with `axis` kept as size 1) and the count.

    Pairs of partial results are joined as a tree (Chan, Golub and LeVeque 1979, after Welford 1962), so that neither
    squares of large means nor long sums lose digits.
    """
    wide = as_tensor(x)
    axes = normalize_axes(axis, wide.ndim)
    means, spread, counts = _widen(wide), _widen(wide) * 0.0, 1
    for each in axes:
        means, spread, counts = _join_axis(means, spread, counts, each)
    return means, spread, counts


def _join_axis(means: Tensor, spread: Tensor, count: int, axis: int) -> tuple[Tensor, Tensor, int]:
    """One axis joined: the largest power of two of it by halves, all pairs at once, then what is left."""
    size = int(means.shape[axis])
    if size <= 1:
        return means, spread, count
    whole = 1 << (size.bit_length() - 1)
    joined = (narrow(means, axis, 0, whole), narrow(spread, axis, 0, whole), count)
    while whole > 1:
        whole //= 2
        low = (narrow(joined[0], axis, 0, whole), narrow(joined[1], axis, 0, whole), joined[2])
        high = (narrow(joined[0], axis, whole, 2 * whole), narrow(joined[1], axis, whole, 2 * whole), joined[2])
        joined = _merge_moments(low, high)
    done = 1 << (size.bit_length() - 1)
    if done == size:
        return joined
    return _merge_moments(
        joined, _join_axis(narrow(means, axis, done, size), narrow(spread, axis, done, size), count, axis)
    )


def _merge_moments(a: tuple[Tensor, Tensor, int], b: tuple[Tensor, Tensor, int]) -> tuple[Tensor, Tensor, int]:
    total = a[2] + b[2]
    apart = b[0] - a[0]
    middle = a[0] + apart * (b[2] / total)
    return middle, a[1] + b[1] + apart * apart * (a[2] * b[2] / total), total


def mean(x: Any, axis: Any = -1, keepdims: bool = True) -> Tensor:
    """The mean along `axis`, as a tree of means: no sum of many large numbers is formed.

    `axis` is kept with size 1, so that `x - mean(x)` are the distances of each row from its mean.

    >>> mean(Tensor([60000.0, 60000.0], "f16")).item()
    60000.0
    """
    middle, _, _ = welford(x, axis)
    return _restore_dtype(_drop_axes(middle, axis, keepdims), x)


def variance(x: Any, mean: Any = None, axis: Any = -1, keepdims: bool = True, correction: float = 0.0) -> Tensor:
    """The variance along `axis`, kept with size 1, by Welford's method, with n - `correction` below.

    Where a `mean` is known already (with or without `axis` kept), the squared distances from it are averaged.

    >>> variance([10000.0, 10001.0, 10002.0, 10003.0], keepdims=False)
    Tensor(1.25, f32)
    """
    if mean is not None:
        return _variance_about(as_tensor(x), as_tensor(mean), axis, keepdims, correction)
    _, spread, count = welford(x, axis)
    return _restore_dtype(_drop_axes(spread, axis, keepdims) * (1.0 / (count - correction)), x)


def _variance_about(x: Tensor, middle: Tensor, axis: Any, keepdims: bool, correction: float) -> Tensor:
    axes = normalize_axes(axis, x.ndim)
    if middle.ndim != x.ndim:
        middle = reshape(middle, shape=tuple(1 if i - x.ndim in axes else n for i, n in enumerate(x.shape)))
    apart, count = _widen(x) - _widen(middle), math.prod(int(x.shape[a]) for a in axes)
    return _restore_dtype(sum(apart * apart, axis=axis, keepdims=keepdims) * (1.0 / (count - correction)), x)


def _drop_axes(x: Tensor, axis: Any, keepdims: bool) -> Tensor:
    return x if keepdims else sum(x, axis=axis)  # the axes have size 1


@composite
def layer_norm(x: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5, axis: Any = -1) -> Tensor:
    """Layer normalisation along `axis` with Welford's mean and variance, then `weight` and `bias`."""
    middle, spread, count = welford(x, axis)
    out = _restore_dtype((_widen(x) - middle) * rsqrt(spread * (1.0 / count) + eps), x)
    out = out if weight is None else out * weight
    return out if bias is None else out + bias


@composite
def rms_norm(x: Any, weight: Any = None, eps: float = 1e-5) -> Tensor:
    """Root mean square normalisation over the last axis, scaled first so that no square overflows."""
    wide = _widen(x)
    top = reduce.max(abs(wide), axis=-1, keepdims=True)
    scale = where(less(top, 1.0), 1.0, top)
    unit = wide / scale
    inverse = 1.0 / scale
    square = sum(unit * unit, axis=-1, keepdims=True) * (1.0 / int(wide.shape[-1]))
    out = _restore_dtype(unit * rsqrt(square + (eps * inverse) * inverse), x)
    return out if weight is None else out * weight


def scaled_dot_product_attention(
    q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False, temperature: float = 1.0, use_log_space: bool = True
) -> Tensor:
    """softmax(q kᵀ / (temperature · sqrt(D)) + mask) v, with the operands scaled before their product.

    Shapes: q [..., S, D], k and v [..., T, D], mask [..., S, T]. In log space the weights are exp of the scores less
    their logsumexp; a query that sees no key gives zeros.

    >>> scaled_dot_product_attention([[1e4]], [[1e4], [0.0]], [[1.0], [2.0]])
    Tensor([[1.]], f32)
    """
    left, right, values = _widen(q), _widen(k), _widen(v)
    root = (temperature * math.sqrt(int(left.shape[-1]))) ** -0.5
    scores = matmul(left * root, transpose(right * root))
    scores = scores if mask is None else scores + _widen(mask)
    if causal:
        shape = scores.shape[-2:]
        scores = where(less(iota(shape=shape, axis=-2), iota(shape=shape, axis=-1)), -math.inf, scores)
    return _restore_dtype(matmul(_log_space_weights(scores) if use_log_space else softmax(scores), values), q)


def _log_space_weights(scores: Tensor) -> Tensor:
    total = reduce.logsumexp(scores, axis=-1, keepdims=True)
    return exp(scores - where(equal(total, -math.inf), 0.0, total))


def attention(function: Callable[..., Any] | None = None, *args: Any, **named: Any) -> Any:
    """`scaled_dot_product_attention`; as a decorator it leaves the function it marks as it is."""
    if callable(function) and not isinstance(function, Tensor):
        return function
    return scaled_dot_product_attention(function, *args, **named)


softmax_safe = softmax
logsumexp_safe = logsumexp
layernorm_safe = layer_norm
rmsnorm_safe = rms_norm

"""Activations: the functions of neural networks beside relu, gelu, silu and softmax (tessera/ops/tensor/nn.py), after
PyTorch's `torch.nn.functional`."""

from __future__ import annotations

from typing import Any

import numpy as np

from tessera.core.errors import ArgumentError, ShapeError, user_location
from tessera.core.shapes import normalize_axis
from tessera.core.types import f32
from tessera.ir.rules import jvp, lower, op
from tessera.ir.tensor import Tensor, as_tensor
from tessera.ops.tensor.argument_checks import check_arguments
from tessera.ops.tensor.basic import cast, round_once, stop_gradient, sum_of_partials
from tessera.ops.tensor.coercion import coerce_floating, composite, unify_dtypes
from tessera.ops.tensor.elementwise import abs, equal, exp, less_equal, log, maximum, minimum, tanh, where
from tessera.ops.tensor.nn import softmax
from tessera.ops.tensor.random import Generator, rand
from tessera.ops.tensor.rearrange import narrow
from tessera.ops.tensor.reduce import argmax
from tessera.ops.tensor.scalar_functions import expm1, log1p, sigmoid
from tessera.ops.tensor.shape import expand_dims, iota, reshape

SELU_ALPHA = 1.6732632423543772
SELU_SCALE = 1.0507009873554805


@op(coerce=coerce_floating)
def logsigmoid(x):
    """The logarithm of sigmoid(x), without overflow.

    >>> import tessera as ts
    >>> ts.logsigmoid([0.0, -1000.0])
    Tensor([-6.931472e-01, -1.000000e+03], f32)
    """
    return np.minimum(x, 0) - np.log1p(np.exp(-np.abs(x)))


@lower(logsigmoid)
def _(x):
    return minimum(x, 0.0) - log1p(exp(-abs(x)))


jvp(logsigmoid)(sum_of_partials(lambda t, out, x: t * sigmoid(-x)))


@op(coerce=coerce_floating)
def hardsigmoid(x):
    """`x` / 6 + 1/2, limited to [0, 1] (Courbariaux, Bengio and David 2015).

    >>> import tessera as ts
    >>> ts.hardsigmoid([-4.0, 0.0, 1.5])
    Tensor([0.  , 0.5 , 0.75], f32)
    """
    return np.clip(x + 3, 0, 6) / 6


@lower(hardsigmoid)
def _(x):
    return minimum(maximum(x + 3.0, 0.0), 6.0) / 6.0


jvp(hardsigmoid)(sum_of_partials(lambda t, out, x: where((x > -3.0) & (x < 3.0), t / 6.0, 0.0)))


@op(coerce=coerce_floating)
def hardswish(x):
    """`x` times hardsigmoid(x) (Howard et al. 2019).

    >>> import tessera as ts
    >>> ts.hardswish([-4.0, 1.0, 6.0])
    Tensor([-0.       ,  0.6666667,  6.       ], f32)
    """
    return x * np.clip(x + 3, 0, 6) / 6


@lower(hardswish)
def _(x):
    return x * minimum(maximum(x + 3.0, 0.0), 6.0) / 6.0


@jvp(hardswish)
@round_once
def _(out, primals, tangents):
    (x,) = primals
    return tangents[0] * where(x <= -3.0, 0.0, where(x >= 3.0, 1.0, x / 3.0 + 0.5))


@op(coerce=coerce_floating)
def hardtanh(x, *, min_val: float = -1.0, max_val: float = 1.0):
    """`x` limited to the interval from `min_val` to `max_val`; its derivative is 0 at the ends.

    >>> import tessera as ts
    >>> ts.hardtanh([-3.0, 0.5, 3.0])
    Tensor([-1. ,  0.5,  1. ], f32)
    """
    return np.minimum(np.maximum(x, x.dtype.type(min_val)), x.dtype.type(max_val))


@lower(hardtanh)
def _(x, *, min_val, max_val):
    return minimum(maximum(x, min_val), max_val)


@jvp(hardtanh)
@round_once
def _(out, primals, tangents, *, min_val, max_val):
    return where((primals[0] > min_val) & (primals[0] < max_val), tangents[0], 0.0)


@check_arguments
def relu6(x: Any) -> Tensor:
    """`x` limited to the interval from 0 to 6.

    >>> relu6([-1.0, 4.0, 8.0])
    Tensor([0., 4., 6.], f32)
    """
    return hardtanh(x, min_val=0.0, max_val=6.0)


@op(coerce=coerce_floating)
def celu(x, *, alpha: float = 1.0):
    """`x` where it is positive, else alpha · (exp(x / alpha) - 1) (Barron 2017).

    >>> import tessera as ts
    >>> ts.celu([-2.0, 3.0], alpha=2.0)
    Tensor([-1.2642411,  3.       ], f32)
    """
    return np.where(x > 0, x, alpha * np.expm1(np.where(x > 0, 0, x) / alpha)).astype(x.dtype)


@lower(celu)
def _(x, *, alpha):
    return where(x > 0.0, x, alpha * expm1(minimum(x, 0.0) / alpha))


@jvp(celu)
@round_once
def _(out, primals, tangents, *, alpha):
    return tangents[0] * where(primals[0] > 0.0, 1.0, exp(minimum(primals[0], 0.0) / alpha))


@op(coerce=coerce_floating)
def selu(x):
    """1.0507 · (`x` where it is positive, else 1.6733 · (exp(x) - 1)) (Klambauer et al. 2017).

    >>> import tessera as ts
    >>> ts.selu([-1.0, 1.0])
    Tensor([-1.1113307,  1.050701 ], f32)
    """
    return (SELU_SCALE * np.where(x > 0, x, SELU_ALPHA * np.expm1(np.where(x > 0, 0, x)))).astype(x.dtype)


@lower(selu)
def _(x):
    return where(x > 0.0, SELU_SCALE * x, SELU_SCALE * SELU_ALPHA * expm1(minimum(x, 0.0)))


@jvp(selu)
@round_once
def _(out, primals, tangents):
    (x,) = primals
    return tangents[0] * where(x > 0.0, SELU_SCALE, SELU_SCALE * SELU_ALPHA * exp(minimum(x, 0.0)))


@op(coerce=coerce_floating)
def softsign(x):
    """`x` / (1 + |x|).

    >>> import tessera as ts
    >>> ts.softsign([-1.0, 3.0])
    Tensor([-0.5 ,  0.75], f32)
    """
    return x / (1 + np.abs(x))


@lower(softsign)
def _(x):
    return x / (abs(x) + 1.0)


@jvp(softsign)
@round_once
def _(out, primals, tangents):
    share = 1.0 / (abs(primals[0]) + 1.0)
    return tangents[0] * share * share


@op(coerce=coerce_floating)
def tanhshrink(x):
    """`x` - tanh(x).

    >>> import tessera as ts
    >>> ts.tanhshrink(0.0), ts.tanhshrink(20.0)
    (Tensor(0., f32), Tensor(19., f32))
    """
    return x - np.tanh(x)


@lower(tanhshrink)
def _(x):
    return x - tanh(x)


@jvp(tanhshrink)
@round_once
def _(out, primals, tangents):
    slope = tanh(primals[0])
    return tangents[0] * slope * slope


@op(coerce=coerce_floating)
def softshrink(x, *, lambd: float = 0.5):
    """`x` moved towards 0 by `lambd`, and 0 where |x| is at most `lambd`.

    >>> import tessera as ts
    >>> ts.softshrink([-2.0, 0.25, 1.0])
    Tensor([-1.5,  0. ,  0.5], f32)
    """
    bound = x.dtype.type(lambd)
    return x - np.minimum(np.maximum(x, -bound), bound)


@lower(softshrink)
def _(x, *, lambd):
    return x - minimum(maximum(x, -lambd), lambd)


@jvp(softshrink)
@round_once
def _(out, primals, tangents, *, lambd):
    return where(abs(primals[0]) > lambd, tangents[0], 0.0)


@op(coerce=coerce_floating)
def hardshrink(x, *, lambd: float = 0.5):
    """`x`, and 0 where |x| is at most `lambd`.

    >>> import tessera as ts
    >>> ts.hardshrink([-2.0, 0.25, 1.0])
    Tensor([-2.,  0.,  1.], f32)
    """
    return np.where(np.abs(x) <= x.dtype.type(lambd), x.dtype.type(0), x)


@lower(hardshrink)
def _(x, *, lambd):
    return where(abs(x) <= lambd, 0.0, x)


@check_arguments
def threshold(x: Any, threshold: float, value: float) -> Tensor:
    """`x` where it is larger than `threshold`, else `value`; NaN stays NaN.

    >>> threshold([1.0, 5.0], 2.0, -1.0)
    Tensor([-1.,  5.], f32)
    """
    x = as_tensor(x)
    return where(less_equal(x, threshold), value, x)


@composite
def prelu(x: Any, weight: Any) -> Tensor:
    """`x` where it is positive, else `weight` · x (He et al. 2015); `weight` is one number or one for each channel.

    Channels are axis 1 of `x` [B, C, ...]; the gradient of `weight` is the sum over the others.

    >>> prelu([[-2.0, -2.0]], [0.5, 0.25])
    Tensor([[-1. , -0.5]], f32)

    Raises:
        ShapeError: `weight` has neither one element nor one for each channel.
    """
    x, w = unify_dtypes([as_tensor(x), as_tensor(weight)])
    channels = x.shape[1] if x.ndim > 1 else 1
    if w.shape not in ((), (1,), (channels,)):
        raise ShapeError(
            "the weight of prelu does not fit", location=user_location(), received=f"{w.type} for {x.type}",
            expected=f"shape (1,) or ({channels},)",
        )  # fmt: skip
    w = reshape(w, shape=(-1, *(1,) * (x.ndim - 2)) if w.ndim and x.ndim > 1 else ())
    return where(x > 0.0, x, w * x)


@composite
def rrelu(
    x: Any, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, generator: Generator | None = None
) -> Tensor:
    """`x` where it is not negative, else slope · x (Xu et al. 2015).

    The slope is the mean of `lower` and `upper`; with `training` each element has its own, drawn evenly between them.

    >>> rrelu([-4.0, 1.0], 0.25, 0.75)
    Tensor([-2.,  1.], f32)
    """
    x = as_tensor(x)
    if not training:
        return where(x >= 0.0, x, x * ((lower + upper) / 2))
    slope = cast(rand(x.shape, dtype=f32, generator=generator) * (upper - lower) + lower, dtype=x.dtype)
    return where(x >= 0.0, x, x * slope)


@composite
def glu(x: Any, axis: int = -1) -> Tensor:
    """The gated linear unit: the first half of `x` along `axis` times the sigmoid of the second (Dauphin et al. 2016).

    >>> glu([3.0, 4.0, 0.0, 100.0])
    Tensor([1.5, 4. ], f32)

    Raises:
        ShapeError: the size of the axis is odd.
    """
    x = as_tensor(x)
    size = x.shape[normalize_axis(axis, x.ndim)]
    if size % 2:
        raise ShapeError(
            "glu cannot halve the axis", location=user_location(), expected=f"an even size of axis {axis}",
            received=str(x.type),
        )  # fmt: skip
    return narrow(x, axis, 0, size // 2) * sigmoid(narrow(x, axis, size // 2, size))


@check_arguments
def softmin(x: Any, axis: int = -1) -> Tensor:
    """Softmax of -x along `axis`.

    >>> softmin([0.0, 0.0])
    Tensor([0.5, 0.5], f32)
    """
    return softmax(-as_tensor(x), axis=axis)


@composite
def gumbel_softmax(
    logits: Any, tau: float = 1.0, hard: bool = False, axis: int = -1, generator: Generator | None = None
) -> Tensor:
    """A sample of the Gumbel-softmax distribution along `axis`, at temperature `tau` (Jang, Gu and Poole 2016).

    With `hard` it is one-hot, and its gradient is that of the soft sample (straight-through estimator).

    >>> gumbel_softmax([0.0, 1000.0], hard=True)
    Tensor([0., 1.], f32)

    Raises:
        ArgumentError: `tau` is not positive.
    """
    x = as_tensor(logits)
    if not tau > 0:
        raise ArgumentError(f"gumbel_softmax at temperature {tau}", location=user_location(), expected="tau > 0")
    noise = -log(-log(rand(x.shape, dtype=f32, generator=generator)))
    soft = softmax((x + cast(noise, dtype=x.dtype)) / tau, axis=axis)
    if not hard:
        return soft
    place = normalize_axis(axis, x.ndim)
    hot = equal(expand_dims(argmax(soft, axis=axis), place), iota(shape=soft.shape, axis=place))
    return cast(hot, dtype=soft.dtype) + (soft - stop_gradient(soft))

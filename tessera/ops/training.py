"""What behaves otherwise in training: dropout and batch normalisation."""

from __future__ import annotations

from typing import Any

from tessera.errors import ArgumentError, DTypeError, ShapeError, here
from tessera.ops.arguments import typed
from tessera.ops.coerce import same_dtype
from tessera.ops.elementwise import greater_equal, rsqrt, where
from tessera.ops.random import Generator, rand
from tessera.ops.reduce import mean, var
from tessera.ops.shape import reshape
from tessera.tensor import Tensor, as_tensor
from tessera.types import f32


@typed
def dropout(x: Any, p: float = 0.5, training: bool = True, generator: Generator | None = None) -> Tensor:
    """`x` with each element set to 0 with probability `p` and the others scaled by 1 / (1 - p).

    Nothing happens unless `training`. The mask comes from `generator`, or the default one (see `Generator` on draws
    made while tracing).

    >>> dropout([1.0, 2.0], training=False)
    Tensor([1., 2.], f32)

    Raises:
        ArgumentError: `p` is not in [0, 1].
    """
    x = as_tensor(x)
    if not 0 <= p <= 1:
        raise ArgumentError(f"dropout with probability {p}", location=here(), expected="0 to 1")
    if not x.dtype.is_float:
        raise DTypeError("dropout of integers", location=here(), received=str(x.type), suggestion="cast to ts.f32")
    if not training or p == 0:
        return x
    kept = greater_equal(rand(x.shape, dtype=f32, generator=generator), p)
    return where(kept, x * (1.0 / (1.0 - p) if p < 1 else 1.0), 0.0)


@typed
def batch_norm(
    x: Any,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Batch normalisation of `x` [B, C, ...] for each channel (Ioffe and Szegedy 2015), then `weight` and `bias` [C].

    With `training` by the mean and variance of the batch, else by the running ones. Tensors do not change in place:
    `running_statistics` gives the new running values.

    >>> batch_norm([[1.0], [3.0]], Tensor([0.0]), Tensor([1.0]), eps=0.0)
    Tensor([[-1.],
            [ 1.]], f32)

    Raises:
        ShapeError: `x` has no axis of channels, or a statistic or weight is not [C].
    """
    x = as_tensor(x)
    _check_channels(x, running_mean=running_mean, running_var=running_var, weight=weight, bias=bias)
    axes = (0, *range(2, x.ndim))
    shape = (x.shape[1], *(1 for _ in axes[1:]))
    if training:
        middle, spread = mean(x, axis=axes, keepdims=True), var(x, axis=axes, keepdims=True)
    else:
        middle, spread = (reshape(t, shape=shape) for t in same_dtype([running_mean, running_var]))
    out = (x - middle) * rsqrt(spread + eps)
    out = out if weight is None else out * reshape(weight, shape=shape)
    return out if bias is None else out + reshape(bias, shape=shape)


def _check_channels(x: Tensor, **each: Any) -> None:
    if x.ndim < 2:
        raise ShapeError("batch_norm takes [B, C, ...]", location=here(), received=str(x.type))
    for name, value in each.items():
        if value is not None and as_tensor(value).shape != (x.shape[1],):
            raise ShapeError(
                f"{name} of batch_norm is not one number for each channel", location=here(),
                expected=f"shape ({x.shape[1]},), for {x.type}", received=str(as_tensor(value).type),
            )  # fmt: skip


@typed
def running_statistics(x: Any, running_mean: Any, running_var: Any, momentum: float = 0.1) -> tuple[Tensor, Tensor]:
    """The running mean and variance of `batch_norm` after this batch: old · (1 - momentum) + new · momentum.

    The new variance is that of a sample (n - 1 below).
    """
    x = as_tensor(x)
    _check_channels(x, running_mean=running_mean, running_var=running_var)
    axes = (0, *range(2, x.ndim))
    new = mean(x, axis=axes), var(x, axis=axes, correction=1.0)
    old = as_tensor(running_mean), as_tensor(running_var)
    return tuple(o * (1.0 - momentum) + n * momentum for o, n in zip(old, new, strict=True))  # type: ignore[return-value]

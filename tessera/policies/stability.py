"""Decorators that put sturdier arithmetic under a function: stable forms, compensated sums, stochastic rounding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tessera import stable
from tessera.ops import nn, reduce, statistics
from tessera.policies.frame import Context, Frame
from tessera.tensor import Tensor


def _variance(x: Any, axis: Any = None, keepdims: bool = False, correction: float = 0.0) -> Tensor:
    return stable.variance(x, axis=axis, keepdims=keepdims, correction=correction)


def _deviation(x: Any, axis: Any = None, keepdims: bool = False, correction: float = 0.0) -> Tensor:
    return _variance(x, axis, keepdims, correction).sqrt()


def _normalized(x: Any, axis: Any = -1, eps: float = 1e-5, center: bool = True) -> Tensor:
    return stable.layer_norm(x, axis=axis, eps=eps) if center else stable.rms_norm(x, eps=eps)


# What stands for each op whose usual form overflows or cancels.
STABLE: dict[Any, Callable[..., Any]] = {
    reduce.mean: lambda x, axis=None, keepdims=False: stable.mean(x, axis=axis, keepdims=keepdims),
    reduce.var: _variance,
    statistics.std: _deviation,
    statistics.logsumexp: lambda x, axis=None, keepdims=False: stable.logsumexp(x, axis=axis, keepdims=keepdims),
    nn.softmax: stable.softmax,
    nn.log_softmax: stable.log_softmax,
    nn.normalize: _normalized,
}


def numerically_stable(function: Callable[..., Any]) -> Callable[..., Any]:
    """Run a function with means, variances, norms and softmax in their stable forms (`tessera.stable`).

    >>> @numerically_stable
    ... def spread(x):
    ...     return x.var()
    >>> spread(Tensor([60000.0, 60002.0], "f16")).item()
    0.0
    """
    return Context(Frame(instead=STABLE))(function)


kahan = Context(Frame({"compensated": True}))


def kahan_sum(function: Callable[..., Any]) -> Callable[..., Any]:
    """Run a function with `sum` and `mean` compensated: the error no longer grows with the number of elements.

    >>> @kahan_sum
    ... def total(x):
    ...     return x.sum()
    >>> total(Tensor([1e8, 1.0, -1e8, 1.0])).item()
    2.0
    """
    return kahan(function)


class Summation:
    """`ts.summation`: how sums are computed; `@ts.summation.kahan` compensates them."""

    kahan = staticmethod(kahan_sum)


class Rounding:
    """`ts.rounding`: how results are rounded; each is a decorator."""

    @staticmethod
    def stochastic(function: Callable[..., Any]) -> Callable[..., Any]:
        """Run a function with every result rounded up or down at random, in proportion to its distance."""
        return Context(Frame({"rounding": "stochastic"}))(function)

    @staticmethod
    def toward_zero(function: Callable[..., Any]) -> Callable[..., Any]:
        """Run a function with every result rounded toward zero."""
        return Context(Frame({"rounding": "toward_zero"}))(function)


summation, rounding = Summation(), Rounding()

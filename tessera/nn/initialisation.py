"""Initialisation: the first values of parameters, drawn from the default generator (PyTorch's `torch.nn.init`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tessera.core.errors import ArgumentError, user_location
from tessera.core.types import f32
from tessera.ir.tensor import Tensor
from tessera.ops.tensor.random import rand, randn


def check_shape(shape: Any) -> tuple[int, ...]:
    """A shape as a tuple; PyTorch's functions of these names take the tensor that they fill.

    Raises:
        ArgumentError: it is a tensor or an array.
    """
    if isinstance(shape, (Tensor, np.ndarray)):
        raise ArgumentError(
            "initialisation takes a shape", location=user_location(), expected="sizes, as (16, 8)",
            received=f"a tensor of shape {list(shape.shape)}",
            suggestion="tensors do not change: layer.weight = nn.Parameter(nn.init.xavier_uniform(layer.weight.shape))",
        )  # fmt: skip
    return tuple(shape)


def uniform(shape: Sequence[int], low: float = 0.0, high: float = 1.0, dtype: Any = f32) -> Tensor:
    """Uniform numbers in [low, high).

    >>> uniform((2, 3), -1.0, 1.0).shape
    (2, 3)
    """
    return (rand(check_shape(shape), dtype=f32) * (high - low) + low).to(dtype)


def normal(shape: Sequence[int], mean: float = 0.0, std: float = 1.0, dtype: Any = f32) -> Tensor:
    """Normal numbers.

    >>> normal((2, 3), std=0.02).shape
    (2, 3)
    """
    return (randn(check_shape(shape), dtype=f32) * std + mean).to(dtype)


def truncated_normal(shape: Sequence[int], std: float = 1.0, limit: float = 2.0, dtype: Any = f32) -> Tensor:
    """Normal numbers within `limit` standard deviations, by the inverse of the distribution function.

    >>> bool(abs(truncated_normal((100,))).max() <= 2.0)
    True
    """
    from tessera.ops.tensor.special_functions import erfinv

    edge = math.erf(limit / math.sqrt(2.0))
    return (erfinv(uniform(shape, -edge, edge)) * (std * math.sqrt(2.0))).to(dtype)


def count_fans(shape: Sequence[int]) -> tuple[int, int]:
    """The inputs and outputs of one element of a result, for a weight [outputs, inputs, ...].

    >>> count_fans((8, 3, 5, 5))
    (75, 200)

    Raises:
        ArgumentError: the weight has less than two axes.
    """
    if len(check_shape(shape)) < 2:
        raise ArgumentError(
            f"a weight of shape {list(shape)} has no fan", location=user_location(), expected="two axes or more"
        )
    field = math.prod(shape[2:])
    return shape[1] * field, shape[0] * field


def kaiming_uniform(shape: Sequence[int], a: float = 0.0, dtype: Any = f32) -> Tensor:
    """Uniform numbers for layers before a leaky ReLU of slope `a` (He et al. 2015).

    >>> bool(abs(kaiming_uniform((4, 6))).max() <= 1.0)
    True
    """
    bound = math.sqrt(6.0 / ((1.0 + a * a) * max(count_fans(shape)[0], 1)))
    return uniform(shape, -bound, bound, dtype)


def kaiming_normal(shape: Sequence[int], a: float = 0.0, dtype: Any = f32) -> Tensor:
    """Normal numbers for layers before a leaky ReLU of slope `a` (He et al. 2015).

    >>> kaiming_normal((4, 6)).shape
    (4, 6)
    """
    return normal(shape, 0.0, math.sqrt(2.0 / ((1.0 + a * a) * max(count_fans(shape)[0], 1))), dtype)


def xavier_uniform(shape: Sequence[int], gain: float = 1.0, dtype: Any = f32) -> Tensor:
    """Uniform numbers that keep the variance in both directions (Glorot and Bengio 2010).

    >>> bool(abs(xavier_uniform((3, 3))).max() <= 1.0)
    True
    """
    bound = gain * math.sqrt(6.0 / max(sum(count_fans(shape)), 1))
    return uniform(shape, -bound, bound, dtype)


def xavier_normal(shape: Sequence[int], gain: float = 1.0, dtype: Any = f32) -> Tensor:
    """Normal numbers that keep the variance in both directions (Glorot and Bengio 2010).

    >>> xavier_normal((3, 3)).shape
    (3, 3)
    """
    return normal(shape, 0.0, gain * math.sqrt(2.0 / max(sum(count_fans(shape)), 1)), dtype)


def bias_of(fan_in: int, shape: Sequence[int], dtype: Any = f32) -> Tensor:
    """A bias as PyTorch draws it: uniform within 1 / sqrt(fan_in).

    >>> bool(abs(bias_of(4, (3,))).max() <= 0.5)
    True
    """
    bound = 1.0 / math.sqrt(fan_in) if fan_in > 0 else 0.0
    return uniform(shape, -bound, bound, dtype)


def __getattr__(name: str) -> Any:
    """Explain the names of PyTorch, whose functions fill a parameter in place."""
    plain = {"trunc_normal_": "truncated_normal"}.get(name, name.removesuffix("_"))
    own = plain in globals()
    hint = f"layer.weight = nn.Parameter(nn.init.{plain}(layer.weight.shape))" if own else "a tensor: ts.zeros(shape)"
    raise AttributeError(
        f"nn.init has no {name!r}" + (f": it makes new tensors; write {hint}" if name.endswith("_") else ""), name=name
    )

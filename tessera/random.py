"""Random tensors: `ts.random.uniform(shape)`, `ts.random.bernoulli(p, shape)`; all from counter-based generators.

Each draws from `generator`, or from the default one, which `manual_seed` starts anew.
"""

from __future__ import annotations

from typing import Any

from tessera.core.types import DType, f32
from tessera.ir.tensor import Tensor
from tessera.ops.tensor.argument_checks import check_arguments
from tessera.ops.tensor.random import Generator, bernoulli, manual_seed, permutation, rand, randint, randn

__all__ = ["Generator", "bernoulli", "manual_seed", "normal", "permutation", "rand", "randint", "randn", "uniform"]


@check_arguments
def uniform(
    shape: Any, low: float = 0.0, high: float = 1.0, dtype: DType = f32, generator: Generator | None = None
) -> Tensor:
    """Numbers evenly spread over [low, high).

    >>> uniform((2, 3), -1.0, 1.0).shape
    (2, 3)
    """
    draw = rand(shape, dtype=dtype, generator=generator)
    return draw if (low, high) == (0.0, 1.0) else draw * (high - low) + low


@check_arguments
def normal(
    shape: Any, mean: float = 0.0, std: float = 1.0, dtype: DType = f32, generator: Generator | None = None
) -> Tensor:
    """Normally distributed numbers of this mean and standard deviation.

    >>> normal((4,), mean=10.0, std=0.0).tolist()
    [10.0, 10.0, 10.0, 10.0]
    """
    return randn(shape, dtype=dtype, generator=generator) * std + mean

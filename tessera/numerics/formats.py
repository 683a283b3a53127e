"""What one rounding to an element type may cost: unit roundoff, smallest step, largest value."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from tessera.types import DType, Policy, fp4, fp6, fp6_e2m3, tf32


@dataclass(frozen=True)
class Format:
    """The error of rounding x to an element type: at most `unit`·|x| + `tiny`, while |x| ≤ `top`.

    `saturates` tells whether larger values become `top`; otherwise they overflow: to infinity
    where the format has one (`infinite`), else to NaN.
    """

    dtype: DType
    unit: float
    tiny: float
    top: float
    saturates: bool = False
    infinite: bool = True

    def rounding(self, magnitude: np.ndarray) -> np.ndarray:
        """A bound on the error of rounding values up to `magnitude`."""
        return self.unit * magnitude + self.tiny


# What never rounds: integers and bools.
def _exact(dtype: DType) -> Format:
    return Format(dtype, 0.0, 0.0, math.inf)


@functools.cache
def format_of(dtype: DType, policy: Policy | None = None) -> Format:
    """The cost of rounding to `dtype` under a policy.

    >>> from tessera.types import f32
    >>> format_of(f32).unit == 2.0**-24
    True
    """
    if not dtype.is_float:
        return _exact(dtype)
    info = ml_dtypes.finfo(dtype.numpy)
    # tf32 is stored as f32 and keeps 13 bits less of the mantissa.
    wider = 2.0**13 if dtype is tf32 else 1.0
    step = 0.5 if policy is None or policy.rounding == "nearest" else 1.0
    tiny = float(info.smallest_subnormal) * wider * step
    if policy is not None and policy.denormals == "flush":
        tiny = float(info.smallest_normal)
    saturates = dtype in (fp6, fp6_e2m3, fp4) or bool(policy and policy.saturate)
    infinite = bool(np.isinf(np.asarray(np.inf).astype(dtype.numpy).astype(np.float64)))
    return Format(dtype, float(info.eps) * wider * step, tiny, float(info.max), saturates, infinite)


def gamma(count: int, unit: float) -> float:
    """γ(n) = n·u / (1 − n·u): the relative error of n roundings in a row (Higham 2002, lemma 3.1)."""
    total = count * unit
    return total / (1 - total) if total < 1 else math.inf

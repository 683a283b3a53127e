"""Conversions with a rounding of one's choice, made of ops that every target has."""

from __future__ import annotations

from typing import Any

import ml_dtypes

from tessera.errors import ArgumentError
from tessera.ops import elementwise as e
from tessera.ops import functions as f
from tessera.ops.basic import cast
from tessera.tensor import Tensor
from tessera.types import DType, f32, f64, int64

ROUNDINGS = ("rte", "rtz")


def wider(to: DType) -> DType:
    """The type in which to compute what is then rounded to `to` once.

    Raises:
        ArgumentError: there is none.
    """
    if to in (f64, int64):
        raise ArgumentError(f"nothing is wider than {to} to round it from", expected="a narrower type, or rte")
    return f64 if to is f32 else f32 if to.is_float else int64


def rounded(x: Tensor, to: DType, rounding: str = "rte", saturate: bool = False) -> Tensor:
    """`x` converted to `to`: to the nearest, ties to even ("rte"), or toward zero ("rtz").

    With `saturate` what lies beyond the range, infinities too, becomes the largest number; NaN stays NaN. Toward
    zero, finite numbers beyond the range become it in any case. Integers are clipped, else they wrap.

    Raises:
        ArgumentError: there is no such rounding, or none from this type.
    """
    if rounding not in ROUNDINGS:
        raise ArgumentError(f'"{rounding}" is not a rounding of this language', expected=" or ".join(ROUNDINGS))
    if not to.is_float:
        return cast(_clipped(x, to) if saturate else x, dtype=to)
    held = x if x.dtype == wider(to) or rounding == "rte" else cast(x, dtype=wider(to))
    low = _clipped(held, to)
    if rounding == "rte":
        return cast(low if saturate else held, dtype=to)
    found = _toward_zero(low, to)
    return found if saturate else e.where(f.isinf(held), cast(held, dtype=to), found)


def _clipped(x: Tensor, to: DType) -> Tensor:
    info: Any = ml_dtypes.finfo(to.numpy) if to.is_float else ml_dtypes.iinfo(to.numpy)
    low, high = (float(info.min), float(info.max)) if to.is_float else (int(info.min), int(info.max))
    if not to.is_float and x.dtype.is_integer and x.dtype.bits <= to.bits:
        return x
    return e.minimum(e.maximum(x, low), high)


def _toward_zero(x: Tensor, to: DType) -> Tensor:
    """`x`, within the range of `to`, rounded toward zero: where the nearest is too large, the one below it."""
    info: Any = ml_dtypes.finfo(to.numpy)
    near = cast(x, dtype=to)
    back = cast(near, dtype=x.dtype)
    # 1.25 · 2^-p of a number with p bits is more than half and less than one and a half of its last place;
    # among denormals the last place is the same for all.
    step = e.maximum(e.abs(back) * (1.25 * float(info.eps) / 2), 0.75 * float(info.smallest_subnormal))
    below = cast(back - e.where(e.less(back, 0.0), -step, step), dtype=to)
    return e.where(e.greater(e.abs(back), e.abs(x)), below, near)

"""Conversions between element types: one rounding, from the source to the target format."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from tessera.numerics.rounding import FINITE_ONLY, grid_of, round_to
from tessera.types import DType, Policy, f32, f64, tf32, uint64


def convert(array: Any, to: DType, saturate: bool = False) -> Any:
    """`array` as elements of `to`: nearest-even for floats, toward zero and saturating for integers.

    A float beyond the target's range becomes its infinity, or NaN where it has none; with
    `saturate`, its largest finite value. NaN becomes integer 0, and +0 where a float format has none.

    >>> from tessera.types import int8
    >>> convert(np.float32([1.0, 3.9, -3.9, 1e9]), int8)
    array([  1,   3,  -3, 127], dtype=int8)
    """
    array = np.asarray(array)
    if array.dtype == to.numpy and to is not tf32 and not (saturate and to.bits >= 32):
        return array  # a sum in f32 may overflow though no conversion follows
    if to is f32 and array.itemsize <= 2 and array.dtype.kind in "fV":
        return array.astype(np.float32)  # exact, and often done
    if to.is_integer and array.dtype.kind not in "iub":
        return _to_integer(array, to)
    if to is tf32:
        return _round_mantissa(_clip(array, to) if saturate else array, 13)
    if to.is_float and to.bits < 32 and array.dtype == f64.numpy and to.numpy != np.dtype(np.float16):
        array = _to_odd(array)
    with np.errstate(all="ignore"):
        if to in FINITE_ONLY and array.dtype.kind in "fV":
            array = np.where(array != array, array.dtype.type(0), array)  # NaN gives +0, whatever its sign
        if to.is_float and saturate:
            array = _clip(array, to)
        return array.astype(to.numpy)


def store(array: Any, to: DType, policy: Policy | None, seed: int = 0) -> Any:
    """`array` as elements of `to`, rounded, saturated and flushed as the policy says.

    Stochastic rounding takes its random bits from `seed` and each element's place.

    >>> from tessera.types import flush_denormals
    >>> store(np.float32([1e-40, 1.0]), f32, f32 @ flush_denormals)
    array([0., 1.], dtype=float32)
    """
    if policy is None:
        return convert(array, to)
    if not to.is_float or (policy.rounding == "nearest" and policy.denormals == "preserve"):
        return convert(array, to, saturate=policy.saturate)
    return round_to(array, to, policy.rounding, policy.saturate, policy.denormals == "flush", seed)


def _to_integer(array: np.ndarray, to: DType) -> np.ndarray:
    info = ml_dtypes.iinfo(to.numpy)
    wide = np.trunc(np.nan_to_num(array.astype(np.float64), nan=0.0, posinf=np.inf, neginf=-np.inf))
    # 2**63 - 1 is not a double: values at or beyond the top are set as integers.
    top, bottom = wide >= float(info.max), wide <= float(info.min)
    out = np.where(top | bottom, 0.0, wide).astype(np.uint64 if to is uint64 else np.int64)
    return np.where(top, int(info.max), np.where(bottom, int(info.min), out)).astype(to.numpy)


def _to_odd(array: np.ndarray) -> np.ndarray:
    """f64 to f32 by rounding to odd: a second rounding to a format of ≤ 22 bits is then exact.

    Boldo and Melquiond, "Emulation of FMA and correctly rounded sums" (2008).
    """
    with np.errstate(all="ignore"):
        near = array.astype(np.float32)
        bits = near.view(np.uint32)
        back = near.astype(np.float64)
        inexact = (back != array) & np.isfinite(near)
        away = np.abs(back) > np.abs(array)
    toward = np.where(inexact & away, bits - np.uint32(1), bits)
    return np.where(inexact, toward | np.uint32(1), bits).astype(np.uint32).view(np.float32)


def _round_mantissa(array: np.ndarray, dropped: int) -> np.ndarray:
    """f32 with the lowest `dropped` mantissa bits rounded away, nearest-even (tf32: 13)."""
    single = _to_odd(array) if array.dtype == f64.numpy else array.astype(f32.numpy)
    bits = single.view(np.uint32)
    half = np.uint32((1 << (dropped - 1)) - 1)
    even = (bits >> np.uint32(dropped)) & np.uint32(1)
    rounded = (bits + half + even) & np.uint32(0xFFFFFFFF << dropped & 0xFFFFFFFF)
    return np.where(np.isfinite(single), rounded, bits).astype(np.uint32).view(np.float32)


def _clip(array: np.ndarray, to: DType) -> np.ndarray:
    top = grid_of(to).top
    return np.where(np.isnan(array.astype(np.float64)), array, np.clip(array, -top, top))

"""Rounding in IR: to fewer bits of mantissa, to odd, toward zero, stochastically; saturation and flushed denormals.

Each builder gives a function of scalars that code generators emit. The grid of a type says which numbers it has.
"""

from __future__ import annotations

from functools import cache

from tessera.core.types import DType, Policy, f32, f64, int32, int64, uint32
from tessera.ir.core import Function
from tessera.ir.numerics.conversion import FINITE_ONLY, FloatGrid, find_float_grid
from tessera.ir.tensor import Tensor
from tessera.lower.scalar_functions.decomposition import trace_rule
from tessera.ops.dialects.arith import bitcast, copysign, extract_bit, is_nan, trunc
from tessera.ops.tensor import elementwise as e
from tessera.ops.tensor.basic import cast
from tessera.ops.tensor.elementwise import where

F32_MANTISSA_BITS, F32_MIN_EXPONENT = 23, -126
F64_MANTISSA_BITS, F64_BIAS = 52, 1023
INF, NAN = float("inf"), float("nan")


def add_half_step(bits: Tensor, dropped: int) -> Tensor:
    """The bits of a float plus half a step: with the lower `dropped` bits cut off they are rounded to nearest even."""
    return bits + ((1 << (dropped - 1)) - 1) + extract_bit(bits, dropped)


def clear_low_bits(bits: Tensor, count: int) -> Tensor:
    """The 32 bits of a float with the lowest ones 0."""
    return bits & ((1 << 32) - (1 << count))


@cache
def build_mantissa_rounding(dropped: int) -> Function:
    """The function that rounds an f32 to `dropped` bits of mantissa fewer, ties to even."""

    def round_mantissa(x: Tensor) -> Tensor:
        rounded = clear_low_bits(add_half_step(bitcast(x, dtype=uint32), dropped), dropped)
        return where(is_nan(x), NAN, bitcast(rounded, dtype=f32))

    return trace_rule(round_mantissa, (f32,))


@cache
def build_rounding_to_odd() -> Function:
    """The function from f64 to f32 by rounding to odd: a second rounding is then exact (Boldo and Melquiond 2008)."""

    def round_to_odd(x: Tensor) -> Tensor:
        near = cast(x, dtype=f32)
        bits = bitcast(near, dtype=int32)
        back = cast(near, dtype=f64)
        inexact = (back != x) & (e.abs(near) < INF)
        bits = where(inexact & (e.abs(back) > e.abs(x)), bits - 1, bits)
        return bitcast(where(inexact, bits | 1, bits), dtype=f32)

    return trace_rule(round_to_odd, (f64,))


@cache
def build_double_truncation() -> Function:
    """The function from f64 to f32 by rounding toward zero; finite numbers stay finite."""

    def truncate(x: Tensor) -> Tensor:
        near = cast(x, dtype=f32)
        bits = bitcast(near, dtype=int32)
        return bitcast(where(e.abs(cast(near, dtype=f64)) > e.abs(x), bits - 1, bits), dtype=f32)

    return trace_rule(truncate, (f64,))


@cache
def build_saturation(dtype: DType, top: float) -> Function:
    """The function that gives the largest number for larger ones, infinities among them; NaN stays."""

    def saturate(x: Tensor) -> Tensor:
        size = e.abs(x)
        return copysign(where(size > top, top, size), x)

    return trace_rule(saturate, (dtype,))


@cache
def build_flush(dtype: DType, least_normal: float) -> Function:
    """The function that gives 0, with the sign of the operand, for denormals."""

    def flush(x: Tensor) -> Tensor:
        size = e.abs(x)
        return copysign(where(size < least_normal, 0.0, size), x)

    return trace_rule(flush, (dtype,))


@cache
def build_truncation(dtype: DType) -> Function:
    """The function that rounds an f32 toward zero to a narrower type; finite numbers stay finite."""
    grid = find_float_grid(dtype)

    def truncate(x: Tensor) -> Tensor:
        found = _truncate_mantissa(x, grid)
        size = e.abs(found)
        too_large = (size > grid.top) & (size < INF)
        return copysign(where(too_large, grid.top, size), found)

    return trace_rule(truncate, (f32,))


def _truncate_mantissa(x: Tensor, grid: FloatGrid) -> Tensor:
    """Fewer digits; below the least normal number all steps are equal. NaN and infinity stay."""
    size = e.abs(x)
    kept = bitcast(clear_low_bits(bitcast(x, dtype=uint32), F32_MANTISSA_BITS - grid.digits), dtype=f32)
    if grid.least > F32_MIN_EXPONENT:
        step = 2.0 ** (grid.least - grid.digits)
        kept = where(size < 2.0**grid.least, trunc(x * (1 / step)) * step, kept)
    return where(size < INF, kept, x)


def find_overflow_value(policy: Policy) -> float:
    """The value that numbers too large for a policy's storage become."""
    grid = find_float_grid(policy.storage)
    if policy.saturate or policy.storage in FINITE_ONLY:
        return grid.top
    return INF if grid.infinite else NAN


@cache
def build_stochastic_rounding(policy: Policy) -> Function:
    """The function from an f64 and 53 random bits to an f32 on the grid of a policy's storage.

    It rounds up where the bits, as a fraction, are less than the distance from the neighbour below.
    """
    grid, flush = find_float_grid(policy.storage), policy.denormals == "flush"

    def round_stochastically(x: Tensor, draw: Tensor) -> Tensor:
        near = _choose_neighbour(e.abs(x), draw, grid)
        near = where(near > grid.top, find_overflow_value(policy), near)
        if flush:
            near = where(near < 2.0**grid.least, 0.0, near)
        return cast(copysign(near, x), dtype=f32)

    return trace_rule(round_stochastically, (f64, int64))


def _choose_neighbour(size: Tensor, draw: Tensor, grid: FloatGrid) -> Tensor:
    """Of the two neighbours of a magnitude on a grid, the one that a draw chooses; infinity and NaN stay.

    The magnitude is scaled to steps of the grid and back by powers of two, which is exact.
    """
    exponent = e.maximum(bitcast(size, dtype=int64) >> F64_MANTISSA_BITS, grid.least + F64_BIAS)
    steps = size * _make_power_of_two(grid.digits + 2 * F64_BIAS - exponent)
    low = e.floor(steps)
    distance = (steps - low) * 2.0**53
    up = cast(draw, dtype=f64) < distance
    near = where(up, low + 1.0, low) * _make_power_of_two(exponent - grid.digits)
    return where(size < INF, near, size)


def _make_power_of_two(biased_exponent: Tensor) -> Tensor:
    """Two to a power, by its biased exponent in f64."""
    return bitcast(biased_exponent << F64_MANTISSA_BITS, dtype=f64)

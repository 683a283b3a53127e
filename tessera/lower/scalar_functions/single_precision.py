"""Scalar functions of f32: argument reduction and minimax polynomials.

Polynomials are minimax fits (Lawson's iteration, relative error below 2^-27) on the reduced range. Each result lies
within the bounds of the OpenCL full profile; `tests/codegen/llvm/test_scalar_functions.py` measures them.
"""

from __future__ import annotations

from tessera.core.types import f32, f64, int32, int64
from tessera.ir.tensor import Tensor
from tessera.lower.scalar_functions.decomposition import SHARED, Rule, constant, evaluate_polynomial
from tessera.lower.scalar_functions.quarter_turns import (
    reduce_all_quarter_turns,
    reduce_quarter_turns,
    reduce_small_quarter_turns,
)
from tessera.ops.dialects.arith import bitcast, copysign, divide, fma, fmod, is_nan
from tessera.ops.tensor import elementwise as e
from tessera.ops.tensor import scalar_functions as f
from tessera.ops.tensor.basic import cast
from tessera.ops.tensor.elementwise import where

# 1.5 * 2^23: added to a float below 2^22 it leaves the nearest integer in the low bits of the mantissa.
ROUND_TO_INTEGER, ROUND_TO_INTEGER_BITS = 12582912.0, 0x4B400000
ROUND_TO_SIXTEENTH = 786432.0  # added and subtracted again, it rounds to a multiple of 1/16
NEAR_ZERO = 1e-8  # exp(x) - 1 and log(1 + x) of smaller numbers round to x
INF, NAN = float("inf"), float("nan")


def _scale_by_power_of_two(p: Tensor, exponent_bits: Tensor) -> Tensor:
    """p * 2^n, in two steps so that neither factor leaves the range of normal numbers."""
    n = exponent_bits - ROUND_TO_INTEGER_BITS
    half = n >> 1
    rest = n - half
    half, rest = half + 127, rest + 127
    half, rest = half << 23, rest << 23
    first, second = bitcast(half, dtype=f32), bitcast(rest, dtype=f32)
    return p * first * second


def split_exp(x: Tensor) -> tuple[Tensor, Tensor]:
    """exp(x - n * log(2)), and `ROUND_TO_INTEGER` + n."""
    x = where(x > 89.0, 89.0, x)
    x = where(x < -105.0, -105.0, x)  # its n is -151: no p makes more than 0 of that
    shifted = fma(x, 1.44269504, ROUND_TO_INTEGER)
    n = shifted - ROUND_TO_INTEGER
    rest = fma(n, -0.693145751953125, x)
    rest = fma(n, -1.42860682030941723212e-6, rest)
    q = evaluate_polynomial(rest, 0.00138131448, 0.00836941879, 0.041668456, 0.166665152, 0.49999994)
    square = rest * rest
    s = fma(q, square, rest)
    return s + 1.0, shifted


@SHARED(e.exp, f32)
def exp_f32(x: Tensor) -> Tensor:
    """exp(x) = 2^n * exp(x - n * log(2)), the last by a polynomial (Cody and Waite 1980)."""
    p, shifted = split_exp(x)
    return _scale_by_power_of_two(p, bitcast(shifted, dtype=int32))


def split_exp2(x: Tensor) -> tuple[Tensor, Tensor]:
    """2^(x - n), and `ROUND_TO_INTEGER` + n."""
    x = where(x > 130.0, 130.0, x)
    x = where(x < -152.0, -152.0, x)
    shifted = x + ROUND_TO_INTEGER
    n = shifted - ROUND_TO_INTEGER
    rest = x - n
    q = evaluate_polynomial(
        rest, 0.000153523171, 0.00134001707, 0.00961844996, 0.0555032939, 0.240226477, 0.693147182
    )  # fmt: skip
    return q * rest + 1.0, shifted


@SHARED(e.exp2, f32)
def exp2_f32(x: Tensor) -> Tensor:
    """2^x = 2^n * 2^(x - n), the last by a polynomial."""
    p, shifted = split_exp2(x)
    return _scale_by_power_of_two(p, bitcast(shifted, dtype=int32))


@SHARED(f.expm1, f32)
def expm1_f32(x: Tensor) -> Tensor:
    """exp(x) - 1 = 2 (s p + (s - 1/2)), where p = exp(x - n * log(2)) - 1 and s = 2^(n - 1): 2^128 is no float."""
    y = where(x > 89.0, 89.0, x)
    y = where(y < -20.0, -20.0, y)
    shifted = fma(y, 1.44269504, ROUND_TO_INTEGER)
    n = shifted - ROUND_TO_INTEGER
    rest = fma(n, -0.693145751953125, y)
    rest = fma(n, -1.42860682030941723212e-6, rest)
    q = evaluate_polynomial(
        rest, 0.000198458816, 0.00139406684, 0.00833338965, 0.0416663587, 0.166666657, 0.5
    )  # fmt: skip
    p = fma(q, rest * rest, rest)
    scale = bitcast((bitcast(shifted, dtype=int32) - (ROUND_TO_INTEGER_BITS - 126)) << 23, dtype=f32)
    found = fma(scale, p, scale - 0.5) * 2.0
    return where(e.abs(x) < NEAR_ZERO, x, found)


def _reduce_log(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """e, f, f^2 and the rest, where x = 2^e * (1 + f), 1 + f is from sqrt(1/2) to sqrt(2), and
    log(1 + f) = f - f^2 / 2 + rest."""
    tiny = x < 1.17549435e-38
    scaled = where(tiny, x * 8388608.0, x)
    correction = where(tiny, constant(-23.0, f32), constant(0.0, f32))
    bits = bitcast(scaled, dtype=int32)
    exponent = (bits - 0x3F3504F3) >> 23
    m = bitcast(bits - (exponent << 23), dtype=f32)
    return cast(exponent, dtype=f32) + correction, *_expand_log(m - 1.0)


def _expand_log(fraction: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """f, f^2 and the rest of log(1 + f) = f - f^2 / 2 + rest."""
    q = evaluate_polynomial(
        fraction, 0.0674663857, -0.116756514, 0.118881628, -0.124055892, 0.142195523, -0.166679963, 0.200021192,
        -0.250000089, 0.333333135,
    )  # fmt: skip
    square = fraction * fraction
    return fraction, square, square * fraction * q


def _combine_log(exponent: Tensor, fraction: Tensor, square: Tensor, rest: Tensor) -> Tensor:
    """e * log(2) + log(1 + f), log(2) in two parts."""
    w = fma(exponent, -2.12194440e-4, rest)
    w = fma(square, -0.5, w)
    return fma(exponent, 0.693359375, fraction + w)


def select_log_special_cases(x: Tensor, v: Tensor) -> Tensor:
    """A logarithm as C has it for negative numbers, zero, infinity and NaN."""
    v = where(x < 0.0, NAN, v)
    v = where(x == 0.0, -INF, v)
    return where(x < INF, v, x)  # infinity and NaN are their own


@SHARED(e.log, f32)
def log_f32(x: Tensor) -> Tensor:
    """log(x) = e * log(2) + log(1 + f), log(2) in two parts."""
    return select_log_special_cases(x, _combine_log(*_reduce_log(x)))


@SHARED(f.log1p, f32)
def log1p_f32(x: Tensor) -> Tensor:
    """log(1 + x) = e * log(2) + log(1 + f), where f = (1 + x) / 2^e - 1 is rounded once (after N. Juffa)."""
    u = x + 1.0
    bits = bitcast(u, dtype=int32)
    exponent = (bits - 0x3F3504F3) >> 23
    power = exponent << 23
    scale = bitcast(0x3F800000 - power, dtype=f32)
    far = bitcast(bits - power, dtype=f32) - 1.0  # x is so large that 1 + x is x, and 2^-e may be no normal number
    fraction = where(x > 1e9, far, fma(x, scale, scale - 1.0))
    found = select_log_special_cases(u, _combine_log(cast(exponent, dtype=f32), *_expand_log(fraction)))
    return where(e.abs(x) < NEAR_ZERO, x, found)


@SHARED(e.log2, f32)
def log2_f32(x: Tensor) -> Tensor:
    """log2(x) = e + log2(e) * log(1 + f); of log2(e) = 1 + 0.44269504 the 1 is added without rounding error."""
    exponent, fraction, square, rest = _reduce_log(x)
    w = fma(square, -0.5, rest)
    v = fma(fraction, 0.44269504088896340736, w * 0.44269504088896340736)
    return select_log_special_cases(x, v + w + fraction + exponent)


def tanh_near_zero(x: Tensor) -> Tensor:
    """tanh(x) for |x| < 0.625: an odd polynomial."""
    z = x * x
    q = evaluate_polynomial(z, -0.00569351809, 0.0206304099, -0.0537376143, 0.133314252, -0.333332807)
    return fma(q, z * x, x)


@SHARED(e.tanh, f32)
def tanh_f32(x: Tensor) -> Tensor:
    """tanh(x) = 1 - 2 / (exp(2 |x|) + 1) with the sign of x, from 0.625 on."""
    size = e.abs(x)
    near = copysign(tanh_near_zero(x), x)
    power = e.exp(size + size)
    far = copysign(1.0 - divide(2.0, power + 1.0), x)
    return where(size < 0.625, near, far)


def clamp(x: Tensor, limit: float) -> Tensor:
    """x within ±limit; NaN stays."""
    x = where(x > limit, limit, x)
    return where(x < -limit, -limit, x)


@SHARED(e.erf, f32)
def erf_f32(x: Tensor) -> Tensor:
    """erf(x) = x p(x²) / q(x²): a rational minimax fit up to 3.95, within 6 ulp; it is 1 from there on."""
    x = clamp(x, 3.95)
    z = x * x
    p = evaluate_polynomial(z, 2.02590627e-6, 2.84686772e-4, 3.80813819e-3, 5.28753735e-2, 0.191549838, 1.12837911)
    q = evaluate_polynomial(z, 3.78317309e-5, 1.17071928e-3, 1.50550436e-2, 0.114559419, 0.503089309, 1.0)
    return clamp(divide(x * p, q), 1.0)


@SHARED(e.erfc, f32)
def erfc_f32(x: Tensor) -> Tensor:
    """erfc(x) = exp(-x^2) p(q) / (1 + 2x) for q = (x - 2) / (x + 2), and 2 - erfc(-x) below 0 (after N. Juffa)."""
    size = e.abs(x)
    t = where(size > 11.0, 11.0, size)
    p = evaluate_polynomial(
        divide(t - 2.0, t + 2.0), 3.29297882e-5, -3.50061971e-4, -1.24907664e-3, 1.26266341e-3, 8.63181807e-3,
        -8.04248141e-3, -5.42032075e-2, 1.64053104e-1, -1.66031532e-1, -9.27639028e-2, 1.27697839,
    )  # fmt: skip
    high = (t + ROUND_TO_SIXTEENTH) - ROUND_TO_SIXTEENTH  # its square is exact
    square = t * t
    rest = (square - high * high) - (t - high) * (t + high)
    return select_erfc_side(x, square, rest, divide(p, t + t + 1.0))


def select_erfc_side(x: Tensor, square: Tensor, rest: Tensor, scaled: Tensor) -> Tensor:
    """erfc(x) from exp(x^2) erfc(|x|); the error of the rounded square is `rest`, which is added to the exponent."""
    power = e.exp(square * -1.0)
    tail = fma(scaled * power, rest, scaled * power)
    return where(is_nan(x), x, where(x < 0.0, 2.0 - tail, tail))


def through_f64(op: Rule) -> Rule:
    """A function of f32 by way of the one of f64: rounded once, and so within an ulp."""

    def rule(*operands: Tensor) -> Tensor:
        wide = [cast(x, dtype=f64) for x in operands]
        return cast(op(*wide), dtype=f32)

    return rule


def power_for_f32(x: Tensor, y: Tensor) -> Tensor:
    """x to the power y in f64, precise enough to round to f32."""
    size = e.abs(x)
    bits = bitcast(size, dtype=int64)
    exponent = (bits - 0x3FE6A09E667F3BCD) >> 52
    m = bitcast(bits - (exponent << 52), dtype=f64)
    exponent = cast(exponent, dtype=f64)
    s = divide(m - 1.0, m + 1.0)
    z = s * s
    q = evaluate_polynomial(
        z, 0.19235933878519512, 0.22195308321368668, 0.26230818925253878, 0.32059889797532520, 0.41219858311113240,
        0.57707801635558536, 0.96179669392597560, 2.8853900817779268,
    )  # fmt: skip
    log2 = fma(s, q, exponent)
    log2 = where(size == 0.0, -INF, log2)
    log2 = where(size == INF, INF, log2)
    log2 = where(is_nan(x), x, log2)
    w = y * log2
    w = where(size == 1.0, 0.0, w)
    w = where(w > 1000.0, 1000.0, w)
    w = where(w < -1000.0, -1000.0, w)
    shifted = w + 6755399441055744.0
    bits = bitcast(shifted, dtype=int64)
    n = shifted - 6755399441055744.0
    p = evaluate_polynomial(
        w - n, 4.4455382718708e-10, 7.054911620801121e-09, 1.01780860092396997e-07, 1.32154867901443095e-06,
        1.52527338040598403e-05, 1.54035303933816100e-04, 1.33335581464284434e-03, 9.61812910762847716e-03,
        5.55041086648215800e-02, 2.40226506959100712e-01, 6.93147180559945309e-01, 1.0,
    )  # fmt: skip
    scale = bitcast((bits - 0x4338000000000000 + 1023) << 52, dtype=f64)
    return select_power_special_cases(x, y, size, p * scale)


def select_power_special_cases(x: Tensor, y: Tensor, size: Tensor, v: Tensor) -> Tensor:
    """x to the power y, where v is the power of size = |x|: the sign, and what C says of special operands."""
    half = y * 0.5
    floor = e.floor(y)
    whole = floor == y
    odd = whole & (e.floor(half) != half)
    minus = v * -1.0
    negative = bitcast(x, dtype=int64) < 0
    v = where(negative & odd, minus, v)
    below = x < 0.0
    undefined = below & (floor != y)
    undefined = undefined & (size < INF)
    v = where(undefined, NAN, v)
    v = where(is_nan(y), y, v)
    v = where(x == 1.0, 1.0, v)
    return where(y == 0.0, 1.0, v)


SHARED(e.pow, f32)(through_f64(power_for_f32))
SHARED(f.atan, f32)(through_f64(f.atan))


def _split_remainder(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """C's remainder, whether its sign differs from the divisor's, and the remainder with the divisor's sign."""
    rest = fmod(x, y)
    some = rest != 0.0
    differ = (y < 0.0) ^ (rest < 0.0)
    fix = some & differ
    return rest, fix, where(fix, rest + y, rest)


@SHARED(e.remainder, f32, f64)
def remainder(x: Tensor, y: Tensor) -> Tensor:
    """What is left of x after whole multiples of y, with the sign of y."""
    _, _, found = _split_remainder(x, y)
    zero = copysign(constant(0.0, y.dtype), y)
    return where(found == 0.0, zero, found)


@SHARED(e.floor_divide, f32, f64)
def floor_divide(x: Tensor, y: Tensor) -> Tensor:
    """The quotient rounded down."""
    rest, fix, _ = _split_remainder(x, y)
    quotient = divide(x - rest, y)
    quotient = where(fix, quotient - 1.0, quotient)
    floor = e.floor(quotient)
    gap = quotient - floor
    found = where(gap > 0.5, floor + 1.0, floor)
    plain = divide(x, y)
    zero = copysign(constant(0.0, y.dtype), plain)
    found = where(quotient == 0.0, zero, found)
    return where(y == 0.0, plain, found)


# Sine and cosine of f32: the argument is reduced in f64, then two polynomials.


def sine_of_quadrant(rest: Tensor, quadrant: Tensor, ahead: int) -> Tensor:
    """The sine of `quadrant` quarter turns and `rest`; the cosine is the sine a quarter turn `ahead`."""
    z = rest * rest
    sine = evaluate_polynomial(z, 2.71756448e-06, -0.000198392561, 0.00833332911, -0.166666672, 1.0) * rest
    q = evaluate_polynomial(z, -2.7203302e-07, 2.47994358e-05, -0.00138888834, 0.0416666679)
    square = z * z
    cosine = fma(q, square, fma(z, -0.5, 1.0))
    odd = (quadrant & 1) == 1
    found = where(odd, sine, cosine) if ahead else where(odd, cosine, sine)
    sign = ((quadrant + ahead) & 2) << 30
    return bitcast(bitcast(found, dtype=int32) ^ sign, dtype=f32)


def make_trigonometric_rule(ahead: int, parts: int | None = None) -> Rule:
    """The sine (or, a quarter turn ahead, cosine) of f32; the argument is reduced by so many parts of pi/2 if given."""

    def rule(x: Tensor) -> Tensor:
        if parts is None:
            rest, bits = reduce_all_quarter_turns(x)
        else:
            rest, bits = reduce_quarter_turns(cast(x, dtype=f64), parts)
        return sine_of_quadrant(cast(rest, dtype=f32), cast(bits, dtype=int32), ahead)

    return rule


def make_small_trigonometric_rule(ahead: int) -> Rule:
    """The sine (or, a quarter turn ahead, cosine) of f32 below `SMALL_ANGLE_F32`, without f64."""
    return lambda x: sine_of_quadrant(*reduce_small_quarter_turns(x), ahead)


# A target that has branches computes the rule of all angles for those that are not small.
SMALL_TRIGONOMETRIC_RULES = {e.sin: make_small_trigonometric_rule(0), e.cos: make_small_trigonometric_rule(1)}
SHARED(e.sin, f32)(make_trigonometric_rule(0))
SHARED(e.cos, f32)(make_trigonometric_rule(1))

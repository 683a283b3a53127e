"""Scalar functions of f64: argument reduction and Chebyshev fits of relative error below 2^-58.

The power keeps the logarithm and its product with y as two numbers each (double-double, Dekker 1971), within 16 ulp.
"""

from __future__ import annotations

from tessera.core.types import f64, int64
from tessera.ir.tensor import Tensor
from tessera.lower.scalar_functions.decomposition import SHARED, Rule, constant, evaluate_polynomial
from tessera.lower.scalar_functions.quarter_turns import (
    ROUND_TO_INTEGER_F64,
    SMALL_ANGLE,
    reduce_large_quarter_turns,
    reduce_quarter_turns,
)
from tessera.lower.scalar_functions.single_precision import (
    INF,
    select_erfc_side,
    select_log_special_cases,
    select_power_special_cases,
)
from tessera.ops.dialects.arith import bitcast, copysign, divide, fma, is_nan
from tessera.ops.tensor import elementwise as e
from tessera.ops.tensor import scalar_functions as f
from tessera.ops.tensor.basic import cast
from tessera.ops.tensor.elementwise import where

ROUND_TO_INTEGER_BITS = 0x4338000000000000  # of ROUND_TO_INTEGER_F64


def _scale_by_power_of_two(p: Tensor, exponent_bits: Tensor) -> Tensor:
    """p * 2^n, in two steps so that neither factor leaves the range of normal numbers."""
    n = exponent_bits - ROUND_TO_INTEGER_BITS
    half = n >> 1
    rest = n - half
    half, rest = half + 1023, rest + 1023
    half, rest = half << 52, rest << 52
    first, second = bitcast(half, dtype=f64), bitcast(rest, dtype=f64)
    return p * first * second


def _expm1_near_zero(x: Tensor) -> Tensor:
    """exp(x) - 1 for |x| < log(2) / 2."""
    q = evaluate_polynomial(
        x, 1.6086677666787361503e-10, 2.0918212319133978201e-9, 2.5052070959803661989e-8, 2.7557263077309411451e-7,
        2.7557319247344509509e-6, 0.000024801587336630946966, 0.00019841269841263251867, 0.0013888888888879003084,
        0.0083333333333333340131, 0.041666666666666676865, 0.16666666666666666667, 0.49999999999999999998,
    )  # fmt: skip
    square = x * x
    return fma(q, square, x)


def _reduce_exponent(x: Tensor) -> tuple[Tensor, Tensor]:
    """x less the nearest multiple of log(2), and the bits of that multiple's number (Cody and Waite 1980)."""
    shifted = fma(x, 1.4426950408889634074, ROUND_TO_INTEGER_F64)
    n = shifted - ROUND_TO_INTEGER_F64
    bits = bitcast(shifted, dtype=int64)
    rest = fma(n, -0.693147180369123816490, x)
    return fma(n, -1.90821492927058770002e-10, rest), bits


@SHARED(e.exp, f64)
def exp_f64(x: Tensor) -> Tensor:
    """exp(x) = 2^n * exp(x - n * log(2))."""
    x = where(x > 710.0, 710.0, x)
    x = where(x < -746.0, -746.0, x)
    rest, bits = _reduce_exponent(x)
    return _scale_by_power_of_two(_expm1_near_zero(rest) + 1.0, bits)


@SHARED(e.exp2, f64)
def exp2_f64(x: Tensor) -> Tensor:
    """2^x = 2^n * exp((x - n) * log(2)), log(2) in two parts."""
    x = where(x > 1025.0, 1025.0, x)
    x = where(x < -1080.0, -1080.0, x)
    shifted = x + ROUND_TO_INTEGER_F64
    n = shifted - ROUND_TO_INTEGER_F64
    bits = bitcast(shifted, dtype=int64)
    y = x - n
    rest = fma(y, 2.3190468138462995584e-17, y * 0.69314718055994528623)
    return _scale_by_power_of_two(_expm1_near_zero(rest) + 1.0, bits)


@SHARED(f.expm1, f64)
def expm1_f64(x: Tensor) -> Tensor:
    """exp(x) - 1 = 2^n * (exp(x - n * log(2)) - 1) + 2^n - 1; beyond 40 it is exp(x)."""
    large = x > 40.0
    y = where(large, 40.0, x)
    y = where(y < -60.0, -60.0, y)
    rest, bits = _reduce_exponent(y)
    p = _expm1_near_zero(rest)
    scale = bitcast((bits - ROUND_TO_INTEGER_BITS + 1023) << 52, dtype=f64)
    near = fma(scale, p, scale - 1.0)
    found = where(large, e.exp(x), near)
    return where(x == 0.0, x, found)


def _split_exponent(x: Tensor) -> tuple[Tensor, Tensor]:
    """e and m, where x = 2^e * m and m is from sqrt(1/2) to sqrt(2)."""
    tiny = x < 2.2250738585072014e-308
    scaled = where(tiny, x * 18014398509481984.0, x)
    correction = where(tiny, constant(-54.0, f64), constant(0.0, f64))
    bits = bitcast(scaled, dtype=int64)
    exponent = (bits - 0x3FE6A09E667F3BCD) >> 52
    m = bitcast(bits - (exponent << 52), dtype=f64)
    return cast(exponent, dtype=f64) + correction, m


def _reduce_log(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """e, f, f^2 / 2 and the rest, where log(x) = e * log(2) + f - f^2 / 2 + rest.

    log m is 2 atanh((m - 1) / (m + 1)).
    """
    exponent, m = _split_exponent(x)
    fraction = m - 1.0
    s = divide(fraction, m + 1.0)
    z = s * s
    q = evaluate_polynomial(
        z, 0.11883452394107859727, 0.1168796299754215568, 0.13335645841949377114, 0.15384574966460906823,
        0.18181818595769064684, 0.22222222219844231103, 0.28571428571435407599, 0.3999999999999999244,
        0.66666666666666666668,
    )  # fmt: skip
    half_square = fraction * 0.5 * fraction
    return exponent, fraction, half_square, s * (half_square + z * q)


@SHARED(e.log, f64)
def log_f64(x: Tensor) -> Tensor:
    """log(x) = e * log(2) + log(m), log(2) in two parts."""
    exponent, fraction, half_square, rest = _reduce_log(x)
    w = fma(exponent, 1.90821492927058770002e-10, rest)
    v = fma(exponent, 0.693147180369123816490, w - half_square + fraction)
    return select_log_special_cases(x, v)


@SHARED(e.log2, f64)
def log2_f64(x: Tensor) -> Tensor:
    """log2(x) = e + log2(e) * log(m), log2(e) in two parts."""
    exponent, fraction, half_square, rest = _reduce_log(x)
    low = rest - half_square
    g = fma(low, 1.4426950408889634074, fma(fraction, 2.0355273740931033e-17, 0.0))
    v = fma(fraction, 1.4426950408889634074, g)
    return select_log_special_cases(x, v + exponent)


@SHARED(f.log1p, f64)
def log1p_f64(x: Tensor) -> Tensor:
    """Kahan's form: the rounding error of 1 + x is divided out again."""
    u = x + 1.0
    d = u - 1.0
    log = e.log(u)
    v = log * divide(x, d)  # log * x overflows
    v = where(d == 0.0, x, v)
    v = where(x == INF, INF, v)
    v = where(u == 0.0, -INF, v)
    return where(is_nan(log), log, v)


@SHARED(e.tanh, f64)
def tanh_f64(x: Tensor) -> Tensor:
    """tanh(x) = expm1(2 |x|) / (expm1(2 |x|) + 2) with the sign of x."""
    size = e.abs(x)
    large = size > 22.0
    size = where(large, 22.0, size)
    power = f.expm1(size + size)
    t = divide(power, power + 2.0)
    found = copysign(where(large, 1.0, t), x)
    return where(is_nan(x), x, found)


@SHARED(f.atan, f64)
def atan_f64(x: Tensor) -> Tensor:
    """The arc tangent: by 1/|x| beyond 1, by (t - 1) / (t + 1) beyond tan(pi/8), then a polynomial."""
    size = e.abs(x)
    inverted = size > 1.0
    t = where(inverted, divide(1.0, size), size)
    turned = t > 0.41421356237309503
    t = where(turned, divide(t - 1.0, t + 1.0), t)
    z = t * t
    q = evaluate_polynomial(
        z, 0.015099884864821963994, -0.033374102242899617117, 0.044989082467814506045, -0.052171658995952996247,
        0.058768110261210217792, -0.066662028877461991022, 0.076922809369842615855, -0.090909080516836059575,
        0.11111111085112750644, -0.1428571428532620101, 0.1999999999999698366, -0.33333333333333324105,
    )  # fmt: skip
    p = fma(z * q, t, t)
    high = where(turned, constant(0.78539816339744830962, f64), constant(0.0, f64))
    low = where(turned, constant(3.0616169978683829e-17, f64), constant(0.0, f64))
    p = p + low + high
    rest = 6.123233995736766e-17 - p + 1.5707963267948965580
    return copysign(where(inverted, rest, p), x)


@SHARED(e.erf, f64)
def erf_f64(x: Tensor) -> Tensor:
    """erf(x): an odd polynomial up to 1, beyond 1 - exp(-x^2) times a polynomial."""
    size = e.abs(x)
    t = where(size > 6.0, 6.0, size)
    z = t * t
    q = evaluate_polynomial(
        z, -4.2290117089891978233e-12, 8.7078349489499495257e-11, -1.2164225654817863871e-9, 1.4792347499413907917e-8,
        -1.6364636604802170643e-7, 1.6462045054724142774e-6, -0.000014925647549075886628, 0.00012055332902288381158,
        -0.00085483270219217735285, 0.0052239776254231166418, -0.026866170645129825815, 0.11283791670955120172,
        -0.37612638903183752378, 1.1283791670955125739,
    )  # fmt: skip
    near = q * t
    u = divide(t - 2.5, t + 2.5)
    g = evaluate_polynomial(
        u, -3.1595535465715722443e-8, -5.7603130516061743533e-8, 8.639939525559339012e-8, 3.8895109633612845339e-7,
        7.5241830008573418442e-8, -1.8165144342459130138e-6, -2.2982975808700140261e-6, 7.5551341650102105187e-6,
        0.000018614556787006241507, -0.000034182497566891251065, -0.0001288771837172816617, 0.00022838039449624533132,
        0.0008759154508692198165, -0.0026423659648242363739, -0.0039937011658797690435, 0.039922539075593691698,
        -0.12503305237882904278, 0.25171319321744924673, -0.3717367339489733533, 0.21080636406114358065,
    )  # fmt: skip
    far = 1.0 - e.exp(z * -1.0) * g
    found = copysign(where(t > 1.0, far, near), x)
    return where(is_nan(x), x, found)


@SHARED(e.erfc, f64)
def erfc_f64(x: Tensor) -> Tensor:
    """erfc(x) = exp(-x^2) p(q) / (1 + 2x) for q = (x - 4) / (x + 4), and 2 - erfc(-x) below 0 (after N. Juffa)."""
    size = e.abs(x)
    t = where(size > 28.0, 28.0, size)
    p = evaluate_polynomial(
        divide(t - 4.0, t + 4.0), -1.8206098680308683344e-9, -1.3670989863347382443e-8, -7.7154186144178301303e-9,
        1.1534943745754157287e-7, 6.2707271571983108779e-8, -8.351619688696847075e-7, 3.0135049944875394771e-7,
        5.7178872846321852018e-6, -0.000011224789135154700706, -0.000024403169244974074952, 0.0001506222439483029924,
        -0.00019925550755614952137, -0.0007577733414133300446, 0.0050319697558954261144, -0.016197734059115007082,
        0.037167515562492865974, -0.066330365811529384089, 0.093732834996794115895, -0.10103906603635213169,
        0.068097054254737323901, 0.015379652102620741303, -0.13962111684056289354, 1.2329951186255525067,
    )  # fmt: skip
    square = t * t
    return select_erfc_side(x, square, fma(t, t * -1.0, square), divide(p, t + t + 1.0))


def _log2_of_mantissa(m: Tensor) -> tuple[Tensor, Tensor]:
    """log2 m = 2 / log(2) * (s + s^3/3 + s^5/5 + ...) for s = (m - 1) / (m + 1), in two numbers.

    What follows s^3 needs no second number.
    """
    f0 = m - 1.0
    d = m + 1.0
    d_low = m - (d - 1.0)
    s = divide(f0, d)
    minus = s * -1.0
    rest = fma(minus, d_low, fma(minus, d, f0))
    s_low = divide(rest, d)
    z = s * s
    z_low = fma(s + s, s_low, fma(s, s, z * -1.0))
    third = z * 0.3333333333333333
    third_low = fma(z, 0.3333333333333333, third * -1.0)
    third_low = fma(z_low, 0.3333333333333333, fma(z, 1.850371707708594e-17, third_low))
    q = evaluate_polynomial(
        z, 0.04, 0.043478260869565216, 0.047619047619047616, 0.05263157894736842, 0.058823529411764705,
        0.06666666666666667, 0.07692307692307693, 0.09090909090909091, 0.1111111111111111, 0.14285714285714285, 0.2,
    )  # fmt: skip
    p = z * z * q
    u = third + p
    u_low = p - (u - third) + third_low
    g = u + 1.0
    g_low = u - (g - 1.0) + u_low
    h = s * g
    h_low = fma(s_low, g, fma(s, g_low, fma(s, g, h * -1.0)))
    log = h * 2.8853900817779268
    log_low = fma(h_low, 2.8853900817779268, fma(h, 2.8853900817779268, log * -1.0))
    return log, fma(h, 4.0710547481862066e-17, log_low)


@SHARED(e.pow, f64)
def power_f64(x: Tensor, y: Tensor) -> Tensor:
    """2^(y * log2 |x|), then the special cases."""
    size = e.abs(x)
    exponent, m = _split_exponent(size)
    mantissa, mantissa_low = _log2_of_mantissa(m)
    log = exponent + mantissa
    log_low = mantissa - (log - exponent) + mantissa_low
    high = where(size == 0.0, -INF, log)
    high = where(size == INF, INF, high)
    high = where(is_nan(x), x, high)
    product = y * high
    product_low = fma(y, log_low, fma(y, high, product * -1.0))
    one = size == 1.0
    product = where(one, 0.0, product)
    product_low = where(one, 0.0, product_low)
    clamped = where(product > 1100.0, 1100.0, product)
    clamped = where(clamped < -1100.0, -1100.0, clamped)
    product_low = where(clamped == product, product_low, 0.0)
    shifted = clamped + ROUND_TO_INTEGER_F64
    n = shifted - ROUND_TO_INTEGER_F64
    bits = bitcast(shifted, dtype=int64)
    rest = (clamped - n + product_low) * 0.69314718055994528623
    found = _scale_by_power_of_two(_expm1_near_zero(rest) + 1.0, bits)
    return select_power_special_cases(x, y, size, e.abs(found))


def _sine_of_quadrant(rest: Tensor, bits: Tensor, ahead: int) -> Tensor:
    """The sine of a number of quarter turns, of which the low bits count, and `rest`; `ahead` as below."""
    z = rest * rest
    q = evaluate_polynomial(
        z, -7.5866368828251596492e-13, 1.6058530596645954712e-10, -2.5052106225994400694e-8,
        2.755731921932057977e-6, -0.00019841269841265041047, 0.008333333333333331481, -0.16666666666666666665,
    )  # fmt: skip
    sine = fma(z * rest, q, rest)
    q = evaluate_polynomial(
        z, 4.7458384125310229648e-14, -1.1470460319209511842e-11, 2.0876755787492605948e-9,
        -2.7557319221392490652e-7, 0.000024801587301584633141, -0.0013888888888888887859, 0.041666666666666666666,
    )  # fmt: skip
    cosine = fma(q, z * z, fma(z, -0.5, 1.0))
    quadrant = bits & 3
    odd = (quadrant & 1) == 1
    found = where(odd, sine, cosine) if ahead else where(odd, cosine, sine)
    sign = ((quadrant + ahead) & 2) << 62
    return bitcast(bitcast(found, dtype=int64) ^ sign, dtype=f64)


def _make_trigonometric_rules(ahead: int) -> tuple[Rule, Rule, Rule]:
    """The sine, or with 1 quarter turn `ahead` the cosine: of small angles, of large ones, of all."""

    def small(x: Tensor) -> Tensor:
        found = _sine_of_quadrant(*reduce_quarter_turns(x, 3), ahead)
        return found if ahead else where(x == 0.0, x, found)  # -0 too

    def large(x: Tensor) -> Tensor:
        return _sine_of_quadrant(*reduce_large_quarter_turns(x), ahead)

    return small, large, lambda x: where(e.abs(x) < SMALL_ANGLE, small(x), large(x))


# A target that has branches computes the rule of large angles for those alone.
TRIGONOMETRIC_RULES = {e.sin: _make_trigonometric_rules(0), e.cos: _make_trigonometric_rules(1)}
for _op, (_, _, _rule) in TRIGONOMETRIC_RULES.items():
    SHARED(_op, f64)(_rule)

"""Special functions as compositions of elementary ones: the gamma function's logarithm and its derivative, the inverse
of the error function, scaled modified Bessel functions, and the cube root.

Floats of up to 32 bits are computed in f64 and rounded once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

from tessera.core.types import f32, f64
from tessera.ir.tensor import Tensor, as_tensor
from tessera.ops.tensor.argument_checks import check_arguments
from tessera.ops.tensor.basic import cast, splat
from tessera.ops.tensor.elementwise import (
    abs,
    cos,
    equal,
    erf,
    erfc,
    exp,
    floor,
    greater,
    less,
    less_equal,
    log,
    maximum,
    minimum,
    not_equal,
    pow,
    sin,
    sqrt,
    where,
)
from tessera.ops.tensor.scalar_functions import copysign, isfinite, isinf, log1p

Function = Callable[[Tensor], Tensor]

# Lanczos' approximation of the gamma function with g = 7 and nine terms (Lanczos 1964; coefficients of Godfrey).
_LANCZOS_G = 7.0
_LANCZOS_BASE = 0.99999999999980993227684700473478
_LANCZOS = (
    676.520368121885098567009190444019, -1259.13921672240287047156078755283, 771.3234287776530788486528258894,
    -176.61502916214059906584551354, 12.507343278686904814458936853, -0.13857109526572011689554707,
    9.984369578019570859563e-6, 1.50563273514931155834e-7,
)  # fmt: skip
_LOG_SQRT_2PI = 0.5 * math.log(2.0 * math.pi)
# Initial values of the inverse error function by w = -log(1 - x²): below 5, and from there on in sqrt(w) (Giles 2010).
_ERFINV_CENTRE = (
    2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087, -0.00125372503, -0.00417768164,
    0.246640727, 1.50140941,
)  # fmt: skip
_ERFINV_TAIL = (
    -0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773, -0.0076224613, 0.00943887047,
    1.00167406, 2.83297682,
)  # fmt: skip
# Chebyshev series, computed with 40 digits: I0(x)·exp(-x) and I1(x)·exp(-x)/x in x/4 - 1 for x up to 8, and both times
# sqrt(x)·exp(-x) in 16/x - 1 from there on.
_I0_SMALL = (
    0.33839763720473803, -0.3046826723431984, 0.17162090152220877, -0.09490109704804764, 0.04930528423967071,
    -0.02373741480589947, 0.010546460394594998, -0.004324309995050576, 0.0016394756169413357, -0.0005763755745385824,
    0.00018850288509584165, -5.754195010082104e-05, 1.6448448070728896e-05, -4.4167383584587505e-06,
    1.1173875391201037e-06, -2.670793853940612e-07, 6.046995022541919e-08, -1.300025009986248e-08,
    2.6598237246823866e-09, -5.189795601635263e-10, 9.675809035373237e-11, -1.726826291441556e-11,
    2.95505266312964e-12, -4.856446783111929e-13, 7.676185498604936e-14, -1.1685332877993451e-14,
    1.715391285555133e-15, -2.431279846547955e-16, 3.3307945188222384e-17, -4.4153416464793395e-18,
)  # fmt: skip
_I0_LARGE = (
    0.4022452055070544, 0.0033691164782556943, 6.889758346916825e-05, 2.8913705208347567e-06, 2.0489185894690638e-07,
    2.266668990498178e-08, 3.3962320257083865e-09, 4.94060238822497e-10, 1.1889147107846439e-11,
    -3.1499165279632416e-11, -1.3215811840447713e-11, -1.7941785315068062e-12, 7.180124451383666e-13,
    3.8527783827421426e-13, 1.54008621752141e-14, -4.150569347287222e-14, -9.554846698828307e-15,
    3.8116806693526224e-15, 1.7725601330565263e-15, -3.425485619677219e-16, -2.8276239805165836e-16,
    3.461222867697461e-17, 4.46562142029676e-17, -4.830504485944182e-18, -7.233180487874754e-18,
)  # fmt: skip
_I1_SMALL = (
    0.12629359322181682, -0.17641651835783406, 0.1026436586898471, -0.05294598120809499, 0.024726449030626516,
    -0.010564084894626197, 0.004156422944312888, -0.0015135724506312532, 0.0005122859561685758,
    -0.00016176081582589674, 4.781565107550054e-05, -1.3273163656039436e-05, 3.4702513081376785e-06,
    -8.568720264695455e-07, 2.0032947535521353e-07, -4.445059128796328e-08, 9.381537386495773e-09,
    -1.8872497517228294e-09, 3.625590281552117e-10, -6.663489723502027e-11, 1.1736186298890901e-11,
    -1.9839743977649436e-12, 3.223793365945575e-13, -5.042185504727912e-14, 7.600684294735408e-15,
    -1.1055969477353862e-15, 1.5536319577362005e-16, -2.111421214358166e-17, 2.7779141127610464e-18,
)  # fmt: skip
_I1_LARGE = (
    0.38928811750914005, -0.009761097491361469, -0.00011058893876262371, -3.882564808877691e-06,
    -2.512236237870209e-07, -2.6314688468895196e-08, -3.835380385964237e-09, -5.589743462196584e-10,
    -1.8974958123505413e-11, 3.2526035830154884e-11, 1.4125807436613782e-11, 2.0356285441470896e-12,
    -7.198551776245908e-13, -4.0835511110921974e-13, -2.1015418427726643e-14, 4.272440016711951e-14,
    1.0420276984128802e-14, -3.8144030724370075e-15, -1.8803547755107825e-15, 3.3082023109209285e-16,
    2.96262899764595e-16, -3.209525921993424e-17, -4.6503053684893586e-17, 4.414348323071708e-18,
    7.517296310842105e-18,
)  # fmt: skip


def _in_double(function: Function) -> Callable[[Any], Tensor]:
    """A function of f64 tensors as one of floats of any type; integers become f32."""

    @functools.wraps(function)
    def apply(x: Any) -> Tensor:
        x = as_tensor(x)
        x = x if x.dtype.is_float else cast(x, dtype=f32)
        return function(x) if x.dtype == f64 else cast(function(cast(x, dtype=f64)), dtype=x.type.policy or x.dtype)

    checked = check_arguments(apply)
    checked.counts_as_one_op = True  # type: ignore[attr-defined]  # it rounds once, from f64
    return checked


def _evaluate_polynomial(coefficients: Sequence[float], x: Tensor) -> Tensor:
    """The polynomial with these coefficients, the highest power first (Horner)."""
    found = splat(coefficients[0], x.type)
    for c in coefficients[1:]:
        found = found * x + c
    return found


def _evaluate_series(coefficients: Sequence[float], x: Tensor) -> Tensor:
    """The Chebyshev series with these coefficients (Clenshaw 1955)."""
    last = before = splat(0.0, x.type)
    for c in coefficients[:0:-1]:
        last, before = 2.0 * x * last - before + c, last
    return x * last - before + coefficients[0]


# The gamma function.


def _shift_argument(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Whether to reflect; z with x = z + 1, or 1 - x = z + 1 after reflection; z + 7.5 and its logarithm."""
    reflects = less(x, 0.5)
    z = where(reflects, -x, x - 1.0)
    log_t = log1p(z / (_LANCZOS_G + 0.5)) + math.log(_LANCZOS_G + 0.5)
    return reflects, z, z + (_LANCZOS_G + 0.5), log_t


@_in_double
def lgamma(x: Any) -> Tensor:
    """The logarithm of the absolute value of the gamma function; infinite at 0, -1, -2, ...

    >>> lgamma([1.0, 5.0])
    Tensor([0.       , 3.1780539], f32)
    """
    reflects, z, t, log_t = _shift_argument(x)
    series = splat(_LANCZOS_BASE, x.type)
    for i, c in enumerate(_LANCZOS):
        series = series + c / (z + (i + 1.0))
    direct = (z + 0.5 - t / log_t) * log_t + (_LOG_SQRT_2PI + log(series))
    size = abs(x)
    part = size - floor(size)
    part = where(greater(part, 0.5), 1.0 - part, part)
    sine = log(where(reflects, sin(math.pi * part), 1.0))
    reflected = where(isfinite(sine), math.log(math.pi) - sine - direct, -sine)
    direct = where(equal(x, 1.0) | equal(x, 2.0), 0.0, direct)
    return where(isinf(x), math.inf, where(reflects, reflected, direct))


@_in_double
def digamma(x: Any) -> Tensor:
    """The derivative of `lgamma`; NaN at -1, -2, ..., and infinite at 0.

    >>> digamma([1.0])
    Tensor([-0.5772157], f32)
    """
    reflects, z, t, log_t = _shift_argument(x)
    slope, series = splat(0.0, x.type), splat(_LANCZOS_BASE, x.type)
    for i, c in enumerate(_LANCZOS):
        term = z + (i + 1.0)
        slope, series = slope - c / (term * term), series + c / term
    direct = log_t + slope / series - _LANCZOS_G / t
    part = x + abs(floor(x + 0.5))
    angle = math.pi * where(equal(part, 0.0), 0.25, part)
    reflected = direct - math.pi * cos(angle) / sin(angle)
    pole = less_equal(x, 0.0) & equal(x, floor(x))
    found = where(reflects, reflected, direct)
    return where(pole, where(equal(x, 0.0), copysign(splat(math.inf, x.type), -x), math.nan), found)


# The inverse of the error function.


@_in_double
def erfinv(x: Any) -> Tensor:
    """The number whose error function is `x`: infinite at -1 and 1, NaN outside.

    >>> erfinv([0.5])
    Tensor([0.47693628], f32)
    """
    inner = less(abs(x), 1.0)
    y = where(inner, x, 0.0)
    w = -log1p(-y * y)
    centre, tail = less(w, 5.0), sqrt(maximum(w, 5.0)) - 3.0
    found = where(
        centre, _evaluate_polynomial(_ERFINV_CENTRE, minimum(w, 5.0) - 2.5), _evaluate_polynomial(_ERFINV_TAIL, tail)
    )
    found = found * y
    for _ in range(3):  # Halley's method, with the distance to the nearer end where the function is flat
        size = abs(found)
        error = where(less(size, 0.5), erf(size) - abs(y), (1.0 - abs(y)) - erfc(size))
        step = error / (2.0 / math.sqrt(math.pi) * exp(-size * size))
        found = copysign(size - step / (1.0 + size * step), y)
    edge = where(equal(abs(x), 1.0), copysign(splat(math.inf, x.type), x), math.nan)
    return where(inner, where(equal(x, 0.0), x, found), edge)


# Modified Bessel functions, times exp(-|x|).


def _scaled_bessel(x: Tensor, small: Sequence[float], large: Sequence[float]) -> tuple[Tensor, Tensor, Tensor]:
    """|x|, and the two series: that of the interval up to 8, and that from there on over sqrt(x)."""
    size = abs(x)
    near, far = minimum(size, 8.0), maximum(size, 8.0)
    return size, _evaluate_series(small, near / 4.0 - 1.0), _evaluate_series(large, 16.0 / far - 1.0) / sqrt(far)


@_in_double
def bessel_i0e(x: Any) -> Tensor:
    """The modified Bessel function of the first kind of order 0, times exp(-|x|).

    >>> bessel_i0e([1.0])
    Tensor([0.4657596], f32)
    """
    size, near, far = _scaled_bessel(x, _I0_SMALL, _I0_LARGE)
    return where(less_equal(size, 8.0), near, where(not_equal(x, x), x, far))


@_in_double
def bessel_i1e(x: Any) -> Tensor:
    """The modified Bessel function of the first kind of order 1, times exp(-|x|).

    >>> bessel_i1e([1.0])
    Tensor([0.20791042], f32)
    """
    size, near, far = _scaled_bessel(x, _I1_SMALL, _I1_LARGE)
    return where(less_equal(size, 8.0), near * x, where(not_equal(x, x), x, copysign(far, x)))


# The cube root.


@_in_double
def cbrt(x: Any) -> Tensor:
    """The cube root of `x`.

    >>> cbrt([8.0, -27.0])
    Tensor([ 2., -3.], f32)
    """
    plain = isfinite(x) & not_equal(x, 0.0)
    size = where(plain, abs(x), 1.0)
    found = pow(size, 1.0 / 3.0)
    found = found - (found - size / (found * found)) / 3.0  # a step of Newton's method
    return where(plain, copysign(found, x), x)

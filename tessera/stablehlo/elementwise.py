"""Rows of pointwise operations: arithmetic, comparisons, bits, conversions and scalar functions, of StableHLO and
CHLO."""

from __future__ import annotations

from typing import Any

from tessera.core.types import BY_NAME, DType, bool_, f32, f64, int32, int64
from tessera.ir.tensor import Tensor
from tessera.ops.tensor import elementwise as e
from tessera.ops.tensor import scalar_functions as f
from tessera.ops.tensor import special_functions as special
from tessera.ops.tensor.basic import cast, full, splat
from tessera.ops.tensor.bits import bitcast, count_leading_zeros, population_count, reduce_precision
from tessera.ops.tensor.scalar_functions import copysign
from tessera.ops.tensor.shape import reshape, slice_, stack
from tessera.stablehlo.table import Site, row, rows

SIGNED_OF = {8: "int8", 16: "int16", 32: "int32", 64: "int64"}
UNSIGNED_OF = {8: "uint8", 16: "uint16", 32: "uint32", 64: "uint64"}


def _as_unsigned(x: Tensor) -> Tensor:
    return cast(x, dtype=BY_NAME[UNSIGNED_OF[x.dtype.bits]]) if x.dtype.kind == "int" else x


def _is_bool(x: Tensor) -> bool:
    return x.dtype == bool_


def add(x: Tensor, y: Tensor) -> Tensor:
    """The sum; of bools, whether one holds."""
    return e.bitwise_or(x, y) if _is_bool(x) else e.add(x, y)


def multiply(x: Tensor, y: Tensor) -> Tensor:
    """The product; of bools, whether both hold."""
    return e.bitwise_and(x, y) if _is_bool(x) else e.mul(x, y)


def maximum(x: Tensor, y: Tensor) -> Tensor:
    """The larger of both; NaN where one is NaN."""
    return e.bitwise_or(x, y) if _is_bool(x) else e.maximum(x, y)


def minimum(x: Tensor, y: Tensor) -> Tensor:
    """The smaller of both; NaN where one is NaN."""
    return e.bitwise_and(x, y) if _is_bool(x) else e.minimum(x, y)


def _round_half_away(x: Tensor) -> Tensor:
    size = e.abs(x)
    down = e.floor(size)
    return copysign(e.where(e.greater_equal(size - down, 0.5), down + 1.0, down), x)


def _subtract(x: Tensor, y: Tensor) -> Tensor:
    return e.bitwise_xor(x, y) if _is_bool(x) else e.sub(x, y)


def _negate(x: Tensor) -> Tensor:
    return e.sub(splat(0, x.type), x) if x.dtype.kind == "uint" else e.neg(x)


def _sign(x: Tensor) -> Tensor:
    if x.dtype.kind == "uint":
        return e.minimum(x, splat(1, x.type))
    return e.where(f.isnan(x), x, copysign(f.sign(x), x)) if x.dtype.is_float else f.sign(x)


def _clamp(low: Tensor, x: Tensor, high: Tensor) -> Tensor:
    return minimum(maximum(x, low), high)


def _atan2(y: Tensor, x: Tensor) -> Tensor:
    return f.atan2(y, x)


rows(
    "stablehlo",
    {
        "abs": lambda x: x if x.dtype.kind == "uint" else e.abs(x),
        "add": add,
        "and": e.bitwise_and,
        "atan2": _atan2,
        "cbrt": special.cbrt,
        "ceil": e.ceil,
        "clamp": _clamp,
        "cosine": e.cos,
        "count_leading_zeros": count_leading_zeros,
        "exponential": e.exp,
        "exponential_minus_one": f.expm1,
        "floor": e.floor,
        "is_finite": f.isfinite,
        "log": e.log,
        "log_plus_one": f.log1p,
        "logistic": f.sigmoid,
        "maximum": maximum,
        "minimum": minimum,
        "multiply": multiply,
        "negate": _negate,
        "not": e.bitwise_not,
        "or": e.bitwise_or,
        "popcnt": population_count,
        "real": lambda x: x,
        "round_nearest_afz": _round_half_away,
        "round_nearest_even": e.round,
        "rsqrt": e.rsqrt,
        "select": e.where,
        "sign": _sign,
        "sine": e.sin,
        "sqrt": e.sqrt,
        "subtract": _subtract,
        "tan": f.tan,
        "tanh": e.tanh,
        "xor": e.bitwise_xor,
    },
)
rows(
    "chlo",
    {
        "acos": f.acos,
        "acosh": f.acosh,
        "asin": f.asin,
        "asinh": f.asinh,
        "atan": f.atan,
        "atanh": f.atanh,
        "bessel_i1e": special.bessel_i1e,
        "conj": lambda x: x,
        "cosh": f.cosh,
        "digamma": special.digamma,
        "erf": e.erf,
        "erf_inv": special.erfinv,
        "erfc": e.erfc,
        "is_inf": f.isinf,
        "is_neg_inf": lambda x: e.equal(x, -float("inf")),
        "is_pos_inf": lambda x: e.equal(x, float("inf")),
        "lgamma": special.lgamma,
        "next_after": f.nextafter,
        "sinh": f.sinh,
        "square": f.square,
        "tan": f.tan,
    },
)


@row("stablehlo.imag")
def _(site: Site, x: Tensor) -> Tensor:
    return splat(0, x.type)


@row("chlo.constant_like")
def _(site: Site, x: Tensor) -> Tensor:
    return full(shape=site.shape, value=site.get("value"), dtype=site.dtype)


# Division, remainder and power: integers round toward zero.


@row("stablehlo.divide")
def _(site: Site, x: Tensor, y: Tensor) -> Tensor:
    return e.div(x, y) if x.dtype.is_float else _divide_integers(x, y)


def _divide_integers(x: Tensor, y: Tensor) -> Tensor:
    """The quotient rounded toward zero; -1 (all bits set) for the divisor 0, as XLA gives it."""
    none = e.equal(y, 0)
    safe = e.where(none, splat(1, y.type), y)
    down = e.floor_divide(x, safe)
    if x.dtype.kind == "uint":
        return e.where(none, splat(2**x.dtype.bits - 1, x.type), down)
    inexact = e.not_equal(down * safe, x)
    up = inexact & e.not_equal(e.less(x, 0), e.less(safe, 0))
    return e.where(none, splat(-1, x.type), down + cast(up, dtype=x.dtype))


@row("stablehlo.remainder")
def _(site: Site, x: Tensor, y: Tensor) -> Tensor:
    if x.dtype.is_float:
        return f.fmod(x, y)
    none = e.equal(y, 0)
    safe = e.where(none, splat(1, y.type), y)
    return e.where(none, x, x - _divide_integers(x, safe) * safe)


@row("stablehlo.power")
def _(site: Site, x: Tensor, y: Tensor) -> Tensor:
    if x.dtype.is_float:
        return e.pow(x, y)
    # Squares and products: an integer power wraps; a negative exponent gives 0, or a power of -1 or 1.
    found, base, left = splat(1, x.type), x, _as_unsigned(y)
    for _ in range(x.dtype.bits):
        found = e.where(e.not_equal(e.bitwise_and(left, 1), 0), found * base, found)
        base, left = base * base, e.shift_right(left, 1)
    if x.dtype.kind == "uint":
        return found
    odd = e.not_equal(e.bitwise_and(y, 1), 0)
    unit = e.where(e.equal(x, 1) | (e.equal(x, -1) & ~odd), splat(1, x.type), splat(0, x.type))
    unit = e.where(e.equal(x, -1) & odd, splat(-1, x.type), unit)
    return e.where(e.less(y, 0), unit, found)


# Bits.


def _shift(site: Site, x: Tensor, y: Tensor, shift: Any, beyond: Any) -> Tensor:
    """A shift; `beyond` is the result where the distance is the width or more."""
    distance, bits = site.constant(1), x.dtype.bits
    if isinstance(distance, int) and 0 <= distance < bits:
        return shift(x, y)
    wide = _as_unsigned(y)
    far = e.greater_equal(wide, bits)
    return e.where(far, beyond, shift(x, e.where(far, splat(0, y.type), y)))


@row("stablehlo.shift_left")
def _(site: Site, x: Tensor, y: Tensor) -> Tensor:
    return _shift(site, x, y, e.shift_left, splat(0, x.type))


@row("stablehlo.shift_right_logical")
def _(site: Site, x: Tensor, y: Tensor) -> Tensor:
    bits, distance = _as_unsigned(x), _as_unsigned(y)
    return cast(_shift(site, bits, distance, e.shift_right, splat(0, bits.type)), dtype=x.dtype)


@row("stablehlo.shift_right_arithmetic")
def _(site: Site, x: Tensor, y: Tensor) -> Tensor:
    signed = cast(x, dtype=BY_NAME[SIGNED_OF[x.dtype.bits]]) if x.dtype.kind == "uint" else x
    distance = cast(y, dtype=signed.dtype) if y.dtype != signed.dtype else y
    last = splat(x.dtype.bits - 1, signed.type)
    return cast(_shift(site, signed, distance, e.shift_right, e.shift_right(signed, last)), dtype=x.dtype)


# Conversions.


@row("stablehlo.convert", "mhlo.convert")
def _(site: Site, x: Tensor) -> Tensor:
    if site.dtype == bool_ and x.dtype != bool_:
        return e.not_equal(x, 0)
    return x if x.dtype == site.dtype else cast(x, dtype=site.dtype)


@row("stablehlo.bitcast_convert")
def _(site: Site, x: Tensor) -> Tensor:
    if x.dtype == site.dtype:
        return x
    if x.dtype.bits not in UNSIGNED_OF or site.dtype.bits not in UNSIGNED_OF:
        raise site.refuse(f"bits of {x.dtype} as {site.dtype}")
    if x.dtype.bits < site.dtype.bits:
        return _merge_bits(x, site.dtype)
    return bitcast(x, site.dtype) if x.dtype.bits == site.dtype.bits else _split_bits(x, site.dtype)


def _unsigned_type(bits: int) -> DType:
    return BY_NAME[UNSIGNED_OF[bits]]


def _merge_bits(x: Tensor, dtype: DType) -> Tensor:
    """The elements of the last axis as one element, the lowest bits first."""
    words = cast(bitcast(x, _unsigned_type(x.dtype.bits)), dtype=_unsigned_type(dtype.bits))
    found = None
    for i in range(x.shape[-1]):
        start, stop = (*(0,) * (x.ndim - 1), i), (*x.shape[:-1], i + 1)
        part = reshape(slice_(words, start=start, stop=stop), shape=x.shape[:-1])
        part = e.shift_left(part, i * x.dtype.bits) if i else part
        found = part if found is None else e.bitwise_or(found, part)
    return bitcast(found, dtype)


def _split_bits(x: Tensor, dtype: DType) -> Tensor:
    """Each element as several of a narrower type along a new last axis, the lowest bits first."""
    word = bitcast(x, _unsigned_type(x.dtype.bits))
    shifted = [e.shift_right(word, i) if i else word for i in range(0, x.dtype.bits, dtype.bits)]
    parts = [cast(e.bitwise_and(w, 2**dtype.bits - 1), dtype=_unsigned_type(dtype.bits)) for w in shifted]
    return bitcast(stack(parts, axis=-1), dtype)


@row("stablehlo.reduce_precision")
def _(site: Site, x: Tensor) -> Tensor:
    exponent, mantissa = _precision_bits(site)
    return reduce_precision(x, exponent, mantissa)


def _precision_bits(site: Site) -> tuple[int, int]:
    """`e5m10`, or two attributes."""
    if site.get("format") is not None:
        exponent, mantissa = str(site.get("format")).lstrip("e").split("m")
        return int(exponent), int(mantissa)
    return int(site.get("exponent_bits")), int(site.get("mantissa_bits"))


# Comparisons.

_COMPARISONS = {
    "EQ": e.equal, "NE": e.not_equal, "LT": e.less, "LE": e.less_equal, "GT": e.greater, "GE": e.greater_equal,
}  # fmt: skip


@row("stablehlo.compare")
def _(site: Site, x: Tensor, y: Tensor) -> Tensor:
    direction, kind = comparison_of(site)
    if kind == "TOTALORDER" and x.dtype.is_float:
        x, y = order_key(x), order_key(y)
    if _is_bool(x) and direction not in ("EQ", "NE"):
        x, y = cast(x, dtype=int32), cast(y, dtype=int32)
    return _COMPARISONS[direction](x, y)


def comparison_of(site: Any) -> tuple[str, str]:
    """The direction and the kind of a comparison, in either form."""
    flags = [*site.get("flags", []), "", ""]
    return site.get("comparison_direction") or flags[0], site.get("compare_type") or flags[1]


def order_key(x: Tensor) -> Tensor:
    """Integers in the total order of floats (IEEE 754): -NaN, -inf, ..., -0, 0, ..., inf, NaN."""
    wide: DType = f64 if x.dtype == f64 else f32
    bits = bitcast(cast(x, dtype=wide), dtype=int64 if wide == f64 else int32)
    top = 2 ** (wide.bits - 1) - 1
    return e.where(e.less(bits, 0), e.bitwise_xor(bits, splat(top, bits.type)), bits)

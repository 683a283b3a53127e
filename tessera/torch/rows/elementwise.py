"""Elementwise rows: arithmetic, comparisons, logic, scalar functions and selection (ATen's pointwise ops)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from tessera.core.errors import UnsupportedOpError
from tessera.core.types import DType, bool_, fp8_e4m3, int64
from tessera.ir.tensor import Tensor
from tessera.ops.tensor import elementwise as e
from tessera.ops.tensor import scalar_functions as s
from tessera.ops.tensor.basic import broadcast_to, cast, splat
from tessera.ops.tensor.bits import bitcast
from tessera.torch.table import (
    ATEN,
    aten,
    convert,
    floating,
    narrow_to,
    promote,
    round_once,
    unify,
    unify_floating,
    wide,
)

# Functions of one operand.

FLOATING: dict[str, Callable[..., Any]] = {
    "acos": s.acos, "acosh": s.acosh, "asin": s.asin, "asinh": s.asinh, "atan": s.atan, "atanh": s.atanh,
    "cos": e.cos, "cosh": s.cosh, "erf": e.erf, "erfc": e.erfc, "exp": e.exp, "exp2": e.exp2, "expm1": s.expm1,
    "log": e.log, "log10": s.log10, "log1p": s.log1p, "log2": e.log2, "reciprocal": s.reciprocal, "rsqrt": e.rsqrt,
    "sigmoid": s.sigmoid, "sin": e.sin, "sinh": s.sinh, "sqrt": e.sqrt, "tan": s.tan, "tanh": e.tanh,
}  # fmt: skip
"""Functions of floats; integers and bools become f32."""

for _name, _function in FLOATING.items():
    aten(f"{_name}.default")(lambda x, function=_function: function(floating(x)))


def _unless_integer(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x: function(x) if x.dtype.is_float else x


for _name, _function in {"ceil": e.ceil, "floor": e.floor, "trunc": s.trunc, "fix": s.trunc, "round": e.round}.items():
    aten(f"{_name}.default")(_unless_integer(_function))

aten("neg.default")(lambda x: e.neg(x))
aten("alias.default", "detach.default", "lift_fresh_copy.default", "positive.default", "clone.default")(lambda x: x)
aten("isnan.default")(lambda x: s.isnan(x))
aten("isinf.default")(lambda x: s.isinf(x))
aten("signbit.default")(lambda x: s.signbit(x) if x.dtype.is_float else e.less(x, 0))
aten("square.default")(lambda x: e.mul(x, x))


@aten("abs.default")
def _(x):
    return e.abs(x) if x.dtype.kind in ("float", "int") else x


@aten("sign.default", "sgn.default")
def _(x):
    if x.dtype.kind == "bool":
        return x
    return e.sub(cast(e.greater(x, 0), dtype=x.dtype), cast(e.less(x, 0), dtype=x.dtype))


@aten("round.decimals")
def _(x, decimals=0):
    if not x.dtype.is_float:
        return x
    scale = 10.0 ** abs(decimals)
    y = wide(x)
    scaled = e.div(e.round(y * scale), scale) if decimals >= 0 else e.round(e.div(y, scale)) * scale
    return narrow_to(scaled, x.dtype)


@aten("frac.default")
def _(x):
    return x - s.trunc(x)


@aten("bitwise_not.default")
def _(x):
    return e.equal(x, False) if x.dtype.kind == "bool" else e.bitwise_not(x)


@aten("deg2rad.default")
def _(x):
    return round_once(lambda a, b: a * b, (floating(x), math.pi / 180))


@aten("rad2deg.default")
def _(x):
    return round_once(lambda a, b: a * b, (floating(x), 180 / math.pi))


@aten("nan_to_num.default")
def _(x, nan=None, posinf=None, neginf=None):
    return s.nan_to_num(x, nan or 0.0, posinf, neginf) if x.dtype.is_float else x


@aten("logit.default")
def _(x, eps=None):
    y = wide(floating(x))
    y = y if eps is None else s.clip(y, eps, 1.0 - eps)
    return narrow_to(e.log(e.div(y, 1.0 - y)), floating(x).dtype)


@aten("sinc.default")
def _(x):
    y = floating(x)
    angle = wide(y) * math.pi
    zero = e.equal(angle, 0.0)
    return narrow_to(e.where(zero, 1.0, e.div(e.sin(angle), e.where(zero, 1.0, angle))), y.dtype)


# Arithmetic of two operands.


def _apply_with_alpha(function: Callable[..., Any], x: Any, y: Any, alpha: Any) -> Any:
    x, y = unify(x, y)
    if not isinstance(alpha, Tensor) and alpha == 1:
        return round_once(function, (x, y))
    return round_once(lambda a, b, k: function(a, b * k), (x, y, alpha))


@aten("add.Tensor", "add.Scalar")
def _(x, y, alpha=1):
    if promote(x, y).kind == "bool":
        return e.bitwise_or(*(_as_bool(v) for v in (x, y))) if alpha else _as_bool(x)
    return _apply_with_alpha(e.add, x, y, alpha)


@aten("sub.Tensor", "sub.Scalar")
def _(x, y, alpha=1):
    return _apply_with_alpha(e.sub, x, y, alpha)


@aten("rsub.Tensor", "rsub.Scalar")
def _(x, y, alpha=1):
    return _apply_with_alpha(lambda a, b: e.sub(b, a), *unify(x, y), 1) if alpha == 1 else _subtract_scaled(x, y, alpha)


def _subtract_scaled(x: Any, y: Any, alpha: Any) -> Any:
    return round_once(lambda a, b, k: e.sub(b, a * k), (*unify(x, y), alpha))


@aten("mul.Tensor", "mul.Scalar")
def _(x, y):
    if promote(x, y).kind == "bool":
        return e.bitwise_and(*(_as_bool(v) for v in (x, y)))
    return round_once(e.mul, unify(x, y))


def _as_bool(x: Any) -> Tensor:
    if isinstance(x, Tensor):
        return x if x.dtype.kind == "bool" else e.not_equal(x, 0)
    return splat(bool(x), Tensor(True).type)


@aten("div.Tensor", "div.Scalar", "true_divide.Tensor")
def _(x, y):
    return round_once(e.div, unify_floating(x, y))


@aten("div.Tensor_mode", "div.Scalar_mode")
def _(x, y, rounding_mode=None):
    if rounding_mode is None:
        return round_once(e.div, unify_floating(x, y))
    x, y = unify(x, y)
    if rounding_mode == "floor":
        return round_once(_floor_divide, (x, y))
    return round_once(_divide_toward_zero, (x, y))


def _divide_toward_zero(x: Any, y: Any) -> Any:
    if (x if isinstance(x, Tensor) else y).dtype.is_float:
        return s.trunc(e.div(x, y))
    quotient = e.floor_divide(x, y)
    inexact = e.not_equal(e.mul(quotient, y), x)
    return e.add(quotient, cast(e.bitwise_and(e.less(quotient, 0), inexact), dtype=quotient.dtype))


def _floor_divide(x: Any, y: Any) -> Any:
    if not (x if isinstance(x, Tensor) else y).dtype.is_float:
        return e.floor_divide(x, y)
    # As Python divides: from the remainder, so that 1.0 // 0.1 is 9; by zero as `div`.
    rest = s.fmod(x, y)
    opposite = e.bitwise_and(e.not_equal(rest, 0.0), e.not_equal(e.less(rest, 0.0), e.less(y, 0.0)))
    quotient = e.div(e.sub(x, rest), y)
    quotient = e.where(opposite, quotient - 1.0, quotient)
    whole = e.floor(quotient)
    whole = e.where(e.greater(quotient - whole, 0.5), whole + 1.0, whole)
    return e.where(e.equal(y, 0.0), e.div(x, y), whole) if isinstance(y, Tensor) or y == 0 else whole


@aten("floor_divide.default", "floor_divide.Scalar")
def _(x, y):
    return round_once(_floor_divide, unify(x, y))


@aten("remainder.Tensor", "remainder.Scalar", "remainder.Scalar_Tensor")
def _(x, y):
    return round_once(_remainder, unify(x, y))


def _remainder(x: Any, y: Any) -> Any:
    if not (x if isinstance(x, Tensor) else y).dtype.is_float:
        return e.remainder(x, y)
    rest = s.fmod(x, y)
    opposite = e.bitwise_and(e.not_equal(rest, 0.0), e.not_equal(e.less(rest, 0.0), e.less(y, 0.0)))
    return e.where(opposite, e.add(rest, y), rest)


@aten("fmod.Tensor", "fmod.Scalar")
def _(x, y):
    return round_once(s.fmod, unify(x, y))


@aten("pow.Tensor_Tensor", "pow.Tensor_Scalar", "pow.Scalar")
def _(x, y):
    if promote(x, y).is_float:
        return round_once(_power, unify(x, y))
    return e.pow(*unify(x, y))


def _power(x: Any, y: Any) -> Any:
    if not isinstance(y, Tensor):
        if y == 2.0:
            return e.mul(x, x)
        if y == 3.0:
            return e.mul(e.mul(x, x), x)
        if y == 0.5:
            return e.sqrt(x)
        if y == 1.0:
            return x
    return e.pow(x, y)


@aten("atan2.default", "atan2.out")
def _(y, x, out=None):
    return s.atan2(*unify_floating(y, x))


@aten("maximum.default")
def _(x, y):
    x, y = unify(x, y)
    return e.bitwise_or(x, y) if x.dtype.kind == "bool" else e.maximum(x, y)


@aten("minimum.default")
def _(x, y):
    x, y = unify(x, y)
    return e.bitwise_and(x, y) if x.dtype.kind == "bool" else e.minimum(x, y)


@aten("fmax.default")
def _(x, y):
    return _ignore_nan(e.maximum, *unify(x, y))


@aten("fmin.default")
def _(x, y):
    return _ignore_nan(e.minimum, *unify(x, y))


def _ignore_nan(function: Callable[..., Any], x: Tensor, y: Tensor) -> Tensor:
    if x.dtype.kind == "bool":
        return e.bitwise_or(x, y) if function is e.maximum else e.bitwise_and(x, y)
    if not x.dtype.is_float:
        return function(x, y)
    return e.where(s.isnan(x), y, e.where(s.isnan(y), x, function(x, y)))


@aten("hypot.default")
def _(x, y):
    return s.hypot(*unify(x, y))


@aten("copysign.Tensor", "copysign.Scalar")
def _(x, y):
    return s.copysign(*unify_floating(x, y))


@aten("logaddexp.default")
def _(x, y):
    return s.logaddexp(*unify_floating(x, y))


@aten("nextafter.default")
def _(x, y):
    return s.nextafter(*unify(x, y))


@aten("xlogy.Tensor", "xlogy.Scalar_Other", "xlogy.Scalar_Self")
def _(x, y):
    x, y = unify_floating(x, y)
    return round_once(_xlogy, (x, y))


def _xlogy(x: Any, y: Any) -> Tensor:
    log = e.log(y) if isinstance(y, Tensor) else math.log(y) if y > 0 else (-math.inf if y == 0 else math.nan)
    zero = e.equal(x, 0.0) if isinstance(x, Tensor) else x == 0
    product = e.where(zero, 0.0, e.mul(x, log)) if isinstance(zero, Tensor) else e.mul(0.0 if zero else x, log)
    same = isinstance(x, Tensor) and isinstance(y, Tensor) and x.data is y.data  # a NaN is then one of the product
    return e.where(s.isnan(y), math.nan, product) if isinstance(y, Tensor) and not same else product


@aten("lerp.Scalar", "lerp.Tensor")
def _(x, y, weight):
    dtype = promote(x, y)
    a, b, w = (wide(v) if isinstance(v, Tensor) else v for v in (x, y, weight))
    if isinstance(w, Tensor):
        near = e.less(e.abs(w), 0.5)
        return narrow_to(e.where(near, a + w * (b - a), b - (b - a) * (1.0 - w)), dtype)
    return narrow_to(a + (b - a) * w if abs(w) < 0.5 else b - (b - a) * (1.0 - w), dtype)


@aten("addcmul.default")
def _(x, first, second, value=1):
    return _add_scaled(e.mul, x, first, second, value)


@aten("addcdiv.default")
def _(x, first, second, value=1):
    return _add_scaled(e.div, x, first, second, value)


def _add_scaled(function: Callable[..., Any], x: Tensor, first: Tensor, second: Tensor, value: Any) -> Tensor:
    dtype = promote(x, first, second)
    x, first, second = (wide(convert(v, dtype)) for v in (x, first, second))
    term = function(first, second)
    return narrow_to(e.add(x, term if value == 1 else e.mul(term, value)), dtype)


# Comparisons and logic.

COMPARISONS: dict[str, Callable[..., Any]] = {
    "eq": e.equal, "ne": e.not_equal, "lt": e.less, "le": e.less_equal, "gt": e.greater, "ge": e.greater_equal,
}  # fmt: skip

for _name, _function in COMPARISONS.items():
    aten(f"{_name}.Tensor", f"{_name}.Scalar")(lambda x, y, function=_function: _compare(function, x, y))


def _compare(function: Callable[..., Any], x: Any, y: Any) -> Any:
    x, y = unify(x, y)
    if isinstance(x, Tensor) and x.dtype.kind == "bool" and function not in (e.equal, e.not_equal):
        x, y = (cast(v, dtype=int64) if isinstance(v, Tensor) else int(v) for v in (x, y))
    return round_once(function, (x, y))


for _name, _function in {"and": e.bitwise_and, "or": e.bitwise_or, "xor": e.bitwise_xor}.items():
    aten(f"bitwise_{_name}.Tensor", f"bitwise_{_name}.Scalar", f"__{_name}__.Tensor", f"__{_name}__.Scalar")(
        lambda x, y, function=_function: function(*unify(x, y))
    )
    aten(f"logical_{_name}.default")(lambda x, y, function=_function: function(_as_bool(x), _as_bool(y)))


@aten("bitwise_left_shift.Tensor", "bitwise_left_shift.Tensor_Scalar", "__lshift__.Scalar", "__lshift__.Tensor")
def _(x, y):
    return e.shift_left(*unify(x, y))


@aten("bitwise_right_shift.Tensor", "bitwise_right_shift.Tensor_Scalar", "__rshift__.Scalar", "__rshift__.Tensor")
def _(x, y):
    return e.shift_right(*unify(x, y))


@aten("logical_not.default")
def _(x):
    return e.equal(_as_bool(x), False)


@aten("isfinite.default")
def _(x):
    return s.isfinite(x)


# Selection and conversion.


@aten("where.self", "where.ScalarSelf", "where.ScalarOther", "where.Scalar")
def _(condition, x, y):
    condition = _as_bool(condition)
    if isinstance(x, Tensor) or isinstance(y, Tensor):
        return e.where(condition, *unify(x, y))
    dtype = promote(x, y)
    return e.where(
        condition, *(splat(convert(v, dtype), condition.type.with_dtype(dtype).with_shape(())) for v in (x, y))
    )


@aten("clamp.default", "clamp.Tensor")
def _(x, low=None, high=None):
    dtype = promote(*(v for v in (x, low, high) if v is not None))
    x = convert(x, dtype)
    x = x if low is None else e.maximum(x, convert(low, dtype))
    return x if high is None else e.minimum(x, convert(high, dtype))


@aten("clamp_min.default", "clamp_min.Tensor")
def _(x, low):
    return e.maximum(*unify(x, low))


@aten("clamp_max.default", "clamp_max.Tensor")
def _(x, high):
    return e.minimum(*unify(x, high))


@aten("_to_copy.default")
def _(x, dtype=None):
    return x if dtype is None else convert_element_type(x, dtype)


ATEN["prims.fma.default"] = lambda x, y, z: s.fma(*unify(x, y, z))
ATEN["prims.convert_element_type.default"] = lambda x, dtype: convert_element_type(x, dtype)


@aten("view.dtype")
def _(x, dtype):
    if dtype != x.dtype and dtype.bits < 32:
        raise UnsupportedOpError(f"a view of elements of {x.dtype} as {dtype}: the bits of NaN would not be kept")
    return bitcast(x, dtype)


@aten("copy.default")
def _(x, source):
    y = convert_element_type(source, x.dtype)
    return y if y.shape == x.shape else broadcast_to(y, shape=x.shape)


MAX_E4M3 = 448


def convert_element_type(x: Tensor, dtype: DType) -> Tensor:
    """`x` with its elements converted; what is not 0 becomes True, and fp8_e4m3, which has no infinity, saturates."""
    if x.dtype == dtype:
        return x
    if dtype == fp8_e4m3 and (x.dtype.is_float or x.dtype.bits > 8):
        x = e.minimum(e.maximum(wide(x) if x.dtype.is_float else x, -MAX_E4M3), MAX_E4M3)
    return e.not_equal(x, 0) if dtype == bool_ else cast(x, dtype=dtype)

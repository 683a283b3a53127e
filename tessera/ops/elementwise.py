"""Elementwise arithmetic, comparison, selection and scalar functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tessera.errors import DTypeError
from tessera.numerics import bounds, special
from tessera.numerics.special import erf as erf_of
from tessera.op import STORAGE, Op, error, op
from tessera.ops.coerce import floating, pointwise, powering, rounding, selecting
from tessera.types import TensorType, bool_


def same(*types: TensorType) -> TensorType:
    """The type rule of ops whose result is like their operands."""
    return next((t for t in types if t.policy), types[0])


def number(*types: TensorType) -> TensorType:
    """As `same`; bools are refused, since their sum means something else to everyone."""
    if types[0].dtype.kind == "bool":
        raise DTypeError(
            "arithmetic on bool", expected="numbers", received=str(types[0]),
            suggestion="use & | ^ for logic, or cast to ts.int32",
        )  # fmt: skip
    return same(*types)


def truth(*types: TensorType) -> TensorType:
    """The type rule of comparisons."""
    return TensorType(types[0].shape, bool_)


def integral(*types: TensorType) -> TensorType:
    """The type rule of bitwise ops: integers and bools."""
    if types[0].dtype.is_float:
        raise DTypeError("bitwise ops need integers or bools", received=str(types[0]))
    return same(*types)


def chosen(condition: TensorType, x: TensorType, y: TensorType) -> TensorType:
    """The type rule of `where`."""
    return same(x, y)


Define = Callable[[Any], Op]


def _define(bound: Any, **columns: Any) -> Define:
    """An op and its error rule."""

    def define(ref: Any) -> Op:
        made = op(pointwise=True, **columns)(ref)
        error(made)(bound)
        return made

    return define


def _arithmetic(bound: Any) -> Define:
    return _define(bound, infer=number, coerce=pointwise)


def _function(bound: Any) -> Define:
    return _define(bound, infer=same, coerce=floating)


def _comparison(bound: Any) -> Define:
    return _define(bound, infer=truth, coerce=pointwise, numerics=STORAGE)


_whole = _define(bounds.selection, infer=same, coerce=rounding)
_bitwise = _define(bounds.bits, infer=integral, coerce=pointwise, numerics=STORAGE)


@_arithmetic(bounds.monotone)
def add(x, y):
    """`x` plus `y`."""
    return np.add(x, y)


@_arithmetic(bounds.monotone)
def sub(x, y):
    """`x` minus `y`."""
    return np.subtract(x, y)


@_arithmetic(bounds.monotone)
def mul(x, y):
    """`x` times `y`."""
    return np.multiply(x, y)


@_function(bounds.quotient)
def div(x, y):
    """`x` divided by `y`; integers are divided as f32."""
    return np.divide(x, y)


@_arithmetic(bounds.floored)
def floor_divide(x, y):
    """The quotient rounded toward minus infinity; an integer divided by zero is undefined."""
    return np.floor_divide(x, y)


@_arithmetic(bounds.rest)
def remainder(x, y):
    """What `floor_divide` leaves; it has the sign of `y`."""
    return np.remainder(x, y)


@_define(bounds.power, infer=same, coerce=powering)
def pow(x, exponent):
    """`x` to the power `exponent`; integers to a power from 0 on stay integers."""
    return special.power(x, exponent)


@_define(bounds.selection, infer=same, coerce=pointwise)
def maximum(x, y):
    """The larger of `x` and `y`; NaN if either is."""
    return np.maximum(x, y)


@_define(bounds.selection, infer=same, coerce=pointwise)
def minimum(x, y):
    """The smaller of `x` and `y`; NaN if either is."""
    return np.minimum(x, y)


@_arithmetic(bounds.selection)
def neg(x):
    """Minus `x`."""
    return np.negative(x)


@_arithmetic(bounds.selection)
def abs(x):
    """The magnitude of `x`."""
    return np.abs(x)


@_function(bounds.monotone)
def exp(x):
    """e to the power `x`."""
    return np.exp(x)


@_function(bounds.monotone)
def exp2(x):
    """Two to the power `x`."""
    return np.exp2(x)


@_function(bounds.monotone)
def log(x):
    """The natural logarithm of `x`."""
    return np.log(x)


@_function(bounds.monotone)
def log2(x):
    """The base-2 logarithm of `x`."""
    return np.log2(x)


@_function(bounds.monotone)
def sqrt(x):
    """The square root of `x`."""
    return np.sqrt(x)


@_function(bounds.monotone)
def rsqrt(x):
    """One over the square root of `x`."""
    return np.divide(x.dtype.type(1), np.sqrt(x))


@_function(bounds.monotone)
def tanh(x):
    """The hyperbolic tangent of `x`."""
    return np.tanh(x)


@_function(bounds.monotone)
def erf(x):
    """The error function: 2/sqrt(pi) times the integral of exp(-t*t) from 0 to `x` (DLMF 7.2.1)."""
    return erf_of(x)


@_function(bounds.lipschitz)
def sin(x):
    """The sine of `x`, in radians."""
    return np.sin(x)


@_function(bounds.lipschitz)
def cos(x):
    """The cosine of `x`, in radians."""
    return np.cos(x)


@_whole
def floor(x):
    """The largest whole number not above `x`."""
    return np.floor(x)


@_whole
def ceil(x):
    """The smallest whole number not below `x`."""
    return np.ceil(x)


@_whole
def round(x):
    """The nearest whole number; ties go to the even one."""
    return np.rint(x)


@_comparison(bounds.selection)
def less(x, y):
    """Whether `x` < `y`."""
    return np.less(x, y)


@_comparison(bounds.selection)
def less_equal(x, y):
    """Whether `x` <= `y`."""
    return np.less_equal(x, y)


@_comparison(bounds.selection)
def greater(x, y):
    """Whether `x` > `y`."""
    return np.greater(x, y)


@_comparison(bounds.selection)
def greater_equal(x, y):
    """Whether `x` >= `y`."""
    return np.greater_equal(x, y)


@_comparison(bounds.equality)
def equal(x, y):
    """Whether `x` equals `y`; NaN equals nothing."""
    return np.equal(x, y)


@_comparison(bounds.equality)
def not_equal(x, y):
    """Whether `x` differs from `y`."""
    return np.not_equal(x, y)


@_bitwise
def bitwise_and(x, y):
    """The bits set in both; logical and for bools."""
    return np.bitwise_and(x, y)


@_bitwise
def bitwise_or(x, y):
    """The bits set in either; logical or for bools."""
    return np.bitwise_or(x, y)


@_bitwise
def bitwise_xor(x, y):
    """The bits set in one but not both."""
    return np.bitwise_xor(x, y)


@_bitwise
def bitwise_not(x):
    """Every bit flipped; logical not for bools."""
    return np.invert(x)


@_bitwise
def shift_left(x, y):
    """`x` shifted left by `y` bits; undefined from the width on."""
    return np.left_shift(x, y)


@_bitwise
def shift_right(x, y):
    """`x` shifted right by `y` bits, keeping the sign of signed integers."""
    return np.right_shift(x, y)


@_define(bounds.selected, infer=chosen, coerce=selecting, numerics=STORAGE)
def where(condition, x, y):
    """`x` where the condition holds, else `y`."""
    return np.where(condition, x, y)

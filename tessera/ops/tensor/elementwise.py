"""Elementwise ops: arithmetic, comparison, bitwise, selection and scalar functions, with their derivatives. Batching
needs no rules."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from tessera.core.errors import DTypeError, user_location
from tessera.core.types import TensorType, bool_, int8
from tessera.ir.analysis import (
    UNBOUNDED,
    add_forms,
    affine_rules,
    bound_remainder,
    combine_endpoints,
    divide_intervals,
    divisor_rules,
    find_common_divisor,
    find_divisor,
    interval_rules,
    multiply_divisors,
    multiply_endpoints,
    multiply_forms,
)
from tessera.ir.numerics import error_rules, reference_kernels
from tessera.ir.rules import BITS, FLOATS, INTEGERS, STORAGE, Op, error, jvp, lower, op, transpose
from tessera.ir.tensor import Tensor
from tessera.ops.tensor.basic import (
    cast,
    instantiate_zero,
    is_undefined_primal,
    linear_jvp,
    splat,
    sum_of_exact_partials,
    sum_of_partials,
    zero_jvp,
)
from tessera.ops.tensor.coercion import (
    BOOL_ARITHMETIC,
    INTEGER_POWER_HOOK,
    coerce_arithmetic,
    coerce_floating,
    coerce_pointwise,
    coerce_power,
    coerce_rounding,
    coerce_select,
)


def infer_same(*types: TensorType) -> TensorType:
    """The type rule of ops whose result is like their operands."""
    return next((t for t in types if t.policy), types[0])


def infer_numeric(*types: TensorType) -> TensorType:
    """As `infer_same`; bools are refused: where they have arithmetic, it is another op (`BOOL_ARITHMETIC`)."""
    if types[0].dtype.kind == "bool":
        raise DTypeError(
            "arithmetic on bool", expected="numbers", received=str(types[0]),
            suggestion="use & | ^ for logic, or cast to ts.int32",
        )  # fmt: skip
    return infer_same(*types)


def infer_comparison(*types: TensorType) -> TensorType:
    """The type rule of comparisons."""
    return TensorType(types[0].shape, bool_)


def infer_bitwise(*types: TensorType) -> TensorType:
    """The type rule of bitwise ops: integers and bools."""
    if types[0].dtype.is_float:
        raise DTypeError("bitwise ops need integers or bools", received=str(types[0]))
    return infer_same(*types)


def infer_select(condition: TensorType, x: TensorType, y: TensorType) -> TensorType:
    """The type rule of `where`."""
    return infer_same(x, y)


DefineOp = Callable[[Any], Op]


def _define_op(bound: Any, **columns: Any) -> DefineOp:
    """An op and its error rule."""

    def define(ref: Any) -> Op:
        made = op(pointwise=True, **columns)(ref)
        error(made)(bound)
        return made

    return define


def _define_arithmetic(bound: Any, **columns: Any) -> DefineOp:
    return _define_op(bound, infer=infer_numeric, coerce=coerce_arithmetic, method=True, **columns)


def _define_function(bound: Any, **columns: Any) -> DefineOp:
    return _define_op(bound, infer=infer_same, coerce=coerce_floating, kinds=FLOATS, method=True, **columns)


def _define_comparison(bound: Any) -> DefineOp:
    return _define_op(bound, infer=infer_comparison, coerce=coerce_pointwise, numerics=STORAGE)


def _define_bitwise(kinds: tuple[str, ...], **columns: Any) -> DefineOp:
    bound = error_rules.bound_bitwise
    return _define_op(bound, infer=infer_bitwise, coerce=coerce_pointwise, numerics=STORAGE, kinds=kinds, **columns)


_define_rounding = _define_op(
    error_rules.bound_whole_numbers, infer=infer_same, coerce=coerce_rounding, kinds=FLOATS, method=True
)
_define_extremum = _define_op(error_rules.bound_selection, infer=infer_same, coerce=coerce_pointwise, method=True)


@_define_arithmetic(error_rules.bound_additive, ulps=0.5)
def add(x, y):
    """`x` plus `y`."""
    return np.add(x, y)


@_define_arithmetic(error_rules.bound_additive, ulps=0.5)
def sub(x, y):
    """`x` minus `y`."""
    return np.subtract(x, y)


@_define_arithmetic(error_rules.bound_monotone, ulps=0.5)
def mul(x, y):
    """`x` times `y`."""
    return np.multiply(x, y)


@_define_function(error_rules.bound_quotient, ulps=2.5, ulps_f64=0.5, domain=(0.5, 3.0), cost=4)
def div(x, y):
    """`x` divided by `y`; integers are divided as f32."""
    return np.divide(x, y)


@_define_arithmetic(error_rules.bound_floor_divide, domain=(1.0, 7.0), cost=30)
def floor_divide(x, y):
    """The quotient rounded toward minus infinity; an integer divided by zero is undefined."""
    return np.floor_divide(x, y)


@_define_arithmetic(error_rules.bound_remainder, domain=(1.0, 7.0), cost=30)
def remainder(x, y):
    """The remainder of `floor_divide`; it has the sign of `y`."""
    return np.remainder(x, y)


@_define_op(
    error_rules.bound_power, infer=infer_same, coerce=coerce_power, kinds=FLOATS, ulps=16.0, domain=(0.1, 3.0), cost=30,
    method=True,
)  # fmt: skip
def pow(x, exponent):
    """`x` to the power `exponent`; integers to a power ≥ 0 stay integers."""
    return reference_kernels.compute_power(x, exponent)


@_define_extremum
def maximum(x, y):
    """The larger of `x` and `y`; NaN if either is. Of zeros +0 is the larger (IEEE 754-2019, maximum)."""
    return reference_kernels.compute_extreme(np.maximum, x, y)


@_define_extremum
def minimum(x, y):
    """The smaller of `x` and `y`; NaN if either is. Of zeros -0 is the smaller (IEEE 754-2019, minimum)."""
    return reference_kernels.compute_extreme(np.minimum, x, y)


@_define_arithmetic(error_rules.bound_selection)
def neg(x):
    """Minus `x`."""
    return np.negative(x)


@_define_arithmetic(error_rules.bound_selection)
def abs(x):
    """The magnitude of `x`."""
    return np.abs(x)


@_define_function(error_rules.bound_monotone, ulps=3.0, domain=(-6.0, 6.0), cost=10)
def exp(x):
    """e to the power `x`."""
    return np.exp(x)


@_define_function(error_rules.bound_monotone, ulps=3.0, domain=(-8.0, 8.0), cost=10)
def exp2(x):
    """Two to the power `x`."""
    return np.exp2(x)


@_define_function(error_rules.bound_monotone, ulps=3.0, domain=(0.01, 8.0), cost=10)
def log(x):
    """The natural logarithm of `x`."""
    return np.log(x)


@_define_function(error_rules.bound_monotone, ulps=3.0, domain=(0.01, 8.0), cost=10)
def log2(x):
    """The base-2 logarithm of `x`."""
    return np.log2(x)


@_define_function(error_rules.bound_monotone, ulps=3.0, ulps_f64=0.5, domain=(0.0, 8.0), cost=4)
def sqrt(x):
    """The square root of `x`."""
    return np.sqrt(x)


@_define_function(error_rules.bound_monotone, ulps=2.0, domain=(0.05, 8.0), cost=4)
def rsqrt(x):
    """One over the square root of `x`."""
    return np.divide(x.dtype.type(1), np.sqrt(x))


@_define_function(error_rules.bound_monotone, ulps=5.0, domain=(-5.0, 5.0), cost=15)
def tanh(x):
    """The hyperbolic tangent of `x`."""
    return np.tanh(x)


@_define_function(error_rules.bound_monotone, ulps=16.0, domain=(-4.0, 4.0), cost=15)
def erf(x):
    """The error function: 2/sqrt(pi) times the integral of exp(-t*t) from 0 to `x` (DLMF 7.2.1)."""
    return reference_kernels.compute_erf(x)


@_define_function(error_rules.bound_monotone, ulps=16.0, domain=(-4.0, 9.0), cost=25)
def erfc(x):
    """The complementary error function: 1 - erf(x), without cancellation where `x` is large (DLMF 7.2.2)."""
    return reference_kernels.compute_erfc(x)


@_define_function(error_rules.bound_lipschitz, ulps=4.0, domain=(-20.0, 20.0), cost=15)
def sin(x):
    """The sine of `x`, in radians."""
    return np.sin(x)


@_define_function(error_rules.bound_lipschitz, ulps=4.0, domain=(-20.0, 20.0), cost=15)
def cos(x):
    """The cosine of `x`, in radians."""
    return np.cos(x)


@_define_rounding
def floor(x):
    """The largest whole number not above `x`."""
    return np.floor(x)


@_define_rounding
def ceil(x):
    """The smallest whole number not below `x`."""
    return np.ceil(x)


@_define_rounding
def round(x):
    """The nearest whole number; ties go to the even one."""
    return np.rint(x)


@_define_comparison(error_rules.bound_selection)
def less(x, y):
    """Whether `x` < `y`."""
    return np.less(x, y)


@_define_comparison(error_rules.bound_selection)
def less_equal(x, y):
    """Whether `x` <= `y`."""
    return np.less_equal(x, y)


@_define_comparison(error_rules.bound_selection)
def greater(x, y):
    """Whether `x` > `y`."""
    return np.greater(x, y)


@_define_comparison(error_rules.bound_selection)
def greater_equal(x, y):
    """Whether `x` >= `y`."""
    return np.greater_equal(x, y)


@_define_comparison(error_rules.bound_equality)
def equal(x, y):
    """Whether `x` equals `y`; NaN equals nothing."""
    return np.equal(x, y)


@_define_comparison(error_rules.bound_equality)
def not_equal(x, y):
    """Whether `x` differs from `y`."""
    return np.not_equal(x, y)


@_define_bitwise(BITS)
def bitwise_and(x, y):
    """The bits set in both; logical and for bools."""
    return np.bitwise_and(x, y)


@_define_bitwise(BITS)
def bitwise_or(x, y):
    """The bits set in either; logical or for bools."""
    return np.bitwise_or(x, y)


@_define_bitwise(BITS)
def bitwise_xor(x, y):
    """The bits set in one but not both."""
    return np.bitwise_xor(x, y)


@_define_bitwise(BITS)
def bitwise_not(x):
    """Every bit flipped; logical not for bools."""
    return np.invert(x)


@_define_bitwise(INTEGERS, domain=(0.0, 3.0))
def shift_left(x, y):
    """`x` shifted left by `y` bits; undefined from the width on."""
    return np.left_shift(x, y)


@_define_bitwise(INTEGERS, domain=(0.0, 3.0))
def shift_right(x, y):
    """`x` shifted right by `y` bits, keeping the sign of signed integers."""
    return np.right_shift(x, y)


@_define_op(error_rules.bound_where, infer=infer_select, coerce=coerce_select, numerics=STORAGE)
def where(condition, x, y):
    """`x` where the condition holds, else `y`."""
    return np.where(condition, x, y)


# Derivatives of the elementwise ops. Batching them needs no rules.


TWO_OVER_ROOT_PI = 2 / math.sqrt(math.pi)  # DLMF 7.2.1
LOG_2 = math.log(2)
GAUSSIAN_LIMIT = 30.0  # exp(-x²) is 0 beyond it in every type

jvp(add)(sum_of_exact_partials(lambda t, out, x, y: t, lambda t, out, x, y: t))
jvp(sub)(sum_of_exact_partials(lambda t, out, x, y: t, lambda t, out, x, y: -t))
jvp(mul)(sum_of_exact_partials(lambda t, out, x, y: t * y, lambda t, out, x, y: t * x))
jvp(div)(sum_of_partials(lambda t, out, x, y: t / y, lambda t, out, x, y: t * (-out / y)))
jvp(remainder)(sum_of_exact_partials(lambda t, out, x, y: t, lambda t, out, x, y: t * -floor_divide(x, y)))


def _power_base_partial(t, out, x, y):
    # At y = 0 the power is 1 whatever x is, and 1 / x may be infinite.
    flat = (y == 0) & (abs(x) < 4 * float(ml_dtypes.finfo(x.dtype.numpy).smallest_normal))
    return t * where(flat, 0.0, y * pow(x, where(flat, 1.0, y - 1.0)))


def _power_exponent_partial(t, out, x, y):
    # Zero to a non-negative power stays zero: the logarithm is not used.
    nought = (x == 0) & (y >= 0)
    return t * where(nought, 0.0, out * log(where(nought, 1.0, x)))


jvp(pow)(sum_of_partials(_power_base_partial, _power_exponent_partial))


def _extremum_weight(wins, x, y):
    """The weight of an operand's tangent: 1 where it is the extremum, 1/2 where both are equal (design 4)."""
    return cast(wins, dtype=x.dtype) + 0.5 * cast(x == y, dtype=x.dtype)


def _square_within(x, limit):
    """The square of `x`, constant beyond ±limit, where it may overflow."""
    near = minimum(maximum(x, -limit), limit)
    return near * near


jvp(maximum)(
    sum_of_exact_partials(
        lambda t, out, x, y: t * _extremum_weight(x > y, x, y), lambda t, out, x, y: t * _extremum_weight(y > x, x, y)
    )
)
jvp(minimum)(
    sum_of_exact_partials(
        lambda t, out, x, y: t * _extremum_weight(x < y, x, y), lambda t, out, x, y: t * _extremum_weight(y < x, x, y)
    )
)
jvp(abs)(sum_of_exact_partials(lambda t, out, x: t * (cast(x > 0, dtype=x.dtype) - cast(x < 0, dtype=x.dtype))))
jvp(neg)(linear_jvp(neg))
jvp(exp)(sum_of_exact_partials(lambda t, out, x: t * out))
jvp(exp2)(sum_of_partials(lambda t, out, x: t * (out * LOG_2)))
jvp(log)(sum_of_exact_partials(lambda t, out, x: t / x))
jvp(log2)(sum_of_partials(lambda t, out, x: t / (x * LOG_2)))
jvp(sqrt)(sum_of_partials(lambda t, out, x: t * (0.5 / out)))
jvp(rsqrt)(sum_of_partials(lambda t, out, x: t * (-0.5 * out / x)))
jvp(tanh)(sum_of_partials(lambda t, out, x: t * (1.0 - out * out)))
jvp(erf)(sum_of_partials(lambda t, out, x: t * (TWO_OVER_ROOT_PI * exp(-_square_within(x, GAUSSIAN_LIMIT)))))
jvp(erfc)(sum_of_partials(lambda t, out, x: t * (-TWO_OVER_ROOT_PI * exp(-_square_within(x, GAUSSIAN_LIMIT)))))
jvp(sin)(sum_of_partials(lambda t, out, x: t * cos(x)))
jvp(cos)(sum_of_partials(lambda t, out, x: t * -sin(x)))

STEP_FUNCTIONS = (floor_divide, floor, ceil, round)
COMPARISON_OPS = (less, less_equal, greater, greater_equal, equal, not_equal)
BITWISE_OPS = (bitwise_and, bitwise_or, bitwise_xor, bitwise_not, shift_left, shift_right)
jvp(*STEP_FUNCTIONS, *COMPARISON_OPS, *BITWISE_OPS)(zero_jvp)


@jvp(where)
def _(out, primals, tangents):
    condition, x, y = primals
    return where(condition, instantiate_zero(tangents[1], x.type), instantiate_zero(tangents[2], y.type))


@transpose(add)
def _(g, x, y):
    return (g if is_undefined_primal(x) else None), (g if is_undefined_primal(y) else None)


@transpose(sub)
def _(g, x, y):
    return (g if is_undefined_primal(x) else None), (-g if is_undefined_primal(y) else None)


@transpose(neg)
def _(g, x):
    return (-g,)


@transpose(mul)
def _(g, x, y):
    return (g * y, None) if is_undefined_primal(x) else (None, g * x)


@transpose(div)
def _(g, x, y):
    return g / y, None


@transpose(where)
def _(g, condition, x, y):
    zero = splat(0, g.type)
    return (
        None,
        (where(condition, g, zero) if is_undefined_primal(x) else None),
        (where(condition, zero, g) if is_undefined_primal(y) else None),
    )


# Integer powers by repeated squaring.


def _infer_integer_power(x: TensorType, exponent: TensorType) -> TensorType:
    if not x.dtype.is_integer:
        raise DTypeError("integer_power needs integers", received=str(x), suggestion="use ts.pow")
    return x


@op(infer=_infer_integer_power, coerce=coerce_pointwise, numerics=STORAGE)
def integer_power(x, exponent):
    """`x` to the power `exponent`, both integers, with wraparound. Below 0 it is 1 / x toward zero (0 for 0)."""
    odd = np.where(exponent & 1, x, 1)
    below = np.where(np.abs(x) == 1, odd, 0)
    wide = np.uint64 if x.dtype.kind == "u" else np.int64
    return np.where(exponent < 0, below, np.power(x.astype(wide), np.maximum(exponent, 0).astype(wide))).astype(x.dtype)


@lower(integer_power)
def _(x, exponent):
    odd = where(equal(bitwise_and(exponent, 1), 1), x, 1)
    result, square = odd, x
    for bit in range(1, min(6, exponent.dtype.bits - 1)):
        square = square * square
        result = result * where(equal(bitwise_and(shift_right(exponent, bit), 1), 1), square, 1)
    if exponent.dtype.bits > 7:  # from 64 on only powers of 0, 1 and -1 do not overflow
        result = result * where(greater_equal(exponent, 64), square * square, 1)
    if exponent.dtype.kind == "uint":
        return result
    return where(less(exponent, 0), where(equal(abs(x), 1), odd, 0), result)


def raise_to_integer(x: Any, exponent: Any) -> Tensor:
    """The power of integers; for an exponent that is a Python number, a product of squares.

    Raises:
        DTypeError: the exponent is negative: the result would not be an integer.
    """
    if not isinstance(exponent, int):
        return integer_power(x, exponent)
    if exponent < 0:
        raise DTypeError(
            "a negative power is not an integer", location=user_location(), received=f"exponent {exponent}",
            expected="an exponent ≥ 0, or a float base", suggestion=f"x.to(ts.f32) ** {exponent}",
        )  # fmt: skip
    result = None
    for bit in bin(exponent)[2:]:
        result = None if result is None else result * result
        if bit == "1":
            result = x if result is None else result * x
    return splat(1, x.type) if result is None else result


INTEGER_POWER_HOOK.append(raise_to_integer)


# Arithmetic on bools as in NumPy: sums and products are bools, quotients int8; differences are refused there, too.


def _as_int8(op: Op) -> Callable[..., Tensor]:
    return lambda x, y: op(cast(x, dtype=int8), cast(y, dtype=int8))


BOOL_ARITHMETIC.update({
    add: bitwise_or, mul: bitwise_and, abs: lambda x: x, floor_divide: _as_int8(floor_divide),
    remainder: _as_int8(remainder),
})  # fmt: skip


# Index analysis: affine forms, intervals and divisors of integer arithmetic.


affine_rules(add)(add_forms)
affine_rules(sub)(lambda analysis, node: add_forms(analysis, node, -1))
affine_rules(mul)(multiply_forms)


@affine_rules(neg)
def _(analysis, node):
    form = analysis.find_form(node.args[0])
    return None if form is None else form.times(-1)


interval_rules(add)(combine_endpoints(operator.add))
interval_rules(sub)(combine_endpoints(operator.sub))
interval_rules(mul)(combine_endpoints(multiply_endpoints))
interval_rules(maximum)(combine_endpoints(max))
interval_rules(minimum)(combine_endpoints(min))
interval_rules(floor_divide)(divide_intervals)
interval_rules(remainder)(bound_remainder)


@interval_rules(abs)
def _(analysis, node):
    low, high = analysis.of(node.args[0])
    known = math.isfinite(low) and math.isfinite(high)  # that of the least integer wraps
    return (max(low, -high, 0), max(high, -low)) if known else UNBOUNDED


@interval_rules(where)
def _(analysis, node):
    (a, b), (c, d) = (analysis.of(v) for v in node.args[1:])
    return min(a, c), max(b, d)


divisor_rules(add, sub, maximum, minimum)(find_common_divisor)
divisor_rules(mul)(multiply_divisors)


@divisor_rules(where)
def _(producers, node):
    return math.gcd(*(find_divisor(producers, v) for v in node.args[1:]))

"""Derivatives of the elementwise ops, apart from them for the length of that file. Batching them needs no rows."""

from __future__ import annotations

import math

from tessera.op import jvp, transpose
from tessera.ops.basic import cast, splat
from tessera.ops.derivatives import along, dense, linear, still, unknown
from tessera.ops.elementwise import (
    abs,
    add,
    bitwise_and,
    bitwise_not,
    bitwise_or,
    bitwise_xor,
    ceil,
    cos,
    div,
    equal,
    erf,
    exp,
    exp2,
    floor,
    floor_divide,
    greater,
    greater_equal,
    less,
    less_equal,
    log,
    log2,
    maximum,
    minimum,
    mul,
    neg,
    not_equal,
    pow,
    remainder,
    round,
    rsqrt,
    shift_left,
    shift_right,
    sin,
    sqrt,
    sub,
    tanh,
    where,
)  # fmt: skip

TWO_OVER_ROOT_PI = 2 / math.sqrt(math.pi)  # DLMF 7.2.1
LOG_2 = math.log(2)

jvp(add)(along(lambda t, out, x, y: t, lambda t, out, x, y: t))
jvp(sub)(along(lambda t, out, x, y: t, lambda t, out, x, y: -t))
jvp(mul)(along(lambda t, out, x, y: t * y, lambda t, out, x, y: t * x))
jvp(div)(along(lambda t, out, x, y: t / y, lambda t, out, x, y: t * (-out / y)))
jvp(remainder)(along(lambda t, out, x, y: t, lambda t, out, x, y: t * -floor_divide(x, y)))


def _by_base(t, out, x, y):
    # At y = 0 the power is 1 whatever x is, and x to the power -1 may be infinite.
    return t * where(y == 0, 0.0, y * pow(x, where(y == 0, 1.0, y - 1.0)))


def _by_exponent(t, out, x, y):
    # Zero to a power that is not negative stays zero: its logarithm is left out.
    nought = (x == 0) & (y >= 0)
    return t * where(nought, 0.0, out * log(where(nought, 1.0, x)))


jvp(pow)(along(_by_base, _by_exponent))


def _weight(wins, x, y):
    """How much of an operand's motion the extreme follows: all where it wins, half where both are equal (design 4)."""
    return cast(wins, dtype=x.dtype) + 0.5 * cast(x == y, dtype=x.dtype)


jvp(maximum)(along(lambda t, out, x, y: t * _weight(x > y, x, y), lambda t, out, x, y: t * _weight(y > x, x, y)))
jvp(minimum)(along(lambda t, out, x, y: t * _weight(x < y, x, y), lambda t, out, x, y: t * _weight(y < x, x, y)))
jvp(abs)(along(lambda t, out, x: t * (cast(x > 0, dtype=x.dtype) - cast(x < 0, dtype=x.dtype))))
jvp(neg)(linear(neg))
jvp(exp)(along(lambda t, out, x: t * out))
jvp(exp2)(along(lambda t, out, x: t * (out * LOG_2)))
jvp(log)(along(lambda t, out, x: t / x))
jvp(log2)(along(lambda t, out, x: t / (x * LOG_2)))
jvp(sqrt)(along(lambda t, out, x: t * (0.5 / out)))
jvp(rsqrt)(along(lambda t, out, x: t * (-0.5 * out / x)))
jvp(tanh)(along(lambda t, out, x: t * (1.0 - out * out)))
jvp(erf)(along(lambda t, out, x: t * (TWO_OVER_ROOT_PI * exp(-(x * x)))))
jvp(sin)(along(lambda t, out, x: t * cos(x)))
jvp(cos)(along(lambda t, out, x: t * -sin(x)))

STEPS = (floor_divide, floor, ceil, round)
COMPARISONS = (less, less_equal, greater, greater_equal, equal, not_equal)
BITS = (bitwise_and, bitwise_or, bitwise_xor, bitwise_not, shift_left, shift_right)
jvp(*STEPS, *COMPARISONS, *BITS)(still)


@jvp(where)
def _(out, primals, tangents):
    condition, x, y = primals
    return where(condition, dense(tangents[1], x.type), dense(tangents[2], y.type))


@transpose(add)
def _(g, x, y):
    return (g if unknown(x) else None), (g if unknown(y) else None)


@transpose(sub)
def _(g, x, y):
    return (g if unknown(x) else None), (-g if unknown(y) else None)


@transpose(neg)
def _(g, x):
    return (-g,)


@transpose(mul)
def _(g, x, y):
    return (g * y, None) if unknown(x) else (None, g * x)


@transpose(div)
def _(g, x, y):
    return g / y, None


@transpose(where)
def _(g, condition, x, y):
    zero = splat(0, g.type)
    return (
        None,
        (where(condition, g, zero) if unknown(x) else None),
        (where(condition, zero, g) if unknown(y) else None),
    )

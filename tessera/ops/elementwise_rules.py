"""Derivatives of the elementwise ops, apart from them for the length of that file. Batching them needs no rows."""

from __future__ import annotations

import math

from tessera.op import jvp, transpose
from tessera.ops import elementwise as e
from tessera.ops import functions
from tessera.ops.basic import cast, splat
from tessera.ops.derivatives import along, dense, linear, still, unknown

TWO_OVER_ROOT_PI = 2 / math.sqrt(math.pi)  # DLMF 7.2.1
LOG_2 = math.log(2)

jvp(e.add)(along(lambda t, out, x, y: t, lambda t, out, x, y: t))
jvp(e.sub)(along(lambda t, out, x, y: t, lambda t, out, x, y: -t))
jvp(e.mul)(along(lambda t, out, x, y: t * y, lambda t, out, x, y: t * x))
jvp(e.div)(along(lambda t, out, x, y: t / y, lambda t, out, x, y: t * (-out / y)))
jvp(e.remainder)(along(lambda t, out, x, y: t, lambda t, out, x, y: t * -e.floor_divide(x, y)))


def _by_base(t, out, x, y):
    # At y = 0 the power is 1 whatever x is, and x to the power -1 may be infinite.
    return t * e.where(y == 0, 0.0, y * e.pow(x, e.where(y == 0, 1.0, y - 1.0)))


def _by_exponent(t, out, x, y):
    # Zero to a power that is not negative stays zero: its logarithm is left out.
    nought = (x == 0) & (y >= 0)
    return t * e.where(nought, 0.0, out * e.log(e.where(nought, 1.0, x)))


jvp(e.pow)(along(_by_base, _by_exponent))


def _weight(wins, x, y):
    """How much of an operand's motion the extreme follows: all where it wins, half where both are equal (design 4)."""
    return cast(wins, dtype=x.dtype) + 0.5 * cast(x == y, dtype=x.dtype)


jvp(e.maximum)(along(lambda t, out, x, y: t * _weight(x > y, x, y), lambda t, out, x, y: t * _weight(y > x, x, y)))
jvp(e.minimum)(along(lambda t, out, x, y: t * _weight(x < y, x, y), lambda t, out, x, y: t * _weight(y < x, x, y)))
jvp(e.abs)(along(lambda t, out, x: t * (cast(x > 0, dtype=x.dtype) - cast(x < 0, dtype=x.dtype))))
jvp(e.neg)(linear(e.neg))
jvp(e.exp)(along(lambda t, out, x: t * out))
jvp(e.exp2)(along(lambda t, out, x: t * (out * LOG_2)))
jvp(e.log)(along(lambda t, out, x: t / x))
jvp(e.log2)(along(lambda t, out, x: t / (x * LOG_2)))
jvp(e.sqrt)(along(lambda t, out, x: t * (0.5 / out)))
jvp(e.rsqrt)(along(lambda t, out, x: t * (-0.5 * out / x)))
jvp(e.tanh)(along(lambda t, out, x: t * (1.0 - out * out)))
jvp(e.erf)(along(lambda t, out, x: t * (TWO_OVER_ROOT_PI * e.exp(-(x * x)))))
jvp(e.sin)(along(lambda t, out, x: t * e.cos(x)))
jvp(e.cos)(along(lambda t, out, x: t * -e.sin(x)))

STEPS = (e.floor_divide, e.floor, e.ceil, e.round, functions.sign, functions.trunc)
COMPARISONS = (e.less, e.less_equal, e.greater, e.greater_equal, e.equal, e.not_equal)
BITS = (e.bitwise_and, e.bitwise_or, e.bitwise_xor, e.bitwise_not, e.shift_left, e.shift_right)
jvp(*STEPS, *COMPARISONS, *BITS)(still)


@jvp(e.where)
def _(out, primals, tangents):
    condition, x, y = primals
    return e.where(condition, dense(tangents[1], x.type), dense(tangents[2], y.type))


@transpose(e.add)
def _(g, x, y):
    return (g if unknown(x) else None), (g if unknown(y) else None)


@transpose(e.sub)
def _(g, x, y):
    return (g if unknown(x) else None), (-g if unknown(y) else None)


@transpose(e.neg)
def _(g, x):
    return (-g,)


@transpose(e.mul)
def _(g, x, y):
    return (g * y, None) if unknown(x) else (None, g * x)


@transpose(e.div)
def _(g, x, y):
    return g / y, None


@transpose(e.where)
def _(g, condition, x, y):
    zero = splat(0, g.type)
    return (
        None,
        (e.where(condition, g, zero) if unknown(x) else None),
        (e.where(condition, zero, g) if unknown(y) else None),
    )

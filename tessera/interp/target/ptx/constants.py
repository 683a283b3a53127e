"""Constant expressions of integers: `(2 * 4) << 3`, as operands, sizes and initial values."""

from __future__ import annotations

import operator
from collections.abc import Callable

from tessera.interp.target.ptx.lexer import Cursor

_BITS = 64
_ALL = (1 << _BITS) - 1  # remainders are of numbers without a sign, as ptxas has them
# Binary operators from those that bind least, as in C.
_LEVELS: tuple[dict[str, Callable[[int, int], int]], ...] = (
    {"||": lambda a, b: int(bool(a) or bool(b))},
    {"&&": lambda a, b: int(bool(a) and bool(b))},
    {"|": operator.or_},
    {"^": operator.xor},
    {"&": operator.and_},
    {"==": operator.eq, "!=": operator.ne},
    {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge},
    {"<<": lambda a, b: a << (b & _BITS - 1), ">>": lambda a, b: a >> (b & _BITS - 1)},
    {"+": operator.add, "-": operator.sub},
    {"*": operator.mul, "/": lambda a, b: _quotient(a, b), "%": lambda a, b: (a & _ALL) % (b & _ALL)},
)
_UNARY: dict[str, Callable[[int], int]] = {
    "+": operator.pos, "-": operator.neg, "~": operator.invert, "!": lambda a: int(not a),
}  # fmt: skip
_CASTS = (".s64", ".u64")


def expression(cursor: Cursor) -> int:
    """The value of an expression: 64 bits with a sign, or without one where a `U` or a cast says so."""
    value = _binary(cursor, 0)
    if not cursor.accept("?"):
        return value
    chosen = expression(cursor)
    cursor.expect(":")
    other = expression(cursor)
    return chosen if value else other


def _binary(cursor: Cursor, level: int) -> int:
    if level == len(_LEVELS):
        return _unary(cursor)
    value, operators = _binary(cursor, level + 1), _LEVELS[level]
    while cursor.at(*operators):
        place, text = cursor.index, cursor.take()
        other = _binary(cursor, level + 1)
        if text in ("/", "%") and not other:
            cursor.index = place
            cursor.fail("division by zero")
        # As 64 bits: what is past them is cut off, and what was made of positive numbers may have become negative.
        value = _wrapped(int(operators[text](value, other)))
    return value


def _unary(cursor: Cursor) -> int:
    if cursor.at(*_UNARY):
        return _wrapped(_UNARY[cursor.take()](_unary(cursor)))
    if not cursor.accept("("):
        if cursor.here_kind != "number":
            cursor.fail("expected an operand")
        return cursor.integer()
    if cursor.accept(*_CASTS):
        cursor.expect(")")
        return _unary(cursor)
    value = expression(cursor)
    cursor.expect(")")
    return value


def _quotient(a: int, b: int) -> int:
    """Toward zero."""
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def _wrapped(value: int) -> int:
    """Values beyond 64 bits cut off; one that fits unsigned stays as it is."""
    half = 1 << _BITS - 1
    if -half <= value < 2 * half:
        return value
    return (value + half) % (2 * half) - half

"""Arithmetic, comparison and logic: folded where both sides are known, written as Python where not."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from tessera.errors import Location
from tessera.interp.target.csl import syntax as s
from tessera.interp.target.csl import types as t
from tessera.interp.target.csl.faults import fail, type_mismatch
from tessera.interp.target.csl.sema.coerce import code, coerce
from tessera.interp.target.csl.sema.frame import Frame, meaning
from tessera.interp.target.csl.sema.operand import Operand, known, runtime

COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
    "<=": operator.le,
    ">=": operator.ge,
}


def idiv(a: int, b: int) -> int:
    """Division that truncates toward zero."""
    q = abs(a) // abs(b)
    return q if (a < 0) == (b < 0) else -q


def irem(a: int, b: int) -> int:
    """The remainder of `idiv`: has the sign of the dividend."""
    return a - b * idiv(a, b)


FOLD: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "&": operator.and_,
    "|": operator.or_,
    "^": operator.xor,
    "<<": operator.lshift,
    ">>": operator.rshift,
}
# Cycles of one scalar operation; the same for 16 and 32 bits.
CYCLES = {"*": 3, "/": 8, "%": 8, "<<": 2}  # "<<": a division that is a shift, with its sign
FLOAT_CYCLES = {"+": 3, "-": 3, "*": 3, "/": 20, "%": 20}


@meaning(s.Binary)
def _binary(f: Frame, node: s.Binary) -> Operand:
    if node.sign in ("and", "or"):
        return _logic(f, node)
    return binary(f, node.sign, f.value(node.left), f.value(node.right), node.loc)


def binary(f: Frame, sign: str, a: Operand, b: Operand, loc: Location) -> Operand:
    """One operation on two operands."""
    if sign in COMPARE:
        return compare(f, sign, a, b, loc)
    if sign in ("<<", ">>"):
        return _shift(f, sign, a, b, loc)
    a, b = peers(f, a, b, loc)
    if not (t.is_number(a.type) or (a.type is t.BOOL and sign in "&|^")):
        fail(loc, f"invalid operands to binary operator '{sign}': '{a.type}' and '{b.type}'")
    if sign in "&|^" and not (t.is_integer(a.type) or a.type is t.BOOL):
        fail(loc, f"invalid operands to binary operator '{sign}': '{a.type}' and '{b.type}'")
    if a.known and b.known:
        return known(a.type, fold(sign, a.type, a.const, b.const, loc), loc)
    return _written(f, sign, a, b, loc)


def fold(sign: str, type_: t.Type, a: Any, b: Any, loc: Location) -> Any:
    """The value of an operation on two known numbers of one type."""
    exact = t.is_integer(type_)
    if sign in "/%":
        if exact and b == 0:
            fail(loc, "division by zero")
        if exact:
            return (idiv if sign == "/" else irem)(int(a), int(b))
        found = _float_division(sign, a, b)
    else:
        found = FOLD[sign](a, b)
    if isinstance(type_, t.Int):
        return type_.wrap(int(found))
    return type_.dtype.type(found) if isinstance(type_, t.Float) else found


def _float_division(sign: str, a: Any, b: Any) -> Any:
    return np.divide(a, b) if sign == "/" else np.fmod(a, b)


def _written(f: Frame, sign: str, a: Operand, b: Operand, loc: Location) -> Operand:
    x, y, type_ = code(f, a), code(f, b), a.type
    if isinstance(type_, t.Float):
        f.cost += FLOAT_CYCLES[sign]
        text = f"fmod({x}, {y})" if sign == "%" else f"({x} {sign} {y})"
        # NumPy rounds scalars of one type to that type; ml_dtypes' bfloat16 does as well.
        return runtime(type_, text, loc)
    f.cost += CYCLES["<<"] if sign in "/%" and b.known and _power_of_two(int(b.const)) else CYCLES.get(sign, 1)
    if sign in "/%":
        return runtime(type_, _division(sign, type_, x, y), loc)
    if sign in "&|^":
        return runtime(type_, f"({x} {sign} {y})", loc)
    return runtime(type_, wrapped(f"{x} {sign} {y}", type_), loc)


def _power_of_two(value: int) -> bool:
    return value > 0 and value & (value - 1) == 0


def _division(sign: str, type_: t.Type, x: str, y: str) -> str:
    if isinstance(type_, t.Int) and not type_.signed:
        return f"({x} {'//' if sign == '/' else '%'} {y})"
    name = "idiv" if sign == "/" else "irem"
    text = f"{name}({x}, {y})"
    return wrapped(text, type_) if sign == "/" else text


def wrapped(text: str, type_: t.Type) -> str:
    """Code that reduces an integer to the width of its type."""
    if not isinstance(type_, t.Int):
        return f"({text})"
    mask = (1 << type_.bits) - 1
    if not type_.signed:
        return f"({text} & {mask})" if " " not in text else f"(({text}) & {mask})"
    half = 1 << (type_.bits - 1)
    return f"((({text}) + {half} & {mask}) - {half})"


def _shift(f: Frame, sign: str, a: Operand, b: Operand, loc: Location) -> Operand:
    for o in (a, b):
        if not t.is_integer(o.type):
            type_mismatch(loc, "integer", o.type)
    if a.known and b.known:
        found = FOLD[sign](int(a.const), int(b.const))
        return known(a.type, a.type.wrap(found) if isinstance(a.type, t.Int) else found, loc)
    f.cost += 1
    if a.type is t.COMPTIME_INT:
        a = coerce(f, a, b.type, loc)
    x, y = code(f, a), code(f, b)
    return runtime(a.type, wrapped(f"{x} << {y}", a.type) if sign == "<<" else f"({x} >> {y})", loc)


def peers(f: Frame, a: Operand, b: Operand, loc: Location) -> tuple[Operand, Operand]:
    """Both operands in one type: a literal takes the type of the other; nothing else converts."""
    if a.type == b.type:
        return a, b
    if {a.type, b.type} == {t.COMPTIME_INT, t.COMPTIME_FLOAT}:
        return known(t.COMPTIME_FLOAT, float(a.const), a.loc), known(t.COMPTIME_FLOAT, float(b.const), b.loc)
    literal = (t.COMPTIME_INT, t.COMPTIME_FLOAT, t.ENUM_LITERAL)
    if a.type in literal:
        return coerce(f, a, b.type, loc), b
    if b.type in literal or isinstance(a.type, t.Pointee):
        return a, coerce(f, b, a.type, loc)
    if isinstance(a.type, t.Int) and isinstance(b.type, t.Int) and (a.known or b.known):
        return (coerce(f, a, b.type, loc), b) if a.known and not b.known else (a, coerce(f, b, a.type, loc))
    type_mismatch(loc, a.type, b.type)


def compare(f: Frame, sign: str, a: Operand, b: Operand, loc: Location) -> Operand:
    """A comparison."""
    a, b = peers(f, a, b, loc)
    if a.type is t.TYPE and f.unit.options.sdk == "1.4":
        fail(loc, f"invalid operands to binary operator '{sign}': 'type'", suggestion="@is_same_type compares types")
    ordered = t.is_number(a.type)
    if sign not in ("==", "!=") and not ordered:
        fail(loc, f"invalid operands to binary operator '{sign}': '{a.type}' and '{b.type}'")
    if a.known and b.known:
        return known(t.BOOL, bool(COMPARE[sign](a.const, b.const)), loc)
    f.cost += 1
    return runtime(t.BOOL, f"({code(f, a)} {sign} {code(f, b)})", loc)


def boolean(f: Frame, node: s.Syntax) -> Operand:
    """A condition."""
    o = f.value(node)
    if o.type is not t.BOOL:
        type_mismatch(node.loc, t.BOOL, o.type)
    return o


def _logic(f: Frame, node: s.Binary) -> Operand:
    a = boolean(f, node.left)
    if a.known:
        decided = bool(a.const) == (node.sign == "or")
        return a if decided else boolean(f, node.right)
    with f.captured() as lines:
        b = boolean(f, node.right)
    f.cost += 1
    if not lines:
        return runtime(t.BOOL, f"({a.code} {node.sign} {code(f, b)})", node.loc)
    name = f.fresh("b")
    f.emit(f"{name} = {a.code}", node.loc)
    f.emit(f"if {'not ' if node.sign == 'or' else ''}{name}:", node.loc)
    f.lines.extend(line._replace(depth=line.depth + 1) for line in lines)
    with f.indented():
        f.emit(f"{name} = {code(f, b)}", node.loc)
    return runtime(t.BOOL, name, node.loc)


@meaning(s.Unary)
def _unary(f: Frame, node: s.Unary) -> Operand:
    return UNARY[node.sign](f, node)


def _negate(f: Frame, node: s.Unary) -> Operand:
    o = f.value(node.operand)
    if not t.is_number(o.type):
        fail(node.loc, f"invalid operand to unary operator '-': '{o.type}'")
    if o.known:
        return known(o.type, o.type.wrap(-o.const) if isinstance(o.type, t.Int) else -o.const, node.loc)
    f.cost += 1
    return runtime(o.type, wrapped(f"-{o.code}", o.type), node.loc)


def _not(f: Frame, node: s.Unary) -> Operand:
    o = boolean(f, node.operand)
    if o.known:
        return known(t.BOOL, not o.const, node.loc)
    f.cost += 1
    return runtime(t.BOOL, f"(not {o.code})", node.loc)


def _invert(f: Frame, node: s.Unary) -> Operand:
    o = f.value(node.operand)
    if not t.is_integer(o.type):
        fail(node.loc, f"invalid operand to unary operator '~': '{o.type}'")
    if o.known:
        return known(o.type, o.type.wrap(~o.const) if isinstance(o.type, t.Int) else ~o.const, node.loc)
    f.cost += 1
    return runtime(o.type, wrapped(f"~{o.code}", o.type), node.loc)


def _comptime(f: Frame, node: s.Unary) -> Operand:
    with f.evaluating():
        return f.value(node.operand)


UNARY: dict[str, Callable[[Frame, s.Unary], Operand]] = {
    "-": _negate,
    "!": _not,
    "~": _invert,
    "comptime": _comptime,
}

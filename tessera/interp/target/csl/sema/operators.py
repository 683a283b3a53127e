"""Operators: constant folding of known operands, Python code for others."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from tessera.core.errors import Location
from tessera.interp.target.csl.cost_model import COSTS
from tessera.interp.target.csl.sema import types as t
from tessera.interp.target.csl.sema.coercion import coerce, render_code
from tessera.interp.target.csl.sema.context import AnalysisContext, ExprValue, make_known, make_runtime, register_rule
from tessera.interp.target.csl.text import syntax as s
from tessera.interp.target.csl.text.diagnostics import fail, type_mismatch

COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
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
    """The remainder of `idiv`; it has the sign of the dividend."""
    return a - b * idiv(a, b)


FOLDED_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "&": operator.and_,
    "|": operator.or_,
    "^": operator.xor,
    "<<": operator.lshift,
    ">>": operator.rshift,
}
MAX_COMPTIME_BITS = 4096  # of a comptime_int: repeated squares would exhaust the machine
# Cycles of one scalar operation; equal for 16 and 32 bits.
INTEGER_CYCLES = {"*": 3, "/": 8, "%": 8, "<<": 2}  # "<<": a signed division by a power of two
FLOAT_CYCLES = {"+": 3, "-": 3, "*": 3, "/": 20, "%": 20}


def count_extra_cycles(type_: t.CslType) -> int:
    """The cycles that a 32-bit integer takes more than one of 16 bits, the width of the scalar unit."""
    return COSTS.long_integer if isinstance(type_, t.CslInt) and type_.bits > 16 else 0


@register_rule(s.BinaryExpr)
def _evaluate_binary_expr(f: AnalysisContext, node: s.BinaryExpr) -> ExprValue:
    if node.sign in ("and", "or"):
        return _evaluate_logic(f, node)
    return evaluate_binary(f, node.sign, f.evaluate(node.left), f.evaluate(node.right), node.loc)


def evaluate_binary(f: AnalysisContext, sign: str, a: ExprValue, b: ExprValue, loc: Location) -> ExprValue:
    """Evaluate a binary operation."""
    if sign in COMPARISONS:
        return evaluate_comparison(f, sign, a, b, loc)
    if sign in ("<<", ">>"):
        return _evaluate_shift(f, sign, a, b, loc)
    a, b = unify_types(f, a, b, loc)
    if not (t.is_number(a.type) or (a.type is t.BOOL and sign in "&|^")):
        fail(loc, f"invalid operands to binary operator '{sign}': '{a.type}' and '{b.type}'")
    if sign in "&|^" and not (t.is_integer(a.type) or a.type is t.BOOL):
        fail(loc, f"invalid operands to binary operator '{sign}': '{a.type}' and '{b.type}'")
    if a.known and b.known:
        return make_known(a.type, fold_constants(sign, a.type, a.const, b.const, loc), loc)
    return _emit_binary(f, sign, a, b, loc)


def fold_constants(sign: str, type_: t.CslType, a: Any, b: Any, loc: Location) -> Any:
    """The value of an operation on two known numbers of one type."""
    exact = t.is_integer(type_)
    if sign in "/%":
        if exact and b == 0:
            fail(loc, "division by zero")
        if exact:
            return (idiv if sign == "/" else irem)(int(a), int(b))
        result = _divide_floats(sign, a, b)
    else:
        result = FOLDED_OPERATORS[sign](a, b)
    if isinstance(type_, t.CslInt):
        return type_.wrap(int(result))
    if isinstance(type_, t.CslFloat):
        return type_.dtype.type(result)
    return check_comptime_width(result, loc) if exact else result


def check_comptime_width(value: int, loc: Location) -> int:
    """A comptime_int that is not too large to compute with."""
    if value.bit_length() > MAX_COMPTIME_BITS:
        fail(loc, f"a comptime_int of {value.bit_length():,} bits: expected at most {MAX_COMPTIME_BITS:,}")
    return value


def _show_number(value: Any) -> str:
    return str(value) if abs(int(value)) < 1 << 64 else "an integer of more than 64"


def _divide_floats(sign: str, a: Any, b: Any) -> Any:
    return np.divide(a, b) if sign == "/" else np.fmod(a, b)


def _emit_binary(f: AnalysisContext, sign: str, a: ExprValue, b: ExprValue, loc: Location) -> ExprValue:
    x, y, type_ = render_code(f, a), render_code(f, b), a.type
    if isinstance(type_, t.CslFloat):
        f.cost += FLOAT_CYCLES[sign]
        text = f"fmod({x}, {y})" if sign == "%" else f"({x} {sign} {y})"
        # NumPy rounds the result of scalars of one type to that type, and so does ml_dtypes' bfloat16.
        return make_runtime(type_, text, loc)
    f.cost += (
        INTEGER_CYCLES["<<"]
        if sign in "/%" and b.known and _is_power_of_two(int(b.const))
        else INTEGER_CYCLES.get(sign, 1)
    ) + count_extra_cycles(type_)
    if sign in "/%":
        positive = find_span(a)[0] >= 0 and find_span(b)[0] >= 0
        return make_runtime(type_, _render_division(sign, type_, x, y, positive), loc)
    if sign in "&|^":
        return make_runtime(type_, f"({x} {sign} {y})", loc)
    span = _compute_span(sign, find_span(a), find_span(b))
    if isinstance(type_, t.CslInt) and type_.low <= span[0] and span[1] <= type_.high:
        return make_runtime(type_, f"({x} {sign} {y})", loc).within(span)
    return make_runtime(type_, wrap_to_width(f"{x} {sign} {y}", type_), loc)


_UNBOUNDED = 1 << MAX_COMPTIME_BITS


def find_span(o: ExprValue) -> tuple[int, int]:
    """Interval analysis: the least and the greatest value of an integer operand."""
    if o.known:
        return int(o.const), int(o.const)
    own = (o.type.low, o.type.high) if isinstance(o.type, t.CslInt) else (-_UNBOUNDED, _UNBOUNDED)
    return getattr(o, "span", own)


def _compute_span(sign: str, a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
    """The span of a sum, a difference or a product."""
    ends = [FOLDED_OPERATORS[sign](x, y) for x in a for y in b]
    return min(ends), max(ends)


def _is_power_of_two(value: int) -> bool:
    return value > 0 and value & (value - 1) == 0


def _render_division(sign: str, type_: t.CslType, x: str, y: str, positive: bool) -> str:
    if positive:
        return f"({x} {'//' if sign == '/' else '%'} {y})"
    name = "idiv" if sign == "/" else "irem"
    text = f"{name}({x}, {y})"
    return wrap_to_width(text, type_) if sign == "/" else text


def wrap_to_width(text: str, type_: t.CslType) -> str:
    """Code that wraps an integer to the width of its type."""
    if not isinstance(type_, t.CslInt):
        return f"({text})"
    mask = (1 << type_.bits) - 1
    if not type_.signed:
        return f"({text} & {mask})" if " " not in text else f"(({text}) & {mask})"
    half = 1 << (type_.bits - 1)
    return f"((({text}) + {half} & {mask}) - {half})"


def _evaluate_shift(f: AnalysisContext, sign: str, a: ExprValue, b: ExprValue, loc: Location) -> ExprValue:
    for o in (a, b):
        if not t.is_integer(o.type):
            type_mismatch(loc, "integer", o.type)
    if a.known and b.known:
        if not 0 <= int(b.const) < MAX_COMPTIME_BITS:
            fail(loc, f"a shift by {_show_number(b.const)} bits: expected 0 to {MAX_COMPTIME_BITS - 1}")
        result = check_comptime_width(FOLDED_OPERATORS[sign](int(a.const), int(b.const)), loc)
        return make_known(a.type, a.type.wrap(result) if isinstance(a.type, t.CslInt) else result, loc)
    f.cost += 1
    if a.type is t.COMPTIME_INT:
        a = coerce(f, a, b.type, loc)
    x, y = render_code(f, a), render_code(f, b)
    return make_runtime(a.type, wrap_to_width(f"{x} << {y}", a.type) if sign == "<<" else f"({x} >> {y})", loc)


_COMPTIME_NUMBERS = (t.COMPTIME_INT, t.COMPTIME_FLOAT)
_LITERALS = (*_COMPTIME_NUMBERS, t.ENUM_LITERAL)


def unify_types(f: AnalysisContext, a: ExprValue, b: ExprValue, loc: Location) -> tuple[ExprValue, ExprValue]:
    """Convert both operands to one type: a literal takes the type of the other operand."""
    if a.type is b.type or a.type == b.type:
        return a, b
    if a.type in _COMPTIME_NUMBERS and b.type in _COMPTIME_NUMBERS:
        return make_known(t.COMPTIME_FLOAT, float(a.const), a.loc), make_known(t.COMPTIME_FLOAT, float(b.const), b.loc)
    if a.type in _LITERALS:
        return coerce(f, a, b.type, loc), b
    if b.type in _LITERALS or isinstance(a.type, t.CslPointer):
        return a, coerce(f, b, a.type, loc)
    if isinstance(a.type, t.CslInt) and isinstance(b.type, t.CslInt) and (a.known or b.known):
        return (coerce(f, a, b.type, loc), b) if a.known and not b.known else (a, coerce(f, b, a.type, loc))
    type_mismatch(loc, a.type, b.type)


def evaluate_comparison(f: AnalysisContext, sign: str, a: ExprValue, b: ExprValue, loc: Location) -> ExprValue:
    """Evaluate a comparison."""
    a, b = unify_types(f, a, b, loc)
    if a.type is t.TYPE and not f.unit.options.late:
        fail(loc, f"invalid operands to binary operator '{sign}': 'type'", suggestion="@is_same_type compares types")
    ordered = t.is_number(a.type)
    if sign not in ("==", "!=") and not ordered:
        fail(loc, f"invalid operands to binary operator '{sign}': '{a.type}' and '{b.type}'")
    if a.known and b.known:
        return make_known(t.BOOL, bool(COMPARISONS[sign](a.const, b.const)), loc)
    f.cost += 1 + count_extra_cycles(a.type)
    return make_runtime(t.BOOL, f"({render_code(f, a)} {sign} {render_code(f, b)})", loc)


def evaluate_condition(f: AnalysisContext, node: s.SyntaxNode) -> ExprValue:
    """Evaluate a condition."""
    o = f.evaluate(node)
    if o.type is not t.BOOL:
        type_mismatch(node.loc, t.BOOL, o.type)
    return o


def _evaluate_logic(f: AnalysisContext, node: s.BinaryExpr) -> ExprValue:
    a = evaluate_condition(f, node.left)
    if a.known:
        decided = bool(a.const) == (node.sign == "or")
        return a if decided else evaluate_condition(f, node.right)
    with f.capture_lines() as lines:
        b = evaluate_condition(f, node.right)
    f.cost += 1
    if not lines:
        return make_runtime(t.BOOL, f"({a.code} {node.sign} {render_code(f, b)})", node.loc)
    name = f.make_name("b")
    f.emit(f"{name} = {a.code}", node.loc)
    f.emit(f"if {'not ' if node.sign == 'or' else ''}{name}:", node.loc)
    f.lines.extend(line._replace(depth=line.depth + 1) for line in lines)
    with f.indent_lines():
        f.emit(f"{name} = {render_code(f, b)}", node.loc)
    return make_runtime(t.BOOL, name, node.loc)


@register_rule(s.UnaryExpr)
def _evaluate_unary(f: AnalysisContext, node: s.UnaryExpr) -> ExprValue:
    return UNARY_RULES[node.sign](f, node)


def _evaluate_negation(f: AnalysisContext, node: s.UnaryExpr) -> ExprValue:
    o = f.evaluate(node.operand)
    if not t.is_number(o.type):
        fail(node.loc, f"invalid operand to unary operator '-': '{o.type}'")
    if o.known:
        return make_known(o.type, o.type.wrap(-o.const) if isinstance(o.type, t.CslInt) else -o.const, node.loc)
    f.cost += 1
    return make_runtime(o.type, wrap_to_width(f"-{o.code}", o.type), node.loc)


def _evaluate_not(f: AnalysisContext, node: s.UnaryExpr) -> ExprValue:
    o = evaluate_condition(f, node.operand)
    if o.known:
        return make_known(t.BOOL, not o.const, node.loc)
    f.cost += 1
    return make_runtime(t.BOOL, f"(not {o.code})", node.loc)


def _evaluate_inversion(f: AnalysisContext, node: s.UnaryExpr) -> ExprValue:
    o = f.evaluate(node.operand)
    if not t.is_integer(o.type):
        fail(node.loc, f"invalid operand to unary operator '~': '{o.type}'")
    if o.known:
        return make_known(o.type, o.type.wrap(~o.const) if isinstance(o.type, t.CslInt) else ~o.const, node.loc)
    f.cost += 1
    return make_runtime(o.type, wrap_to_width(f"~{o.code}", o.type), node.loc)


def _evaluate_comptime(f: AnalysisContext, node: s.UnaryExpr) -> ExprValue:
    return f.evaluate_at_comptime(node.operand)


UNARY_RULES: dict[str, Callable[[AnalysisContext, s.UnaryExpr], ExprValue]] = {
    "-": _evaluate_negation,
    "!": _evaluate_not,
    "~": _evaluate_inversion,
    "comptime": _evaluate_comptime,
}

"""Builtins: their table, casts (`@as`, `@bitcast`, `@ptrcast`), reflection on types, ranges, strings, assertions."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from tessera.core.errors import Location
from tessera.interp.target.csl.cost_model import COSTS
from tessera.interp.target.csl.sema import types as t
from tessera.interp.target.csl.sema.access import evaluate_type
from tessera.interp.target.csl.sema.coercion import coerce, make_zero, render_code
from tessera.interp.target.csl.sema.context import (
    VOID,
    AnalysisContext,
    ExprValue,
    list_members,
    make_anonymous_struct,
    make_known,
    make_runtime,
    register_rule,
)
from tessera.interp.target.csl.sema.operators import evaluate_condition, find_span
from tessera.interp.target.csl.sema.values import REGISTERS, ComptimeValue, GlobalCast, Pointer
from tessera.interp.target.csl.text import syntax as s
from tessera.interp.target.csl.text.diagnostics import fail, type_mismatch
from tessera.interp.target.csl.text.parser import parse

# The table of builtins, and builtins of the whole program.


BuiltinRule = Callable[[AnalysisContext, s.BuiltinCall], ExprValue]


class BuiltinSpec(NamedTuple):
    """One builtin: its number of arguments, and the function that evaluates it."""

    least: int
    most: int
    rule: BuiltinRule


BUILTINS: dict[str, BuiltinSpec] = {}
EARLY_BUILTINS: dict[str, BuiltinSpec] = {}  # of the SDKs before 1.0


def register_builtin(name: str, least: int, most: int | None = None) -> Callable[[BuiltinRule], BuiltinRule]:
    """Register the function that evaluates `@name`."""

    def add(rule: BuiltinRule) -> BuiltinRule:
        BUILTINS["@" + name] = BuiltinSpec(least, least if most is None else most, rule)
        return rule

    return add


@register_rule(s.BuiltinCall)
def _evaluate_builtin(f: AnalysisContext, node: s.BuiltinCall) -> ExprValue:
    spec = BUILTINS.get(node.name) or EARLY_BUILTINS.get(node.name)
    if spec is None:
        fail(node.loc, f"invalid builtin function: '{node.name}'")
    if not spec.least <= len(node.args) <= spec.most:
        expected = str(spec.least) if spec.least == spec.most else f"{spec.least} to {spec.most}"
        fail(node.loc, f"{node.name} expects {expected} arguments, {len(node.args)} provided")
    return spec.rule(f, node)


def evaluate_constant(f: AnalysisContext, node: s.SyntaxNode, type_: t.CslType | None = None) -> ExprValue:
    """Evaluate an argument that must be comptime-known."""
    o = f.evaluate_at_comptime(node)
    if type_ is t.STRING and o.type is not t.STRING:
        type_mismatch(node.loc, t.STRING, o.type)
    return coerce(f, o, type_, node.loc) if type_ is not None else o


def evaluate_integer(f: AnalysisContext, node: s.SyntaxNode) -> int:
    """Evaluate an integer argument that must be comptime-known."""
    o = evaluate_constant(f, node)
    if not t.is_integer(o.type):
        type_mismatch(node.loc, "integer", o.type)
    return int(o.const)


def require_section(f: AnalysisContext, node: s.BuiltinCall, *sections: str) -> None:
    """Check that a builtin is used in a top-level block that allows it."""
    if f.section not in sections and not (f.comptime and f.unit.depth):
        fail(node.loc, f"'{node.name}' is only valid while evaluating a top level {' or '.join(sections)} block")


@register_builtin("is_arch", 1)
def _is_arch(f: AnalysisContext, node: s.BuiltinCall) -> ExprValue:
    return make_known(t.BOOL, evaluate_constant(f, node.args[0], t.STRING).const == f.unit.options.arch, node.loc)


@register_builtin("fp16", 0)
def _fp16(f: AnalysisContext, node: s.BuiltinCall) -> ExprValue:
    return make_known(t.TYPE, t.NAMED[f.unit.options.fp16_format], node.loc)


@register_builtin("get_int", 1)
def _get_int(f: AnalysisContext, node: s.BuiltinCall) -> ExprValue:
    o = f.evaluate(node.args[0])
    if t.is_integer(o.type):
        return o
    if not isinstance(o.type, (t.CslHandle, t.CslEnum)) or o.type in (t.BOOL, t.DIRECTION):
        type_mismatch(node.args[0].loc, "color, queue or task id", o.type)
    return ExprValue(o.type.tag if isinstance(o.type, t.CslEnum) else t.U16, o.const, o.code, loc=node.loc)


@register_builtin("get_rectangle", 0)
def _get_rectangle(f: AnalysisContext, node: s.BuiltinCall) -> ExprValue:
    width, height = f.unit.rectangle
    if not width:
        fail(node.loc, "'@get_rectangle' is only valid after '@set_rectangle'")
    rows = {"fabric": f.unit.options.fabric_dims, "offsets": f.unit.options.fabric_offsets}
    fields = {n: ComptimeValue(t.ANON, _make_size(pair)) for n, pair in rows.items() if pair is not None}
    return make_known(t.ANON, _make_size((width, height)) | fields, node.loc)


def _make_size(pair: tuple[int, int]) -> dict[str, ComptimeValue]:
    return {"width": ComptimeValue(t.U16, pair[0]), "height": ComptimeValue(t.U16, pair[1])}


@register_builtin("import_module", 1, 2)
def _import_module(f: AnalysisContext, node: s.BuiltinCall) -> ExprValue:
    name = evaluate_constant(f, node.args[0], t.STRING).const
    params = evaluate_constant(f, node.args[1]) if len(node.args) > 1 else make_known(t.ANON, {})
    if isinstance(params.type, t.CslStruct):
        params = make_known(t.ANON, list_struct_fields(params.value))
    if params.type is not t.ANON:
        type_mismatch(node.args[1].loc, t.ANON, params.type)
    return make_known(t.MODULE, f.unit.import_module(f.module, name, params.const, node.loc), node.loc)


def list_struct_fields(value: ComptimeValue) -> dict[str, ComptimeValue]:
    """The fields of a value of a named struct type."""
    assert isinstance(value.type, t.CslStruct)
    return {
        name: ComptimeValue(type_, value.data[name] if type_.aggregate else value.data[name][0].item())
        for name, type_ in value.type.fields
    }


# Casts: `@as`, `@bitcast`, `@ptrcast`.


@register_builtin("as", 2)
def _as(f: AnalysisContext, node: s.BuiltinCall) -> ExprValue:
    return cast_value(f, evaluate_type(f, node.args[0]), f.evaluate(node.args[1]), node.loc)


def cast_value(f: AnalysisContext, to: t.CslType, o: ExprValue, loc: Location) -> ExprValue:
    """`@as`: convert a value to a type."""
    if o.type == to:
        return o
    if o.type is t.ENUM_LITERAL or not (_is_castable(o.type) and _is_castable(to)):
        return coerce(f, o, to, loc)
    if o.known:
        return make_known(to, _cast_constant(to, o, loc), loc)
    f.cost += COSTS.integer_cast if t.is_integer(to) and t.is_integer(o.type) else COSTS.cast
    if isinstance(to, t.CslInt) and t.is_integer(o.type):
        span = find_span(o)
        if to.low <= span[0] and span[1] <= to.high:
            return make_runtime(to, o.code, loc).within(span)
    return make_runtime(to, _render_cast(f, to, o), loc)


def _is_castable(type_: t.CslType) -> bool:
    return t.is_number(type_) or type_ is t.BOOL or isinstance(type_, t.CslEnum)


def _cast_constant(to: t.CslType, o: ExprValue, loc: Location) -> Any:
    if isinstance(to, t.CslFloat):
        data = to.dtype.type(o.const)
        if not np.isfinite(np.float32(data)) and o.type in (t.COMPTIME_FLOAT, t.COMPTIME_INT):
            fail(loc, f"cast from '{o.type}' to '{to}' failed")
        return data
    if to is t.BOOL:
        return bool(o.const)
    if to is t.COMPTIME_FLOAT:
        return float(o.const)
    value = int(o.const)
    if isinstance(to, t.CslInt):
        if o.type in (t.COMPTIME_INT, t.COMPTIME_FLOAT) and not to.low <= value <= to.high:
            fail(loc, f"cast from '{o.type}' to '{to}' failed")
        return to.wrap(value)
    if isinstance(to, t.CslEnum) and value not in dict(to.members).values():
        fail(loc, f"enum '{to}' has no member with value {value}")
    return value


def _render_cast(f: AnalysisContext, to: t.CslType, o: ExprValue) -> str:
    if isinstance(to, t.CslFloat):
        whole = f"{f.unit.add_constant(o.type.dtype.type)}({o.code})" if isinstance(o.type, t.CslInt) else o.code
        return f"{f.unit.add_constant(to.dtype.type)}({whole})"  # NumPy rounds its own integers once
    if to is t.BOOL:
        return f"bool({o.code})"
    whole = o.code if t.is_integer(o.type) or isinstance(o.type, t.CslEnum) else f"int({o.code})"
    if o.type is t.BOOL or not isinstance(to, t.CslInt):
        return whole
    return f"wrap({whole}, {to.bits}, {to.signed})"


@register_builtin("bitcast", 2)
def _bitcast(f: AnalysisContext, node: s.BuiltinCall) -> ExprValue:
    to, o = evaluate_type(f, node.args[0]), f.evaluate(node.args[1])
    if o.type is t.COMPTIME_INT and isinstance(to, t.CslInt):
        return make_known(to, to.wrap(o.const), node.loc)
    if o.type == to:
        return o
    if isinstance(to, t.CslPointer) and to.element is t.U16 and o.type is t.U16 and f.unit.options.arch == "wse2":
        return _make_register_pointer(f, to, o, node.loc)
    if o.type.comptime_only or isinstance(to, (t.CslPointer, t.CslDescriptor)) or isinstance(o.type, t.CslPointer):
        fail(node.loc, f"'@bitcast' cannot convert '{o.type}' to '{to}'")
    if _bit_width(o.type) != _bit_width(to):
        fail(node.loc, "expected equal bit width for operands")
    if o.known:
        return make_known(to, bits(o.const, o.type.dtype, to.dtype, to.aggregate), node.loc)
    f.cost += 1
    if isinstance(to, t.CslInt) and isinstance(o.type, t.CslInt):
        return make_runtime(to, f"wrap({o.code}, {to.bits}, {to.signed})", node.loc)
    text = f"{o.code}, {f.unit.add_constant(o.type.dtype)}, {f.unit.add_constant(to.dtype)}, {to.aggregate}"
    return make_runtime(to, f"bits({text})", node.loc)


def _make_register_pointer(f: AnalysisContext, to: t.CslType, o: ExprValue, loc: Location) -> ExprValue:
    """A pointer to a router register at an address."""
    if o.known:
        return make_known(to, Pointer(REGISTERS, int(o.const) // 2), loc)
    return make_runtime(to, f"Pointer(pe.registers, {render_code(f, o)} // 2)", loc)


def _bit_width(type_: t.CslType) -> int:
    return type_.bits if isinstance(type_, t.CslInt) else 8 * type_.size


def bits(data: Any, source: np.dtype[Any], target: np.dtype[Any], whole: bool) -> Any:
    """Reinterpret the bits of a value as another type."""
    view = np.array(data, source).reshape(-1).view(target)
    return view if whole else (view[0] if target.kind in "fV" else view.item(0))


@register_builtin("ptrcast", 2)
def _ptrcast(f: AnalysisContext, node: s.BuiltinCall) -> ExprValue:
    to, o = evaluate_type(f, node.args[0]), f.evaluate_operand(node.args[1])
    if not isinstance(to, t.CslPointer):
        type_mismatch(node.args[0].loc, "pointer type", to)
    if not isinstance(o.type, t.CslPointer):
        type_mismatch(node.args[1].loc, "pointer", o.type)
    old, new = o.type.element.dtype, to.element.dtype
    if old == new:
        return ExprValue(to, o.const, o.code, loc=node.loc)
    if any(x.kind == "O" or x.names for x in (old, new)):
        fail(node.loc, f"'@ptrcast' cannot convert '{o.type}' to '{to}'")
    if o.known:
        array, index = o.const
        cells: Any = array.view(new) if isinstance(array, np.ndarray) else GlobalCast(array, new)
        if isinstance(cells, GlobalCast):
            cells = replace(cells, name=f.unit.add_constant(cells))
        return make_known(to, Pointer(cells, index * old.itemsize // new.itemsize), node.loc)
    return make_runtime(to, f"recast({o.code}, {f.unit.add_constant(new)})", node.loc)


# Reflection, structs, strings and assertions.


@register_builtin("zeros", 1)
def _zeros(f: AnalysisContext, node: s.BuiltinCall) -> ExprValue:
    type_ = evaluate_type(f, node.args[0])
    if not isinstance(type_, t.CslArray):
        type_mismatch(node.args[0].loc, "array type", type_)
    return make_known(type_, make_zero(type_), node.loc)


@register_builtin("constants", 2)
def _constants(f: AnalysisContext, node: s.BuiltinCall) -> ExprValue:
    type_ = evaluate_type(f, node.args[0])
    if not isinstance(type_, t.CslArray):
        type_mismatch(node.args[0].loc, "array type", type_)
    value = coerce(f, f.evaluate(node.args[1]), type_.element, node.args[1].loc)
    if not value.known:
        return make_runtime(type_, f"full({type_.count}, {value.code}, {f.unit.add_constant(type_.dtype)})", node.loc)
    data = np.empty(type_.count, type_.dtype)
    data.fill(value.const)
    return make_known(type_, data, node.loc)


@register_builtin("type_of", 1)
def _type_of(f: AnalysisContext, node: s.BuiltinCall) -> ExprValue:
    return make_known(t.TYPE, f.evaluate_operand(node.args[0]).type, node.loc)


@register_builtin("is_same_type", 2)
def _is_same_type(f: AnalysisContext, node: s.BuiltinCall) -> ExprValue:
    return make_known(t.BOOL, evaluate_type(f, node.args[0]) == evaluate_type(f, node.args[1]), node.loc)


@register_builtin("is_comptime", 0)
def _is_comptime(f: AnalysisContext, node: s.BuiltinCall) -> ExprValue:
    return make_known(t.BOOL, f.comptime, node.loc)


@register_builtin("element_type", 1)
def _element_type(f: AnalysisContext, node: s.BuiltinCall) -> ExprValue:
    type_ = evaluate_type(f, node.args[0])
    if not isinstance(type_, (t.CslArray, t.CslPointer)):
        type_mismatch(node.args[0].loc, "array or pointer type", type_)
    return make_known(t.TYPE, type_.element, node.loc)


def _evaluate_array_type(f: AnalysisContext, node: s.BuiltinCall) -> t.CslArray:
    type_ = evaluate_type(f, node.args[0])
    if not isinstance(type_, t.CslArray):
        type_mismatch(node.args[0].loc, "array type", type_)
    return type_


@register_builtin("element_count", 1)
def _element_count(f: AnalysisContext, node: s.BuiltinCall) -> ExprValue:
    return make_known(t.U32, _evaluate_array_type(f, node).count, node.loc)


@register_builtin("rank", 1)
def _rank(f: AnalysisContext, node: s.BuiltinCall) -> ExprValue:
    return make_known(t.U16, len(_evaluate_array_type(f, node).dims), node.loc)


@register_builtin("dimensions", 1)
def _dimensions(f: AnalysisContext, node: s.BuiltinCall) -> ExprValue:
    dims = _evaluate_array_type(f, node).dims
    return make_known(t.CslArray("", (len(dims),), t.U32), np.array(dims, np.uint32), node.loc)


@register_builtin("has_field", 2)
def _has_field(f: AnalysisContext, node: s.BuiltinCall) -> ExprValue:
    o, name = f.evaluate_operand(node.args[0]), evaluate_constant(f, node.args[1], t.STRING).const
    type_ = o.const if o.type is t.TYPE else o.type
    exists = type_.field(name) is not None if isinstance(type_, t.CslStruct) else name in list_members(o)
    return make_known(t.BOOL, bool(exists), node.loc)


@register_builtin("field", 2)
def _field(f: AnalysisContext, node: s.BuiltinCall) -> ExprValue:
    name = evaluate_constant(f, node.args[1], t.STRING).const
    return f.evaluate_operand(s.FieldExpr(node.loc, node.args[0], name))


@register_builtin("concat_structs", 2)
def _concat_structs(f: AnalysisContext, node: s.BuiltinCall) -> ExprValue:
    if f.unit.options.late:
        fail(
            node.loc, "invalid builtin function: '@concat_structs'", suggestion="SDK 2.10 removed it from the language"
        )
    a, b = f.evaluate_operand(node.args[0]), f.evaluate_operand(node.args[1])
    for o, arg in zip((a, b), node.args, strict=True):
        if o.type is not t.ANON:
            type_mismatch(arg.loc, t.ANON, o.type)
    left, right = list_members(a), list_members(b)
    if all(name.isdigit() for name in (*left, *right)):
        right = {str(len(left) + int(name)): o for name, o in right.items()}
    both = next((n for n in left if n in right), None)
    if both:
        fail(node.loc, f"duplicate field '{both}' in concatenated structs")
    return make_anonymous_struct({**left, **right}, node.loc)


@register_builtin("comptime_assert", 1, 2)
def _comptime_assert(f: AnalysisContext, node: s.BuiltinCall) -> ExprValue:
    with f.at_comptime():
        holds = evaluate_condition(f, node.args[0]).const
    if not holds:
        text = evaluate_constant(f, node.args[1]).const if len(node.args) > 1 else ""
        fail(node.loc, f"comptime assertion failed{': ' + str(text) if text else ''}")
    return VOID


@register_builtin("comptime_print", 1, 99)
def _comptime_print(f: AnalysisContext, node: s.BuiltinCall) -> ExprValue:
    text = " ".join(str(evaluate_constant(f, a).const) for a in node.args)
    f.unit.state.setdefault("printed", []).append(f"{node.loc}: {text}")
    return VOID


@register_builtin("assert", 1)
def _assert(f: AnalysisContext, node: s.BuiltinCall) -> ExprValue:
    condition = evaluate_condition(f, node.args[0])
    if condition.known and condition.const:
        return VOID
    if f.comptime:
        fail(node.loc, "assertion failed")
    f.emit(f"if not {render_code(f, condition)}: unreachable()", node.loc)
    return VOID


@register_builtin("range", 2, 4)
def _range(f: AnalysisContext, node: s.BuiltinCall) -> ExprValue:
    type_ = evaluate_type(f, node.args[0])
    if not t.is_integer(type_):
        type_mismatch(node.args[0].loc, "integer type", type_)
    bounds = [coerce(f, f.evaluate(a), type_, a.loc) for a in node.args[1:]]
    if len(bounds) == 2:
        fail(node.loc, "@range expects 2 or 4 arguments, 3 provided")
    start, stop, step = bounds if len(bounds) == 3 else (make_known(type_, 0), bounds[0], make_known(type_, 1))
    if step.known and step.const == 0:
        fail(node.loc, "step of a range must not be zero")
    return ExprValue(t.RANGE, fields={"type": make_known(t.TYPE, type_), "start": start, "stop": stop, "step": step})


@register_builtin("strcat", 1, 99)
def _strcat(f: AnalysisContext, node: s.BuiltinCall) -> ExprValue:
    return make_known(t.STRING, "".join(evaluate_constant(f, a, t.STRING).const for a in node.args), node.loc)


@register_builtin("strlen", 1)
def _strlen(f: AnalysisContext, node: s.BuiltinCall) -> ExprValue:
    return make_known(t.COMPTIME_INT, len(evaluate_constant(f, node.args[0], t.STRING).const), node.loc)


@register_builtin("get_array", 1)
def _get_array(f: AnalysisContext, node: s.BuiltinCall) -> ExprValue:
    data = np.frombuffer(evaluate_constant(f, node.args[0], t.STRING).const.encode(), np.uint8)
    return make_known(t.CslArray("", (len(data),), t.U8), data.copy(), node.loc)


def _register_range_bound(name: str, field: str) -> None:
    """Register `@range_start` and the like: one bound of a range."""

    @register_builtin(name, 1)
    def _(f: AnalysisContext, node: s.BuiltinCall) -> ExprValue:
        o = f.evaluate_operand(node.args[0])
        if o.type is not t.RANGE or o.fields is None:
            type_mismatch(node.args[0].loc, "range", o.type)
        return o.fields[field]


for _name in ("start", "stop", "step"):
    _register_range_bound(f"range_{_name}", _name)


@register_builtin("get_string_from_byte", 1)
def _get_string_from_byte(f: AnalysisContext, node: s.BuiltinCall) -> ExprValue:
    o = evaluate_constant(f, node.args[0])
    if not t.is_integer(o.type) or not 0 <= o.const <= 255:
        fail(node.loc, f"expected an integer of one byte, got: '{o.const}'")
    return make_known(t.STRING, chr(o.const), node.loc)


@register_builtin("import_comptime_value", 2)
def _import_comptime_value(f: AnalysisContext, node: s.BuiltinCall) -> ExprValue:
    type_, name = evaluate_type(f, node.args[0]), evaluate_constant(f, node.args[1], t.STRING).const
    path = f.unit.find(f.module, name)
    if path is None:
        fail(node.args[1].loc, f"unable to find file '{name}'")
    f.unit.sources.append(str(path))  # part of the compiled program, which the host copies
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        fail(node.args[1].loc, f"'{name}' is not JSON: {error}")
    return _convert_json(f, data, type_, node.loc)


def _convert_json(f: AnalysisContext, data: Any, type_: t.CslType, loc: Location) -> ExprValue:
    """Convert a JSON value to a type. Keys of an object have the form `name:type`."""
    if isinstance(type_, t.CslArray) and isinstance(data, list):
        items = [_convert_json(f, item, type_.element, loc) for item in data]
        return coerce(f, make_anonymous_struct({str(i): o for i, o in enumerate(items)}, loc), type_, loc)
    if type_ is t.ANON and isinstance(data, dict):
        rows = {}
        for key, value in data.items():
            name, _, kind = key.partition(":")
            wanted = evaluate_type(f, parse(f"const x: {kind} = 0;").items[0].type)  # type: ignore[attr-defined]
            rows[name] = _convert_json(f, value, wanted, loc)
        return make_anonymous_struct(rows, loc)
    for python, literal in ((bool, t.BOOL), (int, t.COMPTIME_INT), (float, t.COMPTIME_FLOAT), (str, t.STRING)):
        if isinstance(data, python):
            if literal is t.COMPTIME_INT and type_ is t.COLOR:
                return make_known(t.COLOR, data, loc)
            exact = isinstance(type_, t.CslFloat) and literal is t.COMPTIME_INT
            return coerce(
                f, make_known(t.COMPTIME_FLOAT, float(data)) if exact else make_known(literal, data), type_, loc
            )
    fail(loc, f"JSON value cannot be converted to type '{type_}'")

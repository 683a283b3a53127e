"""Builtins about types, structs, strings and assertions."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from tessera.errors import Location
from tessera.interp.target.csl import syntax as s
from tessera.interp.target.csl import types as t
from tessera.interp.target.csl.faults import fail, type_mismatch
from tessera.interp.target.csl.parser import parse
from tessera.interp.target.csl.sema.builtins import builtin, constant
from tessera.interp.target.csl.sema.coerce import code, coerce, zero
from tessera.interp.target.csl.sema.frame import Frame
from tessera.interp.target.csl.sema.names import type_of
from tessera.interp.target.csl.sema.operand import VOID, Operand, anonymous, known, members, runtime
from tessera.interp.target.csl.sema.operators import boolean


@builtin("zeros", 1)
def _zeros(f: Frame, node: s.Builtin) -> Operand:
    type_ = type_of(f, node.args[0])
    if not isinstance(type_, t.Array):
        type_mismatch(node.args[0].loc, "array type", type_)
    return known(type_, zero(type_), node.loc)


@builtin("constants", 2)
def _constants(f: Frame, node: s.Builtin) -> Operand:
    type_ = type_of(f, node.args[0])
    if not isinstance(type_, t.Array):
        type_mismatch(node.args[0].loc, "array type", type_)
    value = coerce(f, f.value(node.args[1]), type_.element, node.args[1].loc)
    if not value.known:
        return runtime(type_, f"full({type_.count}, {value.code}, {f.unit.constant(type_.dtype)})", node.loc)
    data = np.empty(type_.count, type_.dtype)
    data.fill(value.const)
    return known(type_, data, node.loc)


@builtin("type_of", 1)
def _type_of(f: Frame, node: s.Builtin) -> Operand:
    return known(t.TYPE, f.operand(node.args[0]).type, node.loc)


@builtin("is_same_type", 2)
def _is_same_type(f: Frame, node: s.Builtin) -> Operand:
    return known(t.BOOL, type_of(f, node.args[0]) == type_of(f, node.args[1]), node.loc)


@builtin("is_comptime", 0)
def _is_comptime(f: Frame, node: s.Builtin) -> Operand:
    return known(t.BOOL, f.comptime, node.loc)


@builtin("element_type", 1)
def _element_type(f: Frame, node: s.Builtin) -> Operand:
    type_ = type_of(f, node.args[0])
    if not isinstance(type_, (t.Array, t.Pointee)):
        type_mismatch(node.args[0].loc, "array or pointer type", type_)
    return known(t.TYPE, type_.element, node.loc)


def _array_argument(f: Frame, node: s.Builtin) -> t.Array:
    type_ = type_of(f, node.args[0])
    if not isinstance(type_, t.Array):
        type_mismatch(node.args[0].loc, "array type", type_)
    return type_


@builtin("element_count", 1)
def _element_count(f: Frame, node: s.Builtin) -> Operand:
    return known(t.U32, _array_argument(f, node).count, node.loc)


@builtin("rank", 1)
def _rank(f: Frame, node: s.Builtin) -> Operand:
    return known(t.U16, len(_array_argument(f, node).dims), node.loc)


@builtin("dimensions", 1)
def _dimensions(f: Frame, node: s.Builtin) -> Operand:
    dims = _array_argument(f, node).dims
    return known(t.Array("", (len(dims),), t.U32), np.array(dims, np.uint32), node.loc)


@builtin("has_field", 2)
def _has_field(f: Frame, node: s.Builtin) -> Operand:
    o, name = f.operand(node.args[0]), constant(f, node.args[1], t.STRING).const
    type_ = o.const if o.type is t.TYPE else o.type
    found = type_.field(name) is not None if isinstance(type_, t.Struct) else name in members(o)
    return known(t.BOOL, bool(found), node.loc)


@builtin("field", 2)
def _field(f: Frame, node: s.Builtin) -> Operand:
    name = constant(f, node.args[1], t.STRING).const
    return f.operand(s.Field(node.loc, node.args[0], name))


@builtin("concat_structs", 2)
def _concat_structs(f: Frame, node: s.Builtin) -> Operand:
    if f.unit.options.sdk != "1.4":
        fail(node.loc, "invalid builtin function: '@concat_structs'", suggestion="it left the language with SDK 2.10")
    a, b = f.operand(node.args[0]), f.operand(node.args[1])
    for o, arg in zip((a, b), node.args, strict=True):
        if o.type is not t.ANON:
            type_mismatch(arg.loc, t.ANON, o.type)
    left, right = members(a), members(b)
    if all(name.isdigit() for name in (*left, *right)):
        right = {str(len(left) + int(name)): o for name, o in right.items()}
    both = next((n for n in left if n in right), None)
    if both:
        fail(node.loc, f"duplicate field '{both}' in concatenated structs")
    return anonymous({**left, **right}, node.loc)


@builtin("comptime_assert", 1, 2)
def _comptime_assert(f: Frame, node: s.Builtin) -> Operand:
    with f.evaluating():
        holds = boolean(f, node.args[0]).const
    if not holds:
        text = constant(f, node.args[1]).const if len(node.args) > 1 else ""
        fail(node.loc, f"comptime assertion failed{': ' + str(text) if text else ''}")
    return VOID


@builtin("comptime_print", 1, 99)
def _comptime_print(f: Frame, node: s.Builtin) -> Operand:
    text = " ".join(str(constant(f, a).const) for a in node.args)
    f.unit.state.setdefault("printed", []).append(f"{node.loc}: {text}")
    return VOID


@builtin("assert", 1)
def _assert(f: Frame, node: s.Builtin) -> Operand:
    condition = boolean(f, node.args[0])
    if condition.known and condition.const:
        return VOID
    if f.comptime:
        fail(node.loc, "assertion failed")
    f.emit(f"if not {code(f, condition)}: unreachable()", node.loc)
    return VOID


@builtin("range", 2, 4)
def _range(f: Frame, node: s.Builtin) -> Operand:
    type_ = type_of(f, node.args[0])
    if not t.is_integer(type_):
        type_mismatch(node.args[0].loc, "integer type", type_)
    given = [coerce(f, f.value(a), type_, a.loc) for a in node.args[1:]]
    if len(given) == 2:
        fail(node.loc, "@range expects 2 or 4 arguments, 3 provided")
    start, stop, step = given if len(given) == 3 else (known(type_, 0), given[0], known(type_, 1))
    if step.known and step.const == 0:
        fail(node.loc, "step of a range must not be zero")
    return Operand(t.RANGE, fields={"type": known(t.TYPE, type_), "start": start, "stop": stop, "step": step})


@builtin("strcat", 1, 99)
def _strcat(f: Frame, node: s.Builtin) -> Operand:
    return known(t.STRING, "".join(constant(f, a, t.STRING).const for a in node.args), node.loc)


@builtin("strlen", 1)
def _strlen(f: Frame, node: s.Builtin) -> Operand:
    return known(t.COMPTIME_INT, len(constant(f, node.args[0], t.STRING).const), node.loc)


@builtin("get_array", 1)
def _get_array(f: Frame, node: s.Builtin) -> Operand:
    data = np.frombuffer(constant(f, node.args[0], t.STRING).const.encode(), np.uint8)
    return known(t.Array("", (len(data),), t.U8), data.copy(), node.loc)


def _bound(name: str, field: str) -> None:
    """`@range_start` and the like: one bound of a range."""

    @builtin(name, 1)
    def _(f: Frame, node: s.Builtin) -> Operand:
        o = f.operand(node.args[0])
        if o.type is not t.RANGE or o.fields is None:
            type_mismatch(node.args[0].loc, "range", o.type)
        return o.fields[field]


for _name in ("start", "stop", "step"):
    _bound(f"range_{_name}", _name)


@builtin("get_string_from_byte", 1)
def _get_string_from_byte(f: Frame, node: s.Builtin) -> Operand:
    o = constant(f, node.args[0])
    if not t.is_integer(o.type) or not 0 <= o.const <= 255:
        fail(node.loc, f"expected an integer of one byte, got: '{o.const}'")
    return known(t.STRING, chr(o.const), node.loc)


@builtin("import_comptime_value", 2)
def _import_comptime_value(f: Frame, node: s.Builtin) -> Operand:
    type_, name = type_of(f, node.args[0]), constant(f, node.args[1], t.STRING).const
    path = f.unit.find(f.module, name)
    if path is None:
        fail(node.args[1].loc, f"unable to find file '{name}'")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        fail(node.args[1].loc, f"'{name}' is not JSON: {error}")
    return _imported(f, data, type_, node.loc)


def _imported(f: Frame, data: Any, type_: t.Type, loc: Location) -> Operand:
    """A JSON value as a value of a type; an object's keys are `name:type`."""
    if isinstance(type_, t.Array) and isinstance(data, list):
        items = [_imported(f, item, type_.element, loc) for item in data]
        return coerce(f, anonymous({str(i): o for i, o in enumerate(items)}, loc), type_, loc)
    if type_ is t.ANON and isinstance(data, dict):
        rows = {}
        for key, value in data.items():
            name, _, kind = key.partition(":")
            wanted = type_of(f, parse(f"const x: {kind} = 0;").items[0].type)  # type: ignore[attr-defined]
            rows[name] = _imported(f, value, wanted, loc)
        return anonymous(rows, loc)
    for python, literal in ((bool, t.BOOL), (int, t.COMPTIME_INT), (float, t.COMPTIME_FLOAT), (str, t.STRING)):
        if isinstance(data, python):
            if literal is t.COMPTIME_INT and type_ is t.COLOR:
                return known(t.COLOR, data, loc)
            exact = isinstance(type_, t.Float) and literal is t.COMPTIME_INT
            return coerce(f, known(t.COMPTIME_FLOAT, float(data)) if exact else known(literal, data), type_, loc)
    fail(loc, f"a JSON value of this kind cannot be a '{type_}'")

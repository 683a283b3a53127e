"""Types as expressions, and array and struct literals."""

from __future__ import annotations

from tessera.interp.target.csl import syntax as s
from tessera.interp.target.csl import types as t
from tessera.interp.target.csl.faults import fail, type_mismatch
from tessera.interp.target.csl.sema.coerce import aggregate, array, coerce
from tessera.interp.target.csl.sema.frame import Frame, meaning
from tessera.interp.target.csl.sema.names import type_of
from tessera.interp.target.csl.sema.operand import Operand, anonymous, known


@meaning(s.ArrayType)
def _array_type(f: Frame, node: s.ArrayType) -> Operand:
    element = type_of(f, node.element)
    if not node.dims:
        return known(t.TYPE, t.Pointee("", element, node.const, many=True), node.loc)
    if isinstance(element, t.Array):
        fail(node.loc, "arrays of arrays are not supported", suggestion="write the dimensions together: [a, b]T")
    return known(t.TYPE, t.Array("", tuple(_extent(f, d) for d in node.dims), element), node.loc)


def _extent(f: Frame, node: s.Syntax) -> int:
    with f.evaluating():
        o = f.value(node)
    if not t.is_integer(o.type):
        type_mismatch(node.loc, "integer", o.type)
    if o.const < 0:
        fail(node.loc, f"array dimension must not be negative, got: {o.const}")
    return int(o.const)


@meaning(s.PointerType)
def _pointer_type(f: Frame, node: s.PointerType) -> Operand:
    return known(t.TYPE, t.Pointee("", type_of(f, node.element), node.const), node.loc)


@meaning(s.FunctionType)
def _function_type(f: Frame, node: s.FunctionType) -> Operand:
    params = tuple(type_of(f, p) for p in node.params)
    return known(t.TYPE, t.Fn("", params, type_of(f, node.result), node.task), node.loc)


@meaning(s.AggregateType)
def _aggregate_type(f: Frame, node: s.AggregateType) -> Operand:
    return known(t.TYPE, _enum(f, node) if node.kind == "enum" else _struct(f, node), node.loc)


def _enum(f: Frame, node: s.AggregateType) -> t.Enum:
    tag = type_of(f, node.tag) if node.tag else t.U16
    if not isinstance(tag, t.Int):
        type_mismatch(node.loc, "integer", tag)
    value, rows = -1, []
    for member in node.members:
        with f.evaluating():
            value = value + 1 if member.value is None else int(f.value(member.value).const)
        rows.append((member.name, value))
    return t.Enum("enum", tag, tuple(rows), node.loc)


def _struct(f: Frame, node: s.AggregateType) -> t.Struct:
    rows = []
    for member in node.members:
        if member.type is None:
            fail(member.loc, f"expected a type for field '{member.name}'")
        rows.append((member.name, type_of(f, member.type)))
    return t.Struct(node.kind, tuple(rows), node.packed, node.kind == "union", node.loc)


@meaning(s.StructLiteral)
def _struct_literal(f: Frame, node: s.StructLiteral) -> Operand:
    names = node.names or tuple(str(i) for i in range(len(node.values)))
    repeated = next((n for i, n in enumerate(names) if n in names[:i]), None)
    if repeated:
        fail(node.loc, f"duplicate field '{repeated}' in struct literal")
    if node.type is None:
        return anonymous({n: f.value(v) for n, v in zip(names, node.values, strict=True)}, node.loc)
    type_ = type_of(f, node.type)
    if isinstance(type_, t.Array):
        if len(node.values) != type_.count:
            fail(node.loc, f"expected {type_.count} array elements; found {len(node.values)}")
        items = [coerce(f, f.value(v), type_.element, v.loc) for v in node.values]
        return array(f, type_, items, node.loc)
    if isinstance(type_, t.Struct):
        given = anonymous({n: f.value(v) for n, v in zip(names, node.values, strict=True)}, node.loc)
        return coerce(f, given, type_, node.loc)
    fail(node.loc, f"type '{type_}' does not support struct initialization syntax")


__all__ = ["aggregate"]

"""Names, literals and lvalues: identifiers, type expressions, array elements, fields, pointers."""

from __future__ import annotations

import numpy as np

from tessera.core.errors import Location
from tessera.interp.target.csl.cost_model import COSTS
from tessera.interp.target.csl.sema import types as t
from tessera.interp.target.csl.sema.coercion import (
    STRUCT_VIEWS,
    coerce,
    make_array,
    make_struct,
    render_code,
    to_python_scalar,
)
from tessera.interp.target.csl.sema.context import (
    AnalysisContext,
    ExprValue,
    LValue,
    list_members,
    make_anonymous_struct,
    make_known,
    make_runtime,
    register_rule,
)
from tessera.interp.target.csl.sema.operators import UNARY_RULES, find_span
from tessera.interp.target.csl.sema.values import DIRECTIONS, REGISTERS, GlobalCast, GlobalVariable, Pointer
from tessera.interp.target.csl.text import syntax as s
from tessera.interp.target.csl.text.diagnostics import fail, type_mismatch

# Names, literals and reads of lvalues.


_LITERALS = {bool: t.BOOL, int: t.COMPTIME_INT, float: t.COMPTIME_FLOAT, str: t.STRING, type(None): t.UNDEFINED}
_DIRECTION_NAMES = {name: (t.DIRECTION, i) for i, name in enumerate(DIRECTIONS)}


@register_rule(s.LiteralExpr)
def _evaluate_literal(f: AnalysisContext, node: s.LiteralExpr) -> ExprValue:
    return ExprValue(_LITERALS[type(node.value)], node.value, loc=node.loc)


@register_rule(s.EnumLiteralExpr)
def _evaluate_enum_literal(f: AnalysisContext, node: s.EnumLiteralExpr) -> ExprValue:
    return make_known(t.ENUM_LITERAL, node.name, node.loc)


@register_rule(s.NameExpr)
def _evaluate_name(f: AnalysisContext, node: s.NameExpr) -> ExprValue:
    operand = f.find(node.text) or f.module.lookup(node.text, node.loc)
    if operand is not None:
        return read_current(operand).at(node.loc) if operand.place else operand
    if node.text in t.NAMED and not (node.text == "comptime_struct" and f.unit.options.late):
        return make_known(t.TYPE, t.NAMED[node.text], node.loc)
    if node.text in _DIRECTION_NAMES:
        return make_known(*_DIRECTION_NAMES[node.text], node.loc)
    number = t.parse_integer_type(node.text)
    if number is not None:
        return make_known(t.TYPE, number, node.loc)
    fail(node.loc, f"use of undeclared identifier '{node.text}'")


def read_current(o: ExprValue) -> ExprValue:
    """The operand of a name, with the present value of a comptime variable."""
    if o.known or o.code or o.place is None or o.place.take is None:
        return ExprValue(o.type, o.const, o.code, o.place, o.fields)
    return read_comptime_pointer(o.type, o.place)


def read_comptime_pointer(type_: t.CslType, place: LValue) -> ExprValue:
    """The value at a comptime pointer: a known value, or code if the memory belongs to a PE."""
    assert place.take is not None
    where = place.take()
    if isinstance(where.array, GlobalVariable):
        return read_lvalue(type_, LValue(place.mutable, f"G{where.array.number}", str(where.index), take=place.take))
    if isinstance(where.array, GlobalCast):
        return read_lvalue(type_, LValue(place.mutable, where.array.name, str(where.index), take=place.take))
    if where.array is REGISTERS:
        return read_lvalue(type_, LValue(place.mutable, "pe.registers", str(where.index)))
    if type_.aggregate:
        size = type_.count if isinstance(type_, t.CslArray) else 1
        return ExprValue(type_, where.array[where.index : where.index + size], place=place)
    return ExprValue(type_, to_python_scalar(where.array[where.index], type_), place=place)


def read_lvalue(type_: t.CslType, place: LValue, loc: Location | None = None) -> ExprValue:
    """The value of a memory cell or block at run time."""
    array, index = place.array, place.index
    if isinstance(type_, t.CslArray):
        text = f"{array}[{index}:{index} + {type_.count}]" if index.isidentifier() or index.isdigit() else ""
        text = text or f"window({array}, {index}, {type_.count})"
    elif type_.aggregate:
        text = f"window({array}, {index}, 1)"
    else:
        text = f"{array}[{index}]" if type_.dtype.kind in "fOV" else f"{array}.item({index})"
    return ExprValue(type_, code=text, place=place)


def evaluate_type(f: AnalysisContext, node: s.SyntaxNode) -> t.CslType:
    """Evaluate a type expression."""
    o = f.evaluate_at_comptime(node)
    if o.type is not t.TYPE:
        type_mismatch(node.loc, t.TYPE, o.type)
    return o.const


# Type expressions, and array and struct literals.


@register_rule(s.ArrayTypeExpr)
def _evaluate_array_type(f: AnalysisContext, node: s.ArrayTypeExpr) -> ExprValue:
    element = evaluate_type(f, node.element)
    if not node.dims:
        return make_known(t.TYPE, t.CslPointer("", element, node.const, many=True), node.loc)
    if isinstance(element, t.CslArray):
        fail(
            node.loc,
            "arrays of arrays are not supported",
            suggestion="write one array type with several dimensions: [a, b]T",
        )
    array = t.CslArray("", tuple(_evaluate_extent(f, d) for d in node.dims), element)
    if array.count * max(1, element.size) > MAX_ARRAY_BYTES:
        fail(node.loc, f"an array type of {array.size:,} bytes: expected at most {MAX_ARRAY_BYTES:,}")
    return make_known(t.TYPE, array, node.loc)


MAX_ARRAY_BYTES = 1 << 28  # at comptime: far more than the memory of a PE


def _evaluate_extent(f: AnalysisContext, node: s.SyntaxNode) -> int:
    o = f.evaluate_at_comptime(node)
    if not t.is_integer(o.type):
        type_mismatch(node.loc, "integer", o.type)
    if o.const < 0:
        fail(node.loc, f"array dimension must not be negative, got: {o.const}")
    return int(o.const)


@register_rule(s.PointerTypeExpr)
def _evaluate_pointer_type(f: AnalysisContext, node: s.PointerTypeExpr) -> ExprValue:
    return make_known(t.TYPE, t.CslPointer("", evaluate_type(f, node.element), node.const), node.loc)


@register_rule(s.FunctionTypeExpr)
def _evaluate_function_type(f: AnalysisContext, node: s.FunctionTypeExpr) -> ExprValue:
    params = tuple(evaluate_type(f, p) for p in node.params)
    return make_known(t.TYPE, t.CslFunctionType("", params, evaluate_type(f, node.result), node.task), node.loc)


@register_rule(s.AggregateTypeExpr)
def _evaluate_aggregate_type(f: AnalysisContext, node: s.AggregateTypeExpr) -> ExprValue:
    return make_known(t.TYPE, _make_enum_type(f, node) if node.kind == "enum" else _make_struct_type(f, node), node.loc)


def _make_enum_type(f: AnalysisContext, node: s.AggregateTypeExpr) -> t.CslEnum:
    tag = evaluate_type(f, node.tag) if node.tag else t.U16
    if not isinstance(tag, t.CslInt):
        type_mismatch(node.loc, "integer", tag)
    value, rows = -1, []
    for member in node.members:
        with f.at_comptime():
            value = value + 1 if member.value is None else int(f.evaluate(member.value).const)
        rows.append((member.name, value))
    return t.CslEnum("enum", tag, tuple(rows), node.loc)


def _make_struct_type(f: AnalysisContext, node: s.AggregateTypeExpr) -> t.CslStruct:
    rows = []
    for member in node.members:
        if member.type is None:
            fail(member.loc, f"expected a type for field '{member.name}'")
        rows.append((member.name, evaluate_type(f, member.type)))
    return t.CslStruct(node.kind, tuple(rows), node.packed, node.kind == "union", node.loc)


@register_rule(s.StructLiteralExpr)
def _evaluate_struct_literal(f: AnalysisContext, node: s.StructLiteralExpr) -> ExprValue:
    names = node.names or tuple(str(i) for i in range(len(node.values)))
    repeated = next((n for i, n in enumerate(names) if n in names[:i]), None)
    if repeated:
        fail(node.loc, f"duplicate field '{repeated}' in struct literal")
    if node.type is None:
        return make_anonymous_struct({n: f.evaluate(v) for n, v in zip(names, node.values, strict=True)}, node.loc)
    type_ = evaluate_type(f, node.type)
    if isinstance(type_, t.CslArray):
        if len(node.values) != type_.count:
            fail(node.loc, f"expected {type_.count} array elements; found {len(node.values)}")
        items = [coerce(f, f.evaluate(v), type_.element, v.loc) for v in node.values]
        return make_array(f, type_, items, node.loc)
    if isinstance(type_, t.CslStruct):
        fields = make_anonymous_struct({n: f.evaluate(v) for n, v in zip(names, node.values, strict=True)}, node.loc)
        return coerce(f, fields, type_, node.loc)
    fail(node.loc, f"type '{type_}' does not support struct initialization syntax")


__all__ = ["make_struct"]


# Elements, fields and pointers.


def render_index(f: AnalysisContext, o: ExprValue) -> str:
    """Code of an index. A signed index is checked, because Python counts negative indices from the end."""
    if o.known:
        return str(int(o.const))
    if find_span(o)[0] >= 0:
        return o.code
    name = f.make_name("i")
    return f"({name} if ({name} := {o.code}) >= 0 else below({name}))"


def evaluate_index(f: AnalysisContext, node: s.SyntaxNode) -> ExprValue:
    """Evaluate one index."""
    o = f.evaluate(node)
    if not t.is_integer(o.type) and not isinstance(o.type, t.CslEnum):
        fail(node.loc, f"array index must be an integer, got: '{o.type}'")
    return o


@register_rule(s.SubscriptExpr)
def _evaluate_subscript(f: AnalysisContext, node: s.SubscriptExpr) -> ExprValue:
    base = f.evaluate_operand(node.base)
    if base.type is t.ANON:
        return _access_member(base, str(f.evaluate(node.indices[0]).const), node.loc)
    if isinstance(base.type, t.CslPointer):
        if base.type.many:
            return _index_pointer(f, base, evaluate_index(f, node.indices[0]), node.loc)
        base = dereference_pointer(f, base, node.loc)
    if not isinstance(base.type, t.CslArray):
        fail(node.loc, f"type '{base.type}' does not support indexing")
    indices = [evaluate_index(f, i) for i in node.indices]
    fixed = all(o.known for o in indices)
    element = access_element(f, base, indices, node.loc)
    f.cost += COSTS.fixed_element * f.hold(element) if fixed else COSTS.element
    return element


def access_element(f: AnalysisContext, base: ExprValue, indices: list[ExprValue], loc: Location) -> ExprValue:
    """Evaluate an element of an array."""
    type_ = base.type
    assert isinstance(type_, t.CslArray)
    if len(indices) != len(type_.dims):
        fail(loc, f"expected {len(type_.dims)} indices, {len(indices)} provided")
    for o, n in zip(indices, type_.dims, strict=True):
        if o.known and not 0 <= o.const < n:
            fail(loc, f"index {o.const} is out of bounds for dimension of length {n}")
    if all(o.known for o in indices):
        return _access_known_element(f, base, type_, indices, loc)
    if base.known:
        base = f.unit.materialise(base, loc)
    assert base.place is not None
    index = _render_flat_index(f, indices, type_.dims)
    if base.place.index != "0":
        index = f"{base.place.index} + check_index({index}, {type_.count})"
    return read_lvalue(type_.element, LValue(base.place.mutable, base.place.array, index)).at(loc)


def _access_known_element(
    f: AnalysisContext, base: ExprValue, type_: t.CslArray, indices: list[ExprValue], loc: Location
) -> ExprValue:
    flat = 0
    for o, n in zip(indices, type_.dims, strict=True):
        flat = flat * n + int(o.const)
    place = base.place
    if place is None and base.known:
        return make_known(type_.element, to_python_scalar(base.const[flat], type_.element), loc)
    if place is None:
        return read_lvalue(type_.element, LValue(False, base.code, str(flat))).at(loc)
    take = place.take
    if take is not None:
        moved = LValue(place.mutable, take=lambda: Pointer(take().array, take().index + flat))
        if base.known:
            data = to_python_scalar(base.const[flat], type_.element)
            return ExprValue(type_.element, data, place=moved, loc=loc)
        return read_comptime_pointer(type_.element, moved).at(loc)
    index = str(flat) if place.index == "0" else f"{place.index} + {flat}"
    return read_lvalue(type_.element, LValue(place.mutable, place.array, index)).at(loc)


def _render_flat_index(f: AnalysisContext, indices: list[ExprValue], dims: tuple[int, ...]) -> str:
    if len(indices) == 1:
        return render_index(f, indices[0])
    text = render_code(f, indices[0])
    for o, n in zip(indices[1:], dims[1:], strict=True):
        f.cost += 2
        text = f"({text}) * {n} + check_index({render_code(f, o)}, {n})"
    return f"check_index({text}, {int(np.prod(dims))})"


def _index_pointer(f: AnalysisContext, base: ExprValue, index: ExprValue, loc: Location) -> ExprValue:
    """Evaluate `p[i]`, where `p` is a many-item pointer."""
    f.cost += COSTS.fixed_element if index.known and base.known else COSTS.element
    type_ = base.type
    assert isinstance(type_, t.CslPointer)
    if base.known and index.known:
        where: Pointer = base.const
        place = LValue(not type_.const, take=lambda: Pointer(where.array, where.index + int(index.const)))
        return read_comptime_pointer(type_.element, place).at(loc)
    array, start = _split_pointer(f, base)
    text = render_index(f, index) if start == "0" else f"above({start} + {render_code(f, index)})"
    return read_lvalue(type_.element, LValue(not type_.const, array, text)).at(loc)


def _split_pointer(f: AnalysisContext, o: ExprValue) -> tuple[str, str]:
    if o.known:
        return f.unit.add_constant(o.const.array), str(o.const.index)
    name = o.code
    if not name.isidentifier():
        name = f.make_name("p")
        f.emit(f"{name} = {o.code}", o.loc)
    return f"{name}[0]", f"{name}[1]"


@register_rule(s.DereferenceExpr)
def _evaluate_dereference(f: AnalysisContext, node: s.DereferenceExpr) -> ExprValue:
    base = f.evaluate_operand(node.base)
    if not isinstance(base.type, t.CslPointer):
        fail(node.loc, f"cannot dereference non-pointer type '{base.type}'")
    f.cost += 2
    return dereference_pointer(f, base, node.loc)


def dereference_pointer(f: AnalysisContext, base: ExprValue, loc: Location) -> ExprValue:
    """Evaluate `p.*`."""
    type_ = base.type
    assert isinstance(type_, t.CslPointer)
    if base.known:
        return read_comptime_pointer(type_.element, LValue(not type_.const, take=lambda: base.const)).at(loc)
    array, index = _split_pointer(f, base)
    return read_lvalue(type_.element, LValue(not type_.const, array, index)).at(loc)


@register_rule(s.FieldExpr)
def _evaluate_field(f: AnalysisContext, node: s.FieldExpr) -> ExprValue:
    base = f.evaluate_operand(node.base)
    if isinstance(base.type, t.CslPointer) and isinstance(base.type.element, t.CslStruct):
        base = dereference_pointer(f, base, node.loc)
    if base.type is t.MODULE:
        member = base.const.lookup(node.name, node.loc)
        if member is None:
            fail(node.loc, f"use of undeclared identifier '{node.name}' in module '{base.const.title}'")
        return read_current(member).at(node.loc) if member.place else member
    if base.type is t.ANON:
        return _access_member(base, node.name, node.loc)
    if base.type in STRUCT_VIEWS:
        return _access_member(STRUCT_VIEWS[base.type](base), node.name, node.loc)
    if base.type is t.TYPE and isinstance(base.const, t.CslEnum):
        return coerce(f, make_known(t.ENUM_LITERAL, node.name), base.const, node.loc)
    if isinstance(base.type, t.CslStruct):
        return _access_struct_field(f, base, base.type, node)
    fail(node.loc, f"type '{base.type}' has no field named '{node.name}'")


def _access_member(base: ExprValue, name: str, loc: Location) -> ExprValue:
    member = list_members(base).get(name)
    if member is None:
        fail(loc, f"no field named '{name}' in struct '{base.type}'")
    return member


def _access_struct_field(f: AnalysisContext, base: ExprValue, struct: t.CslStruct, node: s.FieldExpr) -> ExprValue:
    type_ = struct.field(node.name)
    if type_ is None:
        fail(node.loc, f"struct '{struct}' has no field named '{node.name}'")
    if base.known:
        where = base.const[node.name]
        view = where.reshape(-1) if isinstance(type_, t.CslArray) else where
        mutable = base.place is not None and base.place.mutable
        return read_comptime_pointer(type_, LValue(mutable, take=lambda: Pointer(view, 0))).at(node.loc)
    f.cost += 2
    place = base.place or LValue(False, base.code, "0")
    if isinstance(type_, t.CslArray):
        return read_lvalue(
            type_, LValue(place.mutable, f"{place.array}[{node.name!r}][{place.index}].reshape(-1)", "0")
        )
    return read_lvalue(type_, LValue(place.mutable, f"{place.array}[{node.name!r}]", place.index)).at(node.loc)


def _evaluate_address(f: AnalysisContext, node: s.UnaryExpr) -> ExprValue:
    o = f.evaluate_operand(node.operand)
    if isinstance(o.type, t.CslFunctionType):
        return o
    if o.place is None and o.known:
        o = f.unit.materialise(o, node.loc)
    if o.place is None:
        fail(node.loc, "cannot take the address of a value that is not in memory")
    type_ = t.CslPointer("", o.type, const=not o.place.mutable)
    if o.place.take is not None:
        return make_known(type_, o.place.take(), node.loc)
    return make_runtime(type_, f"Pointer({o.place.array}, {o.place.index})", node.loc)


UNARY_RULES["&"] = _evaluate_address

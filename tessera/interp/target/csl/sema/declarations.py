"""Declarations inside functions and blocks, `return`, and assignment."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tessera.core.errors import Location
from tessera.interp.target.csl.cost_model import COSTS
from tessera.interp.target.csl.sema import types as t
from tessera.interp.target.csl.sema.access import evaluate_type, read_lvalue
from tessera.interp.target.csl.sema.coercion import coerce, make_zero, render_code, store_cell
from tessera.interp.target.csl.sema.context import (
    VOID,
    AnalysisContext,
    ComptimeJump,
    ExprValue,
    LValue,
    make_known,
    make_runtime,
    register_rule,
)
from tessera.interp.target.csl.sema.operators import evaluate_binary
from tessera.interp.target.csl.sema.values import GlobalVariable, Pointer
from tessera.interp.target.csl.text import syntax as s
from tessera.interp.target.csl.text.diagnostics import fail

# Declarations inside functions and blocks, and `return`.


if TYPE_CHECKING:
    pass


@register_rule(s.ReturnStmt)
def _emit_return(f: AnalysisContext, node: s.ReturnStmt) -> ExprValue:
    if f.section:
        fail(node.loc, "return outside of a function")
    value = f.evaluate_operand(node.value) if node.value is not None else None
    if f.comptime:
        raise ComptimeJump("return", "", value)
    assert f.function is not None
    result = f.function.result
    if value is not None and value.type is t.VOID and not value.known:
        f.emit(value.code, node.loc)
        value = None
    text = "return"
    if value is not None and value is not VOID:
        text = f"return {render_code(f, coerce(f, value, result, node.loc))}"
    elif result is not t.VOID:
        fail(node.loc, f"expected type '{result}', got: 'void'")
    f.flush(node.loc)
    f.emit(text, node.loc)
    return VOID


@register_rule(s.VariableDecl)
def _declare_name(f: AnalysisContext, node: s.VariableDecl) -> ExprValue:
    type_ = evaluate_type(f, node.type) if node.type is not None else None
    if node.kind == "param":
        fail(node.loc, "param declarations are only allowed at the top level")
    comptime = f.comptime or "comptime" in node.flags
    if node.value is None:
        if node.kind == "const" or type_ is None:
            fail(node.loc, "only 'var' and 'extern const' variables may be uninitialized")
        value = make_known(type_, make_zero(type_), node.loc)
    elif comptime:
        value = f.evaluate_at_comptime(node.value)
    else:
        value = f.evaluate_operand(node.value)
    if type_ is not None:
        value = coerce(f, value, type_, node.value.loc if node.value else node.loc)
    f.declare(node.name, make_local(f, node, value, comptime), node.loc)
    return VOID


def make_local(f: AnalysisContext, node: s.VariableDecl, value: ExprValue, comptime: bool) -> ExprValue:
    """Declare a local variable."""
    if node.kind == "const" and (value.known or value.fields is not None):
        return value
    if comptime:
        return make_comptime_variable(value)
    if value.type.comptime_only or value.type is t.VOID:
        fail(node.loc, f"variable of type '{value.type}' must be const or comptime")
    f.cost += COSTS.declaration + (COSTS.descriptor if value.known and value.type in t.DSDS else 0)
    name, mutable = f.make_name(node.name), node.kind == "var"
    if value.type.aggregate:
        f.emit(f"{name} = {render_code(f, value)}.copy()", node.loc)
        return make_runtime(value.type, name, node.loc, LValue(mutable, name))
    if node.name in f.cells:
        f.emit(f"{name} = zeros(1, {f.unit.add_constant(value.type.dtype)})", node.loc)
        f.emit(f"put({name}, 0, {render_code(f, value)})", node.loc)
        item = f"{name}[0]" if value.type.dtype.kind in "fOV" else f"{name}.item(0)"
        return make_runtime(value.type, item, node.loc, LValue(mutable, name))
    f.emit(f"{name} = {render_code(f, value)}", node.loc)
    return make_runtime(value.type, name, node.loc, LValue(mutable, store=name))


def make_comptime_variable(value: ExprValue) -> ExprValue:
    """A comptime variable with its initial value."""
    if value.type.aggregate:
        array = value.const.copy()
    else:
        array = np.empty(1, object)
        array[0] = value.const
    return ExprValue(value.type, place=LValue(True, take=lambda: Pointer(array, 0)))


# Assignment.


@register_rule(s.AssignStmt)
def _emit_assignment(f: AnalysisContext, node: s.AssignStmt) -> ExprValue:
    if isinstance(node.target, s.NameExpr) and node.target.text == "_":
        f.run(node.value)
        return VOID
    target = f.evaluate_operand(node.target)
    if target.place is None or not target.place.mutable:
        fail(node.target.loc, "cannot assign to constant")
    if node.sign and not target.known:
        target = _hoist_address(f, target, node.loc)
    value = f.evaluate(node.value)
    if node.sign:
        value = evaluate_binary(f, node.sign, target, value, node.loc)
    assign_value(f, target, coerce(f, value, target.type, node.value.loc), node.loc)
    return VOID


def _hoist_address(f: AnalysisContext, target: ExprValue, loc: Location) -> ExprValue:
    """The same cell with its address evaluated once: `a[f()] += 1` reads and writes it."""
    place = target.place
    assert place is not None
    if place.store or target.type.aggregate:
        return target
    array, index = place.array, place.index
    if not array.isidentifier():
        array = f.make_name("m")
        f.emit(f"{array} = {place.array}", loc)
    if not (index.isidentifier() or index.isdigit()):
        index = f.make_name("i")
        f.emit(f"{index} = {place.index}", loc)
    return read_lvalue(target.type, LValue(True, array, index))


def assign_value(f: AnalysisContext, target: ExprValue, value: ExprValue, loc: Location) -> None:
    """Generate the store of a value of the right type to an lvalue."""
    place = target.place
    assert place is not None
    fixed = not place.array or place.index.isdigit()
    f.cost += COSTS.fixed_assignment if fixed else COSTS.assignment
    if not fixed:
        f.held.clear()
    f.cost += COSTS.long_integer if value.type.size == 4 and fixed else 0
    if place.take is not None and not place.array and not place.store:
        where = place.take()
        if not isinstance(where.array, GlobalVariable):
            _assign_comptime(f, where, target.type, value, loc)
            return
        place = LValue(True, f"G{where.array.number}", str(where.index))
    if f.comptime:
        fail(loc, "cannot assign to a run-time variable at compile time")
    text = render_code(f, value)
    if place.store:
        f.emit(f"{place.store} = {text}", loc)
    elif target.type.aggregate:
        count = target.type.count if isinstance(target.type, t.CslArray) else 1
        f.emit(f"window({place.array}, {place.index}, {count})[:] = {text}", loc)
    elif target.type.dtype.kind == "O":
        f.emit(f"put({place.array}, {place.index}, {text})", loc)
    else:
        f.emit(f"{place.array}[{place.index}] = {text}", loc)


def _assign_comptime(f: AnalysisContext, where: Pointer, type_: t.CslType, value: ExprValue, loc: Location) -> None:
    if not value.known:
        fail(loc, "value assigned to a comptime variable is not known at compile time")
    array: Any = where.array
    if type_.aggregate:
        array[where.index : where.index + len(value.const)] = value.const
    else:
        store_cell(array, where.index, value.const)

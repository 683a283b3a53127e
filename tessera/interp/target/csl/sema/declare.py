"""Declarations inside functions and blocks, and `return`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tessera.interp.target.csl import syntax as s
from tessera.interp.target.csl import types as t
from tessera.interp.target.csl.faults import fail
from tessera.interp.target.csl.sema.coerce import code, coerce, zero
from tessera.interp.target.csl.sema.frame import ComptimeJump, Frame, meaning
from tessera.interp.target.csl.sema.names import type_of
from tessera.interp.target.csl.sema.operand import VOID, Operand, Place, known, runtime
from tessera.interp.target.csl.values import Pointer

if TYPE_CHECKING:
    pass


@meaning(s.Return)
def _return(f: Frame, node: s.Return) -> Operand:
    if f.section:
        fail(node.loc, "return outside of a function")
    value = f.operand(node.value) if node.value is not None else None
    if f.comptime:
        raise ComptimeJump("return", "", value)
    assert f.function is not None
    result = f.function.result
    if value is not None and value.type is t.VOID and not value.known:
        f.emit(value.code, node.loc)
        value = None
    text = "return"
    if value is not None and value is not VOID:
        text = f"return {code(f, coerce(f, value, result, node.loc))}"
    elif result is not t.VOID:
        fail(node.loc, f"expected type '{result}', got: 'void'")
    f.flush(node.loc)
    f.emit(text, node.loc)
    return VOID


@meaning(s.Declare)
def _declare(f: Frame, node: s.Declare) -> Operand:
    type_ = type_of(f, node.type) if node.type is not None else None
    if node.kind == "param":
        fail(node.loc, "param declarations are only allowed at the top level")
    comptime = f.comptime or "comptime" in node.flags
    if node.value is None:
        if node.kind == "const" or type_ is None:
            fail(node.loc, "only 'var' and 'extern const' variables may be uninitialized")
        value = known(type_, zero(type_), node.loc)
    elif comptime:
        with f.evaluating():
            value = f.value(node.value)
    else:
        value = f.operand(node.value)
    if type_ is not None:
        value = coerce(f, value, type_, node.value.loc if node.value else node.loc)
    f.declare(node.name, local(f, node, value, comptime), node.loc)
    return VOID


def local(f: Frame, node: s.Declare, value: Operand, comptime: bool) -> Operand:
    """What a local name stands for."""
    if node.kind == "const" and (value.known or value.fields is not None):
        return value
    if comptime:
        return memory(value)
    if value.type.comptime_only or value.type is t.VOID:
        fail(node.loc, f"variable of type '{value.type}' must be const or comptime")
    f.cost += 1
    name, mutable = f.fresh(node.name), node.kind == "var"
    if value.type.aggregate:
        f.emit(f"{name} = {code(f, value)}.copy()", node.loc)
        return runtime(value.type, name, node.loc, Place(mutable, name))
    if node.name in f.cells:
        f.emit(f"{name} = zeros(1, {f.unit.constant(value.type.dtype)})", node.loc)
        f.emit(f"put({name}, 0, {code(f, value)})", node.loc)
        item = f"{name}[0]" if value.type.dtype.kind in "fOV" else f"{name}.item(0)"
        return runtime(value.type, item, node.loc, Place(mutable, name))
    f.emit(f"{name} = {code(f, value)}", node.loc)
    return runtime(value.type, name, node.loc, Place(mutable, store=name))


def memory(value: Operand) -> Operand:
    """A comptime variable that begins with a value."""
    if value.type.aggregate:
        array = value.const.copy()
    else:
        array = np.empty(1, object)
        array[0] = value.const
    return Operand(value.type, place=Place(True, take=lambda: Pointer(array, 0)))

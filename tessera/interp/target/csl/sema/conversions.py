"""Builtins that convert: `@as`, `@bitcast`, `@ptrcast`."""

from __future__ import annotations

from typing import Any

import numpy as np

from tessera.errors import Location
from tessera.interp.target.csl import syntax as s
from tessera.interp.target.csl import types as t
from tessera.interp.target.csl.faults import fail, type_mismatch
from tessera.interp.target.csl.sema.builtins import builtin
from tessera.interp.target.csl.sema.coerce import code, coerce
from tessera.interp.target.csl.sema.frame import Frame
from tessera.interp.target.csl.sema.names import type_of
from tessera.interp.target.csl.sema.operand import Operand, known, runtime
from tessera.interp.target.csl.values import Cast, Pointer


@builtin("as", 2)
def _as(f: Frame, node: s.Builtin) -> Operand:
    return cast(f, type_of(f, node.args[0]), f.value(node.args[1]), node.loc)


def cast(f: Frame, to: t.Type, o: Operand, loc: Location) -> Operand:
    """`@as`: a value converted to a type."""
    if o.type == to:
        return o
    if o.type is t.ENUM_LITERAL or not (_castable(o.type) and _castable(to)):
        return coerce(f, o, to, loc)
    if o.known:
        return known(to, _cast_now(to, o, loc), loc)
    f.cost += 3
    return runtime(to, _cast_code(f, to, o), loc)


def _castable(type_: t.Type) -> bool:
    return t.is_number(type_) or type_ is t.BOOL or isinstance(type_, t.Enum)


def _cast_now(to: t.Type, o: Operand, loc: Location) -> Any:
    if isinstance(to, t.Float):
        data = to.dtype.type(o.const)
        if not np.isfinite(np.float32(data)) and o.type in (t.COMPTIME_FLOAT, t.COMPTIME_INT):
            fail(loc, f"cast from '{o.type}' to '{to}' failed")
        return data
    if to is t.BOOL:
        return bool(o.const)
    if to is t.COMPTIME_FLOAT:
        return float(o.const)
    value = int(o.const)
    if isinstance(to, t.Int):
        if o.type in (t.COMPTIME_INT, t.COMPTIME_FLOAT) and not to.low <= value <= to.high:
            fail(loc, f"cast from '{o.type}' to '{to}' failed")
        return to.wrap(value)
    if isinstance(to, t.Enum) and value not in dict(to.members).values():
        fail(loc, f"enum '{to}' has no member with value {value}")
    return value


def _cast_code(f: Frame, to: t.Type, o: Operand) -> str:
    if isinstance(to, t.Float):
        return f"{f.unit.constant(to.dtype.type)}({o.code})"
    if to is t.BOOL:
        return f"bool({o.code})"
    whole = o.code if t.is_integer(o.type) or isinstance(o.type, t.Enum) else f"int({o.code})"
    if o.type is t.BOOL or not isinstance(to, t.Int):
        return whole
    fits = isinstance(o.type, t.Int) and to.low <= o.type.low and o.type.high <= to.high
    return whole if fits else f"wrap({whole}, {to.bits}, {to.signed})"


@builtin("bitcast", 2)
def _bitcast(f: Frame, node: s.Builtin) -> Operand:
    to, o = type_of(f, node.args[0]), f.value(node.args[1])
    if o.type is t.COMPTIME_INT and isinstance(to, t.Int):
        return known(to, to.wrap(o.const), node.loc)
    if o.type == to:
        return o
    if isinstance(to, t.Pointee) and to.element is t.U16 and o.type is t.U16 and f.unit.options.arch == "wse2":
        return _register(f, to, o, node.loc)
    if o.type.comptime_only or isinstance(to, (t.Pointee, t.Register)) or isinstance(o.type, t.Pointee):
        fail(node.loc, f"'@bitcast' cannot convert '{o.type}' to '{to}'")
    if _bits(o.type) != _bits(to):
        fail(node.loc, "expected equal bit width for operands")
    if o.known:
        return known(to, bits(o.const, o.type.dtype, to.dtype, to.aggregate), node.loc)
    f.cost += 1
    if isinstance(to, t.Int) and isinstance(o.type, t.Int):
        return runtime(to, f"wrap({o.code}, {to.bits}, {to.signed})", node.loc)
    text = f"{o.code}, {f.unit.constant(o.type.dtype)}, {f.unit.constant(to.dtype)}, {to.aggregate}"
    return runtime(to, f"bits({text})", node.loc)


def _register(f: Frame, to: t.Type, o: Operand, loc: Location) -> Operand:
    """An address as a pointer: the router's registers lie there."""
    if f.comptime:
        fail(loc, "a register can only be read at run time")
    return runtime(to, f"Pointer(pe.registers, {code(f, o)} // 2)", loc)


def _bits(type_: t.Type) -> int:
    return type_.bits if isinstance(type_, t.Int) else 8 * type_.size


def bits(data: Any, source: np.dtype[Any], target: np.dtype[Any], whole: bool) -> Any:
    """The same bits as another type."""
    view = np.array(data, source).reshape(-1).view(target)
    return view if whole else (view[0] if target.kind in "fV" else view.item(0))


@builtin("ptrcast", 2)
def _ptrcast(f: Frame, node: s.Builtin) -> Operand:
    to, o = type_of(f, node.args[0]), f.operand(node.args[1])
    if not isinstance(to, t.Pointee):
        type_mismatch(node.args[0].loc, "pointer type", to)
    if not isinstance(o.type, t.Pointee):
        type_mismatch(node.args[1].loc, "pointer", o.type)
    old, new = o.type.element.dtype, to.element.dtype
    if old == new:
        return Operand(to, o.const, o.code, loc=node.loc)
    if any(x.kind == "O" or x.names for x in (old, new)):
        fail(node.loc, f"'@ptrcast' cannot convert '{o.type}' to '{to}'")
    if o.known:
        array, index = o.const
        return known(to, Pointer(Cast(array, new), index * old.itemsize // new.itemsize), node.loc)
    return runtime(to, f"recast({o.code}, {f.unit.constant(new)})", node.loc)

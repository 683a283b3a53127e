"""`@map`: a function called for each element of its operands."""

from __future__ import annotations

from typing import Any

from tessera.errors import Location
from tessera.interp.target.csl import syntax as s
from tessera.interp.target.csl import types as t
from tessera.interp.target.csl.faults import fail, type_mismatch
from tessera.interp.target.csl.sema.builtins import builtin
from tessera.interp.target.csl.sema.coerce import code, coerce
from tessera.interp.target.csl.sema.dsd import is_dsd, options_code
from tessera.interp.target.csl.sema.frame import Frame
from tessera.interp.target.csl.sema.operand import VOID, Operand


@builtin("map", 2, 20)
def _map(f: Frame, node: s.Builtin) -> Operand:
    callback = f.operand(node.args[0])
    args = [f.operand(a) for a in node.args[1:]]
    if f.comptime:
        fail(node.loc, "'@map' is only valid at run time")
    if not isinstance(callback.type, t.Fn) or callback.type.task:
        type_mismatch(node.args[0].loc, "function", callback.type)
    options = args.pop() if args and args[-1].type is t.ANON else None
    type_ = _map_type(callback, args)
    _check_operands(args, type_, node.loc)
    kinds, texts = [], []
    for o, p, arg in zip(args, type_.params, node.args[1:], strict=False):
        kinds.append(p if is_dsd(o.type) else None)
        texts.append(code(f, o if is_dsd(o.type) or p is None else coerce(f, o, p, arg.loc)))
    if type_.result is not t.VOID:
        _check_target(args[-1], type_.result, node.args[-1].loc)
        texts.append(code(f, args[-1]))
    f.flush(node.loc)
    if f.function is not None:
        f.function.waits = True
    shape = f.unit.constant((tuple(kinds), None if type_.result is t.VOID else type_.result))
    text = options_code(f, options, node.loc) if options is not None else "{}"
    where = f.unit.constant(node.loc)
    f.emit(f"yield from pe.map({code(f, callback)}, {shape}, ({', '.join(texts)},), {text}, {where})", node.loc)
    return VOID


def _check_operands(args: list[Operand], type_: t.Fn, loc: Location) -> None:
    count = len(type_.params) + (type_.result is not t.VOID)
    if len(args) != count:
        fail(loc, f"@map callback needs {count} operands, {len(args)} provided")
    if not any(is_dsd(o.type) for o in args):
        fail(loc, "@map expects at least one DSD operand")
    if any(o.type is t.FIFO for o in args):
        fail(loc, "a FIFO cannot be an operand of @map")


def _map_type(callback: Operand, args: list[Operand]) -> t.Fn:
    """The type of the callback; a generic library function takes it from the operands."""
    type_: Any = callback.type
    if None in type_.params or type_.result is t.ANYTYPE:
        fail(callback.loc, "@map expects a function whose parameter types are known")
    return type_


def _check_target(o: Operand, result: t.Type, loc: Location) -> None:
    if is_dsd(o.type):
        return
    if not isinstance(o.type, t.Pointee) or o.type.const or o.type.element != result:
        type_mismatch(loc, f"*{result} or DSD", o.type)

"""Builtins of the machine below the language: random numbers, registers, filters, symbols by number, `@dfilt`."""

from __future__ import annotations

from typing import Any

from tessera.interp.target.csl import syntax as s
from tessera.interp.target.csl import types as t
from tessera.interp.target.csl.faults import fail, type_mismatch
from tessera.interp.target.csl.registers import known_register
from tessera.interp.target.csl.sema.builtins import BUILTINS, Builtin, builtin, constant
from tessera.interp.target.csl.sema.coerce import code, coerce
from tessera.interp.target.csl.sema.dsd import options_code
from tessera.interp.target.csl.sema.frame import Frame
from tessera.interp.target.csl.sema.functions import call_native
from tessera.interp.target.csl.sema.names import type_of
from tessera.interp.target.csl.sema.operand import VOID, Operand, known, members
from tessera.interp.target.csl.shiftregister import drawn, select
from tessera.interp.target.csl.values import NativeFunction, Pointer

_WORDS = t.Pointee("", t.U16, many=True)


def _write(pe: Any, address: int, value: int) -> None:
    pe.registers[address] = value


def _symbol(pe: Any, number: int) -> Any:
    return pe.exported(pe.program.symbol_names[number])


def _value(pe: Any, number: int, type_: t.Type) -> Any:
    found = _symbol(pe, number)
    if isinstance(type_, t.Pointee):
        return found
    cell = found.array[found.index]
    return cell if isinstance(type_, t.Float) else cell.item()


def _tensor(pe: Any, number: int) -> Pointer:
    found = _symbol(pe, number)
    view = found.array.view(t.U16.dtype)
    return Pointer(view, found.index * found.array.dtype.itemsize // 2)


RANDOM = NativeFunction("@random16", lambda pe: drawn(pe), cycles=4, live=True)
SELECT = NativeFunction("@set_active_prng", lambda pe, number: select(pe, number), cycles=4, live=True)
READ = NativeFunction("@get_config", lambda pe, address: pe.registers[address], cycles=4, live=True)
WRITE = NativeFunction("@set_config", _write, cycles=4, live=True)
TENSOR = NativeFunction("@get_tensor_ptr", _tensor, cycles=6, live=True)


@builtin("random16", 0)
def _random16(f: Frame, node: s.Builtin) -> Operand:
    return call_native(f, RANDOM, t.Fn("", (), t.U16), [], node.loc)


@builtin("set_active_prng", 1)
def _set_active_prng(f: Frame, node: s.Builtin) -> Operand:
    return call_native(f, SELECT, t.Fn("", (t.U16,), t.VOID), [f.value(node.args[0])], node.loc)


def _config(f: Frame, node: s.Builtin) -> Operand:
    """A register read or written at its address: those of the router on WSE-2, and while the program runs."""
    writes = node.name.startswith("@set")
    address, *values = [coerce(f, f.value(a), t.U16, a.loc) for a in node.args[: 1 + writes]]
    simulated = f.unit.options.arch == "wse2" and not f.comptime
    if not simulated or (address.known and not known_register(address.const)):
        what = f"'{node.name}' {'writes' if writes else 'reads'} a hardware register that is not simulated"
        fail(node.loc, what, suggestion="use <tile_config>")
    kind = t.Fn("", (t.U16,) * (1 + writes), t.VOID if writes else t.U16)
    return call_native(f, WRITE if writes else READ, kind, [address, *values], node.loc)


# Ranges of addresses, which a checked access may name, change nothing here.
for _name, _least, _most in (("get_config", 1, 2), ("set_config", 2, 3)):
    BUILTINS[f"@{_name}"] = Builtin(_least, _most, _config)
    BUILTINS[f"@{_name}_unchecked"] = Builtin(_least, _least, _config)


@builtin("get_filter_id", 1)
def _get_filter_id(f: Frame, node: s.Builtin) -> Operand:
    """A filter goes by the number of its color; whether it exists is known when the layout is."""
    color = constant(f, node.args[0], t.COLOR).const
    f.unit.tables.filters.setdefault(int(color), node.loc)
    return known(t.U16, int(color), node.loc)


@builtin("get_symbol_id", 1)
def _get_symbol_id(f: Frame, node: s.Builtin) -> Operand:
    name = node.args[0].text if isinstance(node.args[0], s.Name) else ""
    if name not in f.unit.symbols:
        fail(node.loc, f"symbol '{name}' is not exported", suggestion="declare it with @export_name in the layout")
    return known(t.U16, f.unit.symbols.index(name), node.loc)


@builtin("get_symbol_value", 2)
def _get_symbol_value(f: Frame, node: s.Builtin) -> Operand:
    type_ = type_of(f, node.args[0])
    if type_.comptime_only or isinstance(type_, t.Fn):
        type_mismatch(node.args[0].loc, "type of an exported variable", type_)
    value = NativeFunction("@get_symbol_value", lambda pe, number: _value(pe, number, type_), cycles=6, live=True)
    return call_native(f, value, t.Fn("", (t.U16,), type_), [f.value(node.args[1])], node.loc)


@builtin("get_tensor_ptr", 1)
def _get_tensor_ptr(f: Frame, node: s.Builtin) -> Operand:
    return call_native(f, TENSOR, t.Fn("", (t.U16,), _WORDS), [f.value(node.args[0])], node.loc)


@builtin("has_exported_tensors", 0)
def _has_exported_tensors(f: Frame, node: s.Builtin) -> Operand:
    return known(t.BOOL, bool(f.unit.tensors), node.loc)


@builtin("dfilt", 2)
def _dfilt(f: Frame, node: s.Builtin) -> Operand:
    """Drops data wavelets until as many control wavelets have come as the descriptor is long."""
    o, options = f.value(node.args[0]), f.operand(node.args[1])
    if o.type not in (t.FABIN, t.DSR_SRC1):
        type_mismatch(node.args[0].loc, t.FABIN, o.type)
    text = options_code(f, options, node.args[1].loc)
    wanted = members(options).get("async")
    if f.comptime or wanted is None or not wanted.known or not wanted.const:
        fail(node.loc, "'@dfilt' is only valid at run time, and requires '.async = true'")
    f.emit(f"pe.drop({code(f, o)}, {text}, {f.unit.constant(node.loc)})", node.loc)
    return VOID

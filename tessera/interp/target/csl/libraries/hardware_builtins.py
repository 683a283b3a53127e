"""Hardware builtins: pseudo-random numbers (LFSR x^23 + x^18 + 1), router registers, symbols by number, `@dfilt`.

The documentation does not state which bits form a number and how many registers a PE has. This simulator uses the
upper 16 of 23 bits, and four registers.
"""

from __future__ import annotations

from typing import Any

from tessera.interp.target.csl.fabric.routing import is_simulated_register
from tessera.interp.target.csl.sema import types as t
from tessera.interp.target.csl.sema.access import evaluate_type
from tessera.interp.target.csl.sema.builtins import BUILTINS, BuiltinSpec, evaluate_constant, register_builtin
from tessera.interp.target.csl.sema.coercion import coerce, render_code
from tessera.interp.target.csl.sema.context import VOID, AnalysisContext, ExprValue, list_members, make_known
from tessera.interp.target.csl.sema.dsd_builtins import render_options
from tessera.interp.target.csl.sema.functions import call_native
from tessera.interp.target.csl.sema.values import NativeFunction, Pointer
from tessera.interp.target.csl.text import syntax as s
from tessera.interp.target.csl.text.diagnostics import fail, type_mismatch

# Pseudo-random numbers.


PRNG_SEED = 0xDEADBEEF
PRNG_COUNT = 4


def advance_lfsr(state: int) -> int:
    """The register after 128 steps, computed 16 at a time.

    >>> hex(advance_lfsr(PRNG_SEED))
    '0x1469c532'
    """
    for _ in range(8):
        state = (state << 16 | (state >> 7 ^ state >> 2) & 0xFFFF) & 0xFFFFFFFF
    return state


def draw_random16(pe: Any) -> int:
    """The next 16-bit number."""
    states = pe.state.setdefault("random", {})
    active = pe.state.get("active random", 0)
    state = advance_lfsr(states.get(active, PRNG_SEED))
    states[active] = state
    return state >> 7 & 0xFFFF


def select_prng(pe: Any, number: int) -> None:
    """Select the active register."""
    pe.state["active random"] = number % PRNG_COUNT


def seed_prng(pe: Any, seed: int) -> None:
    """Seed the active register; a zero seed is replaced, because zero is a fixed point."""
    pe.state.setdefault("random", {})[pe.state.get("active random", 0)] = seed & 0xFFFFFFFF or PRNG_SEED


def draw_fraction(pe: Any) -> float:
    """A 32-bit number in [0, 1)."""
    return (draw_random16(pe) << 16 | draw_random16(pe)) / 2**32


# The builtins.


_WORD_POINTER = t.CslPointer("", t.U16, many=True)


def _write_register(pe: Any, address: int, value: int) -> None:
    pe.registers[address] = value


def _read_symbol(pe: Any, number: int) -> Any:
    return pe.get_export(pe.program.symbol_names[number])


def _read_symbol_value(pe: Any, number: int, type_: t.CslType) -> Any:
    symbol = _read_symbol(pe, number)
    if isinstance(type_, t.CslPointer):
        return symbol
    cell = symbol.array[symbol.index]
    return cell if isinstance(type_, t.CslFloat) else cell.item()


def _tensor_pointer(pe: Any, number: int) -> Pointer:
    symbol = _read_symbol(pe, number)
    view = symbol.array.view(t.U16.dtype)
    return Pointer(view, symbol.index * symbol.array.dtype.itemsize // 2)


RANDOM16 = NativeFunction("@random16", lambda pe: draw_random16(pe), cycles=4, live=True)
SET_ACTIVE_PRNG = NativeFunction("@set_active_prng", lambda pe, number: select_prng(pe, number), cycles=4, live=True)
GET_CONFIG = NativeFunction("@get_config", lambda pe, address: pe.registers[address], cycles=4, live=True)
SET_CONFIG = NativeFunction("@set_config", _write_register, cycles=4, live=True)
GET_TENSOR_PTR = NativeFunction("@get_tensor_ptr", _tensor_pointer, cycles=6, live=True)


@register_builtin("random16", 0)
def _random16(f: AnalysisContext, node: s.BuiltinCall) -> ExprValue:
    return call_native(f, RANDOM16, t.CslFunctionType("", (), t.U16), [], node.loc)


@register_builtin("set_active_prng", 1)
def _set_active_prng(f: AnalysisContext, node: s.BuiltinCall) -> ExprValue:
    return call_native(
        f, SET_ACTIVE_PRNG, t.CslFunctionType("", (t.U16,), t.VOID), [f.evaluate(node.args[0])], node.loc
    )


def _access_register(f: AnalysisContext, node: s.BuiltinCall) -> ExprValue:
    """Read or write a register at its address: router registers of WSE-2, at run time."""
    writes = node.name.startswith("@set")
    address, *values = [coerce(f, f.evaluate(a), t.U16, a.loc) for a in node.args[: 1 + writes]]
    simulated = f.unit.options.arch == "wse2" and not f.comptime
    if not simulated or (address.known and not is_simulated_register(address.const)):
        what = f"'{node.name}' {'writes' if writes else 'reads'} a hardware register that is not simulated"
        fail(node.loc, what, suggestion="use <tile_config>")
    kind = t.CslFunctionType("", (t.U16,) * (1 + writes), t.VOID if writes else t.U16)
    return call_native(f, SET_CONFIG if writes else GET_CONFIG, kind, [address, *values], node.loc)


# The address range of a checked access has no effect in the simulator.
for _name, _least, _most in (("get_config", 1, 2), ("set_config", 2, 3)):
    BUILTINS[f"@{_name}"] = BuiltinSpec(_least, _most, _access_register)
    BUILTINS[f"@{_name}_unchecked"] = BuiltinSpec(_least, _least, _access_register)


@register_builtin("get_filter_id", 1)
def _get_filter_id(f: AnalysisContext, node: s.BuiltinCall) -> ExprValue:
    """The id of a filter is the number of its color; the layout determines whether it exists."""
    color = evaluate_constant(f, node.args[0], t.COLOR).const
    f.unit.tables.filters.setdefault(int(color), node.loc)
    return make_known(t.U16, int(color), node.loc)


@register_builtin("get_symbol_id", 1)
def _get_symbol_id(f: AnalysisContext, node: s.BuiltinCall) -> ExprValue:
    name = node.args[0].text if isinstance(node.args[0], s.NameExpr) else ""
    if name not in f.unit.symbols:
        fail(node.loc, f"symbol '{name}' is not exported", suggestion="declare it with @export_name in the layout")
    return make_known(t.U16, f.unit.symbols.index(name), node.loc)


@register_builtin("get_symbol_value", 2)
def _get_symbol_value(f: AnalysisContext, node: s.BuiltinCall) -> ExprValue:
    type_ = evaluate_type(f, node.args[0])
    if type_.comptime_only or isinstance(type_, t.CslFunctionType):
        type_mismatch(node.args[0].loc, "type of an exported variable", type_)
    value = NativeFunction(
        "@get_symbol_value", lambda pe, number: _read_symbol_value(pe, number, type_), cycles=6, live=True
    )
    return call_native(f, value, t.CslFunctionType("", (t.U16,), type_), [f.evaluate(node.args[1])], node.loc)


@register_builtin("get_tensor_ptr", 1)
def _get_tensor_ptr(f: AnalysisContext, node: s.BuiltinCall) -> ExprValue:
    return call_native(
        f, GET_TENSOR_PTR, t.CslFunctionType("", (t.U16,), _WORD_POINTER), [f.evaluate(node.args[0])], node.loc
    )


@register_builtin("has_exported_tensors", 0)
def _has_exported_tensors(f: AnalysisContext, node: s.BuiltinCall) -> ExprValue:
    return make_known(t.BOOL, bool(f.unit.tensors), node.loc)


@register_builtin("dfilt", 2)
def _dfilt(f: AnalysisContext, node: s.BuiltinCall) -> ExprValue:
    """Drop data wavelets until as many control wavelets have arrived as the DSD's extent."""
    o, options = f.evaluate(node.args[0]), f.evaluate_operand(node.args[1])
    if o.type not in (t.FABIN, t.DSR_SRC1):
        type_mismatch(node.args[0].loc, t.FABIN, o.type)
    text = render_options(f, options, node.args[1].loc)
    is_async = list_members(options).get("async")
    if f.comptime or is_async is None or not is_async.known or not is_async.const:
        fail(node.loc, "'@dfilt' is only valid at run time, and requires '.async = true'")
    f.emit(f"pe.drop({render_code(f, o)}, {text}, {f.unit.add_constant(node.loc)})", node.loc)
    return VOID

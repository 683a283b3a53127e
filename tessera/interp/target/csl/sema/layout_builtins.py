"""Layout builtins: the rectangle, the code and color configurations of its PEs, exported names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tessera.core.errors import Location
from tessera.interp.target.csl.sema import types as t
from tessera.interp.target.csl.sema.access import evaluate_type
from tessera.interp.target.csl.sema.builtins import (
    evaluate_constant,
    evaluate_integer,
    list_struct_fields,
    register_builtin,
    require_section,
)
from tessera.interp.target.csl.sema.context import VOID, AnalysisContext, ExprValue, make_known
from tessera.interp.target.csl.sema.values import DIRECTIONS, ColorConfig, ComptimeValue, FilterConfig, SwitchPosition
from tessera.interp.target.csl.text import syntax as s
from tessera.interp.target.csl.text.diagnostics import fail, type_mismatch

# WSE-3 has switches only on these colors.
SWITCHABLE_COLORS = frozenset({*range(10), 12, 13, 16, 17, 20, 21})

MAX_SIDE = 1200  # PEs; the longest side of a published fabric is 1,176


@register_builtin("set_rectangle", 2)
def _set_rectangle(f: AnalysisContext, node: s.BuiltinCall) -> ExprValue:
    require_section(f, node, "layout")
    if f.unit.rectangle[0]:
        fail(node.loc, "'@set_rectangle' has already been called")
    width, height = evaluate_integer(f, node.args[0]), evaluate_integer(f, node.args[1])
    if width < 1 or height < 1:
        fail(node.loc, f"rectangle of {width} x {height} PEs is empty")
    if max(width, height) > MAX_SIDE:
        fail(node.loc, f"rectangle of {width} x {height} PEs: no machine has more than {MAX_SIDE} in a row or column")
    f.unit.layout.set_rectangle(f.unit, width, height, node.loc)
    return VOID


def _evaluate_pe_coordinate(f: AnalysisContext, node: s.BuiltinCall) -> tuple[int, int]:
    x, y = evaluate_integer(f, node.args[0]), evaluate_integer(f, node.args[1])
    width, height = f.unit.rectangle
    if not width:
        fail(node.loc, f"'{node.name}' is only valid after '@set_rectangle'")
    if not (0 <= x < width and 0 <= y < height):
        fail(node.loc, f"PE coordinates ({x}, {y}) are outside of the {width} x {height} rectangle")
    return x, y


@register_builtin("set_tile_code", 2, 4)
def _set_tile_code(f: AnalysisContext, node: s.BuiltinCall) -> ExprValue:
    require_section(f, node, "layout")
    place = _evaluate_pe_coordinate(f, node)
    if len(node.args) == 2:  # the layout's own file is the tile code
        f.unit.layout.set_tile_code(place, Path(f.module.file.path), {}, node.loc)
        return VOID
    name = evaluate_constant(f, node.args[2], t.STRING).const
    params = evaluate_constant(f, node.args[3]) if len(node.args) > 3 else make_known(t.ANON, {})
    if params.type is not t.ANON:
        type_mismatch(node.args[3].loc, t.ANON, params.type)
    path = f.unit.find(f.module, name)
    if path is None:
        fail(node.args[2].loc, f"unable to find file '{name}'")
    f.unit.layout.set_tile_code(place, path, params.const, node.loc)
    return VOID


@register_builtin("set_color_config", 4)
def _set_color_config(f: AnalysisContext, node: s.BuiltinCall) -> ExprValue:
    require_section(f, node, "layout")
    place, color = _evaluate_pe_coordinate(f, node), evaluate_constant(f, node.args[2], t.COLOR).const
    config = parse_color_config(f, evaluate_constant(f, node.args[3]), color, node.loc)
    f.unit.layout.set_color_config(place, color, config)
    return VOID


@register_builtin("set_local_color_config", 2)
def _set_local_color_config(f: AnalysisContext, node: s.BuiltinCall) -> ExprValue:
    require_section(f, node, "comptime")
    color = evaluate_constant(f, node.args[0], t.COLOR).const
    if color in f.unit.tables.colors:
        fail(node.loc, "config for this color has already been set")
    f.unit.tables.colors[color] = parse_color_config(f, evaluate_constant(f, node.args[1]), color, node.loc)
    return VOID


_CONFIG_FIELDS = {"routes", "switches", "filter", "teardown"}
_SWITCH_FIELDS = {"pos1", "pos2", "pos3", "current_switch_pos", "ring_mode", "pop_mode"}
_ROUTE_FIELDS = {"rx", "tx", "color_swap_x", "color_swap_y", "pos1"}


def _check_fields(value: ComptimeValue | None, allowed: set[str], what: str, loc: Location) -> dict[str, ComptimeValue]:
    if value is None:
        return {}
    fields = _struct_fields(value, loc)
    unknown = next((n for n in fields if n not in allowed), None)
    if unknown:
        fail(loc, f"unexpected field '{unknown}' in {what}")
    return fields


def _struct_fields(value: ComptimeValue, loc: Location) -> dict[str, ComptimeValue]:
    """The fields of a struct value, of a named or an anonymous type."""
    if isinstance(value.type, t.CslStruct):
        return list_struct_fields(value)
    if value.type is not t.ANON:
        type_mismatch(loc, t.ANON, value.type)
    return value.data


def parse_directions(value: ComptimeValue | None, loc: Location) -> tuple[str, ...]:
    """The names in one direction, or in a tuple or array of directions."""
    if value is None:
        return ()
    if value.type is t.DIRECTION:
        return (DIRECTIONS[int(value.data)],)
    if isinstance(value.type, t.CslArray) and value.type.element is t.DIRECTION:
        return tuple(DIRECTIONS[int(i)] for i in value.data)
    if value.type is not t.ANON:
        type_mismatch(loc, t.DIRECTION, value.type)
    return tuple(name for item in value.data.values() for name in parse_directions(item, loc))


def parse_color_config(f: AnalysisContext, o: ExprValue, color: int, loc: Location) -> ColorConfig:
    """The color configuration that a struct describes."""
    rows = _check_fields(o.value, _CONFIG_FIELDS, "color configuration", loc)
    if "routes" not in rows:
        fail(loc, "a color configuration must have a field 'routes'")
    given = rows["routes"]
    routes = (
        decode_route_bits(given) if t.is_integer(given.type) else _check_fields(given, _ROUTE_FIELDS, "routes", loc)
    )
    switches = _check_fields(rows.get("switches"), _SWITCH_FIELDS, "switches", loc)
    rx, tx = parse_directions(routes.get("rx"), loc), parse_directions(routes.get("tx"), loc)
    for name, side in (("input", rx), ("output", tx)):
        if len(set(side)) != len(side):
            fail(loc, f"duplicate {name} direction")
    if len(rx) > 1 and f.unit.options.arch == "wse3":
        fail(loc, "expected at most 1 input direction")
    if switches and f.unit.options.arch == "wse3" and color not in SWITCHABLE_COLORS:
        fail(loc, f"color {color} does not support switches on wse3")
    return ColorConfig(
        rx,
        tx,
        _parse_switch_positions(switches, loc),
        int(_get_field(switches, "current_switch_pos", 0)),
        bool(_get_field(switches, "ring_mode", False)),
        _selected_flag(switches.get("pop_mode"), "no_pop", loc),
        _parse_filter(rows.get("filter"), loc),
        bool(_get_field(rows, "teardown", False)),
        bool(_get_field(routes, "color_swap_x", False)),
        bool(_get_field(routes, "color_swap_y", False)),
        loc,
    )


def _get_field(rows: dict[str, ComptimeValue], name: str, default: Any) -> Any:
    return rows[name].data if name in rows else default


def _selected_flag(value: ComptimeValue | None, default: str, loc: Location) -> str:
    """The name whose flag is true in `.{ .name = true }`."""
    return default if value is None else next((n for n, v in _struct_fields(value, loc).items() if v.data), default)


def decode_route_bits(bits: ComptimeValue) -> dict[str, ComptimeValue]:
    """Decode routes in the router's register format: outputs in bits 0 to 4, inputs in bits 5 to 9.

    >>> [(name, value.data) for name, value in decode_route_bits(ComptimeValue(t.U16, 0b0000100010)).items()]
    [('rx', array([0])), ('tx', array([1]))]
    """
    kind = t.CslArray("", (1,), t.DIRECTION)
    sides = (("rx", int(bits.data) >> 5 & 31), ("tx", int(bits.data) & 31))
    return {
        name: ComptimeValue(kind, np.flatnonzero([side >> i & 1 for i in range(5)])) for name, side in sides if side
    }


def _parse_switch_positions(switches: dict[str, ComptimeValue], loc: Location) -> tuple[SwitchPosition, ...]:
    positions: list[SwitchPosition] = []
    for name in ("pos1", "pos2", "pos3"):
        if name not in switches:
            break
        given, what = switches[name], f"switch position '{name}'"
        whole = t.is_integer(given.type)
        if whole and not given.data:
            break
        rows = decode_route_bits(given) if whole else _check_fields(given, {"rx", "tx", "invalid"}, what, loc)
        rx, tx = parse_directions(rows.get("rx"), loc), parse_directions(rows.get("tx"), loc)
        if len(rx) + len(tx) > 1:
            fail(loc, f"switch position '{name}' may change only one direction: the input or the output")
        invalid = bool(_get_field(rows, "invalid", False))
        positions.append(SwitchPosition(rx[0] if rx else None, tx[0] if tx else None, invalid))
    if int(_get_field(switches, "current_switch_pos", 0)) > len(positions):
        fail(loc, f"current switch position {_get_field(switches, 'current_switch_pos', 0)} is not defined")
    return tuple(positions)


def _parse_filter(value: ComptimeValue | None, loc: Location) -> FilterConfig | None:
    if value is None:
        return None
    if value.type is not t.ANON:
        type_mismatch(loc, t.ANON, value.type)
    kind = _selected_flag(value.data.get("kind"), "", loc)
    if kind not in ("range", "counter", "sparse_counter"):
        fail(loc, f"filter kind must be range, counter or sparse_counter, got: '{kind}'")
    limits = {n: int(v.data) for n, v in value.data.items() if n not in ("kind", "init_counter")}
    return FilterConfig(kind, limits, int(_get_field(value.data, "init_counter", 0)))


@register_builtin("export_name", 2, 3)
def _export_name(f: AnalysisContext, node: s.BuiltinCall) -> ExprValue:
    require_section(f, node, "layout")
    name, type_ = evaluate_constant(f, node.args[0], t.STRING).const, evaluate_type(f, node.args[1])
    mutable = bool(evaluate_constant(f, node.args[2], t.BOOL).const) if len(node.args) > 2 else None
    if type_.aggregate or isinstance(type_, t.CslEnum) or type_.comptime_only:
        fail(node.args[1].loc, f"exported name must have scalar, pointer or function type, got: '{type_}'")
    if not isinstance(type_, t.CslFunctionType) and mutable is None:
        fail(node.loc, f"exported name '{name}' of type '{type_}' needs a mutability")
    f.unit.layout.export_name(name, type_, mutable, node.loc)
    return VOID


def _make_exported_pointer(o: ExprValue, loc: Location) -> ExprValue:
    """A pointer to an exported variable, through which the host reads it."""
    if o.type.aggregate or o.place is None or o.place.take is None:
        fail(loc, f"exported symbol must be a variable, a pointer or a function, got: '{o.type}'")
    return make_known(t.CslPointer("", o.type, const=not o.place.mutable), o.place.take(), loc)


@register_builtin("export_symbol", 1, 2)
def _export_symbol(f: AnalysisContext, node: s.BuiltinCall) -> ExprValue:
    require_section(f, node, "comptime")
    o = f.evaluate_operand(node.args[0])
    if len(node.args) > 1:
        name = evaluate_constant(f, node.args[1], t.STRING).const
    elif isinstance(node.args[0], s.NameExpr):
        name = node.args[0].text
    else:
        fail(node.loc, "'@export_symbol' needs a name")
    if isinstance(o.type, t.CslFunctionType) and not o.type.task:
        f.unit.render_constant(o)
    elif not isinstance(o.type, t.CslPointer):
        o = _make_exported_pointer(o, node.loc)
    if name in f.unit.tables.exports:
        fail(node.loc, f"symbol '{name}' has already been exported")
    f.unit.tables.exports[name] = (o, node.loc)
    return VOID

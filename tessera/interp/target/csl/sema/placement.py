"""Builtins of a layout: the rectangle, the code and colors of its PEs, exports; and `@ptrcast`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tessera.errors import Location
from tessera.interp.target.csl import syntax as s
from tessera.interp.target.csl import types as t
from tessera.interp.target.csl.faults import fail, type_mismatch
from tessera.interp.target.csl.sema.builtins import builtin, constant, number, only_in
from tessera.interp.target.csl.sema.frame import Frame
from tessera.interp.target.csl.sema.names import type_of
from tessera.interp.target.csl.sema.operand import VOID, Operand, known
from tessera.interp.target.csl.values import DIRECTIONS, ColorConfig, Filter, SwitchPosition, Value

# WSE-3 has switches on these colors only.
SWITCHABLE = frozenset({*range(10), 12, 13, 16, 17, 20, 21})


@builtin("set_rectangle", 2)
def _set_rectangle(f: Frame, node: s.Builtin) -> Operand:
    only_in(f, node, "layout")
    if f.unit.rectangle[0]:
        fail(node.loc, "'@set_rectangle' has already been called")
    width, height = number(f, node.args[0]), number(f, node.args[1])
    if width < 1 or height < 1:
        fail(node.loc, f"rectangle of {width} x {height} PEs is empty")
    f.unit.layout.set_rectangle(f.unit, width, height, node.loc)
    return VOID


def _position(f: Frame, node: s.Builtin) -> tuple[int, int]:
    x, y = number(f, node.args[0]), number(f, node.args[1])
    width, height = f.unit.rectangle
    if not width:
        fail(node.loc, f"'{node.name}' is only valid after '@set_rectangle'")
    if not (0 <= x < width and 0 <= y < height):
        fail(node.loc, f"PE coordinates ({x}, {y}) are outside of the {width} x {height} rectangle")
    return x, y


@builtin("set_tile_code", 2, 4)
def _set_tile_code(f: Frame, node: s.Builtin) -> Operand:
    only_in(f, node, "layout")
    place = _position(f, node)
    if len(node.args) == 2:  # the code stands in the layout's own file
        f.unit.layout.set_tile_code(place, Path(f.module.file.path), {}, node.loc)
        return VOID
    name = constant(f, node.args[2], t.STRING).const
    params = constant(f, node.args[3]) if len(node.args) > 3 else known(t.ANON, {})
    if params.type is not t.ANON:
        type_mismatch(node.args[3].loc, t.ANON, params.type)
    path = f.unit.find(f.module, name)
    if path is None:
        fail(node.args[2].loc, f"unable to find file '{name}'")
    f.unit.layout.set_tile_code(place, path, params.const, node.loc)
    return VOID


@builtin("set_color_config", 4)
def _set_color_config(f: Frame, node: s.Builtin) -> Operand:
    only_in(f, node, "layout")
    place, color = _position(f, node), constant(f, node.args[2], t.COLOR).const
    config = color_config(f, constant(f, node.args[3]), color, node.loc)
    f.unit.layout.set_color_config(place, color, config)
    return VOID


@builtin("set_local_color_config", 2)
def _set_local_color_config(f: Frame, node: s.Builtin) -> Operand:
    only_in(f, node, "comptime")
    color = constant(f, node.args[0], t.COLOR).const
    if color in f.unit.tables.colors:
        fail(node.loc, "config for this color has already been set")
    f.unit.tables.colors[color] = color_config(f, constant(f, node.args[1]), color, node.loc)
    return VOID


_CONFIG = {"routes", "switches", "filter", "teardown"}
_SWITCHES = {"pos1", "pos2", "pos3", "current_switch_pos", "ring_mode", "pop_mode"}
_ROUTES = {"rx", "tx", "color_swap_x", "color_swap_y", "pos1"}


def _rows(value: Value | None, allowed: set[str], what: str, loc: Location) -> dict[str, Value]:
    if value is None:
        return {}
    found = _fields(value, loc)
    unknown = next((n for n in found if n not in allowed), None)
    if unknown:
        fail(loc, f"unexpected field '{unknown}' in {what}")
    return found


def _fields(value: Value, loc: Location) -> dict[str, Value]:
    """The fields of a struct, of a named type or none."""
    if isinstance(value.type, t.Struct):
        return {
            name: Value(type_, value.data[name] if type_.aggregate else value.data[name][0].item())
            for name, type_ in value.type.fields
        }
    if value.type is not t.ANON:
        type_mismatch(loc, t.ANON, value.type)
    return value.data


def directions(value: Value | None, loc: Location) -> tuple[str, ...]:
    """The names of one direction, or of a tuple or array of them."""
    if value is None:
        return ()
    if value.type is t.DIRECTION:
        return (DIRECTIONS[int(value.data)],)
    if isinstance(value.type, t.Array) and value.type.element is t.DIRECTION:
        return tuple(DIRECTIONS[int(i)] for i in value.data)
    if value.type is not t.ANON:
        type_mismatch(loc, t.DIRECTION, value.type)
    return tuple(name for item in value.data.values() for name in directions(item, loc))


def color_config(f: Frame, o: Operand, color: int, loc: Location) -> ColorConfig:
    """The routing that a struct describes."""
    rows = _rows(o.value, _CONFIG, "color configuration", loc)
    if "routes" not in rows:
        fail(loc, "a color configuration must have a field 'routes'")
    given = rows["routes"]
    routes = unpacked(given) if t.is_integer(given.type) else _rows(given, _ROUTES, "routes", loc)
    switches = _rows(rows.get("switches"), _SWITCHES, "switches", loc)
    rx, tx = directions(routes.get("rx"), loc), directions(routes.get("tx"), loc)
    for name, side in (("input", rx), ("output", tx)):
        if len(set(side)) != len(side):
            fail(loc, f"duplicate {name} direction")
    if len(rx) > 1 and f.unit.options.arch == "wse3":
        fail(loc, "expected at most 1 input direction")
    if switches and f.unit.options.arch == "wse3" and color not in SWITCHABLE:
        fail(loc, f"color {color} does not support switches on wse3")
    return ColorConfig(
        rx,
        tx,
        _positions(switches, loc),
        int(_data(switches, "current_switch_pos", 0)),
        bool(_data(switches, "ring_mode", False)),
        _chosen(switches.get("pop_mode"), "no_pop", loc),
        _filter(rows.get("filter"), loc),
        bool(_data(rows, "teardown", False)),
        bool(_data(routes, "color_swap_x", False)),
        bool(_data(routes, "color_swap_y", False)),
        loc,
    )


def _data(rows: dict[str, Value], name: str, default: Any) -> Any:
    return rows[name].data if name in rows else default


def _chosen(value: Value | None, default: str, loc: Location) -> str:
    """The name whose flag is set in `.{ .name = true }`."""
    return default if value is None else next((n for n, v in _fields(value, loc).items() if v.data), default)


def unpacked(bits: Value) -> dict[str, Value]:
    """Routes given as bits, as a router's register has them: outputs in the low five, inputs in the next five.

    >>> [(name, value.data) for name, value in unpacked(Value(t.U16, 0b0000100010)).items()]
    [('rx', array([0])), ('tx', array([1]))]
    """
    kind = t.Array("", (1,), t.DIRECTION)
    sides = (("rx", int(bits.data) >> 5 & 31), ("tx", int(bits.data) & 31))
    return {name: Value(kind, np.flatnonzero([side >> i & 1 for i in range(5)])) for name, side in sides if side}


def _positions(switches: dict[str, Value], loc: Location) -> tuple[SwitchPosition, ...]:
    found: list[SwitchPosition] = []
    for name in ("pos1", "pos2", "pos3"):
        if name not in switches:
            break
        given, what = switches[name], f"switch position '{name}'"
        whole = t.is_integer(given.type)
        if whole and not given.data:
            break
        rows = unpacked(given) if whole else _rows(given, {"rx", "tx", "invalid"}, what, loc)
        rx, tx = directions(rows.get("rx"), loc), directions(rows.get("tx"), loc)
        if len(rx) + len(tx) > 1:
            fail(loc, f"switch position '{name}' may change one direction, the input or the output")
        invalid = bool(_data(rows, "invalid", False))
        found.append(SwitchPosition(rx[0] if rx else None, tx[0] if tx else None, invalid))
    if int(_data(switches, "current_switch_pos", 0)) > len(found):
        fail(loc, f"current switch position {_data(switches, 'current_switch_pos', 0)} is not defined")
    return tuple(found)


def _filter(value: Value | None, loc: Location) -> Filter | None:
    if value is None:
        return None
    if value.type is not t.ANON:
        type_mismatch(loc, t.ANON, value.type)
    kind = _chosen(value.data.get("kind"), "", loc)
    if kind not in ("range", "counter", "sparse_counter"):
        fail(loc, f"filter kind must be range, counter or sparse_counter, got: '{kind}'")
    limits = {n: int(v.data) for n, v in value.data.items() if n not in ("kind", "init_counter")}
    return Filter(kind, limits, int(_data(value.data, "init_counter", 0)))


@builtin("export_name", 2, 3)
def _export_name(f: Frame, node: s.Builtin) -> Operand:
    only_in(f, node, "layout")
    name, type_ = constant(f, node.args[0], t.STRING).const, type_of(f, node.args[1])
    mutable = bool(constant(f, node.args[2], t.BOOL).const) if len(node.args) > 2 else None
    if type_.aggregate or isinstance(type_, t.Enum) or type_.comptime_only:
        fail(node.args[1].loc, f"exported name must have scalar, pointer or function type, got: '{type_}'")
    if not isinstance(type_, t.Fn) and mutable is None:
        fail(node.loc, f"exported name '{name}' of type '{type_}' needs a mutability")
    f.unit.layout.export_name(name, type_, mutable, node.loc)
    return VOID


def _address(o: Operand, loc: Location) -> Operand:
    """A variable of a number as the pointer through which the host reads it."""
    if o.type.aggregate or o.place is None or o.place.take is None:
        fail(loc, f"exported symbol must be a variable, a pointer or a function, got: '{o.type}'")
    return known(t.Pointee("", o.type, const=not o.place.mutable), o.place.take(), loc)


@builtin("export_symbol", 1, 2)
def _export_symbol(f: Frame, node: s.Builtin) -> Operand:
    only_in(f, node, "comptime")
    o = f.operand(node.args[0])
    if len(node.args) > 1:
        name = constant(f, node.args[1], t.STRING).const
    elif isinstance(node.args[0], s.Name):
        name = node.args[0].text
    else:
        fail(node.loc, "'@export_symbol' needs a name")
    if isinstance(o.type, t.Fn) and not o.type.task:
        f.unit.constant_code(o)
    elif not isinstance(o.type, t.Pointee):
        o = _address(o, node.loc)
    if name in f.unit.tables.exports:
        fail(node.loc, f"symbol '{name}' has already been exported")
    f.unit.tables.exports[name] = (o, node.loc)
    return VOID

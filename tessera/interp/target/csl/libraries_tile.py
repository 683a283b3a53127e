"""The library `<tile_config>`: routes, switches, filters and teardown of a PE, changed while it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tessera.interp.target.csl import types as t
from tessera.interp.target.csl.faults import CslFault
from tessera.interp.target.csl.libraries_state import CYCLES, machine, state_parts, timed
from tessera.interp.target.csl.sema.registry import NativeModule
from tessera.interp.target.csl.values import DIRECTIONS, NativeFunction, Value

Members = dict[str, Value]


def _module(name: str, members: Members) -> Value:
    return Value(t.MODULE, NativeModule(f"<tile_config>.{name}", members))


def sides(given: Any) -> tuple[str, ...]:
    """The names of one direction, or of an array or tuple of them."""
    if given is None:
        return ()
    if isinstance(given, dict):
        return tuple(DIRECTIONS[int(i)] for i in given.values())
    return tuple(DIRECTIONS[int(i)] for i in given) if hasattr(given, "__len__") else (DIRECTIONS[int(given)],)


def _enum(name: str, *members: str) -> t.Enum:
    return t.Enum(name, t.U16, tuple((member, i) for i, member in enumerate(members)), "<tile_config>")


FABRIC_IO = _enum("fabric_io", *(f"{way}_{side}" for way in ("TX", "RX") for side in DIRECTIONS))
POP_MODE = _enum("pop_mode", "NO_POP", "ALWAYS_POP", "POP_ON_ADVANCE")
RING_MODE = _enum("ring_mode", "NO_RING_MODE", "RING_MODE")
SWITCH_STATUS = _enum("switch_status", "CLEAR_CURRENT_POS")
SWITCH_POS = _enum("switch_pos", "POS1", "POS2", "POS3")
SWITCH_SELECT = _enum("switch_select", "INPUT", "OUTPUT")


def _types(*enums: t.Enum) -> Members:
    return {enum.name: Value(t.TYPE, enum) for enum in enums}


def _address(name: str, *more: None) -> Value:
    """The address of a color's configuration is its number: the functions here take either."""
    run = NativeFunction(name, lambda pe, color, *kind: color, cycles=CYCLES)
    return Value(t.Fn("", (t.COLOR, *more), t.U16), run)


def _color_config() -> Members:
    def reset(pe: Any, color: int, routes: dict[str, Any]) -> None:
        unknown = set(routes) - {"rx", "tx"}
        if unknown:
            raise CslFault(f"reset_routes: unexpected field '{unknown.pop()}'")
        pe.fabric.reset_routes(color, sides(routes.get("rx")), sides(routes.get("tx")))

    def changer(name: str, wanted: bool | None) -> Value:
        def run(pe: Any, color: int, way: int) -> None:
            incoming, side = divmod(way, len(DIRECTIONS))
            pe.fabric.set_side(color, "rx" if incoming else "tx", DIRECTIONS[side], wanted)

        return timed(name, (None, FABRIC_IO), t.VOID, run)

    return {
        **_types(FABRIC_IO),
        "get_color_config_addr": _address("get_color_config_addr"),
        "reset_routes": timed("reset_routes", (None, None), t.VOID, reset),
        "set_io_direction": changer("set_io_direction", True),
        "clear_io_direction": changer("clear_io_direction", False),
        "toggle_io_direction": changer("toggle_io_direction", None),
    }


def _positions() -> list[Value]:
    """What sets switch positions 1 to 3, by number or by name."""

    def one(name: str, number: int, *ways: str) -> Value:
        def run(pe: Any, color: int, *given: int) -> None:
            pe.fabric.set_switch(color, number, **{w: DIRECTIONS[d] for w, d in zip(ways, given, strict=True)})

        return timed(name, (None, *(t.DIRECTION,) * len(ways)), t.VOID, run)

    def any_side(pe: Any, position: int, color: int, direction: int, outgoing: int) -> None:
        pe.fabric.set_switch(color, position + 1, **{"tx" if outgoing else "rx": DIRECTIONS[direction]})

    def both(pe: Any, position: int, color: int, rx: int, tx: int) -> None:
        pe.fabric.set_switch(color, position + 1, DIRECTIONS[rx], DIRECTIONS[tx])

    rows = [
        one(f"set_{''.join(ways)}_switch_pos{number}", number, *ways)
        for number in (1, 2, 3)
        for ways in (("rx",), ("tx",), ("rx", "tx"))
    ]
    kinds = (SWITCH_POS, None, t.DIRECTION)
    rows.append(timed("set_switch_pos", (*kinds, SWITCH_SELECT), t.VOID, any_side))
    rows.append(timed("set_rxtx_switch_pos", (*kinds, t.DIRECTION), t.VOID, both))
    return rows


def _switch_config() -> Members:
    def plain(name: str, run: Callable[..., None], *kinds: t.Type) -> Value:
        return timed(name, (None, *kinds), t.VOID, run)

    modes = ("no_pop", "always_pop", "pop_on_advance")
    rows = [
        *_positions(),
        plain("clear_current_position", lambda pe, c: pe.fabric.set_position(c, 0)),
        plain("set_current_switch_position", lambda pe, c, place: pe.fabric.set_position(c, place), t.U16),
        plain("set_invalid_for_all_switch_positions", lambda pe, c: pe.fabric.invalidate_positions(c)),
        plain("set_ring_mode", lambda pe, c, mode: pe.fabric.set_ring(c, bool(mode)), RING_MODE),
        plain("set_pop_mode", lambda pe, c, mode: pe.fabric.set_pop_mode(c, modes[mode]), POP_MODE),
    ]
    return {
        **_types(POP_MODE, RING_MODE, SWITCH_STATUS, SWITCH_POS, SWITCH_SELECT),
        "get_color_config_addr": _address("get_color_config_addr"),
        "get_switch_config_addr": _address("get_switch_config_addr", None),
        **{row.data.name: row for row in rows},
    }


def _filters() -> Members:
    def setter(name: str, key: str) -> Value:
        def run(pe: Any, number: int, value: int) -> None:
            pe.fabric.set_filter(number, **{key: value})

        return timed(name, (None, t.U16), t.VOID, run)

    return {
        "set_counter": setter("set_counter", "counter"),
        "set_active_limit": setter("set_active_limit", "limit"),
        "set_max_counter": setter("set_max_counter", "max_counter"),
    }


def _teardown() -> Members:
    def pending(pe: Any) -> int:
        return sum(1 << color for color in pe.fabric.teardown_pending())

    def is_pending(pe: Any, value: int, color: int) -> bool:
        return bool(value >> color & 1)

    asked = NativeFunction("is_pending", is_pending, cycles=4)
    return {
        "exit": timed("exit", (t.COLOR,), t.VOID, lambda pe, color: pe.fabric.teardown_exit(color)),
        "get_pending": timed("get_pending", (), t.U32, pending),
        "is_pending": Value(t.Fn("", (t.U32, t.COLOR), t.BOOL), asked),
    }


def tile_config_module(unit: Any, params: Members) -> Members:
    """The parts of `<tile_config>`."""
    parts = {
        "color_config": _color_config(),
        "switch_config": _switch_config(),
        "filters": _filters(),
        "teardown": _teardown(),
        **state_parts(),
    }
    return {**machine(unit), **{name: _module(name, members) for name, members in parts.items()}}

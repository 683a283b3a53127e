"""The library `<tile_config>`: routes, switches, filters and teardown of a PE, changed while it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tessera.interp.target.csl import types as t
from tessera.interp.target.csl.faults import CslFault
from tessera.interp.target.csl.sema.registry import NativeModule
from tessera.interp.target.csl.values import DIRECTIONS, NativeFunction, Value

Members = dict[str, Value]
_CYCLES = 8


def _function(name: str, params: tuple[t.Type | None, ...], result: t.Type, run: Callable[..., Any]) -> Value:
    return Value(t.Fn("", params, result), NativeFunction(name, run, cycles=_CYCLES, live=True))


def _module(name: str, members: Members) -> Value:
    return Value(t.MODULE, NativeModule(f"<tile_config>.{name}", members))


def sides(given: Any) -> tuple[str, ...]:
    """The names of one direction, or of an array or tuple of them."""
    if given is None:
        return ()
    if isinstance(given, dict):
        return tuple(DIRECTIONS[int(i)] for i in given.values())
    return tuple(DIRECTIONS[int(i)] for i in given) if hasattr(given, "__len__") else (DIRECTIONS[int(given)],)


def _color_config() -> Members:
    def reset(pe: Any, color: int, routes: dict[str, Any]) -> None:
        unknown = set(routes) - {"rx", "tx"}
        if unknown:
            raise CslFault(f"reset_routes: unexpected field '{unknown.pop()}'")
        pe.fabric.reset_routes(color, sides(routes.get("rx")), sides(routes.get("tx")))

    def address(pe: Any, color: int) -> int:
        return color

    known = NativeFunction("get_color_config_addr", address, cycles=_CYCLES)
    return {
        "get_color_config_addr": Value(t.Fn("", (t.COLOR,), t.U16), known),
        "reset_routes": _function("reset_routes", (t.U16, None), t.VOID, reset),
    }


def _switch_config() -> Members:
    def setter(number: int, side: str) -> Value:
        def run(pe: Any, color: int, direction: int) -> None:
            pe.fabric.set_switch(color, number, **{side: DIRECTIONS[direction]})

        return _function(f"set_{side}_switch_pos{number}", (t.COLOR, t.DIRECTION), t.VOID, run)

    def plain(name: str, run: Callable[[Any, int], None]) -> Value:
        return _function(name, (t.COLOR,), t.VOID, run)

    rows = [setter(number, side) for number in (1, 2, 3) for side in ("rx", "tx")]
    rows += [
        plain("clear_current_position", lambda pe, c: pe.fabric.set_position(c, 0)),
        plain("set_invalid_for_all_switch_positions", lambda pe, c: pe.fabric.invalidate_positions(c)),
        plain("set_ring_mode", lambda pe, c: pe.fabric.set_ring(c, True)),
        plain("clear_ring_mode", lambda pe, c: pe.fabric.set_ring(c, False)),
        plain("set_pop_mode_always_pop", lambda pe, c: pe.fabric.set_pop_mode(c, "always_pop")),
        plain("set_pop_mode_pop_on_advance", lambda pe, c: pe.fabric.set_pop_mode(c, "pop_on_advance")),
        plain("clear_pop_mode", lambda pe, c: pe.fabric.set_pop_mode(c, "no_pop")),
    ]
    return {row.data.name: row for row in rows}


def _filters() -> Members:
    def setter(name: str, key: str) -> Value:
        def run(pe: Any, color: int, value: int) -> None:
            pe.fabric.set_filter(color, **{key: value})

        return _function(name, (t.COLOR, t.U16), t.VOID, run)

    return {
        "set_counter": setter("set_counter", "counter"),
        "set_active_limit": setter("set_active_limit", "limit"),
        "set_max_counter": setter("set_max_counter", "max_counter"),
    }


def _teardown() -> Members:
    return {
        "exit": _function("exit", (t.COLOR,), t.VOID, lambda pe, color: pe.fabric.teardown_exit(color)),
        "is_pending": _function(
            "is_pending", (t.COLOR,), t.BOOL, lambda pe, color: color in pe.fabric.teardown_pending()
        ),
    }


def _queues() -> Members:
    def status(name: str, call: str, outgoing: bool) -> Value:
        def run(pe: Any, queue: int) -> bool:
            table = pe.out_colors if outgoing else pe.in_colors
            if queue not in table:
                raise CslFault(f"{name}: queue {queue} is not initialized")
            return bool(getattr(pe.fabric, call)(table[queue]))

        return _function(name, (None,), t.BOOL, run)

    return {
        "is_empty": status("is_empty", "input_empty", False),
        "is_full": status("is_full", "input_full", False),
        "is_output_empty": status("is_output_empty", "output_empty", True),
        "is_output_full": status("is_output_full", "output_full", True),
    }


def _queue_changes() -> dict[str, Members]:
    """Queues of WSE-3 that get other colors, and the state that `@queue_flush` leaves."""

    def leave(pe: Any, queue: int) -> None:
        for side in ("in", "out"):
            pe.leave_flush(side, queue)

    def take(pe: Any, queue: int, color: int, filtered: bool) -> None:
        pe.rebind("in", queue, color)

    return {
        "input_queue_config": {
            "encode_input_queue": _function("encode_input_queue", (None, None, t.BOOL), t.VOID, take)
        },
        "output_queue_config": {
            "encode_output_queue": _function(
                "encode_output_queue", (None, None), t.VOID, lambda pe, queue, color: pe.rebind("out", queue, color)
            )
        },
        "queue_flush": {"exit": _function("exit", (None,), t.VOID, leave)},
    }


def tile_config_module(unit: Any, params: Members) -> Members:
    """The parts of `<tile_config>`."""
    return {
        "color_config": _module("color_config", _color_config()),
        "switch_config": _module("switch_config", _switch_config()),
        "filters": _module("filters", _filters()),
        "teardown": _module("teardown", _teardown()),
        "queue_status": _module("queue_status", _queues()),
        **{name: _module(name, members) for name, members in _queue_changes().items()},
    }

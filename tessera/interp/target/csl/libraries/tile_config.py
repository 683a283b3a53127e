"""The library `<tile_config>`: routes, switches, filters, teardown, queues and task priorities, changed at run time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tessera.interp.target.csl.cost_model import COSTS
from tessera.interp.target.csl.fabric.routing import REGISTER_ADDRESSES
from tessera.interp.target.csl.pe.processing_element import leave_flush, rebind_queue
from tessera.interp.target.csl.sema import types as t
from tessera.interp.target.csl.sema.compilation_unit import NativeModule
from tessera.interp.target.csl.sema.values import DIRECTIONS, ComptimeValue, NativeFunction
from tessera.interp.target.csl.text.diagnostics import CslFault

# Submodules of `<tile_config>` for the state of a PE: queues, task priorities, coordinates.


LibraryMembers = dict[str, ComptimeValue]
QUEUE_COUNT = 8


def make_timed(
    name: str, params: tuple[t.CslType | None, ...], result: t.CslType, run: Callable[..., Any]
) -> ComptimeValue:
    """A function of the router or the queues that takes effect at the PE's present cycle, not at the start of the task,
    because it affects wavelets in transit.
    """

    def in_time(pe: Any, *args: Any) -> Iterator[Any]:
        yield max(pe.clock, pe.events.now)
        return run(pe, *args)

    return ComptimeValue(
        t.CslFunctionType("", params, result),
        NativeFunction(name, in_time, waits=True, cycles=COSTS.configuration, live=True),
    )


_QUEUE_STATUS = t.CslStruct("status", (("empty", t.U8), ("full", t.U8)), identity="<tile_config>")


def _queue_bits(pe: Any, side: str) -> tuple[int, int]:
    """The empty and the full queues of a side, one bit per queue; a queue without a color is empty."""
    colors = pe.in_colors if side == "input" else pe.out_colors
    empty, full = (1 << QUEUE_COUNT) - 1, 0
    for number, color in colors.items():
        if not getattr(pe.fabric, f"{side}_empty")(color):
            empty &= ~(1 << number)
        full |= bool(getattr(pe.fabric, f"{side}_full")(color)) << number
    return empty, full


def _make_queue_status(side: str, queue: t.CslType) -> LibraryMembers:
    def get(pe: Any) -> Any:
        return np.array([_queue_bits(pe, side)], _QUEUE_STATUS.dtype)

    def raw(pe: Any) -> int:
        empty, full = _queue_bits(pe, side)
        return full << QUEUE_COUNT | empty

    def asked(name: str, field: str, ask: Callable[[int, int], bool], *kinds: t.CslType) -> ComptimeValue:
        run = NativeFunction(name, lambda pe, s, q=0: ask(int(s[field][0]), q), cycles=4, live=True)
        return ComptimeValue(t.CslFunctionType("", (_QUEUE_STATUS, *kinds), t.BOOL), run)

    every = (1 << QUEUE_COUNT) - 1
    rows = [
        make_timed("get", (), _QUEUE_STATUS, get),
        make_timed("get_raw", (), t.U16, raw),
        *(asked(f"is_{x}", x, lambda bits, q: bool(bits >> q & 1), queue) for x in ("empty", "full")),
        *(asked(f"all_{x}", x, lambda bits, q: bits == every) for x in ("empty", "full")),
        *(asked(f"none_{x}", x, lambda bits, q: not bits) for x in ("empty", "full")),
    ]
    return {"status": ComptimeValue(t.TYPE, _QUEUE_STATUS), **{row.data.name: row for row in rows}}


def _make_single_queue_status() -> LibraryMembers:
    """The status of one queue by its number."""

    def status(name: str, call: str, outgoing: bool) -> ComptimeValue:
        def run(pe: Any, queue: int) -> bool:
            table = pe.out_colors if outgoing else pe.in_colors
            if queue not in table:
                raise CslFault(f"{name}: queue {queue} is not initialized")
            return bool(getattr(pe.fabric, call)(table[queue]))

        return make_timed(name, (None,), t.BOOL, run)

    return {
        "is_empty": status("is_empty", "input_empty", False),
        "is_full": status("is_full", "input_full", False),
        "is_output_empty": status("is_output_empty", "output_empty", True),
        "is_output_full": status("is_output_full", "output_full", True),
    }


def _make_queue_flush() -> LibraryMembers:
    def leave(pe: Any, queue: int) -> None:
        for side in ("in", "out"):
            leave_flush(pe, side, queue)

    def status(pe: Any, side: str) -> int:
        return sum(1 << number for way, number in pe.flushed if way == side)

    asked = NativeFunction("is_flushed", lambda pe, value, queue: bool(value >> queue & 1), cycles=4)
    return {
        "exit": make_timed("exit", (None,), t.VOID, leave),
        "iq_status": make_timed("iq_status", (), t.U16, lambda pe: status(pe, "in")),
        "oq_status": make_timed("oq_status", (), t.U16, lambda pe: status(pe, "out")),
        "is_flushed": ComptimeValue(t.CslFunctionType("", (t.U16, None), t.BOOL), asked),
    }


def _make_queue_configs() -> dict[str, LibraryMembers]:
    """Queues of WSE-3 whose colors the program changes."""

    def take(pe: Any, queue: int, color: int, filtered: bool) -> None:
        rebind_queue(pe, "in", queue, color)

    def give(pe: Any, queue: int, color: int) -> None:
        rebind_queue(pe, "out", queue, color)

    incoming, outgoing = "encode_input_queue", "encode_output_queue"
    return {
        "input_queue_config": {incoming: make_timed(incoming, (None, None, t.BOOL), t.VOID, take)},
        "output_queue_config": {outgoing: make_timed(outgoing, (None, None), t.VOID, give)},
    }


_TASK_LEVEL = t.CslEnum("level", t.U16, (("LOW", 0), ("HIGH", 1)), "<tile_config>")
_MAIN_THREAD_LEVEL = t.CslEnum(
    "level", t.U16, tuple((n, i) for i, n in enumerate(("MEDIUM_LOW", "MEDIUM", "MEDIUM_HIGH", "HIGH"))), "main thread"
)


def _make_preloadable(name: str, params: tuple[t.CslType | None, ...], run: Callable[..., Any]) -> ComptimeValue:
    """A function that a comptime block may also call; it then takes effect before the program starts."""
    return ComptimeValue(
        t.CslFunctionType("", params, t.VOID), NativeFunction(name, run, cycles=4, live=True, preloadable=True)
    )


def _make_priorities() -> dict[str, LibraryMembers]:
    def update(pe: Any, number: int, level: int) -> None:
        (pe.high_priority.add if level else pe.high_priority.discard)(number)

    return {
        "task_priority": {
            "level": ComptimeValue(t.TYPE, _TASK_LEVEL),
            "update_task_priority": _make_preloadable("update_task_priority", (None, _TASK_LEVEL), update),
            "set_task_priority": _make_preloadable("set_task_priority", (None,), lambda pe, n: update(pe, n, 1)),
            "clear_task_priority": _make_preloadable("clear_task_priority", (None,), lambda pe, n: update(pe, n, 0)),
        },
        # Operations in memory do not compete with microthreads in this simulator: the level has no effect.
        "main_thread_priority": {
            "level": ComptimeValue(t.TYPE, _MAIN_THREAD_LEVEL),
            "update_main_thread_priority": _make_preloadable(
                "update_main_thread_priority", (_MAIN_THREAD_LEVEL,), lambda pe, level: None
            ),
        },
    }


def make_machine_members(unit: Any) -> LibraryMembers:
    """Constants of the machine, and the coordinates of the PE."""
    coordinate = t.CslEnum("fabric_coord", t.U16, (("X", 0), ("Y", 1)), "<tile_config>")
    where = NativeFunction("get_fabric_coord", lambda pe, axis: (pe.x, pe.y)[axis], cycles=4, live=True)
    return {
        "reg_type": ComptimeValue(t.TYPE, t.U16),
        "double_reg_type": ComptimeValue(t.TYPE, t.U32),
        "target_name": ComptimeValue(t.STRING, unit.options.arch),
        "word_size": ComptimeValue(t.COMPTIME_INT, 2),
        "fabric_coord": ComptimeValue(t.TYPE, coordinate),
        "get_fabric_coord": ComptimeValue(t.CslFunctionType("", (coordinate,), t.U16), where),
    }


def make_target_members(unit: Any) -> LibraryMembers:
    """The submodule `target` of WSE-2: the sizes of registers, and the byte addresses of those that are simulated."""
    addresses = {name: ComptimeValue(t.COMPTIME_INT, 2 * word) for name, word in REGISTER_ADDRESSES.items()}
    return {
        "word_size": ComptimeValue(t.COMPTIME_INT, 2),
        "tsc_size_words": ComptimeValue(t.COMPTIME_INT, 3),
        "reg_type": ComptimeValue(t.TYPE, t.U16),
        "double_reg_type": ComptimeValue(t.TYPE, t.U32),
        "addresses": ComptimeValue(t.MODULE, NativeModule("<tile_config>.target.addresses", addresses)),
    }


def make_state_submodules() -> dict[str, LibraryMembers]:
    """The submodules by name."""
    return {
        "queue_status": _make_single_queue_status(),
        "input_queue_status": _make_queue_status("input", t.INPUT_QUEUE),
        "output_queue_status": _make_queue_status("output", t.OUTPUT_QUEUE),
        "queue_flush": _make_queue_flush(),
        **_make_queue_configs(),
        **_make_priorities(),
    }


# Submodules of `<tile_config>` for the router: routes, switches, filters and teardown.


SubmoduleMembers = dict[str, ComptimeValue]


def _make_submodule(name: str, members: SubmoduleMembers) -> ComptimeValue:
    return ComptimeValue(t.MODULE, NativeModule(f"<tile_config>.{name}", members))


def list_directions(given: Any) -> tuple[str, ...]:
    """The names in one direction, or in an array or tuple of directions."""
    if given is None:
        return ()
    if isinstance(given, dict):
        return tuple(DIRECTIONS[int(i)] for i in given.values())
    return tuple(DIRECTIONS[int(i)] for i in given) if hasattr(given, "__len__") else (DIRECTIONS[int(given)],)


def _make_enum(name: str, *members: str) -> t.CslEnum:
    return t.CslEnum(name, t.U16, tuple((member, i) for i, member in enumerate(members)), "<tile_config>")


FABRIC_IO = _make_enum("fabric_io", *(f"{way}_{side}" for way in ("TX", "RX") for side in DIRECTIONS))
POP_MODE = _make_enum("pop_mode", "NO_POP", "ALWAYS_POP", "POP_ON_ADVANCE")
RING_MODE = _make_enum("ring_mode", "NO_RING_MODE", "RING_MODE")
SWITCH_STATUS = _make_enum("switch_status", "CLEAR_CURRENT_POS")
SWITCH_POS = _make_enum("switch_pos", "POS1", "POS2", "POS3")
SWITCH_SELECT = _make_enum("switch_select", "INPUT", "OUTPUT")


def _make_types(*enums: t.CslEnum) -> SubmoduleMembers:
    return {enum.name: ComptimeValue(t.TYPE, enum) for enum in enums}


def _make_address(name: str, *more: None) -> ComptimeValue:
    """The address of a color's configuration is its number: the functions accept both."""
    run = NativeFunction(name, lambda pe, color, *kind: color, cycles=COSTS.configuration)
    return ComptimeValue(t.CslFunctionType("", (t.COLOR, *more), t.U16), run)


def _make_color_config() -> SubmoduleMembers:
    def reset(pe: Any, color: int, routes: dict[str, Any]) -> None:
        unknown = set(routes) - {"rx", "tx"}
        if unknown:
            raise CslFault(f"reset_routes: unexpected field '{unknown.pop()}'")
        pe.fabric.reset_routes(color, list_directions(routes.get("rx")), list_directions(routes.get("tx")))

    def changer(name: str, wanted: bool | None) -> ComptimeValue:
        def run(pe: Any, color: int, way: int) -> None:
            incoming, side = divmod(way, len(DIRECTIONS))
            pe.fabric.set_side(color, "rx" if incoming else "tx", DIRECTIONS[side], wanted)

        return make_timed(name, (None, FABRIC_IO), t.VOID, run)

    return {
        **_make_types(FABRIC_IO),
        "get_color_config_addr": _make_address("get_color_config_addr"),
        "reset_routes": make_timed("reset_routes", (None, None), t.VOID, reset),
        "set_io_direction": changer("set_io_direction", True),
        "clear_io_direction": changer("clear_io_direction", False),
        "toggle_io_direction": changer("toggle_io_direction", None),
    }


def _make_position_setters() -> list[ComptimeValue]:
    """The setters of switch positions 1 to 3, by number or by name."""

    def one(name: str, number: int, *ways: str) -> ComptimeValue:
        def run(pe: Any, color: int, *given: int) -> None:
            pe.fabric.set_switch(color, number, **{w: DIRECTIONS[d] for w, d in zip(ways, given, strict=True)})

        return make_timed(name, (None, *(t.DIRECTION,) * len(ways)), t.VOID, run)

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
    rows.append(make_timed("set_switch_pos", (*kinds, SWITCH_SELECT), t.VOID, any_side))
    rows.append(make_timed("set_rxtx_switch_pos", (*kinds, t.DIRECTION), t.VOID, both))
    return rows


def _make_switch_config() -> SubmoduleMembers:
    def plain(name: str, run: Callable[..., None], *kinds: t.CslType) -> ComptimeValue:
        return make_timed(name, (None, *kinds), t.VOID, run)

    modes = ("no_pop", "always_pop", "pop_on_advance")
    rows = [
        *_make_position_setters(),
        plain("clear_current_position", lambda pe, c: pe.fabric.set_position(c, 0)),
        plain("set_current_switch_position", lambda pe, c, place: pe.fabric.set_position(c, place), t.U16),
        plain("set_invalid_for_all_switch_positions", lambda pe, c: pe.fabric.invalidate_positions(c)),
        plain("set_ring_mode", lambda pe, c, mode: pe.fabric.set_ring(c, bool(mode)), RING_MODE),
        plain("set_pop_mode", lambda pe, c, mode: pe.fabric.set_pop_mode(c, modes[mode]), POP_MODE),
    ]
    return {
        **_make_types(POP_MODE, RING_MODE, SWITCH_STATUS, SWITCH_POS, SWITCH_SELECT),
        "get_color_config_addr": _make_address("get_color_config_addr"),
        "get_switch_config_addr": _make_address("get_switch_config_addr", None),
        **{row.data.name: row for row in rows},
    }


def _make_filters() -> SubmoduleMembers:
    def setter(name: str, key: str) -> ComptimeValue:
        def run(pe: Any, number: int, value: int) -> None:
            pe.fabric.set_filter(number, **{key: value})

        return make_timed(name, (None, t.U16), t.VOID, run)

    return {
        "set_counter": setter("set_counter", "counter"),
        "set_active_limit": setter("set_active_limit", "limit"),
        "set_max_counter": setter("set_max_counter", "max_counter"),
    }


def _make_teardown() -> SubmoduleMembers:
    def pending(pe: Any) -> int:
        return sum(1 << color for color in pe.fabric.teardown_pending())

    def is_pending(pe: Any, value: int, color: int) -> bool:
        return bool(value >> color & 1)

    asked = NativeFunction("is_pending", is_pending, cycles=4)
    return {
        "exit": make_timed("exit", (t.COLOR,), t.VOID, lambda pe, color: pe.fabric.teardown_exit(color)),
        "get_pending": make_timed("get_pending", (), t.U32, pending),
        "is_pending": ComptimeValue(t.CslFunctionType("", (t.U32, t.COLOR), t.BOOL), asked),
    }


def make_tile_config(unit: Any, params: SubmoduleMembers) -> SubmoduleMembers:
    """The submodules of `<tile_config>`."""
    parts = {
        "color_config": _make_color_config(),
        "switch_config": _make_switch_config(),
        "filters": _make_filters(),
        "teardown": _make_teardown(),
        **make_state_submodules(),
    }
    if unit.options.arch == "wse2":
        parts["target"] = make_target_members(unit)
        parts["addresses"] = parts["target"]["addresses"].data.members
    return {**make_machine_members(unit), **{name: _make_submodule(name, members) for name, members in parts.items()}}

"""The parts of `<tile_config>` that concern the state of a PE: its queues, the priorities of its tasks, its place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tessera.interp.target.csl import types as t
from tessera.interp.target.csl.faults import CslFault
from tessera.interp.target.csl.values import NativeFunction, Value

Members = dict[str, Value]
CYCLES = 8
QUEUES = 8


def timed(name: str, params: tuple[t.Type | None, ...], result: t.Type, run: Callable[..., Any]) -> Value:
    """A function of the router or the queues: it takes effect when the code before it has run, not when the task
    begins, since words on their way meet the change."""

    def in_time(pe: Any, *args: Any) -> Iterator[Any]:
        yield max(pe.clock, pe.events.now)
        return run(pe, *args)

    return Value(t.Fn("", params, result), NativeFunction(name, in_time, waits=True, cycles=CYCLES, live=True))


_STATUS = t.Struct("status", (("empty", t.U8), ("full", t.U8)), identity="<tile_config>")


def _bits(pe: Any, side: str) -> tuple[int, int]:
    """Which queues of a side are empty and which are full, one bit for each; one without a color is empty."""
    colors = pe.in_colors if side == "input" else pe.out_colors
    empty, full = (1 << QUEUES) - 1, 0
    for number, color in colors.items():
        if not getattr(pe.fabric, f"{side}_empty")(color):
            empty &= ~(1 << number)
        full |= bool(getattr(pe.fabric, f"{side}_full")(color)) << number
    return empty, full


def _queue_status(side: str, queue: t.Type) -> Members:
    def get(pe: Any) -> Any:
        return np.array([_bits(pe, side)], _STATUS.dtype)

    def raw(pe: Any) -> int:
        empty, full = _bits(pe, side)
        return full << QUEUES | empty

    def asked(name: str, field: str, ask: Callable[[int, int], bool], *kinds: t.Type) -> Value:
        run = NativeFunction(name, lambda pe, s, q=0: ask(int(s[field][0]), q), cycles=4, live=True)
        return Value(t.Fn("", (_STATUS, *kinds), t.BOOL), run)

    every = (1 << QUEUES) - 1
    rows = [
        timed("get", (), _STATUS, get),
        timed("get_raw", (), t.U16, raw),
        *(asked(f"is_{x}", x, lambda bits, q: bool(bits >> q & 1), queue) for x in ("empty", "full")),
        *(asked(f"all_{x}", x, lambda bits, q: bits == every) for x in ("empty", "full")),
        *(asked(f"none_{x}", x, lambda bits, q: not bits) for x in ("empty", "full")),
    ]
    return {"status": Value(t.TYPE, _STATUS), **{row.data.name: row for row in rows}}


def _single_queues() -> Members:
    """One queue at a time, by its number."""

    def status(name: str, call: str, outgoing: bool) -> Value:
        def run(pe: Any, queue: int) -> bool:
            table = pe.out_colors if outgoing else pe.in_colors
            if queue not in table:
                raise CslFault(f"{name}: queue {queue} is not initialized")
            return bool(getattr(pe.fabric, call)(table[queue]))

        return timed(name, (None,), t.BOOL, run)

    return {
        "is_empty": status("is_empty", "input_empty", False),
        "is_full": status("is_full", "input_full", False),
        "is_output_empty": status("is_output_empty", "output_empty", True),
        "is_output_full": status("is_output_full", "output_full", True),
    }


def _flush() -> Members:
    def leave(pe: Any, queue: int) -> None:
        for side in ("in", "out"):
            pe.leave_flush(side, queue)

    def status(pe: Any, side: str) -> int:
        return sum(1 << number for way, number in pe.flushed if way == side)

    asked = NativeFunction("is_flushed", lambda pe, value, queue: bool(value >> queue & 1), cycles=4)
    return {
        "exit": timed("exit", (None,), t.VOID, leave),
        "iq_status": timed("iq_status", (), t.U16, lambda pe: status(pe, "in")),
        "oq_status": timed("oq_status", (), t.U16, lambda pe: status(pe, "out")),
        "is_flushed": Value(t.Fn("", (t.U16, None), t.BOOL), asked),
    }


def _queue_colors() -> dict[str, Members]:
    """Queues of WSE-3 that get other colors."""

    def take(pe: Any, queue: int, color: int, filtered: bool) -> None:
        pe.rebind("in", queue, color)

    def give(pe: Any, queue: int, color: int) -> None:
        pe.rebind("out", queue, color)

    incoming, outgoing = "encode_input_queue", "encode_output_queue"
    return {
        "input_queue_config": {incoming: timed(incoming, (None, None, t.BOOL), t.VOID, take)},
        "output_queue_config": {outgoing: timed(outgoing, (None, None), t.VOID, give)},
    }


_LEVEL = t.Enum("level", t.U16, (("LOW", 0), ("HIGH", 1)), "<tile_config>")
_MAIN = t.Enum(
    "level", t.U16, tuple((n, i) for i, n in enumerate(("MEDIUM_LOW", "MEDIUM", "MEDIUM_HIGH", "HIGH"))), "main thread"
)


def _early(name: str, params: tuple[t.Type | None, ...], run: Callable[..., Any]) -> Value:
    """A function that may also be called at compile time, and then takes effect before the program begins."""
    return Value(t.Fn("", params, t.VOID), NativeFunction(name, run, cycles=4, live=True, early=True))


def _priorities() -> dict[str, Members]:
    def update(pe: Any, number: int, level: int) -> None:
        (pe.preferred.add if level else pe.preferred.discard)(number)

    return {
        "task_priority": {
            "level": Value(t.TYPE, _LEVEL),
            "update_task_priority": _early("update_task_priority", (None, _LEVEL), update),
            "set_task_priority": _early("set_task_priority", (None,), lambda pe, n: update(pe, n, 1)),
            "clear_task_priority": _early("clear_task_priority", (None,), lambda pe, n: update(pe, n, 0)),
        },
        # Threads do not compete for a PE in this simulator, so there is nothing to prefer.
        "main_thread_priority": {
            "level": Value(t.TYPE, _MAIN),
            "update_main_thread_priority": _early("update_main_thread_priority", (_MAIN,), lambda pe, level: None),
        },
    }


def machine(unit: Any) -> Members:
    """Constants of the machine, and where the PE is."""
    coordinate = t.Enum("fabric_coord", t.U16, (("X", 0), ("Y", 1)), "<tile_config>")
    where = NativeFunction("get_fabric_coord", lambda pe, axis: (pe.x, pe.y)[axis], cycles=4, live=True)
    return {
        "reg_type": Value(t.TYPE, t.U16),
        "double_reg_type": Value(t.TYPE, t.U32),
        "target_name": Value(t.STRING, unit.options.arch),
        "word_size": Value(t.COMPTIME_INT, 2),
        "fabric_coord": Value(t.TYPE, coordinate),
        "get_fabric_coord": Value(t.Fn("", (coordinate,), t.U16), where),
    }


def state_parts() -> dict[str, Members]:
    """The parts by their names."""
    return {
        "queue_status": _single_queues(),
        "input_queue_status": _queue_status("input", t.INPUT_QUEUE),
        "output_queue_status": _queue_status("output", t.OUTPUT_QUEUE),
        "queue_flush": _flush(),
        **_queue_colors(),
        **_priorities(),
    }

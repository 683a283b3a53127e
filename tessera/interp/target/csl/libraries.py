"""The libraries of the language: the table of factories, and the small ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tessera.interp.target.csl import libraries_collectives, libraries_memcpy, libraries_tally
from tessera.interp.target.csl import types as t
from tessera.interp.target.csl.faults import CslError, CslFault
from tessera.interp.target.csl.libraries_math import math_module
from tessera.interp.target.csl.libraries_tile import tile_config_module
from tessera.interp.target.csl.sema.registry import LIBRARIES, library
from tessera.interp.target.csl.values import DIRECTIONS, NativeFunction, Value
from tessera.interp.target.csl.wavelets import NO_ENTRY, Opcode, encode

Members = dict[str, Value]


def native(
    name: str,
    params: tuple[t.Type | None, ...],
    result: t.Type,
    run: Callable[..., Any],
    cycles: int = 4,
    live: bool = False,
) -> Value:
    """A library function that runs on the PE."""
    return Value(t.Fn("", params, result), NativeFunction(name, run, cycles=cycles, live=live))


@library("<layout>")
def _layout(unit: Any, params: Members) -> Members:
    """Coordinates of the PE in the rectangle."""

    def coordinate(name: str, axis: int) -> Value:
        def run(pe: Any) -> int:
            if pe is None:
                return unit.coordinate(axis)
            return (pe.x, pe.y)[axis]

        return native(name, (), t.U16, run, 2)

    return {"get_x_coord": coordinate("get_x_coord", 0), "get_y_coord": coordinate("get_y_coord", 1)}


_TURNS = {"WEST": "NORTH", "NORTH": "EAST", "EAST": "SOUTH", "SOUTH": "WEST", "RAMP": "RAMP"}
_FLIPS = {"WEST": "EAST", "EAST": "WEST", "NORTH": "SOUTH", "SOUTH": "NORTH", "RAMP": "RAMP"}


@library("<directions>")
def _directions(unit: Any, params: Members) -> Members:
    """Directions turned around, and as the bits of a router's register (see `placement.unpacked`)."""

    def turned(name: str, table: dict[str, str]) -> Value:
        rows = [DIRECTIONS.index(table[d]) for d in DIRECTIONS]
        return native(name, (t.DIRECTION,), t.DIRECTION, lambda pe, d: rows[d])

    def bit(name: str, first: int) -> Value:
        return native(name, (t.DIRECTION,), t.U16, lambda pe, d: 1 << (first + int(d)))

    back = {v: k for k, v in _TURNS.items()}
    ramp = DIRECTIONS.index("RAMP")
    return {
        "TX_RAMP": Value(t.U16, 1 << ramp),
        "RX_RAMP": Value(t.U16, 1 << (5 + ramp)),
        "dirToTxBits": bit("dirToTxBits", 0),
        "dirToRxBits": bit("dirToRxBits", 5),
        "flip": turned("flip", _FLIPS),
        "rotate_clockwise": turned("rotate_clockwise", _TURNS),
        "rotate_counterclockwise": turned("rotate_counterclockwise", back),
    }


_TIMESTAMP = t.Pointee("", t.Array("", (3,), t.U16))


@library("<time>")
def _time(unit: Any, params: Members) -> Members:
    """The cycle counter of the PE, 48 bits in three words."""

    def get_timestamp(pe: Any, p: Any) -> None:
        now = pe.clock - pe.state.get("tsc", 0)
        for i in range(3):
            p.array[p.index + i] = now >> 16 * i & 0xFFFF

    def reset(pe: Any) -> None:
        pe.state["tsc"] = pe.clock

    return {
        "tsc_size_words": Value(t.COMPTIME_INT, 3),
        "enable_tsc": native("enable_tsc", (), t.VOID, lambda pe: None, live=True),
        "disable_tsc": native("disable_tsc", (), t.VOID, lambda pe: None, live=True),
        "reset_tsc_counter": native("reset_tsc_counter", (), t.VOID, reset, live=True),
        "get_timestamp": native("get_timestamp", (_TIMESTAMP,), t.VOID, get_timestamp, 6, True),
    }


def _generator(pe: Any) -> np.random.Generator:
    """The PE's random numbers: counter-based, by seed and position."""
    if "random" not in pe.state:
        pe.state["random"] = np.random.Generator(np.random.Philox(key=[0, pe.y << 16 | pe.x]))
    return pe.state["random"]


@library("<random>")
def _random(unit: Any, params: Members) -> Members:
    """Random numbers of a range."""

    def seed(pe: Any, value: int) -> None:
        pe.state["random"] = np.random.Generator(np.random.Philox(key=[value, pe.y << 16 | pe.x]))

    def floats(type_: t.Float) -> Callable[..., Any]:
        return lambda pe, low, high: type_.dtype.type(_generator(pe).uniform(float(low), float(high)))

    def whole(pe: Any, low: int, high: int) -> int:
        return int(_generator(pe).integers(low, max(high, low + 1)))

    def normal(pe: Any, mean: Any, deviation: Any) -> Any:
        return np.float32(_generator(pe).normal(float(mean), float(deviation)))

    found = {
        f"random_{x}": native(f"random_{x}", (x, x), x, floats(x) if isinstance(x, t.Float) else whole, 30, True)
        for x in (t.F16, t.F32, t.I16, t.U16, t.I32, t.U32)
    }
    found["set_global_seed"] = native("set_global_seed", (t.U32,), t.VOID, seed, live=True)
    found["random_normal_f32"] = native("random_normal_f32", (t.F32, t.F32), t.F32, normal, 60, True)
    return found


_PRINTED = (t.BOOL, t.I16, t.U16, t.I32, t.U32, t.F16, t.F32)


@library("<debug>")
def _debug(unit: Any, params: Members) -> Members:
    """Records of a run, by `key`, for the host to read."""
    if "key" not in params:
        raise CslError("<debug> needs the parameter 'key'")
    key, size = params["key"].data, int(params["buffer_size"].data) if "buffer_size" in params else 0

    def record(pe: Any, value: Any) -> None:
        rows = pe.traces.setdefault(key, [])
        if size and len(rows) >= size:
            raise CslFault(f"the trace buffer '{key}' of {size} words is full")
        rows.append(value)

    found = {f"trace_{x}": native(f"trace_{x}", (x,), t.VOID, record, 12, True) for x in _PRINTED}
    found["trace_string"] = native("trace_string", (t.STRING,), t.VOID, record, 12, True)
    found["trace_timestamp"] = native("trace_timestamp", (), t.VOID, lambda pe: record(pe, pe.clock), 16, True)
    return found


def printed(pe: Any, text: str) -> None:
    """Add text to what the PE prints; each full line goes to `pe.output`."""
    *lines, rest = (pe.state.get("line", "") + text).split("\n")
    pe.output.extend(lines)
    pe.state["line"] = rest


@library("<simprint>")
def _simprint(unit: Any, params: Members) -> Members:
    """Text in the log of the simulation."""

    def number(name: str, type_: t.Type, spell: Callable[[Any], str]) -> Value:
        return native(name, (type_,), t.VOID, lambda pe, v: printed(pe, spell(v)), live=True)

    rows = [
        number("print_string", t.STRING, str),
        number("print_bool", t.BOOL, lambda v: "true" if v else "false"),
        *(number(f"print_{x}_decimal", x, str) for x in (t.I16, t.U16, t.I32, t.U32)),
        *(number(f"print_{x}_hex", x, lambda v: f"{v:x}") for x in (t.U16, t.U32)),
        *(number(f"print_{x}", x, lambda v: f"{float(v):g}") for x in (t.F16, t.F32)),
    ]
    return {row.data.name: row for row in rows}


_OPCODE = t.Enum("opcode", t.U16, tuple((o.name, int(o)) for o in Opcode), -1)


@library("<control>")
def _control(unit: Any, params: Members) -> Members:
    """Payloads of control wavelets."""

    def single(pe: Any, command: int, ce_ignore: bool, entry: int | None, data: int) -> int:
        word = encode([(Opcode(command), bool(ce_ignore))], NO_ENTRY if entry is None else entry)
        return _with_data(word, data) if entry is not None else word

    def task(pe: Any, entry: int) -> int:
        return encode([(Opcode.NOP, False)], entry)

    return {
        "opcode": Value(t.TYPE, _OPCODE),
        "encode_single_payload": native("encode_single_payload", (_OPCODE, t.BOOL, None, t.U16), t.U32, single),
        "encode_control_task_payload": native("encode_control_task_payload", (t.CONTROL_TASK,), t.U32, task),
    }


def _with_data(word: int, data: int) -> int:
    """The payload with a task argument, which takes the place of the commands in the low half."""
    return word & ~0xFFFF | data


@library("<dsd_ops>")
def _dsd_ops(unit: Any, params: Members) -> Members:
    raise CslError("<dsd_ops> is not part of the simulator", suggestion="call the DSD builtins by name")


library("<math>")(math_module)
library("<tile_config>")(tile_config_module)
library("<memcpy/get_params>")(libraries_memcpy.get_params_module)
library("<memcpy/memcpy>")(libraries_memcpy.memcpy_module)
library("<memcpy/memcpy_switches>")(libraries_memcpy.switches_module)
library("<collectives_2d/params>")(libraries_collectives.params_module)
library("<collectives_2d/pe>")(libraries_collectives.pe_module)
library("<kernels/tally/layout>")(libraries_tally.layout_module)
library("<kernels/tally/pe>")(libraries_tally.pe_module)

__all__ = ["LIBRARIES", "library", "native"]

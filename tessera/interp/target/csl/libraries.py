"""The libraries of the language: the table of factories, and the small ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from tessera.interp.target.csl import libraries_collectives, libraries_memcpy, libraries_tally
from tessera.interp.target.csl import types as t
from tessera.interp.target.csl.faults import CslError
from tessera.interp.target.csl.libraries_math import math_module
from tessera.interp.target.csl.libraries_print import debug_module, simprint_module
from tessera.interp.target.csl.libraries_tile import tile_config_module
from tessera.interp.target.csl.sema.registry import LIBRARIES, library
from tessera.interp.target.csl.shiftregister import drawn, fraction, seeded
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
        "flip_horizontal": turned("flip_horizontal", {**_FLIPS, "NORTH": "NORTH", "SOUTH": "SOUTH"}),
        "flip_vertical": turned("flip_vertical", {**_FLIPS, "EAST": "EAST", "WEST": "WEST"}),
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


@library("<random>")
def _random(unit: Any, params: Members) -> Members:
    """Random numbers of a range, made of those of `@random16`."""

    def floats(type_: t.Type) -> Callable[..., Any]:
        return lambda pe, low, high: type_.dtype.type(float(low) + (float(high) - float(low)) * fraction(pe))

    def normal(pe: Any) -> Any:
        radius = math.sqrt(-2 * math.log(1 - fraction(pe)))
        return np.float32(radius * math.cos(2 * math.pi * fraction(pe)))

    def power(pe: Any, bits: int) -> int:
        return (drawn(pe) << 16 | drawn(pe)) & ((1 << bits) - 1)

    half = t.NAMED[unit.options.fp16_format]
    return {
        "set_global_prng_seed": native("set_global_prng_seed", (t.U32,), t.VOID, seeded, live=True),
        "random_f16": native("random_f16", (half, half), half, floats(half), 30, True),
        "random_f32": native("random_f32", (t.F32, t.F32), t.F32, floats(t.F32), 30, True),
        "random_pow_u32": native("random_pow_u32", (t.U16,), t.U32, power, 30, True),
        "random_normal_f32": native("random_normal_f32", (), t.F32, normal, 60, True),
    }


MOST = 8  # commands of a control wavelet
_OPCODE = t.Enum("opcode", t.U32, tuple((o.name, int(o)) for o in Opcode), -1)


@library("<control>")
def _control(unit: Any, params: Members) -> Members:
    """Payloads of control wavelets."""

    def single(pe: Any, command: int, ce_ignore: bool, entry: int | None, data: int) -> int:
        word = encode([(Opcode(command), bool(ce_ignore))], NO_ENTRY if entry is None else entry)
        return _with_data(word, data) if entry is not None else word

    def task(pe: Any, entry: int) -> int:
        return encode([(Opcode.NOP, False)], entry)

    def several(pe: Any, count: int, commands: Any, ignored: Any, rest: bool, entry: int | None) -> int:
        given = [(Opcode(int(c)), bool(i)) for c, i in zip(commands, ignored, strict=True)]
        given += [(Opcode.NOP, bool(rest))] * (MOST - int(count))
        return encode(given, NO_ENTRY if entry is None else entry)

    def typed(*kinds: t.Type) -> t.Type:
        count = [x.count if isinstance(x, t.Array) else -1 for x in kinds[1:3]]
        if not 0 < count[0] == count[1] <= MOST:
            raise CslError(f"a control wavelet has 1 to {MOST} commands, each with its ce_ignore")
        return t.U32

    payload = NativeFunction("encode_payload", several, result=typed)
    return {
        "MAX_CMDS": Value(t.COMPTIME_INT, MOST),
        "encode_payload": Value(t.Fn("", (t.U16, None, None, t.BOOL, None), t.U32), payload),
        "opcode": Value(t.TYPE, _OPCODE),
        "encode_single_payload": native("encode_single_payload", (_OPCODE, t.BOOL, None, t.U16), t.U32, single),
        "encode_control_task_payload": native("encode_control_task_payload", (t.CONTROL_TASK,), t.U32, task),
    }


def _with_data(word: int, data: int) -> int:
    """The payload with a task argument, which takes the place of the commands in the low half."""
    return word & ~0xFFFF | data


library("<debug>")(debug_module)
library("<simprint>")(simprint_module)
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

"""Standard libraries: `<layout>`, `<directions>`, `<time>`, `<random>`, `<control>`, and the registration of the
others."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from tessera.interp.target.csl.cost_model import COSTS
from tessera.interp.target.csl.fabric.routing import NO_ENTRY, Opcode, encode_payload
from tessera.interp.target.csl.libraries import collectives, fft, host_io
from tessera.interp.target.csl.libraries.hardware_builtins import draw_fraction, draw_random16, seed_prng
from tessera.interp.target.csl.libraries.host_io import make_debug, make_simprint
from tessera.interp.target.csl.libraries.math_functions import make_math
from tessera.interp.target.csl.libraries.message_passing import make_message_passing
from tessera.interp.target.csl.libraries.tile_config import make_tile_config
from tessera.interp.target.csl.sema import types as t
from tessera.interp.target.csl.sema.compilation_unit import LIBRARIES, register_library
from tessera.interp.target.csl.sema.values import DIRECTIONS, ComptimeValue, NativeFunction
from tessera.interp.target.csl.text.diagnostics import CslError, CslFault

Members = dict[str, ComptimeValue]


def make_native(
    name: str,
    params: tuple[t.CslType | None, ...],
    result: t.CslType,
    run: Callable[..., Any],
    cycles: int = 4,
    live: bool = False,
) -> ComptimeValue:
    """A library function that runs on the PE."""
    return ComptimeValue(t.CslFunctionType("", params, result), NativeFunction(name, run, cycles=cycles, live=live))


@register_library("<layout>")
def _make_layout(unit: Any, params: Members) -> Members:
    """The coordinates of the PE in the rectangle."""

    def coordinate(name: str, axis: int) -> ComptimeValue:
        def run(pe: Any) -> int:
            if pe is None:
                return unit.get_coordinate(axis)
            return (pe.x, pe.y)[axis]

        return make_native(name, (), t.U16, run, 2)

    return {"get_x_coord": coordinate("get_x_coord", 0), "get_y_coord": coordinate("get_y_coord", 1)}


_ROTATIONS = {"WEST": "NORTH", "NORTH": "EAST", "EAST": "SOUTH", "SOUTH": "WEST", "RAMP": "RAMP"}
_FLIPS = {"WEST": "EAST", "EAST": "WEST", "NORTH": "SOUTH", "SOUTH": "NORTH", "RAMP": "RAMP"}


@register_library("<directions>")
def _make_directions(unit: Any, params: Members) -> Members:
    """Opposite directions, and directions as bits of a router register (see `decode_route_bits`)."""

    def turned(name: str, table: dict[str, str]) -> ComptimeValue:
        rows = [DIRECTIONS.index(table[d]) for d in DIRECTIONS]
        return make_native(name, (t.DIRECTION,), t.DIRECTION, lambda pe, d: rows[d])

    def bit(name: str, first: int) -> ComptimeValue:
        return make_native(name, (t.DIRECTION,), t.U16, lambda pe, d: 1 << (first + int(d)))

    back = {v: k for k, v in _ROTATIONS.items()}
    ramp = DIRECTIONS.index("RAMP")
    return {
        "TX_RAMP": ComptimeValue(t.U16, 1 << ramp),
        "RX_RAMP": ComptimeValue(t.U16, 1 << (5 + ramp)),
        "dirToTxBits": bit("dirToTxBits", 0),
        "dirToRxBits": bit("dirToRxBits", 5),
        "flip": turned("flip", _FLIPS),
        "flip_horizontal": turned("flip_horizontal", {**_FLIPS, "NORTH": "NORTH", "SOUTH": "SOUTH"}),
        "flip_vertical": turned("flip_vertical", {**_FLIPS, "EAST": "EAST", "WEST": "WEST"}),
        "rotate_clockwise": turned("rotate_clockwise", _ROTATIONS),
        "rotate_counterclockwise": turned("rotate_counterclockwise", back),
    }


_TIMESTAMP = t.CslPointer("", t.CslArray("", (3,), t.U16))


@register_library("<time>")
def _make_time(unit: Any, params: Members) -> Members:
    """The cycle counter of the PE, 48 bits in three words."""

    def get_timestamp(pe: Any, p: Any) -> None:
        now = pe.clock - pe.state.get("tsc", 0)
        for i in range(3):
            p.array[p.index + i] = now >> 16 * i & 0xFFFF

    def enable(pe: Any) -> None:
        pe.state.setdefault("tsc", pe.clock)

    def reset(pe: Any) -> None:
        pe.state["tsc"] = pe.clock

    return {
        "tsc_size_words": ComptimeValue(t.COMPTIME_INT, 3),
        "enable_tsc": make_native("enable_tsc", (), t.VOID, enable, live=True),
        "disable_tsc": make_native("disable_tsc", (), t.VOID, lambda pe: None, live=True),
        "reset_tsc_counter": make_native("reset_tsc_counter", (), t.VOID, reset, live=True),
        "get_timestamp": make_native("get_timestamp", (_TIMESTAMP,), t.VOID, get_timestamp, COSTS.timestamp, True),
    }


@register_library("<random>")
def _make_random(unit: Any, params: Members) -> Members:
    """Random numbers in a range, derived from `@random16`."""

    def floats(type_: t.CslType) -> Callable[..., Any]:
        return lambda pe, low, high: type_.dtype.type(float(low) + (float(high) - float(low)) * draw_fraction(pe))

    def normal(pe: Any) -> Any:
        radius = math.sqrt(-2 * math.log(1 - draw_fraction(pe)))
        return np.float32(radius * math.cos(2 * math.pi * draw_fraction(pe)))

    def power(pe: Any, bits: int) -> int:
        return (draw_random16(pe) << 16 | draw_random16(pe)) & ((1 << bits) - 1)

    half = t.NAMED[unit.options.fp16_format]
    return {
        "set_global_prng_seed": make_native("set_global_prng_seed", (t.U32,), t.VOID, seed_prng, live=True),
        "random_f16": make_native("random_f16", (half, half), half, floats(half), 30, True),
        "random_f32": make_native("random_f32", (t.F32, t.F32), t.F32, floats(t.F32), 30, True),
        "random_pow_u32": make_native("random_pow_u32", (t.U16,), t.U32, power, 30, True),
        "random_normal_f32": make_native("random_normal_f32", (), t.F32, normal, 60, True),
    }


MAX_COMMANDS = 8  # commands of a control wavelet
_OPCODE = t.CslEnum("opcode", t.U32, tuple((o.name, int(o)) for o in Opcode), -1)


@register_library("<control>")
def _make_control(unit: Any, params: Members) -> Members:
    """Payloads of control wavelets."""

    def single(pe: Any, command: int, ce_ignore: bool, entry: int | None, data: int) -> int:
        if not (entry is None or isinstance(entry, int)):
            raise CslFault("the entrypoint of a control wavelet is a control_task_id, or {} for none")
        word = encode_payload([(Opcode(command), bool(ce_ignore))], NO_ENTRY if entry is None else entry)
        return _add_task_argument(word, data) if entry is not None else word

    def task(pe: Any, entry: int) -> int:
        return encode_payload([(Opcode.NOP, False)], entry)

    def several(pe: Any, count: int, commands: Any, ignored: Any, rest: bool, entry: int | None) -> int:
        opcodes = [(Opcode(int(c)), bool(i)) for c, i in zip(commands, ignored, strict=True)]
        opcodes += [(Opcode.NOP, bool(rest))] * (MAX_COMMANDS - int(count))
        return encode_payload(opcodes, NO_ENTRY if entry is None else entry)

    def typed(*kinds: t.CslType) -> t.CslType:
        count = [x.count if isinstance(x, t.CslArray) else -1 for x in kinds[1:3]]
        if not 0 < count[0] == count[1] <= MAX_COMMANDS:
            raise CslError(f"a control wavelet has 1 to {MAX_COMMANDS} commands, each with a ce_ignore")
        return t.U32

    payload = NativeFunction("encode_payload", several, result=typed)
    return {
        "MAX_CMDS": ComptimeValue(t.COMPTIME_INT, MAX_COMMANDS),
        "encode_payload": ComptimeValue(t.CslFunctionType("", (t.U16, None, None, t.BOOL, None), t.U32), payload),
        "opcode": ComptimeValue(t.TYPE, _OPCODE),
        "encode_single_payload": make_native("encode_single_payload", (_OPCODE, t.BOOL, None, t.U16), t.U32, single),
        "encode_control_task_payload": make_native("encode_control_task_payload", (t.CONTROL_TASK,), t.U32, task),
    }


def _add_task_argument(word: int, data: int) -> int:
    """The payload with a task argument in place of the commands in the low half."""
    return word & ~0xFFFF | data


register_library("<debug>")(make_debug)
register_library("<simprint>")(make_simprint)
register_library("<math>")(make_math)
register_library("<tile_config>")(make_tile_config)
register_library("<memcpy/get_params>")(host_io.make_memcpy_params)
register_library("<memcpy/memcpy>")(host_io.make_memcpy)
register_library("<memcpy_multi/get_params>")(host_io.make_early(host_io.make_memcpy_params))
register_library("<memcpy_multi/memcpy>")(host_io.make_early(host_io.make_memcpy))
register_library("<memcpy/memcpy_switches>")(host_io.make_memcpy_switches)
register_library("<message_passing>")(make_message_passing)
register_library("<collectives_2d/params>")(collectives.make_collectives_params)
register_library("<collectives_2d/pe>")(collectives.make_collectives_pe)
register_library("<kernels/fft/fft3d_layout>")(fft.make_fft_layout)
register_library("<kernels/fft/fft3d>")(fft.make_unpublished("fft3d"))
register_library("<kernels/fft/get_params>")(fft.make_unpublished("get_params"))
register_library(fft.PE_LIBRARY)(fft.make_fft_pe)
register_library("<kernels/tally/layout>")(collectives.make_tally_layout)
register_library("<kernels/tally/pe>")(collectives.make_tally_pe)

__all__ = ["LIBRARIES", "register_library", "make_native"]

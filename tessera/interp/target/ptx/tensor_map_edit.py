"""Tensor maps that a kernel makes itself: single fields replaced in shared or global memory, and the copy out."""

from __future__ import annotations

import struct
from collections.abc import Callable

import numpy as np

from tessera.interp.target.ptx.address import known_words, spots, target
from tessera.interp.target.ptx.decode import CONTROL, Decoder, rule
from tessera.interp.target.ptx.lanes import Lanes
from tessera.interp.target.ptx.machine import Line, Machine
from tessera.interp.target.ptx.moves import observe
from tessera.interp.target.ptx.syntax import Instruction, Number
from tessera.interp.target.ptx.tensor_map import MAGIC, SWIZZLES, TYPE_NAMES, place_of
from tessera.interp.target.ptx.types import TYPES

_BYTES = 128
# The ISA's numbers of element types, which are not the driver's: those that flush have numbers of their own.
_ELEMENTS = ("u8", "u16", "u32", "s32", "u64", "s64", "f16", "f32", "f32", "f64", "bf16", "f32", "f32")
# Field: what turns its value into entries (name, index, number) of the map.
_FIELDS: dict[str, Callable[[int, int], list[tuple[str, int, int]]]] = {
    "global_address": lambda at, v: [("address", 0, v)],
    "rank": lambda at, v: [("rank", 0, v + 1)],
    "box_dim": lambda at, v: [("box", at, v)],
    "global_dim": lambda at, v: [("sizes", at, v)],
    "global_stride": lambda at, v: [("strides", at, v)],
    "element_stride": lambda at, v: [("steps", at, v)],
    "elemtype": lambda at, v: [
        ("type", 0, TYPE_NAMES.index(_ELEMENTS[v])),
        ("itemsize", 0, TYPES[_ELEMENTS[v]].bits // 8),
    ],
    "swizzle_mode": lambda at, v: [("swizzle", 0, SWIZZLES[v])],
    "fill_mode": lambda at, v: [("fill", 0, v)],
    "interleave_layout": lambda at, v: [],
}
_ORDINAL = {"box_dim", "global_dim", "global_stride", "element_stride"}


@rule("tensormap", table=CONTROL)
def _(d: Decoder, inst: Instruction, line: Line) -> None:
    {"replace": _replace, "cp_fenceproxy": _copy}[inst.op[1]](d, inst, line)


def _replace(d: Decoder, inst: Instruction, line: Line) -> None:
    field, where = inst.op[3], target(d, inst, inst.operands[0])
    known_words(d, inst, "replace", "tile", "b1024", field)
    ordinal = inst.operands[1] if field in _ORDINAL else Number(0)
    assert isinstance(ordinal, Number)
    value = d.reader(inst.operands[-1], TYPES[inst.op[-1]])
    entries = _FIELDS[field]
    if field == "interleave_layout" and inst.operands[-1] != Number(0):
        raise d.unsupported(inst)

    def step(m: Machine, lanes: Lanes) -> None:
        for spot in spots(m, lanes, where, _BYTES, 64):
            observe(m, spot, 8, "write")
            numbers = spot.lanes.compress(value(m, spot.lanes)).tolist()
            for start, number in zip(spot.lanes.compress(spot.offset).tolist(), numbers, strict=True):
                raw = m.flat[spot.space].raw[start : start + _BYTES]
                for name, index, content in [("magic", 0, MAGIC), *entries(ordinal.value, number)]:
                    offset, form = place_of(name, index)
                    packed = struct.pack(form, content)
                    raw[offset : offset + len(packed)] = np.frombuffer(packed, np.uint8)

    line.step = step


def _copy(d: Decoder, inst: Instruction, line: Line) -> None:
    """From shared to global memory, once for each warp."""
    into, source = target(d, inst, inst.operands[0], "global"), target(d, inst, inst.operands[1], "shared")
    line.team = 32

    def step(m: Machine, lanes: Lanes) -> None:
        first = lanes.select(lanes.thread % 32 == 0)
        (to,), (read,) = spots(m, first, into, _BYTES, 64), spots(m, first, source, _BYTES, 64)
        observe(m, read, 8, "read")
        content = m.flat["shared"].raw[first.compress(read.offset)[:, None] + np.arange(_BYTES)]
        m.flat["global"].raw[first.compress(to.offset)[:, None] + np.arange(_BYTES)] = content

    line.step = step

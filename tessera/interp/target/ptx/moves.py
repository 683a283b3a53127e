"""Moves, loads, stores, and conversions between addresses."""

from __future__ import annotations

import numpy as np

from tessera.errors import RaceError
from tessera.interp.target.ptx.address import SPACES, Spot, known_words, spots, target, windows
from tessera.interp.target.ptx.decode import Decoder, modifiers, rule
from tessera.interp.target.ptx.fault import Fault
from tessera.interp.target.ptx.lanes import Lanes
from tessera.interp.target.ptx.machine import Machine, Step
from tessera.interp.target.ptx.memory import WINDOWS
from tessera.interp.target.ptx.operands import elementwise, parts_of
from tessera.interp.target.ptx.syntax import Instruction
from tessera.interp.target.ptx.types import TYPES, bits_of


@rule("mov")
def _(d: Decoder, inst: Instruction) -> Step:
    modifiers(d, inst)
    t = TYPES[inst.op[-1]]
    return elementwise(d, inst, lambda a: a, t, t)


@rule("ld", "ldu")
def _(d: Decoder, inst: Instruction) -> Step:
    t, parts = TYPES[inst.op[-1]], parts_of(inst.operands[0])
    known_words(d, inst, "v2", "v4", "v8")
    where, size = target(d, inst, inst.operands[1]), t.bits // 8
    writers = [d.writer(p, t) for p in parts]

    def load(m: Machine, lanes: Lanes) -> None:
        for spot in spots(m, lanes, where, size * len(parts)):
            observe(m, spot, size * len(parts), "read")
            index = spot.offset // size
            cells = m.flat[spot.space].views[size]
            for k, write in enumerate(writers):
                write(m, spot.lanes, cells[index + k if k else index].view(t.dtype))

    return load


@rule("st")
def _(d: Decoder, inst: Instruction) -> Step:
    t, parts = TYPES[inst.op[-1]], parts_of(inst.operands[1])
    if inst.op[1] == "async":
        raise d.unsupported(inst)
    known_words(d, inst, "v2", "v4", "v8")
    where, size = target(d, inst, inst.operands[0]), t.bits // 8
    readers = [d.reader(p, t) for p in parts]

    def store(m: Machine, lanes: Lanes) -> None:
        for spot in spots(m, lanes, where, size * len(parts)):
            observe(m, spot, size * len(parts), "write")
            some, cells = spot.lanes, m.flat[spot.space].views[size]
            index = some.compress(spot.offset // size)
            for k, read in enumerate(readers):
                value = some.compress(bits_of(read(m, some), t, t.bits))
                cells[index + k if k else index] = value
                if m.debug and (lost := cells[index + k] != value).any():
                    lane = int(some.flat[np.argmax(lost)])
                    raise Fault("two threads write different values to one address", RaceError, lane)

    return store


def observe(m: Machine, spot: Spot, size: int, kind: str) -> None:
    """Show an access of shared memory to the debug mode."""
    if m.debug and spot.space == "shared":
        m.shadow.access(kind, spot.lanes, spot.lanes.compress(spot.offset), size)


@rule("cvta")
def _(d: Decoder, inst: Instruction) -> Step:
    modifiers(d, inst, "to", *SPACES)
    t, space = TYPES[inst.op[-1]], inst.op[-2].split("::")[0]
    base = np.uint64(0 if space in ("global", "const") else WINDOWS["global" if space == "param" else space])
    if "to" in inst.op:
        return elementwise(d, inst, lambda a: a - base, t, t)
    return elementwise(d, inst, lambda a: a + base, t, t)


@rule("isspacep")
def _(d: Decoder, inst: Instruction) -> Step:
    """Constants and parameters lie in the global window: which of the three an address is cannot be told."""
    space = inst.op[-1].split("::")[0]
    if space not in WINDOWS or inst.op[-1] == "shared::cta":
        raise d.unsupported(inst)
    write, read = d.writer(inst.operands[0], TYPES["pred"]), d.reader(inst.operands[1], TYPES["u64"])

    def test(m: Machine, lanes: Lanes) -> None:
        address, found = read(m, lanes), np.zeros(lanes.shape, bool)
        wide = np.broadcast_to(address, lanes.shape)
        for some, name in windows(wide, lanes):
            if name == space:
                found |= lanes.spread(np.isin(lanes.flat, some.flat))
        write(m, lanes, found)

    return test


@rule("prefetch", "prefetchu", "applypriority", "discard", "setmaxnreg", "griddepcontrol", "nanosleep", "pmevent")
def _(d: Decoder, inst: Instruction) -> Step:
    """Hints to caches, registers and the scheduler change no value."""
    return lambda m, lanes: None


@rule("createpolicy")
def _(d: Decoder, inst: Instruction) -> Step:
    """A cache policy is opaque: any number stands for it."""
    write = d.writer(inst.operands[0], TYPES["b64"])
    return lambda m, lanes: write(m, lanes, np.array([[1]], np.uint64))

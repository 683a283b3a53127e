"""Moves, loads, stores, and conversions between addresses."""

from __future__ import annotations

import numpy as np

from tessera.errors import RaceError
from tessera.interp.target.ptx.address import SPACES, Spot, known_words, spots, target
from tessera.interp.target.ptx.decode import Decoder, modifiers, rule
from tessera.interp.target.ptx.fault import Fault
from tessera.interp.target.ptx.lanes import Lanes
from tessera.interp.target.ptx.machine import Machine, Step
from tessera.interp.target.ptx.memory import RANK_BITS, WINDOW_BITS, WINDOWS
from tessera.interp.target.ptx.operands import elementwise, parts_of, tolerant
from tessera.interp.target.ptx.special import SPECIAL
from tessera.interp.target.ptx.syntax import Group, Instruction, Name, Number, Operand
from tessera.interp.target.ptx.types import TYPES, Type, bits_of


@rule("mov")
def _(d: Decoder, inst: Instruction) -> Step:
    words, t = modifiers(d, inst, "v2", "v4"), TYPES[inst.op[-1]]
    plain = _several(d, inst, t) if words or t.bits > 64 else elementwise(d, inst, lambda a: a, t, t)
    return tolerant(d, inst, plain)


def _several(d: Decoder, inst: Instruction, t: Type) -> Step:
    """A move of registers of 128 bits or of vectors, part by part; four words make two registers of 64 bits."""
    into, sources = (_parts(o) for o in inst.operands)
    if t.bits > 64:
        t, into, sources = TYPES["b64"], _in_pairs(into), _in_pairs(sources)
    writers, readers = [d.writer(o, t) for o in into], [d.reader(o, t) for o in sources]
    if len(writers) != len(readers):
        raise d.unsupported(inst)

    def step(m: Machine, lanes: Lanes) -> None:
        for write, value in zip(writers, [r(m, lanes) for r in readers], strict=True):
            write(m, lanes, value)

    return step


def _parts(operand: Operand) -> tuple[Operand, ...]:
    """The elements of a vector; the fourth of a special register is 0."""
    if isinstance(operand, Name) and f"{operand.text}.x" in SPECIAL:
        return (*(Name(f"{operand.text}.{c}") for c in "xyz"), Number(0))
    return parts_of(operand)


def _in_pairs(parts: tuple[Operand, ...]) -> tuple[Operand, ...]:
    if len(parts) == 2:
        return parts
    return tuple(Group(parts[k : k + 2]) for k in range(0, len(parts), 2))


def _two_operands(d: Decoder, inst: Instruction) -> None:
    """An address and what goes to it or comes from it; a cache policy may be the third."""
    if len(inst.operands) != 2 + ("L2::cache_hint" in inst.op):
        raise d.unsupported(inst)


def element(t: Type) -> Type:
    """What memory instructions move of a type: 128 bits are two elements."""
    return TYPES["b64"] if t.bits > 64 else t


@rule("ld", "ldu")
def _(d: Decoder, inst: Instruction) -> Step:
    t, parts = element(TYPES[inst.op[-1]]), parts_of(inst.operands[0])
    _two_operands(d, inst)
    known_words(d, inst, "v2", "v4", "v8")
    where, size = target(d, inst, inst.operands[1]), t.bits // 8
    writers = [d.writer(p, t) for p in parts]
    strong, own, into = is_strong(inst), _unwatched(inst), d.registers(inst.operands[0])

    def load(m: Machine, lanes: Lanes) -> None:
        for spot in spots(m, lanes, where, size * len(parts)):
            observe(m, spot, size * len(parts), "read", strong, own)
            index = spot.offset // size
            cells = m.flat[spot.space].views[size]
            for k, write in enumerate(writers):
                write(m, spot.lanes, cells[index + k if k else index].view(t.dtype))
            if m.debug and spot.space == "local":
                known = m.shadow.known(spot, size * len(parts))
                for register in into:
                    m.set_known(register, spot.lanes, known)

    return load


@rule("st")
def _(d: Decoder, inst: Instruction) -> Step:
    t, parts = element(TYPES[inst.op[-1]]), parts_of(inst.operands[1])
    if inst.op[1] == "async":
        raise d.unsupported(inst)
    _two_operands(d, inst)
    known_words(d, inst, "v2", "v4", "v8")
    where, size = target(d, inst, inst.operands[0]), t.bits // 8
    readers = [d.reader(p, t) for p in parts]
    strong, own, sources = is_strong(inst), _unwatched(inst), d.registers(inst.operands[1])

    def store(m: Machine, lanes: Lanes) -> None:
        for spot in spots(m, lanes, where, size * len(parts)):
            some, cells = spot.lanes, m.flat[spot.space].views[size]
            index = some.compress(spot.offset // size)
            m.tolerant = spot.space == "local"
            found = [some.compress(bits_of(read(m, some), t, t.bits)) for read in readers]
            if m.debug:
                changed = np.logical_or.reduce([cells[index + k] != value for k, value in enumerate(found)])
                observe(m, spot, size * len(parts), "write", strong, own, changed)
            for k, value in enumerate(found):
                cells[index + k if k else index] = value
                if m.debug and (lost := cells[index + k] != value).any():
                    lane = int(some.flat[np.argmax(lost)])
                    raise Fault("two threads write different values to one address", RaceError, lane)
            m.tolerant = False
            if m.debug and spot.space == "local" and len(sources) == len(readers):
                m.shadow.set_known(spot, size, [m.known(k, some) for k in sources])

    return store


def is_strong(inst: Instruction) -> bool:
    """Whether an access may be one by which threads order others."""
    return not _STRONG.isdisjoint(inst.op)


def _unwatched(inst: Instruction) -> bool:
    """Whether an access is of constants or an entry's parameters, which are there from the beginning."""
    return any(w == "const" or w.startswith("param") for w in inst.op)


_STRONG = {"volatile", "relaxed", "acquire", "release", "mmio", "atom", "red"}


def observe(
    m: Machine,
    spot: Spot,
    size: int,
    kind: str,
    strong: bool = False,
    unwatched: bool = False,
    changed: np.ndarray | None = None,
) -> None:
    """Show an access to the debug mode."""
    if m.debug and not (unwatched and spot.space == "global"):
        m.shadow.access(kind, spot, size, strong, changed)


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
    """Constants and parameters lie in the global window too, and another CTA's memory in the shared one."""
    modifiers(d, inst, types=1)
    space, _, part = inst.op[-1].partition("::")
    window = WINDOWS.get(space, WINDOWS["global"]) >> WINDOW_BITS
    write, read = d.writer(inst.operands[0], TYPES["pred"]), d.reader(inst.operands[1], TYPES["u64"])

    def test(m: Machine, lanes: Lanes) -> None:
        address = read(m, lanes)
        found = address >> np.uint64(WINDOW_BITS) == window
        if space in ("const", "param"):
            found = found & m.arena.lies_in(space, (address - np.uint64(WINDOWS["global"])).view(np.int64))
        if space == "shared" and part != "cluster":
            rank = address >> np.uint64(RANK_BITS) & np.uint64((1 << WINDOW_BITS - RANK_BITS) - 1)
            found = found & ((rank == 0) | (rank == lanes.view(m.special["%cluster_ctarank"]) + np.uint64(1)))
        write(m, lanes, found)

    return test


@rule("prefetch", "prefetchu", "applypriority", "discard", "setmaxnreg", "griddepcontrol", "pmevent")
def _(d: Decoder, inst: Instruction) -> Step:
    """Hints to caches, registers and the scheduler change no value."""
    return lambda m, lanes: None


@rule("createpolicy")
def _(d: Decoder, inst: Instruction) -> Step:
    """A cache policy is opaque: any number stands for it."""
    write = d.writer(inst.operands[0], TYPES["b64"])
    return lambda m, lanes: write(m, lanes, np.array([[1]], np.uint64))

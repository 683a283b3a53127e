"""Loads, stores, atomics, address conversion, barriers, branches and shuffles."""

from __future__ import annotations

import numpy as np

from tessera.interp.target.ptx.decode import CONTROL, Decoder, Place, Reader, rule
from tessera.interp.target.ptx.machine import Lanes, Line, Machine, Step
from tessera.interp.target.ptx.memory import WINDOWS
from tessera.interp.target.ptx.syntax import Address, Group, Instruction, Name, Number
from tessera.interp.target.ptx.types import TYPES, bits_of

_HINTS = {"nc", "ca", "cg", "cs", "lu", "cv", "wb", "wt", "volatile", "relaxed", "weak", "gpu", "cta", "sys"}
_SPACES = ("global", "shared", "local", "param", "const")


def _target(d: Decoder, inst: Instruction, operand: object) -> tuple[str, Reader]:
    """The space of an access, and what reads its addresses."""
    assert isinstance(operand, Address)
    space = next((s for s in inst.op if s in _SPACES), "generic")
    if operand.base is None:
        return space, lambda m, lanes: np.full(len(lanes), operand.offset, np.uint64)
    found = d.resolve(operand.base, inst.location)
    if isinstance(found, Place):
        start = found.address + operand.offset
        return found.space, lambda m, lanes: np.full(len(lanes), start, np.uint64)
    base, u64 = Name(operand.base), TYPES["u64"]
    read, offset = d.reader(base, u64), np.uint64(operand.offset & (1 << 64) - 1)
    space = {"const": "global", "param": "global"}.get(space, space)
    return space, lambda m, lanes: read(m, lanes) + offset


def _parts(d: Decoder, inst: Instruction, operand: object) -> list:
    known = {*_HINTS, *_SPACES, "v2", "v4", inst.op[-1]}
    if any(w not in known and not w.startswith(("L1::", "L2::")) for w in inst.op[1:]):
        raise d.unsupported(inst)
    return list(operand.parts) if isinstance(operand, Group) else [operand]


@rule("ld")
def _(d: Decoder, inst: Instruction) -> Step:
    t, parts = TYPES[inst.op[-1]], _parts(d, inst, inst.operands[0])
    space, address = _target(d, inst, inst.operands[1])
    writers, size = [d.writer(p, t) for p in parts], t.bits // 8

    def load(m: Machine, lanes: Lanes) -> None:
        for where, at, chosen in m.spaces(space, address(m, lanes)):
            some = lanes[chosen]
            offset = m.locate(where, at, some, size * len(parts), size * len(parts)) // size
            for k, write in enumerate(writers):
                write(m, some, m.flat[where].views[size][offset + k].view(t.dtype))

    return load


@rule("st")
def _(d: Decoder, inst: Instruction) -> Step:
    t, parts = TYPES[inst.op[-1]], _parts(d, inst, inst.operands[1])
    space, address = _target(d, inst, inst.operands[0])
    readers, size = [d.reader(p, t) for p in parts], t.bits // 8

    def store(m: Machine, lanes: Lanes) -> None:
        for where, at, chosen in m.spaces(space, address(m, lanes)):
            some = lanes[chosen]
            offset = m.locate(where, at, some, size * len(parts), size * len(parts)) // size
            for k, read in enumerate(readers):
                m.flat[where].views[size][offset + k] = bits_of(read(m, some), t, t.bits)

    return store


_ATOMIC: dict[str, np.ufunc] = {"add": np.add, "min": np.minimum, "max": np.maximum}
_ATOMIC |= {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}


@rule("atom", "red")
def _(d: Decoder, inst: Instruction) -> Step:
    """Lanes that meet at one address take turns in the order of lanes."""
    t, function = TYPES[inst.op[-1]], _ATOMIC[inst.op[-2]]
    returns = inst.op[0] == "atom"
    if t.parts > 1 or (t.kind == "f" and (inst.op[-2] != "add" or t.bits < 32)):
        raise d.unsupported(inst)
    space, address = _target(d, inst, inst.operands[returns])
    read, write = d.reader(inst.operands[returns + 1], t), d.writer(inst.operands[0], t) if returns else None
    size = t.bits // 8

    def update(m: Machine, lanes: Lanes) -> None:
        for where, at, chosen in m.spaces(space, address(m, lanes)):
            some = lanes[chosen]
            index = m.locate(where, at, some, size, size) // size
            cells = m.flat[where].views[size].view(t.dtype)
            value = np.broadcast_to(read(m, some), len(some))
            if write is None:
                function.at(cells, index, value)
                continue
            old = np.empty(len(some), t.dtype)
            for turn in _turns(index):
                old[turn] = cells[index[turn]]
                cells[index[turn]] = function(old[turn], value[turn])
            write(m, some, old)

    return update


def _turns(index: np.ndarray) -> list[np.ndarray]:
    """Positions divided so that no index comes twice in one part."""
    order = np.argsort(index, kind="stable")
    ordered = index[order]
    starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
    rank = np.arange(len(index)) - np.repeat(starts, np.diff(np.r_[starts, len(index)]))
    return [order[rank == r] for r in range(int(rank.max()) + 1)]


@rule("cvta")
def _(d: Decoder, inst: Instruction) -> Step:
    t = TYPES[inst.op[-1]]
    write, read = d.writer(inst.operands[0], t), d.reader(inst.operands[1], t)
    space = inst.op[-2]
    base = np.uint64(0 if space in ("global", "const", "param") else WINDOWS[space])
    step = base if "to" not in inst.op else ~base + np.uint64(1) if base else base
    return lambda m, lanes: write(m, lanes, read(m, lanes) + step)


@rule("membar", "fence")
def _(d: Decoder, inst: Instruction) -> Step:
    if "proxy" in inst.name:
        raise d.unsupported(inst)
    return lambda m, lanes: None


@rule("bra", table=CONTROL)
def _(d: Decoder, inst: Instruction, line: Line) -> None:
    assert isinstance(inst.operands[0], Name)
    target = d.labels[d.resolve(inst.operands[0].text, inst.location)]
    _transfer(d, inst, line, lambda m, lanes: m.push(target, lanes))


@rule("ret", "exit", table=CONTROL)
def _(d: Decoder, inst: Instruction, line: Line) -> None:
    if inst.op[0] == "ret" and d.names.end >= 0:
        target = d.labels[d.names.end]
        _transfer(d, inst, line, lambda m, lanes: m.push(target, lanes))
    else:
        _transfer(d, inst, line, lambda m, lanes: m.exit(lanes))


def _transfer(d: Decoder, inst: Instruction, line: Line, go: Step) -> None:
    guard = d.reader(inst.guard, TYPES["pred"]) if inst.guard else None

    def control(m: Machine, lanes: Lanes, pc: int) -> None:
        taken = guard(m, lanes) if guard else np.ones(len(lanes), bool)
        m.push(pc + 1, lanes[~taken])
        if taken.any():
            go(m, lanes[taken])

    line.control = control


@rule("bar", "barrier", table=CONTROL)
def _(d: Decoder, inst: Instruction, line: Line) -> None:
    words = [w for w in inst.op[1:] if w not in ("cta", "aligned")]
    if words != ["sync"]:
        raise d.unsupported(inst)
    u32 = TYPES["u32"]
    name, need = (d.reader(o, u32) for o in (*inst.operands, *[Number(0)] * (2 - len(inst.operands))))

    def control(m: Machine, lanes: Lanes, pc: int) -> None:
        ids, counts = (np.broadcast_to(r(m, lanes), len(lanes)).astype(np.int64) for r in (name, need))
        m.park(pc, lanes, ids, counts)

    line.control = control


@rule("shfl", table=CONTROL)
def _(d: Decoder, inst: Instruction, line: Line) -> None:
    u32, first, mode = TYPES["b32"], inst.operands[0], inst.op[2]
    out, flag = first.parts if isinstance(first, Group) else (first, Name("_"))
    write, write_flag = d.writer(out, u32), d.writer(flag, TYPES["pred"])
    value, by, clamp, mask = (d.reader(o, u32) for o in inst.operands[1:])
    if inst.op[1] != "sync" or mode not in ("up", "down", "bfly", "idx"):
        raise d.unsupported(inst)

    def step(m: Machine, lanes: Lanes) -> None:
        b, c = by(m, lanes).astype(np.int64) & 31, clamp(m, lanes).astype(np.int64)
        lane, segment = lanes % 32, c >> 8 & 31
        low, top = lane & segment, (lane & segment) | (c & 31 & ~segment)
        at = {"up": lane - b, "down": lane + b, "bfly": lane ^ b, "idx": low | (b & ~segment)}[mode]
        good = at >= top if mode == "up" else at <= top
        source = lanes - lane + np.where(good, at, lane)
        whole = np.zeros(m.count, np.uint32)
        whole[lanes] = value(m, lanes)
        write(m, lanes, whole[source])
        write_flag(m, lanes, good)

    line.step = step
    line.members = lambda m, lanes: np.broadcast_to(mask(m, lanes), len(lanes))

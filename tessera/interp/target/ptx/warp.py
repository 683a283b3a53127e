"""Instructions of a warp: shuffles, votes, matches, reductions, and who is there."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tessera.interp.target.ptx.address import number_or
from tessera.interp.target.ptx.bit_tricks import popcount
from tessera.interp.target.ptx.control import BARRIER_KINDS
from tessera.interp.target.ptx.decode import CONTROL, Decoder, modifiers, rule
from tessera.interp.target.ptx.floats import canonical, chooser
from tessera.interp.target.ptx.lanes import Lanes
from tessera.interp.target.ptx.machine import Line, Machine, Step, whole_teams
from tessera.interp.target.ptx.operands import Reader, pair_of
from tessera.interp.target.ptx.syntax import Instruction, Operand
from tessera.interp.target.ptx.types import TYPES, Type

_ALL = 0xFFFFFFFF
Shuffle = Callable[..., tuple[np.ndarray, np.ndarray]]
_BITS = np.uint32(1) << np.arange(32, dtype=np.uint32)


def gather(d: Decoder, line: Line, mask: Operand) -> Reader:
    """Make a line wait for the lanes its mask names; what reads the mask."""
    read = d.reader(mask, TYPES["b32"])
    line.team = 32
    line.members = read
    return read


def warps_of(m: Machine, lanes: Lanes, value: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A value as [warps, 32] with zeros where a lane is not here, and the row of each lane, flat."""
    many = -(-m.threads // 32)
    whole = np.zeros((m.ctas, many * 32), value.dtype)
    thread = lanes.flat % m.threads
    whole[lanes.ctas, thread] = lanes.compress(value)
    return whole.reshape(-1, 32), lanes.ctas * many + thread // 32


def lane_numbers(m: Machine, lanes: Lanes) -> np.ndarray:
    """The number of each lane in its warp, flat."""
    return lanes.flat % m.threads % 32


@rule("shfl", table=CONTROL)
def _(d: Decoder, inst: Instruction, line: Line) -> None:
    b32, (out, flag) = TYPES["b32"], pair_of(inst.operands[0])
    write, write_flag = d.writer(out, b32), d.writer(flag, TYPES["pred"])
    if inst.op[1] != "sync" or len(inst.op) != 4:
        raise d.unsupported(inst)
    choose = _SHUFFLES[inst.op[2]]
    value, by, clamp = (d.reader(o, b32) for o in inst.operands[1:4])
    gather(d, line, inst.operands[4])
    into, source = d.registers(out), d.registers(inst.operands[1])

    def step(m: Machine, lanes: Lanes) -> None:
        b, c = by(m, lanes), clamp(m, lanes)
        m.tolerant = True  # what was not written counts where it arrives
        bits = value(m, lanes)
        m.tolerant = False
        known = m.known(source[0], lanes) if m.debug and source else None
        moved, good = _moved(m, lanes, bits, choose, (b, c))
        write(m, lanes, moved)
        write_flag(m, lanes, good)
        if known is not None and into:
            m.set_known(into[0], lanes, _moved(m, lanes, known, choose, (b, c))[0])

    line.step = step


def _moved(
    m: Machine, lanes: Lanes, bits: np.ndarray, choose: Shuffle, by: tuple[np.ndarray, np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Values after a shuffle, and whether they are another lane's."""
    b, c = by
    if b.size == c.size == 1 and whole_teams(lanes, 32) and lanes.shape[1] % 32 == 0:
        at, good = choose(np.arange(32), int(b[0, 0]) & 31, int(c[0, 0]))
        warps = np.broadcast_to(bits, lanes.shape).reshape(lanes.shape[0], -1, 32)
        return warps[..., at].reshape(lanes.shape), np.tile(good, lanes.shape[1] // 32)[None]
    rows, row = warps_of(m, lanes, bits)
    at, good = choose(
        lane_numbers(m, lanes), lanes.compress(b).astype(np.int64) & 31, lanes.compress(c).astype(np.int64)
    )
    return lanes.spread(rows[row, at]), lanes.spread(good)


def _shuffle(mode: str) -> Shuffle:
    """From lane, distance and clamp: the lane to read, and whether it lies within the segment."""

    def choose(lane: np.ndarray, b: np.ndarray, c: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        segment = c >> 8 & 31
        low, top = lane & segment, (lane & segment) | (c & 31 & ~segment)
        at = {"up": lane - b, "down": lane + b, "bfly": lane ^ b, "idx": low | (b & ~segment)}[mode]
        good = at >= top if mode == "up" else at <= top
        return np.where(good, at, lane), np.broadcast_to(good, lane.shape)

    return choose


_SHUFFLES = {mode: _shuffle(mode) for mode in ("up", "down", "bfly", "idx")}


@rule("vote", table=CONTROL)
def _(d: Decoder, inst: Instruction, line: Line) -> None:
    if inst.op[1] != "sync":
        raise d.unsupported(inst)
    pred, kind = TYPES["pred"], inst.op[2]
    write = d.writer(inst.operands[0], TYPES[inst.op[3]])
    value, mask = d.reader(inst.operands[1], pred), gather(d, line, inst.operands[2])

    def step(m: Machine, lanes: Lanes) -> None:
        rows, row = warps_of(m, lanes, value(m, lanes))
        ballot = (rows * _BITS).sum(axis=1, dtype=np.uint32)[row]
        members = lanes.compress(mask(m, lanes)) & _here(m, lanes)
        found = ballot & members
        result = {"ballot": found, "any": found != 0, "all": found == members}
        result["uni"] = result["all"] | (found == 0)
        write(m, lanes, lanes.spread(result[kind]))

    line.step = step


def _here(m: Machine, lanes: Lanes) -> np.ndarray:
    """For each lane the lanes of its warp that are here, as a mask."""
    rows, row = warps_of(m, lanes, np.ones((1, 1), bool))
    return (rows * _BITS).sum(axis=1, dtype=np.uint32)[row]


@rule("match", table=CONTROL)
def _(d: Decoder, inst: Instruction, line: Line) -> None:
    """The lanes that hold the same value: those of each lane's own, or all of them if all agree."""
    kind, t = inst.op[1], TYPES[inst.op[3]]
    if inst.op[2] != "sync" or kind not in ("any", "all"):
        raise d.unsupported(inst)
    out, flag = pair_of(inst.operands[0])
    write, write_flag = d.writer(out, TYPES["b32"]), d.writer(flag, TYPES["pred"])
    value, mask = d.reader(inst.operands[1], t), gather(d, line, inst.operands[2])

    def step(m: Machine, lanes: Lanes) -> None:
        bits = lanes.compress(value(m, lanes))
        rows, row = warps_of(m, lanes, lanes.spread(bits))
        members = lanes.compress(mask(m, lanes)) & _here(m, lanes)
        same = ((rows[row] == bits[:, None]) * _BITS).sum(axis=1, dtype=np.uint32) & members
        agreed = same == members
        result = same if kind == "any" else np.where(agreed, members, np.uint32(0))
        write(m, lanes, lanes.spread(result))
        write_flag(m, lanes, lanes.spread(agreed))

    line.step = step


_REDUCE: dict[str, np.ufunc] = {"add": np.add, "min": np.minimum, "max": np.maximum}
_REDUCE |= {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}


def _summed(function: np.ufunc, t: Type) -> Callable[[np.ndarray], np.ndarray]:
    return lambda values: function.reduce(values, dtype=t.dtype)


_FLOAT_WORDS = {"abs", "NaN"}


def _float_choice(name: str, t: Type, words: tuple[str, ...]) -> Callable[[np.ndarray], np.ndarray]:
    """The smallest or largest of some numbers: NaNs are passed over, unless `.NaN` is given."""
    choose = chooser(t, ["NaN"] if "NaN" in words else [], name == "min")

    def found(values: np.ndarray) -> np.ndarray:
        result = np.abs(values) if "abs" in words else values
        while len(result) > 1:
            half = len(result) // 2
            result = np.concatenate([choose(result[:half], result[half : 2 * half]), result[2 * half :]])
        return canonical(t, result)[0]

    return found


@rule("redux", table=CONTROL)
def _(d: Decoder, inst: Instruction, line: Line) -> None:
    words, t = inst.op[3:-1], TYPES[inst.op[-1]]
    if inst.op[1] != "sync" or not set(words) <= (_FLOAT_WORDS if t.kind == "f" else set()):
        raise d.unsupported(inst)
    function = _float_choice(inst.op[2], t, words) if t.kind == "f" else _summed(_REDUCE[inst.op[2]], t)
    write, value = d.writer(inst.operands[0], t), d.reader(inst.operands[1], t)
    mask = gather(d, line, inst.operands[2])

    def step(m: Machine, lanes: Lanes) -> None:
        rows, row = warps_of(m, lanes, value(m, lanes))
        members = lanes.compress(mask(m, lanes)) & _here(m, lanes)
        sets, which = np.unique(np.stack([row, members.astype(np.int64)], axis=1), axis=0, return_inverse=True)
        inside = (sets[:, 1:] >> np.arange(32) & 1).astype(bool)
        total = [function(rows[r][here]) for r, here in zip(sets[:, 0], inside, strict=True)]
        write(m, lanes, lanes.spread(np.array(total, t.dtype)[which.reshape(-1)]))

    line.step = step


@rule("activemask")
def _(d: Decoder, inst: Instruction) -> Step:
    modifiers(d, inst)
    write = d.writer(inst.operands[0], TYPES["b32"])
    return lambda m, lanes: write(m, lanes, lanes.spread(_here(m, lanes)))


@rule("elect", table=CONTROL)
def _(d: Decoder, inst: Instruction, line: Line) -> None:
    """The lowest lane of the mask leads."""
    if inst.op[1:] != ("sync",):
        raise d.unsupported(inst)
    out, flag = pair_of(inst.operands[0])
    write, write_flag = d.writer(out, TYPES["b32"]), d.writer(flag, TYPES["pred"])
    mask = gather(d, line, inst.operands[1])

    def step(m: Machine, lanes: Lanes) -> None:
        members = mask(m, lanes)
        if members.size > 1 or not whole_teams(lanes, 32) or lanes.shape[1] % 32 or members[0, 0] != _ALL:
            members = lanes.spread(lanes.compress(members) & _here(m, lanes))
        leader = popcount((members & (~members + np.uint32(1))) - np.uint32(1))
        write(m, lanes, leader)
        write_flag(m, lanes, lanes.thread % 32 == leader)

    line.step = step


def _warp_barrier(d: Decoder, inst: Instruction, line: Line) -> None:
    gather(d, line, number_or(inst.operands, 0, _ALL))
    line.step = lambda m, lanes: m.shadow.join(lanes, 32) if m.debug else None


BARRIER_KINDS["warp"] = _warp_barrier

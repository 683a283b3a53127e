"""Warp-level instructions: shuffle, vote, match, redux, elect, activemask."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tessera.interp.target.ptx.isa.addressing import get_operand_or_default
from tessera.interp.target.ptx.isa.control_flow import BARRIER_RULES
from tessera.interp.target.ptx.isa.decoder import CONTROL_RULES, PtxDecoder, check_modifiers, decode_rule
from tessera.interp.target.ptx.isa.floating_point import canonicalise_nan, make_min_max
from tessera.interp.target.ptx.isa.logic_and_shift import count_set_bits
from tessera.interp.target.ptx.isa.operands import Reader, split_pair
from tessera.interp.target.ptx.machine.lane_set import LaneSet
from tessera.interp.target.ptx.machine.simt import DecodedInstruction, LaneStep, PtxMachine, is_whole_thread_groups
from tessera.interp.target.ptx.text.syntax import TYPES, PtxInstruction, PtxOperand, PtxType

_FULL_MASK = 0xFFFFFFFF
Shuffle = Callable[..., tuple[np.ndarray, np.ndarray]]
_LANE_MASK_BITS = np.uint32(1) << np.arange(32, dtype=np.uint32)


def converge_on_mask(d: PtxDecoder, line: DecodedInstruction, mask: PtxOperand) -> Reader:
    """Make a line wait for the lanes of its member mask; the reader of the mask."""
    read = d.reader(mask, TYPES["b32"])
    line.group_size = 32
    line.member_mask = read
    return read


def values_by_warp(m: PtxMachine, lanes: LaneSet, value: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A value as [warps, 32], with zeros for lanes that are not active, and the row of each lane."""
    warps = -(-m.threads // 32)
    whole = np.zeros((m.ctas, warps * 32), value.dtype)
    thread = lanes.flat % m.threads
    whole[lanes.ctas, thread] = lanes.compress(value)
    return whole.reshape(-1, 32), lanes.ctas * warps + thread // 32


def find_lane_numbers(m: PtxMachine, lanes: LaneSet) -> np.ndarray:
    """The number of each lane in its warp, flat."""
    return lanes.flat % m.threads % 32


@decode_rule("shfl", table=CONTROL_RULES)
def _(d: PtxDecoder, inst: PtxInstruction, line: DecodedInstruction) -> None:
    b32, (out, flag) = TYPES["b32"], split_pair(inst.operands[0])
    write, write_flag = d.writer(out, b32), d.writer(flag, TYPES["pred"])
    if inst.op[1] != "sync" or len(inst.op) != 4:
        raise d.unsupported(inst)
    choose = _SHUFFLES[inst.op[2]]
    value, by, clamp = (d.reader(o, b32) for o in inst.operands[1:4])
    converge_on_mask(d, line, inst.operands[4])
    into, source = d.registers(out), d.registers(inst.operands[1])

    def step(m: PtxMachine, lanes: LaneSet) -> None:
        b, c = by(m, lanes), clamp(m, lanes)
        m.allow_uninitialised = True  # a lane that uses an uninitialised value is at fault, not its source
        bits = value(m, lanes)
        m.allow_uninitialised = False
        known = m.known(source[0], lanes) if m.debug and source else None
        shuffled, in_segment = _apply_shuffle(m, lanes, bits, choose, (b, c))
        write(m, lanes, shuffled)
        write_flag(m, lanes, in_segment)
        if known is not None and into:
            m.set_known(into[0], lanes, _apply_shuffle(m, lanes, known, choose, (b, c))[0])

    line.step = step


def _apply_shuffle(
    m: PtxMachine, lanes: LaneSet, bits: np.ndarray, choose: Shuffle, by: tuple[np.ndarray, np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """The values after a shuffle, and whether each comes from another lane."""
    b, c = by
    if b.size == c.size == 1 and is_whole_thread_groups(lanes, 32) and lanes.shape[1] % 32 == 0:
        at, in_segment = choose(np.arange(32), int(b[0, 0]) & 31, int(c[0, 0]))
        warps = np.broadcast_to(bits, lanes.shape).reshape(lanes.shape[0], -1, 32)
        return warps[..., at].reshape(lanes.shape), np.tile(in_segment, lanes.shape[1] // 32)[None]
    rows, row = values_by_warp(m, lanes, bits)
    at, in_segment = choose(
        find_lane_numbers(m, lanes), lanes.compress(b).astype(np.int64) & 31, lanes.compress(c).astype(np.int64)
    )
    return lanes.expand(rows[row, at]), lanes.expand(in_segment)


def _make_shuffle(mode: str) -> Shuffle:
    """From lane, distance and clamp: the source lane, and whether it is within the segment."""

    def choose(lane: np.ndarray, b: np.ndarray, c: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        segment = c >> 8 & 31
        low, top = lane & segment, (lane & segment) | (c & 31 & ~segment)
        at = {"up": lane - b, "down": lane + b, "bfly": lane ^ b, "idx": low | (b & ~segment)}[mode]
        in_segment = at >= top if mode == "up" else at <= top
        return np.where(in_segment, at, lane), np.broadcast_to(in_segment, lane.shape)

    return choose


_SHUFFLES = {mode: _make_shuffle(mode) for mode in ("up", "down", "bfly", "idx")}


@decode_rule("vote", table=CONTROL_RULES)
def _(d: PtxDecoder, inst: PtxInstruction, line: DecodedInstruction) -> None:
    if inst.op[1] != "sync":
        raise d.unsupported(inst)
    pred, kind = TYPES["pred"], inst.op[2]
    write = d.writer(inst.operands[0], TYPES[inst.op[3]])
    value, mask = d.reader(inst.operands[1], pred), converge_on_mask(d, line, inst.operands[2])

    def step(m: PtxMachine, lanes: LaneSet) -> None:
        rows, row = values_by_warp(m, lanes, value(m, lanes))
        ballot = (rows * _LANE_MASK_BITS).sum(axis=1, dtype=np.uint32)[row]
        members = lanes.compress(mask(m, lanes)) & _compute_active_mask(m, lanes)
        found = ballot & members
        result = {"ballot": found, "any": found != 0, "all": found == members}
        result["uni"] = result["all"] | (found == 0)
        write(m, lanes, lanes.expand(result[kind]))

    line.step = step


def _compute_active_mask(m: PtxMachine, lanes: LaneSet) -> np.ndarray:
    """For each lane the mask of active lanes of its warp."""
    rows, row = values_by_warp(m, lanes, np.ones((1, 1), bool))
    return (rows * _LANE_MASK_BITS).sum(axis=1, dtype=np.uint32)[row]


@decode_rule("match", table=CONTROL_RULES)
def _(d: PtxDecoder, inst: PtxInstruction, line: DecodedInstruction) -> None:
    """any: the lanes with the same value as each lane; all: the members, if all have the same value."""
    kind, t = inst.op[1], TYPES[inst.op[3]]
    if inst.op[2] != "sync" or kind not in ("any", "all"):
        raise d.unsupported(inst)
    out, flag = split_pair(inst.operands[0])
    write, write_flag = d.writer(out, TYPES["b32"]), d.writer(flag, TYPES["pred"])
    value, mask = d.reader(inst.operands[1], t), converge_on_mask(d, line, inst.operands[2])

    def step(m: PtxMachine, lanes: LaneSet) -> None:
        bits = lanes.compress(value(m, lanes))
        rows, row = values_by_warp(m, lanes, lanes.expand(bits))
        members = lanes.compress(mask(m, lanes)) & _compute_active_mask(m, lanes)
        same = ((rows[row] == bits[:, None]) * _LANE_MASK_BITS).sum(axis=1, dtype=np.uint32) & members
        agreed = same == members
        result = same if kind == "any" else np.where(agreed, members, np.uint32(0))
        write(m, lanes, lanes.expand(result))
        write_flag(m, lanes, lanes.expand(agreed))

    line.step = step


_REDUCE: dict[str, np.ufunc] = {"add": np.add, "min": np.minimum, "max": np.maximum}
_REDUCE |= {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}


def _make_segmented_reduce(function: np.ufunc, t: PtxType) -> Callable[[np.ndarray], np.ndarray]:
    return lambda values: function.reduce(values, dtype=t.dtype)


_FLOAT_WORDS = {"abs", "NaN"}


def _make_float_redux(name: str, t: PtxType, words: tuple[str, ...]) -> Callable[[np.ndarray], np.ndarray]:
    """The minimum or maximum of floats: NaNs are ignored, unless `.NaN` is given."""
    choose = make_min_max(t, ["NaN"] if "NaN" in words else [], name == "min")

    def found(values: np.ndarray) -> np.ndarray:
        result = np.abs(values) if "abs" in words else values
        while len(result) > 1:
            half = len(result) // 2
            result = np.concatenate([choose(result[:half], result[half : 2 * half]), result[2 * half :]])
        return canonicalise_nan(t, result)[0]

    return found


@decode_rule("redux", table=CONTROL_RULES)
def _(d: PtxDecoder, inst: PtxInstruction, line: DecodedInstruction) -> None:
    words, t = inst.op[3:-1], TYPES[inst.op[-1]]
    if inst.op[1] != "sync" or not set(words) <= (_FLOAT_WORDS if t.kind == "f" else set()):
        raise d.unsupported(inst)
    function = (
        _make_float_redux(inst.op[2], t, words) if t.kind == "f" else _make_segmented_reduce(_REDUCE[inst.op[2]], t)
    )
    write, value = d.writer(inst.operands[0], t), d.reader(inst.operands[1], t)
    mask = converge_on_mask(d, line, inst.operands[2])

    def step(m: PtxMachine, lanes: LaneSet) -> None:
        rows, row = values_by_warp(m, lanes, value(m, lanes))
        members = lanes.compress(mask(m, lanes)) & _compute_active_mask(m, lanes)
        sets, which = np.unique(np.stack([row, members.astype(np.int64)], axis=1), axis=0, return_inverse=True)
        inside = (sets[:, 1:] >> np.arange(32) & 1).astype(bool)
        total = [function(rows[r][here]) for r, here in zip(sets[:, 0], inside, strict=True)]
        write(m, lanes, lanes.expand(np.array(total, t.dtype)[which.reshape(-1)]))

    line.step = step


@decode_rule("activemask")
def _(d: PtxDecoder, inst: PtxInstruction) -> LaneStep:
    check_modifiers(d, inst)
    write = d.writer(inst.operands[0], TYPES["b32"])
    return lambda m, lanes: write(m, lanes, lanes.expand(_compute_active_mask(m, lanes)))


@decode_rule("elect", table=CONTROL_RULES)
def _(d: PtxDecoder, inst: PtxInstruction, line: DecodedInstruction) -> None:
    """The lowest lane of the mask is elected."""
    if inst.op[1:] != ("sync",):
        raise d.unsupported(inst)
    out, flag = split_pair(inst.operands[0])
    write, write_flag = d.writer(out, TYPES["b32"]), d.writer(flag, TYPES["pred"])
    mask = converge_on_mask(d, line, inst.operands[1])

    def step(m: PtxMachine, lanes: LaneSet) -> None:
        members = mask(m, lanes)
        if (
            members.size > 1
            or not is_whole_thread_groups(lanes, 32)
            or lanes.shape[1] % 32
            or members[0, 0] != _FULL_MASK
        ):
            members = lanes.expand(lanes.compress(members) & _compute_active_mask(m, lanes))
        leader = count_set_bits((members & (~members + np.uint32(1))) - np.uint32(1))
        write(m, lanes, leader)
        write_flag(m, lanes, lanes.thread % 32 == leader)

    line.step = step


def _decode_warp_barrier(d: PtxDecoder, inst: PtxInstruction, line: DecodedInstruction) -> None:
    converge_on_mask(d, line, get_operand_or_default(inst.operands, 0, _FULL_MASK))
    line.step = lambda m, lanes: m.shadow.join(lanes, 32) if m.debug else None


BARRIER_RULES["warp"] = _decode_warp_barrier

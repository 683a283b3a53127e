"""mbarrier objects: arrivals and transaction counts, phase by phase (PTX ISA 9.7.13.15)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from tessera.core.errors import BarrierError
from tessera.interp.target.ptx.isa.addressing import (
    AddressOperandReader,
    decode_address,
    get_operand_or_default,
    require_known_modifiers,
    resolve_accesses,
)
from tessera.interp.target.ptx.isa.decoder import CONTROL_RULES, PtxDecoder, decode_rule
from tessera.interp.target.ptx.isa.operands import Reader
from tessera.interp.target.ptx.machine.lane_set import LaneSet
from tessera.interp.target.ptx.machine.memory import PtxFault
from tessera.interp.target.ptx.machine.simt import DecodedInstruction, LaneStep, PtxMachine
from tessera.interp.target.ptx.text.syntax import TYPES, AddressOperand, NameOperand, PtxInstruction

_COUNT_BITS = 20
_MAX_ARRIVAL_COUNT = (1 << _COUNT_BITS) - 1


@dataclass
class Mbarrier:
    """One mbarrier: expected arrivals of a phase, pending arrivals and bytes of the current phase, the phase."""

    offset: int
    expected: int
    pending: int
    bytes: int = 0
    phase: int = 0
    phase_completed: Callable[[int], None] | None = field(default=None, repr=False)

    def arrive(self, count: int) -> bool:
        """Count arrivals; whether a phase completed."""
        flipped = False
        while count:
            step = min(count, self.pending)
            if step == 0:
                raise PtxFault(f"more arrivals than the phase expects: {self}", BarrierError)
            self.pending, count = self.pending - step, count - step
            flipped |= self.complete_phase()
        return flipped

    def complete_phase(self) -> bool:
        """Complete the phase if nothing is pending."""
        if self.pending or self.bytes:
            return False
        self.phase, self.pending = self.phase + 1, self.expected
        if self.phase_completed is not None:
            self.phase_completed(self.phase)
        return True

    def __str__(self) -> str:
        return (
            f"mbarrier at byte {self.offset} (phase {self.phase}, lacks {self.pending} arrivals and {self.bytes} bytes)"
        )


def get_mbarriers(m: PtxMachine) -> dict[int, Mbarrier]:
    """The mbarriers of a machine by their offset in all shared memory."""
    return m.state.setdefault("mbarriers", {})


def find_mbarrier(m: PtxMachine, offset: int, lane: int | None = None) -> Mbarrier:
    """The mbarrier at an offset."""
    result = get_mbarriers(m).get(offset)
    if result is None:
        raise PtxFault(f"no mbarrier is initialised at byte {offset % m.shared_size}", BarrierError, lane)
    return result


def complete_transaction(m: PtxMachine, offset: int, count: int) -> None:
    """Complete bytes of a transaction."""
    barrier = find_mbarrier(m, offset)
    barrier.bytes -= count
    if barrier.complete_phase():
        m.unblock()


def find_mbarrier_offsets(m: PtxMachine, lanes: LaneSet, where: AddressOperandReader) -> np.ndarray:
    """The offset of each lane's mbarrier, flat."""
    (access,) = resolve_accesses(m, lanes, where, 8)
    offsets = lanes.compress(access.offset)
    if m.debug:
        m.shadow.check_mbarriers(lanes, offsets)
    return offsets


@decode_rule("mbarrier", table=CONTROL_RULES)
def _(d: PtxDecoder, inst: PtxInstruction, line: DecodedInstruction) -> None:
    kind = inst.op[1]
    if kind in ("test_wait", "try_wait"):
        _decode_wait(d, inst, line)
    else:
        line.step = _STEPS[kind](d, inst)


def _check_mbarrier_modifiers(d: PtxDecoder, inst: PtxInstruction, *more: str) -> None:
    require_known_modifiers(d, inst, inst.op[1], "noComplete", "expect_tx", "parity", *more)


def _init(d: PtxDecoder, inst: PtxInstruction) -> LaneStep:
    _check_mbarrier_modifiers(d, inst)
    where, count = decode_address(d, inst, inst.operands[0]), d.reader(inst.operands[1], TYPES["u32"])

    def step(m: PtxMachine, lanes: LaneSet) -> None:
        counts = lanes.compress(count(m, lanes))
        for offset, n, lane in zip(
            find_mbarrier_offsets(m, lanes, where).tolist(), counts.tolist(), lanes.flat, strict=True
        ):
            if not 1 <= n <= _MAX_ARRIVAL_COUNT:
                raise PtxFault(
                    f"an mbarrier expects 1 to {_MAX_ARRIVAL_COUNT} arrivals, not {n}", BarrierError, int(lane)
                )
            notify = partial(m.shadow.complete_mbarrier_phase, offset) if m.debug else None
            get_mbarriers(m)[offset] = Mbarrier(offset % m.shared_size, n, n, phase_completed=notify)
            if m.debug:
                m.shadow.initialise_mbarrier(int(lane), offset)

    return step


def _invalidate(d: PtxDecoder, inst: PtxInstruction) -> LaneStep:
    where = decode_address(d, inst, inst.operands[0])

    def step(m: PtxMachine, lanes: LaneSet) -> None:
        for offset in np.unique(find_mbarrier_offsets(m, lanes, where)).tolist():
            find_mbarrier(m, offset, int(lanes.flat[0]))
            del get_mbarriers(m)[offset]
            if m.debug:
                del m.shadow.initialised[offset]

    return step


def _decode_arrive(d: PtxDecoder, inst: PtxInstruction) -> LaneStep:
    """An arrival; `expect_tx` first adds expected bytes, `arrive_drop` also leaves all later phases."""
    _check_mbarrier_modifiers(d, inst)
    state, at = _split_state_operand(inst)
    where, write = decode_address(d, inst, inst.operands[at]), d.writer(state, TYPES["b64"])
    expects, drops = "expect_tx" in inst.op, inst.op[1] == "arrive_drop"
    amount = d.reader(get_operand_or_default(inst.operands, at + 1, 1), TYPES["u32"])

    def step(m: PtxMachine, lanes: LaneSet) -> None:
        offsets, amounts = find_mbarrier_offsets(m, lanes, where), lanes.compress(amount(m, lanes)).astype(np.int64)
        write(
            m,
            lanes,
            lanes.expand(_make_arrival_tokens(m, lanes, offsets, np.ones_like(amounts) if expects else amounts)),
        )
        if m.debug:
            m.shadow.arrive_at_mbarrier(lanes, offsets)
        flipped = False
        for offset, which in _group_by_offset(offsets):
            barrier = find_mbarrier(m, offset)
            count = len(which) if expects else int(amounts[which].sum())
            barrier.bytes += int(amounts[which].sum()) if expects else 0
            barrier.expected -= count if drops else 0
            flipped |= barrier.arrive(count)
        if flipped:
            m.unblock()

    return step


def _make_arrival_tokens(m: PtxMachine, lanes: LaneSet, offsets: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The state that each arrival returns: the phase, and in the low bits the pending arrivals before this one."""
    phases = [find_mbarrier(m, o, int(n)).phase for o, n in zip(offsets.tolist(), lanes.flat, strict=True)]
    lacking = np.empty(len(offsets), np.uint64)
    for offset, which in _group_by_offset(offsets):
        before = np.cumsum(counts[which]) - counts[which]
        # The lanes of a warp arrive together.
        _, first, warp = np.unique(lanes.flat[which] // 32, return_index=True, return_inverse=True)
        before = before[first][warp]
        lacking[which] = (find_mbarrier(m, offset).pending - before).astype(np.uint64) & np.uint64(_MAX_ARRIVAL_COUNT)
    return np.array(phases, np.uint64) << np.uint64(_COUNT_BITS) | lacking


def _group_by_offset(offsets: np.ndarray) -> list[tuple[int, np.ndarray]]:
    """Each offset with its positions."""
    kinds, inverse = np.unique(offsets, return_inverse=True)
    order = np.argsort(inverse, kind="stable")
    parts = np.split(order, np.cumsum(np.bincount(inverse.reshape(-1)))[:-1])
    return list(zip(kinds.tolist(), parts, strict=True))


def _split_state_operand(inst: PtxInstruction) -> tuple[NameOperand, int]:
    first = inst.operands[0]
    return (NameOperand("_"), 0) if isinstance(first, AddressOperand) else (first, 1)  # type: ignore[return-value]


def _decode_tx_count(d: PtxDecoder, inst: PtxInstruction) -> LaneStep:
    """`expect_tx` and `complete_tx` as instructions."""
    _check_mbarrier_modifiers(d, inst, "expect_tx", "complete_tx")
    where, amount = decode_address(d, inst, inst.operands[0]), d.reader(inst.operands[1], TYPES["u32"])
    sign = 1 if inst.op[1] == "expect_tx" else -1

    def step(m: PtxMachine, lanes: LaneSet) -> None:
        amounts = lanes.compress(amount(m, lanes)).astype(np.int64)
        for offset, count in zip(find_mbarrier_offsets(m, lanes, where).tolist(), amounts.tolist(), strict=True):
            complete_transaction(m, offset, -sign * count)

    return step


def _decode_pending_count(d: PtxDecoder, inst: PtxInstruction) -> LaneStep:
    write, read = d.writer(inst.operands[0], TYPES["u32"]), d.reader(inst.operands[1], TYPES["u64"])
    return lambda m, lanes: write(m, lanes, (read(m, lanes) & np.uint64(_MAX_ARRIVAL_COUNT)).astype(np.uint32))


_STEPS = {
    "init": _init,
    "inval": _invalidate,
    "arrive": _decode_arrive,
    "arrive_drop": _decode_arrive,
    "expect_tx": _decode_tx_count,
    "complete_tx": _decode_tx_count,
    "pending_count": _decode_pending_count,
}


def _decode_wait(d: PtxDecoder, inst: PtxInstruction, line: DecodedInstruction) -> None:
    """`try_wait` suspends until the phase completes; `test_wait` returns at once, and lets other lanes run first."""
    _check_mbarrier_modifiers(d, inst)
    parity, suspends = "parity" in inst.op, inst.op[1] == "try_wait"
    write, where = d.writer(inst.operands[0], TYPES["pred"]), decode_address(d, inst, inst.operands[1])
    expected_phase = d.reader(inst.operands[2], TYPES["u32" if parity else "u64"])

    def control(m: PtxMachine, lanes: LaneSet, pc: int) -> None:
        offsets, done = _is_phase_complete(m, lanes, where, expected_phase, parity)
        completed = lanes.expand(done)
        subset, remaining = (
            (lanes, lanes.make_empty()) if done.all() else (lanes.select(completed), lanes.select(~completed))
        )
        if subset.count:
            write(m, subset, np.array([[True]]))
            if m.debug:
                m.shadow.wait_at_mbarrier(subset, offsets[done])
            m.push(pc + 1, subset)
        if suspends:
            m.block(pc, remaining)
        elif remaining.count:
            write(m, remaining, np.array([[False]]))
            m.poll(pc + 1, remaining)

    line.control = control


def _is_phase_complete(
    m: PtxMachine, lanes: LaneSet, where: AddressOperandReader, expected_phase: Reader, parity: bool
) -> tuple[np.ndarray, np.ndarray]:
    """The mbarrier of each lane, and whether its phase is complete."""
    offsets, tokens = find_mbarrier_offsets(m, lanes, where), lanes.compress(expected_phase(m, lanes)).astype(np.int64)
    kinds, inverse = np.unique(offsets, return_inverse=True)
    phases = np.array([find_mbarrier(m, o, int(lanes.flat[0])).phase for o in kinds.tolist()])[inverse.reshape(-1)]
    return offsets, (phases & 1) != tokens & 1 if parity else phases != tokens >> _COUNT_BITS

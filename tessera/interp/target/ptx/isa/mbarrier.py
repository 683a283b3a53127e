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
    operand_or_default,
    require_known_modifiers,
    resolve_accesses,
)
from tessera.interp.target.ptx.isa.decoder import CONTROL_RULES, PtxDecoder, decode_rule
from tessera.interp.target.ptx.isa.operands import Reader
from tessera.interp.target.ptx.machine.fault import PtxFault
from tessera.interp.target.ptx.machine.lane_set import LaneSet
from tessera.interp.target.ptx.machine.simt import DecodedInstruction, LaneStep, PtxMachine
from tessera.interp.target.ptx.text.syntax import TYPES, AddressOperand, NameOperand, PtxInstruction

_COUNT_BITS = 20
_MAX_ARRIVAL_COUNT = (1 << _COUNT_BITS) - 1


@dataclass
class Mbarrier:
    """One barrier: how many arrivals a phase takes, how many and how many bytes it still lacks, and the phase."""

    offset: int
    expected: int
    pending: int
    bytes: int = 0
    phase: int = 0
    phase_completed: Callable[[int], None] | None = field(default=None, repr=False)

    def arrive(self, many: int) -> bool:
        """Count arrivals; whether a phase ended."""
        flipped = False
        while many:
            step = min(many, self.pending)
            if step == 0:
                raise PtxFault(f"more arrivals than {self} takes", BarrierError)
            self.pending, many = self.pending - step, many - step
            flipped |= self.settle()
        return flipped

    def settle(self) -> bool:
        """End the phase if nothing is lacking."""
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


def barriers(m: PtxMachine) -> dict[int, Mbarrier]:
    """The barriers of a machine by their offset in all its shared memory."""
    return m.state.setdefault("mbarriers", {})


def find_mbarrier(m: PtxMachine, offset: int, lane: int | None = None) -> Mbarrier:
    """The barrier at an offset."""
    found = barriers(m).get(offset)
    if found is None:
        raise PtxFault(f"no mbarrier was initialised at byte {offset % m.shared_size}", BarrierError, lane)
    return found


def complete_transaction(m: PtxMachine, offset: int, many: int) -> None:
    """Bytes of a copy have come."""
    barrier = find_mbarrier(m, offset)
    barrier.bytes -= many
    if barrier.settle():
        m.unblock()


def mbarrier_offsets(m: PtxMachine, lanes: LaneSet, where: AddressOperandReader) -> np.ndarray:
    """The offset of each lane's barrier, flat."""
    (access,) = resolve_accesses(m, lanes, where, 8)
    return lanes.compress(access.offset)


@decode_rule("mbarrier", table=CONTROL_RULES)
def _(d: PtxDecoder, inst: PtxInstruction, line: DecodedInstruction) -> None:
    kind = inst.op[1]
    if kind in ("test_wait", "try_wait"):
        _decode_wait(d, inst, line)
    else:
        line.step = _STEPS[kind](d, inst)


def _mbarrier_modifiers(d: PtxDecoder, inst: PtxInstruction, *more: str) -> None:
    require_known_modifiers(d, inst, inst.op[1], "noComplete", "expect_tx", "parity", *more)


def _init(d: PtxDecoder, inst: PtxInstruction) -> LaneStep:
    _mbarrier_modifiers(d, inst)
    where, count = decode_address(d, inst, inst.operands[0]), d.reader(inst.operands[1], TYPES["u32"])

    def step(m: PtxMachine, lanes: LaneSet) -> None:
        counts = lanes.compress(count(m, lanes))
        for offset, n, lane in zip(
            mbarrier_offsets(m, lanes, where).tolist(), counts.tolist(), lanes.flat, strict=True
        ):
            if not 1 <= n <= _MAX_ARRIVAL_COUNT:
                raise PtxFault(
                    f"an mbarrier takes 1 to {_MAX_ARRIVAL_COUNT} arrivals, not {n}", BarrierError, int(lane)
                )
            told = partial(m.shadow.phase_completed, offset) if m.debug else None
            barriers(m)[offset] = Mbarrier(offset % m.shared_size, n, n, phase_completed=told)

    return step


def _invalidate(d: PtxDecoder, inst: PtxInstruction) -> LaneStep:
    where = decode_address(d, inst, inst.operands[0])

    def step(m: PtxMachine, lanes: LaneSet) -> None:
        for offset in np.unique(mbarrier_offsets(m, lanes, where)).tolist():
            find_mbarrier(m, offset, int(lanes.flat[0]))
            del barriers(m)[offset]

    return step


def _decode_arrive(d: PtxDecoder, inst: PtxInstruction) -> LaneStep:
    """An arrival; `expect_tx` first adds bytes to wait for, `arrive_drop` also takes part in no later phase."""
    _mbarrier_modifiers(d, inst)
    state, at = _split_state_operand(inst)
    where, write = decode_address(d, inst, inst.operands[at]), d.writer(state, TYPES["b64"])
    expects, drops = "expect_tx" in inst.op, inst.op[1] == "arrive_drop"
    amount = d.reader(operand_or_default(inst.operands, at + 1, 1), TYPES["u32"])

    def step(m: PtxMachine, lanes: LaneSet) -> None:
        offsets, amounts = mbarrier_offsets(m, lanes, where), lanes.compress(amount(m, lanes)).astype(np.int64)
        write(m, lanes, lanes.expand(_arrival_tokens(m, lanes, offsets, np.ones_like(amounts) if expects else amounts)))
        if m.debug:
            m.shadow.mbarrier_arrived(lanes, offsets)
        flipped = False
        for offset, which in _group_by_offset(offsets):
            barrier = find_mbarrier(m, offset)
            many = len(which) if expects else int(amounts[which].sum())
            barrier.bytes += int(amounts[which].sum()) if expects else 0
            barrier.expected -= many if drops else 0
            flipped |= barrier.arrive(many)
        if flipped:
            m.unblock()

    return step


def _arrival_tokens(m: PtxMachine, lanes: LaneSet, offsets: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """What each arrival returns: the phase, and below it how many arrivals were lacking before this one."""
    phases = [find_mbarrier(m, o, int(n)).phase for o, n in zip(offsets.tolist(), lanes.flat, strict=True)]
    lacking = np.empty(len(offsets), np.uint64)
    for offset, which in _group_by_offset(offsets):
        before = np.cumsum(counts[which]) - counts[which]
        # The lanes of a warp arrive as one.
        _, first, warp = np.unique(lanes.flat[which] // 32, return_index=True, return_inverse=True)
        before = before[first][warp]
        lacking[which] = (find_mbarrier(m, offset).pending - before).astype(np.uint64) & np.uint64(_MAX_ARRIVAL_COUNT)
    return np.array(phases, np.uint64) << np.uint64(_COUNT_BITS) | lacking


def _group_by_offset(offsets: np.ndarray) -> list[tuple[int, np.ndarray]]:
    """Each offset and the positions that have it."""
    kinds, inverse = np.unique(offsets, return_inverse=True)
    order = np.argsort(inverse, kind="stable")
    parts = np.split(order, np.cumsum(np.bincount(inverse.reshape(-1)))[:-1])
    return list(zip(kinds.tolist(), parts, strict=True))


def _split_state_operand(inst: PtxInstruction) -> tuple[NameOperand, int]:
    first = inst.operands[0]
    return (NameOperand("_"), 0) if isinstance(first, AddressOperand) else (first, 1)  # type: ignore[return-value]


def _decode_tx_count(d: PtxDecoder, inst: PtxInstruction) -> LaneStep:
    """`expect_tx` and `complete_tx` as instructions of their own."""
    _mbarrier_modifiers(d, inst, "expect_tx", "complete_tx")
    where, amount = decode_address(d, inst, inst.operands[0]), d.reader(inst.operands[1], TYPES["u32"])
    sign = 1 if inst.op[1] == "expect_tx" else -1

    def step(m: PtxMachine, lanes: LaneSet) -> None:
        amounts = lanes.compress(amount(m, lanes)).astype(np.int64)
        for offset, many in zip(mbarrier_offsets(m, lanes, where).tolist(), amounts.tolist(), strict=True):
            complete_transaction(m, offset, -sign * many)

    return step


def _pending_count(d: PtxDecoder, inst: PtxInstruction) -> LaneStep:
    write, read = d.writer(inst.operands[0], TYPES["u32"]), d.reader(inst.operands[1], TYPES["u64"])
    return lambda m, lanes: write(m, lanes, (read(m, lanes) & np.uint64(_MAX_ARRIVAL_COUNT)).astype(np.uint32))


_STEPS = {
    "init": _init,
    "inval": _invalidate,
    "arrive": _decode_arrive,
    "arrive_drop": _decode_arrive,
    "expect_tx": _decode_tx_count,
    "complete_tx": _decode_tx_count,
    "pending_count": _pending_count,
}


def _decode_wait(d: PtxDecoder, inst: PtxInstruction, line: DecodedInstruction) -> None:
    """`try_wait` sleeps until the phase ends; `test_wait` answers at once, and lets the others run first."""
    _mbarrier_modifiers(d, inst)
    parity, tries = "parity" in inst.op, inst.op[1] == "try_wait"
    write, where = d.writer(inst.operands[0], TYPES["pred"]), decode_address(d, inst, inst.operands[1])
    wanted = d.reader(inst.operands[2], TYPES["u32" if parity else "u64"])

    def control(m: PtxMachine, lanes: LaneSet, pc: int) -> None:
        offsets, done = _test_phase_complete(m, lanes, where, wanted, parity)
        over = lanes.expand(done)
        some, rest = (lanes, lanes.make_empty()) if done.all() else (lanes.select(over), lanes.select(~over))
        if some.count:
            write(m, some, np.array([[True]]))
            if m.debug:
                m.shadow.mbarrier_waited(some, offsets[done])
            m.push(pc + 1, some)
        if tries:
            m.block(pc, rest)
        elif rest.count:
            write(m, rest, np.array([[False]]))
            m.poll(pc + 1, rest)

    line.control = control


def _test_phase_complete(
    m: PtxMachine, lanes: LaneSet, where: AddressOperandReader, wanted: Reader, parity: bool
) -> tuple[np.ndarray, np.ndarray]:
    """The barrier of each lane, and whether the phase it waits for is over."""
    offsets, tokens = mbarrier_offsets(m, lanes, where), lanes.compress(wanted(m, lanes)).astype(np.int64)
    kinds, inverse = np.unique(offsets, return_inverse=True)
    phases = np.array([find_mbarrier(m, o, int(lanes.flat[0])).phase for o in kinds.tolist()])[inverse.reshape(-1)]
    return offsets, (phases & 1) != tokens & 1 if parity else phases != tokens >> _COUNT_BITS

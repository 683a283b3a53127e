"""Barriers in shared memory: arrivals and bytes of asynchronous copies, phase by phase."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from tessera.errors import BarrierError
from tessera.interp.target.ptx.address import Target, known_words, number_or, spots, target
from tessera.interp.target.ptx.decode import CONTROL, Decoder, rule
from tessera.interp.target.ptx.fault import Fault
from tessera.interp.target.ptx.lanes import Lanes
from tessera.interp.target.ptx.machine import Line, Machine, Step
from tessera.interp.target.ptx.operands import Reader
from tessera.interp.target.ptx.syntax import Address, Instruction, Name
from tessera.interp.target.ptx.types import TYPES

_COUNT_BITS = 20
_MOST = (1 << _COUNT_BITS) - 1


@dataclass
class Mbarrier:
    """One barrier: how many arrivals a phase takes, how many and how many bytes it still lacks, and the phase."""

    offset: int
    expected: int
    pending: int
    bytes: int = 0
    phase: int = 0
    flipped: Callable[[int], None] | None = field(default=None, repr=False)

    def arrive(self, many: int) -> bool:
        """Count arrivals; whether a phase ended."""
        flipped = False
        while many:
            step = min(many, self.pending)
            if step == 0:
                raise Fault(f"more arrivals than {self} takes", BarrierError)
            self.pending, many = self.pending - step, many - step
            flipped |= self.settle()
        return flipped

    def settle(self) -> bool:
        """End the phase if nothing is lacking."""
        if self.pending or self.bytes:
            return False
        self.phase, self.pending = self.phase + 1, self.expected
        if self.flipped is not None:
            self.flipped(self.phase)
        return True

    def __str__(self) -> str:
        return (
            f"mbarrier at byte {self.offset} (phase {self.phase}, lacks {self.pending} arrivals and {self.bytes} bytes)"
        )


def barriers(m: Machine) -> dict[int, Mbarrier]:
    """The barriers of a machine by their offset in all its shared memory."""
    return m.state.setdefault("mbarriers", {})


def find(m: Machine, offset: int, lane: int | None = None) -> Mbarrier:
    """The barrier at an offset."""
    found = barriers(m).get(offset)
    if found is None:
        raise Fault(f"no mbarrier was initialised at byte {offset % m.shared_size}", BarrierError, lane)
    return found


def complete_bytes(m: Machine, offset: int, many: int) -> None:
    """Bytes of a copy have come."""
    barrier = find(m, offset)
    barrier.bytes -= many
    if barrier.settle():
        m.wake()


def places(m: Machine, lanes: Lanes, where: Target) -> np.ndarray:
    """The offset of each lane's barrier, flat."""
    (spot,) = spots(m, lanes, where, 8)
    return lanes.compress(spot.offset)


@rule("mbarrier", table=CONTROL)
def _(d: Decoder, inst: Instruction, line: Line) -> None:
    kind = inst.op[1]
    if kind in ("test_wait", "try_wait"):
        _wait(d, inst, line)
    else:
        line.step = _STEPS[kind](d, inst)


def _words(d: Decoder, inst: Instruction, *more: str) -> None:
    known_words(d, inst, inst.op[1], "noComplete", "expect_tx", "parity", *more)


def _init(d: Decoder, inst: Instruction) -> Step:
    _words(d, inst)
    where, count = target(d, inst, inst.operands[0]), d.reader(inst.operands[1], TYPES["u32"])

    def step(m: Machine, lanes: Lanes) -> None:
        counts = lanes.compress(count(m, lanes))
        for offset, n, lane in zip(places(m, lanes, where).tolist(), counts.tolist(), lanes.flat, strict=True):
            if not 1 <= n <= _MOST:
                raise Fault(f"an mbarrier takes 1 to {_MOST} arrivals, not {n}", BarrierError, int(lane))
            told = partial(m.shadow.flipped, offset) if m.debug else None
            barriers(m)[offset] = Mbarrier(offset % m.shared_size, n, n, flipped=told)

    return step


def _invalidate(d: Decoder, inst: Instruction) -> Step:
    where = target(d, inst, inst.operands[0])

    def step(m: Machine, lanes: Lanes) -> None:
        for offset in np.unique(places(m, lanes, where)).tolist():
            find(m, offset, int(lanes.flat[0]))
            del barriers(m)[offset]

    return step


def _arrive(d: Decoder, inst: Instruction) -> Step:
    """An arrival; `expect_tx` first adds bytes to wait for, `arrive_drop` also takes part in no later phase."""
    _words(d, inst)
    state, at = _state_and_place(inst)
    where, write = target(d, inst, inst.operands[at]), d.writer(state, TYPES["b64"])
    expects, drops = "expect_tx" in inst.op, inst.op[1] == "arrive_drop"
    amount = d.reader(number_or(inst.operands, at + 1, 1), TYPES["u32"])

    def step(m: Machine, lanes: Lanes) -> None:
        offsets, amounts = places(m, lanes, where), lanes.compress(amount(m, lanes)).astype(np.int64)
        write(m, lanes, lanes.spread(_tokens(m, lanes, offsets, np.ones_like(amounts) if expects else amounts)))
        if m.debug:
            m.shadow.arrived_at(lanes, offsets)
        flipped = False
        for offset, which in _grouped(offsets):
            barrier = find(m, offset)
            many = len(which) if expects else int(amounts[which].sum())
            barrier.bytes += int(amounts[which].sum()) if expects else 0
            barrier.expected -= many if drops else 0
            flipped |= barrier.arrive(many)
        if flipped:
            m.wake()

    return step


def _tokens(m: Machine, lanes: Lanes, offsets: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """What each arrival returns: the phase, and below it how many arrivals were lacking before this one."""
    phases = [find(m, o, int(n)).phase for o, n in zip(offsets.tolist(), lanes.flat, strict=True)]
    lacking = np.empty(len(offsets), np.uint64)
    for offset, which in _grouped(offsets):
        before = np.cumsum(counts[which]) - counts[which]
        # The lanes of a warp arrive as one.
        _, first, warp = np.unique(lanes.flat[which] // 32, return_index=True, return_inverse=True)
        before = before[first][warp]
        lacking[which] = (find(m, offset).pending - before).astype(np.uint64) & np.uint64(_MOST)
    return np.array(phases, np.uint64) << np.uint64(_COUNT_BITS) | lacking


def _grouped(offsets: np.ndarray) -> list[tuple[int, np.ndarray]]:
    """Each offset and the positions that have it."""
    kinds, inverse = np.unique(offsets, return_inverse=True)
    order = np.argsort(inverse, kind="stable")
    parts = np.split(order, np.cumsum(np.bincount(inverse.reshape(-1)))[:-1])
    return list(zip(kinds.tolist(), parts, strict=True))


def _state_and_place(inst: Instruction) -> tuple[Name, int]:
    first = inst.operands[0]
    return (Name("_"), 0) if isinstance(first, Address) else (first, 1)  # type: ignore[return-value]


def _transfer_count(d: Decoder, inst: Instruction) -> Step:
    """`expect_tx` and `complete_tx` as instructions of their own."""
    _words(d, inst, "expect_tx", "complete_tx")
    where, amount = target(d, inst, inst.operands[0]), d.reader(inst.operands[1], TYPES["u32"])
    sign = 1 if inst.op[1] == "expect_tx" else -1

    def step(m: Machine, lanes: Lanes) -> None:
        amounts = lanes.compress(amount(m, lanes)).astype(np.int64)
        for offset, many in zip(places(m, lanes, where).tolist(), amounts.tolist(), strict=True):
            complete_bytes(m, offset, -sign * many)

    return step


def _pending_count(d: Decoder, inst: Instruction) -> Step:
    write, read = d.writer(inst.operands[0], TYPES["u32"]), d.reader(inst.operands[1], TYPES["u64"])
    return lambda m, lanes: write(m, lanes, (read(m, lanes) & np.uint64(_MOST)).astype(np.uint32))


_STEPS = {
    "init": _init,
    "inval": _invalidate,
    "arrive": _arrive,
    "arrive_drop": _arrive,
    "expect_tx": _transfer_count,
    "complete_tx": _transfer_count,
    "pending_count": _pending_count,
}


def _wait(d: Decoder, inst: Instruction, line: Line) -> None:
    """`try_wait` sleeps until the phase ends; `test_wait` answers at once, and lets the others run first."""
    _words(d, inst)
    parity, tries = "parity" in inst.op, inst.op[1] == "try_wait"
    write, where = d.writer(inst.operands[0], TYPES["pred"]), target(d, inst, inst.operands[1])
    wanted = d.reader(inst.operands[2], TYPES["u32" if parity else "u64"])

    def control(m: Machine, lanes: Lanes, pc: int) -> None:
        offsets, done = _finished(m, lanes, where, wanted, parity)
        over = lanes.spread(done)
        some, rest = (lanes, lanes.none()) if done.all() else (lanes.select(over), lanes.select(~over))
        if some.count:
            write(m, some, np.array([[True]]))
            if m.debug:
                m.shadow.waited(some, offsets[done])
            m.push(pc + 1, some)
        if tries:
            m.sleep(pc, rest)
        elif rest.count:
            write(m, rest, np.array([[False]]))
            m.poll(pc + 1, rest)

    line.control = control


def _finished(m: Machine, lanes: Lanes, where: Target, wanted: Reader, parity: bool) -> tuple[np.ndarray, np.ndarray]:
    """The barrier of each lane, and whether the phase it waits for is over."""
    offsets, tokens = places(m, lanes, where), lanes.compress(wanted(m, lanes)).astype(np.int64)
    kinds, inverse = np.unique(offsets, return_inverse=True)
    phases = np.array([find(m, o, int(lanes.flat[0])).phase for o in kinds.tolist()])[inverse.reshape(-1)]
    return offsets, (phases & 1) != tokens & 1 if parity else phases != tokens >> _COUNT_BITS

"""SIMT execution: all threads of some CTAs as lanes, scheduled by the lowest program counter (min-PC reconvergence).

Deadlock is found when no lane can run; livelock when the state of a machine whose lanes are all suspended repeats.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tessera.core.errors import BarrierError, UninitializedError
from tessera.interp.target.ptx.machine.call_stack import STACK_ALIGNMENT, PtxCallStack
from tessera.interp.target.ptx.machine.fault import PtxFault
from tessera.interp.target.ptx.machine.lane_set import LaneSet, all_lanes
from tessera.interp.target.ptx.machine.memory import FlatMemory, GlobalArena
from tessera.interp.target.ptx.machine.named_barriers import NamedBarriers
from tessera.interp.target.ptx.machine.special_registers import LaunchShape, SpecialRegisters, cluster_and_rank_of_ctas
from tessera.interp.target.ptx.sanitizer.global_shadow import GlobalShadow
from tessera.interp.target.ptx.sanitizer.race_detector import PtxRaceDetector
from tessera.interp.target.ptx.text.syntax import PtxInstruction

# A machine in which every lane that could run has gone to sleep: whether anything has come of it since.


LIVELOCK_CHECK_INTERVAL = 256  # sleeps of all from one look to the next


def livelock_fingerprint(machine: PtxMachine) -> bytes:
    """What the machine's course follows from, in short: where lanes are, their registers, and memory.

    Where two are equal the machine has gone round in a circle, and will for ever.
    """
    found = hashlib.blake2b(digest_size=16)
    for pc, lanes in machine.suspended:
        found.update(np.append(lanes.flat, pc).tobytes())
    found.update(np.array([len(p.lanes) for p in machine.barriers.waiters]).tobytes())
    for register in machine.registers:
        found.update(np.ascontiguousarray(register).data)
    for flat in machine.flat.values():
        found.update(flat.raw.data)
    return found.digest()


# All threads of some CTAs as lanes: registers, and a scheduler that runs the lowest program counter first.


LaneStep = Callable[["PtxMachine", LaneSet], None]
STACK_BYTES = 32 << 10  # bytes for calls of functions by themselves and for what is allocated as a program runs
FAIRNESS_INTERVAL = 64  # picks of the lowest counter before the fragment that waited longest has a turn
MAX_REPORTED_MBARRIERS = 16  # mbarriers that the report of a deadlock lists
MAX_IDLE_POLLS = 1 << 14  # rounds of polling in which nothing happens before the program is called dead
_TRUE = np.array([[True]])
_POWERS = np.uint64(1) << np.arange(32, dtype=np.uint64)


@dataclass
class DecodedInstruction:
    """One decoded instruction: a step, or a control transfer that says which lanes go where.

    `team` is how many threads side by side must run it together (0: none); `members` reads a mask that narrows it.
    """

    instruction: PtxInstruction
    step: LaneStep | None = None
    control: Callable[[PtxMachine, LaneSet, int], None] | None = None
    members: Callable[[PtxMachine, LaneSet], np.ndarray] | None = None
    team: int = 0


@dataclass
class PtxProgram:
    """A decoded entry."""

    lines: list[DecodedInstruction] = field(default_factory=list)
    block_starts: set[int] = field(default_factory=set)
    register_widths: list[int] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    shared: int = 0
    local: int = 0
    reserved: int = 0  # bytes of the shared memory that are the system's
    stack: bool = False  # whether local memory grows as the program runs

    @property
    def local_size(self) -> int:
        """Bytes of local memory that a thread has."""
        return -(-self.local // STACK_ALIGNMENT) * STACK_ALIGNMENT + (STACK_BYTES if self.stack else 0)


class PtxMachine:
    """CTAs side by side: a register is an array [C or 1, T or 1] that broadcasts over all lanes."""

    def __init__(
        self, program: PtxProgram, arena: GlobalArena, launch: LaunchShape, ctas: np.ndarray, world: GlobalShadow | None
    ) -> None:
        self.world: GlobalShadow = world  # type: ignore[assignment]
        self.program, self.arena, self.launch, self.debug = program, arena, launch, launch.debug
        self.ctas, self.threads = len(ctas), launch.threads
        self.extent = (self.ctas, self.threads)
        self.registers = [np.zeros((1, 1), bool if w == 1 else f"u{w // 8}") for w in program.register_widths]
        # Whether an array [C, T] is this register's alone, and no view of it is about: it may be changed in place.
        self.private = [False] * len(program.register_widths)
        self.written = [np.zeros((1, 1), bool) for _ in program.register_widths] if launch.debug else []
        self.shared_bytes = program.shared + launch.shared
        self.shared_size, self.local_size = -(-self.shared_bytes // 1024) * 1024, program.local_size
        self.flat = {
            "global": arena.flat,
            "shared": FlatMemory(self.shared_size * self.ctas),
            "local": FlatMemory(self.local_size * self.ctas * self.threads),
        }
        self._cluster(launch, ctas)
        self.stack: PtxCallStack = PtxCallStack(self) if program.stack else None  # type: ignore[assignment]
        self.alive = np.ones(self.extent, bool)
        self.ready: dict[int, LaneSet] = {0: all_lanes(self.extent)}
        self.waiting: dict[int, LaneSet] = {}
        self.blocked: list[tuple[int, LaneSet]] = []
        self.polling: list[tuple[int, LaneSet]] = []
        self.suspended: list[tuple[int, LaneSet]] = []
        self.polls = self.suspend_rounds = 0
        self.last_fingerprint = b""
        self.barriers = NamedBarriers(self)
        self.state: dict[str, Any] = {}  # what families of instructions keep: mbarriers, groups of copies
        self.pc = 0
        self.tolerant = False  # whether registers that were not written may be read
        self.clock = 0
        self.shadow: PtxRaceDetector = PtxRaceDetector(self) if launch.debug else None  # type: ignore[assignment]

    def _cluster(self, launch: LaunchShape, ctas: np.ndarray) -> None:
        cluster, rank = (p[ctas] for p in cluster_and_rank_of_ctas(launch))
        self.special = SpecialRegisters(launch, ctas, cluster, rank, self.program.shared - self.program.reserved)
        self.first_cluster = int(cluster.min())
        self.cluster = cluster - self.first_cluster
        self.rank = rank
        # The row of each cluster's CTA by its rank.
        self.cta_of_rank = np.full((int(self.cluster.max()) + 1, int(np.prod(launch.cluster))), -1)
        self.cta_of_rank[self.cluster, rank] = np.arange(len(ctas))

    def run(self) -> None:
        """Until every lane has exited."""
        picks = 0
        while self.ready or self.waiting or self.blocked or self.polling or self.suspended or self.barriers.waiters:
            if not self.ready:
                self._resume_waiting()
            picks += 1
            self.pc = next(iter(self.ready)) if picks % FAIRNESS_INTERVAL == 0 else min(self.ready)
            self._run_until_divergence(self.ready.pop(self.pc))

    def _run_until_divergence(self, lanes: LaneSet) -> None:
        lines, leaders = self.program.lines, self.program.block_starts
        while True:
            line = lines[self.pc]
            if line.team:
                lanes = self._converge(line, lanes)
                if not lanes.count:
                    return
            if line.control is not None:
                line.control(self, lanes, self.pc)
                return
            line.step(self, lanes)  # type: ignore[misc]
            self.pc += 1
            if self.ready and self.pc in leaders:
                self.push(self.pc, lanes)
                return

    def push(self, pc: int, lanes: LaneSet) -> None:
        """Lanes that go on at a counter, joined with those already there."""
        if lanes.count:
            old = self.ready.get(pc)
            self.ready[pc] = lanes if old is None else old | lanes

    def block(self, pc: int, lanes: LaneSet) -> None:
        """Lanes that try this instruction again after the next event."""
        if lanes.count:
            self.blocked.append((pc, lanes))

    def poll(self, pc: int, lanes: LaneSet) -> None:
        """Lanes that asked in vain and go on when all others have run."""
        self.polling.append((pc, lanes))

    def suspend(self, pc: int, lanes: LaneSet) -> None:
        """Lanes that let all others run before they go on."""
        self.suspended.append((pc, lanes))

    def _resume_waiting(self) -> None:
        """Nobody can run: let those that have slept long enough go on, or those that poll ask again, or give up."""
        if self.suspended:
            self._resume_suspended()
            return
        self.polls += 1
        if not self.polling or self.polls > MAX_IDLE_POLLS:
            self._raise_deadlock()
        polling, self.polling = self.polling, []
        for pc, lanes in polling:
            self.push(pc, lanes)

    def _resume_suspended(self) -> None:
        """Let those that sleep go on, unless that has led to nothing before."""
        self.suspend_rounds += 1
        if self.suspend_rounds % LIVELOCK_CHECK_INTERVAL == 0:
            before, self.last_fingerprint = self.last_fingerprint, livelock_fingerprint(self)
            if before == self.last_fingerprint:
                self._raise_deadlock()
        dozing, self.suspended = self.suspended, []
        for pc, lanes in dozing:
            self.push(pc, lanes)

    def unblock(self) -> None:
        """Something happened that sleeping lanes may have waited for."""
        self.polls = 0
        sleeping, self.blocked = self.blocked, []
        for pc, lanes in sleeping:
            self.push(pc, lanes)

    def _converge(self, line: DecodedInstruction, lanes: LaneSet) -> LaneSet:
        """The lanes whose whole team is here; the others wait for the rest."""
        old = self.waiting.pop(self.pc, None)
        if old is not None:
            lanes = lanes | old
        if is_whole_thread_groups(lanes, line.team):
            return lanes
        missing = self.padded(self.alive, line.team)
        here = np.zeros(self.extent, bool)
        lanes.mark(here)
        missing = missing & ~self.padded(here, line.team)
        place = lanes.ctas * missing.shape[1] + lanes.flat % self.threads // line.team
        if line.members is None:
            done = ~missing.any(axis=2).reshape(-1)[place]
        else:
            absent = (missing * _POWERS).sum(axis=2, dtype=np.uint64).reshape(-1)[place]
            done = lanes.compress(line.members(self, lanes)).astype(np.uint64) & absent == 0
        together = lanes.select(lanes.spread(done))
        if together.count < lanes.count:
            self.waiting[self.pc] = lanes.select(lanes.spread(~done))
        return together

    def padded(self, whole: np.ndarray, team: int) -> np.ndarray:
        """An array [C, T] as [C, teams, team], filled up with zeros."""
        rest = -self.threads % team
        if rest:
            whole = np.concatenate([whole, np.zeros((self.ctas, rest), whole.dtype)], axis=1)
        return whole.reshape(self.ctas, -1, team)

    def exit(self, lanes: LaneSet) -> None:
        """Lanes that are done; barriers no longer wait for them."""
        gone = np.zeros(self.extent, bool)
        lanes.mark(gone)
        self.alive &= ~gone
        self.barriers.remove_exited(lanes)
        waiting, self.waiting = self.waiting, {}
        for pc, rest in waiting.items():
            self.push(pc, rest)
        self.unblock()

    def _raise_deadlock(self) -> None:
        asleep = [p for p, _ in (*self.blocked, *self.polling)] + [p - 1 for p, _ in self.suspended]
        places = [*self.waiting, *asleep, *(p.pc for p in self.barriers.waiters)]
        lines = [self.program.lines[p] for p in sorted(set(places))]
        words = [f"{line.instruction.name} at {line.instruction.location}" for line in lines]
        self.pc = places[0]
        words += [str(b) for b in list(self.state.get("mbarriers", {}).values())[:MAX_REPORTED_MBARRIERS]]
        raise PtxFault("threads wait for each other for ever: " + "; ".join(words), BarrierError)

    def read(self, index: int, lanes: LaneSet) -> np.ndarray:
        """A register's bits."""
        if self.debug:
            known = self.known(index, lanes) | self.tolerant
            if lanes.mask is not None:
                known = known | ~lanes.mask
            if not known.all():
                lane = int(lanes.flat[np.argmin(lanes.compress(known))])
                raise PtxFault(
                    f"register {self.program.names[index]} is used before what it holds is written",
                    UninitializedError,
                    lane,
                )
            self.shadow.check_register(index, lanes)
        if lanes.index is None:
            self.private[index] = False
        return lanes.view(self.registers[index])

    def write(self, index: int, lanes: LaneSet, bits: np.ndarray) -> None:
        """Set a register."""
        if lanes.index is None:
            self.registers[index] = lanes.blend(self.registers[index], bits)
            self.private[index] = False
        elif self.private[index]:
            self.registers[index].reshape(-1)[lanes.index] = bits[0]
        else:
            self.registers[index] = lanes.blend(self.registers[index], bits)
            self.private[index] = True
        if self.debug:
            self.written[index] = lanes.blend(self.written[index], _TRUE)

    def known(self, index: int, lanes: LaneSet) -> np.ndarray:
        """Whether a register was written, in the debug mode."""
        return lanes.view(self.written[index])

    def set_known(self, index: int, lanes: LaneSet, known: np.ndarray) -> None:
        """Say whether what a register holds counts as written."""
        self.written[index] = lanes.blend(self.written[index], known)

    def local_start(self, lane: int, address: int) -> int:
        """Where an address in a lane's local memory, as a program has it, lies in the memory of all."""
        return lane * self.local_size + address + (0 if self.stack is None else int(self.stack.base[lane]))

    def describe_lane(self, lane: int) -> str:
        """A lane as the program sees it."""
        cta, thread = divmod(lane, self.threads)
        at = [",".join(str(int(self.special[f"%ctaid.{d}"][cta, 0])) for d in "xyz")]
        at.append(",".join(str(int(self.special[f"%tid.{d}"][0, thread])) for d in "xyz"))
        return f"block ({at[0]}), thread ({at[1]})"


def is_whole_thread_groups(lanes: LaneSet, team: int) -> bool:
    """Whether the lanes are a rectangle of whole teams."""
    if not lanes.plain:
        return False
    columns, threads = lanes.columns, lanes.extent[1]
    return columns.start % team == 0 and (columns.stop % team == 0 or columns.stop == threads)

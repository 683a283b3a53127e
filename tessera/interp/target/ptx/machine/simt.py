"""SIMT execution: all threads of some CTAs as lanes, scheduled by the lowest program counter (min-PC reconvergence).

A deadlock is detected when no lane can run, a livelock when the state of a machine whose lanes are all suspended
repeats.
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

# Livelock detection, for a machine whose lanes are all suspended.


LIVELOCK_CHECK_INTERVAL = 256  # rounds of suspension between two fingerprints


def livelock_fingerprint(machine: PtxMachine) -> bytes:
    """A hash of the machine's state: program counters, registers and memory.

    If two fingerprints are equal, the machine repeats the same states forever.
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


# Machines: registers, and a scheduler that runs the lowest program counter first.


LaneStep = Callable[["PtxMachine", LaneSet], None]
STACK_BYTES = 32 << 10  # bytes for frames of recursive calls and for alloca
FAIRNESS_INTERVAL = 64  # picks of the lowest counter before the fragment that has waited longest is picked
MAX_REPORTED_MBARRIERS = 16  # mbarriers that a deadlock report lists
MAX_IDLE_POLLS = 1 << 14  # idle rounds of polling before a deadlock is reported
_TRUE = np.array([[True]])
_POWERS = np.uint64(1) << np.arange(32, dtype=np.uint64)


@dataclass
class DecodedInstruction:
    """One decoded instruction: a step, or a control transfer that pushes lanes to their next instructions.

    `group_size` adjacent threads (a warp or warpgroup; 0: none) must execute it converged; `member_mask` reads a mask
    that narrows the group.
    """

    instruction: PtxInstruction
    step: LaneStep | None = None
    control: Callable[[PtxMachine, LaneSet, int], None] | None = None
    member_mask: Callable[[PtxMachine, LaneSet], np.ndarray] | None = None
    group_size: int = 0


@dataclass
class PtxProgram:
    """A decoded entry."""

    lines: list[DecodedInstruction] = field(default_factory=list)
    block_starts: set[int] = field(default_factory=set)
    register_widths: list[int] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    shared: int = 0
    local: int = 0
    reserved: int = 0  # bytes of shared memory that the system reserves
    stack: bool = False  # whether it has recursive calls or alloca

    @property
    def local_size(self) -> int:
        """The bytes of local memory of a thread."""
        return -(-self.local // STACK_ALIGNMENT) * STACK_ALIGNMENT + (STACK_BYTES if self.stack else 0)


class PtxMachine:
    """CTAs side by side: a register is an array [C or 1, T or 1] that broadcasts over all lanes."""

    def __init__(
        self,
        program: PtxProgram,
        arena: GlobalArena,
        launch: LaunchShape,
        ctas: np.ndarray,
        global_shadow: GlobalShadow | None,
    ) -> None:
        self.global_shadow: GlobalShadow = global_shadow  # type: ignore[assignment]
        self.program, self.arena, self.launch, self.debug = program, arena, launch, launch.debug
        self.ctas, self.threads = len(ctas), launch.threads
        self.extent = (self.ctas, self.threads)
        self.registers = [np.zeros((1, 1), bool if w == 1 else f"u{w // 8}") for w in program.register_widths]
        # Whether a register's array has no other references, so that it may be updated in place.
        self.owned = [False] * len(program.register_widths)
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
        self.state: dict[str, Any] = {}  # state of instruction families: mbarriers, groups of copies
        self.pc = 0
        self.allow_uninitialised = False  # whether the sanitizer permits reads of uninitialised registers
        self.clock = 0
        self.shadow: PtxRaceDetector = PtxRaceDetector(self) if launch.debug else None  # type: ignore[assignment]

    def _cluster(self, launch: LaunchShape, ctas: np.ndarray) -> None:
        cluster, rank = (p[ctas] for p in cluster_and_rank_of_ctas(launch))
        self.special = SpecialRegisters(launch, ctas, cluster, rank, self.program.shared - self.program.reserved)
        self.first_cluster = int(cluster.min())
        self.cluster = cluster - self.first_cluster
        self.rank = rank
        # The CTA of each cluster and rank.
        self.cta_of_rank = np.full((int(self.cluster.max()) + 1, int(np.prod(launch.cluster))), -1)
        self.cta_of_rank[self.cluster, rank] = np.arange(len(ctas))

    def run(self) -> None:
        """Run until every lane has exited."""
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
            if line.group_size:
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
        """Make lanes ready at a program counter, where they reconverge with those already there."""
        if lanes.count:
            old = self.ready.get(pc)
            self.ready[pc] = lanes if old is None else old | lanes

    def block(self, pc: int, lanes: LaneSet) -> None:
        """Block lanes: they retry this instruction after the next event."""
        if lanes.count:
            self.blocked.append((pc, lanes))

    def poll(self, pc: int, lanes: LaneSet) -> None:
        """Lanes whose test failed continue after all others have run."""
        self.polling.append((pc, lanes))

    def suspend(self, pc: int, lanes: LaneSet) -> None:
        """Lanes continue after all others have run."""
        self.suspended.append((pc, lanes))

    def _resume_waiting(self) -> None:
        """No lane is ready: resume suspended lanes, else polling lanes, else report a deadlock."""
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
        """Resume suspended lanes, unless the machine's state repeats."""
        self.suspend_rounds += 1
        if self.suspend_rounds % LIVELOCK_CHECK_INTERVAL == 0:
            before, self.last_fingerprint = self.last_fingerprint, livelock_fingerprint(self)
            if before == self.last_fingerprint:
                self._raise_deadlock()
        resumed, self.suspended = self.suspended, []
        for pc, lanes in resumed:
            self.push(pc, lanes)

    def unblock(self) -> None:
        """An event occurred: blocked lanes retry."""
        self.polls = 0
        blocked, self.blocked = self.blocked, []
        for pc, lanes in blocked:
            self.push(pc, lanes)

    def _converge(self, line: DecodedInstruction, lanes: LaneSet) -> LaneSet:
        """The lanes whose whole group is present; the others wait for the rest of their group."""
        old = self.waiting.pop(self.pc, None)
        if old is not None:
            lanes = lanes | old
        if is_whole_thread_groups(lanes, line.group_size):
            return lanes
        missing = self.split_into_groups(self.alive, line.group_size)
        present = np.zeros(self.extent, bool)
        lanes.set_mask(present)
        missing = missing & ~self.split_into_groups(present, line.group_size)
        group_index = lanes.ctas * missing.shape[1] + lanes.flat % self.threads // line.group_size
        if line.member_mask is None:
            complete = ~missing.any(axis=2).reshape(-1)[group_index]
        else:
            absent_mask = (missing * _POWERS).sum(axis=2, dtype=np.uint64).reshape(-1)[group_index]
            complete = lanes.compress(line.member_mask(self, lanes)).astype(np.uint64) & absent_mask == 0
        converged = lanes.select(lanes.expand(complete))
        if converged.count < lanes.count:
            self.waiting[self.pc] = lanes.select(lanes.expand(~complete))
        return converged

    def split_into_groups(self, whole: np.ndarray, group_size: int) -> np.ndarray:
        """An array [C, T] as [C, groups, threads of a group], padded with zeros."""
        rest = -self.threads % group_size
        if rest:
            whole = np.concatenate([whole, np.zeros((self.ctas, rest), whole.dtype)], axis=1)
        return whole.reshape(self.ctas, -1, group_size)

    def exit(self, lanes: LaneSet) -> None:
        """Lanes exit; barriers no longer expect them."""
        exited = np.zeros(self.extent, bool)
        lanes.set_mask(exited)
        self.alive &= ~exited
        self.barriers.remove_exited(lanes)
        waiting, self.waiting = self.waiting, {}
        for pc, rest in waiting.items():
            self.push(pc, rest)
        self.unblock()

    def _raise_deadlock(self) -> None:
        blocked_pcs = [p for p, _ in (*self.blocked, *self.polling)] + [p - 1 for p, _ in self.suspended]
        places = [*self.waiting, *blocked_pcs, *(p.pc for p in self.barriers.waiters)]
        lines = [self.program.lines[p] for p in sorted(set(places))]
        words = [f"{line.instruction.name} at {line.instruction.location}" for line in lines]
        self.pc = places[0]
        words += [str(b) for b in list(self.state.get("mbarriers", {}).values())[:MAX_REPORTED_MBARRIERS]]
        raise PtxFault("deadlock: no thread can continue: " + "; ".join(words), BarrierError)

    def read(self, index: int, lanes: LaneSet) -> np.ndarray:
        """The bits of a register."""
        if self.debug:
            known = self.known(index, lanes) | self.allow_uninitialised
            if lanes.mask is not None:
                known = known | ~lanes.mask
            if not known.all():
                lane = int(lanes.flat[np.argmin(lanes.compress(known))])
                raise PtxFault(
                    f"register {self.program.names[index]} is used before it is initialised",
                    UninitializedError,
                    lane,
                )
            self.shadow.check_register(index, lanes)
        if lanes.index is None:
            self.owned[index] = False
        return lanes.view(self.registers[index])

    def write(self, index: int, lanes: LaneSet, bits: np.ndarray) -> None:
        """Write a register."""
        if lanes.index is None:
            self.registers[index] = lanes.blend(self.registers[index], bits)
            self.owned[index] = False
        elif self.owned[index]:
            self.registers[index].reshape(-1)[lanes.index] = bits[0]
        else:
            self.registers[index] = lanes.blend(self.registers[index], bits)
            self.owned[index] = True
        if self.debug:
            self.written[index] = lanes.blend(self.written[index], _TRUE)

    def known(self, index: int, lanes: LaneSet) -> np.ndarray:
        """Whether a register is initialised, in debug mode."""
        return lanes.view(self.written[index])

    def set_known(self, index: int, lanes: LaneSet, known: np.ndarray) -> None:
        """Mark a register as initialised or not."""
        self.written[index] = lanes.blend(self.written[index], known)

    def local_start(self, lane: int, address: int) -> int:
        """The offset in all local memory of an address in a lane's local memory."""
        return lane * self.local_size + address + (0 if self.stack is None else int(self.stack.base[lane]))

    def describe_lane(self, lane: int) -> str:
        """The block and thread of a lane, for errors."""
        cta, thread = divmod(lane, self.threads)
        at = [",".join(str(int(self.special[f"%ctaid.{d}"][cta, 0])) for d in "xyz")]
        at.append(",".join(str(int(self.special[f"%tid.{d}"][0, thread])) for d in "xyz"))
        return f"block ({at[0]}), thread ({at[1]})"


def is_whole_thread_groups(lanes: LaneSet, group_size: int) -> bool:
    """Whether the lanes are a rectangle of whole groups."""
    if not lanes.plain:
        return False
    columns, threads = lanes.columns, lanes.extent[1]
    return columns.start % group_size == 0 and (columns.stop % group_size == 0 or columns.stop == threads)

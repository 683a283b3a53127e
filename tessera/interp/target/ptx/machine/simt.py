"""SIMT machine: the state of some CTAs, whose threads are lanes: registers, memory, and the lanes that wait."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from tessera.core.errors import UninitializedError
from tessera.interp.target.ptx.machine.call_stack import STACK_ALIGNMENT, PtxCallStack
from tessera.interp.target.ptx.machine.lane_set import LaneSet, make_all_lanes
from tessera.interp.target.ptx.machine.memory import FlatMemory, GlobalArena, PtxFault
from tessera.interp.target.ptx.machine.named_barriers import NamedBarriers
from tessera.interp.target.ptx.machine.special_registers import LaunchShape, SpecialRegisters, find_cluster_and_rank
from tessera.interp.target.ptx.sanitizer.global_shadow import GlobalShadow
from tessera.interp.target.ptx.sanitizer.race_detector import PtxRaceDetector
from tessera.interp.target.ptx.text.syntax import PtxInstruction


class PtxObserver(Protocol):
    """What is told of the instructions and the accesses of a launch; the instruction of an access is the machine's."""

    def execute(self, machine: PtxMachine, instruction: PtxInstruction, lanes: LaneSet) -> None:
        """Lanes execute an instruction."""

    def access(self, machine: PtxMachine, space: str, lanes: LaneSet, offset: np.ndarray, size: int) -> None:
        """Lanes access bytes of shared or global memory; the offsets are in the shape of the lanes."""

    def transfer(self, machine: PtxMachine, read: int, written: int) -> None:
        """A bulk copy reads and writes bytes of global memory."""


LaneStep = Callable[["PtxMachine", LaneSet], None]
STACK_BYTES = 32 << 10  # bytes for frames of recursive calls and for alloca
_TRUE = np.array([[True]])


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
    matrix_registers: set[int] = field(default_factory=set)  # those that wgmma instructions read

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
        observer: PtxObserver | None = None,
    ) -> None:
        self.observer = observer
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
        self._locate_clusters(launch, ctas)
        self.stack: PtxCallStack = PtxCallStack(self) if program.stack else None  # type: ignore[assignment]
        self.alive = np.ones(self.extent, bool)
        self.ready: dict[int, LaneSet] = {0: make_all_lanes(self.extent)}
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

    def release(self) -> None:
        """Break the reference cycles of a stopped machine: its memory is freed now, not by the garbage collector."""
        del self.barriers, self.shadow
        self.state.clear()

    def _locate_clusters(self, launch: LaunchShape, ctas: np.ndarray) -> None:
        cluster, rank = (p[ctas] for p in find_cluster_and_rank(launch))
        self.special = SpecialRegisters(launch, ctas, cluster, rank, self.program.shared - self.program.reserved)
        self.first_cluster = int(cluster.min())
        self.cluster = cluster - self.first_cluster
        self.rank = rank
        # The CTA of each cluster and rank.
        self.cta_of_rank = np.full((int(self.cluster.max()) + 1, int(np.prod(launch.cluster))), -1)
        self.cta_of_rank[self.cluster, rank] = np.arange(len(ctas))

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

    def unblock(self) -> None:
        """An event occurred: blocked lanes retry."""
        self.polls = 0
        blocked, self.blocked = self.blocked, []
        for pc, lanes in blocked:
            self.push(pc, lanes)

    def split_into_groups(self, whole: np.ndarray, group_size: int) -> np.ndarray:
        """An array [C, T] as [C, groups, threads of a group], padded with zeros."""
        rest = -self.threads % group_size
        if rest:
            whole = np.concatenate([whole, np.zeros((self.ctas, rest), whole.dtype)], axis=1)
        return whole.reshape(self.ctas, -1, group_size)

    def exit(self, lanes: LaneSet) -> None:
        """Lanes exit; barriers no longer expect them."""
        if self.debug:
            self.shadow.check_exit(lanes)
        exited = np.zeros(self.extent, bool)
        lanes.set_mask(exited)
        self.alive &= ~exited
        self.barriers.remove_exited(lanes)
        waiting, self.waiting = self.waiting, {}
        for pc, rest in waiting.items():
            self.push(pc, rest)
        self.unblock()

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
            self.shadow.registers.check_read(index, lanes)
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
            if index in self.program.matrix_registers:
                self.shadow.registers.record_write(index, lanes)

    def known(self, index: int, lanes: LaneSet) -> np.ndarray:
        """Whether a register is initialised, in debug mode."""
        return lanes.view(self.written[index])

    def set_known(self, index: int, lanes: LaneSet, known: np.ndarray) -> None:
        """Mark a register as initialised or not."""
        self.written[index] = lanes.blend(self.written[index], known)

    def find_local_offset(self, lane: int, address: int) -> int:
        """The offset in all local memory of an address in a lane's local memory."""
        return lane * self.local_size + address + (0 if self.stack is None else int(self.stack.base[lane]))

    def find_indices(self, lane: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The block and the thread of a lane."""
        cta, thread = divmod(lane, self.threads)
        block = tuple(int(self.special[f"%ctaid.{d}"][cta, 0]) for d in "xyz")
        return block, tuple(int(self.special[f"%tid.{d}"][0, thread]) for d in "xyz")

    def describe_lane(self, lane: int) -> str:
        """The block and thread of a lane, for errors."""
        block, thread = (",".join(map(str, p)) for p in self.find_indices(lane))
        return f"block ({block}), thread ({thread})"


def is_whole_thread_groups(lanes: LaneSet, group_size: int) -> bool:
    """Whether the lanes are a rectangle of whole groups."""
    if not lanes.plain:
        return False
    columns, threads = lanes.columns, lanes.extent[1]
    return columns.start % group_size == 0 and (columns.stop % group_size == 0 or columns.stop == threads)

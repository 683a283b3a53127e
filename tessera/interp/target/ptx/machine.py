"""All threads of some CTAs as lanes: registers, and a scheduler that runs the lowest program counter first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tessera.errors import BarrierError, UninitializedError
from tessera.interp.target.ptx.asleep import OFTEN, picture
from tessera.interp.target.ptx.barriers import Barriers
from tessera.interp.target.ptx.debugging import Shadow
from tessera.interp.target.ptx.fault import Fault
from tessera.interp.target.ptx.lanes import Lanes, everything
from tessera.interp.target.ptx.memory import Arena, Flat
from tessera.interp.target.ptx.special import Launch, SpecialRegisters, clusters
from tessera.interp.target.ptx.stack import ALIGNED, Stack
from tessera.interp.target.ptx.syntax import Instruction
from tessera.interp.target.ptx.world import World

Step = Callable[["Machine", Lanes], None]
STACK = 32 << 10  # bytes for calls of functions by themselves and for what is allocated as a program runs
PATIENCE = 64  # picks of the lowest counter before the fragment that waited longest has a turn
MOST_NAMED = 16  # mbarriers that the report of a deadlock lists
MOST_POLLS = 1 << 14  # rounds of polling in which nothing happens before the program is called dead
_TRUE = np.array([[True]])
_POWERS = np.uint64(1) << np.arange(32, dtype=np.uint64)


@dataclass
class Line:
    """One decoded instruction: a step, or a control transfer that says which lanes go where.

    `team` is how many threads side by side must run it together (0: none); `members` reads a mask that narrows it.
    """

    instruction: Instruction
    step: Step | None = None
    control: Callable[[Machine, Lanes, int], None] | None = None
    members: Callable[[Machine, Lanes], np.ndarray] | None = None
    team: int = 0


@dataclass
class Program:
    """A decoded entry."""

    lines: list[Line] = field(default_factory=list)
    leaders: set[int] = field(default_factory=set)
    widths: list[int] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    shared: int = 0
    local: int = 0
    reserved: int = 0  # bytes of the shared memory that are the system's
    stack: bool = False  # whether local memory grows as the program runs

    @property
    def local_size(self) -> int:
        """Bytes of local memory that a thread has."""
        return -(-self.local // ALIGNED) * ALIGNED + (STACK if self.stack else 0)


class Machine:
    """CTAs side by side: a register is an array [C or 1, T or 1] that broadcasts over all lanes."""

    def __init__(self, program: Program, arena: Arena, launch: Launch, ctas: np.ndarray, world: World | None) -> None:
        self.world: World = world  # type: ignore[assignment]
        self.program, self.arena, self.launch, self.debug = program, arena, launch, launch.debug
        self.ctas, self.threads = len(ctas), launch.threads
        self.extent = (self.ctas, self.threads)
        self.registers = [np.zeros((1, 1), bool if w == 1 else f"u{w // 8}") for w in program.widths]
        # Whether an array [C, T] is this register's alone, and no view of it is about: it may be changed in place.
        self.private = [False] * len(program.widths)
        self.written = [np.zeros((1, 1), bool) for _ in program.widths] if launch.debug else []
        self.shared_bytes = program.shared + launch.shared
        self.shared_size, self.local_size = -(-self.shared_bytes // 1024) * 1024, program.local_size
        self.flat = {
            "global": arena.flat,
            "shared": Flat(self.shared_size * self.ctas),
            "local": Flat(self.local_size * self.ctas * self.threads),
        }
        self._cluster(launch, ctas)
        self.stack: Stack = Stack(self) if program.stack else None  # type: ignore[assignment]
        self.alive = np.ones(self.extent, bool)
        self.ready: dict[int, Lanes] = {0: everything(self.extent)}
        self.waiting: dict[int, Lanes] = {}
        self.sleeping: list[tuple[int, Lanes]] = []
        self.polling: list[tuple[int, Lanes]] = []
        self.dozing: list[tuple[int, Lanes]] = []
        self.polls = self.dozes = 0
        self.pictured = b""
        self.barriers = Barriers(self)
        self.state: dict[str, Any] = {}  # what families of instructions keep: mbarriers, groups of copies
        self.pc = 0
        self.tolerant = False  # whether registers that were not written may be read
        self.clock = 0
        self.shadow: Shadow = Shadow(self) if launch.debug else None  # type: ignore[assignment]

    def _cluster(self, launch: Launch, ctas: np.ndarray) -> None:
        cluster, rank = (p[ctas] for p in clusters(launch))
        self.special = SpecialRegisters(launch, ctas, cluster, rank, self.program.shared - self.program.reserved)
        self.first_cluster = int(cluster.min())
        self.cluster = cluster - self.first_cluster
        self.rank = rank
        # The row of each cluster's CTA by its rank.
        self.row_of = np.full((int(self.cluster.max()) + 1, int(np.prod(launch.cluster))), -1)
        self.row_of[self.cluster, rank] = np.arange(len(ctas))

    def run(self) -> None:
        """Until every lane has exited."""
        picks = 0
        while self.ready or self.waiting or self.sleeping or self.polling or self.dozing or self.barriers.parked:
            if not self.ready:
                self._idle()
            picks += 1
            self.pc = next(iter(self.ready)) if picks % PATIENCE == 0 else min(self.ready)
            self._fragment(self.ready.pop(self.pc))

    def _fragment(self, lanes: Lanes) -> None:
        lines, leaders = self.program.lines, self.program.leaders
        while True:
            line = lines[self.pc]
            if line.team:
                lanes = self._converged(line, lanes)
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

    def push(self, pc: int, lanes: Lanes) -> None:
        """Lanes that go on at a counter, joined with those already there."""
        if lanes.count:
            old = self.ready.get(pc)
            self.ready[pc] = lanes if old is None else old | lanes

    def sleep(self, pc: int, lanes: Lanes) -> None:
        """Lanes that try this instruction again after the next event."""
        if lanes.count:
            self.sleeping.append((pc, lanes))

    def poll(self, pc: int, lanes: Lanes) -> None:
        """Lanes that asked in vain and go on when all others have run."""
        self.polling.append((pc, lanes))

    def doze(self, pc: int, lanes: Lanes) -> None:
        """Lanes that let all others run before they go on."""
        self.dozing.append((pc, lanes))

    def _idle(self) -> None:
        """Nobody can run: let those that have slept long enough go on, or those that poll ask again, or give up."""
        if self.dozing:
            self._wake_dozing()
            return
        self.polls += 1
        if not self.polling or self.polls > MOST_POLLS:
            self._stuck()
        polling, self.polling = self.polling, []
        for pc, lanes in polling:
            self.push(pc, lanes)

    def _wake_dozing(self) -> None:
        """Let those that sleep go on, unless that has led to nothing before."""
        self.dozes += 1
        if self.dozes % OFTEN == 0:
            before, self.pictured = self.pictured, picture(self)
            if before == self.pictured:
                self._stuck()
        dozing, self.dozing = self.dozing, []
        for pc, lanes in dozing:
            self.push(pc, lanes)

    def wake(self) -> None:
        """Something happened that sleeping lanes may have waited for."""
        self.polls = 0
        sleeping, self.sleeping = self.sleeping, []
        for pc, lanes in sleeping:
            self.push(pc, lanes)

    def _converged(self, line: Line, lanes: Lanes) -> Lanes:
        """The lanes whose whole team is here; the others wait for the rest."""
        old = self.waiting.pop(self.pc, None)
        if old is not None:
            lanes = lanes | old
        if whole_teams(lanes, line.team):
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

    def exit(self, lanes: Lanes) -> None:
        """Lanes that are done; barriers no longer wait for them."""
        gone = np.zeros(self.extent, bool)
        lanes.mark(gone)
        self.alive &= ~gone
        self.barriers.exited(lanes)
        waiting, self.waiting = self.waiting, {}
        for pc, rest in waiting.items():
            self.push(pc, rest)
        self.wake()

    def _stuck(self) -> None:
        asleep = [p for p, _ in (*self.sleeping, *self.polling)] + [p - 1 for p, _ in self.dozing]
        places = [*self.waiting, *asleep, *(p.pc for p in self.barriers.parked)]
        lines = [self.program.lines[p] for p in sorted(set(places))]
        words = [f"{line.instruction.name} at {line.instruction.location}" for line in lines]
        self.pc = places[0]
        words += [str(b) for b in list(self.state.get("mbarriers", {}).values())[:MOST_NAMED]]
        raise Fault("threads wait for each other for ever: " + "; ".join(words), BarrierError)

    def read(self, index: int, lanes: Lanes) -> np.ndarray:
        """A register's bits."""
        if self.debug:
            known = self.known(index, lanes) | self.tolerant
            if lanes.mask is not None:
                known = known | ~lanes.mask
            if not known.all():
                lane = int(lanes.flat[np.argmin(lanes.compress(known))])
                raise Fault(
                    f"register {self.program.names[index]} is used before what it holds is written",
                    UninitializedError,
                    lane,
                )
            self.shadow.check_register(index, lanes)
        if lanes.index is None:
            self.private[index] = False
        return lanes.view(self.registers[index])

    def write(self, index: int, lanes: Lanes, bits: np.ndarray) -> None:
        """Set a register."""
        if lanes.index is None:
            self.registers[index] = lanes.merged(self.registers[index], bits)
            self.private[index] = False
        elif self.private[index]:
            self.registers[index].reshape(-1)[lanes.index] = bits[0]
        else:
            self.registers[index] = lanes.merged(self.registers[index], bits)
            self.private[index] = True
        if self.debug:
            self.written[index] = lanes.merged(self.written[index], _TRUE)

    def known(self, index: int, lanes: Lanes) -> np.ndarray:
        """Whether a register was written, in the debug mode."""
        return lanes.view(self.written[index])

    def set_known(self, index: int, lanes: Lanes, known: np.ndarray) -> None:
        """Say whether what a register holds counts as written."""
        self.written[index] = lanes.merged(self.written[index], known)

    def local_start(self, lane: int, address: int) -> int:
        """Where an address in a lane's local memory, as a program has it, lies in the memory of all."""
        return lane * self.local_size + address + (0 if self.stack is None else int(self.stack.base[lane]))

    def name_of(self, lane: int) -> str:
        """A lane as the program sees it."""
        cta, thread = divmod(lane, self.threads)
        at = [",".join(str(int(self.special[f"%ctaid.{d}"][cta, 0])) for d in "xyz")]
        at.append(",".join(str(int(self.special[f"%tid.{d}"][0, thread])) for d in "xyz"))
        return f"block ({at[0]}), thread ({at[1]})"


def whole_teams(lanes: Lanes, team: int) -> bool:
    """Whether the lanes are a rectangle of whole teams."""
    if not lanes.plain:
        return False
    columns, threads = lanes.columns, lanes.extent[1]
    return columns.start % team == 0 and (columns.stop % team == 0 or columns.stop == threads)

"""All threads of some CTAs as lanes: registers, and a scheduler that runs the lowest program counter first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tessera.errors import BarrierError, OutOfBoundsError, UninitializedError
from tessera.interp.target.ptx.fault import Fault
from tessera.interp.target.ptx.memory import WINDOWS, Arena, Flat, check_alignment
from tessera.interp.target.ptx.syntax import Instruction

Lanes = np.ndarray
Step = Callable[["Machine", Lanes], None]
PATIENCE = 1024  # picks of the lowest counter before the fragment that waited longest has a turn


@dataclass
class Line:
    """One decoded instruction: a step, or a control transfer that says which lanes go where."""

    instruction: Instruction
    step: Step | None = None
    control: Callable[[Machine, Lanes, int], None] | None = None
    members: Callable[[Machine, Lanes], np.ndarray] | None = None


@dataclass
class Program:
    """A decoded entry."""

    lines: list[Line] = field(default_factory=list)
    leaders: set[int] = field(default_factory=set)
    widths: list[int] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    shared: int = 0
    local: int = 0


class Machine:
    """CTAs side by side; lane = cta * padded threads + thread."""

    def __init__(
        self, program: Program, arena: Arena, block: tuple, grid: tuple, ctas: np.ndarray, shared: int, debug: bool
    ) -> None:
        self.program, self.arena, self.debug = program, arena, debug
        self.threads = int(np.prod(block))
        self.padded = -(-self.threads // 32) * 32
        self.count = self.padded * len(ctas)
        self.lane = np.arange(self.count)
        self.cta, thread = self.lane // self.padded, self.lane % self.padded
        self.alive = thread < self.threads
        self.registers = [np.zeros(self.count, bool if w == 1 else f"u{w // 8}") for w in program.widths]
        self.written = [np.zeros(self.count, bool) for _ in program.widths] if debug else []
        self.shared_size, self.local_size = -(-shared // 16) * 16, -(-program.local // 16) * 16
        self.flat = {
            "global": arena.flat,
            "shared": Flat(self.shared_size * len(ctas)),
            "local": Flat(self.local_size * self.count),
        }
        self.limits = {"shared": shared, "local": program.local}
        self.special = _special(thread, ctas[self.cta], block, grid)
        self.ready: dict[int, Lanes] = {0: self.lane[self.alive]}
        self.waiting: dict[int, Lanes] = {}
        self.parked: list[tuple[int, Lanes, np.ndarray, np.ndarray]] = []
        self.pc = 0

    def run(self) -> None:
        """Until every lane has exited."""
        picks = 0
        while self.ready or self.waiting or self.parked:
            if not self.ready:
                self._stuck()
            picks += 1
            self.pc = next(iter(self.ready)) if picks % PATIENCE == 0 else min(self.ready)
            self._fragment(self.ready.pop(self.pc))

    def _fragment(self, lanes: Lanes) -> None:
        lines, leaders = self.program.lines, self.program.leaders
        while True:
            line = lines[self.pc]
            if line.members is not None:
                lanes = self._converged(line, lanes)
            if not len(lanes):
                return
            if line.control is not None:
                line.control(self, lanes, self.pc)
                return
            assert line.step is not None
            line.step(self, lanes)
            self.pc += 1
            if self.pc in leaders:
                self.push(self.pc, lanes)
                return

    def push(self, pc: int, lanes: Lanes) -> None:
        """Lanes that go on at a counter, joined with those already there."""
        if len(lanes):
            old = self.ready.get(pc)
            self.ready[pc] = lanes if old is None else np.sort(np.concatenate([old, lanes]))

    def _converged(self, line: Line, lanes: Lanes) -> Lanes:
        """The lanes whose whole member mask is here; the others wait for the rest."""
        old = self.waiting.pop(self.pc, None)
        if old is not None:
            lanes = np.sort(np.concatenate([old, lanes]))
        assert line.members is not None
        bits = np.zeros((self.count // 32, 32), bool)
        bits.reshape(-1)[lanes] = True
        alive = self.alive.reshape(-1, 32)
        mask = line.members(self, lanes)
        wanted = (mask[:, None] >> np.arange(32, dtype=np.uint32) & 1).astype(bool) & alive[lanes // 32]
        there = ~(wanted & ~bits[lanes // 32]).any(axis=1)
        if not there.all():
            self.waiting[self.pc] = lanes[~there]
        return lanes[there]

    def park(self, pc: int, lanes: Lanes, ids: np.ndarray, need: np.ndarray) -> None:
        """Lanes at a barrier; a CTA goes on when enough of its threads are there (need 0: all that live)."""
        self.parked.append((pc, lanes, ids, need))
        self.release()

    def release(self) -> None:
        """Let go the barriers that are complete."""
        alive = np.bincount(self.cta[self.alive], minlength=self.count // self.padded)
        arrived: dict[tuple[int, int], int] = {}
        for _, lanes, ids, _ in self.parked:
            keys, counts = np.unique(self.cta[lanes] * 16 + ids, return_counts=True)
            for key, n in zip(keys.tolist(), counts.tolist(), strict=True):
                arrived[divmod(key, 16)] = arrived.get(divmod(key, 16), 0) + n
        full = np.zeros((len(alive), 16), np.int64)
        for place, n in arrived.items():
            full[place] = n
        kept = []
        for pc, lanes, ids, need in self.parked:
            cta = self.cta[lanes]
            done = full[cta, ids] >= np.where(need > 0, need, alive[cta])
            self.push(pc + 1, lanes[done])
            if not done.all():
                kept.append((pc, lanes[~done], ids[~done], need[~done]))
        self.parked = kept

    def exit(self, lanes: Lanes) -> None:
        """Lanes that are done; barriers no longer wait for them."""
        self.alive[lanes] = False
        if self.debug and any(np.isin(self.cta[p[1]], self.cta[lanes]).any() for p in self.parked):
            raise Fault("threads exit while others of their CTA wait at a barrier", BarrierError, int(lanes[0]))
        if self.parked:
            self.release()
        waiting, self.waiting = self.waiting, {}
        for pc, rest in waiting.items():
            self.push(pc, rest)

    def _stuck(self) -> None:
        places = [*self.waiting, *(p[0] for p in self.parked)]
        words = [
            f"{self.program.lines[p].instruction.name} at {self.program.lines[p].instruction.location}" for p in places
        ]
        self.pc = places[0]
        raise Fault("threads wait for each other for ever: " + "; ".join(sorted(set(words))), BarrierError)

    def read(self, index: int, lanes: Lanes) -> np.ndarray:
        """A register's bits."""
        if self.debug and not (known := self.written[index][lanes]).all():
            lane = int(lanes[np.argmin(known)])
            raise Fault(f"register {self.program.names[index]} is read before it is written", UninitializedError, lane)
        return self.registers[index][lanes]

    def write(self, index: int, lanes: Lanes, bits: np.ndarray) -> None:
        """Set a register."""
        self.registers[index][lanes] = bits
        if self.debug:
            self.written[index][lanes] = True

    def locate(self, space: str, address: np.ndarray, lanes: Lanes, size: int, align: int) -> np.ndarray:
        """Byte offsets of an access in a space's flat memory, checked."""
        check_alignment(address, align, lanes)
        offset = address.astype(np.int64)
        if space == "global":
            offset -= WINDOWS["global"]
            at = self.arena.check(offset, size)
            words = self.arena.describe(int(offset[at])) if at >= 0 else ""
        else:
            bad = (offset < 0) | (offset + size > self.limits[space])
            at = int(np.argmax(bad)) if bad.any() else -1
            words = f"byte {int(offset[at])} of {space} memory, which has {self.limits[space]} bytes" if at >= 0 else ""
            offset = offset + (self.cta[lanes] * self.shared_size if space == "shared" else lanes * self.local_size)
        if at >= 0:
            raise Fault(f"access of {size} bytes at {words}", OutOfBoundsError, int(lanes[at]))
        return offset

    def spaces(self, space: str, address: np.ndarray) -> list[tuple[str, np.ndarray, np.ndarray]]:
        """(space, addresses in it, positions) of an access; a generic one may touch several."""
        if space != "generic":
            return [(space, address, np.arange(len(address)))]
        window = address >> np.uint64(40)
        found = []
        for name, base in WINDOWS.items():
            here = np.flatnonzero((window == base >> 40) if name != "global" else ((window != 1) & (window != 2)))
            if len(here):
                found.append((name, address[here] - np.uint64(base if name != "global" else 0), here))
        return found

    def name_of(self, lane: int) -> str:
        """A lane as the program sees it."""
        at = [",".join(str(int(self.special[f"%{w}.{d}"][lane])) for d in "xyz") for w in ("ctaid", "tid")]
        return f"block ({at[0]}), thread ({at[1]})"


def _special(thread: np.ndarray, cta: np.ndarray, block: tuple, grid: tuple) -> dict[str, Any]:
    """Special registers as one element a lane."""
    found: dict[str, Any] = {}
    for word, index, extent in (("tid", thread, block), ("ctaid", cta, grid)):
        parts = index % extent[0], index // extent[0] % extent[1], index // (extent[0] * extent[1])
        for d, part, n in zip("xyz", parts, extent, strict=True):
            found[f"%{word}.{d}"] = part.astype(np.uint32)
            found[f"%n{word}.{d}"] = np.full(len(thread), n, np.uint32)
    lane = (thread % 32).astype(np.uint32)
    found |= {"%laneid": lane, "%warpid": (thread // 32).astype(np.uint32)}
    one, full = np.uint32(1), np.uint32(0xFFFFFFFF)
    bit = one << lane
    found |= {"%lanemask_eq": bit, "%lanemask_lt": bit - one, "%lanemask_le": bit | (bit - one)}
    found |= {"%lanemask_gt": full ^ (bit | (bit - one)), "%lanemask_ge": full ^ (bit - one)}
    found["%nwarpid"] = np.full(len(thread), -(-int(np.prod(block)) // 32), np.uint32)
    return found

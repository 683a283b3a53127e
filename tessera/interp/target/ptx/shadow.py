"""What the debug mode knows of each byte of shared memory: who wrote it, who read it, and when."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tessera.errors import AsyncCopyError, RaceError, TesseraError, UninitializedError
from tessera.interp.target.ptx.clocks import Clocks
from tessera.interp.target.ptx.fault import Fault

if TYPE_CHECKING:
    from tessera.interp.target.ptx.machine import Machine


class _Events:
    """The last event of a kind at each byte: column, clock and program counter."""

    def __init__(self, size: int) -> None:
        self.column = np.full(size, -1, np.int32)
        self.time = np.zeros(size, np.int32)
        self.pc = np.zeros(size, np.int32)

    def set(self, where: np.ndarray, column: np.ndarray, time: np.ndarray, pc: int) -> None:
        """Record one."""
        self.column[where], self.time[where], self.pc[where] = column, time, pc

    def copy(self, where: np.ndarray, other: _Events) -> None:
        """Take over another's."""
        self.set(where, other.column[where], other.time[where], 0)
        self.pc[where] = other.pc[where]


class Bytes:
    """The bytes of all shared memory of a machine.

    Of reads the last two by different warps are kept: a third reader that no barrier orders may go unseen.
    """

    def __init__(self, m: Machine, clocks: Clocks) -> None:
        self.m, self.clocks = m, clocks
        size = m.flat["shared"].raw.size
        self.known = np.zeros(size, bool)
        self.writes, self.reads, self.older_reads = _Events(size), _Events(size), _Events(size)
        self.atomic = np.zeros(size, bool)
        self.unfenced = np.zeros(size, bool)  # written by a thread and not yet seen by the engines that copy

    def read(
        self,
        where: np.ndarray,
        flat: np.ndarray,
        column: np.ndarray,
        time: np.ndarray,
        engine: bool,
        atomic: bool = False,
    ) -> None:
        """A read of bytes by lanes (each its own), or by an engine for them."""
        if not (known := self.known[where]).all():
            at = int(np.argmin(known))
            raise self._fault(where, flat, at, "is read before it is written", UninitializedError)
        plain = ~self.atomic[where] if atomic else np.ones(len(where), bool)
        self._ordered(where[plain], flat[plain], self.writes, "read")
        if engine and (bad := self.unfenced[where]).any():
            at = int(np.argmax(bad))
            words = "is read by an asynchronous copy or matrix instruction without a fence.proxy.async after it was"
            raise self._fault(where, flat, at, f"{words} written{self._by(self.writes, where[at])}", AsyncCopyError)
        other = self.reads.column[where] // 32 != column // 32
        self.older_reads.copy(where[other], self.reads)
        self.reads.set(where, column, time, self.m.pc)

    def write(
        self,
        where: np.ndarray,
        flat: np.ndarray,
        column: np.ndarray,
        time: np.ndarray,
        engine: bool,
        atomic: bool = False,
    ) -> None:
        """A write, or an atomic update, which may meet others of its kind."""
        plain = ~self.atomic[where] if atomic else np.ones(len(where), bool)
        self._ordered(where[plain], flat[plain], self.writes, "write")
        for reads in (self.reads, self.older_reads):
            self._ordered(where[plain], flat[plain], reads, "write")
        self.known[where] = True
        self.writes.set(where, column, time, self.m.pc)
        self.atomic[where], self.unfenced[where] = atomic, not engine
        for reads in (self.reads, self.older_reads):
            reads.column[where] = -1

    def _ordered(self, where: np.ndarray, flat: np.ndarray, events: _Events, kind: str) -> None:
        """The event must have been seen by the lanes that now access the bytes."""
        column = events.column[where]
        seen = self.clocks.seen(flat, column, events.time[where])
        if seen.all():
            return
        at = int(np.argmin(seen))
        before = "read" if events is not self.writes else "written"
        late = self.m.program.lines[self.m.pc].instruction.name
        if int(column[at]) >= self.clocks.size:
            words = f"meets an asynchronous access that nothing has waited for: {before}"
            raise self._fault(where, flat, at, words + self._by(events, where[at]), AsyncCopyError)
        words = (
            f"is {'read' if kind == 'read' else 'written'} by {late} with nothing that orders it after being {before}"
        )
        raise self._fault(where, flat, at, words + self._by(events, where[at]), RaceError)

    def _by(self, events: _Events, byte: int) -> str:
        """Who caused an event."""
        inst = self.m.program.lines[int(events.pc[byte])].instruction
        source = f" ({inst.source})" if inst.source else ""
        column = int(events.column[byte])
        if column >= self.clocks.size:
            return f" by {inst.name} at {inst.location}{source}"
        cta = int(byte) // self.m.shared_size
        row = int(self.m.row_of[self.m.cluster[cta], column // self.m.threads])
        who = self.m.name_of(row * self.m.threads + column % self.m.threads)
        return f" by {inst.name} at {inst.location}{source}, {who}"

    def _fault(self, where: np.ndarray, flat: np.ndarray, at: int, words: str, kind: type[TesseraError]) -> Fault:
        place = int(where[at]) % self.m.shared_size
        return Fault(f"byte {place} of shared memory {words}", kind, int(flat[at]))

    def fence(self, groups: list[np.ndarray]) -> None:
        """Engines see what these lanes wrote or had seen."""
        dirty = np.flatnonzero(self.unfenced)
        for flat in groups:
            known = self.clocks.vectors[flat].max(axis=0)
            seen = known[self.writes.column[dirty]] >= self.writes.time[dirty]
            same = self.m.cluster[dirty // self.m.shared_size] == self.m.cluster[int(flat[0]) // self.m.threads]
            self.unfenced[dirty[seen & same]] = False

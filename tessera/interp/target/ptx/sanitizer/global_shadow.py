"""Shadow memory of global memory over a whole launch: the last accesses of each cell, and what orders them.

Vector clocks order the threads of a cluster. A strong access (an atomic operation, or a load or store that is volatile,
relaxed, acquire or release) also orders threads of different clusters by release and acquire.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tessera.core.errors import RaceError, UninitializedError
from tessera.interp.target.ptx.machine.memory import PtxFault
from tessera.interp.target.ptx.machine.special_registers import LaunchShape, find_cluster_and_rank, unflatten_index

if TYPE_CHECKING:
    from tessera.interp.target.ptx.machine.lane_set import LaneSet
    from tessera.interp.target.ptx.machine.simt import PtxMachine

Known = dict[int, np.ndarray]  # by cluster: the last known clock of each of its threads
READ, WRITE, ATOMIC = "read", "write", "atomic"


class _GlobalAccessRecord:
    """The last access of a kind to each cell: 1 + the thread in the grid (0: none), its clock, and its instruction."""

    def __init__(self, size: int) -> None:
        # The operating system allocates pages of zeros on first use: unused parts of a large array cost nothing.
        self.who, self.time, self.pc = np.zeros(size, np.int64), np.zeros(size, np.int32), np.zeros(size, np.int32)

    def set(self, where: np.ndarray, who: np.ndarray, time: np.ndarray, pc: int) -> None:
        """Record an access."""
        self.who[where], self.time[where], self.pc[where] = who, time, pc

    def copy(self, where: np.ndarray, other: _GlobalAccessRecord) -> None:
        """Copy records of another kind."""
        self.who[where], self.time[where], self.pc[where] = other.who[where], other.time[where], other.pc[where]


class GlobalShadow:
    """Global memory in cells of the program's smallest access size, and the clocks that clusters have acquired."""

    def __init__(self, launch: LaunchShape, size: int, unit: int, known: np.ndarray | None = None) -> None:
        self.launch, self.unit = launch, unit
        self.known = known  # which bytes are initialised; None: all
        cells = -(-size // unit)
        self.writes, self.reads, self.older_reads = (
            _GlobalAccessRecord(cells),
            _GlobalAccessRecord(cells),
            _GlobalAccessRecord(cells),
        )
        self.strong = np.zeros(cells, bool)  # whether the last write was strong
        self.acquired: dict[int, Known] = {}
        self.released_at: dict[object, Known] = {}

    def access(
        self,
        m: PtxMachine,
        kind: str,
        lanes: LaneSet,
        offsets: np.ndarray,
        size: int,
        strong: bool,
        changed: np.ndarray | None,
    ) -> None:
        """Lanes read, write or update bytes at these offsets; `changed` marks the writes that change memory.

        Writes of the same value to one address do not race, as in the kernel debugger.
        """
        if strong:
            self.synchronise(m, lanes, offsets, kind)
        if self.known is not None:
            self._track_initialised(m, kind, lanes, offsets, size)
        per = max(size // self.unit, 1)
        where = (offsets[:, None] // self.unit + np.arange(per)).reshape(-1)
        flat, clocks = np.repeat(lanes.flat, per), m.shadow.clocks
        who = 1 + (m.first_cluster + m.cluster[flat // m.threads]) * clocks.size + clocks.own[flat]
        news = slice(None) if changed is None else np.repeat(changed, per)
        self._check_ordered(m, where[news], flat[news], self.writes, kind, strong)
        if kind == READ:
            self._record_read(m, where, who, clocks.clock(flat))
            return
        for reads in (self.reads, self.older_reads):
            self._check_ordered(m, where, flat, reads, kind, strong)
            reads.who[where] = 0
        self.writes.set(where, who, clocks.clock(flat), m.pc)
        self.strong[where] = strong

    def _record_read(self, m: PtxMachine, where: np.ndarray, who: np.ndarray, time: np.ndarray) -> None:
        earlier = self.reads.who[where]
        other = (earlier - 1) // 32 != (who - 1) // 32
        if self.launch.replicated:  # the first thread of the copies stands for all
            copies = (self.reads.pc[where] == m.pc) & ((earlier - 1) // m.threads == (who - 1) // m.threads)
            kept = ~(copies & (earlier != 0) & (earlier < who))
            where, who, time, other = (a[kept][::-1] for a in (where, who, time, other & ~copies))
        self.older_reads.copy(where[other], self.reads)
        self.reads.set(where, who, time, m.pc)

    def _track_initialised(self, m: PtxMachine, kind: str, lanes: LaneSet, offsets: np.ndarray, size: int) -> None:
        where = offsets[:, None] + np.arange(size)
        if kind == READ or m.program.lines[m.pc].instruction.op[0] in ("atom", "red"):
            self.require_initialised(m, where, lanes.flat)
        else:
            self.known[where] = True  # type: ignore[index]

    def require_initialised(self, m: PtxMachine, where: np.ndarray, flat: np.ndarray) -> None:
        """Lanes read bytes, a row for each lane."""
        if self.known is None or (known := self.known[where]).all():
            return
        row = int(np.argmin(known.all(axis=1)))
        words = m.arena.describe(int(where[row, np.argmin(known[row])]))
        raise PtxFault(f"{words}, is read before it is written", UninitializedError, int(flat[row]))

    def _check_ordered(
        self, m: PtxMachine, where: np.ndarray, flat: np.ndarray, events: _GlobalAccessRecord, kind: str, strong: bool
    ) -> None:
        """Each earlier access must happen before the lane's access, unless both are strong."""
        who = events.who[where]
        if not who.any():
            return
        seen = (who == 0) | self._is_ordered_before(m, flat, who - 1, events.time[where])
        if strong:
            seen |= self.strong[where] if events is self.writes else True
        if seen.all():
            return
        at = int(np.argmin(seen))
        words = m.arena.describe(int(where[at]) * self.unit).split(",")[0]
        instruction, earlier = m.program.lines[m.pc].instruction, m.program.lines[int(events.pc[where[at]])].instruction
        verbs = ("read" if kind == READ else "written", "written" if events is self.writes else "read")
        message = f"{words} is {verbs[0]} by {instruction.name} with nothing that orders it after being {verbs[1]}"
        source = f" ({earlier.source})" if earlier.source else ""
        name = self._describe_thread(int(who[at]) - 1, m.shadow.clocks.size)
        raise PtxFault(f"{message} by {earlier.name} at {earlier.location}{source}, {name}", RaceError, int(flat[at]))

    def _is_ordered_before(self, m: PtxMachine, flat: np.ndarray, who: np.ndarray, time: np.ndarray) -> np.ndarray:
        clocks = m.shadow.clocks
        theirs, column = np.divmod(np.maximum(who, 0), clocks.size)
        mine = m.first_cluster + m.cluster[flat // m.threads]
        same = theirs == mine
        result = same & (clocks.vectors[flat, column] >= time)
        apart = np.flatnonzero(~same & (who >= 0))
        for pair in np.unique(np.stack([mine[apart], theirs[apart]], axis=1), axis=0).tolist():
            known = self.acquired.get(pair[0], {}).get(pair[1])
            if known is not None:
                subset = apart[(mine[apart] == pair[0]) & (theirs[apart] == pair[1])]
                result[subset] = known[column[subset]] >= time[subset]
        return result

    def synchronise(self, m: PtxMachine, lanes: LaneSet, offsets: np.ndarray, kind: str, space: str = "global") -> None:
        """Strong accesses to addresses: writers release their clocks there, readers acquire them."""
        mine = m.first_cluster + m.cluster[lanes.ctas]
        for offset in np.unique(offsets).tolist():
            here = offsets == offset
            key = offset if space == "global" else (space, m.first_cluster, offset)
            known = self.released_at.setdefault(key, {})
            if kind != READ:
                for c in np.unique(mine[here]).tolist():
                    self._release(m, lanes.flat[here & (mine == c)], c, known)
            if kind != WRITE:
                for c in np.unique(mine[here]).tolist():
                    self._acquire(m, lanes.flat[here & (mine == c)], c, known)

    def _release(self, m: PtxMachine, flat: np.ndarray, cluster: int, known: Known) -> None:
        own = m.shadow.clocks.release_clocks(flat)
        for c, vector in {**self.acquired.get(cluster, {}), cluster: own}.items():
            known[c] = np.maximum(known[c], vector) if c in known else vector.copy()

    def _acquire(self, m: PtxMachine, flat: np.ndarray, cluster: int, known: Known) -> None:
        mine = self.acquired.setdefault(cluster, {})
        for c, vector in known.items():
            if c == cluster:
                m.shadow.clocks.acquire_clocks(flat, vector)
            else:
                mine[c] = np.maximum(mine[c], vector) if c in mine else vector.copy()

    def _describe_thread(self, who: int, size: int) -> str:
        """The block and thread of a thread of the grid, for errors."""
        cluster, column = divmod(who, size)
        rank, thread = divmod(column, self.launch.threads)
        clusters, ranks = find_cluster_and_rank(self.launch)
        cta = int(np.flatnonzero((clusters == cluster) & (ranks == rank))[0])
        at = [
            ",".join(str(int(p[0])) for p in unflatten_index(np.array([i]), e))
            for i, e in ((cta, self.launch.grid), (thread, self.launch.block))
        ]
        return f"block ({at[0]}), thread ({at[1]})"

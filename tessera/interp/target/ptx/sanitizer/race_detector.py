"""Happens-before race detection for shared memory: vector clocks, shadow bytes and ordering events.

A clock counts the releases of a thread; another thread has seen them up to the entry in its own vector. Data that an
asynchronous copy moves belongs to an engine of its own (one a thread, or one an mbarrier), which no thread has seen
before the wait. (Lamport 1978; FastTrack, Flanagan and Freund 2009, keeps the last write and reads of each place.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tessera.core.errors import AsyncCopyError, RaceError, TesseraError, UninitializedError
from tessera.interp.target.ptx.machine.fault import PtxFault
from tessera.interp.target.ptx.machine.lane_set import LaneSet

if TYPE_CHECKING:
    from tessera.interp.target.ptx.isa.addressing import LaneAccess
    from tessera.interp.target.ptx.machine.simt import PtxMachine


# Vector clocks: what each thread knows to have happened, in threads and in the engines that copy for them.
#
# A thread's clock counts its releases; another thread has seen them up to the entry in its own vector. Data that an
# asynchronous copy moves belongs to an engine of its own (one a thread, or one an mbarrier), which nobody has seen
# before
# the wait. (Lamport 1978; FastTrack, Flanagan and Freund 2009, keeps the last write and reads of each place as here.)


_BARRIERS = 256  # mbarriers of a cluster whose transfers are told apart
ENGINES = {"copy": 1, "matrix": 2, "bulk": 3}


class PtxVectorClocks:
    """The vectors of all lanes: one row a lane, one column a thread or engine of its cluster."""

    def __init__(self, m: PtxMachine) -> None:
        self.m = m
        self.size = m.cta_of_rank.shape[1] * m.threads
        self.vectors = np.zeros((m.ctas * m.threads, 4 * self.size + _BARRIERS), np.int32)
        lane = np.arange(m.ctas * m.threads)
        self.own = m.rank[lane // m.threads] * m.threads + lane % m.threads  # the column of each lane
        self.vectors[lane, self.own] = 1
        self.committed = {kind: np.zeros(len(lane), np.int32) for kind in ENGINES}
        self.columns: dict[int, int] = {}

    def time(self, flat: np.ndarray) -> np.ndarray:
        """The clocks of lanes."""
        return self.vectors[flat, self.own[flat]]

    def engine(self, kind: str, flat: np.ndarray) -> np.ndarray:
        """The columns of the engines that work for lanes."""
        return ENGINES[kind] * self.size + self.own[flat]

    def barrier_column(self, offset: int) -> int:
        """The column of the transfers that an mbarrier counts."""
        place = self.columns.setdefault(offset, len(self.columns) % _BARRIERS)
        return 4 * self.size + place

    def seen(self, flat: np.ndarray, column: np.ndarray, time: np.ndarray) -> np.ndarray:
        """Whether lanes have seen events; column -1 is none."""
        return (column < 0) | (self.vectors[flat, column] >= time)

    def release_clocks(self, flat: np.ndarray) -> np.ndarray:
        """What lanes know together; they then begin a new stretch of time."""
        known = self.vectors[flat].max(axis=0)
        self.vectors[flat, self.own[flat]] += 1
        return known

    def acquire_clocks(self, flat: np.ndarray, known: np.ndarray) -> None:
        """Lanes come to know what a vector says."""
        self.vectors[flat] = np.maximum(self.vectors[flat], known)

    def synchronise(self, flat: np.ndarray, known: np.ndarray | None = None) -> None:
        """Lanes that wait for each other know afterwards what any of them knew, and what came before."""
        together = self.release_clocks(flat)
        self.acquire_clocks(flat, together if known is None else np.maximum(together, known))

    def groups(self, lanes: LaneSet, team: int) -> list[np.ndarray]:
        """Lanes divided by warp or warpgroup of their CTA."""
        key = lanes.ctas * (self.m.threads // team + 1) + lanes.flat % self.m.threads // team
        order = np.argsort(key, kind="stable")
        return np.split(lanes.flat[order], np.flatnonzero(np.diff(key[order])) + 1)

    def current(self, kind: str, flat: np.ndarray) -> np.ndarray:
        """The number of the group that lanes' engines are filling."""
        return self.committed[kind][flat] + 1

    def commit(self, kind: str, flat: np.ndarray) -> None:
        """Close the groups of lanes."""
        self.committed[kind][flat] += 1

    def wait(self, kind: str, flat: np.ndarray, left: int) -> None:
        """Lanes have seen all groups of their engines but the latest so many."""
        columns, done = self.engine(kind, flat), self.committed[kind][flat] - left
        self.vectors[flat, columns] = np.maximum(self.vectors[flat, columns], done)


# What the debug mode knows of each byte of shared memory: who wrote it, who read it, and when.


class _SharedAccessRecord:
    """The last event of a kind at each byte: column, clock and program counter."""

    def __init__(self, size: int) -> None:
        self.column = np.full(size, -1, np.int32)
        self.time = np.zeros(size, np.int32)
        self.pc = np.zeros(size, np.int32)

    def set(self, where: np.ndarray, column: np.ndarray, time: np.ndarray, pc: int) -> None:
        """Record one."""
        self.column[where], self.time[where], self.pc[where] = column, time, pc

    def copy(self, where: np.ndarray, other: _SharedAccessRecord) -> None:
        """Take over another's."""
        self.set(where, other.column[where], other.time[where], 0)
        self.pc[where] = other.pc[where]


class SharedShadow:
    """The bytes of all shared memory of a machine.

    Of reads the last two by different warps are kept: a third reader that no barrier orders may go unseen.
    """

    def __init__(self, m: PtxMachine, clocks: PtxVectorClocks) -> None:
        self.m, self.clocks = m, clocks
        size = m.flat["shared"].raw.size
        self.known = np.zeros(size, bool)
        self.writes, self.reads, self.older_reads = (
            _SharedAccessRecord(size),
            _SharedAccessRecord(size),
            _SharedAccessRecord(size),
        )
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

    def _ordered(self, where: np.ndarray, flat: np.ndarray, events: _SharedAccessRecord, kind: str) -> None:
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

    def _by(self, events: _SharedAccessRecord, byte: int) -> str:
        """Who caused an event."""
        inst = self.m.program.lines[int(events.pc[byte])].instruction
        source = f" ({inst.source})" if inst.source else ""
        column = int(events.column[byte])
        if column >= self.clocks.size:
            return f" by {inst.name} at {inst.location}{source}"
        cta = int(byte) // self.m.shared_size
        row = int(self.m.cta_of_rank[self.m.cluster[cta], column // self.m.threads])
        who = self.m.describe_lane(row * self.m.threads + column % self.m.threads)
        return f" by {inst.name} at {inst.location}{source}, {who}"

    def _fault(self, where: np.ndarray, flat: np.ndarray, at: int, words: str, kind: type[TesseraError]) -> PtxFault:
        place = int(where[at]) % self.m.shared_size
        return PtxFault(f"byte {place} of shared memory {words}", kind, int(flat[at]))

    def fence(self, groups: list[np.ndarray]) -> None:
        """Engines see what these lanes wrote or had seen."""
        dirty = np.flatnonzero(self.unfenced)
        for flat in groups:
            known = self.clocks.vectors[flat].max(axis=0)
            seen = known[self.writes.column[dirty]] >= self.writes.time[dirty]
            same = self.m.cluster[dirty // self.m.shared_size] == self.m.cluster[int(flat[0]) // self.m.threads]
            self.unfenced[dirty[seen & same]] = False


# The debug mode: what instructions tell it, and what it makes of that.


class PtxRaceDetector:
    """Follows accesses of shared memory and everything that orders them."""

    def __init__(self, m: PtxMachine) -> None:
        self.m = m
        self.clocks = PtxVectorClocks(m)
        self.bytes = SharedShadow(m, self.clocks)
        self.arrived: dict[object, np.ndarray] = {}  # what those knew who have arrived at a barrier
        self.released: dict[int, np.ndarray] = {}  # what those who wait for an mbarrier learn
        self.in_flight: dict[int, np.ndarray] = {}  # registers that matrix instructions still write: group by lane
        self.in_matrix_instruction = False
        self.local = np.zeros(m.flat["local"].raw.size, bool)  # which bytes of local memory were written

    def access(self, kind: str, spot: LaneAccess, size: int, strong: bool, changed: np.ndarray | None = None) -> None:
        """Loads, stores and atomics of lanes themselves; `changed` says which stores change anything."""
        of_space = {"shared": self._shared, "global": self._global, "local": self._local}
        of_space[spot.space](kind, spot, size, strong, changed)

    def _global(self, kind: str, spot: LaneAccess, size: int, strong: bool, changed: np.ndarray | None) -> None:
        self.m.world.access(self.m, kind, spot.lanes, spot.lanes.compress(spot.offset), size, strong, changed)

    def _local(self, kind: str, spot: LaneAccess, size: int, strong: bool, changed: np.ndarray | None) -> None:
        """Of reads, see `known`."""
        if kind != "read":
            self.local[spot.lanes.compress(spot.offset)[:, None] + np.arange(size)] = True

    def known(self, spot: LaneAccess, size: int) -> np.ndarray:
        """Whether a byte of each access of local memory was written: of structures some are padding."""
        where = spot.lanes.compress(spot.offset)[:, None] + np.arange(size)
        return spot.lanes.spread(np.asarray(self.local[where].any(axis=1)))

    def set_known(self, spot: LaneAccess, size: int, each: list[np.ndarray]) -> None:
        """What a store of registers, of so many bytes each, leaves in local memory counts as written if they do."""
        start = spot.lanes.compress(spot.offset)
        for k, known in enumerate(each):
            where = start[:, None] + np.arange(k * size, (k + 1) * size)
            self.local[where] = spot.lanes.compress(known)[:, None]

    def _shared(self, kind: str, spot: LaneAccess, size: int, strong: bool, changed: np.ndarray | None) -> None:
        lanes, offsets = spot.lanes, spot.lanes.compress(spot.offset)
        if strong:
            self.m.world.synchronise(self.m, lanes, offsets, kind, "shared")
        where = (offsets[:, None] + np.arange(size)).reshape(-1)
        flat = np.repeat(lanes.flat, size)
        column, time = self.clocks.own[flat], self.clocks.time(flat)
        if kind == "read":
            self.bytes.read(where, flat, column, time, engine=False, atomic=strong)
        else:
            self.bytes.write(where, flat, column, time, engine=False, atomic=strong)

    # Barriers of CTAs, warps and clusters

    def barrier_released(self, flat: np.ndarray, key: object) -> None:
        """Lanes leave a barrier together."""
        self.clocks.synchronise(flat, self.arrived.pop(key, None))

    def barrier_arrived(self, flat: np.ndarray, key: object) -> None:
        """Lanes count at a barrier and do not wait."""
        known = self.clocks.release_clocks(flat)
        self.arrived[key] = np.maximum(self.arrived.get(key, known), known)

    def join(self, lanes: LaneSet, team: int) -> None:
        """Lanes of a warp wait for each other."""
        for flat in self.clocks.groups(lanes, team):
            self.clocks.synchronise(flat)

    def cluster_arrived(self, lanes: LaneSet) -> None:
        """As at a barrier of the CTA, by cluster."""
        cluster = self.m.cluster[lanes.ctas]
        for c in np.unique(cluster).tolist():
            self.barrier_arrived(lanes.flat[cluster == c], ("cluster", c))

    def cluster_waited(self, lanes: LaneSet) -> None:
        """Lanes have seen all that arrived."""
        cluster = self.m.cluster[lanes.ctas]
        for c in np.unique(cluster).tolist():
            if (known := self.arrived.get(("cluster", c))) is not None:
                self.clocks.acquire_clocks(lanes.flat[cluster == c], known)

    # mbarriers

    def mbarrier_arrived(self, lanes: LaneSet, offsets: np.ndarray) -> None:
        """Lanes arrive at mbarriers."""
        for offset in np.unique(offsets).tolist():
            self.barrier_arrived(lanes.flat[offsets == offset], offset)

    def phase_completed(self, offset: int, phase: int) -> None:
        """A phase of an mbarrier ended: its transfers too are there."""
        known = self.arrived.pop(offset, np.zeros(self.clocks.vectors.shape[1], np.int32)).copy()
        known[self.clocks.barrier_column(offset)] = phase
        before = self.released.get(offset)
        self.released[offset] = known if before is None else np.maximum(known, before)

    def mbarrier_waited(self, lanes: LaneSet, offsets: np.ndarray) -> None:
        """Lanes have seen a phase end."""
        for offset in np.unique(offsets).tolist():
            if (known := self.released.get(offset)) is not None:
                self.clocks.acquire_clocks(lanes.flat[offsets == offset], known)

    # Copies

    def copy_issued(self, lanes: LaneSet, offsets: np.ndarray, size: int) -> None:
        """A thread's own copy will write these bytes."""
        where, flat = (offsets[:, None] + np.arange(size)).reshape(-1), np.repeat(lanes.flat, size)
        column, time = self.clocks.engine("copy", flat), self.clocks.current("copy", flat)
        # cp.async writes as the thread itself would: another engine must be shown it by a fence.
        self.bytes.write(where, flat, column, time, engine=False)

    def bulk_read(self, lane: int, start: int, size: int) -> None:
        """A bulk copy reads shared memory."""
        where, flat = np.arange(start, start + size), np.full(size, lane)
        column, time = self.clocks.engine("bulk", flat), self.clocks.current("bulk", flat)
        self.bytes.read(where, flat, column, time, engine=True)

    def bulk_write(self, lane: int, start: int, size: int, barrier: int, phase: int) -> None:
        """A bulk copy writes shared memory, and counts at an mbarrier."""
        where, flat = np.arange(start, start + size), np.full(size, lane)
        column = np.full(size, self.clocks.barrier_column(barrier))
        self.bytes.write(where, flat, column, np.full(size, phase + 1), engine=True)

    def committed(self, lanes: LaneSet, kind: str) -> None:
        """Lanes close a group of copies."""
        self.clocks.commit(kind, lanes.flat)

    def group_waited(self, lanes: LaneSet, kind: str, left: int, everything: bool) -> None:
        """Lanes have waited for all but the latest groups; `everything` includes what is in none yet."""
        if everything:
            self.clocks.commit(kind, lanes.flat)
        self.clocks.wait(kind, lanes.flat, left)

    def fence(self, lanes: LaneSet) -> None:
        """A proxy fence."""
        key = lanes.ctas
        self.bytes.fence([lanes.flat[key == c] for c in np.unique(key).tolist()])

    # Matrix instructions of warpgroups

    def matrix_read(self, lanes: LaneSet, chunks: np.ndarray, team: int) -> None:
        """Each team's descriptor names chunks of 16 bytes."""
        for leader, starts in zip(lanes.flat[::team].tolist(), chunks, strict=True):
            where = (starts[:, None] + np.arange(16)).reshape(-1)
            flat = np.full(len(where), leader)
            column, time = self.clocks.engine("matrix", flat), self.clocks.current("matrix", flat)
            self.bytes.read(where, flat, column, time, engine=True)

    def matrix_issued(self, lanes: LaneSet, registers: list[int]) -> None:
        """Accumulators that are written until the wait."""
        groups = self.clocks.current("matrix", lanes.flat)
        for index in registers:
            pending = self.in_flight.setdefault(index, np.zeros(self.m.ctas * self.m.threads, np.int32))
            pending[lanes.flat] = groups

    def matrix_group(self, lanes: LaneSet, kind: str, left: int) -> None:
        """commit_group and wait_group; the fence orders registers, which execute in order here."""
        if kind == "commit":
            self.clocks.commit("matrix", lanes.flat)
        elif kind == "wait":
            self.clocks.wait("matrix", lanes.flat, left)
            for flat in self.clocks.groups(lanes, 128):  # reads were entered for the first thread of each group
                leader = flat[:1] // self.m.threads * self.m.threads + flat[:1] % self.m.threads // 128 * 128
                column = self.clocks.engine("matrix", leader)
                self.clocks.vectors[flat, column] = self.clocks.committed["matrix"][leader] - left

    def check_register(self, index: int, lanes: LaneSet) -> None:
        """A register must not be read while a matrix instruction writes it."""
        pending = self.in_flight.get(index)
        if pending is None or self.in_matrix_instruction:
            return
        seen = self.clocks.vectors[lanes.flat, self.clocks.engine("matrix", lanes.flat)] >= pending[lanes.flat]
        if not seen.all():
            name, lane = self.m.program.names[index], int(lanes.flat[np.argmin(seen)])
            raise PtxFault(
                f"register {name} is read before the wgmma that writes it was waited for", AsyncCopyError, lane
            )

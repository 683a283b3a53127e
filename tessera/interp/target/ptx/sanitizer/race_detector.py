"""Happens-before race detection for shared memory: vector clocks, shadow bytes and ordering events.

A thread's clock counts its releases; another thread has seen them up to the entry in its own vector. Asynchronous
copies belong to engines (one for each thread, or one for each mbarrier) with clocks of their own, which no thread has
seen before its wait. (Lamport 1978; like FastTrack, Flanagan and Freund 2009, it keeps the last write and reads of each
byte.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tessera.core.errors import AsyncCopyError, RaceError, TesseraError, UninitializedError
from tessera.interp.target.ptx.machine.lane_set import LaneSet
from tessera.interp.target.ptx.machine.memory import PtxFault
from tessera.interp.target.ptx.sanitizer.matrix_registers import MatrixRegisterShadow

if TYPE_CHECKING:
    from tessera.interp.target.ptx.isa.addressing import LaneAccess
    from tessera.interp.target.ptx.machine.simt import PtxMachine


# Vector clocks of threads, and of the engines that copy for them.


_BARRIERS = 256  # mbarriers of a cluster that have a column of their own
ENGINES = {"copy": 1, "matrix": 2, "bulk": 3}


class PtxVectorClocks:
    """The vectors of all lanes: a row for each lane, a column for each thread or engine of its cluster."""

    def __init__(self, m: PtxMachine) -> None:
        self.m = m
        self.size = m.cta_of_rank.shape[1] * m.threads
        self.vectors = np.zeros((m.ctas * m.threads, 4 * self.size + _BARRIERS), np.int32)
        lane = np.arange(m.ctas * m.threads)
        self.own = m.rank[lane // m.threads] * m.threads + lane % m.threads  # the column of each lane
        self.vectors[lane, self.own] = 1
        self.committed = {kind: np.zeros(len(lane), np.int32) for kind in ENGINES}
        self.columns: dict[int, int] = {}

    def clock(self, flat: np.ndarray) -> np.ndarray:
        """The clocks of lanes."""
        return self.vectors[flat, self.own[flat]]

    def find_engine_columns(self, kind: str, flat: np.ndarray) -> np.ndarray:
        """The columns of lanes' engines."""
        return ENGINES[kind] * self.size + self.own[flat]

    def find_barrier_column(self, offset: int) -> int:
        """The column of the copies that an mbarrier counts."""
        place = self.columns.setdefault(offset, len(self.columns) % _BARRIERS)
        return 4 * self.size + place

    def has_seen(self, flat: np.ndarray, column: np.ndarray, time: np.ndarray) -> np.ndarray:
        """Whether lanes have seen events; column -1 is no event."""
        return (column < 0) | (self.vectors[flat, column] >= time)

    def release_clocks(self, flat: np.ndarray) -> np.ndarray:
        """The joint vector of lanes; their clocks advance."""
        known = self.vectors[flat].max(axis=0)
        self.vectors[flat, self.own[flat]] += 1
        return known

    def acquire_clocks(self, flat: np.ndarray, known: np.ndarray) -> None:
        """Join a vector into the vectors of lanes."""
        self.vectors[flat] = np.maximum(self.vectors[flat], known)

    def synchronise(self, flat: np.ndarray, known: np.ndarray | None = None) -> None:
        """Lanes at a barrier: each acquires the joint vector of all, and `known` of earlier arrivals."""
        joint = self.release_clocks(flat)
        self.acquire_clocks(flat, joint if known is None else np.maximum(joint, known))

    def split_into_groups(self, lanes: LaneSet, group_size: int) -> list[np.ndarray]:
        """Lanes by warp or warpgroup of their CTA."""
        key = lanes.ctas * (self.m.threads // group_size + 1) + lanes.flat % self.m.threads // group_size
        order = np.argsort(key, kind="stable")
        return np.split(lanes.flat[order], np.flatnonzero(np.diff(key[order])) + 1)

    def current_group(self, kind: str, flat: np.ndarray) -> np.ndarray:
        """The number of the group that lanes' engines are filling."""
        return self.committed[kind][flat] + 1

    def commit_group(self, kind: str, flat: np.ndarray) -> None:
        """Close the current groups of lanes."""
        self.committed[kind][flat] += 1

    def wait_groups(self, kind: str, flat: np.ndarray, pending_groups: int) -> None:
        """Lanes have seen all groups of their engines except the latest `pending_groups`."""
        columns, done = self.find_engine_columns(kind, flat), self.committed[kind][flat] - pending_groups
        self.vectors[flat, columns] = np.maximum(self.vectors[flat, columns], done)


# Shadow of shared memory: the last accesses of each byte.


class _SharedAccessRecord:
    """The last access of a kind to each byte: column, clock and instruction."""

    def __init__(self, size: int) -> None:
        self.column = np.full(size, -1, np.int32)
        self.clock = np.zeros(size, np.int32)
        self.pc = np.zeros(size, np.int32)

    def set(self, where: np.ndarray, column: np.ndarray, time: np.ndarray, pc: int) -> None:
        """Record an access."""
        self.column[where], self.clock[where], self.pc[where] = column, time, pc

    def copy(self, where: np.ndarray, other: _SharedAccessRecord) -> None:
        """Copy records of another kind."""
        self.set(where, other.column[where], other.clock[where], 0)
        self.pc[where] = other.pc[where]


class SharedShadow:
    """The shadow bytes of all shared memory of a machine.

    The last two reads by different warps are kept: a third unordered reader may be missed.
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
        self.unfenced = np.zeros(size, bool)  # written by a thread without a proxy fence since

    def read(
        self,
        where: np.ndarray,
        flat: np.ndarray,
        column: np.ndarray,
        time: np.ndarray,
        engine: bool,
        atomic: bool = False,
    ) -> None:
        """A read of bytes by lanes, or by an engine for them."""
        if not (known := self.known[where]).all():
            at = int(np.argmin(known))
            raise self._make_fault(where, flat, at, "is read before it is written", UninitializedError)
        plain = ~self.atomic[where] if atomic else np.ones(len(where), bool)
        self._check_ordered(where[plain], flat[plain], self.writes, "read")
        if engine and (bad := self.unfenced[where]).any():
            at = int(np.argmax(bad))
            message = "is read by an asynchronous copy or matrix instruction without a fence.proxy.async after it was"
            raise self._make_fault(
                where, flat, at, f"{message} written{self._describe_access(self.writes, where[at])}", AsyncCopyError
            )
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
        """A write, or an atomic update, which does not race with other atomic updates."""
        plain = ~self.atomic[where] if atomic else np.ones(len(where), bool)
        self._check_ordered(where[plain], flat[plain], self.writes, "write")
        for reads in (self.reads, self.older_reads):
            self._check_ordered(where[plain], flat[plain], reads, "write")
        self.known[where] = True
        self.writes.set(where, column, time, self.m.pc)
        self.atomic[where], self.unfenced[where] = atomic, not engine
        for reads in (self.reads, self.older_reads):
            reads.column[where] = -1

    def _check_ordered(self, where: np.ndarray, flat: np.ndarray, events: _SharedAccessRecord, kind: str) -> None:
        """The earlier access must happen before the lanes' access to the bytes."""
        column = events.column[where]
        seen = self.clocks.has_seen(flat, column, events.clock[where])
        if seen.all():
            return
        at = int(np.argmin(seen))
        verb = "read" if events is not self.writes else "written"
        instruction = self.m.program.lines[self.m.pc].instruction.name
        if int(column[at]) >= self.clocks.size:
            message = f"conflicts with an asynchronous access that nothing has waited for: {verb}"
            raise self._make_fault(where, flat, at, message + self._describe_access(events, where[at]), AsyncCopyError)
        late = "read" if kind == "read" else "written"
        message = f"is {late} by {instruction} with nothing that orders it after being {verb}"
        raise self._make_fault(where, flat, at, message + self._describe_access(events, where[at]), RaceError)

    def _describe_access(self, events: _SharedAccessRecord, byte: int) -> str:
        """The instruction and thread of an access, for errors."""
        inst = self.m.program.lines[int(events.pc[byte])].instruction
        source = f" ({inst.source})" if inst.source else ""
        column = int(events.column[byte])
        if column >= self.clocks.size:
            return f" by {inst.name} at {inst.location}{source}"
        cta = int(byte) // self.m.shared_size
        row = int(self.m.cta_of_rank[self.m.cluster[cta], column // self.m.threads])
        who = self.m.describe_lane(row * self.m.threads + column % self.m.threads)
        return f" by {inst.name} at {inst.location}{source}, {who}"

    def _make_fault(
        self, where: np.ndarray, flat: np.ndarray, at: int, message: str, kind: type[TesseraError]
    ) -> PtxFault:
        place = int(where[at]) % self.m.shared_size
        return PtxFault(f"byte {place} of shared memory {message}", kind, int(flat[at]))

    def fence(self, groups: list[np.ndarray]) -> None:
        """A proxy fence: engines see what these lanes wrote or had seen."""
        unfenced_cells = np.flatnonzero(self.unfenced)
        for flat in groups:
            known = self.clocks.vectors[flat].max(axis=0)
            seen = known[self.writes.column[unfenced_cells]] >= self.writes.clock[unfenced_cells]
            same = (
                self.m.cluster[unfenced_cells // self.m.shared_size] == self.m.cluster[int(flat[0]) // self.m.threads]
            )
            self.unfenced[unfenced_cells[seen & same]] = False


# Events: what instructions report to the sanitizer.


class PtxRaceDetector:
    """Tracks accesses to shared memory, and the events that order them."""

    def __init__(self, m: PtxMachine) -> None:
        self.m = m
        self.clocks = PtxVectorClocks(m)
        self.bytes = SharedShadow(m, self.clocks)
        self.arrived: dict[object, np.ndarray] = {}  # the joint vector of the lanes that have arrived at a barrier
        self.released: dict[int, np.ndarray] = {}  # the vector that lanes acquire when they wait for an mbarrier
        self.initialised: dict[int, tuple[int, int, int]] = {}  # of an mbarrier: column, clock and instruction
        self.bulk_reads: dict[int, int] = {}  # of a lane: the latest bulk group that reads shared memory
        self.registers = MatrixRegisterShadow(m, self.clocks)
        self.local = np.zeros(m.flat["local"].raw.size, bool)  # which bytes of local memory are initialised

    def record_access(
        self, kind: str, access: LaneAccess, size: int, strong: bool, changed: np.ndarray | None = None
    ) -> None:
        """Loads, stores and atomics of lanes; `changed` marks the stores that change memory."""
        of_space = {"shared": self._record_shared, "global": self._record_global, "local": self._record_local}
        of_space[access.space](kind, access, size, strong, changed)

    def _record_global(
        self, kind: str, access: LaneAccess, size: int, strong: bool, changed: np.ndarray | None
    ) -> None:
        self.m.global_shadow.access(
            self.m, kind, access.lanes, access.lanes.compress(access.offset), size, strong, changed
        )

    def _record_local(self, kind: str, access: LaneAccess, size: int, strong: bool, changed: np.ndarray | None) -> None:
        """Record writes; `known` checks reads."""
        if kind != "read":
            self.local[access.lanes.compress(access.offset)[:, None] + np.arange(size)] = True

    def known(self, access: LaneAccess, size: int) -> np.ndarray:
        """Whether any byte of each access to local memory is initialised; the rest of a struct may be padding."""
        where = access.lanes.compress(access.offset)[:, None] + np.arange(size)
        return access.lanes.expand(np.asarray(self.local[where].any(axis=1)))

    def set_known(self, access: LaneAccess, size: int, each: list[np.ndarray]) -> None:
        """Mark the bytes of a store to local memory as initialised where the stored registers are."""
        start = access.lanes.compress(access.offset)
        for k, known in enumerate(each):
            where = start[:, None] + np.arange(k * size, (k + 1) * size)
            self.local[where] = access.lanes.compress(known)[:, None]

    def _record_shared(
        self, kind: str, access: LaneAccess, size: int, strong: bool, changed: np.ndarray | None
    ) -> None:
        lanes, offsets = access.lanes, access.lanes.compress(access.offset)
        if strong:
            self.m.global_shadow.synchronise(self.m, lanes, offsets, kind, "shared")
        where = (offsets[:, None] + np.arange(size)).reshape(-1)
        flat = np.repeat(lanes.flat, size)
        column, time = self.clocks.own[flat], self.clocks.clock(flat)
        if kind == "read":
            self.bytes.read(where, flat, column, time, engine=False, atomic=strong)
        else:
            self.bytes.write(where, flat, column, time, engine=False, atomic=strong)

    # Barriers of CTAs, warps and clusters.

    def release_barrier(self, flat: np.ndarray, key: object) -> None:
        """A barrier released these lanes together."""
        self.clocks.synchronise(flat, self.arrived.pop(key, None))

    def arrive_at_barrier(self, flat: np.ndarray, key: object) -> None:
        """Lanes arrived at a barrier and do not wait."""
        known = self.clocks.release_clocks(flat)
        self.arrived[key] = np.maximum(self.arrived.get(key, known), known)

    def join(self, lanes: LaneSet, group_size: int) -> None:
        """Lanes of a warp or warpgroup synchronise."""
        for flat in self.clocks.split_into_groups(lanes, group_size):
            self.clocks.synchronise(flat)

    def arrive_at_cluster_barrier(self, lanes: LaneSet) -> None:
        """Lanes arrived at the barrier of their cluster."""
        cluster = self.m.cluster[lanes.ctas]
        for c in np.unique(cluster).tolist():
            self.arrive_at_barrier(lanes.flat[cluster == c], ("cluster", c))

    def wait_at_cluster_barrier(self, lanes: LaneSet) -> None:
        """Lanes waited at the barrier of their cluster."""
        cluster = self.m.cluster[lanes.ctas]
        for c in np.unique(cluster).tolist():
            if (known := self.arrived.get(("cluster", c))) is not None:
                self.clocks.acquire_clocks(lanes.flat[cluster == c], known)

    # Mbarriers.

    def initialise_mbarrier(self, lane: int, offset: int) -> None:
        """A lane initialises an mbarrier."""
        self.initialised[offset] = int(self.clocks.own[lane]), int(self.clocks.clock(np.array([lane]))[0]), self.m.pc

    def check_mbarriers(self, lanes: LaneSet, offsets: np.ndarray) -> None:
        """Lanes use mbarriers: after their initialisation."""
        for offset in np.unique(offsets).tolist():
            if offset not in self.initialised:
                continue
            column, clock, pc = self.initialised[offset]
            flat = lanes.flat[offsets == offset]
            seen = self.clocks.vectors[flat, column] >= clock
            if not seen.all():
                inst = self.m.program.lines[pc].instruction
                source = f" ({inst.source})" if inst.source else ""
                raise PtxFault(
                    f"the mbarrier at byte {offset % self.m.shared_size} is used with nothing that orders it after "
                    f"{inst.name} at {inst.location}{source}",
                    RaceError, int(flat[np.argmin(seen)]),
                )  # fmt: skip

    def arrive_at_mbarrier(self, lanes: LaneSet, offsets: np.ndarray) -> None:
        """Lanes arrive at mbarriers."""
        for offset in np.unique(offsets).tolist():
            self.arrive_at_barrier(lanes.flat[offsets == offset], offset)

    def complete_mbarrier_phase(self, offset: int, phase: int) -> None:
        """A phase of an mbarrier ended: its transfers too are there."""
        known = self.arrived.pop(offset, np.zeros(self.clocks.vectors.shape[1], np.int32)).copy()
        known[self.clocks.find_barrier_column(offset)] = phase
        verb = self.released.get(offset)
        self.released[offset] = known if verb is None else np.maximum(known, verb)

    def wait_at_mbarrier(self, lanes: LaneSet, offsets: np.ndarray) -> None:
        """Lanes have seen a phase end."""
        for offset in np.unique(offsets).tolist():
            if (known := self.released.get(offset)) is not None:
                self.clocks.acquire_clocks(lanes.flat[offsets == offset], known)

    # Asynchronous copies.

    def record_copy(self, lanes: LaneSet, offsets: np.ndarray, size: int) -> None:
        """A thread issued a cp.async that writes these bytes."""
        where, flat = (offsets[:, None] + np.arange(size)).reshape(-1), np.repeat(lanes.flat, size)
        column, time = self.clocks.find_engine_columns("copy", flat), self.clocks.current_group("copy", flat)
        # cp.async writes in the generic proxy: other engines see it after a proxy fence.
        self.bytes.write(where, flat, column, time, engine=False)

    def record_bulk_read(self, lane: int, start: int, size: int, grouped: bool) -> None:
        """A bulk copy reads shared memory; a group of its lane counts it unless an mbarrier does."""
        where, flat = np.arange(start, start + size), np.full(size, lane)
        column, time = self.clocks.find_engine_columns("bulk", flat), self.clocks.current_group("bulk", flat)
        self.bytes.read(where, flat, column, time, engine=True)
        if grouped:
            self.bulk_reads[lane] = int(time[0])

    def check_exit(self, lanes: LaneSet) -> None:
        """Lanes exit: the shared memory that their bulk copies still read may be given to another CTA."""
        reading = np.array([n for n in self.bulk_reads if np.isin(n, lanes.flat)], np.int64)
        if not len(reading):
            return
        done = self.clocks.vectors[reading, self.clocks.find_engine_columns("bulk", reading)]
        late = done < np.array([self.bulk_reads[n] for n in reading.tolist()])
        if late.any():
            message = "a thread exits while a bulk copy reads shared memory: no cp.async.bulk.wait_group waits for it"
            raise PtxFault(message, AsyncCopyError, int(reading[np.argmax(late)]))

    def record_bulk_write(self, lane: int, start: int, size: int, barrier: int, phase: int) -> None:
        """A bulk copy writes shared memory and signals an mbarrier."""
        where, flat = np.arange(start, start + size), np.full(size, lane)
        column = np.full(size, self.clocks.find_barrier_column(barrier))
        self.bytes.write(where, flat, column, np.full(size, phase + 1), engine=True)

    def committed(self, lanes: LaneSet, kind: str) -> None:
        """Lanes commit a group of copies."""
        self.clocks.commit_group(kind, lanes.flat)

    def wait_for_copy_groups(self, lanes: LaneSet, kind: str, pending_groups: int, everything: bool) -> None:
        """Lanes waited for all but the latest groups; `everything` includes uncommitted copies."""
        if everything:
            self.clocks.commit_group(kind, lanes.flat)
        self.clocks.wait_groups(kind, lanes.flat, pending_groups)

    def fence(self, lanes: LaneSet) -> None:
        """A proxy fence."""
        key = lanes.ctas
        self.bytes.fence([lanes.flat[key == c] for c in np.unique(key).tolist()])

    # Matrix instructions of warpgroups.

    def record_matrix_read(self, lanes: LaneSet, chunks: np.ndarray, group_size: int) -> None:
        """A wgmma of each warpgroup reads chunks of 16 bytes."""
        for leader, starts in zip(lanes.flat[::group_size].tolist(), chunks, strict=True):
            where = (starts[:, None] + np.arange(16)).reshape(-1)
            flat = np.full(len(where), leader)
            column, time = self.clocks.find_engine_columns("matrix", flat), self.clocks.current_group("matrix", flat)
            self.bytes.read(where, flat, column, time, engine=True)

    def record_matrix_group(self, lanes: LaneSet, kind: str, pending_groups: int) -> None:
        """wgmma fence, commit_group and wait_group."""
        if kind == "fence":
            self.registers.fence(lanes)
        elif kind == "commit":
            self.clocks.commit_group("matrix", lanes.flat)
        elif kind == "wait":
            self.clocks.wait_groups("matrix", lanes.flat, pending_groups)
            for flat in self.clocks.split_into_groups(
                lanes, 128
            ):  # reads are recorded for the first thread of each warpgroup
                leader = flat[:1] // self.m.threads * self.m.threads + flat[:1] % self.m.threads // 128 * 128
                column = self.clocks.find_engine_columns("matrix", leader)
                self.clocks.vectors[flat, column] = self.clocks.committed["matrix"][leader] - pending_groups

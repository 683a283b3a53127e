"""The debug mode: what instructions tell it, and what it makes of that."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tessera.errors import AsyncCopyError
from tessera.interp.target.ptx.clocks import Clocks
from tessera.interp.target.ptx.fault import Fault
from tessera.interp.target.ptx.lanes import Lanes
from tessera.interp.target.ptx.shadow import Bytes

if TYPE_CHECKING:
    from tessera.interp.target.ptx.address import Spot
    from tessera.interp.target.ptx.machine import Machine


class Shadow:
    """Follows accesses of shared memory and everything that orders them."""

    def __init__(self, m: Machine) -> None:
        self.m = m
        self.clocks = Clocks(m)
        self.bytes = Bytes(m, self.clocks)
        self.arrived: dict[object, np.ndarray] = {}  # what those knew who have arrived at a barrier
        self.released: dict[int, np.ndarray] = {}  # what those who wait for an mbarrier learn
        self.in_flight: dict[int, np.ndarray] = {}  # registers that matrix instructions still write: group by lane
        self.multiplying = False
        self.local = np.zeros(m.flat["local"].raw.size, bool)  # which bytes of local memory were written

    def access(self, kind: str, spot: Spot, size: int, strong: bool, changed: np.ndarray | None = None) -> None:
        """Loads, stores and atomics of lanes themselves; `changed` says which stores change anything."""
        of_space = {"shared": self._shared, "global": self._global, "local": self._local}
        of_space[spot.space](kind, spot, size, strong, changed)

    def _global(self, kind: str, spot: Spot, size: int, strong: bool, changed: np.ndarray | None) -> None:
        self.m.world.access(self.m, kind, spot.lanes, spot.lanes.compress(spot.offset), size, strong, changed)

    def _local(self, kind: str, spot: Spot, size: int, strong: bool, changed: np.ndarray | None) -> None:
        """Of reads, see `known`."""
        if kind != "read":
            self.local[spot.lanes.compress(spot.offset)[:, None] + np.arange(size)] = True

    def known(self, spot: Spot, size: int) -> np.ndarray:
        """Whether a byte of each access of local memory was written: of structures some are padding."""
        where = spot.lanes.compress(spot.offset)[:, None] + np.arange(size)
        return spot.lanes.spread(np.asarray(self.local[where].any(axis=1)))

    def set_known(self, spot: Spot, size: int, each: list[np.ndarray]) -> None:
        """What a store of registers, of so many bytes each, leaves in local memory counts as written if they do."""
        start = spot.lanes.compress(spot.offset)
        for k, known in enumerate(each):
            where = start[:, None] + np.arange(k * size, (k + 1) * size)
            self.local[where] = spot.lanes.compress(known)[:, None]

    def _shared(self, kind: str, spot: Spot, size: int, strong: bool, changed: np.ndarray | None) -> None:
        lanes, offsets = spot.lanes, spot.lanes.compress(spot.offset)
        if strong:
            self.m.world.meet(self.m, lanes, offsets, kind, "shared")
        where = (offsets[:, None] + np.arange(size)).reshape(-1)
        flat = np.repeat(lanes.flat, size)
        column, time = self.clocks.own[flat], self.clocks.time(flat)
        if kind == "read":
            self.bytes.read(where, flat, column, time, engine=False, atomic=strong)
        else:
            self.bytes.write(where, flat, column, time, engine=False, atomic=strong)

    # Barriers of CTAs, warps and clusters

    def barrier_passed(self, flat: np.ndarray, key: object) -> None:
        """Lanes leave a barrier together."""
        self.clocks.meet(flat, self.arrived.pop(key, None))

    def barrier_arrived(self, flat: np.ndarray, key: object) -> None:
        """Lanes count at a barrier and do not wait."""
        known = self.clocks.publish(flat)
        self.arrived[key] = np.maximum(self.arrived.get(key, known), known)

    def join(self, lanes: Lanes, team: int) -> None:
        """Lanes of a warp wait for each other."""
        for flat in self.clocks.groups(lanes, team):
            self.clocks.meet(flat)

    def cluster_arrived(self, lanes: Lanes) -> None:
        """As at a barrier of the CTA, by cluster."""
        cluster = self.m.cluster[lanes.ctas]
        for c in np.unique(cluster).tolist():
            self.barrier_arrived(lanes.flat[cluster == c], ("cluster", c))

    def cluster_waited(self, lanes: Lanes) -> None:
        """Lanes have seen all that arrived."""
        cluster = self.m.cluster[lanes.ctas]
        for c in np.unique(cluster).tolist():
            if (known := self.arrived.get(("cluster", c))) is not None:
                self.clocks.learn(lanes.flat[cluster == c], known)

    # mbarriers

    def arrived_at(self, lanes: Lanes, offsets: np.ndarray) -> None:
        """Lanes arrive at mbarriers."""
        for offset in np.unique(offsets).tolist():
            self.barrier_arrived(lanes.flat[offsets == offset], offset)

    def flipped(self, offset: int, phase: int) -> None:
        """A phase of an mbarrier ended: its transfers too are there."""
        known = self.arrived.pop(offset, np.zeros(self.clocks.vectors.shape[1], np.int32)).copy()
        known[self.clocks.barrier_column(offset)] = phase
        before = self.released.get(offset)
        self.released[offset] = known if before is None else np.maximum(known, before)

    def waited(self, lanes: Lanes, offsets: np.ndarray) -> None:
        """Lanes have seen a phase end."""
        for offset in np.unique(offsets).tolist():
            if (known := self.released.get(offset)) is not None:
                self.clocks.learn(lanes.flat[offsets == offset], known)

    # Copies

    def copy_issued(self, lanes: Lanes, offsets: np.ndarray, size: int) -> None:
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

    def committed(self, lanes: Lanes, kind: str) -> None:
        """Lanes close a group of copies."""
        self.clocks.commit(kind, lanes.flat)

    def group_waited(self, lanes: Lanes, kind: str, left: int, everything: bool) -> None:
        """Lanes have waited for all but the latest groups; `everything` includes what is in none yet."""
        if everything:
            self.clocks.commit(kind, lanes.flat)
        self.clocks.wait(kind, lanes.flat, left)

    def fence(self, lanes: Lanes) -> None:
        """A proxy fence."""
        key = lanes.ctas
        self.bytes.fence([lanes.flat[key == c] for c in np.unique(key).tolist()])

    # Matrix instructions of warpgroups

    def matrix_read(self, lanes: Lanes, chunks: np.ndarray, team: int) -> None:
        """Each team's descriptor names chunks of 16 bytes."""
        for leader, starts in zip(lanes.flat[::team].tolist(), chunks, strict=True):
            where = (starts[:, None] + np.arange(16)).reshape(-1)
            flat = np.full(len(where), leader)
            column, time = self.clocks.engine("matrix", flat), self.clocks.current("matrix", flat)
            self.bytes.read(where, flat, column, time, engine=True)

    def matrix_issued(self, lanes: Lanes, registers: list[int]) -> None:
        """Accumulators that are written until the wait."""
        groups = self.clocks.current("matrix", lanes.flat)
        for index in registers:
            pending = self.in_flight.setdefault(index, np.zeros(self.m.ctas * self.m.threads, np.int32))
            pending[lanes.flat] = groups

    def matrix_group(self, lanes: Lanes, kind: str, left: int) -> None:
        """commit_group and wait_group; the fence orders registers, which execute in order here."""
        if kind == "commit":
            self.clocks.commit("matrix", lanes.flat)
        elif kind == "wait":
            self.clocks.wait("matrix", lanes.flat, left)
            for flat in self.clocks.groups(lanes, 128):  # reads were entered for the first thread of each group
                leader = flat[:1] // self.m.threads * self.m.threads + flat[:1] % self.m.threads // 128 * 128
                column = self.clocks.engine("matrix", leader)
                self.clocks.vectors[flat, column] = self.clocks.committed["matrix"][leader] - left

    def check_register(self, index: int, lanes: Lanes) -> None:
        """A register must not be read while a matrix instruction writes it."""
        pending = self.in_flight.get(index)
        if pending is None or self.multiplying:
            return
        seen = self.clocks.vectors[lanes.flat, self.clocks.engine("matrix", lanes.flat)] >= pending[lanes.flat]
        if not seen.all():
            name, lane = self.m.program.names[index], int(lanes.flat[np.argmin(seen)])
            raise Fault(f"register {name} is read before the wgmma that writes it was waited for", AsyncCopyError, lane)

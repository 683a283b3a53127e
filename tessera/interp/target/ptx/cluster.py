"""Clusters: addresses in another CTA's shared memory, and the barrier of all threads of a cluster."""

from __future__ import annotations

import numpy as np

from tessera.interp.target.ptx.address import SPACES
from tessera.interp.target.ptx.control import BARRIER_KINDS
from tessera.interp.target.ptx.decode import Decoder, modifiers, rule
from tessera.interp.target.ptx.lanes import Lanes
from tessera.interp.target.ptx.machine import Line, Machine, Step
from tessera.interp.target.ptx.memory import RANK_BITS, WINDOWS
from tessera.interp.target.ptx.syntax import Instruction
from tessera.interp.target.ptx.types import TYPES

_OFFSET = np.uint64((1 << RANK_BITS) - 1)
_MOST_RANKS = 64
_ORDERS = {"release", "acquire", "relaxed", "aligned"}


@rule("mapa")
def _(d: Decoder, inst: Instruction) -> Step:
    """The address that a place of shared memory has in the CTA of a given rank."""
    modifiers(d, inst, *SPACES)
    t = TYPES[inst.op[-1]]
    write = d.writer(inst.operands[0], t)
    address, rank = d.reader(inst.operands[1], TYPES["u64"]), d.reader(inst.operands[2], TYPES["u32"])
    window = np.uint64(0 if "shared::cluster" in inst.op else WINDOWS["shared"])

    def place(at: np.ndarray, to: np.ndarray) -> np.ndarray:
        # A rank beyond the cluster is found when the address is used, if it is.
        ranks = np.minimum(to, np.uint32(_MOST_RANKS)).astype(np.uint64) + np.uint64(1)
        return ((at & _OFFSET) | ranks << np.uint64(RANK_BITS) | window).astype(t.dtype)

    return lambda m, lanes: write(m, lanes, place(address(m, lanes), rank(m, lanes)))


@rule("getctarank")
def _(d: Decoder, inst: Instruction) -> Step:
    modifiers(d, inst, *SPACES)
    write, address = d.writer(inst.operands[0], TYPES["u32"]), d.reader(inst.operands[1], TYPES["u64"])

    def step(m: Machine, lanes: Lanes) -> None:
        named = (address(m, lanes) & np.uint64(0xFFFFFFFF)) >> np.uint64(RANK_BITS)
        own = lanes.view(m.special["%cluster_ctarank"])
        write(m, lanes, np.where(named == 0, own, named - np.uint64(1)).astype(np.uint32))

    return step


class ClusterBarrier:
    """For each cluster how many threads have arrived and the phase; for each lane the phase in which it did."""

    def __init__(self, m: Machine) -> None:
        many = m.row_of.shape[0]
        self.arrived, self.phase = np.zeros(many, np.int64), np.zeros(many, np.int64)
        self.of_lane = np.full(m.ctas * m.threads, -1)

    def settle(self, m: Machine) -> None:
        """End the phase of each cluster whose living threads have all arrived."""
        alive = np.bincount(m.cluster, m.alive.sum(axis=1), len(self.arrived))
        done = (self.arrived >= alive) & (self.arrived > 0)
        self.phase[done] += 1
        self.arrived[done] = 0
        if done.any():
            m.wake()


def cluster_barrier(m: Machine) -> ClusterBarrier:
    """The barrier state of a machine's clusters."""
    if "cluster" not in m.state:
        m.state["cluster"] = ClusterBarrier(m)
    return m.state["cluster"]


def _barrier(d: Decoder, inst: Instruction, line: Line) -> None:
    kind, words = inst.op[2], inst.op[3:]
    if not set(words) <= _ORDERS:
        raise d.unsupported(inst)
    line.team = 32 if "aligned" in words else 0
    line.control = {"arrive": _arrive, "wait": _wait}[kind]


def _arrive(m: Machine, lanes: Lanes, pc: int) -> None:
    barrier = cluster_barrier(m)
    cluster = m.cluster[lanes.ctas]
    barrier.of_lane[lanes.flat] = barrier.phase[cluster]
    np.add.at(barrier.arrived, cluster, 1)
    m.push(pc + 1, lanes)
    if m.debug:
        m.shadow.cluster_arrived(lanes)
    barrier.settle(m)


def _wait(m: Machine, lanes: Lanes, pc: int) -> None:
    barrier = cluster_barrier(m)
    barrier.settle(m)  # threads that have exited no longer count
    done = barrier.phase[m.cluster[lanes.ctas]] > barrier.of_lane[lanes.flat]
    some = lanes.select(lanes.spread(done))
    if some.count and m.debug:
        m.shadow.cluster_waited(some)
    m.push(pc + 1, some)
    m.sleep(pc, lanes.select(lanes.spread(~done)))


BARRIER_KINDS["cluster"] = _barrier

"""Ring buffer between producer and consumers: stages in shared memory with "full" and "empty" mbarriers.

The bytes of a copy complete "full"; each consumer warp group arrives once at "empty" when it has read the stage (in a
cluster the warp groups of all blocks). Both sides pass the stages in order; the mbarrier phase flips with each round.
"""

from __future__ import annotations

from tessera.codegen.ptx.layout import WARPGROUP_THREADS, ThreadTeam
from tessera.codegen.ptx.passes.shared_memory import SHARED_SYMBOL, SharedMemoryAllocator
from tessera.codegen.ptx.text.builder import PtxBuilder

SWIZZLE_ALIGN = 1024  # alignment of buffers with the 128-byte swizzle
BARRIER_ALIGN = 128
MBARRIER_BYTES = 8


class StageRingBuffer:
    """`stages` buffers of `size` bytes, read by `groups` warp groups in each of `blocks` thread blocks.

    `extra` bytes follow the last stage.
    """

    def __init__(
        self,
        text: PtxBuilder,
        allocator: SharedMemoryAllocator,
        stages: int,
        size: int,
        groups: int,
        extra: int = 0,
        blocks: int = 1,
    ) -> None:
        self.text, self.stages, self.size, self.groups, self.blocks = text, stages, size, groups, blocks
        start = allocator.allocate_shared(stages * size + extra + SWIZZLE_ALIGN, BARRIER_ALIGN)
        barriers = allocator.allocate_shared(2 * MBARRIER_BYTES * stages, BARRIER_ALIGN)
        with text.at_entry_head():
            base = text.let("mov.u32", "b32", SHARED_SYMBOL)
            rounded = text.let("add.u32", "b32", base, start + SWIZZLE_ALIGN - 1)
            self.base = text.let("and.b32", "b32", rounded, -SWIZZLE_ALIGN)
            self.full = text.let("add.u32", "b32", base, barriers)
            self.empty = text.let("add.u32", "b32", base, barriers + MBARRIER_BYTES * stages)

    def init_barriers(self, thread: str) -> None:
        """Thread 0 initialises the mbarriers."""
        text, ready = self.text, self.text.new_label("ready")
        text.do(f"bra {ready}", guard=text.let("setp.ne.u32", "pred", thread, 0))
        for offset in range(0, MBARRIER_BYTES * self.stages, MBARRIER_BYTES):
            text.do("mbarrier.init.shared::cta.b64", f"[{self.full}+{offset}]", 1)
            text.do("mbarrier.init.shared::cta.b64", f"[{self.empty}+{offset}]", self.groups * self.blocks)
        text.do("fence.mbarrier_init.release.cluster")
        text.label(ready)

    def init_and_synchronise(self, thread: str) -> None:
        """Thread 0 initialises the mbarriers; all threads of the block, or cluster, wait for it."""
        self.init_barriers(thread)
        if self.blocks == 1:
            self.text.do("bar.sync", 0)
        else:
            self.text.do("barrier.cluster.arrive.release.aligned")
            self.text.do("barrier.cluster.wait.acquire.aligned")

    def synchronise_exit(self) -> None:
        """Keep each block of a cluster resident while others may still arrive at its mbarriers."""
        if self.blocks > 1:
            self.text.do("barrier.cluster.arrive.release")
            self.text.do("barrier.cluster.wait.acquire")

    def make_state(self, phase: int) -> PipelineState:
        """The pipeline state of one side at stage 0; `phase` is the parity that it waits for first."""
        registers = [self.text.let("mov.u32", "b32", n) for n in (0, phase)]
        return PipelineState(self, *registers)


class PipelineState:
    """The stage and the phase parity of the producer or of a consumer, in registers."""

    def __init__(self, ring: StageRingBuffer, stage: str, phase: str) -> None:
        self.ring, self.stage, self.phase = ring, stage, phase

    def wait(self, barriers: str) -> str:
        """Wait for this stage's mbarrier (`ring.full` or `ring.empty`); its address."""
        text, retry = self.ring.text, self.ring.text.new_label("wait")
        barrier = text.let("mad.lo.u32", "b32", self.stage, MBARRIER_BYTES, barriers)
        text.label(retry)
        done = text.let("mbarrier.try_wait.parity.shared::cta.b64", "pred", f"[{barrier}]", self.phase)
        text.do(f"bra {retry}", guard=f"!{done}")
        return barrier

    def buffer(self) -> str:
        """The address of this stage's buffer."""
        return self.ring.text.let("mad.lo.u32", "b32", self.stage, self.ring.size, self.ring.base)

    def skip(self, count: int, guard: str = "") -> None:
        """Advance by `count` stages where the guard holds: another team consumes them."""
        text, (rounds, rest) = self.ring.text, divmod(count, self.ring.stages)
        if rounds % 2:
            text.do("xor.b32", self.phase, self.phase, 1, guard=guard)
        if rest:
            text.do("add.u32", self.stage, self.stage, rest, guard=guard)
            past = text.let("setp.ge.u32", "pred", self.stage, self.ring.stages)
            text.do("xor.b32", self.phase, self.phase, 1, guard=past)
            text.do("sub.u32", self.stage, self.stage, self.ring.stages, guard=past)

    def advance(self) -> None:
        """Advance to the next stage; after the last one the phase flips."""
        text = self.ring.text
        text.do("add.u32", self.stage, self.stage, 1)
        past = text.let("setp.eq.u32", "pred", self.stage, self.ring.stages)
        text.do("xor.b32", self.phase, self.phase, 1, guard=past)
        text.do("mov.u32", self.stage, 0, guard=past)


def release_stage(team: ThreadTeam, ring: StageRingBuffer, stage: str, predicate: str = "") -> None:
    """Arrive once for each warp group at the "empty" mbarrier of a stage, where the predicate holds."""
    text, leader = team.text, emit_group_leader(team)
    if ring.blocks > 1:
        _release_cluster_stage(team, ring, stage, predicate)
        return
    arriving = text.let("and.pred", "pred", predicate, leader) if predicate else leader
    barrier = text.let("mad.lo.u32", "b32", stage, MBARRIER_BYTES, ring.empty)
    text.do("mbarrier.arrive.release.cta.shared::cta.b64", "_", f"[{barrier}]", guard=arriving)


def _release_cluster_stage(team: ThreadTeam, ring: StageRingBuffer, stage: str, predicate: str) -> None:
    """Arrive in each block of the cluster: one thread of the warp group for each block."""
    text, thread = team.text, emit_group_thread(team)
    few = team.hoist(("first of group", ring.blocks), "setp.lt.u32", "pred", thread, ring.blocks)
    rank = team.hoist(("block", ring.blocks), "and.b32", "b32", team.thread, ring.blocks - 1)
    remote = team.hoist(("remote", ring.empty), "mapa.shared::cluster.u32", "b32", ring.empty, rank)
    arriving = text.let("and.pred", "pred", predicate, few) if predicate else few
    barrier = text.let("mad.lo.u32", "b32", stage, MBARRIER_BYTES, remote)
    # No scope qualifier: cluster scope costs a fence of all memory.
    text.do("mbarrier.arrive.shared::cluster.b64", "_", f"[{barrier}]", guard=arriving)


def emit_group_thread(team: ThreadTeam) -> str:
    """The number of a thread in its warp group."""
    return team.hoist(("group thread",), "and.b32", "b32", team.thread, WARPGROUP_THREADS - 1)


def emit_group_leader(team: ThreadTeam) -> str:
    """The predicate of the first thread of each warp group."""
    return team.hoist(("group leader",), "setp.eq.u32", "pred", emit_group_thread(team), 0)

"""Ring buffer between producer and consumers: stages in shared memory with "full" and "empty" mbarriers.

The bytes of a copy complete "full"; each consumer warp group arrives once at "empty" when it has read the stage (in a
cluster those of all blocks). Both sides walk the stages in order; the phase parity flips each time round.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tessera.codegen.ptx.passes.shared_memory_allocator import SHARED_SYMBOL
from tessera.codegen.ptx.text.builder import PtxBuilder

if TYPE_CHECKING:
    from tessera.codegen.ptx.passes.shared_memory_allocator import SharedMemoryAllocator

SWIZZLE_ALIGN = 1024  # what swizzled buffers begin at multiples of
BARRIER_ALIGN = 128


class RingBuffer:
    """`stages` buffers of `size` bytes, read by `groups` warp groups in each of `blocks` blocks, and `more` bytes."""

    def __init__(
        self,
        text: PtxBuilder,
        room: SharedMemoryAllocator,
        stages: int,
        size: int,
        groups: int,
        more: int = 0,
        blocks: int = 1,
    ) -> None:
        self.text, self.stages, self.size, self.groups, self.blocks = text, stages, size, groups, blocks
        start = room.shared(stages * size + more + SWIZZLE_ALIGN, BARRIER_ALIGN)
        barriers = room.shared(16 * stages, BARRIER_ALIGN)
        with text.first():
            base = text.let("mov.u32", "b32", SHARED_SYMBOL)
            up = text.let("add.u32", "b32", base, start + SWIZZLE_ALIGN - 1)
            self.base = text.let("and.b32", "b32", up, -SWIZZLE_ALIGN)
            self.full = text.let("add.u32", "b32", base, barriers)
            self.empty = text.let("add.u32", "b32", base, barriers + 8 * stages)

    def prepare(self, thread: str) -> None:
        """One thread sets up the barriers; the whole block, or cluster, waits for it."""
        self.begin(thread)
        if self.blocks == 1:
            self.text.do("bar.sync", 0)
        else:
            self.text.do("barrier.cluster.arrive.release.aligned")
            self.text.do("barrier.cluster.wait.acquire.aligned")

    def end(self) -> None:
        """No block of a cluster ends while others still arrive at its barriers."""
        if self.blocks > 1:
            self.text.do("barrier.cluster.arrive.release")
            self.text.do("barrier.cluster.wait.acquire")

    def begin(self, thread: str) -> None:
        """One thread sets up the barriers."""
        text, ready = self.text, self.text.new_label("ready")
        text.do(f"bra {ready}", guard=text.let("setp.ne.u32", "pred", thread, 0))
        for stage in range(self.stages):
            text.do("mbarrier.init.shared::cta.b64", f"[{self.full}+{8 * stage}]", 1)
            text.do("mbarrier.init.shared::cta.b64", f"[{self.empty}+{8 * stage}]", self.groups * self.blocks)
        text.do("fence.mbarrier_init.release.cluster")
        text.label(ready)

    def walk(self, parity: int) -> PipelineState:
        """A side's place in the ring; `parity` is what it waits for at first."""
        stage, phase = (self.text.let("mov.u32", "b32", n) for n in (0, parity))
        return PipelineState(self, stage, phase)


class PipelineState:
    """Where one side stands: registers of its own with the stage and the parity it waits for."""

    def __init__(self, ring: RingBuffer, stage: str, phase: str) -> None:
        self.ring, self.stage, self.phase = ring, stage, phase

    def wait(self, barriers: str) -> str:
        """Wait for this stage's barrier; its address."""
        text, again = self.ring.text, self.ring.text.new_label("wait")
        place = text.let("mad.lo.u32", "b32", self.stage, 8, barriers)
        text.label(again)
        done = text.let("mbarrier.try_wait.parity.shared::cta.b64", "pred", f"[{place}]", self.phase)
        text.do(f"bra {again}", guard=f"!{done}")
        return place

    def buffer(self) -> str:
        """The address of this stage's buffer."""
        return self.ring.text.let("mad.lo.u32", "b32", self.stage, self.ring.size, self.ring.base)

    def skip(self, count: int, guard: str = "") -> None:
        """Go past so many stages, which others read, where the guard holds."""
        text, (turns, more) = self.ring.text, divmod(count, self.ring.stages)
        if turns % 2:
            text.do("xor.b32", self.phase, self.phase, 1, guard=guard)
        if more:
            text.do("add.u32", self.stage, self.stage, more, guard=guard)
            past = text.let("setp.ge.u32", "pred", self.stage, self.ring.stages)
            text.do("xor.b32", self.phase, self.phase, 1, guard=past)
            text.do("sub.u32", self.stage, self.stage, self.ring.stages, guard=past)

    def advance(self) -> None:
        """Go on to the next stage; past the last the parity turns."""
        text = self.ring.text
        text.do("add.u32", self.stage, self.stage, 1)
        past = text.let("setp.eq.u32", "pred", self.stage, self.ring.stages)
        text.do("xor.b32", self.phase, self.phase, 1, guard=past)
        text.do("mov.u32", self.stage, 0, guard=past)

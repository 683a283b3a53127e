"""Prefetching across programs: a persistent loop whose loads are bulk copies begun some programs ahead.

Programs that fill a multiprocessor leave its memory idle while they compute. What each loads whole, at addresses known
ahead, is copied to stages of shared memory early; blocks that are the same for all programs are copied once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tessera.codegen.ptx.context import (
    EmissionContext,
    KernelEntry,
    bind_parameters,
    finish_entry,
    make_context,
    synchronise_team,
)
from tessera.codegen.ptx.emitter import emit_block, emit_node
from tessera.codegen.ptx.layout import ThreadTeam
from tessera.codegen.ptx.ops import LaunchFacts, get_fact, prefetched_load
from tessera.codegen.ptx.passes.layout_inference import read_layouts, static_shape
from tessera.codegen.ptx.passes.mainloop import is_known_ahead
from tessera.codegen.ptx.passes.tile_scheduler import TileScheduler, read_order
from tessera.codegen.ptx.table import emission_rule
from tessera.codegen.ptx.table.blocks import block_access
from tessera.codegen.ptx.table.blocks.layout_conversion import plan_exchange_accesses
from tessera.codegen.ptx.table.warpgroup.ring_buffer import StageRingBuffer
from tessera.codegen.ptx.text.builder import PtxBuilder, SourceFiles, element_bytes
from tessera.core.types import GLOBAL, RefType, int64
from tessera.ir.analysis import IntervalAnalysis, find_divisor
from tessera.ir.core import Function, Node, Value
from tessera.ir.rewrite import RewritePatterns, Rewriter, UseDef, rewrite_function
from tessera.ops.dialects import tile
from tessera.ops.tensor import contractions

# Which loads are prefetched: blocks that a program loads whole, at starts that are known ahead. Blocks that are the
# same for all programs are copied once.


SHARED_BYTES = 228_352  # bytes of shared memory, less some for barriers and reductions
MAX_STAGES = 2  # the most programs to prefetch for
MIN_FITTING_PROGRAMS = 2  # programs whose blocks must fit at once: with fewer the copies come too late
BULK_COPY_ALIGN = 16  # bytes that divide the address and size of a copy
MIN_COPY_BYTES = 4096  # smaller blocks are not worth a copy


@dataclass(frozen=True)
class PrefetchPlan:
    """A function with `prefetched_load` ops, and the number of programs to prefetch for."""

    function: Function
    stages: int


def plan_prefetch(function: Function, grid: Sequence[int]) -> PrefetchPlan | None:
    """The function with its loads prefetched, or None if they do not fit or it does not pay."""
    if int(function.attrs.get("group", 1)) != 1:
        return None
    if any(n.op is contractions.dot for n in function.body.walk()):
        return None
    loads = _find_prefetchable_loads(function, grid)
    moving = sum(load_bytes(n) for n, same in loads.items() if not same)
    if not 0 < moving <= SHARED_BYTES // MIN_FITTING_PROGRAMS:
        return None
    still = sum(load_bytes(n) for n, same in loads.items() if same)
    if MIN_FITTING_PROGRAMS * moving + still > SHARED_BYTES:  # those that are the same for all stay in the L2 cache
        loads, still = {n: same for n, same in loads.items() if not same}, 0
    return PrefetchPlan(_rewrite_loads(function, loads), min((SHARED_BYTES - still) // moving, MAX_STAGES))


def form_prefetched_loads(function: Function) -> Function:
    """The function with its loads prefetched, as kernel selection decided."""
    found = plan_prefetch(function, LaunchFacts.of(function).grid)
    assert found is not None, "kernel selection chose this kernel by the same plan"
    return found.function


def load_bytes(node: Node) -> int:
    """The bytes of a load's block."""
    return math.prod(static_shape(node.out)) * element_bytes(node.args[0].type.dtype)  # type: ignore[union-attr]


def _find_prefetchable_loads(function: Function, grid: Sequence[int]) -> dict[Node, bool]:
    """The loads that bulk copies can do, and whether each is the same for all programs."""
    uses = UseDef(function)
    ranges = IntervalAnalysis(uses, grid)
    written = tile.find_written_refs(function.body)
    free = [n for n in function.body.nodes if n.op is tile.load and n.args[0] not in written]
    return {n: _is_program_invariant(uses, n) for n in free if _is_prefetchable(function, uses, ranges, n)}


def _is_prefetchable(function: Function, uses: UseDef, ranges: IntervalAnalysis, node: Node) -> bool:
    """Whether a load reads a contiguous, aligned range inside a parameter, at a start that is known ahead."""
    ref, *starts = node.args
    type, block = ref.type, static_shape(node.out)
    if not isinstance(type, RefType) or type.space != GLOBAL or ref not in function.params or len(starts) != type.rank:
        return False
    if ranges.find_unproven_axes(starts, node.attrs["shape"], static_shape(ref)) or not _is_contiguous(
        node.attrs["shape"], static_shape(ref)
    ):
        return False
    steps = [math.prod(static_shape(ref)[a + 1 :]) * element_bytes(type.dtype) for a in range(type.rank)]
    even = all(find_divisor(uses, v) * step % BULK_COPY_ALIGN == 0 for v, step in zip(starts, steps, strict=True))
    whole = math.prod(block) * element_bytes(type.dtype) % BULK_COPY_ALIGN == 0 and load_bytes(node) >= MIN_COPY_BYTES
    return even and whole and all(v.type.dtype == int64 and is_known_ahead(uses, v) for v in starts)  # type: ignore[union-attr]


def _is_contiguous(block: Sequence[int], shape: Sequence[int]) -> bool:
    """Whether a block is contiguous in memory: after its first axis of size over 1 all axes are whole."""
    first = next((a for a, n in enumerate(block) if n > 1), len(block))
    return list(block[first + 1 :]) == list(shape[first + 1 :])


def _is_program_invariant(uses: UseDef, node: Node) -> bool:
    """Whether the start of a load does not depend on the program id."""
    return not any(n.op is tile.program_id for n in uses.backward_slice(node.args[1:]))


def _rewrite_loads(function: Function, loads: Mapping[Node, bool]) -> Function:
    """The function with these loads as `prefetched_load`."""
    patterns = RewritePatterns("prefetched loads")

    @patterns(tile.load)
    def _(rewriter: Rewriter, node: Node, args: list[Value]) -> Value | None:
        if node not in loads:
            return None
        return rewriter.add(prefetched_load, *args, shape=static_shape(node.out), same=loads[node])

    return rewrite_function(function, patterns)


# Emission: a persistent loop over programs with a ring of stages in shared memory. Once all threads have read a stage,
# one of them issues the copies of the program that reads it next.


BULK_COPY = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"


def emit_prefetching(function: Function, files: SourceFiles | None) -> KernelEntry:
    """A function with `prefetched_load` ops as an entry."""
    facts, text = LaunchFacts.of(function), PtxBuilder(files)
    grid, vector = facts.grid, get_fact(function, "vector")
    team = ThreadTeam(text, get_fact(function, "threads"), 1)
    ctx = make_context(read_layouts(function), text, team, vector, grid, facts)
    ctx.grid.rank = len(grid)
    bind_parameters(ctx, ())
    ctx.grid.scheduler = TileScheduler(text, grid, read_order(function))
    prefetcher = BlockPrefetcher(ctx, get_fact(function, "stages"))
    ctx.pipeline.emit_prefetched = prefetcher.take
    prefetcher.begin()
    loop = ctx.grid.scheduler.begin()
    prefetcher.number = loop[0]
    ctx.smem.hazards.enter_loop(ctx.function.body)
    emit_block(ctx, ctx.function.body)
    ctx.grid.scheduler.end(loop)
    text.line("ret")
    return finish_entry(ctx, programs=math.prod(grid))


class BlockPrefetcher:
    """The stages of prefetched blocks. `number` is the register of the current program's linear number."""

    number = ""

    def __init__(self, ctx: EmissionContext, stages: int) -> None:
        self.ctx, self.text, self.stages = ctx, ctx.text, stages
        nodes = [n for n in ctx.function.body.nodes if n.op is prefetched_load]
        self.moving_loads = [n for n in nodes if not n.attrs["same"]]
        self.invariant_loads = [n for n in nodes if n.attrs["same"]]
        self.needed = UseDef(ctx.function).backward_slice([v for n in nodes for v in n.args[1:]])
        self.ring = StageRingBuffer(self.text, ctx.smem.allocator, stages, _total_bytes(self.moving_loads), 1)
        self.kept = (
            StageRingBuffer(self.text, ctx.smem.allocator, 1, _total_bytes(self.invariant_loads), 1)
            if self.invariant_loads
            else None
        )
        self.pipeline_state = self.ring.make_state(0)
        self.unread_loads = len(self.moving_loads)

    def begin(self) -> None:
        """One thread initialises the mbarriers and issues the first copies."""
        text, team, persistent = self.text, self.ctx.team, self.ctx.grid.scheduler
        assert persistent is not None
        self.ring.init_barriers(team.thread)
        if self.kept is not None:
            self.kept.init_barriers(team.thread)
        text.do("bar.sync", 0)
        ready = text.new_label("supplied")
        text.do(f"bra {ready}", guard=text.let("setp.ne.u32", "pred", team.thread, 0))
        number, step = (text.let("mov.u32", "b32", word) for word in ("%ctaid.x", "%nctaid.x"))
        for stage in range(self.stages):
            buffer = text.let("add.u32", "b32", self.ring.base, stage * self.ring.size)
            self._fill(number, buffer, text.let("add.u32", "b32", self.ring.full, 8 * stage))
            number = text.let("add.u32", "b32", number, step)
        if self.kept is not None:
            with persistent.at(text.let("mov.u32", "b32", 0)):
                self._copies(self.invariant_loads, self.kept.base, self.kept.full)
        text.label(ready)

    def take(self, node: Node) -> None:
        """Load a block into registers. After the last block of a program its stage is refilled."""
        still = node.attrs["same"]
        ring, walker = (self.kept, self.kept.make_state(0)) if still and self.kept else (self.ring, self.pipeline_state)
        walker.wait(ring.full)
        place = _block_offset(self.invariant_loads if still else self.moving_loads, node)
        base = self.text.let("add.u32", "b32", walker.buffer(), place)
        dtype, found = node.args[0].type.dtype, []  # type: ignore[union-attr]
        for run in plan_exchange_accesses(self.ctx, dtype, self.ctx.layout(node.out), base, once=False):
            found += block_access.load_elements(self.text, "shared", dtype, run)
        self.ctx.values[node.out] = tuple(found)
        self.unread_loads -= 0 if still else 1
        if not still and not self.unread_loads:
            self._refill_stage()

    def _refill_stage(self) -> None:
        """After all threads have read a stage, issue the copies of the program that reads it next."""
        text, team = self.text, self.ctx.team
        # A barrier does not order generic loads before asynchronous copies; the proxy fence does.
        text.do("fence.proxy.async.shared::cta")
        synchronise_team(self.ctx)
        behind = text.new_label("behind")
        text.do(f"bra {behind}", guard=text.let("setp.ne.u32", "pred", team.thread, 0))
        step = text.let("mov.u32", "b32", "%nctaid.x")
        number = text.let("mad.lo.u32", "b32", step, self.stages, self.number)
        full = text.let("mad.lo.u32", "b32", self.pipeline_state.stage, 8, self.ring.full)
        self._fill(number, self.pipeline_state.buffer(), full)
        text.label(behind)
        self.pipeline_state.advance()

    def _fill(self, number: str, buffer: str, full: str) -> None:
        """Issue the copies of a program, if it exists."""
        persistent = self.ctx.grid.scheduler
        assert persistent is not None
        none = self.text.new_label("none")
        self.text.do(f"bra {none}", guard=self.text.let("setp.ge.u32", "pred", number, persistent.total))
        with persistent.at(number):
            self._copies(self.moving_loads, buffer, full)
        self.text.label(none)

    def _copies(self, nodes: Sequence[Node], buffer: str, full: str) -> None:
        """Issue the copies of some blocks at their starts in the current program."""
        ctx, text, before = self.ctx, self.text, dict(self.ctx.values)
        for each in self.needed:
            emit_node(ctx, each)
        text.do("mbarrier.arrive.expect_tx.shared::cta.b64", "_", f"[{full}]", _total_bytes(nodes))
        for node in nodes:
            target = text.let("add.u32", "b32", buffer, _block_offset(nodes, node))
            text.do(BULK_COPY, f"[{target}]", f"[{self._address(node)}]", load_bytes(node), f"[{full}]")
        ctx.values = before

    def _address(self, node: Node) -> str:
        """The address of a block in global memory."""
        memory = self.ctx.memrefs[node.args[0]]
        total = memory.base
        for v, step in zip(node.args[1:], memory.strides, strict=True):
            if (start := self.ctx.scalar_operand(v)) != "0":
                total = self.text.let("mad.lo.s64", "b64", start, step, total)
        return total


@emission_rule(prefetched_load)
def _(ctx: EmissionContext, node: Node) -> None:
    assert ctx.pipeline.emit_prefetched is not None
    ctx.pipeline.emit_prefetched(node)


def _total_bytes(nodes: Sequence[Node]) -> int:
    return sum(map(load_bytes, nodes))


def _block_offset(nodes: Sequence[Node], node: Node) -> int:
    """The offset of a block in a stage that holds these blocks one after the other."""
    return sum(load_bytes(n) for n in nodes[: list(nodes).index(node)])

"""Warp specialisation (CUTLASS): one producer thread issues TMA copies, consumer warp groups issue the MMAs.

Both loop over the programs of the grid (a persistent kernel), so the producer fetches the next program's operands
during the epilogue.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tessera.codegen.ptx.context import EmissionContext, KernelEntry, bind_parameters, finish_entry, make_context
from tessera.codegen.ptx.emitter import emit_block, emit_node
from tessera.codegen.ptx.layout import WARPGROUP_THREADS, ThreadTeam
from tessera.codegen.ptx.ops import LaunchFacts, async_mma, fetched_block, gemm_mainloop, get_fact, resident_operand
from tessera.codegen.ptx.passes.layout_inference import read_layouts, static_shape
from tessera.codegen.ptx.passes.mainloop import is_scalar_arithmetic
from tessera.codegen.ptx.passes.tile_scheduler import ThreadBlockCluster, TileScheduler, read_order
from tessera.codegen.ptx.table.warpgroup.epilogue import drain_stores, find_row_stores, find_tma_stores, staging_bytes
from tessera.codegen.ptx.table.warpgroup.pingpong import find_trip_count, start_pingpong
from tessera.codegen.ptx.table.warpgroup.producer import (
    AsyncMmaProducer,
    make_mainloop_maps,
    produce_mainloop,
    zero_unfetched_rows,
)
from tessera.codegen.ptx.table.warpgroup.ring_buffer import StageRingBuffer
from tessera.codegen.ptx.table.warpgroup.tensor_map import (
    TensorMapSpec,
    block_bytes,
    collect_async_mma_maps,
    ring_bytes,
    stage_bytes,
)
from tessera.codegen.ptx.text.builder import PtxBuilder, SourceFiles
from tessera.ir.core import Function, Node, Value

# By the number of consumer threads: the registers of a producer and of a consumer thread. Their sum over the block must
# not exceed what the threads have at launch, or `setmaxnreg.inc` never returns.
REGISTER_SHARES = {256: (40, 232), 512: (32, 112)}
RING_OPS = (async_mma, fetched_block)  # ops whose operands pass through the ring
RESIDENT_STAGES = 2  # buffers of a resident operand: one for the current program, one for the next


@dataclass(frozen=True)
class ProducerWork:
    """What the producer does: its tensor maps, the bytes of a stage, and the emission of one program's copies."""

    maps: Sequence[TensorMapSpec]
    stage: int
    program: Callable[[], None]


def ring_stage_bytes(function: Function) -> int:
    """The bytes of one stage of the ring buffer between the producer and the consumers of a function."""
    loop = next((n for n in function.body.nodes if n.op is gemm_mainloop), None)
    if loop is not None:
        return sum(stage_bytes(loop))
    return max(ring_bytes(n) for n in function.body.walk() if n.op in RING_OPS)


def emit_specialised(function: Function, files: SourceFiles | None) -> KernelEntry:
    """A function with a `gemm_mainloop` or with `async_mma` products as an entry."""
    facts, text = LaunchFacts.of(function), PtxBuilder(files)
    grid, threads, vector = facts.grid, get_fact(function, "threads"), get_fact(function, "vector")
    shared = get_fact(function, "cluster")
    cluster, groups = ThreadBlockCluster(*shared) if shared else None, threads // WARPGROUP_THREADS
    team = ThreadTeam(text, threads, 1, producer_threads=WARPGROUP_THREADS, teams=get_fact(function, "teams"))
    ctx = make_context(read_layouts(function), text, team, vector, grid, facts)
    ctx.grid.rank, ctx.grid.cluster = len(grid), cluster
    bind_parameters(ctx, ())
    work = (
        _plan_mainloop_work if any(n.op is gemm_mainloop for n in ctx.function.body.nodes) else _plan_async_mma_work
    )(ctx)
    stores = list(find_tma_stores(ctx, len(work.maps)))
    maps = [*work.maps, *(m for _, m in stores)]
    ctx.pipeline.tensor_maps = tuple(_emit_map_address(text, f"{function.name}_map{m.index}") for m in maps)
    ctx.pipeline.tma_stores = {store: ctx.pipeline.tensor_maps[m.index] for store, m in stores}
    ctx.pipeline.row_stores = ctx.smem.hazards.rearranged = frozenset(find_row_stores(ctx))
    more = staging_bytes(team) if stores or ctx.pipeline.row_stores else 0
    blocks = cluster.size if cluster is not None else 1
    ctx.pipeline.ring = StageRingBuffer(
        text, ctx.smem.allocator, get_fact(function, "stages"), work.stage, groups, more, blocks
    )
    _emit_roles(ctx, grid, work)
    described = [m.describe(_param_type(ctx, m.param).dtype.name, _param_shape(ctx, m.param)) for m in maps]
    return finish_entry(ctx, described, math.prod(grid))


def _emit_roles(ctx: EmissionContext, grid: Sequence[int], work: ProducerWork) -> None:
    """Emit the barriers, the branch by role, and the code of each role."""
    text, team, ring = ctx.text, ctx.team, ctx.pipeline.ring
    assert ring is not None
    own = {
        n: StageRingBuffer(text, ctx.smem.allocator, RESIDENT_STAGES, block_bytes(n), ring.groups)
        for n in _resident_nodes(ctx)
    }
    for each in own.values():
        each.init_barriers(team.block_thread)
    for node in ctx.function.body.nodes:
        if node.op is gemm_mainloop:
            zero_unfetched_rows(ctx, node)
    ring.init_and_synchronise(team.block_thread)
    fetching, end = text.new_label("helper"), text.new_label("end")
    params = dict(ctx.values)
    text.do(f"bra {fetching}", guard=text.let("setp.ge.u32", "pred", team.block_thread, team.worker_threads))
    ctx.pipeline.resident_states = {n: each.make_state(0) for n, each in own.items()}
    _emit_consumer(ctx, grid)
    text.do(f"bra {end}")
    text.label(fetching)
    ctx.values = params
    ctx.pipeline.resident_states = {n: each.make_state(1) for n, each in own.items()}
    _emit_producer(ctx, grid, work, end)
    text.label(end)
    ring.synchronise_exit()
    text.line("ret")


def _resident_nodes(ctx: EmissionContext) -> list[Node]:
    return [n for n in ctx.function.body.nodes if n.op is resident_operand]


def _plan_mainloop_work(ctx: EmissionContext) -> ProducerWork:
    """The producer's work for a `gemm_mainloop`."""
    node = next(n for n in ctx.function.body.nodes if n.op is gemm_mainloop)
    assert ctx.pipeline.ring is None

    def program() -> None:
        assert ctx.pipeline.state is not None
        for each in ctx.function.body.nodes:
            if each is node:
                produce_mainloop(ctx, node, ctx.pipeline.state)
                return
            if is_scalar_arithmetic(each):
                emit_node(ctx, each)

    return ProducerWork(make_mainloop_maps(ctx, node), sum(stage_bytes(node)), program)


def _plan_async_mma_work(ctx: EmissionContext) -> ProducerWork:
    """The producer's work for `async_mma` products."""
    maps = collect_async_mma_maps(ctx.function)

    def program() -> None:
        assert ctx.pipeline.state is not None
        AsyncMmaProducer(ctx, ctx.pipeline.state, maps, ctx.pipeline.resident_states).emit_block(ctx.function.body)

    stage = max(ring_bytes(n) for n in maps if n.op in RING_OPS)
    return ProducerWork(list(dict.fromkeys(maps.values())), stage, program)


def _param_type(ctx: EmissionContext, param: int):  # type: ignore[no-untyped-def]
    return ctx.function.params[param].type


def _param_shape(ctx: EmissionContext, param: int) -> tuple[int, ...]:
    return static_shape(ctx.function.params[param])


def _emit_map_address(text: PtxBuilder, name: str) -> str:
    with text.at_entry_head():
        place = text.let("mov.b64", "b64", name)
        address = text.let("cvta.param.u64", "b64", place)
        text.do("prefetch.tensormap", f"[{address}]")
    return address


def _emit_consumer(ctx: EmissionContext, grid: Sequence[int]) -> None:
    """Emit the consumer warp groups: the whole function, for one program after the other."""
    assert ctx.pipeline.ring is not None
    team, function = ctx.team, ctx.function
    if team.worker_threads > WARPGROUP_THREADS:
        ctx.text.do("setmaxnreg.inc.sync.aligned.u32", REGISTER_SHARES[team.worker_threads][1])
    ctx.pipeline.state = walker = ctx.pipeline.ring.make_state(0)
    others = 0
    if team.teams > 1:
        others = find_trip_count(function, next(n for n in function.body.nodes if n.op is gemm_mainloop)) or 0
        walker.skip(others, ctx.text.let("setp.ne.u32", "pred", team.team_index, 0))
        start_pingpong(team)
    ctx.smem.hazards.enter_loop(function.body)

    def program() -> None:
        emit_block(ctx, function.body)
        walker.skip(others)

    _emit_program_loop(ctx, grid, program, team)
    if ctx.pipeline.tma_stores:
        drain_stores(ctx)


def _emit_producer(ctx: EmissionContext, grid: Sequence[int], work: ProducerWork, end: str) -> None:
    """Emit the producer thread: the scalar arithmetic of addresses, and the copies."""
    text, ring = ctx.text, ctx.pipeline.ring
    assert ring is not None
    if ctx.team.worker_threads > WARPGROUP_THREADS:
        text.do("setmaxnreg.dec.sync.aligned.u32", REGISTER_SHARES[ctx.team.worker_threads][0])
    text.do(f"bra {end}", guard=text.let("setp.ne.u32", "pred", ctx.team.block_thread, ctx.team.worker_threads))
    ctx.pipeline.state = ring.make_state(1)  # a stage is empty at first
    params: dict[Value, tuple[str, ...]] = dict(ctx.values)

    def program() -> None:
        ctx.values = dict(params)
        work.program()

    _emit_program_loop(ctx, grid, program)


def _emit_program_loop(
    ctx: EmissionContext, grid: Sequence[int], body: Callable[[], None], team: ThreadTeam | None = None
) -> None:
    ctx.grid.scheduler = TileScheduler(ctx.text, grid, read_order(ctx.function), ctx.grid.cluster, team)
    loop = ctx.grid.scheduler.begin()
    body()
    ctx.grid.scheduler.end(loop)

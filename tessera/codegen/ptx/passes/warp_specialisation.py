"""Warp specialisation: consumer warp groups that multiply, and one producer thread that fetches for them.

Both loop over the programs of the grid, so that the next program's operands are fetched during the epilogue.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tessera.codegen.ptx.attributes import LaunchFacts, get_fact
from tessera.codegen.ptx.emitter import PtxEmitter
from tessera.codegen.ptx.ops import async_mma, gemm_mainloop, resident_operand
from tessera.codegen.ptx.passes.layout_inference import read_layouts, static_shape
from tessera.codegen.ptx.passes.mainloop import is_scalar_arithmetic
from tessera.codegen.ptx.passes.tile_scheduler import ThreadBlockCluster, TileScheduler, choose_raster_order
from tessera.codegen.ptx.table.warpgroup.epilogue import drain_stores, find_tma_stores, staging_bytes
from tessera.codegen.ptx.table.warpgroup.pingpong import find_trip_count, start_pingpong
from tessera.codegen.ptx.table.warpgroup.producer import (
    PRODUCED_OPS,
    AsyncMmaProducer,
    TensorMapSpec,
    block_bytes,
    collect_async_mma_maps,
    make_mainloop_maps,
    produce_mainloop,
    stage_bytes,
    zero_unfetched_rows,
)
from tessera.codegen.ptx.table.warpgroup.ring_buffer import RingBuffer
from tessera.codegen.ptx.table.warpgroup.wgmma import WARPGROUP_THREADS
from tessera.codegen.ptx.text.builder import PtxBuilder, SourceFiles
from tessera.codegen.ptx.text.entry import KernelEntry, bind_parameters, finish_entry
from tessera.codegen.ptx.text.thread_team import ThreadTeam
from tessera.ir.core import Function, Node, Value

# Registers of a thread that fetches and of one that multiplies, where there are so many of the latter: together no
# more than all threads begin with, or those that want more wait for ever.
REGISTER_SHARES = {256: (40, 232), 512: (32, 112)}
RESIDENT_STAGES = 2  # blocks that stay: one for the program under way, one for the next
SPECIALISED_OPS = (gemm_mainloop, *PRODUCED_OPS)


@dataclass(frozen=True)
class ProducerWork:
    """What there is to fetch: by which maps, how many bytes a stage holds, and what the thread does for a program."""

    maps: Sequence[TensorMapSpec]
    stage: int
    program: Callable[[], None]


def needs_specialisation(function: Function) -> bool:
    """Whether a function has work for threads of different kinds."""
    return any(node.op in SPECIALISED_OPS for node in function.body.walk())


def ring_stage_bytes(function: Function) -> int:
    """The bytes of one stage of the ring buffer between the producer and the consumers of a function."""
    loop = next((n for n in function.body.nodes if n.op is gemm_mainloop), None)
    if loop is not None:
        return sum(stage_bytes(loop))
    return max(block_bytes(n) for n in function.body.walk() if n.op is async_mma)


def emit_specialised(function: Function, files: SourceFiles | None) -> KernelEntry:
    """A function with a `gemm_mainloop` or with `async_mma` products as an entry."""
    facts, text = LaunchFacts.of(function), PtxBuilder(files)
    grid, threads, vector = facts.grid, get_fact(function, "threads"), get_fact(function, "vector")
    shared = get_fact(function, "cluster")
    cluster, groups = ThreadBlockCluster(*shared) if shared else None, threads // WARPGROUP_THREADS
    team = ThreadTeam(text, threads, 1, helpers=WARPGROUP_THREADS, teams=get_fact(function, "teams"))
    kernel = PtxEmitter(read_layouts(function), text, team, vector, grid, facts.noalias)
    kernel.rank, kernel.cluster = len(grid), cluster
    bind_parameters(kernel, ())
    work = (
        _plan_mainloop_work if any(n.op is gemm_mainloop for n in kernel.function.body.nodes) else _plan_async_mma_work
    )(kernel)
    stores = list(find_tma_stores(kernel, len(work.maps)))
    maps = [*work.maps, *(m for _, m in stores)]
    kernel.maps = tuple(_emit_map_address(text, f"{function.name}_map{m.index}") for m in maps)
    kernel.tma_stores = {store: kernel.maps[m.index] for store, m in stores}
    more, blocks = staging_bytes(team) if stores else 0, cluster.size if cluster is not None else 1
    kernel.ring = RingBuffer(text, kernel.room, get_fact(function, "stages"), work.stage, groups, more, blocks)
    _emit_roles(kernel, grid, work)
    described = [m.described(_param_type(kernel, m.param).dtype.name, _param_shape(kernel, m.param)) for m in maps]
    return finish_entry(kernel, described, math.prod(grid))


def _emit_roles(kernel: PtxEmitter, grid: Sequence[int], work: ProducerWork) -> None:
    """The text: each kind of thread on its way."""
    text, team, ring = kernel.text, kernel.team, kernel.ring
    assert ring is not None
    own = {
        n: RingBuffer(text, kernel.room, RESIDENT_STAGES, block_bytes(n), ring.groups) for n in _resident_nodes(kernel)
    }
    for each in own.values():
        each.begin(team.number)
    for node in kernel.function.body.nodes:
        if node.op is gemm_mainloop:
            zero_unfetched_rows(kernel, node)
    ring.prepare(team.number)
    fetching, end = text.new_label("helper"), text.new_label("end")
    params = dict(kernel.values)
    text.do(f"bra {fetching}", guard=text.let("setp.ge.u32", "pred", team.number, team.working))
    kernel.kept = {n: each.walk(0) for n, each in own.items()}
    _emit_consumer(kernel, grid)
    text.do(f"bra {end}")
    text.label(fetching)
    kernel.values = params
    kernel.kept = {n: each.walk(1) for n, each in own.items()}
    _emit_producer(kernel, grid, work, end)
    text.label(end)
    ring.end()
    text.line("ret")


def _resident_nodes(kernel: PtxEmitter) -> list[Node]:
    return [n for n in kernel.function.body.nodes if n.op is resident_operand]


def _plan_mainloop_work(kernel: PtxEmitter) -> ProducerWork:
    """The work of a `product_loop`."""
    node = next(n for n in kernel.function.body.nodes if n.op is gemm_mainloop)
    assert kernel.ring is None

    def program() -> None:
        assert kernel.pipeline_state is not None
        for each in kernel.function.body.nodes:
            if each is node:
                produce_mainloop(kernel, node, kernel.pipeline_state)
                return
            if is_scalar_arithmetic(each):
                kernel.emit(each)

    return ProducerWork(make_mainloop_maps(kernel, node), sum(stage_bytes(node)), program)


def _plan_async_mma_work(kernel: PtxEmitter) -> ProducerWork:
    """The work of `streamed` products."""
    maps = collect_async_mma_maps(kernel.function)

    def program() -> None:
        assert kernel.pipeline_state is not None
        AsyncMmaProducer(kernel, kernel.pipeline_state, maps, kernel.kept).run(kernel.function.body)

    stage = max(block_bytes(n) for n in maps if n.op is async_mma)
    return ProducerWork(list(dict.fromkeys(maps.values())), stage, program)


def _param_type(kernel: PtxEmitter, param: int):  # type: ignore[no-untyped-def]
    return kernel.function.params[param].type


def _param_shape(kernel: PtxEmitter, param: int) -> tuple[int, ...]:
    return static_shape(kernel.function.params[param])


def _emit_map_address(text: PtxBuilder, name: str) -> str:
    with text.first():
        place = text.let("mov.b64", "b64", name)
        address = text.let("cvta.param.u64", "b64", place)
        text.do("prefetch.tensormap", f"[{address}]")
    return address


def _emit_consumer(kernel: PtxEmitter, grid: Sequence[int]) -> None:
    """What the warp groups do: the whole function, program after program."""
    assert kernel.ring is not None
    team, function = kernel.team, kernel.function
    if team.working > WARPGROUP_THREADS:
        kernel.text.do("setmaxnreg.inc.sync.aligned.u32", REGISTER_SHARES[team.working][1])
    kernel.pipeline_state = walker = kernel.ring.walk(0)
    others = 0
    if team.teams > 1:
        others = find_trip_count(function, next(n for n in function.body.nodes if n.op is gemm_mainloop)) or 0
        walker.skip(others, kernel.text.let("setp.ne.u32", "pred", team.index, 0))
        start_pingpong(team)
    kernel.hazards.enter_loop(function.body)

    def program() -> None:
        kernel.run(function.body)
        walker.skip(others)

    _emit_program_loop(kernel, grid, program, team)
    if kernel.tma_stores:
        drain_stores(kernel)


def _emit_producer(kernel: PtxEmitter, grid: Sequence[int], work: ProducerWork, end: str) -> None:
    """What the first of the helpers does: places by scalar arithmetic, and the copies."""
    text, ring = kernel.text, kernel.ring
    assert ring is not None
    if kernel.team.working > WARPGROUP_THREADS:
        text.do("setmaxnreg.dec.sync.aligned.u32", REGISTER_SHARES[kernel.team.working][0])
    text.do(f"bra {end}", guard=text.let("setp.ne.u32", "pred", kernel.team.number, kernel.team.working))
    kernel.pipeline_state = ring.walk(1)  # a stage is empty at first
    params: dict[Value, tuple[str, ...]] = dict(kernel.values)

    def program() -> None:
        kernel.values = dict(params)
        work.program()

    _emit_program_loop(kernel, grid, program)


def _emit_program_loop(
    kernel: PtxEmitter, grid: Sequence[int], body: Callable[[], None], team: ThreadTeam | None = None
) -> None:
    kernel.persistent = TileScheduler(
        kernel.text, grid, choose_raster_order(kernel.function, grid), kernel.cluster, team
    )
    loop = kernel.persistent.begin()
    body()
    kernel.persistent.end(loop)

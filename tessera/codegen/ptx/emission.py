"""Kernel schedules: a pass chooses one for each tile function, and emission makes a PTX entry of that kind of the
function that every pass has prepared."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from tessera.codegen.ptx.context import KernelEntry, bind_parameters, finish_entry, make_context
from tessera.codegen.ptx.emitter import emit_block
from tessera.codegen.ptx.layout import ThreadTeam
from tessera.codegen.ptx.ops import (
    PREFETCHING,
    UNIFORM,
    WARP_SPECIALISED,
    LaunchFacts,
    gemm_mainloop,
    get_fact,
    set_facts,
)
from tessera.codegen.ptx.passes.launch_configuration import choose_team_size
from tessera.codegen.ptx.passes.layout_inference import read_layouts
from tessera.codegen.ptx.passes.persistent_prefetch import emit_prefetching, plan_prefetch
from tessera.codegen.ptx.passes.tile_scheduler import ThreadBlockCluster, choose_requested_cluster
from tessera.codegen.ptx.passes.warp_specialisation import emit_specialised, ring_stage_bytes
from tessera.codegen.ptx.table.blocks import (  # noqa: F401  (their rows fill the tables)
    control_flow,
    diagnostics,
    group_collectives,
    layout_conversion,
    matrix_multiply,
    mbarrier,
    memory_access,
    reduction,
    staging_buffers,
)
from tessera.codegen.ptx.table.blocks.program_grid import GRID_AXES, exit_grid_barrier, find_linear_grid
from tessera.codegen.ptx.table.scalars import arithmetic, math_functions  # noqa: F401  (their rows fill the tables)
from tessera.codegen.ptx.table.warpgroup import wgmma  # noqa: F401  (their rows fill the tables)
from tessera.codegen.ptx.table.warpgroup.tensor_map import PRODUCED_OPS
from tessera.codegen.ptx.text.builder import PtxBuilder, SourceFiles
from tessera.core.symbolic_dim import find_size_bounds
from tessera.ir.core import Function, find_size_names
from tessera.ops.dialects import tile


def emit_function(function: Function, files: SourceFiles | None) -> KernelEntry:
    """A laid-out tile function as an entry."""
    return KERNEL_EMITTERS[get_fact(function, "kernel")](function, files)


def emit_uniform(function: Function, files: SourceFiles | None) -> KernelEntry:
    """An entry in which every thread does the same, for one program of the grid."""
    facts, group, vector = LaunchFacts.of(function), int(function.attrs.get("group", 1)), get_fact(function, "vector")
    text, grids = PtxBuilder(files), facts.grids
    team = ThreadTeam(text, get_fact(function, "threads"), group)
    grid = tuple(max(find_size_bounds(n)[1] for n in each) for each in zip(*grids, strict=True)) if grids else None
    ctx = make_context(read_layouts(function), text, team, vector, grid, facts.noalias)
    ctx.entry.arch, ctx.entry.min_resident_blocks = facts.arch, get_fact(function, "resident")
    ctx.grid.rank, ctx.grid.linear = max((len(g) for g in grids), default=1), find_linear_grid(grids)
    bind_parameters(ctx, facts.alignments)
    emit_block(ctx, ctx.function.body)
    if ctx.entry.exit_label:
        text.label(ctx.entry.exit_label)
    if "meeting" in ctx.entry.hidden.used:
        exit_grid_barrier(ctx)
    text.line("ret")
    return finish_entry(ctx)


KERNEL_EMITTERS: dict[str, Callable[[Function, SourceFiles | None], KernelEntry]] = {
    UNIFORM: emit_uniform,
    WARP_SPECIALISED: emit_specialised,
    PREFETCHING: emit_prefetching,
}


# Kernel selection: chooses a kernel schedule for each tile function, and its stages, before any pass depends on them. A
# warp-specialised kernel (CUTLASS) is chosen where a loop's operands can be fetched by TMA and at least two stages fit
# in shared memory; a persistent prefetching kernel where programs are large and many; a uniform kernel otherwise.


WGMMA_ARCHS = ("sm_90a",)  # architectures with instructions of warp groups
SHARED_LIMIT = {"sm_80": 166_912, "sm_90a": 232_448}
RING_STAGES = (12, 8, 6, 5, 4, 3, 2)  # of a ring, the most that fit: a small product waits for memory alone
TMA_ALIGN = 16
MIN_PREFETCHED_THREADS = 1024  # threads of a program that fills a multiprocessor
MIN_PREFETCHED_PROGRAMS = 256  # fewer programs run nearly all at once
SPECIALISED_OPS = (gemm_mainloop, *PRODUCED_OPS)  # ops that need a producer
Rewrite = Callable[[Function], Function]


def select_kernel(function: Function, form: Sequence[Rewrite], finish: Sequence[Rewrite]) -> Function:
    """The function with `ptx.kernel`, `ptx.stages` and `ptx.cluster`; the function itself is not rewritten.

    `form` are the passes that form and pipeline loops of asynchronous products, `finish` those between them and
    emission: what they make of the function decides, and the pipeline applies them once the choice is recorded.

    Raises:
        ResourceError: a Schedule asks for a cluster that the function, its grid or the architecture does not allow.
    """
    if get_fact(function, "rounding"):
        return set_facts(function, kernel=UNIFORM)
    able = _has_bulk_copies(function)
    ready = _apply(form, set_facts(function, kernel=WARP_SPECIALISED)) if able else function
    cluster = None
    if int(function.attrs.get("cluster", 1)) != 1:
        cluster = choose_requested_cluster(function, ready, LaunchFacts.of(function).grid, able)
    if any(node.op in SPECIALISED_OPS for node in ready.body.walk()):
        facts: dict[str, Any] = {"kernel": WARP_SPECIALISED}
        facts |= {"cluster": (cluster.size, cluster.axis, cluster.side)} if cluster is not None else {}
        stages = _choose_stages(set_facts(ready, **facts), cluster, finish)
        if stages is not None:
            return set_facts(function, **facts, stages=stages)
    supply = plan_prefetch(function, LaunchFacts.of(function).grid) if able and _fills_device(function) else None
    if supply is not None:
        return set_facts(function, kernel=PREFETCHING, stages=supply.stages)
    return set_facts(function, kernel=UNIFORM)


def _apply(passes: Sequence[Rewrite], function: Function) -> Function:
    for each in passes:
        function = each(function)
    return function


def _fills_device(function: Function) -> bool:
    """Whether a program fills a multiprocessor, and there are many: what prefetching across programs needs to pay."""
    many = math.prod(LaunchFacts.of(function).grid) >= MIN_PREFETCHED_PROGRAMS
    return many and choose_team_size(function) >= MIN_PREFETCHED_THREADS


def _has_bulk_copies(function: Function) -> bool:
    """Whether a persistent kernel may fetch by bulk copies: one grid, aligned arrays that share no memory, and no
    grid barrier, since programs that wait for each other cannot run one after the other."""
    facts = LaunchFacts.of(function)
    aligned = min(facts.alignments, default=TMA_ALIGN) == TMA_ALIGN
    if find_size_names(function):
        return False  # tensor maps and the number of programs are known when the kernel is emitted
    fits = facts.noalias and facts.arch in WGMMA_ARCHS and len(set(facts.grids)) == 1 and aligned
    return fits and not tile.uses_grid_barrier(function.body) and len(facts.grid) <= len(GRID_AXES)


def _choose_stages(ready: Function, cluster: ThreadBlockCluster | None, finish: Sequence[Rewrite]) -> int | None:
    """The stages that a Schedule asks for, or the most that fit in shared memory; None where not even two do.

    The emission itself is measured, since it alone knows what an epilogue exchanges through shared memory. A cluster
    that a Schedule asks for keeps the fewest stages even where they do not fit: emission then says so.
    """
    asked = ready.attrs.get("stages")
    if asked is not None:
        return int(asked)
    limit, size = SHARED_LIMIT[LaunchFacts.of(ready).arch], ring_stage_bytes(ready)
    laid_out = _apply(finish, ready)
    for stages in RING_STAGES:
        if stages * size <= limit and emit_function(set_facts(laid_out, stages=stages), None).shared <= limit:
            return stages
    return RING_STAGES[-1] if cluster is not None else None

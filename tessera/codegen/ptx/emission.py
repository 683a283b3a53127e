"""Emission: a tile function that every pass has prepared becomes a PTX entry of the kind its attributes name."""

from __future__ import annotations

from collections.abc import Callable

from tessera.codegen.ptx.context import make_context
from tessera.codegen.ptx.emitter import emit_block
from tessera.codegen.ptx.ops import PREFETCHING, UNIFORM, WARP_SPECIALISED, LaunchFacts, get_fact
from tessera.codegen.ptx.passes.layout_inference import read_layouts
from tessera.codegen.ptx.passes.persistent_prefetch import emit_prefetching
from tessera.codegen.ptx.passes.warp_specialisation import emit_specialised
from tessera.codegen.ptx.table.blocks import (  # noqa: F401  (their rows fill the tables)
    control_flow,
    diagnostics,
    elementwise,
    group_collectives,
    layout_conversion,
    matrix_multiply,
    mbarrier,
    memory_access,
    reduction,
    staging_buffers,
)
from tessera.codegen.ptx.table.blocks.program_grid import exit_grid_barrier, find_linear_grid
from tessera.codegen.ptx.table.scalars import arithmetic, math_functions  # noqa: F401  (their rows fill the tables)
from tessera.codegen.ptx.table.warpgroup import wgmma  # noqa: F401  (their rows fill the tables)
from tessera.codegen.ptx.text.builder import PtxBuilder, SourceFiles
from tessera.codegen.ptx.text.entry import KernelEntry, bind_parameters, finish_entry
from tessera.codegen.ptx.text.thread_team import ThreadTeam
from tessera.core.symbolic_dim import find_size_bounds
from tessera.ir.core import Function


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

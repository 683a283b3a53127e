"""Pass pipeline: a tile function becomes a PTX entry.

Passes run in order (instruction selection, mainloop formation, software pipelining, layouts); then the function is
emitted as a warp-specialised, a persistent prefetching, or a uniform kernel, with a team size chosen for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tessera.codegen.ptx.emitter import PtxEmitter
from tessera.codegen.ptx.layout import uses_tensor_cores
from tessera.codegen.ptx.passes.instruction_selection import (
    contract_fma,
    fuse_accumulation,
    select_exp2_ftz,
    split_products,
)
from tessera.codegen.ptx.passes.layout_inference import assign_layouts, static_shape
from tessera.codegen.ptx.passes.load_hoisting import hoist_loads
from tessera.codegen.ptx.passes.loop_peeling import narrow_index_comparisons, peel_masked_loops
from tessera.codegen.ptx.passes.mainloop import form_async_mma, form_mainloop
from tessera.codegen.ptx.passes.multistage_pipelining import pipeline_operand_copies
from tessera.codegen.ptx.passes.persistent_prefetch import emit_prefetching, plan_prefetch
from tessera.codegen.ptx.passes.software_pipelining import pipeline_loops
from tessera.codegen.ptx.passes.tile_scheduler import ThreadBlockCluster, choose_requested_cluster
from tessera.codegen.ptx.passes.warp_specialisation import emit_specialised, needs_specialisation
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
from tessera.codegen.ptx.table.blocks.program_grid import GRID_AXES, exit_grid_barrier, find_folded_grid
from tessera.codegen.ptx.table.scalars import arithmetic, math_functions  # noqa: F401  (their rows fill the tables)
from tessera.codegen.ptx.table.scalars.conversion import has_policies
from tessera.codegen.ptx.table.warpgroup import wgmma  # noqa: F401  (their rows fill the tables)
from tessera.codegen.ptx.text.builder import PtxBuilder, SourceFiles
from tessera.codegen.ptx.text.entry import KernelEntry, bind_parameters, finish_entry
from tessera.codegen.ptx.text.register_types import element_bytes
from tessera.codegen.ptx.text.thread_team import WARP_THREADS, ThreadTeam
from tessera.core.types import TensorType
from tessera.ir.core import Function, Value
from tessera.ops.dialects import tile

WGMMA_ARCHS = ("sm_90a",)  # architectures with instructions of warp groups
SHARED_LIMIT = {"sm_80": 166_912, "sm_90a": 232_448}
RING_STAGES = (12, 8, 6, 5, 4, 3, 2)  # of a ring, the most that fit: a small product waits for memory alone
TMA_ALIGN = 16
TEAM_THREADS = (32, 1024)  # the fewest and the most of a team
ELEMENTS_PER_THREAD = 8  # elements that a thread holds of the largest block, where the team can be as large
MMA_ELEMENTS_PER_THREAD = 128  # the same where tensor cores form products: what a warp reads serves 64 rows and columns
WIDE_ELEMENTS_PER_THREAD = 32  # from so many on the team grows past HALF
PREFERRED_THREADS = 256
SM_REGISTERS = 1 << 16  # of a multiprocessor
MAX_RESIDENT_BLOCKS = 8  # of them that are asked to share its registers


def emit_function(
    function: Function,
    files: SourceFiles | None,
    grids: Sequence[Sequence[int]],
    apart: bool,
    aligned: Sequence[int],
    arch: str,
) -> KernelEntry:
    """A tile function as an entry for these grids.

    `apart` says that its refs lie in different memory, `aligned` of how many bytes their addresses are multiples.
    """  # fmt: skip
    if has_policies(function):
        return _emit_uniform(function, files, grids, apart, aligned, arch)
    fused = fuse_accumulation(split_products(select_exp2_ftz(function)))
    if any(uses_tensor_cores(node) for node in fused.body.walk()):  # what these add up, no other engine rounds alike
        fused = contract_fma(fused)
    fits = apart and arch in WGMMA_ARCHS and len(set(grids)) == 1 and min(aligned, default=TMA_ALIGN) == TMA_ALIGN
    # Programs that wait for each other are not worked through in turn.
    fits = fits and not tile.uses_grid_barrier(function.body) and len(grids[0]) <= len(GRID_AXES)
    ready = _pipeline_async_mma(form_mainloop(fused), grids[0]) if fits else fused
    cluster = choose_requested_cluster(function, ready, grids[0] if grids else (), fits)
    if (
        needs_specialisation(ready)
        and (entry := _emit_warp_specialised(ready, files, grids[0], apart, cluster)) is not None
    ):
        return entry
    supply = plan_prefetch(fused, grids[0], choose_team_size(fused)) if fits else None
    if supply is not None:
        return emit_prefetching(supply, choose_team_size(fused), choose_vector_width(fused), files, grids[0], apart)
    ahead = pipeline_operand_copies(fused, apart, aligned, choose_team_size(fused), SHARED_LIMIT[arch])
    return _emit_uniform(ahead, files, grids, apart, aligned, arch)


def _emit_warp_specialised(
    function: Function, files: SourceFiles | None, grid: Sequence[int], apart: bool, cluster: ThreadBlockCluster | None
) -> KernelEntry | None:
    """An entry whose threads have different work, with as many stages as fit; None where not even the fewest do."""
    asked = function.attrs.get("stages")  # by a Schedule: so many, or the shared memory is said not to suffice
    for stages in RING_STAGES if asked is None else (int(asked),):
        entry = emit_specialised(function, files, grid, apart, stages, cluster)
        if entry.shared <= SHARED_LIMIT[WGMMA_ARCHS[0]] or asked is not None:
            return entry
    return entry if cluster is not None else None  # which a Schedule asks for, too


def _pipeline_async_mma(function: Function, grid: Sequence[int]) -> Function:
    """A function with its products streamed, if it can be, and its loops made fit for that."""
    found = form_async_mma(function)
    if found is function:
        return function
    return narrow_index_comparisons(peel_masked_loops(pipeline_loops(contract_fma(found), grid), grid))


def _emit_uniform(
    function: Function,
    files: SourceFiles | None,
    grids: Sequence[Sequence[int]],
    apart: bool,
    aligned: Sequence[int],
    arch: str,
) -> KernelEntry:
    """An entry in which every thread does the same."""
    group = int(function.attrs.get("group", 1))
    text = PtxBuilder(files)
    team = ThreadTeam(text, 1 if group > 1 else choose_team_size(function), group)
    vector = choose_vector_width(function)
    grid = tuple(max(each) for each in zip(*grids, strict=True)) if grids else None
    kernel = PtxEmitter(assign_layouts(hoist_loads(function), team.threads, vector), text, team, vector, grid, apart)
    kernel.arch, kernel.resident = arch, choose_resident_blocks(function)
    kernel.rank, kernel.folded = max((len(g) for g in grids), default=1), find_folded_grid(grids)
    bind_parameters(kernel, aligned)
    kernel.run(kernel.function.body)
    if kernel.exit_label:
        text.label(kernel.exit_label)
    if "meeting" in kernel.extras.used:
        exit_grid_barrier(kernel)
    text.line("ret")
    return finish_entry(kernel)


def choose_team_size(function: Function) -> int:
    """The threads for a tile: so many that none holds many elements of the largest block."""
    most = max((_element_count(v) for node in function.body.walk() for v in node.results), default=1)
    if any(uses_tensor_cores(node) for node in function.body.walk()):
        return min(
            max(1 << max(most // MMA_ELEMENTS_PER_THREAD - 1, 0).bit_length(), 4 * WARP_THREADS), PREFERRED_THREADS
        )
    wanted = (
        most // ELEMENTS_PER_THREAD
        if most // ELEMENTS_PER_THREAD <= PREFERRED_THREADS
        else max(PREFERRED_THREADS, most // WIDE_ELEMENTS_PER_THREAD)
    )
    return min(max(1 << max(wanted - 1, 0).bit_length(), TEAM_THREADS[0]), TEAM_THREADS[1])


def choose_resident_blocks(function: Function) -> int:
    """The blocks of threads that a multiprocessor should hold at once where products take each other's results; 0: any.

    The assembler keeps more alive of them than pays. A thread then has four registers for each element that it holds
    of the largest block: sums, the operands of the next instructions, and addresses.
    """
    if sum(uses_tensor_cores(node) for node in function.body.walk()) < 2:
        return 0
    most = max(_element_count(v) for node in function.body.walk() for v in node.results)
    return max(1, min(SM_REGISTERS // (4 * most), MAX_RESIDENT_BLOCKS))


def choose_vector_width(function: Function) -> int:
    """The neighbours that a thread holds: 16 bytes of the narrowest elements that are loaded or stored."""
    narrow = [n.args[0].type.dtype for n in function.body.walk() if n.op in (tile.load, tile.store)]
    return max(1, min(8, 16 // min((element_bytes(d) for d in narrow), default=4)))


def _element_count(v: Value) -> int:
    return math.prod(static_shape(v)) if isinstance(v.type, TensorType) else 1

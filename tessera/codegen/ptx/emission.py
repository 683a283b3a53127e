"""Kernel schedules: a pass chooses one for each tile function, launch configuration maps its threads, and emission
makes a PTX entry of that kind of the function that every pass has prepared."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tessera.codegen.artifact import parse_size
from tessera.codegen.host_plan import build_host_plan, find_aliased_kernels
from tessera.codegen.ptx.context import (
    VECTOR_BYTES,
    WITHOUT_DEPENDENT_LAUNCH,
    EmissionContext,
    KernelEntry,
    PtxMemRef,
    bind_parameters,
    find_access_length,
    finish_entry,
    make_context,
    wait_for_kernel_ahead,
)
from tessera.codegen.ptx.emitter import emit_block
from tessera.codegen.ptx.layout import (
    WARP_THREADS,
    WARPGROUP_THREADS,
    ThreadTeam,
    bit_width,
    find_final_reductions,
    find_reduced_bits,
    find_row_threads,
    find_warp_rows,
    reduces_last_axis,
    reduction_axes,
    static_shape,
    trace_to_loads,
)
from tessera.codegen.ptx.ops import (
    DOUBLE_MMA,
    LEVEL,
    PREFETCHING,
    UNIFORM,
    WARP_SPECIALISED,
    LaunchFacts,
    async_mma,
    folds_rows,
    gemm_mainloop,
    get_fact,
    matmul_accumulate,
    prefetched_load,
    set_facts,
    uses_split_mma,
    uses_tensor_cores,
)
from tessera.codegen.ptx.passes.branch_formation import COMBINING
from tessera.codegen.ptx.passes.layout_inference import read_layouts
from tessera.codegen.ptx.passes.multistage_pipelining import count_rounds
from tessera.codegen.ptx.passes.persistent_prefetch import emit_prefetching, plan_prefetch
from tessera.codegen.ptx.passes.store_layouts import MOST_EXCHANGED
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
from tessera.codegen.ptx.table.scalars.arithmetic import has_policies
from tessera.codegen.ptx.table.warpgroup import fetched_block, wgmma  # noqa: F401  (their rows fill the tables)
from tessera.codegen.ptx.table.warpgroup.pingpong import PINGPONG_TEAMS, choose_pingpong_groups
from tessera.codegen.ptx.table.warpgroup.tensor_map import PRODUCED_OPS, WGMMA_ROWS
from tessera.codegen.ptx.text.builder import PtxBuilder, SourceFiles, element_bytes
from tessera.core.errors import ResourceError
from tessera.core.symbolic_dim import Size, find_size_bounds, find_size_divisor, proves_less
from tessera.core.types import GLOBAL, TensorType, int64
from tessera.ir.core import Block, Function, Module, Node, Value, find_size_names
from tessera.ir.rewrite import UseDef
from tessera.ops.dialects import control_flow as control_flow_ops
from tessera.ops.dialects import host, tile
from tessera.ops.tensor import basic, contractions, reduce
from tessera.ops.tensor import shape as shape_ops


def emit_function(function: Function, files: SourceFiles | None) -> KernelEntry:
    """A laid-out tile function as an entry."""
    return KERNEL_EMITTERS[get_fact(function, "kernel")](function, files)


def emit_uniform(function: Function, files: SourceFiles | None) -> KernelEntry:
    """An entry in which every thread does the same, for one program of the grid."""
    facts, group, vector = LaunchFacts.of(function), int(function.attrs.get("group", 1)), get_fact(function, "vector")
    text, grids = PtxBuilder(files), facts.grids
    team = ThreadTeam(text, get_fact(function, "threads"), group)
    grid = tuple(max(find_size_bounds(n)[1] for n in each) for each in zip(*grids, strict=True)) if grids else None
    ctx = make_context(read_layouts(function), text, team, vector, grid, facts)
    ctx.entry.min_resident_blocks = get_fact(function, "resident")
    ctx.grid.rank, ctx.grid.linear = max((len(g) for g in grids), default=1), find_linear_grid(grids)
    bind_parameters(ctx, facts.alignments)
    _emit_body(ctx)
    if ctx.entry.exit_label:
        text.label(ctx.entry.exit_label)
    if "meeting" in ctx.entry.hidden.used:
        exit_grid_barrier(ctx)
    text.line("ret")
    return finish_entry(ctx)


def _emit_body(ctx: EmissionContext) -> None:
    """Emit the nodes; loads of constants at its start come before the wait for the kernel ahead (`finish_entry`).

    Where not all programs begin at once, they keep the bandwidth busy without it.
    """
    body, constants = ctx.function.body, get_fact(ctx.function, "constants", ())
    kept = {ctx.function.params[i] for i in constants} if _begins_at_once(ctx) else set()
    early = list(itertools.takewhile(lambda n: _reads_constants(n, kept), body.nodes))
    while early and early[-1].op is not tile.load:
        early.pop()
    if not early or ctx.entry.arch in WITHOUT_DEPENDENT_LAUNCH:
        emit_block(ctx, body)
        return
    emit_block(ctx, replace(body, nodes=tuple(early)))
    wait_for_kernel_ahead(ctx)
    emit_block(ctx, replace(body, nodes=body.nodes[len(early) :]))


RESIDENT_THREADS = 132 * 2048  # of an H200


def _begins_at_once(ctx: EmissionContext) -> bool:
    """Whether a GPU's multiprocessors hold all programs of each launch at once, as far as threads go."""
    counts = [math.prod(find_size_bounds(n)[1] for n in grid) for grid in LaunchFacts.of(ctx.function).grids]
    return all(count * ctx.team.block_threads <= RESIDENT_THREADS for count in counts)


def _reads_constants(node: Node, constants: Collection[Value]) -> bool:
    """Whether a node computes from registers alone, or loads from memory that no kernel of the program writes."""
    return node.args[0] in constants if node.op is tile.load else not (node.op.effects or node.regions)


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


def combines_elements(function: Function) -> bool:
    """Whether a function has products, reductions or loops, rather than ops of elements alone."""
    return any(n.regions or n.op in COMBINING for n in function.body.nodes)


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
        facts = {"kernel": PREFETCHING, "stages": supply.stages}
        made = emit_function(_apply(finish, set_facts(supply.function, **facts)), None)  # with what layouts exchange
        if made.shared <= SHARED_LIMIT[get_fact(function, "arch")]:
            return set_facts(function, **facts)
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

    There are at least as many as a consumer holds at once: with fewer it would wait for ever. The emission itself is
    measured, since it alone knows that, and what an epilogue exchanges through shared memory. A cluster that a Schedule
    asks for keeps the fewest stages even where they do not fit: emission then says so.
    """
    asked, laid_out = ready.attrs.get("stages"), _apply(finish, ready)
    if asked is not None:
        return max(int(asked), emit_function(set_facts(laid_out, stages=int(asked)), None).held_stages)
    limit, size = SHARED_LIMIT[LaunchFacts.of(ready).arch], ring_stage_bytes(ready)
    for stages in RING_STAGES:
        if stages * size <= limit:
            made = emit_function(set_facts(laid_out, stages=stages), None)
            if made.shared <= limit and made.held_stages <= stages:
                return stages
    return RING_STAGES[-1] if cluster is not None else None


TEAM_THREADS = (32, 1024)  # the fewest and the most threads of a team
ELEMENTS_PER_THREAD = 8  # elements of the largest block that a thread holds, where the team can be as large
MMA_ELEMENTS_PER_THREAD = 128  # the same with tensor cores: what a warp reads serves 64 rows and columns
WIDE_ELEMENTS_PER_THREAD = 32  # from so many on a team grows past PREFERRED_THREADS
CARRIED_ELEMENTS_PER_THREAD = 100  # elements of all blocks that a loop carries, which take registers throughout
PREFERRED_THREADS, LEAST_WARPS = 256, 4  # the second of a team whose warps reduce rows of their own
# Threads of a whole GPU; so few elements of a pointwise kernel have one each. The most of them in a team.
SPREAD_THREADS, SPREAD_TEAM = 1 << 16, 512
REALIGNED_THREADS = 768  # of a multiprocessor whose programs walk misaligned rows
SM_REGISTERS = 1 << 16  # registers of a multiprocessor
MAX_RESIDENT_BLOCKS = 8  # the most blocks that are asked to share its registers
SECTOR_BYTES, LINE_BYTES = 32, 128  # of the caches
GLOBAL_ACCESSES = (tile.load, tile.store, tile.gather, tile.scatter, tile.atomic, tile.compare_exchange)
# Ops beside pointwise ones of a kernel whose threads share nothing.
PLAIN_OPS = (tile.load, tile.store, tile.program_id, tile.grid_size, basic.full, basic.broadcast_to, shape_ops.iota)
NETWORK_STAGES = 3  # of pairs in the shortest sorting network
NETWORK_THREADS = 512  # of a multiprocessor that executes it
EPILOGUE_VECTOR = 8  # neighbours that a thread of a warp-specialised kernel holds
MAX_WARPGROUPS = 2  # warp groups that multiply, in a kernel without ping-pong


def map_threads(function: Function) -> Function:
    """The function with its team size, vector width and occupancy as attributes."""
    if get_fact(function, "kernel") == WARP_SPECIALISED:
        return _map_warp_groups(function)
    threads = 1 if int(function.attrs.get("group", 1)) > 1 else choose_team_size(function)
    resident = choose_resident_blocks(function, threads) if get_fact(function, "kernel") == UNIFORM else 0
    return set_facts(function, threads=threads, teams=1, vector=choose_vector_width(function), resident=resident)


def _map_warp_groups(function: Function) -> Function:
    """Two ping-pong teams where their epilogues are long enough; else one team of one or two warp groups."""
    own = 0 if get_fact(function, "cluster") else choose_pingpong_groups(function, LaunchFacts.of(function).grid)
    teams, groups = (PINGPONG_TEAMS, own) if own else (1, min(MAX_WARPGROUPS, _product_rows(function) // WGMMA_ROWS))
    return set_facts(function, threads=WARPGROUP_THREADS * groups, teams=teams, vector=EPILOGUE_VECTOR, resident=0)


def _product_rows(function: Function) -> int:
    """The rows of the blocks that are multiplied."""
    return next(static_shape(n.out)[0] for n in function.body.walk() if n.op in (gemm_mainloop, async_mma))


def choose_team_size(function: Function) -> int:
    """The threads for a tile: so many that none holds many elements of the largest block."""
    most = max((_element_count(v) for node in function.body.walk() for v in node.results), default=1)
    if any(uses_tensor_cores(node) for node in function.body.walk()):
        return _round_team(most // MMA_ELEMENTS_PER_THREAD, PREFERRED_THREADS)
    if split := [static_shape(node.out)[0] for node in function.body.walk() if uses_split_mma(node)]:
        # Of several products, a warp has whole rows.
        most_threads = TEAM_THREADS[1] if len(split) == 1 else WARP_THREADS * max(min(split) // DOUBLE_MMA[0], 4)
        return _round_team(most // WIDE_ELEMENTS_PER_THREAD, most_threads)
    if (few := _count_spread_elements(function, most)) < ELEMENTS_PER_THREAD:
        return min(max(most // few, TEAM_THREADS[0]), SPREAD_TEAM)
    wanted = max(min(most // ELEMENTS_PER_THREAD, PREFERRED_THREADS), most // WIDE_ELEMENTS_PER_THREAD)
    warps = find_warp_rows(function)  # each has rows of its own
    if most <= warps * WARP_THREADS * WIDE_ELEMENTS_PER_THREAD:
        wanted = min(wanted, max(warps, LEAST_WARPS) * WARP_THREADS)
    carried = [sum(map(_element_count, n.results)) for n in function.body.walk() if n.op is control_flow_ops.for_]
    wanted = max(wanted, min(max(carried, default=0) // CARRIED_ELEMENTS_PER_THREAD, PREFERRED_THREADS))
    if cached := get_fact(function, "cached", 0):  # few blocks share the memory of a multiprocessor
        resident = max(SHARED_LIMIT[get_fact(function, "arch")] // cached, 1)
        wanted = max(wanted, min(most // ELEMENTS_PER_THREAD, TEAM_THREADS[1] // resident))
    return min(max(1 << max(wanted - 1, 0).bit_length(), TEAM_THREADS[0]), TEAM_THREADS[1], *find_row_threads(function))


def _count_spread_elements(function: Function, most: int) -> int:
    """The elements of long pointwise functions that a thread takes where they are spread over the whole GPU."""
    plain = (*PLAIN_OPS, shape_ops.reshape, control_flow_ops.if_)
    spread = all(n.op.pointwise or n.op in plain for n in function.body.walk())
    slow = any(n.op.is_transcendental for n in function.body.walk())
    if not (spread and slow and LaunchFacts.of(function).grids) or most & (most - 1):
        return ELEMENTS_PER_THREAD
    programs = max(math.prod(find_size_bounds(n)[1] for n in grid) for grid in LaunchFacts.of(function).grids)
    each = math.ceil(min(programs * most / SPREAD_THREADS, ELEMENTS_PER_THREAD))
    return 1 << max(each - 1, 0).bit_length()


def _round_team(threads: int, most: int) -> int:
    """The next power of two of threads, at least four warps."""
    return min(max(1 << max(threads - 1, 0).bit_length(), 4 * WARP_THREADS), most)


def choose_resident_blocks(function: Function, threads: int) -> int:
    """The blocks that a multiprocessor should hold at once where one product takes another's result, where the end of
    a misaligned row is gathered, and where keys are sorted; 0: any.

    Without a limit the assembler keeps more registers alive than pays. With it a thread of products has four registers
    for each element that it holds of the largest block: sums, the operands of the next instructions, and addresses.
    """
    if get_fact(function, "realigned", False) and not get_fact(function, "cached", 0):
        return REALIGNED_THREADS // threads
    if _is_sorting_network(function):
        return min(NETWORK_THREADS // threads, MAX_RESIDENT_BLOCKS)
    if sum(uses_tensor_cores(node) for node in function.body.walk()) < 2:
        return 0
    most = max(_element_count(v) for node in function.body.walk() for v in node.results)
    return max(1, min(SM_REGISTERS // (4 * most), MAX_RESIDENT_BLOCKS))


def choose_vector_width(function: Function) -> int:
    """The neighbours that a thread holds: 16 bytes of the narrowest elements that are loaded or stored.

    Where accesses cannot move so many at once, since rows begin at any element, fewer may cost less: the threads of a
    warp then access neighbours.
    """
    accesses = (tile.load, tile.store, prefetched_load)
    narrow = [n.args[0].type.dtype for n in function.body.walk() if n.op in accesses]
    most = max(1, min(8, 16 // min((element_bytes(d) for d in narrow), default=4)))
    elements = max((_element_count(v) for node in function.body.walk() for v in node.results), default=1)
    most = min(most, _count_spread_elements(function, elements))
    if all(n.op.pointwise or n.op in (*PLAIN_OPS, control_flow_ops.if_) for n in function.body.walk()):
        stored = [element_bytes(n.args[0].type.dtype) for n in function.body.walk() if n.op is tile.store]
        most = min(most, max(1, VECTOR_BYTES // max(stored, default=1)))  # whole sectors are written at once
    columns = _find_column_permutes(function) | _find_exchanged_permutes(function) | _find_folded_views(function)
    combined = any(_combines_neighbours(n) for n in function.body.walk() if n not in columns)
    if get_fact(function, "kernel") != UNIFORM or combined:
        return most
    found = list(_measure_accesses(function, most))
    if all(each.vector >= min(most, VECTOR_BYTES // each.bytes) for each in found):
        return most
    widths = [1 << n for n in reversed(range(most.bit_length()))]
    rows, threads = _find_reduced_rows(function), choose_team_size(function)

    def cost(width: int) -> float:
        shuffles = sum(rounds * _count_shuffles(*each, threads, width) for each, rounds in rows)
        return sum(each.elements * each.cost(width) for each in found) + shuffles

    return min(widths, key=cost)


def _is_sorting_network(function: Function) -> bool:
    """Whether pairs of 64-bit integers are added up again and again, as a sorting network does to exchange them."""
    sums = (n for n in function.body.walk() if n.op is reduce.sum and n.args[0].type.dtype == int64)  # type: ignore[union-attr]
    return sum([static_shape(n.args[0])[a] for a in reduction_axes(n)] == [2] for n in sums) >= NETWORK_STAGES


def _find_reduced_rows(function: Function) -> list[tuple[tuple[int, int], int]]:
    """The rows and columns, as powers of two, of the blocks that are reduced along their last axis, and how often."""
    columns, found = _find_column_reductions(function), []
    for node, rounds in _walk_rounds(function.body, UseDef(function)):
        reduces = node.op in (reduce.sum, reduce.max, reduce.min) and node not in columns
        if reduces and node.args[0].type.rank - 1 in reduction_axes(node):  # type: ignore[union-attr]
            sizes = static_shape(node.args[0])
            found.append(((1 << sum(map(bit_width, sizes[:-1])), 1 << bit_width(sizes[-1])), rounds))
    return found


def _walk_rounds(block: Block, uses: UseDef, rounds: int = 1) -> Iterator[tuple[Node, int]]:
    """The nodes of a block and of its regions, with how often they are executed; loops of unknown length count once."""
    for node in block.nodes:
        yield node, rounds
        times = count_rounds(uses, node) if node.op is control_flow_ops.for_ else 1
        for region in node.regions:
            yield from _walk_rounds(region, uses, rounds * int(times) if times < math.inf else rounds)


def _count_shuffles(rows: int, columns: int, threads: int, width: int) -> float:
    """The shuffles of the warps of a team that reduces rows, if a thread holds `width` neighbours."""
    lanes = min(WARP_THREADS, max(columns // width, 1))
    held = rows if columns > threads * width else max(rows * columns // (threads * width), 1)
    return held * bit_width(lanes) * threads / WARP_THREADS


def _find_column_permutes(function: Function) -> frozenset[Node]:
    """The permutations that move axes for reductions alone: without the reduced axes, the others keep their order."""
    uses = UseDef(function)
    permutes = [n for n in function.body.walk() if n.op is shape_ops.permute and n.results[0].type.rank]  # type: ignore[union-attr]
    loops = [n for n in function.body.walk() if n.op is control_flow_ops.for_]
    carried = {v: out for n in loops for v, out in zip(n.regions[0].results, n.results, strict=True)}
    return frozenset(n for n in permutes if _is_reduced_alone(uses, n, carried))


def _find_folded_views(function: Function) -> frozenset[Node]:
    """The views of large rows that partial sums fold."""
    uses = UseDef(function)
    views = (uses.find(n.args[0], shape_ops.reshape) for n in function.body.walk() if folds_rows(n))
    return frozenset(view for view in views if view is not None)


def _find_exchanged_permutes(function: Function) -> frozenset[Node]:
    """The permutations of a kernel without reductions whose blocks are exchanged where they are stored."""
    moving = (*PLAIN_OPS, control_flow_ops.if_, shape_ops.permute, shape_ops.reshape)
    if not all(n.op.pointwise or n.op in moving for n in function.body.walk()):
        return frozenset()  # reshapes that fold are looked at by themselves
    permutes = [n for n in function.body.walk() if n.op is shape_ops.permute]
    widest = max((element_bytes(n.args[0].type.dtype) for n in function.body.walk() if n.op is tile.store), default=1)
    return frozenset(n for n in permutes if _element_count(n.out) * widest <= MOST_EXCHANGED)


def _is_reduced_alone(uses: UseDef, node: Node, carried: Mapping[Value, Value]) -> bool:
    """Whether reductions alone read a permuted block, or what a loop makes of such blocks one after the other."""
    sizes, order = static_shape(node.out), [a % len(node.attrs["axes"]) for a in node.attrs["axes"]]
    final = find_final_reductions(uses, _follow_carried(uses, node.out, carried))
    kept = [[order[a] for a in range(len(sizes)) if a not in reduction_axes(n) and sizes[a] != 1] for n in final]
    return bool(final) and all(each == sorted(each) for each in kept)


def _follow_carried(uses: UseDef, value: Value, carried: Mapping[Value, Value]) -> Value:
    """What becomes of a block by pointwise ops and in loops that carry it, as long as one node reads it."""
    while True:
        users = uses.users(value)
        if value in carried:
            value = carried[value]
        elif len(users) != 1 or uses.count_uses(value) != 1:
            return value
        elif users[0].op.pointwise:
            value = users[0].out
        elif users[0].op is control_flow_ops.for_ and value in users[0].args[3:]:
            value = users[0].results[users[0].args.index(value) - 3]
        else:
            return value


def _find_column_reductions(function: Function) -> frozenset[Node]:
    """The reductions of loaded blocks along other axes than the contiguous one."""
    producers = {v: n for n in function.body.walk() for v in n.results}
    nodes = [n for n in function.body.walk() if n.op in (reduce.sum, reduce.max, reduce.min)]
    bits = find_reduced_bits(function)
    columns = {v: held for v, held in bits.items() if not reduces_last_axis(static_shape(v), held)}
    return frozenset(n for n in nodes if columns.keys() & trace_to_loads(producers, n.args[0], frozenset()).keys())


def _combines_neighbours(node: Node) -> bool:
    """Whether an op costs less where a thread holds neighbours: a product, a block folded, as scans and sorts do, or
    transposed: each thread then has a square of elements, and neither side is accessed element by element."""
    if node.op is shape_ops.permute and isinstance(node.out.type, TensorType):
        sizes = static_shape(node.args[0])
        moved = [a % len(sizes) for a in node.attrs["axes"] if sizes[a] != 1]
        return moved != sorted(moved)
    if node.op is shape_ops.reshape and isinstance(node.out.type, TensorType):
        before, after = ([n for n in static_shape(v) if n != 1] for v in (node.args[0], node.out))
        return before != after
    return node.op in (contractions.dot, matmul_accumulate)


@dataclass(frozen=True)
class GlobalAccess:
    """An access to global memory: how many elements of how many bytes, of which one instruction moves `vector`."""

    elements: int
    bytes: int
    vector: int
    writes: bool

    def cost(self, width: int) -> float:
        """The cost of an element if a thread holds `width` neighbours: lines that a warp touches, and instructions.

        Parts of a sector that are written apart are written to the cache apart.
        """
        moved = min(width, self.vector)
        lines = max(1.0, WARP_THREADS * width * self.bytes / LINE_BYTES) / (WARP_THREADS * moved)
        sectors = width / moved * self.bytes / SECTOR_BYTES if self.writes else 0
        return lines + 1 / (WARP_THREADS * moved) + sectors / 2


def _measure_accesses(function: Function, most: int) -> Iterator[GlobalAccess]:
    """The accesses of whole blocks to global memory."""
    producers = {v: n for n in function.body.walk() for v in n.results}
    producers |= {n.regions[0].params[0]: n for n in function.body.walk() if n.op is control_flow_ops.for_}
    known = get_fact(function, "alignments")
    aligned = dict(zip(function.params, known or [VECTOR_BYTES] * len(function.params), strict=True))
    for node, rounds in _walk_rounds(function.body, UseDef(function)):
        if node.op not in GLOBAL_ACCESSES or node.args[0] not in aligned:
            continue
        ref, writes = node.args[0], node.op is not tile.load and node.op is not tile.gather
        block = static_shape(node.args[1] if node.op in (tile.store, tile.scatter) else node.out)
        if not block or block[-1] == 1:
            continue
        memory = PtxMemRef(ref.type.dtype, GLOBAL, "", tuple(ref.type.shape), aligned[ref])  # type: ignore[union-attr]
        size = element_bytes(memory.dtype)
        vector = find_access_length(producers, memory, node, block, min(most, VECTOR_BYTES // size))
        yield GlobalAccess(math.prod(block) * rounds, size, vector, writes)


def _element_count(v: Value) -> int:
    return math.prod(static_shape(v)) if isinstance(v.type, TensorType) else 1


# Launch analysis: records how a tile function is launched (grids, aliasing, alignment) as function attributes. The
# first pass of the pipeline: its result is a module of the level `ptx`.


MAX_PROGRAMS = (1 << 31) - 1  # of a launch: the limit of a grid's first axis


def analyse_launches(module: Module, arch: str) -> Module:
    """The module with the facts of each tile function's launches, for an architecture.

    Raises:
        ResourceError: a grid has more programs than a launch may have.
    """
    launches = [n for n in module.main.body.walk() if n.op is host.launch]
    aliased, plan = find_aliased_kernels(module), build_host_plan(module, {})
    functions = [
        _record_launches(f, arch, list_launch_grids(launches, f), f.name not in aliased, plan)
        for f in module.functions[1:]
    ]
    return module.replace(module.main, *functions, level=LEVEL)


def _record_launches(
    function: Function, arch: str, grids: Sequence[tuple[Size, ...]], noalias: bool, plan: Mapping[str, Any]
) -> Function:
    alignments = tuple(_parameter_alignments(plan, function))
    special: dict[str, Any] = {"rounding": True} if has_policies(function) else {}
    if constants := _list_constants(plan, function):
        special["constants"] = constants
    return set_facts(function, arch=arch, grids=tuple(grids), noalias=noalias, alignments=alignments, **special)


def _list_constants(plan: Mapping[str, Any], function: Function) -> tuple[int, ...]:
    """The parameters that are always inputs of a program none of whose kernels writes them.

    The first kernel of a program begins when all is done that was queued before it; so its inputs are in memory when
    any of its kernels begins. Of programs with loops or work of the host none are known.
    """
    if "steps" in plan or "calls" in plan:
        return ()
    changed = {*plan["written"], *(i for pair in plan.get("reused", ()) for i in pair)}
    kept = {i for i, p in enumerate(plan["params"]) if p["role"] == "input"} - changed
    args = [each["args"] for each in plan["launches"] if each["kernel"] == function.name]
    return tuple(
        i for i in range(len(function.params)) if args and all(given[i].get("param") in kept for given in args)
    )


def _parameter_alignments(plan: Mapping[str, Any], function: Function) -> list[int]:
    """For each parameter a number of bytes that divides its address: a vector's, or less where a slice moves it."""
    args = [each["args"] for each in plan["launches"] if each["kernel"] == function.name]
    moves = [[n for given in args for _, n in given[i].get("moves", ())] for i in range(len(function.params))]
    return [math.gcd(VECTOR_BYTES, *(find_size_divisor(parse_size(n), VECTOR_BYTES) for n in c)) for c in moves]


def list_launch_grids(launches: Sequence[Node], function: Function) -> list[tuple[Size, ...]]:
    """The grids that a function is launched over, all of one rank: an axis that one lacks has one program."""
    grids = [_launch_grid(n) for n in launches if n.attrs["kernel"] == function.name]
    rank = max(map(len, grids), default=1)
    return [(*g, *(1,) * (rank - len(g))) for g in grids]


def _launch_grid(node: Node) -> tuple[Size, ...]:
    grid = tuple(node.attrs["grid"])
    if proves_less(MAX_PROGRAMS, math.prod(grid)):
        raise ResourceError(
            f"a grid of {math.prod(grid):,} programs", location=node.loc, expected=f"at most {MAX_PROGRAMS:,} on a GPU",
            received=f"{math.prod(grid):,}", suggestion="fewer programs that do more each, in a loop",
        )  # fmt: skip
    return grid or (1,)

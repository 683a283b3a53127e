"""Schedule to Tile: each kernel becomes a tile function whose programs are its tiles; loop stages order its reductions.

A reduction over a looped dim is complete only after a whole loop. Stage p holds what p complete loops make possible:
first the nodes that do not depend on the looped dim, then one loop that completes the reductions of this stage. A
value that depends on the looped dim is recomputed in each loop that uses it.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from tessera.core.symbolic_dim import Size, ceil_divide
from tessera.core.types import int64, scalar
from tessera.ir.core import Attrs, Block, Function, Module, Node, Value, structural_key
from tessera.ir.rewrite import (
    RewritePatterns,
    Rewriter,
    UseDef,
    eliminate_dead_nodes,
    merge_equal_nodes,
    rewrite_function,
)
from tessera.ir.rules import Rules
from tessera.lower.indexing_maps import TOTAL, BodyIndexing, KernelDims, analyse_body
from tessera.lower.kernel_summary import name_kernel
from tessera.lower.schedule_to_tile import tile_emitter
from tessera.lower.schedule_to_tile.reductions import LoopReduction, emit_whole_reduction, reduction_rules
from tessera.lower.schedule_to_tile.tile_emitter import BlockValue, TileEmitter
from tessera.ops.dialects import control_flow, host, schedule, tile
from tessera.ops.tensor import basic, shape
from tessera.ops.tensor import elementwise as e

# Loop stages: the order in which the nodes of a body run when a loop walks one dim.
#
# A reduction over the looped dim is complete only after a whole loop. Stage p holds what p complete loops make
# possible: first the nodes that do not depend on the looped dim, then one loop that completes the reductions of this
# stage. A value that depends on the looped dim is recomputed in each loop that uses it.


REDUCTION_OPS = (schedule.reduce, schedule.contract)


@dataclass(frozen=True)
class LoopStage:
    """Nodes before a loop, and the nodes of the loop; `ended` are the reductions that it completes."""

    straight: tuple[Node, ...]
    loop: tuple[Node, ...]
    ended: tuple[Node, ...]


def split_into_stages(block: Block, found: BodyIndexing, loop: Sequence[int]) -> list[LoopStage]:
    """The stages of a body whose looped dims are `loop` (at most one)."""
    if not loop:
        return [LoopStage(block.nodes, (), ())]
    (dim,) = loop
    phase = _number_phases(block, dim)
    last = max((phase[n] for n in block.nodes), default=0)
    made = [_make_stage(block, found, dim, phase, p) for p in range(last + 1)]
    return [s for s in made if s.straight or s.loop]


def _reduces_over(node: Node, dim: int) -> bool:
    return node.op in REDUCTION_OPS and node.attrs["dim"] == dim


def _number_phases(block: Block, dim: int) -> dict[Node, int]:
    """The number of loops that precede a node (for a reduction: that precede its own loop)."""
    after: dict[Value, int] = dict.fromkeys(block.params, 0)
    phase: dict[Node, int] = {}
    for node in block.nodes:
        phase[node] = max((after[v] for v in node.args), default=0)
        for value in node.results:
            after[value] = phase[node] + _reduces_over(node, dim)
    return phase


def _make_stage(block: Block, found: BodyIndexing, dim: int, phase: dict[Node, int], p: int) -> LoopStage:
    ended = tuple(n for n in block.nodes if _reduces_over(n, dim) and phase[n] == p)
    inner = [n for n in block.nodes if _is_inner(n, found, dim)]
    wanted = [n for n in inner if not n.results and phase[n] == p]
    needed = _find_needed_nodes([*ended, *wanted], inner)
    straight = tuple(n for n in block.nodes if n not in inner and not _reduces_over(n, dim) and phase[n] == p)
    return LoopStage(straight, tuple(n for n in inner if n in needed), ended)


def _is_inner(node: Node, found: BodyIndexing, dim: int) -> bool:
    """Whether a node runs inside the loops."""
    if node.results:
        return dim in found.depends[node.out]
    return any(dim in found.depends[v] for v in node.args)


def _find_needed_nodes(ends: Sequence[Node], inner: Sequence[Node]) -> set[Node]:
    """The inner nodes that some nodes depend on, and those of these nodes that are inner."""
    uses = UseDef(Block((), tuple(inner), ()))
    return {n for n in ends if n in inner}.union(uses.backward_slice([v for n in ends for v in n.args]))


GRID_AXES = 3
# rule(emitter, node, uses) emits one node of a body.
tile_rules = Rules("tile")


@dataclass(frozen=True)
class GridTiling:
    """The launch grid: for each axis the dims that it spans, with their numbers of tiles."""

    axes: tuple[tuple[tuple[int, Size], ...], ...]

    @property
    def shape(self) -> tuple[Size, ...]:
        """The grid of the launch."""
        return tuple(math.prod(n for _, n in dims) for dims in self.axes) or (1,)

    @staticmethod
    def of(dims: KernelDims, tiles: Sequence[int], loop: Sequence[int]) -> GridTiling:
        """The grid of a kernel; where there are more dims than axes, the leading ones share the first axis."""
        walked = [d for d, (_, _, kind) in enumerate(dims) if kind == "parallel" and d not in loop]
        counts = [(d, ceil_divide(dims[d][1], tiles[d])) for d in walked]
        many = [(d, n) for d, n in counts if n != 1]
        split = max(len(many) - GRID_AXES + 1, 1)
        return GridTiling((tuple(many[:split]), *((m,) for m in many[split:]))) if many else GridTiling(())


def to_tile(module: Module) -> Module:
    """Lower a Schedule module to a Tile module: each kernel becomes a launch of a tile function."""
    kernels: dict[Hashable, Function] = {}
    patterns = RewritePatterns("kernel to launch")

    @patterns(schedule.kernel)
    def _(rewriter: Rewriter, node: Node, args: list[Value]) -> tuple[()]:
        function, grid = lower_kernel(node, len(kernels))
        # Kernels that are equal, and of the same lines, are one function.
        function = kernels.setdefault(structural_key(replace(function, name="")), function)
        rewriter.builder.add(host.launch, args, {"kernel": function.name, "grid": grid})
        return ()

    main = rewrite_function(module.main, patterns)
    return module.replace(main, *kernels.values(), *module.functions[1:], level="tile")


def lower_kernel(node: Node, number: int) -> tuple[Function, tuple[Size, ...]]:
    """The tile function of a schedule.kernel, and its grid."""
    (block,), dims = node.regions, node.attrs["dims"]
    tiles, loop = node.attrs["schedule"]["tile"], node.attrs["schedule"]["loop"]
    params = tuple(Value(p.type, p.hint) for p in block.params)
    found = analyse_body(block, dims)
    emit = TileEmitter(found, tiles, dict(zip(block.params, params, strict=True)))
    uses = UseDef(block)
    grid = GridTiling.of(dims, tiles, loop)
    with emit.builder.at(node.loc):
        _emit_tile_starts(emit, grid)
        for stage in split_into_stages(block, found, loop):
            _emit_stage(emit, stage, loop, uses, bool(node.attrs["schedule"].get("peel")))
    body = eliminate_dead_nodes(merge_equal_nodes(emit.builder.block(params, ())))
    return Function(f"k{number}_{name_kernel(block)}", body, Attrs({"group": 1}), node.loc), grid.shape


def _emit_tile_starts(emit: TileEmitter, grid: GridTiling) -> None:
    """Emit the first index of the program's tile along each dim of more than one tile."""
    for axis, dims in enumerate(grid.axes):
        place = emit.add(tile.program_id, [], axis=axis)
        for position, (dim, count) in enumerate(reversed(dims)):
            inner = position < len(dims) - 1
            own = emit.add(e.remainder, [place, emit.make_constant(count)]) if inner else place
            size = emit.tile[dim]
            emit.starts[dim] = own if size == 1 else emit.add(e.mul, [own, emit.make_constant(size)])
            if inner:
                place = emit.add(e.floor_divide, [place, emit.make_constant(count)])


def _emit_stage(emit: TileEmitter, stage: LoopStage, loop: Sequence[int], uses: UseDef, peel: bool) -> None:
    _emit_nodes(emit, stage.straight, uses)
    if stage.loop or stage.ended:
        extent = emit.forms.dims[loop[0]][1]
        _emit_loop(emit, stage, loop[0], uses, peel and isinstance(extent, int) and emit.is_ragged(loop[0]))


def _emit_nodes(emit: TileEmitter, nodes: Sequence[Node], uses: UseDef) -> None:
    for node in nodes:
        with emit.builder.at(node.loc):
            out = tile_rules.of(node.op)(emit, node, uses)
        if node.results:
            emit.env[node.out] = out


def _emit_loop(emit: TileEmitter, stage: LoopStage, dim: int, uses: UseDef, peel: bool) -> None:
    """Emit a loop over the tiles of a dim, which carries the reductions that it completes.

    Loop peeling: the last partial tile follows the loop, at its own size, so that neither has a mask.
    """
    carried = [reduction_rules.of(n.op)(emit, n, uses) for n in stage.ended]
    starts = [s.initialise(emit) for s in carried]
    extent, step = emit.forms.dims[dim][1], emit.tile[dim]
    stop = extent // step * step if peel else extent
    bounds = [emit.make_constant(n) for n in (0, stop, step)]
    params = [[Value(v.type) for v in values] for values in starts]
    place = Value(scalar(int64), emit.forms.dims[dim][0])
    with emit.open_region() as nodes, emit.resize(dim, step, peel):
        results = _emit_iteration(emit, stage, uses, dim, place, carried, params)
    flat = [v for values in starts for v in values]
    region = Block((place, *(v for values in params for v in values)), tuple(nodes), tuple(results))
    types = tuple(v.type for v in flat)
    # The types of the results are those that the region yields.
    made = list(emit.builder.add(control_flow.for_, [*bounds, *flat], {}, types=types, regions=(region,)).results)
    if peel:
        last = [[made.pop(0) for _ in values] for values in starts]
        with emit.open_scope(), emit.resize(dim, int(extent - stop), peel):
            made = _emit_iteration(emit, stage, uses, dim, emit.make_constant(stop), carried, last)
    for node, each, values in zip(stage.ended, carried, starts, strict=True):
        with emit.builder.at(node.loc):
            emit.env[node.out] = each.finish(emit, [made.pop(0) for _ in values])


def _emit_iteration(
    emit: TileEmitter,
    stage: LoopStage,
    uses: UseDef,
    dim: int,
    place: Value,
    carried: Sequence[LoopReduction],
    values: Sequence[Sequence[Value]],
) -> list[Value]:
    """Emit the nodes of a loop for the tile at `place`; the carried values after it."""
    emit.starts[dim] = place
    _emit_nodes(emit, stage.loop, uses)
    results = []
    for node, each, before in zip(stage.ended, carried, values, strict=True):
        with emit.builder.at(node.loc):
            results += each.combine(emit, before)
    return results


@tile_rules(*TOTAL)
def _(emit, node, uses):
    return emit.add_pointwise(node.op, [emit.env[v] for v in node.args], node)


@tile_rules(shape.check_index)
def _(emit, node, uses):
    index = emit.env[node.args[0]]
    source = uses.get(node.args[0])
    while source is not None and source.op is basic.cast:
        source = uses.get(source.args[0])
    ragged = [d for d in index.axes if emit.is_ragged(d) and not tile_emitter.reads_zero_padding(emit, source, d)]
    inside = emit.make_range_mask(ragged)
    if inside is not None:
        zero = BlockValue(emit.full((), 0, index.value.type.dtype))
        index = emit.add_pointwise(e.where, [inside, index, zero])
    return emit.add_pointwise(node.op, [index], node)


@tile_rules(basic.full)
def _(emit, node, uses):
    return BlockValue(emit.full((), node.attrs["value"], node.attrs["dtype"]))


@tile_rules(basic.dim_value)
def _(emit, node, uses):
    return BlockValue(emit.make_constant(node.attrs["size"]))


@tile_rules(schedule.index)
def _(emit, node, uses):
    return emit.emit_indices(node.attrs["dim"])


@tile_rules(schedule.load)
def _(emit, node, uses):
    return tile_emitter.emit_load(emit, node)


@tile_rules(schedule.store)
def _(emit, node, uses):
    return tile_emitter.emit_store(emit, node)


@tile_rules(schedule.reduce, schedule.contract)
def _(emit, node, uses):
    return emit_whole_reduction(emit, node, uses)

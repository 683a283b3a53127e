"""Schedule to Tile: each kernel becomes a tile function whose programs are its tiles; loop stages order its reductions.

A reduction over a looped dim is complete only after a whole loop. Stage p holds what p complete loops make possible:
first the nodes that do not depend on the looped dim, then one loop that completes the reductions of this stage. A
value that depends on the looped dim is recomputed in each loop that uses it.

Kernels are named after their ops. Tile legalisation gives those that a target refuses the next smaller tiles.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from tessera.core.symbolic_dim import Size, ceil_divide
from tessera.core.types import int64, scalar
from tessera.ir.core import MAX_SCOPES, Attrs, Block, Function, Module, Node, Value, merge_scopes, structural_key
from tessera.ir.rewrite import (
    RewritePatterns,
    Rewriter,
    UseDef,
    eliminate_dead_nodes,
    merge_equal_nodes,
    rewrite_function,
)
from tessera.ir.rules import Rules
from tessera.lower.graph_to_schedule.tile_sizes import TileSizeSearch
from tessera.lower.indexing_maps import TOTAL, BodyIndexing, KernelDims, analyse_body
from tessera.lower.lowering_plan import LoweringPlan
from tessera.lower.schedule_to_tile import tile_emitter
from tessera.lower.schedule_to_tile.tile_emitter import (
    BlockValue,
    LoopReduction,
    TileEmitter,
    emit_whole_reduction,
    reduction_rules,
)
from tessera.ops.dialects import control_flow, host, schedule, tile
from tessera.ops.tensor import basic, shape
from tessera.ops.tensor import elementwise as e

# Names of kernels, by the ops that they compute.


# The first rows whose ops all occur give the name; each op counts for one row.
KERNEL_PATTERNS: tuple[tuple[frozenset[str], str], ...] = tuple(
    (frozenset(ops.split()), name)
    for ops, name in (
        ("contract", "matmul"),
        ("max exp sum", "softmax"),
        ("sum rsqrt", "normalize"),
        ("argmax", "argmax"),
        ("argmin", "argmin"),
        ("sum", "sum"),
        ("max", "max"),
        ("min", "min"),
        ("erf", "gelu"),
        ("tanh", "tanh"),
        ("exp", "exp"),
        ("log", "log"),
        ("add", "add"),
        ("sub", "sub"),
        ("mul", "mul"),
        ("div", "div"),
        ("where", "where"),
    )
)
# Arithmetic is not named after another op.
_ARITHMETIC = frozenset(("add", "sub", "mul", "div", "where"))


def list_ops(block: Block) -> list[str]:
    """The ops of a body in order, without index arithmetic and constants."""
    names = []
    for node in block.nodes:
        if node.op in (schedule.index, schedule.load, schedule.store) or _is_index_arithmetic(node):
            continue
        names.append(node.attrs["kind"] if node.op is schedule.reduce else node.op.__name__)
    return names


def _is_index_arithmetic(node: Node) -> bool:
    return all(v.type.dtype.name in ("int64", "bool") for v in (*node.args, *node.results)) or not node.args


def name_kernel(block: Block) -> str:
    """A short name for a body."""
    return "_".join(_join_op_names(frozenset(list_ops(block)))) or "copy"


def _join_op_names(ops: Collection[str]) -> list[str]:
    found: list[str] = []
    left = set(ops)
    for pattern, name in KERNEL_PATTERNS:
        if pattern <= left and not (found and pattern <= _ARITHMETIC):
            found.append(name)
            left -= pattern
    return found or sorted(left)[:1]


KernelRow = tuple[str, tuple[str, ...], tuple[str, ...]]
_summary_rules = Rules("summary")


def summarise_kernels(module: Module) -> list[KernelRow]:
    """Name, dims and ops of each kernel of a Schedule module; a launch of a tile function has no ops."""
    nodes = [n for n in module.main.body.walk() if n.op in _summary_rules]
    return [_summary_rules.of(n.op)(number, n) for number, n in enumerate(nodes)]


@_summary_rules(schedule.kernel)
def _(number, node):
    tile, loop = node.attrs["schedule"]["tile"], node.attrs["schedule"]["loop"]
    every = enumerate(zip(node.attrs["dims"], tile, strict=True))
    dims = tuple(f"{name}={n}/{t}{' loop' if d in loop else ''}" for d, ((name, n, _), t) in every)
    (block,) = node.regions
    return f"k{number}_{name_kernel(block)}", dims, tuple(list_ops(block))


@_summary_rules(host.launch)
def _(number, node):
    return node.attrs["kernel"], tuple(f"grid={n}" for n in node.attrs["grid"]), ()


def format_summary(module: Module) -> str:
    """The summary as text."""
    return "\n".join(f"{name:28} {' '.join(dims):44} {' '.join(ops)}" for name, dims, ops in summarise_kernels(module))


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


@dataclass
class _LoweredKernels:
    """The tile functions of a module. Kernels that are equal, and of the same lines, are one function."""

    functions: dict[Hashable, Function] = field(default_factory=dict)
    # By the kernel before its lowering: the launch, and the scopes that each of its nodes has had.
    known: dict[Hashable, tuple[Attrs, list[set[str]]]] = field(default_factory=dict)

    def find_launch(self, node: Node) -> Attrs:
        """The launch of a kernel, as the layers of a model have it many times: it is lowered where that may differ."""
        key = structural_key(Function("", node.regions[0], node.attrs, node.loc))
        scopes = [node.loc.scope, *(n.loc.scope for n in node.regions[0].walk())]
        launch, seen = self.known.get(key, (None, [set[str]() for _ in scopes]))
        # A scope that is known, or one too many to be named, changes no location of the function.
        if launch is None or any(
            s not in held and len(held) <= MAX_SCOPES for s, held in zip(scopes, seen, strict=True)
        ):
            launch = self._lower(node)
            for scope, held in zip(scopes, seen, strict=True):
                held.add(scope)
            self.known[key] = launch, seen
        return launch

    def _lower(self, node: Node) -> Attrs:
        function, grid = lower_kernel(node, len(self.functions))
        key = structural_key(replace(function, name=""))
        function = self.functions[key] = merge_scopes(self.functions.get(key, function), function)
        return Attrs({"kernel": function.name, "grid": grid})


def to_tile(module: Module) -> Module:
    """Lower a Schedule module to a Tile module: each kernel becomes a launch of a tile function."""
    kernels = _LoweredKernels()
    patterns = RewritePatterns("kernel to launch")

    @patterns(schedule.kernel)
    def _(rewriter: Rewriter, node: Node, args: list[Value]) -> tuple[()]:
        rewriter.builder.add(host.launch, args, kernels.find_launch(node))
        return ()

    main = rewrite_function(module.main, patterns)
    return module.replace(main, *kernels.functions.values(), *module.functions[1:], level="tile")


def lower_kernel(node: Node, number: int) -> tuple[Function, tuple[Size, ...]]:
    """The tile function of a schedule.kernel, and its grid."""
    (block,), dims = node.regions, node.attrs["dims"]
    tiles, loop = node.attrs["schedule"]["tile"], node.attrs["schedule"]["loop"]
    params = tuple(Value(p.type, p.hint) for p in block.params)
    found = analyse_body(block, dims)
    emit = TileEmitter(found, tiles, dict(zip(block.params, params, strict=True)))
    uses = UseDef(block)
    grid, peel = GridTiling.of(dims, tiles, loop), bool(node.attrs["schedule"].get("peel"))
    with emit.builder.at(node.loc):
        _emit_tile_starts(emit, grid)
        for stage in split_into_stages(block, found, loop):
            _emit_stage(emit, stage, loop, uses, peel)
    body = eliminate_dead_nodes(merge_equal_nodes(emit.builder.block(params, ())))
    attrs = {"group": 1, "peel": True} if peel else {"group": 1}  # which tile has an element makes no difference
    return Function(f"k{number}_{name_kernel(block)}", body, Attrs(attrs), node.loc), grid.shape


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


# Tile legalisation: kernels that a target's resource model refuses get the next smaller tiles, before any emission.
# Tile sizes are chosen for speed (`choose_tile_sizes`). The resource model of the target (`LoweringPlan.find_refused`)
# then says which kernels exceed its shared memory or registers. Their candidates are tried from the largest tile to the
# smallest: each halves the longest side, which costs the least arithmetic intensity.


def to_legal_tile(module: Module, plan: LoweringPlan) -> Module:
    """The Tile module of a Schedule module, with tiles that the target's resource model accepts.

    A kernel that it refuses even with the smallest tiles stays as it is: the generator then names what is missing.
    """
    tile = to_tile(module)
    if plan.find_refused is None:
        return tile
    while refused := plan.find_refused(tile):
        smaller = _cut_refused(module, tile, refused, plan)
        if smaller is None:
            break
        module, tile = smaller, to_tile(smaller)
    return tile


def _cut_refused(module: Module, tile: Module, refused: Collection[str], plan: LoweringPlan) -> Module | None:
    """The Schedule module with smaller tiles for the refused kernels; None if none of them has smaller ones."""
    kinds = (schedule.kernel, host.launch)
    kernels = [n for n in _walk_host(module.main.body) if n.op in kinds]
    launches = [n for n in _walk_host(tile.main.body) if n.op is host.launch]
    found = {
        k: cut
        for k, launch in zip(kernels, launches, strict=True)
        if k.op is schedule.kernel and launch.attrs["kernel"] in refused and (cut := cut_tiles(k, plan)) is not None
    }
    patterns = RewritePatterns("tile legalisation")

    @patterns(schedule.kernel)
    def _(rewriter: Rewriter, node: Node, args: list[Value]) -> tuple[()] | None:
        if node not in found:
            return None
        attrs = Attrs({**node.attrs, "schedule": found[node]})
        rewriter.builder.add(schedule.kernel, args, attrs, types=(), regions=node.regions)
        return ()

    return module.replace(rewrite_function(module.main, patterns), *module.functions[1:]) if found else None


def _walk_host(block: Block) -> Iterator[Node]:
    """The nodes that the host runs, those of loops and branches included, without the bodies of kernels."""
    for node in block.nodes:
        yield node
        if node.op is not schedule.kernel:
            for region in node.regions:
                yield from _walk_host(region)


def cut_tiles(kernel: Node, plan: LoweringPlan) -> Attrs | None:
    """The schedule of a kernel with half of its longest tile side; None if every side is one element.

    A side along which the kernel reduces is cut last, and then walked by a loop.
    """
    (block,), dims = kernel.regions, kernel.attrs["dims"]
    chosen = kernel.attrs["schedule"]
    search = TileSizeSearch(block, analyse_body(block, dims), plan)
    search.tile, search.loop = list(chosen["tile"]), list(chosen["loop"])
    reduced = {n.attrs["dim"] for n in block.nodes if n.op in REDUCTION_OPS}
    free = [d for d in range(len(dims)) if d not in reduced and dims[d][2] == "parallel"]
    walked = [d for d in reduced if search.loop in ([], [d])]
    for sides in (free, walked):
        longest = max((d for d in sides if search.tile[d] > 1), key=search.tile.__getitem__, default=None)
        if longest is not None:
            search.tile[longest] = search.cut(longest, -(-search.tile[longest] // 2))
            search.loop = [longest] if longest in reduced else search.loop
            return Attrs({**chosen, "tile": tuple(search.tile), "loop": tuple(search.loop)})
    return None

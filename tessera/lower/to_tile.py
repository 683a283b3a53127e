"""Schedule to Tile: each kernel becomes a tile function, its tiles the programs of a grid."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tessera.evaluate import Meaning, copier, rebuild
from tessera.ir.builder import Builder
from tessera.ir.core import Attrs, Block, Function, Module, Node, Value, key
from tessera.lower import accesses
from tessera.lower.emitter import Emitter, Tile
from tessera.lower.forms import Dims, forms
from tessera.lower.naming import label
from tessera.lower.points import POINTWISE
from tessera.lower.stages import Stage, stages
from tessera.lower.sums import Makers, sums, whole
from tessera.op import Rules
from tessera.ops import basic, control, host, schedule, tile
from tessera.ops import elementwise as e
from tessera.passes.common import shared
from tessera.passes.dead_code import swept
from tessera.types import int64, scalar

GRID_AXES = 3
# rule(emitter, node, makers) emits one node of a body.
rules = Rules("tile")


@dataclass(frozen=True)
class Grid:
    """How programs are numbered: for each axis of the grid the dims it walks, with their counts of tiles."""

    axes: tuple[tuple[tuple[int, int], ...], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The grid of the launch."""
        return tuple(math.prod(n for _, n in dims) for dims in self.axes) or (1,)

    @staticmethod
    def of(dims: Dims, tiles: Sequence[int], loop: Sequence[int]) -> Grid:
        """The grid of a kernel; leading dims share the first axis where there are more than axes."""
        walked = [d for d, (_, _, kind) in enumerate(dims) if kind == "parallel" and d not in loop]
        counts = [(d, -(-dims[d][1] // tiles[d])) for d in walked]
        many = [(d, n) for d, n in counts if n > 1]
        split = max(len(many) - GRID_AXES + 1, 1)
        return Grid((tuple(many[:split]), *((m,) for m in many[split:]))) if many else Grid(())


def to_tile(module: Module) -> Module:
    """The Tile module of a Schedule module."""
    made: dict[Hashable, Function] = {}
    main = rebuild(module.main, lambda builder: _launcher(builder, made))
    return module.replace(main, *made.values(), *module.functions[1:], level="tile")


def _launcher(builder: Builder, made: dict[Hashable, Function]) -> Meaning:
    copy = copier(builder)

    def meaning(node: Node, args: list[Value], walk: Any) -> Sequence[Value]:
        if node.op is not schedule.kernel:
            return copy(node, args, walk)
        function, grid = kernel(node, len(made))
        # Kernels that are the same, from the same lines, are one.
        function = made.setdefault(key(replace(function, name="")), function)
        builder.add(host.launch, args, {"kernel": function.name, "grid": grid}, loc=node.loc)
        return ()

    return meaning


def kernel(node: Node, number: int) -> tuple[Function, tuple[int, ...]]:
    """The tile function of a schedule.kernel, and its grid."""
    (block,), dims = node.regions, node.attrs["dims"]
    tiles, loop = node.attrs["schedule"]["tile"], node.attrs["schedule"]["loop"]
    params = tuple(Value(p.type, p.hint) for p in block.params)
    found = forms(block, dims)
    emit = Emitter(found, tiles, dict(zip(block.params, params, strict=True)))
    makers = {v: n for n in block.nodes for v in n.results}
    grid = Grid.of(dims, tiles, loop)
    with emit.builder.at(node.loc):
        _begin(emit, grid)
        for stage in stages(block, found, loop):
            _stage(emit, stage, loop, makers)
    body = swept(shared(emit.builder.block(params, ())))
    return Function(f"k{number}_{label(block)}", body, Attrs({"group": 1}), node.loc), grid.shape


def _begin(emit: Emitter, grid: Grid) -> None:
    """Where the program's tile begins along each dim of more than one tile."""
    for axis, dims in enumerate(grid.axes):
        place = emit.add(tile.program_id, [], axis=axis)
        for position, (dim, count) in enumerate(reversed(dims)):
            inner = position < len(dims) - 1
            own = emit.add(e.remainder, [place, emit.number(count)]) if inner else place
            size = emit.tile[dim]
            emit.starts[dim] = own if size == 1 else emit.add(e.mul, [own, emit.number(size)])
            if inner:
                place = emit.add(e.floor_divide, [place, emit.number(count)])


def _stage(emit: Emitter, stage: Stage, loop: Sequence[int], makers: Makers) -> None:
    _nodes(emit, stage.straight, makers)
    if stage.loop or stage.ended:
        _loop(emit, stage, loop[0], makers)


def _nodes(emit: Emitter, nodes: Sequence[Node], makers: Makers) -> None:
    for node in nodes:
        with emit.builder.at(node.loc):
            out = rules.of(node.op)(emit, node, makers)
        if node.results:
            emit.env[node.out] = out


def _loop(emit: Emitter, stage: Stage, dim: int, makers: Makers) -> None:
    """One loop over the tiles of a dim, which carries the reductions that end with it."""
    carried = [sums.of(n.op)(emit, n, makers) for n in stage.ended]
    starts = [s.start(emit) for s in carried]
    bounds = [emit.number(n) for n in (0, emit.forms.dims[dim][1], emit.tile[dim])]
    params = [[Value(v.type) for v in values] for values in starts]
    place = Value(scalar(int64), emit.forms.dims[dim][0])
    with emit.inner() as nodes:
        emit.starts[dim] = place
        _nodes(emit, stage.loop, makers)
        results = []
        for node, each, values in zip(stage.ended, carried, params, strict=True):
            with emit.builder.at(node.loc):
                results += each.more(emit, values)
    flat = [v for values in starts for v in values]
    region = Block((place, *(v for values in params for v in values)), tuple(nodes), tuple(results))
    types = tuple(v.type for v in flat)
    # The results are what the region yields, so the types of both must agree.
    made = list(emit.builder.add(control.for_, [*bounds, *flat], {}, types=types, regions=(region,)).results)
    for node, each, values in zip(stage.ended, carried, starts, strict=True):
        with emit.builder.at(node.loc):
            emit.env[node.out] = each.end(emit, [made.pop(0) for _ in values])


@rules(*POINTWISE)
def _(emit, node, makers):
    return emit.pointwise(node.op, [emit.env[v] for v in node.args], node)


@rules(basic.full)
def _(emit, node, makers):
    return Tile(emit.full((), node.attrs["value"], node.attrs["dtype"]))


@rules(schedule.index)
def _(emit, node, makers):
    return emit.index(node.attrs["dim"])


@rules(schedule.load)
def _(emit, node, makers):
    return accesses.load(emit, node)


@rules(schedule.store)
def _(emit, node, makers):
    return accesses.store(emit, node)


@rules(schedule.reduce, schedule.contract)
def _(emit, node, makers):
    return whole(emit, node, makers)

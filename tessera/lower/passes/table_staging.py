"""Table staging: a vector from which programs gather again and again is copied to memory of their own.

Each step of a search reads a place of a sorted row. A cache serves a few lines at once, however few lanes want each;
the memory of a multiprocessor serves as many lanes as it has banks. One copy serves many tiles: there are as many
programs as the target runs at once, and each computes one tile after the other (persistent threads: Gupta, Stuart and
Owens 2012).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from tessera.core.types import SHARED, RefType, int64, scalar
from tessera.ir.builder import Builder, Evaluation, evaluate_block, make_copier, override_numerics
from tessera.ir.core import Attrs, Block, Function, Module, Node, Value
from tessera.lower.indexing_maps import get_shape
from tessera.lower.lowering_plan import LoweringPlan
from tessera.ops.dialects import control_flow, host, tile
from tessera.ops.tensor import basic, shape

LEAST_GATHERS = 4  # of a tile from one vector: fewer are as fast from a cache
LEAST_REUSE = 8  # elements that are gathered for each that is copied
LEAST_BYTES = 2048  # of a table: a smaller one lies in few lines of a cache
MOST_RESIDENT = 8  # programs of a processor
ALIGNMENT = 16  # bytes
PLAIN_OPS = (
    basic.full, basic.cast, basic.broadcast_to, shape.iota, shape.reshape, shape.permute, tile.program_id, tile.load,
    tile.gather, tile.store,
)  # fmt: skip


def stage_tables(module: Module, plan: LoweringPlan) -> Module:
    """The module with tables in memory of the programs that gather from them, where the target has room for them."""
    launches = [n for n in module.main.body.nodes if n.op is host.launch]
    times = Counter(n.attrs["kernel"] for n in launches)
    made: dict[Node, tuple[Function, int]] = {}
    for launch in launches:
        function, grid = module.function(launch.attrs["kernel"]), launch.attrs["grid"]
        table = find_table(function) if times[function.name] == 1 and len(grid) == 1 else None
        programs = _count_programs(function, table, grid[0], plan) if table is not None else 0
        if table is not None and programs:
            made[launch] = _stage_table(function, table, grid[0], programs), programs
    if not made:
        return module
    functions = {f.name: f for f, _ in made.values()}
    nodes = tuple(_shrink_grid(n, made[n][1]) if n in made else n for n in module.main.body.nodes)
    body = Block(module.main.body.params, nodes, module.main.body.results)
    main = Function(module.main.name, body, module.main.attrs, module.main.loc)
    return module.replace(main, *(functions.get(f.name, f) for f in module.functions[1:]))


def find_table(function: Function) -> Value | None:
    """The vector from which a function gathers most often, which it does not write."""
    nodes, written = function.body.nodes, tile.find_written_refs(function.body)
    uses = Counter(n.args[0] for n in nodes if n.op is tile.gather)
    table, times = uses.most_common(1)[0] if uses else (None, 0)
    type = table.type if table is not None else None
    plain = isinstance(type, RefType) and type.rank == 1 and type.policy is None and type.dtype.bits >= 8
    if not plain or times < LEAST_GATHERS or table in written or not isinstance(type.shape[0], int):  # type: ignore[union-attr]
        return None
    along_first = all(n.attrs["axis"] == 0 for n in nodes if n.op is tile.program_id)
    return table if along_first and all(n.op.pointwise or n.op in PLAIN_OPS for n in nodes) else None


def _count_programs(function: Function, table: Value, grid: Any, plan: LoweringPlan) -> int:
    """The programs that share a processor with copies of a table; 0 where copies do not pay."""
    size, bits = table.type.shape[0], table.type.dtype.bits  # type: ignore[union-attr]
    resident = min(plan.table_bytes * 8 // max(size * bits, 1), MOST_RESIDENT)
    programs = resident * (plan.processors or 1)
    times = sum(n.op is tile.gather and n.args[0] is table for n in function.body.nodes)
    gathered = times * _count_elements(function) * grid if isinstance(grid, int) else 0
    often = gathered >= LEAST_REUSE * size * programs and grid >= 2 * programs
    return programs if often and resident > 1 and size * bits >= LEAST_BYTES * 8 else 0


def _count_elements(function: Function) -> int:
    """The elements of a tile that are gathered together."""
    return max(math.prod(map(int, get_shape(n.out))) for n in function.body.nodes if n.op is tile.gather)  # type: ignore[arg-type]


def _shrink_grid(launch: Node, programs: int) -> Node:
    attrs = Attrs({**launch.attrs.plain(), "grid": (programs,)})
    return Node(launch.op, launch.args, attrs, launch.results, launch.regions, launch.loc)


def _stage_table(function: Function, table: Value, grid: int, programs: int) -> Function:
    """The function with a copy of a table, and a loop over the tiles of its program."""
    builder, body = Builder(), function.body
    copy = make_copier(builder)
    with builder.at(function.loc), override_numerics(None):
        memory = _copy_table(builder, table, _count_elements(function))
        first, place = builder.add(tile.program_id, [], {"axis": 0}).out, Value(scalar(int64), "tile")

        def run(node: Node, args: list[Value], walk: Evaluation) -> Sequence[Value]:
            if node.op is tile.program_id:
                return (place,)
            if node.op is tile.gather and node.args[0] is table:
                args = [memory, *args[1:]]
            return copy(node, args, walk)

        with builder.region() as nodes:
            evaluate_block(body, body.params, run)
        bounds = [first, _make_constant(builder, grid), _make_constant(builder, programs)]
        builder.add(control_flow.for_, bounds, {}, types=(), regions=(Block((place,), tuple(nodes), ()),))
    return Function(function.name, builder.block(body.params, ()), function.attrs, function.loc)


def _copy_table(builder: Builder, table: Value, step: int) -> Value:
    """Memory with the elements of a table, which are copied so many at a time."""
    (size,), dtype = table.type.shape, table.type.dtype  # type: ignore[union-attr]
    described = {"shape": (size,), "dtype": dtype, "space": SHARED, "alignment": ALIGNMENT}
    memory, place = builder.add(tile.alloc, [], described).out, Value(scalar(int64), "first")
    with builder.region() as nodes:
        part = builder.add(tile.load, [table, place], {"shape": (step,), "edge": "clip"}).out
        builder.add(tile.store, [memory, part, place], {"edge": "clip"})
    bounds = [_make_constant(builder, int(n)) for n in (0, size, step)]
    builder.add(control_flow.for_, bounds, {}, types=(), regions=(Block((place,), tuple(nodes), ()),))
    builder.add(tile.barrier, [])
    return memory


def _make_constant(builder: Builder, n: int) -> Value:
    return builder.add(basic.full, [], {"shape": (), "value": n, "dtype": int64}).out

"""Boundary peeling: programs whose blocks lie within memory run code without bounds checks (XLA's and TVM's loop
partitioning).

A kernel of elementwise ops whose last programs reach past the end of an array checks every element in every program.
Here a program tests once whether it reaches past an end, and only then checks its elements.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

from tessera.codegen.ptx.ops import LaunchFacts, index_constant
from tessera.core.types import TensorType
from tessera.ir.analysis import IntervalAnalysis
from tessera.ir.builder import Builder
from tessera.ir.core import Attrs, Block, Function, Node, Value
from tessera.ir.rewrite import UseDef
from tessera.ops.dialects import control_flow, tile
from tessera.ops.tensor import basic, elementwise, shape

CLIP, UNCHECKED = "clip", "error"  # edges of accesses
ACCESSES = (tile.load, tile.store)
PLAIN_OPS = (*ACCESSES, tile.program_id, tile.grid_size, basic.full, basic.broadcast_to, shape.iota, shape.reshape)
LEAST_PROGRAMS = 16  # fewer gain nothing
MOST_NODES = 200  # of a kernel, which becomes twice as long

# A start, the elements of a block, those of the axis, and whether the start may be below 0.
Bound = tuple[Value, int, int, bool]


def peel_boundary(function: Function) -> Function:
    """The function with a branch for programs that reach past no end, where it has elementwise ops alone."""
    bounds = _find_bounds(function) if _is_plain(function) else []
    scalars, rest = _divide(function.body.nodes)
    if not bounds or not {start for start, *_ in bounds} <= {v for n in scalars for v in n.results}:
        return function
    builder = Builder()
    for node in scalars:
        builder.append(node)
    with builder.at(rest[-1].loc):
        inside = functools.reduce(
            lambda x, y: builder.add(elementwise.bitwise_and, [x, y]).out,
            [check for bound in bounds for check in _check(builder, bound)],
        )
        regions = (Block((), _copy_unchecked(rest), ()), Block((), tuple(rest), ()))
        builder.add(control_flow.if_, [inside], {}, types=(), regions=regions)
    body = Block(function.body.params, builder.block((), ()).nodes, ())
    return Function(function.name, body, function.attrs, function.loc)


def _is_plain(function: Function) -> bool:
    """Whether a function has elementwise ops alone, and one grid of known size with many programs."""
    grids, nodes = set(LaunchFacts.of(function).grids), function.body.nodes
    if len(grids) != 1 or not all(isinstance(n, int) for n in next(iter(grids))) or len(nodes) > MOST_NODES:
        return False
    alone = int(function.attrs.get("group", 1)) == 1 and math.prod(next(iter(grids))) >= LEAST_PROGRAMS
    return alone and all(not n.regions and (n.op.pointwise or n.op in PLAIN_OPS) for n in nodes)


def _find_bounds(function: Function) -> list[Bound]:
    """The bounds of clipped blocks that are not proven, each once."""
    ranges = IntervalAnalysis(UseDef(function), LaunchFacts.of(function).grid)
    found: dict[Bound, None] = {}
    for node in function.body.nodes:
        if node.op not in ACCESSES or node.attrs["edge"] != CLIP:
            continue
        sizes, block, starts = _read_access(node)
        if not all(isinstance(n, int) for n in sizes):
            return []
        for axis in ranges.find_unproven_axes(starts, block, sizes):
            found[starts[axis], block[axis], int(sizes[axis]), ranges.of(starts[axis])[0] < 0] = None
    return list(found)


def _read_access(node: Node) -> tuple[Sequence[int], Sequence[int], Sequence[Value]]:
    """The sizes of an access's memory, those of its block, and where that begins."""
    memory, first = node.args[0].type, 1 if node.op is tile.load else 2
    block = node.attrs["shape"] if node.op is tile.load else node.args[1].type.shape  # type: ignore[union-attr]
    return memory.shape, tuple(map(int, block)), node.args[first : first + memory.rank]  # type: ignore[union-attr, return-value]


def _divide(nodes: Sequence[Node]) -> tuple[list[Node], list[Node]]:
    """The arithmetic on scalars that blocks do not enter, and all other nodes."""
    known, scalars, rest = set[Value](), list[Node](), list[Node]()
    for node in nodes:
        alone = all(isinstance(v.type, TensorType) and not v.type.rank for v in node.results)
        if node.results and alone and node.op not in ACCESSES and set(node.args) <= known:
            known |= set(node.results)
            scalars.append(node)
        else:
            rest.append(node)
    return scalars, rest


def _check(builder: Builder, bound: Bound) -> list[Value]:
    """The conditions that a block lies within an axis."""
    start, count, size, below = bound
    found = [builder.add(elementwise.less_equal, [start, index_constant(builder, size - count)]).out]
    if below:
        found.append(builder.add(elementwise.greater_equal, [start, index_constant(builder, 0)]).out)
    return found


def _copy_unchecked(nodes: Sequence[Node]) -> tuple[Node, ...]:
    """The nodes once more, whose accesses are not checked."""
    builder, made = Builder(), dict[Value, Value]()
    for node in nodes:
        attrs = Attrs({**node.attrs, "edge": UNCHECKED}) if node.op in ACCESSES else node.attrs
        types = tuple(v.type for v in node.results)
        new = builder.add(node.op, [made.get(v, v) for v in node.args], attrs, types=types, loc=node.loc)
        made.update(zip(node.results, new.results, strict=True))
    return builder.block((), ()).nodes

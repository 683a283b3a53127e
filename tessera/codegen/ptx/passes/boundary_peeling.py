"""Boundary peeling: programs whose blocks lie within memory run code without bounds checks (XLA's and TVM's loop
partitioning).

A kernel of elementwise ops whose last programs reach past the end of an array checks every element in every program.
Here a program tests once whether it reaches past an end, and only then checks its elements. Masks that hold everywhere
inside, as those of padding do, are left out there. A block that reaches past an end in every program, as one of whole
rows beside themselves does, stays checked along that axis.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

from tessera.codegen.ptx.ops import LaunchFacts, index_constant
from tessera.codegen.ptx.passes.loop_transformations import COMPARISON_OPS, VIEW_OPS, find_excess
from tessera.core.types import TensorType, bool_
from tessera.ir.analysis import AffineAnalysis, AffineForm, Interval, IntervalAnalysis
from tessera.ir.builder import Builder
from tessera.ir.core import Attrs, Block, Function, Node, Value
from tessera.ir.rewrite import UseDef, eliminate_dead_code
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
    if not _is_plain(function):
        return function
    interior = Interior(function)
    scalars, rest = _divide(function.body.nodes)
    if not interior.bounds or not {start for start, *_ in interior.bounds} <= {v for n in scalars for v in n.results}:
        return function
    builder = Builder()
    for node in scalars:
        builder.append(node)
    with builder.at(rest[-1].loc):
        inside = functools.reduce(
            lambda x, y: builder.add(elementwise.bitwise_and, [x, y]).out,
            [check for bound in interior.bounds for check in _check(builder, bound)],
        )
        regions = (Block((), interior.copy_nodes(rest), ()), Block((), tuple(rest), ()))
        builder.add(control_flow.if_, [inside], {}, types=(), regions=regions)
    body = Block(function.body.params, builder.block((), ()).nodes, ())
    return eliminate_dead_code(Function(function.name, body, function.attrs, function.loc))


def _is_plain(function: Function) -> bool:
    """Whether a function has elementwise ops alone, and one grid of known size with many programs."""
    grids, nodes = set(LaunchFacts.of(function).grids), function.body.nodes
    if len(grids) != 1 or not all(isinstance(n, int) for n in next(iter(grids))) or len(nodes) > MOST_NODES:
        return False
    alone = int(function.attrs.get("group", 1)) == 1 and math.prod(next(iter(grids))) >= LEAST_PROGRAMS
    return alone and all(not n.regions and (n.op.pointwise or n.op in PLAIN_OPS) for n in nodes)


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


class Interior:
    """What is known of the programs whose blocks lie within memory, and the nodes of such a program."""

    def __init__(self, function: Function) -> None:
        self.uses = UseDef(function)
        self.ranges = IntervalAnalysis(self.uses, LaunchFacts.of(function).grid)
        found: dict[Bound, None] = {}
        self.open_axes: dict[Node, list[int]] = {}  # along which an access reaches past an end in every program
        for node in function.body.nodes:
            if node.op not in ACCESSES or node.attrs["edge"] != CLIP:
                continue
            sizes, block, starts = _read_access(node)
            if not all(isinstance(n, int) for n in sizes):
                found = {}
                break
            for axis in self.ranges.find_unproven_axes(starts, block, sizes):
                low, high = self.ranges.of(starts[axis])
                if low > sizes[axis] - block[axis] or high < 0:
                    self.open_axes.setdefault(node, []).append(axis)
                else:
                    found[starts[axis], block[axis], int(sizes[axis]), low < 0] = None
        self.bounds = list(found)
        self.limits: dict[Value, Interval] = {}
        for bound in self.bounds:
            self._narrow_limits(*bound[:3])

    def _narrow_limits(self, start: Value, count: int, size: int) -> None:
        """Narrow the interval of the scalar that a block's start is a multiple of, plus a constant, by its bound."""
        form = AffineAnalysis(self.uses).find_form(start)
        if form is None or len(form.scalars) != 1:
            return
        ((scalar, factor),) = form.scalars.items()
        if factor > 0:
            low, high = self.limits.get(scalar, self.ranges.of(scalar))
            first, last = -(form.constant // factor), (size - count - form.constant) // factor
            self.limits[scalar] = max(low, first), min(high, last)

    def holds(self, node: Node) -> bool:
        """Whether a comparison of indices holds everywhere inside."""
        form = find_excess(self.uses, node)
        return form is not None and self._bound_above(form, node.out) < 0

    def _bound_above(self, form: AffineForm, block: Value) -> float:
        ends = (max(c * n for n in self.limits.get(v, self.ranges.of(v))) for v, c in form.scalars.items())
        return form.upper_bound_of_block(tuple(int(n) for n in block.type.shape)) + sum(ends)  # type: ignore[union-attr, misc]

    def copy_nodes(self, nodes: Sequence[Node]) -> tuple[Node, ...]:
        """The nodes once more, whose accesses are not checked, without the masks that hold."""
        builder, made, true = Builder(), dict[Value, Value](), set[Value]()
        for node in nodes:
            if self._is_true(node, true):
                true.add(node.out)
                continue
            kept = _find_kept(node, true)
            if kept is not None:
                made[node.out] = made.get(kept, kept)
                continue
            for v in true.intersection(node.args) - made.keys():
                whole = {"shape": v.type.shape, "value": True, "dtype": bool_}  # type: ignore[union-attr]
                made[v] = builder.add(basic.full, [], whole).out
            given = self._skip_same_choice(node)
            attrs, args = self._choose_edge(builder, node, [made.get(v, v) for v in given])
            types = tuple(v.type for v in node.results)
            new = builder.add(node.op, args, attrs, types=types, loc=node.loc)
            made.update(zip(node.results, new.results, strict=True))
        return builder.block((), ()).nodes

    def _is_true(self, node: Node, true: set[Value]) -> bool:
        if node.op in COMPARISON_OPS:
            return self.holds(node)
        return node.op in (*VIEW_OPS, elementwise.bitwise_and) and set(node.args) <= true

    def _skip_same_choice(self, node: Node) -> tuple[Value, ...]:
        """The operands of a node; of a choice what another one by the same condition, its first side, chooses."""
        inner = self.uses.find(node.args[1], elementwise.where) if node.op is elementwise.where else None
        if inner is None or inner.args[0] is not node.args[0]:
            return node.args
        return (node.args[0], inner.args[1], *node.args[2:])

    def _choose_edge(self, builder: Builder, node: Node, args: list[Value]) -> tuple[Attrs, list[Value]]:
        """The attributes and operands of a node inside; along other axes an access that stays checked is inside."""
        if node.op not in ACCESSES:
            return node.attrs, args
        if node not in self.open_axes:
            return Attrs({**node.attrs, "edge": UNCHECKED}), args
        sizes, block, starts = _read_access(node)
        first = 1 if node.op is tile.load else 2
        for axis, start in enumerate(starts):
            if axis not in self.open_axes[node] and (start, block[axis], sizes[axis]) in {b[:3] for b in self.bounds}:
                most = index_constant(builder, sizes[axis] - block[axis])
                below = builder.add(elementwise.minimum, [start, most]).out
                args[first + axis] = builder.add(elementwise.maximum, [below, index_constant(builder, 0)]).out
        return node.attrs, args


def _find_kept(node: Node, true: set[Value]) -> Value | None:
    """The operand that a node equals where some of its operands are true everywhere, or None."""
    if node.op is elementwise.where and node.args[0] in true:
        kept = node.args[1]
    elif node.op is elementwise.bitwise_and and not true.isdisjoint(node.args):
        kept = node.args[1] if node.args[0] in true else node.args[0]
    else:
        return None
    return kept if kept.type == node.out.type and kept not in true else None

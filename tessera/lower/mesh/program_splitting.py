"""Program splitting: cuts each program of a launch into several along an axis of its blocks that is parallel.

The axes of a kernel's blocks fall into classes that have equal indices (union-find over the ops). A class is parallel
if no op reduces, contracts or reorders it, no block has it twice, and every store has it: then each part of the class
can be computed alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tessera.core.types import RefType, TensorType, int64
from tessera.ir.builder import Builder, evaluate_block
from tessera.ir.core import Block, Node, Value
from tessera.ir.rules import Op, Rules
from tessera.lower.mesh.op_rules import match_reshape_axes
from tessera.ops.dialects import control_flow, tile
from tessera.ops.tensor import basic, contractions, reduce, shape
from tessera.ops.tensor import elementwise as e

Axis = tuple[Value, int]
# rule(classes, node) joins the axes of a node that have equal indices, and fixes those that must stay whole.
axis_rules = Rules("parallel axes")


class AxisClasses:
    """The classes of the axes of a kernel's blocks, and those that are fixed."""

    def __init__(self, body: Block) -> None:
        self.body, self.params = body, frozenset(body.params)
        self._parent: dict[Axis, Axis] = {}
        self._fixed: set[Axis] = set()
        self.stores: list[Node] = []
        for node in body.walk():
            if node.op.pointwise:
                self._join_blocks([*node.args, *node.results])
            else:
                (axis_rules.get(node.op) or fix_all)(self, node)

    def find(self, value: Value, axis: int) -> Axis:
        """The representative of the class of an axis."""
        key = value, axis % len(value.type.shape)  # type: ignore[union-attr]
        while self._parent.get(key, key) != key:
            key = self._parent[key]
        return key

    def size(self, axis: Axis) -> int:
        """The length of the axes of a class."""
        return int(axis[0].type.shape[axis[1]])  # type: ignore[union-attr]

    def join(self, x: Value, y: Value, pairs: Sequence[tuple[int, int]]) -> None:
        """Axes of two values have equal indices."""
        for a, b in pairs:
            first, other = self.find(x, a), self.find(y, b)
            if first != other:
                self._parent[other] = first
                if other in self._fixed:
                    self._fixed.add(first)

    def fix(self, value: Value, axis: int) -> None:
        """An axis must stay whole."""
        self._fixed.add(self.find(value, axis))

    def _join_blocks(self, values: Sequence[Value]) -> None:
        for value in values[1:]:
            self.broadcast(values[0], value)
        for value in values[2:]:
            self.broadcast(values[1], value)

    def broadcast(self, x: Value, y: Value) -> None:
        """Axes of two values that broadcast together, the last with the last."""
        ranks = len(_shape(x)), len(_shape(y))
        pairs = [(-1 - i, -1 - i) for i in range(min(ranks)) if int(_shape(x)[-1 - i]) == int(_shape(y)[-1 - i])]
        self.join(x, y, pairs)

    def list_parallel(self) -> list[Axis]:
        """The classes along which a program can be cut, in the order of their first store."""
        if not self.stores:
            return []
        found = [self.find(v, a) for v in self.stores[0].args[1:2] for a in range(len(_shape(v)))]
        able = [c for c in dict.fromkeys(found) if c not in self._fixed and self.size(c) > 1 and self._is_stored(c)]
        return [c for c in able if not self._is_repeated(c)]

    def _is_repeated(self, found: Axis) -> bool:
        """Whether a block has a class twice, as where a constant joins rows and columns: parts are its diagonal."""
        values = [v for node in self.body.walk() for v in (*node.results, *(p for r in node.regions for p in r.params))]
        return any(sum(self.find(v, a) == found for a in range(len(_shape(v)))) > 1 for v in values)

    def _is_stored(self, found: Axis) -> bool:
        values = [n.args[1] for n in self.stores]
        return all(any(self.find(v, a) == found for a in range(len(_shape(v)))) for v in values)


def _shape(value: Value) -> tuple:
    return value.type.shape if isinstance(value.type, TensorType) else ()


def fix_all(classes: AxisClasses, node: Node) -> None:
    """An op without a rule needs whole blocks."""
    for value in (*node.args, *node.results):
        for axis in range(len(_shape(value))):
            classes.fix(value, axis)
    if "write" in node.op.effects:
        classes.stores.append(node)


@axis_rules(basic.full, shape.iota, tile.program_id, tile.grid_size, tile.local_id, tile.group_size)
def _(classes, node):
    return None


@axis_rules(basic.broadcast_to)
def _(classes, node):
    classes.broadcast(node.args[0], node.out)


@axis_rules(shape.reshape)
def _(classes, node):
    x, out = node.args[0], node.out
    for before, after in match_reshape_axes(_shape(x), _shape(out)):
        if len(before) == len(after) == 1:
            classes.join(x, out, [(before[0], after[0])])
        else:
            for value, axes in ((x, before), (out, after)):
                for axis in axes:
                    classes.fix(value, axis)


@axis_rules(shape.permute)
def _(classes, node):
    classes.join(node.args[0], node.out, [(a, i) for i, a in enumerate(node.attrs["axes"])])


@axis_rules(contractions.dot)
def _(classes, node):
    a, b = node.args
    if not len(_shape(a)) == len(_shape(b)) == len(_shape(node.out)) >= 2:
        fix_all(classes, node)
        return
    batch = [(i, i) for i in range(len(_shape(a)) - 2)]
    classes.join(a, node.out, [*batch, (-2, -2)])
    classes.join(b, node.out, [*batch, (-1, -1)])
    classes.fix(a, -1)
    classes.fix(b, -2)


@axis_rules(reduce.sum, reduce.max, reduce.min, reduce.argmax, reduce.argmin)
def _(classes, node):
    x, known = node.args[0], node.attrs["axis"]
    rank = len(_shape(x))
    gone = {a % rank for a in (known if isinstance(known, tuple) else (known,))}
    kept = [a for a in range(rank) if a not in gone]
    classes.join(x, node.out, [(a, a if node.attrs["keepdims"] else i) for i, a in enumerate(kept)])
    for axis in gone:
        classes.fix(x, axis)


@axis_rules(tile.load, tile.store)
def _(classes, node):
    if node.args[0] not in classes.params:
        fix_all(classes, node)
        return
    ref, is_load = node.args[0], node.op is tile.load
    block = node.out if is_load else node.args[1]
    for other in node.args[(1 if is_load else 2) + len(ref.type.shape) :]:  # type: ignore[union-attr]
        classes.broadcast(block, other)
    if not is_load:
        classes.stores.append(node)


def _join_lists(classes: AxisClasses, *lists: Sequence[Value]) -> None:
    for values in zip(*lists, strict=True):
        for value in values[1:]:
            classes.join(values[0], value, [(a, a) for a in range(len(_shape(value)))])


@axis_rules(control_flow.for_)
def _(classes, node):
    body = node.regions[0]
    _join_lists(classes, node.args[3:], body.params[1:], body.results, node.results)


@axis_rules(control_flow.while_)
def _(classes, node):
    test, body = node.regions
    _join_lists(classes, node.args, test.params, body.params, body.results, node.results)


@axis_rules(control_flow.if_)
def _(classes, node):
    _join_lists(classes, node.results, *(r.results for r in node.regions))


@dataclass
class _Splitting:
    """A body being rebuilt with the axes of one class cut: `part` is the length of a part, `offset` its first index."""

    classes: AxisClasses
    chosen: Axis
    part: int
    builder: Builder
    offset: Value

    def sizes(self, value: Value) -> tuple[int, ...]:
        """The shape of a value's part."""
        cut = [self.classes.find(value, a) == self.chosen for a in range(len(_shape(value)))]
        return tuple(self.part if c else int(n) for c, n in zip(cut, _shape(value), strict=True))

    def region(self, region: Block, run: Any) -> Block:
        """A region with parts of its values."""
        params = tuple(
            Value(p.type if isinstance(p.type, RefType) else p.type.with_shape(self.sizes(p)), p.hint)
            for p in region.params
        )
        with self.builder.region() as nodes:
            results = run(region, *params)
        return Block(params, tuple(nodes), tuple(results))

    def __call__(self, node: Node, args: list[Value], run: Any) -> Sequence[Value]:
        """The part of a node's results."""
        with self.builder.at(node.loc):
            attrs = dict(node.attrs)
            if node.regions:
                regions = tuple(self.region(r, run) for r in node.regions)
                types = tuple(v.type.with_shape(self.sizes(v)) for v in node.results)  # type: ignore[union-attr]
                return self.builder.add(node.op, args, attrs, types=types, regions=regions).results
            if node.op in _SHAPED:
                attrs["shape"] = self.sizes(node.out)
            if node.op in (tile.load, tile.store) and node.args[0] in self.classes.params:
                args = self._offset_starts(node, args)
            results = self.builder.add(node.op, args, attrs).results
            is_index = node.op is shape.iota and self.classes.find(node.out, node.attrs["axis"]) == self.chosen
            return [self._offset_index(results[0])] if is_index else results

    def _offset_starts(self, node: Node, args: list[Value]) -> list[Value]:
        block, first = (node.out, 1) if node.op is tile.load else (node.args[1], 2)
        moved = list(args)
        for axis in range(len(_shape(block))):
            if self.classes.find(block, axis) == self.chosen:
                moved[first + axis] = self.builder.add(e.add, [moved[first + axis], self.offset]).out
        return moved

    def _offset_index(self, index: Value) -> Value:
        start, sizes = self.offset, {"shape": _shape(index)}
        if index.type.dtype != int64:  # type: ignore[union-attr]
            start = self.builder.add(basic.cast, [start], {"dtype": index.type.dtype}).out  # type: ignore[union-attr]
        return self.builder.add(e.add, [index, self.builder.add(basic.broadcast_to, [start], sizes).out]).out


_SHAPED: tuple[Op, ...] = (basic.full, basic.broadcast_to, shape.reshape, shape.iota, tile.load)


def list_splits(body: Block, grid: Sequence[int]) -> Iterator[tuple[Block, tuple[int, ...]]]:
    """The bodies and grids in which each program is cut into the fewest equal parts along a parallel axis."""
    classes = AxisClasses(body)
    for chosen in classes.list_parallel():
        size = classes.size(chosen)
        parts = next(n for n in range(2, size + 1) if size % n == 0)
        yield _split(classes, chosen, size // parts, len(grid)), (*(int(n) for n in grid), parts)


def _split(classes: AxisClasses, chosen: Axis, part: int, axis: int) -> Block:
    builder, body = Builder(), classes.body
    params = tuple(Value(p.type, p.hint) for p in body.params)
    with builder.at(body.nodes[0].loc):
        place = builder.add(tile.program_id, (), {"axis": axis}).out
        length = builder.add(basic.full, (), {"shape": (), "value": part, "dtype": int64}).out
        offset = builder.add(e.mul, [place, length]).out
    evaluate_block(body, params, _Splitting(classes, chosen, part, builder, offset))
    return builder.block(params, ())

"""Which layout each value of a tile function has by nature; None where it can be made in any.

Constants, ramps and what is computed from them alone are made where they are used, in the layout that is wanted
there. Everything else has one layout, and is handed to another by a `relayout`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tessera.codegen.ptx.layout import Layout, Sizes, spread
from tessera.codegen.ptx.ops import lying, multiply_add, pairs, places_below, product_loop, resident, streamed, supplied
from tessera.codegen.ptx.passes.products import (
    enough_rows,
    fragments,
    group_fragments,
    paired,
    product_layout,
    tensor_cores,
)
from tessera.ir.core import Block, Function, Node, Value
from tessera.op import Rules
from tessera.ops import basic, control, group, linalg, reduce, shape, tile
from tessera.types import RefType, TensorType, int8

Found = Layout | None
natural = Rules("ptx layout")
ROUNDS = 2  # a layout found at a loop's end is carried to its begin once


class Inference:
    """The layouts of one function's values, for teams of `threads` that hold `vector` neighbours in a thread.

    `given` are layouts of loads that are known to be wanted.
    """

    def __init__(
        self, function: Function, threads: int, vector: int, given: Mapping[Value, Layout] | None = None
    ) -> None:
        self.threads, self.vector, self.given = threads, vector, given or {}
        self.of: dict[Value, Found] = {}
        self.direct: set[Node] = set()  # products whose left side stays in registers
        self.lying: set[Value] = set()  # blocks that have no registers
        self._depths: dict[Value, int] = {}
        self._depth = 0
        for v in function.params:
            if isinstance(v.type, TensorType):
                self.of[v] = self.plain(v)
        self.run(function.body)

    def plain(self, v: Value) -> Layout:
        """The plain layout of a block."""
        return self.plain_shape(sizes(v))

    def plain_shape(self, shape: Sizes) -> Layout:
        """The plain layout of blocks of a shape."""
        return spread(shape, self.threads, self.vector)

    def held(self, v: Value) -> Layout:
        """A value's own layout, or the plain one."""
        return self.of[v] or self.plain(v)

    def run(self, block: Block) -> list[Found]:
        """The layouts in a block; those of its results."""
        for node in block.nodes:
            rule = natural.get(node.op)
            found = rule(self, node) if rule is not None else self._pointwise(node)
            self.of.update(zip(node.results, found, strict=True))
            self._depths.update(dict.fromkeys(node.results, self._depth))
        return [self.of[v] for v in block.results]

    def in_registers(self, node: Node) -> bool:
        """Whether a product's left side is best kept in registers: each round uses it again, or it is a product."""
        left = node.args[-2]
        shape = sizes(left)
        if self.threads == 1 or not tensor_cores(node) or not enough_rows(shape[0], self.threads):
            return False
        if left in self.lying or left.type.dtype == int8:  # four neighbours to a register, which no other layout has
            return False
        again = self._depths.get(left, 0) < self._depth
        return again or self.of[left] == fragments(shape, self.threads, True)

    def inside(self, run: Callable[[], list[Found]]) -> list[Found]:
        """What a loop's body gives."""
        self._depth += 1
        found = run()
        self._depth -= 1
        return found

    def _pointwise(self, node: Node) -> list[Found]:
        if not node.op.pointwise:
            return [self.plain(v) if isinstance(v.type, TensorType) else None for v in node.results]
        return [self.chosen(node.args, v) for v in node.results]

    def chosen(self, operands: Sequence[Value], out: Value) -> Found:
        """The layout that most is gained by: one that some operand has, rather not the plain one."""
        if not out.type.rank:
            return self.plain(out)
        found = [self.of[v] for v in operands if v.type.shape == out.type.shape]
        strong = [each for each in found if each is not None]
        plain = self.plain(out)
        return next((each for each in strong if each != plain), strong[0] if strong else None)


def sizes(v: Value) -> Sizes:
    """The shape of a block, all of it known."""
    return tuple(int(n) for n in v.type.shape)  # type: ignore[arg-type]


def _free(inference: Inference, node: Node) -> list[Found]:
    return [inference.plain(node.out) if not node.out.type.rank else None]


natural(basic.full, shape.iota, basic.broadcast_to, places_below)(_free)


@natural(shape.permute)
def _(inference, node):
    found = inference.of[node.args[0]]
    return [found and found.permuted(node.attrs["axes"])]


@natural(shape.reshape)
def _(inference, node):
    found = inference.of[node.args[0]]
    inner = found or inference.plain(node.args[0])
    moved = inner.reshaped(sizes(node.out))
    if found is None and moved is not None and node.out.type.rank:
        return [None]
    return [moved or inference.plain(node.out)]


@natural(tile.load, supplied)
def _(inference, node):
    return [inference.given.get(node.out) or inference.plain(node.out)]


@natural(tile.gather, tile.atomic, tile.compare_exchange)
def _(inference, node):
    blocks = [v for v in node.args if not isinstance(v.type, RefType)]
    return [inference.chosen(blocks, node.out) or inference.plain(node.out)]


@natural(reduce.sum, reduce.max, reduce.min, reduce.argmax, reduce.argmin)
def _(inference, node):
    return [inference.held(node.args[0]).reduced(reduced_axes(node), node.attrs["keepdims"])]


def reduced_axes(node: Node) -> tuple[int, ...]:
    """The axes that a reduction combines, counted from the first."""
    axes, rank = node.attrs["axis"], node.args[0].type.rank  # type: ignore[union-attr]
    return tuple(a % rank for a in ((axes,) if isinstance(axes, int) else axes))


@natural(linalg.dot, multiply_add)
def _(inference, node):
    if inference.in_registers(node):
        inference.direct.add(node)
    return [product_layout(node, inference.threads, node in inference.direct)]


@natural(lying)
def _(inference, node):
    inference.lying.add(node.out)
    return [inference.plain(node.out)]


@natural(pairs)
def _(inference, node):
    return [paired(group_fragments(sizes(node.args[0]), inference.threads))]


@natural(product_loop, resident, streamed)
def _(inference, node):
    return [group_fragments(sizes(node.out), inference.threads)]


@natural(group.collect)
def _(inference, node):
    return [inference.plain(node.out)]


@natural(control.for_)
def _(inference, node):
    (body,) = node.regions
    inference.of[body.params[0]] = inference.plain(body.params[0])
    return _carried(inference, node.args[3:], [body.params[1:]], lambda: inference.run(body))


@natural(control.while_)
def _(inference, node):
    condition, body = node.regions

    def run() -> list[Found]:
        inference.run(condition)
        return inference.run(body)

    return _carried(inference, node.args, [condition.params, body.params], run)


def _carried(
    inference: Inference, inits: Sequence[Value], params: Sequence[Sequence[Value]], run: Callable[[], list[Found]]
) -> list[Found]:
    """What a loop carries has the layout it begins with, or a better one that its body gives."""
    layouts = [inference.of[v] for v in inits]
    for _ in range(ROUNDS):
        for group_ in params:
            inference.of.update(zip(group_, layouts, strict=True))
        given = inference.inside(run)
        layouts = [_better(inference, v, ours, theirs) for v, ours, theirs in zip(inits, layouts, given, strict=True)]
    final = [each or inference.plain(v) for each, v in zip(layouts, inits, strict=True)]
    for group_ in params:
        inference.of.update(zip(group_, final, strict=True))
    inference.inside(run)
    return list(final)


def _better(inference: Inference, v: Value, ours: Found, theirs: Found) -> Found:
    return theirs if theirs is not None and ours in (None, inference.plain(v)) else ours


@natural(control.if_)
def _(inference, node):
    both = zip(*(inference.run(region) for region in node.regions), strict=True)
    return [a or b or inference.plain(v) for (a, b), v in zip(both, node.results, strict=True)]

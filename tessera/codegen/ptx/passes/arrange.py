"""The pass that fixes layouts: every use of a block in another layout than it has goes through a `relayout`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tessera.codegen.ptx.layout import Layout
from tessera.codegen.ptx.ops import (
    multiply_add,
    pairs,
    places_below,
    product_loop,
    relayout,
    released,
    resident,
    settled,
    streamed,
    supplied,
)
from tessera.codegen.ptx.passes.given import given
from tessera.codegen.ptx.passes.infer import Inference, sizes
from tessera.codegen.ptx.passes.products import group_fragments, operand_layouts
from tessera.ir.builder import Builder
from tessera.ir.core import Block, Function, Node, Value
from tessera.op import Rules
from tessera.ops import checks, control, group, linalg, reduce, shape, tile
from tessera.types import RefType, TensorType

# demand(arranger, node, layout of the result) gives the layout wanted of each operand; None for a ref.
demand = Rules("ptx operand layout")
Wanted = Sequence[Layout | None]


@dataclass(frozen=True)
class Arranged:
    """A tile function whose blocks have layouts: those of an op's operands are the ones it works on."""

    function: Function
    layouts: dict[Value, Layout]


def arrange(function: Function, threads: int, vector: int) -> Arranged:
    """The function with each block in its layout, for a team of `threads` threads a tile."""
    walk = Arranger(Inference(function, threads, vector))
    block = walk.whole(function)
    if loads := given(function, walk):
        walk = Arranger(Inference(function, threads, vector, loads))
        block = walk.whole(function)
    return Arranged(Function(function.name, block, function.attrs, function.loc), walk.layouts)


class Arranger:
    """A walk that records a function anew. A value is known by itself and the layout it is wanted in."""

    def __init__(self, inference: Inference) -> None:
        self.inference, self.builder = inference, Builder()
        self.layouts: dict[Value, Layout] = {}
        self.producers: dict[Value, Node] = {}
        self.handed: dict[Value, set[Layout]] = {}  # the layouts that blocks are handed to
        self.plain: set[Value] = set()  # blocks that are used as they are
        self._scopes: list[dict[tuple[Value, Layout | None], Value]] = [{}]
        self._open: list[list[Node]] = []  # the nodes of each region under way, as the scopes

    def whole(self, function: Function) -> Block:
        """The function's body."""
        params = tuple(self.param(v, self.inference.of.get(v)) for v in function.params)
        with self.builder.active(), self.builder.region() as nodes:
            self._open.append(nodes)
            self.run(function.body)
        return Block(params, tuple(nodes), ())

    def param(self, v: Value, layout: Layout | None) -> Value:
        """A new parameter for an old one."""
        new = Value(v.type, v.hint)
        self.bind(v, layout, new)
        return new

    def bind(self, old: Value, layout: Layout | None, new: Value) -> None:
        """Let `new` stand for `old` in a layout, as far as this region goes."""
        self._scopes[-1][old, layout] = new
        if layout is not None:
            self.layouts[new] = layout

    def want(self, v: Value, layout: Layout | None) -> Value:
        """A value in a layout: as it is, made anew, or handed over."""
        if layout is not None and layout == self.inference.of[v]:
            self.plain.add(v)
        if (found := self._found(v, layout)) is not None:
            return found
        assert layout is not None
        own = self.inference.of[v]
        if own is not None:
            self.handed.setdefault(v, set()).add(layout)
            return self._handed(v, own, layout)
        (new,) = self._record(self.producers[v], [layout])
        self.bind(v, layout, new)
        return new

    def _found(self, v: Value, layout: Layout | None) -> Any:
        """A value that is there in a layout, or None."""
        return next((scope[v, layout] for scope in reversed(self._scopes) if (v, layout) in scope), None)

    def _handed(self, v: Value, own: Layout, layout: Layout) -> Value:
        """A value handed to another layout, in the region that it was made in: once for all rounds of a loop."""
        depth = max(i for i, scope in enumerate(self._scopes) if (v, own) in scope)
        with self.builder.at(self.producers[v].loc if v in self.producers else None), self.builder.region() as made:
            new = self.builder.add(relayout, [self._found(v, own)], {"layout": str(layout)}).out
        self._open[depth] += made
        self._scopes[depth][v, layout] = new
        self.layouts[new] = layout
        return new

    def run(self, block: Block) -> None:
        """Record the nodes of a block that do something, or give what is not made where it is used."""
        for node in block.nodes:
            self.producers.update(dict.fromkeys(node.results, node))
            layouts = [self.inference.of[v] for v in node.results]
            if any(o is None and isinstance(v.type, TensorType) for v, o in zip(node.results, layouts, strict=True)):
                continue
            special = REGIONS.get(node.op)
            results = special(self, node) if special is not None else self._record(node, layouts)
            for v, layout, new in zip(node.results, layouts, results, strict=True):
                self.bind(v, layout, new)

    def _record(self, node: Node, layouts: Sequence[Layout | None]) -> tuple[Value, ...]:
        rule = demand.get(node.op) or broadcast
        wanted = rule(self, node, layouts[0] if layouts else None)
        args = [self.want(v, layout) for v, layout in zip(node.args, wanted, strict=True)]
        types = tuple(v.type for v in node.results)
        return self.builder.add(node.op, args, node.attrs, types=types, loc=node.loc).results

    @contextmanager
    def scope(self) -> Iterator[list[Node]]:
        """A region: what is made inside is not known outside."""
        self._scopes.append({})
        with self.builder.region() as nodes:
            self._open.append(nodes)
            yield nodes
        self._open.pop()
        self._scopes.pop()

    def region(self, block: Block, layouts: Sequence[Layout | None]) -> Block:
        """A region whose results have these layouts."""
        with self.scope() as nodes:
            params = tuple(self.param(v, self.inference.of[v]) for v in block.params)
            self.run(block)
            results = tuple(self.want(v, layout) for v, layout in zip(block.results, layouts, strict=True))
        return Block(params, tuple(nodes), results)


def broadcast(arranger: Arranger, node: Node, out: Layout | None) -> Wanted:
    """Every operand where the result's elements are that it is broadcast to; scalars where nothing gives a block."""
    layout = out or arranger.inference.plain_shape(())
    return [None if isinstance(v.type, RefType) else layout.source(sizes(v)) for v in node.args]


@demand(shape.permute)
def _(arranger, node, out):
    axes = node.attrs["axes"]
    return [out.permuted([axes.index(a) for a in range(len(axes))])]


@demand(shape.reshape)
def _(arranger, node, out):
    (x,) = node.args
    own = arranger.inference.of[x]
    return [own or out.reshaped(sizes(x)) or arranger.inference.plain(x)]


def _own(arranger: Arranger, node: Node, out: Layout | None) -> Wanted:
    return [None if isinstance(v.type, RefType) else arranger.inference.held(v) for v in node.args]


demand(reduce.sum, reduce.max, reduce.min, reduce.argmax, reduce.argmin, group.collect, checks.print_)(_own)


@demand(linalg.dot)
def _(arranger, node, out):
    return _sides(arranger, node)


def _sides(arranger: Arranger, node: Node) -> Wanted:
    inference = arranger.inference
    return operand_layouts(node, inference.held, node in inference.direct, inference.threads)


@demand(multiply_add)
def _(arranger, node, out):
    return [out, *_sides(arranger, node)]


@demand(product_loop)
def _(arranger, node, out):
    scalar = arranger.inference.plain_shape(())
    return [out, None, None, *(scalar for _ in node.args[3:])]


@demand(resident, supplied)
def _(arranger, node, out):
    scalar = arranger.inference.plain_shape(())
    return [None, *(scalar for _ in node.args[1:])]


@demand(places_below)
def _(arranger, node, out):
    return [arranger.inference.plain_shape(())]


@demand(pairs)
def _(arranger, node, out):
    return [group_fragments(sizes(node.args[0]), arranger.inference.threads)]


@demand(streamed)
def _(arranger, node, out):
    scalar, summed = arranger.inference.plain_shape(()), node.attrs["summed"]
    places = node.args[3 if summed else 2 :]
    return [arranger.inference.of[node.args[0]], None, *([out] if summed else []), *(scalar for _ in places)]


demand(released, settled)(_own)


@demand(tile.store)
def _(arranger, node, out):
    return broadcast(arranger, node, arranger.inference.held(node.args[1]))


@demand(tile.scatter)
def _(arranger, node, out):
    rank = node.args[0].type.rank
    blocks = [v for v in (node.args[1], *node.args[2 : 2 + rank]) if isinstance(v.type, TensorType)]
    wide = max(blocks, key=lambda v: (v.type.rank, sizes(v)))
    shape_ = _joined([sizes(v) for v in blocks])
    layout = arranger.inference.held(wide) if sizes(wide) == shape_ else arranger.inference.plain_shape(shape_)
    return broadcast(arranger, node, layout)


def _joined(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The shape that all of these are broadcast to."""
    rank = max(map(len, shapes))
    full = [(1,) * (rank - len(s)) + s for s in shapes]
    return tuple(max(each) if 0 not in each else 0 for each in zip(*full, strict=True))


@demand(checks.assert_)
def _(arranger, node, out):
    shape_ = _joined([sizes(v) for v in node.args]) if node.args else ()
    return broadcast(arranger, node, arranger.inference.plain_shape(shape_))


def _for(arranger: Arranger, node: Node) -> tuple[Value, ...]:
    layouts = [arranger.inference.of[v] for v in node.results]
    bounds = [arranger.want(v, arranger.inference.of[v]) for v in node.args[:3]]
    return _loop(arranger, node, bounds, node.args[3:], layouts, [layouts])


def _while(arranger: Arranger, node: Node) -> tuple[Value, ...]:
    layouts = [arranger.inference.of[v] for v in node.results]
    truth = [arranger.inference.plain_shape(())]
    return _loop(arranger, node, [], node.args, layouts, [truth, layouts])


def _loop(
    arranger: Arranger, node: Node, bounds: list[Value], inits: Sequence[Value], layouts: Wanted, results: list[Wanted]
) -> tuple[Value, ...]:
    carried = [arranger.want(v, layout) for v, layout in zip(inits, layouts, strict=True)]
    regions = tuple(arranger.region(r, wanted) for r, wanted in zip(node.regions, results, strict=True))
    types = tuple(v.type for v in node.results)
    args = [*bounds, *carried]
    return arranger.builder.add(node.op, args, node.attrs, types=types, regions=regions, loc=node.loc).results


def _if(arranger: Arranger, node: Node) -> tuple[Value, ...]:
    layouts = [arranger.inference.of[v] for v in node.results]
    condition = arranger.want(node.args[0], arranger.inference.plain_shape(()))
    regions = tuple(arranger.region(r, layouts) for r in node.regions)
    types = tuple(v.type for v in node.results)
    return arranger.builder.add(node.op, [condition], node.attrs, types=types, regions=regions, loc=node.loc).results


REGIONS: dict[object, Callable[[Arranger, Node], tuple[Value, ...]]] = {
    control.for_: _for, control.while_: _while, control.if_: _if,
}  # fmt: skip

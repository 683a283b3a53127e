"""Layout inference: the layout of each value, and a `convert_layout` at each use that wants another.

Constants, ramps and what is computed from them alone are rematerialised where they are used; everything else has one
layout. Small blocks are loaded in the layout of their only use.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tessera.codegen.ptx.layout import (
    DistributedLayout,
    Sizes,
    choose_dot_layout,
    choose_dot_operand_layouts,
    find_reduced_bits,
    has_enough_rows,
    make_blocked_layout,
    make_mma_layout,
    make_reduction_layout,
    make_wgmma_layout,
    pack_layout,
    parse_layout,
    reduction_axes,
    static_shape,
)
from tessera.codegen.ptx.ops import (
    async_mma,
    convert_layout,
    element,
    fetched_block,
    gemm_mainloop,
    get_fact,
    indices_below,
    matmul_accumulate,
    pack_pairs,
    prefetched_load,
    release_operand,
    resident_operand,
    set_facts,
    smem_operand,
    uses_split_mma,
    uses_tensor_cores,
    wait_mma,
)
from tessera.codegen.ptx.passes.store_layouts import choose_store_layout
from tessera.core.types import RefType, TensorType, int8
from tessera.ir.builder import Builder
from tessera.ir.core import Block, Function, Node, Value
from tessera.ir.rules import Rules
from tessera.ops.dialects import control_flow, tile
from tessera.ops.tensor import basic, contractions, reduce, shape

# Inference: the natural layout of each value; None for a value that is rematerialised in any layout.


MaybeLayout = DistributedLayout | None
natural_layout_rules = Rules("ptx layout")
FIXPOINT_ROUNDS = 2  # a layout found at the end of a loop body propagates to its start once


class LayoutInference:
    """The layouts of one function's values, for teams of `threads` threads with `vector` neighbours in each.

    `given` holds layouts of loads that an earlier inference found.
    """

    def __init__(
        self, function: Function, threads: int, vector: int, given: Mapping[Value, DistributedLayout] | None = None
    ) -> None:
        self.threads, self.vector, self.given = threads, vector, given or {}
        self.of: dict[Value, MaybeLayout] = {}
        self.direct: set[Node] = set()  # products whose left operand stays in registers
        self.smem_operands: set[Value] = set()  # operands in shared memory, which have no registers
        split = [n for n in function.body.walk() if uses_split_mma(n)]
        self.chained = set(split) if len(split) > 1 else set()  # a warp has whole rows, which are reduced in between
        self.fragments: set[DistributedLayout] = set()  # layouts of accumulators of main loops
        self._depths: dict[Value, int] = {}
        self._depth = 0
        self.reduced = find_reduced_bits(function, threads)
        for v in function.params:
            if isinstance(v.type, TensorType):
                self.of[v] = self.plain(v)
        self.run(function.body)

    def plain(self, v: Value) -> DistributedLayout:
        """The blocked layout of a block."""
        return make_blocked_layout(static_shape(v), self.threads, self.vector)

    def plain_shape(self, shape: Sizes) -> DistributedLayout:
        """The blocked layout of blocks of a shape."""
        return make_blocked_layout(shape, self.threads, self.vector)

    def find_load_layout(self, v: Value) -> DistributedLayout:
        """The layout of a block from memory: the blocked one, or one for what is reduced along its columns."""
        if v not in self.reduced:
            return self.plain(v)
        return make_reduction_layout(static_shape(v), self.threads, self.vector, self.reduced[v])

    def find_layout(self, v: Value) -> DistributedLayout:
        """A value's own layout, or the blocked one."""
        return self.of[v] or self.plain(v)

    def run(self, block: Block) -> list[MaybeLayout]:
        """Infer the layouts of a block's values; returns those of its results."""
        for node in block.nodes:
            rule = natural_layout_rules.get(node.op)
            found = rule(self, node) if rule is not None else self._pointwise(node)
            self.of.update(zip(node.results, found, strict=True))
            self._depths.update(dict.fromkeys(node.results, self._depth))
        return [self.of[v] for v in block.results]

    def in_registers(self, node: Node) -> bool:
        """Whether a product's left operand stays in registers: it is loop-invariant, or the result of a product."""
        left = node.args[-2]
        shape = static_shape(left)
        held = uses_tensor_cores(node) or node in self.chained
        if self.threads == 1 or not held or not has_enough_rows(shape[0], self.threads):
            return False
        if (
            left in self.smem_operands or left.type.dtype == int8
        ):  # four neighbours to a register, which no other layout has
            return False
        again = self._depths.get(left, 0) < self._depth and node not in self.chained
        return again or self.of[left] == make_mma_layout(shape, self.threads, True)

    def is_fragment(self, layout: DistributedLayout) -> bool:
        """Whether a layout is that of a main loop's accumulator, but for axes of one element."""
        return layout.reshaped(tuple(n for n in layout.shape if n != 1)) in self.fragments

    def inside(self, run: Callable[[], list[MaybeLayout]]) -> list[MaybeLayout]:
        """Infer the layouts of a loop's body."""
        self._depth += 1
        found = run()
        self._depth -= 1
        return found

    def _pointwise(self, node: Node) -> list[MaybeLayout]:
        if not node.op.pointwise:
            return [self.plain(v) if isinstance(v.type, TensorType) else None for v in node.results]
        return [self.chosen(node.args, v) for v in node.results]

    def chosen(self, operands: Sequence[Value], out: Value) -> MaybeLayout:
        """The layout of an elementwise result: one that an operand has, preferably not the blocked one."""
        if not out.type.rank:
            return self.plain(out)
        found = [self.of[v] for v in operands if v.type.shape == out.type.shape]
        strong = [each for each in found if each is not None]
        plain = self.plain(out)
        return next((each for each in strong if each != plain), strong[0] if strong else None)


def _infer_rematerialised(inference: LayoutInference, node: Node) -> list[MaybeLayout]:
    return [inference.plain(node.out) if not node.out.type.rank else None]


natural_layout_rules(basic.full, basic.dim_value, shape.iota, basic.broadcast_to, indices_below)(_infer_rematerialised)


@natural_layout_rules(shape.permute)
def _(inference, node):
    found = inference.of[node.args[0]]
    return [found and found.permuted(node.attrs["axes"])]


@natural_layout_rules(shape.reshape)
def _(inference, node):
    found = inference.of[node.args[0]]
    inner = found or inference.plain(node.args[0])
    moved = inner.reshaped(static_shape(node.out))
    if found is None and moved is not None and node.out.type.rank:
        return [None]
    return [moved or inference.plain(node.out)]


@natural_layout_rules(tile.load, prefetched_load)
def _(inference, node):
    return [inference.given.get(node.out) or inference.find_load_layout(node.out)]


@natural_layout_rules(tile.gather, tile.atomic, tile.compare_exchange)
def _(inference, node):
    blocks = [v for v in node.args if not isinstance(v.type, RefType)]
    return [inference.given.get(node.out) or inference.chosen(blocks, node.out) or inference.plain(node.out)]


@natural_layout_rules(reduce.sum, reduce.max, reduce.min, reduce.argmax, reduce.argmin)
def _(inference, node):
    return [inference.find_layout(node.args[0]).reduced(reduction_axes(node), node.attrs["keepdims"])]


@natural_layout_rules(contractions.dot, matmul_accumulate)
def _(inference, node):
    if inference.in_registers(node):
        inference.direct.add(node)
    return [choose_dot_layout(node, inference.threads, node in inference.direct or node in inference.chained)]


@natural_layout_rules(smem_operand)
def _(inference, node):
    inference.smem_operands.add(node.out)
    return [inference.plain(node.out)]


@natural_layout_rules(pack_pairs)
def _(inference, node):
    return [pack_layout(make_wgmma_layout(static_shape(node.args[0]), inference.threads))]


@natural_layout_rules(gemm_mainloop, resident_operand, async_mma, fetched_block)
def _(inference, node):
    found = make_wgmma_layout(static_shape(node.out), inference.threads)
    inference.fragments |= {found} if node.op is gemm_mainloop else set()
    return [found]


@natural_layout_rules(tile.collect, element)
def _(inference, node):
    return [inference.plain(node.out)]


@natural_layout_rules(control_flow.for_)
def _(inference, node):
    (body,) = node.regions
    inference.of[body.params[0]] = inference.plain(body.params[0])
    return _infer_carried(inference, node.args[3:], [body.params[1:]], lambda: inference.run(body))


@natural_layout_rules(control_flow.while_)
def _(inference, node):
    condition, body = node.regions

    def run() -> list[MaybeLayout]:
        inference.run(condition)
        return inference.run(body)

    return _infer_carried(inference, node.args, [condition.params, body.params], run)


def _infer_carried(
    inference: LayoutInference,
    inits: Sequence[Value],
    params: Sequence[Sequence[Value]],
    run: Callable[[], list[MaybeLayout]],
) -> list[MaybeLayout]:
    """A loop-carried value has the layout of its initial value, or a better one that the body gives."""
    layouts = [inference.of[v] for v in inits]
    for _ in range(FIXPOINT_ROUNDS):
        for group_ in params:
            inference.of.update(zip(group_, layouts, strict=True))
        given = inference.inside(run)
        layouts = [
            _prefer_layout(inference, v, ours, theirs) for v, ours, theirs in zip(inits, layouts, given, strict=True)
        ]
    final = [each or inference.plain(v) for each, v in zip(layouts, inits, strict=True)]
    for group_ in params:
        inference.of.update(zip(group_, final, strict=True))
    inference.inside(run)
    return list(final)


def _prefer_layout(inference: LayoutInference, v: Value, ours: MaybeLayout, theirs: MaybeLayout) -> MaybeLayout:
    return theirs if theirs is not None and ours in (None, inference.plain(v)) else ours


@natural_layout_rules(control_flow.if_)
def _(inference, node):
    both = zip(*(inference.run(region) for region in node.regions), strict=True)
    return [a or b or inference.plain(v) for (a, b), v in zip(both, node.results, strict=True)]


# What the register operand of a product is computed of is loaded in the operand's layout.


def find_fragment_loads(function: Function, threads: int) -> dict[Value, DistributedLayout]:
    """The layouts of loads and gathers that packed left operands are computed of, elementwise or as views."""
    producers = {v: node for node in function.body.walk() for v in node.results}
    loops = [node for node in function.body.walk() if node.op is control_flow.for_]
    carried = {v: (loop, i) for loop in loops for i, v in enumerate(loop.regions[0].params[1:])}
    packed = [node.args[0] for node in function.body.walk() if node.op is pack_pairs]
    work, found, seen = [(v, make_wgmma_layout(static_shape(v), threads)) for v in packed], {}, set[Value]()
    while work:
        v, layout = work.pop()
        node = producers.get(v)
        if v in seen or layout.shape != static_shape(v):
            continue
        seen.add(v)
        if v in carried:  # loaded for the next round
            loop, place = carried[v]
            work += [(loop.args[3 + place], layout), (loop.regions[0].results[place], layout)]
        elif node is None:
            continue
        elif node.op in (tile.load, tile.gather):
            found[v] = layout
        elif node.op is shape.permute:
            axes = node.attrs["axes"]
            work.append((node.args[0], layout.permuted([axes.index(a) for a in range(len(axes))])))
        elif node.op is shape.reshape:
            moved = layout.reshaped(static_shape(node.args[0]))
            work += [(node.args[0], moved)] if moved is not None else []
        elif node.op.pointwise:
            work += [(x, layout) for x in node.args]
    return found


# Small blocks are loaded in the layout of their only use, which saves a conversion; what an epilogue reads beside an
# accumulator whatever its size: quads of threads read whole sectors, a conversion holds the block twice.


MOST_REPEATED = 16  # elements that a thread loads as others do, rather than receive them through shared memory
REPEATED_ROUNDS = 4


def find_load_layouts(
    function: Function, walk: LayoutAssigner, repeated: bool = False
) -> dict[Value, DistributedLayout]:
    """The layouts of loads whose blocks an assignment converted to one other layout only.

    `repeated`: also of what small blocks are computed from, which several threads then compute.
    """
    uses = Counter(v for node in function.body.walk() for v in node.args)
    found: dict[Value, DistributedLayout] = {}
    for v, wanted in walk.conversions.items():
        layout = next(iter(wanted))
        again = repeated and layout.count <= MOST_REPEATED
        if len(wanted) == 1 and (v not in walk.plain or walk.inference.is_fragment(layout) or again):
            found.update(_trace_to_loads(walk, uses, v, layout, again))
    return found


def _trace_to_loads(
    walk: LayoutAssigner, uses: Mapping[Value, int], v: Value, layout: DistributedLayout, again: bool
) -> Iterator[tuple[Value, DistributedLayout]]:
    """The loads that a block is computed from: small ones through casts and reshapes; all beside accumulators, and
    where it is computed `again`."""
    wide, most = again or walk.inference.is_fragment(layout), walk.inference.threads * walk.inference.vector
    work, seen = [(v, layout)], set[Value]()
    while work:
        v, layout = work.pop()
        node = walk.producers.get(v)
        if node is None or v in seen or layout.shape != static_shape(v):
            continue
        seen.add(v)
        if node.op is tile.load and (wide or math.prod(layout.shape) <= most):
            if not again or _reads_neighbours(layout):
                yield v, layout
        elif node.op is shape.reshape and (wide or uses[node.args[0]] == 1):
            moved = layout.reshaped(static_shape(node.args[0]))
            work += [(node.args[0], moved)] if moved is not None else []
        elif node.op.pointwise and (wide or (node.op is basic.cast and uses[node.args[0]] == 1)):
            work += [(x, layout) for x in node.args]


def _reads_neighbours(layout: DistributedLayout) -> bool:
    """Whether the threads of a warp hold adjacent elements of the last axis."""
    axis = max((a for a, n in enumerate(layout.shape) if n != 1), default=-1)
    held = 0
    while held < len(layout.registers) and layout.registers[held] == (axis, held):
        held += 1
    first = next((bit for bit in layout.threads if bit is not None), None)
    return axis < 0 or 1 << held >= layout.shape[axis] or first == (axis, held)


# Assignment: each use of a block in another layout than its own goes through a `convert_layout`.
# rule(assigner, node, layout of the result) gives the layout of each operand; None for a ref.
operand_layout_rules = Rules("ptx operand layout")
WantedLayouts = Sequence[DistributedLayout | None]


@dataclass(frozen=True)
class LaidOutFunction:
    """A tile function with the layout of each block; an op's operands have the layouts that its emission needs."""

    function: Function
    layouts: dict[Value, DistributedLayout]


def assign_layouts(function: Function) -> Function:
    """The function with each block in its layout, as `ptx.layouts`, for the team that thread mapping chose."""
    found = lay_out_function(function, get_fact(function, "threads"), get_fact(function, "vector"))
    numbers: dict[str, int] = {}
    texts = (str(found.layouts[v]) if v in found.layouts else "" for v in _walk_values(found.function))
    words = ["-" if not text else str(numbers.setdefault(text, len(numbers))) for text in texts]
    return set_facts(found.function, layouts=tuple(numbers), value_layouts=" ".join(words))


def read_layouts(function: Function) -> LaidOutFunction:
    """A function that `assign_layouts` made, with the layouts that its attributes hold."""
    known = [parse_layout(text) for text in get_fact(function, "layouts")]
    pairs = zip(_walk_values(function), get_fact(function, "value_layouts").split(), strict=True)
    return LaidOutFunction(function, {v: known[int(word)] for v, word in pairs if word != "-"})


def _walk_values(function: Function) -> Iterator[Value]:
    """Every value of a function: its parameters, then of each node those of its regions and its results."""
    yield from _walk_block_values(function.body)


def _walk_block_values(block: Block) -> Iterator[Value]:
    yield from block.params
    for node in block.nodes:
        for region in node.regions:
            yield from _walk_block_values(region)
        yield from node.results


def lay_out_function(function: Function, threads: int, vector: int) -> LaidOutFunction:
    """The function with each block in its layout, for a team of `threads` threads a tile."""
    fragments = find_fragment_loads(function, threads)

    def assign(given: Mapping[Value, DistributedLayout]) -> tuple[LayoutAssigner, Block]:
        walk = LayoutAssigner(LayoutInference(function, threads, vector, {**given, **fragments}))
        return walk, walk.whole(function)

    walk, block = assign({})
    if loads := find_load_layouts(function, walk):
        walk, block = assign(loads)
    for _ in range(REPEATED_ROUNDS):
        more = {**loads, **find_load_layouts(function, walk, repeated=True)}
        other, made = assign(more) if more != loads else (walk, block)
        if other.count_conversions() >= walk.count_conversions():
            break
        walk, block, loads = other, made, more
    return LaidOutFunction(Function(function.name, block, function.attrs, function.loc), walk.layouts)


class LayoutAssigner:
    """Rebuilds a function; its values are keyed by the old value and a layout."""

    def __init__(self, inference: LayoutInference) -> None:
        self.inference, self.builder = inference, Builder()
        self.layouts: dict[Value, DistributedLayout] = {}
        self.producers: dict[Value, Node] = {}
        self.conversions: dict[Value, set[DistributedLayout]] = {}  # the layouts that blocks are converted to
        self.plain: set[Value] = set()  # blocks that are used in their own layout
        self._scopes: list[dict[tuple[Value, DistributedLayout | None], Value]] = [{}]
        self._open: list[list[Node]] = []  # the nodes of each open region, parallel to the scopes

    def whole(self, function: Function) -> Block:
        """The new body of the function."""
        params = tuple(self.param(v, self.inference.of.get(v)) for v in function.params)
        with self.builder.active(), self.builder.region() as nodes:
            self._open.append(nodes)
            self.run(function.body)
        return Block(params, tuple(nodes), ())

    def param(self, v: Value, layout: DistributedLayout | None) -> Value:
        """A new parameter for an old one."""
        new = Value(v.type, v.hint)
        self.bind(v, layout, new)
        return new

    def bind(self, old: Value, layout: DistributedLayout | None, new: Value) -> None:
        """Let `new` stand for `old` in a layout, within the current region."""
        self._scopes[-1][old, layout] = new
        if layout is not None:
            self.layouts[new] = layout

    def want(self, v: Value, layout: DistributedLayout | None) -> Value:
        """A value in a layout: itself, rematerialised, or converted."""
        if layout is not None and layout == self.inference.of[v]:
            self.plain.add(v)
        if (found := self._found(v, layout)) is not None:
            return found
        assert layout is not None
        own = self.inference.of[v]
        if own is not None:
            self.conversions.setdefault(v, set()).add(layout)
            return self._convert_layout(v, own, layout)
        (new,) = self._record(self.producers[v], [layout])
        self.bind(v, layout, new)
        return new

    def _found(self, v: Value, layout: DistributedLayout | None) -> Any:
        """The value that is available in a layout, or None."""
        return next((scope[v, layout] for scope in reversed(self._scopes) if (v, layout) in scope), None)

    def _convert_layout(self, v: Value, own: DistributedLayout, layout: DistributedLayout) -> Value:
        """Convert a value in the region that defines it, so that a loop body does not convert it in each round."""
        depth = max(i for i, scope in enumerate(self._scopes) if (v, own) in scope)
        with self.builder.at(self.producers[v].loc if v in self.producers else None), self.builder.region() as made:
            new = self.builder.add(convert_layout, [self._found(v, own)], {"layout": str(layout)}).out
        self._open[depth] += made
        self._scopes[depth][v, layout] = new
        self.layouts[new] = layout
        return new

    def count_conversions(self) -> int:
        """How often blocks are converted to another layout."""
        return sum(map(len, self.conversions.values()))

    def run(self, block: Block) -> None:
        """Record the nodes of a block, except those whose results are rematerialised at their uses."""
        for node in block.nodes:
            self.producers.update(dict.fromkeys(node.results, node))
            layouts = [self.inference.of[v] for v in node.results]
            if any(o is None and isinstance(v.type, TensorType) for v, o in zip(node.results, layouts, strict=True)):
                continue
            special = REGION_RULES.get(node.op)
            results = special(self, node) if special is not None else self._record(node, layouts)
            for v, layout, new in zip(node.results, layouts, results, strict=True):
                self.bind(v, layout, new)

    def _record(self, node: Node, layouts: Sequence[DistributedLayout | None]) -> tuple[Value, ...]:
        rule = operand_layout_rules.get(node.op) or broadcast_operand_layouts
        wanted = rule(self, node, layouts[0] if layouts else None)
        args = [self.want(v, layout) for v, layout in zip(node.args, wanted, strict=True)]
        types = tuple(v.type for v in node.results)
        return self.builder.add(node.op, args, node.attrs, types=types, loc=node.loc).results

    @contextmanager
    def scope(self) -> Iterator[list[Node]]:
        """Open a region: values defined inside are not visible outside."""
        self._scopes.append({})
        with self.builder.region() as nodes:
            self._open.append(nodes)
            yield nodes
        self._open.pop()
        self._scopes.pop()

    def region(self, block: Block, layouts: Sequence[DistributedLayout | None]) -> Block:
        """A region whose results have these layouts."""
        with self.scope() as nodes:
            params = tuple(self.param(v, self.inference.of[v]) for v in block.params)
            self.run(block)
            results = tuple(self.want(v, layout) for v, layout in zip(block.results, layouts, strict=True))
        return Block(params, tuple(nodes), results)


def broadcast_operand_layouts(arranger: LayoutAssigner, node: Node, out: DistributedLayout | None) -> WantedLayouts:
    """Operands in layouts that broadcast to the result's without data movement; scalars without a result."""
    layout = out or arranger.inference.plain_shape(())
    return [None if isinstance(v.type, RefType) else layout.source(static_shape(v)) for v in node.args]


@operand_layout_rules(shape.permute)
def _(arranger, node, out):
    axes = node.attrs["axes"]
    return [out.permuted([axes.index(a) for a in range(len(axes))])]


@operand_layout_rules(shape.reshape)
def _(arranger, node, out):
    (x,) = node.args
    own = arranger.inference.of[x]
    return [own or out.reshaped(static_shape(x)) or arranger.inference.plain(x)]


def _natural_operand_layouts(arranger: LayoutAssigner, node: Node, out: DistributedLayout | None) -> WantedLayouts:
    return [None if isinstance(v.type, RefType) else arranger.inference.find_layout(v) for v in node.args]


operand_layout_rules(
    reduce.sum, reduce.max, reduce.min, reduce.argmax, reduce.argmin, tile.collect, tile.print_, element
)(_natural_operand_layouts)


@operand_layout_rules(contractions.dot)
def _(arranger, node, out):
    return _dot_operand_layouts(arranger, node)


def _dot_operand_layouts(arranger: LayoutAssigner, node: Node) -> WantedLayouts:
    inference = arranger.inference
    return choose_dot_operand_layouts(node, inference.find_layout, node in inference.direct, inference.threads)


@operand_layout_rules(matmul_accumulate)
def _(arranger, node, out):
    return [out, *_dot_operand_layouts(arranger, node)]


@operand_layout_rules(gemm_mainloop)
def _(arranger, node, out):
    scalar = arranger.inference.plain_shape(())
    return [out, None, None, *(scalar for _ in node.args[3:])]


@operand_layout_rules(resident_operand, prefetched_load, fetched_block)
def _(arranger, node, out):
    scalar = arranger.inference.plain_shape(())
    return [None, *(scalar for _ in node.args[1:])]


@operand_layout_rules(indices_below)
def _(arranger, node, out):
    return [arranger.inference.plain_shape(())]


@operand_layout_rules(pack_pairs)
def _(arranger, node, out):
    return [make_wgmma_layout(static_shape(node.args[0]), arranger.inference.threads)]


@operand_layout_rules(async_mma)
def _(arranger, node, out):
    scalar, summed = arranger.inference.plain_shape(()), node.attrs["summed"]
    places = node.args[3 if summed else 2 :]
    return [arranger.inference.of[node.args[0]], None, *([out] if summed else []), *(scalar for _ in places)]


operand_layout_rules(release_operand, wait_mma)(_natural_operand_layouts)


@operand_layout_rules(tile.store)
def _(arranger, node, out):
    inference, producers = arranger.inference, arranger.producers
    layout = inference.find_layout(node.args[1])
    if any(made.op is shape.permute for made in producers.values()):
        layout = choose_store_layout(node, layout, inference.threads, inference.of, producers)
    return broadcast_operand_layouts(arranger, node, layout)


@operand_layout_rules(tile.scatter)
def _(arranger, node, out):
    rank = node.args[0].type.rank
    blocks = [v for v in (node.args[1], *node.args[2 : 2 + rank]) if isinstance(v.type, TensorType)]
    wide = max(blocks, key=lambda v: (v.type.rank, static_shape(v)))
    shape_ = _broadcast_shape([static_shape(v) for v in blocks])
    inference = arranger.inference
    layout = inference.find_layout(wide) if static_shape(wide) == shape_ else inference.plain_shape(shape_)
    return broadcast_operand_layouts(arranger, node, layout)


def _broadcast_shape(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The shape that all of these are broadcast to."""
    rank = max(map(len, shapes))
    full = [(1,) * (rank - len(s)) + s for s in shapes]
    return tuple(max(each) if 0 not in each else 0 for each in zip(*full, strict=True))


@operand_layout_rules(tile.assert_)
def _(arranger, node, out):
    shape_ = _broadcast_shape([static_shape(v) for v in node.args]) if node.args else ()
    return broadcast_operand_layouts(arranger, node, arranger.inference.plain_shape(shape_))


def _assign_for(arranger: LayoutAssigner, node: Node) -> tuple[Value, ...]:
    layouts = [arranger.inference.of[v] for v in node.results]
    bounds = [arranger.want(v, arranger.inference.of[v]) for v in node.args[:3]]
    return _assign_loop(arranger, node, bounds, node.args[3:], layouts, [layouts])


def _assign_while(arranger: LayoutAssigner, node: Node) -> tuple[Value, ...]:
    layouts = [arranger.inference.of[v] for v in node.results]
    truth = [arranger.inference.plain_shape(())]
    return _assign_loop(arranger, node, [], node.args, layouts, [truth, layouts])


def _assign_loop(
    arranger: LayoutAssigner,
    node: Node,
    bounds: list[Value],
    inits: Sequence[Value],
    layouts: WantedLayouts,
    results: list[WantedLayouts],
) -> tuple[Value, ...]:
    carried = [arranger.want(v, layout) for v, layout in zip(inits, layouts, strict=True)]
    regions = tuple(arranger.region(r, wanted) for r, wanted in zip(node.regions, results, strict=True))
    types = tuple(v.type for v in node.results)
    args = [*bounds, *carried]
    return arranger.builder.add(node.op, args, node.attrs, types=types, regions=regions, loc=node.loc).results


def _assign_if(arranger: LayoutAssigner, node: Node) -> tuple[Value, ...]:
    layouts = [arranger.inference.of[v] for v in node.results]
    condition = arranger.want(node.args[0], arranger.inference.plain_shape(()))
    regions = tuple(arranger.region(r, layouts) for r in node.regions)
    types = tuple(v.type for v in node.results)
    return arranger.builder.add(node.op, [condition], node.attrs, types=types, regions=regions, loc=node.loc).results


REGION_RULES: dict[object, Callable[[LayoutAssigner, Node], tuple[Value, ...]]] = {
    control_flow.for_: _assign_for, control_flow.while_: _assign_while, control_flow.if_: _assign_if,
}  # fmt: skip

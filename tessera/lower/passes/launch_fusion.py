"""Launch fusion: pointwise producers and consumers of a kernel's memories become part of its loads and stores.

As the epilogues of products (CUTLASS): a tensor that only the launch uses, or that the launch makes for pointwise ops
alone, is then never in memory. A producer is taken in if its elements are loaded about once by all programs and rounds
of their loops, and consumers if the memory is only stored to, outside of loops: all those with one result, whose other
operands broadcast to what is stored.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tessera.core.symbolic_dim import symbol_names
from tessera.core.types import RefType, TensorType, bool_, int64
from tessera.ir.analysis import AffineAnalysis
from tessera.ir.builder import Builder, evaluate_block, make_copier
from tessera.ir.core import Attrs, Block, Function, Node, Value
from tessera.ir.rewrite import UseDef
from tessera.ops.dialects import control_flow, tile
from tessera.ops.tensor import basic, contractions, shape
from tessera.ops.tensor import elementwise as e

NAMED_OPS = 6  # of what is fused
MOST_CONSUMERS = 32  # nodes that become part of a launch at once
MOST_LOADS = 2  # how often programs may load an element of a tensor that is computed where it is loaded
CLIP = "clip"


def fuse_launches(function: Function) -> Function:
    """A Graph function whose launches compute their pointwise producers and consumers."""
    return replace(function, body=_fuse_block(function.body))


def _fuse_block(block: Block) -> Block:
    nodes = [
        replace(n, regions=tuple(map(_fuse_block, n.regions))) if n.op in control_flow.FUNCTIONAL_FLOW_OPS else n
        for n in block.nodes
    ]
    found: list[Node] | None = nodes
    while found is not None:
        nodes, found = found, _fuse_once(replace(block, nodes=tuple(found)))
    return replace(block, nodes=tuple(nodes))


def _fuse_once(block: Block) -> list[Node] | None:
    """The nodes after one fusion; None if there is none to do."""
    scope = _Scope(block)
    for launch in block.nodes:
        if launch.op is control_flow.launch and _is_plain(launch):
            made = _fuse_producers(scope, launch) or _fuse_consumers(scope, launch) or _fuse_narrowing(scope, launch)
            if made is not None:
                return made
    return None


class _Scope:
    """What makes and what uses each value of a block, and where."""

    def __init__(self, block: Block) -> None:
        self.block, self.nodes = block, block.nodes
        self.producers = {v: n for n in block.nodes for v in n.results}
        self.places = {n: i for i, n in enumerate(block.nodes)}
        self.uses: dict[Value, list[Node | None]] = {}  # None: a result of the block
        for each in block.nodes:
            for value in each.args:
                self.uses.setdefault(value, []).append(each)
        for value in block.results:
            self.uses.setdefault(value, []).append(None)


def _fuse_producers(scope: _Scope, launch: Node) -> list[Node] | None:
    for number, value in enumerate(launch.args):
        node = scope.producers.get(value)
        if node is None or len(scope.uses[value]) != 1:
            continue
        gone, views, producers = {node}, list[Node](), scope.producers
        inner = scope.producers.get(node.args[0]) if node.op is shape.reshape else None
        if inner is not None and len(scope.uses[node.args[0]]) == 1 and _is_pointwise(inner):
            gone, (views, node) = {node, inner}, _reshape_operands(inner, value)
            producers = {**producers, **{n.out: n for n in views}}
        if made := _take_producer(launch, number, node, producers):
            return [m for n in scope.nodes if n not in gone for m in ([*views, made] if n is launch else [n])]
    return None


def _reshape_operands(node: Node, result: Value) -> tuple[list[Node], Node]:
    """A pointwise node on reshaped operands, which makes the reshape of its result; and these reshapes."""
    sizes = tuple(result.type.shape)  # type: ignore[union-attr]
    made = {v: Value(v.type.with_shape(sizes), v.hint) for v in dict.fromkeys(node.args)}  # type: ignore[union-attr]
    views = [Node(shape.reshape, (v,), Attrs({"shape": sizes}), (new,), (), node.loc) for v, new in made.items()]
    return views, replace(node, args=tuple(made[v] for v in node.args), results=(result,))


def _fuse_consumers(scope: _Scope, launch: Node) -> list[Node] | None:
    used = [i for i, v in enumerate(launch.results) if scope.uses.get(v)]
    if len(used) != 1:
        return None
    region = _RegionSearch(launch, launch.results[used[0]], scope).find()
    made = _take_consumers(launch, used[0], region) if region is not None else None
    if region is None or made is None:
        return None
    gone, last = {launch, *region.nodes[:-1]}, region.nodes[-1]
    return [m for n in scope.nodes if n not in gone for m in (made if n is last else [n])]


def _fuse_narrowing(scope: _Scope, launch: Node) -> list[Node] | None:
    """A cast to a narrower type of most of a launch's result, which slices and views have taken: the launch stores the
    narrow type, of all of it."""
    used = [v for v in launch.results if scope.uses.get(v)]
    chain = _follow_moves(scope, used[0]) if len(used) == 1 else []
    if not chain or chain[-1].op is not basic.cast or all(n.op is not shape.slice_ for n in chain):
        return None
    own, cast, (source, out) = used[0], chain[-1], (used[0].type, chain[-1].out.type)
    counts = [math.prod(int(n) for n in t.shape) for t in (source, out)]  # type: ignore[union-attr]
    if source.policy is not out.policy is None or out.dtype.bits >= source.dtype.bits or counts[0] > 2 * counts[1]:  # type: ignore[union-attr]
        return None
    value = Value(replace(source, dtype=out.dtype), own.hint)  # type: ignore[type-var, union-attr]
    made = [replace(cast, args=(own,), results=(value,))]
    for node in chain[:-1]:
        moved = Value(replace(node.out.type, dtype=out.dtype), node.out.hint) if node is not chain[-2] else cast.out  # type: ignore[type-var, union-attr]
        made.append(replace(node, args=(value,), results=(moved,)))
        value = moved
    nodes = tuple(m for n in scope.nodes if n not in chain[:-1] for m in (made if n is cast else [n]))
    return _fuse_consumers(_Scope(replace(scope.block, nodes=nodes)), launch)


def _follow_moves(scope: _Scope, value: Value) -> list[Node]:
    """The nodes that a value goes through, each the only use of the one before: moves of elements, and what follows."""
    found: list[Node] = []
    while len(users := scope.uses.get(value, [])) == 1 and users[0] is not None and len(users[0].results) == 1:
        found.append(users[0])
        value = users[0].out
        if users[0].op not in (shape.reshape, shape.permute, shape.slice_):
            break
    return found


def _is_plain(launch: Node) -> bool:
    """Whether a launch has a known grid, and groups of one tile, which all execute every node."""
    known = launch.attrs
    return known["attrs"].get("group", 1) == 1 and all(isinstance(n, int) for n in known["grid"])


def _is_fusible(node: Node, producers: dict[Value, Node]) -> bool:
    """Whether a node is pointwise, and all that it reads and makes can be in memory.

    Where a pointwise node makes a bool, other kernels compute it where they read it.
    """
    made = (*(v for v in node.args if _makes_pointwise(producers.get(v))), *node.results)
    return _is_pointwise(node) and all(v.type.dtype != bool_ for v in made)  # type: ignore[union-attr]


def _makes_pointwise(node: Node | None) -> bool:
    return node is not None and (node.op.pointwise or node.op in (basic.broadcast_to, shape.reshape))


def _is_pointwise(node: Node) -> bool:
    """Whether a node is pointwise on tensors of one known shape, in formats without a policy of their own."""
    types = [v.type for v in (*node.args, *node.results)]
    if not node.op.pointwise or node.op.effects or len(node.results) != 1 or not node.out.type.shape:
        return False
    tensors = [t for t in types if isinstance(t, TensorType)]
    plain = all(t.policy is None and not symbol_names(t.shape) and 0 not in t.shape for t in tensors)
    return len(tensors) == len(types) and plain and all(t.shape == node.out.type.shape for t in tensors)


def _find_splat(value: Value, producers: dict[Value, Node]) -> Any:
    """The number that all elements of a tensor are, or None."""
    node = producers.get(value)
    while node is not None and node.op in (basic.broadcast_to, shape.reshape):
        node = producers.get(node.args[0])
    return node.attrs["value"] if node is not None and node.op is basic.full else None


def _count_loads(body: Block, accesses: Sequence[Node]) -> float:
    """How many elements a program loads at some nodes at most, in all rounds of its loops."""
    uses = UseDef(body)
    return sum(math.prod(map(int, n.out.type.shape)) * _count_rounds(uses, body, n) for n in accesses)  # type: ignore[union-attr]


def _count_rounds(uses: UseDef, block: Block, node: Node) -> float:
    """How often a block executes a node at most, of which it holds only one in its regions; infinity if unknown."""
    if node in block.nodes:
        return 1
    outer = next(n for n in block.nodes for region in n.regions if node in region.walk())
    inner = next(region for region in outer.regions if node in region.walk())
    if outer.op is control_flow.if_:
        return _count_rounds(uses, inner, node)
    return _bound_rounds(uses, outer) * _count_rounds(uses, inner, node) if outer.op is control_flow.for_ else math.inf


def _bound_rounds(uses: UseDef, loop: Node) -> float:
    """A bound of the iterations of a loop: its bounds may differ by a constant, or the upper be a minimum of such."""
    analysis = AffineAnalysis(uses)
    lower, step = (analysis.find_form(v) for v in (loop.args[0], loop.args[2]))
    least = uses.find(loop.args[1], e.minimum)
    found = [math.inf]
    for upper in (analysis.find_form(v) for v in (least.args if least is not None else loop.args[1:2])):
        if lower is None or upper is None or step is None:
            continue
        length = upper.plus(lower, -1)
        if length.is_constant and step.is_constant and step.constant > 0:
            found.append(max(-(-length.constant // step.constant), 0))
    return min(found)


def _list_looped(body: Block) -> set[Node]:
    loops = [n for n in body.walk() if n.op in (control_flow.for_, control_flow.while_)]
    return {n for loop in loops for r in loop.regions for n in r.walk()}


@dataclass
class _Fusion:
    """A pointwise node before a launch, which becomes part of it: the splats and the memories among its operands."""

    launch: Node
    node: Node
    splats: dict[Value, Any]
    builder: Builder

    @property
    def memories(self) -> list[Value]:
        """The operands of the node that are new operands of the launch."""
        return [v for v in dict.fromkeys(self.node.args) if v not in self.splats]

    def make_refs(self) -> dict[Value, Value]:
        """A parameter of the kernel for each of them."""
        return {v: Value(RefType(v.type.shape, v.type.dtype), v.hint or "fused") for v in self.memories}  # type: ignore[union-attr]

    def compute(self, loaded: dict[Value, Value], sizes: tuple[int, ...]) -> Value:
        """The node on blocks."""
        return _compute_blocks(self.builder, [self.node], loaded, self.splats, sizes)

    def make_launch(
        self, args: Sequence[Value], params: Sequence[Value], nodes: Sequence[Node], results: Sequence[Value],
        written: Sequence[int],
    ) -> Node:  # fmt: skip
        """The launch with another body; its name tells what it computes besides."""
        known = self.launch.attrs
        name = name_fused(known["kernel"], [self.node.op.__name__])
        attrs = Attrs({**known, "kernel": name, "written": tuple(written)})
        region = Block(tuple(params), tuple(nodes), ())
        return replace(self.launch, args=tuple(args), attrs=attrs, results=tuple(results), regions=(region,))


def _take_producer(launch: Node, number: int, node: Node, producers: dict[Value, Node]) -> Node | None:
    """The launch that computes an operand where it loads it."""
    (body,) = launch.regions
    param = body.params[number]
    accesses = [n for n in body.walk() if param in n.args]
    if not _is_fusible(node, producers) or number in launch.attrs["written"] or not accesses:
        return None
    if any(n.op is not tile.load for n in accesses):
        return None
    if not _list_looped(body).isdisjoint(accesses) and any(n.op is contractions.dot for n in body.walk()):
        return None  # copies fetch the blocks that a loop multiplies
    loads = math.prod(launch.attrs["grid"]) * _count_loads(body, accesses)
    if loads > MOST_LOADS * math.prod(map(int, param.type.shape)):  # type: ignore[union-attr]
        return None
    splats = {v: n for v in node.args if (n := _find_splat(v, producers)) is not None}
    fusion = _Fusion(launch, node, splats, Builder())
    refs, copy = fusion.make_refs(), make_copier(fusion.builder)
    if not refs:
        return None

    def place(each: Node, args: list[Value], walk: Any) -> Sequence[Value]:
        if each not in accesses:
            return copy(each, args, walk)
        with fusion.builder.at(each.loc):
            return [_load_fused(fusion, each, args, refs)]

    kept = [p for i, p in enumerate(body.params) if i != number]
    evaluate_block(replace(body, params=tuple(kept)), kept, place, {param: param})
    end = number + len(refs)
    args = [*launch.args[:number], *refs, *launch.args[number + 1 :]]
    params = [*kept[:number], *refs.values(), *kept[number:]]
    written = [i if i < number else i + end - number - 1 for i in launch.attrs["written"]]
    return fusion.make_launch(args, params, fusion.builder.block((), ()).nodes, launch.results, written)


def _load_fused(fusion: _Fusion, load: Node, args: list[Value], refs: dict[Value, Value]) -> Value:
    """A load of the operands of the node, and the node on the loaded blocks."""
    rank, sizes = load.args[0].type.rank, tuple(map(int, load.attrs["shape"]))  # type: ignore[union-attr]
    starts, rest = args[1 : 1 + rank], args[1 + rank :]
    loaded = {v: fusion.builder.add(tile.load, [ref, *starts, *rest[:1]], load.attrs).out for v, ref in refs.items()}
    found = fusion.compute(loaded, sizes)
    clips = load.attrs["edge"] == CLIP
    if not (clips or rest) or (len(rest) < 2 and _keeps_zero(fusion)):
        return found
    inside = _find_inside(fusion.builder, load, starts, rest, sizes)
    zero = fusion.builder.add(basic.full, (), {"shape": sizes, "value": 0, "dtype": found.type.dtype}).out  # type: ignore[union-attr]
    other = _broadcast(fusion.builder, rest[1], sizes) if len(rest) > 1 else zero
    return fusion.builder.add(e.where, [inside, found, other]).out


def _keeps_zero(fusion: _Fusion) -> bool:
    """Whether the node gives zero for zeros in memory, so that nothing shows of elements that are not read."""
    values = [np.array(fusion.splats.get(v, 0), v.type.dtype.numpy) for v in fusion.node.args]  # type: ignore[union-attr]
    with np.errstate(all="ignore"):
        found = np.asarray(fusion.node.op.ref(*values, **fusion.node.attrs), np.float64)
    return bool(found == 0 and not np.signbit(found))


def _find_inside(
    builder: Builder, load: Node, starts: Sequence[Value], rest: Sequence[Value], sizes: tuple[int, ...]
) -> Value:
    """The elements that a load reads from memory."""
    found = _broadcast(builder, rest[0], sizes) if rest else None
    for axis, start in enumerate(starts if load.attrs["edge"] == CLIP else ()):
        attrs = {"shape": sizes, "axis": axis - len(sizes), "dtype": int64}
        place = builder.add(e.add, [builder.add(shape.iota, (), attrs).out, _broadcast(builder, start, sizes)]).out
        limit = int(load.args[0].type.shape[axis])  # type: ignore[union-attr]
        for op, bound in ((e.less, limit), (e.greater_equal, 0)):
            attrs = {"shape": sizes, "value": bound, "dtype": int64}
            check = builder.add(op, [place, builder.add(basic.full, (), attrs).out]).out
            found = check if found is None else builder.add(e.bitwise_and, [found, check]).out
    assert found is not None
    return found


def _broadcast(builder: Builder, x: Value, sizes: tuple[int, ...]) -> Value:
    same = tuple(x.type.shape) == sizes  # type: ignore[union-attr]
    return x if same else builder.add(basic.broadcast_to, [x], {"shape": sizes}).out


def _compute_blocks(
    builder: Builder, nodes: Sequence[Node], known: dict[Value, Value], splats: dict[Value, Any], sizes: tuple[int, ...]
) -> Value:
    """The last of pointwise nodes and reshapes, on blocks of one shape that stand for tensors."""
    known = dict(known)
    for v, number in splats.items():
        attrs = {"shape": sizes, "value": number, "dtype": v.type.dtype}  # type: ignore[union-attr]
        known[v] = builder.add(basic.full, (), attrs).out
    for node in nodes:
        args = [known[v] for v in node.args]
        again = node.op is shape.reshape
        known[node.out] = args[0] if again else builder.add(node.op, args, node.attrs, loc=node.loc).out
    return known[nodes[-1].out]


@dataclass(frozen=True)
class ConsumerRegion:
    """Pointwise nodes, and reshapes between them, that make one tensor of a launch's result."""

    own: Value  # the result
    nodes: tuple[Node, ...]
    operands: dict[Value, tuple[Value, tuple[int, ...]]]  # for each from outside: a tensor, and its shape to broadcast
    splats: dict[Value, Any]

    @property
    def result(self) -> Value:
        """The tensor that is used outside."""
        return self.nodes[-1].out

    def list_reads(self) -> list[tuple[Value, tuple[int, ...]]]:
        """The tensors that are new operands of the launch, each once, with their shapes."""
        return list(dict.fromkeys(self.operands.values()))

    def compute(self, builder: Builder, block: Value, loaded: dict[Any, Value]) -> Value:
        """The nodes on a block of the launch's result."""
        sizes = tuple(map(int, block.type.shape))  # type: ignore[union-attr]
        known = {v: _broadcast(builder, loaded[read], sizes) for v, read in self.operands.items()}
        return _compute_blocks(builder, self.nodes, {self.own: block, **known}, self.splats, sizes)


@dataclass
class _RegionSearch:
    """The search for the nodes after a launch that become part of it."""

    launch: Node
    own: Value
    scope: _Scope
    operands: dict[Value, tuple[Value, tuple[int, ...]]] = field(default_factory=dict)
    splats: dict[Value, Any] = field(default_factory=dict)

    def find(self) -> ConsumerRegion | None:
        """The largest region whose last node alone is used outside: so nothing that it reads depends on it."""
        found = [] if symbol_names(self.own.type.shape) else self._list_dependent()  # type: ignore[union-attr]
        for last in reversed(found):
            if last.op is shape.reshape or last.out.type.dtype == bool_:  # type: ignore[union-attr]
                continue
            region = self._find_ancestors(last, found)
            held = {n.out for n in region[:-1]} | {self.own}
            if all(user in region for v in held for user in self.scope.uses.get(v, ())):
                return ConsumerRegion(self.own, tuple(region), *self._select_operands(region))
        return None

    def _list_dependent(self) -> list[Node]:
        """The nodes, in order, that can be computed from the launch's result."""
        found: list[Node] = []
        inside, waiting = {self.own}, [self.own]
        candidates: dict[Node, int] = {}
        while (waiting or candidates) and len(found) < MOST_CONSUMERS:
            for value in waiting:
                candidates.update({n: self.scope.places[n] for n in self.scope.uses.get(value, ()) if n is not None})
            node = min(candidates, key=candidates.__getitem__, default=None)
            waiting = []
            if node is None:
                break
            del candidates[node]
            if node not in found and self._can_compute(node, inside):
                found.append(node)
                inside.add(node.out)
                waiting = [node.out]
        return found

    def _can_compute(self, node: Node, inside: set[Value]) -> bool:
        if node.op is shape.reshape:
            return True
        return _is_pointwise(node) and all(v in inside or self._can_read(v) for v in node.args)

    def _can_read(self, value: Value) -> bool:
        """Whether the kernel can read a tensor from outside, in the shape of the launch's result."""
        if value in self.operands or value in self.splats:
            return True
        splat = _find_splat(value, self.scope.producers)
        if splat is not None:
            self.splats[value] = splat
            return True
        if value.type.dtype == bool_:  # type: ignore[union-attr]
            return False
        sizes = tuple(map(int, self.own.type.shape))  # type: ignore[union-attr]
        found = find_broadcast(value, self.scope.producers, sizes)
        if found is not None:
            self.operands[value] = found
        return found is not None

    def _find_ancestors(self, last: Node, found: Sequence[Node]) -> list[Node]:
        needed, region = {last.out}, []
        for node in reversed(found):
            if node.out in needed:
                region.append(node)
                needed.update(node.args)
        return region[::-1]

    def _select_operands(self, region: Sequence[Node]) -> tuple[dict[Value, Any], dict[Value, Any]]:
        used = {v for n in region for v in n.args}
        return tuple({v: x for v, x in held.items() if v in used} for held in (self.operands, self.splats))  # type: ignore[return-value]


def find_broadcast(
    value: Value, producers: dict[Value, Node], sizes: tuple[int, ...]
) -> tuple[Value, tuple[int, ...]] | None:
    """A tensor that has the elements of a value, and the shape in which it broadcasts to `sizes`; or None."""
    node = producers.get(value)
    while node is not None and node.op is shape.reshape:
        value = node.args[0]
        node = producers.get(value)
    if node is None or node.op is not basic.broadcast_to:
        return value, sizes
    (inner,), whole = node.args, tuple(map(int, value.type.shape))  # type: ignore[union-attr]
    held = tuple(map(int, inner.type.shape))  # type: ignore[union-attr]
    kept = regroup_axes((1,) * (len(whole) - len(held)) + held, whole, sizes)
    return None if kept is None else (inner, kept)


def regroup_axes(held: tuple[int, ...], whole: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[int, ...] | None:
    """The shape that broadcasts to `sizes` as `held` does to `whole`, a reshape of `sizes`; None if there is none.

    >>> regroup_axes((1, 6, 1, 1), (2, 6, 4, 5), (2, 6, 20)), regroup_axes((1, 6), (4, 6), (24,))
    ((1, 6, 1), None)
    """
    found: list[int] = []
    i = j = 0
    while i < len(whole) or j < len(sizes):
        first, begin, left, right = i, j, 1, 1
        while (i, j) == (first, begin) or left != right:  # the next axes of both with as many elements
            if i < len(whole) and (left <= right or j == len(sizes)):
                left, i = left * whole[i], i + 1
            else:
                right, j = right * sizes[j], j + 1
        if held[first:i] == whole[first:i]:
            found.extend(sizes[begin:j])
        elif all(n == 1 for n in held[first:i]):
            found.extend([1] * (j - begin))
        else:
            return None
    return tuple(found)


def _take_consumers(launch: Node, number: int, region: ConsumerRegion) -> list[Node] | None:
    """The launch that stores what a region makes of its result, with the reshapes around it; None if it cannot."""
    (body,), count, at = launch.regions, len(launch.args), launch.attrs["written"][number]
    param, own = body.params[at], region.own
    stores = [n for n in body.walk() if param in n.args]
    if at < count or param.type.policy is not None or not stores:  # type: ignore[union-attr]
        return None
    if any(n.op is not tile.store for n in stores) or not _list_looped(body).isdisjoint(stores):
        return None
    stored = math.prod(launch.attrs["grid"]) * sum(math.prod(map(int, n.args[1].type.shape)) for n in stores)  # type: ignore[union-attr]
    if stored < math.prod(map(int, param.type.shape)):  # type: ignore[union-attr]
        return None  # what is not stored would be another value after the op
    reads, sizes = region.list_reads(), tuple(map(int, own.type.shape))  # type: ignore[union-attr]
    if any(shaped != sizes for _, shaped in reads) and any(len(n.args) > 2 + len(sizes) for n in stores):
        return None  # a mask has the shape of what is stored
    builder, result = Builder(), region.result.type
    copy = make_copier(builder)
    refs = {r: Value(RefType(r[1], r[0].type.dtype), r[0].hint or "fused") for r in reads}  # type: ignore[union-attr]
    out = Value(RefType(param.type.shape, result.dtype), param.hint)  # type: ignore[union-attr]

    def place(each: Node, args: list[Value], walk: Any) -> Sequence[Value]:
        if each not in stores:
            return copy(each, args, walk)
        with builder.at(each.loc):
            loaded = {r: _load_broadcast(builder, each, args, ref, sizes) for r, ref in refs.items()}
            found = region.compute(builder, args[1], loaded)
            return builder.add(tile.store, [out, found, *args[2:]], each.attrs).results

    params = [out if p is param else p for p in body.params]
    evaluate_block(body, params, place)
    params = [*params[:count], *refs.values(), *params[count:]]
    kernel = Block(tuple(params), builder.block((), ()).nodes, ())
    return _make_fused_launch(launch, number, region, kernel)


def _load_broadcast(builder: Builder, store: Node, args: list[Value], ref: Value, sizes: tuple[int, ...]) -> Value:
    """The block of a new operand that a store's block meets: one element along the axes on which it broadcasts."""
    kept, starts = ref.type.shape, args[2 : 2 + len(sizes)]  # type: ignore[union-attr]
    one = [k == 1 != n for k, n in zip(kept, sizes, strict=True)]
    if any(one):
        zero = builder.add(basic.full, (), {"shape": (), "value": 0, "dtype": int64}).out
        starts = [zero if alone else start for alone, start in zip(one, starts, strict=True)]
    block = tuple(1 if alone else int(n) for alone, n in zip(one, args[1].type.shape, strict=True))  # type: ignore[union-attr]
    rest = args[2 + len(sizes) :]
    return builder.add(tile.load, [ref, *starts, *rest], {**store.attrs, "shape": block}).out


def _make_fused_launch(launch: Node, number: int, region: ConsumerRegion, kernel: Block) -> list[Node]:
    reads, known, result, builder = region.list_reads(), launch.attrs, region.result, Builder()
    with builder.at(launch.loc):
        args = [
            v if tuple(v.type.shape) == n else builder.add(shape.reshape, [v], {"shape": n}).out  # type: ignore[union-attr]
            for v, n in reads
        ]
    count, sizes = len(launch.args), tuple(region.own.type.shape)  # type: ignore[union-attr]
    written = tuple(i if i < count else i + len(reads) for i in known["written"])
    ops = [n.op.__name__ for n in region.nodes if n.op is not shape.reshape]
    attrs = Attrs({**known, "kernel": name_fused(known["kernel"], ops), "written": written})
    same = tuple(result.type.shape) == sizes  # type: ignore[union-attr]
    made = result if same else Value(TensorType(sizes, result.type.dtype))  # type: ignore[union-attr]
    results = tuple(made if i == number else v for i, v in enumerate(launch.results))
    builder.append(replace(launch, args=(*launch.args, *args), attrs=attrs, results=results, regions=(kernel,)))
    if not same:
        attrs = Attrs({"shape": tuple(result.type.shape)})  # type: ignore[union-attr]
        builder.append(Node(shape.reshape, (made,), attrs, (result,), (), launch.loc))
    return list(builder.block((), ()).nodes)


def name_fused(kernel: str, ops: Sequence[str]) -> str:
    """The name of a launch that computes some ops besides: it names the first ones.

    >>> name_fused("scale", ["exp", "mul"]), name_fused("scale_with_exp", ["add"])
    ('scale_with_exp_mul', 'scale_with_exp_add')
    """
    name, _, before = kernel.partition("_with_")
    return f"{name}_with_{'_'.join([*(before and [before]), *ops][:NAMED_OPS])}"

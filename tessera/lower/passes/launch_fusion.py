"""Launch fusion: pointwise producers and consumers of a kernel's memories become part of its loads and stores.

As the epilogues of products (CUTLASS): a tensor that only the launch uses, or that the launch alone makes for one
pointwise op, is then never in memory. A producer is taken in if its elements are not loaded in a loop nor by many
programs, and a consumer if its memory is only stored to, outside of loops.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tessera.core.symbolic_dim import symbol_names
from tessera.core.types import RefType, TensorType, bool_, int64
from tessera.ir.builder import Builder, evaluate_block, make_copier
from tessera.ir.core import Attrs, Block, Function, Node, Value
from tessera.ops.dialects import control_flow, tile
from tessera.ops.tensor import basic, shape
from tessera.ops.tensor import elementwise as e

MOST_LOADS = 2  # how often programs may load an element of a tensor that is computed where it is loaded
CLIP = "clip"


def fuse_launches(function: Function) -> Function:
    """A Graph function whose launches compute their pointwise producers and consumers."""
    if not any(n.op is control_flow.launch for n in function.body.walk()):
        return function
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
    producers = {v: n for n in block.nodes for v in n.results}
    uses: dict[Value, list[Node | None]] = {}
    for each in block.nodes:
        for value in each.args:
            uses.setdefault(value, []).append(each)
    for value in block.results:
        uses.setdefault(value, []).append(None)
    for launch in block.nodes:
        if launch.op is not control_flow.launch or not _is_plain(launch):
            continue
        for number, value in enumerate(launch.args):
            node = producers.get(value)
            if len(uses[value]) == 1 and node is not None and (made := _take_producer(launch, number, node, producers)):
                return [made if n is launch else n for n in block.nodes if n is not node]
        for number, value in enumerate(launch.results):
            users = uses.get(value, [])
            user = users[0] if users and all(u is users[0] for u in users) else None
            alone = all(not uses.get(v) for v in launch.results if v is not value)
            if user is not None and alone and (made := _take_consumer(launch, number, user, producers)):
                return [made if n is user else n for n in block.nodes if n is not launch]
    return None


def _is_plain(launch: Node) -> bool:
    """Whether a launch has a known grid, and groups of one tile, which all execute every node."""
    known = launch.attrs
    return known["attrs"].get("group", 1) == 1 and all(isinstance(n, int) for n in known["grid"])


def _is_fusible(node: Node) -> bool:
    """Whether a node is pointwise on tensors of one known shape, in formats without a policy of their own."""
    types = [v.type for v in (*node.args, *node.results)]
    if not node.op.pointwise or node.op.effects or len(node.results) != 1 or not node.out.type.shape:
        return False
    tensors = [t for t in types if isinstance(t, TensorType)]
    plain = all(t.policy is None and t.dtype != bool_ and not symbol_names(t.shape) for t in tensors)
    return len(tensors) == len(types) and plain and all(t.shape == node.out.type.shape for t in tensors)


def _find_splat(value: Value, producers: dict[Value, Node]) -> Any:
    """The number that all elements of a tensor are, or None."""
    node = producers.get(value)
    while node is not None and node.op in (basic.broadcast_to, shape.reshape):
        node = producers.get(node.args[0])
    return node.attrs["value"] if node is not None and node.op is basic.full else None


def _list_looped(body: Block) -> set[Node]:
    loops = [n for n in body.walk() if n.op in (control_flow.for_, control_flow.while_)]
    return {n for loop in loops for r in loop.regions for n in r.walk()}


@dataclass
class _Fusion:
    """A pointwise node and a launch that becomes one: the splats and the memories among the node's other operands."""

    launch: Node
    node: Node
    own: Value  # the tensor between the two
    splats: dict[Value, Any]
    builder: Builder

    @property
    def memories(self) -> list[Value]:
        """The operands of the node that are new operands of the launch."""
        return [v for v in dict.fromkeys(self.node.args) if v not in self.splats and v is not self.own]

    def make_refs(self) -> dict[Value, Value]:
        """A parameter of the kernel for each of them."""
        return {v: Value(RefType(v.type.shape, v.type.dtype), v.hint or "fused") for v in self.memories}  # type: ignore[union-attr]

    def compute(self, loaded: dict[Value, Value], sizes: tuple[int, ...]) -> Value:
        """The node on blocks."""
        blocks = []
        for value in self.node.args:
            if value in self.splats:
                attrs = {"shape": sizes, "value": self.splats[value], "dtype": value.type.dtype}  # type: ignore[union-attr]
                blocks.append(self.builder.add(basic.full, (), attrs).out)
            else:
                blocks.append(loaded[value])
        return self.builder.add(self.node.op, blocks, self.node.attrs, loc=self.node.loc).out

    def make_launch(
        self, args: Sequence[Value], params: Sequence[Value], nodes: Sequence[Node], results: Sequence[Value],
        written: Sequence[int],
    ) -> Node:  # fmt: skip
        """The launch with another body; its name tells what it computes besides."""
        known = self.launch.attrs
        name = known["kernel"] if "_with_" in known["kernel"] else f"{known['kernel']}_with"
        attrs = Attrs({**known, "kernel": f"{name}_{self.node.op.__name__}", "written": tuple(written)})
        region = Block(tuple(params), tuple(nodes), ())
        return replace(self.launch, args=tuple(args), attrs=attrs, results=tuple(results), regions=(region,))


def _plan(launch: Node, node: Node, own: Value, producers: dict[Value, Node]) -> _Fusion:
    splats = {v: n for v in node.args if v is not own and (n := _find_splat(v, producers)) is not None}
    return _Fusion(launch, node, own, splats, Builder())


def _take_producer(launch: Node, number: int, node: Node, producers: dict[Value, Node]) -> Node | None:
    """The launch that computes an operand where it loads it."""
    (body,) = launch.regions
    param = body.params[number]
    accesses = [n for n in body.walk() if param in n.args]
    if not _is_fusible(node) or number in launch.attrs["written"] or not accesses:
        return None
    loads = math.prod(launch.attrs["grid"]) * sum(math.prod(map(int, n.out.type.shape)) for n in accesses if n.results)
    if any(n.op is not tile.load for n in accesses) or not _list_looped(body).isdisjoint(accesses):
        return None
    if loads > MOST_LOADS * math.prod(map(int, param.type.shape)):  # type: ignore[union-attr]
        return None
    fusion = _plan(launch, node, node.out, producers)
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


def _take_consumer(launch: Node, number: int, node: Node, producers: dict[Value, Node]) -> Node | None:
    """The launch that stores what a pointwise op makes of its result."""
    (body,), count, at = launch.regions, len(launch.args), launch.attrs["written"][number]
    param, own = body.params[at], launch.results[number]
    stores = [n for n in body.walk() if param in n.args]
    if not _is_fusible(node) or at < count or param.type.policy is not None or not stores:  # type: ignore[union-attr]
        return None
    if any(n.op is not tile.store for n in stores) or not _list_looped(body).isdisjoint(stores):
        return None
    if any(v in launch.results and v is not own for v in node.args):
        return None
    stored = math.prod(launch.attrs["grid"]) * sum(math.prod(map(int, n.args[1].type.shape)) for n in stores)  # type: ignore[union-attr]
    if stored < math.prod(map(int, param.type.shape)):  # type: ignore[union-attr]
        return None  # what is not stored would be another value after the op
    fusion = _plan(launch, node, own, producers)
    refs, copy = fusion.make_refs(), make_copier(fusion.builder)
    out = Value(RefType(param.type.shape, node.out.type.dtype), param.hint)  # type: ignore[union-attr]

    def place(each: Node, args: list[Value], walk: Any) -> Sequence[Value]:
        if each not in stores:
            return copy(each, args, walk)
        with fusion.builder.at(each.loc):
            sizes = tuple(map(int, args[1].type.shape))  # type: ignore[union-attr]
            attrs = {**each.attrs, "shape": sizes}
            loaded = {v: fusion.builder.add(tile.load, [ref, *args[2:]], attrs).out for v, ref in refs.items()}
            found = fusion.compute({**loaded, own: args[1]}, sizes)
            return fusion.builder.add(tile.store, [out, found, *args[2:]], each.attrs).results

    params = [out if p is param else p for p in body.params]
    evaluate_block(body, params, place)
    params = [*params[:count], *refs.values(), *params[count:]]
    written = [i if i < count else i + len(refs) for i in launch.attrs["written"]]
    results = [node.out if v is own else v for v in launch.results]
    return fusion.make_launch([*launch.args, *refs], params, fusion.builder.block((), ()).nodes, results, written)

"""Batching of kernel launches: the examples of a batch are one more extent of the grid's first axis.

Each memory that differs between examples gets a leading axis, and each access to it a leading index: the example that
the program works on. A kernel with an access that cannot be extended so is launched for one example after the other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tessera.core.symbolic_dim import Dim, Size
from tessera.core.types import RefType, TensorType
from tessera.ir.builder import Builder, Evaluation, make_copier
from tessera.ir.core import Attrs, Block, Node, Value
from tessera.ir.rules import Rules
from tessera.ops.dialects import control_flow, tile
from tessera.ops.tensor import elementwise as e
from tessera.ops.tensor.basic import dim_value, full
from tessera.ops.tensor.shape import reshape
from tessera.transforms.batching import BatchValue, broadcast_to_batch, call_batching_rules
from tessera.transforms.flow.region_ops import bind_region_op, bind_scan

# rule(rewriter, node, args) adds the access with the example's index; the refs that differ are among `args`.
access_rules = Rules("batched access")
IDENTITY_OPS = (tile.program_id, tile.grid_size)


@dataclass(frozen=True)
class KernelBatcher:
    """A tile function that is being rewritten for a batch: the builder, the example's index, and the batched refs."""

    builder: Builder
    example: Value
    program: Value
    extent: Size
    batched: frozenset[Value]

    def constant(self, value: Size) -> Value:
        """An int64 constant, or the value of a symbolic size."""
        if isinstance(value, Dim):
            return self.builder.add(dim_value, [], {"size": value}).out
        return self.builder.add(full, [], {"shape": (), "value": value, "dtype": tile.INDEX_TYPE.dtype}).out

    def rewrite(self, node: Node, args: list[Value], walk: Any) -> Sequence[Value]:
        """A node of the kernel, for one example."""
        if node.op in IDENTITY_OPS and node.attrs["axis"] == 0:
            return [self.program if node.op is tile.program_id else self.constant(self.extent)]
        if self.batched.isdisjoint(args):
            return make_copier(self.builder)(node, args, walk)
        with self.builder.at(node.loc):
            return access_rules.of(node.op)(self, node, args)

    def keep_vector(self, node: Node, ref: Value) -> int:
        """The alignment of an access, in elements, that the leading axis leaves."""
        example = math.prod(ref.type.shape[1:])
        return 1 if isinstance(example, Dim) else math.gcd(node.attrs["vector"], example)

    def add_axis(self, block: Value) -> Value:
        """A block with a leading axis; a scalar as it is."""
        if not block.type.shape:
            return block
        return self.builder.add(reshape, [block], {"shape": (1, *block.type.shape)}).out


@access_rules(tile.load)
def _(batcher: KernelBatcher, node: Node, args: list[Value]) -> Sequence[Value]:
    ref, shape, rank = args[0], node.attrs["shape"], node.args[0].type.rank  # type: ignore[union-attr]
    starts, masks = args[1 : 1 + rank], [batcher.add_axis(v) for v in args[1 + rank :]]
    attrs = {**node.attrs, "shape": (1, *shape), "vector": batcher.keep_vector(node, ref)}
    block = batcher.builder.add(tile.load, [ref, batcher.example, *starts, *masks], attrs).out
    return [batcher.builder.add(reshape, [block], {"shape": shape}).out]


@access_rules(tile.store)
def _(batcher: KernelBatcher, node: Node, args: list[Value]) -> Sequence[Value]:
    ref, value, rank = args[0], args[1], node.args[0].type.rank  # type: ignore[union-attr]
    block = batcher.builder.add(reshape, [value], {"shape": (1, *value.type.shape)}).out
    starts, masks = args[2 : 2 + rank], [batcher.add_axis(v) for v in args[2 + rank :]]
    attrs = {**node.attrs, "vector": batcher.keep_vector(node, ref)}
    batcher.builder.add(tile.store, [ref, block, batcher.example, *starts, *masks], attrs)
    return []


@access_rules(tile.gather, tile.scatter, tile.atomic, tile.compare_exchange)
def _(batcher: KernelBatcher, node: Node, args: list[Value]) -> Sequence[Value]:
    values = {tile.gather: 0, tile.compare_exchange: 2}.get(node.op, 1)  # operands between the ref and the indices
    extended = [*args[: 1 + values], batcher.example, *args[1 + values :]]
    return batcher.builder.add(node.op, extended, node.attrs).results


@access_rules(tile.async_copy)
def _(batcher: KernelBatcher, node: Node, args: list[Value]) -> Sequence[Value]:
    dst, src, *starts = args
    cut = node.args[0].type.rank  # type: ignore[union-attr]
    ends = [(starts[:cut], dst), (starts[cut:], src)]
    listed = [[batcher.example, *s] if ref in batcher.batched else s for s, ref in ends]
    rank = max(dst.type.rank, src.type.rank)  # type: ignore[union-attr]
    shape = (*[1] * (rank - len(node.attrs["shape"])), *node.attrs["shape"])
    batcher.builder.add(tile.async_copy, [dst, src, *listed[0], *listed[1]], {**node.attrs, "shape": shape})
    return []


def can_batch(node: Node) -> bool:
    """Whether every access of a launch to its memories can be extended by an index."""
    (body,) = node.regions
    refs = frozenset(body.params)
    return all(n.op in access_rules for n in body.walk() if not refs.isdisjoint(n.args))


def batch_body(node: Node, batched: Sequence[bool], size: Size) -> tuple[Block, tuple[Size, ...]]:
    """The body of a launch for a batch of examples, and its grid."""
    (body,), grid = node.regions, tuple(node.attrs["grid"]) or (1,)
    builder = Builder()
    params = [
        Value(RefType((size, *p.type.shape), p.type.dtype, policy=p.type.policy) if b else p.type, p.hint)  # type: ignore[union-attr]
        for p, b in zip(body.params, batched, strict=True)
    ]
    with builder.at(node.loc):
        index = builder.add(tile.program_id, [], {"axis": 0}).out
        scratch = KernelBatcher(builder, index, index, grid[0], frozenset())
        extent = scratch.constant(grid[0])
        example = builder.add(e.floor_divide, [index, extent]).out
        program = builder.add(e.remainder, [index, extent]).out
    varying = frozenset(p for p, b in zip(params, batched, strict=True) if b)
    batcher = KernelBatcher(builder, example, program, grid[0], varying)
    Evaluation(batcher.rewrite, {})(body, *params)
    return builder.block(params, ()), (size * grid[0], *grid[1:])


@call_batching_rules(control_flow.launch)
def _(node: Node, lanes: list[BatchValue], walk: Any, size: Any) -> Sequence[BatchValue]:
    written, params = node.attrs["written"], node.regions[0].params
    if not can_batch(node):
        return _launch_in_sequence(node, lanes, size)
    batched = [i in written or (i < len(lanes) and lanes[i].batched) for i in range(len(params))]
    operands = [
        broadcast_to_batch(lane.tensor, size) if b and not lane.batched else lane.tensor
        for lane, b in zip(lanes, batched, strict=False)
    ]
    body, grid = batch_body(node, batched, size)
    hints = Attrs({k: v for k, v in node.attrs["attrs"].items() if k != "cluster"})  # clusters are of one example
    types = [TensorType(p.type.shape, p.type.dtype, p.type.policy) for p in (body.params[i] for i in written)]  # type: ignore[union-attr]
    attrs = {**node.attrs, "grid": grid, "attrs": hints}
    return [BatchValue(t, True) for t in bind_region_op(control_flow.launch, operands, attrs, [body], types)]


def _launch_in_sequence(node: Node, lanes: list[BatchValue], size: Any) -> Sequence[BatchValue]:
    """The launch for one example after the other."""
    flags = [lane.batched for lane in lanes]
    stacks = [lane.tensor for lane in lanes if lane.batched]
    shared = [lane.tensor for lane in lanes if not lane.batched]

    def step(tensors: list[Any]) -> list[Any]:
        varying, fixed = iter(tensors[: len(stacks)]), iter(tensors[len(stacks) :])
        operands = [next(varying) if flag else next(fixed) for flag in flags]
        return bind_region_op(node.op, operands, node.attrs, node.regions, node.result_types)

    return [BatchValue(t, True) for t in bind_scan(step, [], stacks, shared, size)]

"""Batching rules of control flow: scan, cond and while_loop under vmap.

A batched while_loop runs until every example is done; finished examples keep their state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tessera.core.symbolic_dim import Size
from tessera.core.types import TensorType
from tessera.ir.core import Block, Node
from tessera.ir.tensor import Tensor
from tessera.ops.dialects import control_flow
from tessera.ops.tensor.elementwise import where
from tessera.ops.tensor.reduce import any as any_of
from tessera.ops.tensor.shape import permute, reshape
from tessera.transforms.batching import BatchValue, batch_block, broadcast_to_batch
from tessera.transforms.batching import call_batching_rules as batched
from tessera.transforms.flow.derivative_rules import ScanLayout
from tessera.transforms.flow.region_ops import bind_cond, bind_scan, bind_while
from tessera.transforms.recording import record_block

BatchedFlags = list[bool]


def _batched_type(type: TensorType, flag: bool, size: Size) -> TensorType:
    return type.with_shape((size, *type.shape)) if flag else type


def _broadcast_value(lane: BatchValue, size: Size) -> Tensor:
    return lane.tensor if lane.batched else broadcast_to_batch(lane.tensor, size)


def _make_batch_values(tensors: Sequence[Tensor], flags: BatchedFlags) -> list[BatchValue]:
    return [BatchValue(t, f) for t, f in zip(tensors, flags, strict=True)]


def _select_tensors(lanes: Sequence[BatchValue], flags: BatchedFlags, size: Size) -> list[Tensor]:
    """Lanes as tensors, with a leading axis where the flag is set."""
    return [_broadcast_value(lane, size) if f else lane.tensor for lane, f in zip(lanes, flags, strict=True)]


def find_batched_results(block: Block, flags: BatchedFlags, size: Size) -> BatchedFlags:
    """The results of a block that vary between examples, if these parameters do."""
    found: BatchedFlags = []

    def run(tensors: list[Tensor]) -> list[Tensor]:
        outs = batch_block(block, _make_batch_values(tensors, flags), size)
        found[:] = [o.batched for o in outs]
        return [o.tensor for o in outs]

    record_block(run, [_batched_type(p.type, f, size) for p, f in zip(block.params, flags, strict=True)])  # type: ignore[arg-type]
    return found


def find_batched_carry(block: Block, flags: BatchedFlags, carry: int, size: Size) -> tuple[BatchedFlags, BatchedFlags]:
    """`differing`, extended by the carried values that begin to vary in a step."""
    while True:
        found = find_batched_results(block, flags, size)
        grown = [a or b for a, b in zip(flags[:carry], found[:carry], strict=True)] + flags[carry:]
        if grown == flags:
            return flags, found
        flags = grown


@batched(control_flow.scan)
def _(node: Node, lanes: list[BatchValue], walk: Any, size: Any) -> Sequence[BatchValue]:
    parts, block = ScanLayout.of(node), node.regions[0]
    flags, found = find_batched_carry(block, [x.batched for x in lanes], parts.carry, size)
    carry, xs, consts = parts.split(lanes)
    kept = [*flags[: parts.carry], *found[parts.carry :]]

    def step(tensors: list[Tensor]) -> list[Tensor]:
        return _select_tensors(batch_block(block, _make_batch_values(tensors, flags), size), kept, size)

    start = _select_tensors(carry, flags[: parts.carry], size)
    stacks = [_swap_leading_axes(x.tensor) if x.batched else x.tensor for x in xs]
    outs = bind_scan(step, start, stacks, [c.tensor for c in consts], node.attrs["length"], node.attrs["reverse"])
    results = [_swap_leading_axes(y) if f else y for y, f in zip(outs[parts.carry :], kept[parts.carry :], strict=True)]
    return _make_batch_values([*outs[: parts.carry], *results], kept)


def _swap_leading_axes(x: Tensor) -> Tensor:
    """Exchange the axes of lanes and steps: the first two."""
    return permute(x, axes=(1, 0, *range(2, x.ndim)))


@batched(control_flow.cond)
def _(node: Node, lanes: list[BatchValue], walk: Any, size: Any) -> Sequence[BatchValue]:
    condition, operands = lanes[0], lanes[1:]
    if condition.batched:
        both = [batch_block(block, operands, size) for block in node.regions]
        pairs = zip(*both, strict=True)
        return [
            BatchValue(
                _select_per_example(condition.tensor, _broadcast_value(a, size), _broadcast_value(b, size)), True
            )
            for a, b in pairs
        ]
    flags = [x.batched for x in operands]
    found = [find_batched_results(block, flags, size) for block in node.regions]
    kept = [any(each) for each in zip(*found, strict=True)]

    def branch(block: Block) -> Callable[[list[Tensor]], list[Tensor]]:
        return lambda tensors: _select_tensors(batch_block(block, _make_batch_values(tensors, flags), size), kept, size)

    outs = bind_cond(condition.tensor, [branch(b) for b in node.regions], [x.tensor for x in operands])
    return _make_batch_values(outs, kept)


def _select_per_example(condition: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """`first` in the examples where the condition holds."""
    return where(reshape(condition, shape=(*condition.shape, *[1] * (first.ndim - 1))), first, second)


@batched(control_flow.while_loop)
def _(node: Node, lanes: list[BatchValue], walk: Any, size: Any) -> Sequence[BatchValue]:
    count, end = node.attrs["carry"], node.attrs["carry"] + node.attrs["test"]
    test, body = node.regions
    carry, asked, consts = lanes[:count], lanes[count:end], lanes[end:]
    flags = find_batched_carry(body, [x.batched for x in (*carry, *consts)], count, size)[0][:count]
    if any(find_batched_results(test, [*flags, *(x.batched for x in asked)], size)):
        flags = [True] * count

    def ask(tensors: Sequence[Tensor]) -> BatchValue:
        return batch_block(test, [*_make_batch_values(tensors, flags), *asked], size)[0]

    def step(tensors: list[Tensor]) -> list[Tensor]:
        outs = _select_tensors(batch_block(body, [*_make_batch_values(tensors, flags), *consts], size), flags, size)
        goes_on = ask(tensors)
        if not goes_on.batched:
            return outs
        return [_select_per_example(goes_on.tensor, new, old) for new, old in zip(outs, tensors, strict=True)]

    def go_on(tensors: list[Tensor]) -> Tensor:
        found = ask(tensors)
        return any_of(found.tensor) if found.batched else found.tensor

    return _make_batch_values(bind_while(go_on, step, _select_tensors(carry, flags, size)), flags)

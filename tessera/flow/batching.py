"""vmap of loops and branches: a loop carries the examples side by side, and stops for each where it would alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tessera.autodiff.record import record
from tessera.batching import Lane, repeated, spread_out
from tessera.batching import calls as batched
from tessera.flow.nodes import cond_of, scan_of, while_of
from tessera.flow.scan_derivative import Parts
from tessera.ir.core import Block, Node
from tessera.ops import flow
from tessera.ops.elementwise import where
from tessera.ops.shape import permute, reshape
from tessera.ops.statistics import any as any_of
from tessera.shapes import Size
from tessera.tensor import Tensor
from tessera.types import TensorType

Flags = list[bool]


def _wide(type: TensorType, flag: bool, size: Size) -> TensorType:
    return type.with_shape((size, *type.shape)) if flag else type


def _spread(lane: Lane, size: Size) -> Tensor:
    return lane.tensor if lane.batched else repeated(lane.tensor, size)


def _lanes(tensors: Sequence[Tensor], flags: Flags) -> list[Lane]:
    return [Lane(t, f) for t, f in zip(tensors, flags, strict=True)]


def _chosen(lanes: Sequence[Lane], flags: Flags, size: Size) -> list[Tensor]:
    """Lanes as tensors, with a leading axis where a flag says so."""
    return [_spread(lane, size) if f else lane.tensor for lane, f in zip(lanes, flags, strict=True)]


def differing(block: Block, flags: Flags, size: Size) -> Flags:
    """Which results of a block differ between examples, where these parameters do."""
    found: Flags = []

    def run(tensors: list[Tensor]) -> list[Tensor]:
        outs = spread_out(block, _lanes(tensors, flags), size)
        found[:] = [o.batched for o in outs]
        return [o.tensor for o in outs]

    record(run, [_wide(p.type, f, size) for p, f in zip(block.params, flags, strict=True)])  # type: ignore[arg-type]
    return found


def settle(block: Block, flags: Flags, carry: int, size: Size) -> tuple[Flags, Flags]:
    """`differing`, with each carried value that a step makes differ differing from the start."""
    while True:
        found = differing(block, flags, size)
        grown = [a or b for a, b in zip(flags[:carry], found[:carry], strict=True)] + flags[carry:]
        if grown == flags:
            return flags, found
        flags = grown


@batched(flow.scan)
def _(node: Node, lanes: list[Lane], walk: Any, size: Any) -> Sequence[Lane]:
    parts, block = Parts.of(node), node.regions[0]
    flags, found = settle(block, [x.batched for x in lanes], parts.carry, size)
    carry, xs, consts = parts.split(lanes)
    kept = [*flags[: parts.carry], *found[parts.carry :]]

    def step(tensors: list[Tensor]) -> list[Tensor]:
        return _chosen(spread_out(block, _lanes(tensors, flags), size), kept, size)

    start = _chosen(carry, flags[: parts.carry], size)
    stacks = [_swapped(x.tensor) if x.batched else x.tensor for x in xs]
    outs = scan_of(step, start, stacks, [c.tensor for c in consts], node.attrs["length"], node.attrs["reverse"])
    results = [_swapped(y) if f else y for y, f in zip(outs[parts.carry :], kept[parts.carry :], strict=True)]
    return _lanes([*outs[: parts.carry], *results], kept)


def _swapped(x: Tensor) -> Tensor:
    """Lanes and steps in each other's place: the first two axes."""
    return permute(x, axes=(1, 0, *range(2, x.ndim)))


@batched(flow.cond)
def _(node: Node, lanes: list[Lane], walk: Any, size: Any) -> Sequence[Lane]:
    condition, operands = lanes[0], lanes[1:]
    if condition.batched:
        both = [spread_out(block, operands, size) for block in node.regions]
        pairs = zip(*both, strict=True)
        return [Lane(_either(condition.tensor, _spread(a, size), _spread(b, size)), True) for a, b in pairs]
    flags = [x.batched for x in operands]
    found = [differing(block, flags, size) for block in node.regions]
    kept = [any(each) for each in zip(*found, strict=True)]

    def branch(block: Block) -> Callable[[list[Tensor]], list[Tensor]]:
        return lambda tensors: _chosen(spread_out(block, _lanes(tensors, flags), size), kept, size)

    outs = cond_of(condition.tensor, [branch(b) for b in node.regions], [x.tensor for x in operands])
    return _lanes(outs, kept)


def _either(condition: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """`first` in the examples where the condition holds."""
    return where(reshape(condition, shape=(*condition.shape, *[1] * (first.ndim - 1))), first, second)


@batched(flow.while_loop)
def _(node: Node, lanes: list[Lane], walk: Any, size: Any) -> Sequence[Lane]:
    count, end = node.attrs["carry"], node.attrs["carry"] + node.attrs["test"]
    test, body = node.regions
    carry, asked, consts = lanes[:count], lanes[count:end], lanes[end:]
    flags = settle(body, [x.batched for x in (*carry, *consts)], count, size)[0][:count]
    if any(differing(test, [*flags, *(x.batched for x in asked)], size)):
        flags = [True] * count

    def ask(tensors: Sequence[Tensor]) -> Lane:
        return spread_out(test, [*_lanes(tensors, flags), *asked], size)[0]

    def step(tensors: list[Tensor]) -> list[Tensor]:
        outs = _chosen(spread_out(body, [*_lanes(tensors, flags), *consts], size), flags, size)
        goes_on = ask(tensors)
        if not goes_on.batched:
            return outs
        return [_either(goes_on.tensor, new, old) for new, old in zip(outs, tensors, strict=True)]

    def go_on(tensors: list[Tensor]) -> Tensor:
        found = ask(tensors)
        return any_of(found.tensor) if found.batched else found.tensor

    return _lanes(while_of(go_on, step, _chosen(carry, flags, size)), flags)

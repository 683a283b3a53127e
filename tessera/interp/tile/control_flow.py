"""Divergent control flow: branches and loops of all program instances (SIMT divergence and reconvergence).

Instances run together where they agree, else by contiguous ranges or under masks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np

from tessera.interp.tile import cooperative_scheduler
from tessera.interp.tile.affine import AffineScalar
from tessera.interp.tile.machine import (
    InstanceRange,
    TileMachine,
    concatenate_ranges,
    find_contiguous_range,
    run_on_range,
    select_by_mask,
)
from tessera.interp.tile.memory import InstanceMemory
from tessera.ir.core import Block, Node, Value
from tessera.ir.numerics.interval_arithmetic import IntervalArray, require_exact
from tessera.ir.rules import Rules
from tessera.lower.passes.tail_duplication import DivergenceAnalysis, find_lockstep_width
from tessera.ops.dialects import control_flow


def waits_diverge(machine: TileMachine, node: Node, env: Mapping[Value, Any]) -> bool:
    """Whether a wait in a branch may be at different mbarriers or parities in the tiles of a group.

    A value that is not in `env` is a constant.
    """
    found = DivergenceAnalysis(
        {v for region in node.regions for v in region.free if v in env and _varies_in_group(machine, env[v])}
    )
    for region in node.regions:
        found.walk(region)
    return found.uneven


def _varies_in_group(machine: TileMachine, held: Any) -> bool:
    """Whether a value differs between the tiles of a group."""
    if isinstance(held, AffineScalar):
        return bool(held.steps[-1])
    array = held.array if isinstance(held, InstanceMemory) else held
    array = array.value if isinstance(array, IntervalArray) else array
    own = not isinstance(held, InstanceMemory) or held.lead > 0
    return own and array.ndim >= machine.rank and array.shape[machine.rank - 1] > 1


control_flow_rules = Rules("tile control flow")


def _to_scalar(array: np.ndarray) -> Any:
    return array.reshape(()).item()


@control_flow_rules(control_flow.if_)
def _(machine, node, args, walk):
    condition, (then, other) = require_exact(args[0]), node.regions
    if condition.size == 1:
        return walk(then if _to_scalar(condition) else other)
    yes, no = machine.live(condition), machine.live(~condition)
    waits = machine.group > 1 and cooperative_scheduler.has_waits(then, other)
    if waits and (
        node.attrs.get("apart") or waits_diverge(machine, node, walk.env)
    ):  # the tiles wait for different phases
        return _run_interleaved(machine, machine.split_masks((yes, no), find_lockstep_width(then, other)), node, walk)
    if not np.count_nonzero(no):
        return walk(then)
    if not np.count_nonzero(yes):
        return walk(other)
    if cooperative_scheduler.has_waits(then, other):  # of tiles that synchronise through mbarriers
        return _run_interleaved(machine, [(yes, 0), (no, 1)], node, walk)
    part = find_contiguous_range(yes)
    if part and not (other.nodes or other.results):
        return run_on_range(machine, part, then.free, walk, lambda inner: inner(then))
    rest = find_contiguous_range(no)
    if part and rest and machine.active is None:
        first = run_on_range(machine, part, then.free, walk, lambda inner: inner(then))
        second = run_on_range(machine, rest, other.free, walk, lambda inner: inner(other))
        return [_join_ranges((part, a), (rest, b)) for a, b in zip(first, second, strict=True)]
    with machine.masked(yes):
        first = machine.arrays(walk(then))
    with machine.masked(no):
        second = machine.arrays(walk(other))
    return select_by_mask(condition, first, second)


def _run_interleaved(machine: TileMachine, sides: Sequence[tuple[np.ndarray, int]], node: Any, walk: Any) -> Any:
    """Run all branches concurrently, since one may wait at an mbarrier for another: masks, and the block of each."""

    def side(mask: np.ndarray, block: Block) -> Any:
        with machine.masked(mask):
            return machine.arrays(walk.with_values(dict(walk.env))(block))

    found = cooperative_scheduler.run_concurrently(
        machine, [partial(side, mask, node.regions[way]) for mask, way in sides]
    )
    results = found[0]
    for (mask, _), new in zip(sides[1:], found[1:], strict=True):
        results = select_by_mask(mask, new, results)
    return results


def _join_ranges(one: tuple[InstanceRange, Any], other: tuple[InstanceRange, Any]) -> Any:
    """Join the values of the two ranges that make up all instances."""
    return concatenate_ranges([(value, part) for part, value in sorted((one, other), key=lambda p: p[0].low)])


@control_flow_rules(control_flow.for_)
def _(machine, node, args, walk):
    bounds, carried, body = [require_exact(a) for a in args[:3]], args[3:], node.regions[0]
    numbers = [_uniform_bound(b) for b in bounds]
    if None in numbers:
        return _run_divergent_loop(machine, body, walk, machine.arrays(bounds), machine.arrays(carried))
    for i in range(*numbers):
        cooperative_scheduler.check_cancelled()
        carried = walk(body, machine.constant(i), *carried)
    return carried


def _uniform_bound(bound: Any) -> int | None:
    """The value that all instances share, or None."""
    if isinstance(bound, AffineScalar):
        return bound.origin if bound.constant else None
    return _to_scalar(bound) if bound.size == 1 else None


def _run_divergent_loop(
    machine: TileMachine, body: Block, walk: Any, bounds: list[np.ndarray], carried: Sequence[Any]
) -> Sequence[Any]:
    """Run a loop whose bounds differ between instances, as runs of trips with the same active instances.

    While the active instances are contiguous, the others leave the loop with their current values.
    """
    start, stop, step = bounds
    trips = np.maximum(-((start - stop) // step), 0)
    axes = [a for a, n in enumerate(trips.shape) if n > 1]
    apart = _find_contiguous_trips(axes[0], tuple(trips.reshape(-1).tolist())) if len(axes) == 1 else None
    if machine.active is not None or apart is None:
        return _run_masked_loop(machine, body, walk, trips, (start, step), carried)
    before, gone = InstanceRange(axes[0], 0, trips.size), []
    for part, numbers in apart:
        if part != before:
            gone += [(p, p.of(before).cuts(carried)) for p in before.without(part)]
            carried, before = part.of(before).cuts(carried), part
        passes = (part.cut(start), part.cut(step), numbers)
        carried = _run_range_trips(machine, body, walk, part, passes, carried)
    pieces = sorted([*gone, (before, carried)], key=lambda p: p[0].low)
    return [concatenate_ranges([(values[i], p) for p, values in pieces]) for i in range(len(carried))]


@lru_cache(maxsize=256)
def _find_contiguous_trips(axis: int, trips: tuple[int, ...]) -> list[tuple[InstanceRange, range]] | None:
    """The next trips with the same active instances, and their range; None where they are not contiguous."""
    found, done = [], 0
    for end in sorted(set(trips) - {0}):
        left = [i for i, n in enumerate(trips) if n > done]
        if left[-1] - left[0] >= len(left):
            return None
        found.append((InstanceRange(axis, left[0], left[-1] + 1), range(done, end)))
        done = end
    return found


def _run_range_trips(
    machine: TileMachine,
    body: Block,
    walk: Any,
    part: InstanceRange,
    passes: tuple[Any, Any, range],
    carried: Sequence[Any],
) -> Sequence[Any]:
    """Run some trips of a loop on a range of instances."""
    if part.high - part.low == machine.count[part.axis]:
        return _run_trips(machine, body, walk, passes, carried)
    return run_on_range(machine, part, body.free, walk, lambda inner: _run_trips(machine, body, inner, passes, carried))


def _run_masked_loop(
    machine: TileMachine, body: Block, walk: Any, trips: np.ndarray, bounds: tuple[Any, Any], carried: Sequence[Any]
) -> Sequence[Any]:
    """Run a loop under masks, one for each run of trips."""
    done = 0
    for end in sorted(set(trips.reshape(-1).tolist())):
        mask = machine.live(trips > done)
        if end > done and mask.any():
            passes = (*bounds, range(done, end))
            if mask.all():
                carried = _run_trips(machine, body, walk, passes, carried)
            else:
                with machine.masked(mask):
                    carried = select_by_mask(mask, _run_trips(machine, body, walk, passes, carried), carried)
        done = end
    return carried


def _run_trips(
    machine: TileMachine, body: Block, walk: Any, passes: tuple[Any, Any, range], carried: Sequence[Any]
) -> Sequence[Any]:
    start, step, numbers = passes
    if start.size == step.size == 1:
        first, by = start.item(), step.item()
        for k in numbers:
            cooperative_scheduler.check_cancelled()
            carried = walk(body, machine.constant(first + k * by), *carried)
    else:
        for k in numbers:
            cooperative_scheduler.check_cancelled()
            carried = walk(body, start + k * step, *carried)
    return machine.arrays(carried)


@control_flow_rules(control_flow.while_)
def _(machine, node, args, walk):
    condition, body = node.regions
    return _run_while(machine, condition, body, walk, args)


def _run_while(machine: TileMachine, condition: Block, body: Block, walk: Any, carried: Sequence[Any]) -> list[Any]:
    while True:
        cooperative_scheduler.check_cancelled()
        mask = machine.live(require_exact(walk(condition, *carried)[0]))
        if not mask.any():
            return list(carried)
        if mask.all():
            carried = machine.arrays(walk(body, *carried))
        elif part := find_contiguous_range(mask):
            free, inputs = condition.free | body.free, [part.cut(c) for c in carried]
            inner = run_on_range(machine, part, free, walk, lambda w: _run_while(machine, condition, body, w, inputs))  # noqa: B023
            count = machine.count[part.axis]
            return [part.join(n, o, count) for n, o in zip(inner, carried, strict=True)]
        else:
            with machine.masked(mask):
                carried = select_by_mask(mask, machine.arrays(walk(body, *carried)), carried)

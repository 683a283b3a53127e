"""Control flow of all program instances at once: together where they agree, in parts or masked where not."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np

from tessera.interp import interleave
from tessera.interp.affine import Affine
from tessera.interp.machine import Machine, Part, chain, merge, part_of, within
from tessera.interp.uneven import uneven
from tessera.ir.core import Block
from tessera.numerics.bounded import certain
from tessera.op import Rules
from tessera.ops import control
from tessera.passes.differing import meeting

rules = Rules("tile control flow")


def _scalar(array: np.ndarray) -> Any:
    return array.reshape(()).item()


@rules(control.if_)
def _(machine, node, args, walk):
    condition, (then, other) = certain(args[0]), node.regions
    if condition.size == 1:
        return walk(then if _scalar(condition) else other)
    yes, no = machine.live(condition), machine.live(~condition)
    waits = machine.group > 1 and interleave.waits(then, other)
    if waits and (node.attrs.get("apart") or uneven(machine, node, walk.env)):  # each tile waits for something else
        return _interleaved(machine, machine.one_by_one((yes, no), meeting(then, other)), node, walk)
    if not np.count_nonzero(no):
        return walk(then)
    if not np.count_nonzero(yes):
        return walk(other)
    if interleave.waits(then, other):  # of tiles that wait for each other at mbarriers
        return _interleaved(machine, [(yes, 0), (no, 1)], node, walk)
    part = part_of(yes)
    if part and not (other.nodes or other.results):
        return within(machine, part, then.free, walk, lambda inner: inner(then))
    rest = part_of(no)
    if part and rest and machine.active is None:
        first = within(machine, part, then.free, walk, lambda inner: inner(then))
        second = within(machine, rest, other.free, walk, lambda inner: inner(other))
        return [_beside((part, a), (rest, b)) for a, b in zip(first, second, strict=True)]
    with machine.masked(yes):
        first = machine.arrays(walk(then))
    with machine.masked(no):
        second = machine.arrays(walk(other))
    return merge(condition, first, second)


def _interleaved(machine: Machine, sides: Sequence[tuple[np.ndarray, int]], node: Any, walk: Any) -> Any:
    """All ways at once, since one may wait at an mbarrier for what another does: masks, and which block they take."""

    def side(mask: np.ndarray, block: Block) -> Any:
        with machine.masked(mask):
            return machine.arrays(walk.beside(dict(walk.env))(block))

    found = interleave.together(machine, [partial(side, mask, node.regions[way]) for mask, way in sides])
    results = found[0]
    for (mask, _), new in zip(sides[1:], found[1:], strict=True):
        results = merge(mask, new, results)
    return results


def _beside(one: tuple[Part, Any], other: tuple[Part, Any]) -> Any:
    """One value of the two parts that make up all instances."""
    return chain([(value, part) for part, value in sorted((one, other), key=lambda p: p[0].low)])


@rules(control.for_)
def _(machine, node, args, walk):
    bounds, carried, body = [certain(a) for a in args[:3]], args[3:], node.regions[0]
    numbers = [_known(b) for b in bounds]
    if None in numbers:
        return _repeat(machine, body, walk, machine.arrays(bounds), machine.arrays(carried))
    for i in range(*numbers):
        carried = walk(body, machine.constant(i), *carried)
    return carried


def _known(bound: Any) -> int | None:
    """The one value that all instances have, or None."""
    if isinstance(bound, Affine):
        return bound.origin if bound.constant else None
    return _scalar(bound) if bound.size == 1 else None


def _repeat(
    machine: Machine, body: Block, walk: Any, bounds: list[np.ndarray], carried: Sequence[Any]
) -> Sequence[Any]:
    """A loop whose bounds differ between instances: in stretches of passes that the same ones make.

    Where those left lie side by side the others are let go, with the values they have then.
    """
    start, stop, step = bounds
    trips = np.maximum(-((start - stop) // step), 0)
    axes = [a for a, n in enumerate(trips.shape) if n > 1]
    apart = _side_by_side(axes[0], tuple(trips.reshape(-1).tolist())) if len(axes) == 1 else None
    if machine.active is not None or apart is None:
        return _masked(machine, body, walk, trips, (start, step), carried)
    before, gone = Part(axes[0], 0, trips.size), []
    for part, numbers in apart:
        if part != before:
            gone += [(p, p.of(before).cuts(carried)) for p in before.without(part)]
            carried, before = part.of(before).cuts(carried), part
        passes = (part.cut(start), part.cut(step), numbers)
        carried = _stretch(machine, body, walk, part, passes, carried)
    pieces = sorted([*gone, (before, carried)], key=lambda p: p[0].low)
    return [chain([(values[i], p) for p, values in pieces]) for i in range(len(carried))]


@lru_cache(maxsize=256)
def _side_by_side(axis: int, trips: tuple[int, ...]) -> list[tuple[Part, range]] | None:
    """The passes that the same instances make, and the part these are; None where they do not lie side by side."""
    found, done = [], 0
    for end in sorted(set(trips) - {0}):
        left = [i for i, n in enumerate(trips) if n > done]
        if left[-1] - left[0] >= len(left):
            return None
        found.append((Part(axis, left[0], left[-1] + 1), range(done, end)))
        done = end
    return found


def _stretch(
    machine: Machine, body: Block, walk: Any, part: Part, passes: tuple[Any, Any, range], carried: Sequence[Any]
) -> Sequence[Any]:
    """Some passes through a loop, made by the instances of a part."""
    if part.high - part.low == machine.count[part.axis]:
        return _passes(machine, body, walk, passes, carried)
    return within(machine, part, body.free, walk, lambda inner: _passes(machine, body, inner, passes, carried))


def _masked(
    machine: Machine, body: Block, walk: Any, trips: np.ndarray, bounds: tuple[Any, Any], carried: Sequence[Any]
) -> Sequence[Any]:
    """A loop whose stretches are made by those instances that a mask selects."""
    done = 0
    for end in sorted(set(trips.reshape(-1).tolist())):
        mask = machine.live(trips > done)
        if end > done and mask.any():
            passes = (*bounds, range(done, end))
            if mask.all():
                carried = _passes(machine, body, walk, passes, carried)
            else:
                with machine.masked(mask):
                    carried = merge(mask, _passes(machine, body, walk, passes, carried), carried)
        done = end
    return carried


def _passes(
    machine: Machine, body: Block, walk: Any, passes: tuple[Any, Any, range], carried: Sequence[Any]
) -> Sequence[Any]:
    start, step, numbers = passes
    if start.size == step.size == 1:
        first, by = start.item(), step.item()
        for k in numbers:
            carried = walk(body, machine.constant(first + k * by), *carried)
    else:
        for k in numbers:
            carried = walk(body, start + k * step, *carried)
    return machine.arrays(carried)


@rules(control.while_)
def _(machine, node, args, walk):
    condition, body = node.regions
    return _while(machine, condition, body, walk, args)


def _while(machine: Machine, condition: Block, body: Block, walk: Any, carried: Sequence[Any]) -> list[Any]:
    while True:
        mask = machine.live(certain(walk(condition, *carried)[0]))
        if not mask.any():
            return list(carried)
        if mask.all():
            carried = machine.arrays(walk(body, *carried))
        elif part := part_of(mask):
            free, inputs = condition.free | body.free, [part.cut(c) for c in carried]
            inner = within(machine, part, free, walk, lambda w: _while(machine, condition, body, w, inputs))  # noqa: B023
            count = machine.count[part.axis]
            return [part.join(n, o, count) for n, o in zip(inner, carried, strict=True)]
        else:
            with machine.masked(mask):
                carried = merge(mask, machine.arrays(walk(body, *carried)), carried)

"""Debug mode of the Tile interpreter: value mode with every access checked against shadow memory first.

The rules M1 to M14 of docs/semantics.md are what it checks. Programs run as in value mode, all instances in step;
what is reported depends on which elements are touched between which barriers, not on that order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tessera.evaluate import Meaning
from tessera.interp import instances
from tessera.interp.checked import copies, overflow
from tessera.interp.checked import grid as debug_grid
from tessera.interp.checked import sync as debug_sync
from tessera.interp.checked.access import Access, aligned, check, check_written, inside, lanes_of
from tessera.interp.checked.monitor import Monitor
from tessera.interp.checked.nan import watch
from tessera.interp.checked.shadow import ATOMIC, READ, WRITE
from tessera.interp.checked.windows import harmless
from tessera.interp.machine import Machine
from tessera.interp.memory import Memory, Place, expand
from tessera.ir.core import Node
from tessera.numerics.bounded import certain
from tessera.op import Rules
from tessera.ops import tile
from tessera.types import SHARED, RefType

# What is checked before and noted after an op: a rule (monitor, machine, node, args, go), where `go()` runs the op.
rules = Rules("tile debug")
for _table in (debug_sync.rules, debug_grid.rules):
    for _op in _table:
        rules(_op)(_table.of(_op))


def meaning(machine: Machine, monitor: Monitor) -> Meaning:
    """The meaning of nodes on this machine, checked if the monitor checks, and seen by its observers."""
    mean = instances.meaning(machine)
    if monitor.checking:
        mean = _checked(machine, monitor, mean)
    for observer in monitor.observers:
        mean = observer.meaning(machine, mean)
    return mean


def _checked(machine: Machine, monitor: Monitor, plain: Meaning) -> Meaning:
    monitor.begin(machine)

    indices, masks = overflow.index_nodes(monitor.body), monitor.masks

    def mean(node: Node, args: list[Any], walk: Any) -> Sequence[Any]:
        rule = rules.get(node.op)
        if masks is not None:
            masks.follow(machine, node, args, lambda other: plain(node, other, walk))
        if rule is not None:
            return rule(monitor, machine, node, args, lambda: plain(node, args, walk))
        results = plain(node, args, walk)
        if node in indices:
            overflow.check(monitor, machine, node, args, results)
        if monitor.checks.nan:
            watch(monitor, machine, node, args, results)
        return results

    return mean


def _place(
    machine: Machine, node: Node, args: list[Any], block: tuple[int, ...], skip: int
) -> tuple[Place, np.ndarray | None]:
    """Where a load or store begins, and its mask."""
    place, rest = instances._place(machine, node, args, block, skip)
    return place, rest[0] if rest else None


def _regular(monitor: Monitor, node: Node) -> bool:
    """Whether a load or store may be judged as a whole: nobody counts its elements."""
    return monitor.lint is None and node.attrs["vector"] == 1


def _at(machine: Machine, node: Node, place: Place, mask: Any) -> Access:
    keep = _active(machine, len(place.block))
    if mask is not None:
        keep = mask if keep is None else keep & mask
    return Access.of(node, place, keep, node.attrs["edge"] == "clip")


def _active(machine: Machine, depth: int) -> np.ndarray | None:
    return None if machine.active is None else expand(machine.active, depth)


def _points(machine: Machine, node: Node, args: list[Any], skip: int) -> Access:
    """The access of a gather, scatter or atomic: elements at blocks of indices."""
    args = machine.arrays(args)
    memory, indices, rest = instances._indexed(machine, node, args, skip)
    depth = max((v.type.rank for v in node.args[skip:]), default=0)
    keep = _active(machine, depth)
    if rest:
        keep = rest[0] if keep is None else keep & rest[0]
    blocks = [i.shape for i in indices] + ([] if keep is None else [keep.shape])
    return Access(node, memory, indices, np.broadcast_shapes((*machine.count, *(1,) * depth), *blocks), keep)


def _read(monitor: Monitor, machine: Machine, access: Access, go: Any) -> Sequence[Any]:
    access = _inside(monitor, machine, access)
    region = monitor.region(access.memory)
    if region is not None:
        lanes = lanes_of(monitor, machine, access, region)
        check(monitor, access, READ, region, lanes)
        monitor.record(region, READ, lanes, access.node)
    return go()


def _inside(monitor: Monitor, machine: Machine, access: Access, place: int = 0) -> Access:
    """The access without what lies outside, counted where advice is asked for; `place` is the ref's operand."""
    access = inside(monitor, machine, access)
    if monitor.lint is not None:
        ref = access.node.args[place].type
        assert isinstance(ref, RefType)
        region = monitor.region(access.memory)
        monitor.lint.access(machine, access, ref, region.swizzle if region is not None else "")
    return access


def _write(monitor: Monitor, machine: Machine, access: Access, value: Any, go: Any) -> Sequence[Any]:
    access = _inside(monitor, machine, access)
    region = monitor.region(access.memory)
    if region is None:
        return go()
    lanes = lanes_of(monitor, machine, access, region)
    values = _lanewise(machine, value, access.shape)
    check(monitor, access, WRITE, region, lanes, values)
    results = go()
    if monitor.record(region, WRITE, lanes, access.node):
        check_written(monitor, access, region, lanes, values)
    return results


def _lanewise(machine: Machine, value: Any, shape: tuple[int, ...]) -> np.ndarray:
    """A stored value lane by lane."""
    array = machine.arrays([value])[0]
    lead, block = array.shape[: machine.rank], array.shape[machine.rank :]
    full = (*lead, *(1,) * (len(shape) - array.ndim), *block)
    return np.broadcast_to(array.reshape(full), shape).reshape(-1)


@rules(tile.load)
def _(monitor, machine, node, args, go):
    place, mask = _place(machine, node, args, node.attrs["shape"], 1)
    if _regular(monitor, node) and harmless(monitor, machine, node, place, READ, mask):
        return go()
    access = _at(machine, node, place, mask)
    aligned(monitor, machine, access)
    return _read(monitor, machine, access, go)


@rules(tile.store)
def _(monitor, machine, node, args, go):
    place, mask = _place(machine, node, args, node.args[1].type.shape, 2)
    if _regular(monitor, node) and harmless(monitor, machine, node, place, WRITE, mask):
        return go()
    access = _at(machine, node, place, mask)
    aligned(monitor, machine, access)
    return _write(monitor, machine, access, args[1], go)


@rules(tile.gather)
def _(monitor, machine, node, args, go):
    return _read(monitor, machine, _points(machine, node, args, 1), go)


@rules(tile.scatter)
def _(monitor, machine, node, args, go):
    return _write(monitor, machine, _points(machine, node, args, 2), args[1], go)


@rules(tile.atomic, tile.compare_exchange)
def _(monitor, machine, node, args, go):
    access = _inside(monitor, machine, _points(machine, node, args, 2 if node.op is tile.atomic else 3))
    region = monitor.region(access.memory)
    if region is not None:
        lanes = lanes_of(monitor, machine, access, region)
        check(monitor, access, ATOMIC, region, lanes)
        monitor.record(region, ATOMIC, lanes, node)
    return go()


@rules(tile.alloc)
def _(monitor, machine, node, args, go):
    results = go()
    monitor.made(results[0], node.attrs["space"] == SHARED, node.attrs["swizzle"])
    return results


@rules(tile.async_copy)
def _(monitor, machine, node, args, go):
    clip, places = node.attrs["edge"] == "clip", _sides(machine, node, args)
    if copies.take_off(monitor, machine, node, *places, clip):
        return go()
    made = [Access.of(node, p, _active(machine, len(p.block)), c) for p, c in zip(places, (clip, False), strict=True)]
    source, target = (_inside(monitor, machine, a, i) for a, i in zip(made, (1, 0), strict=True))
    for access, kind in ((source, READ), (target, WRITE)):
        region = monitor.region(access.memory)
        if region is not None:
            lanes = lanes_of(monitor, machine, access, region)
            check(monitor, access, kind, region, lanes, _arriving(source) if kind == WRITE else None)
            monitor.record(region, kind, lanes, node)
    results = go()
    for access, kind in ((source, READ), (target, WRITE)):
        region = monitor.region(access.memory)
        if region is not None:
            if kind == WRITE:
                lanes = lanes_of(monitor, machine, access, region)
                check_written(monitor, access, region, lanes, _arriving(source))
            copies.begin(monitor, machine, access, kind, region)
    return results


def _sides(machine: Machine, node: Node, args: list[Any]) -> tuple[Place, Place]:
    """What an asynchronous copy reads and what it writes."""
    target, source = args[0], args[1]
    starts = [certain(a) for a in args[2:]]
    if machine.active is not None:
        starts = [np.where(machine.active, s, 0) for s in machine.arrays(starts)]
    here, block = len(target.shape), tuple(node.attrs["shape"])

    def side(memory: Memory, starts: list[Any]) -> Place:
        rank = len(memory.shape)
        shape = block[len(block) - rank :] if rank <= len(block) else (1,) * (rank - len(block)) + block
        return Place(memory, starts, shape, machine.count)

    return side(source, starts[here:]), side(target, starts[:here])


def _arriving(source: Access) -> np.ndarray:
    """What a copy brings, lane by lane: what lies outside the source arrives as 0."""
    sizes = source.memory.array.shape
    places = [np.clip(i, 0, n - 1) for i, n in zip(source.indices, sizes, strict=True)]
    safe = Access(source.node, source.memory, places, source.shape, None)
    flat = safe.held(np.arange(int(np.prod(source.shape))))
    if source.keep is None:
        return flat
    return np.where(np.broadcast_to(source.keep, source.shape).reshape(-1), flat, np.zeros((), flat.dtype))


@rules(tile.async_commit)
def _(monitor, machine, node, args, go):
    copies.commit(monitor, machine)
    return go()


@rules(tile.async_wait)
def _(monitor, machine, node, args, go):
    copies.wait(monitor, machine, node.attrs["pending"])
    return go()


@rules(tile.barrier)
def _(monitor, machine, node, args, go):
    debug_sync.whole_stretches(monitor, machine, node, machine.group, "a barrier")
    monitor.chunk.passed(machine, machine.group)
    return go()

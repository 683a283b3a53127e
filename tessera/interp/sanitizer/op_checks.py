"""Op checks: each memory op checked against shadow memory before the Tile interpreter runs it.

The rules M1 to M14 of docs/semantics/tile.md are what it checks. Programs run as in value mode, all instances in step;
what is reported depends on which elements are touched between which barriers, not on that order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tessera.core.types import SHARED, RefType
from tessera.interp.sanitizer import async_copies, value_checks
from tessera.interp.sanitizer import synchronisation as debug_grid
from tessera.interp.sanitizer import synchronisation as debug_sync
from tessera.interp.sanitizer.access import (
    InstanceAccess,
    check_access,
    check_alignment,
    check_bounds,
    check_write_conflicts,
    find_active_lanes,
)
from tessera.interp.sanitizer.disjointness import check_affine_access
from tessera.interp.sanitizer.monitor import Monitor
from tessera.interp.sanitizer.shadow_memory import ATOMIC, READ, WRITE
from tessera.interp.sanitizer.value_checks import check_non_finite
from tessera.interp.tile import op_rules
from tessera.interp.tile.machine import TileMachine
from tessera.interp.tile.memory import BlockAccess, InstanceMemory, expand_block_axes
from tessera.ir.builder import NodeSemantics
from tessera.ir.core import Node
from tessera.ir.numerics.interval_arithmetic import require_exact
from tessera.ir.rules import Rules
from tessera.ops.dialects import tile

# Rules (monitor, machine, node, args, go): what to check before an op and record after it; `go()` runs the op.
checked_rules = Rules("tile debug")
for _table in (debug_sync.sync_rules, debug_grid.grid_barrier_rules):
    for _op in _table:
        checked_rules(_op)(_table.of(_op))


def make_checked_evaluator(machine: TileMachine, monitor: Monitor) -> NodeSemantics:
    """Make the semantics of nodes on this machine, with the monitor's checks and observers around them."""
    mean = op_rules.make_evaluator(machine)
    if monitor.checking:
        mean = _make_checked(machine, monitor, mean)
    for observer in monitor.observers:
        mean = observer.meaning(machine, mean)
    return mean


def _make_checked(machine: TileMachine, monitor: Monitor, plain: NodeSemantics) -> NodeSemantics:
    monitor.begin(machine)

    indices, masks = value_checks.find_index_nodes(monitor.body), monitor.masks

    def mean(node: Node, args: list[Any], walk: Any) -> Sequence[Any]:
        rule = checked_rules.get(node.op)
        if masks is not None:
            masks.follow(machine, node, args, lambda other: plain(node, other, walk))
        if rule is not None:
            return rule(monitor, machine, node, args, lambda: plain(node, args, walk))
        results = plain(node, args, walk)
        if node in indices:
            value_checks.check_index_overflow(monitor, machine, node, args, results)
        if monitor.checks.nan:
            check_non_finite(monitor, machine, node, args, results)
        return results

    return mean


def _make_block_access(
    machine: TileMachine, node: Node, args: list[Any], block: tuple[int, ...], skip: int
) -> tuple[BlockAccess, np.ndarray | None]:
    """The start of a load or store, and its mask."""
    place, rest = op_rules._make_block_access(machine, node, args, block, skip)
    return place, rest[0] if rest else None


def _is_affine_checkable(monitor: Monitor, node: Node) -> bool:
    """Whether a load or store may be checked as a whole: no lint counts its elements."""
    return monitor.lint is None and node.attrs["vector"] == 1


def _make_access(machine: TileMachine, node: Node, place: BlockAccess, mask: Any) -> InstanceAccess:
    keep = _active_mask(machine, len(place.block))
    if mask is not None:
        keep = mask if keep is None else keep & mask
    return InstanceAccess.of(node, place, keep, node.attrs["edge"] == "clip")


def _active_mask(machine: TileMachine, depth: int) -> np.ndarray | None:
    return None if machine.active is None else expand_block_axes(machine.active, depth)


def _make_gather_access(machine: TileMachine, node: Node, args: list[Any], skip: int) -> InstanceAccess:
    """The access of a gather, scatter or atomic: the elements at blocks of indices."""
    args = machine.arrays(args)
    memory, _, indices, rest = op_rules._align_indices(machine, node, args, skip)
    depth = max((v.type.rank for v in node.args[skip:]), default=0)
    keep = _active_mask(machine, depth)
    if rest:
        keep = rest[0] if keep is None else keep & rest[0]
    blocks = [i.shape for i in indices] + ([] if keep is None else [keep.shape])
    return InstanceAccess(node, memory, indices, np.broadcast_shapes((*machine.count, *(1,) * depth), *blocks), keep)


def _checked_read(monitor: Monitor, machine: TileMachine, access: InstanceAccess, go: Any) -> Sequence[Any]:
    access = _check_bounds(monitor, machine, access)
    region = monitor.region(access.memory)
    if region is not None:
        lanes = find_active_lanes(monitor, machine, access, region)
        check_access(monitor, access, READ, region, lanes)
        monitor.record(region, READ, lanes, access.node)
    return go()


def _check_bounds(monitor: Monitor, machine: TileMachine, access: InstanceAccess, place: int = 0) -> InstanceAccess:
    """The access without its out-of-bounds lanes, counted for the lints; `place` is the operand number of the ref."""
    access = check_bounds(monitor, machine, access)
    if monitor.lint is not None:
        ref = access.node.args[place].type
        assert isinstance(ref, RefType)
        region = monitor.region(access.memory)
        monitor.lint.access(machine, access, ref, region.swizzle if region is not None else "")
    return access


def _checked_write(
    monitor: Monitor, machine: TileMachine, access: InstanceAccess, value: Any, go: Any
) -> Sequence[Any]:
    access = _check_bounds(monitor, machine, access)
    region = monitor.region(access.memory)
    if region is None:
        return go()
    lanes = find_active_lanes(monitor, machine, access, region)
    values = _broadcast_to_lanes(machine, value, access.shape)
    check_access(monitor, access, WRITE, region, lanes, values)
    results = go()
    if monitor.record(region, WRITE, lanes, access.node):
        check_write_conflicts(monitor, access, region, lanes, values)
    return results


def _broadcast_to_lanes(machine: TileMachine, value: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Broadcast a stored value to the lanes."""
    array = machine.arrays([value])[0]
    lead, block = array.shape[: machine.rank], array.shape[machine.rank :]
    full = (*lead, *(1,) * (len(shape) - array.ndim), *block)
    return np.broadcast_to(array.reshape(full), shape).reshape(-1)


@checked_rules(tile.load)
def _(monitor, machine, node, args, go):
    place, mask = _make_block_access(machine, node, args, node.attrs["shape"], 1)
    if _is_affine_checkable(monitor, node) and check_affine_access(monitor, machine, node, place, READ, mask):
        return go()
    access = _make_access(machine, node, place, mask)
    check_alignment(monitor, machine, access)
    return _checked_read(monitor, machine, access, go)


@checked_rules(tile.store)
def _(monitor, machine, node, args, go):
    place, mask = _make_block_access(machine, node, args, node.args[1].type.shape, 2)
    if _is_affine_checkable(monitor, node) and check_affine_access(monitor, machine, node, place, WRITE, mask):
        return go()
    access = _make_access(machine, node, place, mask)
    check_alignment(monitor, machine, access)
    return _checked_write(monitor, machine, access, args[1], go)


@checked_rules(tile.gather)
def _(monitor, machine, node, args, go):
    return _checked_read(monitor, machine, _make_gather_access(machine, node, args, 1), go)


@checked_rules(tile.scatter)
def _(monitor, machine, node, args, go):
    return _checked_write(monitor, machine, _make_gather_access(machine, node, args, 2), args[1], go)


@checked_rules(tile.atomic, tile.compare_exchange)
def _(monitor, machine, node, args, go):
    access = _check_bounds(
        monitor, machine, _make_gather_access(machine, node, args, 2 if node.op is tile.atomic else 3)
    )
    region = monitor.region(access.memory)
    if region is not None:
        lanes = find_active_lanes(monitor, machine, access, region)
        check_access(monitor, access, ATOMIC, region, lanes)
        monitor.record(region, ATOMIC, lanes, node)
    return go()


@checked_rules(tile.alloc)
def _(monitor, machine, node, args, go):
    results = go()
    monitor.record_allocation(results[0], node.attrs["space"] == SHARED, node.attrs["swizzle"])
    return results


@checked_rules(tile.async_copy)
def _(monitor, machine, node, args, go):
    clip, places = node.attrs["edge"] == "clip", _copy_sides(machine, node, args)
    if async_copies.begin_regular_copy(monitor, machine, node, *places, clip):
        return go()
    made = [
        InstanceAccess.of(node, p, _active_mask(machine, len(p.block)), c)
        for p, c in zip(places, (clip, False), strict=True)
    ]
    source, target = (_check_bounds(monitor, machine, a, i) for a, i in zip(made, (1, 0), strict=True))
    for access, kind in ((source, READ), (target, WRITE)):
        region = monitor.region(access.memory)
        if region is not None:
            lanes = find_active_lanes(monitor, machine, access, region)
            check_access(monitor, access, kind, region, lanes, _copied_values(source) if kind == WRITE else None)
            monitor.record(region, kind, lanes, node)
    results = go()
    for access, kind in ((source, READ), (target, WRITE)):
        region = monitor.region(access.memory)
        if region is not None:
            if kind == WRITE:
                lanes = find_active_lanes(monitor, machine, access, region)
                check_write_conflicts(monitor, access, region, lanes, _copied_values(source))
            async_copies.begin_copy(monitor, machine, access, kind, region)
    return results


def _copy_sides(machine: TileMachine, node: Node, args: list[Any]) -> tuple[BlockAccess, BlockAccess]:
    """The accesses of an asynchronous copy: its read and its write."""
    target, source = args[0], args[1]
    starts = [require_exact(a) for a in args[2:]]
    if machine.active is not None:
        starts = [np.where(machine.active, s, 0) for s in machine.arrays(starts)]
    here, block = len(target.shape), tuple(node.attrs["shape"])

    def side(memory: InstanceMemory, starts: list[Any]) -> BlockAccess:
        rank = len(memory.shape)
        shape = block[len(block) - rank :] if rank <= len(block) else (1,) * (rank - len(block)) + block
        return BlockAccess(memory, starts, shape, machine.count)

    return side(source, starts[here:]), side(target, starts[:here])


def _copied_values(source: InstanceAccess) -> np.ndarray:
    """The values that a copy stores, lane by lane; out-of-bounds elements of the source are 0."""
    sizes = source.memory.array.shape
    places = [np.clip(i, 0, n - 1) for i, n in zip(source.indices, sizes, strict=True)]
    safe = InstanceAccess(source.node, source.memory, places, source.shape, None)
    flat = safe.read_values(np.arange(int(np.prod(source.shape))))
    if source.keep is None:
        return flat
    return np.where(np.broadcast_to(source.keep, source.shape).reshape(-1), flat, np.zeros((), flat.dtype))


@checked_rules(tile.async_commit)
def _(monitor, machine, node, args, go):
    async_copies.commit_group(monitor, machine)
    return go()


@checked_rules(tile.async_wait)
def _(monitor, machine, node, args, go):
    async_copies.wait_group(monitor, machine, node.attrs["pending"])
    return go()


@checked_rules(tile.barrier)
def _(monitor, machine, node, args, go):
    debug_sync.check_convergence(monitor, machine, node, machine.group, "a barrier")
    monitor.chunk.record_barrier(machine, machine.group)
    return go()

"""Mbarriers of a group: the arrivals of all tiles are counted at once; a wait that cannot complete is a deadlock.

The arrivals that complete a phase come before the wait in program order, unless the wait is in a divergent branch whose
other side has yet to arrive: then the sides run as coroutines (`coroutines.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tessera.codegen.grouped.control_flow import any_active
from tessera.codegen.grouped.diagnostics import report_where
from tessera.codegen.grouped.vectoriser import GroupValue, GroupVectoriser, vectorise
from tessera.core.types import int64
from tessera.ir.core import Node, Value
from tessera.ops.dialects import mbarrier as ops
from tessera.ops.dialects import tile
from tessera.ops.dialects.mbarrier import BYTES, COUNT, MISSING, PHASE
from tessera.ops.tensor import basic, elementwise, reduce, shape


class GroupMbarrierState:
    """The four fields of one mbarrier (or of all, where tiles use different ones) in the vectorised function."""

    def __init__(self, group: GroupVectoriser, args: Sequence[GroupValue]) -> None:
        self.group, self.ref, self.slot = group, args[0].value, args[1]
        # a subgroup of one tile uses one mbarrier
        if group.subgroup_start is not None and group.size == 1 and self.slot.varying:
            self.slot = GroupValue(group.reshape(self.slot.value, ()))
        self.axes: tuple[int, ...] = (int(args[0].shape[0]),) if self.slot.varying else ()
        self.uses = self._find_uses() if self.slot.varying else None

    def _find_uses(self) -> Value:
        """For each tile and mbarrier, whether the tile is active and uses that mbarrier."""
        group, count = self.group, self.axes[0]
        every = (group.size, count)
        mine = group.broadcast(group.reshape(self.slot.value, (group.size, 1)), every)
        numbers = group.broadcast(group.add(shape.iota, shape=(1, count), axis=-1, dtype=int64), every)
        uses = group.add(elementwise.equal, mine, numbers)
        if group.active is None:
            return uses
        active = group.broadcast(group.reshape(group.active, (group.size, 1)), every)
        return group.add(elementwise.bitwise_and, uses, active)

    def constant(self, value: int) -> Value:
        """A constant for each mbarrier."""
        return self.group.full(value, int64, *self.axes)

    def _locate(self, field: int) -> tuple[list[Value], tuple[int, int]]:
        first = self.group.full(0, int64) if self.axes else self.slot.value
        return [self.ref, first, self.group.full(field, int64)], (*(self.axes or (1,)), 1)  # type: ignore[return-value]

    def load(self, field: int) -> Value:
        """A field of the mbarrier."""
        indices, block = self._locate(field)
        return self.group.reshape(self.group.add(tile.load, *indices, shape=block, edge="error"), self.axes)

    def store(self, field: int, value: Value) -> None:
        """Set a field of the mbarrier."""
        (ref, *indices), block = self._locate(field)
        self.group.builder.add(tile.store, [ref, self.group.reshape(value, block), *indices], {"edge": "error"})

    def initialise(self, field: int, value: int) -> None:
        """Set a field of the mbarriers that active tiles use."""
        new = self.constant(value)
        if self.uses is not None:
            used = self.group.add(reduce.max, self.uses, axis=(-2,), keepdims=False)
            new = self.group.add(elementwise.where, used, new, self.load(field))
        self.store(field, new)

    def count_active(self, count: int) -> Value:
        """`count` times the number of active tiles that use each mbarrier."""
        group = self.group
        if self.uses is None and group.active is None:
            return self.constant(count * group.size)
        uses, axis = (group.active, -1) if self.uses is None else (self.uses, -2)
        assert uses is not None
        total = group.add(reduce.sum, group.add(basic.cast, uses, dtype=int64), axis=(axis,), keepdims=False)
        return group.add(elementwise.mul, total, self.constant(count))

    def complete_phases(self, arrivals: Value) -> None:
        """Add arrivals, and complete each phase with no arrival and no byte pending."""
        add, count = self.group.add, self.load(COUNT)
        done = add(elementwise.add, add(elementwise.sub, count, self.load(MISSING)), arrivals)
        free = add(elementwise.equal, self.load(BYTES), self.constant(0))
        arrivals_per_phase = add(elementwise.maximum, count, self.constant(1))
        phases = add(elementwise.where, free, add(elementwise.floor_divide, done, arrivals_per_phase), self.constant(0))
        self.store(PHASE, add(elementwise.add, self.load(PHASE), phases))
        remaining = add(elementwise.sub, done, add(elementwise.mul, phases, count))
        self.store(MISSING, add(elementwise.sub, count, remaining))

    def phases(self) -> Value:
        """For each tile the number of the current phase of its mbarrier."""
        group = self.group
        if self.uses is None:
            return group.broadcast(self.load(PHASE), (group.size,))
        field = group.full(PHASE, int64, group.size)
        mask = [] if group.active is None else [group.active]
        return group.add(tile.gather, self.ref, self.slot.value, field, *mask)


@vectorise(ops.mbarrier_init)
def _(group, node, args, run):
    state = GroupMbarrierState(group, args)
    start = {COUNT: node.attrs["count"], MISSING: node.attrs["count"], BYTES: 0, PHASE: 0}
    for field, value in start.items():
        state.initialise(field, value)
    return []


@vectorise(ops.mbarrier_arrive)
def _(group, node, args, run):
    state = GroupMbarrierState(group, args)
    state.complete_phases(state.count_active(node.attrs["count"]))
    return []


@vectorise(ops.mbarrier_expect, ops.mbarrier_copies)
def _(group, node, args, run):
    state = GroupMbarrierState(group, args)
    copies = node.op is ops.mbarrier_copies
    change = elementwise.sub if copies else elementwise.add
    state.store(BYTES, group.add(change, state.load(BYTES), state.count_active(node.attrs["count"])))
    if copies:
        state.complete_phases(state.constant(0))
    return []


DEADLOCK_REPORT: Mapping[str, object] = {
    "kind": "deadlock",
    "text": "deadlock: an mbarrier's phase never ends",
}


def find_waiting_tiles(group: GroupVectoriser, node: Node, args: Sequence[GroupValue]) -> tuple[Value, Value]:
    """Which active tiles would have to wait, and whether any does."""
    group.has_divergent_wait = group.has_divergent_wait or args[1].varying or args[2].varying
    one = group.full(1, int64, group.size)
    phase = group.add(elementwise.bitwise_and, GroupMbarrierState(group, args).phases(), one)
    waiting = group.add(elementwise.equal, phase, group.add(elementwise.bitwise_and, group.to_varying(args[2]), one))
    if group.active is not None:
        waiting = group.add(elementwise.bitwise_and, waiting, group.active)
    return waiting, any_active(group, waiting)


def report_deadlock(group: GroupVectoriser, condition: Value, waiting: Value) -> None:
    """Report, where a condition holds, that these tiles wait forever."""
    report_where(group, condition, [group.expand_to_group(waiting, mask=True)], dict(DEADLOCK_REPORT))


@vectorise(ops.mbarrier_wait)
def _(group, node, args, run):
    waiting, any_waiting = find_waiting_tiles(group, node, args)
    report_deadlock(group, any_waiting, waiting)
    return []

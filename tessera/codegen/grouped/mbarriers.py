"""Mbarriers of a group: arrivals are counted for all tiles at once, and a wait that cannot end is reported as a
deadlock.

Arrivals that a wait needs come before it in the program, unless the wait stands in a divergent branch whose other side
has yet to arrive: then the sides run as coroutines (`coroutines.py`).
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
    """The four numbers of one barrier in the function being made, or of all where tiles use different ones."""

    def __init__(self, group: GroupVectoriser, args: Sequence[GroupValue]) -> None:
        self.group, self.ref, self.slot = group, args[0].value, args[1]
        if (
            group.stretch_start is not None and group.size == 1 and self.slot.varying
        ):  # of one tile alone it is one barrier
            self.slot = GroupValue(group.reshape(self.slot.value, ()))
        self.sizes: tuple[int, ...] = (int(args[0].shape[0]),) if self.slot.varying else ()
        self.hits = self._hits() if self.slot.varying else None

    def _hits(self) -> Value:
        """For each tile and barrier, whether the tile is here for it."""
        group, count = self.group, self.sizes[0]
        every = (group.size, count)
        mine = group.broadcast(group.reshape(self.slot.value, (group.size, 1)), every)
        number = group.broadcast(group.add(shape.iota, shape=(1, count), axis=-1, dtype=int64), every)
        hits = group.add(elementwise.equal, mine, number)
        if group.active is None:
            return hits
        active = group.broadcast(group.reshape(group.active, (group.size, 1)), every)
        return group.add(elementwise.bitwise_and, hits, active)

    def number(self, value: int) -> Value:
        """A constant."""
        return self.group.full(value, int64, *self.sizes)

    def _place(self, field: int) -> tuple[list[Value], tuple[int, int]]:
        first = self.group.full(0, int64) if self.sizes else self.slot.value
        return [self.ref, first, self.group.full(field, int64)], (*(self.sizes or (1,)), 1)  # type: ignore[return-value]

    def get(self, field: int) -> Value:
        """A number of the barrier."""
        place, block = self._place(field)
        return self.group.reshape(self.group.add(tile.load, *place, shape=block, edge="error"), self.sizes)

    def put(self, field: int, value: Value) -> None:
        """Change a number of the barrier."""
        (ref, *place), block = self._place(field)
        self.group.b.add(tile.store, [ref, self.group.reshape(value, block), *place], {"edge": "error"})

    def begin(self, field: int, value: int) -> None:
        """Set a number of the barriers that tiles are here for."""
        new = self.number(value)
        if self.hits is not None:
            met = self.group.add(reduce.max, self.hits, axis=(-2,), keepdims=False)
            new = self.group.add(elementwise.where, met, new, self.get(field))
        self.put(field, new)

    def here(self, count: int) -> Value:
        """`count` for each tile that is here for it."""
        group = self.group
        if self.hits is None and group.active is None:
            return self.number(count * group.size)
        hits, axis = (group.active, -1) if self.hits is None else (self.hits, -2)
        assert hits is not None
        total = group.add(reduce.sum, group.add(basic.cast, hits, dtype=int64), axis=(axis,), keepdims=False)
        return group.add(elementwise.mul, total, self.number(count))

    def settle(self, came: Value) -> None:
        """Count arrivals, and end each phase that nothing is missing in."""
        add, count = self.group.add, self.get(COUNT)
        done = add(elementwise.add, add(elementwise.sub, count, self.get(MISSING)), came)
        free = add(elementwise.equal, self.get(BYTES), self.number(0))
        each = add(elementwise.maximum, count, self.number(1))
        phases = add(elementwise.where, free, add(elementwise.floor_divide, done, each), self.number(0))
        self.put(PHASE, add(elementwise.add, self.get(PHASE), phases))
        left = add(elementwise.sub, done, add(elementwise.mul, phases, count))
        self.put(MISSING, add(elementwise.sub, count, left))

    def phases(self) -> Value:
        """For each tile the number of the phase under way at its barrier."""
        group = self.group
        if self.hits is None:
            return group.broadcast(self.get(PHASE), (group.size,))
        field = group.full(PHASE, int64, group.size)
        mask = [] if group.active is None else [group.active]
        return group.add(tile.gather, self.ref, self.slot.value, field, *mask)


@vectorise(ops.mbarrier_init)
def _(group, node, args, run):
    state = GroupMbarrierState(group, args)
    start = {COUNT: node.attrs["count"], MISSING: node.attrs["count"], BYTES: 0, PHASE: 0}
    for field, value in start.items():
        state.begin(field, value)
    return []


@vectorise(ops.mbarrier_arrive)
def _(group, node, args, run):
    state = GroupMbarrierState(group, args)
    state.settle(state.here(node.attrs["count"]))
    return []


@vectorise(ops.mbarrier_expect, ops.mbarrier_copies)
def _(group, node, args, run):
    state = GroupMbarrierState(group, args)
    copies = node.op is ops.mbarrier_copies
    change = elementwise.sub if copies else elementwise.add
    state.put(BYTES, group.add(change, state.get(BYTES), state.here(node.attrs["count"])))
    if copies:
        state.settle(state.number(0))
    return []


DEADLOCK_REPORT: Mapping[str, object] = {
    "kind": "deadlock",
    "text": "deadlock: an mbarrier's phase never ends",
}


def find_waiting_tiles(group: GroupVectoriser, node: Node, args: Sequence[GroupValue]) -> tuple[Value, Value]:
    """Which tiles here would have to wait, and whether any."""
    group.has_divergent_wait = group.has_divergent_wait or args[1].varying or args[2].varying
    one = group.full(1, int64, group.size)
    phase = group.add(elementwise.bitwise_and, GroupMbarrierState(group, args).phases(), one)
    held = group.add(elementwise.equal, phase, group.add(elementwise.bitwise_and, group.whole(args[2]), one))
    if group.active is not None:
        held = group.add(elementwise.bitwise_and, held, group.active)
    return held, any_active(group, held)


def report_deadlock(group: GroupVectoriser, condition: Value, held: Value) -> None:
    """Report, where a condition holds, that these tiles wait for ever."""
    report_where(group, condition, [group.seen(held, mask=True)], dict(DEADLOCK_REPORT))


@vectorise(ops.mbarrier_wait)
def _(group, node, args, run):
    held, any_of_them = find_waiting_tiles(group, node, args)
    report_deadlock(group, any_of_them, held)
    return []

"""Barriers in memory on a processor: a group runs as one program, in which arrivals are counted for all tiles at once.

What a wait waits for has to lie before it: nothing else would run meanwhile. A wait that would never end is reported as
the interpreter reports a deadlock; a wait of some tiles of a group only, for others, is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tessera.codegen.llvm.group import Group, Part, lift
from tessera.codegen.llvm.report import reported
from tessera.errors import UnsupportedOpError
from tessera.ir.core import Node, Value
from tessera.ops import basic, elementwise, reduce, shape, tile
from tessera.ops import mbarrier as ops
from tessera.ops.mbarrier import BYTES, COUNT, MISSING, PHASE
from tessera.types import int64


class State:
    """The four numbers of one barrier in the function being made."""

    def __init__(self, group: Group, node: Node, args: Sequence[Part]) -> None:
        self.group, (ref, slot) = group, args[:2]
        if slot.varying:
            raise UnsupportedOpError(
                "the target llvm cannot use another mbarrier in each tile of a group", location=node.loc,
                expected="one number for all tiles", suggestion="run it in the interpreter",
            )  # fmt: skip
        self.ref, self.slot = ref.value, slot.value

    def number(self, value: int) -> Value:
        """A constant."""
        return self.group.full(value, int64)

    def get(self, field: int) -> Value:
        """A number of the barrier."""
        place = [self.ref, self.slot, self.number(field)]
        block = self.group.add(tile.load, *place, shape=(1, 1), edge="error")
        return self.group.add(shape.reshape, block, shape=())

    def put(self, field: int, value: Value) -> None:
        """Change a number of the barrier."""
        block = self.group.reshape(value, (1, 1))
        self.group.b.add(tile.store, [self.ref, block, self.slot, self.number(field)], {"edge": "error"})

    def here(self, count: int) -> Value:
        """`count` for each active tile."""
        group = self.group
        if group.active is None:
            return self.number(count * group.size)
        ones = group.add(basic.cast, group.active, dtype=int64)
        total = group.add(reduce.sum, ones, axis=(-1,), keepdims=False)
        return group.add(elementwise.mul, total, self.number(count))

    def settle(self, came: Value) -> None:
        """Count arrivals, and end each phase that nothing is missing in."""
        add, count = self.group.add, self.get(COUNT)
        done = add(elementwise.add, add(elementwise.sub, count, self.get(MISSING)), came)
        free = add(elementwise.equal, self.get(BYTES), self.number(0))
        phases = add(elementwise.where, free, add(elementwise.floor_divide, done, count), self.number(0))
        self.put(PHASE, add(elementwise.add, self.get(PHASE), phases))
        left = add(elementwise.sub, done, add(elementwise.mul, phases, count))
        self.put(MISSING, add(elementwise.sub, count, left))


@lift(ops.mbarrier_init)
def _(group, node, args, run):
    state = State(group, node, args)
    start = {COUNT: node.attrs["count"], MISSING: node.attrs["count"], BYTES: 0, PHASE: 0}
    for field, value in start.items():
        state.put(field, state.number(value))
    return []


@lift(ops.mbarrier_arrive)
def _(group, node, args, run):
    state = State(group, node, args)
    state.settle(state.here(node.attrs["count"]))
    return []


@lift(ops.mbarrier_expect, ops.mbarrier_copies)
def _(group, node, args, run):
    state = State(group, node, args)
    copies = node.op is ops.mbarrier_copies
    change = elementwise.sub if copies else elementwise.add
    state.put(BYTES, group.add(change, state.get(BYTES), state.here(node.attrs["count"])))
    if copies:
        state.settle(state.number(0))
    return []


DEADLOCK: Mapping[str, object] = {
    "kind": "deadlock",
    "text": "deadlock: an mbarrier's phase never ends",
}


@lift(ops.mbarrier_wait)
def _(group, node, args, run):
    if group.active is not None or args[2].varying:
        raise UnsupportedOpError(
            "the target llvm cannot let some tiles of a group wait for others", location=node.loc,
            expected="a wait that all tiles of the group reach, for one parity", suggestion="run it in the interpreter",
        )  # fmt: skip
    state, one = State(group, node, args), group.full(1, int64)
    phase = group.add(elementwise.bitwise_and, state.get(PHASE), one)
    waiting = group.add(elementwise.equal, phase, group.add(elementwise.bitwise_and, args[2].value, one))
    reported(group, waiting, [group.broadcast(waiting, (group.size,))], dict(DEADLOCK))
    return []

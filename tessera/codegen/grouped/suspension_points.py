"""Suspension points of coroutines: mbarrier waits of a group, and the branches and loops that contain waits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from tessera.codegen.contract import static_shape
from tessera.codegen.grouped.control_flow import (
    any_active,
    intersect_active,
    match_varying,
    restrict_to_mask,
    select_by_mask,
    solve_varying,
)
from tessera.codegen.grouped.coroutines import SUSPENSION_POINTS, Coroutine, CoroutineScheduler, CoroutineSlot
from tessera.codegen.grouped.diagnostics import report_where
from tessera.codegen.grouped.vectoriser import GroupValue, GroupVectoriser, vectorise
from tessera.core.types import TensorType, int64
from tessera.ir.core import Block, Node, Value
from tessera.ops.dialects import control_flow, tile
from tessera.ops.dialects import mbarrier as ops
from tessera.ops.dialects.mbarrier import BYTES, COUNT, MISSING, PHASE, mbarrier_wait
from tessera.ops.tensor import basic, elementwise, reduce, shape

# Mbarriers of a group: the arrivals of all tiles are counted at once; a wait that cannot complete is a deadlock.
#
# The arrivals that complete a phase come before the wait in program order, unless the wait is in a divergent branch
# whose other side has yet to arrive: then the sides run as coroutines (`coroutines.py`).


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


# Suspension points of coroutines: mbarrier waits, and the branches and loops that contain waits.


class _SuspensionPoint:
    """A node that may suspend, and the context in which it is emitted."""

    def __init__(self, scheduler: CoroutineScheduler, node: Node, walk: Any) -> None:
        self.scheduler, self.group, self.node, self.walk = scheduler, scheduler.group, node, walk

    def begin(self) -> None:
        """Emit what comes before the first step."""

    def results(self) -> list[GroupValue]:
        """The node's results, once it is done."""
        return []

    def args(self) -> list[GroupValue]:
        """The operands."""
        return [self.walk.env[v] for v in self.node.args]


class MbarrierWaitPoint(_SuspensionPoint):
    """A wait at an mbarrier, for the active tiles."""

    def step(self) -> Value:
        """Whether no tile has to wait; if no coroutine advanced in the last round, waiting is a deadlock."""
        with self.group.builder.at(self.node.loc):
            waiting, any_waiting = find_waiting_tiles(self.group, self.node, self.args())
            last = self.scheduler.load(self.scheduler.stuck).value
            report_deadlock(self.group, self.group.add(elementwise.bitwise_and, any_waiting, last), waiting)
            return self.scheduler.negate(any_waiting)


class BranchPoint(_SuspensionPoint):
    """A branch: coroutines for the tiles of each side, or for a uniform condition one side for all tiles.

    With `split`, each tile resumes its side in code for one subgroup, since tiles wait for different mbarriers.
    """

    def begin(self) -> None:
        """Make a coroutine for each side."""
        (condition,) = self.args()
        no = self.group.add(elementwise.bitwise_not, condition.value)
        self.varying, self.split = condition.varying, condition.varying and self.scheduler.serial
        varying_results = [True] * len(self.node.results) if self.varying else _find_varying_results(self)
        self.sides: list[Coroutine] = []
        self.masks: list[CoroutineSlot] = []
        for block, mask in zip(self.node.regions, (condition.value, no), strict=True):
            self._add_side(block, mask, varying_results)
        self.condition_slot = self.scheduler.save(condition)

    def _add_side(self, block: Block, mask: Value, varying_results: Sequence[bool]) -> None:
        side = Coroutine(
            self.scheduler, block, self.walk, lambda parts: _match_all_varying(self, parts, varying_results), self.split
        )
        if self.varying:
            mask = intersect_active(self.group, mask)
            save = self.scheduler.scatter_to_tiles if self.split else self.scheduler.save
            self.masks.append(save(GroupValue(mask, True)))
        if self.split:
            mask = self.scheduler.any_in_subgroup(mask)
        elif self.varying:
            mask = any_active(self.group, mask)
        side.begin(mask)
        self.sides.append(side)

    def step(self) -> Value:
        """Whether both sides are done, after each is resumed once."""
        for number in range(len(self.sides)):
            if self.split:
                self.scheduler.run_serially(lambda n=number: self._resume_unless_done(n))  # type: ignore[misc]
            else:
                self._resume_unless_done(number)
        first, second = (side.is_done() for side in self.sides)
        return self.group.add(elementwise.bitwise_and, first, second)

    def _resume_unless_done(self, number: int) -> None:
        self.scheduler.emit_if(self.scheduler.negate(self.sides[number].is_done()), lambda: self._resume_side(number))

    def _resume_side(self, number: int) -> None:
        serial, self.scheduler.serial = self.scheduler.serial, self.scheduler.serial and not self.split
        # Code for one tile needs no mask: the tile is active, or its side is done.
        masked = self.varying and not (self.split and self.scheduler.lockstep_width == 1)
        with restrict_to_mask(self.group, self.scheduler.load(self.masks[number]).value) if masked else nullcontext():
            self.sides[number].resume()
        self.scheduler.serial = serial

    def results(self) -> list[GroupValue]:
        """Each tile's results, from its own side."""
        found, *others = ([self.scheduler.load(c) for c in side.outputs] for side in self.sides)
        if self.varying:
            for slot, new in zip(self.masks[1:], others, strict=True):
                mask = self.scheduler.load(slot).value
                found = [select_by_mask(self.group, mask, n, o) for n, o in zip(new, found, strict=True)]
            return found
        # Both sides have results of the same types; one side's are defined.
        condition = self.scheduler.load(self.condition_slot)
        return [
            GroupValue(
                self.group.add(elementwise.where, _broadcast_condition(self, condition, a), a.value, b.value), a.varying
            )
            for a, b in zip(found, others[0], strict=True)
        ]


def _broadcast_condition(point: _SuspensionPoint, condition: GroupValue, like: GroupValue) -> Value:
    return point.group.broadcast(condition.value, static_shape(like.value.type))


def _match_all_varying(
    point: _SuspensionPoint, parts: Sequence[GroupValue], varying: Sequence[bool]
) -> list[GroupValue]:
    return [GroupValue(match_varying(point.group, p, w), w) for p, w in zip(parts, varying, strict=True)]


def _make_state_type(part: GroupValue, varying: bool, size: int) -> TensorType:
    type = part.value.type
    assert isinstance(type, TensorType)
    return type.with_shape((size, *part.shape) if varying else part.shape)


def _find_varying_results(branch: BranchPoint) -> list[bool]:
    """Which results of a branch differ between tiles; the nodes of this trial run are discarded."""
    value: list[list[GroupValue]] = []
    for block in branch.node.regions:
        with branch.group.builder.region():
            value.append(branch.walk(block))
    return [any(p.varying for p in pair) for pair in zip(*value, strict=True)]


class LoopPoint(_SuspensionPoint):
    """A loop; `state` is what it carries, `holds` whether there is another iteration (for each tile, if divergent)."""

    body: Block

    def initial(self) -> list[GroupValue]:
        """The state before the first iteration."""
        raise NotImplementedError

    def holds(self, state: Sequence[GroupValue]) -> GroupValue:
        """Whether there is another iteration."""
        raise NotImplementedError

    def advance_state(self, state: Sequence[GroupValue], results: Sequence[GroupValue]) -> list[GroupValue]:
        """The state after an iteration."""
        raise NotImplementedError

    def begin(self) -> None:
        """Set the state, and which tiles make an iteration."""
        first = self.initial()
        flags = solve_varying([p.varying for p in first] + [False], lambda w: self._find_varying(first, w))
        self.divergent = flags.pop()
        self.varying_results = [w or self.divergent for w in flags]
        state = _match_all_varying(self, first, self.varying_results)
        self.state = [self.scheduler.save(p) for p in state]
        self.routine = Coroutine(self.scheduler, self.body, self.walk, lambda parts: list(parts))
        self.continuing = self.scheduler.save(self._mask_condition(self.holds(state)))
        self.routine.begin()

    def _find_varying(self, first: Sequence[GroupValue], varying: Sequence[bool]) -> list[GroupValue]:
        divergent = varying[-1]
        flags = [w or divergent for w in varying[:-1]]
        types = [_make_state_type(p, w, self.group.size) for p, w in zip(first, flags, strict=True)]
        state = [GroupValue(Value(t), w) for t, w in zip(types, flags, strict=True)]
        with self.group.builder.region():
            condition = self.holds(state)
            after = self.advance_state(state, self.walk(self.body, *state))
        return [*after, condition]

    def _mask_condition(self, condition: GroupValue) -> GroupValue:
        if not self.divergent:
            return condition
        return GroupValue(intersect_active(self.group, self.group.to_varying(condition)), True)

    def _any_continuing(self) -> Value:
        condition = self.scheduler.load(self.continuing).value
        return any_active(self.group, condition) if self.divergent else condition

    def step(self) -> Value:
        """Whether the loop is done, after as many iterations as need no wait."""
        self.scheduler.emit_while(self._any_continuing(), self._emit_iteration)
        return self.scheduler.negate(self._any_continuing())

    def _emit_iteration(self) -> Value:
        state = [self.scheduler.load(c) for c in self.state]
        self.walk.env.update(zip(self.body.params, state, strict=True))
        mask = self.scheduler.load(self.continuing).value if self.divergent else None
        with restrict_to_mask(self.group, mask) if self.divergent else nullcontext():
            self.routine.resume()
            done = self.routine.is_done()
            self.scheduler.emit_if(done, lambda: self._finish_iteration(state, mask))
        return self.group.add(elementwise.bitwise_and, done, self._any_continuing())

    def _finish_iteration(self, state: Sequence[GroupValue], mask: Value | None) -> None:
        found = self.advance_state(state, [self.scheduler.load(c) for c in self.routine.outputs])
        after = _match_all_varying(self, found, self.varying_results)
        if mask is not None:
            after = [select_by_mask(self.group, mask, n, o) for n, o in zip(after, state, strict=True)]
        for slot, part in zip(self.state, after, strict=True):
            self.scheduler.store(slot, part.value)
        self.scheduler.store(self.continuing, self._mask_condition(self.holds(after)).value)
        self.routine.begin()

    def results(self) -> list[GroupValue]:
        """The state after the last iteration."""
        return [self.scheduler.load(c) for c in self.state[-len(self.node.results) :]] if self.node.results else []


class ForPoint(LoopPoint):
    """A `for` loop."""

    @property
    def body(self) -> Block:  # type: ignore[override]
        """The loop's body."""
        return self.node.regions[0]

    def initial(self) -> list[GroupValue]:
        """The induction variable and the loop-carried values."""
        args = self.args()
        return [args[0], *args[3:]]

    def holds(self, state: Sequence[GroupValue]) -> GroupValue:
        """Whether the induction variable is within its bounds."""
        stop, step = self.args()[1:3]
        varying = any(p.varying for p in (state[0], stop, step))
        i, end, by = (match_varying(self.group, p, varying) for p in (state[0], stop, step))
        zero = self.group.broadcast(self.group.full(0, int64), static_shape(by.type))
        up = self.group.add(elementwise.greater, by, zero)
        below, above = (self.group.add(op, i, end) for op in (elementwise.less, elementwise.greater))
        return GroupValue(self.group.add(elementwise.where, up, below, above), varying)

    def advance_state(self, state: Sequence[GroupValue], results: Sequence[GroupValue]) -> list[GroupValue]:
        """The induction variable advanced by the step."""
        step = self.args()[2]
        varying = state[0].varying or step.varying
        i, by = (match_varying(self.group, p, varying) for p in (state[0], step))
        return [GroupValue(self.group.add(elementwise.add, i, by), varying), *results]


class WhilePoint(LoopPoint):
    """A `while` loop."""

    @property
    def body(self) -> Block:  # type: ignore[override]
        """The loop's body."""
        return self.node.regions[1]

    def initial(self) -> list[GroupValue]:
        """The loop-carried values."""
        return self.args()

    def holds(self, state: Sequence[GroupValue]) -> GroupValue:
        """The condition."""
        return self.walk(self.node.regions[0], *state)[0]

    def advance_state(self, state: Sequence[GroupValue], results: Sequence[GroupValue]) -> list[GroupValue]:
        """The results of the body."""
        return list(results)


SUSPENSION_POINTS.update(
    {
        mbarrier_wait: MbarrierWaitPoint,
        control_flow.if_: BranchPoint,
        control_flow.for_: ForPoint,
        control_flow.while_: WhilePoint,
    }
)

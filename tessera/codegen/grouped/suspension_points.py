"""Suspension points of coroutines: mbarrier waits, and the branches and loops that contain waits."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

from tessera.codegen.block_types import static_shape
from tessera.codegen.grouped.control_flow import (
    any_active,
    intersect_active,
    match_varying,
    restrict_to_mask,
    select_by_mask,
    solve_varying,
)
from tessera.codegen.grouped.coroutines import SUSPENSION_POINTS, Coroutine, CoroutineScheduler, CoroutineSlot
from tessera.codegen.grouped.mbarriers import find_waiting_tiles, report_deadlock
from tessera.codegen.grouped.vectoriser import GroupValue
from tessera.core.types import TensorType, int64
from tessera.ir.core import Block, Node, Value
from tessera.ops.dialects import control_flow
from tessera.ops.dialects.mbarrier import mbarrier_wait
from tessera.ops.tensor import elementwise


class _SuspensionPoint:
    """A node that pauses, and the values that it works on."""

    def __init__(self, tasks: CoroutineScheduler, node: Node, walk: Any) -> None:
        self.tasks, self.group, self.node, self.walk = tasks, tasks.group, node, walk

    def begin(self) -> None:
        """Get ready."""

    def results(self) -> list[GroupValue]:
        """The node's results, once it is done."""
        return []

    def args(self) -> list[GroupValue]:
        """The operands."""
        return [self.walk.env[v] for v in self.node.args]


class MbarrierWaitPoint(_SuspensionPoint):
    """A wait at an mbarrier, of the tiles that run."""

    def step(self) -> Value:
        """Whether all of them may go on; where nobody got on in the last round, that is a deadlock."""
        with self.group.b.at(self.node.loc):
            held, any_of_them = find_waiting_tiles(self.group, self.node, self.args())
            last = self.tasks.get(self.tasks.last).value
            report_deadlock(self.group, self.group.add(elementwise.bitwise_and, any_of_them, last), held)
            return self.tasks.negated(any_of_them)


class BranchPoint(_SuspensionPoint):
    """Two sides, for tiles of their own or (where the condition is the same for all) one of them for all.

    Where tiles wait for different things each tile goes through its side by itself.
    """

    def begin(self) -> None:
        """Choose the sides' tiles."""
        (condition,) = self.args()
        no = self.group.add(elementwise.bitwise_not, condition.value)
        self.varying, self.split = condition.varying, condition.varying and self.tasks.apart
        which = [True] * len(self.node.results) if self.varying else _find_varying_results(self)
        self.sides: list[Coroutine] = []
        self.masks: list[CoroutineSlot] = []
        for block, mask in zip(self.node.regions, (condition.value, no), strict=True):
            self._add(block, mask, which)
        self.taken = self.tasks.keep(condition)

    def _add(self, block: Block, mask: Value, which: Sequence[bool]) -> None:
        side = Coroutine(self.tasks, block, self.walk, lambda parts: _match_all_varying(self, parts, which), self.split)
        if self.varying:
            mask = intersect_active(self.group, mask)
            keep = self.tasks.scatter_to_tiles if self.split else self.tasks.keep
            self.masks.append(keep(GroupValue(mask, True)))
        going = (
            self.tasks.any_in_stretch(mask) if self.split else any_active(self.group, mask) if self.varying else mask
        )
        side.begin(going)
        self.sides.append(side)

    def step(self) -> Value:
        """Whether all sides are done, each taken on as far as it goes."""
        for number in range(len(self.sides)):
            if self.split:
                self.tasks.each(lambda n=number: self._unless_done(n))  # type: ignore[misc]
            else:
                self._unless_done(number)
        first, second = (side.done() for side in self.sides)
        return self.group.add(elementwise.bitwise_and, first, second)

    def _unless_done(self, number: int) -> None:
        self.tasks.when(self.tasks.negated(self.sides[number].done()), lambda: self._side(number))

    def _side(self, number: int) -> None:
        apart, self.tasks.apart = self.tasks.apart, self.tasks.apart and not self.split
        masked = self.varying and not (
            self.split and self.tasks.lockstep_width == 1
        )  # a tile alone is there, or it is done
        with restrict_to_mask(self.group, self.tasks.get(self.masks[number]).value) if masked else nullcontext():
            self.sides[number].go()
        self.tasks.apart = apart

    def results(self) -> list[GroupValue]:
        """Each tile's from its own side."""
        found, *others = ([self.tasks.get(c) for c in side.out] for side in self.sides)
        if self.varying:
            for cell, new in zip(self.masks[1:], others, strict=True):
                mask = self.tasks.get(cell).value
                found = [select_by_mask(self.group, mask, n, o) for n, o in zip(new, found, strict=True)]
            return found
        # Both are blocks of one type, of which one has been filled.
        condition = self.tasks.get(self.taken)
        return [
            GroupValue(
                self.group.add(elementwise.where, _broadcast_condition(self, condition, a), a.value, b.value), a.varying
            )
            for a, b in zip(found, others[0], strict=True)
        ]


def _broadcast_condition(pause: _SuspensionPoint, condition: GroupValue, like: GroupValue) -> Value:
    return pause.group.broadcast(condition.value, static_shape(like.value.type))


def _match_all_varying(
    pause: _SuspensionPoint, parts: Sequence[GroupValue], varying: Sequence[bool]
) -> list[GroupValue]:
    return [GroupValue(match_varying(pause.group, p, w), w) for p, w in zip(parts, varying, strict=True)]


def _make_state_type(part: GroupValue, varying: bool, size: int) -> TensorType:
    type = part.value.type
    assert isinstance(type, TensorType)
    return type.with_shape((size, *part.shape) if varying else part.shape)


def _find_varying_results(branch: BranchPoint) -> list[bool]:
    """Which results of a branch differ between tiles; what is recorded to learn it is dropped."""
    found: list[list[GroupValue]] = []
    for block in branch.node.regions:
        with branch.group.b.region():
            found.append(branch.walk(block))
    return [any(p.varying for p in pair) for pair in zip(*found, strict=True)]


class LoopPoint(_SuspensionPoint):
    """Rounds of a body: `state` is what they carry, `holds` says (for each tile, if it differs) who makes another."""

    body: Block

    def initial(self) -> list[GroupValue]:
        """The state before the first round."""
        raise NotImplementedError

    def holds(self, state: Sequence[GroupValue]) -> GroupValue:
        """Whether there is another round."""
        raise NotImplementedError

    def advance_state(self, state: Sequence[GroupValue], results: Sequence[GroupValue]) -> list[GroupValue]:
        """The state after a round."""
        raise NotImplementedError

    def begin(self) -> None:
        """Set the state, and see who makes a round."""
        first = self.initial()
        flags = solve_varying([p.varying for p in first] + [False], lambda w: self._trial(first, w))
        self.divergent = flags.pop()
        self.which = [w or self.divergent for w in flags]
        state = _match_all_varying(self, first, self.which)
        self.state = [self.tasks.keep(p) for p in state]
        self.stretch = Coroutine(self.tasks, self.body, self.walk, lambda parts: list(parts))
        self.continuing = self.tasks.keep(self._live(self.holds(state)))
        self.stretch.begin()

    def _trial(self, first: Sequence[GroupValue], varying: Sequence[bool]) -> list[GroupValue]:
        parted = varying[-1]
        flags = [w or parted for w in varying[:-1]]
        types = [_make_state_type(p, w, self.group.size) for p, w in zip(first, flags, strict=True)]
        state = [GroupValue(Value(t), w) for t, w in zip(types, flags, strict=True)]
        with self.group.b.region():
            held = self.holds(state)
            after = self.advance_state(state, self.walk(self.body, *state))
        return [*after, held]

    def _live(self, held: GroupValue) -> GroupValue:
        if not self.divergent:
            return held
        return GroupValue(intersect_active(self.group, self.group.whole(held)), True)

    def _any(self) -> Value:
        held = self.tasks.get(self.continuing).value
        return any_active(self.group, held) if self.divergent else held

    def step(self) -> Value:
        """Whether the last round is done, after as many as go without waiting."""
        self.tasks.repeat(self._any(), self._round)
        return self.tasks.negated(self._any())

    def _round(self) -> Value:
        state = [self.tasks.get(c) for c in self.state]
        self.walk.env.update(zip(self.body.params, state, strict=True))
        mask = self.tasks.get(self.continuing).value if self.divergent else None
        with restrict_to_mask(self.group, mask) if self.divergent else nullcontext():
            self.stretch.go()
            done = self.stretch.done()
            self.tasks.when(done, lambda: self._next(state, mask))
        return self.group.add(elementwise.bitwise_and, done, self._any())

    def _next(self, state: Sequence[GroupValue], mask: Value | None) -> None:
        found = self.advance_state(state, [self.tasks.get(c) for c in self.stretch.out])
        after = _match_all_varying(self, found, self.which)
        if mask is not None:
            after = [select_by_mask(self.group, mask, n, o) for n, o in zip(after, state, strict=True)]
        for cell, part in zip(self.state, after, strict=True):
            self.tasks.put(cell, part.value)
        self.tasks.put(self.continuing, self._live(self.holds(after)).value)
        self.stretch.begin()

    def results(self) -> list[GroupValue]:
        """What the last round has left."""
        return [self.tasks.get(c) for c in self.state[-len(self.node.results) :]] if self.node.results else []


class ForPoint(LoopPoint):
    """A counted loop."""

    @property
    def body(self) -> Block:  # type: ignore[override]
        """What is repeated."""
        return self.node.regions[0]

    def initial(self) -> list[GroupValue]:
        """The counter and what is carried."""
        args = self.args()
        return [args[0], *args[3:]]

    def holds(self, state: Sequence[GroupValue]) -> GroupValue:
        """Whether the counter is within its bounds."""
        stop, step = self.args()[1:3]
        varying = any(p.varying for p in (state[0], stop, step))
        i, end, by = (match_varying(self.group, p, varying) for p in (state[0], stop, step))
        zero = self.group.broadcast(self.group.full(0, int64), static_shape(by.type))
        up = self.group.add(elementwise.greater, by, zero)
        below, above = (self.group.add(op, i, end) for op in (elementwise.less, elementwise.greater))
        return GroupValue(self.group.add(elementwise.where, up, below, above), varying)

    def advance_state(self, state: Sequence[GroupValue], results: Sequence[GroupValue]) -> list[GroupValue]:
        """The counter goes on."""
        step = self.args()[2]
        varying = state[0].varying or step.varying
        i, by = (match_varying(self.group, p, varying) for p in (state[0], step))
        return [GroupValue(self.group.add(elementwise.add, i, by), varying), *results]


class WhilePoint(LoopPoint):
    """A loop with a condition."""

    @property
    def body(self) -> Block:  # type: ignore[override]
        """What is repeated."""
        return self.node.regions[1]

    def initial(self) -> list[GroupValue]:
        """What is carried."""
        return self.args()

    def holds(self, state: Sequence[GroupValue]) -> GroupValue:
        """The condition."""
        return self.walk(self.node.regions[0], *state)[0]

    def advance_state(self, state: Sequence[GroupValue], results: Sequence[GroupValue]) -> list[GroupValue]:
        """What the body gives."""
        return list(results)


SUSPENSION_POINTS.update(
    {
        mbarrier_wait: MbarrierWaitPoint,
        control_flow.if_: BranchPoint,
        control_flow.for_: ForPoint,
        control_flow.while_: WhilePoint,
    }
)

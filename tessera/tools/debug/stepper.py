"""Debugger engine: observes each node before it runs, records the history, and stops at breakpoints and goals."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from tessera.core.errors import TesseraError
from tessera.interp.observers import ObservedLaunch
from tessera.interp.tile.machine import TileMachine
from tessera.ir.builder import NodeSemantics
from tessera.ir.numerics.interval_arithmetic import require_exact
from tessera.ops.dialects import tile
from tessera.tools.debug.breakpoints import Breakpoint, Goal, Watchpoint
from tessera.tools.debug.history import ExecutionHistory, HistoryStep, instance_value, variables_at

InstanceIndex = tuple[int, ...]


class Stepper:
    """An observer that stops: it calls `stopped(reason)` at each stop, which returns how to continue.

    It returns a goal; while it runs, `step` is where the run stands (it may be moved back into the history) and
    `instance` whose view is shown. `focus` is the one instance to stop for, if it has been chosen.
    """

    stops = True

    def __init__(self, stopped: Callable[[str], Goal | None]) -> None:
        self.stopped = stopped
        self.history = ExecutionHistory()
        self.breakpoints: list[Breakpoint] = []
        self.watches: list[Watchpoint] = []
        self.focus: InstanceIndex | None = None
        self.goal: Goal | None = None  # None: stop at the first step
        self.detached = False
        self.step: HistoryStep | None = None
        self.instance: InstanceIndex = ()
        self.error: TesseraError | None = None
        self.over = False
        self._launches: list[ObservedLaunch] = []  # under way, the innermost last

    def enter(self, started: ObservedLaunch) -> None:
        """A launch begins."""
        self._launches.append(started)
        self.history.enter(started)

    def leave(self) -> None:
        """The launch has ended."""
        self._launches.pop()
        self.history.leave()

    def meaning(self, machine: TileMachine, inner: NodeSemantics) -> NodeSemantics:
        """Wrap the semantics of nodes: record each before and after it runs."""

        def mean(node: Any, args: list[Any], walk: Any) -> Sequence[Any]:
            if self.detached:
                return inner(node, args, walk)
            step = self.history.begin(node, args, machine, self._launches[-1])
            self._arrive(step)
            try:
                results = inner(node, args, walk)
            except TesseraError as error:
                self._fail(step, error)
                raise
            self.history.end(step, results)
            return results

        return mean

    def finish(self) -> None:
        """End the run: stop once more, unless the user has detached."""
        if not self.detached and self.history.steps and self.error is None:
            self.over = True
            self.step = self.history.close()
            if self.focus is not None and self.step.place(self.focus) is not None:
                self.instance = self.focus
            self._stop(self._last())

    def _arrive(self, step: HistoryStep) -> None:
        reason = self.reason(step)
        if reason is not None:
            self.step = step
            self._stop(reason)

    def _fail(self, step: HistoryStep, error: TesseraError) -> None:
        if self.error is not None or self.detached:
            return
        self.error, self.step = error.at(step.node.loc), step
        if error.instance is not None and step.place(error.instance) is None:  # found after the access that it is about
            earlier = (s for s in self.history.before(step) if s.place(error.instance) is not None)
            self.step = next((s for s in earlier if s.node.loc == error.location), step)
        self.instance = self._failing(self.step, error)
        self._stop(str(error))

    def _failing(self, step: HistoryStep, error: TesseraError) -> InstanceIndex:
        """The instance that an error is about, where it says so: by its index, or its place among those that run."""
        if error.instance is not None and step.place(error.instance) is not None:
            return error.instance
        lane = getattr(error, "lane", None)
        if lane is not None:
            return tuple(f + i for f, i in zip(step.first, lane, strict=False))
        return next(iter(step.instances()), step.first)

    def reason(self, step: HistoryStep) -> str | None:
        """The reason to stop at a step: a breakpoint, a watchpoint or the goal; None to continue."""
        found = self._check_breakpoints(step) or self._check_watchpoints(step)
        if found is not None:
            return found
        first = self._choose_instance(step)
        if first is not None and (self.goal is None or self.goal(step)):
            self.instance = first
            return ""
        return None

    def _choose_instance(self, step: HistoryStep) -> InstanceIndex | None:
        """The instance whose view a step is shown in: the focus, the last one shown, or the first that runs."""
        if self.focus is not None:
            return self.focus if step.place(self.focus) is not None else None
        if self.instance and step.place(self.instance) is not None:
            return self.instance
        return next(iter(step.instances()), None)

    def _candidates(self, step: HistoryStep) -> Iterable[InstanceIndex]:
        if self.focus is None:
            return step.instances()
        return [self.focus] if step.place(self.focus) is not None else []

    def _check_breakpoints(self, step: HistoryStep) -> str | None:
        if step.node.op is tile.pause:
            return self._check_pause(step)
        for each in self.breakpoints:
            here = each.here(step)
            each.reached = each.reached or here
            for instance in self._candidates(step) if here else ():
                found = self._at_breakpoint(each, step, instance)
                if found is not None:
                    self.instance = instance
                    return found
        return None

    def _at_breakpoint(self, point: Breakpoint, step: HistoryStep, instance: InstanceIndex) -> str | None:
        """Why to stop for an instance at a breakpoint; a condition that cannot be told is a reason too."""
        if not point.wants(step, instance):
            return None
        try:
            holds = point.condition is None or np.all(self.evaluate(point.condition, step, instance))
        except Exception as error:  # the user's expression may raise anything
            return f"{point}: {type(error).__name__}: {error}"
        return str(point) if holds else None

    def _check_pause(self, step: HistoryStep) -> str | None:
        condition = require_exact(step.args[0])
        for instance in self._candidates(step):
            place = step.place(instance)
            if place is not None and instance_value(condition, None, place):
                self.instance = instance
                return "break_here"
        return None

    def _check_watchpoints(self, step: HistoryStep) -> str | None:
        if not step.starts or not self.watches:
            return None
        instance = self._choose_instance(step)
        for each in self.watches if instance is not None else ():
            assert instance is not None
            try:
                before, now = each.last, self.evaluate(each.text, step, instance)
            except Exception:  # noqa: S112 - it has no value on this line
                continue
            if each.changed(now):
                self.instance = instance
                return f"{each.text} changed from {before} to {now}"
        return None

    def evaluate(self, text: str, step: HistoryStep, instance: InstanceIndex, line: HistoryStep | None = None) -> Any:
        """A Python expression over the variables that an instance has at a step (in the call whose line is given)."""
        line = line or (step.calls[-1] if step.calls else step)
        names = variables_at(self.history, step, line, instance)
        with np.errstate(all="ignore"):
            return eval(text, {"np": np, "numpy": np, **names})  # noqa: S307 - the user's own expression

    def _stop(self, reason: str) -> None:
        """Ask how to go on; a goal within the history is reached there, one beyond it by running on."""
        while True:
            self.goal = self.stopped(reason)
            ended = self.over or self.error is not None
            if self.detached or self.step is None or (ended and self.step is self.history.steps[-1]):
                return
            found = next(((s, r) for s in self.history.after(self.step) if (r := self.reason(s)) is not None), None)
            if found is None and not ended:
                return
            self.step, reason = found if found is not None else (self.history.steps[-1], self._last())

    def _last(self) -> str:
        if self.error is not None:
            return str(self.error)
        missed = [
            f"\n{point}: the run never came to this line after it was set"
            for point in self.breakpoints
            if not point.reached
        ]
        return "the program has ended" + "".join(missed)

    def back(self, goal: Goal) -> str | None:
        """Go back to the nearest earlier step where a goal or a breakpoint stops; None where there is none."""
        assert self.step is not None
        before, self.goal = self.goal, goal
        watches, self.watches = self.watches, []
        for each in watches:
            each.known = False
        try:
            for step in self.history.before(self.step):
                reason = self.reason(step)
                if reason is not None:
                    self.step = step
                    return reason
            return None
        finally:
            self.goal, self.watches = before, watches

    def first(self) -> HistoryStep | None:
        """The earliest step in the history."""
        return self.history.steps[0] if self.history.steps else None

"""One processing element: its memory, its tasks and their states, its threads, its clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from types import GeneratorType
from typing import Any

import numpy as np

from tessera.errors import ArgumentError, Location
from tessera.interp.target.csl import types as t
from tessera.interp.target.csl.events import Events
from tessera.interp.target.csl.exports import Exports, Function
from tessera.interp.target.csl.faults import CslFault
from tessera.interp.target.csl.flushing import Flushing
from tessera.interp.target.csl.operations import Operations
from tessera.interp.target.csl.program import BOOT, Program, allocated
from tessera.interp.target.csl.registers import Registers
from tessera.interp.target.csl.scheduler import Running, Scheduler, wait_words
from tessera.interp.target.csl.sema.tables import Task
from tessera.interp.target.csl.sources import Wait
from tessera.interp.target.csl.together import Bound, Cohort
from tessera.interp.target.csl.values import Dsr, Fifo, Loaded, NativeFunction

TASK_SWITCH = 7  # cycles to begin a task: fitted to published counts of programs of many tasks
NO_TASK = 31


class Pe(Operations, Flushing, Exports, Scheduler):
    """A processing element that runs `program` at (x, y) of the rectangle.

    `fabric` is its view of the router (see the module `view`); None for a PE on its own. Faults of the program
    are raised as `CslFault` from `events.run`.
    """

    def __init__(
        self, program: Program, x: int, y: int, events: Events, fabric: Any = None, cohort: Cohort | None = None
    ) -> None:
        self.program, self.x, self.y, self.events, self.fabric = program, x, y, events, fabric
        self.wide = int(program.unit.options.arch == "wse3")
        # SDK 2.10 no longer initializes input queues by itself.
        self.bare = bool(self.wide) or program.unit.options.sdk != "1.4"
        self.clock = 0
        self.memory_used = program.memory_used
        tables = program.tables
        self.fifos: list[Fifo] = [Fifo(size, *map(program.task_number, tasks)) for size, *tasks in tables.fifos]
        self.enders: set[int] = set()
        self.preferred: set[int] = set()  # ids, colors and queues whose tasks go before others
        self.in_colors, self.out_colors = dict(tables.queues_in), dict(tables.queues_out)
        self.flushed = {}
        self.registers = Registers(self)
        self.dsrs: dict[Dsr, Loaded] = {}
        self.busy: dict[tuple[str, int], Location] = {}
        self.state: dict[str, Any] = {}
        self.traces: dict[str, list[Any]] = {}
        self.output: list[str] = []
        self.trace: Callable[[str, int, int], None] | None = None
        self.cohort, self.pending = cohort, deque()
        arrays = [allocated(g) for g in program.unit.globals] if cohort is None else cohort.join(self)
        self.numbers = {id(array): number for number, array in enumerate(arrays)}
        self.space = program.namespace(self, arrays)
        self.local = {n: task for (kind, n), task in tables.tasks.items() if kind == "local"}
        self.control = {n: task for (kind, n), task in tables.tasks.items() if kind == "control"}
        self.data = {self._color(n): task for (kind, n), task in tables.tasks.items() if kind == "data"}
        self.active: dict[int, None] = dict.fromkeys(tables.activated)
        self.blocked = set(tables.blocked)
        self.heads: dict[int, None] = {}
        self.calls: deque[tuple[str, Callable[..., Any], tuple[Any, ...]]] = deque()
        self.front: Running | None = None
        self.threads: dict[Running, None] = {}
        self.waiters: dict[Any, list[Running]] = {}
        self._due: int | None = None

    def _color(self, number: int) -> int:
        """The color of a data task: on WSE-3 its id is an input queue."""
        if not self.wide:
            return number
        if number not in self.in_colors:
            task = self.program.tasks["data", number]
            raise CslFault(f"input queue {number} of data task '{task.title}' is not initialized", location=task.loc)
        return self.in_colors[number]

    def boot(self) -> None:
        """Make ready what comptime blocks activated."""
        self.space[BOOT]()
        for number in self.active:
            self._bound(number)
        self.wake()

    def _bound(self, number: int) -> Task:
        if number not in self.local:
            raise CslFault(f"local task ID {number} is activated but no task is bound to it")
        return self.local[number]

    def activate(self, number: int) -> None:
        """`@activate`."""
        self._bound(number)
        self.active[number] = None
        self.wake()

    def block(self, number: int) -> None:
        """`@block`."""
        self.blocked.add(number)

    def unblock(self, number: int) -> None:
        """`@unblock`."""
        self.blocked.discard(number)
        self.wake()

    def start(self, function: Any, args: tuple[Any, ...] = ()) -> None:
        """Call an exported function when the PE is free, as a launch from the host does."""
        if len(args) != len(function.params):
            raise ArgumentError(
                f"'{function.name}' is launched with {len(args)} arguments", expected=str(len(function.params))
            )
        given = tuple(_argument(p, a) for p, a in zip(function.params, args, strict=True))
        self.calls.append((function.name, function.run, given))
        self.wake()

    def arrived(self, color: int) -> None:
        """A wavelet came to the input queue of a color."""
        self.heads[color] = None
        self.notify("in", color)
        self.wake()

    def drained(self, color: int) -> None:
        """An output queue has room again."""
        self.notify("out", color)

    def wake(self) -> None:
        """Look for a ready task as soon as the PE is free."""
        when = max(self.clock, self.events.now)
        if self.front is None and (self._due is None or self._due > when):
            self._due = when
            self.events.at(when, self._dispatch)

    def _dispatch(self) -> None:
        self._due = None
        if self.front is not None:
            return
        if self.events.now < self.clock:
            self.wake()
            return
        ready = self._ready()
        if ready is not None:
            self._run(*ready)

    def _ready(self) -> tuple[str, Callable[..., Any], tuple[Any, ...]] | None:
        """The next thing to run, taken off its queue."""
        found: list[tuple[int, Callable[[], tuple[str, Callable[..., Any], tuple[Any, ...]]]]] = []
        for color in list(self.heads):
            taken = self._head(color)
            if taken is not None:
                found.append((self._source(color), taken))
        found += [(n, partial(self._activated, n)) for n in self.active if n not in self.blocked]
        if self.calls:
            found.append((-1, self.calls.popleft))
        if not found:
            return None
        first = [take for number, take in found if number in self.preferred] or [take for _, take in found]
        return (first[0] if self.events.random is None else self.events.random.choice(first))()

    def _source(self, color: int) -> int:
        """What the priority of a color's tasks goes by: the color, or on WSE-3 its queue."""
        return next((q for q, c in self.in_colors.items() if c == color), color) if self.wide else color

    def _activated(self, number: int) -> tuple[str, Callable[..., Any], tuple[Any, ...]]:
        del self.active[number]
        return self._task(self.local[number], ())

    def _task(self, task: Task, args: tuple[Any, ...]) -> tuple[str, Callable[..., Any], tuple[Any, ...]]:
        return task.title, self.space[task.name], args

    def _head(self, color: int) -> Callable[[], Any] | None:
        """What the wavelet at the head of an input queue would start."""
        head = self.fabric.peek(color)
        if head is None:
            del self.heads[color]
            return None
        word, is_control = head
        if is_control:
            return self._control(color, word)
        task = self.data.get(color)
        if task is None or ("in", color) in self.busy or task.number in self.blocked:
            return None
        return lambda: self._task(task, arguments(task.params, self.fabric.pop(color, 1)[0]))

    def _control(self, color: int, word: int) -> Callable[[], Any] | None:
        if color in self.enders:
            return None
        entry = word >> 16 & 0x3F
        task = self.control.get(entry)
        if entry in self.blocked or self._queue_blocked(color):
            return None
        if task is None:
            self.fabric.pop_control(color)
            if entry != NO_TASK:
                what = f"control wavelet on color {color} names task ID {entry}, to which no task is bound"
                raise self._place(CslFault(what), None, None)
            self.wake()
            return None
        return lambda: (self.fabric.pop_control(color), self._task(task, arguments(task.params, word & 0xFFFF)))[1]

    def _queue_blocked(self, color: int) -> bool:
        if not self.wide:
            return color in self.blocked
        return any(q in self.blocked for q, c in self.in_colors.items() if c == color)

    def _run(self, name: str, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        start = self.events.now
        self.clock = max(self.clock, start) + TASK_SWITCH

        def done() -> None:
            self.front = None
            if self.trace is not None:
                self.trace(name, start, self.clock)
            self.wake()

        known = None if self.cohort is None else self.cohort.record(self, function, args)
        if known is not None:
            self._follow(*known)
            done()
            return
        self.settle()
        try:
            found = function(*args)
        except Exception as error:
            self._failed(error)
        if isinstance(found, GeneratorType):
            self.front = Running(name, found, done, True, Location())
            self._resume(self.front)
        else:
            done()

    def _follow(self, bound: Bound, values: list[Any], inputs: tuple[Any, ...], results: list[tuple[str, Any]]) -> None:
        """Run a task by its record: all at once, but for what it does to memory."""
        self.pending.append((bound.work, inputs))
        self.space.update(results)
        for cycles, call, args, line in bound.effects:
            self.clock += cycles
            try:
                call(self, *args(self, values))
            except Exception as error:
                self._failed(error, line=line)
        self.clock += bound.cycles

    def settle(self) -> None:
        """Do to memory what tasks have left to be done."""
        if self.pending and self.cohort is not None:
            self.cohort.settle(self)

    def native(self, function: NativeFunction) -> Callable[..., Any]:
        """A library's function as the program calls it."""
        return partial(function.run, self)

    @property
    def idle(self) -> bool:
        """Whether nothing runs or is about to."""
        return self.front is None and not self.threads and not self.calls and not (set(self.active) - self.blocked)

    def waiting(self) -> list[str]:
        """Who waits for what, in words."""
        running = ([self.front] if self.front else []) + list(self.threads)
        found = [f"{r.name}{f' ({r.loc})' if r.loc.line else ''} waits for {wait_words(r.wait)}" for r in running]
        held = [self.local[n].title for n in self.active if n in self.blocked]
        return found + [f"task '{name}' is active but blocked" for name in held]


def _argument(type_: t.Type, value: Any) -> Any:
    if isinstance(type_, t.Float):
        return type_.dtype.type(value)
    return type_.wrap(int(value)) if isinstance(type_, t.Int) else value


def arguments(params: tuple[t.Type, ...], word: int) -> tuple[Any, ...]:
    """The parameters of a task out of a wavelet: one of 32 bits, or up to two of 16, the low half first."""
    found = []
    for p in params:
        mask = 0xFFFFFFFF if p.size == 4 else 0xFFFF
        cell = np.array([word & mask], np.uint32 if p.size == 4 else np.uint16)
        cell = cell.view(p.dtype) if p.dtype.itemsize > 1 else cell
        found.append(cell[0] if p.dtype.kind in "fV" else cell.item())
        word >>= 16
    return tuple(found)


__all__ = ["Function", "Pe", "Running", "Wait", "arguments"]

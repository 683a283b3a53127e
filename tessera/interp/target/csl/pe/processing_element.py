"""Processing element (PE): memory, exported symbols, task states, queue flushes, and task selection."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from functools import partial
from types import GeneratorType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tessera.core.errors import ArgumentError, Location
from tessera.interp.target.csl.fabric.routing import RouterRegisters
from tessera.interp.target.csl.pe.dsd_issue import DsdIssue
from tessera.interp.target.csl.pe.lockstep_execution import CompiledRecord, LockstepGroup
from tessera.interp.target.csl.pe.microthreads import WaitCondition
from tessera.interp.target.csl.pe.program import BOOT_FUNCTION, PeProgram, ValueInstantiation, allocate_global
from tessera.interp.target.csl.pe.scheduler import Coroutine, EventQueue, PeScheduler, describe_wait
from tessera.interp.target.csl.sema import types as t
from tessera.interp.target.csl.sema.compilation_unit import BoundTask
from tessera.interp.target.csl.sema.values import ComptimeValue, Dsr, DsrContents, Fifo, GlobalVariable, NativeFunction
from tessera.interp.target.csl.text.diagnostics import CslFault

# The part of a PE that the host and the libraries see: its exported symbols, its variables by name.


_GLOBAL = re.compile(r"[RG](\d+)_?$")


class ExportedFunction(NamedTuple):
    """An exported function on a PE."""

    name: str
    run: Callable[..., Any]
    params: tuple[t.CslType, ...]


class ExportedSymbols:
    """The symbols of one PE; each look at memory first does what waits to be done to it."""

    program: PeProgram
    space: dict[str, Any]

    if TYPE_CHECKING:

        def settle(self) -> None: ...

    def exported(self, name: str) -> Any:
        """An exported symbol as it is now: a `Pointer`, or a `Function`."""
        self.settle()
        o = self.program.exports[name]
        move = ValueInstantiation(self, [], self.space)
        move.arrays = [self.space[f"G{g.number}"] for g in self.program.unit.globals]
        if isinstance(o.type, t.CslFunctionType):
            return ExportedFunction(name, move(o.const), tuple(p for p in o.type.params if p is not None))
        return move(o.const) if o.known else self._variable(o.code)

    def _variable(self, code: str) -> Any:
        match = _GLOBAL.match(code)
        assert match is not None
        found = self.program.unit.globals[int(match.group(1))]
        return self.space[f"G{found.number}"][0] if found.addressed else self.space[f"v{found.number}"]

    def memory(self, thing: Any) -> np.ndarray[Any, Any]:
        """The array of a global, given as a `Global` or the `Value` of a library's variable."""
        found = thing.data if isinstance(thing, ComptimeValue) else thing
        assert isinstance(found, GlobalVariable)
        self.settle()
        return self.space[f"G{found.number}"]

    def variable(self, name: str) -> np.ndarray[Any, Any]:
        """The array of a global of the top-level file by its name; raises KeyError where there is none."""
        self.settle()
        for g in self.program.unit.globals:
            if g.name == name:
                loose = f"v{g.number}"
                return np.array([self.space[loose]]) if loose in self.space else self.space[f"G{g.number}"]
        raise KeyError(name)


# The part of a PE that gives its queues other colors while it runs, and learns when they have run empty.


QueueId = tuple[str, int]  # "in" or "out", and a number


class QueueFlushing:
    """Queues of one PE that change: their colors, and what is called when they are empty."""

    program: PeProgram
    fabric: Any
    space: dict[str, Any]
    in_colors: dict[int, int]
    out_colors: dict[int, int]
    data: dict[int, BoundTask]
    ready_colors: dict[int, None]
    calls: deque[tuple[str, Callable[..., Any], tuple[Any, ...]]]
    flushed: dict[QueueId, None]

    if TYPE_CHECKING:

        def wake(self) -> None: ...

    def torn_down(self, color: int) -> None:
        """A teardown reached this color: call its handler, if it has one."""
        self._handle([self.program.tables.teardown.get(color)])

    def flush(self, side: str, number: int) -> None:
        """`@queue_flush`: call the queue's handler as soon as it is empty."""
        if (side, number) not in self.program.tables.emptied:
            raise CslFault(f"{side}put queue {number} is flushed but has no '@set_empty_queue_handler'")
        self.fabric.when_empty(side, self._color_of_queue(side, number), lambda: self._emptied((side, number)))

    def _color_of_queue(self, side: str, number: int) -> int:
        colors = self.in_colors if side == "in" else self.out_colors
        if number not in colors:
            raise CslFault(f"{side}put queue {number} is not initialized")
        return colors[number]

    def _emptied(self, queue: QueueId) -> None:
        self.flushed[queue] = None
        self._handle([])

    def _handle(self, names: list[str | None]) -> None:
        """The teardown task: the handlers of an event, and those of all queues whose flush was not left."""
        names += [self.program.tables.emptied[queue] for queue in self.flushed]
        for name in names:
            if name is not None:
                self.calls.append((name, self.space[name], ()))
                self.wake()

    def leave_flush(self, side: str, number: int) -> None:
        """`queue_flush.exit()`: the handler is not called any more."""
        self.flushed.pop((side, number), None)

    def rebind(self, side: str, number: int, color: int) -> None:
        """Give a queue another color."""
        before = self._color_of_queue(side, number)
        empty = not self.fabric.queue(before).words if side == "in" else self.fabric.output_empty(before)
        if not empty:
            raise CslFault(f"{side}put queue {number} is given color {color} while words of color {before} are in it")
        if side == "out":
            self.out_colors[number] = color
            return
        self.in_colors[number] = color
        if before in self.data and self.data[before].number == number:
            self.data[color] = self.data.pop(before)
        self.ready_colors[color] = None
        self.wake()


# One processing element: its memory, its tasks and their states, its threads, its clock.


TASK_SWITCH_CYCLES = 7  # cycles to begin a task: fitted to published counts of programs of many tasks
NO_TASK_ID = 31


class Pe(DsdIssue, QueueFlushing, ExportedSymbols, PeScheduler):
    """A processing element that runs `program` at (x, y) of the rectangle.

    `fabric` is its view of the router (see the module `view`); None for a PE on its own. Faults of the program
    are raised as `CslFault` from `events.run`.
    """

    def __init__(
        self,
        program: PeProgram,
        x: int,
        y: int,
        events: EventQueue,
        fabric: Any = None,
        cohort: LockstepGroup | None = None,
    ) -> None:
        self.program, self.x, self.y, self.events, self.fabric = program, x, y, events, fabric
        self.wide = int(program.unit.options.arch == "wse3")
        # SDK 2.10 no longer initializes input queues by itself.
        self.needs_queue_initialisation = bool(self.wide) or program.unit.options.sdk != "1.4"
        self.clock = 0
        self.memory_used = program.memory_used
        tables = program.tables
        self.fifos: list[Fifo] = [Fifo(size, *map(program.task_number, tasks)) for size, *tasks in tables.fifos]
        self.control_ended_colors: set[int] = set()
        self.high_priority: set[int] = set()  # ids, colors and queues whose tasks go before others
        self.in_colors, self.out_colors = dict(tables.queues_in), dict(tables.queues_out)
        self.flushed = {}
        self.registers = RouterRegisters(self)
        self.dsrs: dict[Dsr, DsrContents] = {}
        self.busy: dict[tuple[str, int], Location] = {}
        self.state: dict[str, Any] = {}
        self.traces: dict[str, list[Any]] = {}
        self.output: list[str] = []
        self.trace: Callable[[str, int, int], None] | None = None
        self.lockstep_group, self.pending = cohort, deque()
        arrays = [allocate_global(g) for g in program.unit.globals] if cohort is None else cohort.join(self)
        self.numbers = {id(array): number for number, array in enumerate(arrays)}
        self.space = program.namespace(self, arrays)
        self.local = {n: task for (kind, n), task in tables.tasks.items() if kind == "local"}
        self.control = {n: task for (kind, n), task in tables.tasks.items() if kind == "control"}
        self.data = {self._color(n): task for (kind, n), task in tables.tasks.items() if kind == "data"}
        self.active: dict[int, None] = dict.fromkeys(tables.activated)
        self.blocked = set(tables.blocked)
        self.ready_colors: dict[int, None] = {}
        self.calls: deque[tuple[str, Callable[..., Any], tuple[Any, ...]]] = deque()
        self.front: Coroutine | None = None
        self.threads: dict[Coroutine, None] = {}
        self.waiters: dict[Any, list[Coroutine]] = {}
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
        self.space[BOOT_FUNCTION]()
        for number in self.active:
            self._bound(number)
        self.wake()

    def _bound(self, number: int) -> BoundTask:
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
        given = tuple(_convert_argument(p, a) for p, a in zip(function.params, args, strict=True))
        self.calls.append((function.name, function.run, given))
        self.wake()

    def arrived(self, color: int) -> None:
        """A wavelet came to the input queue of a color."""
        self.ready_colors[color] = None
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
        for color in list(self.ready_colors):
            taken = self._head(color)
            if taken is not None:
                found.append((self._source(color), taken))
        found += [(n, partial(self._activated, n)) for n in self.active if n not in self.blocked]
        if self.calls:
            found.append((-1, self.calls.popleft))
        if not found:
            return None
        first = [take for number, take in found if number in self.high_priority] or [take for _, take in found]
        return (first[0] if self.events.random is None else self.events.random.choice(first))()

    def _source(self, color: int) -> int:
        """What the priority of a color's tasks goes by: the color, or on WSE-3 its queue."""
        return next((q for q, c in self.in_colors.items() if c == color), color) if self.wide else color

    def _activated(self, number: int) -> tuple[str, Callable[..., Any], tuple[Any, ...]]:
        del self.active[number]
        return self._task(self.local[number], ())

    def _task(self, task: BoundTask, args: tuple[Any, ...]) -> tuple[str, Callable[..., Any], tuple[Any, ...]]:
        return task.title, self.space[task.name], args

    def _head(self, color: int) -> Callable[[], Any] | None:
        """What the wavelet at the head of an input queue would start."""
        head = self.fabric.peek(color)
        if head is None:
            del self.ready_colors[color]
            return None
        word, is_control = head
        if is_control:
            return self._control(color, word)
        task = self.data.get(color)
        if task is None or ("in", color) in self.busy or task.number in self.blocked:
            return None
        return lambda: self._task(task, unpack_arguments(task.params, self.fabric.pop(color, 1)[0]))

    def _control(self, color: int, word: int) -> Callable[[], Any] | None:
        if color in self.control_ended_colors:
            return None
        entry = word >> 16 & 0x3F
        task = self.control.get(entry)
        if entry in self.blocked or self._queue_blocked(color):
            return None
        if task is None:
            self.fabric.pop_control(color)
            if entry != NO_TASK_ID:
                what = f"control wavelet on color {color} names task ID {entry}, to which no task is bound"
                raise self._place(CslFault(what), None, None)
            self.wake()
            return None
        return lambda: (self.fabric.pop_control(color), self._task(task, unpack_arguments(task.params, word & 0xFFFF)))[
            1
        ]

    def _queue_blocked(self, color: int) -> bool:
        if not self.wide:
            return color in self.blocked
        return any(q in self.blocked for q, c in self.in_colors.items() if c == color)

    def _run(self, name: str, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        start = self.events.now
        self.clock = max(self.clock, start) + TASK_SWITCH_CYCLES

        def done() -> None:
            self.front = None
            if self.trace is not None:
                self.trace(name, start, self.clock)
            self.wake()

        known = None if self.lockstep_group is None else self.lockstep_group.record(self, function, args)
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
            self.front = Coroutine(name, found, done, True, Location())
            self._resume(self.front)
        else:
            done()

    def _follow(
        self, bound: CompiledRecord, values: list[Any], inputs: tuple[Any, ...], results: list[tuple[str, Any]]
    ) -> None:
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
        if self.pending and self.lockstep_group is not None:
            self.lockstep_group.settle(self)

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
        found = [f"{r.name}{f' ({r.loc})' if r.loc.line else ''} waits for {describe_wait(r.wait)}" for r in running]
        held = [self.local[n].title for n in self.active if n in self.blocked]
        return found + [f"task '{name}' is active but blocked" for name in held]


def _convert_argument(type_: t.CslType, value: Any) -> Any:
    if isinstance(type_, t.CslFloat):
        return type_.dtype.type(value)
    return type_.wrap(int(value)) if isinstance(type_, t.CslInt) else value


def unpack_arguments(params: tuple[t.CslType, ...], word: int) -> tuple[Any, ...]:
    """The parameters of a task out of a wavelet: one of 32 bits, or up to two of 16, the low half first."""
    found = []
    for p in params:
        mask = 0xFFFFFFFF if p.size == 4 else 0xFFFF
        cell = np.array([word & mask], np.uint32 if p.size == 4 else np.uint16)
        cell = cell.view(p.dtype) if p.dtype.itemsize > 1 else cell
        found.append(cell[0] if p.dtype.kind in "fV" else cell.item())
        word >>= 16
    return tuple(found)


__all__ = ["ExportedFunction", "Pe", "Coroutine", "WaitCondition", "unpack_arguments"]

"""Branches of a group that wait for each other: each runs in a thread of its own, one of them at a time.

Programs run in step and one branch after the other; where a branch waits at an mbarrier for what another branch of
the same `if` has yet to do, that one must run in between. Threads only keep the place in each branch: the
baton passes from one to the next at waits alone, so that every run takes the same course.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from tessera.errors import ExecutionError, Location
from tessera.interp.machine import Machine
from tessera.ir.core import Block
from tessera.ops.mbarrier import mbarrier_wait

Ready = Callable[[], bool]


class Cancelled(BaseException):
    """Unwinds a branch whose sibling has failed."""


class Task:
    """A branch under way: whether it can go on, the baton that lets it, and whether it waits for its own branches."""

    def __init__(self) -> None:
        self.ready: Ready = lambda: True
        self.baton = threading.Semaphore(0)
        self.joining = False
        self.where: Location | None = None  # the wait at which it stands


class Scheduler:
    """The branches under way, in a fixed order; `now` has the baton. After a failure each one only ends."""

    def __init__(self) -> None:
        self.now = Task()
        self.tasks = [self.now]
        self.failed = False
        self.stuck = False

    def _next(self, place: int) -> Task | None:
        """The next task in turn, from a place on, that can go on."""
        turn = [*self.tasks[place:], *self.tasks[:place]]
        return next((t for t in turn if t.ready() or (self.failed and not t.joining)), None)

    def _hand_on(self, task: Task) -> None:
        self.now = task
        task.baton.release()

    def pause(self, ready: Ready, joining: bool = False) -> bool:
        """Let others run until `ready()`; False where nobody can go on."""
        task = self.now
        task.ready, task.joining = ready, joining
        chosen = self._next(self.tasks.index(task) + 1)
        if chosen is None:
            return False
        if chosen is not task:
            self._hand_on(chosen)
            task.baton.acquire()
        task.ready, task.joining = (lambda: True), False
        if self.failed and not joining:
            raise Cancelled
        return not self.stuck

    def leave(self, task: Task) -> None:
        """End a task and hand the baton on; if nobody can go on, to one that waits, which then says so."""
        place = self.tasks.index(task)
        self.tasks.remove(task)
        chosen = self._next(place)
        self.stuck = chosen is None
        self._hand_on(chosen or next(t for t in self.tasks if not t.joining))


SCHEDULER: contextvars.ContextVar[Scheduler | None] = contextvars.ContextVar("tile scheduler", default=None)


def wait(machine: Machine, ready: Ready, stuck: Callable[[], ExecutionError], where: Location | None = None) -> None:
    """Go on when `ready()` holds, letting other branches run until then; `where` the wait stands.

    Raises:
        ExecutionError: `stuck()`, where no branch can go on.
    """
    scheduler = SCHEDULER.get()
    if ready():
        return
    saved = machine.first, machine.count, machine.active
    task = scheduler.now if scheduler is not None else Task()
    task.where = where
    goes_on = scheduler is not None and scheduler.pause(ready)
    machine.first, machine.count, machine.active = saved
    if not goes_on:
        raise stuck()
    task.where = None


def waiting_elsewhere() -> list[Location]:
    """Where other branches wait, in order."""
    scheduler = SCHEDULER.get()
    tasks = scheduler.tasks if scheduler is not None else ()
    places = [t.where for t in tasks if t is not (scheduler and scheduler.now) and t.where is not None]
    return list(dict.fromkeys(places))


@lru_cache(maxsize=1024)
def waits(*blocks: Block) -> bool:
    """Whether any of these blocks waits at an mbarrier."""
    return any(n.op is mbarrier_wait for b in blocks for n in b.walk())


def together(machine: Machine, jobs: Sequence[Callable[[], Any]]) -> list[Any]:
    """What the jobs give, each run until it waits, in turn. Each finds the machine as it was."""
    scheduler = SCHEDULER.get() or Scheduler()
    token = SCHEDULER.set(scheduler)
    try:
        return Branches(scheduler, machine, jobs).run()
    finally:
        SCHEDULER.reset(token)


class Branches:
    """Jobs under way together, started by the task that has the baton, which then waits for all of them."""

    def __init__(self, scheduler: Scheduler, machine: Machine, jobs: Sequence[Callable[[], Any]]) -> None:
        self.scheduler, self.machine, self.jobs = scheduler, machine, jobs
        self.state = machine.first, machine.count, machine.active
        self.left = set(range(len(jobs)))
        self.tasks = [Task() for _ in jobs]
        self.results: list[Any] = [None] * len(jobs)
        self.errors: list[BaseException] = []

    def run(self) -> list[Any]:
        """What the jobs give.

        Raises:
            BaseException: the first that a job has raised.
        """
        place = self.scheduler.tasks.index(self.scheduler.now)
        self.scheduler.tasks[place:place] = self.tasks
        contexts = [contextvars.copy_context() for _ in self.jobs]
        threads = [threading.Thread(target=c.run, args=(self._job, n), daemon=True) for n, c in enumerate(contexts)]
        for thread in threads:
            thread.start()
        self.scheduler.pause(lambda: not self.left, joining=True)
        for thread in threads:
            thread.join()
        self._restore()
        if self.errors or self.scheduler.failed:
            raise self.errors[0] if self.errors else Cancelled
        return self.results

    def _restore(self) -> None:
        self.machine.first, self.machine.count, self.machine.active = self.state

    def _job(self, number: int) -> None:
        self.tasks[number].baton.acquire()
        try:
            if not self.scheduler.failed:
                self._restore()
                with np.errstate(all="ignore"):
                    self.results[number] = self.jobs[number]()
        except Cancelled:
            pass
        except BaseException as error:  # handed on to whoever started the branches
            self.errors.append(error)
            self.scheduler.failed = True
        finally:
            self.left.discard(number)
            self.scheduler.leave(self.tasks[number])

"""Cooperative scheduler: runs divergent branches of a group as coroutines that switch at mbarrier waits.

Programs run in step and one branch after the other; where a branch waits at an mbarrier for what another branch of
the same `if` has yet to do, that one must run in between. Each branch has a thread, which only keeps its stack: the
baton passes from one thread to the next at waits alone, so that every run is deterministic.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from tessera.core import progress
from tessera.core.errors import ExecutionError, Location
from tessera.interp.tile.machine import TileMachine
from tessera.ir.core import Block
from tessera.ops.dialects.mbarrier import mbarrier_wait

IsReady = Callable[[], bool]


class BranchCancelled(BaseException):
    """Cancels a branch whose sibling has failed, or that Ctrl-C has stopped."""


class BranchTask:
    """A running branch: whether it is ready, its semaphore, and whether it waits for its own branches."""

    def __init__(self) -> None:
        self.ready: IsReady = lambda: True
        self.baton = threading.Semaphore(0)
        self.joining = False
        self.where: Location | None = None  # the wait at which it is blocked


class BranchScheduler:
    """The running branches in a fixed order; `now` is scheduled. After a failure every branch is cancelled."""

    def __init__(self) -> None:
        self.now = BranchTask()
        self.tasks = [self.now]
        self.failed = False
        self.stuck = False

    def _next(self, place: int) -> BranchTask | None:
        """The next ready task in round-robin order."""
        turn = [*self.tasks[place:], *self.tasks[:place]]
        return next((t for t in turn if t.ready() or (self.failed and not t.joining)), None)

    def _pass_baton(self, task: BranchTask) -> None:
        self.now = task
        task.baton.release()

    def _take_baton(self, task: BranchTask) -> None:
        """Wait for the baton; after Ctrl-C, which the main thread receives, until every branch has ended."""
        interrupt = None
        while True:
            try:
                task.baton.acquire()
                break
            except KeyboardInterrupt as error:
                self.failed, interrupt = True, error
        if interrupt is not None:
            raise interrupt

    def pause(self, ready: IsReady, joining: bool = False) -> bool:
        """Yield to other branches until `ready()`; False where no branch is ready."""
        task = self.now
        task.ready, task.joining = ready, joining
        chosen = self._next(self.tasks.index(task) + 1)
        if chosen is None:
            return False
        if chosen is not task:
            self._pass_baton(chosen)
            self._take_baton(task)
        task.ready, task.joining = (lambda: True), False
        if self.failed and not joining:
            raise BranchCancelled
        return not self.stuck

    def leave(self, task: BranchTask) -> None:
        """End a task and schedule the next; if none is ready, a waiting one, which reports the deadlock."""
        place = self.tasks.index(task)
        self.tasks.remove(task)
        chosen = self._next(place)
        self.stuck = chosen is None
        self._pass_baton(chosen or next(t for t in self.tasks if not t.joining))


BRANCH_SCHEDULER: contextvars.ContextVar[BranchScheduler | None] = contextvars.ContextVar(
    "tile scheduler", default=None
)


def check_cancelled() -> None:
    """End this branch if another one has failed or Ctrl-C was pressed; each iteration of a loop asks.

    Raises:
        BranchCancelled: the branches end.
        KeyboardInterrupt: the launch is cancelled.
    """
    progress.check_cancelled()
    scheduler = BRANCH_SCHEDULER.get()
    if scheduler is not None and scheduler.failed:
        raise BranchCancelled


def wait_until(
    machine: TileMachine, ready: IsReady, stuck: Callable[[], ExecutionError], where: Location | None = None
) -> None:
    """Block until `ready()` holds, while other branches run; `where` is the location of the wait.

    Raises:
        ExecutionError: `stuck()`, where no branch is ready.
    """
    scheduler = BRANCH_SCHEDULER.get()
    if ready():
        return
    saved = machine.first, machine.count, machine.active
    task = scheduler.now if scheduler is not None else BranchTask()
    task.where = where
    goes_on = scheduler is not None and scheduler.pause(ready)
    machine.first, machine.count, machine.active = saved
    if not goes_on:
        raise stuck()
    task.where = None


def find_other_waits() -> list[Location]:
    """The locations at which other branches wait, in order."""
    scheduler = BRANCH_SCHEDULER.get()
    tasks = scheduler.tasks if scheduler is not None else ()
    places = [t.where for t in tasks if t is not (scheduler and scheduler.now) and t.where is not None]
    return list(dict.fromkeys(places))


@lru_cache(maxsize=1024)
def has_waits(*blocks: Block) -> bool:
    """Whether any of these blocks waits at an mbarrier."""
    return any(n.op is mbarrier_wait for b in blocks for n in b.walk())


def run_concurrently(machine: TileMachine, jobs: Sequence[Callable[[], Any]]) -> list[Any]:
    """Run jobs as coroutines that switch at waits; each starts from the same machine state. Returns their results."""
    scheduler = BRANCH_SCHEDULER.get() or BranchScheduler()
    token = BRANCH_SCHEDULER.set(scheduler)
    try:
        return ConcurrentBranches(scheduler, machine, jobs).run()
    finally:
        BRANCH_SCHEDULER.reset(token)


class ConcurrentBranches:
    """Concurrent jobs, started by the scheduled task, which then waits for all of them."""

    def __init__(self, scheduler: BranchScheduler, machine: TileMachine, jobs: Sequence[Callable[[], Any]]) -> None:
        self.scheduler, self.machine, self.jobs = scheduler, machine, jobs
        self.state = machine.first, machine.count, machine.active
        self.left = set(range(len(jobs)))
        self.tasks = [BranchTask() for _ in jobs]
        self.results: list[Any] = [None] * len(jobs)
        self.errors: list[BaseException] = []

    def run(self) -> list[Any]:
        """Run the jobs and return their results.

        Raises:
            BaseException: the first that a job has raised.
        """
        place = self.scheduler.tasks.index(self.scheduler.now)
        self.scheduler.tasks[place:place] = self.tasks
        contexts = [contextvars.copy_context() for _ in self.jobs]
        threads = [threading.Thread(target=c.run, args=(self._job, n), daemon=True) for n, c in enumerate(contexts)]
        for thread in threads:
            thread.start()
        try:
            self.scheduler.pause(lambda: not self.left, joining=True)
        finally:
            for thread in threads:
                thread.join()
        self._restore()
        if self.errors or self.scheduler.failed:
            raise self.errors[0] if self.errors else BranchCancelled
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
        except BranchCancelled:
            pass
        except BaseException as error:  # re-raised by the task that started the branches
            self.errors.append(error)
            self.scheduler.failed = True
        finally:
            self.left.discard(number)
            self.scheduler.leave(self.tasks[number])

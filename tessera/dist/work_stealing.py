"""Work stealing: tasks of the host on the workers of a standard executor (Blumofe and Leiserson 1999).

Each worker has a queue. One that has run out takes the last task of the longest queue, so that tasks of unequal time
end together. The workers are those of any executor of `concurrent.futures`: threads, processes, or dask's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ThreadPoolExecutor, wait
from typing import Any

from tessera.core.errors import ArgumentError, user_location

Task = Callable[[], Any]


class WorkStealingScheduler:
    """Runs tasks on workers; `executed` and `stolen` count what each worker ran in the last call of `schedule`.

    `executor` is an executor of `concurrent.futures` with at least `num_workers` workers, as that of
    `dask.distributed.Client().get_executor()`; by default threads, made for each call.

    >>> WorkStealingScheduler(2).schedule([lambda: 1, (pow, 2, 5), lambda: 3])
    [1, 32, 3]

    Raises:
        ArgumentError: there is no worker, or the executor is none.
    """

    def __init__(self, num_workers: int, executor: Executor | None = None) -> None:
        if not isinstance(num_workers, int) or isinstance(num_workers, bool) or num_workers < 1:
            raise ArgumentError(
                "a scheduler needs workers", location=user_location(), expected="a positive number",
                received=repr(num_workers),
            )  # fmt: skip
        if executor is not None and not callable(getattr(executor, "submit", None)):
            raise ArgumentError(
                "this is no executor", location=user_location(), received=repr(executor),
                expected="an executor of concurrent.futures",
            )  # fmt: skip
        self.num_workers, self.executor = num_workers, executor
        self.executed = [0] * num_workers
        self.stolen = [0] * num_workers

    def schedule(self, tasks: Sequence[Task | tuple[Any, ...]]) -> list[Any]:
        """The results of the tasks in their order; a task is a function, or a tuple of one and its arguments.

        An error of a task is raised when those that run have ended; the others are not begun.

        Raises:
            ArgumentError: a task is no function.
        """
        calls = [_read_task(task) for task in tasks]
        queues = [deque(range(w, len(calls), self.num_workers)) for w in range(self.num_workers)]
        self.executed, self.stolen = [0] * self.num_workers, [0] * self.num_workers
        if self.executor is not None:
            return self._run(self.executor, calls, queues)
        with ThreadPoolExecutor(self.num_workers) as executor:
            return self._run(executor, calls, queues)

    def _run(self, executor: Executor, calls: list[tuple[Any, ...]], queues: list[deque[int]]) -> list[Any]:
        running: dict[Future[Any], tuple[int, int]] = {}
        results: dict[int, Any] = {}
        error: BaseException | None = None
        idle = list(range(self.num_workers))
        while True:
            for worker in idle:
                if error is None and (number := self._take(worker, queues)) is not None:
                    function, *arguments = calls[number]
                    running[executor.submit(function, *arguments)] = worker, number
            if not running:
                break
            idle = []
            for done in sorted(wait(running, return_when=FIRST_COMPLETED).done, key=running.__getitem__):
                worker, number = running.pop(done)
                idle.append(worker)
                self.executed[worker] += 1
                failed = done.exception()
                if failed is None:
                    results[number] = done.result()
                error = error or failed
        if error is not None:
            raise error
        return [results[i] for i in range(len(calls))]

    def _take(self, worker: int, queues: list[deque[int]]) -> int | None:
        """The next task of a worker: its own first, or the last of the longest queue."""
        if queues[worker]:
            return queues[worker].popleft()
        victim = max(queues, key=len)
        if not victim:
            return None
        self.stolen[worker] += 1
        return victim.pop()


def _read_task(task: Any) -> tuple[Any, ...]:
    found = task if isinstance(task, tuple) else (task,)
    if not found or not callable(found[0]):
        raise ArgumentError(
            "a task is no function", location=user_location(), received=repr(task),
            expected="a function, or a tuple of one and its arguments",
        )  # fmt: skip
    return found

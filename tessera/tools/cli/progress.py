"""Progress display: bars with the time that is left, on a terminal alone, for what takes longer than half a second."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock, Timer
from typing import Any

from tessera.core.progress import showing_progress

DELAY = 0.5  # seconds before an operation is shown
SHOWN_COMMANDS = ("bisect", "build", "check", "inspect", "ptx", "run")  # the others show theirs, or are interactive


@contextmanager
def progress_on_terminal(command: str) -> Iterator[None]:
    """A context in which operations show how far they are on stderr, if that is a terminal."""
    if command not in SHOWN_COMMANDS or not sys.stderr.isatty():
        yield
        return
    display = ProgressDisplay()
    try:
        with showing_progress(display.show):
            yield
    finally:
        display.close()


class ProgressDisplay:
    """The bars of the operations under way, drawn by a thread of rich; they vanish when all have ended."""

    def __init__(self, console: Any = None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        columns = (
            SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(),
            TextColumn("{task.fields[count]}"), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(),
        )  # fmt: skip
        self._bars = Progress(
            *columns, console=console or Console(stderr=True), transient=True, refresh_per_second=4,
            redirect_stdout=sys.stdout.isatty(), redirect_stderr=True,
        )  # fmt: skip
        self._tasks: dict[str, Any] = {}
        self._timer: Timer | None = None
        self._lock = Lock()

    def show(self, operation: str, done: float | None, total: float | None) -> None:
        """Show how far an operation is; `done` is None at its end."""
        with self._lock:
            if done is None:
                self._end(operation)
                return
            if operation not in self._tasks:
                self._tasks[operation] = self._bars.add_task(operation, total=None, count="")
                if self._timer is None:
                    self._timer = Timer(DELAY, self._start)
                    self._timer.daemon = True
                    self._timer.start()
            count = f"{done:,.0f}" if total is None else f"{done:,.0f} of {total:,.0f}"
            self._bars.update(self._tasks[operation], completed=done, total=total, count=count if done or total else "")

    def close(self) -> None:
        """Remove every bar."""
        with self._lock:
            for operation in list(self._tasks):
                self._end(operation)

    def _start(self) -> None:
        with self._lock:
            if self._tasks:
                self._bars.start()

    def _end(self, operation: str) -> None:
        task = self._tasks.pop(operation, None)
        if task is not None:
            self._bars.remove_task(task)
        if not self._tasks and self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._bars.stop()

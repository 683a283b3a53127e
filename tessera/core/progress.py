"""Progress and cancellation: what long operations report while they run, and how those of other threads are stopped.

A command shows the progress; without one nothing is computed. Ctrl-C reaches the main thread alone: it cancels the
operations of the threads that it waits for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Lock
from typing import TypeVar

T = TypeVar("T")
# show(operation, done, total): an operation has ended when all is done, or when `done` is None.
ShowProgress = Callable[[str, float | None, float | None], None]

_SHOW: ContextVar[ShowProgress | None] = ContextVar("progress", default=None)


class CancelToken:
    """Cancels the operations of a thread, which runs them in `with token.running(stop)`.

    >>> token, stopped = CancelToken(), []
    >>> with token.running(lambda: stopped.append(1)):
    ...     token.cancel()
    >>> stopped
    [1]
    """

    def __init__(self) -> None:
        self.cancelled = False
        self._stops: list[Callable[[], None]] = []
        self._lock = Lock()

    def cancel(self) -> None:
        """Stop what runs; what begins later ends at once."""
        with self._lock:
            self.cancelled = True
            for stop in self._stops:
                stop()

    @contextmanager
    def running(self, stop: Callable[[], None]) -> Iterator[None]:
        """A context in which an operation runs that `stop()` ends.

        Raises:
            KeyboardInterrupt: the operations are cancelled already.
        """
        with self._lock:
            if self.cancelled:
                raise KeyboardInterrupt
            self._stops.append(stop)
        try:
            yield
        finally:
            with self._lock:
                self._stops.remove(stop)


CANCEL_TOKEN: ContextVar[CancelToken | None] = ContextVar("cancellation", default=None)


def check_cancelled() -> None:
    """Raise KeyboardInterrupt where the operations of this thread are cancelled; loops in Python ask now and then."""
    token = CANCEL_TOKEN.get()
    if token is not None and token.cancelled:
        raise KeyboardInterrupt


@contextmanager
def showing_progress(show: ShowProgress) -> Iterator[None]:
    """A context whose operations report to `show`."""
    token = _SHOW.set(show)
    try:
        yield
    finally:
        _SHOW.reset(token)


def is_progress_shown() -> bool:
    """Whether anyone shows what is reported: where nobody does, it need not be computed."""
    return _SHOW.get() is not None


def report_progress(operation: str, done: float, total: float | None = None) -> None:
    """Say how far an operation is; without a `total` no one knows how much is left.

    >>> report_progress("compilation", 1, 3)  # nobody listens
    """
    show = _SHOW.get()
    if show is not None:
        show(operation, done, total)


@contextmanager
def operation(name: str) -> Iterator[None]:
    """A context in which an operation runs that may report how far it is.

    >>> seen = []
    >>> with showing_progress(lambda *report: seen.append(report)), operation("compilation"):
    ...     report_progress("compilation", 1, 3)
    >>> seen
    [('compilation', 0, None), ('compilation', 1, 3), ('compilation', None, None)]
    """
    show = _SHOW.get()
    if show is None:
        yield
        return
    show(name, 0, None)
    try:
        yield
    finally:
        show(name, None, None)


def track(items: Sequence[T], name: str) -> Iterator[T]:
    """The items one by one, as an operation that is done when all were taken.

    >>> list(track([1, 2], "numbers"))
    [1, 2]
    """
    with operation(name):
        for number, item in enumerate(items):
            check_cancelled()
            report_progress(name, number, len(items))
            yield item

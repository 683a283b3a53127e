"""Progress: what long operations report while they run; a command shows it, and without one nothing is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")
# show(operation, done, total): an operation has ended when all is done, or when `done` is None.
ShowProgress = Callable[[str, float | None, float | None], None]

_SHOW: ContextVar[ShowProgress | None] = ContextVar("progress", default=None)


@contextmanager
def showing_progress(show: ShowProgress) -> Iterator[None]:
    """A context whose operations report to `show`."""
    token = _SHOW.set(show)
    try:
        yield
    finally:
        _SHOW.reset(token)


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
            report_progress(name, number, len(items))
            yield item

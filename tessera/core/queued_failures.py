"""Failures of queued launches: a call on a device returns before its kernels have checked their indices and assertions.

A program whose kernels may report a failure is watched from its call on. The failure is raised by whichever comes
first: a copy of elements of its stream to the host, an export to another library, the next call of the program,
`ts.synchronize()`, or the end of the process. Programs of `torch.compile` export their results without waiting, as
PyTorch's own kernels do.
"""

from __future__ import annotations

import atexit
from typing import Protocol


class Watched(Protocol):
    """A program with queued launches that may report failures."""

    streams: set[int]

    def raise_seen(self) -> None:
        """Raise the first failure that its kernels have reported by now."""

    def wait(self) -> None:
        """Wait for its launches."""


_queued: dict[Watched, None] = {}


def watch(program: Watched) -> None:
    """Remember a program until its launches have been waited for."""
    _queued[program] = None


def examine(stream: int) -> None:
    """Raise the failures of launches on a stream that has been waited for, and those that others have reported by now.

    Raises:
        TesseraError: a launch failed.
    """
    for program in tuple(_queued):
        program.streams.discard(stream)
        if not program.streams:
            _queued.pop(program, None)
        program.raise_seen()


def wait_and_examine(stream: int | None = None) -> None:
    """Wait for the watched programs that have launches on a stream, or for all, and raise their failures.

    Raises:
        TesseraError: a launch failed.
    """
    for program in tuple(_queued):
        if stream is None or stream in program.streams:
            program.wait()
            _queued.pop(program, None)
            program.raise_seen()


atexit.register(wait_and_examine)

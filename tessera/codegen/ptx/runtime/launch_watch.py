"""The launches of a program whose failures the host sees in its own memory: they are queued, and examined later.

Only a failure writes that memory, so to see that nothing failed costs neither a copy nor a wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from tessera.codegen.ptx.runtime.device_memory import synchronize_stream
from tessera.core.errors import TesseraError
from tessera.core.queued_failures import watch


class ReportingLaunch(Protocol):
    """A launch with buffers that its kernel writes where something failed."""

    def has_failed(self) -> bool:
        """Whether the host sees a failure."""

    def check_buffers(self, drv: Any) -> None:
        """Raise the first failure."""

    def reset_buffers(self, drv: Any) -> None:
        """Forget all failures."""


def examine(launches: Sequence[ReportingLaunch], driver: Any) -> None:
    """Raise the first failure of launches that have ended, once.

    Raises:
        OutOfBoundsError, ExecutionError: a launch failed.
    """
    try:
        for each in launches:
            each.check_buffers(driver)
    except TesseraError:
        for each in launches:
            each.reset_buffers(driver)
        raise


class LaunchWatch:
    """The reporting launches of a program; `streams` are those that have launches which nobody has waited for."""

    def __init__(self, launches: Sequence[ReportingLaunch], driver: Any) -> None:
        self.launches, self.driver = launches, driver
        self.streams: set[int] = set()

    def run(self, run: Callable[[], None], stream: int) -> None:
        """Queue launches on a stream; a failure of an earlier call is raised first.

        Raises:
            OutOfBoundsError, ExecutionError: an earlier call failed.
        """
        self.raise_seen()
        run()
        self.streams.add(stream)
        watch(self)

    def wait(self) -> None:
        """Wait for the launches."""
        while self.streams:
            synchronize_stream(self.streams.pop())

    def raise_seen(self) -> None:
        """Raise the first failure that kernels have reported by now, once.

        Raises:
            OutOfBoundsError, ExecutionError: a launch failed.
        """
        failed = [each for each in self.launches if each.has_failed()]
        if not failed:
            return
        self.wait()  # a kernel that runs may still write beside what it reported
        try:
            for each in failed:
                each.check_buffers(self.driver)
        finally:
            for each in failed:
                each.reset_buffers(self.driver)

"""What an executing instruction raises before anyone knows which instruction it was."""

from __future__ import annotations

from tessera.errors import ExecutionError, TesseraError


class Fault(Exception):
    """A finding, the error to report it as, and the lane of the machine that met it."""

    def __init__(self, message: str, kind: type[TesseraError] = ExecutionError, lane: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.kind = kind
        self.lane = lane

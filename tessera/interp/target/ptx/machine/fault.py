"""Fault: the exception of an executing instruction, raised before its location is known."""

from __future__ import annotations

from tessera.core.errors import ExecutionError, TesseraError


class PtxFault(Exception):
    """A fault of an instruction: its message, the error it becomes, and the faulting lane."""

    def __init__(self, message: str, kind: type[TesseraError] = ExecutionError, lane: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.kind = kind
        self.lane = lane

"""Diagnostics: compile-time errors and run-time faults of CSL programs, at file:line:column."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from tessera.core.errors import ExecutionError, Location, TesseraError


class CslError(TesseraError):
    """A compile-time error of a CSL program."""


class CslFault(ExecutionError):
    """A run-time fault of a CSL program."""


def fail(location: Location, message: str, *, suggestion: str | None = None) -> NoReturn:
    """Raise a `CslError` at `location`."""
    raise CslError(message, location=location, suggestion=suggestion)


def type_mismatch(location: Location, expected: object, received: object) -> NoReturn:
    """Raise the vendor's error for a value of the wrong type."""
    raise CslError(f"expected type '{expected}', got: '{received}'", location=location)


@contextmanager
def attach_location(location: Location) -> Iterator[None]:
    """Add a location to errors without one that are raised in the context."""
    try:
        yield
    except TesseraError as error:
        error.at(location)
        raise

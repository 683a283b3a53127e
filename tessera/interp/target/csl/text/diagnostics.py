"""Diagnostics: compile-time errors and run-time faults of CSL programs, at file:line:column."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from tessera.core.errors import ExecutionError, Location, TesseraError


class CslError(TesseraError):
    """A CSL program that the compiler refuses."""


class CslFault(ExecutionError):
    """A CSL program that went wrong while it ran."""


def fail(location: Location, message: str, *, suggestion: str | None = None) -> NoReturn:
    """Refuse the program: raises `CslError` at `location`."""
    raise CslError(message, location=location, suggestion=suggestion)


def type_mismatch(location: Location, expected: object, received: object) -> NoReturn:
    """Raises the vendor's wording for a value of the wrong type."""
    raise CslError(f"expected type '{expected}', got: '{received}'", location=location)


@contextmanager
def attach_location(location: Location) -> Iterator[None]:
    """Place the errors raised inside that have no place."""
    try:
        yield
    except TesseraError as error:
        error.at(location)
        raise

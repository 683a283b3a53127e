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


@contextmanager
def name_argument_errors(name: str, location: Location, received: str) -> Iterator[None]:
    """Raise the error of a library that cannot use the values a program gives it as a `CslError`.

    Libraries convert untyped comptime values with Python's functions; programs may pass anything.
    """
    try:
        with attach_location(location):
            yield
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:
        raise CslError(
            f"'{name}' does not accept these arguments", location=location, received=received or "none"
        ) from error


# Internal errors: no Python error reaches a user without the place in the program at which it arose.


@contextmanager
def name_compile_errors(path: str) -> Iterator[None]:
    """Raise an error that is not one of the program as a `CslError` at the syntax that was being analysed.

    Raises:
        CslError: an internal error, or a program whose syntax nests deeper than the analysis can follow.
    """
    try:
        yield
    except (TesseraError, OSError):
        raise
    except RecursionError as error:
        place = _find_analysed_syntax(error) or Location(path, 1)
        raise CslError("the text nests too deep", location=place) from None
    except Exception as error:
        what = f"internal error of the compiler: {type(error).__name__}: {error}"
        place = _find_analysed_syntax(error) or Location(path, 1)
        raise CslError(what, location=place, suggestion="report it with the program") from error


def _find_analysed_syntax(error: BaseException) -> Location | None:
    """The location of the innermost syntax node in the frames of an error."""
    found, trace = None, error.__traceback__
    while trace is not None:
        loc = getattr(trace.tb_frame.f_locals.get("node"), "loc", None)
        found = loc if isinstance(loc, Location) else found
        trace = trace.tb_next
    return found


def name_run_error(error: Exception, cycle: int) -> CslFault:
    """An error that is not a fault of the program, as a fault that names the cycle."""
    what = f"internal error of the simulator in cycle {cycle}: {type(error).__name__}: {error}"
    return CslFault(what, suggestion="report it with the program")


def report_no_progress(cycle: int) -> NoReturn:
    """Raise the fault of events that schedule one another in one cycle without an end."""
    raise CslFault(f"no progress: the events of cycle {cycle} do not end")

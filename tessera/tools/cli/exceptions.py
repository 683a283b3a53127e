"""Diagnosis of exceptions that are not a `TesseraError`: their cause and the user's line."""

from __future__ import annotations

import sysconfig

from tessera.core.errors import (  # fmt: skip
    UNKNOWN,
    FileError,
    Location,
    ProgramError,
    ResourceError,
    TesseraError,
    is_command_file,
    is_package_file,
    traceback_location,
)

TRACEBACK_HINT = "--traceback shows the calls that led there"


def describe_exception(error: Exception) -> TesseraError:
    """Convert an exception to the error to show: of user code, a file, memory, or Tessera itself."""
    if isinstance(error, SyntaxError):
        return syntax_error(error)
    place, own = _locate_exception(error)
    text = f"{type(error).__name__}: {error}"
    if not own:
        return ProgramError(text, suggestion=TRACEBACK_HINT).at(place)
    if isinstance(error, OSError):
        return FileError(f"{error.filename or 'a file'}: {error.strerror or error}").at(place)
    if isinstance(error, MemoryError):
        return ResourceError(f"there is not enough memory: {error}").at(place)
    return TesseraError(f"a fault of Tessera itself: {text}", suggestion=f"report it: {TRACEBACK_HINT}").at(place)


def syntax_error(error: SyntaxError, path: str | None = None) -> FileError:
    """The error for a file that does not parse; `path` is the user's name for it."""
    file = error.filename or path or "the program"
    place = Location(file, error.lineno, error.offset or 0) if error.lineno else None
    return FileError(f"{path or file} is not Python: {error.msg}", location=place)


def _locate_exception(error: BaseException) -> tuple[Location, bool]:
    """The innermost line of user code in a traceback (or UNKNOWN), and whether Tessera's frames follow it.

    Frames outside the command are ignored, and frames of libraries count as their callers'.
    """
    found, own, step = UNKNOWN, True, error.__traceback__
    libraries = tuple(path for name, path in sysconfig.get_paths().items() if name.endswith("lib"))
    while step is not None:
        file = step.tb_frame.f_code.co_filename
        if is_command_file(file):
            found, own = UNKNOWN, True
        elif is_package_file(file):
            own = True
        elif not file.startswith(("<", *libraries)):
            found, own = traceback_location(step), False
        step = step.tb_next
    return found, own

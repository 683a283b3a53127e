"""Errors and source locations: the exception hierarchy that users meet, each with where, expected, received and
suggestion."""

from __future__ import annotations

import linecache
import os
import sys
from dataclasses import dataclass
from types import CodeType, FrameType, TracebackType
from typing import Any

_PACKAGE_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
# What is written in the kernel language: its lines are named as a user's are.
_KERNEL_LANGUAGE = tuple(
    os.path.join(_PACKAGE_FOLDER, *parts)
    for parts in (("stdlib",), ("frontend", "kernel", "tile_api", "online_softmax.py"))
)
_COMMAND_FOLDER = os.path.join(_PACKAGE_FOLDER, "tools", "cli") + os.sep


@dataclass(frozen=True)
class Location:
    """A place in a source file: lines and columns count from 1; column 0 means unknown."""

    file: str = "?"
    line: int = 0
    column: int = 0
    end_column: int = 0

    def __str__(self) -> str:
        column = f":{self.column}" if self.column else ""
        return f"{self.file}:{self.line}{column}"

    def excerpt(self) -> str:
        """The source line with a caret under the columns, or "" where the file cannot be read."""
        line = linecache.getline(self.file, self.line).rstrip("\n")
        if not line.strip():
            return ""
        head = f"  {self.line:>5} | "
        if not self.column:
            return head + line
        last = self.end_column if self.end_column > self.column else self.column + 1
        width = max(1, min(last, len(line) + 1) - self.column)
        return f"{head}{line}\n{' ' * (len(head) - 2)}| {' ' * (self.column - 1)}{'^' * width}"


UNKNOWN = Location()


def frame_location(frame: FrameType) -> Location:
    """The place a frame is executing, with columns where Python (3.11 on) keeps them."""
    return _instruction_location(frame.f_code, frame.f_lasti, frame.f_lineno)


def traceback_location(step: TracebackType) -> Location:
    """The place that a step of a traceback passed, with columns as of a frame."""
    return _instruction_location(step.tb_frame.f_code, step.tb_lasti, step.tb_lineno)


def _instruction_location(code: CodeType, instruction: int, line: int) -> Location:
    column, end = 0, 0
    if sys.version_info >= (3, 11):
        first, last, start, stop = list(code.co_positions())[instruction // 2]
        if first is not None and start is not None:
            line, column = first, start + 1
            end = (stop or start) + 1 if last == first else 0
    return Location(code.co_filename, line, column, end)


def is_command_file(file: str) -> bool:
    """Whether a source file is the command line's: who called it is a shell, no line of Python."""
    return file.startswith(_COMMAND_FOLDER)


def is_package_file(file: str) -> bool:
    """Whether a source file is this package's own; what its library is written in is as a user's."""
    return file.startswith(_PACKAGE_FOLDER) and not file.startswith(_KERNEL_LANGUAGE)


def user_location() -> Location:
    """The innermost place outside this package: the user's line that called in; UNKNOWN where a command did."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_command_file(frame.f_code.co_filename):
        if not is_package_file(frame.f_code.co_filename):
            return frame_location(frame)
        frame = frame.f_back
    return UNKNOWN


def library_caller_location() -> Location:
    """The innermost place outside this package and its library: where a user called a routine of the library."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_PACKAGE_FOLDER):
            return frame_location(frame)
        frame = frame.f_back
    return UNKNOWN


class TesseraError(Exception):
    """What went wrong, where, what was expected, what came, and what to do.

    >>> print(ShapeError("operand shapes differ", expected="8xf32", received="4xf32"))
    ShapeError: operand shapes differ
      expected: 8xf32
      received: 4xf32
    """

    def __init__(
        self,
        message: str,
        *,
        location: Location | None = None,
        expected: Any = None,
        received: Any = None,
        suggestion: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.location = None if location == UNKNOWN else location
        self.expected = expected
        self.received = received
        self.suggestion = suggestion

    def at(self, location: Location) -> TesseraError:
        """This error, placed at `location` unless it already has a place."""
        if self.location is None and location != UNKNOWN:
            self.location = location
        return self

    def __str__(self) -> str:
        place = f"{self.location}: " if self.location else ""
        lines = [f"{place}{type(self).__name__}: {self.message}"]
        if self.location and (excerpt := self.location.excerpt()):
            lines.append(excerpt)
        for title in ("expected", "received", "suggestion"):
            value = getattr(self, title)
            if value is not None:
                lines.append(f"  {title}: {value}")
        return "\n".join(lines)


class ShapeError(TesseraError):
    """Shapes or ranks do not fit."""


class DTypeError(TesseraError):
    """Element types do not fit."""


class ArgumentError(TesseraError):
    """A call has the wrong arguments."""


class UnknownNameError(TesseraError):
    """A name that nothing defines."""


class UnsupportedSyntaxError(TesseraError):
    """Python that the kernel language does not have."""


class UnsupportedOpError(TesseraError):
    """An op that a target cannot emit or an interpreter cannot run."""


class TraceError(TesseraError):
    """Python asked for the value of a tensor that is being traced."""


class EffectError(TesseraError):
    """A function that does what it says it does not."""


class OutOfBoundsError(TesseraError):
    """A read or write outside its tensor; `lane` is the first such instance and element while only that is known."""

    lane: tuple[int, ...] | None = None


class VerifyError(TesseraError):
    """IR that breaks a rule of its level."""


class ParseError(TesseraError):
    """Text (IR, PTX, LLVM, CSL) that does not parse."""


class ArtifactError(TesseraError):
    """An artifact folder that is missing, corrupt or of a newer schema."""


class FileError(TesseraError):
    """A file that is missing, truncated or not what its name says."""


class DeviceUnavailable(TesseraError):
    """A device or library this machine does not have."""


class ResourceError(TesseraError):
    """A program that needs more memory or more of a resource than there is."""


class ProgramError(TesseraError):
    """An exception of the user's own Python, met while a command ran it."""


class ExecutionError(TesseraError):
    """A program that went wrong while it ran."""


class RaceError(ExecutionError):
    """Two accesses of one element, at least one a write, with nothing that orders them."""


class UninitializedError(ExecutionError):
    """A read of memory that nothing has written."""


class AsyncCopyError(ExecutionError):
    """An access that meets an asynchronous copy still under way."""


class BarrierError(ExecutionError):
    """A barrier that some tiles of a group reach and others do not."""


class DeadlockError(ExecutionError):
    """Tiles that wait for what nobody is left to do."""


class AlignmentError(ExecutionError):
    """A vector access that does not begin at a multiple of its width."""


class IndexOverflowError(ExecutionError):
    """Index arithmetic whose result does not fit its integer type."""


class Advice(ExecutionError):
    """Something that gives the right result and could be better: it is reported, and stops nothing."""


class NumericalError(ExecutionError):
    """Numbers that went wrong while a program ran."""


class NonFiniteError(NumericalError):
    """A NaN or an infinity made of finite operands."""


# Tracebacks and documents give each error the name that users import: `tessera.errors.ShapeError`.
for _class in [c for c in globals().values() if isinstance(c, type) and issubclass(c, TesseraError)]:
    _class.__module__ = "tessera.errors"

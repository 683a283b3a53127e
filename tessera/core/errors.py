"""Errors and source locations: the exceptions that users see. Each has a location, a message, the expected and the
received value, and a suggestion."""

from __future__ import annotations

import ast
import contextlib
import functools
import linecache
import os
import stat
import sys
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from types import CodeType, FrameType, TracebackType
from typing import Any, TypeVar

_PACKAGE_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
# Folders of code written in the kernel language: locations in them are reported as those of a user.
_KERNEL_LANGUAGE = tuple(
    os.path.join(_PACKAGE_FOLDER, *parts)
    for parts in (("stdlib",), ("frontend", "kernel", "tile_api", "online_softmax.py"))
)
_CONTEXT_MANAGERS = contextlib.__file__  # it calls the generators of this package's contexts
# PyTorch calls the functions of this package for a user: its frames are no location.
_PYTORCH_FOLDER = os.path.join(os.sep, "site-packages", "torch", "")
_LIBRARY_FOLDER = os.path.dirname(os.__file__) + os.sep
_COMMAND_FOLDER = os.path.join(_PACKAGE_FOLDER, "tools", "cli") + os.sep


@dataclass(frozen=True)
class Location:
    """A location in a source file: lines and columns count from 1; column 0 means unknown.

    `scope` is the module or state object in which a program was traced there; equal lines of several are one location.
    """

    file: str = "?"
    line: int = 0
    column: int = 0
    end_column: int = 0
    scope: str = field(default="", compare=False, repr=False)

    def __str__(self) -> str:
        column = f":{self.column}" if self.column else ""
        return f"{self.file}:{self.line}{column}"

    @functools.lru_cache(maxsize=256)  # noqa: B019 - locations are small and live as long as their programs
    def variable(self) -> str:
        """The variable that the source assigns the value computed here, as `a` or `a[1]`; "" where there is none."""
        try:
            tree = ast.parse("".join(linecache.getlines(self.file)))
        except (SyntaxError, ValueError):
            return ""
        assigned = (node for node in ast.walk(tree) if isinstance(node, (ast.Assign, ast.AnnAssign)))
        return next((n for n in (self._variable_of(node) for node in assigned if node.value) if n), "")

    def _variable_of(self, node: ast.Assign | ast.AnnAssign) -> str:
        target, value = node.targets[0] if isinstance(node, ast.Assign) else node.target, node.value
        index = ""
        while isinstance(value, (ast.Tuple, ast.List)) and self._is_in(value):
            inner = [(i, element) for i, element in enumerate(value.elts) if self._is_in(element)]
            if not inner:
                break  # the list itself
            at, part = inner[0]
            if isinstance(target, (ast.Tuple, ast.List)) and len(target.elts) == len(value.elts):
                target = target.elts[at]
            else:
                index += f"[{at}]"
            value = part
        found = value is not None and self._is_in(value) and isinstance(target, ast.Name)
        return target.id + index if found else ""  # type: ignore[attr-defined]

    def _is_in(self, node: ast.expr) -> bool:
        start, end = (node.lineno, node.col_offset + 1), (node.end_lineno or node.lineno, node.end_col_offset or 0)
        return start <= (self.line, self.column) <= end

    def excerpt(self) -> str:
        """The source line with a caret under the columns, or "" where the file cannot be read."""
        line = read_source_line(self.file, self.line)
        if not line.strip():
            return ""
        head = f"  {self.line:>5} | "
        if not self.column:
            return head + line
        last = self.end_column if self.end_column > self.column else self.column + 1
        width = max(1, min(last, len(line) + 1) - self.column)
        return f"{head}{line}\n{' ' * (len(head) - 2)}| {' ' * (self.column - 1)}{'^' * width}"


MAX_SOURCE_BYTES = 1 << 24  # a longer file is no source that someone wrote


def read_source_line(file: str, line: int) -> str:
    """A line of a file without its end, or "" where there is none.

    Locations of IR name files that may be devices, pipes or very large: only regular files are read.
    """
    if file not in linecache.cache:
        try:
            found = os.stat(file)
        except (OSError, ValueError):
            return ""
        if not stat.S_ISREG(found.st_mode) or found.st_size > MAX_SOURCE_BYTES:
            return ""
    return linecache.getline(file, line).rstrip("\n")


UNKNOWN = Location()
# The module or state object whose method runs: a CallScope (tessera/core/pytree.py), whose text names it, or None.
CURRENT_SCOPE: ContextVar[Any] = ContextVar("scope", default=None)


def frame_location(frame: FrameType) -> Location:
    """The location that a frame executes, with columns where Python records them (from 3.11)."""
    return _instruction_location(frame.f_code, frame.f_lasti, frame.f_lineno)


def traceback_location(step: TracebackType) -> Location:
    """The location of one entry of a traceback."""
    return _instruction_location(step.tb_frame.f_code, step.tb_lasti, step.tb_lineno)


# The positions of the instructions of code objects, by identity: equal code may be of two files.
_POSITIONS: dict[int, tuple[CodeType, tuple[Any, ...]]] = {}
MAX_HELD_CODES = 256


def _read_positions(code: CodeType) -> tuple[Any, ...]:
    found = _POSITIONS.get(id(code))
    if found is None:
        if len(_POSITIONS) >= MAX_HELD_CODES:
            _POSITIONS.clear()
        found = _POSITIONS[id(code)] = code, tuple(code.co_positions())  # type: ignore[attr-defined]
    return found[1]


def _instruction_location(code: CodeType, instruction: int, line: int) -> Location:
    column, end = 0, 0
    if sys.version_info >= (3, 11):
        first, last, start, stop = _read_positions(code)[instruction // 2]
        if first is not None and start is not None:
            line, column = first, start + 1
            end = (stop or start) + 1 if last == first else 0
    return Location(code.co_filename, line, column, end)


def is_command_file(file: str) -> bool:
    """Whether a source file is part of the command line: its caller is a shell, not a line of Python."""
    return file.startswith(_COMMAND_FOLDER)


def is_package_file(file: str) -> bool:
    """Whether a source file is part of this package; the library in the kernel language counts as user code."""
    return file.startswith(_PACKAGE_FOLDER) and not file.startswith(_KERNEL_LANGUAGE)


def is_library_kernel_file(file: str) -> bool:
    """Whether a source file is part of this package's library in the kernel language."""
    return file.startswith(_KERNEL_LANGUAGE)


def user_location() -> Location:
    """The innermost location outside this package: the user's line that called; UNKNOWN for a command."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        origin = _find_origin(frame.f_code.co_filename)
        if origin == _COMMAND:
            return UNKNOWN
        if origin == _USER and not _is_made_method(frame):
            return frame_location(frame)
        frame = frame.f_back
    return UNKNOWN


def trace_location() -> Location:
    """The user's line that called, in the scope of the module or state object whose method runs."""
    return add_scope(user_location())


def add_scope(place: Location) -> Location:
    """A location in the scope of the module or state object whose method runs."""
    scope = CURRENT_SCOPE.get()
    return place if scope is None else replace(place, scope=str(scope))


_COMMAND, _USER, _SKIPPED = range(3)


@functools.lru_cache(maxsize=4096)
def _find_origin(file: str) -> int:
    """Whether the frames of a source file are a command's, a user's, or neither."""
    if is_command_file(file):
        return _COMMAND
    skipped = file == _CONTEXT_MANAGERS or _PYTORCH_FOLDER in file or is_package_file(file)
    return _SKIPPED if skipped else _USER


def _is_made_method(frame: FrameType) -> bool:
    """Whether a frame is a method that `dataclass` made for a class of this package."""
    return frame.f_code.co_filename == "<string>" and str(frame.f_globals.get("__name__")).startswith("tessera.")


def library_caller_location() -> Location:
    """The innermost location outside this package and its library."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_PACKAGE_FOLDER):
            return frame_location(frame)
        frame = frame.f_back
    return UNKNOWN


# Tracebacks without the frames of this package.


TRACEBACK_VARIABLE = "TESSERA_TRACEBACK"
TRACEBACK_NOTE = f"({TRACEBACK_VARIABLE}=full shows the calls inside Tessera.)"


def shows_internal_frames() -> bool:
    """Whether the environment asks for whole tracebacks."""
    return os.environ.get(TRACEBACK_VARIABLE) == "full"


def _is_library_file(file: str) -> bool:
    """Whether a file is of Python's own library or of NumPy; other packages may be a user's."""
    if "site-packages" in file:
        return f"{os.sep}numpy{os.sep}" in file
    return file.startswith((_LIBRARY_FOLDER, "<frozen "))


def filter_traceback(step: TracebackType | None) -> TracebackType | None:
    """A traceback without the frames of this package, and without those of libraries that it calls.

    Its library in the kernel language counts as user code.
    """
    steps, hidden = [], False
    while step is not None:
        file = step.tb_frame.f_code.co_filename
        hidden = is_package_file(file) or (hidden and _is_library_file(file))
        if not hidden:
            steps.append(step)
        step = step.tb_next
    found: TracebackType | None = None
    for each in reversed(steps):
        found = TracebackType(found, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return found


def hide_internal_frames(error: BaseException) -> None:
    """Filter the tracebacks of an error and of those that it says caused it, unless whole ones are wanted."""
    known: set[int] = set()
    while isinstance(error, BaseException) and id(error) not in known and not shows_internal_frames():
        known.add(id(error))
        error.__traceback__ = filter_traceback(error.__traceback__)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)  # type: ignore[assignment]


def _is_raised_by_user(step: TracebackType | None) -> bool:
    """Whether the innermost frame is outside this package, or asks this package for a name that it does not have."""
    while step is not None and step.tb_next is not None:
        step = step.tb_next
    if step is None:
        return False
    code = step.tb_frame.f_code
    missing = code.co_name == "__getattr__" and os.path.dirname(code.co_filename) == _PACKAGE_FOLDER.rstrip(os.sep)
    return missing or not (is_package_file(code.co_filename) or _is_library_file(code.co_filename))


Call = TypeVar("Call", bound=Callable[..., Any])


def hides_internal_frames(function: Call) -> Call:
    """Decorate an entry of the package: errors leave it without its frames (JAX's traceback filtering).

    Typed errors do, and those that the user's own code raises under the entry. An untyped error of the package is a
    defect and keeps its frames.
    """

    @functools.wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        try:
            return function(*args, **named)
        except Exception as error:
            if not hides_frames_of(error):
                raise
            hide_internal_frames(error)
            if sys.version_info < (3, 11):  # there a bare `raise` restores the whole traceback
                raise error
            raise

    return call  # type: ignore[return-value]


def hides_frames_of(error: Exception) -> bool:
    """Whether an error leaves an entry of the package without the package's frames."""
    return isinstance(error, TesseraError) or _is_raised_by_user(error.__traceback__)


# The source of the main program, where no file has it.


def is_main_text(code: CodeType) -> bool:
    """Whether a code object, or one inside it, is compiled from the text that linecache has for its file."""
    whole = _compile_text(code.co_filename)
    return whole is not None and _holds(whole, code)


def _compile_text(file: str) -> CodeType | None:
    try:
        return compile("".join(linecache.getlines(file)), file, "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return None


def _holds(outer: CodeType, code: CodeType) -> bool:
    return outer == code or any(_holds(each, code) for each in outer.co_consts if isinstance(each, CodeType))


def _read_main_text() -> tuple[str, str]:
    """The pseudo file and the text of `python -c TEXT` and of `python < FILE`; no text where it came by a pipe."""
    options = getattr(sys, "orig_argv", [])
    if sys.argv[:1] == ["-c"] and "-c" in options[:-1]:
        return "<string>", options[options.index("-c") + 1]
    try:
        if sys.argv[:1] in (["-"], [""]) and stat.S_ISREG(os.fstat(0).st_mode):
            return "<stdin>", os.pread(0, os.fstat(0).st_size, 0).decode()
    except (OSError, ValueError):
        pass  # there is no standard input
    return "", ""


def keep_main_text() -> None:
    """Let linecache have the text of a main program that no file has: errors and the debugger show its lines."""
    file, text = _read_main_text()
    if text and file not in linecache.cache:
        lines = [line + "\n" for line in text.splitlines()]
        linecache.cache[file] = (len(text), None, lines, file)


def show_uncaught_errors() -> None:
    """Show typed errors that nothing catches without internal frames, in scripts and in IPython."""
    before = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, step: TracebackType | None) -> None:
        if not isinstance(error, TesseraError) or shows_internal_frames():
            before(kind, error, step)
            return
        hide_internal_frames(error)
        before(kind, error, error.__traceback__)
        print(TRACEBACK_NOTE, file=sys.stderr)

    sys.excepthook = show
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is not None:
        shell.set_custom_exc((TesseraError,), _show_in_ipython)


def _show_in_ipython(
    shell: Any, kind: type[BaseException], error: BaseException, step: TracebackType | None, tb_offset: Any = None
) -> None:
    """The handler of IPython for typed errors."""
    hide_internal_frames(error)
    step = step if shows_internal_frames() else filter_traceback(step)
    shell._showtraceback(kind, error, shell.InteractiveTB.structured_traceback(kind, error, step, tb_offset=tb_offset))


class TesseraError(Exception):
    """An error: its message, location, expected and received values, and a suggestion.

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
        self.scope = ""  # the module or state object that raised it outside of a trace
        self.instance: tuple[int, ...] | None = None  # the program (and tile) that failed in an interpreter, if known
        self.site: Any = None  # the instruction and the thread that failed in an emulator, if known
        self.location = None if location == UNKNOWN else location
        self.expected = expected
        self.received = received
        self.suggestion = suggestion

    def at(self, location: Location) -> TesseraError:
        """This error, with `location` unless it has one already."""
        if self.location is None and location != UNKNOWN:
            self.location = location
        return self

    def describe_scope(self) -> str:
        """The module or state object that failed, in brackets: of the location, or the innermost that was running."""
        found = (self.location.scope if self.location else "") or self.scope
        return f" (in {found})" if found else ""

    def __str__(self) -> str:
        place = f"{self.location}: " if self.location else ""
        lines = [f"{place}{type(self).__name__}: {self.message}{self.describe_scope()}"]
        if self.location and (excerpt := self.location.excerpt()):
            lines.append(excerpt)
        for title in ("expected", "received", "suggestion"):
            value = getattr(self, title)
            if value is not None:
                lines.append(f"  {title}: {value}")
        return "\n".join(lines)


class ShapeError(TesseraError, ValueError, IndexError):
    """Shapes or ranks do not match, or an axis is out of range; like NumPy's AxisError, a ValueError and IndexError."""


class DTypeError(TesseraError):
    """Element types do not match."""


class ArgumentError(TesseraError):
    """A call has the wrong arguments."""


class StateDictError(TesseraError):
    """Saved tensors that do not fit a module or a container: missing, extra, or of another shape or element type."""


class UnknownNameError(TesseraError):
    """A name that nothing defines."""


class UnsupportedSyntaxError(TesseraError):
    """Python that the kernel language does not support."""


class UnsupportedOpError(TesseraError):
    """An op that a target cannot emit or an interpreter cannot run."""


class TraceError(TesseraError):
    """Python code needs the value of a tensor during tracing."""


class EffectError(TesseraError):
    """A function with an effect that it does not declare."""


class OutOfBoundsError(TesseraError, IndexError):
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
    """A program that exceeds memory or another resource."""


class ConstraintError(TesseraError):
    """A limit on size, memory, time or accuracy that an optimised model does not meet; it says what was reached."""


class ProgramError(TesseraError):
    """An exception raised by the user's Python code while a command runs it."""


class ExecutionError(TesseraError):
    """A program that fails at run time."""


class RaceError(ExecutionError):
    """A data race: two accesses of one element, at least one of them a write, without an order between them."""


class UninitializedError(ExecutionError):
    """A read of uninitialised memory."""


class AsyncCopyError(ExecutionError):
    """An access to memory of an asynchronous copy that is not complete."""


class BarrierError(ExecutionError):
    """Barrier divergence: some tiles of a group reach a barrier and others do not."""


class DeadlockError(ExecutionError):
    """A deadlock: tiles wait, and no tile is left that could wake them."""


class CollectiveError(ExecutionError):
    """Ranks of an SPMD program that disagree: other collectives or shapes, unmatched messages, replicas that differ."""


class AlignmentError(ExecutionError):
    """A vector access whose address is not a multiple of its width."""


class IndexOverflowError(ExecutionError):
    """Overflow of index arithmetic."""


class Advice(ExecutionError):
    """A warning about a program whose result is right but which could be faster or clearer."""


class NumericalError(ExecutionError):
    """A numerical error at run time."""


class NonFiniteError(NumericalError):
    """A NaN or an infinity computed from finite operands."""


class LostUpdateWarning(UserWarning):
    """A traced function replaces buffers of a module, as batch norm does, and does not return them."""


# Checked arguments: names and texts of users, so that no error comes from within.


def as_text(value: Any, what: str) -> str:
    """A text.

    >>> as_text("edge", "the target")
    'edge'

    Raises:
        ArgumentError: it is something else.
    """
    if isinstance(value, str):
        return value
    raise ArgumentError(
        f"{what} is no text", location=user_location(), received=f"{type(value).__name__} {value!r:.60}"
    )


def as_names(value: Any, what: str) -> tuple[str, ...]:
    """Names: a list of texts, or one text.

    >>> as_names(["w", "b"], "weights"), as_names("w", "weights")
    (('w', 'b'), ('w',))

    Raises:
        ArgumentError: it is something else.
    """
    if isinstance(value, str):
        return (value,)
    found = tuple(value) if isinstance(value, Iterable) and not isinstance(value, bytes) else (None,)
    if all(isinstance(name, str) for name in found):
        return found
    raise ArgumentError(f"{what} is no list of names", location=user_location(),
                        received=f"{type(value).__name__} {value!r:.60}")  # fmt: skip


# Tracebacks and documents give each error the name that users import: `tessera.errors.ShapeError`.
for _class in [c for c in globals().values() if isinstance(c, type) and issubclass(c, (TesseraError, UserWarning))]:
    _class.__module__ = "tessera.errors"
show_uncaught_errors()
keep_main_text()

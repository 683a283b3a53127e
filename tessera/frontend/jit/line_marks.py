"""Debug line marks: inserts an op with the visible variables before each source line of a traced function."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import cache
from types import FrameType, ModuleType
from typing import Any

from tessera.core.device import INTERP, find_generator_name
from tessera.core.errors import Location, UnsupportedOpError, is_package_file
from tessera.core.pytree import flatten
from tessera.core.types import bool_
from tessera.ir.builder import CURRENT_BUILDER, Builder
from tessera.ir.core import Block, Value
from tessera.ir.rules import Op
from tessera.ir.tensor import Tensor
from tessera.ops.dialects import tile
from tessera.ops.tensor.basic import full

# Whether kernels and traced functions are compiled with a mark before each line.
LINE_MARKS_ENABLED: ContextVar[bool] = ContextVar("lines", default=False)
# What marks the function being traced.
ACTIVE_MARKER: ContextVar[LineMarker | None] = ContextVar("marking", default=None)
# The lines at which the `ts.jit` function being traced has said that it stops; None where none is.
REQUESTED_BREAKPOINTS: ContextVar[list[Location] | None] = ContextVar("pauses", default=None)
_MAX_REPR = 200
_COMPREHENSIONS = ("<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>")


class LineMarker:
    """The lines of a trace: a trace function of Python's, which notes each line of the user's functions."""

    def __init__(self, builder: Builder) -> None:
        self.builders = [builder]  # those of the function, and of the loops and branches under way in it
        self.depth: dict[FrameType, int] = {}

    def trace_call(self, frame: FrameType, event: str, arg: Any) -> Any:
        """A function begins: the user's are followed line by line, the package's own are not."""
        if not _is_user_code(frame.f_code.co_filename, frame.f_code.co_name):
            return None
        caller = frame.f_back
        while caller is not None and caller not in self.depth:
            caller = caller.f_back
        self.depth[frame] = 0 if caller is None else self.depth[caller] + 1
        return self._trace_line

    def _trace_line(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "return":
            self.depth.pop(frame, None)
        elif event == "line" and self.is_active:
            self.mark(frame, tile.line, [])
        return self._trace_line

    @property
    def is_active(self) -> bool:
        """Whether what is traced now is marked: what a transform reads is not."""
        return self.builders[-1] is CURRENT_BUILDER.get()

    def mark(self, frame: FrameType, op: Op, first: Sequence[Value]) -> None:
        """Add a mark with the variables of a frame."""
        names, values, known = [], [], []
        for name, held in frame.f_locals.items():
            traced = [(path, leaf.data) for path, leaf in _flatten_variable(held, name) if self._is_live_tensor(leaf)]
            if traced:
                names += [path for path, _ in traced]
                values += [value for _, value in traced]
            elif not callable(held) and not isinstance(held, (ModuleType, type)):
                known.append((name, _format_value(held)))
        attrs = {
            "names": tuple(names), "known": tuple(known), "function": frame.f_code.co_name,
            "depth": self.depth.get(frame, 0),
        }  # fmt: skip
        place = Location(frame.f_code.co_filename, frame.f_lineno)
        self.builders[-1].add(op, [*first, *values], attrs, loc=place)

    def _is_live_tensor(self, leaf: Any) -> bool:
        """Whether a variable is a tensor of this trace, made in a region that is still open."""
        if not isinstance(leaf, Tensor) or not leaf.is_traced:
            return False
        made = [(b, b.producers[leaf.data]) for b in self.builders if leaf.data in b.producers]
        return all(builder.holds(node) for builder, node in made)


@cache
def _is_user_code(file: str, function: str) -> bool:
    """Whether a function is a user's: not this package's own, nor one of Python's or an installed library's."""
    installed = any(file.startswith(sysconfig.get_path(p) + os.sep) for p in ("stdlib", "purelib", "platlib"))
    made = file.startswith(("<frozen", "<string>")) or function in _COMPREHENSIONS
    return not installed and not made and not is_package_file(file)


def _flatten_variable(held: Any, name: str) -> list[tuple[str, Any]]:
    try:
        return flatten(held, name)[0]
    except TypeError:  # a mapping whose keys have no order
        return [(name, held)]


def _format_value(held: Any) -> str:
    try:
        return repr(held)[:_MAX_REPR]
    except Exception:  # an object under construction, say
        return f"a {type(held).__name__}"


@contextmanager
def mark_lines(builder: Builder) -> Iterator[None]:
    """Mark the lines of what is traced into a builder in here."""
    found = LineMarker(builder)
    token, before = ACTIVE_MARKER.set(found), sys.gettrace()
    sys.settrace(found.trace_call)
    try:
        yield
    finally:
        sys.settrace(before)
        ACTIVE_MARKER.reset(token)


@contextmanager
def collect_breakpoints() -> Iterator[list[Location]]:
    """The lines at which what is traced in here says that it stops."""
    places: list[Location] = []
    token = REQUESTED_BREAKPOINTS.set(places)
    try:
        yield places
    finally:
        REQUESTED_BREAKPOINTS.reset(token)


@contextmanager
def mark_region_lines(builder: Builder) -> Iterator[None]:
    """Mark what is traced in here, for a loop or branch, where what it stands in is marked."""
    found = ACTIVE_MARKER.get()
    if found is None or not found.is_active:
        yield
        return
    found.builders.append(builder)
    try:
        yield
    finally:
        found.builders.pop()


def add_breakpoint(condition: Any, frame: FrameType) -> bool:
    """Stop in the debugger where a condition holds; False where no `ts.jit` function is being traced.

    One that is traced without marks says so in PAUSES, and is traced again with them.
    """
    marking, places = ACTIVE_MARKER.get(), REQUESTED_BREAKPOINTS.get()
    if places is not None:
        places.append(Location(frame.f_code.co_filename, frame.f_lineno))
    if marking is None or not marking.is_active:
        return places is not None
    traced = isinstance(condition, Tensor) and condition.is_traced
    found = condition if traced else full(shape=(), value=bool(condition), dtype=bool_)
    marking.mark(frame, tile.pause, [found.data])
    return True


def strip_marks(block: Block) -> Block:
    """A block without marks, as transforms read it."""
    if not any(n.op in (tile.line, tile.pause) for n in block.walk()):
        return block
    kept = [n for n in block.nodes if n.op not in (tile.line, tile.pause)]
    nodes = tuple(replace(n, regions=tuple(map(strip_marks, n.regions))) if n.regions else n for n in kept)
    return Block(block.params, nodes, block.results)


def check_breakpoint_support(place: Location, device: str) -> None:
    """Refuse a device on which a function cannot stop in the debugger, as it asks to at a place.

    Raises:
        UnsupportedOpError: the device is not the interpreter.
    """
    if find_generator_name(device) != INTERP:
        raise UnsupportedOpError(
            f"the target {device} does not stop in a debugger", location=place,
            suggestion="run it in the interpreter, or take ts.debug.break_here out",
        )  # fmt: skip

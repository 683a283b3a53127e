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

# Whether kernels and traced functions are compiled with a line mark before each line.
LINE_MARKS_ENABLED: ContextVar[bool] = ContextVar("lines", default=False)
# The marker of the function being traced.
ACTIVE_MARKER: ContextVar[LineMarker | None] = ContextVar("marking", default=None)
# The breakpoints of the `ts.jit` function being traced; None outside of tracing.
REQUESTED_BREAKPOINTS: ContextVar[list[Location] | None] = ContextVar("pauses", default=None)
_MAX_REPR = 200
_COMPREHENSIONS = ("<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>")


class LineMarker:
    """A Python trace function (sys.settrace) that records a mark for each line of the user's functions."""

    def __init__(self, builder: Builder) -> None:
        self.builders = [builder]  # the builders of the function, and of the loops and branches being traced in it
        self.depth: dict[FrameType, int] = {}

    def trace_call(self, frame: FrameType, event: str, arg: Any) -> Any:
        """Trace a call: the user's functions are followed line by line, the package's own are not."""
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
        """Whether the current trace is marked; traces that a transform reads are not."""
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
        """Whether a variable is a tensor of this trace, from a region that is still open."""
        if not isinstance(leaf, Tensor) or not leaf.is_traced:
            return False
        made = [(b, b.producers[leaf.data]) for b in self.builders if leaf.data in b.producers]
        return all(builder.holds(node) for builder, node in made)


@cache
def _is_user_code(file: str, function: str) -> bool:
    """Whether a function is the user's: not of this package, the standard library or an installed package."""
    installed = any(file.startswith(sysconfig.get_path(p) + os.sep) for p in ("stdlib", "purelib", "platlib"))
    made = file.startswith(("<frozen", "<string>")) or function in _COMPREHENSIONS
    return not installed and not made and not is_package_file(file)


def _flatten_variable(held: Any, name: str) -> list[tuple[str, Any]]:
    try:
        return flatten(held, name)[0]
    except TypeError:  # a mapping with unordered keys
        return [(name, held)]


def _format_value(held: Any) -> str:
    try:
        return repr(held)[:_MAX_REPR]
    except Exception:  # such as an object under construction
        return f"a {type(held).__name__}"


@contextmanager
def mark_lines(builder: Builder) -> Iterator[None]:
    """Mark lines while tracing into a builder."""
    found = LineMarker(builder)
    token, before = ACTIVE_MARKER.set(found), sys.gettrace()
    sys.settrace(found.trace_call)
    try:
        yield
    finally:
        sys.settrace(before)
        ACTIVE_MARKER.reset(token)


@contextmanager
def mark_region_lines(builder: Builder) -> Iterator[None]:
    """Mark lines while tracing the region of a loop or branch, where the enclosing function is marked."""
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

    A trace without marks records the breakpoint, and the function is traced again with marks.
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
    """Remove the line marks of a block, for transforms."""
    if not any(n.op in (tile.line, tile.pause) for n in block.walk()):
        return block
    kept = [n for n in block.nodes if n.op not in (tile.line, tile.pause)]
    nodes = tuple(replace(n, regions=tuple(map(strip_marks, n.regions))) if n.regions else n for n in kept)
    return Block(block.params, nodes, block.results)


def check_breakpoint_support(place: Location, device: str) -> None:
    """Check that a function with a breakpoint runs on a device that can stop in the debugger.

    Raises:
        UnsupportedOpError: the device is not the interpreter.
    """
    if find_generator_name(device) != INTERP:
        raise UnsupportedOpError(
            f"the target {device} has no breakpoints", location=place,
            suggestion="run it in the interpreter, or remove ts.debug.break_here",
        )  # fmt: skip

"""Line marks: debug locations before each source line, with the live variables, for stepping."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from tessera.core.types import bool_
from tessera.frontend.jit.line_marks import LINE_MARKS_ENABLED
from tessera.frontend.kernel.memref import MemRefView
from tessera.frontend.kernel.python_ast.scope import KernelFrame, UnboundName
from tessera.frontend.kernel.python_ast.source import find_writes
from tessera.frontend.kernel.tile_api.synchronisation import MBarrier
from tessera.frontend.kernel.trace import TraceState, current_trace, is_traced
from tessera.ir.core import Value
from tessera.ir.tensor import Tensor
from tessera.ops.dialects import tile
from tessera.ops.tensor.basic import full

_MAX_REPR_LENGTH = 200


def mark_statement(frame: KernelFrame, node: ast.stmt) -> None:
    """Note the statement that is read next; with LINES, mark it in the program."""
    frame.trace.frame = frame
    if LINE_MARKS_ENABLED.get() and not (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    ):  # no docstrings
        _emit_mark(frame, tile.line, [])
    if isinstance(node, ast.For):  # in its body the counter has a value again
        frame.lost -= find_writes([node.target])


def drop_dead_names(frame: KernelFrame, node: ast.stmt) -> None:
    """Forget what a branch or loop assigned and nothing reads: the program does not keep it."""
    if isinstance(node, (ast.If, ast.For, ast.While)):
        frame.lost |= find_writes([node]) - frame.source.live.after.get(node, frozenset())
    else:
        frame.lost -= find_writes([node])


def pause(condition: Any = True) -> None:
    """Stop in the debugger here, in the programs where the condition (a bool or bool scalar) holds."""
    trace = current_trace("ts.debug.break_here")
    assert trace.frame is not None
    trace.pauses = True
    if not is_traced(condition):
        condition = full(shape=(), value=bool(condition), dtype=bool_)
    _emit_mark(trace.frame, tile.pause, [condition.data])


@contextmanager
def compile_with_marks() -> Iterator[None]:
    """Compile kernels and traced functions in here with a mark before each line."""
    token = LINE_MARKS_ENABLED.set(True)
    try:
        yield
    finally:
        LINE_MARKS_ENABLED.reset(token)


def needs_marks(trace: TraceState) -> bool:
    """Whether a kernel just read must be read again, with marks: it stops in the debugger somewhere."""
    return trace.pauses and not LINE_MARKS_ENABLED.get()


def _emit_mark(frame: KernelFrame, op: Any, first: Sequence[Value]) -> None:
    names, values, known = [], [], []
    for name, held in frame.names.items():
        value = _visible_value(held)
        if value is not None and name not in frame.lost:
            names.append(name)
            values.append(value)
        elif not isinstance(held, (UnboundName, Tensor, MemRefView, ModuleType)) and not callable(held):
            known.append((name, repr(held)[:_MAX_REPR_LENGTH]))
    attrs = {"names": tuple(names), "known": tuple(known), "function": frame.source.name, "depth": frame.trace.depth}
    frame.trace.builder.add(op, [*first, *values], attrs, loc=frame.trace.builder.location)


def _visible_value(held: Any) -> Value | None:
    if isinstance(held, Tensor) and held.is_traced:
        return held.data
    if isinstance(held, MBarrier) and held.is_whole:
        return held.memory.value
    # Fresh buffers may yet come to share one allocation (buffers.py): only what is in use has its value for good.
    if isinstance(held, MemRefView) and held.is_whole and not held.memory.prefix:
        return held.memory.value if held.memory.used or held.memory.type.space == "global" else None
    return None

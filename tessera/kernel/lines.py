"""Kernels compiled to be stepped through: a mark before each source line, with the variables that it sees."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from tessera.ir.core import Value
from tessera.kernel.frame import Frame, Unset
from tessera.kernel.liveness import writes
from tessera.kernel.mbarriers import Barrier
from tessera.kernel.place import View
from tessera.kernel.trace import Trace, current, is_traced
from tessera.marks import LINES
from tessera.ops import checks
from tessera.ops.basic import full
from tessera.tensor import Tensor
from tessera.types import bool_

_LONGEST = 200


def before(frame: Frame, node: ast.stmt) -> None:
    """Note the statement that is read next; with LINES, mark it in the program."""
    frame.trace.frame = frame
    if LINES.get() and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):  # no docstrings
        _mark(frame, checks.line, [])
    if isinstance(node, ast.For):  # in its body the counter has a value again
        frame.lost -= writes([node.target])


def after(frame: Frame, node: ast.stmt) -> None:
    """Forget what a branch or loop assigned and nothing reads: the program does not keep it."""
    if isinstance(node, (ast.If, ast.For, ast.While)):
        frame.lost |= writes([node]) - frame.source.live.after.get(node, frozenset())
    else:
        frame.lost -= writes([node])


def pause(condition: Any = True) -> None:
    """Stop in the debugger here, in the programs where the condition (a bool or bool scalar) holds."""
    trace = current("ts.debug.break_here")
    assert trace.frame is not None
    trace.pauses = True
    if not is_traced(condition):
        condition = full(shape=(), value=bool(condition), dtype=bool_)
    _mark(trace.frame, checks.pause, [condition.data])


@contextmanager
def marked() -> Iterator[None]:
    """Compile kernels and traced functions in here with a mark before each line."""
    token = LINES.set(True)
    try:
        yield
    finally:
        LINES.reset(token)


def stepped(trace: Trace) -> bool:
    """Whether a kernel just read must be read again, with marks: it stops in the debugger somewhere."""
    return trace.pauses and not LINES.get()


def _mark(frame: Frame, op: Any, first: Sequence[Value]) -> None:
    names, values, known = [], [], []
    for name, held in frame.names.items():
        value = _value(held)
        if value is not None and name not in frame.lost:
            names.append(name)
            values.append(value)
        elif not isinstance(held, (Unset, Tensor, View, ModuleType)) and not callable(held):
            known.append((name, repr(held)[:_LONGEST]))
    attrs = {"names": tuple(names), "known": tuple(known), "function": frame.source.name, "depth": frame.trace.depth}
    frame.trace.builder.add(op, [*first, *values], attrs, loc=frame.trace.builder.location)


def _value(held: Any) -> Value | None:
    if isinstance(held, Tensor) and held.is_traced:
        return held.data
    if isinstance(held, Barrier) and held.is_whole:
        return held.memory.value
    # Fresh buffers may yet come to share one allocation (buffers.py): only what is in use has its value for good.
    if isinstance(held, View) and held.is_whole and not held.memory.prefix:
        return held.memory.value if held.memory.used or held.memory.type.space == "global" else None
    return None

"""Runtime faults: a PE stores the number of its first fault, and the host raises the error of that number."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tessera.codegen.csl.text.context import CslContext
from tessera.codegen.csl.text.statements import add_line
from tessera.core.errors import (
    DeadlockError,
    ExecutionError,
    Location,
    OutOfBoundsError,
    TesseraError,
    UnsupportedOpError,
)
from tessera.ir.core import Node

FAULT_SYMBOL = "fault"
FAULT_ERRORS: Mapping[str, Callable[..., TesseraError]] = {
    "bounds": OutOfBoundsError,
    "assert": ExecutionError,
    "deadlock": DeadlockError,
}
# Keeps the first fault; fault numbers start at 1.
FAULT_HELPER = f"""fn fail(place: i32) void {{
  if ({FAULT_SYMBOL}[0] == 0) {FAULT_SYMBOL}[0] = place;
}}"""


def make_unsupported_error(node: Node, reason: str) -> UnsupportedOpError:
    """The error for an op that has no CSL."""
    return UnsupportedOpError(
        f"{node.op.name} cannot be emitted for csl: {reason}", location=node.loc,
        suggestion="run this on another target, or in the interpreter",
    )  # fmt: skip


def add_fault(ctx: CslContext, node: Node, kind: str, text: str, expected: str) -> str:
    """Register a possible fault of a node; returns the statement that reports it."""
    ctx.functions["fail"] = FAULT_HELPER
    loc = node.loc
    location = [loc.file, loc.line, loc.column, loc.end_column]
    ctx.faults.append({"kind": kind, "text": text, "expected": expected, "place": location})
    return f"fail({len(ctx.faults)});"


def emit_fault_return(ctx: CslContext, statement: str) -> None:
    """Emit the report of a fault and the end of the program."""
    add_line(ctx, statement)
    add_line(ctx, "sys_mod.unblock_cmd_stream();")
    add_line(ctx, "return;")


def make_fault_error(faults: Sequence[Mapping[str, Any]], number: int, row: int, column: int) -> TesseraError:
    """The error for the fault number that a PE stored."""
    fault = faults[number - 1]
    return FAULT_ERRORS[fault["kind"]](
        fault["text"], location=Location(*fault["place"]), expected=fault["expected"],
        received=f"a violation on the PE in row {row} and column {column}",
    )  # fmt: skip

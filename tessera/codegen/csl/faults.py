"""What goes wrong on an element while it runs: it keeps the number of the place, and the host raises what is there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tessera.codegen.csl.element import Element
from tessera.errors import DeadlockError, ExecutionError, Location, OutOfBoundsError, TesseraError
from tessera.ir.core import Node

SYMBOL = "fault"
KINDS: Mapping[str, Callable[..., TesseraError]] = {
    "bounds": OutOfBoundsError,
    "assert": ExecutionError,
    "deadlock": DeadlockError,
}
# The first place is kept; places count from 1.
HELPER = f"""fn fail(place: i32) void {{
  if ({SYMBOL}[0] == 0) {SYMBOL}[0] = place;
}}"""


def failure(element: Element, node: Node, kind: str, text: str, expected: str) -> str:
    """The statement that says that something went wrong at a node."""
    element.functions["fail"] = HELPER
    loc = node.loc
    place = [loc.file, loc.line, loc.column, loc.end_column]
    element.faults.append({"kind": kind, "text": text, "expected": expected, "place": place})
    return f"fail({len(element.faults)});"


def stop(element: Element, statement: str) -> None:
    """Say what went wrong, and go no further."""
    element.say(statement)
    element.say("sys_mod.unblock_cmd_stream();")
    element.say("return;")


def raised(faults: Sequence[Mapping[str, Any]], number: int, row: int, column: int) -> TesseraError:
    """The error for what an element kept."""
    found = faults[number - 1]
    return KINDS[found["kind"]](
        found["text"], location=Location(*found["place"]), expected=found["expected"],
        received=f"otherwise on the element in row {row} and column {column}",
    )  # fmt: skip

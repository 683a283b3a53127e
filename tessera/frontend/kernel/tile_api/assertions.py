"""Assertions and prints in a kernel: they take effect in the interpreter, in every mode."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tessera.core.errors import ArgumentError, UnsupportedSyntaxError, user_location
from tessera.frontend.kernel.trace import as_value, current_trace, emit_op, is_traced
from tessera.ir.tensor import Tensor
from tessera.ops.dialects import tile
from tessera.ops.tensor.elementwise import equal, greater, greater_equal, less, less_equal, not_equal


@dataclass(frozen=True)
class TracedString:
    """An f-string with values of the running program: its text with a `{}` for each of them."""

    template: str
    values: tuple[Tensor, ...]

    def __str__(self) -> str:
        raise UnsupportedSyntaxError(
            "an f-string with values of the running program can only be printed", received=self.template,
            suggestion="tile.assert_(condition, \"message\", value) shows values",
        )  # fmt: skip


_COMPARISONS = (equal, greater, greater_equal, less, less_equal, not_equal)


def assert_(condition: Any, message: str = "", *values: Any) -> None:
    """Stop the program where `condition` (a bool, a bool scalar or a bool block) does not hold.

    The error names the program, the tile, the element, and what `values` hold there; without any, what
    the condition compares.

    Raises:
        ArgumentError: the condition is known while compiling, and false.
        DTypeError: the condition is not bool.
    """
    current_trace("tile.assert_")
    if not is_traced(condition):
        if not condition:
            raise ArgumentError(f"assertion failed: {message}", location=user_location())
        return
    shown = [as_value(v) for v in values] if values else _comparison_operands(condition)
    emit_op(tile.assert_, [condition, *shown], message=str(message))


def print(*values: Any) -> None:
    """Print values, one line for each tile; strings among them come first, as a label."""
    current_trace("tile.print")
    if any(isinstance(v, TracedString) for v in values):
        print_(*values)
        return
    words = " ".join(v for v in values if isinstance(v, str))
    emit_op(tile.print_, [as_value(v) for v in values if not isinstance(v, str)], label=words)


def print_(*values: Any, sep: str = " ", end: str = "\n") -> None:
    """Python's `print` in a kernel: its arguments in order, one line for each tile (whatever `end` says).

    Raises:
        ArgumentError: `end` is something else than a line's end.
    """
    if end != "\n":
        raise ArgumentError("a kernel prints whole lines", received=f"end={end!r}", suggestion="leave `end` out")
    parts = [format_traced(v) for v in values]
    emit_op(tile.print_, [v for p in parts for v in p.values], label=sep.join(p.template for p in parts), ordered=True)


def format_traced(value: Any) -> TracedString:
    """A value as it is printed: of the running program where it is traced."""
    if isinstance(value, TracedString):
        return value
    return (
        TracedString("{}", (value,))
        if is_traced(value)
        else TracedString(str(value).replace("{", "{{").replace("}", "}}"), ())
    )


def _comparison_operands(condition: Tensor) -> list[Tensor]:
    """The operands of the comparison that a condition is."""
    node = current_trace().builder.producers.get(condition.data)
    return [Tensor(v) for v in node.args] if node is not None and node.op in _COMPARISONS else []

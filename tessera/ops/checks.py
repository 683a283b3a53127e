"""What a kernel says about itself while it runs: assertions and prints."""

from __future__ import annotations

from tessera.errors import DTypeError
from tessera.op import STORAGE, op
from tessera.ops.control import direct
from tessera.types import TensorType


def _check_type(condition: TensorType, *values: TensorType, message: str) -> None:
    if condition.dtype.kind != "bool":
        raise DTypeError(
            "the condition of an assertion is not bool", expected="bool", received=str(condition),
            suggestion="compare: tile.assert_(x > 0)",
        )  # fmt: skip


@op(infer=_check_type, coerce=direct, numerics=STORAGE, dialect="tile", effects=("io",), name="assert")
def assert_(condition, *values, message: str = ""):
    """Stop the program where an element of the bool block `condition` is false.

    The error names the first such program, tile and element, and what `values` hold there. Tiles that
    are not active assert nothing.
    """


def _print_type(*values: TensorType, label: str) -> None:
    return None


@op(infer=_print_type, coerce=direct, numerics=STORAGE, dialect="tile", effects=("io",), name="print")
def print_(*values, label: str = ""):
    """Print `values`, one line for each active tile, in the order of programs and then tiles."""

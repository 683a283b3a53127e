"""What a kernel says about itself while it runs: assertions and prints."""

from __future__ import annotations

from tessera.errors import DTypeError
from tessera.op import STORAGE, op
from tessera.ops.control import direct
from tessera.types import TensorType, Type


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


def _print_type(*values: TensorType, label: str, ordered: bool) -> None:
    return None


@op(infer=_print_type, coerce=direct, numerics=STORAGE, dialect="tile", effects=("io",), name="print")
def print_(*values, label: str = "", ordered: bool = False):
    """Print `values`, one line for each active tile, in the order of programs and then tiles.

    The label stands before them; with `ordered` each `{}` of it stands for one of them.
    """


def _line_type(*values: Type, names: tuple, known: tuple, function: str, depth: int) -> None:
    return None


@op(infer=_line_type, coerce=direct, numerics=STORAGE, dialect="tile", effects=("io",), name="line")
def line(*values, names: tuple, known: tuple, function: str, depth: int):
    """A source line that runs next, for a debugger: only kernels compiled to be stepped through have these.

    `names` are those of `values`, `known` the variables known while compiling as (name, text); `depth` counts the calls
    between the kernel and `function`.
    """


def _pause_type(condition: TensorType, *values: Type, names: tuple, known: tuple, function: str, depth: int) -> None:
    _check_type(condition, message="")


@op(infer=_pause_type, coerce=direct, numerics=STORAGE, dialect="tile", effects=("io",), name="pause")
def pause(condition, *values, names: tuple, known: tuple, function: str, depth: int):
    """Stop in the debugger where the bool scalar `condition` holds; the rest is as for `line`."""

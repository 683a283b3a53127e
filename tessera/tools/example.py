"""Examples: an entry point with its inputs and the reference it is checked against."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from tessera.core.errors import ArgumentError, user_location

Entry = TypeVar("Entry")


@dataclass(frozen=True)
class Example:
    """How to run an entry point: `inputs(rng)` makes its arguments, `reference(*inputs)` the right answer.

    `grid` and `group` launch a kernel; `weights` names the arguments that a built artifact carries;
    `marked` makes this the entry that a file with several runs when none is named; `module` is where it was marked.
    """

    inputs: Callable[..., Any]
    reference: Callable[..., Any] | None = None
    grid: Any = None
    group: int | None = None
    weights: Sequence[str] = ()
    marked: bool = False
    module: str = ""


def example(
    inputs: Callable[..., Any],
    reference: Callable[..., Any] | None = None,
    *,
    grid: Any = None,
    group: int | None = None,
    weights: Sequence[str] = (),
    marked: bool = False,
) -> Callable[[Entry], Entry]:
    """Mark a kernel or jit function as an entry point of this file; one of another module is copied first.

    `mine = ts.example(inputs, grid=...)(imported_kernel)` makes an entry point of an imported kernel.

    `inputs(rng)` takes a NumPy Generator and gives a tuple or dict of arguments; `reference`
    takes the same and gives what the entry should return, or for a kernel that writes in place,
    what the written arguments should hold (a dict by name, or the last argument's value).
    Constants of a kernel are inputs too, by their names, and `reference` receives them with the rest:
    `{"x": x, "y": y, "BLOCK": 128}`. `grid` may be a tuple, or a function of the inputs that gives one; it
    names those that it needs.

    Raises:
        ArgumentError: `inputs` is no function.
    """

    if not callable(inputs):
        raise ArgumentError(
            "the inputs of an example are no function", expected="inputs(rng) -> a tuple or dict of arguments",
            received=type(inputs).__name__, location=user_location(), suggestion="@ts.example(lambda rng: (x, y))",
        )  # fmt: skip

    module = str(sys._getframe(1).f_globals.get("__name__", ""))

    def mark(entry: Entry) -> Entry:
        entry = entry if getattr(entry, "__module__", None) == module else copy.copy(entry)
        entry.example = Example(inputs, reference, grid, group, weights, marked, module)  # type: ignore[attr-defined]
        return entry

    return mark

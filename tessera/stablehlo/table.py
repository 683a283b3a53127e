"""Op table: the one table from the name of a StableHLO or CHLO operation to its meaning as functions of tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tessera.core.errors import UnsupportedOpError
from tessera.core.types import DType, TensorType
from tessera.ir.tensor import Tensor
from tessera.stablehlo.text import HloRegion, Operation

Row = Callable[..., Any]
# row(site, *operands) returns the result, or a list of results.
ROWS: dict[str, Row] = {}


def row(*names: str) -> Callable[[Row], Row]:
    """Add a function to the table under the names of operations."""

    def add(function: Row) -> Row:
        for name in names:
            assert name not in ROWS, f"{name} has two rows"
            ROWS[name] = function
        return function

    return add


def rows(dialect: str, functions: dict[str, Callable[..., Any]]) -> None:
    """Add functions of the operands alone."""
    for name, function in functions.items():
        row(f"{dialect}.{name}")(lambda site, *operands, function=function: function(*operands))


class Program(Protocol):
    """What rows need of the program that they are part of."""

    def call(self, name: str, operands: Sequence[Any], numbers: Sequence[Any]) -> list[Any]:
        """The results of a function."""

    def run_region(self, region: HloRegion, operands: Sequence[Any], scope: Scope) -> list[Any]:
        """What a region returns."""

    def custom_call(self, target: str) -> Row | None:
        """The meaning that the user gave a custom call."""


class Scope:
    """The values of names, and the numbers of those that are scalar constants, in nested regions."""

    def __init__(self, outer: Scope | None = None) -> None:
        self.values: dict[str, Any] = dict(outer.values) if outer else {}
        self.numbers: dict[str, Any] = dict(outer.numbers) if outer else {}


@dataclass(frozen=True)
class Site:
    """One operation where it is evaluated."""

    operation: Operation
    scope: Scope
    program: Program

    @property
    def type(self) -> TensorType:
        """The type of the only result."""
        (type,) = self.operation.types
        return type

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the only result."""
        return self.type.shape  # type: ignore[return-value]

    @property
    def dtype(self) -> DType:
        """The element type of the only result."""
        return self.type.dtype

    def get(self, name: str, default: Any = None) -> Any:
        """An attribute, or the default."""
        return self.operation.attrs.get(name, default)

    def numbers(self, name: str, default: Iterable[int] = ()) -> tuple[int, ...]:
        """An attribute that is a list of integers: a list, an array or dense elements."""
        found = self.operation.attrs.get(name)
        return tuple(int(n) for n in (default if found is None else found))

    def constant(self, position: int) -> Any:
        """The number of an operand that is a scalar constant of the program; None for another one."""
        names = self.operation.operands
        return self.scope.numbers.get(names[position]) if position < len(names) else None

    def body(self, index: int = 0) -> Callable[..., list[Any]]:
        """A region as a function of its parameters."""
        region = self.operation.regions[index]
        return lambda *operands: self.program.run_region(region, operands, self.scope)

    def refuse(self, reason: str, suggestion: str | None = None) -> UnsupportedOpError:
        """The error that this operation is not supported."""
        return UnsupportedOpError(f"{self.operation.name} is not supported: {reason}", suggestion=suggestion)


def as_list(found: Any) -> list[Tensor]:
    """The results of a row as a list."""
    if found is None:
        return []
    return list(found) if isinstance(found, (list, tuple)) else [found]

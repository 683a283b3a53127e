"""What a rule of the verifier yields where a module breaks it, and the walks that rules share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from tessera.ir.core import Function, Module, Node, Value
from tessera.types import Type


class Breach(NamedTuple):
    """A broken rule: the node, function or module that breaks it, and what is wrong."""

    where: Node | Function | Module
    message: str
    expected: Any = None
    received: Any = None


def nodes(module: Module) -> Iterator[Node]:
    """Every node of every function."""
    for function in module.functions:
        yield from function.body.walk()


def types(values: Sequence[Value]) -> tuple[Type, ...]:
    """The types of values."""
    return tuple(v.type for v in values)


def listed(found: Sequence[Type]) -> str:
    """Types for people; the policy too, since types that differ in nothing else would look the same."""
    return ", ".join(f"{t} {t.policy}" if t.policy else str(t) for t in found) or "none"


def differing(where: Node, what: str, want: Sequence[Type], got: Sequence[Type]) -> Iterator[Breach]:
    """A breach where types are not those wanted."""
    if tuple(want) != tuple(got):
        yield Breach(where, f"{what} have other types", listed(want), listed(got))

"""The record of a task, and what is done to the values in it."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tessera.interp.target.csl.steps import Work
from tessera.interp.target.csl.symbols import LARGEST, Early, Late
from tessera.interp.target.csl.values import Dsr

LOOSE = re.compile(r"v\d+$")  # the names of scalar variables in compiled programs


@dataclass
class Effect:
    """A call on the PE, `cycles` after the one before it ended; `line` is that of the compiled program."""

    cycles: int
    call: Callable[..., Any]
    args: tuple[Any, ...]
    line: int


@dataclass
class Record:
    """What a task does where its guards hold."""

    guards: list[tuple[str, Any]] = field(default_factory=list)
    inputs: list[str] = field(default_factory=list)  # expressions that memory work needs, as numbers of each PE
    effects: list[Effect] = field(default_factory=list)
    results: dict[str, Any] = field(default_factory=dict)  # what the task leaves in the scalar variables
    work: Work = field(default_factory=Work)
    cycles: int = 0  # after the last effect


def fixed(value: Any) -> Any:
    """A descriptor with the variables in it looked at; numbers as they are."""
    if not isinstance(value, tuple) or not any(isinstance(item, (Early, Late, tuple)) for item in value):
        return value
    return rebuilt(value, lambda item: int(item) if isinstance(item, (Early, Late)) else fixed(item))


def found_in(value: Any, kinds: type | tuple[type, ...]) -> bool:
    """Whether something of these kinds stands in a value, as far down as values go."""
    if isinstance(value, dict):
        return any(found_in(item, kinds) for item in value.values())
    return isinstance(value, kinds) or (isinstance(value, tuple) and any(found_in(item, kinds) for item in value))


def rebuilt(value: Any, change: Callable[[Any], Any]) -> Any:
    """A tuple (a descriptor is one) or dict with its items changed; anything else as it is."""
    if isinstance(value, dict):
        return {name: change(item) for name, item in value.items()}
    if not isinstance(value, tuple) or isinstance(value, Dsr):
        return value
    items = [change(item) for item in value]
    return type(value)(*items) if hasattr(value, "_fields") else tuple(items)


def safe(function: Callable[..., Any], given: tuple[Any, ...]) -> bool:
    """Whether 64 bits hold what integers of any size would, up to what is masked off afterwards."""
    constants = [a for a in given if isinstance(a, int)]
    if any(abs(a) >= LARGEST for a in constants):
        return False
    if function in (operator.lshift, operator.rshift):
        return isinstance(given[1], int) and 0 <= given[1] < 32
    if function in (operator.floordiv, operator.mod):
        return isinstance(given[1], int) and given[1] > 0
    return True

"""What one instance holds of the values that the interpreter keeps for all of them."""

from __future__ import annotations

import ast
from typing import Any

import numpy as np

from tessera.debug.history import History, Step
from tessera.interp.affine import Affine
from tessera.interp.memory import Memory
from tessera.ir.core import Value
from tessera.numerics.bounded import Bounded
from tessera.types import TensorType


def own(value: Any, type: Any, place: tuple[int, ...]) -> Any:
    """An instance's part of a value: a block or scalar; `place` is where it stands among those that run."""
    if isinstance(value, Affine):
        return np.int64(value.origin + sum(s * i for s, i in zip(value.steps, place, strict=True)))
    if isinstance(value, Bounded):
        return Bounded(own(value.value, type, place), own(value.radius, type, place))
    rank = len(place)
    array = value[tuple(i if n > 1 else 0 for i, n in zip(place, value.shape[:rank], strict=True))]
    return np.broadcast_to(array, tuple(int(n) for n in type.shape)) if isinstance(type, TensorType) else array


def at(history: History, step: Step, value: Value, held: Any, place: tuple[int, ...]) -> Any:
    """What an instance sees of a value or memory when a step is about to run."""
    if not isinstance(held, Memory):
        return own(held, value.type, place)
    array = history.memory(held, step)
    return array[tuple(i if n > 1 else 0 for i, n in zip(place, array.shape[: held.lead], strict=False))]


def names_of(line: Step) -> list[tuple[str, Value, Any]]:
    """The variables of the program at a line: name, IR value, and what all instances hold."""
    attrs, node = line.node.attrs, line.node
    if "names" not in attrs:
        return []
    skip = len(node.args) - len(attrs["names"])
    return list(zip(attrs["names"], node.args[skip:], line.args[skip:], strict=True))


def variables(history: History, step: Step, line: Step, instance: tuple[int, ...]) -> dict[str, Any]:
    """The variables of a line as one instance holds them at a step; those known while compiling too."""
    found: dict[str, Any] = {name: _literal(text) for name, text in line.node.attrs.get("known", ())}
    # A line that called a function may have run with other instances than the step inside it.
    place = line.place(instance)
    if place is None:
        return found
    if not names_of(line):  # no kernel that was compiled to be stepped through: its arguments alone
        return {**found, **_arguments(step)}
    return {**found, **{name: at(history, step, value, held, place) for name, value, held in names_of(line)}}


def _arguments(step: Step) -> dict[str, Any]:
    named = zip(step.launch.function.params, step.launch.args, strict=True)
    return {p.hint or f"argument{i}": a for i, (p, a) in enumerate(named)}


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text

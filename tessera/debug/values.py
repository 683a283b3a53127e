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
    if not place:  # a value of a Graph function, as it is
        return np.asarray(value)
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
    if not names_of(line):
        return {**found, **_unmarked(history, step, line, instance)}
    held = {name: at(history, step, value, held, place) for name, value, held in names_of(line)}
    return _nested({**found, **held})


def _unmarked(history: History, step: Step, line: Step, instance: tuple[int, ...]) -> dict[str, Any]:
    """What is known on a line that was not marked: what the marked line around it sees, or a kernel's arguments."""
    around = step.calls[step.calls.index(line) - 1] if line in step.calls[1:] else None
    if around is not None and around is not line:
        return variables(history, step, around, instance)
    named = zip(step.launch.function.params, step.launch.args, strict=True)
    return {p.hint or f"argument{i}": a for i, (p, a) in enumerate(named)}


def _nested(found: dict[str, Any]) -> dict[str, Any]:
    """Variables by name, those of containers ("layers.0.weight") in containers again."""
    whole: dict[str, Any] = {}
    for name, held in found.items():
        *path, last = [int(part) if part.isdigit() else part for part in name.split(".")]
        place: dict[Any, Any] = whole
        for part in path:
            place = place.setdefault(part, {})
        place[last] = held
    return {name: _listed(held) for name, held in whole.items()}


def _listed(held: Any) -> Any:
    """A container whose keys are numbers in order as a list."""
    if not isinstance(held, dict):
        return held
    inner = {key: _listed(part) for key, part in held.items()}
    return list(inner.values()) if list(inner) == list(range(len(inner))) else inner


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text

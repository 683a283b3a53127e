"""Where a NaN or an infinity comes from: the ops it went through, back to the one that made it of finite operands."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from tessera.debug import show
from tessera.debug.history import History, Step
from tessera.debug.values import own
from tessera.interp.affine import Affine
from tessera.interp.memory import Memory
from tessera.ops import tile
from tessera.types import TensorType

_READS, _WRITES = (tile.load, tile.gather), (tile.store, tile.scatter)


def trace_back(history: History, step: Step, held: Any, instance: tuple[int, ...]) -> Iterator[str]:
    """The way of a value that is not finite, the latest op first; `held` is what all instances hold."""
    while True:
        made = next((s for s in history.before(step) if any(r is held for r in s.results)), None)
        if made is None:
            yield "it was there before, or was joined of several ways through a branch or loop"
            return
        place = made.place(instance)
        where = f"{show.place(made.node.loc)}: {made.node.op.name}"
        if place is None:
            yield f"{where}, in other programs alone"
            return
        said, found = _source(history, made, place, instance)
        yield where + said
        if found is None:
            return
        step, held = found


def _source(
    history: History, made: Step, place: tuple[int, ...], instance: tuple[int, ...]
) -> tuple[str, tuple[Step, Any] | None]:
    """What to say of an op whose result is not finite, and where that came from: a step, and a value before it."""
    if made.node.op in _READS:
        found = _written(history, made, instance)
        name = made.args[0].name
        return (f": it came in with {name}", None) if found is None else (f" of {name}", found)
    guilty = [a for v, a in zip(made.node.args, made.args, strict=True) if _bad(v.type, a, place)]
    return ("", (made, guilty[0])) if guilty else (f" makes it of {_operands(made, place)}", None)


def _bad(type: Any, held: Any, place: tuple[int, ...]) -> bool:
    """Whether an instance's part of a float value is not all finite."""
    if isinstance(held, (Memory, Affine)) or not isinstance(type, TensorType) or not type.dtype.is_float:
        return False
    return not np.isfinite(np.asarray(own(held, type, place)).astype(np.float64)).all()


def _operands(made: Step, place: tuple[int, ...]) -> str:
    """The operands in words."""
    shown = []
    for value, held in zip(made.node.args, made.args, strict=True):
        array = np.asarray(own(held, value.type, place))
        shown.append(str(array) if not array.ndim else f"a block ({show.stats(array)})")
    return ", ".join(shown)


def _written(history: History, read: Step, instance: tuple[int, ...]) -> tuple[Step, Any] | None:
    """The last store to the memory that a step reads of something not finite, and what it stored."""
    memory = read.args[0].array
    for step in history.before(read):
        if step.node.op in _WRITES and np.may_share_memory(step.args[0].array, memory):
            place = step.place(instance)
            if place is not None and _bad(step.node.args[1].type, step.args[1], place):
                return step, step.args[1]
    return None

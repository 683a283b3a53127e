"""What nodes that only move elements do, as far as their attributes say it: one subscript, found ahead."""

from __future__ import annotations

from operator import itemgetter, methodcaller
from typing import Any

import numpy as np

from tessera.op import Rules
from tessera.ops import basic, shape

# row(node, rank) gives move(array): the result, where `rank` axes of instances lead.
rows = Rules("tile moves")

EVERY = slice(None)


@rows(basic.broadcast_to)
def _(node, rank):
    # Axes that repeat stay at size 1: NumPy repeats them where it must.
    new = (None,) * (len(node.attrs["shape"]) - node.args[0].type.rank)
    return itemgetter((EVERY,) * rank + new) if new else itself


@rows(shape.permute)
def _(node, rank):
    return methodcaller("transpose", *range(rank), *(a + rank for a in node.attrs["axes"]))


@rows(shape.reshape)
def _(node, rank):
    before, after = node.args[0].type.shape, node.attrs["shape"]
    if [n for n in before if n != 1] != [n for n in after if n != 1]:
        return lambda array: whole(array, before).reshape(*array.shape[:rank], *after)
    return itemgetter((EVERY,) * rank + _unit_axes(before, after))


def itself(array: Any) -> Any:
    """The move that changes nothing."""
    return array


def _unit_axes(before: tuple[int, ...], after: tuple[int, ...]) -> tuple[Any, ...]:
    """The subscript that takes axes of size 1 away and puts others in."""
    places: list[Any] = []
    sizes = iter(before)
    for wanted in after:
        if wanted == 1:
            places.append(None)
        else:
            size = next(sizes)
            while size == 1:
                places.append(0)
                size = next(sizes)
            places.append(EVERY)
    return (*places, *(0 for _ in sizes))


def whole(array: Any, block: tuple[int, ...]) -> Any:
    """A value with its block axes at full size, where it holds 1 for what is the same everywhere."""
    sizes, lead = array.shape, array.ndim - len(block)
    return array if sizes[lead:] == block else np.broadcast_to(array, (*sizes[:lead], *block))

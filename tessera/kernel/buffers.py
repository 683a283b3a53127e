"""Buffers in a list: one allocation with a leading axis, so that the list can be indexed while the kernel runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tessera.errors import UnsupportedSyntaxError
from tessera.kernel.place import Memory, View
from tessera.kernel.subscript import subscript, whole
from tessera.kernel.trace import current
from tessera.ops import tile
from tessera.types import GLOBAL


def shared_list(values: list[Any]) -> list[Any]:
    """The list; where it holds fresh buffers of one kind, they are made one allocation."""
    if len(values) < 2 or not all(_fresh(v) for v in values):
        return values
    builder = current().builder
    memories = [v.memory for v in values]
    nodes = [builder.producers[m.value] for m in memories]
    if len({id(m) for m in memories}) < len(memories) or any(n.attrs != nodes[0].attrs for n in nodes):
        return values
    attrs = {**nodes[0].attrs, "shape": (len(values), *nodes[0].attrs["shape"])}
    joint = builder.add(tile.alloc, [], attrs).out
    for place, memory in enumerate(memories):
        memory.value, memory.prefix = joint, (place,)
    return values


def _fresh(value: Any) -> bool:
    return isinstance(value, View) and value.is_whole and value.memory.type.space != GLOBAL and _unused(value.memory)


def _unused(memory: Memory) -> bool:
    return not memory.used and not memory.prefix


def indexed(values: Sequence[Any], index: Any) -> View:
    """An element of a list of buffers, chosen while the kernel runs.

    Raises:
        UnsupportedSyntaxError: the list holds something else.
    """
    memories = [v.memory for v in values if isinstance(v, View) and v.is_whole]
    prefixes = [m.prefix for m in memories]
    if not values or prefixes != [(n,) for n in range(len(values))] or len({m.value for m in memories}) != 1:
        raise UnsupportedSyntaxError(
            "a list is indexed by a value known only at run time",
            expected="a list of buffers of one shape and type, made where the list is: [tile.alloc_shared(...), ...]",
            suggestion="unroll the loop: for i in tile.static_range(n)",
        )
    joint = Memory(memories[0].value, memories[0].name, used=True)
    return subscript(whole(joint), index)

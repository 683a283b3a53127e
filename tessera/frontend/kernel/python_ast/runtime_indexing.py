"""Run-time indexing: lists of buffers packed into one allocation, and register blocks by traced indices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tessera.core.errors import UnsupportedSyntaxError
from tessera.core.types import GLOBAL
from tessera.frontend.kernel.memref import MemRef, MemRefView, load_if_memref, subscript_view, view_whole
from tessera.frontend.kernel.tile_api.memory import alloc_register
from tessera.frontend.kernel.trace import current_trace, is_traced
from tessera.ir.tensor import Tensor
from tessera.ops.dialects import tile

# Buffers in a list: one allocation with a leading axis, so that the list can be indexed while the kernel runs.


def pack_buffers(values: list[Any]) -> list[Any]:
    """The list; where it holds fresh buffers of one kind, they are made one allocation."""
    if len(values) < 2 or not all(_is_fresh_buffer(v) for v in values):
        return values
    builder = current_trace().builder
    memories = [v.memory for v in values]
    nodes = [builder.producers[m.value] for m in memories]
    if len({id(m) for m in memories}) < len(memories) or any(n.attrs != nodes[0].attrs for n in nodes):
        return values
    attrs = {**nodes[0].attrs, "shape": (len(values), *nodes[0].attrs["shape"])}
    joint = builder.add(tile.alloc, [], attrs).out
    for place, memory in enumerate(memories):
        memory.value, memory.prefix = joint, (place,)
    return values


def _is_fresh_buffer(value: Any) -> bool:
    return (
        isinstance(value, MemRefView)
        and value.is_whole
        and value.memory.type.space != GLOBAL
        and _is_unused(value.memory)
    )


def _is_unused(memory: MemRef) -> bool:
    return not memory.used and not memory.prefix


def index_buffers(values: Sequence[Any], index: Any) -> MemRefView:
    """An element of a list of buffers, chosen while the kernel runs.

    Raises:
        UnsupportedSyntaxError: the list holds something else.
    """
    memories = [v.memory for v in values if isinstance(v, MemRefView) and v.is_whole]
    prefixes = [m.prefix for m in memories]
    if not values or prefixes != [(n,) for n in range(len(values))] or len({m.value for m in memories}) != 1:
        raise UnsupportedSyntaxError(
            "a list is indexed by a value known only at run time",
            expected="a list of buffers of one shape and type, made where the list is: [tile.alloc_shared(...), ...]",
            suggestion="unroll the loop: for i in tile.static_range(n)",
        )
    joint = MemRef(memories[0].value, memories[0].name, used=True)
    return subscript_view(view_whole(joint), index)


def selects_elements(block: Any, index: Any) -> bool:
    """Whether a subscript picks some of a block's elements, rather than giving it other axes."""
    items = index if isinstance(index, tuple) else (index,)
    if not (isinstance(block, Tensor) and is_traced(block) and block.ndim) or any(i is None for i in items):
        return False
    return not all(_is_full_slice(i) for i in items)


def _is_full_slice(item: Any) -> bool:
    """Whether an item takes all of an axis; nothing is compared, for `==` of a block is a block."""
    unbounded = isinstance(item, slice) and all(b is None for b in (item.start, item.stop, item.step))
    return item is Ellipsis or unbounded


def index_block(block: Tensor, index: Any) -> Tensor:
    """The elements of a block that an index names."""
    buffer = alloc_register(block.shape, block.dtype)
    buffer.store(block)
    return load_if_memref(subscript_view(buffer, index))  # type: ignore[no-any-return]

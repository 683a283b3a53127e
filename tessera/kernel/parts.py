"""Parts of blocks by subscript: `b[3]`, `b[i : i + 4]`, `b[rows]`, read back from registers that can be indexed."""

from __future__ import annotations

from typing import Any

from tessera.kernel.copies import alloc_register
from tessera.kernel.place import value
from tessera.kernel.subscript import subscript
from tessera.kernel.trace import is_traced
from tessera.tensor import Tensor


def is_part(block: Any, index: Any) -> bool:
    """Whether a subscript picks some of a block's elements, rather than giving it other axes."""
    items = index if isinstance(index, tuple) else (index,)
    if not (isinstance(block, Tensor) and is_traced(block) and block.ndim) or any(i is None for i in items):
        return False
    return not all(_is_whole(i) for i in items)


def _is_whole(item: Any) -> bool:
    """Whether an item takes all of an axis; nothing is compared, for `==` of a block is a block."""
    unbounded = isinstance(item, slice) and all(b is None for b in (item.start, item.stop, item.step))
    return item is Ellipsis or unbounded


def part_of(block: Tensor, index: Any) -> Tensor:
    """The elements of a block that an index names."""
    buffer = alloc_register(block.shape, block.dtype)
    buffer.store(block)
    return value(subscript(buffer, index))  # type: ignore[no-any-return]

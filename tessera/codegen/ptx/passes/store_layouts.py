"""Store layouts: the layout in which a block is stored; transposed blocks are exchanged first, and stored by rows."""

from __future__ import annotations

import math
from collections.abc import Mapping

from tessera.codegen.ptx.layout import WARP_THREADS, DistributedLayout, bit_width, make_blocked_layout
from tessera.codegen.ptx.text.builder import element_bytes
from tessera.core.symbolic_dim import Dim
from tessera.core.types import GLOBAL, RefType
from tessera.ir.core import Node, Value
from tessera.ops.tensor import shape

SECTOR_BYTES, ACCESS_BYTES = 32, 16  # that memory writes at once, and the widest access of a thread
MOST_EXCHANGED = 1 << 14  # bytes of a block that is exchanged to be stored by rows


def choose_store_layout(
    node: Node, own: DistributedLayout, threads: int, layouts: Mapping[Value, DistributedLayout | None],
    producers: Mapping[Value, Node],
) -> DistributedLayout:  # fmt: skip
    """The layout in which a store takes its block: its own, except that transposed blocks are stored by rows of memory.

    The threads of a warp would write parts of as many sectors as they hold elements.
    """
    ref, value = node.args[:2]
    if threads == 1 or not _is_transposed(value, layouts, producers):
        return own
    assert isinstance(ref.type, RefType)
    size, length = element_bytes(ref.type.dtype), ref.type.shape[-1]
    if ref.type.space != GLOBAL or isinstance(length, Dim):
        return own
    whole, vector = min(SECTOR_BYTES, own.shape[-1] * size), math.gcd(length, max(1, ACCESS_BYTES // size))
    if math.prod(own.shape) * size > MOST_EXCHANGED or count_run(own, vector) * size >= whole:
        return own
    return make_blocked_layout(own.shape, threads, vector)


def _is_transposed(
    v: Value, layouts: Mapping[Value, DistributedLayout | None], producers: Mapping[Value, Node]
) -> bool:
    """Whether a block is another one with its axes permuted, and perhaps computed with."""
    made = producers.get(v)
    while made is not None and made.args and (made.op.pointwise or made.op is shape.reshape):
        held = [x for x in made.args if layouts.get(x) is not None]
        made = producers.get(held[0]) if held else None
    return made is not None and made.op is shape.permute


def count_run(layout: DistributedLayout, vector: int) -> int:
    """The neighbours along the last axis that the threads of a warp store at once, with `vector` in one access.

    >>> rows = make_blocked_layout((32, 32), 128, 4)
    >>> count_run(rows, 4), count_run(rows, 1), count_run(rows.permuted((1, 0)), 4)
    (32, 1, 4)
    """
    axis, held = len(layout.shape) - 1, 0
    while held < len(layout.registers) and layout.registers[held] == (axis, held):
        held += 1
    if 1 << held > vector:
        return vector
    lanes = layout.threads[: bit_width(WARP_THREADS)]
    while (axis, held) in lanes:
        held += 1
    return 1 << held

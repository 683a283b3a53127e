"""Load layouts: blocks are loaded in the layout of their use where that saves a conversion.

Small blocks are, if they have one use; what an epilogue reads beside an accumulator is, whatever its size: quads of
threads read whole sectors, a conversion holds the block twice.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from tessera.codegen.ptx.layout import DistributedLayout, static_shape
from tessera.ir.core import Function, Value
from tessera.ops.dialects import tile
from tessera.ops.tensor import basic, shape

if TYPE_CHECKING:
    from tessera.codegen.ptx.passes.layout_inference import LayoutAssigner

MOST_REPEATED = 16  # elements that a thread loads as others do, rather than receive them through shared memory
REPEATED_ROUNDS = 4


def find_load_layouts(
    function: Function, walk: LayoutAssigner, repeated: bool = False
) -> dict[Value, DistributedLayout]:
    """The layouts of loads whose blocks an assignment converted to one other layout only.

    `repeated`: also of what small blocks are computed from, which several threads then compute.
    """
    uses = Counter(v for node in function.body.walk() for v in node.args)
    found: dict[Value, DistributedLayout] = {}
    for v, wanted in walk.conversions.items():
        layout = next(iter(wanted))
        again = repeated and layout.count <= MOST_REPEATED
        if len(wanted) == 1 and (v not in walk.plain or walk.inference.is_fragment(layout) or again):
            found.update(_trace_to_loads(walk, uses, v, layout, again))
    return found


def _trace_to_loads(
    walk: LayoutAssigner, uses: Mapping[Value, int], v: Value, layout: DistributedLayout, again: bool
) -> Iterator[tuple[Value, DistributedLayout]]:
    """The loads that a block is computed from: small ones through casts and reshapes; all beside accumulators, and
    where it is computed `again`."""
    wide, most = again or walk.inference.is_fragment(layout), walk.inference.threads * walk.inference.vector
    work, seen = [(v, layout)], set[Value]()
    while work:
        v, layout = work.pop()
        node = walk.producers.get(v)
        if node is None or v in seen or layout.shape != static_shape(v):
            continue
        seen.add(v)
        if node.op is tile.load and (wide or math.prod(layout.shape) <= most):
            if not again or _reads_neighbours(layout):
                yield v, layout
        elif node.op is shape.reshape and (wide or uses[node.args[0]] == 1):
            moved = layout.reshaped(static_shape(node.args[0]))
            work += [(node.args[0], moved)] if moved is not None else []
        elif node.op.pointwise and (wide or (node.op is basic.cast and uses[node.args[0]] == 1)):
            work += [(x, layout) for x in node.args]


def _reads_neighbours(layout: DistributedLayout) -> bool:
    """Whether the threads of a warp hold adjacent elements of the last axis."""
    axis = max((a for a, n in enumerate(layout.shape) if n != 1), default=-1)
    held = 0
    while held < len(layout.registers) and layout.registers[held] == (axis, held):
        held += 1
    first = next((bit for bit in layout.threads if bit is not None), None)
    return axis < 0 or 1 << held >= layout.shape[axis] or first == (axis, held)

"""Layouts for small blocks of memory: loaded as they are used, they are handed to nobody."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

from tessera.codegen.ptx.layout import Layout
from tessera.codegen.ptx.passes.infer import sizes
from tessera.ir.core import Function, Value
from tessera.ops import basic, shape, tile

if TYPE_CHECKING:
    from tessera.codegen.ptx.passes.arrange import Arranger


def given(function: Function, walk: Arranger) -> dict[Value, Layout]:
    """What a first walk over a function handed to one other layout alone, as layouts of the loads it came from."""
    uses = Counter(v for node in function.body.walk() for v in node.args)
    found: dict[Value, Layout] = {}
    for v, wanted in walk.handed.items():
        if len(wanted) == 1 and v not in walk.plain:
            source = _loaded(walk, uses, v, next(iter(wanted)))
            found.update([source] if source is not None else [])
    return found


def _loaded(walk: Arranger, uses: Mapping[Value, int], v: Value, layout: Layout) -> tuple[Value, Layout] | None:
    """The load that a block comes from by casts and other shapes alone, if it is small, and its layout for this one."""
    node = walk.producers.get(v)
    while node is not None and node.op in (basic.cast, shape.reshape) and uses[node.args[0]] == 1:
        (v,) = node.args
        moved = layout.reshaped(sizes(v)) if node.op is shape.reshape else layout
        if moved is None:
            return None
        node, layout = walk.producers.get(v), moved
    if node is None or node.op is not tile.load:
        return None
    return (v, layout) if math.prod(sizes(v)) <= walk.inference.threads * walk.inference.vector else None

"""Values exchanged between the tiles of a group: the tiles' axis of a block, seen as part of the block."""

from __future__ import annotations

from tessera.codegen.grouped.memory import load
from tessera.codegen.grouped.rewrite import Group, Part, lift
from tessera.ops import elementwise as e
from tessera.ops import group as ops
from tessera.ops import shape, tile
from tessera.types import SHARED, int64


@lift(ops.collect)
def _(group, node, args, run):
    (x,), width, size = args, node.attrs["width"], group.size
    if not x.varying:
        return [Part(group.broadcast(x.value, (width, *x.shape)))]
    if width == size:  # what one sees all see
        return [Part(x.value)]
    each = group.reshape(x.value, (size // width, 1, width, *x.shape))
    seen = group.broadcast(each, (size // width, width, width, *x.shape))
    return [Part(group.reshape(seen, (size, width, *x.shape)), True)]


@lift(ops.meet)
def _(group, node, args, run):
    return []  # each op is done for all tiles before the next begins


@lift(ops.exchange)
def _(group, node, args, run):
    x, lane = args
    if not x.varying:
        return [x]
    attrs = {"shape": (group.size, *x.shape), "dtype": x.value.type.dtype, "space": SHARED}
    memory = group.b.add(tile.alloc, [], attrs).out
    zero = group.full(0, int64)
    group.b.add(tile.store, [memory, x.value, *[zero] * (len(x.shape) + 1)], {"edge": "error"})
    starts = [_source(group, lane, node.attrs["width"]), *[Part(zero)] * len(x.shape)]
    found = load(group, Part(memory), starts, (1, *x.shape), "error", [])
    return [Part(group.reshape(found.value, (group.size, *x.shape)), True)]


def _source(group: Group, lane: Part, width: int) -> Part:
    """The place in the group that each tile reads from."""
    me = group.add(shape.iota, shape=(group.size,), axis=-1, dtype=int64)
    each = group.full(width, int64, group.size)
    first = group.add(e.sub, me, group.add(e.remainder, me, each))
    return Part(group.add(e.add, first, group.add(e.remainder, group.whole(lane), each)), True)

"""Memory seen by a group: places that differ between tiles become gathers and scatters."""

from __future__ import annotations

from collections.abc import Sequence

from tessera.codegen.blocks import sizes
from tessera.codegen.grouped.rewrite import Group, Part, lift
from tessera.ir.core import Value
from tessera.ops import basic, elementwise, shape, tile
from tessera.types import REGISTER, bool_, int64


@lift(tile.alloc)
def _(group, node, args, run):
    attrs = dict(node.attrs)
    own = attrs["space"] == REGISTER
    if own:
        attrs["shape"] = (group.total, *attrs["shape"])
    return [Part(group.b.add(tile.alloc, [], attrs).out, own)]


@lift(tile.load)
def _(group, node, args, run):
    ref, rest = args[0], args[1:]
    rank = len(ref.shape)
    return [load(group, ref, rest[:rank], node.attrs["shape"], node.attrs["edge"], rest[rank:])]


def load(
    group: Group, ref: Part, starts: Sequence[Part], block: tuple[int, ...], edge: str, rest: Sequence[Part]
) -> Part:
    """A block for each tile; once for all of them where it is the same."""
    if ref.varying and not any(p.varying for p in starts):
        values = [p.value for p in starts]
        more = [group.whole(_shaped(group, p, block)) for p in rest]
        attrs = {"shape": (group.size, *block), "edge": edge}
        return Part(group.b.add(tile.load, [ref.value, group.first(), *values, *more], attrs).out, True)
    if not any(p.varying for p in (*starts, *rest)):
        attrs = {"shape": block, "edge": edge}
        return Part(group.b.add(tile.load, [ref.value, *(p.value for p in (*starts, *rest))], attrs).out)
    places = indices(group, ref, starts, block)
    other = [group.ranked(rest[1], len(block))] if len(rest) > 1 else []
    mask = _mask(group, ref, starts, block, edge, rest[0] if rest else None)
    if other:
        other = [group.broadcast(other[0], (group.size, *block))]
    keep = group.broadcast(mask, (group.size, *block)) if mask is not None else None
    found = group.add(tile.gather, ref.value, *places, *([keep] if keep else []), *(other if keep else []))
    return Part(group.broadcast(found, (group.size, *block)), True)


def _shaped(group: Group, p: Part, block: tuple[int, ...]) -> Part:
    """A mask or other value as large as its block."""
    if p.varying:
        return Part(group.broadcast(group.ranked(p, len(block)), (group.size, *block)), True)
    return Part(group.broadcast(p.value, block))


def indices(group: Group, ref: Part, starts: Sequence[Part], block: tuple[int, ...]) -> list[Value]:
    """The index of every element of every tile's block along each axis, ready to broadcast."""
    found = []
    for axis, (start, n) in enumerate(zip(starts, block, strict=True)):
        along = [1] * len(block)
        along[axis] = n
        steps = Part(group.add(shape.iota, shape=tuple(along), axis=axis - len(block), dtype=int64))
        first = group.ranked(Part(_index(group, start.value), start.varying), len(block))
        whole = (group.size, *along) if start.varying else tuple(along)
        found.append(group.add(elementwise.add, group.broadcast(first, whole), group.broadcast(steps.value, whole)))
    # All tiles have elements of their own, even where every index is the same for all.
    found[:0] = [_tiles(group, len(block))] if ref.varying else []
    return found


def _index(group: Group, v: Value) -> Value:
    return v if v.type.dtype == int64 else group.add(basic.cast, v, dtype=int64)


def _tiles(group: Group, rank: int) -> Value:
    """The number of each tile, for blocks of `rank` axes."""
    return group.ranked(Part(group.tiles(), True), rank)


def _mask(
    group: Group, ref: Part, starts: Sequence[Part], block: tuple[int, ...], edge: str, own: Part | None
) -> Value | None:
    """Which elements to touch: those of active tiles, inside the memory, that the program's own mask has."""
    mask = group.running(len(block))
    if own is not None:
        mask = group.both(mask, group.ranked(own, len(block)))
    if edge != "clip":
        return mask
    places = indices(group, ref, starts, block)[1 if ref.varying else 0 :]
    for place, n in zip(places, ref.shape, strict=True):
        zero, size = (group.full(v, int64, *sizes(place.type)) for v in (0, n))
        mask = group.both(mask, group.add(elementwise.greater_equal, place, zero))
        mask = group.both(mask, group.add(elementwise.less, place, size))
    return mask


@lift(tile.store)
def _(group, node, args, run):
    ref, value, rest = args[0], args[1], args[2:]
    rank = len(ref.shape)
    store(group, ref, value, rest[:rank], node.attrs["edge"], rest[rank] if rest[rank:] else None)
    return []


def store(group: Group, ref: Part, value: Part, starts: Sequence[Part], edge: str, own: Part | None) -> None:
    """Write each tile's block, or the one that is the same for all."""
    block, masks = value.shape, [own] if own is not None else []
    if ref.varying and not any(p.varying for p in starts):
        mask = group.running(len(block))
        if own is not None:
            mask = group.both(mask, group.ranked(own, len(block)))
        more = [group.broadcast(mask, (group.size, *block))] if mask is not None else []
        values = [ref.value, group.whole(value), group.first(), *(p.value for p in starts), *more]
        group.b.add(tile.store, values, {"edge": edge})
        return
    if not any(p.varying for p in (value, *starts, *masks)):
        # A guard sees to it that some tile is active here: that one writes.
        group.b.add(tile.store, [p.value for p in (ref, value, *starts, *masks)], {"edge": edge})
        return
    places = indices(group, ref, starts, block)
    places[0] = group.broadcast(places[0], (group.size, *_tail(places[0], len(block))))
    mask = _mask(group, ref, starts, block, edge, own)
    group.b.add(tile.scatter, [ref.value, group.whole(value), *places, *([mask] if mask is not None else [])], {})


def _tail(v: Value, rank: int) -> tuple[int, ...]:
    whole = sizes(v.type)
    return whole[len(whole) - rank :] if rank else ()


@lift(tile.async_copy)
def _(group, node, args, run):
    dst, src, starts = args[0], args[1], args[2:]
    here, there, block = len(dst.shape), len(src.shape), tuple(node.attrs["shape"])
    full = (1,) * (max(here, there, len(block)) - len(block)) + block
    target, source = full[len(full) - here :], full[len(full) - there :]
    data = load(group, src, starts[here:], source, node.attrs["edge"], [])
    whole = (group.size, *target) if data.varying else target
    store(group, dst, Part(group.reshape(data.value, whole), data.varying), starts[:here], "error", None)
    return []


@lift(tile.gather)
def _(group, node, args, run):
    ref, rest = args[0], args[1:]
    rank, depth = len(ref.shape), len(node.out.type.shape)
    if not ref.varying and not any(p.varying for p in rest):
        return [Part(group.add(tile.gather, ref.value, *(p.value for p in rest)))]
    places, more = _spread(group, ref, rest[:rank], depth), [group.ranked(p, depth) for p in rest[rank:]]
    mask = group.both(group.running(depth), more[0] if more else None)
    out = (group.size, *node.out.type.shape)
    extra = [group.broadcast(mask, out)] if mask is not None else []
    extra += [group.broadcast(more[1], out)] if len(more) > 1 else []
    return [Part(group.broadcast(group.add(tile.gather, ref.value, *places, *extra), out), True)]


def _spread(group: Group, ref: Part, places: Sequence[Part], depth: int) -> list[Value]:
    """Index blocks ready to broadcast, with the tile's own number first for memory of its own."""
    own = [_tiles(group, depth)] if ref.varying else []
    return [*own, *(group.ranked(p, depth) for p in places)]


@lift(tile.scatter)
def _(group, node, args, run):
    ref, value, rest = args[0], args[1], args[2:]
    rank = len(ref.shape)
    depth = max((len(p.shape) for p in rest), default=0)
    if not ref.varying and not any(p.varying for p in (value, *rest)):
        group.b.add(tile.scatter, [ref.value, value.value, *(p.value for p in rest)], {})
        return []
    places, more = _spread(group, ref, rest[:rank], depth), [group.ranked(p, depth) for p in rest[rank:]]
    mask = group.both(group.running(depth), more[0] if more else None)
    everyone = (group.size, *((1,) * depth))
    mask = group.both(mask, group.full(True, bool_, *everyone))
    group.b.add(tile.scatter, [ref.value, group.ranked(value, depth), *places, *([mask] if mask else [])], {})
    return []


@lift(tile.atomic, tile.compare_exchange)
def _(group, node, args, run):
    count = 1 if node.op is tile.atomic else 2
    ref, values, rest = args[0], args[1 : 1 + count], args[1 + count :]
    rank, depth = len(ref.shape), len(node.out.type.shape)
    places, more = _spread(group, ref, rest[:rank], depth), [group.ranked(p, depth) for p in rest[rank:]]
    mask = group.both(group.running(depth), more[0] if more else None)
    # Every tile does its own update, even where all update the same place by the same value.
    out = (group.size, *node.out.type.shape)
    keep = group.broadcast(mask if mask is not None else group.full(True, bool_), out)
    operands = [group.ranked(p, depth) for p in values]
    old = group.b.add(node.op, [ref.value, *operands, *places, keep], node.attrs).out
    return [Part(old, True)]

"""Group collectives: values exchanged between the tiles of a group; each tile is a thread, so warps use shuffles."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tessera.codegen.ptx.context import EmissionContext, synchronise_team
from tessera.codegen.ptx.passes.shared_memory_allocator import SHARED_SYMBOL
from tessera.codegen.ptx.table import emission_rule
from tessera.codegen.ptx.table.blocks.layout_conversion import FULL_WARP_MASK, shuffle_register
from tessera.codegen.ptx.table.scalars import packing
from tessera.codegen.ptx.table.scalars.arithmetic import ScalarContext, floor_divide_integers
from tessera.codegen.ptx.text.memref import VectorAccess
from tessera.codegen.ptx.text.register_types import element_bytes
from tessera.codegen.ptx.text.thread_team import WARP_THREADS
from tessera.core.types import DType, int64
from tessera.ir.core import Node
from tessera.ops.dialects import tile

NAMED_BARRIERS = 15  # beside the one of the whole block
COUNTER_BYTES = 4  # bytes of a count
POLL_NANOSECONDS = 20  # nanoseconds between two looks at it


@emission_rule(tile.exchange)
def _(ctx: EmissionContext, node: Node) -> None:
    x, lane = node.args
    held = ctx.values[x]
    if ctx.team.group == 1:
        ctx.values[node.out] = held
        return
    width = node.attrs["width"]
    place = floor_divide_integers(ScalarContext(ctx.text, int64, int64), ctx.scalar_operand(lane), str(width))[1]
    narrow = ctx.text.let("cvt.u32.u64", "b32", place) if place.startswith("%") else place
    reads = _make_segment_reader(ctx, width, x.type.dtype, held)
    ctx.values[node.out] = tuple(reads(i, narrow) for i in range(len(held)))


@emission_rule(tile.collect)
def _(ctx, node):
    (x,) = node.args
    width, held = node.attrs["width"], ctx.values[x]
    ours, theirs = ctx.layout(node.out), ctx.layout(x)
    if ctx.team.group == 1:
        ctx.values[node.out] = tuple(held[theirs.index[place[1:]]] for place in ours.offsets)
        return
    reads = _make_segment_reader(ctx, width, x.type.dtype, held)
    known = {}
    for place in ours.offsets:
        key = (min(place[0], width - 1), theirs.index[place[1:]])  # what lies past the end is never looked at
        known[key] = known.get(key) or reads(key[1], str(key[0]))
    ctx.values[node.out] = tuple(known[min(p[0], width - 1), theirs.index[p[1:]]] for p in ours.offsets)


@emission_rule(tile.meet)
def _(ctx, node):
    width, team = node.attrs["width"], ctx.team
    if team.group == 1:
        synchronise_team(ctx)
    elif WARP_THREADS % width == 0 or team.group <= WARP_THREADS:
        ctx.text.do("bar.warp.sync", _segment_mask(ctx, width)[1])
    else:
        _make_segment_barrier(ctx, width)()


def _make_segment_reader(
    ctx: EmissionContext, width: int, dtype: DType, held: Sequence[str]
) -> Callable[[int, str], str]:
    """What reads register `i` of the tile at a place of this tile's stretch."""
    if WARP_THREADS % width == 0 or ctx.team.group <= WARP_THREADS:
        return _read_by_shuffle(ctx, width, dtype, held)
    return _read_through_memory(ctx, width, dtype, held)


def _read_by_shuffle(ctx: EmissionContext, width: int, dtype: DType, held: Sequence[str]) -> Callable[[int, str], str]:
    text = ctx.text
    lane, members = _segment_mask(ctx, width)

    def read(i: int, place: str) -> str:
        return shuffle_register(text, dtype, held[i], "idx", text.let("add.s32", "b32", lane, place), members)

    return read


def _segment_mask(ctx: EmissionContext, width: int) -> tuple[str, str]:
    """The first lane of this tile's stretch, and the bits of all its lanes."""
    team = ctx.team
    first = team.hoist(("stretch", width), "rem.u32", "b32", team.thread, width)
    first = team.hoist(("first", width), "sub.s32", "b32", team.thread, first)
    lane = team.hoist(("first lane", width), "and.b32", "b32", first, WARP_THREADS - 1)
    whole = str((1 << width) - 1)
    return lane, FULL_WARP_MASK if width == WARP_THREADS else team.hoist(
        ("members", width), "shl.b32", "b32", whole, lane
    )


def _read_through_memory(
    ctx: EmissionContext, width: int, dtype: DType, held: Sequence[str]
) -> Callable[[int, str], str]:
    """Through shared memory, between two barriers of the stretch."""
    text, team, each = ctx.text, ctx.team, element_bytes(dtype)
    meet = _make_segment_barrier(ctx, width)
    row = team.group * each
    start = ctx.smem.allocator.shared(row * len(held), 16)
    base = team.hoist((SHARED_SYMBOL,), "mov.u32", "b32", SHARED_SYMBOL)
    own = text.let("mad.lo.s32", "b32", team.thread, each, base)
    meet()
    for i, x in enumerate(held):
        packing.store_elements(text, "shared", dtype, VectorAccess(0, 1, own, start + i * row, ("",)), [x])
    meet()
    first = team.hoist(("stretch", width), "rem.u32", "b32", team.thread, width)
    first = team.hoist(("first", width), "sub.s32", "b32", team.thread, first)

    def read(i: int, place: str) -> str:
        at = text.let("add.s32", "b32", first, place)
        address = text.let("mad.lo.s32", "b32", at, each, base)
        return packing.load_elements(text, "shared", dtype, VectorAccess(0, 1, address, start + i * row, ("",)))[0]

    return read


def _make_segment_barrier(ctx: EmissionContext, width: int) -> Callable[[], None]:
    """What makes the tiles of a stretch wait for each other."""
    text, team = ctx.text, ctx.team
    if width == team.group:
        return lambda: team.synchronise()
    if width % WARP_THREADS or team.group // width > NAMED_BARRIERS:
        return lambda: _emit_counting_barrier(ctx, width)
    number = team.hoist(("number", width), "div.u32", "b32", team.thread, width)
    number = team.hoist(("barrier", width), "add.s32", "b32", number, 1)
    return lambda: text.do("bar.sync", number, width)


def _emit_counting_barrier(ctx: EmissionContext, width: int) -> None:
    """A barrier of stretches that the hardware has none for: tiles count in shared memory, and look until all have."""
    text, place = ctx.text, _counter_address(ctx, width)
    text.do("fence.acq_rel.cta")
    before = text.let("atom.shared.add.u32", "b32", f"[{place}]", 1)
    rounds = text.let("div.u32", "b32", before, width)
    due = text.let("mad.lo.u32", "b32", rounds, width, width)
    again = text.new_label("count")
    text.label(again)
    missing = text.let("sub.s32", "b32", due, text.let("ld.acquire.cta.shared.u32", "b32", f"[{place}]"))
    some = text.let("setp.gt.s32", "pred", missing, 0)
    text.do("nanosleep.u32", POLL_NANOSECONDS, guard=some)
    text.do(f"bra {again}", guard=some)


def _counter_address(ctx: EmissionContext, width: int) -> str:
    """Where a tile's stretch counts: 0 when the entry begins."""
    team, key = ctx.team, ("counter", width)
    made = team.has_hoisted(key)
    start = 0 if made else ctx.smem.allocator.shared(COUNTER_BYTES * (team.group // width), COUNTER_BYTES)
    base = team.hoist((SHARED_SYMBOL,), "mov.u32", "b32", SHARED_SYMBOL)
    number = team.hoist(("number", width), "div.u32", "b32", team.thread, width)
    place = team.hoist(("counted", width), "mad.lo.u32", "b32", number, COUNTER_BYTES, base)
    counter = team.hoist(key, "add.u32", "b32", place, start)
    if not made:
        with ctx.text.at_entry_head():
            ctx.text.do("st.shared.u32", f"[{counter}]", 0)
            ctx.text.do("bar.sync", 0)
    return counter

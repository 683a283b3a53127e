"""Group collectives: values exchanged between the tiles of a group; each tile is a thread, so warps use shuffles.

A segment is `width` consecutive tiles. Segments that warps do not contain exchange through shared memory, between two
barriers: the block's, named barriers, or counters in shared memory where the hardware has too few of these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tessera.codegen.ptx.context import EmissionContext, VectorAccess, synchronise_team
from tessera.codegen.ptx.layout import WARP_THREADS
from tessera.codegen.ptx.ops import ballot, element
from tessera.codegen.ptx.passes.shared_memory import SHARED_SYMBOL
from tessera.codegen.ptx.table import emission_rule
from tessera.codegen.ptx.table.blocks import block_access
from tessera.codegen.ptx.table.blocks.layout_conversion import FULL_WARP_MASK, shuffle_register
from tessera.codegen.ptx.table.scalars.arithmetic import floor_divide_integers
from tessera.codegen.ptx.table.scalars.math_functions import ScalarContext
from tessera.codegen.ptx.text.builder import element_bytes
from tessera.core.types import DType, int64
from tessera.ir.core import Node
from tessera.ops.dialects import tile

NAMED_BARRIERS = 15  # besides barrier 0, which the whole block uses
COUNTER_BYTES = 4
POLL_NANOSECONDS = 20
SegmentReader = Callable[[int, str], str]  # from a register's position and a tile's in the segment to that register


@emission_rule(tile.exchange)
def _(ctx: EmissionContext, node: Node) -> None:
    x, lane = node.args
    held = ctx.values[x]
    if ctx.team.group == 1:
        ctx.values[node.out] = held
        return
    width = node.attrs["width"]
    source = floor_divide_integers(ScalarContext(ctx.text, int64, int64), ctx.scalar_operand(lane), str(width))[1]
    narrow = ctx.text.let("cvt.u32.u64", "b32", source) if source.startswith("%") else source
    read = _make_segment_reader(ctx, width, x.type.dtype, held)
    ctx.values[node.out] = tuple(read(i, narrow) for i in range(len(held)))


@emission_rule(tile.collect)
def _(ctx, node):
    (x,) = node.args
    width, held = node.attrs["width"], ctx.values[x]
    offsets, source = ctx.layout(node.out).offsets, ctx.layout(x)
    if ctx.team.group == 1:
        ctx.values[node.out] = tuple(held[source.index[offset[1:]]] for offset in offsets)
        return
    read = _make_segment_reader(ctx, width, x.type.dtype, held)
    # Registers past the segment's end are padding, and repeat its last tile.
    keys = [(min(offset[0], width - 1), source.index[offset[1:]]) for offset in offsets]
    known = {key: read(key[1], str(key[0])) for key in dict.fromkeys(keys)}
    ctx.values[node.out] = tuple(known[key] for key in keys)


@emission_rule(ballot)
def _(ctx, node):
    held = ctx.values[node.args[0]]
    votes = [ctx.text.let("vote.sync.ballot.b32", "b32", x, FULL_WARP_MASK) for x in held]
    ctx.values[node.out] = tuple(ctx.text.let("cvt.u64.u32", "b64", x) for x in votes)


@emission_rule(element)
def _(ctx, node):
    (x,) = node.args
    ctx.values[node.out] = (ctx.values[x][ctx.layout(x).index[node.attrs["place"]]],)


@emission_rule(tile.meet)
def _(ctx, node):
    width, team = node.attrs["width"], ctx.team
    if team.group == 1:
        synchronise_team(ctx)
    elif WARP_THREADS % width == 0 or team.group <= WARP_THREADS:
        ctx.text.do("bar.warp.sync", _find_segment_lanes(ctx, width)[1])
    else:
        _make_segment_barrier(ctx, width)()


def _make_segment_reader(ctx: EmissionContext, width: int, dtype: DType, held: Sequence[str]) -> SegmentReader:
    """A function that emits the read of another tile's register."""
    if WARP_THREADS % width == 0 or ctx.team.group <= WARP_THREADS:
        return _read_by_shuffle(ctx, width, dtype, held)
    return _read_through_memory(ctx, width, dtype, held)


def _read_by_shuffle(ctx: EmissionContext, width: int, dtype: DType, held: Sequence[str]) -> SegmentReader:
    text = ctx.text
    first_lane, members = _find_segment_lanes(ctx, width)

    def read(i: int, position: str) -> str:
        lane = text.let("add.s32", "b32", first_lane, position)
        return shuffle_register(text, dtype, held[i], "idx", lane, members)

    return read


def _find_segment_lanes(ctx: EmissionContext, width: int) -> tuple[str, str]:
    """The first lane of this tile's segment, and the member mask of its lanes."""
    team = ctx.team
    first_lane = team.hoist(("first lane", width), "and.b32", "b32", _find_first_tile(ctx, width), WARP_THREADS - 1)
    if width == WARP_THREADS:
        return first_lane, FULL_WARP_MASK
    return first_lane, team.hoist(("members", width), "shl.b32", "b32", str((1 << width) - 1), first_lane)


def _find_first_tile(ctx: EmissionContext, width: int) -> str:
    """The number of the first tile of this tile's segment."""
    team = ctx.team
    position = team.hoist(("position", width), "rem.u32", "b32", team.thread, width)
    return team.hoist(("first tile", width), "sub.s32", "b32", team.thread, position)


def _read_through_memory(ctx: EmissionContext, width: int, dtype: DType, held: Sequence[str]) -> SegmentReader:
    """Store this tile's registers to shared memory, between two barriers of the segment."""
    text, team, size = ctx.text, ctx.team, element_bytes(dtype)
    synchronise = _make_segment_barrier(ctx, width)
    row = team.group * size
    start = ctx.smem.allocator.allocate_shared(row * len(held), 16)
    base = team.hoist((SHARED_SYMBOL,), "mov.u32", "b32", SHARED_SYMBOL)
    own = text.let("mad.lo.s32", "b32", team.thread, size, base)
    synchronise()
    for i, x in enumerate(held):
        block_access.store_elements(text, "shared", dtype, VectorAccess(0, 1, own, start + i * row, ("",)), [x])
    synchronise()
    first = _find_first_tile(ctx, width)

    def read(i: int, position: str) -> str:
        source = text.let("add.s32", "b32", first, position)
        address = text.let("mad.lo.s32", "b32", source, size, base)
        return block_access.load_elements(text, "shared", dtype, VectorAccess(0, 1, address, start + i * row, ("",)))[0]

    return read


def _make_segment_barrier(ctx: EmissionContext, width: int) -> Callable[[], None]:
    """A function that emits a barrier of the tiles of a segment."""
    text, team = ctx.text, ctx.team
    if width == team.group:
        return team.synchronise
    if width % WARP_THREADS or team.group // width > NAMED_BARRIERS:
        return lambda: _emit_counter_barrier(ctx, width)
    barrier = team.hoist(("barrier", width), "add.s32", "b32", _find_segment(ctx, width), 1)
    return lambda: text.do("bar.sync", barrier, width)


def _find_segment(ctx: EmissionContext, width: int) -> str:
    """The number of this tile's segment."""
    return ctx.team.hoist(("segment", width), "div.u32", "b32", ctx.team.thread, width)


def _emit_counter_barrier(ctx: EmissionContext, width: int) -> None:
    """A barrier by a counter in shared memory: each tile increments it, and polls until all of the segment have."""
    text, counter = ctx.text, _find_counter(ctx, width)
    text.do("fence.acq_rel.cta")
    before = text.let("atom.shared.add.u32", "b32", f"[{counter}]", 1)
    rounds = text.let("div.u32", "b32", before, width)
    target = text.let("mad.lo.u32", "b32", rounds, width, width)
    retry = text.new_label("count")
    text.label(retry)
    missing = text.let("sub.s32", "b32", target, text.let("ld.acquire.cta.shared.u32", "b32", f"[{counter}]"))
    waiting = text.let("setp.gt.s32", "pred", missing, 0)
    text.do("nanosleep.u32", POLL_NANOSECONDS, guard=waiting)
    text.do(f"bra {retry}", guard=waiting)


def _find_counter(ctx: EmissionContext, width: int) -> str:
    """The address of the counter of this tile's segment, which the head of the entry zeroes."""
    team, key = ctx.team, ("counter", width)
    made = team.has_hoisted(key)
    start = 0 if made else ctx.smem.allocator.allocate_shared(COUNTER_BYTES * (team.group // width), COUNTER_BYTES)
    base = team.hoist((SHARED_SYMBOL,), "mov.u32", "b32", SHARED_SYMBOL)
    address = team.hoist(
        ("counter base", width), "mad.lo.u32", "b32", _find_segment(ctx, width), COUNTER_BYTES, base
    )  # fmt: skip
    counter = team.hoist(key, "add.u32", "b32", address, start)
    if not made:
        with ctx.text.at_entry_head():
            ctx.text.do("st.shared.u32", f"[{counter}]", 0)
            ctx.text.do("bar.sync", 0)
    return counter

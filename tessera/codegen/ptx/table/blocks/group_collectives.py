"""Group collectives: values exchanged between the tiles of a group; each tile is a thread, so warps use shuffles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tessera.codegen.ptx.passes.shared_memory_allocator import SHARED_SYMBOL
from tessera.codegen.ptx.table import emit_node
from tessera.codegen.ptx.table.blocks.layout_conversion import FULL_WARP_MASK, shuffle_register
from tessera.codegen.ptx.table.scalars import packing
from tessera.codegen.ptx.table.scalars.arithmetic import ScalarContext, floor_divide_integers
from tessera.codegen.ptx.text.memref import VectorAccess
from tessera.codegen.ptx.text.register_types import element_bytes
from tessera.codegen.ptx.text.thread_team import WARP_THREADS
from tessera.core.types import DType, int64
from tessera.ir.core import Node
from tessera.ops.dialects import tile

if TYPE_CHECKING:
    from tessera.codegen.ptx.emitter import PtxEmitter

NAMED_BARRIERS = 15  # beside the one of the whole block
COUNTER_BYTES = 4  # bytes of a count
POLL_NANOSECONDS = 20  # nanoseconds between two looks at it


@emit_node(tile.exchange)
def _(kernel: PtxEmitter, node: Node) -> None:
    x, lane = node.args
    held = kernel.values[x]
    if kernel.team.group == 1:
        kernel.values[node.out] = held
        return
    width = node.attrs["width"]
    place = floor_divide_integers(ScalarContext(kernel.text, int64, int64), kernel.scalar_operand(lane), str(width))[1]
    narrow = kernel.text.let("cvt.u32.u64", "b32", place) if place.startswith("%") else place
    reads = _make_segment_reader(kernel, width, x.type.dtype, held)
    kernel.values[node.out] = tuple(reads(i, narrow) for i in range(len(held)))


@emit_node(tile.collect)
def _(kernel, node):
    (x,) = node.args
    width, held = node.attrs["width"], kernel.values[x]
    ours, theirs = kernel.layout(node.out), kernel.layout(x)
    if kernel.team.group == 1:
        kernel.values[node.out] = tuple(held[theirs.index[place[1:]]] for place in ours.offsets)
        return
    reads = _make_segment_reader(kernel, width, x.type.dtype, held)
    known = {}
    for place in ours.offsets:
        key = (min(place[0], width - 1), theirs.index[place[1:]])  # what lies past the end is never looked at
        known[key] = known.get(key) or reads(key[1], str(key[0]))
    kernel.values[node.out] = tuple(known[min(p[0], width - 1), theirs.index[p[1:]]] for p in ours.offsets)


@emit_node(tile.meet)
def _(kernel, node):
    width, team = node.attrs["width"], kernel.team
    if team.group == 1:
        kernel.meet()
    elif WARP_THREADS % width == 0 or team.group <= WARP_THREADS:
        kernel.text.do("bar.warp.sync", _segment_mask(kernel, width)[1])
    else:
        _make_segment_barrier(kernel, width)()


def _make_segment_reader(
    kernel: PtxEmitter, width: int, dtype: DType, held: Sequence[str]
) -> Callable[[int, str], str]:
    """What reads register `i` of the tile at a place of this tile's stretch."""
    if WARP_THREADS % width == 0 or kernel.team.group <= WARP_THREADS:
        return _read_by_shuffle(kernel, width, dtype, held)
    return _read_through_memory(kernel, width, dtype, held)


def _read_by_shuffle(kernel: PtxEmitter, width: int, dtype: DType, held: Sequence[str]) -> Callable[[int, str], str]:
    text = kernel.text
    lane, members = _segment_mask(kernel, width)

    def read(i: int, place: str) -> str:
        return shuffle_register(text, dtype, held[i], "idx", text.let("add.s32", "b32", lane, place), members)

    return read


def _segment_mask(kernel: PtxEmitter, width: int) -> tuple[str, str]:
    """The first lane of this tile's stretch, and the bits of all its lanes."""
    team = kernel.team
    first = team.once(("stretch", width), "rem.u32", "b32", team.thread, width)
    first = team.once(("first", width), "sub.s32", "b32", team.thread, first)
    lane = team.once(("first lane", width), "and.b32", "b32", first, WARP_THREADS - 1)
    whole = str((1 << width) - 1)
    return lane, FULL_WARP_MASK if width == WARP_THREADS else team.once(
        ("members", width), "shl.b32", "b32", whole, lane
    )


def _read_through_memory(
    kernel: PtxEmitter, width: int, dtype: DType, held: Sequence[str]
) -> Callable[[int, str], str]:
    """Through shared memory, between two barriers of the stretch."""
    text, team, each = kernel.text, kernel.team, element_bytes(dtype)
    meet = _make_segment_barrier(kernel, width)
    row = team.group * each
    start = kernel.room.shared(row * len(held), 16)
    base = team.once((SHARED_SYMBOL,), "mov.u32", "b32", SHARED_SYMBOL)
    own = text.let("mad.lo.s32", "b32", team.thread, each, base)
    meet()
    for i, x in enumerate(held):
        packing.store_elements(text, "shared", dtype, VectorAccess(0, 1, own, start + i * row, ("",)), [x])
    meet()
    first = team.once(("stretch", width), "rem.u32", "b32", team.thread, width)
    first = team.once(("first", width), "sub.s32", "b32", team.thread, first)

    def read(i: int, place: str) -> str:
        at = text.let("add.s32", "b32", first, place)
        address = text.let("mad.lo.s32", "b32", at, each, base)
        return packing.load_elements(text, "shared", dtype, VectorAccess(0, 1, address, start + i * row, ("",)))[0]

    return read


def _make_segment_barrier(kernel: PtxEmitter, width: int) -> Callable[[], None]:
    """What makes the tiles of a stretch wait for each other."""
    text, team = kernel.text, kernel.team
    if width == team.group:
        return lambda: team.meet(text)
    if width % WARP_THREADS or team.group // width > NAMED_BARRIERS:
        return lambda: _emit_counting_barrier(kernel, width)
    number = team.once(("number", width), "div.u32", "b32", team.thread, width)
    number = team.once(("barrier", width), "add.s32", "b32", number, 1)
    return lambda: text.do("bar.sync", number, width)


def _emit_counting_barrier(kernel: PtxEmitter, width: int) -> None:
    """A barrier of stretches that the hardware has none for: tiles count in shared memory, and look until all have."""
    text, place = kernel.text, _counter_address(kernel, width)
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


def _counter_address(kernel: PtxEmitter, width: int) -> str:
    """Where a tile's stretch counts: 0 when the entry begins."""
    team, key = kernel.team, ("counter", width)
    made = team.knows(key)
    start = 0 if made else kernel.room.shared(COUNTER_BYTES * (team.group // width), COUNTER_BYTES)
    base = team.once((SHARED_SYMBOL,), "mov.u32", "b32", SHARED_SYMBOL)
    number = team.once(("number", width), "div.u32", "b32", team.thread, width)
    place = team.once(("counted", width), "mad.lo.u32", "b32", number, COUNTER_BYTES, base)
    counter = team.once(key, "add.u32", "b32", place, start)
    if not made:
        with kernel.text.first():
            kernel.text.do("st.shared.u32", f"[{counter}]", 0)
            kernel.text.do("bar.sync", 0)
    return counter

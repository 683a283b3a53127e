"""What the tiles of a group tell each other: each is a thread, so that within a warp registers are shuffled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tessera.codegen.ptx.blocks.shuffle import EVERYONE, shuffled
from tessera.codegen.ptx.memory import Run
from tessera.codegen.ptx.room import SHARED
from tessera.codegen.ptx.scalars import words
from tessera.codegen.ptx.scalars.emit import Spot, floored
from tessera.codegen.ptx.team import WARP
from tessera.codegen.ptx.types import size
from tessera.codegen.ptx.visit import visit
from tessera.ir.core import Node
from tessera.ops import group
from tessera.types import DType, int64

if TYPE_CHECKING:
    from tessera.codegen.ptx.kernel import Kernel

BARRIERS = 15  # beside the one of the whole block
WORD = 4  # bytes of a count
REST = 20  # nanoseconds between two looks at it


@visit(group.exchange)
def _(kernel: Kernel, node: Node) -> None:
    x, lane = node.args
    held = kernel.values[x]
    if kernel.team.group == 1:
        kernel.values[node.out] = held
        return
    width = node.attrs["width"]
    place = floored(Spot(kernel.text, int64, int64), kernel.one(lane), str(width))[1]
    narrow = kernel.text.let("cvt.u32.u64", "b32", place) if place.startswith("%") else place
    reads = _stretch(kernel, width, x.type.dtype, held)
    kernel.values[node.out] = tuple(reads(i, narrow) for i in range(len(held)))


@visit(group.collect)
def _(kernel, node):
    (x,) = node.args
    width, held = node.attrs["width"], kernel.values[x]
    ours, theirs = kernel.layout(node.out), kernel.layout(x)
    if kernel.team.group == 1:
        kernel.values[node.out] = tuple(held[theirs.index[place[1:]]] for place in ours.offsets)
        return
    reads = _stretch(kernel, width, x.type.dtype, held)
    known = {}
    for place in ours.offsets:
        key = (min(place[0], width - 1), theirs.index[place[1:]])  # what lies past the end is never looked at
        known[key] = known.get(key) or reads(key[1], str(key[0]))
    kernel.values[node.out] = tuple(known[min(p[0], width - 1), theirs.index[p[1:]]] for p in ours.offsets)


@visit(group.meet)
def _(kernel, node):
    width, team = node.attrs["width"], kernel.team
    if team.group == 1:
        kernel.meet()
    elif WARP % width == 0 or team.group <= WARP:
        kernel.text.do("bar.warp.sync", _members(kernel, width)[1])
    else:
        _barrier(kernel, width)()


def _stretch(kernel: Kernel, width: int, dtype: DType, held: Sequence[str]) -> Callable[[int, str], str]:
    """What reads register `i` of the tile at a place of this tile's stretch."""
    if WARP % width == 0 or kernel.team.group <= WARP:
        return _in_warp(kernel, width, dtype, held)
    return _in_memory(kernel, width, dtype, held)


def _in_warp(kernel: Kernel, width: int, dtype: DType, held: Sequence[str]) -> Callable[[int, str], str]:
    text = kernel.text
    lane, members = _members(kernel, width)

    def read(i: int, place: str) -> str:
        return shuffled(text, dtype, held[i], "idx", text.let("add.s32", "b32", lane, place), members)

    return read


def _members(kernel: Kernel, width: int) -> tuple[str, str]:
    """The first lane of this tile's stretch, and the bits of all its lanes."""
    team = kernel.team
    first = team.once(("stretch", width), "rem.u32", "b32", team.thread, width)
    first = team.once(("first", width), "sub.s32", "b32", team.thread, first)
    lane = team.once(("first lane", width), "and.b32", "b32", first, WARP - 1)
    whole = str((1 << width) - 1)
    return lane, EVERYONE if width == WARP else team.once(("members", width), "shl.b32", "b32", whole, lane)


def _in_memory(kernel: Kernel, width: int, dtype: DType, held: Sequence[str]) -> Callable[[int, str], str]:
    """Through shared memory, between two barriers of the stretch."""
    text, team, each = kernel.text, kernel.team, size(dtype)
    meet = _barrier(kernel, width)
    row = team.group * each
    start = kernel.room.shared(row * len(held), 16)
    base = team.once((SHARED,), "mov.u32", "b32", SHARED)
    own = text.let("mad.lo.s32", "b32", team.thread, each, base)
    meet()
    for i, x in enumerate(held):
        words.store(text, "shared", dtype, Run(0, 1, own, start + i * row, ("",)), [x])
    meet()
    first = team.once(("stretch", width), "rem.u32", "b32", team.thread, width)
    first = team.once(("first", width), "sub.s32", "b32", team.thread, first)

    def read(i: int, place: str) -> str:
        at = text.let("add.s32", "b32", first, place)
        address = text.let("mad.lo.s32", "b32", at, each, base)
        return words.load(text, "shared", dtype, Run(0, 1, address, start + i * row, ("",)))[0]

    return read


def _barrier(kernel: Kernel, width: int) -> Callable[[], None]:
    """What makes the tiles of a stretch wait for each other."""
    text, team = kernel.text, kernel.team
    if width == team.group:
        return lambda: team.meet(text)
    if width % WARP or team.group // width > BARRIERS:
        return lambda: _count_up(kernel, width)
    number = team.once(("number", width), "div.u32", "b32", team.thread, width)
    number = team.once(("barrier", width), "add.s32", "b32", number, 1)
    return lambda: text.do("bar.sync", number, width)


def _count_up(kernel: Kernel, width: int) -> None:
    """A barrier of stretches that the hardware has none for: tiles count in shared memory, and look until all have."""
    text, place = kernel.text, _counter(kernel, width)
    text.do("fence.acq_rel.cta")
    before = text.let("atom.shared.add.u32", "b32", f"[{place}]", 1)
    rounds = text.let("div.u32", "b32", before, width)
    due = text.let("mad.lo.u32", "b32", rounds, width, width)
    again = text.new_label("count")
    text.label(again)
    missing = text.let("sub.s32", "b32", due, text.let("ld.acquire.cta.shared.u32", "b32", f"[{place}]"))
    some = text.let("setp.gt.s32", "pred", missing, 0)
    text.do("nanosleep.u32", REST, guard=some)
    text.do(f"bra {again}", guard=some)


def _counter(kernel: Kernel, width: int) -> str:
    """Where a tile's stretch counts: 0 when the entry begins."""
    team, key = kernel.team, ("counter", width)
    made = team.knows(key)
    start = 0 if made else kernel.room.shared(WORD * (team.group // width), WORD)
    base = team.once((SHARED,), "mov.u32", "b32", SHARED)
    number = team.once(("number", width), "div.u32", "b32", team.thread, width)
    place = team.once(("counted", width), "mad.lo.u32", "b32", number, WORD, base)
    counter = team.once(key, "add.u32", "b32", place, start)
    if not made:
        with kernel.text.first():
            kernel.text.do("st.shared.u32", f"[{counter}]", 0)
            kernel.text.do("bar.sync", 0)
    return counter

"""Asynchronous copies of a block (cp.async): 16, 8 or 4 bytes at a time, zeros where the block lies outside its source.

Where neighbours of so many bytes do not lie together on both sides, and between other kinds of memory, elements go
through registers at once: what is done before the wait is allowed to be done already.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tessera.codegen.ptx.blocks.slots import Lying, as_rows, slot_address
from tessera.codegen.ptx.layout import Layout, Sizes, spread, width
from tessera.codegen.ptx.memory import VECTOR_BYTES, Memory, Place, block_runs, read, together, write
from tessera.codegen.ptx.types import size
from tessera.codegen.ptx.visit import visit
from tessera.ir.core import Node, Value
from tessera.ops import tile
from tessera.types import GLOBAL

if TYPE_CHECKING:
    from tessera.codegen.ptx.kernel import Kernel

LEAST = 4  # bytes of a copy
THROUGH = {VECTOR_BYTES: "cg"}  # whole lines pass by the first cache


@dataclass(frozen=True)
class Ends:
    """Both ends of a copy: memories and where the block begins in each; `to` is None where that is a slot."""

    node: Node
    to: Memory | None
    source: Memory
    starts: tuple[tuple[Value, ...], tuple[Value, ...]]

    @property
    def shape(self) -> Sizes:
        """The block's shape."""
        return tuple(int(n) for n in self.node.attrs["shape"])

    @property
    def clip(self) -> bool:
        """Whether what lies outside the source counts as 0."""
        return bool(self.node.attrs["edge"] == "clip")


@visit(tile.async_copy)
def _(kernel: Kernel, node: Node) -> None:
    to, source, *starts = node.args
    rank = to.type.rank  # type: ignore[union-attr]
    places = (tuple(starts[:rank]), tuple(starts[rank:]))
    ends = Ends(node, kernel.memories.get(to), kernel.memories[source], places)
    length = _length(kernel, ends)
    if length:
        _Copy(kernel, ends, length).run()
    else:
        _through_registers(kernel, ends)


@visit(tile.async_commit)
def _(kernel, node):
    kernel.text.do("cp.async.commit_group")


@visit(tile.async_wait)
def _(kernel, node):
    kernel.text.do("cp.async.wait_group", node.attrs["pending"])


def _length(kernel: Kernel, ends: Ends) -> int:
    """The neighbours that one copy moves; 0 where copies cannot."""
    to, source, each = ends.to, ends.source, size(ends.source.dtype)
    if source.space != GLOBAL or (to is not None and to.space != "shared"):
        return 0
    length = VECTOR_BYTES // each
    for m, starts in zip((to, source), ends.starts, strict=True):
        if m is not None:
            length = together(kernel.producers, m, starts, _ranked(ends.shape, len(m.shape)), length)
    while length > 1 and (ends.shape[-1] % length or (ends.clip and source.shape[-1] % length)):
        length //= 2
    return length if length * each >= LEAST else 0


class _Copy:
    """One copy under emission, by all threads of a team."""

    def __init__(self, kernel: Kernel, ends: Ends, length: int) -> None:
        self.kernel, self.text, self.ends, self.length = kernel, kernel.text, ends, length
        self.bytes = length * size(ends.source.dtype)
        self.layout = _pieces(ends.shape, kernel.team.threads, length)
        rank = len(ends.source.shape)
        self.seen = _as_rank(self.layout, rank)
        self.source = Place(kernel, ends.source, ends.starts[1], self.seen)
        self._sizes: dict[str, str] = {}

    def run(self) -> None:
        """Each thread's pieces."""
        target = self._target()
        for first in range(0, self.layout.count, self.length):
            offset = self.layout.offsets[first]
            address, more = self.source.address(self.seen.offsets[first])
            place = f"[{address}+{more}]" if more else f"[{address}]"
            clips = self.source.clipped(self.seen.offsets[first]) if self.ends.clip else []
            present = self._present(self.source.joined(tuple(clips)))
            team = self.kernel.team
            guard = self.source.joined((team.owner(self.layout), *team.inside(self.layout, offset)))
            form = f"cp.async.{THROUGH.get(self.bytes, 'ca')}.shared.global"
            self.text.do(form, target(first), place, self.bytes, *present, guard=guard)

    def _present(self, clip: str) -> tuple[str, ...]:
        """The bytes to read of a piece, where that is not always all of it."""
        if not clip:
            return ()
        if clip not in self._sizes:
            self._sizes[clip] = self.text.let("selp.b32", "b32", self.bytes, 0, clip)
        return (self._sizes[clip],)

    def _target(self) -> Callable[[int], str]:
        """What gives the place that the element of a register is copied to."""
        ends, each = self.ends, size(self.ends.source.dtype)
        if ends.to is None:
            held = self.kernel.slots[ends.node.args[0]]
            lying = Lying(self.kernel, held, slot_address(self.kernel, held, self.kernel.one(ends.starts[0][0])))
            rows = as_rows(self.layout)
            own = lying.own(rows, each)
            return lambda first: lying.at(own, rows.offsets[first][0], rows.offsets[first][1] * each)
        seen = _as_rank(self.layout, len(ends.to.shape))
        place = Place(self.kernel, ends.to, ends.starts[0], seen)

        def plain(first: int) -> str:
            address, more = place.address(seen.offsets[first])
            return f"[{address}+{more}]" if more else f"[{address}]"

        return plain


def _pieces(shape: Sizes, threads: int, length: int) -> Layout:
    """A block spread over threads by pieces of `length` neighbours; threads that none is left for hold the same."""
    count = 1
    for n in shape:
        count <<= width(n)
    busy = min(threads, max(count // length, 1))
    found = spread(shape, busy, length)
    return Layout(shape, found.registers, (*found.threads, *(None,) * (width(threads) - width(busy))))


def _as_rank(layout: Layout, rank: int) -> Layout:
    """The layout with axes of size 1 put in front or left out."""
    moved = rank - len(layout.shape)
    names = {(a, p): (a + moved, p) for a, n in enumerate(layout.shape) for p in range(width(n))}
    return layout.renamed(_ranked(layout.shape, rank), names)


def _through_registers(kernel: Kernel, ends: Ends) -> None:
    """The copy as a load and a store."""
    assert ends.to is not None
    m, n = ends.to, ends.source
    layouts = [spread(_ranked(ends.shape, len(each.shape)), kernel.team.threads, kernel.vector) for each in (m, n)]
    elements = read(kernel, n, block_runs(kernel, n, ends.starts[1], layouts[1], ends.clip, (), once=False))
    write(kernel, m, block_runs(kernel, m, ends.starts[0], layouts[0], False, (), once=True), elements)


def _ranked(shape: Sizes, rank: int) -> Sizes:
    """A block's shape on the side of a memory of some rank: axes of size 1 put in front or left out."""
    return (1,) * (rank - len(shape)) + shape[max(0, len(shape) - rank) :]

"""The thread that fetches: for each round of a `product_loop` it fills a stage of the ring by tensor-map copies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tessera.codegen.ptx.entries.ring import Walker
from tessera.codegen.ptx.types import size
from tessera.ir.core import Node, Value

if TYPE_CHECKING:
    from tessera.codegen.ptx.kernel import Kernel

INNER = 64  # elements of 16 bits in a row of the swizzle
EIGHT = 8  # rows that the swizzle repeats after
PIECE = 16  # bytes of one store


@dataclass(frozen=True)
class Map:
    """What is fetched of a parameter: boxes of a shape; `index` counts the entry's maps."""

    index: int
    param: int
    box: tuple[int, ...]

    def described(self, dtype: str, shape: tuple[int, ...]) -> dict[str, Any]:
        """The map as data, for whoever launches."""
        return {"param": self.param, "box": list(self.box), "dtype": dtype, "shape": list(shape)}


def maps_of(kernel: Kernel, node: Node) -> tuple[Map, Map]:
    """The maps of a loop's two sides: boxes of 64 of its rows or columns where those lie side by side.

    Of a side that a cluster shares each block fetches some of the boxes, or of its only one some rows.
    """
    rows, columns, depth = node.attrs["block"]
    a, b = node.args[1:3]
    params = kernel.function.params
    left, right = (present(node) // _cut(kernel, 0), depth), (depth, INNER)
    if node.attrs["turned"]:
        left = (depth, INNER)
    if node.attrs["flipped"]:
        right = (columns // _cut(kernel, 1), depth)
    found = []
    for index, (v, box) in enumerate(((a, left), (b, right))):
        found.append(Map(index, params.index(v), (1,) * (v.type.rank - 2) + box))
    return found[0], found[1]


def _cut(kernel: Kernel, side: int) -> int:
    """The blocks of threads that fetch a side together."""
    return kernel.cluster.size if kernel.cluster is not None and kernel.cluster.side == side else 1


def stage_bytes(node: Node) -> tuple[int, int]:
    """The bytes of either side in a stage."""
    rows, columns, depth = node.attrs["block"]
    each = size(node.args[1].type.dtype)
    return rows * depth * each, columns * depth * each


def present(node: Node) -> int:
    """The rows of a left block that are fetched: eight at a time, no more than the memory has."""
    rows, block = int(node.args[1].type.shape[-2]), int(node.attrs["block"][0])  # type: ignore[union-attr]
    return block if node.attrs["turned"] else min(block, -(-rows // EIGHT) * EIGHT)


def blank(kernel: Kernel, node: Node) -> None:
    """Write 0 to the rows of each stage that no fetch reaches; they stay so."""
    text, team, ring = kernel.text, kernel.team, kernel.ring
    assert ring is not None
    depth = node.attrs["block"][2] * size(node.args[1].type.dtype)  # type: ignore[union-attr]
    first, count = present(node) * depth, (node.attrs["block"][0] - present(node)) * depth
    if not count:
        return
    start = text.let("mad.lo.u32", "b32", team.number, PIECE, ring.base)
    for stage in range(ring.stages):
        for done in range(0, count, team.block * PIECE):
            more = (count - done) // PIECE
            guard = text.let("setp.lt.u32", "pred", team.number, more) if more < team.block else ""
            place = f"[{start}+{stage * ring.size + first + done}]"
            text.do("st.shared.v4.b32", place, "{0, 0, 0, 0}", guard=guard)
    text.do("fence.proxy.async.shared::cta")


def fetch(kernel: Kernel, node: Node, walker: Walker) -> None:
    """Fill a stage for each round."""
    text, ring = kernel.text, walker.ring
    lower, upper = (kernel.one(v) for v in node.args[3:5])
    index = text.let("mov.b64", "b64", lower)
    head, done = text.new_label("fetch"), text.new_label("fetched")
    text.label(head)
    text.do(f"bra {done}", guard=text.let("setp.ge.s64", "pred", index, upper))
    walker.wait(ring.empty)
    full = text.let("mad.lo.u32", "b32", walker.stage, 8, ring.full)
    left, right = stage_bytes(node)
    fetched = left * present(node) // node.attrs["block"][0] + right
    text.do("mbarrier.arrive.expect_tx.shared::cta.b64", "_", f"[{full}]", fetched)
    buffer = walker.buffer()
    a, b = (_places(kernel, node, side, index) for side in ("left", "right"))
    rows, columns, _ = node.attrs["block"]
    one, other = _Side(kernel, 0, buffer, 0, left, full), _Side(kernel, 1, buffer, left, right, full)
    one.boxes(a, rows // INNER) if node.attrs["turned"] else one.rows(a, present(node))
    other.rows(b, columns) if node.attrs["flipped"] else other.boxes(b, columns // INNER)
    walker.advance()
    text.do("add.s64", index, index, node.attrs["step"])
    text.do(f"bra {head}")
    text.label(done)


def _places(kernel: Kernel, node: Node, side: str, index: str) -> list[str]:
    """Where a block begins on each axis, as 32-bit numbers."""
    starts: tuple[Value, ...] = node.args[5:]
    wide = [index if at < 0 else kernel.one(starts[at]) for at in node.attrs[side]]
    return [kernel.text.let("cvt.u32.u64", "b32", x) if x.startswith("%") else x for x in wide]


class _Side:
    """One side of a stage as it is fetched: `size` bytes at `buffer + offset`, of which a cluster's blocks share."""

    def __init__(self, kernel: Kernel, number: int, buffer: str, offset: int, size: int, full: str) -> None:
        self.kernel, self.number, self.buffer, self.size, self.full = kernel, number, buffer, size, full
        self.offset, self.cut = offset, _cut(kernel, number)
        self.mask = kernel.cluster.mask if kernel.cluster is not None and self.cut > 1 else 0

    def rows(self, places: list[str], rows: int) -> None:
        """A side that is one box, or this block's rows of it."""
        if self.cut == 1:
            copy_box(self.kernel, self.number, self.buffer, self.offset, places, self.full)
            return
        row = self._further(places[-2], rows // self.cut)
        buffer = self._further(self.buffer, self.size // self.cut)
        copy_box(self.kernel, self.number, buffer, self.offset, [*places[:-2], row, places[-1]], self.full, self.mask)

    def boxes(self, places: list[str], count: int) -> None:
        """A side that is boxes side by side, or this block's of them."""
        each, ours, text = self.size // count, count // self.cut, self.kernel.text
        first, buffer = places[-1], self.buffer
        if self.cut > 1:
            first, buffer = self._further(first, ours * INNER), self._further(buffer, ours * each)
        for part in range(ours):
            column = text.let("add.s32", "b32", first, part * INNER) if part else first
            offset = self.offset + part * each
            copy_box(self.kernel, self.number, buffer, offset, [*places[:-1], column], self.full, self.mask)

    def _further(self, place: str, step: int) -> str:
        """A place, so many steps further on as this block is in its cluster."""
        team = self.kernel.team
        rank = team.once(("rank",), "mov.u32", "b32", "%cluster_ctarank")
        more = team.once(("rank", step), "mul.lo.u32", "b32", rank, step)
        return self.kernel.text.let("add.s32", "b32", more, place)


def copy_box(
    kernel: Kernel, number: int, buffer: str, offset: int, places: list[str], full: str, mask: int = 0
) -> None:
    """Begin the copy of a box by one of the maps; its bytes complete the barrier `full`.

    With a mask it goes to the same place in each of those blocks of the cluster, and completes the barriers there.
    """
    text = kernel.text
    target = text.let("add.u32", "b32", buffer, offset) if offset else buffer
    inner_first = ", ".join(reversed(places))
    form = f"cp.async.bulk.tensor.{len(places)}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
    operands = [f"[{target}]", f"[{kernel.maps[number]}, {{{inner_first}}}]", f"[{full}]"]
    if mask:
        form, operands = f"{form}.multicast::cluster", [*operands, str(mask)]
    text.do(form, *operands)

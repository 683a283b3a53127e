"""The thread that fetches: for each round of a `product_loop` it fills a stage of the ring by tensor-map copies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tessera.codegen.ptx.ring import Walker
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
    """The maps of a loop's two sides: of the right side boxes of 64 columns, unless its rows are the columns."""
    rows, columns, depth = node.attrs["block"]
    a, b = node.args[1:3]
    params = kernel.function.params
    right = (columns, depth) if node.attrs["flipped"] else (depth, INNER)
    found = []
    for index, (v, box) in enumerate(((a, (present(node), depth)), (b, right))):
        found.append(Map(index, params.index(v), (1,) * (v.type.rank - 2) + box))
    return found[0], found[1]


def stage_bytes(node: Node) -> tuple[int, int]:
    """The bytes of either side in a stage."""
    rows, columns, depth = node.attrs["block"]
    each = size(node.args[1].type.dtype)
    return rows * depth * each, columns * depth * each


def present(node: Node) -> int:
    """The rows of a left block that are fetched: eight at a time, no more than the memory has."""
    rows = int(node.args[1].type.shape[-2])  # type: ignore[union-attr]
    return min(int(node.attrs["block"][0]), -(-rows // EIGHT) * EIGHT)


def blank(kernel: Kernel, node: Node) -> None:
    """Write 0 to the rows of each stage that no fetch reaches; they stay so."""
    text, team, ring = kernel.text, kernel.team, kernel.ring
    assert ring is not None
    depth = node.attrs["block"][2] * size(node.args[1].type.dtype)  # type: ignore[union-attr]
    first, count = present(node) * depth, (node.attrs["block"][0] - present(node)) * depth
    if not count:
        return
    start = text.let("mad.lo.u32", "b32", team.thread, PIECE, ring.base)
    for stage in range(ring.stages):
        for done in range(0, count, team.block * PIECE):
            more = (count - done) // PIECE
            guard = text.let("setp.lt.u32", "pred", team.thread, more) if more < team.block else ""
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
    copy_box(kernel, 0, buffer, 0, a, full)
    if node.attrs["flipped"]:
        copy_box(kernel, 1, buffer, left, b, full)
    else:
        for part in range(node.attrs["block"][1] // INNER):
            column = text.let("add.s32", "b32", b[-1], part * INNER) if part else b[-1]
            copy_box(kernel, 1, buffer, left + part * INNER * node.attrs["block"][2] * 2, [*b[:-1], column], full)
    walker.advance()
    text.do("add.s64", index, index, node.attrs["step"])
    text.do(f"bra {head}")
    text.label(done)


def _places(kernel: Kernel, node: Node, side: str, index: str) -> list[str]:
    """Where a block begins on each axis, as 32-bit numbers."""
    starts: tuple[Value, ...] = node.args[5:]
    wide = [index if at < 0 else kernel.one(starts[at]) for at in node.attrs[side]]
    return [kernel.text.let("cvt.u32.u64", "b32", x) if x.startswith("%") else x for x in wide]


def copy_box(kernel: Kernel, number: int, buffer: str, offset: int, places: list[str], full: str) -> None:
    """Begin the copy of a box by one of the maps; its bytes complete the barrier `full`."""
    text = kernel.text
    target = text.let("add.u32", "b32", buffer, offset) if offset else buffer
    inner_first = ", ".join(reversed(places))
    text.do(
        f"cp.async.bulk.tensor.{len(places)}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes",
        f"[{target}]", f"[{kernel.maps[number]}, {{{inner_first}}}]", f"[{full}]",
    )  # fmt: skip

"""The TMA producer: one thread that fills the stages of a ring buffer by tensor-map copies.

It computes only what the addresses and loop bounds need (a backward slice of the function).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tessera.codegen.ptx.ops import async_mma, resident_operand
from tessera.codegen.ptx.passes.index_analysis import backward_slice
from tessera.codegen.ptx.passes.layout_inference import static_shape
from tessera.codegen.ptx.table.warpgroup.ring_buffer import PipelineState
from tessera.codegen.ptx.text.register_types import element_bytes
from tessera.ir.core import Block, Function, Node, Value
from tessera.ops.dialects import control_flow

if TYPE_CHECKING:
    from tessera.codegen.ptx.emitter import PtxEmitter


# The thread that fetches: for each round of a `product_loop` it fills a stage of the ring by tensor-map copies.


BOX_COLUMNS = 64  # elements of 16 bits in a row of the swizzle
SWIZZLE_ROWS = 8  # rows that the swizzle repeats after
STORE_BYTES = 16  # bytes of one store


@dataclass(frozen=True)
class TensorMapSpec:
    """What is fetched of a parameter: boxes of a shape; `index` counts the entry's maps."""

    index: int
    param: int
    box: tuple[int, ...]

    def described(self, dtype: str, shape: tuple[int, ...]) -> dict[str, Any]:
        """The map as data, for whoever launches."""
        return {"param": self.param, "box": list(self.box), "dtype": dtype, "shape": list(shape)}


def make_mainloop_maps(kernel: PtxEmitter, node: Node) -> tuple[TensorMapSpec, TensorMapSpec]:
    """The maps of a loop's two sides: boxes of 64 of its rows or columns where those lie side by side.

    Of a side that a cluster shares each block fetches some of the boxes, or of its only one some rows.
    """
    rows, columns, depth = node.attrs["block"]
    a, b = node.args[1:3]
    params = kernel.function.params
    left, right = (count_fetched_rows(node) // _count_sharing_blocks(kernel, 0), depth), (depth, BOX_COLUMNS)
    if node.attrs["turned"]:
        left = (depth, BOX_COLUMNS)
    if node.attrs["flipped"]:
        right = (columns // _count_sharing_blocks(kernel, 1), depth)
    found = []
    for index, (v, box) in enumerate(((a, left), (b, right))):
        found.append(TensorMapSpec(index, params.index(v), (1,) * (v.type.rank - 2) + box))
    return found[0], found[1]


def _count_sharing_blocks(kernel: PtxEmitter, side: int) -> int:
    """The blocks of threads that fetch a side together."""
    return kernel.cluster.size if kernel.cluster is not None and kernel.cluster.side == side else 1


def stage_bytes(node: Node) -> tuple[int, int]:
    """The bytes of either side in a stage."""
    rows, columns, depth = node.attrs["block"]
    each = element_bytes(node.args[1].type.dtype)
    return rows * depth * each, columns * depth * each


def count_fetched_rows(node: Node) -> int:
    """The rows of a left block that are fetched: eight at a time, no more than the memory has."""
    rows, block = int(node.args[1].type.shape[-2]), int(node.attrs["block"][0])  # type: ignore[union-attr]
    return block if node.attrs["turned"] else min(block, -(-rows // SWIZZLE_ROWS) * SWIZZLE_ROWS)


def zero_unfetched_rows(kernel: PtxEmitter, node: Node) -> None:
    """Write 0 to the rows of each stage that no fetch reaches; they stay so."""
    text, team, ring = kernel.text, kernel.team, kernel.ring
    assert ring is not None
    depth = node.attrs["block"][2] * element_bytes(node.args[1].type.dtype)  # type: ignore[union-attr]
    first, count = count_fetched_rows(node) * depth, (node.attrs["block"][0] - count_fetched_rows(node)) * depth
    if not count:
        return
    start = text.let("mad.lo.u32", "b32", team.number, STORE_BYTES, ring.base)
    for stage in range(ring.stages):
        for done in range(0, count, team.block * STORE_BYTES):
            more = (count - done) // STORE_BYTES
            guard = text.let("setp.lt.u32", "pred", team.number, more) if more < team.block else ""
            place = f"[{start}+{stage * ring.size + first + done}]"
            text.do("st.shared.v4.b32", place, "{0, 0, 0, 0}", guard=guard)
    text.do("fence.proxy.async.shared::cta")


def produce_mainloop(kernel: PtxEmitter, node: Node, walker: PipelineState) -> None:
    """Fill a stage for each round."""
    text, ring = kernel.text, walker.ring
    lower, upper = (kernel.scalar_operand(v) for v in node.args[3:5])
    index = text.let("mov.b64", "b64", lower)
    head, done = text.new_label("fetch"), text.new_label("fetched")
    text.label(head)
    text.do(f"bra {done}", guard=text.let("setp.ge.s64", "pred", index, upper))
    walker.wait(ring.empty)
    full = text.let("mad.lo.u32", "b32", walker.stage, 8, ring.full)
    left, right = stage_bytes(node)
    fetched = left * count_fetched_rows(node) // node.attrs["block"][0] + right
    text.do("mbarrier.arrive.expect_tx.shared::cta.b64", "_", f"[{full}]", fetched)
    buffer = walker.buffer()
    a, b = (_box_coordinates(kernel, node, side, index) for side in ("left", "right"))
    rows, columns, _ = node.attrs["block"]
    one, other = _OperandFetch(kernel, 0, buffer, 0, left, full), _OperandFetch(kernel, 1, buffer, left, right, full)
    one.boxes(a, rows // BOX_COLUMNS) if node.attrs["turned"] else one.rows(a, count_fetched_rows(node))
    other.rows(b, columns) if node.attrs["flipped"] else other.boxes(b, columns // BOX_COLUMNS)
    walker.advance()
    text.do("add.s64", index, index, node.attrs["step"])
    text.do(f"bra {head}")
    text.label(done)


def _box_coordinates(kernel: PtxEmitter, node: Node, side: str, index: str) -> list[str]:
    """Where a block begins on each axis, as 32-bit numbers."""
    starts: tuple[Value, ...] = node.args[5:]
    wide = [index if at < 0 else kernel.scalar_operand(starts[at]) for at in node.attrs[side]]
    return [kernel.text.let("cvt.u32.u64", "b32", x) if x.startswith("%") else x for x in wide]


class _OperandFetch:
    """One side of a stage as it is fetched: `size` bytes at `buffer + offset`, of which a cluster's blocks share."""

    def __init__(self, kernel: PtxEmitter, number: int, buffer: str, offset: int, size: int, full: str) -> None:
        self.kernel, self.number, self.buffer, self.size, self.full = kernel, number, buffer, size, full
        self.offset, self.cut = offset, _count_sharing_blocks(kernel, number)
        self.mask = kernel.cluster.mask if kernel.cluster is not None and self.cut > 1 else 0

    def rows(self, places: list[str], rows: int) -> None:
        """A side that is one box, or this block's rows of it."""
        if self.cut == 1:
            copy_tensor_box(self.kernel, self.number, self.buffer, self.offset, places, self.full)
            return
        row = self._further(places[-2], rows // self.cut)
        buffer = self._further(self.buffer, self.size // self.cut)
        copy_tensor_box(
            self.kernel, self.number, buffer, self.offset, [*places[:-2], row, places[-1]], self.full, self.mask
        )

    def boxes(self, places: list[str], count: int) -> None:
        """A side that is boxes side by side, or this block's of them."""
        each, ours, text = self.size // count, count // self.cut, self.kernel.text
        first, buffer = places[-1], self.buffer
        if self.cut > 1:
            first, buffer = self._further(first, ours * BOX_COLUMNS), self._further(buffer, ours * each)
        for part in range(ours):
            column = text.let("add.s32", "b32", first, part * BOX_COLUMNS) if part else first
            offset = self.offset + part * each
            copy_tensor_box(self.kernel, self.number, buffer, offset, [*places[:-1], column], self.full, self.mask)

    def _further(self, place: str, step: int) -> str:
        """A place, so many steps further on as this block is in its cluster."""
        team = self.kernel.team
        rank = team.once(("rank",), "mov.u32", "b32", "%cluster_ctarank")
        more = team.once(("rank", step), "mul.lo.u32", "b32", rank, step)
        return self.kernel.text.let("add.s32", "b32", more, place)


def copy_tensor_box(
    kernel: PtxEmitter, number: int, buffer: str, offset: int, places: list[str], full: str, mask: int = 0
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


# The thread that fetches for `streamed` products: it walks a function's loops and fills a stage for each of them.
#
# What it computes is what the places are computed from, and nothing else.


PRODUCED_OPS = (resident_operand, async_mma)


def source_ref(node: Node) -> Value:
    """The memory that a node reads."""
    return node.args[1] if node.op is async_mma else node.args[0]


def block_starts(node: Node) -> tuple[Value, ...]:
    """Where its block begins."""
    return node.args[1:] if node.op is resident_operand else node.args[3 if node.attrs["summed"] else 2 :]


def block_extent(node: Node) -> tuple[int, int]:
    """The rows and columns of its block in memory."""
    if node.op is resident_operand:
        return static_shape(node.out)[0], static_shape(node.out)[1]
    depth, columns = node.attrs["block"]
    return (columns, depth) if node.attrs["flipped"] else (depth, columns)


def block_bytes(node: Node) -> int:
    """The bytes of its block."""
    rows, columns = block_extent(node)
    return rows * columns * element_bytes(source_ref(node).type.dtype)  # type: ignore[union-attr]


def collect_async_mma_maps(function: Function) -> dict[Node, TensorMapSpec]:
    """The map that each node is fetched by: boxes of a block's rows, one row of the swizzle wide."""
    made: dict[tuple[int, tuple[int, ...]], TensorMapSpec] = {}
    found = {}
    for node in function.body.walk():
        if node.op in PRODUCED_OPS:
            ref = source_ref(node)
            box = (*(1,) * (ref.type.rank - 2), block_extent(node)[0], BOX_COLUMNS)  # type: ignore[union-attr]
            param = function.params.index(ref)
            found[node] = made.setdefault((param, box), TensorMapSpec(len(made), param, box))
    return found


class AsyncMmaProducer:
    """The walk: `maps` say what to fetch by, and each `resident` has a ring of its own."""

    def __init__(
        self,
        kernel: PtxEmitter,
        walker: PipelineState,
        maps: Mapping[Node, TensorMapSpec],
        own: Mapping[Node, PipelineState],
    ) -> None:
        self.kernel, self.text, self.pipeline_state, self.maps, self.own = kernel, kernel.text, walker, maps, own
        self.needed = _address_nodes(kernel.function)

    def run(self, block: Block) -> None:
        """Fetch what a block reads, in order."""
        for node in block.nodes:
            if node.op in PRODUCED_OPS:
                self._fill(node)
            elif node.op is control_flow.for_ and any(n.op in PRODUCED_OPS for n in node.regions[0].walk()):
                self._loop(node)
            elif node in self.needed:
                self.kernel.emit(node)

    def _loop(self, node: Node) -> None:
        text = self.text
        lower, upper, step = (self.kernel.scalar_operand(v) for v in node.args[:3])
        index = text.let("mov.b64", "b64", lower)
        head, done = text.new_label("fetch"), text.new_label("fetched")
        text.label(head)
        text.do(f"bra {done}", guard=text.let("setp.ge.s64", "pred", index, upper))
        self.kernel.values[node.regions[0].params[0]] = (index,)
        self.run(node.regions[0])
        text.do("add.s64", index, index, step)
        text.do(f"bra {head}")
        text.label(done)

    def _fill(self, node: Node) -> None:
        """Wait until a stage is empty, and begin the copies into it."""
        walker, text = self.own.get(node, self.pipeline_state), self.text
        walker.wait(walker.ring.empty)
        full = text.let("mad.lo.u32", "b32", walker.stage, 8, walker.ring.full)
        text.do("mbarrier.arrive.expect_tx.shared::cta.b64", "_", f"[{full}]", block_bytes(node))
        wide = [self.kernel.scalar_operand(v) for v in block_starts(node)]
        places = [text.let("cvt.u32.u64", "b32", x) if x.startswith("%") else x for x in wide]
        buffer, (rows, columns) = walker.buffer(), block_extent(node)
        each = rows * BOX_COLUMNS * element_bytes(source_ref(node).type.dtype)  # type: ignore[union-attr]
        for part in range(columns // BOX_COLUMNS):
            column = text.let("add.s32", "b32", places[-1], part * BOX_COLUMNS) if part else places[-1]
            copy_tensor_box(self.kernel, self.maps[node].index, buffer, part * each, [*places[:-1], column], full)
        walker.advance()


def _address_nodes(function: Function) -> set[Node]:
    """The nodes that places and the bounds of loops are computed by."""
    wanted: list[Value] = []
    for node in function.body.walk():
        if node.op in PRODUCED_OPS:
            wanted += block_starts(node)
        elif node.op is control_flow.for_:
            wanted += node.args[:3]
    return set(backward_slice(function, wanted))

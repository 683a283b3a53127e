"""TMA producer: one thread that fills the stages of a ring buffer by tensor-map copies.

It computes only the scalars that the copies' coordinates and the loop bounds need (a backward slice of the function).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tessera.codegen.ptx.context import EmissionContext
from tessera.codegen.ptx.emitter import emit_node
from tessera.codegen.ptx.ops import fetched_block
from tessera.codegen.ptx.table.warpgroup.ring_buffer import MBARRIER_BYTES, PipelineState
from tessera.codegen.ptx.table.warpgroup.tensor_map import (
    BOX_COLUMNS,
    FETCHED_DEPTH,
    PRODUCED_OPS,
    TensorMapSpec,
    block_extent,
    block_starts,
    box_columns,
    count_fetched_rows,
    ring_bytes,
    stage_bytes,
)
from tessera.codegen.ptx.text.builder import PtxBuilder, element_bytes
from tessera.core.symbolic_dim import ceil_divide
from tessera.ir.core import Block, Function, Node, Value
from tessera.ir.rewrite import UseDef
from tessera.ops.dialects import control_flow

STORE_BYTES = 16  # bytes of one vectorised store


def make_mainloop_maps(ctx: EmissionContext, node: Node) -> tuple[TensorMapSpec, TensorMapSpec]:
    """The descriptors of both operands of a `gemm_mainloop`.

    A box has 64 rows or columns where these are contiguous in memory. Each block of a cluster fetches its share of the
    operand that the cluster shares: some of its boxes or, where there is only one, some of its rows.
    """
    rows, columns, depth = node.attrs["block"]
    a, b = node.args[1:3]
    params = ctx.function.params
    left, right = (count_fetched_rows(node) // _count_sharing_blocks(ctx, 0), depth), (depth, BOX_COLUMNS)
    if node.attrs["turned"]:
        left = (depth, BOX_COLUMNS)
    if node.attrs["flipped"]:
        right = (columns // _count_sharing_blocks(ctx, 1), depth)
    found = []
    for index, (v, box) in enumerate(((a, left), (b, right))):
        found.append(TensorMapSpec(index, params.index(v), (1,) * (v.type.rank - 2) + box))
    return found[0], found[1]


def _count_sharing_blocks(ctx: EmissionContext, side: int) -> int:
    """The thread blocks that fetch an operand together."""
    return ctx.grid.cluster.size if ctx.grid.cluster is not None and ctx.grid.cluster.side == side else 1


def zero_unfetched_rows(ctx: EmissionContext, node: Node) -> None:
    """Zero the rows of each stage that no copy writes."""
    text, team, ring = ctx.text, ctx.team, ctx.pipeline.ring
    assert ring is not None
    depth = node.attrs["block"][2] * element_bytes(node.args[1].type.dtype)  # type: ignore[union-attr]
    first, count = count_fetched_rows(node) * depth, (node.attrs["block"][0] - count_fetched_rows(node)) * depth
    if not count:
        return
    start = text.let("mad.lo.u32", "b32", team.block_thread, STORE_BYTES, ring.base)
    for stage in range(ring.stages):
        for done in range(0, count, team.block_threads * STORE_BYTES):
            left = (count - done) // STORE_BYTES
            guard = text.let("setp.lt.u32", "pred", team.block_thread, left) if left < team.block_threads else ""
            address = f"[{start}+{stage * ring.size + first + done}]"
            text.do("st.shared.v4.b32", address, "{0, 0, 0, 0}", guard=guard)
    text.do("fence.proxy.async.shared::cta")


def produce_mainloop(ctx: EmissionContext, node: Node, state: PipelineState) -> None:
    """Emit the producer's loop for a `gemm_mainloop`: fill one stage in each iteration."""
    text, ring = ctx.text, state.ring
    lower, upper = (ctx.scalar_operand(v) for v in node.args[3:5])
    index = text.let("mov.b64", "b64", lower)
    head, done = text.new_label("fetch"), text.new_label("fetched")
    text.label(head)
    text.do(f"bra {done}", guard=text.let("setp.ge.s64", "pred", index, upper))
    state.wait(ring.empty)
    full = text.let("mad.lo.u32", "b32", state.stage, MBARRIER_BYTES, ring.full)
    left, right = stage_bytes(node)
    fetched = left * count_fetched_rows(node) // node.attrs["block"][0] + right
    text.do("mbarrier.arrive.expect_tx.shared::cta.b64", "_", f"[{full}]", fetched)
    _fetch_stage(ctx, node, index, state.buffer(), full)
    state.advance()
    text.do("add.s64", index, index, node.attrs["step"])
    text.do(f"bra {head}")
    text.label(done)


def _fetch_stage(ctx: EmissionContext, node: Node, index: str, buffer: str, full: str) -> None:
    """Begin the copies of both operands of one iteration."""
    rows, columns, _ = node.attrs["block"]
    left, right = stage_bytes(node)
    a, b = (_box_coordinates(ctx, node, side, index) for side in ("left", "right"))
    first, second = _OperandFetch(ctx, 0, buffer, 0, left, full), _OperandFetch(ctx, 1, buffer, left, right, full)
    if node.attrs["turned"]:
        first.fetch_boxes(a, rows // BOX_COLUMNS)
    else:
        first.fetch_rows(a, count_fetched_rows(node))
    if node.attrs["flipped"]:
        second.fetch_rows(b, columns)
    else:
        second.fetch_boxes(b, ceil_divide(columns, BOX_COLUMNS))


def _box_coordinates(ctx: EmissionContext, node: Node, side: str, index: str) -> list[str]:
    """The coordinates of an operand's block as 32-bit numbers."""
    starts: tuple[Value, ...] = node.args[5:]
    wide = [index if at < 0 else ctx.scalar_operand(starts[at]) for at in node.attrs[side]]
    found = [ctx.text.let("cvt.u32.u64", "b32", x) if x.startswith("%") else x for x in wide]
    for steps in node.attrs["strides"][side == "right" :][:1]:
        found = _add_digits(ctx.text, ctx.text.let("cvt.u32.u64", "b32", index), node.attrs["digits"], found, steps)
    return found


def _add_digits(
    text: PtxBuilder, index: str, digits: Sequence[int], starts: list[str], strides: Sequence[Sequence[int]]
) -> list[str]:
    """Coordinates plus what the digits of an index add to them."""
    rest = index
    for place in reversed(range(len(digits))):
        digit = text.let("rem.u32", "b32", rest, digits[place]) if place else rest
        for axis, each in enumerate(strides):
            if each[place]:
                starts[axis] = text.let("mad.lo.u32", "b32", digit, each[place], starts[axis])
        rest = text.let("div.u32", "b32", rest, digits[place]) if place else rest
    return starts


class _OperandFetch:
    """The copies of one operand into a stage: `size` bytes at `buffer + offset`; a cluster's blocks share the work."""

    def __init__(self, ctx: EmissionContext, index: int, buffer: str, offset: int, size: int, full: str) -> None:
        self.ctx, self.index, self.buffer, self.size, self.full = ctx, index, buffer, size, full
        self.offset, self.shares = offset, _count_sharing_blocks(ctx, index)
        self.mask = ctx.grid.cluster.mask if ctx.grid.cluster is not None and self.shares > 1 else 0

    def fetch_rows(self, coordinates: list[str], rows: int) -> None:
        """Copy an operand that is one box, or this block's rows of it."""
        buffer = self.buffer
        if self.shares > 1:
            row = self._add_rank(coordinates[-2], rows // self.shares)
            buffer = self._add_rank(buffer, self.size // self.shares)
            coordinates = [*coordinates[:-2], row, coordinates[-1]]
        copy_tensor_box(self.ctx, self.index, buffer, self.offset, coordinates, self.full, self.mask)

    def fetch_boxes(self, coordinates: list[str], count: int) -> None:
        """Copy an operand that is several boxes side by side, or this block's share of them."""
        box_bytes, share, text = self.size // count, count // self.shares, self.ctx.text
        first, buffer = coordinates[-1], self.buffer
        if self.shares > 1:
            first, buffer = self._add_rank(first, share * BOX_COLUMNS), self._add_rank(buffer, share * box_bytes)
        for part in range(share):
            column = text.let("add.s32", "b32", first, part * BOX_COLUMNS) if part else first
            offset = self.offset + part * box_bytes
            copy_tensor_box(self.ctx, self.index, buffer, offset, [*coordinates[:-1], column], self.full, self.mask)

    def _add_rank(self, base: str, step: int) -> str:
        """`base` plus `step` times this block's rank in its cluster."""
        team = self.ctx.team
        rank = team.hoist(("rank",), "mov.u32", "b32", "%cluster_ctarank")
        scaled = team.hoist(("rank", step), "mul.lo.u32", "b32", rank, step)
        return self.ctx.text.let("add.s32", "b32", scaled, base)


def copy_tensor_box(
    ctx: EmissionContext, index: int, buffer: str, offset: int, coordinates: list[str], full: str, mask: int = 0
) -> None:
    """Begin the copy of a box by a TMA descriptor; its bytes complete the mbarrier `full`.

    With a mask the copy is multicast to those blocks of the cluster, and completes the mbarriers there.
    """
    text = ctx.text
    target = text.let("add.u32", "b32", buffer, offset) if offset else buffer
    inner_first = ", ".join(reversed(coordinates))
    form = f"cp.async.bulk.tensor.{len(coordinates)}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
    operands = [f"[{target}]", f"[{ctx.pipeline.tensor_maps[index]}, {{{inner_first}}}]", f"[{full}]"]
    if mask:
        form, operands = f"{form}.multicast::cluster", [*operands, str(mask)]
    text.do(form, *operands)


class AsyncMmaProducer:
    """The producer's walk over a function with `async_mma`: `maps` are the descriptors of the nodes to fetch.

    Each resident operand has a ring of its own (`resident_states`).
    """

    def __init__(
        self,
        ctx: EmissionContext,
        state: PipelineState,
        maps: Mapping[Node, TensorMapSpec],
        resident_states: Mapping[Node, PipelineState],
    ) -> None:
        self.ctx, self.text, self.state, self.maps, self.resident_states = ctx, ctx.text, state, maps, resident_states
        self.address_nodes = _find_address_nodes(ctx.function)

    def emit_block(self, block: Block) -> None:
        """Fetch what a block reads, in order."""
        for node in block.nodes:
            if node.op in PRODUCED_OPS:
                self._fetch(node)
            elif node.op is control_flow.for_ and any(n.op in PRODUCED_OPS for n in node.regions[0].walk()):
                self._emit_loop(node)
            elif node in self.address_nodes:
                emit_node(self.ctx, node)

    def _emit_loop(self, node: Node) -> None:
        text = self.text
        lower, upper, step = (self.ctx.scalar_operand(v) for v in node.args[:3])
        index = text.let("mov.b64", "b64", lower)
        head, done = text.new_label("fetch"), text.new_label("fetched")
        text.label(head)
        text.do(f"bra {done}", guard=text.let("setp.ge.s64", "pred", index, upper))
        self.ctx.values[node.regions[0].params[0]] = (index,)
        self.emit_block(node.regions[0])
        text.do("add.s64", index, index, step)
        text.do(f"bra {head}")
        text.label(done)

    def _fetch(self, node: Node) -> None:
        """Fill the stages that a node reads."""
        (rows, columns), width = block_extent(node), box_columns(node)
        if node.op is not fetched_block:
            if not node.attrs.get("shares"):
                self._fill_stage(node, [(0, column) for column in range(0, columns, width)])
        elif node.attrs["turned"]:
            for row in range(0, rows, FETCHED_DEPTH):
                self._fill_stage(node, [(row, column) for column in range(0, columns, width)])
        else:
            for column in range(0, columns, width):
                self._fill_stage(node, [(0, column)])

    def _fill_stage(self, node: Node, boxes: Sequence[tuple[int, int]]) -> None:
        """Wait for an empty stage and begin the copies of boxes, by their rows and columns in the block, into it."""
        state, text = self.resident_states.get(node, self.state), self.text
        state.wait(state.ring.empty)
        full = text.let("mad.lo.u32", "b32", state.stage, MBARRIER_BYTES, state.ring.full)
        text.do("mbarrier.arrive.expect_tx.shared::cta.b64", "_", f"[{full}]", ring_bytes(node))
        wide = [self.ctx.scalar_operand(v) for v in block_starts(node)]
        starts = [text.let("cvt.u32.u64", "b32", x) if x.startswith("%") else x for x in wide]
        buffer, box_bytes, axis = state.buffer(), ring_bytes(node) // len(boxes), node.attrs["axis"]
        for number, (row, column) in enumerate(boxes):
            place = list(starts)
            place[axis] = text.let("add.s32", "b32", starts[axis], row) if row else starts[axis]
            place[-1] = text.let("add.s32", "b32", starts[-1], column) if column else starts[-1]
            copy_tensor_box(self.ctx, self.maps[node].index, buffer, number * box_bytes, place, full)
        state.advance()


def _find_address_nodes(function: Function) -> set[Node]:
    """The nodes that compute the copies' coordinates and the loop bounds."""
    wanted: list[Value] = []
    for node in function.body.walk():
        if node.op in PRODUCED_OPS:
            wanted += block_starts(node)
        elif node.op is control_flow.for_ and any(n.op in PRODUCED_OPS for n in node.regions[0].walk()):
            wanted += node.args[:3]
    return set(UseDef(function).backward_slice(wanted))

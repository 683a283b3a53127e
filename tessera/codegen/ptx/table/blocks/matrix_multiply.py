"""Matrix multiplication rows: tensor cores (mma.sync with ldmatrix) where they apply, otherwise fused multiply-add."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tessera.codegen.ptx.context import EmissionContext
from tessera.codegen.ptx.layout import (
    LANE_BITS,
    MMA_K_BYTES,
    MMA_OPERAND_TYPES,
    DistributedLayout,
    LayoutBit,
    Sizes,
    bit_width,
    has_enough_rows,
    make_mma_layout,
    mma_type_suffix,
    uses_tensor_cores,
)
from tessera.codegen.ptx.ops import matmul_accumulate
from tessera.codegen.ptx.passes.barrier_insertion import READ, WRITE
from tessera.codegen.ptx.passes.layout_inference import static_shape
from tessera.codegen.ptx.table import emission_rule
from tessera.codegen.ptx.table.blocks.layout_conversion import (
    emit_thread_address,
    exchange_space,
    plan_exchange_accesses,
    row_major_strides,
)
from tessera.codegen.ptx.table.scalars import packing
from tessera.codegen.ptx.table.scalars.conversion import convert, convert_for_storage, wrap_integer
from tessera.codegen.ptx.table.scalars.packing import pack_halves
from tessera.codegen.ptx.text.memref import VectorAccess, format_address
from tessera.codegen.ptx.text.register_types import element_bytes, ptx_type, register_class
from tessera.core.types import TensorType
from tessera.ir.core import Node
from tessera.ops.tensor import contractions

# Sums of products by multiply-add: both sides in memory that the team shares, a square of sums in each thread.


FMA_UNROLL = 4
OPERAND_ALIGN = 16


class FmaProduct:
    """One product under emission."""

    def __init__(self, ctx: EmissionContext, node: Node) -> None:
        self.ctx, self.text, self.node = ctx, ctx.text, node
        a, b = self.sides = node.args[-2:]
        self.dtypes = [v.type.dtype for v in self.sides]  # type: ignore[union-attr]
        self.wide = a.type.accumulate  # type: ignore[union-attr]
        self.left, self.right = ctx.layout(a).shape, ctx.layout(b).shape
        self.layout = ctx.layout(node.out)
        self.k = self.left[-1]
        each = element_bytes(self.dtypes[0])  # both are as large
        self.offset = -(-math.prod(self.left) * each // OPERAND_ALIGN) * OPERAND_ALIGN
        self.base = ctx.smem.allocator.exchange(self.offset + math.prod(self.right) * each)

    def put(self) -> None:
        """Both sides into the exchange."""
        ctx = self.ctx
        if ctx.smem.hazards.exchange(WRITE):
            ctx.team.synchronise()
        for v, at, dtype in zip(self.sides, (0, self.offset), self.dtypes, strict=True):
            for run in plan_exchange_accesses(ctx, dtype, ctx.layout(v), self.base, once=True):
                moved = VectorAccess(run.first, run.count, run.address, run.offset + at, run.guards)
                part = ctx.values[v][run.first : run.first + run.count]
                packing.store_elements(self.text, exchange_space(ctx), dtype, moved, part)
        if ctx.smem.hazards.exchange(READ):
            ctx.team.synchronise()

    def run(self) -> None:
        """The sums: a loop along the axis that the sides share, some steps a round, then what is left."""
        self.sums = self.begun()
        steps = (
            row_major_strides(self.left, element_bytes(self.dtypes[0])),
            row_major_strides(self.right, element_bytes(self.dtypes[1])),
        )
        places = [self._address(s, a, keep) for s, a, keep in zip(steps, (0, self.offset), (-2, -1), strict=True)]
        rounds = self.k // FMA_UNROLL
        if rounds > 1:
            self._loop(places, steps, rounds)
        else:
            rounds = 0
        for k in range(rounds * FMA_UNROLL, self.k):
            behind = k - rounds * FMA_UNROLL if rounds > 1 else k
            self._step(places, steps, behind)

    def begun(self) -> list[str]:
        """Registers of their own that hold what the products are added to."""
        kind = register_class(self.wide)
        given = self.ctx.values[self.node.args[0]] if len(self.node.args) > 2 else ()
        first = given or (packing.zero_literal(kind),) * self.layout.count
        return [self.text.let(f"mov.{kind}", kind, x) for x in first]

    def _address(self, steps: Sizes, at: int, keep: int) -> str:
        """A register of its own with the address of what a thread's first element needs: its row or its column."""
        rank = len(steps)
        used = tuple(0 if axis >= rank - 2 and axis != rank + keep else s for axis, s in enumerate(steps))
        total = emit_thread_address(self.ctx, self.layout, used, self.base)
        kind = "b64" if self.ctx.smem.allocator.own else "b32"
        return self.text.let(f"add.s{kind[1:]}", kind, total, at)

    def _loop(self, places: list[str], steps: Sequence[Sizes], rounds: int) -> None:
        text, head = self.text, self.text.new_label("dot")
        count = text.let("mov.u32", "b32", rounds)
        text.label(head)
        for k in range(FMA_UNROLL):
            self._step(places, steps, k)
        form = "s64" if self.ctx.smem.allocator.own else "s32"
        for place, step in zip(places, (steps[0][-1], steps[1][-2]), strict=True):
            text.do(f"add.{form}", place, place, FMA_UNROLL * step)
        text.do("sub.s32", count, count, 1)
        text.do(f"bra {head}", guard=text.let("setp.ne.s32", "pred", count, 0))

    def _step(self, places: Sequence[str], steps: Sequence[Sizes], k: int) -> None:
        """One place of the shared axis: a column of the left side times a row of the right one."""
        row, column = len(self.layout.shape) - 2, len(self.layout.shape) - 1
        left = self._loaded(0, places[0], steps[0], k * steps[0][-1])
        right = self._loaded(1, places[1], steps[1], k * steps[1][-2])
        form = ptx_type(self.wide)
        multiply = "fma.rn" if self.wide.is_float else "mad.lo"
        for total, place in zip(self.sums, self.layout.offsets, strict=True):
            a, b = left[place[: row + 1]], right[place[:row] + place[column:]]
            self.text.do(f"{multiply}.{form}", total, a, b, total)

    def _loaded(self, side: int, base: str, steps: Sizes, at: int) -> dict[Sizes, str]:
        """The elements of a side that this thread's registers need, by their place along the leading axes and one more:
        rows of the left one, columns of the right."""
        outer = len(self.layout.shape) - 2
        axis = outer + side
        found: dict[Sizes, str] = {}
        for place in self.layout.offsets:
            key = (*place[:outer], place[axis])
            if key not in found:
                offset = at + sum(n * s for n, s in zip(key[:-1], steps, strict=False)) + key[-1] * steps[axis]
                found[key] = self._element(side, base, offset, place)
        return found

    def _element(self, side: int, base: str, offset: int, place: Sizes) -> str:
        axes = (*range(len(place) - 2), len(place) - 2 + side)
        inside = [self.ctx.team.axis_predicate(self.layout, a, place[a]) for a in axes]
        guard = ""
        for each in inside:
            guard = self.text.let("and.pred", "pred", guard, each) if guard and each else guard or each
        run = VectorAccess(0, 1, base, offset, (guard,))
        (x,) = packing.load_elements(self.text, exchange_space(self.ctx), self.dtypes[side], run)
        return convert(self.text, self.dtypes[side], self.wide, x)


# Where the sides of a product by tensor cores lie in shared memory: in the exchange, or in a slot (`slots.Lying`).
#
# Both say where a thread's rows lie for ldmatrix; rows of the exchange are 16 bytes longer than they need be, so that
# the eight rows that are read at once lie in different banks.


ROW_PADDING = 16  # bytes after each row
LDMATRIX_BYTES = 16  # bytes of the shared axis in one of the matrices that are loaded


class SmemSource(Protocol):
    """Memory that ldmatrix reads a side from."""

    def thread_address(self, layout: DistributedLayout, unit: int) -> str:
        """What stands for a thread's own place: `layout` gives its row and, times `unit`, its bytes along that."""

    def operand_at(self, thread_address: str, row: int, byte: int) -> str:
        """The place of a byte so far from a thread's own, as an operand."""


@dataclass
class ExchangedOperand:
    """A side in the exchange, `offset` bytes after its begin."""

    ctx: EmissionContext
    base: str
    offset: int
    pitch: int

    def thread_address(self, layout: DistributedLayout, unit: int) -> str:
        """The address of a thread's own place, without the offset."""
        team = self.ctx.team
        total = self.base
        for axis, step in enumerate((self.pitch, unit)):
            place = team.thread_offset(layout, axis)
            if place != "0":
                part = team.hoist(("near", place, step), "mul.lo.u32", "b32", place, step)
                total = self.ctx.text.let("add.s32", "b32", total, part)
        return total

    def operand_at(self, thread_address: str, row: int, byte: int) -> str:
        """The place of a byte so far from a thread's own, as an operand."""
        more = self.offset + row * self.pitch + byte
        return format_address(thread_address, more)


def row_pitch(count: int) -> int:
    """The bytes from one row of so many bytes in the exchange to the next."""
    return -(-count // (2 * ROW_PADDING)) * 2 * ROW_PADDING + ROW_PADDING


# Products by the tensor cores of a warp (mma.sync): both sides in shared memory, read by ldmatrix.


MMA_ROWS, MMA_COLUMNS = 16, 8  # of the sums of one instruction


class MmaProduct:
    """One product under emission."""

    def __init__(self, ctx: EmissionContext, node: Node) -> None:
        self.ctx, self.text, self.node = ctx, ctx.text, node
        self.sides = node.args[-2:]
        self.wide = self.sides[0].type.accumulate  # type: ignore[union-attr]
        self.layout = ctx.layout(node.out)
        self.held = [MMA_OPERAND_TYPES[v.type.dtype] for v in self.sides]  # type: ignore[union-attr]
        self.dtype = self.held[0]
        self.each = element_bytes(self.dtype)
        self.step = MMA_K_BYTES // self.each
        self.depth = static_shape(self.sides[0])[1]
        self.smem_operands = [ctx.smem.operands.get(v) for v in self.sides]
        self.direct = self.smem_operands[0] is None and self._in_registers()
        # The right side lies in memory as its registers hold neighbours: by rows, or by columns. Elements of 8 bits
        # must lie by columns, since loads turn only pairs of bytes around.
        first = ctx.layout(self.sides[1]).registers[:1]
        self.turned = [bool(each and each.flipped) for each in self.smem_operands]
        if self.smem_operands[1] is None:
            self.turned[1] = self.each == 1 or first == ((0, 0),)
        self.homes = self._homes()

    def _in_registers(self) -> bool:
        """Whether the left side is in the registers that the instructions read."""
        left, threads = self.ctx.layout(self.sides[0]), self.ctx.team.threads
        own = all(form == make_mma_layout(form.shape, threads, True) for form in (left, self.layout))
        return own and self.each == 2 and has_enough_rows(left.shape[0], threads)

    def _homes(self) -> list[SmemSource | None]:
        """Where both sides lie; None for what is in registers.

        Rows and columns in the exchange are filled up to what one instruction takes: that is never looked at.
        """
        (rows, depth), columns = static_shape(self.sides[0]), static_shape(self.sides[1])[1]
        tall = 1 << max(bit_width(rows), 4)
        pitches = [row_pitch(self.each * n) for n in (depth, depth if self.turned[1] else columns)]
        offset = 0 if self.direct or self.smem_operands[0] else tall * pitches[0]
        more = 1 << max(bit_width(columns), 4) if self.turned[1] else depth
        end = offset if self.smem_operands[1] else offset + more * pitches[1] + -(-columns // 16) * 16 * self.each
        base = self.ctx.smem.allocator.exchange(end) if end else ""
        left, right = (ExchangedOperand(self.ctx, base, *at) for at in zip((0, offset), pitches, strict=True))
        return [None if self.direct else self.smem_operands[0] or left, self.smem_operands[1] or right]

    def put(self) -> None:
        """What does not lie in memory yet into the exchange."""
        ctx, each = self.ctx, self.each
        homes = [(v, home, turned) for v, home, turned in zip(self.sides, self.homes, self.turned, strict=True)]
        ours = [(v, home, turned) for v, home, turned in homes if isinstance(home, ExchangedOperand)]
        if ours and ctx.smem.hazards.exchange(WRITE):
            ctx.team.synchronise()
        for v, home, turned in ours:
            steps = (each, home.pitch) if turned else (home.pitch, each)
            for run in plan_exchange_accesses(ctx, self.dtype, ctx.layout(v), home.base, once=True, steps=steps):
                moved = VectorAccess(run.first, run.count, run.address, run.offset + home.offset, run.guards)
                packing.store_elements(
                    self.text, "shared", self.dtype, moved, ctx.values[v][run.first : run.first + run.count]
                )
        if ours and ctx.smem.hazards.exchange(READ):
            ctx.team.synchronise()

    def run(self) -> None:
        """The sums: for each 16 steps of the shared axis what the warp needs of both sides, then all products of it."""
        kind = register_class(self.wide)
        zero = packing.zero_literal(kind)
        given = self.ctx.values[self.node.args[0]] if len(self.node.args) > 2 else (zero,) * self.layout.count
        self.sums = [self.text.let(f"mov.{kind}", kind, x) for x in given]
        places = {offset: i for i, offset in enumerate(self.layout.offsets)}
        down = sorted({m - m % MMA_ROWS for m, _ in places})
        across = sorted({n - n % MMA_COLUMNS for _, n in places})
        left, right = (self._own(home, lanes) for home, lanes in zip(self.homes, self._lanes(), strict=True))
        for k in range(0, self.depth, self.step):
            a = {m: self._rows(left, m, k) for m in down}
            b = self._columns(right, across, k)
            for m in down:
                for n in across:
                    self._multiply(places, m, n, a[m], b[n])

    def _own(self, home: SmemSource | None, lanes: DistributedLayout) -> str:
        return home.thread_address(lanes, LDMATRIX_BYTES) if home is not None else ""

    def _multiply(self, places: dict[tuple[int, ...], int], m: int, n: int, a: list[str], b: list[str]) -> None:
        kind = register_class(self.wide)
        spots = [places.get((m + down, n + across)) for down in (0, 8) for across in (0, 1)]
        d = [
            self.sums[i] if i is not None else self.text.let(f"mov.{kind}", kind, packing.zero_literal(kind))
            for i in spots
        ]
        sums, left, right = (f"{{{', '.join(each)}}}" for each in (d, a, b))
        deep, total, *types = mma_type_suffix(*self.held).split(".")
        form = ".".join([f"m16n8{deep}", "row.col", total, *types, total])
        self.text.do(f"mma.sync.aligned.{form}", sums, left, right, sums)

    def _rows(self, left: str, m: int, k: int) -> list[str]:
        """The left side's part for 16 rows: from memory, or from the registers that hold it already."""
        home, turned = self.homes[0], self.turned[0]
        if home is not None:
            row, place = (k, m) if turned else (m, k)
            return self._four(home.operand_at(left, row, place * self.each), ".trans" if turned else "")
        side = self.sides[0]
        held, index = self.ctx.values[side], self.ctx.layout(side).index
        spots = [(m + down, k + across) for across in (0, 8) for down in (0, 8)]
        # Rows that the block has not got are computed from others, and never looked at.
        pairs = [[held[index.get((r, c + n), index[m, c + n])] for n in (0, 1)] for r, c in spots]
        return [pack_halves(self.text, self.dtype, *pair) for pair in pairs]

    def _four(self, place: str, form: str) -> list[str]:
        """Four 8 by 8 matrices: the addresses of their rows come from the 32 threads."""
        found = [self.text.new("b32") for _ in range(4)]
        self.text.do(f"ldmatrix.sync.aligned.m8n8.x4{form}.shared.b16", f"{{{', '.join(found)}}}", place)
        return found

    def _columns(self, right: str, across: list[int], k: int) -> dict[int, list[str]]:
        """The right side's parts for each 8 columns, two at a time where two are neighbours."""
        found: dict[int, list[str]] = {}
        home, turned = self.homes[1], self.turned[1]
        assert home is not None
        for n in across:
            if n in found:
                continue
            row, place = (n, k) if turned else (k, n)
            four = self._four(home.operand_at(right, row, place * self.each), "" if turned else ".trans")
            found[n], second = four[:2], four[2:]
            if n + MMA_COLUMNS in across:
                found[n + MMA_COLUMNS] = second
        return found

    def _lanes(self) -> tuple[DistributedLayout, DistributedLayout]:
        """Which row each thread gives the address of, and which piece of 16 bytes along it, in either side."""
        down, across = ([b if b is not None and b[0] == axis else None for b in self._warps()] for axis in (0, 1))
        rows = bit_width(self.layout.shape[0])
        ours: list[LayoutBit | None] = [(0, p) if p < rows else None for p in range(4)]
        left = DistributedLayout((1 << max(rows, 4), 2), (), (*ours, (1, 0), *down))
        if self.turned[0]:
            turned = [None if b is None else (1, b[1] - 3) for b in down]
            left = DistributedLayout((16, 64), (), ((0, 0), (0, 1), (0, 2), (1, 0), (0, 3), *turned))
        two = self.layout.shape[1] > MMA_COLUMNS and (1, 3) in self.layout.registers
        if self.turned[1]:  # eight columns, the half of the 16 steps, eight more
            columns = [None if b is None else (0, b[1]) for b in across]
            more = (0, 3) if two else None
            return left, DistributedLayout((512, 2), (), ((0, 0), (0, 1), (0, 2), (1, 0), more, *columns))
        pieces = [None if b is None else (1, b[1] - 3) for b in across]
        return left, DistributedLayout((16, 64), (), ((0, 0), (0, 1), (0, 2), (0, 3), (1, 0) if two else None, *pieces))

    def _warps(self) -> tuple[LayoutBit | None, ...]:
        return self.layout.threads[LANE_BITS:]


# Matrix products: by the tensor cores where they take them, else by multiply-add.


@emission_rule(contractions.dot, matmul_accumulate)
def _(ctx: EmissionContext, node: Node) -> None:
    product = (MmaProduct if ctx.team.threads > 1 and uses_tensor_cores(node) else FmaProduct)(ctx, node)
    product.put()
    product.run()
    out = node.out.type
    assert isinstance(out, TensorType)
    sums = [wrap_integer(ctx.text, product.wide, x) for x in product.sums]
    ctx.values[node.out] = tuple(convert_for_storage(ctx.text, product.wide, out, x) for x in sums)

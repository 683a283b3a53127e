"""Matrix multiplication: tensor cores (mma.sync with ldmatrix) where they apply, otherwise fused multiply-add."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from tessera.codegen.ptx.context import EmissionContext, format_address
from tessera.codegen.ptx.layout import (
    LANE_BITS,
    DistributedLayout,
    LayoutBit,
    Sizes,
    ThreadTeam,
    bit_width,
    has_enough_rows,
    make_mma_layout,
)
from tessera.codegen.ptx.ops import (
    MMA_K_BYTES,
    MMA_OPERAND_TYPES,
    matmul_accumulate,
    mma_type_suffix,
    uses_double_mma,
    uses_split_mma,
    uses_tensor_cores,
)
from tessera.codegen.ptx.passes.layout_inference import static_shape
from tessera.codegen.ptx.passes.shared_memory import READ, WRITE
from tessera.codegen.ptx.table import emission_rule
from tessera.codegen.ptx.table.blocks import block_access
from tessera.codegen.ptx.table.blocks.block_access import pack_halves
from tessera.codegen.ptx.table.blocks.fma_product import FmaProduct, store_shifted
from tessera.codegen.ptx.table.blocks.fragment_products import (
    MMA_COLUMNS,
    MMA_ROWS,
    DoubleMmaProduct,
    SplitMmaProduct,
)
from tessera.codegen.ptx.table.blocks.layout_conversion import plan_exchange_accesses, synchronise_exchange
from tessera.codegen.ptx.table.scalars.arithmetic import convert_for_storage
from tessera.codegen.ptx.table.scalars.math_functions import wrap_integer
from tessera.codegen.ptx.text.builder import element_bytes, register_class
from tessera.core.types import TensorType
from tessera.ir.core import Node
from tessera.ops.tensor import contractions


@emission_rule(contractions.dot, matmul_accumulate)
def _(ctx: EmissionContext, node: Node) -> None:
    product = _choose_engine(ctx, node)(ctx, node)
    product.store_operands()
    product.emit()
    out = node.out.type
    assert isinstance(out, TensorType)
    sums = [wrap_integer(ctx.text, product.accumulator_type, x) for x in product.sums]
    ctx.values[node.out] = tuple(convert_for_storage(ctx.text, product.accumulator_type, out, x) for x in sums)


def _choose_engine(ctx: EmissionContext, node: Node) -> type[MmaProduct] | type[FmaProduct]:
    if ctx.team.threads == 1:
        return FmaProduct
    return next((engine for fits, engine in ENGINES if fits(node)), FmaProduct)


ROW_PADDING = 16  # bytes after each row of the exchange buffer: eight consecutive rows are in different banks
LDMATRIX_BYTES = 16  # bytes along a row in one 8x8 matrix


class SmemSource(Protocol):
    """Shared memory that ldmatrix reads an operand from: the exchange buffer, or a slot (`SmemOperand`)."""

    def thread_address(self, layout: DistributedLayout, unit: int) -> str:
        """A thread's own address: `layout` maps threads to rows and, in units of `unit` bytes, to columns."""

    def operand_at(self, thread_address: str, row: int, byte: int) -> str:
        """The address operand of a byte at a distance from a thread's own address."""


@dataclass
class ExchangedOperand:
    """An operand in the exchange buffer, `offset` bytes after its begin, with `pitch` bytes from row to row."""

    team: ThreadTeam
    base: str
    offset: int
    pitch: int

    def thread_address(self, layout: DistributedLayout, unit: int) -> str:
        """A thread's own address, without the offset."""
        total = self.base
        for axis, stride in enumerate((self.pitch, unit)):
            index = self.team.thread_offset(layout, axis)
            if index != "0":
                scaled = self.team.hoist(("scaled", index, stride), "mul.lo.u32", "b32", index, stride)
                total = self.team.text.let("add.s32", "b32", total, scaled)
        return total

    def operand_at(self, thread_address: str, row: int, byte: int) -> str:
        """The address operand of a byte at a distance from a thread's own address."""
        return format_address(thread_address, self.offset + row * self.pitch + byte)


def row_pitch(count: int) -> int:
    """The bytes from row to row in the exchange buffer, for rows of `count` bytes."""
    return -(-count // (2 * ROW_PADDING)) * 2 * ROW_PADDING + ROW_PADDING


class MmaProduct:
    """A product by mma.sync: operands in shared memory, read by ldmatrix; the left one may be in registers."""

    def __init__(self, ctx: EmissionContext, node: Node) -> None:
        self.ctx, self.text, self.node = ctx, ctx.text, node
        self.operands = node.args[-2:]
        self.accumulator_type = self.operands[0].type.accumulate  # type: ignore[union-attr]
        self.layout = ctx.layout(node.out)
        self.dtypes = [MMA_OPERAND_TYPES[v.type.dtype] for v in self.operands]  # type: ignore[union-attr]
        self.size = element_bytes(self.dtypes[0])
        self.k_step = MMA_K_BYTES // self.size
        self.depth = static_shape(self.operands[0])[1]
        self.in_place = [ctx.smem.operands.get(v) for v in self.operands]
        self.left_in_registers = self.in_place[0] is None and self._has_left_fragments()
        # Whether each operand is stored transposed in shared memory. The right operand is stored in the order in which
        # its registers are contiguous; 8-bit elements always transposed, because ldmatrix.trans moves pairs of bytes.
        first_bit = ctx.layout(self.operands[1]).registers[:1]
        self.transposed = [bool(each and each.flipped) for each in self.in_place]
        if self.in_place[1] is None:
            self.transposed[1] = self.size == 1 or first_bit == ((0, 0),)
        self.sources = self._choose_sources()

    def _has_left_fragments(self) -> bool:
        """Whether the left operand has the register layout of an MMA fragment."""
        left, threads = self.ctx.layout(self.operands[0]), self.ctx.team.threads
        by_rows = all(form == make_mma_layout(form.shape, threads, True) for form in (left, self.layout))
        return by_rows and self.size == 2 and has_enough_rows(left.shape[0], threads)

    def _choose_sources(self) -> list[SmemSource | None]:
        """Where ldmatrix reads both operands; None for fragments in registers.

        In the exchange buffer rows and columns are padded to the size of one instruction.
        """
        (rows, depth), columns = static_shape(self.operands[0]), static_shape(self.operands[1])[1]
        padded_rows, padded_columns = (1 << max(bit_width(n), 4) for n in (rows, columns))
        pitches = [row_pitch(self.size * n) for n in (depth, depth if self.transposed[1] else padded_columns)]
        start = 0 if self.left_in_registers or self.in_place[0] else padded_rows * pitches[0]
        right_rows = padded_columns if self.transposed[1] else depth
        end = start if self.in_place[1] else start + right_rows * pitches[1] + -(-columns // 16) * 16 * self.size
        base, team = self.ctx.smem.allocator.reserve_exchange(end) if end else "", self.ctx.team
        left, right = (ExchangedOperand(team, base, *each) for each in zip((0, start), pitches, strict=True))
        return [None if self.left_in_registers else self.in_place[0] or left, self.in_place[1] or right]

    def store_operands(self) -> None:
        """Store the operands that are neither in place nor in registers to the exchange buffer."""
        ctx, size, dtype = self.ctx, self.size, self.dtypes[0]
        every = zip(self.operands, self.sources, self.transposed, strict=True)
        stored = [(v, source, turned) for v, source, turned in every if isinstance(source, ExchangedOperand)]
        if stored:
            synchronise_exchange(ctx, WRITE)
        for v, source, turned in stored:
            strides = (size, source.pitch) if turned else (source.pitch, size)
            layout = self._fill_matrices(ctx.layout(v), turned, v is self.operands[1])
            for access in plan_exchange_accesses(ctx, dtype, layout, source.base, once=True, strides=strides):
                store_shifted(ctx, dtype, access, source.offset, ctx.values[v], "shared")
        if stored:
            synchronise_exchange(ctx, READ)

    def _fill_matrices(self, layout: DistributedLayout, turned: bool, right: bool) -> DistributedLayout:
        """The layout with a block of whole 8x8 matrices: ldmatrix reads no element that was not stored.

        Of the right operand the warps read as many columns as the power of two that holds them.
        """
        units = (LDMATRIX_BYTES // self.size, 8) if turned else (8, LDMATRIX_BYTES // self.size)
        shape = [min(-(-n // unit) * unit, 1 << bit_width(n)) for n, unit in zip(layout.shape, units, strict=True)]
        if right:
            shape[1] = 1 << bit_width(layout.shape[1])
        return replace(layout, shape=tuple(shape))

    def emit(self) -> None:
        """Emit the MMAs: for each step along the reduction axis the fragments of both operands, then all products."""
        kind = register_class(self.accumulator_type)
        zeros = (block_access.zero_literal(kind),) * self.layout.count
        given = self.ctx.values[self.node.args[0]] if len(self.node.args) > 2 else zeros
        self.sums = [self.text.let(f"mov.{kind}", kind, x) for x in given]
        rows = sorted({m - m % MMA_ROWS for m, _ in self.layout.offsets})
        columns = sorted({n - n % MMA_COLUMNS for _, n in self.layout.offsets})
        left, right = (
            source.thread_address(lanes, LDMATRIX_BYTES) if source is not None else ""
            for source, lanes in zip(self.sources, self._make_lane_layouts(), strict=True)
        )
        for k in range(0, self.depth, self.k_step):
            a = {m: self._load_left(left, m, k) for m in rows}
            b = self._load_right(right, columns, k)
            for m in rows:
                for n in columns:
                    self._emit_mma(self.layout.index, m, n, a[m], b[n])

    def _emit_mma(self, index: Mapping[Sizes, int], m: int, n: int, a: list[str], b: list[str]) -> None:
        kind = register_class(self.accumulator_type)
        registers = [index.get((m + down, n + across)) for down in (0, 8) for across in (0, 1)]
        d = [
            self.sums[i] if i is not None else self.text.let(f"mov.{kind}", kind, block_access.zero_literal(kind))
            for i in registers
        ]
        sums, left, right = (f"{{{', '.join(each)}}}" for each in (d, a, b))
        depth, total, *types = mma_type_suffix(*self.dtypes).split(".")
        form = f"m16n8{depth}.row.col.{total}.{'.'.join(types)}.{total}"
        self.text.do(f"mma.sync.aligned.{form}", sums, left, right, sums)

    def _load_left(self, left: str, m: int, k: int) -> list[str]:
        """The left fragment of 16 rows."""
        source, transposed = self.sources[0], self.transposed[0]
        if source is not None:
            row, column = (k, m) if transposed else (m, k)
            return self._load_matrices(source.operand_at(left, row, column * self.size), transposed)
        operand = self.operands[0]
        held, index = self.ctx.values[operand], self.ctx.layout(operand).index
        corners = [(m + down, k + across) for across in (0, 8) for down in (0, 8)]
        # Rows beyond the block take any register: nothing reads their sums.
        pairs = [[held[index.get((r, c + n), index[m, c + n])] for n in (0, 1)] for r, c in corners]
        return [pack_halves(self.text, self.dtypes[0], *pair) for pair in pairs]

    def _load_matrices(self, address: str, transposed: bool) -> list[str]:
        """Four 8x8 matrices; each of the 32 threads gives the address of one row."""
        found = [self.text.new("b32") for _ in range(4)]
        form = f"ldmatrix.sync.aligned.m8n8.x4{'.trans' if transposed else ''}.shared.b16"
        self.text.do(form, f"{{{', '.join(found)}}}", address)
        return found

    def _load_right(self, right: str, columns: list[int], k: int) -> dict[int, list[str]]:
        """The right fragments by column, two neighbours with one ldmatrix."""
        found: dict[int, list[str]] = {}
        source, transposed = self.sources[1], self.transposed[1]
        assert source is not None
        for n in columns:
            if n in found:
                continue
            row, column = (n, k) if transposed else (k, n)
            four = self._load_matrices(source.operand_at(right, row, column * self.size), not transposed)
            found[n], second = four[:2], four[2:]
            if n + MMA_COLUMNS in columns:
                found[n + MMA_COLUMNS] = second
        return found

    def _make_lane_layouts(self) -> tuple[DistributedLayout, DistributedLayout]:
        """For each operand the row, and the 16-byte unit of it, whose address each thread gives to ldmatrix."""
        warps = self.layout.threads[LANE_BITS:]
        down, across = ([b if b is not None and b[0] == axis else None for b in warps] for axis in (0, 1))
        return self._make_left_lanes(down), self._make_right_lanes(across)

    def _make_left_lanes(self, warps: Sequence[LayoutBit | None]) -> DistributedLayout:
        if self.transposed[0]:
            units = [None if b is None else (1, b[1] - 3) for b in warps]
            return DistributedLayout((16, 64), (), ((0, 0), (0, 1), (0, 2), (1, 0), (0, 3), *units))
        rows = bit_width(self.layout.shape[0])
        lanes: list[LayoutBit | None] = [(0, p) if p < rows else None for p in range(4)]
        return DistributedLayout((1 << max(rows, 4), 2), (), (*lanes, (1, 0), *warps))

    def _make_right_lanes(self, warps: Sequence[LayoutBit | None]) -> DistributedLayout:
        two = self.layout.shape[1] > MMA_COLUMNS and (1, 3) in self.layout.registers
        if self.transposed[1]:  # eight columns, the half of the k step, eight more columns
            columns = [None if b is None else (0, b[1]) for b in warps]
            second = (0, 3) if two else None
            return DistributedLayout((512, 2), (), ((0, 0), (0, 1), (0, 2), (1, 0), second, *columns))
        units = [None if b is None else (1, b[1] - 3) for b in warps]
        lanes = ((0, 0), (0, 1), (0, 2), (0, 3), (1, 0) if two else None)
        return DistributedLayout((16, 64), (), (*lanes, *units))


ENGINES: tuple[tuple[Callable[[Node], bool], type[MmaProduct] | type[FmaProduct]], ...] = (
    (uses_tensor_cores, MmaProduct), (uses_double_mma, DoubleMmaProduct), (uses_split_mma, SplitMmaProduct),
)  # fmt: skip

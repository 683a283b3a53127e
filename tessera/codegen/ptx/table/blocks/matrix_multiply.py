"""Matrix multiplication: tensor cores (mma.sync with ldmatrix) where they apply, otherwise fused multiply-add."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from tessera.codegen.ptx.context import DOUBLE_PADDING, EmissionContext, VectorAccess, format_address
from tessera.codegen.ptx.layout import (
    DOUBLE_MMA,
    LANE_BITS,
    MMA_K_BYTES,
    MMA_OPERAND_TYPES,
    DistributedLayout,
    LayoutBit,
    Sizes,
    ThreadTeam,
    and_predicates,
    bit_width,
    has_enough_rows,
    make_mma_layout,
    mma_type_suffix,
    uses_double_mma,
    uses_tensor_cores,
)
from tessera.codegen.ptx.ops import matmul_accumulate
from tessera.codegen.ptx.passes.layout_inference import static_shape
from tessera.codegen.ptx.passes.shared_memory import READ, WRITE
from tessera.codegen.ptx.table import emission_rule
from tessera.codegen.ptx.table.blocks import block_access
from tessera.codegen.ptx.table.blocks.block_access import pack_halves
from tessera.codegen.ptx.table.blocks.layout_conversion import (
    emit_thread_address,
    exchange_space,
    plan_exchange_accesses,
    synchronise_exchange,
)
from tessera.codegen.ptx.table.scalars.arithmetic import convert, convert_for_storage
from tessera.codegen.ptx.table.scalars.math_functions import wrap_integer
from tessera.codegen.ptx.text.builder import element_bytes, ptx_type, register_class
from tessera.core.types import DType, TensorType
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
    return MmaProduct if uses_tensor_cores(node) else DoubleMmaProduct if uses_double_mma(node) else FmaProduct


FMA_UNROLL = 4
OPERAND_ALIGN = 16  # bytes of the largest access, too


class FmaProduct:
    """A product by multiply-add: both operands in the exchange buffer, a square of sums in each thread."""

    row_padding = OPERAND_ALIGN  # bytes after a row, so that neighbouring rows are in different banks

    def __init__(self, ctx: EmissionContext, node: Node) -> None:
        self.ctx, self.text, self.node = ctx, ctx.text, node
        a, b = self.operands = node.args[-2:]
        self.dtypes = [v.type.dtype for v in self.operands]  # type: ignore[union-attr]
        self.accumulator_type = a.type.accumulate  # type: ignore[union-attr]
        self.shapes = [ctx.layout(a).shape, ctx.layout(b).shape]
        self.held = held = [self._hold_shape(s) for s in self.shapes]
        self.strides = [
            _row_strides(s, element_bytes(d), self.row_padding) for s, d in zip(held, self.dtypes, strict=True)
        ]
        self.layout = ctx.layout(node.out)
        self.depth = self.shapes[0][-1]
        size = element_bytes(self.dtypes[0])  # of both
        self.in_place = [ctx.smem.operands.get(v) for v in self.operands]
        every = zip(self.strides, held, self.in_place, strict=True)
        bytes_ = [0 if source else s[0] * shape[0] for s, shape, source in every]
        self.base = ctx.smem.allocator.reserve_exchange(sum(bytes_)) if sum(bytes_) else ""
        self.starts = (0, bytes_[0])
        self.longest = 1 if ctx.smem.allocator.exchange_is_local else OPERAND_ALIGN // size  # elements of an access

    def _hold_shape(self, shape: Sizes) -> Sizes:
        """The shape of the memory that holds an operand of a shape."""
        return shape

    def store_operands(self) -> None:
        """Store the operands that are not in place to the exchange buffer."""
        ctx = self.ctx
        if all(self.in_place):
            return
        synchronise_exchange(ctx, WRITE)
        every = zip(self.operands, self.held, self.starts, self.dtypes, self.strides, strict=True)
        stored = [each for each, source in zip(every, self.in_place, strict=True) if not source]
        for v, held, start, dtype, strides in stored:
            layout = replace(ctx.layout(v), shape=held)
            for access in plan_exchange_accesses(ctx, dtype, layout, self.base, once=True, strides=strides):
                _store_shifted(ctx, dtype, access, start, ctx.values[v], exchange_space(ctx))
        synchronise_exchange(ctx, READ)

    def emit(self) -> None:
        """Emit the sums: a loop along the reduction axis, unrolled, and its remainder."""
        self.sums = self._initialise_sums()
        pointers = [self._make_pointer(0, -2), self._make_pointer(1, -1)]
        rounds = self.depth // FMA_UNROLL
        if rounds > 1:
            self._emit_loop(pointers, rounds)
        else:
            rounds = 0
        for k in range(self.depth - rounds * FMA_UNROLL):
            self._emit_steps(pointers, k, 1)

    def _initialise_sums(self) -> list[str]:
        """Registers that hold the initial accumulator."""
        kind = register_class(self.accumulator_type)
        given = self.ctx.values[self.node.args[0]] if len(self.node.args) > 2 else ()
        initial = given or (block_access.zero_literal(kind),) * self.layout.count
        return [self.text.let(f"mov.{kind}", kind, x) for x in initial]

    def _make_pointer(self, side: int, kept_axis: int) -> str:
        """A register with the address of the thread's first row of the left, or column of the right operand."""
        strides, rank = self.strides[side], len(self.strides[side])
        used = tuple(0 if axis >= rank - 2 and axis != rank + kept_axis else s for axis, s in enumerate(strides))
        total = emit_thread_address(self.ctx, self.layout, used, self.base)
        kind = "b64" if self.ctx.smem.allocator.exchange_is_local else "b32"
        return self.text.let(f"add.s{kind[1:]}", kind, total, self.starts[side])

    def _emit_loop(self, pointers: Sequence[str], rounds: int) -> None:
        text, head = self.text, self.text.new_label("dot")
        count = text.let("mov.u32", "b32", rounds)
        text.label(head)
        self._emit_steps(pointers, 0, FMA_UNROLL)
        form = "s64" if self.ctx.smem.allocator.exchange_is_local else "s32"
        for pointer, stride in zip(pointers, (self.strides[0][-1], self.strides[1][-2]), strict=True):
            text.do(f"add.{form}", pointer, pointer, FMA_UNROLL * stride)
        text.do("sub.s32", count, count, 1)
        text.do(f"bra {head}", guard=text.let("setp.ne.s32", "pred", count, 0))

    def _emit_steps(self, pointers: Sequence[str], first: int, count: int) -> None:
        """Indices of the reduction axis: columns of the left operand times rows of the right one."""
        row, column = len(self.layout.shape) - 2, len(self.layout.shape) - 1
        lefts = self._load_left(pointers[0], first, count)
        form = ptx_type(self.accumulator_type)
        multiply = "fma.rn" if self.accumulator_type.is_float else "mad.lo"
        for k, left in enumerate(lefts, first):
            right = self._load_right(pointers[1], k)
            for total, offset in zip(self.sums, self.layout.offsets, strict=True):
                a, b = left[offset[: row + 1]], right[offset[:row] + offset[column:]]
                self.text.do(f"{multiply}.{form}", total, a, b, total)

    def _load_left(self, pointer: str, first: int, count: int) -> list[dict[Sizes, str]]:
        """For each of `count` columns the elements of the left operand that the thread needs, by batch axes and row."""
        found: list[dict[Sizes, str]] = [{} for _ in range(count)]
        length = math.gcd(count, self.longest)
        for indices in self.layout.offsets:
            key = indices[:-1]
            if key in found[0]:
                continue
            for k in range(0, count, length):
                offset = sum(n * s for n, s in zip((*key, first + k), self.strides[0], strict=True))
                guard = self._make_guard(0, indices)
                for i, x in enumerate(self._load_run(0, pointer, offset, (guard,) * length)):
                    found[k + i][key] = x
        return found

    def _load_right(self, pointer: str, k: int) -> dict[Sizes, str]:
        """The elements of a row of the right operand that the thread needs, by batch axes and column."""
        found: dict[Sizes, str] = {}
        length = self._find_right_length()
        for indices in self.layout.offsets:
            key = (*indices[:-2], indices[-1])
            if key in found:
                continue
            offset = sum(n * s for n, s in zip((*key[:-1], k, key[-1]), self.strides[1], strict=True))
            guard = self._make_guard(1, indices)
            for i, x in enumerate(self._load_run(1, pointer, offset, (guard,) * length)):
                beside = *key[:-1], key[-1] + i
                found[beside] = x
        return found

    def _find_right_length(self) -> int:
        """The neighbouring columns that a thread holds, and one access loads: never columns after the block."""
        column, length = len(self.layout.shape) - 1, 1
        longest = math.gcd(self.layout.shape[column], self.longest)
        for place, bit in enumerate(self.layout.registers):
            if bit != (column, place) or length >= longest:
                break
            length *= 2
        return length

    def _make_guard(self, side: int, indices: Sizes) -> str:
        axes = (*range(len(indices) - 2), len(indices) - 2 + side)
        return and_predicates(self.text, *(self.ctx.team.axis_predicate(self.layout, a, indices[a]) for a in axes))

    def _load_run(self, side: int, pointer: str, offset: int, guards: tuple[str, ...]) -> list[str]:
        """Neighbouring elements of an operand, in the accumulation type."""
        access = VectorAccess(0, len(guards), pointer, offset, guards)
        held = block_access.load_elements(self.text, exchange_space(self.ctx), self.dtypes[side], access)
        return [convert(self.text, self.dtypes[side], self.accumulator_type, x) for x in held]


def _row_strides(shape: Sizes, size: int, padding: int) -> Sizes:
    """The bytes along each axis of an operand whose rows are whole accesses, with `padding` after them."""
    *outer, columns = shape
    pitch = -(-columns * size // OPERAND_ALIGN) * OPERAND_ALIGN + padding
    return (*(math.prod(outer[a + 1 :]) * pitch for a in range(len(outer))), size)


DOUBLE_BYTES = 8


class DoubleMmaProduct(FmaProduct):
    """A product of doubles by mma.sync, whose fragments are single elements in the exchange buffer or in a slot.

    (PTX ISA, "Matrix fragments for mma.m16n8k8" and "mma.m8n8k4" with .f64.)
    """

    row_padding = DOUBLE_PADDING

    def _hold_shape(self, shape: Sizes) -> Sizes:
        """Rows and columns up to those that fragments cover; nothing reads the sums of the added ones."""
        rows, columns = (1 << bit_width(n) for n in shape)
        return rows, columns

    def emit(self) -> None:
        """Emit the MMAs: for each step along the reduction axis the fragments of both operands, then all products."""
        self.sums = self._initialise_sums()
        rows = sorted({m - m % MMA_ROWS for m, _ in self.layout.offsets})
        columns = sorted({n - n % MMA_COLUMNS for _, n in self.layout.offsets})
        pointers = self._make_lane_pointers()
        step = DOUBLE_MMA[2]
        for k in range(0, self.depth, step):
            a = {m: [self._load(0, pointers[0], m + 8 * i, k + 4 * j) for j in (0, 1) for i in (0, 1)] for m in rows}
            b = {n: [self._load(1, pointers[1], k + 4 * j, n) for j in (0, 1)] for n in columns}
            for m in rows:
                for n in columns:
                    self._emit_mma(m, n, a[m], b[n])

    def _make_lane_pointers(self) -> list[str]:
        """The addresses of a thread's first elements: of its row and column of four for the left operand, and of its
        row of four and column for the right one; in a slot, their distance from its begin."""
        warps = self.layout.threads[LANE_BITS:]
        down, across = ([b if b is not None and b[0] == axis else None for b in warps] for axis in (0, 1))
        held = [self._hold_shape(s) for s in self.shapes]
        left = DistributedLayout(held[0], (), ((1, 0), (1, 1), (0, 0), (0, 1), (0, 2), *down))
        right = DistributedLayout(held[1], (), ((0, 0), (0, 1), (1, 0), (1, 1), (1, 2), *across))
        return [self._make_lane_pointer(side, lanes) for side, lanes in enumerate((left, right))]

    def _make_lane_pointer(self, side: int, lanes: DistributedLayout) -> str:
        source = self.in_place[side]
        if source is not None:
            return source.thread_address(lanes.permuted((1, 0)) if source.flipped else lanes, DOUBLE_BYTES)
        address = emit_thread_address(self.ctx, lanes, self.strides[side], self.base)
        return self.text.let("add.s32", "b32", address, self.starts[side])

    def _load(self, side: int, pointer: str, row: int, column: int) -> str:
        source = self.in_place[side]
        if source is not None:
            row, column = (column, row) if source.flipped else (row, column)
            return self.text.let("ld.shared.f64", "f64", source.operand_at(pointer, row, column * DOUBLE_BYTES))
        (x,) = self._load_run(side, pointer, row * self.strides[side][0] + column * self.strides[side][1], ("",))
        return x

    def _emit_mma(self, m: int, n: int, a: list[str], b: list[str]) -> None:
        index = self.layout.index
        d = [self.sums[index[m + down, n + across]] for down in (0, 8) for across in (0, 1)]
        if self.ctx.entry.arch == "sm_80":  # eight rows and four elements of the contraction at a time
            for half in (0, 1):
                for j in (0, 1):
                    self._do_mma("m8n8k4", d[2 * half : 2 * half + 2], [a[2 * j + half]], [b[j]])
        else:
            self._do_mma("m16n8k8", d, a, b)

    def _do_mma(self, size: str, *registers: list[str]) -> None:
        sums, left, right = (f"{{{', '.join(each)}}}" for each in registers)
        self.text.do(f"mma.sync.aligned.{size}.row.col.f64.f64.f64.f64", sums, left, right, sums)


def _store_shifted(
    ctx: EmissionContext, dtype: DType, access: VectorAccess, shift: int, held: Sequence[str], space: str
) -> None:
    """Make a planned store `shift` bytes further on."""
    moved = VectorAccess(access.first, access.count, access.address, access.offset + shift, access.guards)
    block_access.store_elements(ctx.text, space, dtype, moved, held[access.first : access.first + access.count])


ROW_PADDING = 16  # bytes after each row of the exchange buffer: eight consecutive rows are in different banks
LDMATRIX_BYTES = 16  # bytes along a row in one 8x8 matrix
MMA_ROWS, MMA_COLUMNS = 16, 8  # of one instruction's accumulator


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
                _store_shifted(ctx, dtype, access, source.offset, ctx.values[v], "shared")
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

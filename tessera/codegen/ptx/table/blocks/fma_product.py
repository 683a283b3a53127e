"""Products by fused multiply-add: both operands in shared memory, a square of sums in each thread."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

from tessera.codegen.ptx.context import EmissionContext, VectorAccess
from tessera.codegen.ptx.layout import Sizes, and_predicates
from tessera.codegen.ptx.passes.shared_memory import READ, WRITE
from tessera.codegen.ptx.table.blocks import block_access
from tessera.codegen.ptx.table.blocks.layout_conversion import (
    emit_thread_address,
    exchange_space,
    plan_exchange_accesses,
    synchronise_exchange,
)
from tessera.codegen.ptx.table.scalars.arithmetic import convert
from tessera.codegen.ptx.text.builder import element_bytes, ptx_type, register_class
from tessera.core.types import DType
from tessera.ir.core import Node

FMA_UNROLL = 4
OPERAND_ALIGN = 16  # bytes of the largest access, too


class FmaProduct:
    """A product by multiply-add: operands in slots or in the exchange buffer, a square of sums in each thread."""

    row_paddings = (OPERAND_ALIGN, OPERAND_ALIGN)  # bytes after a row: neighbouring rows are in different banks

    def __init__(self, ctx: EmissionContext, node: Node) -> None:
        self.ctx, self.text, self.node = ctx, ctx.text, node
        a, b = self.operands = node.args[-2:]
        self.dtypes = [v.type.dtype for v in self.operands]  # type: ignore[union-attr]
        self.accumulator_type = a.type.accumulate  # type: ignore[union-attr]
        self.shapes = [ctx.layout(a).shape, ctx.layout(b).shape]
        self.held = held = [self._hold_shape(s) for s in self.shapes]
        self.layout = ctx.layout(node.out)
        self.given: Sequence[str] = ctx.values[node.args[0]] if len(node.args) > 2 else ()
        self.depth = self.shapes[0][-1]
        self.size = size = element_bytes(self.dtypes[0])  # of both
        self.places = self.layout.offsets  # whose sums are computed
        self.in_place = [ctx.smem.operands.get(v) for v in self.operands]
        self.stored = self._find_stored()
        self.strides = [row_strides(s, size, pad) for s, pad in zip(held, self.row_paddings, strict=True)]
        every = zip(self.strides, held, self.stored, strict=True)
        bytes_ = [s[0] * shape[0] if stored else 0 for s, shape, stored in every]
        base = ctx.smem.allocator.reserve_exchange(sum(bytes_)) if sum(bytes_) else ""
        self.bases, self.starts = [base, base], [0, bytes_[0]]
        longest = 1 if ctx.smem.allocator.exchange_is_local else OPERAND_ALIGN // size
        self.longest = [longest, longest]  # elements of an access
        for side, source in enumerate(self.in_place):
            if source is not None:
                pitch = source.slots.rows.pitch
                self.strides[side] = (size, pitch) if source.flipped else (pitch, size)
                self.bases[side], self.starts[side] = source.base, 0
                self.longest[side] = 1 if source.flipped else longest

    def _hold_shape(self, shape: Sizes) -> Sizes:
        """The shape of the memory that holds an operand of a shape."""
        return shape

    def _find_stored(self) -> list[bool]:
        """Whether each operand is stored to the exchange buffer."""
        return [source is None for source in self.in_place]

    def store_operands(self) -> None:
        """Store the operands that are not in place to the exchange buffer."""
        ctx = self.ctx
        if not any(self.stored):
            return
        synchronise_exchange(ctx, WRITE)
        every = zip(self.operands, self.held, self.starts, self.dtypes, self.strides, self.bases, strict=True)
        for v, held, start, dtype, strides, base in itertools.compress(every, self.stored):
            layout = replace(ctx.layout(v), shape=held)
            for access in plan_exchange_accesses(ctx, dtype, layout, base, once=True, strides=strides):
                store_shifted(ctx, dtype, access, start, ctx.values[v], exchange_space(ctx))
        synchronise_exchange(ctx, READ)

    def emit(self) -> None:
        """Emit the sums: a loop along the reduction axis, unrolled, and its remainder."""
        self.sums = self._initialise_sums()
        pointers = [self._make_pointer(0, -2), self._make_pointer(1, -1)]
        rounds = self.depth // FMA_UNROLL
        if rounds > 1:
            self._emit_loop(pointers, rounds, FMA_UNROLL)
        else:
            rounds = 0
        for k in range(self.depth - rounds * FMA_UNROLL):
            self._emit_steps(pointers, k, 1)

    def _initialise_sums(self) -> list[str]:
        """Registers that hold the initial accumulator."""
        kind = register_class(self.accumulator_type)
        zero, index = block_access.zero_literal(kind), self.layout.index
        initial = [self.given[index[p]] if self.given else zero for p in self.places]
        return [self.text.let(f"mov.{kind}", kind, x) for x in initial]

    def _make_pointer(self, side: int, kept_axis: int) -> str:
        """A register with the address of the thread's first row of the left, or column of the right operand."""
        strides, rank = self.strides[side], len(self.strides[side])
        used = tuple(0 if axis >= rank - 2 and axis != rank + kept_axis else s for axis, s in enumerate(strides))
        total = emit_thread_address(self.ctx, self.layout, used, self.bases[side])
        kind = "b64" if self.ctx.smem.allocator.exchange_is_local else "b32"
        return self.text.let(f"add.s{kind[1:]}", kind, total, self.starts[side])

    def _emit_loop(self, pointers: Sequence[str], rounds: int, unrolled: int) -> None:
        text, head = self.text, self.text.new_label("dot")
        count = text.let("mov.u32", "b32", rounds)
        text.label(head)
        self._emit_round(pointers, unrolled)
        form = "s64" if self.ctx.smem.allocator.exchange_is_local else "s32"
        for pointer, stride in zip(pointers, (self.strides[0][-1], self.strides[1][-2]), strict=True):
            text.do(f"add.{form}", pointer, pointer, unrolled * stride)
        text.do("sub.s32", count, count, 1)
        text.do(f"bra {head}", guard=text.let("setp.ne.s32", "pred", count, 0))

    def _emit_round(self, pointers: Sequence[str], count: int) -> None:
        """One round of the loop along the reduction axis."""
        self._emit_steps(pointers, 0, count)

    def _emit_steps(self, pointers: Sequence[str], first: int, count: int) -> None:
        """Indices of the reduction axis: columns of the left operand times rows of the right one."""
        row, column = len(self.layout.shape) - 2, len(self.layout.shape) - 1
        lefts = self._load_left(pointers[0], first, count)
        form = ptx_type(self.accumulator_type)
        multiply = "fma.rn" if self.accumulator_type.is_float else "mad.lo"
        for k, left in enumerate(lefts, first):
            right = self._load_right(pointers[1], k)
            for total, offset in zip(self.sums, self.places, strict=True):
                a, b = left[offset[: row + 1]], right[offset[:row] + offset[column:]]
                self.text.do(f"{multiply}.{form}", total, a, b, total)

    def _load_left(self, pointer: str, first: int, count: int) -> list[dict[Sizes, str]]:
        """For each of `count` columns the elements of the left operand that the thread needs, by batch axes and row."""
        found: list[dict[Sizes, str]] = [{} for _ in range(count)]
        length = math.gcd(count, self.longest[0])
        for indices in self.places:
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
        for indices in self.places:
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
        longest = math.gcd(self.layout.shape[column], self.longest[1])
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


def row_strides(shape: Sizes, size: int, padding: int) -> Sizes:
    """The bytes along each axis of an operand whose rows are whole accesses, with `padding` after them."""
    *outer, columns = shape
    pitch = -(-columns * size // OPERAND_ALIGN) * OPERAND_ALIGN + padding
    return (*(math.prod(outer[a + 1 :]) * pitch for a in range(len(outer))), size)


def store_shifted(
    ctx: EmissionContext, dtype: DType, access: VectorAccess, shift: int, held: Sequence[str], space: str
) -> None:
    """Make a planned store `shift` bytes further on."""
    moved = VectorAccess(access.first, access.count, access.address, access.offset + shift, access.guards)
    block_access.store_elements(ctx.text, space, dtype, moved, held[access.first : access.first + access.count])

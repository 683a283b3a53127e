"""Block accesses: addresses of a block's elements in memory, and its vectorised, predicated loads and stores."""

from __future__ import annotations

from collections.abc import Sequence

from tessera.codegen.ptx.context import EmissionContext, Registers
from tessera.codegen.ptx.layout import DistributedLayout, Sizes, and_predicates
from tessera.codegen.ptx.table.scalars import conversion
from tessera.codegen.ptx.text.builder import element_bytes, is_immediate
from tessera.codegen.ptx.text.memref import VECTOR_BYTES, PtxMemRef, VectorAccess, find_vector_length
from tessera.core.symbolic_dim import Dim, Size, find_size_divisor
from tessera.ir.analysis import find_divisor
from tessera.ir.core import Value

MAX_OFFSET = 1 << 31  # the constant offset of an address operand has 32 bits


def plan_block_accesses(
    ctx: EmissionContext,
    m: PtxMemRef,
    starts: Sequence[Value],
    layout: DistributedLayout,
    clip: bool,
    masks: Sequence[str],
    once: bool,
) -> list[VectorAccess]:
    """The accesses that cover a block beginning at `starts`; with `once` a single thread accesses each element."""
    block = BlockAddress(ctx, m, starts, layout)
    guards = [_make_guard(ctx, block, i, clip, masks, once) for i in range(layout.count)]
    length = block.find_vector_length()
    accesses = []
    for first in range(0, layout.count, length):
        address, offset = block.locate(layout.offsets[first])
        accesses.append(VectorAccess(first, length, address, offset, tuple(guards[first : first + length])))
    return accesses


def _make_guard(ctx: EmissionContext, block: BlockAddress, i: int, clip: bool, masks: Sequence[str], once: bool) -> str:
    """The predicate of register `i`: inside the block and the memory, unmasked, and in the owning thread."""
    layout = block.layout
    found = ctx.team.bounds_predicates(layout, layout.offsets[i])
    if clip:
        found += block.clip_predicates(layout.offsets[i])
    owner = [ctx.team.owner_predicate(layout)] if once else []
    return block.and_cached((*owner, *found, *(masks[i : i + 1] if masks else ())))


class BlockAddress:
    """Address and bounds predicates of a block in memory; each is computed once."""

    def __init__(self, ctx: EmissionContext, m: PtxMemRef, starts: Sequence[Value], layout: DistributedLayout) -> None:
        self.ctx, self.m, self.starts, self.layout = ctx, m, starts, layout
        self._base = ""
        self._far_addresses: dict[Size, str] = {}
        self._clips: dict[tuple[int, int], str] = {}
        self._conjunctions: dict[tuple[str, ...], str] = {}
        self._unproven_axes = ctx.analyses.ranges.find_unproven_axes(starts, layout.shape, m.shape)

    def base(self) -> str:
        """The address of the thread's first element."""
        if not self._base:
            text, team = self.ctx.text, self.ctx.team
            total = self.m.base
            for v, stride in zip(self.starts, self.m.strides, strict=True):
                start = self.ctx.scalar_operand(v)
                if start != "0":
                    start = _widen_index(self.ctx, v, start)
                    total = text.let("mad.lo.s64", "b64", start, self.ctx.sizes.find(stride), total)
            for axis, stride in enumerate(self.m.strides):
                offset = team.thread_offset(self.layout, axis)
                if offset != "0":
                    scaled = self._scale_offset(offset, stride)
                    total = text.let("add.s64", "b64", total, scaled)
            self._base = total
        return self._base

    def _scale_offset(self, offset: str, stride: Size) -> str:
        team, key = self.ctx.team, ("offset", offset, stride)
        if not isinstance(stride, Dim):
            return team.hoist(key, "mul.wide.u32", "b64", offset, stride)
        step = self.ctx.sizes.find(stride)
        return team.hoist(key, "mul.lo.u64", "b64", team.hoist(("wide", offset), "cvt.u64.u32", "b64", offset), step)

    def locate(self, offset: Sizes) -> tuple[str, int]:
        """A register and a constant whose sum is the address of an element."""
        distance = sum(n * stride for n, stride in zip(offset, self.m.strides, strict=True))
        if not isinstance(distance, Dim) and distance < MAX_OFFSET:
            return self.base(), distance
        if distance not in self._far_addresses:
            step = self.ctx.sizes.find(distance)
            self._far_addresses[distance] = self.ctx.text.let("add.s64", "b64", self.base(), step)
        return self._far_addresses[distance], 0

    def find_vector_length(self) -> int:
        """The leading registers that hold neighbours in memory which one access can move."""
        count, rank = 0, len(self.m.shape)
        for i, bit in enumerate(self.layout.registers):
            if bit != (rank - 1, i):
                break
            count += 1
        most = min(1 << count, VECTOR_BYTES // element_bytes(self.m.dtype))
        return find_vector_length(self.ctx.analyses.producers, self.m, self.starts, self.layout.shape, most)

    def clip_predicates(self, offset: Sizes) -> list[str]:
        """The predicates that an element is inside the memory, along the axes where that is not proven."""
        return [self._clip(axis, offset[axis]) for axis in self._unproven_axes]

    def _clip(self, axis: int, offset: int) -> str:
        size = self.m.shape[axis]
        divisor = find_size_divisor(size, find_divisor(self.ctx.analyses.producers, self.starts[axis]))
        offset -= offset % (divisor & -divisor)  # neighbours share a predicate, as in `ThreadTeam.axis_predicate`
        if (axis, offset) not in self._clips:
            ctx, text = self.ctx, self.ctx.text
            index = _widen_index(ctx, self.starts[axis], ctx.scalar_operand(self.starts[axis]))
            thread = ctx.team.thread_offset(self.layout, axis)
            if thread != "0":
                index = text.let(
                    "add.s64", "b64", ctx.team.hoist(("wide", thread), "cvt.u64.u32", "b64", thread), index
                )
            if offset:
                index = text.let("add.s64", "b64", index, offset)
            if is_immediate(index):
                index = text.let("mov.b64", "b64", index)
            # Compared as unsigned numbers, negative indices are out of bounds too.
            self._clips[axis, offset] = text.let("setp.lt.u64", "pred", index, ctx.sizes.find(size))
        return self._clips[axis, offset]

    def and_cached(self, predicates: tuple[str, ...]) -> str:
        """The conjunction of predicates."""
        found = tuple(dict.fromkeys(p for p in predicates if p))
        if found not in self._conjunctions:
            self._conjunctions[found] = and_predicates(self.ctx.text, *found)
        return self._conjunctions[found]


def _widen_index(ctx: EmissionContext, v: Value, register: str) -> str:
    """An index as 64 bits."""
    if v.type.dtype.bits == 64 or is_immediate(register):
        return register
    return ctx.text.let(f"cvt.s64.{'u32' if v.type.dtype.kind == 'uint' else 's32'}", "b64", register)


def load_block(
    ctx: EmissionContext, m: PtxMemRef, accesses: Sequence[VectorAccess], others: Sequence[str] = ()
) -> Registers:
    """Load the elements of a block, one for each register; where a guard fails, the one of `others`, or 0."""
    found: list[str] = []
    for access in accesses:
        elements = conversion.load_elements(ctx.text, m.space, m.dtype, access)
        guarded = zip(elements, access.guards, others[access.first : access.first + access.count], strict=False)
        found += [_select_masked(ctx, m, x, g, o) for x, g, o in guarded] if others else elements
    return tuple(found)


def _select_masked(ctx: EmissionContext, m: PtxMemRef, x: str, guard: str, other: str) -> str:
    return conversion.select_register(ctx.text, m.dtype, guard, x, other) if guard else x


def store_block(ctx: EmissionContext, m: PtxMemRef, accesses: Sequence[VectorAccess], elements: Sequence[str]) -> None:
    """Store the elements of a block whose guards hold."""
    for access in accesses:
        values = elements[access.first : access.first + access.count]
        conversion.store_elements(ctx.text, m.space, m.dtype, access, values)

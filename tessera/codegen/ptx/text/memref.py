"""Memory references: addresses of blocks in memory, and vectorised, guarded accesses to them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tessera.codegen.ptx.layout import DistributedLayout, Sizes
from tessera.codegen.ptx.passes.index_analysis import find_divisor
from tessera.codegen.ptx.table.scalars import packing
from tessera.codegen.ptx.text.register_types import element_bytes, is_immediate
from tessera.codegen.ptx.text.thread_team import and_predicates
from tessera.core.types import DType
from tessera.ir.core import Node, Value

if TYPE_CHECKING:
    from tessera.codegen.ptx.emitter import PtxEmitter

VECTOR_BYTES = 16
MAX_OFFSET = 1 << 31  # offsets of an address are 32 bits wide


@dataclass(frozen=True)
class PtxMemRef:
    """Elements in row-major order at an address: a 64-bit register, a multiple of `align` bytes."""

    dtype: DType
    space: str
    base: str
    shape: Sizes
    align: int = VECTOR_BYTES

    @property
    def steps(self) -> Sizes:
        """The bytes from one element to the next along each axis."""
        return tuple(math.prod(self.shape[a + 1 :]) * element_bytes(self.dtype) for a in range(len(self.shape)))


def find_vector_length(
    producers: Mapping[Value, Node], m: PtxMemRef, starts: Sequence[Value], block: Sizes, most: int
) -> int:
    """How many neighbours along the last axis may be moved at once, up to `most`, wherever in a block they lie."""
    length = max(1, most)
    while length > 1 and not _is_aligned(producers, m, starts, block, length):
        length //= 2
    return length


def _is_aligned(
    producers: Mapping[Value, Node], m: PtxMemRef, starts: Sequence[Value], block: Sizes, length: int
) -> bool:
    each = element_bytes(m.dtype)
    *outer, (last, _, _) = zip(starts, (step // each for step in m.steps), block, strict=True)
    still = all(step % length == 0 or (n == 1 and find_divisor(producers, v) % length == 0) for v, step, n in outer)
    return still and m.align % (length * each) == 0 and find_divisor(producers, last) % length == 0


@dataclass(frozen=True)
class VectorAccess:
    """Neighbouring registers of a block that one instruction moves: the first, how many, the address of it, and the
    predicate of each element ("" : always)."""

    first: int
    count: int
    address: str
    offset: int
    guards: tuple[str, ...]

    @property
    def place(self) -> str:
        """The address as an operand."""
        return f"[{self.address}+{self.offset}]" if self.offset else f"[{self.address}]"


def plan_block_accesses(
    kernel: PtxEmitter,
    m: PtxMemRef,
    starts: Sequence[Value],
    layout: DistributedLayout,
    clip: bool,
    masks: Sequence[str],
    once: bool,
) -> list[VectorAccess]:
    """The runs that make up a block that begins at `starts`; `once` asks for one thread an element."""
    place = BlockAddress(kernel, m, starts, layout)
    guards = [_access_guard(kernel, place, layout, i, clip, masks, once) for i in range(layout.count)]
    length = place.neighbours()
    runs = []
    for first in range(0, layout.count, length):
        address, offset = place.address(layout.offsets[first])
        runs.append(VectorAccess(first, length, address, offset, tuple(guards[first : first + length])))
    return runs


def _access_guard(
    kernel: PtxEmitter,
    place: BlockAddress,
    layout: DistributedLayout,
    i: int,
    clip: bool,
    masks: Sequence[str],
    once: bool,
) -> str:
    found = kernel.team.inside(layout, layout.offsets[i])
    if clip:
        found += place.clipped(layout.offsets[i])
    owner = [kernel.team.owner(layout)] if once else []
    return place.joined((*owner, *found, *(masks[i : i + 1] if masks else ())))


class BlockAddress:
    """Where a block lies in memory, as registers."""

    def __init__(self, kernel: PtxEmitter, m: PtxMemRef, starts: Sequence[Value], layout: DistributedLayout) -> None:
        self.kernel, self.m, self.starts, self.layout = kernel, m, starts, layout
        self._base = ""
        self._far: dict[int, str] = {}
        self._clips: dict[tuple[int, int], str] = {}
        self._joined: dict[tuple[str, ...], str] = {}
        self._loose = kernel.ranges.find_unproven_axes(starts, layout.shape, m.shape)

    def base(self) -> str:
        """The address of the thread's first element."""
        if not self._base:
            text, team = self.kernel.text, self.kernel.team
            total = self.m.base
            for v, step in zip(self.starts, self.m.steps, strict=True):
                start = self.kernel.scalar_operand(v)
                if start != "0":
                    start = _widen_index(self.kernel, v, start)
                    total = text.let("mad.lo.s64", "b64", start, step, total)
            for axis, step in enumerate(self.m.steps):
                place = team.place(self.layout, axis)
                if place != "0":
                    key = ("offset", place, step)
                    total = text.let("add.s64", "b64", total, team.once(key, "mul.wide.u32", "b64", place, step))
            self._base = total
        return self._base

    def address(self, offset: Sizes) -> tuple[str, int]:
        """A register and a constant whose sum is the address of an element."""
        count = sum(n * step for n, step in zip(offset, self.m.steps, strict=True))
        if count < MAX_OFFSET:
            return self.base(), count
        if count not in self._far:
            self._far[count] = self.kernel.text.let("add.s64", "b64", self.base(), count)
        return self._far[count], 0

    def neighbours(self) -> int:
        """How many registers from the first on hold neighbours in memory that may be moved at once."""
        count, rank = 0, len(self.m.shape)
        for i, bit in enumerate(self.layout.registers):
            if bit != (rank - 1, i):
                break
            count += 1
        most = min(1 << count, VECTOR_BYTES // element_bytes(self.m.dtype))
        return find_vector_length(self.kernel.producers, self.m, self.starts, self.layout.shape, most)

    def clipped(self, offset: Sizes) -> list[str]:
        """The predicates that an element lies inside the memory."""
        return [self._clip(axis, offset[axis]) for axis in self._loose]

    def _clip(self, axis: int, offset: int) -> str:
        whole = math.gcd(self.m.shape[axis], find_divisor(self.kernel.producers, self.starts[axis]))
        offset -= offset % (whole & -whole)  # neighbours share a predicate, as in `Team.within`
        if (axis, offset) not in self._clips:
            kernel, text = self.kernel, self.kernel.text
            start = _widen_index(kernel, self.starts[axis], kernel.scalar_operand(self.starts[axis]))
            place = kernel.team.place(self.layout, axis)
            if place != "0":
                far = kernel.team.once(("wide", place), "cvt.u64.u32", "b64", place)
                start = text.let("add.s64", "b64", far, start)
            if offset:
                start = text.let("add.s64", "b64", start, offset)
            if is_immediate(start):
                start = text.let("mov.b64", "b64", start)
            # As unsigned numbers places before the begin are large ones.
            self._clips[axis, offset] = text.let("setp.lt.u64", "pred", start, self.m.shape[axis])
        return self._clips[axis, offset]

    def joined(self, predicates: tuple[str, ...]) -> str:
        """Whether all of these hold."""
        found = tuple(dict.fromkeys(p for p in predicates if p))
        if found not in self._joined:
            self._joined[found] = and_predicates(self.kernel.text, *found)
        return self._joined[found]


def _widen_index(kernel: PtxEmitter, v: Value, register: str) -> str:
    """An index as 64 bits."""
    if v.type.dtype.bits == 64 or is_immediate(register):
        return register
    return kernel.text.let(f"cvt.s64.{'u32' if v.type.dtype.kind == 'uint' else 's32'}", "b64", register)


def load_block(
    kernel: PtxEmitter, m: PtxMemRef, runs: Sequence[VectorAccess], others: Sequence[str] = ()
) -> tuple[str, ...]:
    """The elements of a block, one for each register; where a guard fails those of `others`, or 0."""
    found: list[str] = []
    for run in runs:
        elements = packing.load_elements(kernel.text, m.space, m.dtype, run)
        guarded = zip(elements, run.guards, others[run.first : run.first + run.count], strict=False)
        found += [_select_masked(kernel, m, x, g, o) for x, g, o in guarded] if others else elements
    return tuple(found)


def _select_masked(kernel: PtxEmitter, m: PtxMemRef, x: str, guard: str, other: str) -> str:
    return packing.select_register(kernel.text, m.dtype, guard, x, other) if guard else x


def store_block(kernel: PtxEmitter, m: PtxMemRef, runs: Sequence[VectorAccess], elements: Sequence[str]) -> None:
    """Store the elements of a block, where their guards hold."""
    for run in runs:
        packing.store_elements(kernel.text, m.space, m.dtype, run, elements[run.first : run.first + run.count])

"""Memory references: row-major buffers, vectorised accesses, and swizzled rows of shared memory for ldmatrix.

ldmatrix reads eight rows at once; these must be in different banks. Where a row's bytes are a power of two, the last
bits of the row's number swizzle the 16-byte units within the row; other rows are padded by one unit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tessera.codegen.ptx.layout import DistributedLayout, Sizes, ThreadTeam, bit_width
from tessera.codegen.ptx.text.builder import element_bytes
from tessera.core.symbolic_dim import Size
from tessera.core.types import DType
from tessera.ir.analysis import find_divisor
from tessera.ir.core import Node, Value

VECTOR_BYTES = 16  # the widest load or store of one thread


@dataclass(frozen=True)
class PtxMemRef:
    """A row-major buffer: `base` is a 64-bit register whose address is a multiple of `align` bytes."""

    dtype: DType
    space: str
    base: str
    shape: tuple[Size, ...]
    align: int = VECTOR_BYTES

    @property
    def strides(self) -> tuple[Size, ...]:
        """The bytes from one element to the next along each axis."""
        return tuple(math.prod(self.shape[a + 1 :]) * element_bytes(self.dtype) for a in range(len(self.shape)))


def find_vector_length(
    producers: Mapping[Value, Node], m: PtxMemRef, starts: Sequence[Value], block: Sizes, most: int
) -> int:
    """The elements along the last axis, at most `most`, that one aligned access can move anywhere in the block."""
    length = max(1, most)
    while length > 1 and not _is_aligned(producers, m, starts, block, length):
        length //= 2
    return length


def _is_aligned(
    producers: Mapping[Value, Node], m: PtxMemRef, starts: Sequence[Value], block: Sizes, length: int
) -> bool:
    size = element_bytes(m.dtype)
    *outer, (last, _, _) = zip(starts, (stride // size for stride in m.strides), block, strict=True)
    aligned = all(
        stride % length == 0 or (n == 1 and find_divisor(producers, v) % length == 0) for v, stride, n in outer
    )
    return aligned and m.align % (length * size) == 0 and find_divisor(producers, last) % length == 0


@dataclass(frozen=True)
class VectorAccess:
    """One load or store of `count` neighbouring registers of a block, from register `first` on.

    `guards` holds the predicate of each element; "" means that the element is always accessed.
    """

    first: int
    count: int
    address: str
    offset: int
    guards: tuple[str, ...]

    @property
    def operand(self) -> str:
        """The address as an operand."""
        return format_address(self.address, self.offset)


def format_address(register: str, offset: int) -> str:
    """An address operand.

    >>> format_address("%x1", 16), format_address("%x1", 0)
    ('[%x1+16]', '[%x1]')
    """
    return f"[{register}+{offset}]" if offset else f"[{register}]"


SWIZZLE_UNIT = 16  # bytes that a swizzle moves together
BANK_BYTES = 128  # bytes of one row of all shared memory banks


@dataclass(frozen=True)
class SwizzledRows:
    """Rows in shared memory: the bytes from one row to the next, and the swizzle of row r: `r >> shift & mask`."""

    pitch: int
    shift: int = 0
    mask: int = 0

    def swizzle(self, row: int) -> int:
        """The number that a byte's offset within a row is XORed with."""
        return (row >> self.shift & self.mask) * SWIZZLE_UNIT

    def split_offset(self, row: int, byte: int) -> tuple[int, int]:
        """The distance of a byte from a thread's first one: the part XORed to the address, and the part added."""
        within = BANK_BYTES - 1 if self.mask else 0
        return byte & within ^ self.swizzle(row), row * self.pitch + (byte & ~within)


def choose_row_layout(count: int) -> SwizzledRows:
    """The layout of rows of `count` bytes, a multiple of two swizzle units.

    >>> choose_row_layout(128), choose_row_layout(64), choose_row_layout(96)
    (SwizzledRows(pitch=128, shift=0, mask=7), SwizzledRows(pitch=64, shift=1, mask=3), SwizzledRows(pitch=112,
    shift=0, mask=0))
    """
    if count & (count - 1):
        return SwizzledRows(count + SWIZZLE_UNIT)
    bits = min(bit_width(count // SWIZZLE_UNIT), 3)
    return SwizzledRows(count, 3 - bits, (1 << bits) - 1)


@dataclass(frozen=True)
class SmemSlots:
    """The staging buffers of one `smem_slots`."""

    base: str  # a 32-bit address
    slot_bytes: int
    rows: SwizzledRows
    element_bytes: int


@dataclass
class SmemOperand:
    """A block in one staging buffer; each address in it is computed once."""

    team: ThreadTeam
    slots: SmemSlots
    base: str
    flipped: bool = False
    _addresses: dict[tuple[str, int], str] = field(default_factory=dict)

    def operand_at(self, thread_address: str, row: int, byte: int) -> str:
        """The address operand of a byte at a distance from a thread's own first byte."""
        return format_address(*self.locate(thread_address, row, byte))

    def locate(self, thread_address: str, row: int, byte: int) -> tuple[str, int]:
        """The same address as a register and a constant."""
        swizzled, added = self.slots.rows.split_offset(row, byte)
        text, known = self.team.text, self._addresses
        if (thread_address, 0) not in known:
            start = text.let("add.u32", "b32", self.base, thread_address) if thread_address != "0" else self.base
            known[thread_address, 0] = start
        if (thread_address, swizzled) not in known:
            known[thread_address, swizzled] = text.let("xor.b32", "b32", known[thread_address, 0], swizzled)
        return known[thread_address, swizzled], added

    def thread_address(self, layout: DistributedLayout, unit: int) -> str:
        """A thread's offset in a slot: `layout` maps threads to rows and, in units of `unit` bytes, to columns."""
        team, rows = self.team, self.slots.rows
        row, column = (team.thread_offset(layout, axis) for axis in (0, 1))
        key = ("slot", row, column, unit, rows)
        byte = team.hoist((*key, "byte"), "mul.lo.u32", "b32", column, unit) if column != "0" else "0"
        if row == "0":
            return byte
        if rows.mask:
            bits = team.hoist((*key, "bits"), "bfe.u32", "b32", row, rows.shift, rows.mask.bit_length())
            swizzle = team.hoist((*key, "swizzle"), "shl.b32", "b32", bits, bit_width(SWIZZLE_UNIT))
            byte = team.hoist((*key, "swizzled"), "xor.b32", "b32", byte, swizzle)
        return team.hoist((*key, "address"), "mad.lo.u32", "b32", row, rows.pitch, byte)

"""Blocks in slots of shared memory as ldmatrix reads them, and where their pieces of 16 bytes lie.

Eight rows that are read at once must lie in different banks: pieces change places within a row by the row's last bits
where rows are a power of two of bytes; else rows are longer than they need be.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tessera.codegen.ptx.layout import Layout, width
from tessera.codegen.ptx.memory import Memory, Run
from tessera.codegen.ptx.ops import lying, slots
from tessera.codegen.ptx.room import SHARED
from tessera.codegen.ptx.scalars import words
from tessera.codegen.ptx.team import both
from tessera.codegen.ptx.types import size
from tessera.codegen.ptx.visit import visit
from tessera.ir.core import Node, Value

if TYPE_CHECKING:
    from tessera.codegen.ptx.kernel import Kernel

PIECE = 16  # bytes
SPAN = 128  # bytes of all banks
ALIGN = 128


@dataclass(frozen=True)
class Rows:
    """How rows lie: the bytes from one to the next, and the pieces of row r swapped by `r >> shift & mask`."""

    pitch: int
    shift: int = 0
    mask: int = 0

    def turn(self, row: int) -> int:
        """What the byte within a row is changed by (exclusive or)."""
        return (row >> self.shift & self.mask) * PIECE

    def apart(self, row: int, byte: int) -> tuple[int, int]:
        """The place of a byte so far from a thread's first one: what is exclusive-or-ed to its address, then added."""
        within = SPAN - 1 if self.mask else 0
        return byte & within ^ self.turn(row), row * self.pitch + (byte & ~within)


def rows_of(count: int) -> Rows:
    """Rows of so many bytes, a multiple of two pieces.

    >>> rows_of(128), rows_of(64), rows_of(96)
    (Rows(pitch=128, shift=0, mask=7), Rows(pitch=64, shift=1, mask=3), Rows(pitch=112, shift=0, mask=0))
    """
    if count & (count - 1):
        return Rows(count + PIECE)
    bits = min(width(count // PIECE), 3)
    return Rows(count, 3 - bits, (1 << bits) - 1)


@dataclass(frozen=True)
class Slots:
    """The slots of one `slots`: a 32-bit address, the bytes of each, and how their rows lie."""

    base: str
    each: int
    rows: Rows
    bytes: int  # of an element


@visit(slots)
def _(kernel: Kernel, node: Node) -> None:
    text, dtype = kernel.text, node.attrs["dtype"]
    shape = tuple(int(n) for n in node.attrs["shape"])
    count, height, columns = shape[0], math.prod(shape[1:-1]), shape[-1]
    rows = rows_of(columns * size(dtype)) if node.attrs["swizzled"] else Rows(columns * size(dtype))
    offset = kernel.room.shared(count * height * rows.pitch, ALIGN)
    with text.first():
        base = text.let("add.u32", "b32", text.let("mov.u32", "b32", SHARED), offset)
        wide = text.let("cvt.u64.u32", "b64", base)
    kernel.slots[node.out] = Slots(base, height * rows.pitch, rows, size(dtype))
    if not node.attrs["swizzled"]:
        kernel.memories[node.out] = Memory(dtype, "shared", wide, shape)


@visit(lying)
def _(kernel, node):
    held = kernel.slots[node.args[0]]
    base = slot_address(kernel, held, kernel.one(node.args[1]))
    kernel.lying[node.out] = Lying(kernel, held, base, node.attrs["flipped"])
    kernel.values[node.out] = ()


def slot_address(kernel: Kernel, held: Slots, slot: str) -> str:
    """The address of a slot."""
    if not slot.startswith("%"):
        return kernel.text.let("add.u32", "b32", held.base, int(slot) * held.each)
    narrow = kernel.text.let("cvt.u32.u64", "b32", slot)
    return kernel.text.let("mad.lo.u32", "b32", narrow, held.each, held.base)


@dataclass
class Lying:
    """One slot under emission: addresses in it, each computed once."""

    kernel: Kernel
    slots: Slots
    base: str
    flipped: bool = False
    _known: dict[tuple[str, int], str] = field(default_factory=dict)

    def at(self, own: str, row: int, byte: int) -> str:
        """The place of a byte so far from a thread's own, as an operand."""
        address, more = self.place(own, row, byte)
        return f"[{address}+{more}]" if more else f"[{address}]"

    def place(self, own: str, row: int, byte: int) -> tuple[str, int]:
        """The same as a register and a number to add."""
        turned, more = self.slots.rows.apart(row, byte)
        text = self.kernel.text
        if (own, 0) not in self._known:
            self._known[own, 0] = text.let("add.u32", "b32", self.base, own) if own != "0" else self.base
        if (own, turned) not in self._known:
            self._known[own, turned] = text.let("xor.b32", "b32", self._known[own, 0], turned)
        return self._known[own, turned], more

    def own(self, layout: Layout, unit: int) -> str:
        """What a thread's place adds to a slot's address: `layout` gives its row and, times `unit`, its bytes."""
        team, rows = self.kernel.team, self.slots.rows
        row, place = (team.place(layout, axis) for axis in (0, 1))
        key = ("slot", row, place, unit, rows)
        byte = team.once((*key, "byte"), "mul.lo.u32", "b32", place, unit) if place != "0" else "0"
        if row == "0":
            return byte
        if rows.mask:
            turn = team.once((*key, "bits"), "bfe.u32", "b32", row, rows.shift, rows.mask.bit_length())
            turn = team.once((*key, "turn"), "shl.b32", "b32", turn, width(PIECE))
            byte = team.once((*key, "turned"), "xor.b32", "b32", byte, turn)
        return team.once((*key, "own"), "mad.lo.u32", "b32", row, rows.pitch, byte)


def as_rows(layout: Layout) -> Layout:
    """The layout of a block with at most one axis beside the last as one of rows."""
    found = layout.reshaped((math.prod(layout.shape[:-1]), layout.shape[-1]))
    assert found is not None
    return found


def put(kernel: Kernel, held: Slots, slot: str, value: Value) -> None:
    """Store a block of one slot's shape into a slot."""
    layout, dtype, team = kernel.layout(value), value.type.dtype, kernel.team  # type: ignore[union-attr]
    target = Lying(kernel, held, slot_address(kernel, held, slot))
    flat = as_rows(layout)
    own, length = target.own(flat, held.bytes), _neighbours(flat, PIECE // held.bytes)
    for first in range(0, flat.count, length):
        row, column = flat.offsets[first]
        guard = both(kernel.text, team.owner(flat), *team.inside(flat, (row, column)))
        address, more = target.place(own, row, column * held.bytes)
        run = Run(0, length, address, more, (guard,) * length)
        words.store(kernel.text, "shared", dtype, run, kernel.values[value][first : first + length])


def _neighbours(layout: Layout, most: int) -> int:
    """How many registers from the first on hold neighbours along a row, up to `most`, inside the block together."""
    length = 1
    for i, bit in enumerate(layout.registers):
        if bit != (1, i) or 2 * length > most or layout.shape[1] % (2 * length):
            break
        length *= 2
    return length

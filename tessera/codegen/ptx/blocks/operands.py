"""Where the sides of a product by tensor cores lie in shared memory: in the exchange, or in a slot (`slots.Lying`).

Both say where a thread's rows lie for ldmatrix; rows of the exchange are 16 bytes longer than they need be, so that
the eight rows that are read at once lie in different banks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from tessera.codegen.ptx.layout import Layout

if TYPE_CHECKING:
    from tessera.codegen.ptx.kernel import Kernel

GAP = 16  # bytes after each row
HALF = 16  # bytes of the shared axis in one of the matrices that are loaded


class Home(Protocol):
    """Memory that ldmatrix reads a side from."""

    def own(self, layout: Layout, unit: int) -> str:
        """What stands for a thread's own place: `layout` gives its row and, times `unit`, its bytes along that."""

    def at(self, own: str, row: int, byte: int) -> str:
        """The place of a byte so far from a thread's own, as an operand."""


@dataclass
class Exchanged:
    """A side in the exchange, `offset` bytes after its begin."""

    kernel: Kernel
    base: str
    offset: int
    pitch: int

    def own(self, layout: Layout, unit: int) -> str:
        """The address of a thread's own place, without the offset."""
        team = self.kernel.team
        total = self.base
        for axis, step in enumerate((self.pitch, unit)):
            place = team.place(layout, axis)
            if place != "0":
                part = team.once(("near", place, step), "mul.lo.u32", "b32", place, step)
                total = self.kernel.text.let("add.s32", "b32", total, part)
        return total

    def at(self, own: str, row: int, byte: int) -> str:
        """The place of a byte so far from a thread's own, as an operand."""
        more = self.offset + row * self.pitch + byte
        return f"[{own}+{more}]" if more else f"[{own}]"


def pitch(count: int) -> int:
    """The bytes from one row of so many bytes in the exchange to the next."""
    return -(-count // (2 * GAP)) * 2 * GAP + GAP

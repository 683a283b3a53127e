"""Where a program and a tile stand: ids, sizes, barriers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tessera.codegen.ptx.visit import visit
from tessera.ir.core import Node
from tessera.ops import tile

if TYPE_CHECKING:
    from tessera.codegen.ptx.kernel import Kernel

# The last axis of a grid varies fastest, as elements of an array do: it is the hardware's first.
AXES = "xyz"


@visit(tile.program_id)
def _(kernel: Kernel, node: Node) -> None:
    kernel.values[node.out] = (_special(kernel, "ctaid", node),)


@visit(tile.grid_size)
def _(kernel, node):
    kernel.values[node.out] = (_special(kernel, "nctaid", node),)


def _special(kernel: Kernel, name: str, node: Node) -> str:
    return _axis(kernel, name, node.attrs["axis"])


def _axis(kernel: Kernel, name: str, axis: int) -> str:
    """A special register as an index; an axis that the grid lacks has one program."""
    if kernel.persistent is not None:
        return kernel.persistent.place(axis) if name == "ctaid" else str(kernel.persistent.size(axis))
    if axis >= kernel.rank:
        return "0" if name == "ctaid" else "1"
    word = f"%{name}.{AXES[kernel.rank - 1 - axis]}"
    narrow = kernel.team.once((word,), "mov.u32", "b32", word)
    return kernel.team.once((word, "wide"), "cvt.u64.u32", "b64", narrow)


@visit(tile.local_id)
def _(kernel, node):
    alone = kernel.team.group == 1
    wide = "0" if alone else kernel.team.once(("thread",), "cvt.u64.u32", "b64", kernel.team.thread)
    kernel.values[node.out] = (wide,)


@visit(tile.group_size)
def _(kernel, node):
    kernel.values[node.out] = (str(kernel.team.group),)


@visit(tile.barrier)
def _(kernel, node):
    if kernel.team.block > 1:
        kernel.team.meet(kernel.text)


def program_number(kernel: Kernel) -> str:
    """This program's number in row-major order, as 64 bits."""
    total = "0"
    for axis in range(kernel.rank):
        place, count = _axis(kernel, "ctaid", axis), _axis(kernel, "nctaid", axis)
        total = place if total == "0" else kernel.text.let("mad.lo.s64", "b64", total, count, place)
    return total

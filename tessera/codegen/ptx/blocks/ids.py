"""Where a program and a tile stand: ids, sizes, barriers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tessera.codegen.ptx.visit import visit
from tessera.errors import UnsupportedOpError
from tessera.ir.core import Node
from tessera.ops import tile

if TYPE_CHECKING:
    from tessera.codegen.ptx.kernel import Kernel

# The last axis of a grid varies fastest, as elements of an array do: it is the hardware's first.
AXES = "xyz"
MOST = (1 << 16) - 1  # places along its other axes


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
    if kernel.folded:
        return _unfolded(kernel, axis) if name == "ctaid" else str(kernel.folded[axis])
    word = f"%{name}.{AXES[kernel.rank - 1 - axis]}"
    narrow = kernel.team.once((word,), "mov.u32", "b32", word)
    return kernel.team.once((word, "wide"), "cvt.u64.u32", "b64", narrow)


def _unfolded(kernel: Kernel, axis: int) -> str:
    """A place of a program that the hardware knows by its number alone."""
    once, size = kernel.team.once, kernel.folded[axis]
    number = once(("%ctaid.x",), "mov.u32", "b32", "%ctaid.x")
    after = math.prod(kernel.folded[axis + 1 :])
    place = once(("after", after), "div.u32", "b32", number, after) if after > 1 else number
    place = once(("place", axis), "rem.u32", "b32", place, size) if axis else place
    return once(("place", axis, "wide"), "cvt.u64.u32", "b64", place)


def folds(grids: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The grid whose programs the hardware is given by number, having fewer or smaller axes; else nothing.

    Raises:
        UnsupportedOpError: there are several such grids.
    """
    wide = [tuple(g) for g in grids if len(g) > len(AXES) or any(n > MOST for n in g[:-1])]
    if not wide:
        return ()
    if len({tuple(g) for g in grids}) > 1:
        raise UnsupportedOpError(
            f"a kernel launched over several grids, one of which is {wide[0]}",
            expected=f"grids of at most {len(AXES)} axes, all but the last of at most {MOST:,} programs; or only one",
        )
    return wide[0]


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


def program_count(kernel: Kernel) -> str:
    """How many programs the grid has, as 64 bits."""
    total = _axis(kernel, "nctaid", 0)
    for axis in range(1, kernel.rank):
        count = _axis(kernel, "nctaid", axis)
        total = kernel.team.once(("programs", axis), "mul.lo.s64", "b64", total, count)
    return total

"""Assertions: the first failure of each is kept in memory that whoever launches looks at. Prints there are none.

A failure is one number: the program's in row-major order, then the tile's in its group, then the element's in the
block. The least of all failures is kept, whatever the order in which threads run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tessera.codegen.ptx.access import spread_to
from tessera.codegen.ptx.exchange import row_major
from tessera.codegen.ptx.ids import program_number
from tessera.codegen.ptx.infer import sizes
from tessera.codegen.ptx.team import both
from tessera.codegen.ptx.visit import visit
from tessera.errors import UnsupportedOpError
from tessera.ir.core import Node
from tessera.ops import checks

if TYPE_CHECKING:
    from tessera.codegen.ptx.kernel import Kernel

TILE_BIT, PROGRAM_BIT = 22, 32  # where the tile's and the program's number begin


@visit(checks.assert_)
def _(kernel: Kernel, node: Node) -> None:
    text, team = kernel.text, kernel.team
    condition = node.args[0]
    layout = kernel.layout(condition)
    site = len(kernel.sites)
    kernel.sites.append(described(kernel, node))
    program = text.let("shl.b64", "b64", program_number(kernel), PROGRAM_BIT)
    if team.group > 1:
        tile = text.let("shl.b32", "b32", team.thread, TILE_BIT)
        program = text.let("or.b64", "b64", program, text.let("cvt.u64.u32", "b64", tile))
    steps = row_major(layout.shape, 1)
    first = "0"
    for axis, step in enumerate(steps):
        place = team.place(layout, axis)
        first = text.let("mad.lo.u32", "b32", place, step, first) if place != "0" else first
    for held, offset in zip(spread_to(kernel, condition, layout), layout.offsets, strict=True):
        wrong = text.let("not.pred", "pred", held)
        guard = both(text, wrong, team.owner(layout), *team.inside(layout, offset))
        number = text.let("add.u32", "b32", first, sum(n * s for n, s in zip(offset, steps, strict=True)))
        key = text.let("or.b64", "b64", program, text.let("cvt.u64.u32", "b64", number))
        old = text.new("b64")
        text.do("atom.global.min.u64", old, f"[{kernel.reports}+{8 * site}]", key, guard=guard)


def described(kernel: Kernel, node: Node) -> dict[str, Any]:
    """A place of the text in words that JSON can hold."""
    loc = node.loc
    return {
        "text": node.attrs["message"],
        "group": kernel.team.group,
        "place": [loc.file, loc.line, loc.column, loc.end_column],
        "shape": list(sizes(node.args[0])),
    }


@visit(checks.print_)
def _(kernel, node):
    raise UnsupportedOpError(
        "the target ptx has no tile.print", location=node.loc, expected="a kernel without it, or the interpreter",
        suggestion='run this kernel with target="interp", or put the line behind a constexpr of the kernel',
    )  # fmt: skip

"""Assertions: the first failure of each is kept in memory that whoever launches looks at.

A failure is one number: the program's in row-major order, then the tile's in its group, then the element's in the
block. The least of all failures is kept, whatever the order in which threads run. What stands beside the condition
there is in one of the records that each new least failure leaves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tessera.codegen.ptx.blocks.access import spread_to
from tessera.codegen.ptx.blocks.exchange import row_major
from tessera.codegen.ptx.blocks.ids import program_number
from tessera.codegen.ptx.passes.infer import sizes
from tessera.codegen.ptx.scalars.words import encoded, in_register
from tessera.codegen.ptx.team import both
from tessera.codegen.ptx.types import register_class, size
from tessera.codegen.ptx.visit import visit
from tessera.errors import UnsupportedOpError
from tessera.ir.core import Node, Value
from tessera.ops import checks, group, mbarrier, tile
from tessera.types import DType

if TYPE_CHECKING:
    from tessera.codegen.ptx.kernel import Kernel

TILE_BIT, PROGRAM_BIT = 22, 32  # where the tile's and the program's number begin
WORD = 8
MOST = 14  # values that are shown
RECORD = WORD * (2 + MOST)
ROOM = 512 * RECORD  # bytes of records, behind the word that counts them


@visit(checks.assert_)
def _(kernel: Kernel, node: Node) -> None:
    text, team = kernel.text, kernel.team
    condition, *values = node.args
    layout = kernel.layout(condition)
    shown = [v for v in values if _fits(sizes(v), layout.shape)][:MOST]
    site, found = kernel.extras.site("reports", described(node, team.group, shown))
    beside = [spread_to(kernel, v, layout) for v in shown]
    program = _tile_number(kernel)
    steps = row_major(layout.shape, 1)
    first = "0"
    for axis, step in enumerate(steps):
        place = team.place(layout, axis)
        first = text.let("mad.lo.u32", "b32", place, step, first) if place != "0" else first
    failed = []
    for i, (held, offset) in enumerate(zip(spread_to(kernel, condition, layout), layout.offsets, strict=True)):
        wrong = text.let("not.pred", "pred", held)
        failed.append(both(text, wrong, team.owner(layout), *team.inside(layout, offset)))
        number = text.let("add.u32", "b32", first, sum(n * s for n, s in zip(offset, steps, strict=True)))
        key = text.let("or.b64", "b64", program, text.let("cvt.u64.u32", "b64", number))
        old = text.let("mov.u64", "b64", 0)
        text.do("atom.global.min.u64", old, f"[{found}+{WORD * site}]", key, guard=failed[-1])
        if shown:  # of the least failure so far
            kept = [(v.type.dtype, registers[i]) for v, registers in zip(shown, beside, strict=True)]
            _keep(kernel, site, key, text.let("setp.lt.u64", "pred", key, old), kept)
    _end(kernel, failed)


def _fits(shape: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    """Whether a block has an element for each of another, or one for several."""
    ours = whole[len(whole) - len(shape) :]
    return len(shape) <= len(whole) and all(n in (1, m) for n, m in zip(shape, ours, strict=True))


def _tile_number(kernel: Kernel) -> str:
    """The program and the tile, where a failure's number has them."""
    text, team = kernel.text, kernel.team
    program = text.let("shl.b64", "b64", program_number(kernel), PROGRAM_BIT)
    if team.group == 1:
        return program
    tile = text.let("shl.b32", "b32", team.thread, TILE_BIT)
    return text.let("or.b64", "b64", program, text.let("cvt.u64.u32", "b64", tile))


def _keep(kernel: Kernel, site: int, key: str, guard: str, values: Sequence[tuple[DType, str]]) -> None:
    """What stands beside the condition at a failure, in a record of its own if there is room for one more."""
    text = kernel.text
    _, memory = kernel.extras.site("values", {})
    at = text.let("mov.u64", "b64", ROOM)
    text.do("atom.global.add.u64", at, f"[{memory}]", RECORD, guard=guard)
    some = text.let("setp.lt.u64", "pred", at, ROOM)
    record = text.let("add.s64", "b64", memory, at)
    for i, word in enumerate((key, site, *(_bits(kernel, dtype, x) for dtype, x in values))):
        text.do("st.global.u64", f"[{record}+{WORD * (i + 1)}]", word, guard=some)


def _bits(kernel: Kernel, dtype: DType, x: str) -> str:
    """An element in memory's form, at the low end of a word."""
    text = kernel.text
    if size(dtype) < WORD // 2:
        return text.let("cvt.u64.u32", "b64", in_register(text, "b32", encoded(text, dtype, [x])[0]))
    kind = register_class(dtype)
    bits = text.let(f"mov.b{size(dtype) * 8}", f"b{size(dtype) * 8}", in_register(text, kind, x))
    return bits if size(dtype) == WORD else text.let("cvt.u64.u32", "b64", bits)


def _end(kernel: Kernel, failed: Sequence[str]) -> None:
    """The end of a program that failed: of all its threads, or of a tile's own thread, unless others wait for it.

    Where threads work through several programs, or have different work, the program goes on.
    """
    text, team = kernel.text, kernel.team
    if kernel.persistent is not None or team.helpers or (team.group > 1 and _meets(kernel)):
        return
    total = failed[0]
    for each in failed[1:]:
        total = text.let("or.pred", "pred", total, each)
    if team.threads > 1:
        total = text.let("barrier.red.or.pred", "pred", 0, total)
        kernel.hazards.met()
    text.do(f"bra {kernel.end()}", guard=total)


def _meets(kernel: Kernel) -> bool:
    """Whether tiles of a group wait for each other."""
    waits = (tile.barrier, tile.grid_barrier, group.exchange, group.collect, group.meet, *mbarrier.OPS)
    return any(node.op in waits for node in kernel.function.body.walk())


def described(node: Node, group: int, shown: Sequence[Value]) -> dict[str, Any]:
    """A place of the text in words that JSON can hold."""
    loc = node.loc
    return {
        "text": node.attrs["message"],
        "group": group,
        "place": [loc.file, loc.line, loc.column, loc.end_column],
        "shape": list(sizes(node.args[0])),
        "values": [v.type.dtype.name for v in shown],  # type: ignore[union-attr]
    }


@visit(checks.line)
def _(kernel, node):
    """Nothing: a place for a debugger to stop at, which compiled code has no use for."""


@visit(checks.pause)
def _(kernel, node):
    raise UnsupportedOpError(
        "the target ptx does not stop in a debugger", location=node.loc,
        suggestion='run this kernel with target="interp", or take breakpoint() out',
    )  # fmt: skip

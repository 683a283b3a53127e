"""Prints: what a tile says is appended to memory that whoever launches prints, once all is done.

A record holds the number of the place in the text and the tile's in its group, the program's number, the rounds of the
loops around the place, and the operands in row-major order. The head of the memory says how many bytes are wanted, how
many there are, and where records end: one that has no room is counted, not written, and so are those after it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from tessera.codegen.ptx.blocks.ids import program_number
from tessera.codegen.ptx.memory import Memory, block_runs, write
from tessera.codegen.ptx.passes.infer import sizes
from tessera.codegen.ptx.room import SHARED
from tessera.codegen.ptx.scalars.words import in_register
from tessera.codegen.ptx.team import both
from tessera.codegen.ptx.types import size
from tessera.codegen.ptx.visit import visit
from tessera.ir.core import Attrs, Block, Node, Value
from tessera.ops import basic, checks, control
from tessera.types import TensorType, int64

if TYPE_CHECKING:
    from tessera.codegen.ptx.kernel import Kernel

ALIGN = 16
WANTED, ROOM, END, HEAD = 0, 8, 16, 32  # where the numbers of the memory's head lie, and where records begin
WORD = 8
TILE_BIT = 32
LOOPS = (control.for_, control.while_)


def _aligned(count: int) -> int:
    return -(-count // ALIGN) * ALIGN


def path_to(block: Block, wanted: Node) -> tuple[list[Node], list[int | None]] | None:
    """The loops around a node, and its place: the number of each node and region on the way, None for a loop's round.

    Places whose rounds are filled in are in the order in which one tile comes to them.
    """
    for number, node in enumerate(block.nodes):
        if node is wanted:
            return [], [number]
        for part, region in enumerate(node.regions):
            found = path_to(region, wanted)
            if found is not None:
                looped = node.op in LOOPS
                return [node] * looped + found[0], [number, *([None] if looped else []), part, *found[1]]
    return None


class Rounds:
    """The rounds of loops in which something prints: a register for each, counted as they go by."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self.of: dict[Node, str] = {}

    def begin(self, loop: Node) -> None:
        """A loop begins."""
        if any(each.op is checks.print_ for region in loop.regions for each in region.walk()):
            self.of[loop] = self._kernel.text.let("mov.u64", "b64", 0)

    def end(self, loop: Node) -> None:
        """A round of it ends."""
        if loop in self.of:
            self._kernel.text.do("add.s64", self.of[loop], self.of[loop], 1)


@visit(checks.print_)
def _(kernel: Kernel, node: Node) -> None:
    place = path_to(kernel.function.body, node)
    assert place is not None
    loops, path = place
    starts, total = _room(node, len(loops))
    site, memory = kernel.extras.site("prints", _described(kernel, node, path, total))
    record, fits = _claimed(kernel, memory, total)
    _head(kernel, record, fits, site, [kernel.rounds.of[loop] for loop in loops])
    for v, start in zip(node.args, starts, strict=True):
        _operand(kernel, v, kernel.text.let("add.s64", "b64", record, start), fits)


def _room(node: Node, rounds: int) -> tuple[list[int], int]:
    """Where the operands begin in a record, and its bytes."""
    starts, at = [], _aligned(WORD * (2 + rounds))
    for v in node.args:
        starts.append(at)
        at += _aligned(math.prod(sizes(v)) * size(v.type.dtype))  # type: ignore[union-attr]
    return starts, at


def _described(kernel: Kernel, node: Node, path: list[int | None], total: int) -> dict[str, Any]:
    """A place of the text in words that JSON can hold."""
    return {
        "text": node.attrs["label"],
        "ordered": node.attrs["ordered"],
        "group": kernel.team.group,
        "path": path,
        "bytes": total,
        "operands": [{"shape": list(sizes(v)), "dtype": v.type.dtype.name} for v in node.args],  # type: ignore[union-attr]
    }


def _first(kernel: Kernel) -> str:
    """Whether a thread speaks for its tile: the first of a team, or each where tiles are threads."""
    team = kernel.team
    return team.once(("first",), "setp.eq.u32", "pred", team.thread, 0) if team.threads > 1 else ""


def _claimed(kernel: Kernel, memory: str, total: int) -> tuple[str, str]:
    """The address of a new record, and whether there is room for it; a team has it of its first thread."""
    text, team = kernel.text, kernel.team
    at = text.new("b64")
    text.do("atom.global.add.u64", at, f"[{memory}+{WANTED}]", total, guard=_first(kernel))
    if team.threads > 1:
        slot = f"[{team.once(('slot',), 'add.u32', 'b32', _shared(kernel), kernel.room.shared(WORD, WORD))}]"
        kernel.meet()  # whoever still reads the last one
        text.do("st.shared.u64", slot, at, guard=_first(kernel))
        kernel.meet()
        at = text.let("ld.shared.u64", "b64", slot)
    end = text.let("add.s64", "b64", at, total)
    fits = text.let("setp.le.u64", "pred", end, text.let("ld.global.u64", "b64", f"[{memory}+{ROOM}]"))
    none = both(text, _first(kernel), text.let("not.pred", "pred", fits))
    text.do("red.global.min.u64", f"[{memory}+{END}]", at, guard=none)
    return text.let("add.s64", "b64", memory, at), fits


def _shared(kernel: Kernel) -> str:
    return kernel.team.once((SHARED,), "mov.u32", "b32", SHARED)


def _head(kernel: Kernel, record: str, fits: str, site: int, rounds: list[str]) -> None:
    text, team = kernel.text, kernel.team
    where = text.let("mov.u64", "b64", site)
    if team.group > 1:
        tile = text.let("cvt.u64.u32", "b64", team.thread)
        where = text.let("add.s64", "b64", where, text.let("shl.b64", "b64", tile, TILE_BIT))
    guard = both(text, _first(kernel), fits)
    for i, word in enumerate((where, in_register(text, "b64", program_number(kernel)), *rounds)):
        text.do("st.global.u64", f"[{record}+{WORD * i}]", word, guard=guard)


def _operand(kernel: Kernel, v: Value, base: str, fits: str) -> None:
    """An operand at an address, each element by one thread."""
    layout = kernel.layout(v)
    memory = Memory(v.type.dtype, "global", base, sizes(v), ALIGN)  # type: ignore[union-attr]
    starts = [_zero(kernel)] * len(memory.shape)
    runs = block_runs(kernel, memory, starts, layout, False, (fits,) * layout.count, once=True)
    write(kernel, memory, runs, kernel.values[v])


def _zero(kernel: Kernel) -> Value:
    """An index that is 0."""
    node = Node(basic.full, (), Attrs({"shape": (), "value": 0, "dtype": int64}), (Value(TensorType((), int64)),))
    kernel.producers[node.out] = node
    kernel.values[node.out] = ("0",)
    return node.out

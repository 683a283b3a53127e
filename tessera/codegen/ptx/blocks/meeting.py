"""The barrier of a whole grid: counts in memory that the programs of a launch share, all of which must run at once.

The counts are how many have come to barriers so far, over the launch, and how many have ended. A program goes on when
as many have come as there are programs, times the barriers that it has been to. Where some have ended before, that can
no longer be: it says so, and ends too. The last to end leaves both counts at 0, for the next launch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tessera.codegen.ptx.blocks.ids import program_count, program_number
from tessera.codegen.ptx.scalars.words import in_register
from tessera.codegen.ptx.visit import visit
from tessera.ir.core import Node
from tessera.ops import tile

if TYPE_CHECKING:
    from tessera.codegen.ptx.kernel import Kernel

# Where the words of a launch's memory lie: both counts, the first program to end (from 1 on), and who waited in vain.
CAME, ENDED, EARLY, LOST, BYTES = 0, 8, 16, 24, 32
SITE_BIT = 40  # where the number of the place in the text begins, above a program's
REST = 32  # nanoseconds between two looks


@visit(tile.grid_barrier)
def _(kernel: Kernel, node: Node) -> None:
    text, team, loc = kernel.text, kernel.team, node.loc
    described = {"place": [loc.file, loc.line, loc.column, loc.end_column]}
    site, state = kernel.extras.site("meeting", described)
    due = team.once(("due",), "mov.u64", "b64", 0)
    kernel.meet()  # what the whole block wrote before
    text.do("add.s64", due, due, program_count(kernel))
    lost = text.let("setp.lt.u32", "pred", team.thread, 0)
    gone = text.new_label("met")
    text.do(f"bra {gone}", guard=text.let("setp.ne.u32", "pred", team.thread, 0))
    _wait(kernel, state, due, lost, gone)
    key = text.let("add.s64", "b64", in_register(text, "b64", program_number(kernel)), site << SITE_BIT)
    text.do("red.global.min.u64", f"[{state}+{LOST}]", key)
    text.label(gone)
    text.do(f"bra {kernel.end()}", guard=text.let("barrier.red.or.pred", "pred", 0, lost))


def _wait(kernel: Kernel, state: str, due: str, lost: str, gone: str) -> None:
    """Come, and look until all have; who falls through has lost the others."""
    text, again = kernel.text, kernel.text.new_label("meet")
    text.do("fence.acq_rel.gpu")
    text.do("red.relaxed.gpu.global.add.u64", f"[{state}+{CAME}]", 1)
    text.label(again)
    # Whoever has ended is looked at first: it may have come to this barrier before.
    ended = text.let("ld.acquire.gpu.global.u64", "b64", f"[{state}+{ENDED}]")
    came = text.let("ld.acquire.gpu.global.u64", "b64", f"[{state}+{CAME}]")
    text.do(f"bra {gone}", guard=text.let("setp.ge.u64", "pred", came, due))
    text.do("setp.ne.u64", lost, ended, 0)
    text.do("nanosleep.u32", REST, guard=f"!{lost}")
    text.do(f"bra {again}", guard=f"!{lost}")


def leave(kernel: Kernel) -> None:
    """The end of an entry whose programs meet: this one has ended."""
    text, team = kernel.text, kernel.team
    state, out = kernel.extras.address("meeting"), text.new_label("out")
    text.do(f"bra {out}", guard=text.let("setp.ne.u32", "pred", team.thread, 0))
    number = text.let("add.s64", "b64", in_register(text, "b64", program_number(kernel)), 1)
    text.let("atom.relaxed.gpu.global.cas.b64", "b64", f"[{state}+{EARLY}]", 0, number)
    before = text.let("atom.acq_rel.gpu.global.add.u64", "b64", f"[{state}+{ENDED}]", 1)
    rest = text.let("add.s64", "b64", before, 1)
    last = text.let("setp.eq.u64", "pred", rest, program_count(kernel))
    for word in (CAME, ENDED):
        text.do("st.global.u64", f"[{state}+{word}]", 0, guard=last)
    text.label(out)

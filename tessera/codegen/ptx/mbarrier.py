"""Barriers in memory: the hardware's own, in the first eight bytes of each barrier's state.

Copies are done when their op is: the bytes they bring have come once every thread of the tile is past it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tessera.codegen.ptx.visit import visit
from tessera.errors import UnsupportedOpError
from tessera.ir.core import Node
from tessera.ops import mbarrier

if TYPE_CHECKING:
    from tessera.codegen.ptx.kernel import Kernel

STATE = 8 * mbarrier.FIELDS  # bytes of a barrier's state


def _place(kernel: Kernel, node: Node) -> str:
    """The address of a barrier, as an operand."""
    memory, slot = kernel.memories[node.args[0]], kernel.one(node.args[1])
    return f"[{kernel.text.let('mad.lo.s64', 'b64', slot, STATE, memory.base)}]"


def _one(kernel: Kernel) -> str:
    """Whether a thread speaks for its tile: the first of a team, or each where tiles are threads."""
    team = kernel.team
    return team.once(("first",), "setp.eq.u32", "pred", team.thread, 0) if team.threads > 1 else ""


@visit(mbarrier.mbarrier_init)
def _(kernel: Kernel, node: Node) -> None:
    if node not in kernel.function.body.nodes:
        raise UnsupportedOpError(
            "the target ptx begins mbarriers where every tile passes", location=node.loc,
            expected="a barrier made outside of loops and branches",
        )  # fmt: skip
    team = kernel.team
    first = team.once(("first",), "setp.eq.u32", "pred", team.thread, 0)
    kernel.text.do("mbarrier.init.shared.b64", _place(kernel, node), node.attrs["count"], guard=first)


@visit(mbarrier.mbarrier_arrive)
def _(kernel, node):
    if kernel.team.threads > 1:
        kernel.meet()  # what the whole team wrote before
    place = _place(kernel, node)
    for _ in range(node.attrs["count"]):
        state = kernel.text.new("b64")
        kernel.text.do("mbarrier.arrive.shared.b64", state, place, guard=_one(kernel))


@visit(mbarrier.mbarrier_expect)
def _(kernel, node):
    _check_bytes(kernel, node)
    kernel.text.do(
        "mbarrier.expect_tx.relaxed.cta.shared::cta.b64", _place(kernel, node), node.attrs["count"], guard=_one(kernel)
    )


@visit(mbarrier.mbarrier_copies)
def _(kernel, node):
    _check_bytes(kernel, node)
    if kernel.team.threads > 1:
        kernel.meet()
    kernel.text.do("fence.acq_rel.cta")
    kernel.text.do(
        "mbarrier.complete_tx.relaxed.cta.shared::cta.b64", _place(kernel, node), node.attrs["count"],
        guard=_one(kernel),
    )  # fmt: skip


def _check_bytes(kernel: Kernel, node: Node) -> None:
    if kernel.arch != "sm_90a":
        raise UnsupportedOpError(
            f"{kernel.arch} has no mbarriers that count bytes", location=node.loc, expected="--arch sm_90a",
            suggestion="wait for the copies, then arrive",
        )  # fmt: skip


@visit(mbarrier.mbarrier_wait)
def _(kernel, node):
    """The language asks for the phase of a parity to have ended, as the instruction does."""
    text = kernel.text
    parity = kernel.one(node.args[2])
    narrow = text.let("cvt.u32.u64", "b32", parity) if parity.startswith("%") else parity
    bit = text.let("and.b32", "b32", narrow, 1) if narrow.startswith("%") else str(int(narrow) & 1)
    place, again = _place(kernel, node), text.new_label("wait")
    test = "try_wait" if kernel.arch == "sm_90a" else "test_wait"
    text.label(again)
    done = text.let(f"mbarrier.{test}.parity.shared.b64", "pred", place, bit)
    text.do(f"bra {again}", guard=f"!{done}")

"""Barriers in memory: the hardware's own, in the first eight bytes of each barrier's state, or `counted` ones.

The bytes that copies bring have come once every thread of the tile has waited for its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tessera.codegen.ptx.blocks import counted
from tessera.codegen.ptx.visit import visit
from tessera.ir.core import Node
from tessera.ops import mbarrier

if TYPE_CHECKING:
    from tessera.codegen.ptx.kernel import Kernel

STATE = 8 * mbarrier.FIELDS  # bytes of a barrier's state


def _address(kernel: Kernel, node: Node) -> str:
    """The register with the address of a barrier."""
    memory, slot = kernel.memories[node.args[0]], kernel.one(node.args[1])
    return kernel.text.let("mad.lo.s64", "b64", slot, STATE, memory.base)


def _place(kernel: Kernel, node: Node) -> str:
    """The address of a barrier, as an operand."""
    return f"[{_address(kernel, node)}]"


def _one(kernel: Kernel) -> str:
    """Whether a thread speaks for its tile: the first of a team, or each where tiles are threads."""
    team = kernel.team
    return team.once(("first",), "setp.eq.u32", "pred", team.thread, 0) if team.threads > 1 else ""


@visit(mbarrier.mbarrier_init)
def _(kernel: Kernel, node: Node) -> None:
    if counted.used(kernel):
        counted.begin(kernel, _address(kernel, node), node.attrs["count"], _one(kernel))
        return
    team = kernel.team
    first = team.once(("first",), "setp.eq.u32", "pred", team.thread, 0)
    kernel.text.do("mbarrier.init.shared.b64", _place(kernel, node), node.attrs["count"], guard=first)


@visit(mbarrier.mbarrier_arrive)
def _(kernel, node):
    if kernel.team.threads > 1:
        kernel.meet()  # what the whole team wrote before
    if counted.used(kernel):
        counted.arrive(kernel, _address(kernel, node), node.attrs["count"], _one(kernel))
        return
    place = _place(kernel, node)
    for _ in range(node.attrs["count"]):
        state = kernel.text.new("b64")
        kernel.text.do("mbarrier.arrive.shared.b64", state, place, guard=_one(kernel))


@visit(mbarrier.mbarrier_expect)
def _(kernel, node):
    if counted.used(kernel):
        counted.expect(kernel, _address(kernel, node), node.attrs["count"], _one(kernel))
        return
    kernel.text.do(
        "mbarrier.expect_tx.relaxed.cta.shared::cta.b64", _place(kernel, node), node.attrs["count"], guard=_one(kernel)
    )


@visit(mbarrier.mbarrier_copies)
def _(kernel, node):
    kernel.text.do("cp.async.wait_all")
    if kernel.team.threads > 1:
        kernel.meet()
    if counted.used(kernel):
        counted.come(kernel, _address(kernel, node), node.attrs["count"], _one(kernel))
        return
    kernel.text.do("fence.acq_rel.cta")
    kernel.text.do(
        "mbarrier.complete_tx.relaxed.cta.shared::cta.b64", _place(kernel, node), node.attrs["count"],
        guard=_one(kernel),
    )  # fmt: skip


@visit(mbarrier.mbarrier_wait)
def _(kernel, node):
    """The language asks for the phase of a parity to have ended, as the instruction does."""
    text = kernel.text
    parity = kernel.one(node.args[2])
    narrow = text.let("cvt.u32.u64", "b32", parity) if parity.startswith("%") else parity
    bit = text.let("and.b32", "b32", narrow, 1) if narrow.startswith("%") else str(int(narrow) & 1)
    if counted.used(kernel):
        counted.wait(kernel, _address(kernel, node), bit)
        return
    place, again = _place(kernel, node), text.new_label("wait")
    test = "try_wait" if kernel.arch == "sm_90a" else "test_wait"
    text.label(again)
    done = text.let(f"mbarrier.{test}.parity.shared.b64", "pred", place, bit)
    text.do(f"bra {again}", guard=f"!{done}")

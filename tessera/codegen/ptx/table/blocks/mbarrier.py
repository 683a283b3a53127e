"""Memory barriers: mbarrier objects of the hardware, or a software barrier that compare-and-swap updates.

The software barrier serves where the hardware's cannot: on sm_80, which counts no transaction bytes, and for a barrier
that a loop or branch initialises repeatedly. Its first word holds the phase, the pending arrivals and, signed, the
pending bytes; the second word holds the arrivals of each phase. When nothing is pending the next phase begins.
"""

from __future__ import annotations

from tessera.codegen.ptx.context import EmissionContext, synchronise_team
from tessera.codegen.ptx.table import emission_rule
from tessera.ir.core import Node
from tessera.ops.dialects import mbarrier

STATE_BYTES = 8 * mbarrier.MBARRIER_FIELDS
PHASE_BITS, ARRIVAL_BITS = 20, 20
BYTES_BIT = PHASE_BITS + ARRIVAL_BITS  # the lowest bit of the pending bytes
COUNT_OFFSET = 8  # of the second word
POLL_NANOSECONDS = 20


def uses_software_barriers(ctx: EmissionContext) -> bool:
    """Whether the function's mbarriers are software barriers."""
    body = ctx.function.body
    counts_bytes = any(n.op in (mbarrier.mbarrier_expect, mbarrier.mbarrier_copies) for n in body.walk())
    nested = any(n.op is mbarrier.mbarrier_init and n not in body.nodes for n in body.walk())
    return nested or (counts_bytes and ctx.entry.arch != "sm_90a")


def _init_software_barrier(ctx: EmissionContext, address: str, count: int, guard: str) -> None:
    """Store phase 0 of a barrier with `count` arrivals."""
    ctx.text.do("st.shared.u64", f"[{address}]", count << PHASE_BITS, guard=guard)
    ctx.text.do("st.shared.u64", f"[{address}+{COUNT_OFFSET}]", count, guard=guard)


def _update_software_barrier(ctx: EmissionContext, address: str, change: int, guard: str) -> None:
    """Add to the state word; if nothing is pending then, begin the next phase."""
    text = ctx.text
    retry, done = text.new_label("again"), text.new_label("changed")
    if guard:
        text.do(f"bra {done}", guard=f"!{guard}")
    text.do("fence.acq_rel.cta")
    count = text.let("ld.shared.u64", "b64", f"[{address}+{COUNT_OFFSET}]")
    full = text.let("shl.b64", "b64", count, PHASE_BITS)
    old = text.let("ld.volatile.shared.u64", "b64", f"[{address}]")
    text.label(retry)
    reduced = text.let("add.s64", "b64", old, change)
    completed = text.let("setp.eq.u64", "pred", text.let("shr.u64", "b64", reduced, PHASE_BITS), 0)
    phase = text.let("and.b64", "b64", text.let("add.s64", "b64", old, 1), (1 << PHASE_BITS) - 1)
    new = text.let("selp.b64", "b64", text.let("or.b64", "b64", phase, full), reduced, completed)
    seen = text.let("atom.shared.cas.b64", "b64", f"[{address}]", old, new)
    changed = text.let("setp.ne.s64", "pred", seen, old)
    text.do("mov.b64", old, seen)
    text.do(f"bra {retry}", guard=changed)
    text.label(done)


def _wait_software_barrier(ctx: EmissionContext, address: str, parity: str) -> None:
    """Poll until the current phase has another parity."""
    text, retry = ctx.text, ctx.text.new_label("wait")
    text.label(retry)
    word = text.let("cvt.u32.u64", "b32", text.let("ld.acquire.cta.shared.u64", "b64", f"[{address}]"))
    same = text.let("setp.eq.u32", "pred", text.let("and.b32", "b32", word, 1), parity)
    text.do("nanosleep.u32", POLL_NANOSECONDS, guard=same)
    text.do(f"bra {retry}", guard=same)


def _barrier_address(ctx: EmissionContext, node: Node) -> str:
    """The register with the address of a barrier."""
    memory, slot = ctx.memrefs[node.args[0]], ctx.scalar_operand(node.args[1])
    return ctx.text.let("mad.lo.s64", "b64", slot, STATE_BYTES, memory.base)


@emission_rule(mbarrier.mbarrier_init)
def _(ctx: EmissionContext, node: Node) -> None:
    count, team = node.attrs["count"], ctx.team
    if uses_software_barriers(ctx):
        _init_software_barrier(ctx, _barrier_address(ctx, node), count, team.tile_leader_predicate())
        return
    address = f"[{_barrier_address(ctx, node)}]"
    ctx.text.do("mbarrier.init.shared.b64", address, count, guard=team.first_thread_predicate())


@emission_rule(mbarrier.mbarrier_arrive)
def _(ctx, node):
    count, team = node.attrs["count"], ctx.team
    if team.threads > 1:
        synchronise_team(ctx)  # orders the team's earlier writes
    address = _barrier_address(ctx, node)
    if uses_software_barriers(ctx):
        _update_software_barrier(ctx, address, -(count << PHASE_BITS), team.tile_leader_predicate())
        return
    for _ in range(count):
        state = ctx.text.new("b64")
        ctx.text.do("mbarrier.arrive.shared.b64", state, f"[{address}]", guard=team.tile_leader_predicate())


@emission_rule(mbarrier.mbarrier_expect)
def _(ctx, node):
    count, address, leader = node.attrs["count"], _barrier_address(ctx, node), ctx.team.tile_leader_predicate()
    if uses_software_barriers(ctx):
        _update_software_barrier(ctx, address, count << BYTES_BIT, leader)
        return
    ctx.text.do("mbarrier.expect_tx.relaxed.cta.shared::cta.b64", f"[{address}]", count, guard=leader)


@emission_rule(mbarrier.mbarrier_copies)
def _(ctx, node):
    """The bytes of the team's copies arrive once every thread has waited for its own cp.async."""
    count, leader = node.attrs["count"], ctx.team.tile_leader_predicate
    ctx.text.do("cp.async.wait_all")
    if ctx.team.threads > 1:
        synchronise_team(ctx)
    if uses_software_barriers(ctx):
        _update_software_barrier(ctx, _barrier_address(ctx, node), -(count << BYTES_BIT), leader())
        return
    ctx.text.do("fence.acq_rel.cta")
    address = f"[{_barrier_address(ctx, node)}]"
    ctx.text.do("mbarrier.complete_tx.relaxed.cta.shared::cta.b64", address, count, guard=leader())


@emission_rule(mbarrier.mbarrier_wait)
def _(ctx, node):
    """Wait until the phase of the given parity has completed."""
    text = ctx.text
    parity = ctx.scalar_operand(node.args[2])
    narrow = text.let("cvt.u32.u64", "b32", parity) if parity.startswith("%") else parity
    bit = text.let("and.b32", "b32", narrow, 1) if narrow.startswith("%") else str(int(narrow) & 1)
    address = _barrier_address(ctx, node)
    if uses_software_barriers(ctx):
        _wait_software_barrier(ctx, address, bit)
        return
    retry = text.new_label("wait")
    test = "try_wait" if ctx.entry.arch == "sm_90a" else "test_wait"
    text.label(retry)
    done = text.let(f"mbarrier.{test}.parity.shared.b64", "pred", f"[{address}]", bit)
    text.do(f"bra {retry}", guard=f"!{done}")

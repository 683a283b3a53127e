"""Memory barriers (mbarrier): the hardware's own, or a software barrier changed by compare-and-swap.

The software barrier serves where the hardware's cannot: sm_80 counts no bytes, and a barrier made in a loop or branch
would be initialised twice. Its word holds the phase, the pending arrivals, and (signed, at the top) the pending bytes;
the next word holds the arrivals of each phase.
"""

from __future__ import annotations

from tessera.codegen.ptx.context import EmissionContext, synchronise_team
from tessera.codegen.ptx.table import emission_rule
from tessera.ir.core import Node
from tessera.ops.dialects import mbarrier

# Barriers in memory where the hardware's do not serve: a word of the state that is changed by compare-and-swap.
#
# Those of sm_80 count no bytes, and none may be begun again while it stands, as one made in a loop or a branch is.
#
# The word holds the number of the phase, the arrivals that it still takes, and (signed, at the top) the bytes; the next
# word the arrivals of each phase. Where nothing is missing any more, the phase after it begins.


PHASE_BITS, ARRIVAL_BITS = 20, 20  # bits of the two lower numbers
BYTES_BIT = PHASE_BITS + ARRIVAL_BITS
COUNT_OFFSET = 8  # where the second word lies
POLL_NANOSECONDS = 20  # nanoseconds between two looks


def uses_software_barriers(ctx: EmissionContext) -> bool:
    """Whether a function's barriers are these."""
    body = ctx.function.body
    bytes_ = any(n.op in (mbarrier.mbarrier_expect, mbarrier.mbarrier_copies) for n in body.walk())
    inside = any(n.op is mbarrier.mbarrier_init and n not in body.nodes for n in body.walk())
    return inside or (bytes_ and ctx.entry.arch != "sm_90a")


def init_software_barrier(ctx: EmissionContext, place: str, count: int, guard: str) -> None:
    """Phase 0 of a barrier that takes `count` arrivals."""
    ctx.text.do("st.shared.u64", f"[{place}]", count << PHASE_BITS, guard=guard)
    ctx.text.do("st.shared.u64", f"[{place}+{COUNT_OFFSET}]", count, guard=guard)


def arrive_software_barrier(ctx: EmissionContext, place: str, count: int, guard: str) -> None:
    """So many arrivals less are missing."""
    _update_state(ctx, place, -(count << PHASE_BITS), guard)


def expect_bytes(ctx: EmissionContext, place: str, count: int, guard: str) -> None:
    """So many bytes more are missing."""
    _update_state(ctx, place, count << BYTES_BIT, guard)


def complete_bytes(ctx: EmissionContext, place: str, count: int, guard: str) -> None:
    """So many bytes less are missing."""
    _update_state(ctx, place, -(count << BYTES_BIT), guard)


def _update_state(ctx: EmissionContext, place: str, by: int, guard: str) -> None:
    """Add to the word; if that leaves nothing missing, begin the next phase."""
    text = ctx.text
    again, done = text.new_label("again"), text.new_label("changed")
    if guard:
        text.do(f"bra {done}", guard=f"!{guard}")
    text.do("fence.acq_rel.cta")
    count = text.let("ld.shared.u64", "b64", f"[{place}+{COUNT_OFFSET}]")
    full = text.let("shl.b64", "b64", count, PHASE_BITS)
    old = text.let("ld.volatile.shared.u64", "b64", f"[{place}]")
    text.label(again)
    less = text.let("add.s64", "b64", old, by)
    none = text.let("setp.eq.u64", "pred", text.let("shr.u64", "b64", less, PHASE_BITS), 0)
    phase = text.let("and.b64", "b64", text.let("add.s64", "b64", old, 1), (1 << PHASE_BITS) - 1)
    new = text.let("selp.b64", "b64", text.let("or.b64", "b64", phase, full), less, none)
    seen = text.let("atom.shared.cas.b64", "b64", f"[{place}]", old, new)
    other = text.let("setp.ne.s64", "pred", seen, old)
    text.do("mov.b64", old, seen)
    text.do(f"bra {again}", guard=other)
    text.label(done)


def wait_software_barrier(ctx: EmissionContext, place: str, parity: str) -> None:
    """Look until the phase under way has another parity."""
    text, again = ctx.text, ctx.text.new_label("wait")
    text.label(again)
    word = text.let("cvt.u32.u64", "b32", text.let("ld.acquire.cta.shared.u64", "b64", f"[{place}]"))
    same = text.let("setp.eq.u32", "pred", text.let("and.b32", "b32", word, 1), parity)
    text.do("nanosleep.u32", POLL_NANOSECONDS, guard=same)
    text.do(f"bra {again}", guard=same)


# Barriers in memory: the hardware's own, in the first eight bytes of each barrier's state, or `counted` ones.
#
# The bytes that copies bring have come once every thread of the tile has waited for its own.


STATE_BYTES = 8 * mbarrier.MBARRIER_FIELDS  # bytes of a barrier's state


def _barrier_address(ctx: EmissionContext, node: Node) -> str:
    """The register with the address of a barrier."""
    memory, slot = ctx.memrefs[node.args[0]], ctx.scalar_operand(node.args[1])
    return ctx.text.let("mad.lo.s64", "b64", slot, STATE_BYTES, memory.base)


def _barrier_operand(ctx: EmissionContext, node: Node) -> str:
    """The address of a barrier, as an operand."""
    return f"[{_barrier_address(ctx, node)}]"


def _is_tile_leader(ctx: EmissionContext) -> str:
    """Whether a thread speaks for its tile: the first of a team, or each where tiles are threads."""
    team = ctx.team
    return team.hoist(("first",), "setp.eq.u32", "pred", team.thread, 0) if team.threads > 1 else ""


@emission_rule(mbarrier.mbarrier_init)
def _(ctx: EmissionContext, node: Node) -> None:
    if uses_software_barriers(ctx):
        init_software_barrier(ctx, _barrier_address(ctx, node), node.attrs["count"], _is_tile_leader(ctx))
        return
    team = ctx.team
    first = team.hoist(("first",), "setp.eq.u32", "pred", team.thread, 0)
    ctx.text.do("mbarrier.init.shared.b64", _barrier_operand(ctx, node), node.attrs["count"], guard=first)


@emission_rule(mbarrier.mbarrier_arrive)
def _(ctx, node):
    if ctx.team.threads > 1:
        synchronise_team(ctx)  # what the whole team wrote before
    if uses_software_barriers(ctx):
        arrive_software_barrier(ctx, _barrier_address(ctx, node), node.attrs["count"], _is_tile_leader(ctx))
        return
    place = _barrier_operand(ctx, node)
    for _ in range(node.attrs["count"]):
        state = ctx.text.new("b64")
        ctx.text.do("mbarrier.arrive.shared.b64", state, place, guard=_is_tile_leader(ctx))


@emission_rule(mbarrier.mbarrier_expect)
def _(ctx, node):
    if uses_software_barriers(ctx):
        expect_bytes(ctx, _barrier_address(ctx, node), node.attrs["count"], _is_tile_leader(ctx))
        return
    ctx.text.do(
        "mbarrier.expect_tx.relaxed.cta.shared::cta.b64",
        _barrier_operand(ctx, node),
        node.attrs["count"],
        guard=_is_tile_leader(ctx),
    )


@emission_rule(mbarrier.mbarrier_copies)
def _(ctx, node):
    ctx.text.do("cp.async.wait_all")
    if ctx.team.threads > 1:
        synchronise_team(ctx)
    if uses_software_barriers(ctx):
        complete_bytes(ctx, _barrier_address(ctx, node), node.attrs["count"], _is_tile_leader(ctx))
        return
    ctx.text.do("fence.acq_rel.cta")
    ctx.text.do(
        "mbarrier.complete_tx.relaxed.cta.shared::cta.b64", _barrier_operand(ctx, node), node.attrs["count"],
        guard=_is_tile_leader(ctx),
    )  # fmt: skip


@emission_rule(mbarrier.mbarrier_wait)
def _(ctx, node):
    """The language asks for the phase of a parity to have ended, as the instruction does."""
    text = ctx.text
    parity = ctx.scalar_operand(node.args[2])
    narrow = text.let("cvt.u32.u64", "b32", parity) if parity.startswith("%") else parity
    bit = text.let("and.b32", "b32", narrow, 1) if narrow.startswith("%") else str(int(narrow) & 1)
    if uses_software_barriers(ctx):
        wait_software_barrier(ctx, _barrier_address(ctx, node), bit)
        return
    place, again = _barrier_operand(ctx, node), text.new_label("wait")
    test = "try_wait" if ctx.entry.arch == "sm_90a" else "test_wait"
    text.label(again)
    done = text.let(f"mbarrier.{test}.parity.shared.b64", "pred", place, bit)
    text.do(f"bra {again}", guard=f"!{done}")

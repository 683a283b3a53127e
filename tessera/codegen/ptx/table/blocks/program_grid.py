"""The program grid: program ids and sizes, block barriers, and the barrier of a whole grid.

The grid barrier counts arrivals and exits in memory that all programs of a launch share; all must be resident at once.
A program that waits while another has exited reports a deadlock and exits too. The last to exit resets the counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tessera.codegen.diagnostics import describe_location
from tessera.codegen.ptx.context import EmissionContext, get_exit_label, synchronise_team
from tessera.codegen.ptx.table import emission_rule
from tessera.codegen.ptx.table.scalars.packing import materialise_operand
from tessera.core.errors import UnsupportedOpError
from tessera.ir.core import Node
from tessera.ops.dialects import tile

# Where a program and a tile stand: ids, sizes, barriers.


# The last axis of a grid varies fastest, as elements of an array do: it is the hardware's first.
GRID_AXES = "xyz"
MAX_GRID_DIM = (1 << 16) - 1  # places along its other axes


@emission_rule(tile.program_id)
def _(ctx: EmissionContext, node: Node) -> None:
    ctx.values[node.out] = (_read_axis_register(ctx, "ctaid", node),)


@emission_rule(tile.grid_size)
def _(ctx, node):
    ctx.values[node.out] = (_read_axis_register(ctx, "nctaid", node),)


def _read_axis_register(ctx: EmissionContext, name: str, node: Node) -> str:
    return _read_special_register(ctx, name, node.attrs["axis"])


def _read_special_register(ctx: EmissionContext, name: str, axis: int) -> str:
    """A special register as an index; an axis that the grid lacks has one program."""
    if ctx.grid.scheduler is not None:
        return ctx.grid.scheduler.place(axis) if name == "ctaid" else str(ctx.grid.scheduler.size(axis))
    if axis >= ctx.grid.rank:
        return "0" if name == "ctaid" else "1"
    if ctx.grid.linear:
        return _unfold_program_id(ctx, axis) if name == "ctaid" else str(ctx.grid.linear[axis])
    word = f"%{name}.{GRID_AXES[ctx.grid.rank - 1 - axis]}"
    narrow = ctx.team.hoist((word,), "mov.u32", "b32", word)
    return ctx.team.hoist((word, "wide"), "cvt.u64.u32", "b64", narrow)


def _unfold_program_id(ctx: EmissionContext, axis: int) -> str:
    """A place of a program that the hardware knows by its number alone."""
    once, size = ctx.team.hoist, ctx.grid.linear[axis]
    number = once(("%ctaid.x",), "mov.u32", "b32", "%ctaid.x")
    after = math.prod(ctx.grid.linear[axis + 1 :])
    place = once(("after", after), "div.u32", "b32", number, after) if after > 1 else number
    place = once(("place", axis), "rem.u32", "b32", place, size) if axis else place
    return once(("place", axis, "wide"), "cvt.u64.u32", "b64", place)


def find_folded_grid(grids: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The grid whose programs the hardware is given by number, having fewer or smaller axes; else nothing.

    Raises:
        UnsupportedOpError: there are several such grids.
    """
    wide = [tuple(g) for g in grids if len(g) > len(GRID_AXES) or any(n > MAX_GRID_DIM for n in g[:-1])]
    if not wide:
        return ()
    if len({tuple(g) for g in grids}) > 1:
        raise UnsupportedOpError(
            f"a kernel launched over several grids, one of which is {wide[0]}",
            expected=f"grids of at most {len(GRID_AXES)} axes, all but the last of at most {MAX_GRID_DIM:,} programs; "
            "or only one",
        )
    return wide[0]


@emission_rule(tile.local_id)
def _(ctx, node):
    alone = ctx.team.group == 1
    wide = "0" if alone else ctx.team.hoist(("thread",), "cvt.u64.u32", "b64", ctx.team.thread)
    ctx.values[node.out] = (wide,)


@emission_rule(tile.group_size)
def _(ctx, node):
    ctx.values[node.out] = (str(ctx.team.group),)


@emission_rule(tile.barrier)
def _(ctx, node):
    if ctx.team.block_threads > 1:
        ctx.team.synchronise()


def emit_program_number(ctx: EmissionContext) -> str:
    """This program's number in row-major order, as 64 bits."""
    total = "0"
    for axis in range(ctx.grid.rank):
        place, count = _read_special_register(ctx, "ctaid", axis), _read_special_register(ctx, "nctaid", axis)
        total = place if total == "0" else ctx.text.let("mad.lo.s64", "b64", total, count, place)
    return total


def emit_program_count(ctx: EmissionContext) -> str:
    """How many programs the grid has, as 64 bits."""
    total = _read_special_register(ctx, "nctaid", 0)
    for axis in range(1, ctx.grid.rank):
        count = _read_special_register(ctx, "nctaid", axis)
        total = ctx.team.hoist(("programs", axis), "mul.lo.s64", "b64", total, count)
    return total


# The barrier of a whole grid: counts in memory that the programs of a launch share, all of which must run at once.
#
# The counts are how many have come to barriers so far, over the launch, and how many have ended. A program goes on when
# as many have come as there are programs, times the barriers that it has been to. Where some have ended before, that
# can
# no longer be: it says so, and ends too. The last to end leaves both counts at 0, for the next launch.


# Where the words of a launch's memory lie: both counts, the first program to end (from 1 on), and who waited in vain.
ARRIVED_AT, EXITED_AT, FIRST_EXIT_AT, DEADLOCK_AT, GRID_BARRIER_BYTES = 0, 8, 16, 24, 32
SITE_BIT = 40  # where the number of the place in the text begins, above a program's
POLL_NANOSECONDS = 32  # nanoseconds between two looks


@emission_rule(tile.grid_barrier)
def _(ctx: EmissionContext, node: Node) -> None:
    text, team = ctx.text, ctx.team
    described = {"place": describe_location(node.loc)}
    site, state = ctx.entry.hidden.add_site("meeting", described)
    due = team.hoist(("due",), "mov.u64", "b64", 0)
    synchronise_team(ctx)  # what the whole block wrote before
    text.do("add.s64", due, due, emit_program_count(ctx))
    lost = text.let("setp.lt.u32", "pred", team.thread, 0)
    gone = text.new_label("met")
    text.do(f"bra {gone}", guard=text.let("setp.ne.u32", "pred", team.thread, 0))
    _arrive_and_wait(ctx, state, due, lost, gone)
    key = text.let("add.s64", "b64", materialise_operand(text, "b64", emit_program_number(ctx)), site << SITE_BIT)
    text.do("red.global.min.u64", f"[{state}+{DEADLOCK_AT}]", key)
    text.label(gone)
    text.do(f"bra {get_exit_label(ctx)}", guard=text.let("barrier.red.or.pred", "pred", 0, lost))


def _arrive_and_wait(ctx: EmissionContext, state: str, due: str, lost: str, gone: str) -> None:
    """Come, and look until all have; who falls through has lost the others."""
    text, again = ctx.text, ctx.text.new_label("meet")
    text.do("fence.acq_rel.gpu")
    text.do("red.relaxed.gpu.global.add.u64", f"[{state}+{ARRIVED_AT}]", 1)
    text.label(again)
    # Whoever has ended is looked at first: it may have come to this barrier before.
    ended = text.let("ld.acquire.gpu.global.u64", "b64", f"[{state}+{EXITED_AT}]")
    came = text.let("ld.acquire.gpu.global.u64", "b64", f"[{state}+{ARRIVED_AT}]")
    text.do(f"bra {gone}", guard=text.let("setp.ge.u64", "pred", came, due))
    text.do("setp.ne.u64", lost, ended, 0)
    text.do("nanosleep.u32", POLL_NANOSECONDS, guard=f"!{lost}")
    text.do(f"bra {again}", guard=f"!{lost}")


def exit_grid_barrier(ctx: EmissionContext) -> None:
    """The end of an entry whose programs meet: this one has ended."""
    text, team = ctx.text, ctx.team
    state, out = ctx.entry.hidden.address("meeting"), text.new_label("out")
    text.do(f"bra {out}", guard=text.let("setp.ne.u32", "pred", team.thread, 0))
    number = text.let("add.s64", "b64", materialise_operand(text, "b64", emit_program_number(ctx)), 1)
    text.let("atom.relaxed.gpu.global.cas.b64", "b64", f"[{state}+{FIRST_EXIT_AT}]", 0, number)
    before = text.let("atom.acq_rel.gpu.global.add.u64", "b64", f"[{state}+{EXITED_AT}]", 1)
    rest = text.let("add.s64", "b64", before, 1)
    last = text.let("setp.eq.u64", "pred", rest, emit_program_count(ctx))
    for word in (ARRIVED_AT, EXITED_AT):
        text.do("st.global.u64", f"[{state}+{word}]", 0, guard=last)
    text.label(out)

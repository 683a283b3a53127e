"""Program grid: program ids and sizes, the block's barrier, and the barrier of the whole grid.

The grid barrier counts arrivals and exits in memory that all programs of a launch share; a cooperative launch makes all
of them resident at once. A program continues when as many have arrived as there are programs, times the barriers that
it has passed. One that waits after another has exited reports a deadlock and exits too. The last to exit resets the
counts for the next launch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tessera.codegen.diagnostics import describe_location
from tessera.codegen.ptx.context import EmissionContext, get_exit_label, synchronise_team
from tessera.codegen.ptx.table import emission_rule
from tessera.codegen.ptx.table.scalars.arithmetic import materialise_operand
from tessera.core.errors import UnsupportedOpError
from tessera.core.symbolic_dim import proves_less
from tessera.ir.core import Node
from tessera.ops.dialects import tile

# The last axis of a program grid varies fastest: it is the first axis of the hardware grid.
GRID_AXES = "xyz"
MAX_GRID_DIM = (1 << 16) - 1  # of the second and third axis of the hardware grid
# Layout of the grid barrier's state: both counters, the first program to exit (from 1 on), and the deadlock record.
ARRIVED_AT, EXITED_AT, FIRST_EXIT_AT, DEADLOCK_AT, GRID_BARRIER_BYTES = 0, 8, 16, 24, 32
SITE_BIT = 40  # the lowest bit of the site in a deadlock record, above the program's number
POLL_NANOSECONDS = 32


@emission_rule(tile.program_id)
def _(ctx: EmissionContext, node: Node) -> None:
    ctx.values[node.out] = (_emit_grid_index(ctx, "ctaid", node.attrs["axis"]),)


@emission_rule(tile.grid_size)
def _(ctx, node):
    ctx.values[node.out] = (_emit_grid_index(ctx, "nctaid", node.attrs["axis"]),)


def _emit_grid_index(ctx: EmissionContext, register: str, axis: int) -> str:
    """The program's id ("ctaid") or the grid's size ("nctaid") along an axis; a missing axis has one program."""
    grid = ctx.grid
    if grid.scheduler is not None:
        return grid.scheduler.place(axis) if register == "ctaid" else str(grid.scheduler.size(axis))
    if axis >= grid.rank:
        return "0" if register == "ctaid" else "1"
    if grid.linear:
        return _delinearise_program_id(ctx, axis) if register == "ctaid" else str(grid.linear[axis])
    name = f"%{register}.{GRID_AXES[grid.rank - 1 - axis]}"
    narrow = ctx.team.hoist((name,), "mov.u32", "b32", name)
    return ctx.team.hoist((name, "wide"), "cvt.u64.u32", "b64", narrow)


def _delinearise_program_id(ctx: EmissionContext, axis: int) -> str:
    """The program's id along an axis of a linear hardware grid."""
    hoist, shape = ctx.team.hoist, ctx.grid.linear
    number = hoist(("%ctaid.x",), "mov.u32", "b32", "%ctaid.x")
    inner = math.prod(shape[axis + 1 :])
    index = hoist(("quotient", inner), "div.u32", "b32", number, inner) if inner > 1 else number
    index = hoist(("program id", axis), "rem.u32", "b32", index, shape[axis]) if axis else index
    return hoist(("program id", axis, "wide"), "cvt.u64.u32", "b64", index)


def find_linear_grid(grids: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The grid that exceeds the axes of a hardware grid, and is launched as a linear one; () if there is none.

    Raises:
        UnsupportedOpError: the kernel is launched over several grids, one of which needs this.
    """
    wide = [tuple(g) for g in grids if len(g) > len(GRID_AXES) or any(proves_less(MAX_GRID_DIM, n) for n in g[:-1])]
    if not wide:
        return ()
    if len({tuple(g) for g in grids}) > 1:
        raise UnsupportedOpError(
            f"a kernel is launched over several grids, one of which is {wide[0]}",
            expected=f"grids of at most {len(GRID_AXES)} axes, all but the last of at most {MAX_GRID_DIM:,} programs; "
            "or a single grid",
        )
    return wide[0]


@emission_rule(tile.local_id)
def _(ctx, node):
    team = ctx.team
    alone = team.group == 1
    ctx.values[node.out] = ("0" if alone else team.hoist(("tile id",), "cvt.u64.u32", "b64", team.thread),)


@emission_rule(tile.group_size)
def _(ctx, node):
    ctx.values[node.out] = (str(ctx.team.group),)


@emission_rule(tile.barrier)
def _(ctx, node):
    if ctx.team.block_threads > 1:
        ctx.team.synchronise()


def emit_program_number(ctx: EmissionContext) -> str:
    """The program's number in row-major order, as 64 bits."""
    total = "0"
    for axis in range(ctx.grid.rank):
        index, count = _emit_grid_index(ctx, "ctaid", axis), _emit_grid_index(ctx, "nctaid", axis)
        total = index if total == "0" else ctx.text.let("mad.lo.s64", "b64", total, count, index)
    return total


def emit_program_count(ctx: EmissionContext) -> str:
    """The number of programs of the grid, as 64 bits."""
    total = _emit_grid_index(ctx, "nctaid", 0)
    for axis in range(1, ctx.grid.rank):
        count = _emit_grid_index(ctx, "nctaid", axis)
        total = ctx.team.hoist(("programs", axis), "mul.lo.s64", "b64", total, count)
    return total


@emission_rule(tile.grid_barrier)
def _(ctx: EmissionContext, node: Node) -> None:
    text, team = ctx.text, ctx.team
    site, state = ctx.entry.hidden.add_site("meeting", {"place": describe_location(node.loc)})
    target = team.hoist(("arrivals",), "mov.u64", "b64", 0)
    synchronise_team(ctx)  # orders the block's earlier writes
    text.do("add.s64", target, target, emit_program_count(ctx))
    deadlocked = text.let("setp.lt.u32", "pred", team.thread, 0)
    done = text.new_label("met")
    text.do(f"bra {done}", guard=text.let("setp.ne.u32", "pred", team.thread, 0))
    _emit_arrive_and_wait(ctx, state, target, deadlocked, done)
    number = materialise_operand(text, "b64", emit_program_number(ctx))
    record = text.let("add.s64", "b64", number, site << SITE_BIT)
    text.do("red.global.min.u64", f"[{state}+{DEADLOCK_AT}]", record)
    text.label(done)
    text.do(f"bra {get_exit_label(ctx)}", guard=text.let("barrier.red.or.pred", "pred", 0, deadlocked))


def _emit_arrive_and_wait(ctx: EmissionContext, state: str, target: str, deadlocked: str, done: str) -> None:
    """Arrive, and poll until `target` arrivals; control falls through where that cannot happen any more."""
    text, retry = ctx.text, ctx.text.new_label("meet")
    text.do("fence.acq_rel.gpu")
    text.do("red.relaxed.gpu.global.add.u64", f"[{state}+{ARRIVED_AT}]", 1)
    text.label(retry)
    # Exits are read before arrivals: a program that has exited may have arrived at this barrier before.
    exited = text.let("ld.acquire.gpu.global.u64", "b64", f"[{state}+{EXITED_AT}]")
    arrived = text.let("ld.acquire.gpu.global.u64", "b64", f"[{state}+{ARRIVED_AT}]")
    text.do(f"bra {done}", guard=text.let("setp.ge.u64", "pred", arrived, target))
    text.do("setp.ne.u64", deadlocked, exited, 0)
    text.do("nanosleep.u32", POLL_NANOSECONDS, guard=f"!{deadlocked}")
    text.do(f"bra {retry}", guard=f"!{deadlocked}")


def exit_grid_barrier(ctx: EmissionContext) -> None:
    """Count this program's exit at the end of an entry with grid barriers; the last program resets the counters."""
    text, team = ctx.text, ctx.team
    state, out = ctx.entry.hidden.address("meeting"), text.new_label("out")
    text.do(f"bra {out}", guard=text.let("setp.ne.u32", "pred", team.thread, 0))
    number = text.let("add.s64", "b64", materialise_operand(text, "b64", emit_program_number(ctx)), 1)
    text.let("atom.relaxed.gpu.global.cas.b64", "b64", f"[{state}+{FIRST_EXIT_AT}]", 0, number)
    before = text.let("atom.acq_rel.gpu.global.add.u64", "b64", f"[{state}+{EXITED_AT}]", 1)
    exits = text.let("add.s64", "b64", before, 1)
    last = text.let("setp.eq.u64", "pred", exits, emit_program_count(ctx))
    for offset in (ARRIVED_AT, EXITED_AT):
        text.do("st.global.u64", f"[{state}+{offset}]", 0, guard=last)
    text.label(out)

"""Diagnostics: assertions and prints, recorded in device memory that the launcher reads afterwards.

A failed assertion is one number (program, tile, element); the least is kept whatever the order of threads, with a
record of the values beside the condition. A print appends a record: site, tile, program, loop rounds, operands. A
record for which there is no room is counted and dropped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tessera.codegen.diagnostics import (
    ASSERT_BUFFER_BYTES,
    ASSERT_PROGRAM_BIT,
    ASSERT_RECORD_BYTES,
    ASSERT_TILE_BIT,
    CAPACITY_AT,
    END_AT,
    MAX_SHOWN_VALUES,
    PRINT_ALIGN,
    PRINT_TILE_BIT,
    WANTED_AT,
    WORD_BYTES,
    describe_location,
)
from tessera.codegen.ptx.context import EmissionContext, get_exit_label, synchronise_team
from tessera.codegen.ptx.passes.layout_inference import static_shape
from tessera.codegen.ptx.passes.shared_memory_allocator import SHARED_SYMBOL
from tessera.codegen.ptx.table import emission_rule
from tessera.codegen.ptx.table.blocks.block_access import plan_block_accesses, store_block
from tessera.codegen.ptx.table.blocks.layout_conversion import broadcast_registers, row_major_strides
from tessera.codegen.ptx.table.blocks.program_grid import emit_program_number
from tessera.codegen.ptx.table.scalars.packing import encode_elements, materialise_operand
from tessera.codegen.ptx.text.memref import PtxMemRef
from tessera.codegen.ptx.text.register_types import element_bytes, register_class
from tessera.codegen.ptx.text.thread_team import and_predicates
from tessera.core.errors import UnsupportedOpError
from tessera.core.types import DType, TensorType, int64
from tessera.ir.core import Attrs, Block, Node, Value
from tessera.ops.dialects import control_flow, mbarrier, tile
from tessera.ops.tensor import basic

# Assertions: the first failure of each is kept in memory that whoever launches looks at.
#
# A failure is one number: the program's in row-major order, then the tile's in its group, then the element's in the
# block. The least of all failures is kept, whatever the order in which threads run. What stands beside the condition
# there is in one of the records that each new least failure leaves.


@emission_rule(tile.assert_)
def _(ctx: EmissionContext, node: Node) -> None:
    text, team = ctx.text, ctx.team
    condition, *values = node.args
    layout = ctx.layout(condition)
    shown = [v for v in values if _is_broadcastable(static_shape(v), layout.shape)][:MAX_SHOWN_VALUES]
    site, found = ctx.entry.hidden.add_site("reports", describe_assertion(node, team.group, shown))
    beside = [broadcast_registers(ctx, v, layout) for v in shown]
    program = _pack_tile_number(ctx)
    steps = row_major_strides(layout.shape, 1)
    first = "0"
    for axis, step in enumerate(steps):
        place = team.thread_offset(layout, axis)
        first = text.let("mad.lo.u32", "b32", place, step, first) if place != "0" else first
    failed = []
    for i, (held, offset) in enumerate(zip(broadcast_registers(ctx, condition, layout), layout.offsets, strict=True)):
        wrong = text.let("not.pred", "pred", held)
        failed.append(
            and_predicates(text, wrong, team.owner_predicate(layout), *team.bounds_predicates(layout, offset))
        )
        number = text.let("add.u32", "b32", first, sum(n * s for n, s in zip(offset, steps, strict=True)))
        key = text.let("or.b64", "b64", program, text.let("cvt.u64.u32", "b64", number))
        old = text.let("mov.u64", "b64", 0)
        text.do("atom.global.min.u64", old, f"[{found}+{WORD_BYTES * site}]", key, guard=failed[-1])
        if shown:  # of the least failure so far
            kept = [(v.type.dtype, registers[i]) for v, registers in zip(shown, beside, strict=True)]
            _record_failure(ctx, site, key, text.let("setp.lt.u64", "pred", key, old), kept)
    _exit_failed_program(ctx, failed)


def _is_broadcastable(shape: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    """Whether a block has an element for each of another, or one for several."""
    ours = whole[len(whole) - len(shape) :]
    return len(shape) <= len(whole) and all(n in (1, m) for n, m in zip(shape, ours, strict=True))


def _pack_tile_number(ctx: EmissionContext) -> str:
    """The program and the tile, where a failure's number has them."""
    text, team = ctx.text, ctx.team
    program = text.let("shl.b64", "b64", emit_program_number(ctx), ASSERT_PROGRAM_BIT)
    if team.group == 1:
        return program
    tile = text.let("shl.b32", "b32", team.thread, ASSERT_TILE_BIT)
    return text.let("or.b64", "b64", program, text.let("cvt.u64.u32", "b64", tile))


def _record_failure(ctx: EmissionContext, site: int, key: str, guard: str, values: Sequence[tuple[DType, str]]) -> None:
    """What stands beside the condition at a failure, in a record of its own if there is room for one more."""
    text = ctx.text
    _, memory = ctx.entry.hidden.add_site("values", {})
    at = text.let("mov.u64", "b64", ASSERT_BUFFER_BYTES)
    text.do("atom.global.add.u64", at, f"[{memory}]", ASSERT_RECORD_BYTES, guard=guard)
    some = text.let("setp.lt.u64", "pred", at, ASSERT_BUFFER_BYTES)
    record = text.let("add.s64", "b64", memory, at)
    for i, word in enumerate((key, site, *(_element_bits(ctx, dtype, x) for dtype, x in values))):
        text.do("st.global.u64", f"[{record}+{WORD_BYTES * (i + 1)}]", word, guard=some)


def _element_bits(ctx: EmissionContext, dtype: DType, x: str) -> str:
    """An element in memory's form, at the low end of a word."""
    text = ctx.text
    if element_bytes(dtype) < WORD_BYTES // 2:
        return text.let("cvt.u64.u32", "b64", materialise_operand(text, "b32", encode_elements(text, dtype, [x])[0]))
    kind = register_class(dtype)
    bits = text.let(
        f"mov.b{element_bytes(dtype) * 8}", f"b{element_bytes(dtype) * 8}", materialise_operand(text, kind, x)
    )
    return bits if element_bytes(dtype) == WORD_BYTES else text.let("cvt.u64.u32", "b64", bits)


def _exit_failed_program(ctx: EmissionContext, failed: Sequence[str]) -> None:
    """The end of a program that failed: of all its threads, or of a tile's own thread, unless others wait for it.

    Where threads work through several programs, or have different work, the program goes on.
    """
    text, team = ctx.text, ctx.team
    if ctx.grid.scheduler is not None or team.producer_threads or (team.group > 1 and _group_synchronises(ctx)):
        return
    total = failed[0]
    for each in failed[1:]:
        total = text.let("or.pred", "pred", total, each)
    if team.threads > 1:
        total = text.let("barrier.red.or.pred", "pred", 0, total)
        ctx.smem.hazards.note_barrier()
    text.do(f"bra {get_exit_label(ctx)}", guard=total)


def _group_synchronises(ctx: EmissionContext) -> bool:
    """Whether tiles of a group wait for each other."""
    waits = (tile.barrier, tile.grid_barrier, tile.exchange, tile.collect, tile.meet, *mbarrier.MBARRIER_OPS)
    return any(node.op in waits for node in ctx.function.body.walk())


def describe_assertion(node: Node, group: int, shown: Sequence[Value]) -> dict[str, Any]:
    """A place of the text in words that JSON can hold."""
    return {
        "text": node.attrs["message"],
        "group": group,
        "place": describe_location(node.loc),
        "shape": list(static_shape(node.args[0])),
        "values": [v.type.dtype.name for v in shown],  # type: ignore[union-attr]
    }


@emission_rule(tile.line)
def _(ctx, node):
    """Nothing: a place for a debugger to stop at, which compiled code has no use for."""


@emission_rule(tile.pause)
def _(ctx, node):
    raise UnsupportedOpError(
        "the target ptx does not stop in a debugger", location=node.loc,
        suggestion='run this kernel with target="interp", or take breakpoint() out',
    )  # fmt: skip


# Prints: what a tile says is appended to memory that whoever launches prints, once all is done.
#
# A record holds the number of the place in the text and the tile's in its group, the program's number, the rounds of
# the
# loops around the place, and the operands in row-major order. The head of the memory says how many bytes are wanted,
# how
# many there are, and where records end: one that has no room is counted, not written, and so are those after it.


LOOP_OPS = (control_flow.for_, control_flow.while_)


def _align_up(count: int) -> int:
    return -(-count // PRINT_ALIGN) * PRINT_ALIGN


def find_node_path(block: Block, wanted: Node) -> tuple[list[Node], list[int | None]] | None:
    """The loops around a node, and its place: the number of each node and region on the way, None for a loop's round.

    Places whose rounds are filled in are in the order in which one tile comes to them.
    """
    for number, node in enumerate(block.nodes):
        if node is wanted:
            return [], [number]
        for part, region in enumerate(node.regions):
            found = find_node_path(region, wanted)
            if found is not None:
                looped = node.op in LOOP_OPS
                return [node] * looped + found[0], [number, *([None] if looped else []), part, *found[1]]
    return None


def start_loop_counter(ctx: EmissionContext, loop: Node) -> None:
    """Zero the iteration counter of a loop that prints."""
    if any(node.op is tile.print_ for region in loop.regions for node in region.walk()):
        ctx.entry.loop_counters[loop] = ctx.text.let("mov.u64", "b64", 0)


def advance_loop_counter(ctx: EmissionContext, loop: Node) -> None:
    """Count an iteration of a loop that prints."""
    counter = ctx.entry.loop_counters.get(loop)
    if counter is not None:
        ctx.text.do("add.s64", counter, counter, 1)


@emission_rule(tile.print_)
def _(ctx: EmissionContext, node: Node) -> None:
    place = find_node_path(ctx.function.body, node)
    assert place is not None
    loops, path = place
    starts, total = _plan_record(node, len(loops))
    site, memory = ctx.entry.hidden.add_site("prints", _describe_print(ctx, node, path, total))
    record, fits = _claim_record(ctx, memory, total)
    _store_header(ctx, record, fits, site, [ctx.entry.loop_counters[loop] for loop in loops])
    for v, start in zip(node.args, starts, strict=True):
        _store_operand(ctx, v, ctx.text.let("add.s64", "b64", record, start), fits)


def _plan_record(node: Node, rounds: int) -> tuple[list[int], int]:
    """Where the operands begin in a record, and its bytes."""
    starts, at = [], _align_up(WORD_BYTES * (2 + rounds))
    for v in node.args:
        starts.append(at)
        at += _align_up(math.prod(static_shape(v)) * element_bytes(v.type.dtype))  # type: ignore[union-attr]
    return starts, at


def _describe_print(ctx: EmissionContext, node: Node, path: list[int | None], total: int) -> dict[str, Any]:
    """A place of the text in words that JSON can hold."""
    return {
        "text": node.attrs["label"],
        "ordered": node.attrs["ordered"],
        "group": ctx.team.group,
        "path": path,
        "bytes": total,
        "operands": [{"shape": list(static_shape(v)), "dtype": v.type.dtype.name} for v in node.args],  # type: ignore[union-attr]
    }


def _is_tile_leader(ctx: EmissionContext) -> str:
    """Whether a thread speaks for its tile: the first of a team, or each where tiles are threads."""
    team = ctx.team
    return team.hoist(("first",), "setp.eq.u32", "pred", team.thread, 0) if team.threads > 1 else ""


def _claim_record(ctx: EmissionContext, memory: str, total: int) -> tuple[str, str]:
    """The address of a new record, and whether there is room for it; a team has it of its first thread."""
    text, team = ctx.text, ctx.team
    at = text.new("b64")
    text.do("atom.global.add.u64", at, f"[{memory}+{WANTED_AT}]", total, guard=_is_tile_leader(ctx))
    if team.threads > 1:
        start = ctx.smem.allocator.shared(WORD_BYTES, WORD_BYTES)
        slot = f"[{team.hoist(('slot',), 'add.u32', 'b32', _shared_base(ctx), start)}]"
        synchronise_team(ctx)  # whoever still reads the last one
        text.do("st.shared.u64", slot, at, guard=_is_tile_leader(ctx))
        synchronise_team(ctx)
        at = text.let("ld.shared.u64", "b64", slot)
    end = text.let("add.s64", "b64", at, total)
    fits = text.let("setp.le.u64", "pred", end, text.let("ld.global.u64", "b64", f"[{memory}+{CAPACITY_AT}]"))
    none = and_predicates(text, _is_tile_leader(ctx), text.let("not.pred", "pred", fits))
    text.do("red.global.min.u64", f"[{memory}+{END_AT}]", at, guard=none)
    return text.let("add.s64", "b64", memory, at), fits


def _shared_base(ctx: EmissionContext) -> str:
    return ctx.team.hoist((SHARED_SYMBOL,), "mov.u32", "b32", SHARED_SYMBOL)


def _store_header(ctx: EmissionContext, record: str, fits: str, site: int, rounds: list[str]) -> None:
    text, team = ctx.text, ctx.team
    where = text.let("mov.u64", "b64", site)
    if team.group > 1:
        tile = text.let("cvt.u64.u32", "b64", team.thread)
        where = text.let("add.s64", "b64", where, text.let("shl.b64", "b64", tile, PRINT_TILE_BIT))
    guard = and_predicates(text, _is_tile_leader(ctx), fits)
    for i, word in enumerate((where, materialise_operand(text, "b64", emit_program_number(ctx)), *rounds)):
        text.do("st.global.u64", f"[{record}+{WORD_BYTES * i}]", word, guard=guard)


def _store_operand(ctx: EmissionContext, v: Value, base: str, fits: str) -> None:
    """An operand at an address, each element by one thread."""
    layout = ctx.layout(v)
    memory = PtxMemRef(v.type.dtype, "global", base, static_shape(v), PRINT_ALIGN)  # type: ignore[union-attr]
    starts = [_zero_index(ctx)] * len(memory.shape)
    runs = plan_block_accesses(ctx, memory, starts, layout, False, (fits,) * layout.count, once=True)
    store_block(ctx, memory, runs, ctx.values[v])


def _zero_index(ctx: EmissionContext) -> Value:
    """An index that is 0."""
    node = Node(basic.full, (), Attrs({"shape": (), "value": 0, "dtype": int64}), (Value(TensorType((), int64)),))
    ctx.analyses.producers[node.out] = node
    ctx.values[node.out] = ("0",)
    return node.out

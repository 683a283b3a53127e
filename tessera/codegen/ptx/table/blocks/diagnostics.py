"""Diagnostics: assertions and prints, recorded in device memory that the runtime reads after the launch.

A failed assertion is one number: program, tile and element. The least is kept, so the result does not depend on the
order of threads; each new least failure appends a record of the values beside the condition. A print appends a record:
site and tile, program, iteration numbers of the surrounding loops, operands. A record that does not fit is counted and
dropped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tessera.codegen.artifact import describe_size
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
from tessera.codegen.ptx.context import EmissionContext, PtxMemRef, get_exit_label, synchronise_team
from tessera.codegen.ptx.layout import DistributedLayout, and_predicates
from tessera.codegen.ptx.passes.layout_inference import static_shape
from tessera.codegen.ptx.passes.shared_memory import SHARED_SYMBOL
from tessera.codegen.ptx.table import emission_rule
from tessera.codegen.ptx.table.blocks.block_access import encode_elements, plan_block_accesses, store_block
from tessera.codegen.ptx.table.blocks.layout_conversion import broadcast_registers, row_major_strides
from tessera.codegen.ptx.table.blocks.program_grid import emit_program_number
from tessera.codegen.ptx.table.scalars.arithmetic import materialise_operand
from tessera.codegen.ptx.text.builder import PtxBuilder, element_bytes, register_class
from tessera.core.errors import UnsupportedOpError
from tessera.core.symbolic_dim import proves_less, round_up
from tessera.core.types import DType, TensorType, int64
from tessera.ir.core import Attrs, Block, Node, Value
from tessera.ops.dialects import control_flow, mbarrier, tile
from tessera.ops.tensor import basic, shape

LOOP_OPS = (control_flow.for_, control_flow.while_)
SYNCHRONISING_OPS = (
    tile.barrier,
    tile.grid_barrier,
    tile.exchange,
    tile.collect,
    tile.meet,
    *mbarrier.MBARRIER_OPS,
)


@emission_rule(tile.assert_)
def _(ctx: EmissionContext, node: Node) -> None:
    text, team = ctx.text, ctx.team
    condition, *values = node.args
    layout = ctx.layout(condition)
    shown = [v for v in values if _is_broadcastable(static_shape(v), layout.shape)][:MAX_SHOWN_VALUES]
    site, reports = ctx.entry.hidden.add_site("reports", describe_assertion(node, team.group, shown))
    shown_registers = [broadcast_registers(ctx, v, layout) for v in shown]
    instance, strides = _emit_instance_key(ctx), row_major_strides(layout.shape, 1)
    thread_element = _emit_thread_element(ctx, layout, strides)
    failures = []
    for i, held in enumerate(broadcast_registers(ctx, condition, layout)):
        offset = layout.offsets[i]
        failed = text.let("not.pred", "pred", held)
        bounds = (team.owner_predicate(layout), *team.bounds_predicates(layout, offset))
        failures.append(and_predicates(text, failed, *bounds))
        place = (reports, instance, thread_element)
        key, old = _emit_failure(ctx, site, place, offset, strides, failures[-1])
        if shown:
            least = text.let("setp.lt.u64", "pred", key, old)
            elements = [(v.type.dtype, registers[i]) for v, registers in zip(shown, shown_registers, strict=True)]
            _record_failure(ctx, site, key, least, elements)
    _exit_failed_program(ctx, failures)


@emission_rule(shape.check_index)
def _(ctx: EmissionContext, node: Node) -> None:
    (v,), layout, size = node.args, ctx.layout(node.out), node.attrs["size"]
    indices = _widen_indices(ctx.text, v.type.dtype, broadcast_registers(ctx, v, layout))  # type: ignore[union-attr]
    low, high = ctx.analyses.ranges.of(v)
    if low >= 0 and proves_less(high, size):
        ctx.values[node.out] = tuple(indices)
        return
    text, found, outside, bound = ctx.text, [], [], ctx.sizes.find(size)
    for index in indices:
        place = index
        if node.attrs["wrap"]:
            negative = text.let("setp.lt.s64", "pred", index, 0)
            place = text.let("selp.b64", "b64", text.let("add.s64", "b64", index, bound), index, negative)
        outside.append(text.let("setp.ge.u64", "pred", place, bound))
        found.append(text.let("selp.b64", "b64", 0, place, outside[-1]))
    ctx.values[node.out] = tuple(found)
    _record_outside(ctx, node, layout, indices, outside)


def _widen_indices(text: PtxBuilder, dtype: DType, registers: Sequence[str]) -> list[str]:
    """Integer registers as registers of 64 bits; equal ones are converted once."""
    form, wide = "u32" if dtype.kind == "uint" else "s32", {}
    for held in registers:
        if held not in wide:
            whole = materialise_operand(text, register_class(dtype), held)
            wide[held] = whole if dtype.bits == 64 else text.let(f"cvt.s64.{form}", "b64", whole)
    return [wide[held] for held in registers]


def _record_outside(
    ctx: EmissionContext, node: Node, layout: DistributedLayout, indices: Sequence[str], outside: Sequence[str]
) -> None:
    """Record the indices that are out of bounds; a branch skips this where a thread has none."""
    text, team = ctx.text, ctx.team
    known = {**node.attrs, "size": describe_size(node.attrs["size"])}
    described = {**known, "kind": "index", "shape": list(layout.shape), "values": ["int64"]}
    site, reports = ctx.entry.hidden.add_site("reports", {**described, **_describe_origin(node, team.group)})
    failures = [
        and_predicates(text, bad, team.owner_predicate(layout), *team.bounds_predicates(layout, layout.offsets[i]))
        for i, bad in enumerate(outside)
    ]
    instance, strides = _emit_instance_key(ctx), row_major_strides(layout.shape, 1)
    thread_element, skip = _emit_thread_element(ctx, layout, strides), text.new_label("inside")
    none = text.let("not.pred", "pred", _join_predicates(text, failures))
    ctx.entry.hidden.address("values")
    text.do(f"bra {skip}", guard=none)
    for i, failed in enumerate(failures):
        key, old = _emit_failure(ctx, site, (reports, instance, thread_element), layout.offsets[i], strides, failed)
        least = text.let("setp.lt.u64", "pred", key, old)
        _record_failure(ctx, site, key, least, [(int64, indices[i])])
    text.label(skip)


def _emit_failure(
    ctx: EmissionContext,
    site: int,
    place: tuple[str, str, str],
    offset: Sequence[int],
    strides: Sequence[int],
    guard: str,
) -> tuple[str, str]:
    """Note a failure of one element, where the guard holds: its key, and the least key before it (0 elsewhere)."""
    text, (reports, instance, thread_element) = ctx.text, place
    distance = sum(n * stride for n, stride in zip(offset, strides, strict=True))
    element = text.let("add.u32", "b32", thread_element, distance)
    key = text.let("or.b64", "b64", instance, text.let("cvt.u64.u32", "b64", element))
    old = text.let("mov.u64", "b64", 0)
    text.do("atom.global.min.u64", old, f"[{reports}+{WORD_BYTES * site}]", key, guard=guard)
    return key, old


def _join_predicates(text: PtxBuilder, predicates: Sequence[str]) -> str:
    """The disjunction of some predicates."""
    total = predicates[0]
    for each in predicates[1:]:
        total = text.let("or.pred", "pred", total, each)
    return total


def _is_broadcastable(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    """Whether a block broadcasts to a shape."""
    inner = to[len(to) - len(shape) :]
    return len(shape) <= len(to) and all(n in (1, m) for n, m in zip(shape, inner, strict=True))


def _emit_instance_key(ctx: EmissionContext) -> str:
    """The upper bits of a failure's key: program and tile."""
    text, team = ctx.text, ctx.team
    program = text.let("shl.b64", "b64", emit_program_number(ctx), ASSERT_PROGRAM_BIT)
    if team.group == 1:
        return program
    tile_number = text.let("shl.b32", "b32", team.thread, ASSERT_TILE_BIT)
    return text.let("or.b64", "b64", program, text.let("cvt.u64.u32", "b64", tile_number))


def _emit_thread_element(ctx: EmissionContext, layout: DistributedLayout, strides: Sequence[int]) -> str:
    """The row-major number of a thread's first element."""
    total = "0"
    for axis, stride in enumerate(strides):
        thread = ctx.team.thread_offset(layout, axis)
        total = ctx.text.let("mad.lo.u32", "b32", thread, stride, total) if thread != "0" else total
    return total


def _record_failure(ctx: EmissionContext, site: int, key: str, guard: str, values: Sequence[tuple[DType, str]]) -> None:
    """Append the values beside a failed condition to the record buffer, if it has room."""
    text = ctx.text
    _, buffer = ctx.entry.hidden.add_site("values", {})
    offset = text.let("mov.u64", "b64", ASSERT_BUFFER_BYTES)
    text.do("atom.global.add.u64", offset, f"[{buffer}]", ASSERT_RECORD_BYTES, guard=guard)
    fits = text.let("setp.lt.u64", "pred", offset, ASSERT_BUFFER_BYTES)
    record = text.let("add.s64", "b64", buffer, offset)
    for i, word in enumerate((key, site, *(_emit_element_bits(ctx, dtype, x) for dtype, x in values))):
        text.do("st.global.u64", f"[{record}+{WORD_BYTES * (i + 1)}]", word, guard=fits)


def _emit_element_bits(ctx: EmissionContext, dtype: DType, x: str) -> str:
    """An element in its memory format, zero-extended to a word."""
    text, size = ctx.text, element_bytes(dtype)
    if size < WORD_BYTES // 2:
        return text.let("cvt.u64.u32", "b64", materialise_operand(text, "b32", encode_elements(text, dtype, [x])[0]))
    kind, form = register_class(dtype), f"b{size * 8}"
    bits = text.let(f"mov.{form}", form, materialise_operand(text, kind, x))
    return bits if size == WORD_BYTES else text.let("cvt.u64.u32", "b64", bits)


def _exit_failed_program(ctx: EmissionContext, failures: Sequence[str]) -> None:
    """Exit where a program, or a tile of a group, has failed, unless other threads may wait for it.

    A persistent or warp-specialised kernel continues.
    """
    text, team = ctx.text, ctx.team
    if ctx.grid.scheduler is not None or team.producer_threads or (team.group > 1 and _has_synchronisation(ctx)):
        return
    total = _join_predicates(text, failures)
    if team.threads > 1:
        total = text.let("barrier.red.or.pred", "pred", 0, total)
        ctx.smem.hazards.note_barrier()
    text.do(f"bra {get_exit_label(ctx)}", guard=total)


def _has_synchronisation(ctx: EmissionContext) -> bool:
    """Whether tiles of a group wait for each other."""
    return any(node.op in SYNCHRONISING_OPS for node in ctx.function.body.walk())


def describe_assertion(node: Node, group: int, shown: Sequence[Value]) -> dict[str, Any]:
    """The site of an assertion as manifest data."""
    return {
        "text": node.attrs["message"],
        **_describe_origin(node, group),
        "shape": list(static_shape(node.args[0])),
        "values": [v.type.dtype.name for v in shown],  # type: ignore[union-attr]
    }


def _describe_origin(node: Node, group: int) -> dict[str, Any]:
    return {"group": group, "place": describe_location(node.loc)}


@emission_rule(tile.line)
def _(ctx, node):
    """A debugger's stepping point emits nothing."""


@emission_rule(tile.pause)
def _(ctx, node):
    raise UnsupportedOpError(
        "the target ptx does not stop in a debugger", location=node.loc,
        suggestion='run this kernel with target="interp", or remove breakpoint()',
    )  # fmt: skip


def find_node_path(block: Block, wanted: Node) -> tuple[list[Node], list[int | None]] | None:
    """The loops around a node, and its path: the position of each node and region, None for an iteration number.

    With the iteration numbers filled in, paths sort in execution order.
    """
    for position, node in enumerate(block.nodes):
        if node is wanted:
            return [], [position]
        for part, region in enumerate(node.regions):
            found = find_node_path(region, wanted)
            if found is not None:
                is_loop = node.op in LOOP_OPS
                return [node] * is_loop + found[0], [position, *([None] if is_loop else []), part, *found[1]]
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
    found = find_node_path(ctx.function.body, node)
    assert found is not None
    loops, path = found
    starts, size = _plan_record(node, len(loops))
    site, buffer = ctx.entry.hidden.add_site("prints", _describe_print(ctx, node, path, size))
    record, fits = _claim_record(ctx, buffer, size)
    _store_header(ctx, record, fits, site, [ctx.entry.loop_counters[loop] for loop in loops])
    for v, start in zip(node.args, starts, strict=True):
        _store_operand(ctx, v, ctx.text.let("add.s64", "b64", record, start), fits)


def _plan_record(node: Node, loops: int) -> tuple[list[int], int]:
    """The offsets of the operands in a record, and its size."""
    starts, size = [], round_up(WORD_BYTES * (2 + loops), PRINT_ALIGN)
    for v in node.args:
        starts.append(size)
        size += round_up(math.prod(static_shape(v)) * element_bytes(v.type.dtype), PRINT_ALIGN)  # type: ignore[union-attr]
    return starts, size


def _describe_print(ctx: EmissionContext, node: Node, path: list[int | None], size: int) -> dict[str, Any]:
    """The site of a print as manifest data."""
    return {
        "text": node.attrs["label"],
        "ordered": node.attrs["ordered"],
        "group": ctx.team.group,
        "path": path,
        "bytes": size,
        "operands": [{"shape": list(static_shape(v)), "dtype": v.type.dtype.name} for v in node.args],  # type: ignore[union-attr]
    }


def _claim_record(ctx: EmissionContext, buffer: str, size: int) -> tuple[str, str]:
    """The address of a new record, and the predicate that it fits; the leader claims it and broadcasts its offset."""
    text, team = ctx.text, ctx.team
    offset = text.new("b64")
    text.do("atom.global.add.u64", offset, f"[{buffer}+{WANTED_AT}]", size, guard=team.tile_leader_predicate())
    if team.threads > 1:
        start = ctx.smem.allocator.allocate_shared(WORD_BYTES, WORD_BYTES)
        base = team.hoist((SHARED_SYMBOL,), "mov.u32", "b32", SHARED_SYMBOL)
        broadcast = f"[{team.hoist(('slot',), 'add.u32', 'b32', base, start)}]"
        synchronise_team(ctx)  # other threads may still read the previous offset
        text.do("st.shared.u64", broadcast, offset, guard=team.tile_leader_predicate())
        synchronise_team(ctx)
        offset = text.let("ld.shared.u64", "b64", broadcast)
    end = text.let("add.s64", "b64", offset, size)
    fits = text.let("setp.le.u64", "pred", end, text.let("ld.global.u64", "b64", f"[{buffer}+{CAPACITY_AT}]"))
    dropped = and_predicates(text, team.tile_leader_predicate(), text.let("not.pred", "pred", fits))
    text.do("red.global.min.u64", f"[{buffer}+{END_AT}]", offset, guard=dropped)
    return text.let("add.s64", "b64", buffer, offset), fits


def _store_header(ctx: EmissionContext, record: str, fits: str, site: int, counters: Sequence[str]) -> None:
    """Store site and tile, program, and the iteration numbers of the loops around the site."""
    text, team = ctx.text, ctx.team
    where = text.let("mov.u64", "b64", site)
    if team.group > 1:
        tile_number = text.let("cvt.u64.u32", "b64", team.thread)
        where = text.let("add.s64", "b64", where, text.let("shl.b64", "b64", tile_number, PRINT_TILE_BIT))
    guard = and_predicates(text, team.tile_leader_predicate(), fits)
    for i, word in enumerate((where, materialise_operand(text, "b64", emit_program_number(ctx)), *counters)):
        text.do("st.global.u64", f"[{record}+{WORD_BYTES * i}]", word, guard=guard)


def _store_operand(ctx: EmissionContext, v: Value, base: str, fits: str) -> None:
    """Store an operand to a record, each element by one thread."""
    layout = ctx.layout(v)
    memory = PtxMemRef(v.type.dtype, "global", base, static_shape(v), PRINT_ALIGN)  # type: ignore[union-attr]
    starts = [_make_zero_index(ctx)] * len(memory.shape)
    accesses = plan_block_accesses(ctx, memory, starts, layout, False, (fits,) * layout.count, once=True)
    store_block(ctx, memory, accesses, ctx.values[v])


def _make_zero_index(ctx: EmissionContext) -> Value:
    """An index constant 0."""
    node = Node(basic.full, (), Attrs({"shape": (), "value": 0, "dtype": int64}), (Value(TensorType((), int64)),))
    ctx.analyses.producers[node.out] = node
    ctx.values[node.out] = ("0",)
    return node.out

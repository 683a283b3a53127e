"""Control flow: branches and loops. Each loop-carried value has an array, into which an iteration copies its result."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from tessera.codegen.csl.table.blocks import emit, emit_block
from tessera.codegen.csl.text.context import CslContext, TaskFunction
from tessera.codegen.csl.text.dsd import CSL_TYPES, PeArrayView
from tessera.codegen.csl.text.memory_allocation import (
    allocate_array,
    allocate_for,
    bind_value,
    drop_value,
    release_view,
    unpin_views,
)
from tessera.codegen.csl.text.program_files import end_task
from tessera.codegen.csl.text.statements import add_line, cast_to_index, emit_copy, open_block, reuse_or_copy
from tessera.ir.core import Block, Node, Value
from tessera.ops.dialects import control_flow, mesh


def allocate_loop_carried(
    ctx: CslContext, node: Node, carried: Sequence[PeArrayView], coming: Collection[int] = ()
) -> None:
    """Allocate arrays with the initial values of the loop-carried values. Values that the loop receives (`coming`) have
    a double buffer.
    """
    initial = node.args[len(node.args) - len(carried) :]
    captured = {value for region in node.regions for value in region.free}
    for number, (value, old, start) in enumerate(zip(node.results, initial, carried, strict=True)):
        if number in coming:
            bind_value(ctx, value, start)
            continue
        shared = initial.count(old) > 1 or old in captured  # each needs an array of its own
        kind = CSL_TYPES[value.type.dtype]
        place = _copy_to_new_array(ctx, start, kind) if shared else reuse_or_copy(ctx, old, start, kind)
        bind_value(ctx, value, place)


def _bind_region_params(ctx: CslContext, node: Node, params: Sequence[Value]) -> None:
    """Bind the parameters of a region to the carried values."""
    for param, value in zip(params, node.results, strict=True):
        bind_value(ctx, param, ctx.values[value])


def emit_yield(ctx: CslContext, node: Node, body: Block, coming: Collection[int] = ()) -> None:
    """Copy the results of an iteration to the carried values; results that another copy would overwrite are copied
    first.
    """
    kept = [n for n in range(len(node.results)) if n not in coming]
    places = [ctx.values[node.results[n]] for n in kept]
    results = [ctx.values[body.results[n]] for n in kept]
    targets = {p.buffer for p in places}
    apart = [
        _copy_to_new_array(ctx, x, x.type) if x.buffer in targets and x != place else x
        for x, place in zip(results, places, strict=True)
    ]
    for place, view in zip(places, apart, strict=True):
        emit_copy(ctx, place, view)
    for view, result in zip(apart, results, strict=True):
        if view is not result:
            release_view(ctx, view)
    _drop_region_values(ctx, body)


def _drop_region_values(ctx: CslContext, block: Block) -> None:
    """Unbind the parameters and values of a region."""
    own = {*block.params, *(v for node in block.nodes for v in node.results)}
    for value in dict.fromkeys((*block.params, *block.results)):
        if value in own:
            drop_value(ctx, value)


def _copy_to_new_array(ctx: CslContext, view: PeArrayView, kind: str) -> PeArrayView:
    copy = allocate_array(ctx, view.shape, kind)
    emit_copy(ctx, copy, view)
    return copy


def _format_bound(view: PeArrayView) -> str:
    text = view.at(())
    return text if text.lstrip("-").isdigit() else f"@as(i32, {text})"


@emit(control_flow.for_)
def _(ctx, node, lower, upper, step, *carried):
    body = node.regions[0]
    if ctx.pending_task is not None and ctx.depth == 1 and any(n.op is mesh.arrived for n in body.nodes):
        emit_task_loop(ctx, node, [lower, upper, step], carried)
        return
    turn = next(ctx.names)
    allocate_loop_carried(ctx, node, carried)
    bind_value(ctx, body.params[0], PeArrayView("i32", (), literal=cast_to_index(ctx, f"turn{turn}")))
    name = f"turn{turn}"
    _bind_region_params(ctx, node, body.params[1:])
    with open_block(
        ctx, f"for (@range(i32, {_format_bound(lower)}, {_format_bound(upper)}, {_format_bound(step)})) |{name}|"
    ):
        emit_block(ctx, body)
        emit_yield(ctx, node, body)


@emit(control_flow.while_)
def _(ctx, node, *carried):
    test, body = node.regions
    allocate_loop_carried(ctx, node, carried)
    with open_block(ctx, "while (true)"):
        _bind_region_params(ctx, node, test.params)
        emit_block(ctx, test)
        add_line(ctx, f"if ({ctx.values[test.results[0]].at(())} == 0) break;")
        _drop_region_values(ctx, test)
        _bind_region_params(ctx, node, body.params)
        emit_block(ctx, body)
        emit_yield(ctx, node, body)


@emit(control_flow.if_)
def _(ctx, node, condition):
    places = [allocate_for(ctx, value.type) for value in node.results]
    for value, place in zip(node.results, places, strict=True):
        bind_value(ctx, value, place)
    heads = (f"if ({condition.at(())} != 0)", "else")
    for head, region in zip(heads, node.regions, strict=True):
        with open_block(ctx, head):
            emit_block(ctx, region)
            for place, result in zip(places, region.results, strict=True):
                emit_copy(ctx, place, ctx.values[result])
            _drop_region_values(ctx, region)


def emit_task_loop(ctx: CslContext, node: Node, bounds: Sequence[PeArrayView], carried: Sequence[PeArrayView]) -> None:
    """Emit a loop with asynchronous receives (double buffering).

    Each iteration uses the received data and starts the receive of the next iteration into the other half of the
    buffer. The loop body is a task that is activated once per iteration; the task after the last iteration continues
    the program.
    """
    body, turn = node.regions[0], f"turn{next(ctx.names)}"
    lower, upper, step = (b.literal for b in bounds)
    coming = {place for place, value in enumerate(body.params[1:]) if _is_awaited(body, value)}
    ctx.variables.append(f"{turn}: i32 = 0")
    add_line(ctx, f"{turn} = {lower};")
    allocate_loop_carried(ctx, node, carried, coming)
    assert ctx.pending_task is not None
    task = ctx.pending_task.name
    end_task(ctx)
    with open_block(ctx, f"if ({turn} < {upper})"):
        bind_value(ctx, body.params[0], PeArrayView("i32", (), literal=turn))
        _bind_double_buffers(ctx, node, carried, coming, turn)
        ctx.pending_task = TaskFunction(task)
        emit_block(ctx, body)
        ctx.pending_task = None
        emit_yield(ctx, node, body, coming)
        add_line(ctx, f"{turn} += {step};")
        add_line(ctx, "return;")
    unpin_views(ctx)
    passes = len(range(int(lower), int(upper), int(step)))
    for place in coming:
        view = carried[place]
        ctx.values[node.results[place]] = replace(view, offset=view.offset + passes % 2 * view.size)


def _is_awaited(body: Block, value: Value) -> bool:
    return any(n.op is mesh.arrived and n.args[0] == value for n in body.nodes)


def _bind_double_buffers(
    ctx: CslContext, node: Node, carried: Sequence[PeArrayView], coming: Collection[int], turn: str
) -> None:
    """Bind the parameters of an iteration: received values to the full half of their buffer; the next receive goes to
    the other half.
    """
    body = node.regions[0]
    for place, (param, value) in enumerate(zip(body.params[1:], node.results, strict=True)):
        view = ctx.values[value]
        if place in coming:
            size, half = carried[place].size, f"half{next(ctx.names)}"
            add_line(ctx, f"const {half}: i16 = @as(i16, {turn} % 2) * {size};")
            ctx.receive_targets[body.results[place]] = replace(view, dynamic_offset=f"{size} - {half}")
            view = replace(view, dynamic_offset=half)
        bind_value(ctx, param, view)

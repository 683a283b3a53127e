"""Broadcast routes: each PE along an axis broadcasts in turn through the last PE, which forwards every word on arrival.

The words of the sender pass the other PEs on their way to the last PE (the token channel); from there routers alone
deliver them to all PEs (the loopback channel). After a PE's turn a control wavelet advances the router switches to the
next sender. Receives are asynchronous, and a task continues after them. In a loop, in a branch, or with too few
queues, neighbours forward in a chain instead (`collectives.emit_chain_broadcast`).
"""

from __future__ import annotations

from dataclasses import replace

from tessera.codegen.csl.table.blocks import emit
from tessera.codegen.csl.table.collectives import (
    FabricMessage,
    emit_chain_broadcast,
    emit_if_else,
    emit_shift,
    find_neighbour_conditions,
    get_fabin_dsd,
    get_fabout_dsd,
    make_message,
)
from tessera.codegen.csl.table.memory import slice_axis
from tessera.codegen.csl.text.context import CslContext
from tessera.codegen.csl.text.dsd import LONG_TYPES, PeArrayView, coalesce_axes, make_row_major_strides
from tessera.codegen.csl.text.memory_allocation import allocate_array, allocate_for, pin_view, release_view, unpin_views
from tessera.codegen.csl.text.program_files import add_completion_task, add_task, end_task, get_pending_task
from tessera.codegen.csl.text.routes import (
    COORDINATE_NAMES,
    NEIGHBOUR_CHANNELS,
    get_loopback_channel,
    get_token_channel,
    get_wraparound_channel,
)
from tessera.codegen.csl.text.statements import (
    add_channel,
    add_constant,
    add_line,
    emit_move,
    get_dsd,
    make_contiguous,
    open_block,
)
from tessera.ir.core import Node
from tessera.ops.dialects import mesh

# Payloads of control wavelets in the encoding of <control>: advance this router, or this and the next; no task.
ADVANCE_ONE, ADVANCE_TWO = "0x95F9249", "0xB5F9249"


def _find_last_coordinate(ctx: CslContext, axis: int) -> int:
    return ctx.grid[axis] - 1


def _format_forward(ctx: CslContext, received: FabricMessage, axis: int, options: str = "") -> str:
    """The statement with which the last PE forwards all words that arrive."""
    return received.format_move(
        get_fabout_dsd(ctx, get_loopback_channel(axis), received.size),
        get_fabin_dsd(ctx, get_token_channel(axis), received.size),
        options,
    )


def _format_token_pass(ctx: CslContext, axis: int) -> str:
    """The statement that passes the turn to the next PE; the last PE does not switch its own router."""
    name, last = add_channel(ctx, get_token_channel(axis)), _find_last_coordinate(ctx, axis)
    options = f".fabric_color = send_{name}, .extent = 1, .output_queue = out_{name}, .control = true"
    word = add_constant(ctx, f"@get_dsd(fabout_dsd, .{{ {options} }})", f"turn_{name}_")
    payload = f"@as(u32, if ({COORDINATE_NAMES[axis]} == {last - 1}) {ADVANCE_ONE} else {ADVANCE_TWO})"
    return f"@mov32({word}, {add_constant(ctx, payload, f'advance_{name}_')});"


def _format_root(number: str, each: int) -> str:
    """The coordinate of the present sender."""
    if number.isdigit():
        return str(int(number) // each)
    return number if each == 1 else f"{number} / {each}"


def _can_suspend(ctx: CslContext) -> bool:
    """Whether the program can continue in a task after the present statement."""
    return ctx.uses_broadcast_routes and ctx.depth == 1


@emit(mesh.broadcast)
def _(ctx, node, x, number):
    out = allocate_for(ctx, node.out.type)
    emit_chain_broadcast(ctx, out, x, node.attrs["axis"], _format_root(number.literal, node.attrs["each"]))
    return out


@emit(mesh.begin_broadcast)
def _(ctx, node, x, number):
    axis, each, text = node.attrs["axis"], node.attrs["each"], number.literal
    out = _allocate_receive_buffer(ctx, node, x)
    if out is None:
        out = allocate_for(ctx, node.out.type)
        emit_chain_broadcast(ctx, out, x, axis, _format_root(text, each))
    else:
        _begin_broadcast(ctx, out, x, axis, text, each)
    return out


def _allocate_receive_buffer(ctx: CslContext, node: Node, x: PeArrayView) -> PeArrayView | None:
    """The buffer of an asynchronous receive: half of a double buffer, because a loop receives into the other half; None
    without tasks.
    """
    if node.out in ctx.receive_targets or not _can_suspend(ctx):
        return ctx.receive_targets.get(node.out)
    return replace(
        allocate_array(ctx, (2 * max(x.size, 1),), x.type), shape=x.shape, strides=make_row_major_strides(x.shape)
    )


@emit(mesh.begin_rotate)
def _(ctx, node, x):
    axis, out = node.attrs["axis"], _allocate_receive_buffer(ctx, node, x)
    channel = NEIGHBOUR_CHANNELS[axis][0 if node.attrs["offset"] > 0 else 1]
    if out is None:
        out = allocate_for(ctx, node.out.type)
        emit_shift(ctx, out, x, axis, channel, closed=True)
        return out
    held, (sends, receives) = make_contiguous(ctx, x), find_neighbour_conditions(ctx, axis, channel)
    gate, received, own = (
        add_completion_task(ctx, COORDINATE_NAMES[axis]),
        make_message(ctx, out),
        make_message(ctx, held),
    )
    on_receive, on_send = (f".{{ .async = true, .{call} = {gate}_id }}" for call in ("activate", "unblock"))
    emit_if_else(
        ctx, receives, [received.format_receive(ctx, c, on_receive) for c in (channel, get_wraparound_channel(channel))]
    )
    emit_if_else(ctx, sends, [own.format_send(ctx, c, on_send) for c in (channel, get_wraparound_channel(channel))])
    pin_view(ctx, held)
    return out


def _begin_broadcast(ctx: CslContext, out: PeArrayView, x: PeArrayView, axis: int, number: str, each: int) -> None:
    """Start the receive of the root's `x`. The gate opens when the receive and the send are complete."""
    source, received = make_contiguous(ctx, x), make_message(ctx, out)
    own, gate = make_message(ctx, source), add_completion_task(ctx, COORDINATE_NAMES[axis])
    coordinate, last, root = COORDINATE_NAMES[axis], _find_last_coordinate(ctx, axis), _format_root(number, each)
    sent = f".{{ .async = true, .unblock = {gate}_id }}"
    add_line(
        ctx, received.format_receive(ctx, get_loopback_channel(axis), f".{{ .async = true, .activate = {gate}_id }}")
    )
    with open_block(ctx, f"if ({coordinate} == {root})"):
        with open_block(ctx, f"if ({coordinate} == {last})"):
            add_line(ctx, own.format_send(ctx, get_loopback_channel(axis), sent))
        with open_block(ctx, "else"):
            _send_and_pass_token(ctx, own, axis, gate, "" if each == 1 else f"{number} % {each} == {each - 1}")
    with open_block(ctx, f"else if ({coordinate} == {last})"):
        add_line(ctx, _format_forward(ctx, received, axis, sent))
    with open_block(ctx, "else"):
        add_line(ctx, f"@unblock({gate}_id);")
    pin_view(ctx, source)


def _send_and_pass_token(ctx: CslContext, own: FabricMessage, axis: int, gate: str, ends: str) -> None:
    """Start an asynchronous send, and pass the turn after it if it `ends` the PE's turns."""
    send = own.format_send(ctx, get_token_channel(axis), f".{{ .async = true, .unblock = {gate}_id }}")
    if _find_last_coordinate(ctx, axis) < 2:
        add_line(ctx, send)
        return
    pass_task = add_task(ctx, f"{gate}_turned", [_format_token_pass(ctx, axis), f"@unblock({gate}_id);"])
    send_and_pass = own.format_send(ctx, get_token_channel(axis), f".{{ .async = true, .activate = {pass_task}_id }}")
    if not ends:
        add_line(ctx, send_and_pass)
        return
    with open_block(ctx, f"if ({ends})"):
        add_line(ctx, send_and_pass)
    with open_block(ctx, "else"):
        add_line(ctx, send)


@emit(mesh.arrived)
def _(ctx, node, pending):
    if ctx.pending_task is not None and ctx.depth == 1:
        end_task(ctx)
        unpin_views(ctx)
    return pending


@emit(mesh.all_gather)
def _(ctx, node, x):
    along, axis = node.attrs["along"], node.attrs["axis"] % len(x.shape)
    length, pieces = x.shape[axis], ctx.grid[along]
    shape = (*x.shape[:axis], length * pieces, *x.shape[axis + 1 :])
    out = allocate_array(ctx, shape, x.type)
    every = PeArrayView(x.type, (pieces, *x.shape), out.buffer, out.offset, (length * out.strides[axis], *out.strides))
    (_emit_async_all_gather if _fits_one_dsd(ctx, every) else _emit_serial_all_gather)(ctx, every, x, along)
    return slice_axis(out, axis, 0, node.attrs["size"])


def _fits_one_dsd(ctx: CslContext, every: PeArrayView) -> bool:
    """Whether one DSD operation can receive all pieces while the PE sends its own."""
    sizes, (level,) = coalesce_axes([every])
    return _can_suspend(ctx) and every.type not in LONG_TYPES and get_dsd(ctx, level, sizes) is not None


def _emit_async_all_gather(ctx: CslContext, every: PeArrayView, x: PeArrayView, axis: int) -> None:
    """Receive all pieces with one asynchronous operation; a task continues after it."""
    sizes, (level,) = coalesce_axes([every])
    coordinate, last, source = COORDINATE_NAMES[axis], _find_last_coordinate(ctx, axis), make_contiguous(ctx, x)
    own = make_message(ctx, source)
    memory = get_dsd(ctx, level, sizes)
    add_line(
        ctx,
        own.format_move(
            str(memory),
            get_fabin_dsd(ctx, get_loopback_channel(axis), every.size),
            get_pending_task(ctx).format_async_options(),
        ),
    )
    with open_block(ctx, f"if ({coordinate} == {last})"):
        add_line(ctx, _format_forward(ctx, replace(own, size=last * own.size), axis))
        add_line(ctx, own.format_send(ctx, get_loopback_channel(axis)))
    with open_block(ctx, "else"):
        add_line(ctx, own.format_send(ctx, get_token_channel(axis)))
        if last > 1:
            add_line(ctx, _format_token_pass(ctx, axis))
    end_task(ctx)
    if source is not x:
        release_view(ctx, source)


def _emit_serial_all_gather(ctx: CslContext, every: PeArrayView, x: PeArrayView, axis: int) -> None:
    """Broadcast the pieces one after another, and copy each to its position."""
    piece, turn = allocate_array(ctx, x.shape, x.type), f"turn{next(ctx.names)}"
    with open_block(ctx, f"for (@range(i16, {every.shape[0]})) |{turn}|"):
        emit_chain_broadcast(ctx, piece, x, axis, turn)
        first = replace(every, shape=x.shape, strides=every.strides[1:])
        emit_move(ctx, first, piece, f"@as({ctx.index_type}, {turn}) * {every.strides[0]}", "")
    release_view(ctx, piece)

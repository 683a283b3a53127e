"""Broadcast routes: each element along an axis broadcasts in turn through the last one, which forwards every word as
it arrives.

The sender's words travel past the others to the last element ("pass"), and from there to all by the routers alone
("echo"). After an element's turn a control word switches the routers to the next sender. Receives are asynchronous
and a task continues afterwards; in a loop, in a branch, or with too few queues, neighbours forward instead
(`collectives.emit_chain_broadcast`).
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
from tessera.codegen.csl.table.slices import slice_axis
from tessera.codegen.csl.text.dsd import PeArrayView, coalesce_axes, make_row_major_strides
from tessera.codegen.csl.text.pe_program import CslEmitter
from tessera.codegen.csl.text.routes import (
    COORDINATE_NAMES,
    NEIGHBOUR_CHANNELS,
    get_loopback_channel,
    get_token_channel,
    get_wraparound_channel,
)
from tessera.ir.core import Node
from tessera.ops.dialects import mesh

# Payloads of control words, as <control> makes them: advance this router, or this and the next; no task is meant.
ADVANCE_ONE, ADVANCE_TWO = "0x95F9249", "0xB5F9249"


def _find_last_coordinate(element: CslEmitter, axis: int) -> int:
    return element.grid[axis] - 1


def _format_forward(element: CslEmitter, told: FabricMessage, axis: int, options: str = "") -> str:
    """The statement by which the last tells all what comes to it."""
    return told.moved(
        get_fabout_dsd(element, get_loopback_channel(axis), told.size),
        get_fabin_dsd(element, get_token_channel(axis), told.size),
        options,
    )


def _format_token_pass(element: CslEmitter, axis: int) -> str:
    """The statement that lets the next element have its turn; the last needs no router for its own."""
    name, last = element.channel(get_token_channel(axis)), _find_last_coordinate(element, axis)
    ends = f".fabric_color = send_{name}, .extent = 1, .output_queue = out_{name}, .control = true"
    word = element.constant(f"@get_dsd(fabout_dsd, .{{ {ends} }})", f"turn_{name}_")
    payload = f"@as(u32, if ({COORDINATE_NAMES[axis]} == {last - 1}) {ADVANCE_ONE} else {ADVANCE_TWO})"
    return f"@mov32({word}, {element.constant(payload, f'advance_{name}_')});"


def _format_root(number: str, each: int) -> str:
    """Whose turn it is."""
    if number.isdigit():
        return str(int(number) // each)
    return number if each == 1 else f"{number} / {each}"


def _can_suspend(element: CslEmitter) -> bool:
    """Whether a task can go on after what stands here."""
    return element.uses_broadcast_routes and element.depth == 1


@emit(mesh.broadcast)
def _(element, node, x, number):
    out = element.allocate_for(node.out.type)
    emit_chain_broadcast(element, out, x, node.attrs["axis"], _format_root(number.literal, node.attrs["each"]))
    return out


@emit(mesh.begin_broadcast)
def _(element, node, x, number):
    axis, each, text = node.attrs["axis"], node.attrs["each"], number.literal
    out = _allocate_receive_buffer(element, node, x)
    if out is None:
        out = element.allocate_for(node.out.type)
        emit_chain_broadcast(element, out, x, axis, _format_root(text, each))
    else:
        _begin_broadcast(element, out, x, axis, text, each)
    return out


def _allocate_receive_buffer(element: CslEmitter, node: Node, x: PeArrayView) -> PeArrayView | None:
    """Where what is begun comes: one half of room for two, since a loop receives into the other; None without tasks."""
    if node.out in element.receive_targets or not _can_suspend(element):
        return element.receive_targets.get(node.out)
    return replace(
        element.allocate((2 * max(x.size, 1),), x.type), shape=x.shape, strides=make_row_major_strides(x.shape)
    )


@emit(mesh.begin_rotate)
def _(element, node, x):
    axis, out = node.attrs["axis"], _allocate_receive_buffer(element, node, x)
    way = NEIGHBOUR_CHANNELS[axis][0 if node.attrs["offset"] > 0 else 1]
    if out is None:
        out = element.allocate_for(node.out.type)
        emit_shift(element, out, x, axis, way, closed=True)
        return out
    held, (sends, takes) = element.plain(x), find_neighbour_conditions(element, axis, way)
    gate, told, own = (
        element.add_completion_task(COORDINATE_NAMES[axis]),
        make_message(element, out),
        make_message(element, held),
    )
    came, went = (f".{{ .async = true, .{call} = {gate}_id }}" for call in ("activate", "unblock"))
    emit_if_else(element, takes, [told.format_receive(element, c, came) for c in (way, get_wraparound_channel(way))])
    emit_if_else(element, sends, [own.format_send(element, c, went) for c in (way, get_wraparound_channel(way))])
    element.pin(held)
    return out


def _begin_broadcast(element: CslEmitter, out: PeArrayView, x: PeArrayView, axis: int, number: str, each: int) -> None:
    """Receive what the one whose turn it is has as `x`; a gate opens when all is here, and sent."""
    held, told = element.plain(x), make_message(element, out)
    own, gate = make_message(element, held), element.add_completion_task(COORDINATE_NAMES[axis])
    place, last, root = COORDINATE_NAMES[axis], _find_last_coordinate(element, axis), _format_root(number, each)
    sent = f".{{ .async = true, .unblock = {gate}_id }}"
    element.add_line(
        told.format_receive(element, get_loopback_channel(axis), f".{{ .async = true, .activate = {gate}_id }}")
    )
    with element.inner(f"if ({place} == {root})"):
        with element.inner(f"if ({place} == {last})"):
            element.add_line(own.format_send(element, get_loopback_channel(axis), sent))
        with element.inner("else"):
            _send_and_pass_token(element, own, axis, gate, "" if each == 1 else f"{number} % {each} == {each - 1}")
    with element.inner(f"else if ({place} == {last})"):
        element.add_line(_format_forward(element, told, axis, sent))
    with element.inner("else"):
        element.add_line(f"@unblock({gate}_id);")
    element.pin(held)


def _send_and_pass_token(element: CslEmitter, own: FabricMessage, axis: int, gate: str, ends: str) -> None:
    """Send beside other work, and then hand over where this `ends` an element's turns."""
    plain = own.format_send(element, get_token_channel(axis), f".{{ .async = true, .unblock = {gate}_id }}")
    if _find_last_coordinate(element, axis) < 2:
        element.add_line(plain)
        return
    turned = element.task(f"{gate}_turned", [_format_token_pass(element, axis), f"@unblock({gate}_id);"])
    over = own.format_send(element, get_token_channel(axis), f".{{ .async = true, .activate = {turned}_id }}")
    if not ends:
        element.add_line(over)
        return
    with element.inner(f"if ({ends})"):
        element.add_line(over)
    with element.inner("else"):
        element.add_line(plain)


@emit(mesh.arrived)
def _(element, node, pending):
    if element.pending_task is not None and element.depth == 1:
        element.end_task()
        element.unpin()
    return pending


@emit(mesh.all_gather)
def _(element, node, x):
    along, axis = node.attrs["along"], node.attrs["axis"] % len(x.shape)
    length, pieces = x.shape[axis], element.grid[along]
    shape = (*x.shape[:axis], length * pieces, *x.shape[axis + 1 :])
    out = element.allocate(shape, x.type)
    every = PeArrayView(x.type, (pieces, *x.shape), out.buffer, out.offset, (length * out.strides[axis], *out.strides))
    (_emit_async_all_gather if _fits_one_dsd(element, every) else _emit_serial_all_gather)(element, every, x, along)
    return slice_axis(out, axis, 0, node.attrs["size"])


def _fits_one_dsd(element: CslEmitter, every: PeArrayView) -> bool:
    """Whether one operation can receive all pieces, beside which the element's own is sent."""
    sizes, (level,) = coalesce_axes([every])
    return _can_suspend(element) and every.type != "i64" and element.get_dsd(level, sizes) is not None


def _emit_async_all_gather(element: CslEmitter, every: PeArrayView, x: PeArrayView, axis: int) -> None:
    """All pieces come by one operation, after which a task goes on."""
    sizes, (level,) = coalesce_axes([every])
    place, last, held = COORDINATE_NAMES[axis], _find_last_coordinate(element, axis), element.plain(x)
    own = make_message(element, held)
    memory = element.get_dsd(level, sizes)
    element.add_line(
        own.moved(
            str(memory),
            get_fabin_dsd(element, get_loopback_channel(axis), every.size),
            element.get_pending_task().done(),
        )
    )
    with element.inner(f"if ({place} == {last})"):
        element.add_line(_format_forward(element, replace(own, size=last * own.size), axis))
        element.add_line(own.format_send(element, get_loopback_channel(axis)))
    with element.inner("else"):
        element.add_line(own.format_send(element, get_token_channel(axis)))
        if last > 1:
            element.add_line(_format_token_pass(element, axis))
    element.end_task()
    if held is not x:
        element.release(held)


def _emit_serial_all_gather(element: CslEmitter, every: PeArrayView, x: PeArrayView, axis: int) -> None:
    """Each piece is told and put where it belongs."""
    piece, turn = element.allocate(x.shape, x.type), f"turn{next(element.names)}"
    with element.inner(f"for (@range(i16, {every.shape[0]})) |{turn}|"):
        emit_chain_broadcast(element, piece, x, axis, turn)
        first = replace(every, shape=x.shape, strides=every.strides[1:])
        element.move(first, piece, f"@as(i32, {turn}) * {every.strides[0]}", "")
    element.release(piece)

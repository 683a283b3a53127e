"""Collectives along chains of neighbours: all-reduce, chain broadcast, shift and rotate.

Every operation is synchronous: elements communicate in program order, and no task is needed. Each direction has an
even and an odd colour, chosen by the sender's coordinate, so that sends and receives do not collide. The last element
broadcasts a reduced value on one colour that routers deliver to all; a wrap-around route closes a ring.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tessera.codegen.csl.table.blocks import emit
from tessera.codegen.csl.text.dsd import FLOAT_TYPES, PeArrayView
from tessera.codegen.csl.text.pe_program import CslEmitter
from tessera.codegen.csl.text.routes import (
    COORDINATE_NAMES,
    NEIGHBOUR_CHANNELS,
    FabricChannel,
    get_broadcast_channel,
    get_wraparound_channel,
)
from tessera.ir.core import Node
from tessera.ops.dialects import mesh

# Operations that put f32 together while they arrive, and how two of another type are put together.
FABRIC_REDUCTIONS = {"sum": "@fadds", "max": "@fmaxs", "min": "@fmaxs"}
REDUCTION_EXPRESSIONS = {
    "sum": "{0} + {1}",
    "max": "if ({0} > {1} or {0} != {0}) {0} else {1}",
    "min": "if ({0} < {1} or {0} != {0}) {0} else {1}",
}
# What moves words of a type: 64 bits are two words.
WORD_MOVES = {
    "f32": ("@fmovs", 1),
    "i32": ("@mov32", 1),
    "i64": ("@mov32", 2),
    "f16": ("@fmovh", 1),
    "half": ("@mov16", 1),
    "i16": ("@mov16", 1),
}


@dataclass(frozen=True)
class FabricMessage:
    """What lies one after another in memory, ready to be told: what moves it, where it is, and how many words."""

    move: str
    memory: str
    size: int

    def format_send(self, element: CslEmitter, channel: FabricChannel, options: str = "") -> str:
        """The statement that sends it."""
        return self.moved(get_fabout_dsd(element, channel, self.size), self.memory, options)

    def format_receive(self, element: CslEmitter, channel: FabricChannel, options: str = "") -> str:
        """The statement that receives it."""
        return self.moved(self.memory, get_fabin_dsd(element, channel, self.size), options)

    def moved(self, target: str, source: str, options: str = "") -> str:
        """The statement that moves words such as these."""
        return f"{self.move}({', '.join([target, source, *([options] if options else [])])});"


def make_message(element: CslEmitter, view: PeArrayView) -> FabricMessage:
    """A contiguous view as a message."""
    move, words = WORD_MOVES[view.type]
    size = view.size * words
    if words > 1:
        assert view.buffer is not None
        memory = f"@get_dsd(mem1d_dsd, .{{ .base_address = {view.buffer.words}, .extent = {size} }})"
        steps = [str(view.offset * words)] if view.offset else []
        steps += [f"({view.dynamic_offset}) * {words}"] if view.dynamic_offset else []
        if steps:
            memory = f"@increment_dsd_offset({memory}, {' + '.join(steps)}, i32)"
        return FabricMessage(move, memory, size)
    return FabricMessage(move, _get_memory_dsd(element, view), size)


def get_fabout_dsd(element: CslEmitter, channel: FabricChannel, size: int) -> str:
    """The descriptor that sends `size` words on a channel."""
    name = element.channel(channel)
    text = f"@get_dsd(fabout_dsd, .{{ .fabric_color = send_{name}, .extent = {size}, .output_queue = out_{name} }})"
    return element.constant(text, f"to_{name}_")


def get_fabin_dsd(element: CslEmitter, channel: FabricChannel, size: int) -> str:
    """The descriptor that receives what is sent on a channel."""
    name = element.channel(channel)
    text = f"@get_dsd(fabin_dsd, .{{ .fabric_color = from_{name}, .extent = {size}, .input_queue = in_{name} }})"
    return element.constant(text, f"by_{name}_")


def _get_memory_dsd(element: CslEmitter, view: PeArrayView) -> str:
    found = element.get_dsd(replace(view, shape=(view.size,), strides=(1,)), (view.size,))
    assert found is not None
    return found


@emit(mesh.all_reduce)
def _(element, node, x):
    kind, axis = node.attrs["kind"], node.attrs["axis"]
    out = element.reuse_or_copy(node.args[0], x)
    (_emit_float_all_reduce if out.type == "f32" else _emit_chain_all_reduce)(element, out, kind, axis)
    return out


def _emit_float_all_reduce(element: CslEmitter, out: PeArrayView, kind: str, axis: int) -> None:
    """f32 put together while they arrive, and told on as they are."""
    size, last, place, there = out.size, element.grid[axis] - 1, COORDINATE_NAMES[axis], NEIGHBOUR_CHANNELS[axis][0]
    memory, gather, around, told = (
        _get_memory_dsd(element, out),
        FABRIC_REDUCTIONS[kind],
        get_broadcast_channel(axis),
        make_message(element, out),
    )
    send, take = get_fabout_dsd(element, there, size), get_fabin_dsd(element, there, size)
    if kind == "min":
        element.add_line(f"@fnegs({memory}, {memory});")
    with element.inner(f"if ({place} == {last})"):
        element.add_line(f"{gather}({memory}, {memory}, {take});")
        element.add_line(told.format_send(element, around))
    with element.inner("else"):
        with element.inner(f"if ({place} == 0)"):
            element.add_line(f"@fmovs({send}, {memory});")
        with element.inner("else"):
            element.add_line(f"{gather}({send}, {memory}, {take});")
        element.add_line(told.format_receive(element, around))
    if kind == "min":
        element.add_line(f"@fnegs({memory}, {memory});")


def _emit_chain_all_reduce(element: CslEmitter, out: PeArrayView, kind: str, axis: int) -> None:
    """What has no such operation: received, put together, and told on."""
    last, place, there, around = (
        element.grid[axis] - 1,
        COORDINATE_NAMES[axis],
        NEIGHBOUR_CHANNELS[axis][0],
        get_broadcast_channel(axis),
    )
    told = make_message(element, out)
    came = element.allocate(out.shape, out.type)
    with element.inner(f"if ({place} > 0)"):
        element.add_line(make_message(element, came).format_receive(element, there))
        element.loop([out, came], lambda t: f"{t[0]} = {REDUCTION_EXPRESSIONS[kind].format(t[1], t[0])};")
    with element.inner(f"if ({place} == {last})"):
        element.add_line(told.format_send(element, around))
    with element.inner("else"):
        element.add_line(told.format_send(element, there))
        element.add_line(told.format_receive(element, around))
    element.release(came)


def emit_chain_broadcast(element: CslEmitter, out: PeArrayView, x: PeArrayView, axis: int, root: str) -> None:
    """What the element at place `root` along an axis has as `x`, for all of them as `out`, which lies in one piece."""
    last, (there, back), place, told = (
        element.grid[axis] - 1,
        NEIGHBOUR_CHANNELS[axis],
        COORDINATE_NAMES[axis],
        make_message(element, out),
    )
    with element.inner(f"if ({place} == {root})"):
        own = make_message(element, x) if x.contiguous else told
        if not x.contiguous:
            element.copy(out, x)
        _emit_if(element, own.format_send(element, there), f"{place} < {last}")
        _emit_if(element, own.format_send(element, back), f"{place} > 0")
        if x.contiguous:  # the others wait, so they come first
            element.copy(out, x)
    with element.inner(f"else if ({place} > {root})"):
        element.add_line(told.format_receive(element, there))
        _emit_if(element, told.format_send(element, there), f"{place} < {last}")
    with element.inner("else"):
        element.add_line(told.format_receive(element, back))
        _emit_if(element, told.format_send(element, back), f"{place} > 0")


def _emit_if(element: CslEmitter, statement: str, where: str) -> None:
    with element.inner(f"if ({where})"):
        element.add_line(statement)


@emit(mesh.shift)
def _(element, node, x):
    out = element.allocate_for(node.out.type)
    emit_shift(element, out, x, *_find_shift_channel(node), closed=False)
    place, first = (
        COORDINATE_NAMES[node.attrs["axis"]],
        0 if node.attrs["offset"] > 0 else _find_last_coordinate(element, node),
    )
    with element.inner(f"if ({place} == {first})"):
        element.copy(out, PeArrayView(out.type, out.shape, literal="0.0" if out.type in FLOAT_TYPES else "0"))
    return out


@emit(mesh.rotate)
def _(element, node, x):
    out = element.allocate_for(node.out.type)
    emit_shift(element, out, x, *_find_shift_channel(node), closed=True)
    return out


def _find_last_coordinate(element: CslEmitter, node: Node) -> int:
    return element.grid[node.attrs["axis"]] - 1


def _find_shift_channel(node: Node) -> tuple[int, FabricChannel]:
    """The axis along which words move, and their way."""
    axis = node.attrs["axis"]
    return axis, NEIGHBOUR_CHANNELS[axis][0 if node.attrs["offset"] > 0 else 1]


def find_neighbour_conditions(element: CslEmitter, axis: int, way: FabricChannel) -> tuple[str, str]:
    """Where an element has one to send to along a way, and where one to receive from."""
    place, last = COORDINATE_NAMES[axis], element.grid[axis] - 1
    final, first = (last, 0) if way.step > 0 else (0, last)
    return f"{place} != {final}", f"{place} != {first}"


def emit_shift(
    element: CslEmitter, out: PeArrayView, x: PeArrayView, axis: int, way: FabricChannel, closed: bool
) -> None:
    """What the neighbour before has as `x`, and where the line is closed to a ring that at its other end."""
    held, (sends, takes) = element.plain(x), find_neighbour_conditions(element, axis, way)
    own, told = make_message(element, held), make_message(element, out)
    send, take = [own.format_send(element, way)], [told.format_receive(element, way)]
    if closed:
        send.append(own.format_send(element, get_wraparound_channel(way)))
        take.append(told.format_receive(element, get_wraparound_channel(way)))
    # Those at even places send first, those at odd ones receive first: nobody waits for ever.
    with element.inner(f"if ({COORDINATE_NAMES[axis]} % 2 == 0)"):
        emit_if_else(element, sends, send)
        emit_if_else(element, takes, take)
    with element.inner("else"):
        emit_if_else(element, takes, take)
        emit_if_else(element, sends, send)
    if held is not x:
        element.release(held)


def emit_if_else(element: CslEmitter, where: str, statements: list[str]) -> None:
    """A statement for those that have a neighbour; the second, if there is one, for the one at the edge."""
    _emit_if(element, statements[0], where)
    if statements[1:]:
        with element.inner("else"):
            element.add_line(statements[1])

"""What elements tell each other: chains of neighbours, each direction on two colors by the sender's place.

Every operation is synchronous, so elements meet in program order and no task is needed. An even and an odd color for
each direction keep what an element sends apart from what it receives. What the last along an axis has put together it
spreads on one color that the routers hand to all, and rings are closed by one that they hand past all.
"""

from __future__ import annotations

from dataclasses import dataclass

from tessera.codegen.csl.blocks import emit
from tessera.codegen.csl.channels import PLACE, WAYS, Channel, ring, spread
from tessera.codegen.csl.element import Element
from tessera.codegen.csl.structure import slab
from tessera.codegen.csl.views import View
from tessera.ops import mesh

# Operations that put f32 together while they arrive, and how two of another type are put together.
GATHER = {"sum": "@fadds", "max": "@fmaxs", "min": "@fmaxs"}
TOGETHER = {
    "sum": "{0} + {1}",
    "max": "if ({0} > {1} or {0} != {0}) {0} else {1}",
    "min": "if ({0} < {1} or {0} != {0}) {0} else {1}",
}
# What moves words of a type: 64 bits are two words.
WORDS = {"f32": ("@fmovs", 1), "i32": ("@mov32", 1), "i64": ("@mov32", 2), "f16": ("@fmovh", 1), "half": ("@mov16", 1),
         "i16": ("@mov16", 1)}  # fmt: skip


@dataclass(frozen=True)
class Message:
    """What lies one after another in memory, ready to be told: what moves it, where it is, and how many words."""

    move: str
    memory: str
    size: int

    def sent(self, element: Element, channel: Channel) -> str:
        """The statement that sends it."""
        return f"{self.move}({sending(element, channel, self.size)}, {self.memory});"

    def taken(self, element: Element, channel: Channel) -> str:
        """The statement that receives it."""
        return f"{self.move}({self.memory}, {receiving(element, channel, self.size)});"


def message(element: Element, view: View) -> Message:
    """A contiguous view as a message."""
    move, words = WORDS[view.type]
    size = view.size * words
    if words > 1:
        assert view.buffer is not None
        memory = f"@get_dsd(mem1d_dsd, .{{ .base_address = {view.buffer.words}, .extent = {size} }})"
        if view.offset:
            memory = f"@increment_dsd_offset({memory}, {view.offset * words}, i32)"
        return Message(move, memory, size)
    return Message(move, _memory(element, view), size)


def sending(element: Element, channel: Channel, size: int) -> str:
    """The descriptor that sends `size` words on a channel."""
    name = element.channel(channel)
    text = f"@get_dsd(fabout_dsd, .{{ .fabric_color = send_{name}, .extent = {size}, .output_queue = out_{name} }})"
    return element.constant(text, f"to_{name}_")


def receiving(element: Element, channel: Channel, size: int) -> str:
    """The descriptor that receives what is sent on a channel."""
    name = element.channel(channel)
    text = f"@get_dsd(fabin_dsd, .{{ .fabric_color = from_{name}, .extent = {size}, .input_queue = in_{name} }})"
    return element.constant(text, f"by_{name}_")


def _memory(element: Element, view: View) -> str:
    found = element.described(View(view.type, (view.size,), view.buffer, view.offset, (1,)), (view.size,))
    assert found is not None
    return found


@emit(mesh.all_reduce)
def _(element, node, x):
    kind, axis = node.attrs["kind"], node.attrs["axis"]
    out = element.successor(node.args[0], x)
    (_floats if out.type == "f32" else _others)(element, out, kind, axis)
    return out


def _floats(element: Element, out: View, kind: str, axis: int) -> None:
    """f32 put together while they arrive, and told on as they are."""
    size, last, place, there = out.size, element.grid[axis] - 1, PLACE[axis], WAYS[axis][0]
    memory, gather, around = _memory(element, out), GATHER[kind], spread(axis)
    send, take = sending(element, there, size), receiving(element, there, size)
    if kind == "min":
        element.say(f"@fnegs({memory}, {memory});")
    with element.inner(f"if ({place} == {last})"):
        element.say(f"{gather}({memory}, {memory}, {take});")
        element.say(message(element, out).sent(element, around))
    with element.inner("else"):
        with element.inner(f"if ({place} == 0)"):
            element.say(f"@fmovs({send}, {memory});")
        with element.inner("else"):
            element.say(f"{gather}({send}, {memory}, {take});")
        element.say(message(element, out).taken(element, around))
    if kind == "min":
        element.say(f"@fnegs({memory}, {memory});")


def _others(element: Element, out: View, kind: str, axis: int) -> None:
    """What has no such operation: received, put together, and told on."""
    last, place, there, around = element.grid[axis] - 1, PLACE[axis], WAYS[axis][0], spread(axis)
    came = element.room(out.shape, out.type)
    with element.inner(f"if ({place} > 0)"):
        element.say(message(element, came).taken(element, there))
        element.loop([out, came], lambda t: f"{t[0]} = {TOGETHER[kind].format(t[1], t[0])};")
    with element.inner(f"if ({place} == {last})"):
        element.say(message(element, out).sent(element, around))
    with element.inner("else"):
        element.say(message(element, out).sent(element, there))
        element.say(message(element, out).taken(element, around))
    element.release(came)


@emit(mesh.broadcast)
def _(element, node, x, root):
    out = element.fresh(node.out.type)
    _tell(element, out, x, node.attrs["axis"], root.literal)
    return out


def _tell(element: Element, out: View, x: View, axis: int, root: str) -> None:
    """What the element at place `root` along an axis has as `x`, for all of them as `out`, which lies in one piece."""
    last, (there, back), place, told = element.grid[axis] - 1, WAYS[axis], PLACE[axis], message(element, out)
    with element.inner(f"if ({place} == {root})"):
        own = message(element, x) if x.contiguous else told
        if not x.contiguous:
            element.copy(out, x)
        _where(element, own.sent(element, there), f"{place} < {last}")
        _where(element, own.sent(element, back), f"{place} > 0")
        if x.contiguous:  # the others wait, so they come first
            element.copy(out, x)
    with element.inner(f"else if ({place} > {root})"):
        element.say(told.taken(element, there))
        _where(element, told.sent(element, there), f"{place} < {last}")
    with element.inner("else"):
        element.say(told.taken(element, back))
        _where(element, told.sent(element, back), f"{place} > 0")


def _where(element: Element, statement: str, where: str) -> None:
    with element.inner(f"if ({where})"):
        element.say(statement)


@emit(mesh.all_gather)
def _(element, node, x):
    along, axis, pieces = node.attrs["along"], node.attrs["axis"] % len(x.shape), element.grid[node.attrs["along"]]
    length = x.shape[axis]
    shape = (*x.shape[:axis], length * pieces, *x.shape[axis + 1 :])
    out, piece = element.room(shape, x.type), element.room(x.shape, x.type)
    root = f"root{next(element.names)}"
    with element.inner(f"for (@range(i16, {pieces})) |{root}|"):
        _tell(element, piece, x, along, root)
        element.move(slab(out, axis, 0, length), piece, f"@as(i32, {root}) * {length * out.strides[axis]}", "")
    element.release(piece)
    return slab(out, axis, 0, node.attrs["size"])


@emit(mesh.shift, mesh.rotate)
def _(element, node, x):
    axis = node.attrs["axis"]
    out, place = element.fresh(node.out.type), PLACE[axis]
    held, way = element.plain(x), WAYS[axis][0 if node.attrs["offset"] > 0 else 1]
    last = element.grid[axis] - 1
    final, first = (last, 0) if way.step > 0 else (0, last)  # who has none to send to, who none to receive from
    send, take = [message(element, held).sent(element, way)], [message(element, out).taken(element, way)]
    if node.op is mesh.rotate:
        send.append(message(element, held).sent(element, ring(way)))
        take.append(message(element, out).taken(element, ring(way)))
    # Those at even places send first, those at odd ones receive first: nobody waits for ever.
    with element.inner(f"if ({place} % 2 == 0)"):
        _but(element, f"{place} != {final}", send)
        _but(element, f"{place} != {first}", take)
    with element.inner("else"):
        _but(element, f"{place} != {first}", take)
        _but(element, f"{place} != {final}", send)
    if node.op is mesh.shift:
        with element.inner(f"if ({place} == {first})"):
            element.copy(out, View(out.type, out.shape, literal="0.0" if out.type in ("f32", "f16", "half") else "0"))
    if held is not x:
        element.release(held)
    return out


def _but(element: Element, where: str, statements: list[str]) -> None:
    """A statement for those that have a neighbour; the second, if there is one, for the one at the edge."""
    _where(element, statements[0], where)
    if statements[1:]:
        with element.inner("else"):
            element.say(statements[1])

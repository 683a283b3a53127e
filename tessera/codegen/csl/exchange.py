"""What elements tell each other: chains of neighbours, each direction on two colors by the sender's place.

Every operation is synchronous, so elements meet in program order and no task is needed. An even and an odd color for
each direction keep what an element sends apart from what it receives. What the last along an axis has put together it
spreads on one color that the routers hand to all, and rings are closed by one that they hand past all.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tessera.codegen.csl.blocks import emit
from tessera.codegen.csl.channels import PLACE, WAYS, Channel, ring, spread
from tessera.codegen.csl.element import Element
from tessera.codegen.csl.views import FLOATS, View
from tessera.ir.core import Node
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

    def sent(self, element: Element, channel: Channel, options: str = "") -> str:
        """The statement that sends it."""
        return self.moved(sending(element, channel, self.size), self.memory, options)

    def taken(self, element: Element, channel: Channel, options: str = "") -> str:
        """The statement that receives it."""
        return self.moved(self.memory, receiving(element, channel, self.size), options)

    def moved(self, target: str, source: str, options: str = "") -> str:
        """The statement that moves words such as these."""
        return f"{self.move}({', '.join([target, source, *([options] if options else [])])});"


def message(element: Element, view: View) -> Message:
    """A contiguous view as a message."""
    move, words = WORDS[view.type]
    size = view.size * words
    if words > 1:
        assert view.buffer is not None
        memory = f"@get_dsd(mem1d_dsd, .{{ .base_address = {view.buffer.words}, .extent = {size} }})"
        steps = [str(view.offset * words)] if view.offset else []
        steps += [f"({view.onward}) * {words}"] if view.onward else []
        if steps:
            memory = f"@increment_dsd_offset({memory}, {' + '.join(steps)}, i32)"
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
    found = element.described(replace(view, shape=(view.size,), strides=(1,)), (view.size,))
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
    memory, gather, around, told = _memory(element, out), GATHER[kind], spread(axis), message(element, out)
    send, take = sending(element, there, size), receiving(element, there, size)
    if kind == "min":
        element.say(f"@fnegs({memory}, {memory});")
    with element.inner(f"if ({place} == {last})"):
        element.say(f"{gather}({memory}, {memory}, {take});")
        element.say(told.sent(element, around))
    with element.inner("else"):
        with element.inner(f"if ({place} == 0)"):
            element.say(f"@fmovs({send}, {memory});")
        with element.inner("else"):
            element.say(f"{gather}({send}, {memory}, {take});")
        element.say(told.taken(element, around))
    if kind == "min":
        element.say(f"@fnegs({memory}, {memory});")


def _others(element: Element, out: View, kind: str, axis: int) -> None:
    """What has no such operation: received, put together, and told on."""
    last, place, there, around = element.grid[axis] - 1, PLACE[axis], WAYS[axis][0], spread(axis)
    told = message(element, out)
    came = element.room(out.shape, out.type)
    with element.inner(f"if ({place} > 0)"):
        element.say(message(element, came).taken(element, there))
        element.loop([out, came], lambda t: f"{t[0]} = {TOGETHER[kind].format(t[1], t[0])};")
    with element.inner(f"if ({place} == {last})"):
        element.say(told.sent(element, around))
    with element.inner("else"):
        element.say(told.sent(element, there))
        element.say(told.taken(element, around))
    element.release(came)


def tell(element: Element, out: View, x: View, axis: int, root: str) -> None:
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


@emit(mesh.shift)
def _(element, node, x):
    out = element.fresh(node.out.type)
    turned(element, out, x, *_line(node), closed=False)
    place, first = PLACE[node.attrs["axis"]], 0 if node.attrs["offset"] > 0 else _last(element, node)
    with element.inner(f"if ({place} == {first})"):
        element.copy(out, View(out.type, out.shape, literal="0.0" if out.type in FLOATS else "0"))
    return out


@emit(mesh.rotate)
def _(element, node, x):
    out = element.fresh(node.out.type)
    turned(element, out, x, *_line(node), closed=True)
    return out


def _last(element: Element, node: Node) -> int:
    return element.grid[node.attrs["axis"]] - 1


def _line(node: Node) -> tuple[int, Channel]:
    """The axis along which words move, and their way."""
    axis = node.attrs["axis"]
    return axis, WAYS[axis][0 if node.attrs["offset"] > 0 else 1]


def ends(element: Element, axis: int, way: Channel) -> tuple[str, str]:
    """Where an element has one to send to along a way, and where one to receive from."""
    place, last = PLACE[axis], element.grid[axis] - 1
    final, first = (last, 0) if way.step > 0 else (0, last)
    return f"{place} != {final}", f"{place} != {first}"


def turned(element: Element, out: View, x: View, axis: int, way: Channel, closed: bool) -> None:
    """What the neighbour before has as `x`, and where the line is closed to a ring that at its other end."""
    held, (sends, takes) = element.plain(x), ends(element, axis, way)
    own, told = message(element, held), message(element, out)
    send, take = [own.sent(element, way)], [told.taken(element, way)]
    if closed:
        send.append(own.sent(element, ring(way)))
        take.append(told.taken(element, ring(way)))
    # Those at even places send first, those at odd ones receive first: nobody waits for ever.
    with element.inner(f"if ({PLACE[axis]} % 2 == 0)"):
        but(element, sends, send)
        but(element, takes, take)
    with element.inner("else"):
        but(element, takes, take)
        but(element, sends, send)
    if held is not x:
        element.release(held)


def but(element: Element, where: str, statements: list[str]) -> None:
    """A statement for those that have a neighbour; the second, if there is one, for the one at the edge."""
    _where(element, statements[0], where)
    if statements[1:]:
        with element.inner("else"):
            element.say(statements[1])

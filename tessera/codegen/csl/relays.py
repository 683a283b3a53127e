"""One element telling all along an axis, in turn: through the last, which tells each word on as it comes.

Words of the one whose turn it is go past the others to the last ("pass"), and from there to all, by the routers alone
("echo"). After an element's turn a control word moves the routers: its own lets pass again what comes from before, the
next one's takes from its element. Echoes come while their words are still sent, so that receiving is asynchronous and a
task goes on afterwards: there is none in a loop or a branch, nor where queues are too few. Neighbours hand on there
(`exchange.tell`).
"""

from __future__ import annotations

from dataclasses import replace

from tessera.codegen.csl.blocks import emit
from tessera.codegen.csl.channels import PLACE, WAYS, echo, passing, ring
from tessera.codegen.csl.element import Element
from tessera.codegen.csl.exchange import Message, but, ends, message, receiving, sending, tell, turned
from tessera.codegen.csl.structure import slab
from tessera.codegen.csl.views import View, merged, row_major
from tessera.ir.core import Node
from tessera.ops import mesh

# Payloads of control words, as <control> makes them: advance this router, or this and the next; no task is meant.
ADVANCE_ONE, ADVANCE_TWO = "0x95F9249", "0xB5F9249"


def _last(element: Element, axis: int) -> int:
    return element.grid[axis] - 1


def _relayed(element: Element, told: Message, axis: int, options: str = "") -> str:
    """The statement by which the last tells all what comes to it."""
    return told.moved(sending(element, echo(axis), told.size), receiving(element, passing(axis), told.size), options)


def _handed_over(element: Element, axis: int) -> str:
    """The statement that lets the next element have its turn; the last needs no router for its own."""
    name, last = element.channel(passing(axis)), _last(element, axis)
    ends = f".fabric_color = send_{name}, .extent = 1, .output_queue = out_{name}, .control = true"
    word = element.constant(f"@get_dsd(fabout_dsd, .{{ {ends} }})", f"turn_{name}_")
    payload = f"@as(u32, if ({PLACE[axis]} == {last - 1}) {ADVANCE_ONE} else {ADVANCE_TWO})"
    return f"@mov32({word}, {element.constant(payload, f'advance_{name}_')});"


def _root(number: str, each: int) -> str:
    """Whose turn it is."""
    if number.isdigit():
        return str(int(number) // each)
    return number if each == 1 else f"{number} / {each}"


def _tasked(element: Element) -> bool:
    """Whether a task can go on after what stands here."""
    return element.relays and element.depth == 1


@emit(mesh.broadcast)
def _(element, node, x, number):
    out = element.fresh(node.out.type)
    tell(element, out, x, node.attrs["axis"], _root(number.literal, node.attrs["each"]))
    return out


@emit(mesh.begin_broadcast)
def _(element, node, x, number):
    axis, each, text = node.attrs["axis"], node.attrs["each"], number.literal
    out = _coming(element, node, x)
    if out is None:
        out = element.fresh(node.out.type)
        tell(element, out, x, axis, _root(text, each))
    else:
        _begun(element, out, x, axis, text, each)
    return out


def _coming(element: Element, node: Node, x: View) -> View | None:
    """Where what is begun comes: one half of room for two, since a loop receives into the other; None without tasks."""
    if node.out in element.turns or not _tasked(element):
        return element.turns.get(node.out)
    return replace(element.room((2 * max(x.size, 1),), x.type), shape=x.shape, strides=row_major(x.shape))


@emit(mesh.begin_rotate)
def _(element, node, x):
    axis, out = node.attrs["axis"], _coming(element, node, x)
    way = WAYS[axis][0 if node.attrs["offset"] > 0 else 1]
    if out is None:
        out = element.fresh(node.out.type)
        turned(element, out, x, axis, way, closed=True)
        return out
    held, (sends, takes) = element.plain(x), ends(element, axis, way)
    gate, told, own = element.gate(PLACE[axis]), message(element, out), message(element, held)
    came, went = (f".{{ .async = true, .{call} = {gate}_id }}" for call in ("activate", "unblock"))
    but(element, takes, [told.taken(element, c, came) for c in (way, ring(way))])
    but(element, sends, [own.sent(element, c, went) for c in (way, ring(way))])
    element.pin(held)
    return out


def _begun(element: Element, out: View, x: View, axis: int, number: str, each: int) -> None:
    """Receive what the one whose turn it is has as `x`; a gate opens when all is here, and sent."""
    held, told = element.plain(x), message(element, out)
    own, gate = message(element, held), element.gate(PLACE[axis])
    place, last, root = PLACE[axis], _last(element, axis), _root(number, each)
    sent = f".{{ .async = true, .unblock = {gate}_id }}"
    element.say(told.taken(element, echo(axis), f".{{ .async = true, .activate = {gate}_id }}"))
    with element.inner(f"if ({place} == {root})"):
        with element.inner(f"if ({place} == {last})"):
            element.say(own.sent(element, echo(axis), sent))
        with element.inner("else"):
            _passed(element, own, axis, gate, "" if each == 1 else f"{number} % {each} == {each - 1}")
    with element.inner(f"else if ({place} == {last})"):
        element.say(_relayed(element, told, axis, sent))
    with element.inner("else"):
        element.say(f"@unblock({gate}_id);")
    element.pin(held)


def _passed(element: Element, own: Message, axis: int, gate: str, ends: str) -> None:
    """Send beside other work, and then hand over where this `ends` an element's turns."""
    plain = own.sent(element, passing(axis), f".{{ .async = true, .unblock = {gate}_id }}")
    if _last(element, axis) < 2:
        element.say(plain)
        return
    turned = element.task(f"{gate}_turned", [_handed_over(element, axis), f"@unblock({gate}_id);"])
    over = own.sent(element, passing(axis), f".{{ .async = true, .activate = {turned}_id }}")
    if not ends:
        element.say(over)
        return
    with element.inner(f"if ({ends})"):
        element.say(over)
    with element.inner("else"):
        element.say(plain)


@emit(mesh.arrived)
def _(element, node, pending):
    if element.awaited is not None and element.depth == 1:
        element.pause()
        element.unpin()
    return pending


@emit(mesh.all_gather)
def _(element, node, x):
    along, axis = node.attrs["along"], node.attrs["axis"] % len(x.shape)
    length, pieces = x.shape[axis], element.grid[along]
    shape = (*x.shape[:axis], length * pieces, *x.shape[axis + 1 :])
    out = element.room(shape, x.type)
    every = View(x.type, (pieces, *x.shape), out.buffer, out.offset, (length * out.strides[axis], *out.strides))
    (_gathered if _at_once(element, every) else _one_by_one)(element, every, x, along)
    return slab(out, axis, 0, node.attrs["size"])


def _at_once(element: Element, every: View) -> bool:
    """Whether one operation can receive all pieces, beside which the element's own is sent."""
    sizes, (level,) = merged([every])
    return _tasked(element) and every.type != "i64" and element.described(level, sizes) is not None


def _gathered(element: Element, every: View, x: View, axis: int) -> None:
    """All pieces come by one operation, after which a task goes on."""
    sizes, (level,) = merged([every])
    place, last, held = PLACE[axis], _last(element, axis), element.plain(x)
    own = message(element, held)
    memory = element.described(level, sizes)
    element.say(own.moved(str(memory), receiving(element, echo(axis), every.size), element.awaiting().done()))
    with element.inner(f"if ({place} == {last})"):
        element.say(_relayed(element, replace(own, size=last * own.size), axis))
        element.say(own.sent(element, echo(axis)))
    with element.inner("else"):
        element.say(own.sent(element, passing(axis)))
        if last > 1:
            element.say(_handed_over(element, axis))
    element.pause()
    if held is not x:
        element.release(held)


def _one_by_one(element: Element, every: View, x: View, axis: int) -> None:
    """Each piece is told and put where it belongs."""
    piece, turn = element.room(x.shape, x.type), f"turn{next(element.names)}"
    with element.inner(f"for (@range(i16, {every.shape[0]})) |{turn}|"):
        tell(element, piece, x, axis, turn)
        first = replace(every, shape=x.shape, strides=every.strides[1:])
        element.move(first, piece, f"@as(i32, {turn}) * {every.strides[0]}", "")
    element.release(piece)

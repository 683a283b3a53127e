"""What elements tell each other: chains of neighbours, each direction on two colors by the sender's place.

Every operation is synchronous, so elements meet in program order and no task is needed. An even and an odd color for
each direction keep what an element sends apart from what it receives. What the last along an axis has put together it
spreads on one color that the routers hand to all, and rings are closed by one that they hand past all.
"""

from __future__ import annotations

from tessera.codegen.csl.blocks import emit
from tessera.codegen.csl.channels import PLACE, WAYS, Channel, ring, spread
from tessera.codegen.csl.element import Element, block_size, descriptor, unsupported
from tessera.codegen.csl.views import View
from tessera.ir.core import Node
from tessera.ops import mesh

GATHER = {"sum": "@fadds", "max": "@fmaxs"}
MOVE_WORDS = {"f32": "@fmovs", "i32": "@mov32"}


def sending(element: Element, channel: Channel, size: int) -> str:
    """The descriptor that sends `size` words on a channel."""
    name = element.channel(channel)
    return f"@get_dsd(fabout_dsd, .{{ .fabric_color = send_{name}, .extent = {size}, .output_queue = out_{name} }})"


def receiving(element: Element, channel: Channel, size: int) -> str:
    """The descriptor that receives what is sent on a channel."""
    name = element.channel(channel)
    return f"@get_dsd(fabin_dsd, .{{ .fabric_color = from_{name}, .extent = {size}, .input_queue = in_{name} }})"


def _memory(view: View) -> str:
    found = descriptor(View(view.type, (view.size,), view.buffer, view.offset, (1,)), (view.size,))
    assert found is not None
    return found


@emit(mesh.all_reduce)
def _(element, node, x):
    kind, axis, last = node.attrs["kind"], node.attrs["axis"], element.grid[node.attrs["axis"]] - 1
    if x.type != "f32":
        raise unsupported(node, f"what is put together are f32, not {x.type}")
    out, size = element.fresh(node.out.type), block_size(node.out.type.shape)
    element.copy(out, x)
    memory, (there, _), place = _memory(out), WAYS[axis], PLACE[axis]
    if kind == "min":
        element.say(f"@fnegs({memory}, {memory});")
    gather = GATHER.get(kind, "@fmaxs")
    send, take = sending(element, there, size), receiving(element, there, size)
    with element.inner(f"if ({place} == {last})"):
        element.say(f"{gather}({memory}, {memory}, {take});")
        element.say(f"@fmovs({sending(element, spread(axis), size)}, {memory});")
    with element.inner("else"):
        with element.inner(f"if ({place} == 0)"):
            element.say(f"@fmovs({send}, {memory});")
        with element.inner("else"):
            element.say(f"{gather}({send}, {memory}, {take});")
        element.say(f"@fmovs({memory}, {receiving(element, spread(axis), size)});")
    if kind == "min":
        element.say(f"@fnegs({memory}, {memory});")
    return out


@emit(mesh.broadcast)
def _(element, node, x, root):
    axis, last, move = node.attrs["axis"], element.grid[node.attrs["axis"]] - 1, _move(node, x)
    out, size = element.fresh(node.out.type), block_size(node.out.type.shape)
    memory, (there, back), place = _memory(out), WAYS[axis], PLACE[axis]
    with element.inner(f"if ({place} == {root.literal})"):
        element.copy(out, x)
        _told(element, f"{move}({sending(element, there, size)}, {memory});", f"{place} < {last}")
        _told(element, f"{move}({sending(element, back, size)}, {memory});", f"{place} > 0")
    with element.inner(f"else if ({place} > {root.literal})"):
        element.say(f"{move}({memory}, {receiving(element, there, size)});")
        _told(element, f"{move}({sending(element, there, size)}, {memory});", f"{place} < {last}")
    with element.inner("else"):
        element.say(f"{move}({memory}, {receiving(element, back, size)});")
        _told(element, f"{move}({sending(element, back, size)}, {memory});", f"{place} > 0")
    return out


def _told(element: Element, statement: str, where: str) -> None:
    with element.inner(f"if ({where})"):
        element.say(statement)


@emit(mesh.shift, mesh.rotate)
def _(element, node, x):
    axis = node.attrs["axis"]
    out, size, place = element.fresh(node.out.type), block_size(node.out.type.shape), PLACE[axis]
    held, way, move = element.plain(x), WAYS[axis][0 if node.attrs["offset"] > 0 else 1], _move(node, x)
    last = element.grid[axis] - 1
    final, first = (last, 0) if way.step > 0 else (0, last)  # who has none to send to, who none to receive from
    send = [f"{move}({sending(element, way, size)}, {_memory(held)});"]
    take = [f"{move}({_memory(out)}, {receiving(element, way, size)});"]
    if node.op is mesh.rotate:
        send.append(f"{move}({sending(element, ring(way), size)}, {_memory(held)});")
        take.append(f"{move}({_memory(out)}, {receiving(element, ring(way), size)});")
    # Those at even places send first, those at odd ones receive first: nobody waits for ever.
    with element.inner(f"if ({place} % 2 == 0)"):
        _but(element, f"{place} != {final}", send)
        _but(element, f"{place} != {first}", take)
    with element.inner("else"):
        _but(element, f"{place} != {first}", take)
        _but(element, f"{place} != {final}", send)
    if node.op is mesh.shift:
        with element.inner(f"if ({place} == {first})"):
            element.copy(out, View(out.type, out.shape, literal="0.0" if out.type == "f32" else "0"))
    return out


def _but(element: Element, where: str, statements: list[str]) -> None:
    """A statement for those that have a neighbour; the second, if there is one, for the one at the edge."""
    _told(element, statements[0], where)
    if statements[1:]:
        with element.inner("else"):
            element.say(statements[1])


def _move(node: Node, x: View) -> str:
    if x.type not in MOVE_WORDS:
        raise unsupported(node, f"what is told are words of 32 bits, not {x.type}")
    return MOVE_WORDS[x.type]


@emit(mesh.halo)
def _(element, node, x, edge):
    axis, out = node.attrs["axis"] % len(x.shape), element.fresh(node.out.type)
    length, up = out.shape[axis], node.attrs["offset"] > 0
    element.copy(_slab(out, axis, 0 if up else length - 1, 1), edge)
    if length > 1:
        element.copy(_slab(out, axis, int(up), length - 1), _slab(x, axis, int(not up), length - 1))
    return out


def _slab(x: View, axis: int, first: int, count: int) -> View:
    """Some neighbours along an axis of a view."""
    shape = (*x.shape[:axis], count, *x.shape[axis + 1 :])
    if x.literal:
        return View(x.type, shape, literal=x.literal)
    return View(x.type, shape, x.buffer, x.offset + first * x.strides[axis], x.strides)

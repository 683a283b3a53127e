"""What elements tell each other: chains of neighbours, each direction on two colors by the sender's place.

Every operation is synchronous, so elements meet in program order and no task is needed. An even and an odd color for
each direction keep what an element sends apart from what it receives. What the last along an axis has put together it
spreads on one color that the routers hand to all.
"""

from __future__ import annotations

from dataclasses import dataclass

from tessera.codegen.csl.blocks import emit
from tessera.codegen.csl.element import Element, block_size, descriptor, unsupported
from tessera.codegen.csl.views import View
from tessera.ops import mesh


@dataclass(frozen=True)
class Direction:
    """One way along a mesh axis."""

    name: str
    opposite: str
    axis: int
    step: int
    number: int  # its colors are twice this and one more; its queues 2 more


DIRECTIONS = {
    d.name: d
    for d in (
        Direction("east", "west", 1, 1, 0),
        Direction("west", "east", 1, -1, 1),
        Direction("south", "north", 0, 1, 2),
        Direction("north", "south", 0, -1, 3),
    )
}
# Along a mesh axis: the way its places grow, and the way back.
WAYS = {0: ("south", "north"), 1: ("east", "west")}
PLACE = {0: "row", 1: "column"}
# The color and the queues on which the last along an axis spreads a result.
SPREAD = {1: (8, 6), 0: (9, 7)}
GATHER = {"sum": "@fadds", "max": "@fmaxs"}


def sending(element: Element, name: str, size: int) -> str:
    """The descriptor that sends `size` words in a direction."""
    element.directions.add(name)
    return f"@get_dsd(fabout_dsd, .{{ .fabric_color = send_{name}, .extent = {size}, .output_queue = out_{name} }})"


def receiving(element: Element, name: str, size: int) -> str:
    """The descriptor that receives what is sent in a direction."""
    element.directions.add(name)
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
    element.spreads.add(axis)
    told = f".extent = {size}, .fabric_color = spread_{place}"
    with element.inner(f"if ({place} == {last})"):
        element.say(f"{gather}({memory}, {memory}, {take});")
        element.say(f"@fmovs(@get_dsd(fabout_dsd, .{{ {told}, .output_queue = out_spread_{place} }}), {memory});")
    with element.inner("else"):
        with element.inner(f"if ({place} == 0)"):
            element.say(f"@fmovs({send}, {memory});")
        with element.inner("else"):
            element.say(f"{gather}({send}, {memory}, {take});")
        element.say(f"@fmovs({memory}, @get_dsd(fabin_dsd, .{{ {told}, .input_queue = in_spread_{place} }}));")
    if kind == "min":
        element.say(f"@fnegs({memory}, {memory});")
    return out


@emit(mesh.broadcast)
def _(element, node, x, root):
    if x.type not in ("f32", "i32"):
        raise unsupported(node, f"what is told are words of 32 bits, not {x.type}")
    axis, last = node.attrs["axis"], element.grid[node.attrs["axis"]] - 1
    out, size = element.fresh(node.out.type), block_size(node.out.type.shape)
    memory, (there, back), place = _memory(out), WAYS[axis], PLACE[axis]
    move = "@fmovs" if x.type == "f32" else "@mov32"
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


@emit(mesh.shift)
def _(element, node, x):
    if x.type not in ("f32", "i32"):
        raise unsupported(node, f"what is told are words of 32 bits, not {x.type}")
    axis, last = node.attrs["axis"], element.grid[node.attrs["axis"]] - 1
    out, size = element.fresh(node.out.type), block_size(node.out.type.shape)
    held, place = element.plain(x), PLACE[axis]
    name = WAYS[axis][0 if node.attrs["offset"] > 0 else 1]
    move, step = ("@fmovs" if x.type == "f32" else "@mov32"), DIRECTIONS[name].step
    sends, takes = (f"{place} < {last}", f"{place} > 0") if step > 0 else (f"{place} > 0", f"{place} < {last}")
    send = f"{move}({sending(element, name, size)}, {_memory(held)});"
    take = f"{move}({_memory(out)}, {receiving(element, name, size)});"
    # Those at even places send first, those at odd ones receive first: nobody waits for ever.
    with element.inner(f"if ({place} % 2 == 0)"):
        _told(element, send, sends)
        _told(element, take, takes)
    with element.inner("else"):
        _told(element, take, takes)
        _told(element, send, sends)
    with element.inner(f"if (!({takes}))"):
        element.copy(out, View(out.type, out.shape, literal="0.0" if out.type == "f32" else "0"))
    return out


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

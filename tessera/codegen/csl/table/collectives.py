"""Collectives along chains of neighbours: all-reduce, chain broadcast, shift and rotate; and arg reductions."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tessera.codegen.csl.table.blocks import emit
from tessera.codegen.csl.table.memory import loop_over_elements
from tessera.codegen.csl.text.context import CslContext
from tessera.codegen.csl.text.dsd import FLOAT_TYPES, PeArrayView
from tessera.codegen.csl.text.memory_allocation import allocate_array, allocate_for, release_view
from tessera.codegen.csl.text.routes import (
    COORDINATE_NAMES,
    NEIGHBOUR_CHANNELS,
    FabricChannel,
    get_broadcast_channel,
    get_wraparound_channel,
)
from tessera.codegen.csl.text.statements import (
    add_channel,
    add_constant,
    add_line,
    emit_copy,
    emit_loop,
    get_dsd,
    make_contiguous,
    make_unsupported_error,
    open_block,
    reuse_or_copy,
)
from tessera.ir.core import Node
from tessera.lower.scalar_functions.small_floats import SMALL_FLOAT_FORMATS
from tessera.ops.dialects import mesh
from tessera.ops.tensor import reduce

# Arg reductions: the index of the largest or smallest element along an axis of a block.


ARG_COMPARISONS = {reduce.argmax: ">", reduce.argmin: "<"}


@emit(*ARG_COMPARISONS)
def _(ctx, node, x):
    if node.types[0].dtype in SMALL_FLOAT_FORMATS:
        raise make_unsupported_error(node, f"CSL has no comparison of {node.types[0].dtype}; cast to f32 first")
    axis, out = node.attrs["axis"] % len(x.shape), allocate_for(ctx, node.out.type)
    kept = tuple(n for a, n in enumerate(x.shape) if a != axis)
    level = PeArrayView(
        out.type, kept, out.buffer, out.offset, _drop_axis_stride(out, axis, bool(node.attrs["keepdims"]))
    )
    best, place, step = (f"{name}{next(ctx.names)}" for name in ("best", "place", "step"))
    beats = ARG_COMPARISONS[node.op]
    with loop_over_elements(ctx, kept) as names:
        first, present = (x.at([*names[:axis], at, *names[axis:]]) for at in ("0", step))
        add_line(ctx, f"var {best}: {x.type} = {first};")
        add_line(ctx, f"var {place}: i16 = 0;")
        with open_block(ctx, f"for (@range(i16, {x.shape[axis]})) |{step}|"):
            condition = f"{present} {beats} {best}"
            if node.types[0].dtype.is_float:  # the first NaN wins
                condition = f"{best} == {best} and ({condition} or {present} != {present})"
            add_line(ctx, f"if ({condition}) {{ {best} = {present}; {place} = {step}; }}")
        add_line(ctx, f"{level.at(names)} = @as({out.type}, {place});")
    return out


def _drop_axis_stride(out: PeArrayView, axis: int, kept: bool) -> tuple[int, ...]:
    """The strides without that of the reduced axis."""
    return tuple(s for a, s in enumerate(out.strides) if not kept or a != axis)


# Collectives along chains of neighbours: all-reduce, chain broadcast, shift and rotate.
#
# Every operation is synchronous: PEs communicate in program order, and no task is needed. Each direction has an even
# and
# an odd colour, chosen by the sender's coordinate, so that sends and receives do not collide. The last PE broadcasts a
# reduced value on one colour that routers deliver to all PEs; a wrap-around route closes a ring.


# DSD operations that reduce f32 values as they arrive, and expressions that combine two values of other types.
FABRIC_REDUCTIONS = {"sum": "@fadds", "max": "@fmaxs", "min": "@fmaxs"}
REDUCTION_EXPRESSIONS = {
    "sum": "{0} + {1}",
    "max": "if ({0} > {1} or {0} != {0}) {0} else {1}",
    "min": "if ({0} < {1} or {0} != {0}) {0} else {1}",
}
# The DSD operation that moves each type: 64 bits are two words.
WORD_MOVES = {
    "f32": ("@fmovs", 1),
    "i32": ("@mov32", 1),
    "i64": ("@mov32", 2),
    "f16": ("@fmovh", 1),
    "half": ("@mov16", 1),
    "i16": ("@mov16", 1),
    "u32": ("@mov32", 1),
    "u64": ("@mov32", 2),
    "u16": ("@mov16", 1),
}


@dataclass(frozen=True)
class FabricMessage:
    """A contiguous array that can be sent: the DSD operation that moves it, its DSD, and its number of words."""

    move: str
    memory: str
    size: int

    def format_send(self, ctx: CslContext, channel: FabricChannel, options: str = "") -> str:
        """The statement that sends the message."""
        return self.format_move(get_fabout_dsd(ctx, channel, self.size), self.memory, options)

    def format_receive(self, ctx: CslContext, channel: FabricChannel, options: str = "") -> str:
        """The statement that receives the message."""
        return self.format_move(self.memory, get_fabin_dsd(ctx, channel, self.size), options)

    def format_move(self, target: str, source: str, options: str = "") -> str:
        """The DSD operation that moves the words of the message."""
        return f"{self.move}({', '.join([target, source, *([options] if options else [])])});"


def make_message(ctx: CslContext, view: PeArrayView) -> FabricMessage:
    """The message of a contiguous view."""
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
    return FabricMessage(move, _get_memory_dsd(ctx, view), size)


def get_fabout_dsd(ctx: CslContext, channel: FabricChannel, size: int) -> str:
    """The DSD that sends `size` words on a channel."""
    name = add_channel(ctx, channel)
    text = f"@get_dsd(fabout_dsd, .{{ .fabric_color = send_{name}, .extent = {size}, .output_queue = out_{name} }})"
    return add_constant(ctx, text, f"to_{name}_")


def get_fabin_dsd(ctx: CslContext, channel: FabricChannel, size: int) -> str:
    """The DSD that receives the words of a channel."""
    name = add_channel(ctx, channel)
    text = f"@get_dsd(fabin_dsd, .{{ .fabric_color = from_{name}, .extent = {size}, .input_queue = in_{name} }})"
    return add_constant(ctx, text, f"by_{name}_")


def _get_memory_dsd(ctx: CslContext, view: PeArrayView) -> str:
    dsd = get_dsd(ctx, replace(view, shape=(view.size,), strides=(1,)), (view.size,))
    assert dsd is not None
    return dsd


@emit(mesh.all_reduce)
def _(ctx, node, x):
    kind, axis = node.attrs["kind"], node.attrs["axis"]
    out = reuse_or_copy(ctx, node.args[0], x)
    (_emit_float_all_reduce if out.type == "f32" else _emit_chain_all_reduce)(ctx, out, kind, axis)
    return out


def _emit_float_all_reduce(ctx: CslContext, out: PeArrayView, kind: str, axis: int) -> None:
    """Reduce f32 values as they arrive, then broadcast the result."""
    size, last, place, forward = out.size, ctx.grid[axis] - 1, COORDINATE_NAMES[axis], NEIGHBOUR_CHANNELS[axis][0]
    memory, gather, around, received = (
        _get_memory_dsd(ctx, out),
        FABRIC_REDUCTIONS[kind],
        get_broadcast_channel(axis),
        make_message(ctx, out),
    )
    send, take = get_fabout_dsd(ctx, forward, size), get_fabin_dsd(ctx, forward, size)
    if kind == "min":
        add_line(ctx, f"@fnegs({memory}, {memory});")
    with open_block(ctx, f"if ({place} == {last})"):
        add_line(ctx, f"{gather}({memory}, {memory}, {take});")
        add_line(ctx, received.format_send(ctx, around))
    with open_block(ctx, "else"):
        with open_block(ctx, f"if ({place} == 0)"):
            add_line(ctx, f"@fmovs({send}, {memory});")
        with open_block(ctx, "else"):
            add_line(ctx, f"{gather}({send}, {memory}, {take});")
        add_line(ctx, received.format_receive(ctx, around))
    if kind == "min":
        add_line(ctx, f"@fnegs({memory}, {memory});")


def _emit_chain_all_reduce(ctx: CslContext, out: PeArrayView, kind: str, axis: int) -> None:
    """Reduce values without a reducing DSD operation: receive, combine, send on."""
    last, place, forward, around = (
        ctx.grid[axis] - 1,
        COORDINATE_NAMES[axis],
        NEIGHBOUR_CHANNELS[axis][0],
        get_broadcast_channel(axis),
    )
    received = make_message(ctx, out)
    came = allocate_array(ctx, out.shape, out.type)
    with open_block(ctx, f"if ({place} > 0)"):
        add_line(ctx, make_message(ctx, came).format_receive(ctx, forward))
        emit_loop(ctx, [out, came], lambda t: f"{t[0]} = {REDUCTION_EXPRESSIONS[kind].format(t[1], t[0])};")
    with open_block(ctx, f"if ({place} == {last})"):
        add_line(ctx, received.format_send(ctx, around))
    with open_block(ctx, "else"):
        add_line(ctx, received.format_send(ctx, forward))
        add_line(ctx, received.format_receive(ctx, around))
    release_view(ctx, came)


def emit_chain_broadcast(ctx: CslContext, out: PeArrayView, x: PeArrayView, axis: int, root: str) -> None:
    """Broadcast `x` of the PE with coordinate `root` along an axis into `out` of all PEs; `out` is contiguous."""
    last, (forward, back), place, received = (
        ctx.grid[axis] - 1,
        NEIGHBOUR_CHANNELS[axis],
        COORDINATE_NAMES[axis],
        make_message(ctx, out),
    )
    with open_block(ctx, f"if ({place} == {root})"):
        own = make_message(ctx, x) if x.contiguous else received
        if not x.contiguous:
            emit_copy(ctx, out, x)
        _emit_if(ctx, own.format_send(ctx, forward), f"{place} < {last}")
        _emit_if(ctx, own.format_send(ctx, back), f"{place} > 0")
        if x.contiguous:  # the other PEs wait for the root's send, so it comes first
            emit_copy(ctx, out, x)
    with open_block(ctx, f"else if ({place} > {root})"):
        add_line(ctx, received.format_receive(ctx, forward))
        _emit_if(ctx, received.format_send(ctx, forward), f"{place} < {last}")
    with open_block(ctx, "else"):
        add_line(ctx, received.format_receive(ctx, back))
        _emit_if(ctx, received.format_send(ctx, back), f"{place} > 0")


def _emit_if(ctx: CslContext, statement: str, where: str) -> None:
    with open_block(ctx, f"if ({where})"):
        add_line(ctx, statement)


@emit(mesh.shift)
def _(ctx, node, x):
    out = allocate_for(ctx, node.out.type)
    emit_shift(ctx, out, x, *_find_shift_channel(node), closed=False)
    place, first = (
        COORDINATE_NAMES[node.attrs["axis"]],
        0 if node.attrs["offset"] > 0 else _find_last_coordinate(ctx, node),
    )
    with open_block(ctx, f"if ({place} == {first})"):
        emit_copy(ctx, out, PeArrayView(out.type, out.shape, literal="0.0" if out.type in FLOAT_TYPES else "0"))
    return out


@emit(mesh.rotate)
def _(ctx, node, x):
    out = allocate_for(ctx, node.out.type)
    emit_shift(ctx, out, x, *_find_shift_channel(node), closed=True)
    return out


def _find_last_coordinate(ctx: CslContext, node: Node) -> int:
    return ctx.grid[node.attrs["axis"]] - 1


def _find_shift_channel(node: Node) -> tuple[int, FabricChannel]:
    """The axis and the direction of a shift."""
    axis = node.attrs["axis"]
    return axis, NEIGHBOUR_CHANNELS[axis][0 if node.attrs["offset"] > 0 else 1]


def find_neighbour_conditions(ctx: CslContext, axis: int, way: FabricChannel) -> tuple[str, str]:
    """The conditions under which a PE has a neighbour to send to, and one to receive from."""
    place, last = COORDINATE_NAMES[axis], ctx.grid[axis] - 1
    final, first = (last, 0) if way.step > 0 else (0, last)
    return f"{place} != {final}", f"{place} != {first}"


def emit_shift(ctx: CslContext, out: PeArrayView, x: PeArrayView, axis: int, way: FabricChannel, closed: bool) -> None:
    """Receive `x` of the preceding neighbour; on a ring the first PE receives that of the last."""
    source, (sends, receives) = make_contiguous(ctx, x), find_neighbour_conditions(ctx, axis, way)
    own, received = make_message(ctx, source), make_message(ctx, out)
    send, take = [own.format_send(ctx, way)], [received.format_receive(ctx, way)]
    if closed:
        send.append(own.format_send(ctx, get_wraparound_channel(way)))
        take.append(received.format_receive(ctx, get_wraparound_channel(way)))
    # PEs at even coordinates send first, those at odd ones receive first, which avoids a deadlock.
    with open_block(ctx, f"if ({COORDINATE_NAMES[axis]} % 2 == 0)"):
        emit_if_else(ctx, sends, send)
        emit_if_else(ctx, receives, take)
    with open_block(ctx, "else"):
        emit_if_else(ctx, receives, take)
        emit_if_else(ctx, sends, send)
    if source is not x:
        release_view(ctx, source)


def emit_if_else(ctx: CslContext, where: str, statements: list[str]) -> None:
    """A statement for PEs that have a neighbour, and optionally one for the PE at the edge."""
    _emit_if(ctx, statements[0], where)
    if statements[1:]:
        with open_block(ctx, "else"):
            add_line(ctx, statements[1])

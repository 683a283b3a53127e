"""Memory: loads, stores, slices, concatenation, indexed reads and halos in the memory of one PE."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from tessera.codegen.csl.table.blocks import emit
from tessera.codegen.csl.table.scalars import format_literal, format_narrowing, format_widening
from tessera.codegen.csl.text.context import CslContext
from tessera.codegen.csl.text.dsd import (
    CSL_TYPES,
    PeArrayView,
    make_row_major_strides,
    offset_element,
    widen_index_literal,
)
from tessera.codegen.csl.text.memory_allocation import allocate_array, allocate_for, declare_array, release_view
from tessera.codegen.csl.text.statements import (
    add_fault,
    add_line,
    emit_copy,
    emit_loop,
    emit_move,
    make_contiguous,
    reuse_or_copy,
)
from tessera.core.shapes import broadcast
from tessera.ir.core import Node, Value
from tessera.ops.dialects import mesh, tile

# Kernel memory ops: a ref is an array of the PE, and a block of it is a view with a dynamic offset.
#
# A PE runs the programs of a kernel in sequence: a copy is complete when it is issued, barriers within a program are
# no-ops, and an atomic update is an ordinary one.


CLIP = "clip"


def format_index(ctx: CslContext, view: PeArrayView) -> str:
    """A scalar as an index."""
    return view.literal or f"@as({ctx.index_type}, {view.at(())})"


def _format_offset(ref: PeArrayView, starts: Sequence[str]) -> str:
    """The offset of a block in elements; empty if it is zero."""
    terms = [s if stride == 1 else f"{s} * {stride}" for s, stride in zip(starts, ref.strides, strict=True) if s != "0"]
    return " + ".join(terms)


@contextmanager
def loop_over_elements(ctx: CslContext, shape: Sequence[int]) -> Iterator[list[str]]:
    """Open a loop nest over a block; yields the names of the loop variables."""
    names = [f"at{next(ctx.names)}" if n != 1 else "0" for n in shape]
    loops = [(name, n) for name, n in zip(names, shape, strict=True) if n != 1]
    for name, n in loops:
        add_line(ctx, f"for (@range(i16, {n})) |{name}| {{")
        ctx.depth += 1
    yield names
    for _ in loops:
        ctx.depth -= 1
        add_line(ctx, "}")


def _find_bounds_checks(
    ctx: CslContext, ref: PeArrayView, starts: Sequence[str], shape: Sequence[int], names: Sequence[str]
) -> list[str]:
    """The conditions for a block element to be in bounds, without those that are statically true."""
    conditions = []
    for start, size, length, name in zip(starts, ref.shape, shape, names, strict=True):
        if start.isdigit() and int(start) + length <= size:
            continue
        index = f"{start} + @as({ctx.index_type}, {name})"
        conditions.append(f"{index} < {size}")
        if "-" in start or "[" in start:
            conditions.append(f"{index} >= 0")
    return conditions


def _emit_guarded(ctx: CslContext, conditions: Sequence[str], then: str, otherwise: str = "") -> None:
    """A statement under conditions, and optionally one for the other case."""
    if not conditions:
        add_line(ctx, then)
        return
    # Nested branches: an element out of bounds is never read.
    tail = f" else {{ {otherwise} }}" if otherwise else ""
    add_line(ctx, f"if ({' and '.join(f'({c})' for c in conditions)}) {{ {then} }}{tail}")


def _format_mask(mask: PeArrayView | None, shape: tuple[int, ...], names: Sequence[str]) -> list[str]:
    return [] if mask is None else [f"{mask.broadcast_axes(shape).at(names)} != 0"]


@emit(tile.load)
def _(ctx, node, ref, *rest):
    starts, out = [format_index(ctx, v) for v in rest[: len(ref.shape)]], allocate_for(ctx, node.out.type)
    mask, other = (*rest[len(ref.shape) :], None, None)[:2]
    region, place = replace(ref, shape=out.shape), _format_offset(ref, starts)
    bounded = (
        _find_bounds_checks(ctx, ref, starts, out.shape, ["0"] * len(starts)) if node.attrs["edge"] == CLIP else []
    )
    if mask is None and not bounded:
        emit_move(ctx, out, region, "", place)
        return out
    zero = PeArrayView(out.type, out.shape, literal=format_literal(0, node.out.type.dtype))
    given = zero if other is None else other.broadcast_axes(out.shape)
    with loop_over_elements(ctx, out.shape) as names:
        conditions = _format_mask(mask, out.shape, names)
        conditions += _find_bounds_checks(ctx, ref, starts, out.shape, names) if bounded else []
        source = offset_element(region.at(names), place)
        _emit_guarded(ctx, conditions, f"{out.at(names)} = {source};", f"{out.at(names)} = {given.at(names)};")
    return out


@emit(tile.store)
def _(ctx, node, ref, value, *rest):
    value = widen_index_literal(ref, value)
    starts, mask = [format_index(ctx, v) for v in rest[: len(ref.shape)]], (*rest[len(ref.shape) :], None)[0]
    region, place = replace(ref, shape=value.shape), _format_offset(ref, starts)
    bounded = (
        _find_bounds_checks(ctx, ref, starts, value.shape, ["0"] * len(starts)) if node.attrs["edge"] == CLIP else []
    )
    if mask is None and not bounded:
        emit_move(ctx, region, value, place, "")
        return
    with loop_over_elements(ctx, value.shape) as names:
        conditions = _format_mask(mask, value.shape, names)
        conditions += _find_bounds_checks(ctx, ref, starts, value.shape, names) if bounded else []
        _emit_guarded(ctx, conditions, f"{offset_element(region.at(names), place)} = {value.at(names)};")


def _format_element(
    ctx: CslContext, ref: PeArrayView, indices: Sequence[PeArrayView], shape: tuple[int, ...], names: Sequence[str]
) -> str:
    """The array element that index blocks select at one position."""
    texts = [f"@as({ctx.index_type}, {v.broadcast_axes(shape).at(names)})" for v in indices]
    return offset_element(PeArrayView(ref.type, (), ref.buffer, ref.offset, ()).at(()), _format_offset(ref, texts))


@emit(tile.gather)
def _(ctx, node, ref, *rest):
    rank, out = len(ref.shape), allocate_for(ctx, node.out.type)
    mask, other = (*rest[rank:], None, None)[:2]
    zero = PeArrayView(out.type, out.shape, literal=format_literal(0, node.out.type.dtype))
    given = zero if other is None else other.broadcast_axes(out.shape)
    with loop_over_elements(ctx, out.shape) as names:
        source = _format_element(ctx, ref, rest[:rank], out.shape, names)
        conditions = _format_mask(mask, out.shape, names)
        _emit_guarded(ctx, conditions, f"{out.at(names)} = {source};", f"{out.at(names)} = {given.at(names)};")
    return out


def _broadcast_shape(node: Node, first: int) -> tuple[int, ...]:
    """The broadcast shape of index blocks and of the axes before them."""
    return tuple(int(n) for n in broadcast(*(v.type.shape for v in node.args[first:])))


@emit(tile.scatter)
def _(ctx, node, ref, value, *rest):
    rank, shape = len(ref.shape), _broadcast_shape(node, 1)
    with loop_over_elements(ctx, shape) as names:
        target = _format_element(ctx, ref, rest[:rank], shape, names)
        mask = (*rest[rank:], None)[0]
        _emit_guarded(
            ctx,
            _format_mask(mask, shape, names),
            f"{target} = {widen_index_literal(ref, value).broadcast_axes(shape).at(names)};",
        )


ATOMIC_EXPRESSIONS = {
    "add": "{0} + {1}", "max": "if ({1} > {0} or {1} != {1}) {1} else {0}", "exchange": "{1}",
    "min": "if ({1} < {0} or {1} != {1}) {1} else {0}", "and": "{0} & {1}", "or": "{0} | {1}", "xor": "{0} ^ {1}",
}  # fmt: skip


@emit(tile.atomic)
def _(ctx, node, ref, value, *rest):
    rank, out, old = len(ref.shape), allocate_for(ctx, node.out.type), f"old{next(ctx.names)}"
    dtype = node.out.type.dtype
    with loop_over_elements(ctx, out.shape) as names:
        place = _format_element(ctx, ref, rest[:rank], out.shape, names)
        given = widen_index_literal(ref, value).broadcast_axes(out.shape).at(names)
        operands = [format_widening(ctx, dtype, text) if dtype.bits < 16 else text for text in (old, given)]
        text = ATOMIC_EXPRESSIONS[node.attrs["kind"]].format(*operands)
        text = format_narrowing(ctx, dtype, f"({text})") if dtype.bits < 16 else text
        mask = (*rest[rank:], None)[0]
        then = f"const {old}: {out.type} = {place}; {place} = {text}; {out.at(names)} = {old};"
        _emit_guarded(
            ctx,
            _format_mask(mask, out.shape, names),
            then,
            f"{out.at(names)} = {format_literal(0, node.out.type.dtype)};",
        )
    return out


@emit(tile.compare_exchange)
def _(ctx, node, ref, value, expected, *rest):
    rank, out, old = len(ref.shape), allocate_for(ctx, node.out.type), f"old{next(ctx.names)}"
    with loop_over_elements(ctx, out.shape) as names:
        place = _format_element(ctx, ref, rest[:rank], out.shape, names)
        given, wanted = (widen_index_literal(ref, v).broadcast_axes(out.shape).at(names) for v in (value, expected))
        mask = (*rest[rank:], None)[0]
        swap = f"if ({old} == {wanted}) {{ {place} = {given}; }}"
        then = f"const {old}: {out.type} = {place}; {swap} {out.at(names)} = {old};"
        _emit_guarded(
            ctx,
            _format_mask(mask, out.shape, names),
            then,
            f"{out.at(names)} = {format_literal(0, node.out.type.dtype)};",
        )
    return out


@emit(tile.alloc)
def _(ctx, node):
    shape, kind = tuple(map(int, node.out.type.shape)), CSL_TYPES[node.out.type.dtype]
    return allocate_array(ctx, shape, kind)


@emit(tile.async_copy)
def _(ctx, node, dst, src, *starts):
    here, texts = len(dst.shape), [format_index(ctx, v) for v in starts]
    rank = max(here, len(src.shape), len(node.attrs["shape"]))
    block = (1,) * (rank - len(node.attrs["shape"])) + tuple(node.attrs["shape"])
    target, source = (_align_ranks(v, block) for v in (dst, src))
    to, start = _format_offset(dst, texts[:here]), _format_offset(src, texts[here:])
    level = ["0"] * (rank - len(src.shape)) + texts[here:]
    bounded = _find_bounds_checks(ctx, source[1], level, block, ["0"] * rank) if node.attrs["edge"] == CLIP else []
    if not bounded:
        emit_move(ctx, target[0], source[0], to, start)
        return
    with loop_over_elements(ctx, block) as names:
        into = offset_element(target[0].at(names), to)
        value, zero = offset_element(source[0].at(names), start), format_literal(0, node.types[0].dtype)
        _emit_guarded(
            ctx,
            _find_bounds_checks(ctx, source[1], level, block, names),
            f"{into} = {value};",
            f"{into} = {zero};",
        )


def _align_ranks(x: PeArrayView, block: tuple[int, ...]) -> tuple[PeArrayView, PeArrayView]:
    """A block's view of an array of lower rank, and the array with as many axes."""
    extra = len(block) - len(x.shape)
    strides = (*(0,) * extra, *x.strides)
    return replace(x, shape=block, strides=strides), replace(x, shape=(1,) * extra + x.shape, strides=strides)


# A launch with a grid barrier has only one program.
@emit(tile.async_commit, tile.async_wait, tile.barrier, tile.grid_barrier)
def _(ctx, node):
    return None


def declare_param(ctx: CslContext, param: Value) -> PeArrayView:
    """Declare the array of a kernel parameter."""
    shape = tuple(int(n) for n in param.type.shape)
    buffer = declare_array(ctx, param, shape)
    return PeArrayView(buffer.type, shape, buffer, 0, make_row_major_strides(shape))


# Slices, concatenation, indexed reads and halos in the memory of one PE; most are views of the same array.


def slice_axis(x: PeArrayView, axis: int, first: int, count: int) -> PeArrayView:
    """A slice along one axis of a view."""
    shape = (*x.shape[:axis], count, *x.shape[axis + 1 :])
    if x.literal:
        return PeArrayView(x.type, shape, literal=x.literal)
    return PeArrayView(x.type, shape, x.buffer, x.offset + first * x.strides[axis], x.strides)


@emit(mesh.panel)
def _(ctx, node, x, number):
    axis = node.attrs["axis"] % len(x.shape)
    size = x.shape[axis] // node.attrs["count"]
    if x.literal:
        return slice_axis(x, axis, 0, size)
    if number.literal.isdigit():
        return slice_axis(x, axis, int(number.literal) * size, size)
    out = allocate_for(ctx, node.out.type)
    emit_move(ctx, out, slice_axis(x, axis, 0, size), "", f"{number.literal} * {size * x.strides[axis]}")
    return out


@emit(mesh.section)
def _(ctx, node, x):
    attrs, shape = node.attrs, tuple(map(int, node.out.type.shape))
    if x.literal or 0 in shape:
        return PeArrayView(x.type, shape, x.buffer, x.offset, x.strides, x.literal)
    offset = x.offset + sum(a * s for a, s in zip(attrs["start"], x.strides, strict=True))
    strides = tuple(by * s for by, s in zip(attrs["step"], x.strides, strict=True))
    return replace(x, shape=shape, offset=offset, strides=strides)


@emit(mesh.join)
def _(ctx, node, *blocks):
    axis, out, first = node.attrs["axis"] % len(node.out.type.shape), allocate_for(ctx, node.out.type), 0
    for block in blocks:
        emit_copy(ctx, slice_axis(out, axis, first, block.shape[axis]), block)
        first += block.shape[axis]
    return out


@emit(mesh.put)
def _(ctx, node, x, one, number):
    axis, out = node.attrs["axis"] % len(x.shape), reuse_or_copy(ctx, node.args[0], x)
    emit_move(ctx, slice_axis(out, axis, 0, 1), one, f"{number.literal} * {out.strides[axis]}", "")
    return out


@emit(mesh.pick)
def _(ctx, node, x, indices):
    axis, out = node.attrs["axis"] % len(x.shape), allocate_for(ctx, node.out.type)
    if x.literal:
        return x.broadcast_axes(out.shape)
    inner = len(x.shape) - axis - 1
    around = len(indices.shape)
    zeros = (0,) * around
    spread = (*(0,) * axis, *make_row_major_strides(indices.shape), *(0,) * inner)
    places = make_contiguous(ctx, indices) if not indices.literal else indices
    named = replace(places, shape=out.shape, strides=() if places.literal else spread)
    source = replace(x, shape=out.shape, strides=(*x.strides[:axis], *zeros, *x.strides[axis + 1 :]))
    stride = x.strides[axis]
    size = x.shape[axis]
    outside = add_fault(ctx, node, "bounds", f"index out of bounds for an axis of size {size}", f"0 to {size - 1}")
    emit_loop(
        ctx,
        [out, named, source],
        lambda t: (
            f"if ({t[1]} < 0 or {t[1]} >= {size}) {{ {outside} }} "
            f"else {{ {t[0]} = {_offset_index(t[2], f'{t[1]} * {stride}')}; }}"
        ),
    )
    if places is not indices:
        release_view(ctx, places)
    return out


def _offset_index(text: str, first: str) -> str:
    """An array element moved by an offset."""
    name, _, index = text.partition("[")
    return f"{name}[@as(i16, {first}) + {index}"


@emit(mesh.halo)
def _(ctx, node, x, edge):
    axis, out = node.attrs["axis"] % len(x.shape), allocate_for(ctx, node.out.type)
    length, up = out.shape[axis], node.attrs["offset"] > 0
    emit_copy(ctx, slice_axis(out, axis, 0 if up else length - 1, 1), edge)
    if length > 1:
        emit_copy(ctx, slice_axis(out, axis, int(up), length - 1), slice_axis(x, axis, int(not up), length - 1))
    return out

"""Slices, concatenation, indexed reads and halos in the memory of one PE; most are views of the same array."""

from __future__ import annotations

from dataclasses import replace

from tessera.codegen.csl.table.blocks import emit
from tessera.codegen.csl.text.dsd import PeArrayView, make_row_major_strides
from tessera.codegen.csl.text.faults import add_fault
from tessera.codegen.csl.text.memory_allocation import allocate_for, release_view
from tessera.codegen.csl.text.statements import emit_copy, emit_loop, emit_move, make_contiguous, reuse_or_copy
from tessera.ops.dialects import mesh


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

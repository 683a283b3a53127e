"""Rows of operations that move elements: shapes, slices, padding, gather and scatter.

Gather and scatter along one axis are the ops of Tessera. The general ones compute the row-major number of each element,
and index the flattened operand; updates outside the operand go to one more element, which is dropped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tessera.core.symbolic_dim import Size
from tessera.core.types import int64
from tessera.ir.tensor import Tensor
from tessera.ops.tensor import elementwise as e
from tessera.ops.tensor import shape as s
from tessera.ops.tensor.basic import broadcast_to, cast, full, splat
from tessera.ops.tensor.rearrange import flip
from tessera.stablehlo.padding import pad_with
from tessera.stablehlo.regions import scatter_flat
from tessera.stablehlo.table import Site, row

# Shapes.


@row("stablehlo.reshape", "mhlo.reshape", "stablehlo.dynamic_reshape")
def _(site: Site, x: Tensor, *rest: Tensor) -> Tensor:
    return s.reshape(x, shape=site.shape)


@row("stablehlo.broadcast_in_dim", "mhlo.broadcast_in_dim", "stablehlo.dynamic_broadcast_in_dim")
def _(site: Site, x: Tensor, *rest: Tensor) -> Tensor:
    places = site.numbers("dims", site.numbers("broadcast_dimensions"))
    order = sorted(range(x.ndim), key=lambda i: places[i])
    moved = x if order == list(range(x.ndim)) else s.permute(x, axes=tuple(order))
    sizes = {places[i]: x.shape[i] for i in order}
    aligned = tuple(sizes.get(i, 1) for i in range(len(site.shape)))
    aligned_x = moved if moved.shape == aligned else s.reshape(moved, shape=aligned)
    return aligned_x if aligned == site.shape else broadcast_to(aligned_x, shape=site.shape)


@row("stablehlo.broadcast")
def _(site: Site, x: Tensor) -> Tensor:
    return broadcast_to(x, shape=site.shape)


@row("stablehlo.transpose", "mhlo.transpose")
def _(site: Site, x: Tensor) -> Tensor:
    return s.permute(x, axes=site.numbers("dims", site.numbers("permutation")))


@row("stablehlo.iota", "stablehlo.dynamic_iota")
def _(site: Site, *sizes: Tensor) -> Tensor:
    axis = site.get("dim", site.get("iota_dimension"))
    if site.dtype.is_float:
        return cast(s.iota(shape=site.shape, axis=axis), dtype=site.dtype)
    return s.iota(shape=site.shape, axis=axis, dtype=site.dtype)


@row("stablehlo.concatenate")
def _(site: Site, *parts: Tensor) -> Tensor:
    return s.concatenate(parts, axis=site.get("dim", site.get("dimension")))


@row("stablehlo.reverse")
def _(site: Site, x: Tensor) -> Tensor:
    axes = site.numbers("dims", site.numbers("dimensions"))
    return flip(x, axes) if axes and all(site.shape) else x


@row("stablehlo.get_dimension_size")
def _(site: Site, x: Tensor) -> Tensor:
    return full(shape=(), value=x.shape[site.get("dim", site.get("dimension"))], dtype=site.dtype)


# Slices and padding.


@row("stablehlo.slice")
def _(site: Site, x: Tensor) -> Tensor:
    if site.get("ranges") is not None:
        ranges = [(*r, 1)[:3] for r in site.get("ranges")]
    else:
        limits = (site.numbers(n) for n in ("start_indices", "limit_indices", "strides"))
        ranges = list(zip(*limits, strict=True))
    start, stop, step = zip(*ranges, strict=True) if ranges else ((), (), ())
    return s.slice_(x, start=start, stop=stop, step=step)


@row("stablehlo.pad")
def _(site: Site, x: Tensor, value: Tensor) -> Tensor:
    low, high, interior = (
        site.numbers(n, site.numbers(f"edge_padding_{n}" if n != "interior" else "interior_padding"))
        for n in ("low", "high", "interior")
    )
    return pad_with(x, value, site.constant(1), list(zip(low, high, interior, strict=True)))


@row("stablehlo.dynamic_slice")
def _(site: Site, x: Tensor, *starts: Tensor) -> Tensor:
    for axis, (size, start) in enumerate(zip(site.shape, starts, strict=True)):
        x = _take_range(x, axis, start, site.constant(axis + 1), size)
    return x


def _take_range(x: Tensor, axis: int, start: Tensor, number: Any, size: int) -> Tensor:
    """`size` elements of an axis from `start`, which is clamped to the axis."""
    whole = x.shape[axis]
    if size == whole:
        return x
    if number is not None:
        first = min(max(int(number), 0), whole - size)
        low, high = ([v if i == axis else d for i, d in enumerate(n)] for v, n in ((first, [0] * x.ndim), (0, x.shape)))
        high[axis] = first + size
        return s.slice_(x, start=tuple(low), stop=tuple(high))
    places = clamp_index(start, whole - size) + s.iota(shape=(size,))
    return s.gather(x, places, axis=axis)


def clamp_index(start: Tensor, largest: int) -> Tensor:
    """Indices as int64 from 0 to the largest."""
    if start.dtype.kind == "uint":
        start = e.minimum(start, splat(min(largest, 2**start.dtype.bits - 1), start.type))
        return cast(start, dtype=int64)
    return e.minimum(e.maximum(cast(start, dtype=int64), 0), largest)


@row("stablehlo.dynamic_update_slice")
def _(site: Site, x: Tensor, update: Tensor, *starts: Tensor) -> Tensor:
    if 0 in update.shape:
        return x
    inside, found = None, update
    for axis, start in enumerate(starts):
        size, whole = found.shape[axis], x.shape[axis]
        if size == whole:
            continue
        steps = s.iota(shape=(whole,)) - clamp_index(start, whole - size)
        along = (whole, *(1,) * (x.ndim - axis - 1))
        hit = s.reshape(e.greater_equal(steps, 0) & e.less(steps, size), shape=along)
        inside = hit if inside is None else inside & hit
        if size > 1:  # one element is broadcast
            found = s.gather(found, e.minimum(e.maximum(steps, 0), size - 1), axis=axis)
    return found if inside is None else e.where(inside, found, x)


# Gather.


@dataclass(frozen=True)
class _Dimensions:
    """The dimension numbers of a gather or scatter, under one set of names."""

    window: tuple[int, ...]  # axes of the result (updates) that step through the window
    collapsed: tuple[int, ...]  # axes of the operand that have no such axis
    operand_batch: tuple[int, ...]
    index_batch: tuple[int, ...]
    mapped: tuple[int, ...]  # the operand's axis for each number of an index
    vector: int  # the axis of the indices that holds them


def _read_dimensions(site: Site, names: Sequence[str], attribute: str) -> _Dimensions:
    """The dimension numbers; `names` are those of window, collapsed and mapped axes, and of the indices' batch."""
    given = site.get(attribute, {})
    if attribute == "scatter_dimension_numbers":
        given = {**given, "operand_batching_dims": given.get("input_batching_dims", ())}
    window, collapsed, mapped, index_batch, operand_batch = (
        tuple(given.get(n, ())) for n in (*names, "operand_batching_dims")
    )
    return _Dimensions(window, collapsed, operand_batch, index_batch, mapped, given.get("index_vector_dim", 0))


def _index_vectors(indices: Tensor, dims: _Dimensions) -> list[Tensor]:
    """The numbers of the index vectors: one tensor of the batch shape for each mapped axis."""
    if dims.vector == indices.ndim:
        return [indices]
    found = []
    for i in range(len(dims.mapped)):
        start = tuple(i if a == dims.vector else 0 for a in range(indices.ndim))
        stop = tuple(i + 1 if a == dims.vector else n for a, n in enumerate(indices.shape))
        part = s.slice_(indices, start=start, stop=stop)
        found.append(s.reshape(part, shape=tuple(n for a, n in enumerate(indices.shape) if a != dims.vector)))
    return found


def _window_axes(rank: int, dims: _Dimensions) -> list[int]:
    """The operand's axes that the window's axes of the result step through."""
    return [a for a in range(rank) if a not in dims.collapsed and a not in dims.operand_batch]


def _align(x: Tensor, axes: Sequence[int], rank: int) -> Tensor:
    """`x` with its axes at these places of a larger rank."""
    sizes = dict(zip(axes, x.shape, strict=True))
    return s.reshape(x, shape=tuple(sizes.get(i, 1) for i in range(rank)))


def _operand_places(
    shape: tuple[Size, ...], operand: tuple[Size, ...], indices: Tensor, dims: _Dimensions, room: Sequence[int] | None
) -> list[Tensor]:
    """For each axis of the operand the index of each element of the result (updates), broadcast to its shape.

    With `room`, the sizes of the window, starts are clamped, so that the window fits.
    """
    rank = len(shape)
    batch = [a for a in range(rank) if a not in dims.window]
    found: list[Any] = [None] * len(operand)
    for axis, start in zip(dims.mapped, _index_vectors(indices, dims), strict=True):
        first = cast(start, dtype=int64) if room is None else clamp_index(start, operand[axis] - room[axis])
        found[axis] = _align(first, batch, rank)
    index_axes = [a for a in range(indices.ndim) if a != dims.vector]
    for axis, source in zip(dims.operand_batch, dims.index_batch, strict=True):
        at = batch[index_axes.index(source)]
        found[axis] = _align(s.iota(shape=(shape[at],)), [at], rank)
    for at, axis in zip(dims.window, _window_axes(len(operand), dims), strict=True):
        step = _align(s.iota(shape=(shape[at],)), [at], rank)
        found[axis] = step if found[axis] is None else found[axis] + step
    zero = full(shape=(1,) * rank, value=0, dtype=int64)
    return [zero if place is None else place for place in found]


def _flat_places(places: Sequence[Tensor], operand: Sequence[Size], shape: tuple[Size, ...]) -> Tensor:
    """The row-major number of the element at these indices."""
    flat = full(shape=shape, value=0, dtype=int64)
    for axis, place in enumerate(places):
        flat = flat + place * math.prod(operand[axis + 1 :])
    return flat


def _whole_slices(x: Tensor, dims: _Dimensions, sizes: Sequence[int]) -> bool:
    """Whether the index is of one axis, which the result does not have, and all other axes are taken whole."""
    if len(dims.mapped) != 1 or dims.operand_batch:
        return False
    (axis,) = dims.mapped
    rest = all(n == m for a, (n, m) in enumerate(zip(sizes, x.shape, strict=True)) if a != axis)
    return dims.collapsed == (axis,) and sizes[axis] == 1 and rest


@row("stablehlo.gather")
def _(site: Site, x: Tensor, indices: Tensor) -> Tensor:
    names = ("offset_dims", "collapsed_slice_dims", "start_index_map", "start_indices_batching_dims")
    dims = _read_dimensions(site, names, "dimension_numbers")
    sizes = site.numbers("slice_sizes")
    if 0 in site.shape:
        return full(shape=site.shape, value=0, dtype=site.dtype)
    if _whole_slices(x, dims, sizes):
        (axis,) = dims.mapped
        (start,) = _index_vectors(indices, dims)
        found = s.gather(x, clamp_index(start, x.shape[axis] - 1), axis=axis)
        return _order_gathered(found, axis, start.ndim, dims, len(site.shape))
    places = _operand_places(site.shape, x.shape, indices, dims, sizes)
    return s.gather(s.reshape(x, shape=(-1,)), _flat_places(places, x.shape, site.shape), axis=0)


def _order_gathered(found: Tensor, axis: int, count: int, dims: _Dimensions, rank: int) -> Tensor:
    """The axes of `ts.gather`, [before, indices, after], in the order of the result."""
    batch = iter(range(axis, axis + count))
    window = iter([*range(axis), *range(axis + count, rank)])
    order = tuple(next(window) if a in dims.window else next(batch) for a in range(rank))
    return found if order == tuple(range(rank)) else s.permute(found, axes=order)


# Scatter.


def _fits_operand(
    shape: tuple[Size, ...], operand: tuple[Size, ...], indices: Tensor, dims: _Dimensions
) -> Tensor | None:
    """Whether the whole window of an update lies in the operand, as XLA takes it; None without indices."""
    extents = {a: shape[at] for at, a in zip(dims.window, _window_axes(len(operand), dims), strict=True)}
    batch = [a for a in range(len(shape)) if a not in dims.window]
    inside = None
    for axis, start in zip(dims.mapped, _index_vectors(indices, dims), strict=True):
        first = _align(cast(start, dtype=int64), batch, len(shape))
        fits = e.greater_equal(first, 0) & e.less_equal(first, operand[axis] - extents.get(axis, 1))
        inside = fits if inside is None else inside & fits
    return inside


@row("stablehlo.scatter")
def _(site: Site, *operands: Tensor) -> list[Tensor]:
    count = len(operands) // 2
    inputs, indices, updates = operands[:count], operands[count], operands[count + 1 :]
    names = (
        "update_window_dims",
        "inserted_window_dims",
        "scatter_dims_to_operand_dims",
        "scatter_indices_batching_dims",
    )
    dims = _read_dimensions(site, names, "scatter_dimension_numbers")
    if 0 in updates[0].shape or 0 in inputs[0].shape:
        return list(inputs)
    shape, operand = updates[0].shape, inputs[0].shape
    places = _operand_places(shape, operand, indices, dims, None)
    inside = _fits_operand(shape, operand, indices, dims)
    numbers = _flat_places(places, operand, shape)
    if inside is not None:
        numbers = e.where(inside, numbers, math.prod(operand))
    flat = s.reshape(numbers, shape=(-1,))
    return scatter_flat(site, inputs, flat, [s.reshape(u, shape=(-1,)) for u in updates], 0)

"""Indexing: Gather and Scatter in all forms, OneHot, TopK, NonZero, Unique, Compress, ReverseSequence."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tessera.core.types import int64
from tessera.ir.tensor import Tensor
from tessera.onnx.node_rules import NodeCall, rule
from tessera.onnx.rules.shape import take_range
from tessera.ops.tensor import elementwise as e
from tessera.ops.tensor import rearrange, sorting
from tessera.ops.tensor.basic import broadcast_to, cast
from tessera.ops.tensor.scatter import scatter, scatter_add
from tessera.ops.tensor.shape import check_index, expand_dims, gather, iota, permute, reshape

SCATTER_MODES = {"none": "set", "mul": "multiply", "min": "min", "max": "max"}


@rule("Gather")
def _(call: NodeCall, x: Any, indices: Tensor) -> Any:
    axis = call.attr("axis")
    return np.take(x, indices.numpy(), axis) if isinstance(x, np.ndarray) else gather(x, indices, axis=axis)


@rule("GatherElements")
def _(call: NodeCall, x: Tensor, indices: Tensor) -> Tensor:
    return rearrange.take_along_axis(x, indices, call.attr("axis"))


def linear_index(call: NodeCall, shape: tuple[Any, ...], indices: Tensor, batch: int) -> tuple[Tensor, int]:
    """Index vectors [..., depth] into the axes of `shape` as numbers in row-major order, and the depth."""
    depth = int(indices.shape[-1])
    if batch + depth > len(shape):
        raise call.fail("the index vectors are too long", expected=f"at most {len(shape) - batch}", received=depth)
    found: Any = Tensor(np.zeros(indices.shape[:-1], np.int64))
    for axis in range(batch):
        found = found * shape[axis] + iota(shape=indices.shape[:-1], axis=axis)
    for i in range(depth):
        part = check_index(indices[..., i], size=shape[batch + i], along=batch + i)
        found = found * shape[batch + i] + part
    return found, depth


@rule("GatherND")
def _(call: NodeCall, x: Tensor, indices: Tensor) -> Tensor:
    batch = call.attr("batch_dims", 0)
    place, depth = linear_index(call, x.shape, indices, batch)
    rest = x.shape[batch + depth :]
    rows = reshape(x, shape=(math.prod(x.shape[: batch + depth]), *rest))
    return gather(rows, place, axis=0)


def scatter_flat(call: NodeCall, rows: Tensor, place: Tensor, updates: Tensor, mode: str) -> Tensor:
    """`rows` [N, ...] with `updates` at the rows of the vector `place`, combined as a reduction of ONNX says."""
    if mode == "add" and rows.dtype.kind != "bool":
        return scatter_add(rows, place, updates, axis=0)
    if mode not in SCATTER_MODES:
        raise call.fail(f"no reduction {mode}", expected="none, add, mul, min, max")
    return scatter(rows, place, updates, axis=0, mode=SCATTER_MODES[mode])


@rule("ScatterND")
def _(call: NodeCall, x: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    place, depth = linear_index(call, x.shape, indices, 0)
    rest = x.shape[depth:]
    rows = reshape(x, shape=(math.prod(x.shape[:depth]), *rest))
    parts = reshape(updates, shape=(math.prod(place.shape), *rest))
    out = scatter_flat(call, rows, reshape(place, shape=(-1,)), parts, call.attr("reduction", "none"))
    return reshape(out, shape=x.shape)


@rule("ScatterElements", "Scatter")
def _(call: NodeCall, x: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    axis = call.attr("axis") % x.ndim
    place: Any = Tensor(np.zeros(indices.shape, np.int64))
    checked = check_index(indices, size=x.shape[axis], along=axis)
    for i, size in enumerate(x.shape):
        place = place * size + (checked if i == axis else iota(shape=indices.shape, axis=i))
    rows, flat, parts = (reshape(t, shape=(-1,)) for t in (x, place, updates))
    return reshape(scatter_flat(call, rows, flat, parts, call.attr("reduction", "none")), shape=x.shape)


@rule("TensorScatter")
def _(call: NodeCall, past: Tensor, update: Tensor, indices: Tensor | None = None) -> Tensor:
    axis = call.attr("axis") % past.ndim
    size, length = past.shape[axis], update.shape[axis]
    start = Tensor(np.zeros(past.shape[0], np.int64)) if indices is None else cast(indices, dtype=int64)
    at = expand_dims(start, 1) + iota(shape=(1, length))
    at = e.remainder(at, size) if call.attr("mode") == "circular" else at
    shape: list[Any] = [1] * past.ndim
    shape[0], shape[axis] = past.shape[0], length
    place = broadcast_to(reshape(at, shape=tuple(shape)), shape=update.shape)
    flat: Any = Tensor(np.zeros(update.shape, np.int64))
    checked = check_index(place, size=size, along=axis)
    for i, n in enumerate(past.shape):
        flat = flat * n + (checked if i == axis else iota(shape=update.shape, axis=i))
    rows, to, parts = (reshape(t, shape=(-1,)) for t in (past, flat, update))
    return reshape(scatter_flat(call, rows, to, parts, "none"), shape=past.shape)


@rule("OneHot", static=(1,))
def _(call: NodeCall, indices: Tensor, depth: Tensor, values: Tensor) -> Tensor:
    size = call.ints(depth, "the depth")[0]
    axis = call.attr("axis")
    at = axis + indices.ndim + 1 if axis < 0 else axis
    place = indices if indices.dtype == int64 else cast(indices, dtype=int64)
    shape = [1] * (indices.ndim + 1)
    shape[at] = size
    wrapped = e.where(e.less(place, 0), place + size, place)
    hit = e.equal(expand_dims(wrapped, at), reshape(iota(shape=(size,)), shape=tuple(shape)))
    return e.where(hit, values[1], values[0])


@rule("TopK", static=(1,))
def _(call: NodeCall, x: Tensor, k: Tensor | None = None) -> tuple[Tensor, Tensor]:
    count = call.attr("k") if k is None else call.ints(k, "k")[0]
    return sorting.topk(x, count, call.attr("axis"), bool(call.attr("largest", 1)))


@rule("NonZero")
def _(call: NodeCall, x: Tensor) -> Tensor:
    found = np.nonzero(call.array(e.not_equal(x, 0) if x.dtype.kind != "bool" else x, "the elements"))
    return Tensor(np.array(found, np.int64).reshape(max(x.ndim, 1), -1))


@rule("Compress", static=(1,))
def _(call: NodeCall, x: Tensor, condition: Tensor) -> Tensor:
    places = np.nonzero(call.array(condition, "the condition"))[0]
    axis = call.attr("axis", None)
    rows = reshape(x, shape=(-1,)) if axis is None else x
    return gather(rows, Tensor(places), axis=0 if axis is None else axis)


@rule("Unique", static=(0,))
def _(call: NodeCall, x: Tensor) -> tuple[Tensor, ...]:
    array, axis = call.array(x, "the elements"), call.attr("axis", None)
    _, first, inverse, counts = np.unique(array, return_index=True, return_inverse=True, return_counts=True, axis=axis)
    order = np.arange(len(first)) if call.attr("sorted") else np.argsort(first)
    rank = np.argsort(order)
    values = array.reshape(-1)[first[order]] if axis is None else np.take(array, first[order], axis)
    found = (values, first[order], rank[inverse.reshape(-1)], counts[order])
    return tuple(Tensor(np.asarray(a)) for a in found)


@rule("ReverseSequence")
def _(call: NodeCall, x: Tensor, lengths: Tensor) -> Tensor:
    time, batch = call.attr("time_axis"), call.attr("batch_axis")
    return reverse_sequences(x, lengths, time, batch)


def reverse_sequences(x: Tensor, lengths: Tensor, time: int, batch: int) -> Tensor:
    """The first `lengths[b]` steps of each example b in reverse, the others as they are."""
    order = (batch, time, *(i for i in range(x.ndim) if i not in (batch, time)))
    rows = permute(x, axes=order)
    size = rows.shape[1]
    step = iota(shape=(rows.shape[0], size))
    length = expand_dims(cast(lengths, dtype=int64), 1)
    place = e.where(e.less(step, length), length - 1 - step, step)
    flat = place + iota(shape=place.shape, axis=0) * size
    found = gather(reshape(rows, shape=(-1, *rows.shape[2:])), flat, axis=0)
    return permute(found, axes=tuple(int(i) for i in np.argsort(order)))


@rule("NonMaxSuppression", static=(0, 1, 2, 3, 4))
def _(call: NodeCall, boxes: Tensor, scores: Tensor, *limits: Tensor | None) -> Tensor:
    given = [None if x is None else call.array(x, "a limit").reshape(-1)[0] for x in limits]
    most, overlap, least = (*given, None, None, None)[:3]
    found = []
    corners = _box_corners(call.array(boxes, "the boxes"), call.attr("center_point_box"))
    for b, row in enumerate(call.array(scores, "the scores")):
        for c, score in enumerate(row):
            kept = _suppress(corners[b], score, int(most or 0), float(overlap or 0.0), least)
            found += [(b, c, i) for i in kept]
    return Tensor(np.array(found, np.int64).reshape(-1, 3))


def _box_corners(boxes: np.ndarray, centred: int) -> np.ndarray:
    """Boxes [B, N, 4] as (low y, low x, high y, high x)."""
    if centred:
        x, y, w, h = np.moveaxis(boxes, -1, 0)
        return np.stack([y - h / 2, x - w / 2, y + h / 2, x + w / 2], -1)
    a, b = boxes[..., :2], boxes[..., 2:]
    return np.concatenate([np.minimum(a, b), np.maximum(a, b)], -1)


def _suppress(boxes: np.ndarray, scores: np.ndarray, most: int, overlap: float, least: Any) -> list[int]:
    """The boxes to keep: by falling score, each that overlaps none kept before by more than the limit."""
    order = [i for i in np.argsort(-scores, kind="stable") if least is None or scores[i] > least]
    kept: list[int] = []
    for i in order:
        if len(kept) >= most:
            break
        if all(_overlap(boxes[i], boxes[j]) <= overlap for j in kept):
            kept.append(int(i))
    return kept


def _overlap(a: np.ndarray, b: np.ndarray) -> float:
    """Intersection over union."""
    sides = np.maximum(np.minimum(a[2:], b[2:]) - np.maximum(a[:2], b[:2]), 0)
    shared = float(sides[0] * sides[1])
    area = sum(float((x[2] - x[0]) * (x[3] - x[1])) for x in (a, b)) - shared
    return shared / area if area > 0 else 0.0


def select(x: Tensor, axis: int, index: int) -> Tensor:
    """The slice at one index of an axis, without the axis."""
    cut = take_range(x, axis, index, index + 1, 1)
    return reshape(cut, shape=(*x.shape[:axis], *x.shape[axis + 1 :]))

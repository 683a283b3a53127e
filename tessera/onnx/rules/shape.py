"""Shapes: Reshape, Transpose, Slice, Concat, Split, Pad, Tile and the operators that read a shape."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from tessera.core.shapes import normalize_axis
from tessera.ir.tensor import Tensor
from tessera.onnx.element_types import Carried, find_element
from tessera.onnx.node_rules import NodeCall, rule
from tessera.ops.api.creation import eye
from tessera.ops.tensor import elementwise as e
from tessera.ops.tensor import rearrange
from tessera.ops.tensor.basic import broadcast_to, cast
from tessera.ops.tensor.rearrange import narrow
from tessera.ops.tensor.shape import concatenate, gather, iota, permute, reshape


def reshape_value(x: Any, shape: Sequence[int]) -> Any:
    """A tensor, or an array of strings, in another shape."""
    return x.reshape(tuple(shape)) if isinstance(x, np.ndarray) else reshape(x, shape=tuple(shape))


@rule("Identity")
def _(call: NodeCall, x: Any) -> Any:
    return x


@rule("Reshape", static=(1,))
def _(call: NodeCall, x: Any, shape: Tensor | None = None) -> Any:
    sizes = call.attr("shape") if shape is None else call.ints(shape, "the shape")
    if not call.attr("allowzero", 0):
        sizes = [x.shape[i] if n == 0 else n for i, n in enumerate(sizes)]
    if -1 in sizes:
        known = math.prod(n for n in sizes if n != -1)
        sizes = [math.prod(x.shape) // known if n == -1 and known else n for n in sizes]
    if math.prod(sizes) != math.prod(x.shape):
        raise call.fail("another number of elements", expected=tuple(sizes), received=tuple(x.shape))
    return reshape_value(x, sizes)


@rule("Transpose")
def _(call: NodeCall, x: Any) -> Any:
    axes = tuple(call.attr("perm", None) or reversed(range(len(x.shape))))
    return x.transpose(axes) if isinstance(x, np.ndarray) else permute(x, axes=axes)


@rule("Flatten")
def _(call: NodeCall, x: Any) -> Any:
    axis = call.attr("axis")
    at = axis + len(x.shape) if axis < 0 else axis
    return reshape_value(x, (math.prod(x.shape[:at]), math.prod(x.shape[at:])))


def _read_axes(call: NodeCall, axes: Tensor | None, rank: int) -> list[int]:
    listed = call.attr("axes", None) if axes is None else call.ints(axes, "axes")
    return [normalize_axis(a, rank) + rank for a in listed or ()]


@rule("Squeeze", static=(1,))
def _(call: NodeCall, x: Any, axes: Tensor | None = None) -> Any:
    found = _read_axes(call, axes, len(x.shape)) or [i for i, n in enumerate(x.shape) if n == 1]
    if any(x.shape[a] != 1 for a in found):
        raise call.fail("an axis to remove has more than one element", received=tuple(x.shape))
    return reshape_value(x, [n for i, n in enumerate(x.shape) if i not in found])


@rule("Unsqueeze", static=(1,))
def _(call: NodeCall, x: Any, axes: Tensor | None = None) -> Any:
    count = len(call.attr("axes")) if axes is None else len(call.ints(axes, "axes"))
    rank = len(x.shape) + count
    found = _read_axes(call, axes, rank)
    sizes = iter(x.shape)
    return reshape_value(x, [1 if i in found else next(sizes) for i in range(rank)])


@rule("Shape")
def _(call: NodeCall, x: Any) -> Tensor:
    start, stop = call.attr("start", 0), call.attr("end", None)
    return Tensor(np.array(_read_sizes(call, x)[slice(start, stop)], np.int64))


@rule("Size")
def _(call: NodeCall, x: Any) -> Tensor:
    return Tensor(np.asarray(math.prod(_read_sizes(call, x)), np.int64))


def _read_sizes(call: NodeCall, x: Any) -> list[int]:
    if not all(isinstance(n, (int, np.integer)) for n in x.shape):
        raise call.refuse(f"the shape {tuple(map(str, x.shape))} has sizes that are known by name alone")
    return [int(n) for n in x.shape]


@rule("Concat")
def _(call: NodeCall, *xs: Any) -> Any:
    axis = call.attr("axis", 1) if call.since < 4 else call.attr("axis")
    return np.concatenate(xs, axis) if isinstance(xs[0], np.ndarray) else concatenate(list(xs), axis=axis)


@rule("Split", static=(1,))
def _(call: NodeCall, x: Tensor, split: Tensor | None = None) -> tuple[Any, ...]:
    axis, count = call.attr("axis"), len(call.node.outputs)
    size = x.shape[axis]
    sizes = call.attr("split", None) if split is None else call.ints(split, "the sizes")
    if sizes is None:
        each = -(-size // count)
        sizes = [min(each, size - i * each) for i in range(count)]
    if sum(sizes) != size or min(sizes, default=0) < 0:
        raise call.fail("the parts do not fit the axis", expected=size, received=str(list(sizes)))
    ends = np.cumsum(sizes)
    return tuple(take_range(x, axis, int(b - n), int(b), 1) for n, b in zip(sizes, ends, strict=True))


def take_range(x: Any, axis: int, start: int, stop: int, step: int) -> Any:
    """The elements range(start, stop, step) of an axis."""
    axis = normalize_axis(axis, len(x.shape)) + len(x.shape)
    places = range(start, stop, step)
    if isinstance(x, np.ndarray):
        return np.take(x, np.array(places, np.int64), axis)
    if step > 0:
        return x if places == range(x.shape[axis]) else narrow(x, axis, start, max(start, stop), step)
    return gather(x, Tensor(np.array(places, np.int64)), axis=axis)


@rule("Slice", static=(1, 2, 3, 4))
def _(
    call: NodeCall,
    x: Any,
    starts: Tensor | None = None,
    ends: Tensor | None = None,
    axes: Tensor | None = None,
    steps: Tensor | None = None,
) -> Any:
    if call.since < 10:
        low, high = call.attr("starts"), call.attr("ends")
        along, by = call.attr("axes", None), None
    else:
        low, high = call.ints(starts, "the start"), call.ints(ends, "the end")
        along = None if axes is None else call.ints(axes, "axes")
        by = None if steps is None else call.ints(steps, "the step")
    along = list(range(len(low))) if along is None else along
    by = [1] * len(low) if by is None else by
    if not len(low) == len(high) == len(along) == len(by) or 0 in by:
        raise call.fail("starts, ends, axes and steps do not fit each other")
    for axis, a, b, step in zip(along, low, high, by, strict=True):
        x = take_range(x, axis, *slice(a, b, step).indices(int(x.shape[axis])))
    return x


@rule("Expand", static=(1,))
def _(call: NodeCall, x: Any, shape: Tensor) -> Any:
    sizes = np.broadcast_shapes(tuple(x.shape), tuple(call.ints(shape, "the shape")))
    return np.broadcast_to(x, sizes) if isinstance(x, np.ndarray) else broadcast_to(x, shape=sizes)


@rule("Tile", static=(1,))
def _(call: NodeCall, x: Any, repeats: Tensor) -> Any:
    counts = call.ints(repeats, "the repeats")
    return np.tile(x, counts) if isinstance(x, np.ndarray) else rearrange.tiled(x, counts)


@rule("Pad", static=(1, 3))
def _(
    call: NodeCall, x: Tensor, pads: Tensor | None = None, value: Tensor | None = None, axes: Tensor | None = None
) -> Tensor:
    counts = call.attr("pads") if pads is None else call.ints(pads, "the padding")
    along = list(range(x.ndim)) if axes is None else [a % x.ndim for a in call.ints(axes, "axes")]
    if len(counts) != 2 * len(along):
        raise call.fail("the padding does not fit the axes", expected=2 * len(along), received=len(counts))
    mode = call.attr("mode")
    filling: Any = call.attr("value", 0.0) if value is None else value
    for i, axis in enumerate(along):
        x = pad_axis(x, axis, counts[i], counts[i + len(along)], mode, filling)
    return x


PAD_MODES = {"reflect": "reflect", "edge": "edge", "wrap": "wrap"}


def pad_axis(x: Tensor, axis: int, low: int, high: int, mode: str, value: Any) -> Tensor:
    """`x` with elements added (or, for a negative count, removed) before and after an axis."""
    if min(low, high) < 0:
        x = take_range(x, axis, max(-low, 0), x.shape[axis] + min(high, 0), 1)
        low, high = max(low, 0), max(high, 0)
    if not low and not high:
        return x
    if mode != "constant":
        places = np.pad(np.arange(int(x.shape[axis])), (low, high), PAD_MODES[mode])  # type: ignore[call-overload]
        return gather(x, Tensor(places), axis=axis)
    parts = [x]
    for count, at in ((low, 0), (high, len)):
        if count:
            shape = (*x.shape[:axis], count, *x.shape[axis + 1 :])
            parts.insert(0 if at == 0 else len(parts), _fill_like(x, shape, value))
    return concatenate(parts, axis=axis)


def _fill_like(x: Tensor, shape: tuple[Any, ...], value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return broadcast_to(reshape(cast(value, dtype=x.dtype), shape=()), shape=shape)
    return cast(broadcast_to(Tensor(np.asarray(value, np.float32)), shape=shape), dtype=x.dtype)


@rule("DepthToSpace")
def _(call: NodeCall, x: Tensor) -> Tensor:
    by, (batch, channels, height, width) = call.attr("blocksize"), x.shape
    inner = channels // (by * by)
    if call.attr("mode", "DCR") == "DCR":
        cut = permute(reshape(x, shape=(batch, by, by, inner, height, width)), axes=(0, 3, 4, 1, 5, 2))
    else:
        cut = permute(reshape(x, shape=(batch, inner, by, by, height, width)), axes=(0, 1, 4, 2, 5, 3))
    return reshape(cut, shape=(batch, inner, height * by, width * by))


@rule("SpaceToDepth")
def _(call: NodeCall, x: Tensor) -> Tensor:
    by, (batch, channels, height, width) = call.attr("blocksize"), x.shape
    cut = reshape(x, shape=(batch, channels, height // by, by, width // by, by))
    shape = (batch, channels * by * by, height // by, width // by)
    axes = (0, 3, 5, 1, 2, 4) if call.attr("mode", "DCR") == "DCR" else (0, 1, 3, 5, 2, 4)
    return reshape(permute(cut, axes=axes), shape=shape)


@rule("EyeLike")
def _(call: NodeCall, x: Tensor) -> Tensor:
    wanted = call.attr("dtype", None)
    dtype = x.dtype if wanted is None else find_element(ir.DataType(wanted), "EyeLike")
    return cast(eye(int(x.shape[0]), int(x.shape[1]), k=call.attr("k")), dtype=dtype)


@rule("Range", static=(0, 1, 2))
def _(call: NodeCall, start: Tensor, limit: Tensor, delta: Tensor) -> Tensor:
    low, high, by = (call.array(x, "the range").reshape(())[()] for x in (start, limit, delta))
    count = max(int(np.ceil((float(high) - float(low)) / float(by))), 0) if start.dtype.is_float else None
    if count is None:
        return Tensor(np.arange(low, high, by, dtype=start.numpy().dtype))
    return Tensor((low + np.arange(count) * by).astype(start.numpy().dtype))


@rule("Trilu", static=(1,))
def _(call: NodeCall, x: Tensor, k: Tensor | None = None) -> Tensor:
    by = 0 if k is None else call.ints(k, "the diagonal")[0]
    rows, columns = (iota(shape=x.shape[-2:], axis=a) for a in (-2, -1))
    kept = e.greater_equal(columns - rows, by) if call.attr("upper") else e.less_equal(columns - rows, by)
    return e.where(kept, x, cast(Tensor(np.zeros((), np.int8)), dtype=x.dtype))


@rule("CenterCropPad", static=(1,))
def _(call: NodeCall, x: Tensor, shape: Tensor) -> Tensor:
    sizes = call.ints(shape, "the shape")
    axes = call.attr("axes", None) or list(range(x.ndim))
    for axis, wanted in zip(axes, sizes, strict=True):
        at, size = axis % x.ndim, x.shape[axis]
        if wanted < size:
            low = (size - wanted) // 2
            x = take_range(x, at, low, low + wanted, 1)
        elif wanted > size:
            low = (wanted - size) // 2
            x = pad_axis(x, at, low, wanted - size - low, "constant", 0)
    return x


def unwrap(x: Any) -> Any:
    """The tensor of a carried value."""
    return x.tensor if isinstance(x, Carried) else x

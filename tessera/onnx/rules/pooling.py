"""Pooling: the maximum, mean or p-norm of windows, global pools, MaxUnpool."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tessera.ir.tensor import Tensor
from tessera.onnx.node_rules import NodeCall, rule
from tessera.onnx.rules.convolution import Sides, find_sides, read_window
from tessera.ops.tensor import elementwise as e
from tessera.ops.tensor import reduce as r
from tessera.ops.tensor.basic import cast
from tessera.ops.tensor.coercion import composite
from tessera.ops.tensor.convolution import extract_windows, pad_spatial
from tessera.ops.tensor.pooling import Windows
from tessera.ops.tensor.reduce import apply_root
from tessera.ops.tensor.scatter import scatter
from tessera.ops.tensor.shape import iota, reshape


@dataclass(frozen=True)
class _NodePool:
    """The windows of a pool as its attributes describe them; `beyond` is what ceil_mode adds after each axis."""

    kernel: list[int]
    strides: list[int]
    dilations: list[int]
    sides: Sides
    beyond: list[int]
    counts: list[int]

    def extract(self, x: Tensor, fill: Any) -> Tensor:
        """The windows [B, C, window elements, counts]."""
        sides = [(a, b + more) for (a, b), more in zip(self.sides, self.beyond, strict=True)]
        return extract_windows(pad_spatial(x, sides, fill), self.kernel, self.strides, self.dilations)

    def starts(self) -> tuple[Tensor, ...]:
        """The first place of each window along each axis."""
        axes = zip(self.counts, self.strides, self.sides, strict=True)
        return tuple(iota(shape=(n,)) * s - a for n, s, (a, _) in axes)


def _plan(call: NodeCall, sizes: Sequence[Any]) -> _NodePool:
    kernel = list(call.attr("kernel_shape"))
    if len(kernel) != len(sizes):
        raise call.fail("the window does not fit the input", expected=f"{len(sizes)} axes", received=tuple(kernel))
    strides, dilations = read_window(call, kernel)
    sides = find_sides(call, sizes, kernel, strides, dilations)
    beyond, counts = [], []
    for n, k, s, d, (a, b) in zip(sizes, kernel, strides, dilations, sides, strict=True):
        room = n + a + b - d * (k - 1) - 1
        count = room // s + 1
        if call.attr("ceil_mode", 0):
            count = -(-room // s) + 1
            count -= (count - 1) * s >= n + a  # the last window starts in the input
        counts.append(count)
        beyond.append(max((count - 1) * s - room, 0))
    return _NodePool(kernel, strides, dilations, sides, beyond, counts)


@rule("MaxPool")
def _(call: NodeCall, x: Tensor) -> Any:
    plan = _plan(call, x.shape[2:])
    lowest = -math.inf if x.dtype.is_float else int(np.iinfo(x.dtype.numpy).min)
    values = plan.extract(x, lowest)
    if not call.wants(1):
        return r.max(values, axis=2)
    windows = Windows(values, tuple(plan.kernel), plan.starts(), tuple(plan.dilations), x.shape[2:])
    largest, place = windows.maximum(True)
    if call.attr("storage_order"):
        place = _to_column_major(place, x.shape[2:])
    image = iota(shape=(x.shape[0] * x.shape[1],)) * math.prod(x.shape[2:])
    return largest, place + reshape(image, shape=(*x.shape[:2], *(1,) * (x.ndim - 2)))


def _to_column_major(place: Tensor, sizes: Sequence[Any]) -> Tensor:
    """Numbers of elements in row-major order as those in column-major order."""
    found: Any = 0
    for axis in range(len(sizes)):
        index = e.remainder(e.floor_divide(place, math.prod(sizes[axis + 1 :])), sizes[axis])
        found = index * math.prod(sizes[:axis]) + found
    return found


@rule("AveragePool")
def _(call: NodeCall, x: Tensor) -> Tensor:
    plan = _plan(call, x.shape[2:])
    with_padding = bool(call.attr("count_include_pad", 0))
    counts = _count_elements(plan, x.shape[2:], with_padding).astype(x.type.compute.numpy)

    @composite
    def average(x: Tensor) -> Tensor:
        return r.sum(plan.extract(x, 0), axis=2) / cast(Tensor(counts), dtype=x.dtype)

    return average(x)


def _count_elements(plan: _NodePool, sizes: Sequence[Any], with_padding: bool) -> np.ndarray:
    """The number of elements of each window that are in the input, or in it and its padding."""
    total = np.ones([1] * len(sizes))
    for axis, (n, (a, b)) in enumerate(zip(sizes, plan.sides, strict=True)):
        first = np.arange(plan.counts[axis])[:, None] * plan.strides[axis] - a
        place = first + np.arange(plan.kernel[axis]) * plan.dilations[axis]
        low, high = (-a, n + b) if with_padding else (0, n)
        inside = ((place >= low) & (place < high)).sum(-1)
        total = total * inside.reshape([-1 if i == axis else 1 for i in range(len(sizes))])
    return np.maximum(total, 1)


@rule("LpPool")
def _(call: NodeCall, x: Tensor) -> Tensor:
    plan, p = _plan(call, x.shape[2:]), call.attr("p")
    return composite(lambda x: _root(r.sum(e.abs(plan.extract(x, 0)) ** p, axis=2), p))(x)


def _root(x: Tensor, p: int) -> Tensor:
    return x if p == 1 else apply_root(lambda t: t ** (1.0 / p), x)


@rule("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool")
def _(call: NodeCall, x: Tensor) -> Tensor:
    axes = tuple(range(2, x.ndim))
    if call.operator == "GlobalLpPool":
        p = call.attr("p")
        return composite(lambda x: _root(r.sum(e.abs(x) ** p, axis=axes, keepdims=True), p))(x)
    return (r.mean if call.operator == "GlobalAveragePool" else r.max)(x, axis=axes, keepdims=True)


@rule("MaxUnpool", static=(2,))
def _(call: NodeCall, x: Tensor, places: Tensor, output: Tensor | None = None) -> Tensor:
    kernel = list(call.attr("kernel_shape"))
    strides, _ = read_window(call, kernel)
    rank = len(kernel)
    pads = call.attr("pads", None) or [0] * (2 * rank)
    axes = zip(x.shape[2:], kernel, strides, pads[:rank], pads[rank:], strict=True)
    inferred = [*x.shape[:2], *((n - 1) * s + k - a - b for n, k, s, a, b in axes)]
    sizes = tuple(inferred if output is None else call.ints(output, "the output's shape"))
    if output is not None:  # the indices are those of the inferred shape
        places = _move_places(places, tuple(inferred), sizes)
    empty = Tensor(np.zeros(math.prod(sizes), x.dtype.numpy))
    flat = scatter(empty, reshape(places, shape=(-1,)), reshape(x, shape=(-1,)), axis=0)
    return reshape(flat, shape=sizes)


def _move_places(places: Tensor, before: tuple[int, ...], after: tuple[int, ...]) -> Tensor:
    """Numbers of elements in one shape as those in another."""
    found: Any = 0
    for axis in range(len(before)):
        index = e.remainder(e.floor_divide(places, math.prod(before[axis + 1 :])), before[axis])
        found = index * math.prod(after[axis + 1 :]) + found
    return found

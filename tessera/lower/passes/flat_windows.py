"""Flat windows: the windows of a product run along flat lines of a padded array, past the ends of its rows.

The windows of a convolution of stride 1, as columns of a matrix, are pieces of rows. Read as one line, the array has
the elements of all windows at one offset in a row of memory (Anderson et al. 2017, low-memory GEMM convolution). The
columns at the ends of the rows, which are no windows, are computed and dropped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tessera.ir.core import Function, Node, Value
from tessera.ir.rewrite import RewritePatterns, Rewriter, rewrite_function
from tessera.lower.indexing_maps import get_shape
from tessera.ops.tensor import contractions, shape

MAX_WASTE = 1.3  # columns computed for each column kept
MIN_DEPTH = 48  # of shorter products, dropping columns costs more than contiguous reads gain

patterns = RewritePatterns("flat windows", same_types=True)


def flatten_windows(function: Function) -> Function:
    """Rewrite the products of a function whose right operands are windows of stride 1."""
    return rewrite_function(function, patterns, remove_dead=True)


@dataclass(frozen=True)
class FlatWindows:
    """A strided view whose last two axes are the last two of its source, at stride 1: `rows` by `columns` windows."""

    node: Node

    @property
    def source(self) -> tuple[int, ...]:
        """The shape of the array."""
        return get_shape(self.node.args[0])  # type: ignore[return-value]

    @property
    def lead(self) -> tuple[int, ...]:
        """The view's axes before those of the windows."""
        return tuple(self.node.attrs["shape"][:-2])

    @property
    def rows(self) -> int:
        """The windows along the second to last axis."""
        return int(self.node.attrs["shape"][-2])

    @property
    def columns(self) -> int:
        """The windows along the last axis."""
        return int(self.node.attrs["shape"][-1])

    def is_flat(self) -> bool:
        """Whether a line of the source has the windows of a row, and some more."""
        *others, across, along = self.node.attrs["strides"]
        steps = [row[-2:] for row in others]
        sizes = (*self.source, *self.node.attrs["shape"])
        return (
            all(isinstance(n, int) for n in sizes)
            and all(tuple(step) == (0, 0) for step in steps)
            and tuple(across[-2:]) == (1, 0)
            and tuple(along[-2:]) == (0, 1)
            and self.columns < self.source[-1] <= MAX_WASTE * self.columns
        )

    def find_last(self, axis: int) -> int:
        """The largest index along an axis of the source that the first window has."""
        row, first = self.node.attrs["strides"][axis], self.node.attrs["start"][axis]
        return int(first + sum(s * (n - 1) for s, n in zip(row, self.lead, strict=False)))

    def view_lines(self, rewriter: Rewriter) -> Value:
        """The view [lead, rows · width of the source] of the flat source."""
        source, strides, start = self.node.args[0], self.node.attrs["strides"], self.node.attrs["start"]
        *outer, height, width = self.source
        missing = self.find_last(-2) + self.rows + (self.find_last(-1) > 0) - height
        if missing > 0:
            source = _add_rows(rewriter, source, missing)
        flat = rewriter.add(shape.reshape, source, shape=(*outer, math.prod(get_shape(source)[-2:])))
        line = tuple(a * width + b for a, b in zip(strides[-2][:-2], strides[-1][:-2], strict=True))
        return rewriter.add(
            shape.strided_view,
            flat,
            shape=(*self.lead, self.rows * width),
            start=(*start[:-2], start[-2] * width + start[-1]),
            strides=(*((*row[:-2], 0) for row in strides[:-2]), (*line, 1)),
        )


def _add_rows(rewriter: Rewriter, source: Value, count: int) -> Value:
    """The array with more rows of zeros at the end; an array that is padded anyway is padded once."""
    rank = len(get_shape(source))
    high, low, value = [0] * rank, (0,) * rank, 0.0 if source.type.dtype.is_float else 0  # type: ignore[union-attr]
    padded = rewriter.find_producer(source, shape.pad)
    if padded is not None:
        source, high, low = padded.args[0], list(padded.attrs["high"]), padded.attrs["low"]
        value = padded.attrs["value"]
    high[-2] += count
    return rewriter.add(shape.pad, source, low=low, high=tuple(high), value=value)


@patterns(contractions.dot)
def _(rewriter: Rewriter, node: Node, args: list[Value]) -> Value | None:
    """A product with windows."""
    below = args[1]
    while (reshaped := rewriter.find_producer(below, shape.reshape)) is not None:
        below = reshaped.args[0]
    view = rewriter.find_producer(below, shape.strided_view)
    if view is None or len(view.attrs["shape"]) < 4 or len(get_shape(view.args[0])) < 2:
        return None
    windows = FlatWindows(view)
    *batch, depth, count = get_shape(args[1])
    if not isinstance(depth, int) or not isinstance(count, int) or depth < MIN_DEPTH or not windows.is_flat():
        return None
    outer = _find_outer(windows, count)
    if outer is None:
        return None
    width = windows.source[-1]
    columns = math.prod(outer) * windows.rows * width
    right = rewriter.add(shape.reshape, windows.view_lines(rewriter), shape=(*batch, depth, columns))
    product = rewriter.add(contractions.dot, args[0], right, **node.attrs)
    *lead, rows, _ = get_shape(product)
    split = (*lead, rows, *outer, windows.rows, width)
    kept = (*split[:-1], windows.columns)
    whole = rewriter.add(shape.reshape, product, shape=split)
    cut = rewriter.add(shape.slice_, whole, start=(0,) * len(split), stop=kept, step=(1,) * len(split))
    return rewriter.add(shape.reshape, cut, shape=get_shape(node.out))


def _find_outer(windows: FlatWindows, count: int) -> Sequence[int] | None:
    """The view's axes that are columns of the product besides the last two; None where columns are no whole axes."""
    sizes = windows.node.attrs["shape"]
    for first in range(len(sizes) - 2, -1, -1):
        if math.prod(sizes[first:]) == count:
            return tuple(sizes[first:-2])
    return None

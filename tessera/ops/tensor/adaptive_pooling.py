"""Adaptive pooling: averages and maxima over windows whose lengths follow from the size of the output (PyTorch)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tessera.core.errors import ShapeError, user_location
from tessera.ir.tensor import Tensor, as_tensor
from tessera.ops.tensor.argument_checks import check_arguments
from tessera.ops.tensor.basic import cast
from tessera.ops.tensor.coercion import composite
from tessera.ops.tensor.elementwise import less, minimum, where
from tessera.ops.tensor.pooling import Windows, along_axis, check_pooled, expand_output_size, find_lowest_value
from tessera.ops.tensor.rearrange import narrow
from tessera.ops.tensor.reduce import sum
from tessera.ops.tensor.shape import concatenate, count_elements, gather, iota, permute, reshape

# Adaptive pools: window i of n elements in m windows has the elements from ⌊i·n/m⌋ to before ⌈(i + 1)·n/m⌉.


def _adaptive_windows(name: str, rank: int, input: Any, output_size: Any, fill: Any) -> tuple[Windows, Tensor]:
    """The windows, each filled up to the size of the largest, and the numbers of their own elements."""
    x = check_pooled(name, rank, input)
    starts, lengths, kernel = zip(*_adaptive_axes(x, output_size), strict=True)
    counts, cut = [start.shape[0] for start in starts], x
    for axis, (start, length, size) in enumerate(zip(starts, lengths, kernel, strict=True)):
        cut = _split_axis(cut, 2 + 2 * axis, start, length, size, fill)
    order = (0, 1, *(3 + 2 * i for i in range(rank)), *(2 + 2 * i for i in range(rank)))
    values = reshape(permute(cut, axes=order), shape=(*x.shape[:2], count_elements(kernel), *counts))
    total: Any = 1
    for axis, length in enumerate(lengths):
        total = total * along_axis(length, axis, rank)
    return Windows(values, kernel, starts, (1,) * rank, x.shape[2:]), total


def _adaptive_axes(x: Tensor, output_size: Any) -> list[tuple[Tensor, Tensor, Any]]:
    """For each axis after the first two: where its windows start, their lengths, and the longest."""
    found = []
    for size, count in zip(x.shape[2:], expand_output_size(output_size, x.shape[2:]), strict=True):
        place = iota(shape=(count,))
        start = place * size // count
        length = ((place + 1) * size + (count - 1)) // count - start
        found.append((start, length, size // count if size % count == 0 else _longest_window(size, count)))
    return found


MAX_SLICED = 8  # windows of different lengths that are slices; more are gathered


def _sum_windows(x: Tensor, axis: int, start: Tensor, length: Tensor, size: Any) -> Tensor:
    """The sums of the windows of an axis."""
    extent, count = x.shape[axis], start.shape[0]
    if not isinstance(extent, int) or extent % count == 0 or count > MAX_SLICED:
        return sum(_split_axis(x, axis, start, length, size, 0), axis=axis + 1)
    edges = [(i * extent // count, -(-(i + 1) * extent // count)) for i in range(count)]
    return concatenate([sum(narrow(x, axis, a, b), axis=axis, keepdims=True) for a, b in edges], axis=axis)


def _split_axis(x: Tensor, axis: int, start: Tensor, length: Tensor, size: int, fill: Any) -> Tensor:
    """`x` with an axis replaced by two: the windows, and `size` elements of each, the last ones maybe `fill`."""
    if x.shape[axis] == start.shape[0] * size:
        return reshape(x, shape=(*x.shape[:axis], start.shape[0], size, *x.shape[axis + 1 :]))
    element = iota(shape=(start.shape[0], size))
    last = reshape(length, shape=(-1, 1))
    place = reshape(start, shape=(-1, 1)) + minimum(element, last - 1)
    inside = reshape(less(element, last), shape=(*element.shape, *(1,) * (x.ndim - 1 - axis)))
    return where(inside, gather(x, place, axis=axis), fill)


def _longest_window(size: Any, count: int) -> int:
    if not isinstance(size, int):
        raise ShapeError(
            f"an adaptive pool of {size} elements with {count} windows", location=user_location(),
            expected=f"a known size, or a multiple of {count}", received=str(size),
        )  # fmt: skip
    ends = [(i * size // count, -(-(i + 1) * size // count)) for i in range(count)]
    return np.max([end - start for start, end in ends]).item()


@composite
def adaptive_avg_pool1d(input: Any, output_size: Any) -> Tensor:
    """The means of `output_size` windows that cover `input` [B, C, W]; see `adaptive_avg_pool2d`.

    >>> adaptive_avg_pool1d([[[1.0, 2.0, 6.0]]], 2)
    Tensor([[[1.5, 4. ]]], f32)
    """
    return _adaptive_average(1, input, output_size)


@composite
def adaptive_avg_pool2d(input: Any, output_size: Any) -> Tensor:
    """The means of windows that cover `input` [B, C, H, W], `output_size` of them along each axis.

    `output_size` is a number or one for each axis, where None keeps the size. Window i of m along an axis of n has
    the elements from floor(i·n/m) to before ceil((i + 1)·n/m).

    >>> adaptive_avg_pool2d([[[[1.0, 2.0], [3.0, 4.0]]]], (1, None))
    Tensor([[[[2., 3.]]]], f32)

    Raises:
        ShapeError: `input` has another rank, or an empty axis.
    """
    return _adaptive_average(2, input, output_size)


@composite
def adaptive_avg_pool3d(input: Any, output_size: Any) -> Tensor:
    """The means of windows that cover `input` [B, C, D, H, W]; see `adaptive_avg_pool2d`.

    >>> from tessera import ones
    >>> adaptive_avg_pool3d(ones((1, 1, 3, 4, 5)), 1)
    Tensor([[[[[1.]]]]], f32)
    """
    return _adaptive_average(3, input, output_size)


def _adaptive_average(rank: int, input: Any, output_size: Any) -> Tensor:
    x = check_pooled(f"an adaptive {rank}D pool", rank, input)
    total, axes = x, _adaptive_axes(x, output_size)
    if all(start.shape[0] == 1 for start, _, _ in axes):  # one window: one reduction
        return sum(x, axis=tuple(range(2, 2 + rank)), keepdims=True) / count_elements(x.shape[2:])
    if rank > 1 and all(_divides(n, start) for n, (start, _, _) in zip(x.shape[2:], axes, strict=True)):
        return _average_equal_windows(x, [int(start.shape[0]) for start, _, _ in axes])
    number: Any = 1
    for axis, (start, length, size) in enumerate(axes):
        # Outer axes first: their windows are whole rows of memory, and leave little to add along the last axis.
        total = _sum_windows(total, 2 + axis, start, length, size)
        number = number * along_axis(length, axis, rank)
    return total / cast(number, dtype=total.dtype)


def _divides(size: Any, start: Tensor) -> bool:
    return isinstance(size, int) and isinstance(start.shape[0], int) and size % start.shape[0] == 0


def _average_equal_windows(x: Tensor, counts: Sequence[int]) -> Tensor:
    """The means of windows of one size, which lie side by side: one reduction of all their axes."""
    lengths = [n // count for n, count in zip(x.shape[2:], counts, strict=True)]
    apart = [n for pair in zip(counts, lengths, strict=True) for n in pair]
    total = sum(reshape(x, shape=(*x.shape[:2], *apart)), axis=tuple(range(3, 3 + 2 * len(counts), 2)))
    return total / count_elements(lengths)


@check_arguments
def adaptive_max_pool1d(input: Any, output_size: Any, return_indices: bool = False) -> Any:
    """The largest elements of `output_size` windows that cover `input` [B, C, W]; see `adaptive_max_pool2d`.

    >>> adaptive_max_pool1d([[[1.0, 2.0, 6.0]]], 2, return_indices=True)
    (Tensor([[[2., 6.]]], f32), Tensor([[[1, 2]]], int64))
    """
    return _adaptive_maximum(1, input, output_size, return_indices)


@check_arguments
def adaptive_max_pool2d(input: Any, output_size: Any, return_indices: bool = False) -> Any:
    """The largest elements of windows that cover `input` [B, C, H, W]; the windows are those of `adaptive_avg_pool2d`.

    With `return_indices` the result is a pair; the index of an element counts along the flattened axes H, W.

    >>> adaptive_max_pool2d([[[[1.0, 2.0], [3.0, 4.0]]]], 1)
    Tensor([[[[4.]]]], f32)
    """
    return _adaptive_maximum(2, input, output_size, return_indices)


@check_arguments
def adaptive_max_pool3d(input: Any, output_size: Any, return_indices: bool = False) -> Any:
    """The largest elements of windows that cover `input` [B, C, D, H, W]; see `adaptive_max_pool2d`.

    >>> from tessera import ones
    >>> adaptive_max_pool3d(ones((1, 1, 3, 4, 5)), (1, 2, 2)).shape
    (1, 1, 1, 2, 2)
    """
    return _adaptive_maximum(3, input, output_size, return_indices)


def _adaptive_maximum(rank: int, input: Any, output_size: Any, return_indices: bool) -> Any:
    x = as_tensor(input)
    windows, _ = _adaptive_windows(f"an adaptive {rank}D pool", rank, x, output_size, find_lowest_value(x))
    return windows.maximum(return_indices)

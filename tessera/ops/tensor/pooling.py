"""Pooling: the maximum, mean or p-norm of each window of an input, windows of adaptive size, and the inverse of a
maximum."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tessera.core.errors import ArgumentError, ShapeError, user_location
from tessera.core.types import DType, int32, int64, to_python_numbers
from tessera.ir.tensor import Tensor, as_tensor
from tessera.ops.tensor.argument_checks import check_arguments
from tessera.ops.tensor.basic import broadcast_to, cast, full
from tessera.ops.tensor.coercion import composite
from tessera.ops.tensor.convolution import AXIS_NAMES, IntPair, expand_per_axis, extract_windows, pad_spatial
from tessera.ops.tensor.elementwise import equal, greater, greater_equal, less, maximum, minimum, not_equal, where
from tessera.ops.tensor.logic import logical_and, logical_or
from tessera.ops.tensor.random import Generator, rand
from tessera.ops.tensor.rearrange import take_along_axis
from tessera.ops.tensor.reduce import apply_root, argmax, find_neutral_element, max, mean, sum
from tessera.ops.tensor.scatter import scatter
from tessera.ops.tensor.shape import count_elements, expand_dims, gather, iota, reshape, slice_, squeeze

MAX_COMPARED = 64  # elements of a window that are compared one after the other
MAX_WINDOW = 16  # elements of a window that is read as a whole
MAX_SMALL = 1 << 30  # places that are counted in 32 bits, with room for those around them
MAX_VISITED = 16  # windows of a place that its derivative visits


@dataclass(frozen=True)
class Windows:
    """The windows of an input [B, C, sizes]: `values` [B, C, window elements, counts].

    Element e of a window is at (e // …) · step + start along each axis; `starts` are the first places along the axes.
    """

    values: Tensor
    kernel: tuple[int, ...]
    starts: tuple[Tensor, ...]
    step: tuple[int, ...]
    sizes: tuple[Any, ...]

    def maximum(self, return_indices: bool) -> Any:
        """The largest element of each window, and its index in the flattened axes of the input."""
        largest = max(self.values, axis=2)
        return (largest, self._flat_index(_find_largest(self.values))) if return_indices else largest

    def _flat_index(self, element: Tensor) -> Tensor:
        rank, dtype = len(self.kernel), find_index_type(self.sizes)
        element, found = cast(element, dtype=dtype), full(shape=(), value=0, dtype=dtype)
        for axis in range(rank):
            inner = math.prod(self.kernel[axis + 1 :])
            offset = (element // inner) % self.kernel[axis] * self.step[axis]
            start = along_axis(cast(self.starts[axis], dtype=dtype), axis, rank)
            found = found * self.sizes[axis] + maximum(offset + start, start % self.step[axis])  # not in the padding
        return cast(found, dtype=int64)


def _find_largest(values: Tensor) -> Tensor:
    """The number of the first largest element, or of the last NaN, of windows [B, C, elements, counts]."""
    count = values.shape[2]
    if isinstance(count, int) and count <= MAX_COMPARED:  # one after the other, so that no windows are stored
        return _pick_number(values, [full(shape=(), value=i, dtype=int32) for i in range(count)])
    numbers = reshape(iota(shape=(count,)), shape=(count, *(1,) * (values.ndim - 3)))
    last = max(where(not_equal(values, values), broadcast_to(numbers, shape=values.shape), -1), axis=2)
    return where(less(last, 0), argmax(values, axis=2), last) if values.dtype.is_float else argmax(values, axis=2)


def _pick_number(values: Tensor, numbers: Sequence[Tensor]) -> Tensor:
    """The number of the first largest element, or of the last NaN, of windows [B, C, elements, counts]."""
    best, found = _take_element(values, 0), numbers[0]
    for i, number in enumerate(numbers[1:], 1):
        each = _take_element(values, i)
        better = greater(each, best)
        better = logical_or(better, not_equal(each, each)) if values.dtype.is_float else better
        best, found = where(better, each, best), where(better, number, found)
    return broadcast_to(found, shape=best.shape)


def find_index_type(sizes: Sequence[Any]) -> DType:
    """The integers that count the elements of these axes: of 32 bits where they are few enough."""
    return int32 if all(isinstance(n, int) for n in sizes) and math.prod(sizes) < MAX_SMALL else int64


def _take_element(values: Tensor, number: int) -> Tensor:
    start, stop = (0, 0, number, *(0,) * (values.ndim - 3)), (*values.shape[:2], number + 1, *values.shape[3:])
    return squeeze(slice_(values, start=start, stop=stop, step=(1,) * values.ndim), 2)


def along_axis(vector: Tensor, axis: int, rank: int) -> Tensor:
    """A vector as a tensor of `rank` axes, along one of them."""
    return reshape(vector, shape=(1,) * axis + (vector.shape[0],) + (1,) * (rank - 1 - axis))


def check_pooled(name: str, rank: int, input: Any) -> Tensor:
    x = as_tensor(input)
    if x.ndim != rank + 2:
        raise ShapeError(f"{name} takes [B, C, {AXIS_NAMES[rank]}]", location=user_location(), received=str(x.type))
    return x


@dataclass(frozen=True)
class _Pool:
    """The checked attributes of a pool, one for each spatial axis; `counts` are the numbers of windows."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    counts: tuple[Any, ...]
    sides: list[tuple[Any, Any]]

    def extract(self, x: Tensor, fill: Any) -> Windows:
        """The windows of `x`, surrounded by `fill`."""
        values = extract_windows(pad_spatial(x, self.sides, fill), self.kernel, self.stride, self.dilation)
        axes = zip(self.counts, self.stride, self.padding, strict=True)
        starts = tuple(iota(shape=(n,)) * s - p for n, s, p in axes)
        return Windows(values, self.kernel, starts, self.dilation, x.shape[2:])

    def along(self, axis: int) -> _Pool:
        """The pool along one axis alone."""
        given = (self.kernel, 1), (self.stride, 1), (self.padding, 0), (self.dilation, 1), (self.counts, 1)
        alone = (tuple(v if i == axis else n for i, v in enumerate(each)) for each, n in given)
        sides = [side if i == axis else (0, 0) for i, side in enumerate(self.sides)]
        return _Pool(*alone, sides)  # type: ignore[call-arg, arg-type]

    def counted_elements(self, x: Tensor, with_padding: bool) -> Tensor:
        """The number of elements of each window that are in the input, or in it and its padding."""
        total: Any = 1
        for i, (n, k, s, p) in enumerate(zip(x.shape[2:], self.kernel, self.stride, self.padding, strict=True)):
            first, more = iota(shape=(self.counts[i],)) * s - p, p if with_padding else 0
            inside = minimum(first + k, n + more) - maximum(first, -more)
            total = total * along_axis(inside, i, len(self.kernel))
        return cast(total, dtype=x.dtype)


def _plan(
    x: Tensor, kernel_size: IntPair, stride: IntPair | None, padding: IntPair, dilation: IntPair, ceil_mode: bool
) -> _Pool:
    rank = x.ndim - 2
    kernel, reach = expand_per_axis("kernel_size", kernel_size, rank), expand_per_axis("dilation", dilation, rank)
    around = expand_per_axis("padding", padding, rank)
    if any(2 * p > k for p, k in zip(around, kernel, strict=True)):
        raise ArgumentError(
            "padding is more than half the window", location=user_location(), received=f"{around} of {kernel}"
        )
    step = kernel if stride is None else expand_per_axis("stride", stride, rank)
    axes = list(zip(x.shape[2:], kernel, step, around, reach, strict=True))
    counts = tuple(_count_windows(*axis, ceil_mode) for axis in axes)
    ends = [(c - 1) * s + d * (k - 1) + 1 - n - p for c, (n, k, s, p, d) in zip(counts, axes, strict=True)]
    sides = [(p, end if ceil_mode and end > p else p) for p, end in zip(around, ends, strict=True)]
    return _Pool(kernel, step, around, reach, counts, sides)


def _count_windows(size: Any, kernel: int, stride: int, padding: int, dilation: int, ceil_mode: bool) -> Any:
    room = size + 2 * padding - dilation * (kernel - 1) - 1
    if not ceil_mode:
        return room // stride + 1
    if not isinstance(size, int):
        raise ShapeError(
            f"a pool of {size} elements with ceil_mode", location=user_location(), expected="known sizes",
            received=str(size), suggestion="pad the input, and leave ceil_mode out",
        )  # fmt: skip
    count = -(-room // stride) + 1
    return count - 1 if (count - 1) * stride >= size + padding else count  # the last window starts in the input


def find_lowest_value(x: Tensor) -> Any:
    return find_neutral_element("max", x.dtype)


@check_arguments
def max_pool1d(
    input: Any,
    kernel_size: IntPair,
    stride: IntPair | None = None,
    padding: IntPair = 0,
    dilation: IntPair = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    """The largest element of each window of `input` [B, C, W]; see `max_pool2d`.

    >>> max_pool1d([[[1.0, 3.0, 2.0, 0.0]]], 2, return_indices=True)
    (Tensor([[[3., 2.]]], f32), Tensor([[[1, 2]]], int64))
    """
    x = check_pooled("a 1D pool", 1, input)
    return _max_pool(x, kernel_size, stride, padding, dilation, ceil_mode, return_indices)


@check_arguments
def max_pool2d(
    input: Any,
    kernel_size: IntPair,
    stride: IntPair | None = None,
    padding: IntPair = 0,
    dilation: IntPair = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    """The largest element of each window of `input` [B, C, H, W]; `stride` is the window's size unless given.

    Padding counts as smaller than everything. `ceil_mode` adds windows that extend beyond the padding. With
    `return_indices` the result is a pair; the index of an element (the first of equal ones, the last NaN) counts along
    the flattened axes H, W.

    >>> max_pool2d(Tensor([[[[1.0, 2.0], [3.0, 4.0]]]]), 2)
    Tensor([[[[4.]]]], f32)

    Raises:
        ShapeError: `input` has another rank, or a window is larger than the padded input.
        ArgumentError: the padding is more than half the window.
    """
    x = check_pooled("a 2D pool", 2, input)
    return _max_pool(x, kernel_size, stride, padding, dilation, ceil_mode, return_indices)


@check_arguments
def max_pool3d(
    input: Any,
    kernel_size: IntPair,
    stride: IntPair | None = None,
    padding: IntPair = 0,
    dilation: IntPair = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    """The largest element of each window of `input` [B, C, D, H, W]; see `max_pool2d`.

    >>> from tessera import ones
    >>> max_pool3d(ones((1, 1, 2, 4, 4)), 2).shape
    (1, 1, 1, 2, 2)
    """
    x = check_pooled("a 3D pool", 3, input)
    return _max_pool(x, kernel_size, stride, padding, dilation, ceil_mode, return_indices)


def _max_pool(
    x: Tensor, kernel: IntPair, stride: Any, padding: IntPair, dilation: IntPair, ceil: bool, indices: bool
) -> Any:
    plan = _plan(x, kernel, stride, padding, dilation, ceil)
    return plan.extract(x, find_lowest_value(x)).maximum(indices)


def find_maxima_by_axis(
    x: Tensor, kernel: IntPair, stride: Any, padding: IntPair, dilation: IntPair, ceil: bool
) -> tuple[Tensor, Tensor] | None:
    """The maxima and indices of a pool by one axis after the other, or None where windows are small, or long along one;
    their derivative differs where maxima are tied."""
    plan = _plan(x, kernel, stride, padding, dilation, ceil)
    if math.prod(plan.kernel) <= MAX_WINDOW or not all(k <= MAX_COMPARED for k in plan.kernel):
        return None
    best, found, inner = x, full(shape=x.shape, value=0, dtype=int32), 1
    for axis, count in reversed(list(enumerate(plan.kernel))):
        line = plan.along(axis)
        values, before = line.extract(best, find_lowest_value(x)).values, line.extract(found, 0).values
        found = _pick_number(values, [_take_element(before, i) + i * inner for i in range(count)])
        best, inner = max(values, axis=2), inner * count
    return best, plan.extract(x, 0)._flat_index(found)


def pull_back_maximum(
    g: Tensor,
    indices: Tensor,
    sizes: Sequence[Any],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
) -> Tensor | None:
    """The derivative [B, C, sizes] of a max-pool for that of its result, from the indices of the maxima.

    Each place adds up what the windows that cover it hold for it, so that nothing is scattered. None where a place has
    more windows than are worth visiting.
    """
    turns = [range(-(-k // s)) for k, s in zip(kernel, stride, strict=True)]
    if math.prod(map(len, turns)) > MAX_VISITED:
        return None
    rank, dtype = len(sizes), find_index_type(sizes)
    flat = reshape(iota(shape=(math.prod(sizes),), dtype=dtype), shape=tuple(sizes))
    indices = cast(indices, dtype=dtype)
    total: Any = None
    for turn in itertools.product(*turns):
        part, at, covered = g, indices, None
        for axis, (n, k, s, p, j) in enumerate(zip(sizes, kernel, stride, padding, turn, strict=True)):
            place = iota(shape=(n,), dtype=dtype) + p
            window = place // s - j
            count = g.shape[2 + axis]
            inside = logical_and(
                less(place - window * s, k), logical_and(greater_equal(window, 0), less(window, count))
            )
            window = minimum(maximum(window, 0), count - 1)
            part, at = gather(part, window, axis=2 + axis), gather(at, window, axis=2 + axis)
            inside = along_axis(inside, axis, rank)
            covered = inside if covered is None else logical_and(covered, inside)
        term = where(logical_and(covered, equal(at, flat)), part, 0)
        total = term if total is None else total + term
    return total


@composite
def avg_pool1d(
    input: Any,
    kernel_size: IntPair,
    stride: IntPair | None = None,
    padding: IntPair = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
) -> Tensor:
    """The mean of each window of `input` [B, C, W]; see `avg_pool2d`.

    >>> avg_pool1d([[[1.0, 3.0, 2.0, 0.0]]], 2)
    Tensor([[[2., 1.]]], f32)
    """
    x = check_pooled("a 1D pool", 1, input)
    return _average_pool(x, kernel_size, stride, padding, ceil_mode, count_include_pad, None)


@composite
def avg_pool2d(
    input: Any,
    kernel_size: IntPair,
    stride: IntPair | None = None,
    padding: IntPair = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tensor:
    """The mean of each window of `input` [B, C, H, W]; `stride` is the window's size unless given.

    The zeros of the padding count as elements unless `count_include_pad` is False; `divisor_override` replaces the
    number of elements. `ceil_mode` adds windows that extend beyond the padding.

    >>> avg_pool2d(Tensor([[[[1.0, 2.0], [3.0, 4.0]]]]), (1, 2))
    Tensor([[[[1.5],
              [3.5]]]], f32)
    """
    x = check_pooled("a 2D pool", 2, input)
    return _average_pool(x, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override)


@composite
def avg_pool3d(
    input: Any,
    kernel_size: IntPair,
    stride: IntPair | None = None,
    padding: IntPair = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tensor:
    """The mean of each window of `input` [B, C, D, H, W]; see `avg_pool2d`.

    >>> from tessera import ones
    >>> avg_pool3d(ones((1, 1, 2, 2, 2)), 2)
    Tensor([[[[[1.]]]]], f32)
    """
    x = check_pooled("a 3D pool", 3, input)
    return _average_pool(x, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override)


def _average_pool(
    x: Tensor, kernel: IntPair, stride: Any, padding: IntPair, ceil: bool, with_padding: bool, divisor: int | None
) -> Tensor:
    plan = _plan(x, kernel, stride, padding, 1, ceil)
    values = plan.extract(x, 0).values
    if divisor is None and not ceil and (with_padding or not any(plan.padding)):
        return mean(values, axis=2)
    return sum(values, axis=2) / (plan.counted_elements(x, with_padding) if divisor is None else divisor)


@composite
def lp_pool1d(
    input: Any, norm_type: float, kernel_size: IntPair, stride: IntPair | None = None, ceil_mode: bool = False
) -> Tensor:
    """The p-norm of each window of `input` [B, C, W]: (Σ x^p)^(1/p) for p = `norm_type`; PyTorch's for partial windows.

    >>> lp_pool1d([[[3.0, 4.0]]], 2, 2)
    Tensor([[[5.]]], f32)
    """
    return _norm_pool(check_pooled("a 1D pool", 1, input), norm_type, kernel_size, stride, ceil_mode)


@composite
def lp_pool2d(
    input: Any, norm_type: float, kernel_size: IntPair, stride: IntPair | None = None, ceil_mode: bool = False
) -> Tensor:
    """The p-norm of each window of `input` [B, C, H, W]: (Σ x^p)^(1/p) for p = `norm_type`; see `lp_pool1d`.

    >>> lp_pool2d([[[[3.0], [4.0]]]], 2, (2, 1))
    Tensor([[[[5.]]]], f32)
    """
    return _norm_pool(check_pooled("a 2D pool", 2, input), norm_type, kernel_size, stride, ceil_mode)


@composite
def lp_pool3d(
    input: Any, norm_type: float, kernel_size: IntPair, stride: IntPair | None = None, ceil_mode: bool = False
) -> Tensor:
    """The p-norm of each window of `input` [B, C, D, H, W]: (Σ x^p)^(1/p) for p = `norm_type`; see `lp_pool1d`.

    >>> lp_pool3d([[[[[3.0, 4.0]]]]], 1, (1, 1, 2))
    Tensor([[[[[7.]]]]], f32)
    """
    return _norm_pool(check_pooled("a 3D pool", 3, input), norm_type, kernel_size, stride, ceil_mode)


def _norm_pool(x: Tensor, p: float, kernel: IntPair, stride: Any, ceil: bool) -> Tensor:
    if not p > 0:
        raise ArgumentError(f"a pool with the norm {p}", location=user_location(), expected="a positive number")
    plan = _plan(x, kernel, stride, 0, 1, ceil)
    total = sum(plan.extract(x**p, 0).values, axis=2)
    if ceil:  # as in PyTorch, a partial window has the mean of its elements in the place of those that it lacks
        total = total * (count_elements(plan.kernel) / plan.counted_elements(x, False))
    return total if p == 1 else apply_root(lambda t: t ** (1.0 / p), total)


def expand_output_size(value: Any, sizes: Sequence[Any]) -> tuple[int, ...]:
    value = to_python_numbers(value)
    listed = tuple(value) if isinstance(value, (list, tuple)) else (value,) * len(sizes)
    if len(listed) != len(sizes) or not all(n is None or isinstance(n, int) and n > 0 for n in listed):
        raise ArgumentError(
            "output_size is not valid", location=user_location(), received=str(value),
            expected=f"a number above 0 or {len(sizes)} of them; None keeps the size of an axis",
        )  # fmt: skip
    if any(isinstance(n, int) and n < 1 for n in sizes):
        raise ShapeError("an adaptive pool of an empty axis", location=user_location(), received=f"sizes {sizes}")
    return tuple(int(n) if m is None else m for m, n in zip(listed, sizes, strict=True))


# Fractional pools: windows of one size at places that are drawn for each channel (Graham 2014).


@check_arguments
def fractional_max_pool2d(
    input: Any, kernel_size: IntPair, output_size: Any = None, output_ratio: Any = None, return_indices: bool = False,
    samples: Any = None, generator: Generator | None = None,
) -> Any:  # fmt: skip
    """The largest elements of windows of `input` [B, C, H, W] at random places, `output_size` along each axis.

    Instead of `output_size`, `output_ratio` gives the share of the size of each axis. `samples` [B, C, 2] are numbers
    from 0 to 1 (for W, then H) that determine the places; without them they come from `generator`. With
    `return_indices` the result is a pair, as of `max_pool2d`.

    >>> fractional_max_pool2d([[[[1.0, 2.0, 3.0]]]], (1, 1), (1, 2), samples=[[[0.0, 0.0]]])
    Tensor([[[[1., 3.]]]], f32)

    Raises:
        ShapeError: `input` or `samples` have other shapes, or a window is larger than the input.
        ArgumentError: both or none of `output_size` and `output_ratio`.
    """
    return _fractional_maximum(
        2, input, kernel_size, output_size, output_ratio, return_indices, samples, generator, order=(1, 0)
    )


@check_arguments
def fractional_max_pool3d(
    input: Any, kernel_size: IntPair, output_size: Any = None, output_ratio: Any = None, return_indices: bool = False,
    samples: Any = None, generator: Generator | None = None,
) -> Any:  # fmt: skip
    """The largest elements of windows of `input` [B, C, D, H, W] at random places; see `fractional_max_pool2d`.

    `samples` are [B, C, 3], for D, H and W.

    >>> from tessera import ones
    >>> fractional_max_pool3d(ones((1, 2, 4, 4, 4)), 2, output_ratio=0.5).shape
    (1, 2, 2, 2, 2)
    """
    return _fractional_maximum(
        3, input, kernel_size, output_size, output_ratio, return_indices, samples, generator, order=(0, 1, 2)
    )


def _fractional_maximum(
    rank: int, input: Any, kernel_size: IntPair, output_size: Any, output_ratio: Any, return_indices: bool,
    samples: Any, generator: Generator | None, order: tuple[int, ...],
) -> Any:  # fmt: skip
    x, kernel = (
        check_pooled(f"a fractional {rank}D pool", rank, input),
        expand_per_axis("kernel_size", kernel_size, rank),
    )
    sizes: tuple[Any, ...] = x.shape[2:]
    lead, counts = x.shape[:2], _find_fractional_counts(sizes, output_size, output_ratio)
    drawn = rand((*lead, rank), generator=generator) if samples is None else as_tensor(samples)
    too_large = any(k + n - 1 > size for k, n, size in zip(kernel, counts, sizes, strict=True))
    if drawn.shape != (*lead, rank) or too_large:
        raise ShapeError(
            "the windows of a fractional pool do not fit", location=user_location(),
            expected=f"samples of shape {(*lead, rank)}, and windows that lie within the input",
            received=f"{drawn.type}; {counts} windows of {kernel} in {x.type}",
        )  # fmt: skip
    place: Any = 0
    for axis, (size, count, k) in enumerate(zip(sizes, counts, kernel, strict=True)):
        start = _find_fractional_starts(drawn[..., order[axis]], size, count, k)
        around = (1,) * axis, (1,) * (rank - 1 - axis)
        inner = reshape(iota(shape=(k,)), shape=(1, 1, *around[0], k, *around[1], *(1,) * rank))
        place = place * size + inner + reshape(start, shape=(*lead, *(1,) * rank, *around[0], count, *around[1]))
    place = reshape(place, shape=(*lead, count_elements(kernel), *counts))
    plane = reshape(iota(shape=(count_elements(lead),)), shape=(*lead, *(1,) * (rank + 1)))
    values = gather(reshape(x, shape=(-1,)), plane * count_elements(sizes) + place, axis=0)
    largest = max(values, axis=2)
    if not return_indices:
        return largest
    return largest, squeeze(take_along_axis(place, argmax(values, axis=2, keepdims=True), 2), 2)


def _find_fractional_counts(sizes: Sequence[Any], output_size: Any, output_ratio: Any) -> tuple[int, ...]:
    if not all(isinstance(n, int) for n in sizes):
        raise ShapeError("a fractional pool of unknown sizes", location=user_location(), received=str(sizes))
    if (output_size is None) == (output_ratio is None):
        raise ArgumentError(
            "a fractional pool needs output_size or output_ratio", location=user_location(), expected="one of them"
        )
    if output_ratio is None:
        return expand_output_size(output_size, sizes)
    ratios = output_ratio if isinstance(output_ratio, (list, tuple)) else (output_ratio,) * len(sizes)
    return expand_output_size([math.floor(n * r) for n, r in zip(sizes, ratios, strict=True)], sizes)


def _find_fractional_starts(sample: Tensor, size: int, count: int, kernel: int) -> Tensor:
    """The first places [B, C, count] of the windows; the last one ends with the axis."""
    step = (size - kernel) / (count - 1) if count > 1 else 0.0
    index, share = iota(shape=(count,)), expand_dims(cast(sample, dtype=sample.type.compute), -1)
    start = cast((share + index) * step, dtype=int64) - cast(share * step, dtype=int64)
    return where(less(index, count - 1), start, size - kernel)


# The inverse of a maximum: each element back at its index.


@check_arguments
def max_unpool1d(
    input: Any, indices: Any, kernel_size: IntPair, stride: IntPair | None = None, padding: IntPair = 0,
    output_size: Any = None,
) -> Tensor:  # fmt: skip
    """The elements of `input` [B, C, W] at the `indices` of `max_pool1d`, zeros elsewhere; see `max_unpool2d`.

    >>> max_unpool1d([[[3.0, 2.0]]], Tensor([[[1, 2]]]), 2)
    Tensor([[[0., 3., 2., 0.]]], f32)
    """
    return _max_unpool(1, input, indices, kernel_size, stride, padding, output_size)


@check_arguments
def max_unpool2d(
    input: Any, indices: Any, kernel_size: IntPair, stride: IntPair | None = None, padding: IntPair = 0,
    output_size: Any = None,
) -> Tensor:  # fmt: skip
    """The elements of `input` [B, C, H, W] at the `indices` that `max_pool2d` returned, zeros elsewhere.

    The sizes of the result are `output_size`, its last axes or by default (H − 1)·stride − 2·padding + kernel, ….
    If an index occurs twice, the last element remains.

    >>> max_unpool2d([[[[4.0]]]], Tensor([[[[3]]]]), 2)
    Tensor([[[[0., 0.],
              [0., 4.]]]], f32)

    Raises:
        ShapeError: `indices` has not the shape of `input`.
    """
    return _max_unpool(2, input, indices, kernel_size, stride, padding, output_size)


@check_arguments
def max_unpool3d(
    input: Any, indices: Any, kernel_size: IntPair, stride: IntPair | None = None, padding: IntPair = 0,
    output_size: Any = None,
) -> Tensor:  # fmt: skip
    """The elements of `input` [B, C, D, H, W] at the `indices` of `max_pool3d`, zeros elsewhere; see `max_unpool2d`.

    >>> max_unpool3d([[[[[4.0]]]]], Tensor([[[[[1]]]]]), (1, 1, 2))
    Tensor([[[[[0., 4.]]]]], f32)
    """
    return _max_unpool(3, input, indices, kernel_size, stride, padding, output_size)


def _max_unpool(
    rank: int, input: Any, indices: Any, kernel_size: IntPair, stride: Any, padding: IntPair, output_size: Any
) -> Tensor:
    x, place = check_pooled(f"max_unpool{rank}d", rank, input), as_tensor(indices)
    if place.shape != x.shape or not place.dtype.is_integer:
        raise ShapeError(
            "the indices do not fit the input", location=user_location(), received=f"{x.type} and {place.type}",
            expected="one integer for each element",
        )  # fmt: skip
    kernel, around = expand_per_axis("kernel_size", kernel_size, rank), expand_per_axis("padding", padding, rank)
    step = kernel if stride is None else expand_per_axis("stride", stride, rank)
    axes = zip(x.shape[2:], kernel, step, around, strict=True)
    sizes = [(n - 1) * s - 2 * p + k for n, k, s, p in axes]
    sizes = sizes if output_size is None else list(output_size)[-rank:]
    planes, room = x.shape[0] * x.shape[1], count_elements(sizes)
    flat = reshape(place, shape=(planes, -1)) + iota(shape=(planes, 1), axis=-2) * room
    empty = reshape(x, shape=(-1,))
    zeros = cast(iota(shape=(planes * room,)) * 0, dtype=x.dtype)
    out = scatter(zeros, reshape(flat, shape=(-1,)), empty)
    return reshape(out, shape=(*x.shape[:2], *sizes))

"""Convolution: windows extracted by strided slices (im2col), then a matrix product; transposed convolution as a
convolution of the input with zeros between its elements (Dumoulin and Visin 2016)."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

from tessera.core.errors import ArgumentError, ShapeError, user_location
from tessera.core.size_guards import assume_at_most
from tessera.ir.tensor import Tensor, as_tensor
from tessera.ops.tensor.argument_checks import check_arguments
from tessera.ops.tensor.basic import cast, full
from tessera.ops.tensor.coercion import composite, unify_dtypes
from tessera.ops.tensor.contractions import matmul
from tessera.ops.tensor.rearrange import flip, interleave_phases
from tessera.ops.tensor.shape import (
    count_elements,
    expand_dims,
    gather,
    insert_zeros,
    iota,
    pad,
    permute,
    reshape,
    slice_,
    squeeze,
    stack,
)

IntPair = int | Sequence[int]
Padding = int | str | Sequence[int]
Sides = Sequence[tuple[Any, Any]]  # what is added before and after each spatial axis
MAX_SLICES = 128  # windows of more elements are gathered: a slice for each is too long a program
# Transposed convolutions to so few channels add up windows, of at most so many elements for each channel of the input.
FOLDED_OUTPUTS, FOLDED_ELEMENTS = 63, 16
MAX_DEPTHWISE = 64  # depthwise windows of more elements are products of matrices
AXIS_NAMES = {1: "W", 2: "H, W", 3: "D, H, W"}


@composite
def conv1d(
    input: Any,
    weight: Any,
    bias: Any = None,
    stride: IntPair = 1,
    padding: Padding = 0,
    dilation: IntPair = 1,
    groups: int = 1,
) -> Tensor:
    """The 1D convolution (correlation) of `input` [B, C, W] with `weight` [O, C/groups, K], plus `bias` [O].

    As `conv2d`, with one spatial axis.

    >>> conv1d([[[1.0, 2.0, 4.0]]], [[[1.0, -1.0]]])
    Tensor([[[-1., -2.]]], f32)
    """
    return _convolve(1, input, weight, bias, stride, padding, dilation, groups)


@composite
def conv2d(
    input: Any,
    weight: Any,
    bias: Any = None,
    stride: IntPair = 1,
    padding: Padding = 0,
    dilation: IntPair = 1,
    groups: int = 1,
) -> Tensor:
    """The 2D convolution (correlation) of `input` [B, C, H, W] with `weight` [O, C/groups, KH, KW], plus `bias` [O].

    The result is [B, O, (H + 2·padding − dilation·(KH − 1) − 1) // stride + 1, …]. `stride`, `padding` (zeros on
    both sides) and `dilation` are numbers or one for each axis; input channels and results are cut into `groups`.
    Padding "valid" is 0; "same" keeps the sizes of the input, at stride 1.

    >>> conv2d(Tensor([[[[1.0, 2.0], [3.0, 4.0]]]]), Tensor([[[[1.0, 1.0], [1.0, 1.0]]]]))
    Tensor([[[[10.]]]], f32)

    Raises:
        ShapeError: ranks or channels do not fit, or the window is larger than the padded input.
    """
    return _convolve(2, input, weight, bias, stride, padding, dilation, groups)


@composite
def conv3d(
    input: Any,
    weight: Any,
    bias: Any = None,
    stride: IntPair = 1,
    padding: Padding = 0,
    dilation: IntPair = 1,
    groups: int = 1,
) -> Tensor:
    """The 3D convolution (correlation) of `input` [B, C, D, H, W] with `weight` [O, C/groups, KD, KH, KW], plus `bias`.

    As `conv2d`, with three spatial axes.

    >>> from tessera import ones
    >>> conv3d(ones((1, 1, 2, 2, 2)), ones((1, 1, 2, 2, 2)))
    Tensor([[[[[8.]]]]], f32)
    """
    return _convolve(3, input, weight, bias, stride, padding, dilation, groups)


def _convolve(
    rank: int, input: Any, weight: Any, bias: Any, stride: IntPair, padding: Padding, dilation: IntPair, groups: int
) -> Tensor:
    x, w = unify_dtypes([input, weight])
    _check_channels(rank, x, w, groups)
    steps, reach = expand_per_axis("stride", stride, rank), expand_per_axis("dilation", dilation, rank)
    sides = _find_sides(padding, rank, w.shape[2:], steps, reach)
    return _correlate(x, w, bias, steps, sides, reach, groups)


def _find_sides(
    padding: Padding, rank: int, kernel: Sequence[Any], stride: Sequence[int], dilation: Sequence[int]
) -> Sides:
    if not isinstance(padding, str):
        return [(n, n) for n in expand_per_axis("padding", padding, rank)]
    if padding not in ("same", "valid") or (padding == "same" and any(s != 1 for s in stride)):
        raise ArgumentError(
            f"padding {padding!r} is not valid with stride {tuple(stride)}", location=user_location(),
            expected='a number or one for each axis, "valid", or "same" with stride 1',
        )  # fmt: skip
    added = [d * (k - 1) if padding == "same" else 0 for d, k in zip(dilation, kernel, strict=True)]
    return [(n // 2, n - n // 2) for n in added]


def _correlate(
    x: Tensor, w: Tensor, bias: Any, stride: Sequence[int], sides: Sides, dilation: Sequence[int], groups: int
) -> Tensor:
    """The convolution of checked operands: `w` is [O, C/groups, kernel]."""
    outputs, channels, kernel = w.shape[0], w.shape[1], w.shape[2:]
    if channels == 1 and outputs == groups and _is_small(kernel):
        out = _correlate_depthwise(pad_spatial(x, sides, 0), w, stride, dilation)
        return out if bias is None else out + reshape(bias, shape=(outputs, *(1 for _ in kernel)))
    if groups == 1 and all(isinstance(n, int) and n == 1 for n in (*kernel, *x.shape[2:])) and not _has_sides(sides):
        # One element of each channel, as in squeeze-and-excitation: the images are the rows of one product.
        rows, flat = reshape(w, shape=(outputs, channels)), reshape(x, shape=(x.shape[0], channels))
        out = reshape(
            matmul(flat, permute(rows, axes=(1, 0)), dtype=x.dtype), shape=(x.shape[0], outputs, *x.shape[2:])
        )
        return out if bias is None else out + reshape(bias, shape=(outputs, *(1 for _ in kernel)))
    cut = extract_windows(pad_spatial(x, sides, 0), kernel, stride, dilation)
    size = count_elements(kernel)
    spatial = cut.shape[3:]
    columns = reshape(cut, shape=(x.shape[0], groups, channels * size, count_elements(spatial)))
    rows = reshape(w, shape=(1, groups, outputs // groups, channels * size))
    out = reshape(matmul(rows, columns, dtype=x.dtype), shape=(x.shape[0], outputs, *spatial))
    return out if bias is None else out + reshape(bias, shape=(outputs, *(1 for _ in kernel)))


def _has_sides(sides: Sides) -> bool:
    return any(n != 0 for pair in sides for n in pair)


def _is_small(kernel: Sequence[Any]) -> bool:
    return all(isinstance(n, int) for n in kernel) and count_elements(kernel) <= MAX_DEPTHWISE


def _correlate_depthwise(x: Tensor, w: Tensor, stride: Sequence[int], dilation: Sequence[int]) -> Tensor:
    """A convolution of each channel by itself: a sum over the window's elements, which needs no product of matrices."""
    outputs, kernel, wide = w.shape[0], w.shape[2:], x.type.accumulate
    slices = _cut_slices(x, kernel, _count_windows(x, kernel, stride, dilation), stride, dilation)
    flat = cast(reshape(w, shape=(outputs, count_elements(kernel), *(1 for _ in kernel))), dtype=wide)
    zeros, ones = (0,) * len(kernel), (1,) * len(kernel)
    total: Any = None
    for i, each in enumerate(slices):
        factor = slice_(flat, start=(0, i, *zeros), stop=(outputs, i + 1, *ones), step=(1,) * flat.ndim)
        term = cast(each, dtype=wide) * squeeze(factor, 1)
        total = term if total is None else total + term
    return cast(total, dtype=x.dtype)


def _check_channels(rank: int, x: Tensor, w: Tensor, groups: int) -> None:
    fits = x.ndim == w.ndim == rank + 2 and x.shape[1] == w.shape[1] * groups and w.shape[0] % groups == 0
    if not fits:
        raise ShapeError(
            f"conv{rank}d: input and weight do not fit, with {groups} groups",
            location=user_location(),
            expected=f"input [B, C, {AXIS_NAMES[rank]}], weight [O, C/groups, kernel], O divisible by groups",
            received=f"{x.type} and {w.type}",
        )


@composite
def conv_transpose1d(
    input: Any,
    weight: Any,
    bias: Any = None,
    stride: IntPair = 1,
    padding: IntPair = 0,
    output_padding: IntPair = 0,
    groups: int = 1,
    dilation: IntPair = 1,
) -> Tensor:
    """The 1D transposed convolution of `input` [B, C, W] with `weight` [C, O/groups, K], plus `bias` [O].

    As `conv_transpose2d`, with one spatial axis.

    >>> conv_transpose1d([[[1.0, 2.0]]], [[[1.0, -1.0]]], stride=2)
    Tensor([[[ 1., -1.,  2., -2.]]], f32)
    """
    return _convolve_transposed(1, input, weight, bias, stride, padding, output_padding, groups, dilation)


@composite
def conv_transpose2d(
    input: Any,
    weight: Any,
    bias: Any = None,
    stride: IntPair = 1,
    padding: IntPair = 0,
    output_padding: IntPair = 0,
    groups: int = 1,
    dilation: IntPair = 1,
) -> Tensor:
    """The 2D transposed convolution of `input` [B, C, H, W] with `weight` [C, O/groups, KH, KW], plus `bias` [O].

    It is the gradient of `conv2d` by its input. The result is [B, O, (H − 1)·stride − 2·padding + dilation·(KH − 1) +
    output_padding + 1, …]; `output_padding` is less than the stride or the dilation.

    >>> conv_transpose2d([[[[1.0, 2.0]]]], [[[[1.0], [10.0]]]])
    Tensor([[[[ 1.,  2.],
              [10., 20.]]]], f32)

    Raises:
        ShapeError: ranks or channels do not fit, or the result has no elements.
    """
    return _convolve_transposed(2, input, weight, bias, stride, padding, output_padding, groups, dilation)


@composite
def conv_transpose3d(
    input: Any,
    weight: Any,
    bias: Any = None,
    stride: IntPair = 1,
    padding: IntPair = 0,
    output_padding: IntPair = 0,
    groups: int = 1,
    dilation: IntPair = 1,
) -> Tensor:
    """The 3D transposed convolution of `input` [B, C, D, H, W] with `weight` [C, O/groups, KD, KH, KW], plus `bias`.

    As `conv_transpose2d`, with three spatial axes.

    >>> from tessera import ones
    >>> conv_transpose3d(ones((1, 1, 1, 1, 1)), ones((1, 2, 1, 1, 2))).shape
    (1, 2, 1, 1, 2)
    """
    return _convolve_transposed(3, input, weight, bias, stride, padding, output_padding, groups, dilation)


def _convolve_transposed(
    rank: int, input: Any, weight: Any, bias: Any, stride: IntPair, padding: IntPair, output_padding: IntPair,
    groups: int, dilation: IntPair,
) -> Tensor:  # fmt: skip
    x, w = unify_dtypes([input, weight])
    if x.ndim != rank + 2 or w.ndim != rank + 2 or x.shape[1] != w.shape[0] or w.shape[0] % groups:
        raise ShapeError(
            f"conv_transpose{rank}d: input and weight do not fit, with {groups} groups", location=user_location(),
            expected=f"input [B, C, {AXIS_NAMES[rank]}], weight [C, O/groups, kernel], C divisible by groups",
            received=f"{x.type} and {w.type}",
        )  # fmt: skip
    steps, reach = expand_per_axis("stride", stride, rank), expand_per_axis("dilation", dilation, rank)
    around, more = expand_per_axis("padding", padding, rank), expand_per_axis("output_padding", output_padding, rank)
    if any(m >= max(s, d) for m, s, d in zip(more, steps, reach, strict=True)):
        raise ArgumentError(
            "output_padding is too large", location=user_location(), received=f"{more}, stride {steps}",
            expected="less than the stride or the dilation of each axis",
        )  # fmt: skip
    if _has_phases(x, w, steps, reach):
        axes = zip(x.shape[2:], w.shape[2:], steps, around, more, strict=True)
        counts = [(n - 1) * s - 2 * p + k + m for n, k, s, p, m in axes]
        if min(counts) >= 1:
            out = _convolve_phases(x, w, steps, around, counts, groups)
            return out if bias is None else out + reshape(bias, shape=(out.shape[1], *(1 for _ in steps)))
    for i, step in enumerate(steps):
        x = insert_zeros(x, i + 2, step) if step > 1 else x
    full = [d * (k - 1) for d, k in zip(reach, w.shape[2:], strict=True)]
    sides = [(f - p, f - p + m - s + 1) for f, p, m, s in zip(full, around, more, steps, strict=True)]
    sizes = [n + low + high - f for n, (low, high), f in zip(x.shape[2:], sides, full, strict=True)]
    if any(isinstance(n, int) and n < 1 for n in sizes):
        raise ShapeError(
            f"conv_transpose{rank}d has no elements left", location=user_location(), received=f"sizes {tuple(sizes)}",
            suggestion="reduce the padding",
        )  # fmt: skip
    return _correlate(x, _flip_kernel(w, groups), bias, (1,) * rank, sides, reach, groups)


def _has_phases(x: Tensor, w: Tensor, steps: Sequence[int], dilation: Sequence[int]) -> bool:
    """Whether a transposed convolution has strides, and each of its phases a part of the kernel."""
    known = all(isinstance(n, int) for n in (*x.shape, *w.shape))
    fits = all(k >= s for k, s in zip(w.shape[2:], steps, strict=True))
    return known and fits and max(steps) > 1 and set(dilation) == {1} and 0 not in x.shape


def _convolve_phases(
    x: Tensor, w: Tensor, steps: Sequence[int], around: Sequence[int], counts: Sequence[int], groups: int
) -> Tensor:
    """A transposed convolution by phases (Shi et al. 2016): result s·t + phase is a convolution at t, of every s-th
    element of the kernel, so that no zeros are multiplied."""
    if groups == 1 and tuple(w.shape[2:]) == tuple(steps) and not any(around):
        return _spread_elements(x, w, counts)
    few = w.shape[1] <= min(FOLDED_OUTPUTS, x.shape[1]) and count_elements(w.shape[1:]) <= FOLDED_ELEMENTS * x.shape[1]
    if groups == 1 and few:
        return _fold_products(x, w, steps, around, counts)
    rank, turns = len(steps), [-(-n // s) for n, s in zip(counts, steps, strict=True)]
    found: dict[tuple[int, ...], Tensor] = {}
    for phase in itertools.product(*(range(s) for s in steps)):
        first = [(a + p) % s for a, p, s in zip(phase, around, steps, strict=True)]
        part = slice_(w, start=(0, 0, *first), stop=tuple(w.shape), step=(1, 1, *steps))
        before = [(a + p - f) // s for a, p, f, s in zip(phase, around, first, steps, strict=True)]
        axes = zip(part.shape[2:], before, turns, x.shape[2:], strict=True)
        sides = [(k - 1 - b, b + t - n) for k, b, t, n in axes]
        found[phase] = _correlate(x, _flip_kernel(part, groups), None, (1,) * rank, sides, (1,) * rank, groups)
    whole = interleave_phases(found, 2)
    return slice_(whole, start=(0,) * whole.ndim, stop=(*whole.shape[:2], *counts), step=(1,) * whole.ndim)


def _spread_elements(x: Tensor, w: Tensor, counts: Sequence[int]) -> Tensor:
    """A transposed convolution whose windows do not overlap: one product gives the windows of all elements."""
    sizes, kernel, rank = x.shape[2:], w.shape[2:], w.ndim - 2
    rows = reshape(w, shape=(w.shape[0], count_elements(w.shape[1:])))
    flat = reshape(x, shape=(*x.shape[:2], count_elements(sizes)))
    windows = matmul(permute(rows, axes=(1, 0)), flat, dtype=x.dtype)
    apart = reshape(windows, shape=(x.shape[0], w.shape[1], *kernel, *sizes))
    order = (0, 1, *(i for axis in range(rank) for i in (2 + rank + axis, 2 + axis)))
    whole = reshape(
        permute(apart, axes=order), shape=(x.shape[0], w.shape[1], *(n * k for n, k in zip(sizes, kernel, strict=True)))
    )
    sides = [(0, n - m) for n, m in zip(counts, whole.shape[2:], strict=True)]  # of output_padding
    return pad_spatial(whole, sides, 0)


def _fold_products(x: Tensor, w: Tensor, steps: Sequence[int], around: Sequence[int], counts: Sequence[int]) -> Tensor:
    """A transposed convolution to few channels: one product has a row for each channel and element of the kernel, where
    each phase would have a product of few rows; the windows of all elements are then added up."""
    rows = reshape(w, shape=(w.shape[0], count_elements(w.shape[1:])))
    flat = reshape(x, shape=(*x.shape[:2], count_elements(x.shape[2:])))
    windows = matmul(permute(rows, axes=(1, 0)), flat, dtype=x.type.accumulate)
    cut = reshape(windows, shape=(x.shape[0], w.shape[1], count_elements(w.shape[2:]), *x.shape[2:]))
    return cast(_fold_phases(cut, counts, w.shape[2:], steps, around), dtype=x.dtype)


def _flip_kernel(w: Tensor, groups: int) -> Tensor:
    """[C, O/groups, kernel] as [O, C/groups, kernel], with the kernel reversed along each spatial axis."""
    inputs, outputs, kernel = w.shape[0], w.shape[1], w.shape[2:]
    grouped = reshape(w, shape=(groups, inputs // groups, outputs, *kernel))
    order = (0, 2, 1, *range(3, w.ndim + 1))
    swapped = reshape(permute(grouped, axes=order), shape=(groups * outputs, inputs // groups, *kernel))
    return flip(swapped, tuple(range(2, w.ndim)))


def expand_per_axis(name: str, value: IntPair, rank: int) -> tuple[int, ...]:
    """One number for each spatial axis."""
    listed: tuple[Any, ...] = tuple(value) if isinstance(value, (list, tuple)) else (value,) * rank
    least = 0 if name.endswith("padding") else 1
    if len(listed) != rank or not all(isinstance(n, int) and n >= least for n in listed):
        raise ArgumentError(
            f"{name} is not valid", location=user_location(), received=str(value),
            expected=f"a number or {rank} of them, each at least {least}",
        )  # fmt: skip
    return listed


def pad_spatial(x: Tensor, sides: Sides, value: Any) -> Tensor:
    """`x` [B, C, sizes] with `value` before and after each spatial axis; a negative count removes elements."""
    if any(n < 0 for pair in sides for n in pair):
        start = [max(-low, 0) for low, _ in sides]
        stop = [n + min(high, 0) for n, (_, high) in zip(x.shape[2:], sides, strict=True)]
        x = slice_(x, start=(0, 0, *start), stop=(*x.shape[:2], *stop), step=(1,) * x.ndim)
    low, high = ((0, 0, *(max(pair[i], 0) for pair in sides)) for i in (0, 1))
    return pad(x, low=low, high=high, value=value) if any((*low, *high)) else x


def extract_windows(x: Tensor, kernel: Any, stride: Sequence[int], dilation: Sequence[int]) -> Tensor:
    """[B, C, sizes] as [B, C, window elements, windows] (im2col): one strided slice for each element of the window."""
    counts = _count_windows(x, kernel, stride, dilation)
    if all(isinstance(n, int) for n in (*kernel, *counts)) and count_elements(kernel) > MAX_SLICES:
        if all(k == s and d == 1 for k, s, d in zip(kernel, stride, dilation, strict=True)):
            return _split_windows(x, kernel, counts)
        return _gather_windows(x, kernel, counts, stride, dilation)
    cuts = _cut_slices(x, kernel, counts, stride, dilation)
    return stack(cuts, axis=2) if len(cuts) > 1 else expand_dims(cuts[0], 2)


def _count_windows(x: Tensor, kernel: Any, stride: Sequence[int], dilation: Sequence[int]) -> list[Any]:
    """The number of windows along each spatial axis."""
    reach = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    counts = [(n - r) // s + 1 for n, r, s in zip(x.shape[2:], reach, stride, strict=True)]
    if not all(assume_at_most(1, n) for n in counts):
        raise ShapeError(
            f"a window of {tuple(reach)} is larger than the padded input",
            location=user_location(),
            received=str(x.type),
        )
    return counts


def _cut_slices(
    x: Tensor, kernel: Any, counts: Sequence[Any], stride: Sequence[int], dilation: Sequence[int]
) -> list[Tensor]:
    """For each element of the window the slice [B, C, windows] of the elements that it meets."""
    cuts = []
    for place in itertools.product(*(range(k) for k in kernel)):
        low = [p * d for p, d in zip(place, dilation, strict=True)]
        high = [a + (n - 1) * s + 1 for a, n, s in zip(low, counts, stride, strict=True)]
        cuts.append(slice_(x, start=(0, 0, *low), stop=(*x.shape[:2], *high), step=(1, 1, *stride)))
    return cuts


def _split_windows(x: Tensor, kernel: Sequence[int], counts: Sequence[int]) -> Tensor:
    """As `extract_windows`, of windows side by side (patches): no element is in two of them."""
    rank, ends = len(kernel), [n * k for n, k in zip(counts, kernel, strict=True)]
    whole = slice_(x, start=(0,) * x.ndim, stop=(*x.shape[:2], *ends), step=(1,) * x.ndim)
    apart = reshape(whole, shape=(*x.shape[:2], *itertools.chain(*zip(counts, kernel, strict=True))))
    order = (0, 1, *range(3, 3 + 2 * rank, 2), *range(2, 2 + 2 * rank, 2))
    return reshape(permute(apart, axes=order), shape=(*x.shape[:2], count_elements(kernel), *counts))


def _gather_windows(
    x: Tensor, kernel: Sequence[int], counts: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> Tensor:
    """As `extract_windows`, by one gather for each axis."""
    rank = len(kernel)
    for axis in reversed(range(rank)):
        element = expand_dims(iota(shape=(kernel[axis],)) * dilation[axis], 1)
        x = gather(x, element + iota(shape=(counts[axis],)) * stride[axis], axis=axis + 2)
    order = (0, 1, *range(2, 2 + 2 * rank, 2), *range(3, 3 + 2 * rank, 2))
    return reshape(permute(x, axes=order), shape=(*x.shape[:2], count_elements(kernel), *counts))


@check_arguments
def im2col(
    input: Any, kernel_size: IntPair, dilation: IntPair = 1, padding: IntPair = 0, stride: IntPair = 1
) -> Tensor:
    """The windows of `input` [B, C, H, W] as columns: [B, C·KH·KW, windows] (`unfold` of PyTorch).

    >>> im2col([[[[1.0, 2.0, 4.0]]]], (1, 2))
    Tensor([[[1., 2.],
             [2., 4.]]], f32)
    """
    x = as_tensor(input)
    if x.ndim != 4:
        raise ShapeError("im2col takes [B, C, H, W]", location=user_location(), received=str(x.type))
    around = expand_per_axis("padding", padding, 2)
    kernel, steps = expand_per_axis("kernel_size", kernel_size, 2), expand_per_axis("stride", stride, 2)
    padded = pad_spatial(x, [(n, n) for n in around], 0)
    cut = extract_windows(padded, kernel, steps, expand_per_axis("dilation", dilation, 2))
    return reshape(cut, shape=(x.shape[0], x.shape[1] * count_elements(kernel), count_elements(cut.shape[3:])))


@composite
def col2im(
    input: Any,
    output_size: IntPair,
    kernel_size: IntPair,
    dilation: IntPair = 1,
    padding: IntPair = 0,
    stride: IntPair = 1,
) -> Tensor:
    """The sum of columns [B, C·KH·KW, windows] at the places that `im2col` takes them from: [B, C, H, W].

    It is the gradient of `im2col` (`fold` of PyTorch).

    >>> col2im([[[1.0, 2.0], [10.0, 20.0]]], (1, 3), (1, 2))
    Tensor([[[[ 1., 12., 20.]]]], f32)

    Raises:
        ShapeError: the columns do not fit `output_size` and the windows.
    """
    x, sizes = as_tensor(input), expand_per_axis("output_size", output_size, 2)
    kernel, steps = expand_per_axis("kernel_size", kernel_size, 2), expand_per_axis("stride", stride, 2)
    around, reach = expand_per_axis("padding", padding, 2), expand_per_axis("dilation", dilation, 2)
    axes = tuple(zip(sizes, kernel, steps, around, reach, strict=True))
    counts = [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in axes]
    size = count_elements(kernel)
    if x.ndim != 3 or x.shape[1] % size or x.shape[2] != count_elements(counts):
        raise ShapeError(
            "the columns do not fit the windows", location=user_location(), received=str(x.type),
            expected=f"[B, C*{size}, {count_elements(counts)}]",
        )  # fmt: skip
    if all(k == s and n == c * k and not p and d == 1 for (n, k, s, p, d), c in zip(axes, counts, strict=True)):
        apart = reshape(x, shape=(x.shape[0], x.shape[1] // size, *kernel, *counts))  # windows that do not overlap
        return reshape(permute(apart, axes=(0, 1, 4, 2, 5, 3)), shape=(*apart.shape[:2], *sizes))
    cut = reshape(x, shape=(x.shape[0], x.shape[1] // size, size, *counts))
    if max(steps) > 1 and set(reach) == {1} and all(isinstance(n, int) for n in (*sizes, *x.shape)):
        return _fold_phases(cut, sizes, kernel, steps, around)
    total = full(shape=(*cut.shape[:2], *sizes), value=0, dtype=cut.dtype)
    for i, place in enumerate(itertools.product(*(range(k) for k in kernel))):
        part = squeeze(slice_(cut, start=(0, 0, i, 0, 0), stop=(*cut.shape[:2], i + 1, *counts), step=(1,) * 5), 2)
        for axis, step in enumerate(steps):
            part = insert_zeros(part, axis + 2, step)
        low = [k * d - p for k, (*_, p, d) in zip(place, axes, strict=True)]
        ends = [(a, a + m, n) for a, m, n in zip(low, part.shape[2:], sizes, strict=True)]
        if any(isinstance(n, int) and a >= n or isinstance(end, int) and end <= 0 for a, end, n in ends):
            continue  # all windows have this tap in the padding
        high = [n - a - m for n, a, m in zip(sizes, low, part.shape[2:], strict=True)]
        total = pad_spatial(part, list(zip(low, high, strict=True)), 0) + total
    return total


def _fold_phases(
    cut: Tensor, sizes: Sequence[Any], kernel: Sequence[Any], steps: Sequence[int], around: Sequence[int]
) -> Tensor:
    """The sum of columns [B, C, kernel elements, windows] by phases: element s · t + phase sums every s-th tap of
    windows."""
    turns = [-(-n // s) for n, s in zip(sizes, steps, strict=True)]
    found: dict[tuple[int, ...], Tensor] = {}
    for phase in itertools.product(*map(range, steps)):
        ahead = [divmod(p + a, s) for p, a, s in zip(phase, around, steps, strict=True)]
        taps = [range(first, k, s) for (_, first), k, s in zip(ahead, kernel, steps, strict=True)]
        total = full(shape=(*cut.shape[:2], *turns), value=0, dtype=cut.dtype)
        for place in itertools.product(*(enumerate(each) for each in taps)):
            low = [j - before for (j, _), (before, _) in zip(place, ahead, strict=True)]
            if any(not -n < m < t for n, m, t in zip(cut.shape[3:], low, turns, strict=True)):
                continue  # no window has this tap there
            tap = functools.reduce(lambda i, each: i * each[1] + each[0][1], zip(place, kernel, strict=True), 0)
            start, stop = (0, 0, tap, *(0 for _ in sizes)), (*cut.shape[:2], tap + 1, *cut.shape[3:])
            part = squeeze(slice_(cut, start=start, stop=stop, step=(1,) * cut.ndim), 2)
            high = [t - n - m for t, n, m in zip(turns, part.shape[2:], low, strict=True)]
            total = pad_spatial(part, list(zip(low, high, strict=True)), 0) + total
        found[phase] = total
    whole = interleave_phases(found, 2)
    return slice_(whole, start=(0,) * whole.ndim, stop=(*whole.shape[:2], *sizes), step=(1,) * whole.ndim)

"""Convolution and pooling: windows extracted by strided slices (im2col), then a matrix product or a reduction."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tessera.core.errors import ArgumentError, ShapeError, user_location
from tessera.ir.tensor import Tensor, as_tensor
from tessera.ops.tensor.argument_checks import check_arguments
from tessera.ops.tensor.coercion import composite, unify_dtypes
from tessera.ops.tensor.contractions import matmul
from tessera.ops.tensor.reduce import max, mean
from tessera.ops.tensor.shape import count_elements, expand_dims, pad, reshape, slice_, stack

IntPair = int | Sequence[int]


@composite
def conv1d(
    input: Any,
    weight: Any,
    bias: Any = None,
    stride: IntPair = 1,
    padding: IntPair = 0,
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
    padding: IntPair = 0,
    dilation: IntPair = 1,
    groups: int = 1,
) -> Tensor:
    """The 2D convolution (correlation) of `input` [B, C, H, W] with `weight` [O, C/groups, KH, KW], plus `bias` [O].

    The result is [B, O, (H + 2·padding − dilation·(KH − 1) − 1) // stride + 1, …]. `stride`, `padding` (zeros on
    both sides) and `dilation` are numbers or one for each axis; input channels and results are cut into `groups`.

    >>> conv2d(Tensor([[[[1.0, 2.0], [3.0, 4.0]]]]), Tensor([[[[1.0, 1.0], [1.0, 1.0]]]]))
    Tensor([[[[10.]]]], f32)

    Raises:
        ShapeError: ranks or channels do not fit, or the window is larger than the padded input.
    """
    return _convolve(2, input, weight, bias, stride, padding, dilation, groups)


def _convolve(
    rank: int, input: Any, weight: Any, bias: Any, stride: IntPair, padding: IntPair, dilation: IntPair, groups: int
) -> Tensor:
    x, w = unify_dtypes([input, weight])
    _check_channels(rank, x, w, groups)
    outputs, channels, kernel = w.shape[0], w.shape[1], w.shape[2:]
    around = expand_per_axis("padding", padding, rank)
    cut = _extract_windows(
        _pad_spatial(x, around, 0),
        kernel,
        expand_per_axis("stride", stride, rank),
        expand_per_axis("dilation", dilation, rank),
    )
    size = count_elements(kernel)
    spatial = cut.shape[3:]
    columns = reshape(cut, shape=(x.shape[0], groups, channels * size, count_elements(spatial)))
    rows = reshape(w, shape=(1, groups, outputs // groups, channels * size))
    out = reshape(matmul(rows, columns, dtype=x.dtype), shape=(x.shape[0], outputs, *spatial))
    return out if bias is None else out + reshape(bias, shape=(outputs, *(1 for _ in kernel)))


def _check_channels(rank: int, x: Tensor, w: Tensor, groups: int) -> None:
    fits = x.ndim == w.ndim == rank + 2 and x.shape[1] == w.shape[1] * groups and w.shape[0] % groups == 0
    if not fits:
        sizes = ", ".join("HW"[2 - rank :])
        raise ShapeError(
            f"conv{rank}d: input and weight do not fit, with {groups} groups",
            location=user_location(),
            expected=f"input [B, C, {sizes}], weight [O, C/groups, kernel], O divisible by groups",
            received=f"{x.type} and {w.type}",
        )


def expand_per_axis(name: str, value: IntPair, rank: int) -> tuple[int, ...]:
    """One number for each spatial axis."""
    listed: tuple[Any, ...] = tuple(value) if isinstance(value, (list, tuple)) else (value,) * rank
    least = 0 if name == "padding" else 1
    if len(listed) != rank or not all(isinstance(n, int) and n >= least for n in listed):
        raise ArgumentError(
            f"{name} is not valid", location=user_location(), received=str(value),
            expected=f"a number or {rank} of them, each at least {least}",
        )  # fmt: skip
    return listed


def _pad_spatial(x: Tensor, around: tuple[int, ...], value: Any) -> Tensor:
    sides = (0, 0, *around)
    return pad(x, low=sides, high=sides, value=value) if any(around) else x


def _extract_windows(x: Tensor, kernel: Any, stride: tuple[int, ...], dilation: tuple[int, ...]) -> Tensor:
    """[B, C, sizes] as [B, C, window elements, windows] (im2col): one strided slice for each element of the window."""
    sizes = x.shape[2:]
    reach = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    counts = [(n - r) // s + 1 for n, r, s in zip(sizes, reach, stride, strict=True)]
    if any(isinstance(n, int) and n < 1 for n in counts):
        raise ShapeError(
            f"a window of {tuple(reach)} is larger than the padded input",
            location=user_location(),
            received=str(x.type),
        )
    cuts = []
    for place in itertools.product(*(range(k) for k in kernel)):
        low = [p * d for p, d in zip(place, dilation, strict=True)]
        high = [a + (n - 1) * s + 1 for a, n, s in zip(low, counts, stride, strict=True)]
        cuts.append(slice_(x, start=(0, 0, *low), stop=(*x.shape[:2], *high), step=(1, 1, *stride)))
    return stack(cuts, axis=2) if len(cuts) > 1 else expand_dims(cuts[0], 2)


def _pool_windows(input: Any, kernel_size: IntPair, stride: IntPair | None, padding: IntPair, fill: Any) -> Tensor:
    x = as_tensor(input)
    kernel = expand_per_axis("kernel_size", kernel_size, 2)
    around = expand_per_axis("padding", padding, 2)
    if x.ndim != 4:
        raise ShapeError("a 2D pool takes [B, C, H, W]", location=user_location(), received=str(x.type))
    if any(2 * p > k for p, k in zip(around, kernel, strict=True)):
        raise ArgumentError(
            "padding is more than half the window", location=user_location(), received=f"{around} of {kernel}"
        )
    step = kernel if stride is None else expand_per_axis("stride", stride, 2)
    return _extract_windows(_pad_spatial(x, around, fill(x)), kernel, step, (1, 1))


@check_arguments
def max_pool2d(input: Any, kernel_size: IntPair, stride: IntPair | None = None, padding: IntPair = 0) -> Tensor:
    """The largest element of each window of `input` [B, C, H, W]; `stride` is the window's size unless given.

    Padding counts as smaller than everything.

    >>> max_pool2d(Tensor([[[[1.0, 2.0], [3.0, 4.0]]]]), 2)
    Tensor([[[[4.]]]], f32)
    """
    return max(_pool_windows(input, kernel_size, stride, padding, _find_lowest_value), axis=2)


def _find_lowest_value(x: Tensor) -> Any:
    return -math.inf if x.dtype.is_float else int(np.iinfo(x.dtype.numpy).min)


@check_arguments
def avg_pool2d(input: Any, kernel_size: IntPair, stride: IntPair | None = None, padding: IntPair = 0) -> Tensor:
    """The mean of each window of `input` [B, C, H, W], including the zeros of the padding.

    >>> avg_pool2d(Tensor([[[[1.0, 2.0], [3.0, 4.0]]]]), (1, 2))
    Tensor([[[[1.5],
              [3.5]]]], f32)
    """
    return mean(_pool_windows(input, kernel_size, stride, padding, lambda x: 0), axis=2)

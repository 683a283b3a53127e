"""Convolution: Conv, ConvTranspose, ConvInteger, DeformConv, Col2Im."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tessera.core.types import int32, int64
from tessera.ir.tensor import Tensor
from tessera.onnx.node_rules import NodeCall, rule
from tessera.ops.tensor import convolution as c
from tessera.ops.tensor import elementwise as e
from tessera.ops.tensor.basic import cast
from tessera.ops.tensor.coercion import composite
from tessera.ops.tensor.contractions import matmul
from tessera.ops.tensor.convolution import pad_spatial
from tessera.ops.tensor.shape import gather, insert_zeros, iota, permute, reshape

CONVOLUTIONS = {1: c.conv1d, 2: c.conv2d, 3: c.conv3d}
TRANSPOSED = {1: c.conv_transpose1d, 2: c.conv_transpose2d, 3: c.conv_transpose3d}
Sides = list[tuple[int, int]]


def find_sides(
    call: NodeCall, sizes: Sequence[Any], kernel: Sequence[Any], strides: Sequence[Any], dilations: Sequence[Any]
) -> Sides:
    """What is added before and after each axis: by `pads`, or as `auto_pad` says."""
    rank, mode = len(sizes), call.attr("auto_pad", "NOTSET")
    if mode == "NOTSET":
        pads = call.attr("pads", None) or [0] * (2 * rank)
        return list(zip(pads[:rank], pads[rank:], strict=True))
    if mode == "VALID":
        return [(0, 0)] * rank
    found = []
    for n, k, s, d in zip(sizes, kernel, strides, dilations, strict=True):
        total = max((-(-n // s) - 1) * s + (k - 1) * d + 1 - n, 0)
        small, large = total // 2, total - total // 2
        found.append((small, large) if mode == "SAME_UPPER" else (large, small))
    return found


def read_window(call: NodeCall, kernel: Sequence[Any]) -> tuple[list[int], list[int]]:
    """The strides and dilations."""
    ones = [1] * len(kernel)
    return list(call.attr("strides", None) or ones), list(call.attr("dilations", None) or ones)


@rule("Conv")
def _(call: NodeCall, x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    return convolve(call, x, w, bias)


def convolve(call: NodeCall, x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """The convolution that the attributes of a node describe."""
    kernel = w.shape[2:]
    strides, dilations = read_window(call, kernel)
    sides = find_sides(call, x.shape[2:], kernel, strides, dilations)
    if len(kernel) not in CONVOLUTIONS:
        raise call.refuse(f"a convolution of {len(kernel)} axes")
    even = [a for a, b in sides if a == b]
    inside = even if len(even) == len(sides) else [0] * len(sides)
    x = x if inside == even and even else pad_spatial(x, sides, 0)
    groups = call.attr("group", 1)
    return CONVOLUTIONS[len(kernel)](x, w, bias, tuple(strides), tuple(inside), tuple(dilations), groups)


@rule("ConvInteger")
def _(call: NodeCall, x: Tensor, w: Tensor, x_zero: Tensor | None = None, w_zero: Tensor | None = None) -> Tensor:
    x, w = cast(x, dtype=int32), cast(w, dtype=int32)
    x = x if x_zero is None else x - reshape(cast(x_zero, dtype=int32), shape=())
    if w_zero is not None:
        w = w - reshape(cast(w_zero, dtype=int32), shape=(-1, *(1,) * (w.ndim - 1)))
    return convolve(call, x, w)


@rule("ConvTranspose")
def _(call: NodeCall, x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    kernel, sizes = w.shape[2:], x.shape[2:]
    rank = len(kernel)
    if rank not in TRANSPOSED:
        raise call.refuse(f"a transposed convolution of {rank} axes")
    strides, dilations = read_window(call, kernel)
    more = list(call.attr("output_padding", None) or [0] * rank)
    whole = [(n - 1) * s + d * (k - 1) + 1 for n, k, s, d in zip(sizes, kernel, strides, dilations, strict=True)]
    sides = _find_transposed_sides(call, sizes, strides, whole, more)
    cut = [(-low, extra - high) for (low, high), extra in zip(sides, more, strict=True)]

    @composite
    def transpose(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        out = TRANSPOSED[rank](x, w, None, tuple(strides), 0, 0, call.attr("group"), tuple(dilations))
        out = pad_spatial(out, cut, 0)
        return out if bias is None else out + reshape(bias, shape=(-1, *(1,) * rank))

    return transpose(x, w, bias)


def _find_transposed_sides(
    call: NodeCall, sizes: Sequence[Any], strides: list[int], whole: list[int], more: list[int]
) -> Sides:
    """What is removed before and after each axis of the whole result."""
    rank, mode = len(sizes), call.attr("auto_pad")
    wanted = call.attr("output_shape", None)
    if wanted is None and mode in ("SAME_UPPER", "SAME_LOWER"):
        wanted = [n * s for n, s in zip(sizes, strides, strict=True)]
    if wanted is None:
        pads = call.attr("pads", None) or [0] * (2 * rank)
        return list(zip(pads[:rank], pads[rank:], strict=True)) if mode == "NOTSET" else [(0, 0)] * rank
    found = []
    for full, extra, size in zip(whole, more, wanted[-rank:], strict=True):
        total = max(full + extra - size, 0)
        low = total // 2 if mode == "SAME_UPPER" else total - total // 2
        found.append((low, full + extra - size - low))
    return found


@rule("Col2Im", static=(1, 2))
def _(call: NodeCall, x: Tensor, image: Tensor, block: Tensor) -> Tensor:
    sizes, kernel = call.ints(image, "the image's shape"), call.ints(block, "the block's shape")
    rank = len(sizes)
    strides, dilations = read_window(call, kernel)
    pads = call.attr("pads", None) or [0] * (2 * rank)
    sides = list(zip(pads[:rank], pads[rank:], strict=True))
    axes = list(zip(sizes, kernel, strides, dilations, sides, strict=True))
    counts = [(n + a + b - d * (k - 1) - 1) // s + 1 for n, k, s, d, (a, b) in axes]
    channels = x.shape[1] // math.prod(kernel)
    cut = reshape(x, shape=(x.shape[0], channels, math.prod(kernel), *counts))

    @composite
    def collect(cut: Tensor) -> Tensor:
        total: Any = 0
        for i, place in enumerate(itertools.product(*(range(k) for k in kernel))):
            part = cut[:, :, i]
            for axis, step in enumerate(strides):
                part = insert_zeros(part, axis + 2, step)
            low = [p * d - a for p, d, (a, _) in zip(place, dilations, sides, strict=True)]
            high = [n - a - m for n, a, m in zip(sizes, low, part.shape[2:], strict=True)]
            total = pad_spatial(part, list(zip(low, high, strict=True)), 0) + total
        return total

    return collect(cut)


@rule("DeformConv")
def _(
    call: NodeCall, x: Tensor, w: Tensor, offset: Tensor, bias: Tensor | None = None, mask: Tensor | None = None
) -> Tensor:
    if x.ndim != 4:
        raise call.refuse("a deformable convolution of other than two axes")
    return composite(_convolve_deformed)(x, w, offset, bias, mask, call)


def _convolve_deformed(
    x: Tensor, w: Tensor, offset: Tensor, bias: Tensor | None, mask: Tensor | None, call: NodeCall
) -> Tensor:
    """Each element of a window is read at an offset, by bilinear interpolation (Dai et al. 2017)."""
    kernel: Any = w.shape[2:]
    strides, dilations = read_window(call, kernel)
    pads = call.attr("pads", None) or [0] * 4
    groups, shifts = call.attr("group"), call.attr("offset_group")
    batch, channels, height, width = x.shape
    counts: Any = offset.shape[2:]
    size = math.prod(kernel)
    moved = reshape(offset, shape=(batch, shifts, size, 2, *counts))
    base = []
    for axis in range(2):
        starts = np.arange(counts[axis]) * strides[axis] - pads[axis]
        taps = np.indices(kernel)[axis].reshape(-1) * dilations[axis]
        shape = [1, 1, size, 1, 1]
        ends = starts.reshape(-1, 1) if axis == 0 else starts.reshape(1, -1)
        base.append(Tensor((taps.reshape(shape) + ends).astype(x.dtype.numpy)))
    y, z = (moved[:, :, :, axis] + base[axis] for axis in range(2))
    image = permute(reshape(x, shape=(batch, shifts, channels // shifts, height * width)), axes=(0, 1, 3, 2))
    rows = reshape(image, shape=(batch * shifts * height * width, channels // shifts))
    columns = _sample(rows, y, z, height, width)  # [B, shifts, size, H', W', C / shifts]
    if mask is not None:
        columns = columns * reshape(mask, shape=(batch, shifts, size, *counts, 1))
    columns = permute(columns, axes=(0, 1, 5, 2, 3, 4))
    columns = reshape(columns, shape=(batch, groups, channels // groups * size, math.prod(counts)))
    weights = reshape(w, shape=(1, groups, w.shape[0] // groups, -1))
    out = reshape(matmul(weights, columns), shape=(batch, w.shape[0], *counts))
    return out if bias is None else out + reshape(bias, shape=(-1, 1, 1))


def _sample(rows: Tensor, y: Tensor, x: Tensor, height: Any, width: Any) -> Tensor:
    """Bilinear interpolation at places [B, G, ...] of images that are rows [B · G · height · width, C]; 0 outside."""
    image = iota(shape=(y.shape[0] * y.shape[1],)) * (height * width)
    start = reshape(image, shape=(*y.shape[:2], *(1,) * (y.ndim - 2)))
    low_y, low_x = e.floor(y), e.floor(x)
    total: Any = 0
    for a, b in itertools.product((0, 1), repeat=2):
        at_y, at_x = low_y + float(a), low_x + float(b)
        weight = (1.0 - e.abs(y - at_y)) * (1.0 - e.abs(x - at_x))
        inside = e.greater_equal(at_y, 0.0) & e.less(at_y, float(height))
        inside = inside & e.greater_equal(at_x, 0.0) & e.less(at_x, float(width))
        row = cast(e.minimum(e.maximum(at_y, 0.0), height - 1.0), dtype=int64)
        column = cast(e.minimum(e.maximum(at_x, 0.0), width - 1.0), dtype=int64)
        found = gather(rows, start + row * width + column, axis=0)
        total = total + found * e.where(inside, weight, 0.0)[..., None]
    return total

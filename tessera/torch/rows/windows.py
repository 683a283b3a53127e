"""Window rows: convolutions, pools, resampling and reflected padding, with their derivatives (ATen's spatial ops).

The derivative of an op that is linear in its input is the reverse-mode derivative of its row, or its adjoint in slices
where that has no scatter.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tessera.core.types import DType, f64
from tessera.ir.tensor import Tensor
from tessera.ops.tensor import adaptive_pooling, pooling
from tessera.ops.tensor import elementwise as e
from tessera.ops.tensor import reduce as r
from tessera.ops.tensor.convolution import (
    col2im,
    conv1d,
    conv2d,
    conv3d,
    conv_transpose1d,
    conv_transpose2d,
    conv_transpose3d,
    im2col,
)
from tessera.ops.tensor.rearrange import flip, narrow, pad
from tessera.ops.tensor.resampling import (
    Resampling,
    channel_shuffle,
    grid_sample,
    pixel_shuffle,
    pixel_unshuffle,
    resample,
    resample_back,
)
from tessera.ops.tensor.scatter import scatter_add
from tessera.ops.tensor.shape import gather, iota, permute, reshape
from tessera.torch.table import aten, narrow_to, wide, zeros
from tessera.transforms.autodiff import vjp


def per_axis(value: Any, rank: int, default: Any = None) -> tuple[int, ...]:
    """One number for each spatial axis; an empty list means the default."""
    listed = (value,) if isinstance(value, int) else tuple(value)
    listed = listed or tuple(default)
    return listed * rank if len(listed) == 1 else listed


def with_batch(function: Callable[[Tensor], Any], x: Tensor, rank: int) -> Any:
    """A function of [B, C, sizes] on [C, sizes] too."""
    if x.ndim == rank + 2:
        return function(x)
    out = function(reshape(x, shape=(1, *x.shape)))
    return (
        tuple(reshape(v, shape=v.shape[1:]) for v in out)
        if isinstance(out, tuple)
        else reshape(out, shape=out.shape[1:])
    )


def pull_back(function: Callable[[Tensor], Tensor], like: Tensor, g: Tensor) -> Tensor:
    """The derivative of a linear function by its operand, which is like a tensor, for that of its result."""
    _, pull = vjp(function, zeros(like.shape, g.dtype))
    return pull(g)[0]


# Convolution.

CONVOLUTIONS = {1: conv1d, 2: conv2d, 3: conv3d}
TRANSPOSED = {1: conv_transpose1d, 2: conv_transpose2d, 3: conv_transpose3d}


@aten("convolution.default")
def convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: Any, padding: Any, dilation: Any, transposed: bool,
    output_padding: Any, groups: int,
) -> Tensor:  # fmt: skip
    """The convolution, or the transposed one."""
    rank = weight.ndim - 2
    stride, padding, dilation = (per_axis(v, rank) for v in (stride, padding, dilation))

    def run(v: Tensor) -> Tensor:
        if transposed:
            extra = per_axis(output_padding, rank)
            return TRANSPOSED[rank](v, weight, bias, stride, padding, extra, groups, dilation)
        return CONVOLUTIONS[rank](v, weight, bias, stride, padding, dilation, groups)

    return with_batch(run, x, rank)


@aten("convolution_backward.default")
def _(g, x, weight, bias_sizes, stride, padding, dilation, transposed, output_padding, groups, output_mask):
    rank, dtype = weight.ndim - 2, x.dtype
    gw, xw, ww = wide(g), wide(x), wide(weight)
    settings = (stride, padding, dilation, transposed, output_padding, groups)
    by_x = by_weight = by_bias = None
    if output_mask[0]:
        if not transposed and g.dtype == weight.dtype == dtype and _slides(g, x, weight, stride):
            by_x = _transpose_convolution(g, x, weight, stride, padding, dilation, groups)
        else:
            by_x = narrow_to(pull_back(lambda v: convolution(v, ww, None, *settings), xw, gw), dtype)
    if output_mask[1]:
        by_weight = narrow_to(pull_back(lambda v: convolution(xw, v, None, *settings), ww, gw), weight.dtype)
    if output_mask[2]:
        axes = tuple(i for i in range(gw.ndim) if i != gw.ndim - rank - 1)
        by_bias = narrow_to(r.sum(gw, axis=axes), dtype)
    return by_x, by_weight, by_bias


def _slides(g: Tensor, x: Tensor, weight: Tensor, stride: Any) -> bool:
    """Whether windows of several elements, of a batch of known sizes, follow each other without steps."""
    known = all(t.ndim == weight.ndim and all(isinstance(n, int) and n for n in t.shape) for t in (g, x, weight))
    return known and set(per_axis(stride, weight.ndim - 2)) == {1} and any(n > 1 for n in weight.shape[2:])


def _transpose_convolution(
    g: Tensor, x: Tensor, weight: Tensor, stride: Any, padding: Any, dilation: Any, groups: int
) -> Tensor:
    """The gradient of a convolution by its input: a transposed convolution, which needs no windows in memory."""
    rank = weight.ndim - 2
    steps, around, gaps = (per_axis(v, rank) for v in (stride, padding, dilation))
    axes = zip(g.shape[2:], x.shape[2:], weight.shape[2:], steps, around, gaps, strict=True)
    rest = tuple(size - ((n - 1) * s - 2 * p + d * (k - 1) + 1) for n, size, k, s, p, d in axes)
    return TRANSPOSED[rank](g, weight, None, steps, around, rest, groups, gaps)


@aten("im2col.default")
def _(x, kernel_size, dilation, padding, stride):
    return with_batch(lambda v: im2col(v, *(per_axis(n, 2) for n in (kernel_size, dilation, padding, stride))), x, 2)


@aten("col2im.default")
def _(x, output_size, kernel_size, dilation, padding, stride):
    settings = [per_axis(n, 2) for n in (output_size, kernel_size, dilation, padding, stride)]
    return with_batch(lambda v: col2im(v, *settings), x, 1)


# Pools.

MAX_POOLS = {1: pooling.max_pool1d, 2: pooling.max_pool2d, 3: pooling.max_pool3d}
AVERAGE_POOLS = {2: pooling.avg_pool2d, 3: pooling.avg_pool3d}


def _max_pool(rank: int, indices: bool) -> Callable[..., Any]:
    def row(
        x: Tensor, kernel_size: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False
    ) -> Any:
        kernel = per_axis(kernel_size, rank)
        settings = (kernel, per_axis(stride, rank, kernel), per_axis(padding, rank), per_axis(dilation, rank))

        def pool(v: Tensor) -> Any:
            by_axis = pooling.find_maxima_by_axis(v, *settings, ceil_mode) if rank > 1 else None
            if by_axis is None:
                return MAX_POOLS[rank](v, *settings, ceil_mode, indices)
            return by_axis if indices else by_axis[0]

        return with_batch(pool, x, rank)

    return row


def _max_pool_backward(rank: int) -> Callable[..., Any]:
    def row(
        g: Tensor, x: Tensor, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil: bool, at: Tensor
    ) -> Tensor:
        size, reach = per_axis(kernel, rank), per_axis(dilation, rank)
        windows = (size, per_axis(stride, rank, size), per_axis(padding, rank))
        if set(reach) != {1} or not all(isinstance(n, int) for n in (*x.shape, *g.shape)):
            return scatter_flat(g, at, x.shape, rank)
        shape = x.shape if x.ndim == rank + 2 else (1, *x.shape)
        given, places = (reshape(v, shape=(*shape[:2], *v.shape[-rank:])) for v in (wide(g), at))
        found = pooling.pull_back_maximum(given, places, shape[2:], *windows)
        return (
            scatter_flat(g, at, x.shape, rank) if found is None else narrow_to(reshape(found, shape=x.shape), g.dtype)
        )

    return row


def scatter_flat(g: Tensor, at: Tensor, shape: Sequence[Any], rank: int) -> Tensor:
    """Elements added at indices into the flattened spatial axes."""
    channels, size = math.prod(shape[:-rank]), math.prod(shape[-rank:])
    gw, places = reshape(wide(g), shape=(channels, -1)), reshape(at, shape=(channels, -1))
    places = places + iota(shape=places.shape, axis=0) * size
    flat = scatter_add(zeros((channels * size,), gw.dtype), reshape(places, shape=(-1,)), reshape(gw, shape=(-1,)))
    return narrow_to(reshape(flat, shape=shape), g.dtype)


for _rank in (1, 2, 3):
    aten(f"max_pool{_rank}d_with_indices.default")(_max_pool(_rank, True))
    aten(f"max_pool{_rank}d.default")(_max_pool(_rank, False))
aten("max_pool2d_with_indices_backward.default")(_max_pool_backward(2))
aten("max_pool3d_with_indices_backward.default")(_max_pool_backward(3))


@aten("avg_pool1d.default")
def _(x, kernel_size, stride=(), padding=0, ceil_mode=False, count_include_pad=True):
    kernel = per_axis(kernel_size, 1)
    settings = (kernel, per_axis(stride, 1, kernel), per_axis(padding, 1), ceil_mode, count_include_pad)
    return with_batch(lambda v: pooling.avg_pool1d(v, *settings), x, 1)


def _average_pool(rank: int) -> Callable[..., Any]:
    def row(
        x: Tensor, kernel_size: Any, stride: Any = (), padding: Any = 0, ceil_mode: bool = False,
        count_include_pad: bool = True, divisor_override: int | None = None,
    ) -> Tensor:  # fmt: skip
        kernel = per_axis(kernel_size, rank)
        settings = (kernel, per_axis(stride, rank, kernel), per_axis(padding, rank), ceil_mode, count_include_pad)
        return with_batch(lambda v: AVERAGE_POOLS[rank](v, *settings, divisor_override), x, rank)

    return row


def _average_pool_backward(rank: int) -> Callable[..., Any]:
    forward = _average_pool(rank)

    def row(g: Tensor, x: Tensor, *settings: Any) -> Tensor:
        return narrow_to(pull_back(lambda v: forward(v, *settings), x, wide(g)), g.dtype)

    return row


for _rank in (2, 3):
    aten(f"avg_pool{_rank}d.default")(_average_pool(_rank))
    aten(f"avg_pool{_rank}d_backward.default")(_average_pool_backward(_rank))

ADAPTIVE_AVERAGES = {
    1: adaptive_pooling.adaptive_avg_pool1d,
    2: adaptive_pooling.adaptive_avg_pool2d,
    3: adaptive_pooling.adaptive_avg_pool3d,
}
ADAPTIVE_MAXIMA = {2: adaptive_pooling.adaptive_max_pool2d, 3: adaptive_pooling.adaptive_max_pool3d}


def _adaptive_average(rank: int) -> Callable[..., Any]:
    return lambda x, size: with_batch(lambda v: ADAPTIVE_AVERAGES[rank](v, per_axis(size, rank)), x, rank)


def _adaptive_average_backward(rank: int) -> Callable[..., Any]:
    forward = _adaptive_average(rank)
    return lambda g, x: narrow_to(pull_back(lambda v: forward(v, g.shape[-rank:]), x, wide(g)), g.dtype)


def _adaptive_maximum(rank: int) -> Callable[..., Any]:
    return lambda x, size: with_batch(lambda v: ADAPTIVE_MAXIMA[rank](v, per_axis(size, rank), True), x, rank)


aten("adaptive_avg_pool1d.default")(_adaptive_average(1))
for _rank in (2, 3):
    aten(f"_adaptive_avg_pool{_rank}d.default")(_adaptive_average(_rank))
    aten(f"_adaptive_avg_pool{_rank}d_backward.default")(_adaptive_average_backward(_rank))
    aten(f"adaptive_max_pool{_rank}d.default")(_adaptive_maximum(_rank))
aten("adaptive_max_pool2d_backward.default")(lambda g, x, at: scatter_flat(g, at, x.shape, 2))
aten("adaptive_max_pool3d_backward.default")(lambda g, x, at: scatter_flat(g, at, x.shape, 3))
aten("max_unpool2d.default")(lambda x, at, size: _unpool(x, at, size, 2))
aten("max_unpool3d.default")(lambda x, at, size, stride, padding: _unpool(x, at, size, 3))


def _unpool(x: Tensor, at: Tensor, size: Sequence[int], rank: int) -> Tensor:
    unpool = {2: pooling.max_unpool2d, 3: pooling.max_unpool3d}[rank]
    indices = at if at.ndim == rank + 2 else reshape(at, shape=(1, *at.shape))
    return with_batch(lambda v: unpool(v, indices, 1, output_size=tuple(size)), x, rank)


# Resampling.


def _find_resampling(shape: Sequence[Any], mode: str, size: Any, align: bool, scales: Any, dtype: DType) -> Resampling:
    """ATen's places: by a scale where it is given and positive, else by the ratio of the sizes."""
    sizes = tuple(shape[2:])
    steps = [None if s is None or s <= 0 else float(s) for s in scales or (None,) * len(sizes)]
    counts = size or [math.floor(float(n) * s) for n, s in zip(sizes, scales, strict=True)]
    places = np.float64 if dtype == f64 and not mode.startswith("nearest") else np.float32  # as ATen computes them
    return Resampling(mode, sizes, tuple(counts), steps, align, places)


def _resample(x: Tensor, mode: str, size: Any, align_corners: bool, scales: Any) -> Tensor:
    found = resample(wide(x), _find_resampling(x.shape, mode, size, align_corners, scales, x.dtype))
    return narrow_to(found, x.dtype)


MODES = {
    "upsample_nearest1d": "nearest", "upsample_nearest2d": "nearest", "upsample_nearest3d": "nearest",
    "_upsample_nearest_exact1d": "nearest-exact", "_upsample_nearest_exact2d": "nearest-exact",
    "_upsample_nearest_exact3d": "nearest-exact",
}  # fmt: skip
LINEAR_MODES = {
    "upsample_linear1d": "linear", "upsample_bilinear2d": "bilinear", "upsample_trilinear3d": "trilinear",
    "upsample_bicubic2d": "bicubic",
}  # fmt: skip

for _name, _mode in MODES.items():
    aten(f"{_name}.vec")(lambda x, size, scales, mode=_mode: _resample(x, mode, size, False, scales))
    aten(f"{_name}.default")(lambda x, size, *scales, mode=_mode: _resample(x, mode, size, False, scales or None))
    aten(f"{_name}_backward.default")(
        lambda g, size, shape, *scales, mode=_mode: _resample_back(g, shape, mode, size, False, scales or None)
    )
for _name, _mode in LINEAR_MODES.items():
    aten(f"{_name}.vec")(lambda x, size, align, scales, mode=_mode: _resample(x, mode, size, align, scales))
    aten(f"{_name}.default")(
        lambda x, size, align, *scales, mode=_mode: _resample(x, mode, size, align, scales or None)
    )
    aten(f"{_name}_backward.default")(
        lambda g, size, shape, align, *scales, mode=_mode: _resample_back(g, shape, mode, size, align, scales or None)
    )


def _resample_back(g: Tensor, shape: Sequence[int], mode: str, size: Any, align_corners: bool, scales: Any) -> Tensor:
    back = resample_back(wide(g), _find_resampling(shape, mode, size, align_corners, scales, g.dtype))
    return narrow_to(back, g.dtype)


SAMPLING = ("bilinear", "nearest", "bicubic")
BORDERS = ("zeros", "border", "reflection")


@aten("grid_sampler_2d.default", "grid_sampler_3d.default")
def _(x, grid, interpolation_mode, padding_mode, align_corners):
    return grid_sample(x, grid, SAMPLING[interpolation_mode], BORDERS[padding_mode], align_corners)


@aten("grid_sampler_2d_backward.default", "grid_sampler_3d_backward.default")
def _(g, x, grid, interpolation_mode, padding_mode, align_corners, output_mask):
    mode, border = SAMPLING[interpolation_mode], BORDERS[padding_mode]
    _, pull = vjp(lambda v, points: grid_sample(v, points, mode, border, align_corners), wide(x), wide(grid))
    by_x, by_grid = pull(wide(g))
    return (narrow_to(by_x, x.dtype) if output_mask[0] else None), narrow_to(by_grid, grid.dtype)


aten("pixel_shuffle.default")(lambda x, factor: _with_leading(lambda v: pixel_shuffle(v, factor), x))
aten("pixel_unshuffle.default")(lambda x, factor: _with_leading(lambda v: pixel_unshuffle(v, factor), x))
aten("native_channel_shuffle.default", "channel_shuffle.default")(lambda x, groups: channel_shuffle(x, groups))


def _with_leading(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    out = function(reshape(x, shape=(math.prod(x.shape[:-3]), *x.shape[-3:])))
    return reshape(out, shape=(*x.shape[:-3], *out.shape[1:]))


# Padding with elements of the input.

MAX_SUMMANDS = 8  # more are summed by a kernel of their own


def _reflect(place: Tensor, size: int) -> Tensor:
    inside = e.abs(place)
    return (size - 1) - e.abs((size - 1) - inside)


def _replicate(place: Tensor, size: int) -> Tensor:
    return e.minimum(e.maximum(place, 0), size - 1)


def _pad_with(places: Callable[[Tensor, Any], Tensor], x: Tensor, padding: Sequence[int]) -> Tensor:
    for i in range(len(padding) // 2):
        axis, low, high = x.ndim - 1 - i, padding[2 * i], padding[2 * i + 1]
        size = x.shape[axis]
        if low or high:
            x = gather(x, places(iota(shape=(size + low + high,)) - low, size), axis=axis)
    return x


def _pad_with_back(fold_ends: Callable[..., Tensor], g: Tensor, x: Tensor, padding: Sequence[int]) -> Tensor:
    total = wide(g)
    for i in range(len(padding) // 2):
        axis, low, high = x.ndim - 1 - i, padding[2 * i], padding[2 * i + 1]
        total = _pad_axis(total, axis, max(-low, 0), max(-high, 0))
        total = fold_ends(total, axis, max(low, 0), max(high, 0))
    return narrow_to(total, g.dtype)


def _pad_axis(x: Tensor, axis: int, low: Any, high: Any) -> Tensor:
    return pad(x, [(low, high) if i == axis else (0, 0) for i in range(x.ndim)])


def _fold_reflections(g: Tensor, axis: int, low: int, high: int) -> Tensor:
    """The adjoint of a reflection along an axis: what was read from its ends is added there."""
    end = g.shape[axis] - high
    total, size = narrow(g, axis, low, end), end - low
    if low:
        total = total + _pad_axis(flip(narrow(g, axis, 0, low), axis), axis, 1, size - 1 - low)
    if high:
        total = total + _pad_axis(flip(narrow(g, axis, end, end + high), axis), axis, size - 1 - high, 1)
    return total


def _fold_replicas(g: Tensor, axis: int, low: int, high: int) -> Tensor:
    """The adjoint of a replication along an axis: the copies are added to its ends."""
    end = g.shape[axis] - high
    total, size = narrow(g, axis, low, end), end - low
    for first, last, before in ((0, low, 0), (end, end + high, size - 1)):
        for copies in _list_summands(g, axis, first, last):
            total = total + _pad_axis(copies, axis, before, size - 1 - before)
    return total


def _list_summands(x: Tensor, axis: int, first: int, last: int) -> list[Tensor]:
    """Slices of one element whose sum is that of a range: the elements, or the sum of many."""
    if last - first > MAX_SUMMANDS:
        return [r.sum(narrow(x, axis, first, last), axis=axis, keepdims=True)]
    return [narrow(x, axis, i, i + 1) for i in range(first, last)]


for _name, _places, _fold_ends in (
    ("reflection", _reflect, _fold_reflections), ("replication", _replicate, _fold_replicas),
):  # fmt: skip
    for _rank in (1, 2, 3):
        aten(f"{_name}_pad{_rank}d.default")(lambda x, padding, places=_places: _pad_with(places, x, padding))
        aten(f"{_name}_pad{_rank}d_backward.default")(
            lambda g, x, padding, fold_ends=_fold_ends: _pad_with_back(fold_ends, g, x, padding)
        )


# Overlapping windows of one axis.


@aten("unfold_backward.default")
def _(g, input_sizes, dim, size, step):
    if not input_sizes:
        return reshape(g, shape=())
    axis = dim % len(input_sizes)
    windows = permute(wide(g), axes=(*range(axis + 1), g.ndim - 1, *range(axis + 1, g.ndim - 1)))
    return narrow_to(_fold_windows(windows, axis, input_sizes[axis], size, step), g.dtype)


def _fold_windows(g: Tensor, axis: int, length: int, size: int, step: int) -> Tensor:
    """The sum of windows [.., windows, size, ..] that begin every `step` elements of an axis, which replaces theirs.

    Windows are cut into blocks of `step` elements; block d of window t adds to block t + d of the result.
    """
    most, blocks = -(-size // step), -(-length // step)
    front, behind, count = g.shape[:axis], g.shape[axis + 2 :], g.shape[axis]
    cut = reshape(_pad_axis(g, axis + 1, 0, most * step - size), shape=(*front, count, most, step, *behind))
    if most > MAX_SUMMANDS:
        total = _add_diagonals(cut, axis, blocks)
    else:
        parts = [narrow(cut, axis + 1, d, d + 1) for d in range(most)]
        moved = [_pad_axis(part, axis, d, blocks - count - d) for d, part in enumerate(parts)]
        total = functools.reduce(e.add, moved)
    return narrow(reshape(total, shape=(*front, blocks * step, *behind)), axis, 0, length)


def _add_diagonals(x: Tensor, axis: int, length: int) -> Tensor:
    """The sums of [.., t, d, ..] over all t + d that are equal: row d of [d, t] moves by d, in rows of other width."""
    front, (count, most), behind = x.shape[:axis], x.shape[axis : axis + 2], x.shape[axis + 2 :]
    rows = permute(x, axes=(*range(axis), axis + 1, axis, *range(axis + 2, x.ndim)))
    rows = _pad_axis(rows, axis + 1, 0, length + 1 - count)
    flat = reshape(rows, shape=(*front, most * (length + 1), *behind))
    return r.sum(reshape(narrow(flat, axis, 0, most * length), shape=(*front, most, length, *behind)), axis=axis)

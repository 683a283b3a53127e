"""Resampling of images: interpolation, sampling at the points of a grid, and elements moved between channels and
space."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tessera.core.errors import ArgumentError, ShapeError, user_location
from tessera.core.types import DType, f32, f64, int64
from tessera.ir.tensor import Tensor, as_tensor
from tessera.ops.tensor.adaptive_pooling import adaptive_avg_pool1d, adaptive_avg_pool2d, adaptive_avg_pool3d
from tessera.ops.tensor.argument_checks import check_arguments
from tessera.ops.tensor.basic import broadcast_to, cast
from tessera.ops.tensor.coercion import composite, unify_dtypes
from tessera.ops.tensor.contractions import matmul
from tessera.ops.tensor.elementwise import (
    abs,
    floor,
    greater,
    greater_equal,
    less,
    less_equal,
    maximum,
    minimum,
    remainder,
    where,
)  # fmt: skip
from tessera.ops.tensor.elementwise import round as round_to_even
from tessera.ops.tensor.reduce import sum
from tessera.ops.tensor.shape import gather, iota, permute, reshape, stack

# Interpolation: along each axis the taps of an element are `count` elements of the input, each with its weight.

Taps = list[tuple[np.ndarray, np.ndarray]]  # places and weights, for each tap
MAX_UNROLLED = 16  # elements that an element is a tap of, which are added one after the other; more are reduced
CUBIC = -0.75  # the parameter of Keys' cubic convolution
AREA = {1: adaptive_avg_pool1d, 2: adaptive_avg_pool2d, 3: adaptive_avg_pool3d}
LINEAR_RANKS = {"linear": 1, "bilinear": 2, "trilinear": 3}


@composite
def interpolate(
    input: Any, size: Any = None, scale_factor: Any = None, mode: str = "nearest", align_corners: bool = False,
    recompute_scale_factor: bool = False,
) -> Tensor:  # fmt: skip
    """`input` [B, C, sizes] resampled to `size`, or by `scale_factor`: one number, or one for each axis.

    `mode` is "nearest" (the element at the floor of the place), "nearest-exact" (the nearest one), "linear",
    "bilinear", "trilinear" (by the number of axes), "bicubic" (Keys 1981, with -3/4), or "area" (means of windows).
    With `align_corners` the centres of the corner elements coincide, else the corners of the images do. A place in
    the input is computed with `scale_factor` as given, unless `recompute_scale_factor`.

    >>> interpolate([[[1.0, 3.0]]], size=4, mode="linear")
    Tensor([[[1. , 1.5, 2.5, 3. ]]], f32)

    Raises:
        ShapeError: `input` has no, or more than three, spatial axes, or one of size 0.
        ArgumentError: both or none of `size` and `scale_factor`, or the mode is not one for this rank.
    """
    x = as_tensor(input)
    rank = x.ndim - 2
    if not 1 <= rank <= 3 or 0 in x.shape[2:]:
        raise ShapeError(
            "interpolate takes one to three spatial axes", location=user_location(), received=str(x.type),
            expected="[B, C, W], [B, C, H, W] or [B, C, D, H, W], with elements",
        )  # fmt: skip
    _check_mode(mode, rank, align_corners)
    sizes, scales = _find_sizes(x, size, scale_factor, recompute_scale_factor)
    if mode == "area":
        return AREA[rank](x, sizes)
    x = x if x.dtype.is_float or mode.startswith("nearest") else cast(x, dtype=f32)
    return resample(x, Resampling(mode, x.shape[2:], sizes, scales, align_corners))


@dataclass(frozen=True)
class Resampling:
    """An interpolation of images of `sizes` to `counts`, by `scales` where these are given: the taps of each axis.

    Places are computed in the format `places`.
    """

    mode: str
    sizes: Sequence[Any]
    counts: Sequence[int]
    scales: Sequence[float | None]
    align_corners: bool = False
    places: type[np.floating[Any]] = np.float64

    def list_axes(self) -> Iterator[tuple[int, int, Taps]]:
        """The place of each axis, from the last one, its size, and the taps of its new elements."""
        find = TAPS.get(self.mode, _linear_taps)
        for axis, count in enumerate(self.counts):
            size = int(self.sizes[axis])
            yield 2 + axis, size, find(_Places(size, count, self.scales[axis], self.align_corners, self.places))


def resample(x: Tensor, to: Resampling) -> Tensor:
    """An image [B, C, sizes] after an interpolation, one axis after the other."""
    for axis, _, taps in to.list_axes():
        x = _combine_taps(x, taps, axis)
    return x


def resample_back(g: Tensor, to: Resampling) -> Tensor:
    """The gradient of an interpolation with respect to its image: its adjoint, as windows of `g` without a scatter."""
    for axis, size, taps in reversed(list(to.list_axes())):
        g = _spread_taps(g, taps, size, axis)
    return g


def _check_mode(mode: str, rank: int, align_corners: bool) -> None:
    known = {"nearest", "nearest-exact", "area", *(m for m, r in LINEAR_RANKS.items() if r == rank)}
    known |= {"bicubic"} if rank == 2 else set()
    if mode not in known:
        raise ArgumentError(
            f"interpolation {mode!r} of {rank} axes", location=user_location(), expected=", ".join(sorted(known))
        )
    if align_corners and mode in ("nearest", "nearest-exact", "area"):
        raise ArgumentError(f"align_corners with mode {mode!r}", location=user_location(), expected="a linear mode")


def _find_sizes(x: Tensor, size: Any, factor: Any, recompute: bool) -> tuple[tuple[int, ...], list[float | None]]:
    """The sizes of the result, and what the sizes of the input are multiplied by where that is given."""
    rank, given = x.ndim - 2, size if factor is None else factor
    listed = tuple(given) if isinstance(given, (list, tuple)) else (given,) * rank
    right = (size is None) != (factor is None) and len(listed) == rank and not {None} & set(listed)
    if not right or min(listed) <= 0:
        raise ArgumentError(
            "interpolate needs `size` or `scale_factor`", location=user_location(), received=f"{size}, {factor}",
            expected=f"one of them, a number above 0 or {rank} of them",
        )  # fmt: skip
    if factor is None:
        return tuple(int(n) for n in listed), [None] * rank
    sizes = tuple(math.floor(float(n) * s) for n, s in zip(x.shape[2:], listed, strict=True))
    return sizes, [None if recompute else float(s) for s in listed]


def _combine_taps(x: Tensor, taps: Taps, axis: int) -> Tensor:
    if len(taps) == 1:
        return _take(x, taps[0][0], axis)
    parts = []
    for places, weights in _load_taps(taps, int(x.shape[axis]), x.dtype):
        parts.append(gather(x, places, axis=axis) * reshape(weights, shape=(-1, *(1,) * (x.ndim - 1 - axis))))
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _spread_taps(g: Tensor, taps: Taps, size: int, axis: int) -> Tensor:
    """The adjoint of `_combine_taps`: for each of `size` elements the sum of what those that it is a tap of have, times
    their weights. The elements of an element are a range, since the places of a tap never decrease.
    """
    count = int(g.shape[axis])
    if len(taps) == 1 and (times := _find_repetition(taps[0][0], size)):
        return sum(reshape(g, shape=(*g.shape[:axis], size, times, *g.shape[axis + 1 :])), axis=axis + 1)
    starts, lengths, weights = _invert_taps(taps, size, count)
    most, behind = len(weights), (1,) * (g.ndim - 1 - axis)
    start, length = Tensor(starts.astype(np.uint32)), Tensor(lengths.astype(np.uint32))
    if most > MAX_UNROLLED:
        element = iota(shape=(size, most), dtype=start.dtype)
        place = minimum(reshape(start, shape=(-1, 1)) + element, count - 1)
        inside = reshape(less(element, reshape(length, shape=(-1, 1))), shape=(size, most, *behind))
        weight = reshape(Tensor(weights.T.astype(g.dtype.numpy)), shape=(size, most, *behind))
        return sum(where(inside, gather(g, place, axis=axis) * weight, 0.0), axis=axis + 1)
    total: Any = None
    for i, each in enumerate(weights):
        found = gather(g, minimum(start + i, count - 1), axis=axis)
        # A product with a weight of 0 would make NaN of an infinity that belongs to other elements.
        found = found if (each == 1).all() else found * reshape(Tensor(each.astype(g.dtype.numpy)), shape=(-1, *behind))
        inside = reshape(greater(length, i), shape=(-1, *behind))
        found = found if (lengths > i).all() else where(inside, found, 0.0)
        total = found if total is None else total + found
    return total


def _invert_taps(taps: Taps, size: int, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For each of `size` elements the first of the elements that it is a tap of, how many these are, and the weights
    of the first of them, the second and so on; 1 where there is none.
    """
    places = np.concatenate([place for place, _ in taps])
    named = places * count + np.tile(np.arange(count), len(taps))  # pairs of a tap and what it is a tap of
    pairs, where_from = np.unique(named, return_inverse=True)
    added = np.bincount(where_from, np.concatenate([weight for _, weight in taps]), len(pairs))
    of, by = np.divmod(pairs, count)
    lengths = np.bincount(of, minlength=size)
    firsts = np.cumsum(lengths) - lengths
    starts = np.where(lengths > 0, by[np.minimum(firsts, len(by) - 1)], 0)
    weights = np.ones((int(lengths.max()), size))
    weights[by - starts[of], of] = added
    return starts, lengths, weights


def _load_taps(taps: Taps, size: int, dtype: DType) -> list[tuple[Tensor, Tensor]]:
    """The places, which are seen to be inside, and the weights of taps, as tensors.

    Two taps whose places are neighbours and whose weights add up to 1 share one table of each.
    """
    if not _are_neighbours(taps, size):
        return [(_table_places(places, size), Tensor(weights.astype(dtype.numpy))) for places, weights in taps]
    (low, _), (_, share) = taps
    first, second = _table_places(low, size), Tensor(share.astype(dtype.numpy))
    return [(first, 1 - second), (minimum(first + 1, size - 1), second)]


def _are_neighbours(taps: Taps, size: int) -> bool:
    if len(taps) != 2:
        return False
    (low, share), (high, rest) = taps
    return np.array_equal(high, np.minimum(low + 1, size - 1)) and np.allclose(share + rest, 1, rtol=0, atol=2.0**-50)


def _table_places(places: np.ndarray, size: int) -> Tensor:
    """Places of an axis, all inside; unsigned and with their limit stated, so that no target checks them."""
    return minimum(Tensor(places.astype(np.uint32)), size - 1)


def _take(x: Tensor, places: np.ndarray, axis: int) -> Tensor:
    """The elements at places of an axis; where each is taken equally often in turn, without a table of the places."""
    size, times = int(x.shape[axis]), _find_repetition(places, int(x.shape[axis]))
    if not times:
        return gather(x, _table_places(places, size), axis=axis)
    before, after = x.shape[:axis], x.shape[axis + 1 :]
    repeated = broadcast_to(reshape(x, shape=(*before, size, 1, *after)), shape=(*before, size, times, *after))
    return reshape(repeated, shape=(*before, len(places), *after))


def _find_repetition(places: np.ndarray, size: int) -> int:
    """How often places have each of `size` elements in turn; 0 if they do not."""
    times = len(places) // size
    return times if times * size == len(places) and np.array_equal(places, np.arange(len(places)) // times) else 0


@dataclass(frozen=True)
class _Places:
    """The places in an axis of `size` elements of each of `count` new ones."""

    size: int
    count: int
    scale: float | None
    align_corners: bool
    kind: type[np.floating[Any]]

    @property
    def index(self) -> np.ndarray:
        return np.arange(self.count, dtype=self.kind)

    @property
    def step(self) -> Any:
        """What is between two places."""
        if self.align_corners:
            return self.kind((self.size - 1) / (self.count - 1) if self.count > 1 else 0.0)
        return self.kind(self.size / self.count if self.scale is None else 1 / self.scale)

    def find(self) -> np.ndarray:
        return self.index * self.step if self.align_corners else (self.index + 0.5) * self.step - 0.5


def _nearest_taps(at: _Places) -> Taps:
    places = np.floor(at.index * at.step).astype(np.int64)
    return [(np.minimum(places, at.size - 1), np.ones(at.count))]


def _exact_taps(at: _Places) -> Taps:
    places = np.floor((at.index + 0.5) * at.step).astype(np.int64)
    return [(np.minimum(places, at.size - 1), np.ones(at.count))]


def _linear_taps(at: _Places) -> Taps:
    places = np.maximum(at.find(), 0.0)
    low = np.minimum(np.floor(places).astype(np.int64), at.size - 1)
    share = np.clip(places - low, 0.0, 1.0)
    return [(low, 1 - share), (np.minimum(low + 1, at.size - 1), share)]


def _cubic_taps(at: _Places) -> Taps:
    places = at.find()
    low = np.floor(places).astype(np.int64)
    weights = _weigh_cubic(places - low)
    return [(np.clip(low + i - 1, 0, at.size - 1), w) for i, w in enumerate(weights)]


def _weigh_cubic(t: Any) -> list[Any]:
    """The weights of four neighbours for a place at the share `t` between the middle two (Keys 1981)."""
    near = lambda d: ((CUBIC + 2) * d - (CUBIC + 3)) * d * d + 1  # noqa: E731
    far = lambda d: ((d - 5) * d + 8) * d * CUBIC - 4 * CUBIC  # noqa: E731
    return [far(t + 1), near(t), near(1 - t), far(2 - t)]


TAPS: dict[str, Callable[..., Taps]] = {
    "nearest": _nearest_taps,
    "nearest-exact": _exact_taps,
    "bicubic": _cubic_taps,
}


# Sampling at the points of a grid.


@composite
def affine_grid(theta: Any, size: Sequence[int], align_corners: bool = False) -> Tensor:
    """The points of an image of `size` [B, C, H, W] after the affine maps `theta` [B, 2, 3]: [B, H, W, 2].

    The same for volumes: `size` [B, C, D, H, W] and `theta` [B, 3, 4] give [B, D, H, W, 3]. Points are (x, y) or
    (x, y, z), from -1 to 1 (see `grid_sample`).

    >>> affine_grid([[[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]], (1, 1, 1, 2))
    Tensor([[[[-0.5,  0. ],
              [ 0.5,  0. ]]]], f32)

    Raises:
        ShapeError: `theta` does not fit `size`.
    """
    maps, rank = as_tensor(theta), len(size) - 2
    if rank not in (2, 3) or maps.shape != (size[0], rank, rank + 1):
        raise ShapeError(
            "theta does not fit the size", location=user_location(), received=f"{maps.type} for {tuple(size)}",
            expected="[B, 2, 3] for [B, C, H, W], or [B, 3, 4] for [B, C, D, H, W]",
        )  # fmt: skip
    spatial = tuple(size[2:])
    lines = []
    for axis in range(rank - 1, -1, -1):
        n = spatial[axis]
        ends = 1.0 if align_corners and n > 1 else (n - 1) / n if not align_corners else 0.0
        index = cast(iota(shape=spatial, axis=axis - rank), dtype=f64)
        lines.append(cast(index * (2 * ends / max(n - 1, 1)) - ends, dtype=maps.dtype))
    one = lines[0] * 0.0 + 1.0
    points = reshape(stack([*lines, one], axis=-1), shape=(1, -1, rank + 1))
    return reshape(matmul(points, maps.swapaxes(-1, -2)), shape=(size[0], *spatial, rank))


@composite
def grid_sample(
    input: Any, grid: Any, mode: str = "bilinear", padding_mode: str = "zeros", align_corners: bool = False
) -> Tensor:
    """The values of `input` [B, C, H, W] at the points of `grid` [B, I, J, 2]: [B, C, I, J].

    The same for volumes: [B, C, D, H, W] and [B, I, J, K, 3]. A point is (x, y) or (x, y, z); -1 and 1 are the ends of
    an axis: the centres of its first and last elements with `align_corners`, else their outer edges. `mode` is
    "bilinear" (trilinear for volumes), "nearest" or "bicubic" (images only). Beyond the ends, `padding_mode` "zeros"
    gives 0, "border" the element at the end, "reflection" the element at the reflected place.

    >>> grid_sample([[[[1.0, 3.0]]]], [[[[0.0, 0.0]]]])
    Tensor([[[[2.]]]], f32)

    Raises:
        ShapeError: ranks or batches do not fit.
        ArgumentError: an unknown mode.
    """
    x, points = unify_dtypes([as_tensor(input), as_tensor(grid)])
    rank = x.ndim - 2
    if rank not in (2, 3) or points.ndim != x.ndim or points.shape[0] != x.shape[0] or points.shape[-1] != rank:
        raise ShapeError(
            "the grid does not fit the input", location=user_location(), received=f"{x.type} and {points.type}",
            expected="[B, C, H, W] and [B, I, J, 2], or [B, C, D, H, W] and [B, I, J, K, 3]",
        )  # fmt: skip
    modes = ("bilinear", "nearest", "bicubic")[: 5 - rank]
    if mode not in modes or padding_mode not in ("zeros", "border", "reflection"):
        raise ArgumentError(
            f"grid_sample with {mode!r} and {padding_mode!r}", location=user_location(),
            expected=f"mode {', '.join(modes)}; padding_mode zeros, border, reflection",
        )  # fmt: skip
    limit = _Border(padding_mode, align_corners)
    taps = []
    for axis, size in enumerate(x.shape[2:]):
        point = points[..., rank - 1 - axis]
        place = (point + 1.0) * ((size - 1) / 2) if align_corners else ((point + 1.0) * size - 1.0) / 2
        taps.append(SAMPLED_TAPS[mode](place, size, limit))
    return _sample_taps(x, taps, padding_mode == "zeros")


class _Border:
    """What happens to places beyond the ends of an axis."""

    def __init__(self, mode: str, align_corners: bool) -> None:
        self.mode, self.align_corners = mode, align_corners

    def limit(self, place: Tensor, size: int) -> Tensor:
        """The place that counts instead: with "zeros" the place itself."""
        if self.mode == "zeros":
            return place
        if self.mode == "reflection":
            place = self._reflect(place, size)
        return minimum(maximum(place, 0.0), float(size - 1))

    def _reflect(self, place: Tensor, size: int) -> Tensor:
        low, span = (0.0, size - 1.0) if self.align_corners else (-0.5, float(size))
        if span == 0:
            return place * 0.0
        along = remainder(abs(place - low), 2 * span)
        return minimum(along, 2 * span - along) + low


SampledTaps = list[tuple[Tensor, Any]]  # for one axis: places, which are whole numbers, and their weights


def _sample_bilinear(place: Tensor, size: Any, border: _Border) -> SampledTaps:
    place = border.limit(place, size)
    low = floor(place)
    return [(low, 1.0 - (place - low)), (low + 1.0, place - low)]


def _sample_nearest(place: Tensor, size: Any, border: _Border) -> SampledTaps:
    return [(round_to_even(border.limit(place, size)), None)]


def _sample_bicubic(place: Tensor, size: Any, border: _Border) -> SampledTaps:
    low = floor(place)
    weights = _weigh_cubic(place - low)
    return [(border.limit(low + (i - 1.0), size), w) for i, w in enumerate(weights)]


SAMPLED_TAPS: dict[str, Callable[[Tensor, Any, _Border], SampledTaps]] = {
    "bilinear": _sample_bilinear,
    "nearest": _sample_nearest,
    "bicubic": _sample_bicubic,
}


def _sample_taps(x: Tensor, axes: Sequence[SampledTaps], zeros: bool) -> Tensor:
    """The sum of the elements at all combinations of taps, times their weights."""
    channels, sizes = x.shape[1], x.shape[2:]
    rows = reshape(permute(x, axes=(0, *range(2, x.ndim), 1)), shape=(-1, channels))
    out_shape = axes[0][0][0].shape
    total: Any = None
    for taps in itertools.product(*axes):
        flat: Any = iota(shape=out_shape, axis=-len(out_shape))
        inside: Any = None
        weight: Any = None
        for (place, w), size in zip(taps, sizes, strict=True):
            index = cast(minimum(maximum(place, 0.0), float(size - 1)), dtype=int64)
            within = greater_equal(place, 0.0) & less_equal(place, float(size - 1))
            flat = flat * size + index
            inside = within if inside is None else inside & within
            weight = w if weight is None else weight * w
        found = gather(rows, flat, axis=0)
        found = found if weight is None else found * weight[..., None]
        found = where(inside[..., None], found, 0.0) if zeros else found
        total = found if total is None else total + found
    return permute(total, axes=(0, len(out_shape), *range(1, len(out_shape))))


# Elements moved between channels and space.


@check_arguments
def pixel_shuffle(x: Any, upscale_factor: int) -> Tensor:
    """[..., C·r², H, W] as [..., C, H·r, W·r], for r = `upscale_factor` (Shi et al. 2016).

    >>> pixel_shuffle([[[1.0]], [[2.0]], [[3.0]], [[4.0]]], 2)
    Tensor([[[1., 2.],
             [3., 4.]]], f32)

    Raises:
        ShapeError: the channels are no multiple of r².
    """
    x, r = as_tensor(x), upscale_factor
    if x.ndim < 3 or r < 1 or x.shape[-3] % (r * r):
        raise ShapeError(
            "pixel_shuffle does not fit", location=user_location(), received=f"{x.type}, factor {r}",
            expected=f"[..., C*{r * r}, H, W]",
        )  # fmt: skip
    (channels, height, width), lead = x.shape[-3:], x.shape[:-3]
    cut = reshape(x, shape=(*lead, channels // (r * r), r, r, height, width))
    n = len(lead)
    turned = permute(cut, axes=(*range(n), n, n + 3, n + 1, n + 4, n + 2))
    return reshape(turned, shape=(*lead, channels // (r * r), height * r, width * r))


@check_arguments
def pixel_unshuffle(x: Any, downscale_factor: int) -> Tensor:
    """The inverse of `pixel_shuffle`: [..., C, H·r, W·r] as [..., C·r², H, W], for r = `downscale_factor`.

    >>> pixel_unshuffle([[[1.0, 2.0], [3.0, 4.0]]], 2).shape
    (4, 1, 1)

    Raises:
        ShapeError: height or width are no multiples of r.
    """
    x, r = as_tensor(x), downscale_factor
    if x.ndim < 3 or r < 1 or x.shape[-1] % r or x.shape[-2] % r:
        raise ShapeError(
            "pixel_unshuffle does not fit", location=user_location(), received=f"{x.type}, factor {r}",
            expected=f"[..., C, H*{r}, W*{r}]",
        )  # fmt: skip
    (channels, height, width), lead = x.shape[-3:], x.shape[:-3]
    cut = reshape(x, shape=(*lead, channels, height // r, r, width // r, r))
    n = len(lead)
    turned = permute(cut, axes=(*range(n), n, n + 2, n + 4, n + 1, n + 3))
    return reshape(turned, shape=(*lead, channels * r * r, height // r, width // r))


@check_arguments
def channel_shuffle(x: Any, groups: int) -> Tensor:
    """`x` [B, C, ...] with its channels, in `groups` of equal size, interleaved (Zhang et al. 2018).

    >>> channel_shuffle([[[1.0], [2.0], [3.0], [4.0]]], 2)
    Tensor([[[1.],
             [3.],
             [2.],
             [4.]]], f32)

    Raises:
        ShapeError: the channels are no multiple of `groups`.
    """
    x = as_tensor(x)
    if x.ndim < 2 or groups < 1 or x.shape[1] % groups:
        raise ShapeError(
            "channel_shuffle does not fit", location=user_location(), received=f"{x.type}, {groups} groups",
            expected="[B, C, ...] with C divisible by groups",
        )  # fmt: skip
    cut = reshape(x, shape=(x.shape[0], groups, x.shape[1] // groups, *x.shape[2:]))
    return reshape(permute(cut, axes=(0, 2, 1, *range(3, cut.ndim))), shape=x.shape)

"""Resampling: Resize and Upsample by taps along each axis, GridSample, AffineGrid, RoiAlign."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tessera.core.types import f32, int64
from tessera.ir.tensor import Tensor
from tessera.onnx.node_rules import NodeCall, rule
from tessera.ops.tensor import elementwise as e
from tessera.ops.tensor import reduce as r
from tessera.ops.tensor import resampling as image
from tessera.ops.tensor.basic import cast
from tessera.ops.tensor.coercion import composite
from tessera.ops.tensor.shape import gather, permute, reshape

# Resize: along each axis an element of the result is a weighted sum of a few elements of the input (its taps).


@dataclass(frozen=True)
class _Axis:
    """One axis of a resize: its sizes, its scale, and the region of interest (for tf_crop_and_resize)."""

    size: int
    count: int
    scale: float
    region: tuple[float, float] = (0.0, 1.0)

    def places(self, mode: str) -> np.ndarray:
        """The place in the input of each element of the result."""
        index = np.arange(self.count, dtype=np.float64)
        if mode == "asymmetric":
            return index / self.scale
        if mode == "align_corners":
            return index * (self.size - 1) / (self.scale * self.size - 1) if self.count > 1 else index * 0
        if mode == "tf_crop_and_resize":
            low, high = self.region
            if self.count == 1:
                return index + 0.5 * (low + high) * (self.size - 1)
            return low * (self.size - 1) + index * (high - low) * (self.size - 1) / (self.count - 1)
        if mode == "pytorch_half_pixel" and self.count == 1:
            return index * 0 - 0.5 if self.scale is None else index * 0
        if mode == "half_pixel_symmetric":
            adjusted = self.count / (self.scale * self.size)
            return self.size / 2 * (1 - adjusted) + (index + 0.5) / self.scale - 0.5
        return (index + 0.5) / self.scale - 0.5


NEAREST: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "round_prefer_floor": lambda x: np.ceil(x - 0.5),
    "round_prefer_ceil": lambda x: np.floor(x + 0.5),
    "floor": np.floor,
    "ceil": np.ceil,
}
TRANSFORMATIONS = (
    "half_pixel", "asymmetric", "align_corners", "tf_crop_and_resize", "pytorch_half_pixel", "half_pixel_symmetric",
)  # fmt: skip


@rule("Resize", "Upsample", static=(1, 2, 3))
def _(call: NodeCall, x: Tensor, *operands: Tensor | None) -> Tensor:
    listed = (*operands, None, None, None)
    roi, scales, sizes = listed[:3]
    if call.since < 11:  # Upsample, and Resize of opset 10: (x, scales)
        roi, scales, sizes = None, listed[0], None
    axes = call.attr("axes", None)
    along = [a % x.ndim for a in axes] if axes else list(range(x.ndim))
    found = _plan_axes(call, x, along, roi, scales, sizes)
    mode = call.attr("coordinate_transformation_mode", "asymmetric")
    if mode not in TRANSFORMATIONS:
        raise call.refuse(f"the coordinate transformation {mode}")

    @composite
    def resize(x: Tensor) -> Tensor:
        outside: list[Any] = []
        for axis, plan in zip(along, found, strict=True):
            places = plan.places(mode)
            outside.append((axis, (places < 0) | (places > plan.size - 1)))
            if plan.count != plan.size or not np.array_equal(places, np.arange(plan.size)):
                taps = _find_taps(call, plan, places)
                x = image._combine_taps(x, taps, axis)
        return x if mode != "tf_crop_and_resize" else _extrapolate(x, outside, call.attr("extrapolation_value"))

    wide = x if x.dtype.is_float or call.attr("mode") == "nearest" else cast(x, dtype=f32)
    out = resize(wide)
    return out if out.dtype == x.dtype else cast(_limit(out, x), dtype=x.dtype)


def _limit(out: Tensor, x: Tensor) -> Tensor:
    """Interpolated values as integers of `x` take them: toward zero, within the type."""
    limits = np.iinfo(x.dtype.numpy)
    return e.minimum(e.maximum(out, float(limits.min)), float(limits.max))


def _plan_axes(
    call: NodeCall, x: Tensor, along: list[int], roi: Tensor | None, scales: Tensor | None, sizes: Tensor | None
) -> list[_Axis]:
    given = call.attr("scales", None) if scales is None else [float(s) for s in call.array(scales, "the scales")]
    wanted = None if sizes is None else call.ints(sizes, "the sizes")
    count = len(along)
    regions = [(0.0, 1.0)] * count
    if roi is not None and call.attr("coordinate_transformation_mode", "") == "tf_crop_and_resize":
        ends = [float(v) for v in call.array(roi, "the region")]
        regions = list(zip(ends[:count], ends[count:], strict=True))
    before = [int(x.shape[a]) for a in along]
    if wanted:
        factors = [w / n for w, n in zip(wanted, before, strict=True)]
        policy = call.attr("keep_aspect_ratio_policy", "stretch")
        if policy != "stretch":
            one = (min if policy == "not_larger" else max)(factors)
            factors = [one] * count
            wanted = [math.floor(n * one + 0.5) for n in before]
    elif given:
        factors = list(given)
        wanted = [math.floor(n * (high - low) * s) for n, s, (low, high) in zip(before, factors, regions, strict=True)]
    else:
        raise call.fail("neither scales nor sizes are given")
    return [_Axis(*each) for each in zip(before, wanted, factors, regions, strict=True)]


def _find_taps(call: NodeCall, plan: _Axis, places: np.ndarray) -> image.Taps:
    mode = call.attr("mode")
    if mode == "nearest":
        choose = NEAREST[call.attr("nearest_mode", "floor")]
        index = np.clip(choose(places), 0, plan.size - 1).astype(np.int64)
        return [(index, np.ones(plan.count))]
    shrink = min(plan.scale, 1.0) if call.attr("antialias", 0) else 1.0
    cubic = call.attr("cubic_coeff_a", -0.75)
    reach = (2 if mode == "cubic" else 1) / shrink
    first = np.floor(places).astype(np.int64) - math.ceil(reach) + 1
    if mode == "cubic" or shrink < 1:
        steps = range(2 * math.ceil(reach))
    else:
        steps = range(2)
    parts = [first + i for i in steps]
    weigh = (lambda d: _weigh_cubic(d, cubic)) if mode == "cubic" else (lambda d: np.maximum(1 - np.abs(d), 0))
    weights = [weigh((p - places) * shrink) for p in parts]
    if call.attr("exclude_outside", 0) or shrink < 1 and call.attr("exclude_outside", 0):
        weights = [np.where((p < 0) | (p >= plan.size), 0.0, w) for p, w in zip(parts, weights, strict=True)]
    total = sum(weights)
    return [(np.clip(p, 0, plan.size - 1), w / total) for p, w in zip(parts, weights, strict=True)]


def _weigh_cubic(distance: np.ndarray, a: float) -> np.ndarray:
    """The cubic convolution kernel (Keys 1981)."""
    d = np.abs(distance)
    near = ((a + 2) * d - (a + 3)) * d * d + 1
    far = ((d - 5) * d + 8) * d * a - 4 * a
    return np.where(d <= 1, near, np.where(d < 2, far, 0.0))


def _extrapolate(x: Tensor, outside: list[tuple[int, np.ndarray]], value: float) -> Tensor:
    for axis, mask in outside:
        if mask.any():
            shape = [1] * x.ndim
            shape[axis] = len(mask)
            x = e.where(Tensor(mask.reshape(shape)), value, x)
    return x


# Sampling at the points of a grid.

MODES = {"linear": "bilinear", "bilinear": "bilinear", "nearest": "nearest", "cubic": "bicubic", "bicubic": "bicubic"}


@rule("GridSample")
def _(call: NodeCall, x: Tensor, grid: Tensor) -> Tensor:
    mode = MODES.get(call.attr("mode"))
    rank = x.ndim - 2
    if mode is None or rank not in (2, 3) or (mode == "bicubic" and rank == 3):
        raise call.refuse(f"mode {call.attr('mode')} of {rank} axes")
    grid = grid if grid.dtype == x.dtype else cast(grid, dtype=x.dtype)
    return image.grid_sample(x, grid, mode, call.attr("padding_mode"), bool(call.attr("align_corners")))


@rule("AffineGrid", static=(1,))
def _(call: NodeCall, theta: Tensor, size: Tensor) -> Tensor:
    sizes = call.ints(size, "the size")
    return image.affine_grid(theta, tuple(sizes), bool(call.attr("align_corners")))


@rule("RoiAlign")
def _(call: NodeCall, x: Tensor, boxes: Tensor, batch: Tensor) -> Tensor:
    ratio = call.attr("sampling_ratio")
    if ratio <= 0:
        raise call.refuse("a number of samples that depends on the boxes (sampling_ratio=0)")
    half = call.attr("coordinate_transformation_mode", "output_half_pixel") == "half_pixel"
    counts = (call.attr("output_height"), call.attr("output_width"))
    scale, largest = call.attr("spatial_scale"), call.attr("mode") == "max"
    return composite(_align_regions)(x, boxes, batch, counts, ratio, scale, half, largest)


def _align_regions(
    x: Tensor, boxes: Tensor, batch: Tensor, counts: tuple[int, int], ratio: int, scale: float, half: bool,
    largest: bool,
) -> Tensor:  # fmt: skip
    """Means (or maxima) of bilinear samples in the cells of boxes (He et al. 2017): [boxes, C, counts]."""
    corners = boxes * scale - (0.5 if half else 0.0)
    places = []
    for axis, count in enumerate(counts):
        low, high = corners[:, 1 - axis], corners[:, 3 - axis]
        length = high - low if half else e.maximum(high - low, 1.0)
        share = (np.arange(count * ratio) + 0.5) / (count * ratio)
        places.append(low[:, None] + length[:, None] * Tensor(share.astype(x.dtype.numpy)))
    (height, width), channels = x.shape[2:], x.shape[1]
    rows = reshape(permute(x, axes=(0, 2, 3, 1)), shape=(-1, channels))
    start = reshape(cast(batch, dtype=int64) * (height * width), shape=(-1, 1, 1))
    taps = [_region_taps(p, n) for p, n in zip(places, (height, width), strict=True)]
    samples = []
    for (i, u), (j, v) in itertools.product(*taps):
        found = gather(rows, start + i[:, :, None] * width + j[:, None, :], axis=0)
        samples.append(found * (u[:, :, None] * v[:, None, :])[..., None])
    join: Any = e.maximum if largest else e.add
    value = samples[0]
    for each in samples[1:]:
        value = join(value, each)
    cells = reshape(value, shape=(-1, counts[0], ratio, counts[1], ratio, channels))
    found = (r.max if largest else r.mean)(cells, axis=(2, 4))
    return permute(found, axes=(0, 3, 1, 2))


def _region_taps(place: Tensor, size: Any) -> list[tuple[Tensor, Tensor]]:
    """The two neighbours of each place and their weights: 0 for a place that is more than 1 outside."""
    inside = e.greater_equal(place, -1.0) & e.less_equal(place, float(size))
    place = e.minimum(e.maximum(place, 0.0), float(size - 1))
    low = e.minimum(e.floor(place), float(max(size - 2, 0)))
    share = place - low
    first = cast(low, dtype=int64)
    second = e.minimum(first + 1, size - 1)
    return [(first, e.where(inside, 1.0 - share, 0.0)), (second, e.where(inside, share, 0.0))]

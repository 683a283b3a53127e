"""Implicit GEMM: convolutions as products whose right operand is read from the image, shifted (cuDNN's implicit GEMM).

A padded image is a list of positions with all channels of each. A tap of the window meets, for all windows at once, the
same list from another position on: position p + (i · height + j) · width + k for tap (i, j, k). So a convolution of
stride 1 is a sum over taps of products [O, C] · [C, positions]: one loop over taps and channels. It computes positions
that wrap around an edge too, which the check of the results drops.

A window with strides is one of stride 1 over the phases of the image, which count as channels. f32 is multiplied in
three parts (`tessera.stdlib.split_products`). Tensor cores cut off bits of a sum each time that they add to it, always
towards zero: long f32 sums are cut by channels, and the pieces are added in f32.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from tessera.core.symbolic_dim import ceil_divide, round_up
from tessera.core.types import DType, TensorType, bf16, f32
from tessera.frontend.kernel import kernel
from tessera.frontend.kernel.graph_launch import OutputMemory, launch
from tessera.frontend.kernel.tile_api import tile
from tessera.ir.core import Value
from tessera.ir.rewrite import UseDef
from tessera.ir.tensor import Tensor
from tessera.lower.indexing_maps import get_shape, get_tensor_type
from tessera.lower.lowering_plan import BLOCK_RATES, EVEN_BLOCKS, STEP_SECONDS, estimate_waves
from tessera.lower.passes.window_views import find_stacked_slices
from tessera.ops.tensor import basic, reduce, shape
from tessera.stdlib.split_products import (
    ALIGNMENT,
    BF16_RATE,
    BUSY_PROGRAMS,
    F32_RATE,
    LAUNCH_SECONDS,
    LEFT_ORDER,
    MEMORY_RATE,
    PRODUCTS,
    RIGHT_ORDER,
    find_narrow_type,
    has_nonfinite,
    select_part,
    split_memory,
    split_number,
)

# mypy: disable-error-code="operator, attr-defined, index"

AXES = 3  # spatial axes of the kernels
DEPTH = 64  # channels of a block
LEAST_ROWS = 64  # outputs of a block
SPLIT_CHANNELS, SPLIT_POSITIONS = 64, 64  # the block of an image that a program splits
CHECKED_OUTPUTS, CHECKED_WINDOWS = 32, 256  # the block of results that a program checks
FOLD_RATE = 1.1e12  # bytes a second that shifted images are written at, as channels of one
MAX_WASTE = 1.2  # places of blocks for each window
MAX_DEPTH = 4096  # elements that one f32 sum adds up: tensor cores cut off 1e-9 of a sum for each, measured on an H200


@kernel
def split_channels(x, parts, *, order, channels, BC, BP):
    """parts [Z, P, len(order) · channels] = the parts of x [Z, C, P] in this order, on the grid (Z, blocks of channels,
    blocks of P). Channels after C are zeros; BC divides `channels`. Without an order [Z, P, channels] are x itself."""
    z, c, p = tile.program_id(0), tile.program_id(1) * BC, tile.program_id(2) * BP
    turned = tile.alloc_shared((BP, BC), x.dtype)  # read in the order of the stores
    tile.store(turned[:, :], tile.transpose(tile.load(x[z, c : c + BC, p : p + BP], edge="clip")))
    if len(order) == 0:
        tile.store(parts[z, p : p + BP, c : c + BC], tile.load(turned[:, :]), edge="clip")
    else:
        found = split_number(tile.load(turned[:, :]))
    for place in tile.static_range(len(order)):
        start = place * channels + c
        tile.store(parts[z, p : p + BP, start : start + BC], select_part(order[place], found), edge="clip")


@kernel
def multiply_windows(weights, image, out, *, parts, pieces, cuts, taps, steps, channels, depth, BM, BN, BK):
    """out [S · pieces · cuts, Z, O, P] = the sum over parts, a piece of the channels and a cut of the rows of taps of
    weights [G, O, S · parts · taps · depth] times image [Z, P, S · parts · channels], shifted by `steps` for each tap,
    on the grid (S · pieces · cuts · Z, blocks of O, blocks of P).

    `depth` is the number of channels rounded up to a multiple of BK · pieces; weights after the channels are 0.
    """
    z, o, p = tile.program_id(0) % out.shape[1], tile.program_id(1) * BM, tile.program_id(2) * BN
    group, chunk = z % weights.shape[0], tile.program_id(0) // out.shape[1]
    above, chunk = chunk % cuts * (taps[1] // cuts), chunk // cuts
    first, piece = chunk // pieces * parts, chunk % pieces * (depth // pieces)
    total = tile.zeros((BM, BN), "f32")
    for part in tile.range(0, parts, 1):
        for i in tile.range(0, taps[0], 1):
            for j in tile.range(0, taps[1] // cuts, 1):
                for k in tile.range(0, taps[2], 1):
                    for c in tile.range(0, depth // pieces, BK):
                        tap = (((first + part) * taps[0] + i) * taps[1] + above + j) * taps[2] + k
                        deep, place = tap * depth + piece + c, (first + part) * channels + piece + c
                        start = p + i * steps[0] + (above + j) * steps[1] + k * steps[2]
                        left = tile.load(weights[group, o : o + BM, deep : deep + BK], edge="clip")
                        right = tile.load(image[z, start : start + BN, place : place + BK], edge="clip")
                        total = total + tile.dot(left, tile.transpose(right))
    whole = tile.program_id(0) // out.shape[1]
    tile.store(out[whole, z, o : o + BM, p : p + BN], tile.cast(total, out.dtype), edge="clip")


@kernel
def check_windows(sums, weights, image, out, *, joined, taps, gaps, phases, window, stacked, BO, BH, BW):
    """out [Z, O, D, H, W] = the sum of sums [S, Z, O, D', H', W'], or [S, O, Z, …] if joined, at the windows, or where
    a block is not finite the convolution of the image [Z, C, D', H', W'] by weights [G, O, C · taps] in f32; on the
    grid (Z · D, blocks of O, blocks of H · W).

    Channels are those of `stacked` shifts along the last axis, and of `phases` along each. Taps of a phase that the
    `window` does not have are left out: their weights are 0, and 0 times an infinity is NaN.
    """
    depth, across = out.shape[2], tile.cdiv(out.shape[4], BW)
    z, d, o = tile.program_id(0) // depth, tile.program_id(0) % depth, tile.program_id(1) * BO
    h, w = tile.program_id(2) // across * BH, tile.program_id(2) % across * BW
    group = z % weights.shape[0]
    total = tile.zeros((BO, BH, BW), "f32")
    for chunk in tile.static_range(sums.shape[0]):
        if joined:
            part = tile.load(sums[chunk, o : o + BO, z, d, h : h + BH, w : w + BW], edge="clip")
        else:
            part = tile.load(sums[chunk, z, o : o + BO, d, h : h + BH, w : w + BW], edge="clip")
        total = part if chunk == 0 else total + part
    wrong = has_nonfinite(total)
    total = tile.where(wrong, 0.0, total)
    for c in tile.range(0, tile.where(wrong, image.shape[1], 0), 1):
        for i in tile.range(0, taps[0], 1):
            for j in tile.range(0, taps[1], 1):
                for k in tile.range(0, taps[2], 1):
                    tap = ((c * taps[0] + i) * taps[1] + j) * taps[2] + k
                    y, x = h + j * gaps[1], w + k * gaps[2]
                    left = tile.reshape(tile.load(weights[group, o : o + BO, tap : tap + 1], edge="clip"), (BO, 1, 1))
                    seen = tile.load(image[z, c : c + 1, d + i * gaps[0], y : y + BH, x : x + BW], edge="clip")
                    more = tile.cast(left, "f32") * tile.cast(seen, "f32")
                    if phases != (1, 1, 1):
                        within = c % (image.shape[1] // stacked)
                        first, second = within // (phases[1] * phases[2]) % phases[0], within // phases[2] % phases[1]
                        third = (k + c // (image.shape[1] // stacked)) * phases[2] + within % phases[2]
                        there = (i * phases[0] + first < window[0]) & (j * phases[1] + second < window[1])
                        more = tile.where(there & (third < window[2]), more, 0.0)
                    total = total + more
    tile.store(out[z, o : o + BO, d, h : h + BH, w : w + BW], total, edge="clip")


# A convolution as the product that it is at the Graph level: weights [B, G, O, C · taps] times stacked slices.


@dataclass(frozen=True)
class StackedWindows:
    """Windows [B, C, taps, positions] of an image [B, C, sizes], as stacked slices."""

    image: Value
    taps: tuple[int, ...]
    dilations: tuple[int, ...]
    strides: tuple[int, ...]
    counts: tuple[int, ...]  # windows along each axis


@dataclass(frozen=True)
class WindowProduct:
    """A product of weights [1, G, O, C · taps] and of windows as [B, G, C · taps, positions]."""

    windows: StackedWindows
    weights: Value
    groups: int
    result: tuple[int, ...]
    narrow: DType | None  # the 16-bit float that f32 operands have been cast from
    wave_blocks: bool = False  # as of a lowering plan

    def compute(self, image: Tensor, weights: Tensor) -> Tensor:
        """The product, as [B, G, O, positions]."""
        windows, groups, outputs, dtype = self.windows, self.groups, int(weights.shape[-2]), image.dtype
        if self.narrow is not None:
            image, weights = (basic.cast(x, dtype=self.narrow) for x in (image, weights))
        weights = shape.reshape(weights, shape=(groups, outputs, -1, *windows.taps))
        taps, gaps, strides = windows.taps, windows.dilations, windows.strides
        if any(s > 1 for s in strides):
            taps, gaps = _fold_taps(windows), (1,) * len(taps)
            image, weights = _fold_phases(image, weights, windows)
        batch, sizes = int(image.shape[0]), tuple(int(n) for n in image.shape[2:])
        missing = (1,) * (AXES - len(taps))
        convolution = PositionConvolution(
            missing + tuple(taps), missing + tuple(gaps), missing + sizes, missing + windows.counts, missing + strides,
            missing + windows.taps, wave_blocks=self.wave_blocks,
        )  # fmt: skip
        image = shape.reshape(image, shape=(batch * groups, -1, math.prod(sizes)))
        weights = shape.reshape(weights, shape=(groups, outputs, -1, math.prod(taps)))
        return shape.reshape(convolution.compute(image, weights, dtype), shape=self.result)


def _fold_taps(windows: StackedWindows) -> tuple[int, ...]:
    """The taps along each axis where phases are channels."""
    return tuple(int(ceil_divide(t, s)) for t, s in zip(windows.taps, windows.strides, strict=True))


def _fold_phases(image: Tensor, weights: Tensor, windows: StackedWindows) -> tuple[Tensor, Tensor]:
    """The image [B, C · phases, …] and the weights [G, O, C · phases, taps] of windows of stride 1 over the phases."""
    taps, strides = _fold_taps(windows), windows.strides
    wanted = [s * (c + t - 1) for s, c, t in zip(strides, windows.counts, taps, strict=True)]
    image = resize(image, (*image.shape[:2], *wanted))
    weights = resize(weights, (*weights.shape[:3], *(t * s for t, s in zip(taps, strides, strict=True))))
    return move_phases(image, strides), move_phases(weights, strides)


def move_phases(x: Tensor, strides: Sequence[int]) -> Tensor:
    """[…, C, n · s, …] as […, C · s · …, n, …]: each phase of the last axes is a channel."""
    first = x.ndim - len(strides)
    lead, sizes = x.shape[:first], [n // s for n, s in zip(x.shape[first:], strides, strict=True)]
    x = shape.reshape(x, shape=(*lead, *itertools.chain(*zip(sizes, strides, strict=True))))
    x = shape.permute(x, axes=(*range(first), *range(first + 1, x.ndim, 2), *range(first, x.ndim, 2)))
    return shape.reshape(x, shape=(*lead[:-1], lead[-1] * math.prod(strides), *sizes))


def resize(x: Tensor, sizes: Sequence[Any]) -> Tensor:
    """A tensor cut, or padded with zeros, at the end of each axis."""
    stop = tuple(min(n, m) for n, m in zip(x.shape, sizes, strict=True))
    if stop != x.shape:
        x = shape.slice_(x, start=(0,) * x.ndim, stop=stop, step=(1,) * x.ndim)
    high = tuple(m - n for n, m in zip(stop, sizes, strict=True))
    return shape.pad(x, low=(0,) * x.ndim, high=high, value=0) if any(high) else x


class WindowBlocks(NamedTuple):
    """The parts of a convolution's contraction, pieces of the channels and cuts of the rows of taps, and the rows and
    columns of its blocks of results."""

    pieces: int
    cuts: int
    rows: int
    columns: int


@dataclass(frozen=True)
class PositionConvolution:
    """A convolution over a list of positions, each along three axes."""

    taps: tuple[int, ...]
    gaps: tuple[int, ...]  # positions along the axis from one tap to the next
    sizes: tuple[int, ...]  # of the image
    counts: tuple[int, ...]  # of the windows
    phases: tuple[int, ...]  # along each axis, which are channels
    window: tuple[int, ...]  # the taps of all phases
    stacked: int = 1  # taps along the last axis that are channels, too
    wave_blocks: bool = False

    @property
    def has_missing_taps(self) -> bool:
        """Whether some phases have fewer taps than others: the weights of the missing ones are 0."""
        return any(taps % count for taps, count in zip(self.window, self.phases, strict=True))

    @property
    def steps(self) -> tuple[int, ...]:
        """The positions from one tap to the next."""
        return tuple(gap * math.prod(self.sizes[a + 1 :]) for a, gap in enumerate(self.gaps))

    def compute(self, image: Tensor, weights: Tensor, dtype: DType) -> Tensor:
        """The convolution of an image [Z, C, P] by weights [G, O, C, taps] at each window: [Z, O, *counts]."""
        if self._folds_taps(image, int(weights.shape[1])):
            return self._fold_last_taps(image, weights, dtype)
        channels = int(image.shape[1])
        aligned = round_up(channels, ALIGNMENT)
        if image.dtype != f32:
            return self._compute_narrow(image, weights, aligned, dtype)
        parts = _move_channels(image, RIGHT_ORDER, aligned)
        number, channels = (1, PRODUCTS * aligned) if fold_parts(channels) else (PRODUCTS, aligned)
        pieces, depth = cut_channels(channels, math.prod(self.taps))
        left = (self._split_folded if number == 1 else self._split_ordered)(weights, aligned, depth)
        joined = int(weights.shape[0]) == 1 and self._wastes_positions(image)
        if joined:
            parts = _join_images(parts)
        sums = self._launch(parts, left, number, self._choose_plain_blocks(parts, left, pieces), channels, dtype)
        return self._check(sums, weights, image, joined)

    def _compute_narrow(self, image: Tensor, weights: Tensor, channels: int, dtype: DType) -> Tensor:
        """The convolution of 16-bit operands: one product, cut by channels where the results are few."""
        count, outputs = int(image.shape[0]), int(weights.shape[1])
        moved = _move_narrow(image, channels)
        joined = int(weights.shape[0]) == 1 and self._wastes_positions(image)
        moved = _join_images(moved) if joined else moved
        blocks = self._choose_blocks((int(moved.shape[0]), outputs, int(moved.shape[1])), channels)
        left, pieces = self._order_taps(weights, round_up(channels, DEPTH * blocks.pieces)), blocks.pieces * blocks.cuts
        checked = self.has_missing_taps
        sums = self._launch(moved, left, 1, blocks, channels, f32 if pieces > 1 or checked else dtype)
        if checked:
            return basic.cast(self._check(sums, weights, image, joined), dtype=dtype)
        lead = (outputs, count) if joined else (count, outputs)
        parts = resize(shape.reshape(sums, shape=(pieces, *lead, *self.sizes)), (pieces, *lead, *self.counts))
        found = basic.cast(reduce.sum(parts, axis=(0,)), dtype=dtype) if pieces > 1 else shape.squeeze(parts, axis=0)
        return shape.permute(found, axes=(1, 0, *range(2, found.ndim))) if joined else found

    def _choose_blocks(self, results: tuple[int, int, int], channels: int) -> WindowBlocks:
        """The division of the contraction and the blocks of results [Z, O, P] that take the least time: the waves of
        programs, and the sum of the parts' results."""
        (count, outputs, positions), rounds = results, ceil_divide(channels, DEPTH)
        times = dict[WindowBlocks, float]()
        for rows, columns in BLOCK_RATES if self.wave_blocks else EVEN_BLOCKS:
            programs = count * ceil_divide(outputs, rows) * ceil_divide(positions, columns)
            most = max(1, BUSY_PROGRAMS // programs)
            for cuts in (n for n in range(1, self.taps[1] + 1) if self.taps[1] % n == 0 and n <= most):
                for pieces in range(1, min(rounds, most // cuts) + 1):
                    parts = pieces * cuts
                    depth = DEPTH * ceil_divide(rounds, pieces) * math.prod(self.taps) // cuts
                    sizes = count * parts, outputs, depth, positions
                    added = 8 * parts * math.prod(results) / MEMORY_RATE + LAUNCH_SECONDS if parts > 1 else 0
                    waves = estimate_waves(sizes, (rows, columns), BUSY_PROGRAMS, turned=True)
                    times[WindowBlocks(pieces, cuts, rows, columns)] = waves * STEP_SECONDS + added
        return min(times, key=times.__getitem__)

    def _choose_plain_blocks(self, image: Tensor, weights: Tensor, pieces: int) -> WindowBlocks:
        """Large blocks, of more columns where their programs fill a GPU."""
        count, positions, outputs = int(image.shape[0]), int(image.shape[1]), int(weights.shape[1])
        rows = 64 if outputs <= 64 else 128
        fills = count * ceil_divide(outputs, rows) * ceil_divide(positions, 256) >= BUSY_PROGRAMS
        return WindowBlocks(pieces, 1, rows, 256 if fills else 128)

    def _wastes_positions(self, image: Tensor) -> bool:
        """Whether blocks of positions of one image are much longer than it."""
        count, _, positions = (int(n) for n in image.shape)
        return count > 1 and round_up(positions, 128) > 1.1 * positions

    def _folds_taps(self, image: Tensor, outputs: int) -> bool:
        """Whether a contraction with the taps along the last axis as channels saves more than their copies take."""
        plain, folded = self._count_depth(image, 1), self._count_depth(image, self.taps[-1])
        count, channels, positions = (int(n) for n in image.shape)
        saved = 2 * (plain - folded) * count * outputs * positions / BF16_RATE
        written = self.taps[-1] * count * channels * positions * image.dtype.bits / 8
        return folded < 0.85 * plain and saved > written / FOLD_RATE

    def _count_depth(self, image: Tensor, folded: int) -> int:
        """The elements that the products contract, where so many taps along the last axis are channels."""
        channels = round_up(int(image.shape[1]) * folded, ALIGNMENT) * (PRODUCTS if image.dtype == f32 else 1)
        return math.prod(self.taps) // folded * round_up(channels, DEPTH)

    def _fold_last_taps(self, image: Tensor, weights: Tensor, dtype: DType) -> Tensor:
        """The convolution of few channels: the taps along the last axis are channels of a stack of shifted images."""
        last, (count, channels, positions) = self.taps[-1], image.shape
        longer = resize(image, (count, channels, positions + (last - 1) * self.steps[-1]))
        starts = [k * self.steps[-1] for k in range(last)]
        ends = [(count, channels, n + positions) for n in starts]
        shifted = [
            shape.slice_(longer, start=(0, 0, n), stop=end, step=(1, 1, 1)) for n, end in zip(starts, ends, strict=True)
        ]
        stacked = shape.concatenate(shifted, axis=1)
        groups, outputs, _, taps = weights.shape
        moved = shape.reshape(weights, shape=(groups, outputs, channels, taps // last, last))
        moved = shape.reshape(shape.permute(moved, axes=(0, 1, 4, 2, 3)), shape=(groups, outputs, -1, taps // last))
        return replace(self, taps=(*self.taps[:-1], 1), stacked=last).compute(stacked, moved, dtype)

    def _order_taps(self, weights: Tensor, depth: int) -> Tensor:
        """Weights [G, O, C, taps] as [G, O, taps · depth]."""
        groups, outputs, _, taps = weights.shape
        moved = resize(shape.permute(weights, axes=(0, 1, 3, 2)), (groups, outputs, taps, depth))
        return shape.reshape(moved, shape=(groups, outputs, taps * depth))

    def _split_ordered(self, weights: Tensor, aligned: int, depth: int) -> Tensor:
        """The parts of weights [G, O, C, taps] as [G, O, 6 · taps · depth]."""
        left = self._order_taps(weights, depth)
        parts = split_memory(shape.reshape(left, shape=(-1, 1, 1, left.shape[2])), LEFT_ORDER)
        return shape.reshape(parts, shape=(*left.shape[:2], -1))

    def _split_folded(self, weights: Tensor, aligned: int, depth: int) -> Tensor:
        """The parts of weights [G, O, C, taps] as [G, O, taps · depth], where a depth has all parts."""
        groups, outputs, _, taps = weights.shape
        left = shape.reshape(self._order_taps(weights, aligned), shape=(groups * outputs, 1, 1, taps * aligned))
        parts = shape.reshape(split_memory(left, LEFT_ORDER), shape=(groups * outputs, PRODUCTS, taps, aligned))
        parts = shape.reshape(shape.permute(parts, axes=(0, 2, 1, 3)), shape=(groups, outputs, taps, -1))
        return shape.reshape(resize(parts, (groups, outputs, taps, depth)), shape=(groups, outputs, taps * depth))

    def _launch(
        self, image: Tensor, weights: Tensor, parts: int, choice: WindowBlocks, channels: int, dtype: DType
    ) -> Tensor:
        """The sums [S · pieces · cuts, Z, O, P]: over all parts, or over some of them where the results are few."""
        (pieces, cuts, rows, columns), total = choice, choice.pieces * choice.cuts
        count, positions, outputs = int(image.shape[0]), int(image.shape[1]), int(weights.shape[1])
        programs = total * count * ceil_divide(outputs, rows) * ceil_divide(positions, columns)
        chunks = max(n for n in range(1, parts + 1) if parts % n == 0 and (n == 1 or n * programs <= BUSY_PROGRAMS))
        memory = OutputMemory(TensorType((chunks * total, count, outputs, positions), dtype))
        depth = int(weights.shape[2]) // (parts * math.prod(self.taps))
        constants = {"parts": parts // chunks, "pieces": pieces, "cuts": cuts, "taps": self.taps, "steps": self.steps}
        blocks = {"channels": channels, "depth": depth, "BM": rows, "BN": columns, "BK": DEPTH}
        grid = chunks * total * count, ceil_divide(outputs, rows), ceil_divide(positions, columns)
        return launch(multiply_windows, grid, weights, image, memory, **constants, **blocks)

    def _check(self, sums: Tensor, weights: Tensor, image: Tensor, joined: bool) -> Tensor:
        """The sums at the windows, or results in f32 where they are not finite; `joined`: of images as one list."""
        (chunks, _, outputs, _), (depth, height, width) = sums.shape, self.counts
        count, sizes = int(image.shape[0]), self.sizes
        columns = find_block_width(width)
        rows = min(CHECKED_WINDOWS // columns, 1 << (height - 1).bit_length())
        grid = count * depth, ceil_divide(int(outputs), CHECKED_OUTPUTS), ceil_divide(height, rows)
        grid = (*grid[:2], grid[2] * ceil_divide(width, columns))
        lead = (chunks, outputs, count) if joined else (chunks, count, outputs)
        sums, image = shape.reshape(sums, shape=(*lead, *sizes)), shape.reshape(image, shape=(*image.shape[:2], *sizes))
        plain = shape.reshape(weights, shape=(*weights.shape[:2], -1))
        memory = OutputMemory(TensorType((count, int(outputs), *self.counts), f32))
        constants = {
            "joined": joined,
            "taps": self.taps,
            "gaps": self.gaps,
            "phases": self.phases,
            "window": self.window,
            "stacked": self.stacked,
            "BO": CHECKED_OUTPUTS,
            "BH": rows,
            "BW": columns,
        }
        return launch(check_windows, grid, sums, plain, image, memory, **constants)


def _join_images(parts: Tensor) -> Tensor:
    """Images [Z, P, C] as one list of positions: the windows that begin in one image and end in the next are dropped
    like those that wrap around."""
    return shape.reshape(parts, shape=(1, -1, parts.shape[2]))


def find_block_width(width: int) -> int:
    """The widest block of windows, of a power of two, whose last one leaves few places empty.

    >>> find_block_width(32), find_block_width(34), find_block_width(56), find_block_width(3)
    (32, 8, 64, 4)
    """
    least = 1 << (width - 1).bit_length()
    fits = [1 << n for n in range(9) if 1 << n <= least and round_up(width, 1 << n) <= MAX_WASTE * width]
    return min(max(8, *fits), least, CHECKED_WINDOWS) if fits else min(8, least)


def fold_parts(channels: int) -> bool:
    """Whether all parts of a channel are side by side: where rounding each part to whole blocks costs more."""
    aligned = round_up(channels, ALIGNMENT)
    return PRODUCTS * round_up(aligned, DEPTH) > 1.1 * round_up(PRODUCTS * aligned, DEPTH)


def cut_channels(channels: int, taps: int) -> tuple[int, int]:
    """The pieces of the channels whose f32 sums over all taps are short, and the channels that make them even.

    >>> cut_channels(256, 9), cut_channels(1248, 9), cut_channels(64, 343)
    ((1, 256), (3, 1344), (1, 64))
    """
    blocks = ceil_divide(channels, DEPTH)
    width = max(min(blocks, MAX_DEPTH // (taps * DEPTH)), 1)
    width = ceil_divide(blocks, ceil_divide(blocks, width))
    pieces = ceil_divide(blocks, width)
    return pieces, pieces * width * DEPTH


def _move_narrow(image: Tensor, channels: int) -> Tensor:
    """An image [Z, C, P] as [Z, P, C'], with zeros after its channels: one kernel with what pads the image."""
    count, _, positions = image.shape
    return resize(shape.permute(image, axes=(0, 2, 1)), (count, positions, channels))


def _move_channels(image: Tensor, order: tuple[int, ...], aligned: int) -> Tensor:
    """The parts of an image [Z, C, P] as [Z, P, parts · C'], with C' channels; without an order the image itself."""
    count, _, positions = (int(n) for n in image.shape)
    memory = OutputMemory(TensorType((count, positions, max(len(order), 1) * aligned), bf16 if order else image.dtype))
    width = math.gcd(SPLIT_CHANNELS, aligned)
    grid = count, aligned // width, ceil_divide(positions, SPLIT_POSITIONS)
    blocks = {"BC": width, "BP": SPLIT_POSITIONS}
    return launch(split_channels, grid, image, memory, order=order, channels=aligned, **blocks)


# Which products are convolutions, and where this pays.


WINDOW_RATE, NARROW_WINDOW_RATE = 760e12, 380e12  # operations a second of products over positions; of 64 outputs
STACK_RATE = 0.5e12  # bytes a second at which stacked slices are written and read
LONGEST = 8192  # elements of a window, with as many channels as a block has: more are cut off too often by tensor cores


def match_windows(uses: UseDef, weights: Value, columns: Value, wave_blocks: bool = False) -> WindowProduct | None:
    """The product of weights and stacked windows as a convolution, or None where it is none or that does not pay."""
    found = find_windows(uses, weights, columns)
    if found is None:
        return None
    pays = estimate_positions(found) < min(estimate_gathered(found), estimate_stacked(found))
    return replace(found, wave_blocks=wave_blocks) if pays else None


def find_windows(uses: UseDef, weights: Value, columns: Value) -> WindowProduct | None:
    """The product of weights and stacked windows, or None where it is none."""
    if len(get_shape(weights)) != 4 or not all(isinstance(n, int) for n in (*get_shape(weights), *get_shape(columns))):
        return None
    windows = find_stacked_windows(uses, columns)
    repeated = uses.find(weights, basic.broadcast_to)
    weights = repeated.args[0] if repeated is not None else weights
    batch, groups, _, positions = get_shape(columns)
    outputs = get_shape(weights)[-2]
    if windows is None or get_shape(weights)[:2] != (1, groups) or get_shape(windows.image)[0] != batch:
        return None
    narrow = {find_narrow_type(uses, v) for v in (windows.image, weights)}
    if None in narrow and len(narrow) > 1:
        return None  # one narrow operand: cheaper than six products
    result, kind = (batch, groups, outputs, positions), next(iter(narrow)) if len(narrow) == 1 else None
    return WindowProduct(windows, weights, int(groups), result, kind)  # type: ignore[arg-type]


def find_stacked_windows(uses: UseDef, columns: Value) -> StackedWindows | None:
    """The windows of an image that are the columns [B, G, C · taps, positions] of a product, or None."""
    held = uses.find(columns, shape.reshape)
    return _match_stack(uses, held.args[0]) if held is not None else None


def _match_stack(uses: UseDef, stacked: Value) -> StackedWindows | None:
    """Stacked slices [B, C, taps, counts] as windows."""
    node = uses.find(stacked, shape.concatenate)
    if node is None or node.attrs["axis"] % len(get_shape(stacked)) != 2:
        return None
    slices = find_stacked_slices(uses.find, node.args, 2)
    if slices is None:
        return None
    first, starts = slices[0], [tuple(s.attrs["start"]) for s in slices]
    if any(s[:2] != (0, 0) for s in starts) or tuple(first.attrs["step"])[:2] != (1, 1):
        return None
    axes = [sorted({s[a] for s in starts}) for a in range(2, len(starts[0]))]
    gaps = [{y - x for x, y in itertools.pairwise(places)} for places in axes]
    whole = [(0, 0, *place) for place in itertools.product(*axes)] == starts and len(axes) <= AXES
    if not whole or any(len(g) > 1 for g in gaps) or any(places[0] for places in axes):
        return None
    counts = tuple(int(n) for n in get_shape(first.out)[2:])
    dilations = tuple(next(iter(g), 1) for g in gaps)
    return StackedWindows(first.args[0], tuple(map(len, axes)), dilations, tuple(first.attrs["step"])[2:], counts)


def estimate_positions(product: WindowProduct) -> float:
    """The seconds of a convolution over positions; infinite where it is none."""
    strided = max(product.windows.strides) > 1 and max(product.windows.dilations) > 1
    windows = product.windows
    if strided or math.prod(_fold_taps(windows)) * DEPTH > LONGEST:
        return math.inf
    f32_parts = get_tensor_type(product.weights).dtype == f32 and product.narrow is None
    (batch, channels, *_), phases = get_shape(windows.image), math.prod(windows.strides)
    sizes = [c + t - 1 for c, t in zip(windows.counts, _fold_taps(windows), strict=True)]
    positions = int(batch) * math.prod(sizes)
    if phases == 1:
        positions = math.prod(int(n) for n in get_shape(windows.image)) // int(channels)
    taps = _fold_taps(windows)
    deep, number = int(channels) // product.groups * phases, PRODUCTS if f32_parts else 1
    held = {n: math.prod(taps) // n * round_up(number * deep * n, DEPTH) for n in (1, taps[-1])}
    folded = taps[-1] if held[taps[-1]] < 0.85 * held[1] else 1  # taps along the last axis that become channels
    outputs, rows = int(product.result[1] * product.result[2]), round_up(product.result[2], LEAST_ROWS)
    summed = held[folded] if fold_parts(deep * folded) else held[folded] // PRODUCTS
    pieces = ceil_divide(summed, MAX_DEPTH) if f32_parts else 1
    each = (18, 4 + 8 * pieces) if f32_parts else (6, 6)  # bytes of a channel and of an output of a position
    moved = positions * (int(channels) * phases * folded * each[0] + outputs * each[1])
    rate = WINDOW_RATE if rows > LEAST_ROWS else NARROW_WINDOW_RATE
    computed = 2 * positions * product.groups * rows * held[folded]
    return computed / rate + moved / MEMORY_RATE + 5 * LAUNCH_SECONDS


# Operations a second where windows are gathered: f32 by the rows of a block, and 16 bits.
GATHERED_RATES, GATHERED_NARROW_RATE = {16: 11e12, 32: 17e12, 64: 21e12}, 80e12
SPLIT_RATE, LARGE = 100e12, 256  # of f32 products in parts, whose rows, columns and depth are large
LEAST_GATHERED_ROWS = 16


def estimate_gathered(product: WindowProduct) -> float:
    """The seconds of a direct convolution."""
    batch, groups, outputs, positions = product.result
    rows = min(LEAST_ROWS, max(LEAST_GATHERED_ROWS, 1 << (outputs - 1).bit_length()))
    whole = batch * groups * round_up(outputs, rows) * positions * int(get_shape(product.weights)[-1])
    wide = get_tensor_type(product.weights).dtype == f32 and product.narrow is None
    return 2 * whole / (GATHERED_RATES[rows] if wide else GATHERED_NARROW_RATE) + 2 * LAUNCH_SECONDS


def estimate_stacked(product: WindowProduct) -> float:
    """The seconds of a product of windows in memory, which are written tap by tap."""
    windows, window = product.windows, int(get_shape(product.weights)[-1])
    wide = get_tensor_type(product.weights).dtype == f32 and product.narrow is None
    batch, channels, *_ = get_shape(windows.image)
    taps = math.prod(windows.taps)
    held = int(batch) * int(channels) * taps * math.prod(windows.counts) * (4 if wide else 2)
    large = min(product.result[2], product.result[3], window) >= LARGE
    rate = BF16_RATE if not wide else SPLIT_RATE if large else F32_RATE
    return 2 * math.prod(product.result) * window / rate + held / STACK_RATE + (taps + 1) * LAUNCH_SECONDS

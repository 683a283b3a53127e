"""Indirect convolution: products whose windows are read in place, through tables of offsets (Dukhan 2019).

Element (k, p) of a matrix of windows is element `places[p] + depths[k]` of the padded image: a window begins at its
place, and its element k lies at a depth that is the same in all windows. So windows are neither written nor packed.

Two forms differ in what the lanes of a register hold. *Outputs*: weights are packed once, an element of the image is
broadcast, and windows may lie anywhere. *Places*: a row of the matrix is a line of the image, which must be contiguous.
Windows with strides are such lines of the phases of the image, and the ends of rows, which are no windows, are computed
and dropped (Anderson et al. 2017). It takes any number of outputs without empty lanes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tessera.core.symbolic_dim import ceil_divide, round_up
from tessera.core.types import TensorType, int64
from tessera.frontend.kernel import kernel
from tessera.frontend.kernel.graph_launch import OutputMemory, launch
from tessera.frontend.kernel.tile_api import tile
from tessera.ir.core import Value
from tessera.ir.rewrite import UseDef
from tessera.ir.tensor import Tensor
from tessera.lower.indexing_maps import get_shape
from tessera.ops.tensor import basic, elementwise, shape
from tessera.stdlib.convolution import AXES, WindowProduct, find_windows, move_phases, resize
from tessera.stdlib.gemm import zero_accumulator

# mypy: disable-error-code="operator, attr-defined, index"


@kernel
def pack_weights(weights, out, *, BK):
    """out [G, blocks of O, K, BO] = weights [G, O, K], zeros after the last output, on the grid (G, blocks of O, blocks
    of K)."""
    g, o, k = tile.program_id(0), tile.program_id(1) * out.shape[3], tile.program_id(2) * BK
    rows = tile.load(weights[g, o : o + out.shape[3], k : k + BK], edge="clip")
    tile.store(out[g, tile.program_id(1), k : k + BK, :], tile.transpose(rows), edge="clip")


@kernel
def multiply_windows(image, weights, depths, out, *, windows, BP, BK):
    """out [B · G, O, P] = the products of the windows of image [elements] and of weights [G, blocks of O, K, BO], on
    the grid (B · G, blocks of P, blocks of O); with channels last, out [P, G, O] on (G, blocks of P, blocks of O)."""
    z, p, block = tile.program_id(0), tile.program_id(1) * BP, tile.program_id(2)
    group, window, o = z % weights.shape[0], weights.shape[2], block * weights.shape[3]
    first = find_places(p, windows, BP) + z // weights.shape[0] * windows["image"] + group * windows["group"]
    rest = count_first(window, BK)
    total = zero_accumulator(weights, (BP, weights.shape[3]))
    if rest:
        total = multiply_elements(image, weights, depths, group, first, block, 0, rest)
    for k in tile.range(rest, window, BK):
        total = total + multiply_elements(image, weights, depths, group, first, block, k, BK)
    if windows["channels_last"]:
        tile.store(out[p : p + BP, group, o : o + weights.shape[3]], total, edge="clip")
    else:
        tile.store(out[z, o : o + weights.shape[3], p : p + BP], tile.transpose(total), edge="clip")


def count_first(depth, chunk):
    """The elements of a contraction before those of a loop over whole chunks; 0 where the loop has all of them."""
    return depth % chunk if depth % chunk else depth if depth == chunk else 0


def find_places(p, windows, BP):
    """Where the windows p to p + BP begin; those after the last one begin where the first one does."""
    counts, moves = windows["counts"], windows["moves"]
    places = tile.cast(p + tile.arange(0, BP), "int32")
    places = tile.where(places < counts[0] * counts[1] * counts[2] * counts[3], places, 0)
    row = places // counts[3]
    plane = row // counts[2]
    first = plane // counts[1] * moves[0] + plane % counts[1] * moves[1] + row % counts[2] * moves[2]
    return tile.cast(first + places % counts[3] * moves[3], "int64")


def multiply_elements(image, weights, depths, group, first, block, k, BK):
    """The products of elements k to k + BK of windows."""
    seen = tile.load(image[first[:, None] + depths[k : k + BK][None, :]])
    return tile.dot(seen, weights[group, block, k : k + BK, :])


@kernel
def multiply_lines(image, weights, depths, out, *, group_size, BO, BP, BK):
    """out [B · G, O, P] = weights [G, O, K] times the lines of image [B, elements] that begin at `depths`, on the grid
    (B · G, blocks of P, blocks of O)."""
    z, p, o = tile.program_id(0), tile.program_id(1) * BP, tile.program_id(2) * BO
    group, window = z % weights.shape[0], weights.shape[2]
    first = tile.arange(0, BP) + (p + group * group_size)
    image_number, rest = z // weights.shape[0], count_first(window, BK)
    total = zero_accumulator(weights, (BO, BP))
    if rest:
        total = multiply_rows(image, weights, depths, image_number, group, first, o, 0, BO, rest)
    for k in tile.range(rest, window, BK):
        total = total + multiply_rows(image, weights, depths, image_number, group, first, o, k, BO, BK)
    tile.store(out[z, o : o + BO, p : p + BP], total, edge="clip")


def multiply_rows(image, weights, depths, z, group, first, o, k, BO, BK):
    """The products of the lines k to k + BK."""
    seen = tile.load(image[z, depths[k : k + BK][:, None] + first[None, :]])
    return tile.dot(tile.load(weights[group, o : o + BO, k : k + BK], edge="clip"), seen)


MOST_INDEXED = 1 << 30  # elements of an image, whose places have 32 bits
SET_STRIDE = 512  # bytes: places at multiples of it share sets of the first cache
LANES = 16  # outputs or places of a register
DEEP = 256  # elements of windows that a program contracts in a row: a panel of weights fits the first cache
ROUND = 4  # of them that a round of a loop contracts
MOST_PLACES, LEAST_PLACES = 196, 56  # windows of a program
ROWS = 14  # of a register tile
LONGEST_LINE, SHORTEST_LINE = 240, 96  # places of a line of a program
OUTPUT_BLOCKS = {32: 32, 16: 18, 8: 15}  # outputs of a program, and their cost in lanes: narrow tiles wait for loads
BROADCAST = 1.04  # the cost of a multiply-add with lanes of outputs, relative to one with lanes of places
PACK = 40  # the cost of an element of packed weights, in multiply-adds
MOVE = 100  # the cost of an element of an image that is moved to a phase, in multiply-adds
DROP = 10  # the cost of a result that is copied from between those that are dropped, in multiply-adds
MOST_OUTPUTS = 72  # rows of weights of a program


@dataclass(frozen=True)
class ChannelsLast:
    """The source [B, sizes, C] of an image, and what is added before and after each of its axes."""

    source: Value
    low: tuple[int, ...]
    high: tuple[int, ...]
    value: float

    def pad(self, source: Tensor) -> Tensor:
        """The image [B, sizes, C'], whose places are not at a stride that maps them to few sets of a cache."""
        more = LANES if (int(source.shape[-1]) * source.dtype.bits // 8) % SET_STRIDE == 0 else 0
        high = (*self.high[:-1], self.high[-1] + more)
        return shape.pad(source, low=self.low, high=high, value=self.value) if any((*self.low, *high)) else source


@dataclass(frozen=True)
class IndirectConvolution:
    """A product of weights and windows that are read in place."""

    product: WindowProduct
    moved: ChannelsLast | None  # what the image is made of, where its channels are last in memory

    @property
    def operands(self) -> tuple[Value, Value]:
        """The image, or what it is made of, and the weights."""
        return (self.moved.source if self.moved else self.product.windows.image), self.product.weights

    @cached_property
    def taps(self) -> tuple[int, ...]:
        """The taps along three axes."""
        return self._extend(self.product.windows.taps)

    @cached_property
    def gaps(self) -> tuple[int, ...]:
        """The elements of the image from one tap to the next."""
        return self._extend(self.product.windows.dilations)

    @cached_property
    def strides(self) -> tuple[int, ...]:
        """The elements of the image from one window to the next."""
        return self._extend(self.product.windows.strides)

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """The windows along three axes."""
        return self._extend(self.product.windows.counts)

    @property
    def window(self) -> int:
        """The elements of a window, with all channels."""
        return int(get_shape(self.product.weights)[-1])

    @property
    def channels(self) -> int:
        """The channels of a window."""
        return self.window // math.prod(self.taps)

    def _extend(self, sizes: Sequence[int]) -> tuple[int, ...]:
        return (1,) * (AXES - len(sizes)) + tuple(sizes)

    def compute(self, image: Tensor, weights: Tensor) -> Tensor:
        """The product, as [B, G, O, positions]."""
        _, groups, outputs, _ = self.product.result
        weights = shape.reshape(weights, shape=(groups, outputs, self.window))
        if self.moved is not None:
            return self._multiply_channels_last(self.moved.pad(image), weights)
        image = shape.reshape(image, shape=(*image.shape[:2], *self._extend([int(n) for n in image.shape[2:]])))
        made = self._multiply_lines(image, weights) if self.has_lines() else self._multiply_windows(image, weights)
        return shape.reshape(made, shape=self.product.result)

    def has_lines(self) -> bool:
        """Whether lanes hold places."""
        return self.estimate_lines() < self.estimate_windows()

    # Lanes hold outputs.

    @cached_property
    def output_block(self) -> int:
        """The outputs of a program."""
        return min(OUTPUT_BLOCKS, key=self._estimate_outputs)

    def _estimate_outputs(self, size: int) -> int:
        """The cost of all outputs in blocks of a size, in lanes."""
        return int(ceil_divide(self.product.result[2], size)) * OUTPUT_BLOCKS[size]

    def estimate_windows(self) -> float:
        """The multiply-adds of a group of an image, with those of empty lanes, and for its part of packed weights."""
        batch, _, outputs, _ = self.product.result
        multiplied = self.window * self._estimate_outputs(self.output_block) * math.prod(self.counts)
        return BROADCAST * multiplied + PACK * self.window * outputs / batch

    def _multiply_channels_last(self, image: Tensor, weights: Tensor) -> Tensor:
        """The product, as [B, G, O, positions], of an image [B, sizes, C]."""
        batch, groups, outputs, _ = self.product.result
        *found, channels = (int(n) for n in image.shape[1:])
        sizes = self._extend(found)
        steps = 1, sizes[1] * sizes[2] * channels, sizes[2] * channels, channels
        made = self._multiply(image, weights, steps, (batch, *self.counts))
        counts = self.product.windows.counts
        made = shape.reshape(made, shape=(batch, *counts, groups * outputs))
        made = shape.permute(made, axes=(0, len(counts) + 1, *range(1, len(counts) + 1)))
        return shape.reshape(made, shape=self.product.result)

    def _multiply_windows(self, image: Tensor, weights: Tensor) -> Tensor:
        sizes = tuple(int(n) for n in image.shape[2:])
        return self._multiply(image, weights, (math.prod(sizes), sizes[1] * sizes[2], sizes[2], 1), (1, *self.counts))

    def _multiply(self, image: Tensor, weights: Tensor, steps: Sequence[int], counts: Sequence[int]) -> Tensor:
        """The product, for the steps in memory from one channel and from one element along each axis to the next, and
        the windows that a program takes as one list: of all images, or of each."""
        batch, groups, outputs, positions = self.product.result
        whole, size, channels_last = math.prod(counts), math.prod(image.shape[1:]), self.moved is not None
        moves = size, *(a * b for a, b in zip(self.strides, steps[1:], strict=True))
        places, deep = choose_places(whole), divide_depth(self.window)
        weights = pack_rows(weights, self.output_block)
        depths = self.find_window_depths(steps)
        made = (whole, groups, outputs) if channels_last else (batch * groups, outputs, positions)
        windows = {"counts": tuple(counts), "moves": moves, "image": size, "group": self.channels * steps[0]}
        windows["channels_last"] = channels_last
        grid = groups if channels_last else batch * groups, ceil_divide(whole, places), weights.shape[1]
        memory, image = OutputMemory(TensorType(made, image.dtype)), shape.reshape(image, shape=(-1,))
        return launch(multiply_windows, grid, image, weights, depths, memory, windows=windows, BP=places, BK=deep)

    def find_window_depths(self, steps: Sequence[int]) -> Tensor:
        """Where the elements of a window of an image with these steps lie after its first one."""
        return self._find_depths(steps, [range(0, t * g, g) for t, g in zip(self.taps, self.gaps, strict=True)])

    def _find_depths(self, steps: Sequence[int], offsets: Sequence[Sequence[int]]) -> Tensor:
        """Where the elements of a window lie after its first one, for steps of channels and offsets of taps."""
        number = shape.iota(shape=(self.window,), axis=0, dtype=int64)
        total: Any = number // math.prod(self.taps) * steps[0]
        for axis, places in enumerate(offsets):
            tap = number // math.prod(self.taps[axis + 1 :]) % self.taps[axis]
            total = total + _select(tap, [n * steps[axis + 1] for n in places])
        return total  # type: ignore[no-any-return]

    # Lanes hold places.

    @cached_property
    def line(self) -> tuple[int, ...]:
        """The sizes of a phase of the image: windows are some of its places."""
        last = [(t - 1) * g // s for t, g, s in zip(self.taps, self.gaps, self.strides, strict=True)]
        return tuple(c + n for c, n in zip(self.counts, last, strict=True))

    @property
    def reach(self) -> int:
        """The places from the first window to the last."""
        return sum((c - 1) * math.prod(self.line[a + 1 :]) for a, c in enumerate(self.counts)) + 1

    def estimate_lines(self) -> float:
        """The multiply-adds of a group of an image, with those of places that are no windows, and for its copies."""
        block, outputs = choose_line(self.reach), self.product.result[2]
        multiplied = self.window * max(outputs, 2) * block * int(ceil_divide(self.reach, block))
        phases, dropped = math.prod(self.strides), self.line != self.counts
        moved = MOVE * self.channels * phases * math.prod(self.line) if phases > 1 else 0
        return multiplied + moved + (DROP * outputs * math.prod(self.counts) if dropped else 0)

    def _multiply_lines(self, image: Tensor, weights: Tensor) -> Tensor:
        batch, groups, outputs, _ = self.product.result
        block = choose_line(self.reach)
        number = ceil_divide(self.reach, block)
        image, plane = self._split_phases(image, number * block - self.reach)
        depths = self._find_line_depths(plane)
        rows = ceil_divide(outputs, ceil_divide(outputs, MOST_OUTPUTS))
        held = math.prod(self.line)
        memory = OutputMemory(TensorType((batch * groups, outputs, held), image.dtype))
        image = shape.reshape(image, shape=(batch, -1))
        grid = batch * groups, number, ceil_divide(outputs, rows)
        size = self.channels * math.prod(self.strides) * plane
        blocks = {"BO": rows, "BP": block, "BK": divide_depth(self.window)}
        sums = launch(multiply_lines, grid, image, weights, depths, memory, group_size=size, **blocks)
        lead = batch * groups, outputs
        return resize(shape.reshape(sums, shape=(*lead, *self.line)), (*lead, *self.counts))

    def _split_phases(self, image: Tensor, more: int) -> tuple[Tensor, int]:
        """The image [B, C · phases, …] with `more` places at the end of each phase, and the places of a phase."""
        axis = next(a for a in range(AXES) if a == AXES - 1 or self.line[a] > 1)
        sizes = list(self.line)
        sizes[axis] += int(ceil_divide(more, math.prod(sizes[axis + 1 :])))
        wanted = [n * s for n, s in zip(sizes, self.strides, strict=True)]
        image = resize(image, (*image.shape[:2], *wanted))
        if max(self.strides) > 1:  # what is padded has no masks, so that its phases are shuffles, not gathers
            image = move_phases(basic.fusion_barrier(image), self.strides)
        return image, math.prod(sizes)

    def _find_line_depths(self, plane: int) -> Tensor:
        """Where the lines of a window's elements begin."""
        steps = plane * math.prod(self.strides), self.line[1] * self.line[2], self.line[2], 1
        offsets = []
        for axis, (count, gap, stride) in enumerate(zip(self.taps, self.gaps, self.strides, strict=True)):
            phase = plane * math.prod(self.strides[axis + 1 :])
            offsets.append([n * gap // stride * steps[axis + 1] + n * gap % stride * phase for n in range(count)])
        return self._find_depths((steps[0], 1, 1, 1), offsets)


def pack_rows(rows: Tensor, block: int) -> Tensor:
    """Matrices [G, O, K] as [G, blocks of O, K, outputs of a block]."""
    count, outputs, depth = rows.shape
    blocks = ceil_divide(outputs, block)
    packed = OutputMemory(TensorType((count, blocks, depth, block), rows.dtype))
    return launch(pack_weights, (count, blocks, ceil_divide(depth, 64)), rows, packed, BK=64)  # type: ignore[no-any-return]


def _select(number: Tensor, values: Sequence[int]) -> Tensor:
    """values[number], for a number within bounds."""
    step = values[1] - values[0] if len(values) > 1 else 0
    if list(values) == [n * step for n in range(len(values))]:
        return number * step  # type: ignore[no-any-return]
    total: Any = number * 0
    for place, value in enumerate(values):
        total = total + elementwise.where(elementwise.equal(number, place), value, 0)
    return total  # type: ignore[no-any-return]


def divide_depth(depth: int) -> int:
    """The elements that a program contracts in a row: a divisor of their number and whole rounds, if there is one."""
    least, most = DEEP // 2, DEEP * 5 // 4
    if depth <= most:
        return depth
    return next((n for n in range(most, least, -1) if depth % n == 0 and n % ROUND == 0), DEEP)


def choose_places(positions: int) -> int:
    """The windows of a program, whose register tiles have 14 rows, for the least empty rows."""

    def estimate_cost(size: int) -> int:
        whole, rest = divmod(size, ROWS)
        return int(ceil_divide(positions, size)) * (whole * ROWS + (max(8, rest) if rest else 0) + 3)

    return min(range(min(positions, LEAST_PLACES), min(positions, MOST_PLACES) + 1), key=estimate_cost)


def choose_line(reach: int) -> int:
    """The places of a line of a program, in whole registers, for the fewest after the last."""
    sizes = range(min(SHORTEST_LINE, round_up(reach, LANES)), min(LONGEST_LINE, round_up(reach, LANES)) + 1, LANES)
    return min(sizes, key=lambda size: ceil_divide(reach, size) * (size + 2))


def match_indirect(uses: UseDef, weights: Value, columns: Value) -> IndirectConvolution | None:
    """The product of weights and stacked windows as an indirect convolution, or None where it is none."""
    found = find_windows(uses, weights, columns)
    if found is None or 0 in (*found.result, get_shape(found.weights)[-1]):
        return None
    if math.prod(map(int, get_shape(found.windows.image))) >= MOST_INDEXED:
        return None
    return IndirectConvolution(found, _find_channels_last(uses, found.windows.image))


def _find_channels_last(uses: UseDef, image: Value) -> ChannelsLast | None:
    """What an image is made of that is permuted, then perhaps padded, from one with channels last; or None."""
    padded = uses.find(image, shape.pad)
    turned = uses.find(image if padded is None else padded.args[0], shape.permute)
    rank = len(get_shape(image))
    if turned is None or tuple(turned.attrs["axes"]) != (0, rank - 1, *range(1, rank - 1)):
        return None
    if padded is None:
        return ChannelsLast(turned.args[0], (0,) * rank, (0,) * rank, 0)
    low, high = (tuple(padded.attrs[n]) for n in ("low", "high"))
    return ChannelsLast(
        turned.args[0], (low[0], *low[2:], low[1]), (high[0], *high[2:], high[1]), padded.attrs["value"]
    )

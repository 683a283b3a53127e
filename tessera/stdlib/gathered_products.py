"""Gathered products: f32 convolutions on tensor cores, whose windows are gathered and split into bf16 in registers.

A program multiplies the windows of a block of results by a block of weights. Each thread gathers the elements of its
windows by index, from a table of where windows begin and one of the steps within a window, and splits them into the
register operand of warpgroup products (an implicit GEMM of CUTLASS's mixed-input kind). The weights alone are split in
memory. So the image is read as it is, with any strides, gaps and groups, and results are written once. Where one is not
finite, its block is computed again in f32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from tessera.core.symbolic_dim import ceil_divide, round_up
from tessera.core.types import TensorType, f32, int32
from tessera.frontend.kernel import kernel
from tessera.frontend.kernel.graph_launch import OutputMemory, launch
from tessera.frontend.kernel.tile_api import tile
from tessera.ir.core import Value
from tessera.ir.rewrite import UseDef
from tessera.ir.tensor import Tensor
from tessera.lower.indexing_maps import get_shape, get_tensor_type
from tessera.ops.tensor import shape
from tessera.stdlib.convolution import (
    AXES,
    LONGEST,
    WindowProduct,
    estimate_gathered,
    estimate_positions,
    estimate_stacked,
    find_windows,
)
from tessera.stdlib.split_products import (
    BUSY_PROGRAMS,
    HIGH,
    LAUNCH_SECONDS,
    LOW,
    MAX_DEPTH,
    MEMORY_RATE,
    MIDDLE,
    has_nonfinite,
    join_sums,
    split_memory,
    split_number,
)
from tessera.stdlib.thin_products import PARTS, ROUND, ROWS, add_products

# mypy: disable-error-code="operator, attr-defined, index"

COLUMNS = (16, 32, 64, 128)  # of a block of weights
AHEAD_COLUMNS = 64  # beside so many the registers hold a second block of windows
TAILS = (16, 32)  # elements of a shorter round
TABLE_BLOCK = 1024  # entries of the tables that a program computes
MOST_CHUNKS = 16  # of a window, whose products are added up apart
CHECKED_POSITIONS, CHECKED_OUTPUTS = 128, 16  # the block of results that a program checks
MOST_INDEXED = 1 << 31  # elements of an image, whose indices have 32 bits
# Seconds of a round of a block by its columns, and of a program's start and end.
ROUND_SECONDS = {16: 1.3e-6, 32: 1.36e-6, 64: 1.7e-6, 128: 3.8e-6}
PROGRAM_SECONDS = {16: 2.4e-6, 32: 2.9e-6, 64: 3.7e-6, 128: 3.7e-6}


@kernel
def index_windows(starts, steps, *, taps, gaps, strides, sizes, counts, window, BT):
    """starts [P] = where each window begins in an image, and steps [K] the distances of its elements, 0 after them."""
    place = tile.cast(tile.program_id(0) * BT + tile.arange(0, BT), "int32")
    plane = place // counts[2]
    first = (plane // counts[1] * strides[0] * sizes[1] + plane % counts[1] * strides[1]) * sizes[2]
    first = first + place % counts[2] * strides[2]
    tile.store(starts[tile.program_id(0) * BT : tile.program_id(0) * BT + BT], first, edge="clip")
    line = place // taps[2]
    plane = line // (taps[0] * taps[1]) * sizes[0] + line // taps[1] % taps[0] * gaps[0]
    step = (plane * sizes[1] + line % taps[1] * gaps[1]) * sizes[2] + place % taps[2] * gaps[2]
    step = tile.where(place < window, step, 0)
    tile.store(steps[tile.program_id(0) * BT : tile.program_id(0) * BT + BT], step, edge="clip")


def gather_windows(image, z, first, steps, k, inside, BP, BK):
    """A block of windows that begin at `first`: their elements from k on, where these are inside."""
    if inside is True:
        return tile.load(image[z, first[:, None] + tile.load(steps[k : k + BK])[None, :]])
    places = first[:, None] + tile.load(steps[k : k + BK], edge="clip")[None, :]
    return tile.load(image[z, places], mask=tile.broadcast(inside, (BP, BK)))


def load_weights(parts, group, o, k, BO, BK):
    """The parts of a block of weights, transposed."""
    front = tile.transpose(tile.load(parts[HIGH, group, o : o + BO, k : k + BK], edge="clip"))
    second = tile.transpose(tile.load(parts[MIDDLE, group, o : o + BO, k : k + BK], edge="clip"))
    last = tile.transpose(tile.load(parts[LOW, group, o : o + BO, k : k + BK], edge="clip"))
    return front, second, last


def convolve_in_f32(total, image, weights, first, steps, z, o, wrong, window):
    """A block of results [P, O], or where it is not finite the sums of the products of all elements in f32."""
    total, group = tile.where(wrong, 0.0, total), z % weights.shape[0]
    for k in tile.range(0, tile.where(wrong, window, 0), 1):
        seen = tile.load(image[z, first + tile.load(steps[k : k + 1])])
        weight = tile.load(weights[group, o : o + total.shape[1], k : k + 1], edge="clip")
        total = total + seen[:, None] * tile.reshape(weight, (1, total.shape[1]))
    return total


@kernel
def multiply_gathered(image, weights, starts, steps, parts, out, *, window, depth, tail, ahead, BP, BO, BK):
    """out [S, Z, O, P] = for each s the products of weights [G, O, window] and of the windows of an image [Z, L], over
    the elements s · depth to (s + 1) · depth, and then `tail` more if there is one chunk.

    On the grid (S · Z, blocks of P, blocks of O). `starts` and `steps` say where the elements of a window are; `parts`
    [3, G, O, K] are the bf16 parts of the weights, 0 after the window. With `ahead` the block of the next round is
    gathered while tensor cores multiply. One chunk that is not finite is computed again in f32.
    """
    chunk, z = tile.program_id(0) // out.shape[1], tile.program_id(0) % out.shape[1]
    p, o = tile.program_id(1) * BP, tile.program_id(2) * BO
    group, begin = z % weights.shape[0], chunk * depth
    first = tile.load(starts[p : p + BP], edge="clip")
    total, rest = tile.zeros((BP, BO), "f32"), tile.zeros((BP, BO), "f32")
    if depth > 0:
        block = gather_windows(image, z, first, steps, begin, True, BP, BK)
        for k in tile.range(begin, begin + depth, BK):
            if ahead:
                following = gather_windows(image, z, first, steps, k + BK, k + BK < begin + depth, BP, BK)
            else:
                block = gather_windows(image, z, first, steps, k, True, BP, BK)
            total, rest = add_products(total, rest, split_number(block), load_weights(parts, group, o, k, BO, BK))
            if ahead:
                block = following
    if tail > 0:
        for k in tile.range(depth, depth + tail, tail):
            left = split_number(gather_windows(image, z, first, steps, k, True, BP, tail))
            total, rest = add_products(total, rest, left, load_weights(parts, group, o, k, BO, tail))
    total = total + rest
    if out.shape[0] == 1:
        total = convolve_in_f32(total, image, weights, first, steps, z, o, has_nonfinite(total), window)
    tile.store(out[chunk, z, o : o + BO, p : p + BP], tile.transpose(total), edge="clip")


@kernel
def add_gathered(sums, image, weights, starts, steps, out, *, window, BP, BO):
    """out [Z, O, P] = the sum of sums [S, Z, O, P], or the convolution in f32 where that is not finite.

    On the grid (Z, blocks of P, blocks of O), for the other operands of `multiply_gathered`.
    """
    z, p, o = tile.program_id(0), tile.program_id(1) * BP, tile.program_id(2) * BO
    total = tile.load(sums[0, z, o : o + BO, p : p + BP], edge="clip")
    for part in tile.static_range(1, sums.shape[0]):
        total = total + tile.load(sums[part, z, o : o + BO, p : p + BP], edge="clip")
    first, wrong = tile.load(starts[p : p + BP], edge="clip"), has_nonfinite(total)
    total = convolve_in_f32(tile.transpose(total), image, weights, first, steps, z, o, wrong, window)
    tile.store(out[z, o : o + BO, p : p + BP], tile.transpose(total), edge="clip")


@dataclass(frozen=True)
class GatheredProduct:
    """A product of f32 weights and windows that are gathered and split in registers, cut into chunks."""

    product: WindowProduct
    columns: int  # outputs of a block
    chunks: int

    @property
    def window(self) -> int:
        """The elements of a window."""
        return int(get_shape(self.product.weights)[-1])

    @property
    def tail(self) -> int:
        """The elements of a shorter round at the end."""
        left = self.window % ROUND
        return next((n for n in TAILS if n >= left), 0) if self.chunks == 1 and left else 0

    @property
    def depth(self) -> int:
        """The elements of a chunk, in whole rounds."""
        if self.tail:
            return self.window // ROUND * ROUND
        return round_up(ceil_divide(self.window, self.chunks), ROUND)

    def compute(self, image: Tensor, weights: Tensor) -> Tensor:
        """The product, as [B, G, O, positions]."""
        windows, (batch, groups, outputs, positions) = self.product.windows, self.product.result
        missing = (1,) * (AXES - len(windows.taps))
        sizes = missing + tuple(int(n) for n in image.shape[2:])
        taps, whole = missing + windows.taps, self.chunks * self.depth + self.tail
        image = shape.reshape(image, shape=(batch * groups, self.window // math.prod(taps) * math.prod(sizes)))
        weights = shape.reshape(weights, shape=(groups, outputs, self.window))
        wide = shape.pad(weights, low=(0, 0, 0), high=(0, 0, whole - self.window), value=0)
        parts = split_memory(shape.reshape(wide, shape=(1, 1, groups * outputs, whole)), PARTS)
        parts = shape.reshape(parts, shape=(len(PARTS), groups, outputs, whole))
        constants = {"taps": taps, "gaps": missing + windows.dilations, "sizes": sizes, "window": self.window}
        constants |= {"strides": missing + windows.strides, "counts": missing + windows.counts}
        tables = [OutputMemory(TensorType((n,), int32)) for n in (positions, whole)]
        entries = ceil_divide(max(positions, whole), TABLE_BLOCK)
        starts, steps = launch(index_windows, (entries,), *tables, **constants, BT=TABLE_BLOCK)
        lead, blocks = batch * groups, (ceil_divide(positions, ROWS), ceil_divide(outputs, self.columns))
        memory = OutputMemory(TensorType((self.chunks, lead, outputs, positions), f32))
        numbers = {
            "depth": self.depth,
            "tail": self.tail,
            "ahead": self.columns <= AHEAD_COLUMNS,
            "BP": ROWS,
            "BO": self.columns,
            "BK": ROUND,
        }
        grid = self.chunks * lead, *blocks
        out = launch(
            multiply_gathered, grid, image, weights, starts, steps, parts, memory, window=self.window, **numbers
        )
        if self.chunks > 1:
            blocks = (ceil_divide(positions, CHECKED_POSITIONS), ceil_divide(outputs, CHECKED_OUTPUTS))
            memory = OutputMemory(TensorType((lead, outputs, positions), f32))
            numbers = {"window": self.window, "BP": CHECKED_POSITIONS, "BO": CHECKED_OUTPUTS}
            sums = join_sums(out)
            out = launch(add_gathered, (lead, *blocks), sums, image, weights, starts, steps, memory, **numbers)
        return shape.reshape(out, shape=self.product.result)

    def estimate_seconds(self) -> float:
        """The time of all launches: waves of programs, or what they read and write."""
        batch, groups, outputs, positions = self.product.result
        programs = self.chunks * batch * groups * ceil_divide(positions, ROWS) * ceil_divide(outputs, self.columns)
        rounds = self.depth / ROUND + self.tail / ROUND
        busy = ceil_divide(programs, BUSY_PROGRAMS) * (
            rounds * ROUND_SECONDS[self.columns] + PROGRAM_SECONDS[self.columns]
        )
        stored = math.prod(self.product.result) * (1 if self.chunks == 1 else 2 * self.chunks + 1)
        moved = math.prod(map(int, get_shape(self.product.windows.image))) + stored
        return max(busy, 4 * moved / MEMORY_RATE) + (3 + (self.chunks > 1)) * LAUNCH_SECONDS


def match_gathered(uses: UseDef, weights: Value, columns: Value) -> GatheredProduct | None:
    """The product of f32 weights and stacked windows as a gathered one, or None where another way takes less time."""
    found = find_windows(uses, weights, columns)
    if found is None or found.narrow is not None or get_tensor_type(found.weights).dtype != f32:
        return None
    window = int(get_shape(found.weights)[-1])
    if 0 in (*found.result, window) or window > LONGEST:
        return None
    if math.prod(map(int, get_shape(found.windows.image)[1:])) >= MOST_INDEXED:
        return None
    gathered = min(_list_choices(found), key=GatheredProduct.estimate_seconds)
    others = min(estimate_gathered(found), estimate_stacked(found), estimate_positions(found))
    return gathered if gathered.estimate_seconds() < others else None


def _list_choices(product: WindowProduct) -> Iterator[GatheredProduct]:
    """The blocks and chunks that are tried; no chunk is empty."""
    window, outputs = int(get_shape(product.weights)[-1]), product.result[2]
    least = ceil_divide(window, MAX_DEPTH)
    for columns in COLUMNS:
        if columns > COLUMNS[0] and columns >= 2 * outputs:
            break  # half of the block is empty
        for chunks in range(least, max(MOST_CHUNKS, 2 * least) + 1):
            if (chunks - 1) * round_up(ceil_divide(window, chunks), ROUND) < window:
                yield GatheredProduct(product, columns, chunks)

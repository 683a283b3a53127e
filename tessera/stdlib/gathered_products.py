"""Gathered products: f32 convolutions on tensor cores, whose windows are gathered and split into bf16 in registers.

A program multiplies the windows of a block of results by a block of weights. Each thread gathers the elements of its
windows by index, from a table of where windows begin and one of the steps within a window, and splits them into the
register operand of warpgroup products (an implicit GEMM of CUTLASS's mixed-input kind). The weights alone are split in
memory. So the image is read as it is, with any strides, gaps and groups, and results are written once. Where one is not
finite, its block is computed again in f32.
"""

from __future__ import annotations

import math
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
    split_memory,
    split_number,
)
from tessera.stdlib.thin_products import PARTS, ROUND, ROWS, add_products

# mypy: disable-error-code="operator, attr-defined, index"

COLUMNS = (32, 64, 128)  # of a block of weights
TABLE_BLOCK = 1024  # entries of the tables that a program computes
MOST_CHUNKS = 4  # of a window, whose products are added up apart
MOST_INDEXED = 1 << 31  # elements of an image, whose indices have 32 bits
# Seconds of a round of a block, by its columns, and of a program's start and end: what threads issue or tensor cores.
ROUND_SECONDS, PROGRAM_SECONDS = {32: 1.0e-6, 64: 1.2e-6, 128: 2.2e-6}, 1.5e-6


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


@kernel
def multiply_gathered(image, weights, starts, steps, parts, out, *, window, depth, chunks, BP, BO, BK):
    """out [Z, O, P] = the products of weights [G, O, window] and of the windows of an image [Z, L].

    On the grid (Z, blocks of P, blocks of O). `starts` and `steps` say where the elements of a window are; `parts`
    [3, G, O, chunks · depth] are the bf16 parts of the weights, 0 after the window.
    """
    z, p, o = tile.program_id(0), tile.program_id(1) * BP, tile.program_id(2) * BO
    group = z % weights.shape[0]
    first = tile.load(starts[p : p + BP], edge="clip")
    for chunk in tile.static_range(chunks):
        product, rest = tile.zeros((BP, BO), "f32"), tile.zeros((BP, BO), "f32")
        for k in tile.range(chunk * depth, chunk * depth + depth, BK):
            step = tile.load(steps[k : k + BK])
            left = split_number(tile.load(image[z, first[:, None] + step[None, :]]))
            last = tile.transpose(tile.load(parts[LOW, group, o : o + BO, k : k + BK], edge="clip"))
            second = tile.transpose(tile.load(parts[MIDDLE, group, o : o + BO, k : k + BK], edge="clip"))
            front = tile.transpose(tile.load(parts[HIGH, group, o : o + BO, k : k + BK], edge="clip"))
            product, rest = add_products(product, rest, left, (front, second, last))
        total = product + rest if chunk == 0 else total + (product + rest)
    wrong = has_nonfinite(total)
    total = tile.where(wrong, 0.0, total)
    for k in tile.range(0, tile.where(wrong, window, 0), 1):
        step = tile.load(steps[k : k + 1])
        seen = tile.load(image[z, first + step])
        weight = tile.load(weights[group, o : o + BO, k : k + 1], edge="clip")
        total = total + seen[:, None] * tile.reshape(weight, (1, BO))
    tile.store(out[z, o : o + BO, p : p + BP], tile.transpose(total), edge="clip")


@dataclass(frozen=True)
class GatheredProduct:
    """A product of f32 weights and windows that are gathered and split in registers."""

    product: WindowProduct

    @property
    def window(self) -> int:
        """The elements of a window."""
        return int(get_shape(self.product.weights)[-1])

    @property
    def chunks(self) -> int:
        """The parts of a window that are added up apart."""
        return ceil_divide(self.window, MAX_DEPTH)

    @property
    def depth(self) -> int:
        """The elements of a chunk."""
        return round_up(ceil_divide(self.window, self.chunks), ROUND)

    @property
    def columns(self) -> int:
        """The outputs of a block: the fewest blocks, then the fewest outputs."""
        outputs = self.product.result[2]
        return min(COLUMNS, key=lambda n: (ceil_divide(outputs, n) * ROUND_SECONDS[n], n))

    def compute(self, image: Tensor, weights: Tensor) -> Tensor:
        """The product, as [B, G, O, positions]."""
        windows, (batch, groups, outputs, positions) = self.product.windows, self.product.result
        missing = (1,) * (AXES - len(windows.taps))
        sizes = missing + tuple(int(n) for n in image.shape[2:])
        taps, depth = missing + windows.taps, self.chunks * self.depth
        image = shape.reshape(image, shape=(batch * groups, self.window // math.prod(taps) * math.prod(sizes)))
        weights = shape.reshape(weights, shape=(groups, outputs, self.window))
        wide = shape.pad(weights, low=(0, 0, 0), high=(0, 0, depth - self.window), value=0)
        parts = split_memory(shape.reshape(wide, shape=(1, 1, groups * outputs, depth)), PARTS)
        parts = shape.reshape(parts, shape=(len(PARTS), groups, outputs, depth))
        constants = {"taps": taps, "gaps": missing + windows.dilations, "sizes": sizes, "window": self.window}
        constants |= {"strides": missing + windows.strides, "counts": missing + windows.counts}
        tables = [OutputMemory(TensorType((n,), int32)) for n in (positions, depth)]
        entries = ceil_divide(max(positions, depth), TABLE_BLOCK)
        starts, steps = launch(index_windows, (entries,), *tables, **constants, BT=TABLE_BLOCK)
        grid = batch * groups, ceil_divide(positions, ROWS), ceil_divide(outputs, self.columns)
        memory = OutputMemory(TensorType((batch * groups, outputs, positions), f32))
        blocks = {"depth": self.depth, "chunks": self.chunks, "BP": ROWS, "BO": self.columns, "BK": ROUND}
        out = launch(
            multiply_gathered, grid, image, weights, starts, steps, parts, memory, window=self.window, **blocks
        )
        return shape.reshape(out, shape=self.product.result)

    def estimate_seconds(self) -> float:
        """The time of all launches: waves of programs, or what they read and write."""
        batch, groups, outputs, positions = self.product.result
        programs = batch * groups * ceil_divide(positions, ROWS) * ceil_divide(outputs, self.columns)
        rounds = self.chunks * self.depth // ROUND
        busy = ceil_divide(programs, BUSY_PROGRAMS) * (rounds * ROUND_SECONDS[self.columns] + PROGRAM_SECONDS)
        moved = math.prod(map(int, get_shape(self.product.windows.image))) + math.prod(self.product.result)
        return max(busy, 4 * moved / MEMORY_RATE) + 3 * LAUNCH_SECONDS


def match_gathered(uses: UseDef, weights: Value, columns: Value) -> GatheredProduct | None:
    """The product of f32 weights and stacked windows as a gathered one, or None where another way takes less time."""
    found = find_windows(uses, weights, columns)
    if found is None or found.narrow is not None or get_tensor_type(found.weights).dtype != f32:
        return None
    if 0 in (*found.result, get_shape(found.weights)[-1]):
        return None
    if math.prod(map(int, get_shape(found.windows.image)[1:])) >= MOST_INDEXED:
        return None
    gathered = GatheredProduct(found)
    others = min(estimate_gathered(found), estimate_stacked(found), estimate_positions(found))
    return gathered if gathered.chunks <= MOST_CHUNKS and gathered.estimate_seconds() < others else None

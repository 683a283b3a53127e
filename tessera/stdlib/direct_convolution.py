"""Direct convolution: one product that gathers its windows from the image (Chellapilla et al. 2006, but not stored).

A program multiplies a block of weights by the windows of a block of results, which it gathers by index, channel and tap
in turn: nothing is written but the results. It takes any strides, gaps and groups, and pads no channels, where implicit
GEMMs on tensor cores (`tessera.stdlib.convolution`) need many channels and outputs to pay for their copies.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tessera.core.symbolic_dim import ceil_divide, round_up
from tessera.core.types import TensorType, f32
from tessera.frontend.kernel import kernel
from tessera.frontend.kernel.graph_launch import OutputMemory, launch
from tessera.frontend.kernel.tile_api import tile
from tessera.ir.core import Value
from tessera.ir.rewrite import UseDef
from tessera.ir.tensor import Tensor
from tessera.lower.indexing_maps import get_shape
from tessera.ops.tensor import basic, reduce, shape
from tessera.stdlib.convolution import AXES, WindowProduct, estimate_gathered, estimate_stacked, find_windows
from tessera.stdlib.gemm import zero_accumulator
from tessera.stdlib.split_products import BUSY_PROGRAMS

# mypy: disable-error-code="operator, attr-defined, index"

MOST_OUTPUTS, LEAST_OUTPUTS = 64, 16  # rows of a block of results
BLOCK_ELEMENTS, MOST_PLACES, LEAST_PLACES = 8192, 256, 64  # of a block of results, and its columns
LEAST_ROUND, ROUND = 8, 32  # elements of a window that a round contracts
LEAST_DEPTH = 128  # elements of a part of the windows
MOST_INDEXED = 1 << 31  # elements of an image, whose indices have 32 bits


@kernel
def gather_windows(image, weights, out, *, taps, gaps, strides, sizes, counts, depth, BO, BP, BK):
    """out [S, Z, O, P] = for each s the products of the elements s · depth to (s + 1) · depth of the windows of image
    [Z, C · sizes] and of weights [G, O, C · taps], on the grid (S · Z, blocks of O, blocks of P)."""
    chunk, z = tile.program_id(0) // out.shape[1], tile.program_id(0) % out.shape[1]
    o, group, window = tile.program_id(1) * BO, z % weights.shape[0], weights.shape[2]
    places = tile.cast(tile.program_id(2) * BP + tile.arange(0, BP), "int32")
    there = places < out.shape[3]
    plane = places // counts[2]
    first = (plane // counts[1] * strides[0] * sizes[1] + plane % counts[1] * strides[1]) * sizes[2]
    first = tile.where(there, first + places % counts[2] * strides[2], 0)
    total = zero_accumulator(weights, (BO, BP))
    for k in tile.range(chunk * depth, tile.minimum(chunk * depth + depth, window), BK):
        elements = tile.cast(k + tile.arange(0, BK), "int32")
        line = elements // taps[2]
        channel = line // (taps[0] * taps[1])
        plane = channel * sizes[0] + line // taps[1] % taps[0] * gaps[0]
        step = (plane * sizes[1] + line % taps[1] * gaps[1]) * sizes[2] + elements % taps[2] * gaps[2]
        inside = tile.broadcast((elements < window)[:, None] & there[None, :], (BK, BP))
        seen = tile.load(image[z, step[:, None] + first[None, :]], mask=inside)
        total = total + tile.dot(tile.load(weights[group, o : o + BO, k : k + BK], edge="clip"), seen)
    tile.store(out[chunk, z, o : o + BO, tile.program_id(2) * BP : tile.program_id(2) * BP + BP],
               tile.cast(total, out.dtype), edge="clip")  # fmt: skip


@dataclass(frozen=True)
class DirectConvolution:
    """A product of weights and windows that are gathered: the blocks of its results, and the parts of its windows."""

    product: WindowProduct
    outputs: int
    places: int
    parts: int

    def compute(self, image: Tensor, weights: Tensor) -> Tensor:
        """The product, as [B, G, O, positions]."""
        product, windows, dtype = self.product, self.product.windows, image.dtype
        if product.narrow is not None:
            image, weights = (basic.cast(x, dtype=product.narrow) for x in (image, weights))
        batch, groups, outputs, positions = product.result
        missing = (1,) * (AXES - len(windows.taps))
        sizes = missing + tuple(int(n) for n in image.shape[2:])
        window = int(weights.shape[-1])
        image = shape.reshape(image, shape=(batch * groups, window // math.prod(windows.taps) * math.prod(sizes)))
        weights = shape.reshape(weights, shape=(groups, outputs, window))
        memory = OutputMemory(
            TensorType((self.parts, batch * groups, outputs, positions), f32 if self.parts > 1 else dtype)
        )
        constants = {"taps": missing + windows.taps, "gaps": missing + windows.dilations, "sizes": sizes}
        constants |= {"strides": missing + windows.strides, "counts": missing + windows.counts}
        size = min(ROUND, max(LEAST_ROUND, 1 << (window - 1).bit_length()))
        blocks = {"depth": round_up(ceil_divide(window, self.parts), size), "BO": self.outputs, "BP": self.places}
        grid = self.parts * batch * groups, ceil_divide(outputs, self.outputs), ceil_divide(positions, self.places)
        sums = launch(gather_windows, grid, image, weights, memory, **constants, **blocks, BK=size)
        if self.parts > 1:
            sums = basic.cast(reduce.sum(sums, axis=(0,), keepdims=False), dtype=dtype)
        return shape.reshape(sums, shape=product.result)


def match_direct(uses: UseDef, weights: Value, columns: Value) -> DirectConvolution | None:
    """The product of weights and stacked windows as a direct convolution, or None where it is none or does not pay."""
    found = find_windows(uses, weights, columns)
    if found is None or 0 in (*found.result, get_shape(found.weights)[-1]):
        return None
    if math.prod(map(int, get_shape(found.windows.image)[1:])) >= MOST_INDEXED:
        return None
    return choose_blocks(found) if estimate_gathered(found) < estimate_stacked(found) else None


def choose_blocks(product: WindowProduct) -> DirectConvolution:
    """Blocks of results that are as large as a GPU stays filled with, then parts of their windows."""
    window = int(get_shape(product.weights)[-1])
    batch, groups, outputs, positions = product.result
    rows = min(MOST_OUTPUTS, max(LEAST_OUTPUTS, 1 << (outputs - 1).bit_length()))
    columns = min(MOST_PLACES, BLOCK_ELEMENTS // rows)

    def count() -> int:
        return batch * groups * ceil_divide(outputs, rows) * ceil_divide(positions, columns)

    while columns > LEAST_PLACES and count() < BUSY_PROGRAMS:
        columns //= 2
    parts = max(1, min(2 * BUSY_PROGRAMS // count(), window // LEAST_DEPTH))
    while parts == 1 and rows > LEAST_OUTPUTS and count() < BUSY_PROGRAMS:
        rows //= 2
    return DirectConvolution(product, rows, columns, parts)

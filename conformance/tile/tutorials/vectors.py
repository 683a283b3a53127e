"""Vector addition, fused softmax, and dropout that keeps a seed instead of a mask."""

from __future__ import annotations

import math

import tessera as ts
from tessera import tile


@ts.kernel
def add(x, y, out, *, BLOCK: int):
    """out = x + y; the last program's block reaches past the end."""
    offsets = tile.program_id(0) * BLOCK + tile.arange(0, BLOCK)
    mask = offsets < len(x)
    total = tile.load(x, offsets, mask=mask) + tile.load(y, offsets, mask=mask)
    tile.store(out, offsets, total, mask=mask)


@ts.kernel
def softmax(x, out, *, BLOCK: int):
    """The softmax of each row, read and written once; each program processes rows at a fixed stride."""
    cols = tile.arange(0, BLOCK)
    inside = cols < x.shape[1]
    for row in tile.range(tile.program_id(0), x.shape[0], tile.num_programs(0)):
        scores = tile.load(x[row], cols, mask=inside, other=-math.inf)
        weights = tile.exp(scores - tile.max(scores))
        tile.store(out[row], cols, weights / tile.sum(weights), mask=inside)


@ts.kernel
def dropout(x, out, seed: ts.int64, *, p: float, BLOCK: int):
    """Dropout with probability p: the mask is a function of the seed and is not stored."""
    offsets = tile.program_id(0) * BLOCK + tile.arange(0, BLOCK)
    mask = offsets < len(x)
    block = tile.load(x, offsets, mask=mask)
    keep = tile.random(seed, offsets) >= p
    tile.store(out, offsets, tile.where(keep, block / (1 - p), 0.0), mask=mask)

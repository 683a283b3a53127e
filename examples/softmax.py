"""Softmax over rows: each program processes whole rows."""

import numpy as np

import tessera as ts
from tessera import tile

ROWS = 8


def inputs(rng: np.random.Generator) -> dict:
    """100 rows of 300 numbers, some of them large."""
    x = rng.standard_normal((100, 300), dtype=np.float32) * 20
    return {"x": x, "out": np.zeros_like(x)}


def reference(x, out):
    """The same in NumPy, in double precision."""
    e = np.exp(x.astype(np.float64) - x.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


@ts.example(inputs, reference, grid=lambda x, **_: -(-x.shape[0] // ROWS))
@ts.kernel
def softmax(x: ts.Tensor["M", "N"], out: ts.Tensor["M", "N"]):
    """out = exp(x) divided by its sum along each row, computed relative to the maximum."""
    first = tile.program_id(0) * ROWS
    rows = tile.load(x[first : first + ROWS, :], edge="clip")
    e = tile.exp(rows - tile.max(rows, axis=1, keepdims=True))
    tile.store(out[first : first + ROWS, :], e / tile.sum(e, axis=1, keepdims=True), edge="clip")

"""The sum of two vectors, block by block: `tessera run examples/vector_add.py`."""

import numpy as np

import tessera as ts
from tessera import tile

BLOCK = 256


def inputs(rng: np.random.Generator) -> dict:
    """Two vectors whose length is not a multiple of the block."""
    x, y = rng.standard_normal((2, 1000), dtype=np.float32)
    return {"x": x, "y": y, "out": np.zeros_like(x)}


def reference(x, y, out):
    """The same in NumPy."""
    return x + y


@ts.example(inputs, reference, grid=lambda x, **_: -(-x.shape[0] // BLOCK))
@ts.kernel
def vector_add(x: ts.Tensor["N"], y: ts.Tensor["N"], out: ts.Tensor["N"]):
    """out = x + y."""
    offsets = tile.program_id(0) * BLOCK + tile.arange(0, BLOCK)
    inside = offsets < N
    total = tile.load(x[offsets], mask=inside) + tile.load(y[offsets], mask=inside)
    tile.store(out[offsets], total, mask=inside)

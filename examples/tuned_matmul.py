"""A matrix product whose block sizes are chosen by measuring: `tessera run examples/tuned_matmul.py --target llvm`.

The first run tries every size that a model predicts to be fast and keeps the best in a file; the next one reads it.
`--no-tune` takes the first size. `--target ptx` without a GPU uses the model alone.
"""

import numpy as np

import tessera as ts
from tessera import tile


def inputs(rng):
    """Two matrices, and memory for their product."""
    a, b = rng.standard_normal((192, 128), np.float32), rng.standard_normal((128, 256), np.float32)
    return {"a": a, "b": b, "c": np.zeros((192, 256), np.float32)}


def reference(a, b, c):
    """The product in NumPy."""
    return a @ b


@ts.example(inputs, reference, grid=lambda c, BM, BN, **_: (-(-c.shape[0] // BM), -(-c.shape[1] // BN)))
@ts.kernel.autotune(
    space={"BM": [16, 32, 64], "BN": [16, 32, 64], "BK": [32, 64]},
    constraints=[lambda c: c.BM * c.BN <= 2048],
    search=ts.Guided(ts.RooflineModel("cpu"), keep=4),
    samples=3,
)
def matmul(a, b, c, *, BM: int = 32, BN: int = 32, BK: int = 32):
    m, n = tile.program_id(0) * BM, tile.program_id(1) * BN
    acc = tile.zeros((BM, BN))
    for k in tile.range(0, a.shape[1], BK):
        acc += tile.load(a[m : m + BM, k : k + BK], edge="clip") @ tile.load(b[k : k + BK, n : n + BN], edge="clip")
    tile.store(c[m : m + BM, n : n + BN], acc, edge="clip")

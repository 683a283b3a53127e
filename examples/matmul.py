"""A matrix product of bf16 with f32 accumulation; sizes need not be multiples of the blocks."""

import ml_dtypes
import numpy as np

import tessera as ts
from tessera import tile

BM, BN, BK = 64, 64, 32


def inputs(rng: np.random.Generator) -> dict:
    """130x100 by 100x70."""
    a, b = (rng.standard_normal(s, dtype=np.float32).astype(ml_dtypes.bfloat16) for s in ((130, 100), (100, 70)))
    return {"a": a, "b": b, "c": np.zeros((130, 70), np.float32)}


def reference(a, b, c):
    """The same in NumPy, in double precision."""
    return a.astype(np.float64) @ b.astype(np.float64)


@ts.example(inputs, reference, grid=lambda c, **_: (-(-c.shape[0] // BM), -(-c.shape[1] // BN)))
@ts.kernel
def matmul(a: ts.Tensor["M", "K", ts.bf16], b: ts.Tensor["K", "N", ts.bf16], c: ts.Tensor["M", "N", ts.f32]):
    """c = a b."""
    m, n = tile.program_id(0) * BM, tile.program_id(1) * BN
    acc = tile.zeros((BM, BN), ts.f32)
    for k in tile.range(0, K, BK):
        left = tile.load(a[m : m + BM, k : k + BK], edge="clip")
        right = tile.load(b[k : k + BK, n : n + BN], edge="clip")
        acc = tile.mma(left, right, acc)
    tile.store(c[m : m + BM, n : n + BN], acc, edge="clip")

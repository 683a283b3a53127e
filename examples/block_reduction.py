"""The sum of each row by a group of tiles that share memory: partial sums, then a tree with barriers."""

import numpy as np

import tessera as ts
from tessera import tile

GROUP = 64


def inputs(rng: np.random.Generator) -> dict:
    """20 rows of 1000 numbers."""
    x = rng.standard_normal((20, 1000), dtype=np.float32)
    return {"x": x, "out": np.zeros(20, np.float32)}


def reference(x, out):
    """The same in NumPy, in double precision."""
    return x.astype(np.float64).sum(axis=1)


@ts.example(inputs, reference, grid=lambda x, **_: (x.shape[0],), group=GROUP)
@ts.kernel
def block_reduction(x: ts.Tensor["M", "N"], out: ts.Tensor["M"]):
    """out[m] = the sum of x[m, :]."""
    row, me = tile.program_id(0), tile.local_id()
    partial = tile.alloc_shared((GROUP,), ts.f32)

    total = 0.0
    for i in tile.range(me, N, GROUP):
        total += x[row, i]
    partial[me] = total
    tile.barrier()

    stride = GROUP // 2
    while stride > 0:
        if me < stride:
            partial[me] += partial[me + stride]
        tile.barrier()
        stride //= 2

    if me == 0:
        out[row] = partial[0]

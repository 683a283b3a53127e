"""Padding of shared rows changes no value, and takes the bank conflicts of columns away."""

import numpy as np
import pytest
from engines import results

import tessera as ts
from tessera import tile
from tessera.core.errors import ResourceError


def columns(padding, limit=0):
    @ts.kernel(shared_memory=limit)
    def turned(x, out):
        me = tile.local_id()
        shared = tile.alloc_shared((32, 32), ts.f32, padding=padding)
        for k in tile.range(0, 32):
            shared[k, me] = x[k, me]
        tile.barrier()
        for k in tile.range(0, 32):
            out[k, me] = shared[me, k]

    return turned


@pytest.mark.parametrize("padding", [0, 1, 5])
def test_values_stay(padding, rng):
    x = rng.random((32, 32), dtype="f4")
    for (out,) in results(columns(padding), {"x": x, "out": np.zeros_like(x)}, group=32):
        np.testing.assert_array_equal(out, x.T)


@pytest.mark.parametrize(("padding", "conflicts"), [(0, True), (1, False)])
def test_advice(padding, conflicts):
    x = np.zeros((32, 32), "f4")
    found = ts.debug.check(columns(padding)[(1,), 32], x, np.zeros_like(x), lint=True)
    assert ("bank conflicts" in str(found)) == conflicts


def test_it_counts_as_memory():
    x = np.zeros((32, 32), "f4")
    columns(0, limit=4096)[(1,), 32](x, x.copy())
    with pytest.raises(ResourceError, match="4224 bytes"):
        columns(1, limit=4096)[(1,), 32](x, x.copy())

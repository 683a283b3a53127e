"""Loads by pattern (programming model, chapter 8.2) on the interpreter and on LLVM."""

import numpy as np
import pytest

import tessera as ts
from tessera import tile
from tessera.core.errors import ArgumentError, ShapeError
from tessera.runtime.program import prepare


@ts.kernel
def coalesced_access(data, indices, out, N: ts.constexpr):
    i = tile.program_id(0)
    coalesced = tile.load_coalesced(data[i, 0:N], threads=32)
    strided = tile.load_strided(data[i], stride=2)
    random = tile.load_gather(data[i], tile.load(indices), mask=tile.load(indices) < N, other=-1.0)
    broadcasted = tile.load_broadcast(data[i, 0])
    out[i, 0:N] = coalesced + broadcasted
    out[i, N : N + N // 2] = strided
    out[i, N + N // 2 : 2 * N + N // 2] = random


@pytest.mark.parametrize("engine", [("tile", "interp"), ("device", "llvm")], ids=str)
def test_what_is_read(engine, rng):
    data, indices = rng.random((3, 8), "f4"), np.array([3, 1, 7, 8, 0, 99, 2, 2])
    program = prepare(
        coalesced_access, {"data": data, "indices": indices, "out": np.zeros((3, 20), "f4"), "N": 8}, grid=(3,)
    )
    picked = np.where(indices < 8, data[:, np.minimum(indices, 7)], -1)
    want = np.concatenate([data + data[:, :1], data[:, ::2], picked], axis=1)
    np.testing.assert_array_equal(program.run(*engine)[-1], want)


@ts.kernel
def columns(x, out):
    out[0:2, 0:3] = tile.load_strided(x[0:4, 0:3], 3, axis=0)
    out[2:4, 0:3] = tile.load_gather(x, tile.arange(2) + 1)


def test_rows(rng):
    x, out = rng.random((4, 3), "f4"), np.zeros((4, 3), "f4")
    columns[(1,)](x, out)
    np.testing.assert_array_equal(out, x[[0, 3, 1, 2]])


@ts.kernel
def no_stride(x):
    x[0] = tile.sum(tile.load_strided(x, 0))


@ts.kernel
def a_scalar(x):
    x[0] = tile.load_gather(x[0], tile.arange(2))[0]


@pytest.mark.parametrize(("entry", "error"), [(no_stride, ArgumentError), (a_scalar, ShapeError)])
def test_refusals(entry, error):
    with pytest.raises(error):
        entry[(1,)](np.zeros(4, "f4"))

"""Searches in sorted vectors of every size around powers of two, against NumPy."""

import numpy as np
import pytest

import tessera as ts


def draw(size, dtype):
    rng = np.random.default_rng(size)
    row = np.sort(rng.integers(-20, 20, size)).astype(dtype)
    values = np.concatenate([row[:40], row[-3:], row[:9] + 1, np.array([-100, 100, 0])]).astype(dtype)
    if np.issubdtype(dtype, np.floating):
        row[-1:], values[-2:] = np.nan, (np.nan, -0.0)
    return row, values


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("size", [1, 2, 16, 17, 31, 32, 33, 127, 128, 1000])
@pytest.mark.parametrize("dtype", [np.float32, np.int64], ids=lambda d: d.__name__)
def test_sizes(size, side, dtype):
    row, values = draw(size, dtype)
    np.testing.assert_array_equal(ts.searchsorted(row, values, side=side).numpy(), np.searchsorted(row, values, side))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("size", [17, 64, 1000])
def test_compiled(size, side):
    row, values = draw(size, np.float32)
    search = ts.jit(lambda row, values: ts.searchsorted(row, values, side=side), target="llvm")
    np.testing.assert_array_equal(search(row, values).numpy(), np.searchsorted(row, values, side))
    shaped = values[:12].reshape(3, 4)
    np.testing.assert_array_equal(search(row, shaped).numpy(), np.searchsorted(row, shaped, side))


def test_every_value_is_larger_or_smaller():
    row = np.arange(100, dtype=np.float32)
    assert ts.searchsorted(row, [-1.0, 1e9, np.inf, -np.inf]).numpy().tolist() == [0, 100, 100, 0]

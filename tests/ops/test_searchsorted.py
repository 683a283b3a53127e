"""Searches in sorted vectors of every size around powers of two, against NumPy."""

import numpy as np
import pytest

import tessera as ts
from tessera.ops.tensor.sorting import list_search_steps


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


@pytest.mark.parametrize("size", [17, 31, 32, 33, 100, 1023, 1024, 4095, 6144, 8877, 65535, 65536, 98304, 250000])
def test_steps_find_each_place_and_share_few_banks(size):
    """The searches of a warp read 32 banks: with steps of powers of two, most of them would wait for one."""
    steps = list_search_steps(size)
    left, widest = size, 0
    for step in steps:
        assert 0 < step <= (left + 1) // 2  # the place is among the next `left` ones, or fewer
        left -= step
    assert left == 0 and len(steps) <= size.bit_length() + 1
    wanted, count = np.random.default_rng(size).integers(0, size + 1, (50, 32)), np.zeros((50, 32), int)
    for step in steps:
        read = count + step - 1
        widest = max(widest, np.mean([np.bincount(np.unique(row) % 32).max() for row in read]))
        count = np.where(read < wanted, count + step, count)
    np.testing.assert_array_equal(count, wanted)
    assert widest < 12


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("size", [17, 63, 64, 65, 700])
def test_rows_of_their_own_and_every_step(size, side):
    rng = np.random.default_rng(size)
    rows, values = (
        np.sort(rng.integers(0, size, (3, size)).astype("f4")),
        rng.integers(-1, size + 1, (3, 50)).astype("f4"),
    )
    want = np.stack([np.searchsorted(row, v, side) for row, v in zip(rows, values, strict=True)])
    for target in ("interp", "llvm", "ptx"):
        found = ts.jit(lambda r, v: ts.searchsorted(r, v, side=side), target=target)(rows, values)
        np.testing.assert_array_equal(found.numpy(), want)

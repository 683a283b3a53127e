"""tile.split by level: every element is walked once, in parts that fit; and split of joined blocks as before."""

import numpy as np
import pytest
from engines import ENGINES, results
from hypothesis import given, settings
from hypothesis import strategies as st

import tessera as ts
from tessera import tile
from tessera.core.errors import ArgumentError, ShapeError
from tessera.frontend.kernel.tile_api.access_patterns import CACHE_LEVEL_BITS, block_shape_for_level


def process(part):
    part[...] = tile.load(part) * 2.0 + 1.0


@ts.kernel
def hierarchical(X):
    for l2_tile in tile.split(X, level="L2"):
        for l1_tile in tile.split(l2_tile, level="L1"):
            for reg_tile in tile.split(l1_tile, level="register"):
                process(reg_tile)


def test_three_levels(rng):
    x = rng.random((1, 180, 400), dtype="f4")
    for (out,) in results(hierarchical, {"X": x}, engines=ENGINES[:2]):
        np.testing.assert_allclose(out, x * 2 + 1, rtol=1e-6)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 3000), min_size=1, max_size=3), st.sampled_from(list(CACHE_LEVEL_BITS.values())))
def test_parts_divide_and_fit(whole, budget):
    part = block_shape_for_level(whole, 32, budget)
    assert all(n % p == 0 for n, p in zip(whole, part, strict=True))
    assert np.prod(part) * 4 <= budget


@ts.kernel
def given_shape(x, out):
    first, second = tile.split(tile.load(x))
    out[...] = first + second
    for part in tile.split(out[1:5], shape=(2,)):
        part[...] = tile.load(part) * 3.0


def test_a_shape_of_ones_own(rng):
    x = rng.random((6, 2), dtype="f4")
    want = x.sum(1)
    want[1:5] *= 3
    for (out,) in results(given_shape, {"x": x, "out": np.zeros(6, "f4")}):
        np.testing.assert_allclose(out, want, rtol=1e-6)


@ts.kernel
def no_level(x):
    for part in tile.split(x, level="L9"):
        process(part)


@ts.kernel
def no_divisor(x):
    for part in tile.split(x, shape=(4,)):
        process(part)


@ts.kernel
def of_a_value(x):
    for part in tile.split(tile.load(x), level="L1"):
        process(part)


@pytest.mark.parametrize(
    ("entry", "error"), [(no_level, ArgumentError), (no_divisor, ShapeError), (of_a_value, ArgumentError)]
)
def test_refusals(entry, error):
    with pytest.raises(error):
        results(entry, {"x": np.zeros(6, "f4")}, engines=[("tile", "interp")])

"""Warp and block primitives against NumPy, with and without blocks of values, and what is refused."""

import numpy as np
import pytest

import tessera as ts
from conformance.tile.cooperation.cases import block_primitives, blocks_of_values, warp_primitives
from tessera import tile
from tessera.core.errors import ArgumentError, ExecutionError


def test_warps(rng):
    x, out, votes = rng.uniform(-1, 1, 64).astype("f4"), np.zeros((8, 64), "f4"), np.zeros((4, 64), "i8")
    warp_primitives[(1,), 64](x, out, votes)
    rows, lanes = x.reshape(2, 32), np.arange(32)
    want = [
        np.repeat(rows.sum(1), 32), np.repeat(rows.max(1), 32), np.repeat(rows.min(1), 32), np.repeat(rows[:, 5], 32),
        rows[:, lanes ^ 15].ravel(), rows[:, np.where(lanes < 3, lanes, lanes - 3)].ravel(),
        rows[:, np.where(lanes > 29, lanes, lanes + 2)].ravel(), np.repeat(rows[:, 1], 32),
    ]  # fmt: skip
    np.testing.assert_allclose(out, want, rtol=1e-5)
    bits = [sum(1 << int(i) for i in np.flatnonzero(row > 0)) for row in rows]
    assert votes[0].all() and not votes[1].any() and votes[2].tolist() == np.repeat(bits, 32).tolist()
    same = np.arange(64).reshape(2, 32) % 3
    assert votes[3, 40] == sum(1 << i for i in range(32) if same[1, i] == same[1, 8])


def test_blocks(rng):
    x, out = rng.uniform(-1, 1, (3, 24)).astype("f4"), np.zeros((5, 3, 24), "f4")
    block_primitives[(3,), 24](x, out)
    eights, lanes = x.reshape(3, 3, 8), np.arange(24)
    want = np.stack([x.sum(1)[:, None] + 0 * x, x.max(1)[:, None] + 0 * x, np.repeat(eights.sum(2), 8, 1),
                     x[:, :1] + 0 * x, x[:, lanes - lanes % 8 + (lanes * 3 + 1) % 8]])  # fmt: skip
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-6)


def test_blocks_of_values(rng):
    x, out = rng.random((64, 5), "f4"), np.zeros((2, 64, 5), "f4")
    blocks_of_values[(1,), 64](x, out)
    rows = x.reshape(2, 32, 5)
    np.testing.assert_allclose(out[0].reshape(2, 32, 5), np.broadcast_to(rows.sum(1, keepdims=True), rows.shape), 1e-5)
    np.testing.assert_array_equal(out[1, 33], x[32])


@ts.kernel
def divergent(x, out):
    me = tile.local_id()
    if me % 2 == 0:
        out[me] = tile.warp.reduce_sum(x[me])


@ts.kernel
def divergent_half(x, out):
    me = tile.local_id()
    if me < 3:
        out[me] = tile.cooperative_group(4).shuffle(x[me], 0)


@ts.kernel
def crooked(x, out):
    out[tile.local_id()] = tile.cooperative_group(3).reduce(x[0])


@ts.kernel
def wide(x, out):
    out[0] = tile.cast(tile.block.ballot(x[0] > 0), ts.f32)


@ts.kernel
def unknown(x, out):
    out[0] = tile.block.reduce(x[0], op="median")


@pytest.mark.parametrize(
    ("entry", "group", "error", "says"),
    [
        (divergent, 8, ExecutionError, "exchange values and others"),
        (divergent_half, 8, ExecutionError, "all 4 tiles"),
        (crooked, 8, ArgumentError, "stretches of 3"),
        (wide, 128, ArgumentError, "64 bits"),
        (unknown, 8, ArgumentError, "median"),
    ],
)
def test_refusals(entry, group, error, says):
    with pytest.raises(error, match=says):
        entry[(1,), group](np.ones(8, "f4"), np.zeros(8, "f4"))


@ts.kernel
def chapter_8_3(x: ts.Tile):
    warp_sum = tile.warp.reduce_sum(x)
    warp_max = tile.warp.reduce_max(x)
    shuffled = tile.warp.shuffle(x, lane_id=5)
    butterfly = tile.warp.butterfly(x, mask=0xF)
    all_positive = tile.warp.all(x > 0)
    any_zero = tile.warp.any(x == 0)
    mask = tile.warp.match(x)
    tile.block.sync()
    block_sum = tile.block.reduce_sum(x)
    group = tile.cooperative_group(size=64)
    group_result = group.reduce(x, op="sum")
    value = tile.block.broadcast(x, src_thread=0)
    tile.assert_((warp_max == shuffled) & (butterfly == value) & all_positive & ~any_zero & (mask == 2**32 - 1))
    tile.assert_((warp_sum * 4.0 == block_sum) & (group_result == 64.0 * x))


def test_the_snippet_of_the_programming_model():
    """Every tile of the four warps has the same block: sums are multiples of it, and all 32 lanes match."""
    chapter_8_3(np.array([1.0, 2.0, 4.0], "f4"))
    with pytest.raises(ExecutionError):
        chapter_8_3(np.array([1.0, 0.0, 4.0], "f4"))

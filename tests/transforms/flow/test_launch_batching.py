"""vmap of kernel launches: one more extent of the grid, and the same as a launch for each example."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tessera as ts
from tessera import tile

TARGETS = ("interp", "llvm", "ptx")


@ts.kernel
def rows_times(x, w, out, *, BM: int = 4):
    """Blocks with a mask, a gather and a second axis of the grid."""
    r, c = tile.program_id(0) * BM + tile.arange(0, BM), tile.program_id(1)
    inside = r < x.shape[0]
    out[r, c] = tile.load(x[r, c], mask=inside) * w[c]


@ts.kernel
def blocks(x, w, out, *, BM: int = 4):
    """Clipped blocks of rows, times a shared row."""
    r = tile.program_id(0) * BM
    tile.store(out[r : r + BM, :], tile.load(x[r : r + BM, :], edge="clip") * w[:][None, :], edge="clip")


@ts.kernel
def histogram(x, counts):
    """Atomic updates at indices that the memory holds."""
    i = tile.program_id(0)
    tile.atomic_add(counts[x[i]], 1)


@ts.kernel
def staged(x, out, *, N: int):
    """A group that exchanges values through shared memory."""
    shared, i = tile.alloc_shared((N,), ts.f32), tile.local_id()
    shared[i] = x[tile.program_id(0) * N + i]
    tile.barrier()
    out[tile.program_id(0) * N + i] = shared[N - 1 - i]


def launch_blocks(x, w):
    return ts.launch(blocks, (-(-x.shape[0] // 4),), x, w, ts.like(x))


@settings(max_examples=12, deadline=None)
@given(st.integers(1, 3), st.integers(1, 9), st.integers(1, 3), st.booleans(), st.integers(0, 2))
def test_a_batch_is_a_launch_for_each_example(batch, rows, columns, shared, axis):
    generator = np.random.default_rng(rows)
    x = generator.standard_normal((batch, rows, columns)).astype("f4")
    w = generator.standard_normal((columns,) if shared else (batch, columns)).astype("f4")
    expected = x * (w if shared else w[:, None, :])
    moved = np.moveaxis(x, 0, axis)
    found = ts.vmap(launch_blocks, in_dims=(axis, None if shared else 0))(moved, w)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize("target", TARGETS)
def test_batches_of_batches(target):
    x = np.arange(60, dtype="f4").reshape(2, 2, 5, 3)
    w = np.float32([1, 2, 3])
    twice = lambda x: ts.vmap(ts.vmap(lambda v: launch_blocks(v, w)))(x)  # noqa: E731
    np.testing.assert_allclose(ts.jit(twice, target=target)(x), x * w, rtol=1e-6)


@pytest.mark.parametrize("target", TARGETS)
def test_atomics_and_groups_and_grids_of_two_axes(target):
    x = np.array([[0, 2, 2, 1], [3, 3, 3, 0]])
    count = lambda v: ts.launch(histogram, (4,), v, ts.zeros(4, dtype="int32"))  # noqa: E731
    found = ts.jit(lambda v: ts.vmap(count)(v), target=target)(x)
    np.testing.assert_array_equal(found, [[1, 1, 2, 0], [1, 0, 0, 3]])
    y = np.arange(48, dtype="f4").reshape(2, 24)
    turned = ts.jit(lambda v: ts.vmap(lambda a: ts.launch(staged, ((3,), 8), a, ts.like(a), N=8))(v), target=target)(y)
    np.testing.assert_array_equal(turned, y.reshape(2, 3, 8)[:, :, ::-1].reshape(2, 24))
    z, w = np.arange(32, dtype="f4").reshape(2, 8, 2), np.float32([1, 10])
    grid = ts.jit(lambda v: ts.vmap(lambda a: ts.launch(rows_times, (2, 2), a, w, ts.like(a)))(v), target=target)(z)
    np.testing.assert_array_equal(grid, z * w)


def test_a_shared_operand_is_not_repeated():
    function = ts.jit(lambda x, w: ts.vmap(launch_blocks, in_dims=(0, None))(x, w)).trace(
        ts.ones((3, 5, 2)), ts.ones(2)
    )
    (launch,) = [n for n in function.function.body.nodes if n.op.name == "ts.launch"]
    assert [str(v.type) for v in launch.args] == ["3x5x2xf32", "2xf32"]
    assert launch.attrs["grid"] == (6,)

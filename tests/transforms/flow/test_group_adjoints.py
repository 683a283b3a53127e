"""Reverse mode of kernels whose tiles communicate: shared memory, barriers, warps, loops and branches of each tile."""

import numpy as np
import pytest

import tessera as ts
from examples.block_reduction import block_reduction
from tessera import tile
from tessera.core.errors import UnsupportedOpError


@ts.kernel
def smooth(x, out, *, W: int):
    """Shared memory that is overwritten after it was read."""
    row, me = tile.program_id(0), tile.local_id()
    held = tile.alloc_shared((W,), ts.f32)
    held[me] = x[row, me] * x[row, me]
    tile.barrier()
    a = held[(me + 1) % W] * held[W - 1 - me]
    tile.barrier()
    held[me] = a * 0.5
    tile.barrier()
    out[row, me] = a + held[(me + 3) % W] * held[me]


@ts.kernel
def sum_warp(x, out):
    """A butterfly over the lanes of a warp, and a maximum over all of them."""
    row, lane = tile.program_id(0), tile.lane_id()
    value = tile.sin(x[row, lane])
    for step in (16, 8, 4, 2, 1):
        value = value + tile.warp.shuffle(value, (lane + step) % 32)
    out[row, lane] = value * x[row, lane]


@ts.kernel
def halves(x, out, *, W: int):
    """Tiles of either side of a branch, and strided loops of a different start for each tile."""
    row, me = tile.program_id(0), tile.local_id()
    held = tile.alloc_shared((W,), ts.f32)
    total = 1.0
    for i in tile.range(me, x.shape[1], W):
        total = total * 0.5 + x[row, i] * total
    held[me] = total
    tile.barrier()
    if me < W // 2:
        held[me] = held[me] * held[me + W // 2]
    tile.barrier()
    if me == 0:
        out[row] = held[0] + held[1] * held[W - 1]


def run_smooth(x):
    return ts.launch(smooth, ((x.shape[0],), x.shape[1]), x, ts.like(x), W=x.shape[1])


def run_warp(x):
    return ts.launch(sum_warp, ((x.shape[0],), 32), x, ts.like(x))


def run_halves(x):
    return ts.launch(halves, ((x.shape[0],), 8), x, ts.like(shape=(x.shape[0],), dtype="f32"), W=8)


def run_rows(x):
    return ts.launch(block_reduction, ((x.shape[0],), 64), ts.sin(x), ts.like(shape=(x.shape[0],), dtype="f32"))


@pytest.mark.parametrize("target", ["interp", "llvm", "ptx"])
@pytest.mark.parametrize(
    ("run", "shape"), [(run_smooth, (3, 16)), (run_warp, (2, 32)), (run_halves, (2, 21)), (run_rows, (2, 100))]
)
def test_gradients_are_central_differences(run, shape, target, rng):
    def loss(x):
        return ts.sum(run(x) ** 2)

    x, step = ((rng.standard_normal(shape) * s).astype("f4") for s in (0.5, 1.0))
    found = ts.jit(ts.grad(loss), target=target)(x).numpy().astype("f8")
    ends = [float(loss(ts.tensor(x + e * step)).numpy()) for e in (2e-3, -2e-3)]
    slope = (ends[0] - ends[1]) / 4e-3
    np.testing.assert_allclose((found * step).sum(), slope, rtol=2e-2, atol=2e-2)


def test_the_sum_of_rows_has_the_gradient_of_its_maths(rng):
    x = rng.standard_normal((3, 100)).astype("f4")
    found = ts.grad(lambda x: ts.sum(run_rows(x) ** 2))(x).numpy()
    wide = x.astype("f8")
    np.testing.assert_allclose(found, 2 * np.sin(wide).sum(1, keepdims=True) * np.cos(wide), rtol=1e-4, atol=1e-4)


@ts.kernel
def loop_store(x, out):
    me = tile.local_id()
    held = tile.alloc_shared((8,), ts.f32)
    held[me] = x[me]
    tile.barrier()
    for _ in tile.range(0, 3):
        held[me] = held[me] * 2.0
    out[me] = held[me]


@ts.kernel
def store_after_loop(x, out):
    me = tile.local_id()
    held = tile.alloc_shared((8,), ts.f32)
    held[me] = x[me]
    tile.barrier()
    total = 1.0
    for i in tile.range(0, 8):
        total = total * held[i]
    tile.barrier()
    held[me] = total
    tile.barrier()
    out[me] = held[7 - me]


@ts.kernel
def shared_atomic(x, out):
    me = tile.local_id()
    held = tile.alloc_shared((8,), ts.f32)
    held[me] = 0.0
    tile.barrier()
    tile.atomic_add(held[0], x[me])
    tile.barrier()
    out[me] = held[me]


@pytest.mark.parametrize(
    ("kernel", "text"),
    [
        (loop_store, "a store to memory that the kernel allocates, in a loop or branch after it"),
        (store_after_loop, "a store to memory that the kernel allocates, after a loop that reads it"),
        (shared_atomic, "tile.atomic in it"),
    ],
)
def test_what_has_no_reverse_mode_names_the_line(kernel, text, rng):
    x = rng.standard_normal(8).astype("f4")
    with pytest.raises(UnsupportedOpError, match=text) as error:
        ts.grad(lambda x: ts.sum(ts.launch(kernel, ((1,), 8), x, ts.like(x))))(x)
    assert error.value.location.file == __file__ and "@kernel.vjp" in error.value.suggestion

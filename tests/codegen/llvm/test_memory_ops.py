"""Loads and stores at edges and under masks, gathers, scatters, copies, atomics, scratch memory."""

import numpy as np
import pytest
from test_loop_fusion import numbers
from tilekernels import Kernel, agree

from tessera.codegen.llvm import BACKEND
from tessera.core.types import bf16, bool_, f16, f32, f64, int8, int16, int32, int64
from tessera.ops.dialects import tile
from tessera.ops.tensor import basic, shape
from tessera.ops.tensor import elementwise as e


@pytest.mark.parametrize("dtype", [f32, f64, f16, bf16, int8, bool_, int64], ids=str)
@pytest.mark.parametrize("block", [8, 16, 24, 100])
def test_clip(dtype, block):
    x, out = numbers(dtype, 70), numbers(dtype, 70, seed=1)
    k = Kernel(x, out)
    start = k(e.sub, k(e.mul, k(tile.program_id), block), 5)  # begins before the memory, ends past it
    k.store(k.params[1], k.load(k.params[0], start, shape=(block,), edge="clip"), start, edge="clip")
    agree(k.module((80 // block + 1,)), [x, out])


def test_clip_2d_with_other():
    x, out = numbers(f32, 9, 21), np.zeros((16, 32), np.float32)
    k = Kernel(x, out)
    seven = k.const(7.0, f32, (8, 16))
    i, j = (k(e.mul, k(tile.program_id, axis=a), n) for a, n in ((0, 8), (1, 16)))
    mask = k.const(True, bool_, (8, 16))
    k.store(k.params[1], k.load(k.params[0], i, j, shape=(8, 16), edge="clip", rest=(mask, seven)), i, j)
    agree(k.module((2, 2)), [x, out])


@pytest.mark.parametrize("dtype", [f32, bf16, int16, bool_], ids=str)
def test_masks(dtype):
    x, out = numbers(dtype, 6, 37), numbers(dtype, 6, 37, seed=1)
    k = Kernel(x, out)
    at = k(shape.iota, shape=(6, 37), axis=-1, dtype=int64)
    mask = k(e.less, at, k.const(30, int64, (6, 37)))
    odd = k(e.equal, k(e.remainder, at, k.const(2, int64, (6, 37))), k.const(1, int64, (6, 37)))
    k.store(k.params[1], k.load(k.params[0], rest=(odd,)), rest=(mask,))
    agree(k.module(), [x, out])


def test_mask_of_one_row():
    x, out = numbers(f32, 6, 37), numbers(f32, 6, 37, seed=1)
    k = Kernel(x, out)
    row = k(e.less, k(shape.iota, shape=(6, 1), axis=-2, dtype=int64), k.const(4, int64, (6, 1)))
    k.store(k.params[1], k.load(k.params[0], rest=(row,)), rest=(row,))
    agree(k.module(), [x, out])


def test_scalar_loads_and_stores():
    x, out = numbers(int64, 4), np.zeros(4, np.int64)
    k = Kernel(x, out)
    i = k(tile.program_id)
    mask = k(e.less, i, 3)
    block = k.load(k.params[0], i, shape=(1,), rest=(k.broadcast(mask, 1),))
    k.store(k.params[1], block, i, rest=(k.broadcast(mask, 1),))
    agree(k.module((4,)), [x, out])


@pytest.mark.parametrize("index", [int32, int64], ids=str)
def test_gather(index):
    x = numbers(f32, 20, 33)
    rows = np.array([3, 19, 0, 7, 7], index.numpy)
    out = np.zeros((5, 33), np.float32)
    k = Kernel(x, rows, out)
    i = k(shape.reshape, k.load(k.params[1]), shape=(5, 1))
    j = k(basic.cast, k(shape.iota, shape=(1, 33), axis=-1, dtype=int64), dtype=int64)
    k.store(k.params[2], k(tile.gather, k.params[0], i, j))
    agree(k.module(), [x, rows, out])


def test_gather_scatter_masked():
    x, at, out = numbers(f16, 50), np.random.default_rng(0).permutation(50).reshape(5, 10), numbers(f16, 50, seed=1)
    k = Kernel(x, at, out)
    i = k.load(k.params[1])
    mask = k(e.less, i, k.const(40, int64, (5, 10)))
    other = k.const(2.0, f16, (5, 10))
    k(
        tile.scatter,
        k.params[2],
        k(tile.gather, k.params[0], i, mask, other),
        k(e.sub, k.const(49, int64, (5, 10)), i),
        mask,
    )
    agree(k.module(), [x, at, out])


def test_a_load_before_a_store_keeps_the_old_values():
    x = numbers(f32, 64)
    k = Kernel(x)
    low, high = k.load(k.params[0], 0, shape=(32,)), k.load(k.params[0], 32, shape=(32,))
    k.store(k.params[0], high, 0)
    k.store(k.params[0], low, 32)
    agree(k.module(), [x])


def test_a_shift_in_place():
    x = numbers(f32, 65)
    k = Kernel(x)
    k.store(k.params[0], k.load(k.params[0], 0, shape=(64,)), 1)
    agree(k.module(), [x])


def test_in_place_in_a_loop():
    x = numbers(f32, 64)
    k = Kernel(x)

    def step(i):
        old = k.load(k.params[0], i, shape=(60,))
        k.store(k.params[0], k(e.mul, old, k.const(0.5, f32, (60,))), i)

    k.loop(0, 5, 1, [], step)
    agree(k.module(), [x])


@pytest.mark.parametrize("space", ["shared", "register"])
def test_alloc_and_copy(space):
    x, out = numbers(f32, 10, 40), np.zeros((10, 40), np.float32)
    k = Kernel(x, out)
    room = k(tile.alloc, shape=(2, 5, 40), dtype=f32, space=space)

    def step(i):
        slot = k(e.remainder, i, 2)
        k(tile.async_copy, room, k.params[0], slot, 0, 0, k(e.mul, i, 5), 0, shape=(5, 40), edge="clip")
        k(tile.async_commit)
        k(tile.async_wait, pending=0)
        k(tile.barrier)
        block = k(shape.reshape, k.load(room, slot, 0, 0, shape=(1, 5, 40)), shape=(5, 40))
        k.store(k.params[1], k.add(block, block), k(e.mul, i, 5), 0)

    k.loop(0, 2, 1, [], step)
    agree(k.module(), [x, out])


@pytest.mark.parametrize("kind", ["add", "max", "min", "exchange"])
@pytest.mark.parametrize("dtype", [f32, int32, int64], ids=str)
def test_atomics(kind, dtype):
    x = np.random.default_rng(0).integers(0, 100, 20).astype(dtype.numpy)
    total, old = np.full(3, 50, dtype.numpy), np.zeros(20, dtype.numpy)
    k = Kernel(x, total, old)
    at = k(e.remainder, k(shape.iota, shape=(20,), axis=-1, dtype=int64), k.const(3, int64, (20,)))
    mask = k(e.not_equal, at, k.const(1, int64, (20,)))
    k.store(k.params[2], k(tile.atomic, k.params[1], k.load(k.params[0]), at, mask, kind=kind))
    agree(k.module(), [x, total, old])


@pytest.mark.parametrize(("size", "masked"), [(96, False), (100, True)])
def test_loops_that_end_at_the_edge_need_no_mask(size, masked):
    x, out = numbers(f32, size), np.zeros(size, np.float32)
    k = Kernel(x, out)

    def step(i):
        k.store(k.params[1], k.load(k.params[0], i, shape=(32,), edge="clip"), i, edge="clip")

    k.loop(0, size, 32, [], step)
    agree(k.module(), [x, out])
    assert ("masked" in BACKEND.emit(k.module(), {}).text("kernels.ll")) == masked


def test_stores_that_follow_each_other_share_a_loop_nest():
    """Values that several of them need are computed once, in registers: without scratch memory."""
    x, y, a, b = (numbers(f32, 3, 70, seed=s) for s in range(4))
    k = Kernel(x, y, a, b)
    first = k.load(k.params[0])
    m = k(e.sqrt, k(e.add, k(e.mul, first, k.load(k.params[1])), k.const(2.0, f32, (3, 70))))
    k.store(k.params[2], m)
    k.store(k.params[3], k(e.div, first, m))
    module = k.module()
    agree(module, [x, y, a, b])
    assert "%buf" not in BACKEND.emit(module, {}).text("kernels.ll")


@pytest.mark.parametrize("shift", [0, 1, 16])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_stores_that_overwrite_what_others_read(shift, order):
    """Two memories change places; a store that is shifted overwrites what the other store has yet to read."""
    x, y = numbers(f32, 80), numbers(f32, 80, seed=1)
    k = Kernel(x, y)
    loaded = [k.load(p, k.const(0), shape=(64,)) for p in k.params]
    half = k.const(0.5, f32, (64,))
    sums = [k(e.add, k(e.mul, loaded[1], half), loaded[0]), k(e.sub, loaded[0], half)]
    for i in order:
        k.store(k.params[i], sums[i], k.const(shift if i else 0))
    agree(k.module(), [x, y])


@pytest.mark.parametrize(("columns", "rows", "fetched"), [(1500, 16, True), (96, 16, False), (1500, 4, False)])
def test_pieces_of_rows_that_lie_in_pages_of_their_own_are_fetched_before_they_are_stored(columns, rows, fetched):
    x, out = np.abs(numbers(f32, rows, 64)), np.zeros((rows + 3, columns), np.float32)
    k = Kernel(x, out)
    start = k(e.mul, k(tile.program_id), 64)
    k.store(k.params[1], k(e.sqrt, k.load(k.params[0])), k.const(1), start, edge="clip")
    module = k.module((-(-columns // 64),))
    text = BACKEND.emit(module, {"vector_bytes": 64}).text("kernels.ll")
    assert (", i32 1, i32 3, i32 1)" in text) == fetched  # a prefetch that is to write
    agree(module, [x, out])

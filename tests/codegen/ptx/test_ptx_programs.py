"""Loops, branches, reductions, atomics and groups of tiles."""

import numpy as np
import pytest
from ptxcheck import numbers, run

from tessera.core.types import bf16, bool_, f16, f32, f64, int32, int64
from tessera.ops.dialects import tile
from tessera.ops.tensor import basic, reduce, shape
from tessera.ops.tensor import elementwise as e

REDUCTIONS = (reduce.sum, reduce.max, reduce.min, reduce.argmax, reduce.argmin)


@pytest.mark.parametrize("op", REDUCTIONS, ids=lambda op: op.name)
@pytest.mark.parametrize(("size", "axis"), [((5, 300), -1), ((300, 5), -2), ((64, 64), -1), ((3, 1), -1)])
def test_reductions(op, size, axis):
    def build(k, x, out):
        k.store(out, k(op, k.load(x), axis=(axis,) if op in REDUCTIONS[:3] else axis, keepdims=True))

    kind = np.float32 if op in REDUCTIONS[:3] else np.int64
    kept = tuple(1 if a == axis % 2 else n for a, n in enumerate(size))
    run(build, numbers(f32, *size), np.zeros(kept, kind), rtol=1e-5)


@pytest.mark.parametrize("dtype", (f64, f16, bf16, int64, int32, bool_), ids=str)
def test_reductions_of_types(dtype):
    def build(k, x, total, most):
        v = k.load(x)
        if dtype != bool_:
            k.store(total, k(shape.reshape, k(reduce.sum, v, axis=(-2, -1), keepdims=False), shape=(1,)))
        k.store(most, k(shape.reshape, k(reduce.max, v, axis=(-2, -1), keepdims=False), shape=(1,)))

    wide = np.int64 if not dtype.is_float else dtype.numpy
    rtol = 1e-2 if dtype in (bf16, f16) else 1e-12
    run(build, numbers(dtype, 9, 40), np.zeros(1, wide), np.zeros(1, dtype.numpy), rtol=rtol)


def test_not_a_number_comes_first():
    def build(k, x, most, place):
        v = k.load(x)
        k.store(most, k(reduce.max, v, axis=(-1,), keepdims=True))
        k.store(place, k(reduce.argmax, v, axis=-1, keepdims=True))

    x = numbers(f32, 100)
    x[[40, 70]] = np.nan
    run(build, x, np.zeros(1, np.float32), np.zeros(1, np.int64))


def test_carried_blocks_and_scalars():
    def build(k, x, out, count):
        def step(i, s, block):
            return k.add(s, i), k.add(block, k.load(x, i, 0, shape=(1, 40)))

        total, block = k.loop(1, 7, 2, [k.const(10), k.const(0.0, f32, (1, 40))], step)
        k.store(out, block)
        k.store(count, k.broadcast(total, 1))

    run(build, numbers(f32, 8, 40), np.zeros((1, 40), np.float32), np.zeros(1, np.int64))


def test_swapped_each_round():
    def build(k, x, y):
        a, b = k.loop(0, 3, 1, [k.load(x), k.load(y)], lambda i, a, b: (b, a))
        k.store(x, a)
        k.store(y, b)

    run(build, numbers(f32, 40), numbers(f32, 40, seed=1))


def test_a_loop_that_reads_what_other_threads_wrote():
    def build(k, x):
        def step(i):
            v = k.load(x)
            mirrored = k(e.bitwise_xor, k(shape.iota, shape=(256,), axis=0), k.const(255, int64, (256,)))
            turned = k(tile.gather, x, mirrored)
            k.store(x, k.add(v, turned))

        k.loop(0, 4, 1, [], lambda i: step(i))

    run(build, numbers(f32, 256))


def test_branches_and_while():
    def build(k, out):
        def body(n):
            even = k(e.equal, k(e.remainder, n, k.const(2)), k.const(0))
            (found,) = k.branch(even, lambda: [k(e.floor_divide, n, k.const(2))],
                                lambda: [k.add(k(e.mul, n, k.const(3)), 1)])  # fmt: skip
            return [found]

        (n,) = k.loop_while([k.const(27)], lambda n: [k(e.greater, n, k.const(100 // 7))], body)
        k.store(out, k.broadcast(n, 1))

    run(build, np.zeros(1, np.int64))


@pytest.mark.parametrize("kind", ["add", "max", "min"])
@pytest.mark.parametrize("dtype", (f32, f64, int32, int64, f16), ids=str)
def test_atomics(dtype, kind):
    def build(k, x, out):
        bins = k(e.bitwise_and, k(shape.iota, shape=(96,), axis=0), k.const(3, int64, (96,)))
        k(tile.atomic, out, k(basic.cast, k(basic.cast, k.load(x), dtype=int32), dtype=dtype), bins, kind=kind)

    run(build, numbers(dtype, 96), np.zeros(4, dtype.numpy))


@pytest.mark.parametrize(("tiles", "width"), [(32, 8), (24, 24), (64, 64), (128, 64), (48, 24), (120, 40), (1024, 64)])
def test_tiles_of_a_group_exchange(tiles, width):
    def build(k, x, out):
        me = k(tile.local_id)
        v = k.load(x, me, shape=(1,))
        other = k(tile.exchange, v, k.add(me, 3), width=width)
        every = k(tile.collect, v, width=width)
        total = k(shape.reshape, k(reduce.sum, every, axis=(-2,), keepdims=False), shape=(1,))
        k.store(out, k.add(other, total), me)

    run(build, numbers(int64, tiles), np.zeros(tiles, np.int64), group=tiles)


def test_shared_memory_between_tiles():
    def build(k, x, out):
        me = k(tile.local_id)
        room = k(tile.alloc, shape=(64,), dtype=f32)
        k.store(room, k.load(x, me, shape=(1,)), me)
        k(tile.barrier)
        k.store(out, k.load(room, k(e.sub, k.const(63), me), shape=(1,)), me)

    run(build, numbers(f32, 64), np.zeros(64, np.float32), group=64)

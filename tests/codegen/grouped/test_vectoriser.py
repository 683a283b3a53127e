"""Groups of several tiles: ids, shared memory, barriers, and divergent control flow."""

import numpy as np
import pytest
from test_loop_fusion import numbers
from tilekernels import Kernel, agree

from tessera.core.types import f32, int64
from tessera.ops.dialects import tile
from tessera.ops.tensor import basic, contractions, reduce, shape
from tessera.ops.tensor import elementwise as e

GROUP = 4


def run(build, *arrays, grid=(2,), **tolerance):
    k = Kernel(*arrays, group=GROUP)
    build(k, *k.params)
    agree(k.module(grid), list(arrays), **tolerance)


def row(k):
    """The number of this tile among all."""
    return k.add(k(e.mul, k(tile.program_id), k(tile.group_size)), k(tile.local_id))


def one(k, x):
    return k.broadcast(x, 1)


def test_each_tile_its_row():
    def build(k, x, out):
        block = k.load(x, row(k), 0, shape=(1, 20))
        k.store(out, k(e.mul, block, block), row(k), 0)

    run(build, numbers(f32, 8, 20), np.zeros((8, 20), np.float32))


def test_clip_and_mask():
    def build(k, x, out):
        at = k(e.mul, row(k), 10)
        mask = k(e.less, k(shape.iota, shape=(10,), axis=-1, dtype=int64), k.broadcast(k.add(row(k), 3), 10))
        k.store(out, k.load(x, at, shape=(10,), edge="clip", rest=(mask,)), at, edge="clip", rest=(mask,))

    run(build, numbers(f32, 75), np.zeros(75, np.float32))


def test_shared_memory_and_barrier():
    def build(k, x, out):
        room = k(tile.alloc, shape=(GROUP, 16), dtype=f32)
        me = k(tile.local_id)
        k.store(room, k.load(x, row(k), 0, shape=(1, 16)), me, 0)
        k(tile.barrier)
        neighbour = k(e.remainder, k.add(me, 1), GROUP)
        k.store(out, k.load(room, neighbour, 0, shape=(1, 16)), row(k), 0)

    run(build, numbers(f32, 8, 16), np.zeros((8, 16), np.float32))


def test_register_memory():
    def build(k, x, out):
        room = k(tile.alloc, shape=(2, 16), dtype=f32, space="register")
        k.store(room, k.load(x, row(k), 0, shape=(1, 16)), 0, 0)
        k.store(room, k.const(1.0, f32, (1, 16)), k(e.remainder, k(tile.local_id), 2), 0)
        k.store(out, k.load(room, 0, 0, shape=(1, 16)), row(k), 0)

    run(build, numbers(f32, 8, 16), np.zeros((8, 16), np.float32))


def test_one_copy_for_all():
    def build(k, x, out):
        room = k(tile.alloc, shape=(16,), dtype=f32)
        k(tile.async_copy, room, x, 0, k(tile.program_id), 0, shape=(16,), edge="clip")
        k(tile.async_commit)
        k(tile.async_wait)
        k(tile.barrier)
        k.store(out, k(shape.reshape, k.load(room), shape=(1, 16)), row(k), 0)

    run(build, numbers(f32, 2, 16), np.zeros((8, 16), np.float32))


def test_reduce_dot_permute():
    def build(k, x, y, out):
        a = k(shape.reshape, k.load(x, row(k), 0, 0, shape=(1, 5, 6)), shape=(5, 6))
        c = k(contractions.dot, a, k.load(y), dtype=f32)
        top = k.broadcast(k(reduce.max, c, axis=(-1,), keepdims=True), 5, 7)
        c = k(shape.permute, k(e.sub, c, top), axes=(1, 0))
        k.store(out, k(shape.reshape, c, shape=(1, 7, 5)), row(k), 0, 0)

    x = np.random.default_rng(0).normal(size=(8, 5, 6)).astype(np.float32)
    y = np.random.default_rng(1).normal(size=(6, 7)).astype(np.float32)
    run(build, x, y, np.zeros((8, 7, 5), np.float32), atol=1e-5)


def test_divergent_branch():
    def build(k, x, out):
        me = k(tile.local_id)
        block = k.load(x, row(k), 0, shape=(1, 16))

        def yes():
            k.store(out, k.const(5.0, f32, (1, 16)), row(k), 0)
            return k.add(block, block), me

        value, number = k.branch(k(e.less, me, 2), yes, lambda: (block, k.const(7)))
        scaled = k(e.mul, value, k.broadcast(k(basic.cast, number, dtype=f32), 1, 16))
        k.store(out, k.add(scaled, k.load(out, row(k), 0, shape=(1, 16))), row(k), 0)

    run(build, numbers(f32, 8, 16), np.zeros((8, 16), np.float32))


def test_nested_branches_and_uniform_ones():
    def build(k, out):
        me, p = k(tile.local_id), k(tile.program_id)

        def inner():
            return k.branch(k(e.equal, me, 1), lambda: k.const(10), lambda: k.const(20))

        (v,) = k.branch(k(e.less, me, 3), inner, lambda: k.const(30))
        (w,) = k.branch(k(e.equal, p, 0), lambda: v, lambda: k.const(1))
        k.store(out, one(k, w), row(k))

    run(build, np.zeros(8, np.int64))


def test_divergent_loop():
    def build(k, x, out):
        def step(i, total):
            return k.add(total, k(reduce.sum, k.load(x, i, 0, shape=(1, 16)), axis=(-1, -2)))

        (total,) = k.loop(0, k.add(row(k), 1), 1, [k.const(0.0, f32)], step)
        k.store(out, one(k, total), row(k))

    run(build, np.full((8, 16), 2, np.float32), np.zeros(8, np.float32))


def test_uniform_loop_with_varying_values():
    def build(k, x, out):
        def step(i, total, rounds):
            return k.add(total, k.load(x, i, 0, shape=(1, 16))), k.add(rounds, k(tile.local_id))

        total, rounds = k.loop(0, 8, 1, [k.const(0.0, f32, (1, 16)), k.const(0)], step)
        k.store(out, k(e.mul, total, k.broadcast(k(basic.cast, rounds, dtype=f32), 1, 16)), row(k), 0)

    run(build, np.ones((8, 16), np.float32), np.zeros((8, 16), np.float32))


@pytest.mark.parametrize("divergent", [True, False])
def test_while(divergent):
    def build(k, out):
        limit = k.add(row(k), 5) if divergent else k.const(5)

        def body(i, j):
            return k.add(i, 2), k.add(j, k(tile.local_id))

        i, j = k.loop_while([k.const(0), k.const(0)], lambda i, j: k(e.less, i, limit), body)
        k.store(out, one(k, k.add(k(e.mul, i, 100), j)), row(k))

    run(build, np.zeros(8, np.int64))


def test_atomics_of_every_tile():
    def build(k, total, old):
        before = k(tile.atomic, total, k.const(2), k(tile.program_id), kind="add")
        k.store(old, one(k, before), row(k))

        def yes():
            k(tile.atomic, total, k(tile.local_id), k(tile.program_id), kind="add")

        k.branch(k(e.less, k(tile.local_id), 3), yes, lambda: None)

    run(build, np.zeros(2, np.int64), np.zeros(8, np.int64))


def test_gather_and_scatter():
    def build(k, x, out):
        at = k.broadcast(row(k), 6)
        columns = k(shape.iota, shape=(6,), axis=-1, dtype=int64)
        block = k(tile.gather, x, at, columns)
        k(tile.scatter, out, block, k(e.sub, k.const(7, int64, (6,)), at), columns)

    run(build, numbers(f32, 8, 6), np.zeros((8, 6), np.float32))

"""Loops and branches with loop-carried scalars and blocks."""

import numpy as np
from test_loop_fusion import numbers
from tilekernels import Kernel, agree

from tessera.core.types import f32, int32
from tessera.ops.dialects import tile
from tessera.ops.tensor import basic, reduce
from tessera.ops.tensor import elementwise as e


def run(build, *arrays, grid=(1,), **tolerance):
    k = Kernel(*arrays)
    build(k, *k.params)
    agree(k.module(grid), list(arrays), **tolerance)


def test_carried_scalars_and_blocks():
    def build(k, x, out, count):
        def step(i, s, block):
            return k.add(s, i), k.add(block, k.load(x, i, 0, shape=(1, 40)))

        total, block = k.loop(1, 7, 2, [k.const(10), k.const(0.0, f32, (1, 40))], step)
        k.store(out, block)
        k.store(count, k.broadcast(total, 1))

    run(build, numbers(f32, 8, 40), np.zeros((1, 40), np.float32), np.zeros(1, np.int64))


def test_no_round():
    def build(k, x, out):
        (block,) = k.loop(5, 5, 1, [k.load(x)], lambda i, b: k.add(b, b))
        k.store(out, block)

    run(build, numbers(f32, 40), np.zeros(40, np.float32))


def test_counting_down():
    def build(k, out):
        k.loop(9, -1, -3, [], lambda i: k.store(out, k.broadcast(i, 1), i))

    run(build, np.zeros(10, np.int64))


def test_a_step_known_when_it_runs():
    def build(k, step, out):
        k.loop(0, 10, step, [], lambda i: k.store(out, k.broadcast(k.const(1), 1), i))

    run(build, np.asarray(3), np.zeros(10, np.int64))


def test_swap():
    def build(k, x, y):
        a, b = k.loop(0, 3, 1, [k.load(x), k.load(y)], lambda i, a, b: (b, a))
        k.store(x, a)
        k.store(y, b)

    run(build, numbers(f32, 40), numbers(f32, 40, seed=1))


def test_fibonacci_blocks():
    def build(k, x, y):
        a, b = k.loop(0, 5, 1, [k.load(x), k.load(y)], lambda i, a, b: (b, k.add(a, b)))
        k.store(x, a)
        k.store(y, b)

    run(build, numbers(int32, 40), numbers(int32, 40, seed=1))


def test_reset_to_an_outer_value():
    def build(k, x, out):
        zero = k.const(0.0, f32, (33,))

        def step(i, a, b):
            return zero, k.add(b, k.add(a, k.load(x)))

        _, b = k.loop(0, 3, 1, [k.load(x), zero], step)
        k.store(out, b)

    run(build, numbers(f32, 33), np.zeros(33, np.float32))


def test_nested_loops_carry_one_block():
    def build(k, x, out):
        def inner(j, b):
            return k.add(b, k.load(x, j, 0, shape=(1, 40)))

        def outer(i, b):
            return k.loop(0, 4, 1, [k(e.mul, b, k.const(0.5, f32, (1, 40)))], inner)

        (block,) = k.loop(0, 3, 1, [k.const(0.0, f32, (1, 40))], outer)
        k.store(out, block)

    run(build, numbers(f32, 8, 40), np.zeros((1, 40), np.float32))


def test_old_and_new_value_in_one_round():
    """As in an online softmax: the new maximum and the old one are both needed."""

    def build(k, x, out):
        def step(i, m, total):
            row = k.load(x, i, 0, shape=(1, 40))
            new = k(e.maximum, m, k(reduce.max, row, axis=(-1,), keepdims=True))
            scale = k(e.exp, k(e.sub, m, new))
            weights = k(e.exp, k(e.sub, row, k.broadcast(new, 1, 40)))
            return new, k.add(k(e.mul, total, scale), k(reduce.sum, weights, axis=(-1,), keepdims=True))

        m, total = k.loop(0, 8, 1, [k.const(-np.inf, f32, (1, 1)), k.const(0.0, f32, (1, 1))], step)
        k.store(out, k.add(m, k(e.log, total)))

    x = np.random.default_rng(0).normal(size=(8, 40)).astype(np.float32)
    run(build, x, np.zeros((1, 1), np.float32), rtol=1e-5)


def test_while_scalar():
    def build(k, out):
        (i,) = k.loop_while([k.const(1)], lambda i: k(e.less, i, 1000), lambda i: k(e.mul, i, 3))
        k.store(out, k.broadcast(i, 1))

    run(build, np.zeros(1, np.int64))


def test_while_block():
    def build(k, x, out):
        two = k.const(2.0, f32, (37,))

        def holds(b, n):
            return k(e.less, k(reduce.max, b, axis=(-1,)), k.const(100.0, f32))

        def body(b, n):
            return k(e.mul, b, two), k.add(n, 1)

        b, n = k.loop_while([k.load(x), k.const(0)], holds, body)
        k.store(out, b)

    run(build, np.linspace(1, 9, 37).astype(np.float32), np.zeros(37, np.float32))


def test_branches():
    def build(k, x, out):
        i = k(tile.program_id)
        block = k.load(x, i, 0, shape=(1, 40))
        odd = k(e.equal, k(e.remainder, i, 2), 1)
        value, flag = k.branch(odd, lambda: (k.add(block, block), k.const(1)), lambda: (block, k.const(0)))
        k.store(out, k.add(value, k.broadcast(k(basic.cast, flag, dtype=f32), 1, 40)), i, 0)

    run(build, numbers(f32, 8, 40), np.zeros((8, 40), np.float32), grid=(8,))


def test_branch_with_effects():
    def build(k, out):
        i = k(tile.program_id)
        one = k.broadcast(k.const(1), 1)
        k.branch(k(e.less, i, 3), lambda: k.store(out, one, i), lambda: None)

    run(build, np.zeros(8, np.int64), grid=(8,))


def test_branch_in_a_loop():
    def build(k, x, out):
        def step(i, b):
            row = k.load(x, i, 0, shape=(1, 40))
            return k.branch(k(e.less, i, 4), lambda: k.add(b, row), lambda: b)

        (b,) = k.loop(0, 8, 1, [k.const(0.0, f32, (1, 40))], step)
        k.store(out, b)

    run(build, numbers(f32, 8, 40), np.zeros((1, 40), np.float32))


def test_grid_of_three_axes():
    def build(k, out):
        ids = [k(tile.program_id, axis=a) for a in range(3)]
        sizes = [k(tile.grid_size, axis=a) for a in range(3)]
        code = k.const(0)
        for i, n in zip(ids, sizes, strict=True):
            code = k.add(k(e.mul, code, n), i)
        k.store(out, k(basic.broadcast_to, code, shape=(1, 1, 1)), *ids)

    run(build, np.zeros((2, 3, 5), np.int64), grid=(2, 3, 5))

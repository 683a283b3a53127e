"""Control flow: carried values of loops, branches, and barriers within loops."""

import numpy as np
from ptxcheck import numbers, run

from tessera.core.types import f32, int64
from tessera.ops.dialects import tile
from tessera.ops.tensor import elementwise as e
from tessera.ops.tensor import shape


def test_carried_blocks_and_scalars():
    def build(k, x, out, count):
        def step(i, s, block):
            return k.add(s, i), k.add(block, k.load(x, i, 0, shape=(1, 40)))

        total, block = k.loop(1, 7, 2, [k.const(10), k.const(0.0, f32, (1, 40))], step)
        k.store(out, block)
        k.store(count, k.broadcast(total, 1))

    run(build, numbers(f32, 8, 40), np.zeros((1, 40), np.float32), np.zeros(1, np.int64))


def test_swapped_carried_blocks():
    def build(k, x, y):
        a, b = k.loop(0, 3, 1, [k.load(x), k.load(y)], lambda i, a, b: (b, a))
        k.store(x, a)
        k.store(y, b)

    run(build, numbers(f32, 40), numbers(f32, 40, seed=1))


def test_loop_with_cross_thread_dependences():
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

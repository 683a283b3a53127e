"""Random tile functions: blocks reused, reshaped, reduced, multiplied, loop-carried and overwritten."""

import numpy as np
import pytest
from tilekernels import Kernel, agree

from tessera.core.types import f32
from tessera.ops.dialects import tile
from tessera.ops.tensor import basic, contractions, reduce, shape
from tessera.ops.tensor import elementwise as e

SIZES = (1, 3, 16, 20, 33)


class Random:
    """A random program over integers small enough that f32 holds every result exactly."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
        rows, columns = self.rng.choice(SIZES[1:], 2)
        self.shape = (int(rows), int(columns))
        self.arrays = [self.rng.integers(-2, 3, self.shape).astype(np.float32) for _ in range(3)]
        self.k = Kernel(*self.arrays)

    def pick(self, items):
        return items[self.rng.integers(len(items))]

    def tame(self, x):
        """Values brought back to -3 … 3."""
        k, sizes = self.k, x.type.shape
        three = k.const(3.0, f32, sizes)
        return k(e.maximum, k(e.minimum, x, three), k(e.neg, three))

    def step(self, blocks):
        """One more block of the common shape."""
        choice = self.pick(
            [self.arithmetic, self.reduced, self.turned, self.product, self.loaded, self.costly, self.looped]
        )
        return self.tame(choice(blocks))

    def arithmetic(self, blocks):
        return self.k(self.pick([e.add, e.sub, e.mul, e.maximum]), self.pick(blocks), self.pick(blocks))

    def costly(self, blocks):
        """An expensive op whose result is exact: one over one."""
        one = self.k.const(1.0, f32, self.shape)
        return self.k(e.mul, self.k(e.div, one, self.k(e.sqrt, one)), self.pick(blocks))

    def reduced(self, blocks):
        op, axis = self.pick([reduce.sum, reduce.max, reduce.min]), self.pick([(-1,), (-2,), (-1, -2)])
        found = self.tame(self.k(op, self.pick(blocks), axis=axis, keepdims=True))
        return self.k(e.add, self.k.broadcast(found, *self.shape), self.pick(blocks))

    def turned(self, blocks):
        k, (m, n) = self.k, self.shape
        flipped = k(shape.permute, self.pick(blocks), axes=(1, 0))
        return k(shape.reshape, k(e.add, flipped, flipped), shape=(m, n))

    def product(self, blocks):
        k, x = self.k, self.pick(blocks)
        square = k(contractions.dot, x, k(shape.permute, self.pick(blocks), axes=(1, 0)), dtype=f32)
        return k(contractions.dot, self.tame(square), x, dtype=f32)

    def loaded(self, blocks):
        k, ref = self.k, self.pick(self.k.params)
        block = k(tile.load, ref, 0, 0, shape=self.shape, edge="clip")
        if self.rng.random() < 0.5:
            k.store(self.pick(k.params), self.pick(blocks))
        return block

    def looped(self, blocks):
        first, second = self.pick(blocks), self.pick(blocks)

        def body(i, a, b):
            inner = [*blocks, a, b]
            return [self.step_flat(inner), self.pick([a, b, self.step_flat(inner)])]

        return self.pick(self.k.loop(0, int(self.rng.integers(0, 4)), 1, [first, second], body))

    def step_flat(self, blocks):
        """As `step`, without another loop."""
        return self.tame(
            self.pick([self.arithmetic, self.reduced, self.turned, self.product, self.costly, self.added])(blocks)
        )

    def added(self, blocks):
        """The sum that may be made in place."""
        k = self.k
        square = k(contractions.dot, self.pick(blocks), k(shape.permute, self.pick(blocks), axes=(1, 0)), dtype=f32)
        return k.add(self.pick(blocks), k(contractions.dot, self.tame(square), self.pick(blocks), dtype=f32))

    def program(self):
        blocks = [self.k.load(p) for p in self.k.params]
        for _ in range(self.rng.integers(3, 9)):
            blocks.append(self.step(blocks))
        self.k.store(self.k.params[0], blocks[-1])
        self.k.store(self.k.params[1], self.k.add(self.pick(blocks), self.pick(blocks)))
        return self.k.module()


@pytest.mark.parametrize("seed", range(60))
def test_random(seed):
    made = Random(seed)
    agree(made.program(), made.arrays)


def test_broadcast_of_an_expensive_row():
    x, out = np.linspace(0.5, 3, 33).astype(np.float32), np.zeros((20, 33), np.float32)
    k = Kernel(x, out)
    k.store(
        k.params[1],
        k(basic.broadcast_to, k(e.sqrt, k(e.div, k.load(k.params[0]), k.const(2.0, f32, (33,)))), shape=(20, 33)),
    )
    agree(k.module(), [x, out])

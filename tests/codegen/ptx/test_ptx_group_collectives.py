"""Group collectives: exchanges between tiles by shuffles, named barriers and counters; shared memory of a group."""

import numpy as np
import pytest
from ptxcheck import numbers, run

from tessera.core.types import f32, int64
from tessera.ops.dialects import tile
from tessera.ops.tensor import elementwise as e
from tessera.ops.tensor import reduce, shape


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

"""Values exchanged between tiles: LLVM and the interpreter agree, also in a group of one and on blocks."""

import numpy as np
import pytest
from test_loop_fusion import numbers
from tilekernels import Kernel, agree

from tessera.core.types import bf16, bool_, f16, f32, f64, int8, int32, int64
from tessera.ops.dialects import tile
from tessera.ops.tensor import elementwise as e
from tessera.ops.tensor import reduce


def build(group_size, width, dtype, block):
    """Each tile writes the largest of its stretch and what another of it holds."""
    x, out = numbers(dtype, group_size, block), numbers(dtype, 2, group_size, block, seed=1)
    k = Kernel(x, out, group=group_size)
    me = k(tile.local_id)
    mine = k.load(k.params[0], me, 0, shape=(1, block))
    largest = k(reduce.max, k(tile.collect, mine, width=width), axis=(-3,), keepdims=True)
    other = k(tile.exchange, mine, k.add(k(e.mul, me, 3), 1), width=width)
    for row, value in enumerate((largest, k.broadcast(other, 1, 1, block))):
        k.store(k.params[1], value, row, me, 0)
    return k.module(), [x, out]


@pytest.mark.parametrize("dtype", [f32, f64, f16, bf16, int8, int32, int64, bool_], ids=str)
def test_types(dtype):
    module, arrays = build(8, 4, dtype, 5)
    agree(module, arrays)


@pytest.mark.parametrize(("size", "width"), [(1, 1), (4, 1), (4, 4), (6, 2), (32, 16), (64, 32)])
def test_widths(size, width):
    module, arrays = build(size, width, f32, 3)
    agree(module, arrays)


def test_a_negative_lane_counts_from_the_end():
    x, out = np.arange(4, dtype=np.float32), np.zeros(4, np.float32)
    k = Kernel(x, out, group=4)
    me = k(tile.local_id)
    k.store(k.params[1], k.broadcast(k(tile.exchange, k.load(k.params[0], me, shape=(1,)), -1, width=2), 1), me)
    agree(k.module(), [x, out])

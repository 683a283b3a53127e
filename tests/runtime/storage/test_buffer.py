"""Buffers and functions that use memory again (programming model, 13.2)."""

import numpy as np
import pytest

import tessera as ts
from tessera.core.errors import ArgumentError, ResourceError, ShapeError


@ts.kernel
def compute_into(x, out):
    i = ts.tile.program_id(0)
    out[i] = x[i] * 2.0


def test_the_specifications_buffer():
    x = ts.Tensor(np.arange(8, dtype="f4"))
    with ts.memory.buffer(size="1KB") as buf:
        temp1 = buf.allocate(x.shape)
        compute_into[8](x, temp1)
        temp2 = buf.reuse(temp1)
        compute_into[8](temp1, temp2)
    assert temp2.tolist() == temp1.tolist() == [4.0 * i for i in range(8)]
    assert np.shares_memory(temp1.numpy(), temp2.numpy()) and buf.pool.report().allocations == 1


def test_another_shape_and_type_in_a_place():
    with ts.memory.buffer("1KB") as buf:
        first = buf.allocate((4, 8))
        second = buf.reuse(first, (3, 5), "bf16")
        assert second.shape == (3, 5) and second.dtype == ts.bf16
        with pytest.raises(ShapeError, match="is smaller"):
            buf.reuse(first, (100,))
        with pytest.raises(ArgumentError, match="lies in no piece of the buffer"):
            buf.reuse(ts.ones((4,)))
        with pytest.raises(ArgumentError, match="lies in no piece"):
            buf.reuse(ts.Tensor(first.numpy()[:, ::2]))
        with pytest.raises(ResourceError, match="is full"):
            buf.allocate(1000)


def test_a_function_uses_its_memory_again():
    places = []

    @ts.memory.reuse
    def step(x):
        y = ts.exp(x) + 1.0
        if not y.is_traced:
            places.append(y.numpy().ctypes.data)
        return y

    x = ts.ones((64,))
    for _ in range(4):
        step(x)
    assert len(set(places)) < 4
    kept = [step(x) for _ in range(3)]
    assert len({k.numpy().ctypes.data for k in kept}) == 3  # what is still held is not written over
    assert ts.jit(step)(x).tolist() == kept[0].tolist()

"""Asynchronous copies of which a program's block begins or ends outside of global memory are reported, either way."""

import numpy as np
import pytest

import tessera as ts
from tessera import tile
from tessera.tools.debug import checked


@ts.kernel
def copy_in(x, *, LOW: int):
    first, held = tile.program_id(0) * 8 + LOW, tile.alloc_shared((8,), ts.f32)
    tile.async_copy(x[first : first + 8], held[0:8])
    tile.wait_async()
    tile.barrier()


@ts.kernel
def copy_out(x, *, LOW: int):
    first, held = tile.program_id(0) * 8 + LOW, tile.alloc_shared((8,), ts.f32)
    tile.store(held[0:8], tile.full((8,), 1.0))
    tile.barrier()
    tile.async_copy(held[0:8], x[first : first + 8])
    tile.wait_async()


@pytest.mark.parametrize("kernel", [copy_in, copy_out])
@pytest.mark.parametrize(("size", "low"), [(16, 0), (17, 1), (12, 0), (15, 0), (16, 1), (16, -1)])
def test_the_blocks_of_all_programs_are_inside(kernel, size, low):
    with checked(collect=True) as report:  # debug mode finds it before the interpreter refuses it
        kernel[2](np.zeros(size, np.float32), LOW=low)
    inside = low >= 0 and 16 + low <= size
    assert report.kinds == ([] if inside else ["bounds"])

"""Outputs that kernels read: zeros before the first launch, unless a launch has written all of them before."""

import numpy as np
import pytest

import tessera as ts
from tessera import tile
from tessera.codegen.llvm import BACKEND
from tessera.core.types import TensorType, f32
from tessera.frontend.kernel.graph_launch import OutputMemory, launch
from tessera.runtime import driver


def read_outputs(function, *arrays):
    """The outputs whose memory must hold zeros, and the result of the built program."""
    module = driver.lower(ts.jit(function).trace(*arrays).function, "llvm")["tile"]
    artifact = BACKEND.emit(module, {})
    plan = artifact.manifest["plan"]
    outputs = [i for i in plan["read"] if plan["params"][i]["role"] == "output"]
    return outputs, BACKEND.guarded(artifact)(list(arrays))[0]


@pytest.mark.parametrize("shape", [(50, 7), (3581, 175), (2, 30, 40)])
def test_what_is_updated_in_place_needs_no_zeros(shape, rng):
    x, i = rng.random(shape, np.float32), rng.integers(0, shape[0], 9)
    u = rng.random((9, *shape[1:]), np.float32)
    found, out = read_outputs(lambda x, i, u: ts.scatter_add(x, i, u), x, i, u)
    want = x.copy()
    np.add.at(want, i, u)
    np.testing.assert_allclose(out, want, rtol=1e-6)
    assert found == []


@ts.kernel
def store_blocks(x, out, *, BLOCK: int, step: int, low: int):
    start = tile.program_id(0) * step + low
    tile.store(out[start : start + BLOCK], tile.load(x[start : start + BLOCK], edge="clip"), edge="clip")


@ts.kernel
def add_one(out, *, size: int):
    tile.store(out[0:size], tile.load(out[0:size]) + 1.0)


GRIDS = {"whole": (13, 8, 0, True), "too few": (12, 8, 0, False), "gaps": (13, 9, 0, False), "moved": (13, 8, 8, False)}


@pytest.mark.parametrize("name", GRIDS)
def test_only_a_whole_write_initialises(name):
    """The blocks of all programs cover the output, or what they leave is zero."""
    (programs, step, low, whole), x = GRIDS[name], np.full(100, 5.0, np.float32)

    def program(x):
        memory = OutputMemory(TensorType((100,), f32))
        out = launch(store_blocks, (programs,), x, memory, BLOCK=8, step=step, low=low)
        return launch(add_one, (1,), out, size=100)

    found, out = read_outputs(program, x)
    want = np.ones(100, np.float32)
    for start in range(low, low + programs * step, step):
        want[start : start + 8] = 6
    np.testing.assert_array_equal(out, want)
    assert (found == []) == whole

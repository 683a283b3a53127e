"""Outputs that kernels read: zeros before the first launch, unless a launch has written all of them before."""

import numpy as np
import pytest

import tessera as ts
from tessera import tile
from tessera.codegen.contract import get_backend
from tessera.core.types import TensorType, f32
from tessera.frontend.kernel.graph_launch import OutputMemory, launch
from tessera.runtime import driver

CHECKED = {"llvm": "guarded", "ptx": "sanitized"}  # what runs a program and checks its accesses
on_targets = pytest.mark.parametrize("target", CHECKED)


def read_outputs(target, function, *arrays):
    """The outputs whose memory must hold zeros, and the result of the built program."""
    module = driver.lower(ts.jit(function).trace(*arrays).function, target)["tile"]
    artifact = get_backend(target).emit(module, {})
    plan = artifact.manifest["plan"]
    outputs = [i for i in plan["read"] if plan["params"][i]["role"] == "output"]
    return outputs, getattr(get_backend(target), CHECKED[target])(artifact)(list(arrays))[0]


@on_targets
@pytest.mark.parametrize("shape", [(50, 7), (3581, 175), (2, 30, 40)])
def test_what_is_updated_in_place_needs_no_zeros(shape, target, rng):
    """The copy before it writes all, also where its last block has a program of its own kind (boundary peeling)."""
    x, i = rng.random(shape, np.float32), rng.integers(0, shape[0], 9)
    u = rng.random((9, *shape[1:]), np.float32)
    found, out = read_outputs(target, lambda x, i, u: ts.scatter_add(x, i, u), x, i, u)
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


@on_targets
@pytest.mark.parametrize("name", GRIDS)
def test_only_a_whole_write_initialises(name, target):
    """The blocks of all programs cover the output, or what they leave is zero."""
    (programs, step, low, whole), x = GRIDS[name], np.full(100, 5.0, np.float32)

    def program(x):
        memory = OutputMemory(TensorType((100,), f32))
        out = launch(store_blocks, (programs,), x, memory, BLOCK=8, step=step, low=low)
        return launch(add_one, (1,), out, size=100)

    found, out = read_outputs(target, program, x)
    want = np.ones(100, np.float32)
    for start in range(low, low + programs * step, step):
        want[start : start + 8] = 6
    np.testing.assert_array_equal(out, want)
    assert (found == []) == whole


@on_targets
def test_a_memory_that_a_launch_is_given(target):
    """A launch updates a value that the program computes: the first launch writes all of the output."""
    found, out = read_outputs(target, lambda x: launch(add_one, (1,), ts.tanh(x), size=96), np.ones(96, np.float32))
    assert found == []
    np.testing.assert_allclose(out, np.tanh(1.0) + 1.0, rtol=1e-5)

"""Launches with groups of tiles in functions for a mesh: cut over the elements, with the values of the interpreter."""

import numpy as np
import pytest

import tessera as ts
from examples.block_reduction import block_reduction
from tessera import tile
from tessera.core.errors import UnsupportedOpError
from tessera.runtime import driver


def draw(*shape):
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


@ts.kernel
def reverse_rows(x, out, *, WIDTH: int):
    """Each tile moves one element of a row through shared memory, and adds that of its neighbour."""
    row, me = tile.program_id(0), tile.local_id()
    held = tile.alloc_shared((WIDTH,), ts.f32)
    held[me] = x[row, me]
    tile.barrier()
    out[row, me] = held[WIDTH - 1 - me] + held[(me + 1) % WIDTH]


@ts.kernel
def thread_rows(x, out):
    """A thread program: a launch without a group has 32 tiles for each of its warps."""
    row = tile.program_id(0)
    i, _, _ = tile.thread_id()
    out[row, i] = x[row, i] * 2.0


def reverse(x):
    return ts.launch(reverse_rows, ((x.shape[0],), x.shape[1]), x, ts.like(x), WIDTH=x.shape[1])


def sum_rows(x):
    return ts.launch(block_reduction, ((x.shape[0],), 64), x, ts.like(shape=(x.shape[0],), dtype="f32"))


@pytest.mark.parametrize("target", ["csl", "csl:2x2", "csl:1x3"])
def test_groups_between_operations_of_a_function(target):
    x = draw(6, 8)
    found = ts.jit(lambda x: reverse(x * 2.0) + 1.0, target=target)(x).numpy()
    np.testing.assert_allclose(found, (x[:, ::-1] + np.roll(x, -1, axis=1)) * 2 + 1, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(ts.jit(sum_rows, target=target)(x).numpy(), x.sum(1), rtol=1e-4, atol=1e-5)


def test_thread_programs_and_loops():
    two_warps = ts.kernel(num_warps=2)(thread_rows.kernel_function)
    launch = lambda x: ts.launch(two_warps, (x.shape[0],), x, ts.like(x))  # noqa: E731
    x = draw(3, 64)
    doubled = ts.jit(lambda x: ts.scan(lambda c, _: (launch(c), None), x, None, length=3)[0], target="csl:2x2")
    np.testing.assert_allclose(doubled(x).numpy(), x * 8, rtol=1e-6)


def test_programs_are_cut_over_the_elements():
    """An element holds its rows, not the whole array."""
    traced = ts.jit(lambda x: reverse(x)).trace(draw(16, 8))
    names = [name for name, _ in driver.iterate_passes(traced.function, driver.find_plan("csl:2x2"))]
    assert names[:2] == ["trace", "group vectorisation"]
    module = driver.lower(traced.function, "csl:2x2")["tile"]
    shapes = {n.out.type.shape for n in module.main.body.nodes if n.op.name == "host.alloc"}
    assert (16, 8) not in shapes
    assert all(f.attrs["group"] == 1 for f in module.functions[1:])


@ts.kernel
def meet(x, out):
    out[tile.program_id(0)] = x[tile.program_id(0)]
    tile.grid_barrier()
    out[tile.program_id(0)] += 1.0


def test_programs_that_wait_for_each_other_are_refused():
    with pytest.raises(UnsupportedOpError, match="wait for each other") as error:
        ts.jit(lambda x: ts.launch(meet, ((4,), 2), x, ts.like(x)), target="csl:2x2")(draw(4))
    assert error.value.location.file == __file__

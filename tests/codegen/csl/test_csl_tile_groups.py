"""Tile groups on a PE agree with the Tile interpreter; faults of kernels are reported with their line."""

import numpy as np
import pytest

import tessera as ts
from tessera import tile
from tessera.codegen.csl.generator import Csl
from tessera.core.errors import ExecutionError, UnsupportedOpError
from tessera.runtime.program import prepare


@ts.kernel
def turned(x, out):
    held, me = tile.alloc_shared((8,), ts.f32), tile.local_id()
    held[me] = x[tile.program_id(0) * 8 + me]
    tile.barrier()
    out[tile.program_id(0) * 8 + me] = held[7 - me]


@ts.kernel
def parted(x, out):
    me, total = tile.local_id(), 0.0
    for i in range(me):
        total += x[i]
    if me % 2 == 0:
        total = -total
    out[me] = total


@ts.kernel
def summed(x, out):
    me = tile.local_id()
    out[me] = tile.warp.reduce_sum(x[me]) + tile.warp.butterfly(x[me], mask=3)


@ts.kernel
def elected(counter, out):
    me = tile.local_id()
    tile.atomic_add(counter[0], 1)
    out[me] = tile.atomic_cas(counter[1], 0, me + 1)


@ts.kernel
def places(x, most, least):
    row = tile.local_id()
    values = tile.load(x[row, 0:5])
    most[row] = tile.argmax(values, axis=0)
    least[row] = tile.argmin(values, axis=0)


@ts.kernel
def positive(x, out):
    i = tile.program_id(0)
    tile.assert_(x[i] > 0.0, "a root")
    out[i] = tile.sqrt(x[i])


def r(*shape):
    return np.random.default_rng(sum(shape)).random(shape, dtype=np.float32) + 0.1


NANS = np.where(r(8, 5) > 0.8, np.float32("nan"), r(8, 5))
CASES = {
    "turned by a barrier": (turned, (r(16), np.zeros(16, np.float32)), 2),
    "branches and loops apart": (parted, (r(8), np.zeros(8, np.float32)), 1),
    "sum of a warp": (summed, (r(8), np.zeros(8, np.float32)), 1),
    "compare and exchange": (elected, (np.zeros(2, np.int32), np.zeros(8, np.int32)), 1),
    "places": (places, (NANS, np.zeros(8, np.int64), np.zeros(8, np.int64)), 1),
}


@pytest.mark.parametrize(("grid", "arch"), [((1, 1), "wse3"), ((2, 2), "wse2")])
@pytest.mark.parametrize("name", CASES)
def test_agrees_with_the_interpreter(name, grid, arch):
    kernel, arrays, programs = CASES[name]
    program = prepare(kernel, [a.copy() for a in arrays], grid=(programs,), group=8)
    wanted = program.run("tile")
    arrays, generator = [a.copy() for a in arrays], Csl(grid)
    generator.runtime(generator.emit(program.levels["tile"], {"arch": arch})).run(arrays)
    for found, want in zip((arrays[i] for i in program.written), wanted, strict=True):
        np.testing.assert_allclose(found, want, rtol=1e-6)


def run(kernel, arrays, programs):
    program = prepare(kernel, arrays, grid=(programs,))
    generator = Csl((1, 2))
    generator.runtime(generator.emit(program.levels["tile"], {})).run(arrays)
    return arrays


def test_true_assertions_are_silent():
    x, out = run(positive, [r(3), np.zeros(3, np.float32)], 3)
    np.testing.assert_allclose(out, np.sqrt(x), rtol=1e-6)


def test_failed_assertions_are_reported_with_their_line():
    with pytest.raises(ExecutionError, match="assertion failed: a root") as found:
        run(positive, [r(3) - 0.5, np.zeros(3, np.float32)], 3)
    assert "test_csl_tile_groups.py" in str(found.value) and "row 0 and column 0" in found.value.received


@ts.kernel
def spoken(x):
    tile.print(x[tile.program_id(0)])


def test_prints_are_errors_with_their_line():
    program = prepare(spoken, [r(3)], grid=(3,))
    with pytest.raises(UnsupportedOpError, match="cannot send text to the host") as found:
        Csl((1, 1)).emit(program.levels["tile"], {})
    assert "test_csl_tile_groups.py" in str(found.value)

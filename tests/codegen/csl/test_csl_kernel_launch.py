"""Kernel launches: one PE runs all programs of a launch in sequence, within the Tile interpreter's bounds."""

import numpy as np
import pytest

import tessera as ts
from tessera import tile
from tessera.codegen.csl.generator import Csl
from tessera.runtime.program import prepare


@ts.kernel
def doubled(x):
    i = tile.program_id(0)
    x[i] *= 2.0


@ts.kernel
def shares(x, out):
    row = tile.program_id(0)
    values = tile.load(x[row, 0:8])
    tile.store(out[row, 0:8], values / tile.sum(values, axis=0))


@ts.kernel
def counted(x, bins):
    i = tile.program_id(0)
    tile.atomic_add(bins[x[i] % 3], 1)


@ts.kernel
def halves(x, out):
    total = 0.0
    i = tile.program_id(0)
    while total < x[i]:
        total += 0.5
    if total > 1.0:
        out[i] = total
    else:
        out[i] = -total


@ts.kernel
def past_the_end(x, out):
    i = tile.program_id(0) * 4
    place = i + tile.arange(0, 4)
    values = tile.load(x[i : i + 4], mask=place < 10, other=-1.0)
    tile.store(out[i : i + 4], values + 1.0, mask=place < 10)


def r(*shape):
    return np.random.default_rng(sum(shape)).random(shape, dtype=np.float32) + 0.1


CASES = {
    "in place": (doubled, (r(6),), 6),
    "rows": (shares, (r(5, 8), np.zeros((5, 8), np.float32)), 5),
    "atomic": (counted, (np.arange(10, dtype=np.int32), np.zeros(3, np.int32)), 10),
    "masked": (past_the_end, (r(10), np.zeros(10, np.float32)), 3),
    "while and if": (halves, (r(7) * 3, np.zeros(7, np.float32)), 7),
}


@pytest.mark.parametrize(("grid", "arch"), [((1, 1), "wse2"), ((2, 2), "wse3")])
@pytest.mark.parametrize("name", CASES)
def test_agrees_with_the_interpreter(name, grid, arch):
    kernel, arrays, programs = CASES[name]
    program = prepare(kernel, arrays, grid=(programs,))
    wanted = program.run("tile")
    arrays = [a.copy() for a in arrays]
    generator = Csl(grid)
    generator.runtime(generator.emit(program.levels["tile"], {"arch": arch})).run(arrays)
    for found, want in zip((arrays[i] for i in program.written), wanted, strict=True):
        np.testing.assert_allclose(found, want, rtol=1e-6)


def test_what_cannot_be_cut_and_does_not_fit_is_an_error_with_the_sizes_and_the_line():
    program = prepare(counted, (np.zeros(20000, np.int32), np.zeros(3, np.int32)), grid=(20000,))
    with pytest.raises(
        ts.errors.ResourceError, match="78 KB of arrays needed.*several programs access the elements of `bins`"
    ) as error:
        Csl((2, 2)).emit(program.levels["tile"], {})
    assert "tile.atomic_add(bins[x[i] % 3], 1)" in str(error.value)

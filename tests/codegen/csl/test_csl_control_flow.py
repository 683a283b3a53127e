"""CSL programs with slices, gathers, conditions and loops stay within the interpreter's bounds."""

import numpy as np
import pytest
from mesh_cases import CASES

import tessera as ts
from tessera.codegen.csl.generator import Csl
from tessera.core.errors import OutOfBoundsError
from tessera.interp import bound
from tessera.runtime import driver


@pytest.mark.parametrize(("grid", "arch"), [((1, 1), "wse3"), ((2, 3), "wse2"), ((1, 4), "wse3")])
@pytest.mark.parametrize("name", CASES)
def test_agrees_with_the_interpreter(name, grid, arch):
    function, args = CASES[name]
    traced = ts.jit(function).trace(*args).function
    module = driver.lower(traced, f"csl:{grid[0]}x{grid[1]}")["tile"]
    generator = Csl(grid)
    found = generator.runtime(generator.emit(module, {"arch": arch})).run(args)
    for one, reference in zip(found, bound.run(traced, args), strict=True):
        assert bound.compare_with_bound(one, reference).ok


@pytest.mark.parametrize("grid", [(1, 1), (2, 2)])
@pytest.mark.parametrize("index", [-8, 7])
def test_an_index_out_of_bounds_is_reported_with_its_line(grid, index):
    x, places = np.ones((7, 3), np.float32), np.array([2, index, 0], np.int32)
    traced = ts.jit(lambda x, i: ts.embedding(x, i)).trace(x, places).function
    generator = Csl(grid)
    runtime = generator.runtime(generator.emit(driver.lower(traced, f"csl:{grid[0]}x{grid[1]}")["tile"], {}))
    with pytest.raises(OutOfBoundsError, match="index is outside axis 0 of size 7") as found:
        runtime.run([x, places])
    assert "test_csl_control_flow.py" in str(found.value) and found.value.expected == "from -7 to 6"

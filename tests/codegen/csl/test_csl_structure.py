"""CSL of programs that move elements between pieces, choose, count and branch, against the interpreter's bounds."""

import pytest
from mesh_cases import CASES

import tessera as ts
from tessera import driver
from tessera.codegen.csl.generator import Csl
from tessera.interp import bound


@pytest.mark.parametrize(("grid", "arch"), [((1, 1), "wse3"), ((2, 3), "wse2"), ((1, 4), "wse3")])
@pytest.mark.parametrize("name", CASES)
def test_agrees_with_the_interpreter(name, grid, arch):
    function, args = CASES[name]
    traced = ts.jit(function).trace(*args).function
    module = driver.lower(traced, f"csl:{grid[0]}x{grid[1]}")["tile"]
    generator = Csl(grid)
    found = generator.runtime(generator.emit(module, {"arch": arch})).run(args)
    for one, reference in zip(found, bound.run(traced, args), strict=True):
        assert bound.compare(one, reference).ok

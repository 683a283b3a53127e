"""How many launches and programs reductions to several results have on a GPU: few results are spread over programs."""

import math

import numpy as np
import pytest

import tessera as ts
from tessera.lower.lowering_plan import LoweringPlan
from tessera.runtime import driver

# shape, axes: the programs of each launch
CASES = {
    ((159, 70781), 0): [553],  # runs of 128 results are programs enough
    ((3000, 500), 0): [125],  # so few elements are one launch
    ((100000, 100), 0): [500, 25],
    ((32000, 1280), 0): [1000, 160],  # 128 results a program, which pad nothing
    ((7, 3045, 576), 1): [945, 126],
    ((4096, 4096), 0): [1024, 128],
    ((396, 491, 875), (0, 2)): [491],
}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_programs(case):
    shape, axes = case
    traced = ts.jit(lambda x: ts.sum(x, axis=axes)).trace(np.broadcast_to(np.float32(0), shape))
    main = driver.lower(traced.function, "ptx")["tile"].main
    grids = [math.prod(n.attrs["grid"]) for n in main.body.walk() if n.op.name == "host.launch"]
    assert grids == CASES[case]


def test_lanes_pad_little():
    plan = LoweringPlan(power_of_two_tiles=True)
    assert [plan.fit_lanes(n, 1024) for n in (4096, 1280, 1000, 640, 309, 100)] == [1024, 256, 1024, 128, 128, 1024]
    assert LoweringPlan().fit_lanes(1280, 1024) == 1024 and plan.fit_lanes(1280, 64) == 64


@pytest.mark.parametrize(("columns", "width"), [(1271, 636), (1975, 1024), (1090, 545), (4096, 1024), (900, 900)])
def test_lanes_of_rows_pad_little(columns, width):
    """On processors a program computes its whole block: of 1271 results, 1024 and 247 would take as long as 2048."""
    traced = ts.jit(lambda x: ts.sum(x, axis=0)).trace(np.broadcast_to(np.float32(0), (2000, columns)))
    module = driver.lower(traced.function, "llvm")["tile"]
    loads = [n for n in module.functions[1].body.walk() if n.op.name == "tile.load"]
    assert {n.attrs["shape"][-1] for n in loads} == {width}

"""The cost model of schedules: counts by hand, and what makes a schedule cost more."""

import numpy as np
import pytest

import tessera as ts
from tessera.runtime import driver
from tessera.runtime.planning import MachineModel, count_work, estimate_seconds

MACHINE = MachineModel("round", 1e9, 2e9, 1e9, 1, 1e9, 0.0, 0.0)


def lower(function, *arrays, **choice):
    return driver.lower(ts.jit(function).trace(*arrays).function, "llvm", choice)["tile"]


def test_a_product_counts_its_loop_rounds_and_padding():
    x, w = np.ones((32, 1024), "f4"), np.ones((1024, 32), "f4")
    module = lower(lambda x, w: x @ w, x, w, m=32, n=32, k=256, programs=1)
    work = count_work(module.functions[1].body)
    assert work.flops == pytest.approx(2 * 32 * 32 * 1024, rel=0.01) and work.matrix_flops == 0
    assert work.bytes == 4 * (32 * 1024 * 2 + 32 * 32)


def test_arithmetic_and_memory_bound_launches():
    x = np.ones((64, 64), "f4")
    exps = estimate_seconds(lower(lambda x: ts.exp(x), x), MACHINE)
    adds = estimate_seconds(lower(lambda x: x + 1.0, x), MACHINE)
    assert adds == pytest.approx(2 * 4 * 64 * 64 / 1e9) and exps == pytest.approx(12 * 64 * 64 / 1e9)


def test_programs_are_dealt_out_in_rounds():
    x = np.ones((96, 4096), "f4")
    module = lower(lambda x: ts.softmax(x), x, programs=3, rows=4096 * 32)
    grid = next(n for n in module.main.body.nodes if "launch" in n.op.name).attrs["grid"]
    times = [estimate_seconds(module, MachineModel("p", p * 1e9, p * 1e9, 1e12, p, 1e12, 0.0, 0.0)) for p in (1, 2, 3)]
    assert grid == (3,) and times[0] == pytest.approx(1.5 * times[1]) and times[0] == pytest.approx(3 * times[2])

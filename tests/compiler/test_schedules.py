"""Passes of users over schedules: the tiles that they set, and that results do not depend on them."""

import numpy as np
import pytest

import tessera as ts
from tessera.compiler import ScheduledKernel, ScheduleGenerator, ScheduleOptimizer, only, passes
from tessera.errors import ArgumentError
from tessera.runtime import driver

R = np.random.default_rng(0)


def schedule_module(function, *args, given):
    with only(given):
        traced = ts.jit(function).trace(*args).function
        modules = dict(driver.iterate_passes(traced, driver.find_plan("llvm")))
    return next(m for name, m in modules.items() if name.startswith(type(given).__name__))


class Tiles(ScheduleOptimizer):
    def __init__(self, **tiles):
        self.tiles = tiles

    def optimize(self, schedule, kernel):
        return self.tile_loops(schedule, **self.tiles)


@pytest.mark.parametrize(
    "tiles", [{"tile_m": 1}, {"tile_m": 3, "tile_n": 5, "tile_k": 7}, {"tile_k": 1}, {"tile_n": 64}]
)
@pytest.mark.parametrize("target", ["llvm", "ptx"])
@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: ts.relu(x @ w) + 1.0,
        lambda x, w: ts.softmax(x) * 2.0,
        lambda x, w: ts.sum(x, axis=0) + ts.sum(x * x),
        lambda x, w: ts.layer_norm(x) @ w,
        lambda x, w: ts.exp(x).T + 0.0,
    ],
)
def test_any_tiles_give_the_same_results(function, target, tiles):
    x, w = R.standard_normal((13, 20)).astype("f4"), R.standard_normal((20, 11)).astype("f4")
    with only(Tiles(**tiles)):
        found = ts.jit(function, target=target)(x, w).numpy()
    np.testing.assert_allclose(found, ts.jit(function)(x, w).numpy(), rtol=2e-5, atol=2e-5)


def test_the_tiles_are_those_that_were_asked_for():
    x, w = R.standard_normal((64, 48)).astype("f4"), R.standard_normal((48, 32)).astype("f4")
    module = schedule_module(lambda x, w: x @ w, x, w, given=Tiles(tile_m=16, tile_n=8, tile_k=12))
    (node,) = [n for n in module.main.body.nodes if n.op.name == "schedule.kernel"]
    assert node.attrs["schedule"]["tile"] == (16, 8, 12) and node.attrs["schedule"]["loop"] == (2,)


def test_what_a_generator_sees():
    seen = {}

    class Generator(ScheduleGenerator):
        def generate(self, kernel, target):
            seen[kernel.name] = kernel
            assert target.plan.pointwise > 0
            return None

    x, w = R.standard_normal((64, 48)).astype("f4"), R.standard_normal((48, 32)).astype("f4")
    with only(Generator()):
        ts.jit(lambda x, w: (x @ w, ts.exp(x), x.T + 0.0, ts.sum(x, axis=-1)), target="llvm")(x, w)
    product = next(k for name, k in seen.items() if "contract" in name)
    assert product.count_flops() == 2 * 64 * 48 * 32
    assert product.count_memory_bytes() == 4 * (64 * 48 + 48 * 32 + 64 * 32)
    assert product.arithmetic_intensity() == product.count_flops() / product.count_memory_bytes()
    assert seen["exp"].memory_access_pattern() == "contiguous" and seen["exp"].count_flops() == 64 * 48
    assert seen["reduce"].count_flops() == 64 * 48
    assert isinstance(product, ScheduledKernel) and "i0=64" in repr(product)


def test_what_is_no_schedule():
    class Wrong(ScheduleOptimizer):
        def optimize(self, schedule, kernel):
            return {"tile_m": 3}

    with passes(Wrong()), pytest.raises(ArgumentError, match="gives no schedule"):
        ts.jit(lambda x: x + 1.0, target="llvm")(np.ones(3, "f4"))
    with pytest.raises(ArgumentError, match="no compiler pass"):
        ts.compiler.schedule_pass(3)
    with pytest.raises(ArgumentError, match="without arguments"):
        ts.compiler.graph_pass(type("Needs", (), {"__init__": lambda self, n: None, "run": lambda self, g: g}))


@pytest.mark.parametrize("count", [0, 1])
def test_empty_and_single_elements(count):
    x = np.ones((count, 3), "f4")
    with only(Tiles(tile_m=2, tile_n=2)):
        assert (ts.jit(lambda x: x * 2.0, target="llvm")(x).numpy() == 2 * x).all()

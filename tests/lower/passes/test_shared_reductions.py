"""Reductions of one value over the same axes, kept by one and dropped by the other, are one reduction."""

import numpy as np
import pytest

import tessera as ts
from tessera.lower.passes.canonicalisation import share_reductions
from tessera.runtime import driver

CASES = {
    "a sum beside its differences": (lambda x: (ts.sum(x, axis=1), x - ts.sum(x, axis=1, keepdims=True)), "ts.sum", 1),
    "kept first": (lambda x: (x / ts.sum(x, axis=0, keepdims=True), ts.sum(x, axis=0)), "ts.sum", 1),
    "axes counted from either end": (
        lambda x: (ts.max(x, axis=(0, -1)), ts.max(x, axis=(0, 1), keepdims=True)),
        "ts.max",
        1,
    ),
    "places": (lambda x: (ts.argmax(x, axis=1), ts.argmax(x, axis=1, keepdims=True)), "ts.argmax", 1),
    "three": (
        lambda x: (ts.min(x, axis=0), ts.min(x, axis=0, keepdims=True), ts.min(x, axis=(0,), keepdims=False)),
        "ts.min",
        1,
    ),
    "other axes": (lambda x: (ts.sum(x, axis=0), ts.sum(x, axis=1, keepdims=True)), "ts.sum", 2),
    "other operands": (lambda x: (ts.sum(x, axis=1), ts.sum(x * x, axis=1, keepdims=True)), "ts.sum", 2),
}


def draw(dtype="f4"):
    return np.random.default_rng(0).standard_normal((13, 37)).astype(dtype)


@pytest.mark.parametrize("case", CASES)
def test_one_node_is_left(case):
    function, op, count = CASES[case]
    graph = driver.lower(ts.jit(function).trace(draw()).function, "ptx")["graph"].main
    made = [n.op.name for n in share_reductions(graph).body.nodes]
    assert made.count(op) == count


@pytest.mark.parametrize("target", ["ptx", "llvm"])
@pytest.mark.parametrize("dtype", ["f4", "f2", "f8"])
@pytest.mark.parametrize("case", CASES)
def test_the_results_stay(case, dtype, target):
    function, x = CASES[case][0], draw(dtype)
    lowered = driver.lower(ts.jit(function).trace(x).function, target)
    for level in ("tile", "target"):
        for ours, want in zip(driver.run_level(lowered, level, [x], target), function(ts.Tensor(x)), strict=True):
            np.testing.assert_allclose(ours, want.numpy(), rtol=2e-3 if dtype == "f2" else 1e-5, atol=1e-3)


def test_a_function_without_such_a_pair_stays_as_it_is():
    graph = driver.lower(ts.jit(lambda x: ts.sum(x, axis=1)).trace(draw()).function, "ptx")["graph"].main
    assert share_reductions(graph) is graph


def test_other_reductions_over_the_same_axes_stay_apart():
    def both(x):
        return ts.sum(x, axis=1), ts.max(x, axis=1), ts.min(x, axis=1, keepdims=True)

    x = draw()
    lowered = driver.lower(ts.jit(both).trace(x).function, "ptx")
    found = driver.run_level(lowered, "tile", [x], "ptx")
    for ours, want in zip(found, (x.sum(1), x.max(1), x.min(1, keepdims=True)), strict=True):
        np.testing.assert_allclose(ours, want, rtol=1e-5)

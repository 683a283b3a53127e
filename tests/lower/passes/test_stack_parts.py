"""What is computed from stacks is computed from their parts: gradients of pools are few kernels."""

import numpy as np
import pytest

import tessera as ts
from tessera.ir.rewrite import eliminate_dead_code
from tessera.lower.passes.canonicalisation import canonicalise
from tessera.ops.tensor import shape
from tessera.runtime import driver


def kernels(function, *arrays, target="ptx"):
    """The number of kernels, and the results on a target and in the interpreter."""
    traced = ts.jit(function).trace(*arrays).function
    levels = driver.lower(traced, target)
    wanted = driver.run_level(driver.lower(traced, "interp"), "graph", list(arrays), "interp")
    return len(levels["tile"].functions) - 1, driver.run_level(levels, "target", list(arrays), target), wanted


@pytest.mark.parametrize("target", ["ptx", "llvm"])
@pytest.mark.parametrize(("pool", "window", "most"), [
    (ts.max_pool2d, (3, 1, 1), 4), (ts.max_pool2d, (2, 2, 0), 3), (ts.max_pool2d, (3, 2, 1), 4),
    (ts.avg_pool2d, (3, 1, 1), 2), (ts.avg_pool2d, (2, 2, 0), 1), (ts.avg_pool2d, (3, 2, 1), 1),
])  # fmt: skip
def test_gradients_of_pools(pool, window, most, target):
    rng = np.random.default_rng(0)
    x = rng.integers(-3, 3, (2, 3, 11, 14)).astype("f4")  # with ties
    y = rng.standard_normal(pool(ts.Tensor(x), *window).shape).astype("f4")
    gradient = ts.grad(lambda x, y: ts.sum(pool(x, *window) * y))
    count, ours, wanted = kernels(gradient, x, y, target=target)
    assert count <= most or target == "llvm"
    np.testing.assert_allclose(ours[0], wanted[0], rtol=1e-6, atol=1e-6)


def test_parts_of_values_of_stacks():
    x = np.random.default_rng(1).standard_normal((4, 6)).astype("f4")

    def function(x):
        parts = [x[:, i : i + 4] for i in range(3)]
        whole = ts.stack(parts, axis=1) * 2.0 + ts.expand_dims(parts[0], 1)
        return ts.sum(whole, axis=1), whole[:, 1], ts.max(whole, axis=1)

    count, ours, wanted = kernels(function, x)
    assert count == 1  # no kernel writes the stack, and small ones are one
    for a, b in zip(ours, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["f4", "f2"])
def test_a_value_of_a_stack_may_be_used_twice(dtype):
    x = np.random.default_rng(1).integers(-40, 40, (4, 6)).astype(dtype) / 8

    def function(x):
        stacked = ts.stack([x, x - 1.0, abs(x)], axis=1)
        total = ts.sum(stacked * stacked, axis=1)  # accumulated in f32, then rounded
        return total * total

    simple = eliminate_dead_code(canonicalise(ts.jit(function).trace(x).function))
    assert shape.concatenate not in {node.op for node in simple.body.nodes}
    _, (ours,), _ = kernels(function, x)
    total = (np.stack([x, x - 1, abs(x)], axis=1) ** 2).astype("f4").sum(1).astype(dtype)
    np.testing.assert_array_equal(ours, total * total)


def test_a_stack_beside_what_is_not_computed_is_reduced_as_it_is():
    x, w = (
        np.random.default_rng(1).integers(-9, 9, (2, 4, 6)).astype("f4"),
        np.arange(48.0, dtype="f4").reshape(4, 3, 4),
    )
    _, (ours,), _ = kernels(lambda x, w: ts.sum(ts.stack([x[:, i : i + 4] for i in range(3)], axis=1) * w, 1), x[0], w)
    windows = np.lib.stride_tricks.sliding_window_view(x[0], 4, axis=1)
    np.testing.assert_array_equal(ours, (windows * w).sum(1))


def test_slices_of_several_parts_stay():
    x = np.arange(24, dtype="f4").reshape(4, 6)
    _, ours, wanted = kernels(lambda x: ts.stack([x, x * 2.0, x - 1.0], axis=0)[1:] + 1.0, x)
    np.testing.assert_array_equal(ours[0], wanted[0])

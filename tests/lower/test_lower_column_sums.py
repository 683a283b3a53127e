"""Sums of columns: parts of the rows side by side, and no memory for cheap values of rows' statistics."""

import numpy as np
import pytest

import tessera as ts
from tessera.ops.dialects import schedule
from tessera.runtime import driver

RNG = np.random.default_rng(5)


def gradient(x, w, g):
    """The gradients of a norm of rows."""

    def inner(x, w):
        return ts.sum(ts.layer_norm(x, (x.shape[1],), w, ts.zeros(x.shape[1])) * g)

    return ts.grad(inner, argnums=[0, 1])(x, w)


def lower(function, *arrays):
    return driver.lower(ts.jit(function).trace(*arrays).function, "llvm")


def find_allocations(levels):
    return [n.attrs["shape"] for n in levels["schedule"].main.body.nodes if n.op.name == "host.alloc"]


@pytest.mark.parametrize("shape", [(4096, 360), (400, 100), (5000, 333)])
def test_a_sum_of_many_rows_is_divided(shape):
    x = RNG.standard_normal(shape).astype("f4")
    levels = lower(lambda x: ts.sum(x, axis=0), x)
    kernels = [n for n in levels["schedule"].main.body.nodes if n.op is schedule.kernel]
    assert (len(kernels) > 1) == (x.size >= 1 << 17)
    for level in ("schedule", "tile", "target"):
        (found,) = driver.run_level(levels, level, [x])
        np.testing.assert_allclose(found, x.astype("f8").sum(0), rtol=1e-5, atol=1e-3, err_msg=level)


def test_the_gradient_of_a_norm_keeps_no_array_of_the_size_of_its_input():
    x, w, g = (RNG.standard_normal(s).astype("f4") for s in ((600, 96), (96,), (600, 96)))
    levels = lower(gradient, x, w, g)
    assert all(np.prod(shape) < x.size for shape in find_allocations(levels))
    torch = pytest.importorskip("torch")
    a, b = (torch.from_numpy(t).double().requires_grad_() for t in (x, w))
    (torch.nn.functional.layer_norm(a, (96,), b) * torch.from_numpy(g)).sum().backward()
    for level in ("schedule", "tile", "target"):
        found = driver.run_level(levels, level, [x, w, g])
        for got, want in zip(found, (a.grad, b.grad), strict=True):
            np.testing.assert_allclose(got, want.numpy(), rtol=2e-4, atol=2e-4, err_msg=level)


def test_a_costly_value_of_rows_is_computed_once():
    """exp is not computed again for the sum of columns, nor is a statistic that no other kernel reads."""
    x = RNG.standard_normal((600, 96)).astype("f4")
    levels = lower(lambda x: ts.sum(ts.softmax(x), axis=0), x)
    assert [600, 96] in [list(s) for s in find_allocations(levels)]
    (found,) = driver.run_level(levels, "target", [x])
    e = np.exp(x - x.max(1, keepdims=True))
    np.testing.assert_allclose(found, (e / e.sum(1, keepdims=True)).sum(0), rtol=1e-5)


def test_a_statistic_that_nothing_else_reads_is_no_reason_to_read_rows_twice():
    x = RNG.standard_normal((600, 96)).astype("f4")
    levels = lower(lambda x: ts.sum((x - ts.mean(x, axis=1, keepdims=True)) * x, axis=0), x)
    assert [600, 96] in [list(s) for s in find_allocations(levels)]
    (found,) = driver.run_level(levels, "target", [x])
    wide = x.astype("f8")
    np.testing.assert_allclose(found, ((wide - wide.mean(1, keepdims=True)) * wide).sum(0), rtol=1e-4)

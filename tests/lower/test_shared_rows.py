"""Kernels of rows that store, besides their result, what other kernels read of the rows."""

import numpy as np
import pytest

import tessera as ts
from tessera.codegen.contract import get_backend
from tessera.runtime import driver

RNG = np.random.default_rng(5)
X, W, G = (RNG.standard_normal(s).astype(np.float32) for s in ((64, 96), (96,), (64, 96)))
TARGETS = RNG.integers(0, 96, 64).astype(np.int32)


def normalise(x, w, g):
    """Both gradients of a norm, and its result."""
    found = ts.layer_norm(x, weight=w)
    _, back = ts.vjp(lambda x, w: ts.layer_norm(x, weight=w), x, w)
    return found, *back(g)


def classify(x, targets, scale):
    """The loss and its gradient."""
    return ts.value_and_grad(lambda x: ts.cross_entropy(x * scale, targets))(x)


PROGRAMS = {
    "norm": (normalise, (X, W, G), "normalize", 3),
    "loss": (classify, (X, TARGETS, np.full((), 2.0, np.float32)), "softmax", 4),
}


def list_stores(module):
    """For each kernel of a Schedule module how many memories it writes."""
    kernels = [n for n in module.main.body.nodes if n.op.name == "schedule.kernel"]
    return [len({m.args[0] for m in n.regions[0].nodes if m.op.name == "schedule.store"}) for n in kernels]


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_first_kernel_stores_what_the_others_need(name):
    program, arrays, kernel, count = PROGRAMS[name]
    levels = driver.lower(ts.jit(program).trace(*arrays).function, "ptx")
    stores = list_stores(levels["schedule"])
    assert max(stores) > 1 and len(stores) == count
    assert any(kernel in n.attrs["kernel"] for n in levels["tile"].main.body.walk() if n.op.name == "host.launch")
    want = driver.run_level(levels, "graph", arrays)
    for level in ("schedule", "tile"):
        for ours, exact in zip(driver.run_level(levels, level, arrays), want, strict=True):
            np.testing.assert_allclose(ours, exact, rtol=2e-4, atol=2e-5)
    artifact = get_backend("ptx").emit(levels["tile"], {"arch": "sm_90a"})
    for ours, exact in zip(get_backend("ptx").interpreter(artifact)(arrays), want, strict=True):
        np.testing.assert_allclose(ours, exact, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("name", PROGRAMS)
def test_other_targets_store_one_result(name):
    program, arrays, *_ = PROGRAMS[name]
    stores = list_stores(driver.lower(ts.jit(program).trace(*arrays).function, "llvm")["schedule"])
    assert stores == [1] * len(stores)


PARTS = {  # of rows that another kernel needs whole
    "the first columns": lambda x, w: (y := ts.exp(x) * w, ts.sum(y[:, :40], axis=1)),
    "one row": lambda x, w: (y := ts.exp(x) * w, ts.sum(y[:1], axis=1)),
    "the first rows": lambda x, w: (y := ts.exp(x) * w, ts.sum(y[:20], axis=1)),
    "a part of a vector": lambda x, w: (y := ts.exp(w) * 2.0, ts.sum(y[:2]), x * y),
    "others": lambda x, w: (y := ts.exp(x) * w, ts.sum(y[:, 1:], axis=1)),
}


@pytest.mark.parametrize("name", PARTS)
def test_what_a_kernel_reads_a_part_of_is_stored_whole(name):
    levels = driver.lower(ts.jit(PARTS[name]).trace(X, W).function, "ptx")
    want = driver.run_level(levels, "graph", [X, W])
    for level in ("schedule", "tile"):
        for ours, exact in zip(driver.run_level(levels, level, [X, W], "ptx"), want, strict=True):
            np.testing.assert_allclose(ours, exact, rtol=2e-5, atol=1e-5)


def measure(x, w):
    """Deviations and means."""
    return ts.std(x, axis=-1, correction=1), ts.mean(x, axis=-1)


def measure_first(x, w):
    """Means, what other kernels make of them, and deviations."""
    m = ts.mean(x, axis=-1)
    return m, ts.exp(m) * w[0], ts.var(x, axis=-1), m + w[1]


def weigh(x, w):
    """A sum of rows of what depends on another result of the rows."""
    m = ts.sum(x, axis=-1)
    e = ts.exp(ts.tanh(m))
    return e.reshape((-1, 4)), ts.sum((x - m[:, None]) ** 2 * e[:, None], axis=-1), ts.cumsum(m)


def centre(x, w):
    """Deviations of rows and of their weighted elements, which share a mean, and the mean over columns."""
    m = ts.mean(x, axis=-1)
    apart = x - m[:, None]
    return ts.sum(apart * apart, axis=-1), ts.max(apart * w, axis=-1), ts.sum(x, axis=0), m.reshape((8, 8))


@pytest.mark.parametrize(("program", "most"), [(measure, 1), (measure_first, 1), (weigh, 2), (centre, 3)])
def test_results_of_what_a_reduction_of_rows_reads(program, most):
    """A kernel that reduces rows stores a sum of them, of which others make results: the rows are read once."""
    levels = driver.lower(ts.jit(program).trace(X, W).function, "ptx")
    launches = [n for n in levels["tile"].main.body.nodes if n.op.name == "host.launch"]
    assert sum(any(v.type.shape == X.shape for v in n.args) for n in launches) <= most
    want = driver.run_level(levels, "graph", [X, W])
    for level in ("schedule", "tile", "target"):
        for ours, exact in zip(driver.run_level(levels, level, [X, W], "ptx"), want, strict=True):
            np.testing.assert_allclose(ours, exact, rtol=2e-4, atol=2e-4, err_msg=level)

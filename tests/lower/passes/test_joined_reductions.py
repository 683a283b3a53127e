"""Multi-output fusion of reductions: those of the same elements are one kernel, and what is computed of their results
alone is computed where these are stored."""

from dataclasses import replace

import numpy as np
import pytest

import tessera as ts
from tessera.lower.lowering_plan import LoweringPlan
from tessera.lower.passes.multi_output_fusion import MemoryMap, find_fusible, is_covered
from tessera.ops.dialects import schedule
from tests.lower.levels import agree, modules, traced

rng = np.random.default_rng(11)
X, G = (rng.standard_normal((24, 40)).astype(np.float32) for _ in range(2))
W = rng.standard_normal(40).astype(np.float32)
PLAN = LoweringPlan(collapse=True)
MANY = replace(PLAN, parallel=264)


def kernels(function, *arrays, plan=PLAN):
    main = modules(traced(function, *arrays)[0], plan)["schedule"].main
    return [n for n in main.body.nodes if n.op is schedule.kernel]


def list_reductions(function, *arrays, plan=PLAN):
    """For each kernel, how many reductions it has."""
    return [sum(n.op is schedule.reduce for n in k.regions[0].nodes) for k in kernels(function, *arrays, plan=plan)]


def shifted_sums(count):
    """Sums over the rows of products with shifted columns, as of the taps of a depthwise convolution."""
    return lambda x, g: tuple(ts.sum(x[:, i : i + 24] * g[:, :24], axis=0) for i in range(count))


SUMS = {  # and the reductions of each kernel
    "of both gradients of a norm": (lambda x, g, w: (ts.sum(x * g, axis=0), ts.sum(g, axis=0)), [2]),
    "of other rows": (lambda x, g, w: (ts.sum(x, axis=0), ts.sum(x, axis=1)), [1, 1]),
    "one of the other": (lambda x, g, w: (u := ts.sum(x, axis=0), ts.max(g * u, axis=0)), [1, 1]),
    "of few elements": (lambda x, g, w: (ts.sum(x, axis=0), ts.max(g, axis=0)), [2]),
}


@pytest.mark.parametrize("name", SUMS)
def test_reductions_of_the_same_elements_are_one_kernel(name):
    function, counts = SUMS[name]
    agree(function, X, G, W)
    assert list_reductions(function, X, G, W) == counts


def test_reductions_that_see_memory_with_other_shapes_are_one_kernel():
    """Rows are divided into parts, as a view or by their indices, which count the same elements."""

    def gradients(x, g, mean):
        return ts.sum((x - mean) * g, axis=0), ts.sum(g, axis=0)

    arrays = [rng.standard_normal((4096, n)).astype(np.float32) for n in (64, 64, 1)]
    plan = replace(PLAN, reduction_parts=16)
    agree(gradients, *arrays, plans={"parts": plan})
    assert list_reductions(gradients, *arrays, plan=plan) == [2, 2]


def test_a_kernel_has_a_bounded_number_of_reductions():
    agree(shifted_sums(11), X, G)
    assert list_reductions(shifted_sums(11), X, G) == [2, 2, 2, 2, 2, 1]
    assert list_reductions(shifted_sums(11), X, G, plan=MANY) == [8, 3]


def narrow_and_scaled(x, g, w):
    total = ts.sum(x, axis=0)
    return total, total.to(ts.f16), total * 2.0 + w


EPILOGUES = {  # and how many kernels there are
    "other forms of a sum": (narrow_and_scaled, 1),
    "of two sums": (lambda x, g, w: (a := ts.sum(x * g, axis=0), b := ts.sum(g, axis=0), a - b * w), 1),
    "of a full sum": (lambda x, g, w: (a := ts.sum(x), ts.sqrt(a * a + 1.0), ts.mean(x).to(ts.f16)), 1),
    "other elements of it": (lambda x, g, w: (a := ts.sum(x, axis=0), ts.flip(a, 0) + w), 2),
    "part of it": (lambda x, g, w: (a := ts.sum(x, axis=0), a[:7] + 1.0), 2),
    "spread": (lambda x, g, w: (a := ts.sum(x, axis=0), x - a), 2),
}


@pytest.mark.parametrize("name", EPILOGUES)
def test_results_are_computed_where_sums_are_stored(name):
    function, count = EPILOGUES[name]
    agree(function, X, G, W)
    assert len(kernels(function, X, G, W)) == count


def test_what_a_mask_leaves_out_is_not_computed_where_it_is_stored():
    both = SUMS["of both gradients of a norm"][0]
    (node,) = kernels(both, X, G, W)
    pointwise = find_fusible(kernels(lambda x, g, w: w + 1.0, X, G, W)[0], MemoryMap({}))
    stores = [n for n in node.regions[0].nodes if n.op is schedule.store]
    assert is_covered(node, pointwise, stores)
    masked = replace(stores[1], args=(*stores[1].args, stores[0].args[1]))
    block = replace(node.regions[0], nodes=tuple(masked if n is stores[1] else n for n in node.regions[0].nodes))
    assert not is_covered(replace(node, regions=(block,)), pointwise, [stores[0], masked])


def test_zeros_of_both_signs_stay_apart():
    def function(x, g, w):
        return ts.maximum(ts.sum(x * 0.0, axis=0), -0.0), ts.sum(x * 0.0, axis=0) * -0.0

    for target in ("llvm", "ptx"):
        got = ts.jit(function, target=target)(X, G, W)
        for ours, exact in zip(got, ts.jit(function, target="interp")(X, G, W), strict=True):
            np.testing.assert_array_equal(np.signbit(ours.numpy()), np.signbit(exact.numpy()))
    both = ts.jit(lambda x: (x * 0.0, x * -0.0), target="llvm")(np.ones(70, np.float32))
    for ours, sign in zip(both, (False, True), strict=True):
        assert (np.signbit(ours.numpy()) == sign).all()


def test_windows_and_their_places_are_one_kernel():
    images = rng.standard_normal((2, 3, 9, 11)).astype(np.float32)

    def pool(x):
        return ts.max_pool2d(x, 3, 2, 1, return_indices=True)

    agree(pool, images)
    assert len(kernels(pool, images, plan=MANY)) == 1


@pytest.mark.parametrize("target", ["llvm", "ptx"])
def test_targets_agree(target):
    for function, _ in (*SUMS.values(), *EPILOGUES.values()):
        want = ts.jit(function, target="interp")(X, G, W)
        got = ts.jit(function, target=target)(X, G, W)
        for ours, exact in zip(got, want, strict=True):
            np.testing.assert_allclose(ours.numpy(), exact.numpy(), rtol=2e-3, atol=1e-4)

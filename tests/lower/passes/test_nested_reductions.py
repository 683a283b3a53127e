"""Reductions of few elements of another reduction's results are one reduction; others stay."""

import numpy as np
import pytest

import tessera as ts
from tessera.runtime import driver

X = np.random.default_rng(0).standard_normal((3, 4, 6, 5)).astype("f4")
FORMS = {  # and the number of reductions that are left
    "of two axes": (lambda x: x.sum(-1).sum(1), 1),
    "kept axes": (lambda x: x.sum(2, keepdims=True).sum((1, 2), keepdims=True), 1),
    "maxima": (lambda x: x.max(1).max(-1), 1),
    "windows": (lambda x: x.reshape((3, 4, 2, 3, 5)).sum(-1).reshape((3, 2, 2, 2, 3)).sum(-2), 1),
    "other kinds": (lambda x: x.max(1).sum(-1), 2),
    "a view of other than rows": (lambda x: x.sum(1).reshape((3, 15, 2)).sum(-1), 2),
    "many elements": (lambda x: x.reshape((1, 4, 6, 15)).sum(-1).sum(1), 1),
    "more elements": (lambda x: x.reshape((1, 4, 15, 6)).sum(2).sum(1).sum(-1), 2),
    "read twice": (lambda x: (s := x.sum(-1)).sum(-1)[..., None] * s, 2),
}


def count_reductions(function, x):
    traced = ts.jit(function).trace(x).function
    graph = dict(driver.iterate_passes(traced, driver.find_plan("ptx")))["dead code"].main
    return sum(n.op.name in ("ts.sum", "ts.max") for n in graph.body.walk())


@pytest.mark.parametrize("form", FORMS)
def test_against_numpy(form):
    function, count = FORMS[form]
    assert count_reductions(function, X) == count
    for target in ("interp", "llvm", "ptx"):
        found = ts.jit(function, target=target)(X)
        if form == "read twice":
            want = X.sum(-1).sum(-1)[..., None] * X.sum(-1)
        else:
            want = function(X)
        np.testing.assert_allclose(found, want, rtol=2e-5, atol=1e-5)


def test_sums_in_narrow_types_are_rounded_twice():
    x = np.float16([[[2048, 1], [1, 1]]])
    function = lambda x: x.sum(-1).sum(-1)  # noqa: E731
    assert count_reductions(function, x) == 2
    assert [ts.jit(function, target=t)(x).tolist() for t in ("interp", "llvm", "ptx")] == [[2050]] * 3


def test_sums_of_one_sum_are_not_negative_zero():
    x = np.full((1, 3, 2), -0.0, "f4")
    for target in ("interp", "llvm", "ptx"):
        found = np.asarray(ts.jit(lambda x: x.sum(-1).sum(0), target=target)(x))
        np.testing.assert_array_equal(np.signbit(found), np.signbit(np.asarray(ts.jit(lambda x: x.sum(-1))(x)))[0])

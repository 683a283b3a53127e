"""Special functions against SciPy."""

import numpy as np
import pytest
import scipy.special

import tessera as ts

POINTS = np.concatenate([np.linspace(-9.97, 9.94, 401), np.geomspace(1e-6, 200, 60)])
UNIT = np.concatenate([np.linspace(-0.999, 0.999, 201), [1e-9, -1e-9, 1 - 1e-12, -1 + 1e-9]])
CASES = {
    "lgamma": (ts.lgamma, scipy.special.gammaln, POINTS),
    "digamma": (ts.digamma, scipy.special.digamma, POINTS),
    "erfinv": (ts.erfinv, scipy.special.erfinv, UNIT),
    "bessel_i0e": (ts.bessel_i0e, scipy.special.i0e, POINTS),
    "bessel_i1e": (ts.bessel_i1e, scipy.special.i1e, POINTS),
    "cbrt": (ts.cbrt, np.cbrt, POINTS),
}


@pytest.mark.parametrize("name", CASES)
def test_values(name):
    function, known, points = CASES[name]
    np.testing.assert_allclose(function(points).numpy(), known(points), 2e-13, 2e-14)
    single = points.astype("f4")
    np.testing.assert_allclose(function(single).numpy(), known(single.astype("f8")).astype("f4"), 3e-7, 1e-37)


@pytest.mark.parametrize("name", CASES)
def test_derivatives(name):
    function, known, points = CASES[name]
    points = points[np.abs(points - np.round(points)) > 0.02][::7] if name != "erfinv" else np.linspace(-0.9, 0.9, 13)
    step = 1e-5
    slope = (known(points + step) - known(points - step)) / (2 * step)
    found = ts.grad(lambda x: ts.sum(function(x)))(ts.Tensor(points)).numpy()
    np.testing.assert_allclose(found, slope, 3e-5, 1e-7)


def test_ends():
    inf = np.inf
    np.testing.assert_array_equal(ts.lgamma([0.0, -1.0, inf, -inf]).numpy(), [inf, inf, inf, inf])
    np.testing.assert_array_equal(ts.digamma([0.0, -1.0, inf]).numpy(), [-inf, np.nan, inf])
    np.testing.assert_array_equal(ts.erfinv([1.0, -1.0, 1.5, np.nan]).numpy(), [inf, -inf, np.nan, np.nan])
    np.testing.assert_array_equal(ts.cbrt([inf, -inf, 0.0, np.nan]).numpy(), [inf, -inf, 0, np.nan])
    np.testing.assert_array_equal(ts.bessel_i1e([inf, -inf, np.nan]).numpy(), [0, 0, np.nan])


def test_compiled():
    x = POINTS[::9].astype("f4")
    for function, _, _ in CASES.values():
        given = np.tanh(x) if function is ts.erfinv else x
        np.testing.assert_allclose(
            ts.jit(lambda x, f=function: f(x), target="cpu")(given).numpy(), function(given).numpy(), 3e-6
        )

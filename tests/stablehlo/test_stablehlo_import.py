"""Programs of JAX, imported from their text, give the values that JAX gives."""

import numpy as np
import pytest

jax = pytest.importorskip("jax")
from jax_functions import CASES  # noqa: E402

import tessera as ts  # noqa: E402


def lower(function, *args, **options):
    return jax.jit(function).lower(*args).as_text(**options)


def check_results(found, want):
    found = found if isinstance(found, tuple) else (found,)
    for a, b in zip(found, jax.tree.leaves(want), strict=True):
        b = np.asarray(b)
        assert a.shape == b.shape and a.dtype.numpy == b.dtype
        scale = {2: 1e-2, 1: 0}.get(b.dtype.itemsize, 2e-5)
        exact = b.dtype.kind in "iub"
        np.testing.assert_allclose(a.numpy().astype("f8"), b.astype("f8"), *((0, 0) if exact else (scale, scale)))


@pytest.mark.parametrize("name", CASES)
def test_values_of_jax(name):
    function, *args = CASES[name]
    lowered = jax.jit(function).lower(*args)
    check_results(ts.stablehlo.load(lowered.as_text())(*args), lowered.compile()(*args))

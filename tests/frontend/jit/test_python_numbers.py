"""Python numbers as arguments of jit functions have weak types: they take the element type of what they meet."""

import numpy as np
import pytest

import tessera as ts
from tessera.core.errors import DTypeError

FUNCTIONS = {
    "product": lambda x, n: x * n,
    "of numbers": lambda x, n: x * (n * 0.5 + 1),
    "reversed": lambda x, n: n - x,
    "power": lambda x, n: x**n,
    "choice": lambda x, n: ts.where(x > n, x, n),
    "maximum": lambda x, n: ts.maximum(x, n),
    "negative": lambda x, n: x / -n,
}


@pytest.mark.parametrize("number", [0.5, 2])
@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32", "int32"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_results_are_those_without_jit(name, dtype, number):
    x = (ts.arange(4) + 1).to(getattr(ts, dtype))
    found, want = ts.jit(FUNCTIONS[name])(x, number), FUNCTIONS[name](x, number)
    assert found.dtype == want.dtype and found.tolist() == want.tolist()


def test_numbers_and_arrays_in_turn():
    scale, x = ts.jit(lambda x, n: x * n), np.ones(3, np.int32)
    found = [scale(x, n).dtype for n in (2, 3, np.int64(2), 2, 2.5, np.int64(3))]
    assert found == [ts.int32, ts.int32, ts.int64, ts.int32, ts.f32, ts.int64]


def test_arrays_of_no_axes_are_not_weak():
    with pytest.raises(DTypeError, match="cannot mix f16 and f32"):
        ts.jit(lambda x, n: x * n)(ts.ones((2,), ts.f16), np.float32(2))


def test_a_number_that_was_rounded_to_f32_is_none_of_f64():
    """Its error would be larger than that of the result's type."""
    with pytest.raises(DTypeError, match="cannot mix f32 and f64"):
        ts.jit(lambda x, n: x * n)(np.ones(3), 0.1)


def test_a_step_of_a_model_in_16_bits():
    parameters = {"a": ts.ones((3,), ts.f16), "b": ts.ones((2,), ts.f32)}
    step = ts.jit(lambda p, rate: ts.tree.map(lambda t: t - rate * t, p))
    for rate in (0.5, 0.25):
        found = step(parameters, rate)
        assert [(t.dtype, t.tolist()[0]) for t in found.values()] == [(ts.f16, 1 - rate), (ts.f32, 1 - rate)]


def test_traced_loops_and_derivatives():
    x = ts.ones((3,), ts.f16)
    assert ts.jit(lambda x, n: ts.grad(lambda x: (x * n).sum())(x))(x, 0.5).tolist() == [0.5] * 3
    assert ts.jit(lambda x, n: ts.vmap(lambda row: row * n)(x))(x, 0.5).dtype == ts.f16
    scanned = ts.jit(lambda x, n: ts.scan(lambda c, _: (c * n, c), x, np.zeros(2, np.float32))[0])(x, 0.5)
    assert (scanned.dtype, scanned.tolist()) == (ts.f16, [0.25] * 3)

"""`ts.debug.error_bound`: the certain digits of results, against exact arithmetic, and the line that lost them."""

import math
from fractions import Fraction

import numpy as np
import pytest

import tessera as ts
from tessera.core.errors import ArgumentError, ExecutionError


def test_cancellation_is_named_with_its_line():
    def f(x):
        y = 1.0 + x
        return y - 1.0

    x = np.float32([1e-5])
    found = ts.debug.error_bound(f)(x)
    exact = Fraction(float(x[0]))
    off = abs(Fraction(float(ts.jit(f)(x).numpy()[0])) - exact)
    assert off <= found.results[0].radius[0] and found.digits == pytest.approx(2.2, abs=0.5)
    assert -math.log10(off / exact) >= found.digits  # the actual digits are at least those
    assert found.losses[0].op == "ts.sub"
    assert found.losses[0].location.line == f.__code__.co_firstlineno + 2
    assert "correct digits" in str(found) and "lost by ts.sub at" in str(found)


def test_an_exact_function_has_all_digits():
    found = ts.debug.error_bound(lambda x: x[::-1] * 2.0)(np.float32([1.0, 3.0]))
    assert found.digits == 17.0 and not found.losses


def test_narrow_types_have_few_digits():
    x = np.random.default_rng(0).uniform(1, 2, 64).astype(np.float32)
    wide = ts.debug.error_bound(lambda x: ts.sum(x * 1.1))(x)
    narrow = ts.debug.error_bound(lambda x: ts.sum(ts.cast(ts.cast(x, dtype=ts.bf16) * 1.1, dtype=ts.f32)))(x)
    assert 4.5 < wide.digits < 7.3 and 1.5 < narrow.digits < 3.0


def test_gradients_and_jit_functions():
    found = ts.debug.error_bound(ts.jit(ts.grad(lambda x: ts.sum(ts.exp(x) * x))))(np.float32([0.5, -2.0]))
    assert 5.0 < found.digits < 8.0 and len(found.results) == 1


def test_refusals():
    with pytest.raises(ArgumentError, match="takes a function"):
        ts.debug.error_bound(3)
    with pytest.raises(ExecutionError, match="rounding may change"):
        ts.debug.error_bound(lambda x: ts.cond(x.sum() > 0, lambda: x, lambda: -x))(np.float32([1e8, 1.0, -1e8]))

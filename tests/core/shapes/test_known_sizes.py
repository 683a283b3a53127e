"""Named sizes in the body of a function: numbers where a trace knows them, symbolic where types are checked."""

import math
from typing import TypeVar

import numpy as np
import pytest

import tessera as ts
from tessera.core.errors import ShapeError
from tessera.core.symbolic_dim import UnknownSizeError

B, D = ts.dims("B D")
X = np.ones((2, 4), "f4")
BODIES = {
    "function": (lambda x: x / ts.sqrt(D), X / 2),
    "python": (lambda x: x / math.sqrt(D) + 1 / D + D**0.5 + D / 2, X / 2 + 0.25 + 4),
    "factor": (lambda x: D * x + x * D, X * 8),
    "shape": (lambda x: x + ts.zeros((B, D)) + ts.arange(D).to(ts.f32), X + np.arange(4)),
    "reshape": (lambda x: x.reshape(D, B), X.reshape(4, 2)),
    "slice": (lambda x: x[:, : D // 2], X[:, :2]),
}


@pytest.mark.parametrize("name", BODIES)
def test_sizes_are_numbers_in_a_trace(name):
    body, want = BODIES[name]

    def function(x: ts.Tensor[B, D]):
        return body(x)

    for target in ("interp", "llvm"):
        out = ts.jit(function, target=target)(X)
        np.testing.assert_allclose(out, want, rtol=1e-6)
    assert ts.check(function).ok


def test_a_type_variable_is_its_name():
    size = TypeVar("size")

    def function(x: ts.Tensor["B", size]):
        return x / ts.sqrt(size)

    assert ts.jit(function)(X).tolist() == (X / 2).tolist()


def test_a_check_goes_on_behind_a_size():
    def attention(q: ts.Tensor[B, D], k: ts.Tensor[B, D]) -> ts.Tensor[B, D]:
        return ts.softmax(q @ k.T / ts.sqrt(D))

    assert 'Received: Tensor["B", "B"]' in str(ts.check(attention))


def test_outside_a_trace_nobody_knows_them():
    for call in (lambda: ts.sqrt(D), lambda: ts.ones((2,)) * D, lambda: float(D)):
        with pytest.raises(UnknownSizeError):
            call()
    with pytest.raises(ShapeError):
        ts.ones((2, 4)).reshape(D, B)

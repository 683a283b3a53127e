"""Routines of the library as functions: what comes out for what goes in, and where their errors point."""

import inspect

import numpy as np
import pytest

import tessera as ts
from tessera import stdlib
from tessera.core.errors import DTypeError, ShapeError, TraceError


def test_tensors_come_out_where_one_goes_in(rng):
    x = rng.random((3, 8), dtype="f4")
    plain, tensor = stdlib.stable_softmax(x), stdlib.stable_softmax(ts.Tensor(x))
    assert type(plain) is np.ndarray and isinstance(tensor, ts.Tensor)
    np.testing.assert_array_equal(plain, tensor.numpy())
    loss, gradient = stdlib.cross_entropy(ts.Tensor(x), np.array([0, 1, 2]), gradient=True)
    assert isinstance(loss, ts.Tensor) and gradient.shape == (3, 8)
    bf16 = ts.Tensor(x).to(ts.bf16)
    assert stdlib.rms_norm(bf16).dtype == ts.bf16
    assert isinstance(stdlib.tree_sum(ts.Tensor(x)), ts.Tensor)


def test_in_place_as_before(rng):
    param = ts.Tensor(rng.random(10, dtype="f4"))
    before = param.numpy().copy()
    m, v = ts.zeros((10,)), ts.zeros((10,))
    assert stdlib.fused_adam(param, ts.ones((10,)), m, v, step=1) is None
    assert (param.numpy() < before).all() and (m.numpy() > 0).all()


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: stdlib.stable_softmax(np.arange(4)), DTypeError),
        (lambda: stdlib.matmul(np.ones((3, 4), "f4"), np.ones((5, 6), "f4")), ShapeError),
        (lambda: stdlib.rotary_embedding(np.ones((2, 3), "f4")), ShapeError),
        (lambda: ts.jit(lambda x: stdlib.fused_adam(x, x, x, x, step=1))(ts.ones((4,))), TraceError),
    ],
)
def test_errors_point_at_the_call(call, error):
    with pytest.raises(error) as found:
        call()
    assert found.value.location.file == __file__ and found.value.location.line == inspect.getsourcelines(call)[1]

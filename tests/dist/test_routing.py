"""Tokens to experts and back: the weighted sum of the chosen experts, and its gradients, as without routing."""

import numpy as np
import pytest

import tessera as ts
from tessera.errors import ArgumentError, OutOfBoundsError, ShapeError, TraceError


class Mixture(ts.nn.Module):
    def __init__(self, count=3):
        self.experts = [ts.nn.Linear(4, 4).on(f"gpu:{i % 2}") for i in range(count)]

    @ts.expert_parallel
    def forward(self, x, weights, indices):
        sent = ts.all_to_all(x, indices, src_axis="batch", dst_axis="expert")
        return ts.all_to_all(ts.parallel_apply(self.experts, sent), weights, src_axis="expert", dst_axis="batch")


def compute(model, x, weights, indices):
    """Each token through its experts, one by one."""
    rows = []
    for t in range(x.shape[0]):
        chosen = np.atleast_1d(indices[t])
        parts = [model.experts[int(e)](x[t : t + 1]) * weights[t].reshape((-1,))[k] for k, e in enumerate(chosen)]
        rows.append(sum(parts[1:], parts[0]))
    return ts.concatenate(rows, axis=0)


@pytest.mark.parametrize("choices", [None, 1, 2])
def test_values_and_gradients(choices):
    rng, model = np.random.default_rng(0), Mixture()
    shape = (7,) if choices is None else (7, choices)
    x, weights = (ts.Tensor(rng.standard_normal(s).astype("f4")) for s in ((7, 4), shape))
    indices = np.array([[2, 0], [2, 1], [0, 2], [2, 0], [0, 1], [2, 1], [0, 2]])[:, : choices or 1].reshape(shape)
    found = model(x, weights, ts.Tensor(indices))
    np.testing.assert_allclose(found.numpy(), compute(model, x, weights, indices).numpy(), rtol=1e-5, atol=1e-6)
    run = ts.grad(lambda x, w: (model(x, w, ts.Tensor(indices)) ** 2.0).sum(), argnums=(0, 1))
    want = ts.grad(lambda x, w: (compute(model, x, w, indices) ** 2.0).sum(), argnums=(0, 1))
    for a, b in zip(run(x, weights), want(x, weights), strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-4, atol=1e-5)


def test_refusals():
    model, x, w = Mixture(), ts.ones((2, 4)), ts.ones((2,))
    with pytest.raises(OutOfBoundsError, match="no such expert"):
        model(x, w, ts.Tensor(np.array([0, 3])))
    with pytest.raises(ShapeError, match="do not fit the tokens"):
        model(x, w, ts.Tensor(np.array([0, 1, 2])))
    with pytest.raises(ShapeError, match="a weight for each choice|do not fit"):
        model(x, ts.ones((3,)), ts.Tensor(np.array([0, 1])))
    with pytest.raises(ArgumentError, match="has no experts"):
        ts.expert_parallel(lambda self: None)(model.experts[0])
    with pytest.raises(ArgumentError, match="this all_to_all has no experts"):
        ts.all_to_all(x, w, src_axis="batch", dst_axis="expert")
    with pytest.raises(TraceError, match="not known in a trace"):
        ts.jit(lambda i: model(x, w, i))(ts.Tensor(np.array([0, 1])))

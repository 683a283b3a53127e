"""Gradients under numeric contexts: they have the types of the primals, so that what follows computes in these."""

import numpy as np
import pytest

import tessera as ts
from tessera import nn, optim


def loss(w, x):
    return ts.mean(ts.tanh(x @ w) ** 2)


@pytest.mark.parametrize("inside", [False, True])
def test_gradients_have_no_policy(inside):
    w, x = ts.randn((4, 2)), ts.randn((3, 4))
    context = ts.precision("mixed")
    if inside:
        with context:
            found = ts.grad(loss)(w, x)
    else:
        found = ts.grad(lambda w, x: context(loss)(w, x))(w, x)
    assert found.type == w.type
    np.testing.assert_allclose(found, ts.grad(loss)(w, x), rtol=0.02, atol=2e-3)


def test_the_tape_gives_gradients_without_a_policy():
    w = ts.Tensor(np.ones((4, 2), "f4"), requires_grad=True)
    with ts.precision("mixed"):
        loss(w, ts.ones((3, 4))).backward()
    assert w.grad.type.policy is None


def test_a_policy_of_the_primal_stays():
    x = ts.Tensor([1.0, 2.0], ts.f32 @ ts.accum(ts.f32) @ ts.compute(ts.bf16))
    assert ts.grad(lambda x: ts.sum(x * x))(x).type == x.type


def test_a_cast_to_an_element_type_removes_the_policy():
    x = ts.Tensor([2048.0], ts.f32 @ ts.compute(ts.f16))
    assert (x + 1.0).tolist() == [2048.0] and (ts.cast(x, ts.f32) + 1.0).tolist() == [2049.0]


@pytest.mark.parametrize("target", ["interp", "llvm"])
def test_adam_trains_in_mixed_precision(target):
    """Adam's eps is 0 in f16, and small squares are."""
    ts.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = optim.Adam(lr=1e-2)
    x = ts.randn((16, 4))
    y = ts.sum(x, axis=1, keepdims=True) * 1e-3

    @ts.jit(target=target)
    def step(model, state):
        with ts.precision("mixed"):
            value, grads = ts.value_and_grad(lambda m: ts.mean((m(x) - y) ** 2))(model)
        return value, *optimizer.update(model, grads, state)

    state, values = optimizer.init(model), []
    for _ in range(20):
        value, model, state = step(model, state)
        values.append(float(value))
    assert np.isfinite(values).all() and values[-1] < 0.5 * values[0]

"""The example whose attention and norms are kernels: it trains, and each step equals that of ts operations."""

import numpy as np
import pytest

import tessera as ts
from examples import transformer_kernels as example

TOKENS = np.random.default_rng(2).integers(0, example.TOKENS, (example.BATCH, example.LENGTH))


def normalise(x, scale):
    return ts.rms_norm(x, scale, eps=1e-5)


def mix(x, w):
    shape = (example.BATCH, example.LENGTH, example.HEADS, example.WIDTH // example.HEADS)
    q, k, v = (ts.permute(ts.reshape(x @ w[n], shape=shape), axes=(0, 2, 1, 3)) for n in "qkv")
    found = ts.permute(ts.scaled_dot_product_attention(q, k, v, causal=True), axes=(0, 2, 1, 3))
    return ts.reshape(found, shape=x.shape) @ w["o"]


@pytest.mark.parametrize("target", ("interp", "llvm"))
def test_a_step_equals_that_of_operations(target, monkeypatch):
    weights = example.make_weights()
    value, gradient = ts.jit(ts.value_and_grad(example.loss), target=target)(weights, TOKENS)
    monkeypatch.setattr(example, "normalise", normalise)
    monkeypatch.setattr(example, "mix", mix)
    expected, reference = ts.value_and_grad(example.loss)(weights, TOKENS)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    for name in weights:
        np.testing.assert_allclose(gradient[name], reference[name], atol=2e-6, err_msg=name)


def test_it_learns():
    losses = example.train("llvm", 40)
    assert losses[0] > 2 and max(losses[-3:]) < 0.1

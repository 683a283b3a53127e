"""Routines of the library in traced functions: values and gradients equal those of ts operations, on each target."""

import numpy as np
import pytest

import tessera as ts
from tessera import stdlib

TARGETS = ("interp", "llvm", "ptx")
RANDOM = np.random.default_rng(3)


def random(*shape):
    return RANDOM.standard_normal(shape).astype("f4")


def attention(q, k, v):
    """Attention in which two heads of queries share one of keys."""
    k, v = (ts.repeat(t, 2, axis=1) for t in (k, v))
    return ts.scaled_dot_product_attention(q, k, v, causal=True)


def rotated(x):
    """Rotation of the pairs (i, i + D/2) by the angle of position and pair."""
    length, half = x.shape[1], x.shape[2] // 2
    angle = np.arange(length)[:, None] * 10000.0 ** (-np.arange(half) / half)
    c, s, left, right = np.cos(angle).astype("f4"), np.sin(angle).astype("f4"), x[..., :half], x[..., half:]
    return ts.concatenate([left * c - right * s, right * c + left * s], axis=-1)


LABELS = np.array([1, 0, 3, 3, 2])
PAIRS = {
    "softmax": (stdlib.stable_softmax, lambda x: ts.softmax(x, axis=-1), random(3, 5, 20)),
    "layer norm": (
        stdlib.efficient_layernorm, lambda x, w, b: ts.layer_norm(x, (20,), w, b),
        random(7, 20), random(20), random(20),
    ),
    "rms norm": (stdlib.rms_norm, lambda x, w: ts.rms_norm(x, w, eps=1e-5), random(7, 20), random(20)),
    "matmul": (
        lambda a, b, c: stdlib.matmul(a, b, c, activation="gelu"), lambda a, b, c: ts.gelu(a @ b + c),
        random(5, 9), random(9, 7), random(7),
    ),
    "one right matrix": (stdlib.batched_matmul, lambda a, b: a @ b, random(3, 5, 9), random(1, 9, 4)),
    "several by one and one by several": (
        stdlib.batched_matmul, lambda a, b: a @ b, random(2, 1, 5, 9), random(1, 3, 9, 4),
    ),
    "one left matrix": (stdlib.batched_matmul, lambda a, b: a @ b, random(1, 5, 9), random(3, 9, 4)),
    "batched": (stdlib.batched_matmul, lambda a, b: a @ b, random(3, 5, 9), random(9, 4)),
    "attention": (
        lambda *x: stdlib.flash_attention(*x, causal=True), attention,
        random(2, 4, 9, 8), random(2, 2, 9, 8), random(2, 2, 9, 8),
    ),
    "rotary": (stdlib.rotary_embedding, rotated, random(2, 6, 8)),
    "tree sum": (stdlib.tree_sum, lambda x: x.sum(), random(70)),
    "cross entropy": (lambda x: stdlib.cross_entropy(x, LABELS), lambda x: ts.cross_entropy(x, LABELS), random(5, 6)),
}  # fmt: skip


def weigh(function):
    def loss(*args):
        y = function(*args)
        return (y * ts.Tensor(np.cos(np.arange(y.size, dtype="f4")).reshape(y.shape))).sum()

    return loss


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", PAIRS)
def test_values_and_gradients(name, target):
    own, other, *args = PAIRS[name]
    places = tuple(range(len(args)))
    np.testing.assert_allclose(
        ts.jit(lambda *x: own(*x), target=target)(*args), other(*map(ts.Tensor, args)), atol=3e-5
    )
    found = ts.jit(ts.grad(weigh(own), places), target=target)(*args)
    for g, expected in zip(found, ts.grad(weigh(other), places)(*args), strict=True):
        np.testing.assert_allclose(g, expected, atol=1e-4)


def test_gradients_by_the_tape():
    x = ts.Tensor(random(4, 20), requires_grad=True)
    weigh(stdlib.stable_softmax)(x).backward()
    np.testing.assert_allclose(x.grad, ts.grad(weigh(lambda v: ts.softmax(v, axis=-1)))(x.numpy()), atol=1e-5)


def test_a_batch_of_routines():
    x = random(3, 2, 20)
    np.testing.assert_allclose(ts.vmap(stdlib.stable_softmax)(x), ts.softmax(ts.Tensor(x), axis=-1), atol=1e-6)

"""Normalisations, softmax, Adam and rotary embedding against their published formulas in f64."""

import numpy as np
import pytest

from tessera import set_default_device
from tessera.core.errors import ArgumentError, DTypeError, ShapeError
from tessera.core.schedule import Schedule
from tessera.core.types import BY_NAME
from tessera.stdlib import efficient_layernorm, fused_adam, rms_norm, rotary_embedding, stable_softmax

TOLERANCE = {"f32": 3e-6, "f16": 4e-3, "bf16": 3e-2}
SHAPES = [(1,), (3, 700), (2, 9, 33)]


@pytest.fixture(params=["interp", "cpu"], autouse=True)
def device(request):
    """Every test runs in the interpreter and on the llvm target."""
    set_default_device(request.param)
    yield request.param
    set_default_device("interp")


@pytest.fixture(params=TOLERANCE)
def make(request, rng):
    """make(*shape) gives normal numbers of one element type; make.tolerance is its tolerance."""

    def made(*shape):
        return rng.standard_normal(shape).astype(BY_NAME[request.param].numpy)

    made.tolerance = TOLERANCE[request.param]
    return made


def wide(x):
    return np.asarray(x).astype("f8")


def close(found, want, make):
    np.testing.assert_allclose(wide(found), want, atol=make.tolerance, rtol=make.tolerance)


@pytest.mark.parametrize("shape", SHAPES)
def test_norms(shape, make):
    x, w, b = make(*shape), make(shape[-1]), make(shape[-1])
    X = wide(x)
    square = (X * X).mean(-1, keepdims=True)
    layer = (X - X.mean(-1, keepdims=True)) / np.sqrt(X.var(-1, keepdims=True) + 1e-5) * wide(w) + wide(b)
    close(efficient_layernorm(x, w, b), layer, make)
    close(rms_norm(x, w, eps=1e-3), X / np.sqrt(square + 1e-3) * wide(w), make)
    small = efficient_layernorm.with_schedule(Schedule(block=(2, 16)))
    close(small(x, w, b), layer, make)


@pytest.mark.parametrize("shape", SHAPES)
def test_softmax(shape, make):
    x = make(*shape) * make(1) * 30
    e = np.exp(wide(x) - wide(x).max(-1, keepdims=True))
    close(stable_softmax(x), e / e.sum(-1, keepdims=True), make)


def test_softmax_of_infinities():
    x = np.full((2, 40), -np.inf, "f4")
    x[0, 30] = 1.0
    found = stable_softmax.with_schedule(Schedule(block=(1, 8)))(x)
    assert found[0, 30] == 1.0 and found[0].sum() == 1.0 and np.isnan(found[1]).all()


@pytest.mark.parametrize("decoupled", [False, True])
def test_adam(decoupled, make):
    p, state = make(777), np.float32
    m, v, want, M, V = np.zeros(777, state), np.zeros(777, state), wide(p), 0.0, 0.0
    for step in (1, 2, 3):
        g = make(777)
        G = wide(g) + (0.0 if decoupled else 0.1 * want)
        want = want * (1 - 1e-2 * 0.1) if decoupled else want
        M, V = 0.9 * M + 0.1 * G, 0.99 * V + 0.01 * G * G
        want = want - 1e-2 * (M / (1 - 0.9**step)) / (np.sqrt(V / (1 - 0.99**step)) + 1e-8)
        fused_adam(p, g, m, v, step=step, lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1, decoupled=decoupled)
    close(p, want, make)
    assert abs(m - M).max() < 1e-2 and abs(v - V).max() < 1e-2


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_is_a_complex_product(interleaved, make):
    x = make(2, 3, 70, 16)
    X = wide(x)
    p, q = (X[..., ::2], X[..., 1::2]) if interleaved else (X[..., :8], X[..., 8:])
    turned = (p + 1j * q) * np.exp(1j * np.arange(5, 75)[:, None] * 10000.0 ** (-np.arange(8) / 8))
    parts = [turned.real, turned.imag]
    want = np.stack(parts, -1).reshape(x.shape) if interleaved else np.concatenate(parts, -1)
    close(rotary_embedding(x, offset=5, interleaved=interleaved), want, make)


def test_refusals(device):
    x = np.zeros((2, 4), "f4")
    with pytest.raises(DTypeError, match="`weight` and `x` hold different types"):
        rms_norm(x, np.zeros(4))
    with pytest.raises(DTypeError, match="`x` holds int64"):
        stable_softmax(np.arange(3))
    with pytest.raises(ShapeError, match="`bias` does not fit"):
        efficient_layernorm(x, None, np.zeros(3, "f4"))
    with pytest.raises(ArgumentError, match="written in place"):
        fused_adam(x.T, x.T, x.T.copy(), x.T.copy(), step=1)
    with pytest.raises(ArgumentError, match="step=0 is no step"):
        fused_adam(x, x, x, x, step=0)
    with pytest.raises(ShapeError, match="rotates pairs"):
        rotary_embedding(np.zeros((2, 3), "f4"))


def test_nothing_gives_nothing():
    assert stable_softmax(np.zeros((0, 5), "f4")).shape == (0, 5)
    assert rms_norm(np.zeros((3, 0), "f4")).shape == (3, 0)

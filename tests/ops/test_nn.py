"""Composites of neural networks against their formulas in Python's math; error bounds are in tests/interp."""

import math

import numpy as np
import pytest

from tessera.core.errors import ArgumentError, DTypeError, ShapeError
from tessera.core.types import bf16, f16, f32, f64, int32
from tessera.frontend.jit.tracing import Jit
from tessera.interp.bound import compare_with_bound, run
from tessera.ir.tensor import Tensor
from tessera.ops.tensor import nn

ROW = [-3.0, -0.5, 0.0, 0.25, 2.0]


def normal(x):
    return 0.5 * (1 + math.erf(x / math.sqrt(2)))


POINTWISE = {
    nn.relu: lambda x: max(x, 0.0),
    nn.sigmoid: lambda x: 1 / (1 + math.exp(-x)),
    nn.silu: lambda x: x / (1 + math.exp(-x)),
    nn.gelu: lambda x: x * normal(x),
}


@pytest.mark.parametrize("op", POINTWISE, ids=lambda o: o.__name__)
@pytest.mark.parametrize(("dtype", "rtol"), ((f64, 1e-14), (f32, 3e-6), (f16, 1e-3), (bf16, 8e-3)), ids=str)
def test_pointwise(op, dtype, rtol):
    out = op(Tensor(ROW, dtype))
    assert out.dtype == dtype
    np.testing.assert_allclose(out.numpy().astype(float), [POINTWISE[op](x) for x in ROW], rtol=rtol)


def test_tanh_gelu():
    def formula(x):
        return 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

    out = nn.gelu(Tensor(ROW, f64), approximate="tanh").numpy()
    np.testing.assert_allclose(out, [formula(x) for x in ROW], rtol=1e-13)


def softmax(row):
    top = max(row)
    e = [math.exp(x - top) for x in row]
    return [v / math.fsum(e) for v in e]


def test_softmax():
    x = np.array([ROW, [1000.0, 0, 0, -1000, 1000]])
    want = [softmax(r) for r in x.tolist()]
    np.testing.assert_allclose(nn.softmax(Tensor(x)).numpy(), want, rtol=1e-14)
    np.testing.assert_allclose(nn.softmax(Tensor(x.T), axis=0).numpy().T, want, rtol=1e-14)
    np.testing.assert_allclose(nn.log_softmax(Tensor([ROW], f64)).numpy(), np.log([softmax(ROW)]), rtol=1e-13)


def norm(row, eps, center=True):
    middle = math.fsum(row) / len(row) if center else 0.0
    d = [x - middle for x in row]
    return [v / math.sqrt(math.fsum(t * t for t in d) / len(d) + eps) for v in d]


def test_norms():
    x, w, b = Tensor([ROW], f64), Tensor([1.0, 2, 3, 4, 5], f64), Tensor([0.5] * 5, f64)
    np.testing.assert_allclose(nn.layer_norm(x, 5).numpy()[0], norm(ROW, 1e-5), rtol=1e-12)
    scaled = np.array(norm(ROW, 1e-3)) * w.numpy() + 0.5
    np.testing.assert_allclose(nn.layer_norm(x, (5,), w, b, eps=1e-3).numpy()[0], scaled, rtol=1e-12)
    plain = np.array(norm(ROW, 0, center=False))
    np.testing.assert_allclose(nn.rms_norm(x, w, eps=0.0).numpy()[0], plain * w.numpy(), rtol=1e-12)
    both = nn.layer_norm(Tensor(np.array([ROW, ROW]) * [[1], [2]]), (2, 5)).numpy()
    np.testing.assert_allclose(both.ravel(), norm(ROW + [2 * v for v in ROW], 1e-5), rtol=1e-12)


def attention(q, k, v, mask=None, causal=False):
    """One query at a time."""
    out = []
    for i, query in enumerate(q):
        added = [0.0] * len(k) if mask is None else mask[i]
        s = [float(query @ key) / math.sqrt(len(query)) + m for key, m in zip(k, added, strict=True)]
        s = [x if not causal or j <= i else -math.inf for j, x in enumerate(s)]
        out.append(sum(p * row for p, row in zip(softmax(s), v, strict=True)))
    return np.array(out)


def test_attention(rng):
    q, k, v = rng.normal(size=(4, 8)), rng.normal(size=(6, 8)), rng.normal(size=(6, 3))
    mask = np.where(rng.random((4, 6)) < 0.3, -np.inf, rng.normal(size=(4, 6)))
    mask[:, 0] = 0
    sdpa = nn.scaled_dot_product_attention
    np.testing.assert_allclose(sdpa(*map(Tensor, (q, k, v))).numpy(), attention(q, k, v), rtol=1e-12)
    np.testing.assert_allclose(
        sdpa(*map(Tensor, (q, k, v, mask)), causal=True).numpy(), attention(q, k, v, mask, True), rtol=1e-12
    )
    torch_names = sdpa(*map(Tensor, (q, k, v)), attn_mask=Tensor(mask), is_causal=True)
    np.testing.assert_allclose(torch_names.numpy(), attention(q, k, v, mask, True), rtol=1e-12)
    batch = sdpa(*(Tensor(np.stack([t, 2 * t])) for t in (q, k, v)), scale=1 / math.sqrt(8))
    np.testing.assert_allclose(batch.numpy()[1], attention(2 * q, 2 * k, 2 * v), rtol=1e-12)


def test_weights_of_attention_are_rounded_as_asked_for(rng):
    q, k, v = (rng.normal(size=(9, 8)).astype(bf16.numpy) for _ in range(3))
    wide = [x.astype(np.float64) for x in (q, k, v)]
    power = np.exp(wide[0] @ wide[1].T / math.sqrt(8) - np.max(wide[0] @ wide[1].T / math.sqrt(8), -1, keepdims=True))
    for weights, narrow in ((None, power.astype(bf16.numpy)), ("f32", power), ("f16", power.astype(np.float16))):
        found = nn.scaled_dot_product_attention(*map(Tensor, (q, k, v)), weights=weights).numpy()
        want = (narrow.astype(np.float64) @ wide[2] / power.sum(-1, keepdims=True)).astype(bf16.numpy)
        np.testing.assert_allclose(found.astype(np.float64), want.astype(np.float64), rtol=2.0**-8, atol=1e-6)
        assert np.mean(found == want) > 0.95  # the same but where f32 and f64 lie on two sides of a tie
    with pytest.raises(DTypeError, match="weights of attention in"):
        nn.scaled_dot_product_attention(*map(Tensor, (q, k, v)), weights="int8")


def test_a_rough_cast_may_lose_what_is_subnormal():
    x = np.array([1.0, 2.0**-130, 1.5 * 2.0**-126], np.float32)
    (bound,) = run(Jit(lambda x: nn.rough_cast(x, dtype=bf16)).trace(x).function, [x])
    assert (
        compare_with_bound(x, bound).ok
        and compare_with_bound(x * [1, 0, 1], bound).ok
        and not compare_with_bound(x * [1, 1, 0], bound).ok
    )
    assert not compare_with_bound(x * [0, 1, 1], bound).ok and nn.rough_cast(Tensor(x), dtype=bf16).numpy()[1] == x[1]


def test_errors():
    with pytest.raises(ShapeError, match="axis 1 is out of range"):
        nn.softmax(Tensor(ROW), axis=1)
    with pytest.raises(ArgumentError, match="takes 4 operands"):
        nn.scaled_dot_product_attention(Tensor([ROW]), Tensor([ROW]))


def test_relu_of_integers_is_of_integers():
    out = nn.relu(Tensor(np.array([1, -1], np.int32)))
    assert out.dtype == int32 and out.tolist() == [1, 0]
    with pytest.raises(DTypeError, match="arithmetic on bool"):
        nn.relu(Tensor([True]))

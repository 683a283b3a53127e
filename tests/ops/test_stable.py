"""tessera.stable on inputs that break the naive formulas, against f64 and Python's exact sums."""

import statistics

import numpy as np
import pytest

import tessera as ts
from tessera import stable
from tessera.core.types import bf16, f16, f32

HIDDEN = [float("-inf")] * 3


def test_softmax_and_logsumexp_at_the_edges():
    assert stable.softmax(ts.Tensor([HIDDEN, [1e4, 1e4, -1e4]])).tolist() == [[0.0] * 3, [0.5, 0.5, 0.0]]
    assert stable.logsumexp(ts.Tensor([HIDDEN])).tolist() == [float("-inf")]
    assert stable.logsumexp(ts.Tensor([float("inf"), 0.0])).item() == float("inf")
    assert stable.softmax(ts.Tensor([6e4, 6e4], f16)).tolist() == [0.5, 0.5]


@pytest.mark.parametrize("n", (1, 2, 3, 7, 64, 1000))
def test_variance_far_from_zero(n, rng):
    x = np.float32(1e4 + rng.normal(size=n))
    want = statistics.pvariance([float(v) for v in x])
    np.testing.assert_allclose(stable.variance(x).item(), want, rtol=1e-3, atol=1e-6)
    naive = np.mean(x * x, dtype=np.float32) - np.mean(x, dtype=np.float32) ** 2
    assert n < 7 or abs(naive - want) > 10 * abs(stable.variance(x).item() - want)
    np.testing.assert_allclose(stable.mean(x).item(), statistics.fmean(map(float, x)), rtol=2e-7)


@pytest.mark.parametrize("dtype", (f16, bf16, f32), ids=str)
def test_norms_of_large_elements(dtype):
    x = ts.Tensor(np.array([[200.0, -200.0, 400.0, 0.0]]) * (100 if dtype is f16 else 1e4), dtype)
    wide = x.numpy().astype(np.float64)
    centred = (wide - wide.mean()) / wide.std()
    unit = float(np.ldexp(1.0, {f16: -10, bf16: -7, f32: -21}[dtype]))
    np.testing.assert_allclose(stable.layer_norm(x).numpy().astype(float), centred, rtol=unit, atol=unit)
    rms = wide / np.sqrt((wide * wide).mean())
    np.testing.assert_allclose(stable.rms_norm(x).numpy().astype(float), rms, rtol=unit, atol=unit)
    huge = stable.rms_norm(ts.Tensor([3e38, 3e38])).tolist()
    np.testing.assert_allclose(huge, [1.0, 1.0], rtol=1e-6)


@pytest.mark.parametrize("target", ("interp", "llvm"))
def test_attention_of_large_scores(target, rng):
    q, k, v = (rng.normal(size=(2, 5, 8)).astype(np.float32) * s for s in (1e3, 1e3, 1.0))
    s = np.einsum("bqd,bkd->bqk", q.astype(float), k.astype(float)) / np.sqrt(8)
    s = np.where(np.tril(np.ones((5, 5), bool)), s, -np.inf)
    e = np.exp(s - s.max(-1, keepdims=True))
    want = e / e.sum(-1, keepdims=True) @ v
    run = ts.jit(lambda q, k, v: stable.scaled_dot_product_attention(q, k, v, causal=True), target=target)
    np.testing.assert_allclose(run(q, k, v).numpy(), want, rtol=2e-2, atol=2e-2)


def test_a_query_that_sees_nothing_gives_zeros():
    mask = ts.Tensor([[float("-inf")] * 2])
    assert stable.attention([[1.0]], [[1.0], [2.0]], [[3.0], [4.0]], mask).tolist() == [[0.0]]


@pytest.mark.parametrize("dtype", (f16, bf16), ids=str)
def test_narrow_types_where_the_naive_forms_break(dtype, rng):
    """Scores of 1e5 overflow f16 and lose all digits in bf16; squares of 6e4 overflow f16; exp(100) does too."""
    unit = {f16: 2e-3, bf16: 2e-2}[dtype]
    q, k, v = (
        ts.Tensor(rng.normal(size=s) * scale, dtype) for s, scale in (((6, 16), 200.0), ((9, 16), 200.0), ((9, 4), 1.0))
    )
    wide = [t.numpy().astype(np.float64) for t in (q, k, v)]
    scores = wide[0] @ wide[1].T / 4.0
    assert dtype is bf16 or np.isinf(ts.matmul(q, k.T).numpy().astype(np.float64)).any()
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    want = weights / weights.sum(-1, keepdims=True) @ wide[2]
    for log_space in (True, False):
        got = stable.scaled_dot_product_attention(q, k, v, use_log_space=log_space)
        assert got.dtype is dtype
        np.testing.assert_allclose(got.numpy().astype(np.float64), want, atol=4 * unit)
    row = ts.Tensor([100.0, 100.0, -100.0], dtype)
    assert np.isinf(ts.exp(row).numpy().astype(np.float64)).any() or dtype is bf16
    np.testing.assert_allclose(stable.logsumexp_safe(row).item(), 100.0 + np.log(2), rtol=unit)
    np.testing.assert_allclose(stable.softmax_safe(row).numpy().astype(float), [0.5, 0.5, 0.0], atol=unit)
    big = ts.Tensor([6e4, 6e4, -6e4, 6e4], dtype)
    np.testing.assert_allclose(stable.rmsnorm_safe(big).numpy().astype(float), [1, 1, -1, 1], rtol=unit)
    np.testing.assert_allclose(stable.mean(big).item(), 3e4, rtol=2 * unit)
    centred = np.array([1, 1, -3, 1]) / np.sqrt(3)
    np.testing.assert_allclose(stable.layernorm_safe(big).numpy().astype(float), centred, rtol=2 * unit)


def test_variance_about_a_mean_that_is_known(rng):
    x = rng.normal(size=(3, 50)).astype(np.float32)
    for mean in (stable.mean(x), stable.mean(x, keepdims=False)):
        np.testing.assert_allclose(stable.variance(x, mean).numpy(), x.var(axis=1, keepdims=True), rtol=1e-5)
        assert stable.variance(x, mean, keepdims=False).shape == (x.shape[0],)

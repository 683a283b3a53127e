"""The kernels of Triton's public tutorials, in our language, against PyTorch (tests/fixtures/tutorials)."""

from pathlib import Path

import numpy as np
import pytest

import tessera as ts
from conformance.tile.tutorials import attention, layer_norm, products, vectors

ANSWERS = np.load(Path(__file__).parents[2] / "fixtures" / "tutorials" / "answers.npz")


@pytest.fixture(autouse=True, params=["interp", "cpu"])
def device(request):
    before = ts.default_device()
    ts.set_default_device(request.param)
    yield request.param
    ts.set_default_device(before)


def answers(*names):
    return [ANSWERS[n] for n in names]


def close(found, want, rtol=1e-5, atol=1e-5):
    np.testing.assert_allclose(np.asarray(found).astype("f8"), want, rtol=rtol, atol=atol)


def cdiv(n, block):
    return -(-n // block)


def test_vector_add():
    x, y, want = answers("add_x", "add_y", "add")
    out = np.zeros_like(x)
    vectors.add[(cdiv(1000, 128),)](x, y, out, BLOCK=128)
    np.testing.assert_array_equal(out, x + y)
    close(out, want)


@pytest.mark.parametrize("programs", [1, 8, 37])
def test_fused_softmax(programs):
    x, want = answers("softmax_x", "softmax")
    out = np.zeros_like(x)
    vectors.softmax[(programs,)](x, out, BLOCK=64)
    close(out, want, atol=1e-7)


@pytest.mark.parametrize("group", [1, 3])
def test_matmul(group):
    a, b, want, leaky = answers("matmul_a", "matmul_b", "matmul", "matmul_leaky")
    for activate, right in ((False, want), (True, leaky)):
        c = np.zeros((70, 90), "f4")
        blocks = {"BM": 16, "BN": 32, "BK": 16, "GROUP": group}
        products.matmul[(cdiv(70, 16) * cdiv(90, 32),)](a.astype("f2"), b.astype("f2"), c, activate=activate, **blocks)
        close(c, right, rtol=1e-4, atol=1e-4)


def test_low_memory_dropout():
    x = answers("add_x")[0]
    runs = []
    for seed in (123, 123, 512):
        out = np.zeros_like(x)
        vectors.dropout[(cdiv(1000, 128),)](x, out, seed, p=0.5, BLOCK=128)
        runs.append(out)
    drawn = ts.rand((1000,), generator=ts.Generator(123)).numpy()
    np.testing.assert_array_equal(runs[0], np.where(drawn >= 0.5, x * 2, 0))
    np.testing.assert_array_equal(runs[0], runs[1])
    assert (runs[0] != runs[2]).mean() > 0.3 and 0.4 < (runs[0] == 0).mean() < 0.6


def test_layer_norm():
    x, w, b, g = answers("norm_x", "norm_w", "norm_b", "norm_g")
    (rows, n), y = x.shape, np.zeros_like(x)
    mean, rstd = np.zeros(rows, "f4"), np.zeros(rows, "f4")
    layer_norm.forward[(rows,)](x, w, b, y, mean, rstd, eps=1e-5, BLOCK=16)
    close(y, ANSWERS["norm"])
    dx, sums, dw, db = np.zeros_like(x), np.zeros((2, 4, n), "f4"), np.zeros(n, "f4"), np.zeros(n, "f4")
    layer_norm.backward_rows[(rows,)](g, x, w, mean, rstd, dx, sums[0], sums[1], BLOCK=64)
    layer_norm.backward_sums[(cdiv(n, 32),)](sums[0], sums[1], dw, db, BM=2, BN=32)
    close(dx, ANSWERS["norm_dx"])
    close(dw, ANSWERS["norm_dw"])
    close(db, ANSWERS["norm_db"])


@pytest.mark.parametrize("name", ["full", "causal"])
def test_fused_attention(name):
    q, k, v, g = answers(*(f"{name}_{n}" for n in "qkvg"))
    options = {"causal": name == "causal", "scale": 0.3, "BM": 32, "BN": 16}
    out, lse, delta = np.zeros_like(q), np.zeros((3, 64), "f4"), np.zeros((3, 64), "f4")
    attention.forward[3, 2](q, k, v, out, lse, **options)
    close(out, ANSWERS[name])
    attention.row_sums[3, 2](out, g, delta, BM=32)
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    attention.keys_backward[3, 4](q, k, v, g, lse, delta, dk, dv, **options)
    attention.queries_backward[3, 2](q, k, v, g, lse, delta, dq, **options)
    for found, part in ((dq, "dq"), (dk, "dk"), (dv, "dv")):
        close(found, ANSWERS[f"{name}_{part}"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("programs", [1, 4])
def test_grouped_gemm(programs):
    a, b, want = ([ANSWERS[f"group{part}{i}"] for i in range(3)] for part in ("_a", "_b", ""))
    sizes = np.array([(x.shape[0], y.shape[1], x.shape[1]) for x, y in zip(a, b, strict=True)])
    flat = [np.concatenate([m.ravel() for m in ms]).astype(ts.bf16.numpy) for ms in (a, b)]
    c = np.zeros(sum(w.size for w in want), "f4")
    products.grouped_gemm[(programs,)](*flat, c, sizes, BM=16, BN=16, BK=8)
    close(c, np.concatenate([w.ravel() for w in want]), rtol=1e-4, atol=1e-4)


def test_block_scaled_matmul():
    a, b, sa, sb, want = answers("scaled_a", "scaled_b", "scaled_sa", "scaled_sb", "scaled")
    a, b = a.astype(ts.fp8_e4m3.numpy), b.astype(ts.fp8_e4m3.numpy)
    c = np.zeros((32, 48), "f4")
    products.block_scaled[2, 3](a, sa.astype("u1"), b, sb.astype("u1"), c, BM=16, BN=16, VEC=32)
    close(c, want, rtol=1e-4, atol=1e-4)

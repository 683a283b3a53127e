"""Composites of neural networks against their formulas in Python's math; error bounds are in tests/interp."""

import math

import numpy as np
import pytest

import tessera as ts
from tessera.core.errors import ArgumentError, DTypeError, ShapeError
from tessera.core.types import bf16, f16, f32, f64, int32
from tessera.frontend.jit.tracing import Jit
from tessera.interp.bound import compare_with_bound, run
from tessera.ir.tensor import Tensor
from tessera.ops.tensor import nn
from tessera.ops.tensor.attention import positional_attention, rough_cast, scaled_dot_product_attention

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
    sdpa = scaled_dot_product_attention
    np.testing.assert_allclose(sdpa(*map(Tensor, (q, k, v))).numpy(), attention(q, k, v), rtol=1e-12)
    np.testing.assert_allclose(
        sdpa(*map(Tensor, (q, k, v, mask)), causal=True).numpy(), attention(q, k, v, mask, True), rtol=1e-12
    )
    torch_names = sdpa(*map(Tensor, (q, k, v)), attn_mask=Tensor(mask), is_causal=True)
    np.testing.assert_allclose(torch_names.numpy(), attention(q, k, v, mask, True), rtol=1e-12)
    batch = sdpa(*(Tensor(np.stack([t, 2 * t])) for t in (q, k, v)), scale=1 / math.sqrt(8))
    np.testing.assert_allclose(batch.numpy()[1], attention(2 * q, 2 * k, 2 * v), rtol=1e-12)


@pytest.mark.in_turn("groups")
@pytest.mark.parametrize("target", [None, "llvm", "ptx"])
@pytest.mark.parametrize("options", [{}, {"causal": True, "window": 3}, {"window": 2, "softcap": 0.5}])
@pytest.mark.parametrize("groups", [1, 2, 6])
def test_grouped_attention(groups, options, target, rng):
    q, k, v = (rng.normal(size=(2, h, n, 8)).astype("f4") for h, n in ((6, 9), (groups, 5), (groups, 5)))
    attend = lambda q, k, v: scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)  # noqa: E731
    found = (attend if target is None else ts.jit(attend, target=target))(*map(Tensor, (q, k, v))).numpy()
    cap, window = options.get("softcap"), options.get("window", 99)
    s = q.astype("f8") @ np.repeat(k, 6 // groups, axis=1).swapaxes(-1, -2) / math.sqrt(8)
    i, j = np.arange(9)[:, None], np.arange(5)
    seen = (j > i - window) & ((j <= i) | (not options.get("causal")))
    e = np.where(seen, np.exp(cap * np.tanh(s / cap) if cap else s), 0.0)
    total = e.sum(-1, keepdims=True)  # 0 for a query that sees no key, which gives 0
    want = e @ np.repeat(v, 6 // groups, axis=1) / np.where(total == 0, 1, total)
    np.testing.assert_allclose(found, want, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("options", [{}, {"causal": True, "window": 3}, {"softcap": 1.5}])
def test_grouped_attention_is_that_of_repeated_heads(options, rng):
    """In gradients, too; the cotangent of a shared head is the sum over its group. Lanes of vmap are batches."""
    q, k, v, w = (Tensor(rng.normal(size=(2, h, 5, 4))) for h in (6, 2, 2, 6))
    attend = lambda q, k, v: scaled_dot_product_attention(q, k, v, **options)  # noqa: E731
    repeat = lambda x: ts.reshape(ts.broadcast_to(x[:, :, None], (2, 2, 3, 5, 4)), (2, 6, 5, 4))  # noqa: E731
    found = ts.grad(lambda *x: (attend(*x) * w).sum(), argnums=(0, 1, 2))(q, k, v)
    want = ts.grad(lambda q, k, v: (attend(q, repeat(k), repeat(v)) * w).sum(), argnums=(0, 1, 2))(q, k, v)
    for x, y in zip(found, want, strict=True):
        np.testing.assert_allclose(x.numpy(), y.numpy(), rtol=1e-10, atol=1e-13)
    np.testing.assert_allclose(ts.vmap(attend)(q, k, v).numpy(), attend(q, k, v).numpy(), rtol=1e-12)
    shared = ts.vmap(attend, in_axes=(0, None, None))(q, k[0], v[0])
    np.testing.assert_allclose(shared.numpy()[0], attend(q, k, v).numpy()[0], rtol=1e-12)


def test_heads_that_do_not_divide_and_windows_out_of_range():
    q, k = Tensor(np.ones((6, 3, 2), "f4")), Tensor(np.ones((4, 3, 2), "f4"))
    with pytest.raises(ShapeError, match="do not divide those of queries"):
        scaled_dot_product_attention(q, k, k)
    with pytest.raises(ShapeError, match="do not divide those of queries"):
        positional_attention(*(x.permute(1, 0, 2).reshape(1, 3, -1, 2) for x in (q, k, k)))
    with pytest.raises(ShapeError, match="cannot broadcast 6 with 2"):
        scaled_dot_product_attention(q, k[:2], k[:2], enable_gqa=False)
    for options in ({"window": -1}, {"softcap": -1.0}, {"softcap": math.inf}):
        with pytest.raises(ArgumentError, match="window or softcap"):
            scaled_dot_product_attention(q, q, q, **options)


def test_weights_of_attention_are_rounded_as_asked_for(rng):
    q, k, v = (rng.normal(size=(9, 8)).astype(bf16.numpy) for _ in range(3))
    wide = [x.astype(np.float64) for x in (q, k, v)]
    power = np.exp(wide[0] @ wide[1].T / math.sqrt(8) - np.max(wide[0] @ wide[1].T / math.sqrt(8), -1, keepdims=True))
    for weights, narrow in ((None, power.astype(bf16.numpy)), ("f32", power), ("f16", power.astype(np.float16))):
        found = scaled_dot_product_attention(*map(Tensor, (q, k, v)), weights=weights).numpy()
        want = (narrow.astype(np.float64) @ wide[2] / power.sum(-1, keepdims=True)).astype(bf16.numpy)
        np.testing.assert_allclose(found.astype(np.float64), want.astype(np.float64), rtol=2.0**-8, atol=1e-6)
        assert np.mean(found == want) > 0.95  # the same but where f32 and f64 lie on two sides of a tie
    with pytest.raises(DTypeError, match="weights of attention in"):
        scaled_dot_product_attention(*map(Tensor, (q, k, v)), weights="int8")


def test_a_rough_cast_may_lose_what_is_subnormal():
    x = np.array([1.0, 2.0**-130, 1.5 * 2.0**-126], np.float32)
    (bound,) = run(Jit(lambda x: rough_cast(x, dtype=bf16)).trace(x).function, [x])
    assert (
        compare_with_bound(x, bound).ok
        and compare_with_bound(x * [1, 0, 1], bound).ok
        and not compare_with_bound(x * [1, 1, 0], bound).ok
    )
    assert not compare_with_bound(x * [0, 1, 1], bound).ok and rough_cast(Tensor(x), dtype=bf16).numpy()[1] == x[1]


def test_errors():
    with pytest.raises(ShapeError, match="axis 1 is out of range"):
        nn.softmax(Tensor(ROW), axis=1)
    with pytest.raises(ArgumentError, match="takes 4 operands"):
        scaled_dot_product_attention(Tensor([ROW]), Tensor([ROW]))


def test_relu_of_integers_is_of_integers():
    out = nn.relu(Tensor(np.array([1, -1], np.int32)))
    assert out.dtype == int32 and out.tolist() == [1, 0]
    with pytest.raises(DTypeError, match="arithmetic on bool"):
        nn.relu(Tensor([True]))

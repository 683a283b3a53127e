"""Products, attention, cross entropy and the tree sum against NumPy in f64."""

import math

import numpy as np
import pytest

from tessera import set_default_device, stdlib
from tessera.core.errors import ArgumentError, DTypeError, ShapeError
from tessera.core.schedule import Schedule
from tessera.core.types import BY_NAME, bf16, fp8_e4m3

TOLERANCE = {"f32": 1e-5, "f16": 1e-2, "bf16": 6e-2}
SMALL = Schedule(block=(16, 8, 32))


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


def cube(x):
    return x * x * x


GELU = np.vectorize(lambda y: 0.5 * y * (1 + math.erf(y / math.sqrt(2))))
EPILOGUES = [
    (None, lambda y: y), ("relu", lambda y: np.maximum(y, 0)), ("tanh", np.tanh), ("gelu", GELU),
    ("silu", lambda y: y / (1 + np.exp(-y))), (cube, lambda y: y**3),
]  # fmt: skip


@pytest.mark.parametrize(("activation", "formula"), EPILOGUES, ids=lambda a: str(getattr(a, "__name__", a)))
def test_matmul(activation, formula, make):
    a, b, bias = make(33, 41), make(41, 70), make(70)
    want = formula(wide(a) @ wide(b) / 8 + wide(bias))
    close(stdlib.matmul(a, (b / 8).astype(b.dtype), bias, activation=activation), want, make)


def test_batches_and_groups(make):
    a, b = make(2, 1, 19, 20), make(3, 20, 9)
    close(stdlib.batched_matmul.with_schedule(SMALL)(a, b), wide(a) @ wide(b), make)
    a, bias, sizes = make(40, 20), make(3, 9), [17, 0, 23]
    want = np.concatenate([wide(a[:17]) @ wide(b[0]) + wide(bias[0]), wide(a[17:]) @ wide(b[2]) + wide(bias[2])])
    close(stdlib.grouped_matmul.with_schedule(SMALL)(a, b, sizes, bias), want, make)


def test_int8_products_are_exact(rng):
    a, b = (rng.integers(-128, 128, s).astype(np.int8) for s in ((35, 700), (700, 20)))
    rows, cols = 2.0 ** rng.integers(-9, 0, 35), 2.0 ** rng.integers(-9, 0, 20)
    want = (a.astype("i8") @ b.astype("i8")) * rows[:, None] * cols
    np.testing.assert_array_equal(stdlib.quantized_matmul(a, b, rows, cols), want.astype("f4"))
    assert stdlib.quantized_matmul(a, b, 0.5, out_dtype=bf16).dtype == bf16.numpy


def test_fp8_products(device, rng):
    a, b = (rng.standard_normal(s).astype(fp8_e4m3.numpy) for s in ((9, 30), (30, 5)))
    np.testing.assert_allclose(stdlib.quantized_matmul(a, b, 2.0), wide(a) @ wide(b) * 2, rtol=1e-5, atol=1e-5)


def attention(q, k, v, causal, lengths):
    """The definition, batch by batch, each with only the keys it holds."""
    k, v = (np.repeat(wide(x), q.shape[1] // k.shape[1], axis=1) for x in (k, v))
    found = []
    for b, length in enumerate(lengths or [k.shape[2]] * len(q)):
        s = wide(q[b]) @ np.swapaxes(k[b, :, :length], -1, -2) / math.sqrt(q.shape[3])
        past = length - q.shape[2] if lengths else 0
        s = np.where(np.arange(length) <= past + np.arange(q.shape[2])[:, None], s, -np.inf) if causal else s
        e = np.exp(s - s.max(-1, keepdims=True))
        found.append(e @ v[b, :, :length] / e.sum(-1, keepdims=True))
    return np.stack(found)


@pytest.mark.in_turn("lengths")
@pytest.mark.parametrize("lengths", [None, [37, 90]])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("groups", [1, 2, 6])
def test_attention(groups, causal, lengths, make):
    q, k, v = make(2, 6, 35, 8), make(2, groups, 90, 8), make(2, groups, 90, 5)
    if lengths:
        k[0, :, 37:] = v[0, :, 37:] = np.inf  # what lies behind a cache's length is never used
    found = stdlib.flash_attention_2.with_schedule(Schedule(block=(16, 32)))(q, k, v, causal=causal, lengths=lengths)
    close(found, attention(q, k, v, causal, lengths), make)


def test_cross_entropy(make, rng):
    x, t = make(21, 1100) * make(1), rng.integers(0, 1100, 21)
    t[4] = -100
    X, used = wide(x), t != -100
    total = np.log(np.exp(X - X.max(1, keepdims=True)).sum(1)) + X.max(1)
    losses = np.where(used, total - X[np.arange(21), t], 0.0)
    gradient = np.exp(X - total[:, None])
    gradient[np.arange(21), t] -= 1
    loss, grad = stdlib.cross_entropy(x, t, gradient=True)
    assert abs(loss - losses.sum() / 20) < 1e-5
    close(grad, gradient * used[:, None] / 20, make)
    np.testing.assert_allclose(stdlib.cross_entropy(x, t, reduction="none"), losses, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [0, 1, 4096, 4097, 300_000])
def test_tree_sum(size, rng):
    whole = rng.integers(-1000, 1000, size)
    assert stdlib.tree_sum(whole) == whole.sum() and stdlib.tree_sum(whole.astype(np.int8)) == whole.astype("i1").sum()
    x = rng.standard_normal(size).astype("f4")
    assert abs(stdlib.tree_sum(x) - math.fsum(x)) <= 20 * 2**-24 * abs(x).sum()
    assert stdlib.tree_sum.with_schedule(Schedule(block=256))(x) == pytest.approx(math.fsum(x), abs=0.1)


def test_tree_sum_gives_the_same_bits_everywhere(rng, device):
    x = rng.standard_normal(100_001).astype("f4")
    found = []
    for each in ("interp", "cpu"):
        set_default_device(each)
        found.append(stdlib.tree_sum(x).tobytes())
    assert found[0] == found[1] == stdlib.tree_sum(x).tobytes()


def test_refusals(device):
    a = np.zeros((2, 3), "f4")
    with pytest.raises(ShapeError, match="do not fit"):
        stdlib.matmul(a, a)
    with pytest.raises(ArgumentError, match="not an activation"):
        stdlib.matmul(a, a.T, activation="rleu")
    with pytest.raises(DTypeError, match="same quantised type"):
        stdlib.quantized_matmul(a, a.T)
    with pytest.raises(ShapeError, match="groups do not fit"):
        stdlib.grouped_matmul(a, np.zeros((2, 3, 1), "f4"), [1, 2])
    with pytest.raises(ArgumentError, match="row 1 is no class"):
        stdlib.cross_entropy(a, np.array([0, 3]))
    q, k = np.zeros((1, 3, 2, 4), "f4"), np.zeros((1, 2, 2, 4), "f4")
    with pytest.raises(ShapeError, match="G divides H"):
        stdlib.flash_attention(q, k, k)
    with pytest.raises(ArgumentError, match="does not fit the cache"):
        stdlib.flash_attention(q, q, q, lengths=[3])
    with pytest.raises(ArgumentError, match="cannot be halved"):
        stdlib.tree_sum.with_schedule(Schedule(block=100))(a)


def test_a_routine_shows_itself():
    assert "activation" in str(stdlib.matmul.__signature__) and "kernel" not in str(stdlib.matmul.__signature__)
    assert stdlib.matmul.with_schedule(SMALL).schedule == SMALL and stdlib.matmul.schedule == Schedule()
    assert repr(stdlib.matmul) == "<routine matmul>"

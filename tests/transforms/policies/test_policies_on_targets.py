"""Numeric policies on compiled targets: narrow compute types, sums in 16 bits, loops in a numeric context."""

import numpy as np
import pytest

import tessera as ts
from tessera import tile
from tessera.ir.verify import verify
from tessera.runtime import driver

TARGETS = ["interp", "llvm", "ptx"]
POINTWISE = {
    "a constant beside it": (lambda x: x + 1.0, 2048),
    "a product": (lambda x: x * 1.001, 2050),
    "twice": (lambda x: (x + 1.0) + 1.0, 2048),
    "a function": (lambda x: ts.exp(x / 1000), 7.7578125),
    "a comparison": (lambda x: ts.where(x + 1.0 > x, 1.0, 2.0), 2),
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", POINTWISE)
def test_results_are_rounded_to_the_compute_type(name, target):
    """2049 is no number of f16."""
    function, want = POINTWISE[name]
    with ts.precision(compute=ts.f16):
        assert ts.jit(function, target=target)(np.float32([2048])).tolist() == [want]


def test_results_in_bf16_and_fp8():
    for compute, want in ((ts.bf16, 1.296875), (ts.fp8_e4m3, 1.25)):
        with ts.precision(compute=compute):
            assert [ts.jit(lambda x: x * 1.3, target=t)(np.float32([1])).item() for t in TARGETS] == [want] * 3


POLICIES = [ts.f16 @ ts.accum(ts.f16), ts.bf16 @ ts.accum(ts.bf16), ts.f32 @ ts.accum(ts.f16)]


@pytest.mark.parametrize("policy", [*POLICIES, ts.fp8_e4m3 @ ts.accum(ts.f16), ts.f16 @ ts.accum(ts.f64)], ids=str)
@pytest.mark.parametrize("shape", [(1, 4, 1), (3, 16, 5), (33, 70, 19)])
def test_products_that_accumulate_in_other_types(policy, shape, rng):
    """Sums of 16 bits took half the memory that the microkernel of processors wrote to."""
    m, k, n = shape
    a, b = (ts.Tensor(rng.standard_normal(s).astype("f4")).to(policy) for s in ((m, k), (k, n)))
    for function in (lambda a, b: a @ b, lambda a, b: (a @ b) + (a @ b), lambda a, b: (a @ b).T):
        want, *found = (np.asarray(ts.jit(function, target=t)(a, b).to(ts.f64)) for t in ("interp", "llvm", "ptx"))
        for each in found:
            np.testing.assert_allclose(each, want, rtol=0.1, atol=0.02 * k * np.abs(want).max() / 4)


@ts.kernel
def added(a, b, out):
    total = tile.zeros((8, 8), ts.f16)
    for k in tile.range(0, 32, 16):
        total += tile.cast(tile.dot(a[0:8, k : k + 16], b[k : k + 16, 0:8]), ts.f16)
    out[0:8, 0:8] = total


def test_a_kernel_adds_products_in_16_bits(rng):
    policy = POLICIES[0]
    a, b = (ts.Tensor(rng.standard_normal(s).astype("f2")).to(policy) for s in ((8, 32), (32, 8)))
    run = lambda a, b: ts.launch(added, (1,), a, b, ts.like(a, shape=(8, 8)))  # noqa: E731
    want, found = (np.asarray(ts.jit(run, target=t)(a, b), "f8") for t in ("interp", "llvm"))
    np.testing.assert_allclose(found, want, atol=0.05)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("policy", [POLICIES[0], ts.f32 @ ts.accum(ts.f64)], ids=str)
def test_attention_that_accumulates_in_another_type(policy, target, rng):
    x = ts.Tensor(rng.standard_normal((1, 1, 20, 8)).astype("f4")).to(policy)
    attend = lambda q: ts.scaled_dot_product_attention(q, q, q)  # noqa: E731
    want = attend(ts.Tensor(np.asarray(x.to(ts.f64)))).numpy()
    np.testing.assert_allclose(ts.jit(attend, target=target)(x).to(ts.f64).numpy(), want, atol=2e-2)


W, X = np.full((3, 3), 0.25, "f4"), np.ones((5, 3), "f4")
LOOPS = {
    "scan": lambda: ts.scan(lambda h, x: (ts.tanh(h @ W + x), h), ts.zeros((3,)), X)[0],
    "while": lambda: ts.while_loop(lambda s: s < 10.0, lambda s: s * 2, ts.tensor(1.0)),
    "fori": lambda: ts.fori_loop(0, 3, lambda i, s: s * 2, 1.0),
    "cond": lambda: ts.cond(ts.tensor(True), lambda a: a * 2, lambda a: a, ts.tensor(1.0)),
    "gradient": lambda: ts.grad(lambda w: ts.scan(lambda h, x: (h @ w + x, None), ts.zeros((3,)), X)[0].sum())(W),
    "layer": lambda: ts.nn.LSTM(3, 4)(X[:, None])[0] * 0.0,
}


@pytest.mark.parametrize("target", [None, "llvm"])
@pytest.mark.parametrize("name", LOOPS)
def test_loops_in_a_numeric_context(name, target):
    """The state has the policy that each step gives its results."""
    run = LOOPS[name] if target is None else ts.jit(LOOPS[name], target=target)
    with ts.precision("mixed"):
        found = run()
    np.testing.assert_allclose(found.to(ts.f32), np.asarray(LOOPS[name]()), rtol=5e-3)


DRAWS = {
    "rand": lambda g: ts.rand((400,), generator=g),
    "randn": lambda g: ts.randn((400,), generator=g),
    "bernoulli": lambda g: ts.random.bernoulli(0.25, (400,), generator=g),
    "randint": lambda g: ts.randint(0, 10, (400,), generator=g),
}


@pytest.mark.parametrize("name", DRAWS)
def test_draws_are_those_outside_of_a_context(name):
    """In f16 the words of a generator are infinite."""
    draw = lambda: DRAWS[name](ts.Generator(3))  # noqa: E731
    want = draw().numpy()
    with ts.precision("mixed"):
        for found in (draw(), ts.jit(draw, target="llvm")()):
            np.testing.assert_allclose(np.asarray(found.to(ts.f32)), want.astype("f4"), rtol=1e-5, atol=1e-6)


def test_layers_are_initialised_and_drop_in_a_context():
    ts.manual_seed(0)
    with ts.precision("mixed"):
        layer, kept = ts.nn.Linear(64, 64), ts.dropout(ts.ones(1000), 0.5)
    assert 0 < np.abs(layer.weight.numpy()).max() <= 0.125 and 400 < np.count_nonzero(kept.numpy()) < 600


@pytest.mark.parametrize("target", ["interp", "llvm", "ptx"])
@pytest.mark.parametrize("function", [lambda x: ts.scaled_dot_product_attention(x, x, x), lambda x: x.mT @ x])
def test_sums_that_loops_carry_have_no_policy(function, target):
    """The rules of the Tile level hold (V4): rounds of a product are added in the plain type, and rounded once."""
    x = np.random.default_rng(0).standard_normal((2, 200, 16)).astype("f4")
    flushed = ts.jit(lambda x: function(ts.cast(x, dtype=ts.f32 @ ts.flush_denormals)))
    verify(driver.lower(flushed.trace(x).function, target)["tile"])
    want = np.asarray(function(ts.Tensor(x)))
    np.testing.assert_allclose(np.asarray(ts.jit(flushed.function, target=target)(x)), want, rtol=1e-4, atol=1e-5)

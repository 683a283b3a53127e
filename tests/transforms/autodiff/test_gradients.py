"""Derivatives against central differences in f64, and the two modes against each other."""

import numpy as np
import pytest

import tessera as ts
from tessera.core.errors import ArgumentError, DTypeError, ShapeError

X = np.array([[0.3, 1.1, 0.7], [1.9, 0.2, 1.3]])
Y = np.array([[1.2, 0.4, 2.1], [0.6, 1.7, 0.9]])
PLACES = np.array([2, 0, 2])
CASES = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / y,
    "pow": lambda x, y: x**y,
    "remainder": lambda x, y: x % y,
    "maximum": ts.maximum,
    "minimum": ts.minimum,
    "where": lambda x, y: ts.where(x > y, x * x, y),
    "matmul": lambda x, y: x @ y.T,
    "slice": lambda x, y: x[:, ::2] * y[:, 1:],
    "concatenate": lambda x, y: ts.concatenate([x * x, y], axis=1),
    "pad": lambda x, y: ts.pad(x * y, ((1, 0), (0, 2))),
    "gather": lambda x, y: ts.gather(x * y, ts.Tensor(PLACES), axis=1),
    "scatter_add": lambda x, y: ts.scatter_add(x, ts.Tensor(PLACES), x * y, axis=1),
    "reductions": lambda x, y: ts.max(x, axis=1) * ts.min(y, axis=1) + ts.var(x, axis=1) + ts.mean(y, axis=1),
    "softmax": lambda x, y: ts.softmax(x) * ts.log_softmax(y),
    "attention": lambda x, y: ts.scaled_dot_product_attention(x, y, x * y, causal=True),
    **{
        name: lambda x, y, name=name: getattr(ts, name)(x) * y
        for name in "neg abs exp exp2 log log2 sqrt rsqrt tanh erf sin cos relu sigmoid silu gelu".split()
    },
}


@pytest.mark.parametrize("name", CASES)
def test_both_modes_and_central_differences(name, rng):
    f, v, w, h = CASES[name], rng.normal(size=X.shape), rng.normal(size=Y.shape), 1e-6
    _, moved = ts.jvp(f, (X, Y), (v, w))
    high, low = (f(ts.Tensor(X + s * v), ts.Tensor(Y + s * w)).numpy() for s in (h, -h))
    assert np.allclose(moved.numpy(), (high - low) / (2 * h), rtol=1e-5, atol=1e-6)
    g = rng.normal(size=moved.shape)
    _, pull = ts.vjp(f, X, Y)
    a, b = pull(g)
    assert np.isclose((g * moved.numpy()).sum(), (a.numpy() * v).sum() + (b.numpy() * w).sum(), rtol=1e-10)


def test_ties_share_evenly():
    assert ts.grad(lambda x: ts.max(x))(np.float32([2, 2, 1])).numpy().tolist() == [0.5, 0.5, 0]


@pytest.mark.parametrize("target", ["interp", "llvm"])
def test_a_training_step_lowers_the_loss(target, rng):
    def loss(p, x, y):
        return ts.mean((ts.tanh(x @ p["a"]) @ p["b"] - y) ** 2)

    step = ts.jit(ts.value_and_grad(loss), target=target)
    p = {"a": rng.normal(size=(4, 8)).astype("f4"), "b": rng.normal(size=(8, 2)).astype("f4")}
    x, y = rng.normal(size=(16, 4)).astype("f4"), rng.normal(size=(16, 2)).astype("f4")
    first, g = step(p, x, y)
    after, _ = step({k: p[k] - np.float32(0.01) * g[k].numpy() for k in p}, x, y)
    assert float(after) < float(first)
    assert np.allclose(g["a"], ts.grad(loss)(p, x, y)["a"], atol=1e-5)


@pytest.mark.parametrize(
    "call, error, text",
    [
        (lambda: ts.grad(lambda x: x * x)(X), ShapeError, "needs a scalar"),
        (lambda: ts.grad(lambda x: x * x)(np.int64(3)), DTypeError, "not floats"),
        (lambda: ts.grad(lambda x: 3.0)(1.0), ArgumentError, "does not depend"),
        (lambda: ts.jvp(lambda x: x * x, (1.0,), (1.0, 2.0)), ArgumentError, "the number of tangents is wrong"),
        (lambda: ts.jvp(lambda x, y: x * y, (1.0, 2.0), (1.0,)), ArgumentError, "the number of tangents is wrong"),
    ],
)
def test_errors(call, error, text):
    with pytest.raises(error, match=text):
        call()


@pytest.mark.parametrize(
    ("function", "args", "name"),
    [
        (lambda x, t: t["a"].sum(), (1.0, {"a": np.arange(3)}), r"t\.a"),
        (lambda *both: both[1].sum(), (1.0, np.arange(3)), "argument 1"),
    ],
)
def test_an_argument_of_integers_is_named_in_the_error(function, args, name):
    with pytest.raises(DTypeError, match=f"no derivative with respect to {name}: "):
        ts.grad(function, argnums=1)(*args)


@pytest.mark.parametrize(
    ("ends", "joined"), [([(0, 3), (3, 7), (7, 10)], True), ([(7, 10), (0, 7)], True), ([(0, 6), (4, 10)], False),
                         ([(0, 3), (4, 10)], False), ([(0, 10), (0, 3), (3, 10)], True)],
)  # fmt: skip
def test_cotangents_of_slices_side_by_side_are_concatenated(ends, joined):
    x = np.random.default_rng(0).standard_normal((4, 10)).astype(np.float32)
    gradient = ts.jit(ts.grad(lambda x: sum(ts.sum(x[:, a:b] ** (i + 2)) for i, (a, b) in enumerate(ends))))
    ops = [n.op.__name__ for n in gradient.trace(x).function.body.walk()]
    want = np.zeros_like(x)
    for i, (a, b) in enumerate(ends):
        want[:, a:b] += (i + 2) * x[:, a:b] ** (i + 1)
    assert ("concatenate" in ops) == joined
    np.testing.assert_allclose(gradient(x).numpy(), want, rtol=1e-5)


def test_a_part_that_is_no_slice_is_added_to_those_that_are():
    x = np.arange(6, dtype=np.float32)
    found = ts.jit(ts.grad(lambda x: ts.sum(x[:2]) + ts.sum(x * x) + ts.sum(3 * x[2:])))(x).numpy()
    np.testing.assert_array_equal(found, 2 * x + [1, 1, 3, 3, 3, 3])

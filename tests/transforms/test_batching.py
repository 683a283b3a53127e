"""vmap against a loop, and composed with grad."""

import numpy as np
import pytest

import tessera as ts
from tessera.core.errors import ArgumentError, ShapeError

PLACES = np.array([1, 0, 1])
CASES = {
    "pointwise": lambda x, w: ts.sin(x) * w,
    "matmul": lambda x, w: x @ w.T,
    "softmax": lambda x, w: ts.softmax(x * w).sum(axis=0),
    "moves": lambda x, w: ts.pad(ts.concatenate([x, w]).T, ((1, 0), (0, 1)))[1:, ::2].reshape(-1),
    "gather": lambda x, w: ts.gather(x + w, ts.argmax(x, axis=1), axis=1),
    "scatter": lambda x, w: ts.scatter_add(w, ts.argmax(x, axis=1), x[:, :2], axis=1),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dims", [(0, 0), (0, None), (None, 0)])
def test_a_loop_gives_the_same(name, dims, rng):
    f, many = CASES[name], [rng.normal(size=(4, 2, 3)), rng.normal(size=(4, 2, 3))]
    args = [m if d == 0 else m[0] for m, d in zip(many, dims, strict=True)]
    rows = [f(*(ts.Tensor(a[i] if d == 0 else a) for a, d in zip(args, dims, strict=True))).numpy() for i in range(4)]
    assert np.allclose(ts.vmap(f, in_dims=dims)(*args).numpy(), np.stack(rows))


def test_per_example_gradients(rng):
    w, x = rng.normal(size=3), rng.normal(size=(5, 3))
    each = ts.vmap(ts.grad(lambda w, x: ts.tanh((w * x).sum())), in_dims=(None, 0))(w, x).numpy()
    assert np.allclose(each, (1 - np.tanh(x @ w) ** 2)[:, None] * x)


@pytest.mark.parametrize("axis, out", [(0, 0), (1, 0), (-1, 1), (2, -1)])
def test_axes_in_and_out(axis, out, rng):
    x = rng.normal(size=(3, 3, 3))
    rows = [np.take(x, i, axis) @ np.ones(3) * np.take(x, i, axis)[0] for i in range(3)]
    found = ts.vmap(lambda a: (a @ ts.ones(3, dtype=ts.f64)) * a[0], in_dims=axis, out_dims=out)(x)
    np.testing.assert_allclose(found, np.stack(rows, out))


def test_containers_and_nesting(rng):
    p = {"w": rng.normal(size=(4, 3)), "b": rng.normal(size=(4,))}
    x = rng.normal(size=(5, 3))
    both = ts.vmap(ts.vmap(lambda p, x: {"y": p["w"] @ x + p["b"], "x": x}, in_dims=(None, 0)), in_dims=(0, None))
    found = both(p, x)
    np.testing.assert_allclose(found["y"], p["w"] @ x.T + p["b"][:, None])
    assert found["x"].shape == (4, 5, 3)
    first, second = ts.vmap(lambda a: (a, a * 2.0), out_dims=(0, 1))(x)
    assert first.shape == (5, 3) and second.shape == (3, 5)


@pytest.mark.parametrize("size", [0, 1])
def test_few_examples(size):
    x = np.ones((size, 3))
    assert ts.vmap(lambda a: ts.softmax(a) @ ts.ones((3, 2), dtype=ts.f64))(x).shape == (size, 2)


@pytest.mark.parametrize(
    "call, error, text",
    [
        (lambda: ts.vmap(lambda a, b: a + b)(np.ones(3), np.ones(4)), ShapeError, "number of examples"),
        (lambda: ts.vmap(lambda a: a)(np.float32(1)), ShapeError, "no axis"),
        (lambda: ts.vmap(lambda a: a, in_dims=None)(np.ones(3)), ArgumentError, "in_dims"),
        (lambda: ts.vmap(lambda a, b: a, in_dims=(0,))(np.ones(3), np.ones(3)), ArgumentError, "in_dims"),
        (lambda: ts.vmap(lambda a: a, in_dims=5)(np.ones(3)), ShapeError, "axis 5"),
    ],
)
def test_refused(call, error, text):
    with pytest.raises(error, match=text):
        call()


@pytest.mark.parametrize("target", ["interp", "llvm"])
def test_compiled(target, rng):
    w, x = rng.normal(size=(3, 2)).astype("f4"), rng.normal(size=(6, 3)).astype("f4")
    f = ts.vmap(ts.grad(lambda w, x: (ts.tanh(x @ w) ** 2).sum()), in_dims=(None, 0))
    want = np.stack([ts.grad(lambda w, x: (ts.tanh(x @ w) ** 2).sum())(w, row).numpy() for row in x])
    np.testing.assert_allclose(ts.jit(f, target=target)(w, x), want, rtol=1e-4, atol=1e-6)


def test_axes_may_be_a_container_like_the_argument():
    params = {"w": ts.ones((5, 2)), "b": ts.Tensor(1.0), "none": None}
    axes = {"w": 0, "b": None, "none": None}
    assert ts.vmap(lambda p, x: p["w"] * x + p["b"], in_dims=(axes, None))(params, 2.0).shape == (5, 2)
    assert ts.vmap(lambda p: p[0] * p[1], in_dims=([1, 0],))([ts.ones((2, 5)), ts.ones((5,))]).shape == (5, 2)
    for wrong in ({"v": 0}, [0, 1, 2, 3], "a"):
        with pytest.raises(ArgumentError, match="in_dims does not fit"):
            ts.vmap(lambda p, x: p["w"] * x, in_dims=(wrong, 0))(params, ts.ones(5))


def test_in_axes_is_in_dims():
    x, y = np.arange(6.0).reshape(2, 3), np.arange(3.0)
    want = ts.vmap(lambda a, b: a * b, in_dims=(0, None), out_dims=1)(x, y)
    for made in (
        ts.vmap(lambda a, b: a * b, in_axes=(0, None), out_axes=1),
        ts.vmap(in_axes=(0, None), out_dims=1)(lambda a, b: a * b),
    ):
        np.testing.assert_array_equal(made(x, y).numpy(), want.numpy())
    with pytest.raises(ArgumentError, match="in_dims and in_axes"):
        ts.vmap(lambda a: a, in_dims=1, in_axes=1)


@pytest.mark.parametrize("run", [lambda f: f, ts.jit], ids=["eager", "jit"])
def test_lanes_of_a_scatter_stay_apart(run):
    """The first and the last place, equal places and places from the end, in lanes of several slices."""
    x = np.arange(30.0, dtype=np.float32).reshape(3, 5, 2)
    places, updates = np.array([[0, 4, 4, 2], [3, 3, 0, 3], [4, 1, 1, -5]]), -1 - x[:, :4]
    wanted, added = x.copy(), x.copy()
    for lane in range(3):
        for place, update in zip(places[lane], updates[lane], strict=True):
            wanted[lane, place] = update
            added[lane, place] += update
    found = run(ts.vmap(lambda a, i, u: ts.scatter(a, i, u, axis=0)))(x, places, updates)
    np.testing.assert_array_equal(found.numpy(), wanted)
    found = run(ts.vmap(lambda a, i, u: ts.scatter_add(a, i, u, axis=0)))(x, places, updates)
    np.testing.assert_array_equal(found.numpy(), added)

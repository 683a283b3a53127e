"""Fixed points and minima: their derivatives against central differences, in every mode, and batched."""

import numpy as np
import pytest
from everywhere import close

import tessera as ts
from tessera.core.errors import ArgumentError
from tessera.transforms.flow.implicit_differentiation import solve_conjugate_gradients

W = np.array([[0.2, 0.1, 0.0], [0.1, -0.3, 0.2], [0.1, 0.0, 0.25]])
B = np.array([0.3, -0.7, 1.1])


@ts.implicit_diff
def solve_fixed_point(f, x0, max_iters=100):
    """As the specification has it: it looks at values."""
    x = x0
    for _ in range(max_iters):
        x_new = f(x)
        if bool((ts.abs(x - x_new) < 1e-15).all()):
            break
        x = x_new
    return x


@ts.implicit_diff
def traceable(f, x0):
    return ts.while_loop(lambda x, y: (ts.abs(x - y) > 1e-15).any(), lambda x, y: (y, f(y)), (x0, f(x0)))[1]


@ts.diff_through_opt
def argmin_layer(x, objective):
    return ts.optimize(lambda y: objective(x, y), init=ts.zeros_like(x))


def point(w, b):
    return (solve_fixed_point(lambda x: ts.tanh(w @ x + b), ts.zeros(3, dtype=ts.f64)) ** 2).sum()


def traced_point(w, b):
    return (traceable(lambda x: ts.tanh(w @ x + b), ts.zeros(3, dtype=ts.f64)) ** 2).sum()


def minimum(w, b):
    return (argmin_layer(b, lambda x, y: (ts.exp(y) - x * y).sum() + ((w @ y) ** 2).sum() + (y * y).sum()) ** 3).sum()


def along(function, *tangents, step=1e-5):
    """How a function's result moves when the matrix and the vector move, by central differences."""
    ends = [function(*(ts.Tensor(a + s * t) for a, t in zip((W, B), tangents, strict=True))) for s in (step, -step)]
    return (ends[0].numpy() - ends[1].numpy()) / (2 * step)


@pytest.mark.parametrize("function", [point, traced_point, minimum])
def test_derivatives(function, rng):
    v, u = rng.normal(size=W.shape), rng.normal(size=B.shape)
    gw, gb = (g.numpy() for g in ts.grad(function, argnums=(0, 1))(W, B))
    np.testing.assert_allclose((gw * v).sum() + (gb * u).sum(), along(function, v, u), rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(ts.jvp(function, (W, B), (v, u))[1], (gw * v).sum() + (gb * u).sum(), rtol=1e-9)
    second = ts.hessian(function, 1)(W, B).numpy()
    want = along(lambda w, b: ts.grad(function, 1)(w, b), 0 * v, u)
    np.testing.assert_allclose(second @ u, want, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(ts.jacrev(ts.grad(function, 1), 1)(W, B), second, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("function", [traced_point, minimum])
@pytest.mark.parametrize("target", ["interp", "llvm"])
def test_jit(function, target):
    close(ts.jit(ts.grad(function), target=target)(W, B), ts.grad(function)(W, B), target, rtol=1e-8)


@pytest.mark.parametrize("function", [point, minimum])
def test_batches(function):
    many = np.stack([B, 0.5 * B, B[::-1]])
    rows = np.stack([ts.grad(function, 1)(W, b).numpy() for b in many])
    found = ts.vmap(ts.grad(function, 1), in_dims=(None, 0))(W, many)
    np.testing.assert_allclose(found, rows, rtol=1e-8, atol=1e-10)


def test_containers():
    @ts.implicit_diff
    def solve(f, x0, steps):
        for _ in range(steps):
            x0 = f(x0)
        return x0

    def loss(a):
        pair = solve(lambda x: {"u": 0.5 * x["v"] + a, "v": 0.25 * x["u"]}, {"u": a * 0.0, "v": a * 0.0}, 60)
        return pair["u"] + pair["v"]

    assert ts.grad(loss)(np.float64(2.0)).item() == pytest.approx(1.25 / (1 - 0.125))


def loops_of_one(f, x0):
    return f(x0)


def test_refused():
    with pytest.raises(ArgumentError, match="container"):
        ts.implicit_diff(loops_of_one)(lambda x: (x, x), ts.Tensor(1.0))


def test_conjugate_gradients_take_more_steps_than_unknowns_where_rounding_needs_them():
    """A condition number of 10^10: about three steps for each unknown."""
    q, _ = np.linalg.qr(np.random.default_rng(12).standard_normal((12, 12)))
    a, b = q @ np.diag(np.logspace(0, 10, 12)) @ q.T, np.ones(12)
    matrix, right = ts.Tensor((a + a.T) / 2), ts.Tensor(b)
    (x,) = solve_conjugate_gradients(lambda xs: [matrix @ xs[0] - right], [ts.zeros(12, dtype=ts.f64)])
    np.testing.assert_allclose(a @ x.numpy(), b, atol=1e-4)

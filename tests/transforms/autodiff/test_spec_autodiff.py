"""Programs of the programming model's chapters 3 and 7, as written there, against central differences."""

import numpy as np
import pytest
from everywhere import central

import tessera as ts

X = np.array([0.3, -0.9, 1.4])


def test_forward_reverse_and_higher():
    def f(x):
        return (ts.sin(x) * x).sum()

    v = np.array([1.0, 2.0, -0.5])
    slope = ts.jvp(f, (X,), (v,))[1]
    assert slope.item() == pytest.approx((central(f, X)[0] * v).sum(), rel=1e-7)
    np.testing.assert_allclose(ts.grad(f)(X), central(f, X)[0], rtol=1e-7)
    want = central(lambda x: ts.grad(f)(x), X)[0]
    np.testing.assert_allclose(ts.jacfwd(ts.grad(f))(X).numpy().sum(0), want, rtol=1e-6)


def test_fixed_point_that_looks_at_values():
    @ts.implicit_diff
    def solve_fixed_point(f, x0, max_iters=100):
        x = x0
        for _ in range(max_iters):
            x_new = f(x)
            if ts.allclose(x, x_new, rtol=1e-13, atol=1e-13):
                break
            x = x_new
        return x

    def solution(a):
        return solve_fixed_point(lambda x: ts.cos(x) * 0.5 + a, ts.zeros(3, dtype=ts.f64)).sum()

    np.testing.assert_allclose(ts.grad(solution)(X), central(solution, X)[0], rtol=1e-6)


def test_gradient_penalty():
    alpha = ts.rand((2, 1, 1, 1), dtype=ts.f64, generator=ts.Generator(3))

    def discriminator(x):
        return (ts.sin(x) * x).sum()

    def gradient_penalty(real, fake, lambda_gp=10):
        interpolated = alpha * real + (1 - alpha) * fake
        grad = ts.grad(discriminator, argnums=0)(interpolated)
        grad_norm = ts.norm(grad, dim=[1, 2, 3])
        return lambda_gp * ((grad_norm - 1) ** 2).mean()

    rng = np.random.default_rng(0)
    real, fake = rng.normal(size=(2, 1, 2, 2)), rng.normal(size=(2, 1, 2, 2))
    found = ts.grad(gradient_penalty, argnums=(0, 1))(real, fake)
    for got, want in zip(found, central(gradient_penalty, real, fake), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_functional_rnn():
    w_h, w_x = ts.Tensor(np.eye(3) * 0.5), ts.Tensor(np.eye(3) * 0.2)

    def functional_rnn(x, initial_state):
        def step(state, x_t):
            new_state = ts.tanh(state @ w_h + x_t @ w_x)
            return new_state, new_state * 2.0

        final_state, outputs = ts.scan(step, initial_state, x)
        return outputs, final_state

    xs = np.stack([X, 2 * X])
    outputs, last = functional_rnn(ts.Tensor(xs), ts.Tensor(X))
    state = X
    for row in xs:
        state = np.tanh(state @ (np.eye(3) * 0.5) + row @ (np.eye(3) * 0.2))
    np.testing.assert_allclose(last, state)
    np.testing.assert_allclose(outputs[-1], 2 * state)


def test_the_guides_loss_function():
    @ts.jit
    @ts.autodiff
    def loss_function(x, W, b, y_true):  # noqa: N803  (as the guide spells it)
        y_pred = ts.matmul(x, W) + b
        y_pred = ts.relu(y_pred)
        loss = ts.mse(y_pred, y_true)
        return loss

    x, w, b, y = X[None], np.eye(3), np.zeros(3), np.ones((1, 3))
    grad_fn = ts.grad(loss_function)
    grad_w, grad_b = grad_fn(x, w, b, y)
    want = central(loss_function, x, w, b, y)
    np.testing.assert_allclose(grad_w, want[1], atol=1e-7)
    np.testing.assert_allclose(grad_b, want[2], atol=1e-7)


def test_which_arguments_autodiff_takes():
    cases = {
        "params x y": 0, "x W": 1, "x": 0, "x y": 0, "inputs w targets": 1, "a b": (0, 1), "x_t state label_ids": 1,
        "xavier y_true": 0,
    }  # fmt: skip
    for names, want in cases.items():
        function = eval(f"lambda {', '.join(names.split())}: None")
        assert ts.autodiff(function).differentiated == want, names

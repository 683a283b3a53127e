"""`backward`: gradients of what was run eagerly, against `grad` of the same function."""

import gc
import weakref

import numpy as np
import pytest
from everywhere import close

import tessera as ts
from tessera.core.errors import ArgumentError, ShapeError, TraceError
from tessera.ir.tensor import Tensor

X = np.array([[0.3, 1.1], [0.7, -0.4]])
W = np.array([[0.2, -0.5], [0.9, 0.1]])
SQUARE = ts.custom_vjp(lambda x: x * x)
SQUARE.defvjp(lambda x: (x * x, x), lambda x, g: g * 3.0 * x)  # three, to tell that the rule was used
PROGRAMS = {
    "ops": lambda x, w: (ts.tanh(x @ w) * x).sum() + ts.softmax(x).max() + (x[0] * 2.0).sum(),
    "loss": lambda x, w: ts.mse_loss(ts.gelu(x @ w), x),
    "scan": lambda x, w: ts.scan(lambda s, y: (ts.sin(s @ w + y), s), x[0], x)[1].sum(),
    "cond": lambda x, w: ts.cond(x.sum() > 0, lambda: (x @ w).sum(), lambda: w.sum()),
    "custom": lambda x, w: (SQUARE(x) @ w).sum(),
    "checkpoint": lambda x, w: ts.checkpoint(lambda x, w: ts.sin(x @ w))(x, w).sum(),
    "jit": lambda x, w: ts.jit(lambda x: ts.exp(x) @ w)(x).sum(),
    "llvm": lambda x, w: ts.jit(lambda x, w: ts.exp(x) @ w, target="llvm")(x, w).sum(),
    "factors": lambda x, w: ts.inv(x @ w).sum() + ts.svd(x)[1][0],
    "only one": lambda x, w: w.sum() + ts.stop_gradient(x).sum(),
}


def test_what_is_used_twice_is_walked_once():
    """Each op of a chain uses the one before it twice: 2**60 ways lead back."""
    x = Tensor(X, requires_grad=True)
    y = x
    for _ in range(60):
        y = (y + y) * 0.5
    y.sum().backward()
    np.testing.assert_array_equal(x.grad.numpy(), np.ones_like(X))


@pytest.mark.parametrize("name", PROGRAMS)
def test_as_grad(name):
    function = PROGRAMS[name]
    x, w = Tensor(X, requires_grad=True), Tensor(W, requires_grad=True)
    out = function(x, w)
    out.backward()
    want = ts.grad(function, argnums=(0, 1))(X, W)
    close([ts.zeros_like(x) if x.grad is None else x.grad, w.grad], list(want), name)
    assert not x.grad.requires_grad and out.requires_grad


def test_gradients_add_up_and_begin_anew():
    x = Tensor([1.0, 2.0], requires_grad=True)
    y = x * x
    y.backward(Tensor([1.0, 10.0]))
    y.sum().backward()
    assert x.grad.tolist() == [4.0, 44.0]
    x.grad = None
    (x.detach() * x).sum().backward()
    assert x.grad.tolist() == [1.0, 2.0]


def test_what_asks_for_nothing_remembers_nothing():
    x = Tensor([1.0]) * 2.0
    assert not x.requires_grad and not hasattr(x, "history")
    assert not (Tensor([1.0], requires_grad=True).detach() * 2.0).requires_grad
    assert not (Tensor([1.0], requires_grad=True) > 0.0).requires_grad


def test_through_copies_and_slices():
    x = Tensor(X, requires_grad=True)
    (x.clone()[0] * x.T[:, 1].to(ts.f32).to(ts.f64)).sum().backward()
    np.testing.assert_allclose(x.grad, [X[1], X[0]], rtol=1e-6)


def test_what_was_made_is_freed():
    x = Tensor([1.0], requires_grad=True)
    y = x * 2.0
    y.sum().backward()
    ref = weakref.ref(y)
    gc.disable()
    try:
        del y
        assert ref() is None  # without the collector: nothing holds itself
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "call, error, text",
    [
        (lambda: (Tensor([1.0, 2.0], requires_grad=True) * 2.0).backward(), ShapeError, "not a scalar"),
        (lambda: Tensor(1.0).backward(), ArgumentError, "requires_grad"),
        (lambda: Tensor([1.0], requires_grad=True).backward(ts.ones(2)), ShapeError, "another shape"),
        (lambda: ts.jit(lambda x: x.backward() or x)(1.0), TraceError, "ts.grad"),
    ],
)
def test_refused(call, error, text):
    with pytest.raises(error, match=text):
        call()

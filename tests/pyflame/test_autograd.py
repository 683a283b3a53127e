"""Automatic differentiation of lazy graphs: leaves, modes, freed graphs; gradients are PyTorch's."""

import threading

import numpy as np
import pytest

import tessera as ts
import tessera.pyflame as pf

torch = pytest.importorskip("torch")
X = np.random.default_rng(1).normal(size=(4, 3)).astype(np.float32)


def test_gradients_of_a_graph_of_two_branches_are_those_of_pytorch():
    def loss(p, x, w):
        h = p.tanh(x @ w)
        return ((h * h).sum() + p.exp(h).mean()) * 0.5

    x, w = pf.tensor(X), pf.tensor(X.T.copy(), requires_grad=True)
    a, b = torch.tensor(X), torch.tensor(X.T.copy(), requires_grad=True)
    value = loss(pf, x, w)
    pf.autograd.backward(value)
    loss(torch, a, b).backward()
    assert value.is_evaluated() and x.grad is None
    np.testing.assert_allclose(w.grad.numpy(), b.grad, rtol=1e-5, atol=1e-6)
    loss(pf, x, w).backward()  # accumulates
    np.testing.assert_allclose(w.grad.numpy(), 2 * b.grad, rtol=1e-5, atol=1e-6)


def test_without_requires_grad_all_float_leaves_receive_gradients():
    x, y, i = pf.randn([2, 3]), pf.randn([3, 2]), pf.tensor([1], dtype=pf.int32)
    pf.autograd.backward((x @ y)[i].sum())
    np.testing.assert_allclose(x.grad.numpy()[1], y.numpy().sum(1), rtol=1e-5)
    assert y.grad.shape == [3, 2] and i.grad is None


def test_an_intermediate_result_may_be_evaluated_before_and_after():
    x = pf.tensor(X, requires_grad=True)
    h = (x * x).eval()
    later = x * 3.0
    (h.sum() + later.sum()).backward()
    np.testing.assert_allclose(x.grad.numpy(), 2 * X + 3, rtol=1e-6)
    np.testing.assert_allclose(later.numpy(), X * 3, rtol=1e-6)
    assert x.requires_grad and h.requires_grad


def test_no_grad_makes_constants():
    x = pf.tensor(X, requires_grad=True)
    with pf.autograd.no_grad():
        assert not pf.autograd.GradMode.is_enabled()
        c = x * x
    assert pf.autograd.GradMode.is_enabled() and not c.requires_grad
    (c * x).sum().backward()
    np.testing.assert_allclose(x.grad.numpy(), X * X, rtol=1e-6)
    with pytest.raises(ts.errors.ArgumentError, match="nothing with a gradient"):
        c.sum().detach().backward()
    with pytest.raises(ts.errors.ArgumentError, match="nothing with a gradient"), pf.no_grad():
        (x * 2.0).sum().backward()


def test_detach_and_modes_of_threads():
    x = pf.tensor([2.0], requires_grad=True)
    (x.detach() * x).backward()
    assert x.grad.item() == 2
    pf.GradMode.set_enabled(False)
    found = []
    thread = threading.Thread(target=lambda: found.append(pf.GradMode.is_enabled()))
    thread.start()
    thread.join()
    assert found == [True] and not (x * x).requires_grad
    pf.GradMode.set_enabled(True)
    assert (x * x).requires_grad


@pf.no_grad()
def infer(x):
    return x * 2.0


def test_no_grad_as_a_decorator():
    assert not infer(pf.tensor([1.0], requires_grad=True)).requires_grad


def test_a_freed_graph_is_refused_and_names_the_line():
    x = pf.tensor([3.0], requires_grad=True)
    y = x * x
    z = y * 2.0
    z.backward(retain_graph=True)
    z.backward()
    assert x.grad.item() == 24
    for again in (z, y, y * 4.0):
        with pytest.raises(ts.errors.ArgumentError, match="freed") as found:
            pf.autograd.backward(again)
        assert found.value.location.file == __file__
    assert y.item() == 9


@pytest.mark.parametrize(
    "call",
    [
        lambda x: pf.autograd.backward(x * x),
        lambda x: pf.autograd.backward((x * x).sum(), pf.ones([2])),
        lambda x: pf.autograd.backward(x * x, 1.0),
    ],
)
def test_an_output_that_is_not_a_scalar_needs_a_gradient_of_its_shape(call):
    with pytest.raises(ts.errors.ShapeError) as found:
        call(pf.ones([3]))
    assert found.value.location.line == call.__code__.co_firstlineno


def test_wrong_outputs():
    with pytest.raises(ts.errors.DTypeError, match="float"):
        pf.backward(pf.ones([1], dtype=pf.int32))
    with pytest.raises(ts.errors.ArgumentError, match="takes a tensor"):
        pf.backward(3.0)
    with pytest.raises(ts.errors.DTypeError, match="grad_output"):
        pf.backward(pf.ones([2]) * 2.0, pf.ones([2], dtype=pf.float16))
    with pytest.raises(ts.errors.DTypeError, match="only float"):
        pf.ones([2], dtype=pf.int32).requires_grad_()
    with pytest.raises(ts.errors.ArgumentError, match="computed from others"):
        (pf.ones([2]) * 2.0).requires_grad_()
    with pytest.raises(ts.errors.ArgumentError, match="set_enabled"):
        pf.GradMode.set_enabled("no")


def test_a_leaf_has_its_own_gradient():
    x = pf.tensor([5.0], requires_grad=True)
    x.backward()
    assert x.grad.item() == 1


def test_what_needs_no_gradient_is_not_part_of_the_graph():
    w = pf.tensor([2.0], requires_grad=True)
    target = pf.tensor([3.0]) * 2.0
    for _ in range(2):
        ((w - target) * (w - target)).sum().backward()
    assert w.grad.item() == -16 and not target.requires_grad


def test_the_same_graph_with_other_leaves():
    for first, second in ((True, True), (False, True), (True, False)):
        a, b = (pf.tensor([v], requires_grad=asked) for v, asked in ((2.0, first), (5.0, second)))
        (a * a * b).sum().backward()
        assert (a.grad and a.grad.item()) == (20 if first else None)
        assert (b.grad and b.grad.item()) == (4 if second else None)


def test_backward_keeps_the_values_of_what_is_held():
    x = pf.tensor(X, requires_grad=True)
    h = pf.exp(x)
    (h * 2.0).sum().backward()
    assert h.is_evaluated()
    np.testing.assert_allclose(h.numpy(), np.exp(X), rtol=1e-6)

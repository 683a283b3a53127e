"""The functions that take derivatives: which arguments, containers, auxiliary results, Jacobians, batches."""

import numpy as np
import pytest
from everywhere import central, close, everywhere

import tessera as ts
from tessera.core.errors import ArgumentError, ShapeError

A = np.array([0.3, -0.8])
P = {"w": np.array([[0.5, -1.0], [0.2, 0.7]]), "b": (np.array([0.1, 0.4]),)}


def loss(p, x, scale=2.0):
    return (ts.tanh(x @ p["w"] + p["b"][0]) ** 2).sum() * scale


def test_argnums_and_containers():
    both = ts.grad(loss, argnums=(0, 1))(P, A)
    assert set(both[0]) == {"w", "b"} and isinstance(both[0]["b"], tuple) and both[1].shape == (2,)
    np.testing.assert_allclose(both[1], central(lambda x: loss(P, x), A)[0], rtol=1e-7)
    np.testing.assert_allclose(both[0]["w"], central(lambda w: loss({**P, "w": w}, A), P["w"])[0], rtol=1e-7)
    close(ts.grad(loss, argnums=-1)(P, A), both[1], "counted from the end")
    close(ts.grad(loss)(P, A, scale=4.0)["w"].numpy() / 2, both[0]["w"], "keyword")
    close(ts.grad(loss, argnums=(1,))(P, A), (both[1],), "a tuple of one")


def test_auxiliary_results():
    def with_aux(p, x):
        y = x @ p["w"]
        return (y * y).sum(), {"y": y, "n": 3}

    (value, aux), grads = ts.value_and_grad(with_aux, has_aux=True)(P, A)
    only, again = ts.grad(with_aux, has_aux=True)(P, A)
    np.testing.assert_allclose(aux["y"], A @ P["w"])
    assert int(aux["n"]) == 3 and float(value) == pytest.approx(float((aux["y"] ** 2).sum()))
    close(grads, only, "grad")
    close(again["y"], aux["y"], "aux")
    with pytest.raises(ArgumentError, match="has_aux"):
        ts.grad(lambda x: x.sum(), has_aux=True)(A)


def test_vjp_and_jvp_of_containers():
    def both(p):
        return {"out": A @ p["w"] + p["b"][0], "sum": p["w"].sum()}

    out, pull = ts.vjp(both, P)
    (g,) = pull({"out": ts.Tensor(A), "sum": ts.Tensor(np.float64(2.0))})
    np.testing.assert_allclose(g["w"], np.outer(A, A) + 2.0)
    _, moved = ts.jvp(both, (P,), ({"w": P["w"], "b": (A,)},))
    np.testing.assert_allclose(moved["out"], A @ P["w"] + A)
    assert set(out) == {"out", "sum"}


def test_jacobians_of_containers():
    def f(p):
        return {"u": ts.sin(p["w"]) @ A, "v": p["b"][0] * 2.0}

    forward, reverse = ts.jacfwd(f)(P), ts.jacrev(f)(P)
    assert forward["u"]["w"].shape == (2, 2, 2) and forward["v"]["b"][0].shape == (2, 2)
    close(forward, reverse, "both modes")
    np.testing.assert_allclose(forward["v"]["b"][0], 2 * np.eye(2))
    np.testing.assert_allclose(forward["u"]["b"][0], np.zeros((2, 2)))


def test_hessians():
    def f(x):
        return (x[0] ** 2 * x[1]).sum() + ts.exp(x).sum()

    want = np.diag(np.exp(A)) + [[2 * A[1], 2 * A[0]], [2 * A[0], 0]]
    np.testing.assert_allclose(everywhere(ts.hessian(f), A, text=False), want, rtol=1e-12)
    np.testing.assert_allclose(ts.jacfwd(ts.grad(f))(A), want, rtol=1e-12)  # as the specification writes it
    np.testing.assert_allclose(ts.jacrev(ts.jacfwd(f))(A), want, rtol=1e-12)


def test_third_order():
    third = ts.grad(ts.grad(ts.grad(lambda x: ts.sin(x) * x)))
    assert third(np.float64(0.7)).item() == pytest.approx(-3 * np.sin(0.7) - 0.7 * np.cos(0.7))


def test_decorators_in_the_order_of_the_specification():
    @ts.jit
    @ts.autodiff(argnums=(1, 2))
    def linear_loss(x, w, b, y):
        return ts.mse_loss(ts.relu(x @ w + b), y)

    x, w, b, y = (np.ones(s, np.float32) for s in ((4, 3), (3, 2), (2,), (4, 2)))
    gw, gb = ts.grad(linear_loss)(x, w, b, y)
    assert gw.shape == (3, 2) and gb.shape == (2,) and float(linear_loss(x, w, b, y)) == 9.0


def test_per_example_gradients_of_the_specification():
    @ts.vmap(in_dims=(None, 0, 0), out_dims=0)
    def per_example_grad(params, x, y):
        return ts.grad(lambda p: ts.mse_loss(p * x, y))(params)

    x, y, w = np.arange(6.0).reshape(3, 2), np.ones((3, 2)), A
    want = np.stack([(w * a - b) * a for a, b in zip(x, y, strict=True)])
    np.testing.assert_allclose(per_example_grad(w, x, y), want)
    np.testing.assert_allclose(ts.per_example_grad(lambda p, x, y: ts.mse_loss(p * x, y))(w, x, y), want)


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_gradient_accumulation(parts, rng):
    x, y = rng.normal(size=(8, 2)), rng.normal(size=(8, 2))

    def mean_loss(p, x, y):
        return ((ts.tanh(x @ p["w"]) - y) ** 2).mean()

    want = ts.value_and_grad(mean_loss)(P, x, y)
    close(ts.accumulate_grad(mean_loss, parts)(P, x, y), want, "eager")
    close(ts.jit(ts.accumulate_grad(mean_loss, parts), target="llvm")(P, x, y), want, "llvm")
    trace = ts.jit(ts.accumulate_grad(mean_loss, parts)).trace(P, x, y).function
    assert any(n.op.name == "ts.scan" for n in trace.body.nodes) == (parts > 1)
    if parts > 1:
        with pytest.raises(ShapeError, match="does not divide"):
            ts.accumulate_grad(mean_loss, 3)(P, x, y)


def test_gradient_accumulation_as_a_decorator():
    rng = np.random.default_rng(1)
    w, x = rng.normal(size=(3, 1)).astype("f4"), rng.normal(size=(8, 3)).astype("f4")

    def whole(w):
        return ((ts.Tensor(x) @ w) ** 2).mean()

    def parted(w):
        @ts.gradient_accumulation(steps=4)
        def loss(batch):
            return ((batch @ w) ** 2).mean()

        return loss(x)

    close(ts.value_and_grad(parted)(ts.Tensor(w)), ts.value_and_grad(whole)(ts.Tensor(w)), "eager")
    close(ts.jit(ts.grad(parted), target="llvm")(w), ts.grad(whole)(ts.Tensor(w)), "llvm")
    shared = ts.gradient_accumulation(2, shared=0)(lambda w, x: ((x @ w) ** 2).mean())
    close(ts.grad(shared)(ts.Tensor(w), x), ts.grad(whole)(ts.Tensor(w)), "shared")
    for steps in (0, -1, True, 2.0, "2", None):
        with pytest.raises(ArgumentError, match="number of steps"):
            ts.gradient_accumulation(steps=steps)
    with pytest.raises(ShapeError, match="3 parts"):
        ts.gradient_accumulation(3)(lambda x: x.sum())(x)


def test_none_in_a_container_stays_none():
    params = {"w": ts.Tensor([1.0, 2.0]), "b": None, "more": [None, ts.Tensor([3.0])]}

    def loss(p):
        return (p["w"] * 2.0).sum() + (p["more"][1] ** 2).sum()

    for found in (ts.grad(loss)(params), ts.jit(ts.grad(loss), target="llvm")(params), ts.vjp(loss, params)[1](1.0)[0]):
        assert found["w"].tolist() == [2.0, 2.0] and found["b"] is None and found["more"][0] is None
    assert ts.jvp(loss, (params,), (params,))[1].item() == 24.0 and ts.jit(lambda x: (x, None))(1.0)[1] is None


@pytest.mark.parametrize("ord", [0.5, 1, 1.5, 2, 3])
def test_a_norm_has_the_subgradient_zero_where_an_element_is_zero(ord):
    x = np.array([0.0, 1.0, -4.0])
    found = ts.grad(lambda x: ts.norm(x, ord))(ts.Tensor(x)).numpy()
    want = np.sign(x[1:]) * np.abs(x[1:]) ** (ord - 1) * np.linalg.norm(x, ord) ** (1 - ord)
    np.testing.assert_allclose(found, [0.0, *want], rtol=1e-12)


@pytest.mark.parametrize("argnums", ["a", 1.0, (0, "a"), 5, (0, 0), (1, -1)])
@pytest.mark.parametrize(
    "transform", [ts.grad, ts.value_and_grad, ts.jacrev, ts.jacfwd, ts.hessian, ts.per_example_grad]
)
def test_argnums_that_name_no_arguments_are_refused(transform, argnums):
    """Twice the same argument gave 0 for the first."""
    with pytest.raises(ArgumentError, match=r"was not passed by position|argnums is"):
        transform(lambda a, b: (a * b).sum(), argnums=argnums)(ts.ones(2), ts.ones(2))


@pytest.mark.parametrize("transform", [ts.jacrev, ts.jacfwd, ts.hessian])
def test_a_jacobian_is_of_one_argument(transform):
    with pytest.raises(ArgumentError, match="argnums is"):
        transform(lambda a, b: (a * b).sum(), argnums=(0, 1))(ts.ones(2), ts.ones(2))

"""Rules of a user's: as the specification writes them, in both modes, batched, jitted, and within loops."""

import math

import numpy as np
import pytest
from everywhere import close, everywhere

import tessera as ts
from tessera.core.errors import ArgumentError, ShapeError, UnsupportedOpError

X = np.array([-1.5, 0.5, 2.0])
Y = np.array([0.7, 1.3, -2.1])


@ts.custom_vjp
def custom_relu(x):
    return ts.maximum(x, 0)


custom_relu.defvjp(lambda x: (ts.maximum(x, 0), (x > 0)), lambda mask, grad_y: grad_y * mask.to(grad_y.dtype))


@ts.custom_jvp
def stable_div(x, y):
    return x / y


def stable_div_jvp(primals, tangents):
    x, y = primals
    dx, dy = tangents
    return x / y, (dx * y - x * dy) / (y * y)


stable_div.defjvp(stable_div_jvp)


@ts.custom_vjp
def custom_gelu(x):
    return 0.5 * x * (1 + ts.tanh(0.79788456 * (x + 0.044715 * x**3)))


def custom_gelu_fwd(x):
    y = custom_gelu(x)
    return y, (x, y)


def custom_gelu_bwd(saved, grad_output):
    x, y = saved
    cdf = 0.5 * (1 + ts.tanh(0.79788456 * (x + 0.044715 * x**3)))
    pdf = ts.exp(-0.5 * x**2) / math.sqrt(2 * math.pi)
    return grad_output * (cdf + x * pdf)


custom_gelu.defvjp(custom_gelu_fwd, custom_gelu_bwd)


@ts.custom_vjp
def marked(tree, scale):
    """Its rule is not its derivative: ten times the cotangent tells that it was used."""
    return {"out": tree["a"] * scale, "other": tree["b"]}


marked.defvjp(
    lambda tree, scale: (marked(tree, scale), (tree["a"], scale)),
    lambda saved, g: ({"a": 10.0 * g["out"] * saved[1], "b": None}, (g["out"] * saved[0]).sum() * 100.0),
)


def test_the_rules_of_the_specification():
    np.testing.assert_array_equal(ts.grad(lambda x: custom_relu(x).sum())(X), [0, 1, 1])
    wanted = ts.grad(lambda x, y: (x / y).sum(), argnums=(0, 1))(X, Y)
    close(ts.grad(lambda x, y: stable_div(x, y).sum(), argnums=(0, 1))(X, Y), wanted, "jvp rule")
    near = ts.grad(lambda x: ts.gelu(x).sum())(X).numpy()
    np.testing.assert_allclose(ts.grad(lambda x: custom_gelu(x).sum())(X), near, atol=2e-3)


def test_containers_and_arguments_that_have_no_cotangent():
    a, scale = marked_gradients(X, Y, np.float64(3.0))
    np.testing.assert_allclose(a["a"], np.full(3, 30.0))
    np.testing.assert_array_equal(a["b"], np.zeros(3))
    np.testing.assert_allclose(scale, 100 * X.sum())


def marked_gradients(a, b, scale):
    def loss(tree, scale):
        return sum(t.sum() for t in marked(tree, scale).values())

    return ts.grad(loss, argnums=(0, 1))({"a": a, "b": b}, scale)


@pytest.mark.parametrize("function", [custom_relu, custom_gelu, lambda x: stable_div(x, x * x + 1.0)])
def test_rules_under_every_transform(function):
    total = ts.grad(lambda x: function(x).sum())
    close(everywhere(total, X, text=False), total(X), "jit")
    close(ts.vmap(ts.grad(function))(X), total(X), "vmap of grad")
    close(ts.grad(lambda x: ts.vmap(function)(x).sum())(X), total(X), "grad of vmap")
    close(ts.grad(lambda x: ts.map(function, x).sum())(X), total(X), "in a loop")
    close(
        ts.grad(lambda x: ts.cond(x.sum() > 0, lambda: function(x).sum(), lambda: x.sum()))(X), total(X), "in a branch"
    )
    close(ts.grad(ts.jit(lambda x: function(x).sum()))(X), total(X), "through jit")


def test_a_rule_is_differentiated_in_turn():
    @ts.custom_vjp
    def cube(x):
        return x**3

    cube.defvjp(lambda x: (cube(x), x), lambda x, g: g * 3.0 * x * x)
    assert ts.grad(ts.grad(cube))(2.0).item() == 12.0
    assert ts.grad(ts.grad(ts.grad(cube)))(2.0).item() == 6.0


def test_a_rule_that_closes_over_an_array_in_a_loop():
    table = np.array([2.0, 3.0, 4.0])
    scaled = ts.custom_vjp(lambda x: x * ts.Tensor(table))
    scaled.defvjp(lambda x: (x * ts.Tensor(table), ts.Tensor(table)), lambda saved, g: g * saved * ts.Tensor(table))

    def loss(x):
        return ts.scan(lambda s, _: (scaled(s), s.sum()), x, length=2)[0].sum()

    np.testing.assert_array_equal(everywhere(ts.grad(loss), X, text=False), table**4)


def test_straight_through():
    quantize = ts.straight_through(lambda x: ts.round(x * 4.0) / 4.0)
    np.testing.assert_array_equal(quantize(ts.Tensor(X + 0.1)), np.round((X + 0.1) * 4) / 4)
    np.testing.assert_array_equal(everywhere(ts.grad(lambda x: (quantize(x) * Y).sum()), X, text=False), Y)
    np.testing.assert_array_equal(ts.jvp(quantize, (X,), (Y,))[1], Y)


def test_stop_gradient():
    assert ts.grad(lambda x: x * ts.stop_gradient(x * x))(3.0).item() == 9.0
    assert ts.jvp(lambda x: x * ts.stop_gradient(x), (3.0,), (1.0,))[1].item() == 3.0


def test_refused():
    lonely = ts.custom_vjp(lambda x: x * 2.0)
    with pytest.raises(ArgumentError, match="no rule yet"):
        ts.grad(lonely)(1.0)
    with pytest.raises(UnsupportedOpError, match="custom_jvp"):
        ts.jvp(custom_relu, (X,), (Y,))
    wrong = ts.custom_vjp(lambda x, y: x * y)
    wrong.defvjp(lambda x, y: (x * y, None), lambda _, g: g)
    with pytest.raises(ArgumentError, match="one cotangent for each"):
        ts.grad(wrong)(1.0, 2.0)
    misshapen = ts.custom_vjp(lambda x: x.sum())
    misshapen.defvjp(lambda x: (x.sum(), None), lambda _, g: g)
    with pytest.raises(ShapeError, match="cotangent"):
        ts.grad(misshapen)(X)
    with pytest.raises(ArgumentError, match="captures a tensor"):
        ts.grad(lambda x: _closing(x))(1.0)


def _closing(x):
    inner = ts.custom_vjp(lambda y: y * x)
    inner.defvjp(lambda y: (y * x, None), lambda _, g: g)
    return inner(x)

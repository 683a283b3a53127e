"""Forward mode and second derivatives of kernels, and rules of their own: against differences and ts operations."""

import numpy as np
import pytest

import tessera as ts
from tessera import tile
from tessera.core.errors import ArgumentError, UnsupportedOpError
from tessera.stdlib.attention import attend

RANDOM = np.random.default_rng(0)


@ts.kernel
def smooth(x, w, out, *, BM: int = 4):
    i = tile.program_id(0) * BM
    v = tile.load(x[i : i + BM], edge="clip", mask=tile.arange(0, BM) != 2, other=w[0])
    tile.store(out[i : i + BM], tile.exp(v) * tile.tanh(v + w[0]) + v / (w[1] + 4.0), edge="clip")


@ts.kernel
def looped(x, w, out, *, BM: int = 4, STEPS: int = 3):
    i = tile.program_id(0) * BM
    v, state = x[i : i + BM], tile.zeros((BM,), x.dtype)
    for _ in tile.range(0, STEPS):
        state = tile.tanh(state * w[0:BM] + v)
    if i > 0:
        state = state * state
    out[i : i + BM] = state


@ts.kernel
def counted(x, out):
    """A loop that ends by a run-time value, and memory that is read after it is written."""
    i = tile.program_id(0)
    total, turns = x[i], 0
    while turns < i + 1:
        total = total * x[i]
        turns += 1
    out[i] = total
    out[i] = out[i] * 2.0 + x[i]


@ts.kernel
def shared(x, out, *, BM: int = 4):
    """Shared memory and an atomic sum."""
    i = tile.program_id(0) * BM
    held = tile.alloc_shared((BM,), x.dtype)
    held[0:BM] = x[i : i + BM] * x[i : i + BM]
    tile.barrier()
    tile.atomic_add(out[0], tile.sum(tile.load(held[0:BM]) * x[i : i + BM], axis=0))


@ts.kernel
def copied(x, out, *, BM: int = 4):
    """Memory that is copied beside the program, and read after the wait."""
    i = tile.program_id(0) * BM
    held = tile.alloc_shared((BM,), x.dtype)
    tile.async_copy(x[i : i + BM], held)
    tile.wait_async()
    tile.barrier()
    v = held[0:BM]
    tile.store(out[i : i + BM], tile.sin(v) * x[i : i + BM])


def z(*shape):
    return ts.like(shape=shape, dtype=ts.f64)


def r(*shape):
    return ts.Tensor(RANDOM.standard_normal(shape))


FORWARD = {
    "smooth": (lambda x, w: ts.launch(smooth, (3,), x, w, z(10)), (r(10), r(2))),
    "loop and branch": (lambda x, w: ts.launch(looped, (3,), x, w, z(12)), (r(12), r(4))),
    "while and memory read back": (lambda x: ts.launch(counted, (3,), x, z(3)), (r(3),)),
    "asynchronous copies": (lambda x: ts.launch(copied, (3,), x, z(12)), (r(12),)),
    "shared memory and atomics": (lambda x: ts.launch(shared, (3,), x, ts.zeros(1, dtype=ts.f64)), (r(12),)),
}
TWICE = [name for name in FORWARD if name in ("smooth", "loop and branch")]


def differences(f, xs, us, h=1e-6):
    ahead, behind = (f(*(x + u * d for x, u in zip(xs, us, strict=True))) for d in (h, -h))
    return (ahead.numpy() - behind.numpy()) / (2 * h)


@pytest.mark.parametrize("target", ["interp", "llvm", "ptx"])
@pytest.mark.parametrize("name", FORWARD)
def test_tangents_are_differences(name, target):
    f, xs = FORWARD[name]
    us = tuple(r(*x.shape) for x in xs)
    f = ts.jit(f, target=target)
    out, moved = ts.jvp(f, xs, us)
    np.testing.assert_allclose(out.numpy(), f(*xs).numpy(), rtol=1e-12)
    np.testing.assert_allclose(moved.numpy(), differences(f, xs, us), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("order", ["reverse over reverse", "forward over reverse", "reverse over forward"])
@pytest.mark.parametrize("name", TWICE)
def test_second_derivatives_are_differences_of_gradients(name, order):
    f, xs = FORWARD[name]
    us, weights = tuple(r(*x.shape) for x in xs), r(*f(*xs).shape)
    loss = lambda *xs: (f(*xs) * weights).sum()  # noqa: E731
    slope = ts.grad(loss)
    if order == "forward over reverse":
        found = ts.jvp(slope, xs, us)[1]
    elif order == "reverse over forward":
        found = ts.grad(lambda *xs: ts.jvp(loss, xs, us)[1])(*xs)
    else:
        every = ts.grad(loss, argnums=tuple(range(len(xs))))
        found = ts.grad(lambda *xs: sum((g * u).sum() for g, u in zip(_tuple(every(*xs)), us, strict=True)))(*xs)
    np.testing.assert_allclose(found.numpy(), differences(slope, xs, us, 1e-5), rtol=1e-6, atol=1e-7)


def _tuple(x):
    return x if isinstance(x, tuple) else (x,)


def test_a_third_derivative():
    f = lambda x: ts.launch(cube, (2,), x, ts.like(x)).sum()  # noqa: E731
    third = ts.grad(lambda x: ts.grad(lambda x: ts.grad(f)(x).sum())(x).sum())
    np.testing.assert_allclose(third(r(6)).numpy(), 6.0, rtol=1e-12)


@ts.kernel
def cube(x, out, *, BM: int = 4):
    i = tile.program_id(0) * BM
    v = tile.load(x[i : i + BM], edge="clip")
    tile.store(out[i : i + BM], v * v * v, edge="clip")


def test_attention_as_a_kernel_has_the_hessian_of_the_op():
    q, k, v, u = (ts.Tensor(RANDOM.standard_normal((1, 2, 5, 4)), dtype=ts.f32) for _ in range(4))
    kernel = lambda q: ts.launch(attend, (1, 2, 1), q, k, v, None, None, ts.like(q), causal=True, scale=0.5, BM=8, BN=4)  # noqa: E731
    op = lambda q: ts.scaled_dot_product_attention(q, k, v, causal=True, scale=0.5)  # noqa: E731
    for transform in (
        lambda f: ts.jvp(f, (q,), (u,))[1],
        lambda f: ts.grad(lambda q: (ts.grad(lambda q: (f(q) ** 2).sum())(q) * u).sum())(q),
    ):
        np.testing.assert_allclose(transform(kernel).numpy(), transform(op).numpy(), rtol=2e-4, atol=2e-5)


def test_tangents_of_a_batch():
    x = r(2, 10)
    f = lambda x: ts.jvp(lambda x: ts.launch(cube, (3,), x, z(10)), (x,), (x * 0 + 1.0,))[1]  # noqa: E731
    np.testing.assert_allclose(ts.vmap(f)(x).numpy(), 3 * x.numpy() ** 2, rtol=1e-12)


# Rules of a kernel's own: each doubles the derivative, so that one sees that it counts.


@pytest.fixture
def ruled():
    @ts.kernel
    def scaled(x, w, out, *, BM: int = 4):
        i = tile.program_id(0) * BM
        tile.store(out[i : i + BM], tile.load(x[i : i + BM], edge="clip") * w[0], edge="clip")

    @scaled.vjp
    def scaled_vjp(call):
        assert call.grid == (2,) and call.group == 1 and call.constants["BM"] == 4
        return {
            "x": 2.0 * ts.launch(scaled, call.grid, call.cotangents["out"], call.inputs["w"], ts.like(call.inputs["x"]))
        }

    @scaled.jvp
    def scaled_jvp(call):
        return {"out": 2.0 * call.tangents["x"] * call.inputs["w"] + 0.0 * call.outputs["out"]}

    return scaled


X, W = ts.Tensor(np.arange(6.0)), ts.Tensor(np.array([3.0]))
USES = {
    "grad": lambda f: ts.grad(lambda x: f(x).sum())(X),
    "jit": lambda f: ts.jit(ts.grad(lambda x: f(x).sum()), target="llvm")(X),
    "vmap": lambda f: ts.vmap(ts.grad(lambda x: f(x).sum()))(ts.stack([X, X]))[1],
    "checkpoint": lambda f: ts.grad(ts.checkpoint(lambda x: f(x).sum()))(X),
    "jvp": lambda f: ts.jvp(f, (X,), (ts.ones_like(X),))[1],
    "scan": lambda f: ts.grad(lambda x: ts.scan(lambda c, _: (f(c), ts.zeros(())), x, None, length=1)[0].sum())(X),
}


@pytest.mark.parametrize("use", USES)
def test_a_rule_takes_the_place_of_the_derived_derivative(use, ruled):
    found = USES[use](lambda x: ts.launch(ruled, (2,), x, W, ts.like(x)))
    np.testing.assert_allclose(found.numpy(), 6.0)


def test_a_rule_counts_on_the_tape_and_for_a_launch_in_place(ruled):
    x = ts.Tensor(X.numpy(), requires_grad=True)
    ts.launch(ruled, (2,), x, W, ts.like(x)).sum().backward()
    np.testing.assert_allclose(x.grad.numpy(), 6.0)

    def in_place(x):
        out = ts.zeros(6, dtype=ts.f64)
        ruled[(2,)](x, W, out)
        return out.sum()

    np.testing.assert_allclose(ts.grad(in_place)(X).numpy(), 6.0)


def test_what_has_no_rule_is_derived(ruled):
    ruled.rules.vjp = None
    np.testing.assert_allclose(ts.grad(lambda x: ts.launch(ruled, (2,), x, W, ts.like(x)).sum())(X).numpy(), 3.0)


def test_errors_of_rules_and_of_kernels_without_tangents(ruled):
    ruled.vjp(lambda call: {"y": call.cotangents["out"]})
    with pytest.raises(ArgumentError, match="scaled returns something else.*\n.*\n.*\n.*among x, w"):
        ts.grad(lambda x: ts.launch(ruled, (2,), x, W, ts.like(x)).sum())(X)

    @ts.kernel
    def most(x, out):
        tile.atomic_max(out[0], x[tile.program_id(0)])

    with pytest.raises(UnsupportedOpError, match=r"an atomic max in it(.|\n)*@kernel.jvp"):
        ts.jvp(lambda x: ts.launch(most, (6,), x, ts.zeros(1, dtype=ts.f64)), (X,), (X,))


@ts.kernel
def checked(x, out):
    i = tile.program_id(0)
    tile.assert_(x[i] > -100.0, "too small", x[i])
    out[i] = x[i] * x[i]


def test_an_assertion_has_no_tangent():
    x = np.array([1.0, 2.0, 3.0])
    value, tangent = ts.jvp(lambda x: ts.launch(checked, (3,), x, z(3)), (ts.Tensor(x),), (ts.Tensor(x + 1),))
    assert value.tolist() == [1, 4, 9] and tangent.tolist() == [4, 12, 24]


@ts.kernel
def filled(x, w, out):
    v = tile.load(x[0:4], mask=tile.arange(0, 4) != 2, other=w[0])
    out[0:4] = v * v


def test_a_tangent_of_what_fills_a_load_alone_is_refused():
    x, w = r(4), (r(1),)
    with pytest.raises(UnsupportedOpError, match="a load whose `other` alone has a derivative"):
        ts.jvp(lambda w: ts.launch(filled, (1,), x, w, z(4)), w, w)
    value, tangent = ts.jvp(lambda x, w: ts.launch(filled, (1,), x, w, z(4)), (x, *w), (ts.zeros_like(x), *w))
    assert tangent.tolist() == [0, 0, 2 * value[2].item(), 0]

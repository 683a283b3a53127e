"""Loops and branches: eager, traced, at every level and on llvm; their derivatives, and batches of them."""

import numpy as np
import pytest
from everywhere import arrays_of, central, close, everywhere

import tessera as ts
from tessera.core.errors import ArgumentError
from tessera.core.pytree import flatten

W = np.array([[0.3, -0.2, 0.5], [0.1, 0.4, -0.3], [0.2, 0.2, 0.1]])
X = np.array([[0.5, 1.1, 0.2], [0.9, 0.3, 0.7], [0.4, 0.6, 1.2], [1.0, 0.1, 0.8]])
ZERO = np.zeros(3)


def rnn(w, xs):
    def step(state, x):
        new = ts.tanh(state @ w + x)
        return new, new * x

    return ts.scan(step, ts.Tensor(ZERO), xs)


def backwards(w, xs):
    return ts.scan(lambda s, x: (s * 0.5 + x, {"a": s.sum(), "b": x @ w}), ts.Tensor(ZERO), xs, reverse=True)


def swapping(w, xs):
    return ts.scan(lambda s, x: ((s[1], s[0] * x), s[0] + s[1]), (w[0], w[1]), xs)


def growing(w, xs):  # the state begins still, and moves once a step has run
    return ts.fori_loop(0, 3, lambda i, s: s * xs[0] + w[1] * i, ts.Tensor(ZERO))


def nested(w, xs):
    return ts.map(lambda x: ts.scan(lambda s, y: (s + y * x, s), ts.Tensor(ZERO), w)[1].sum(axis=0), xs)


def taken(w, xs):
    return ts.cond(xs.sum() > 5.0, lambda a, b: (a @ b.T, a.sum()), lambda a, b: (b.T * 1.0, b.sum()), w, xs[:3])


def chosen(w, xs):  # each branch closes over something of its own
    return ts.map(lambda x: ts.cond(x.sum() > 2.0, lambda: x @ w, lambda: ts.sin(x) * w[0]), xs)


def folded(w, xs):
    return ts.fold(lambda a, b: a * 0.5 + b, xs), ts.fold(ts.matmul, ts.stack([w, w.T, w]))


def several(w, xs):
    return ts.scan(lambda s, both: (s + both["x"] * both["y"][0], None), w[0], {"x": xs, "y": (xs * 2.0, w[:1])[:1]})[0]


PROGRAMS = [rnn, backwards, swapping, growing, nested, taken, chosen, folded, several]


def until(w, xs):
    return ts.while_loop(lambda s, i: s.sum() < 50.0, lambda s, i: (s * s + xs[0] + w[0], i + 1), (xs[1], 0))


@pytest.mark.parametrize("program", [*PROGRAMS, until])
def test_every_engine_agrees(program):
    everywhere(program, W, X)


@pytest.mark.parametrize("program", PROGRAMS)
def test_gradients(program):
    def loss(w, xs):
        return sum((t * t).sum() for t in _tensors(program(w, xs)))

    found = everywhere(ts.grad(loss, argnums=(0, 1)), W, X, text=False)
    for got, want in zip(arrays_of(found), central(loss, W, X), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-7)


def _tensors(result):
    return [leaf for _, leaf in flatten(result)[0]]


@pytest.mark.parametrize("program", [*PROGRAMS, until])
def test_forward_mode(program, rng):
    v, u, h = rng.normal(size=W.shape), rng.normal(size=X.shape), 1e-6
    ends = [arrays_of(program(ts.Tensor(W + s * v), ts.Tensor(X + s * u))) for s in (h, -h)]
    moved = everywhere(lambda w, x: ts.jvp(program, (w, x), (ts.Tensor(v), ts.Tensor(u)))[1], W, X, text=False)
    for got, high, low in zip(arrays_of(moved), *ends, strict=True):
        np.testing.assert_allclose(
            got, (high - low) / (2 * h) if got.dtype.kind == "f" else got * 0, rtol=1e-6, atol=1e-7
        )


@pytest.mark.parametrize("program", [*PROGRAMS, until])
@pytest.mark.parametrize("dims", [(0, 0), (None, 0), (0, None)])
def test_vmap_is_a_loop(program, dims, rng):
    args = [np.stack([a * s for s in (1.0, 0.5, 1.7)]) if d == 0 else a for a, d in zip((W, X), dims, strict=True)]
    rows = [program(*(ts.Tensor(a[i] if d == 0 else a) for a, d in zip(args, dims, strict=True))) for i in range(3)]
    found = everywhere(ts.vmap(program, in_dims=dims), *args, levels=(), text=False)
    for got, *want in zip(arrays_of(found), *map(arrays_of, rows), strict=True):
        np.testing.assert_allclose(got, np.stack(want), rtol=1e-12, atol=1e-15)


def test_higher_orders():
    def loss(x):
        last, ys = ts.scan(lambda s, y: (ts.sin(s * y) + y, s * s * y), ts.Tensor(np.float64(0.5)), x)
        return last + ys.sum()

    x, h = X[0], 1e-5
    second = ts.hessian(loss)
    differences = [(ts.grad(loss)(x + e).numpy() - ts.grad(loss)(x - e).numpy()) / (2 * h) for e in np.eye(3) * h]
    np.testing.assert_allclose(everywhere(second, x, text=False), differences, rtol=1e-6, atol=1e-8)
    close(ts.jacrev(ts.grad(loss))(x), second(x), "reverse over reverse")
    close(ts.jacrev(ts.jacfwd(loss))(x), second(x), "reverse over forward")
    third = [(second(x + e).numpy() - second(x - e).numpy()) / (2 * h) for e in np.eye(3) * h]
    np.testing.assert_allclose(ts.jacfwd(second)(x), np.stack(third, -1), rtol=1e-5, atol=1e-7)
    close(ts.jacrev(ts.jacrev(ts.grad(loss)))(x), ts.jacfwd(second)(x), "three times reverse")


def test_what_all_steps_share_is_kept_once():
    """The way back needs `w` and the inputs: neither is stacked again (states, and tanh of each step, are)."""
    function = ts.jit(ts.grad(lambda w, xs: rnn(w, xs)[1].sum())).trace(W, X).function
    ahead, back = (n for n in function.body.nodes if n.op.name == "ts.scan")
    assert back.attrs["reverse"] and not ahead.attrs["reverse"]
    assert sum(v.type.shape == (4, 3, 3) for v in (*ahead.results, *back.args)) == 0
    assert len(ahead.results) <= 4


def test_what_depends_on_constants_alone_is_computed_once():
    """The way back needs the exponential of `w` and each state: only the states are stacked."""

    def last(w, xs):
        return ts.scan(lambda s, x: (s * ts.exp(w) + x, None), ts.zeros(5, dtype=ts.f64), xs)[0].sum()

    function = ts.jit(ts.grad(last)).trace(np.zeros(5), np.ones((7, 5))).function
    ahead, _ = (n for n in function.body.nodes if n.op.name == "ts.scan")
    assert sum(v.type.shape == (7, 5) for v in ahead.results) == 1


def test_no_steps_and_one():
    for size in (0, 1):
        last, ys = everywhere(lambda x: ts.scan(lambda s, y: (s + y, s), ts.Tensor(ZERO), x), X[:size])
        assert ys.shape == (size, 3)
    np.testing.assert_array_equal(ts.fold(ts.add, X[:1]), X[0])
    assert ts.fori_loop(3, 3, lambda i, x: x + 1, 5).item() == 5


def test_decorators():
    @ts.scan
    def cell(state, x):
        return state + x, state * x

    @ts.fold
    def tree(a, b):
        return a + b

    assert cell(0.0, ts.Tensor([1.0, 2.0]))[0].item() == 3.0
    assert tree(ts.Tensor([1.0, 2.0, 3.0])).item() == 6.0 and cell.__name__ == "cell"


def test_the_loop_of_the_specification():
    @ts.while_loop
    def refined(x, condition, max_iters=100):
        @ts.jit
        def body(x, i):
            return x * 2.0, i + 1

        return ts.while_loop(cond=lambda x, i: condition(x) and i < max_iters, body=body, init=(x, 0))[0]

    assert refined(ts.Tensor(1.0), lambda x: x < 100.0).item() == 128.0
    assert refined(ts.Tensor(1.0), lambda x: x < 100.0, 3).item() == 8.0


def test_fold_is_a_tree():
    """n ones of which half the sum would swallow the other in f16: only a tree adds them exactly."""
    assert ts.fold(ts.add, ts.ones(4096, dtype=ts.f16)).item() == 4096.0


def test_random_numbers_of_each_step():
    def step(total, seed):
        drawn = ts.rand(4, generator=ts.Generator(seed))
        return total + drawn, drawn

    seeds = np.arange(3)
    total, drawn = everywhere(lambda s: ts.scan(step, ts.zeros(4), s), seeds)
    rows = np.stack([ts.rand(4, generator=ts.Generator(int(s))).numpy() for s in seeds])
    np.testing.assert_array_equal(drawn, rows)
    np.testing.assert_allclose(total, rows.sum(0), rtol=1e-6)


@pytest.mark.parametrize("moving", ["carry", "constant", "stack"])
def test_forward_mode_of_a_scan_in_one_operand(moving):
    """A tangent of the carry, of a captured constant or of the stack alone, against central differences."""

    def program(start, w, xs):
        return ts.scan(lambda s, x: (s * w + x, s * x), start, xs)

    operands = {"carry": np.array([0.5, -1.0]), "constant": np.array([0.7, 1.3]), "stack": X[:, :2].copy()}
    tangent = np.linspace(-1, 1, operands[moving].size).reshape(operands[moving].shape)

    def of(v):
        return program(*({**operands, moving: v}.values()))

    _, found = ts.jvp(of, (operands[moving],), (tangent,))
    high, low = (of(ts.Tensor(operands[moving] + h * tangent)) for h in (1e-5, -1e-5))
    for got, up, down in zip(found, high, low, strict=True):
        np.testing.assert_allclose(got.numpy(), (up.numpy() - down.numpy()) / 2e-5, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("most", [None, 9])
@pytest.mark.parametrize(
    "test, step",
    [
        (lambda n, x: n < 3, lambda n, x: (n + 1, x * 2.0)),
        (lambda s: s[0] < 3, lambda s: (s[0] + 1, s[1] * 2.0)),  # as in JAX
        (lambda *s: s[0] < 3, lambda s, *, by=2.0: (s[0] + 1, s[1] * by)),
    ],
)
def test_functions_of_a_while_loop_take_the_parts_or_the_tuple(test, step, most):
    def program(x):
        return ts.while_loop(test, step, (0, x), max_iters=most)

    for run in (program, ts.jit(program), ts.jit(program, target="llvm")):
        count, last = run(ts.tensor(1.5))
        assert (count.item(), last.item()) == (3, 12.0)


@pytest.mark.parametrize("target", ["interp", "llvm"])
def test_a_loop_up_to_a_tensor(target):
    """As in JAX: the number of steps is a value."""
    program = ts.jit(
        lambda n, x: ts.fori_loop(1, n, lambda i, s: (s[0] + x[i], s[1] * i), (0.0 * x[0], 1)), target=target
    )
    for count in (0, 1, 2, 5):
        total, product = program(np.int32(count), np.arange(6.0, dtype="f4"))
        assert (total.item(), product.item()) == (sum(range(1, count)), np.prod(range(1, count), dtype=int))
    with pytest.raises(ArgumentError, match="no integer"):
        ts.fori_loop(0, 2.5, lambda i, x: x, 1.0)


def test_a_loop_up_to_a_tensor_has_a_tangent():
    tangent = ts.jvp(lambda x: ts.fori_loop(0, ts.tensor(3), lambda i, s: s * x, 1.0), (2.0,), (1.0,))[1]
    assert tangent.item() == 12

"""The default generator in compiled programs: its state is an argument and a result, so that a compiled function draws
what the same calls draw eagerly."""

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tessera as ts
from tessera.core.errors import ArgumentError, EffectError
from tessera.runtime.program import prepare


def drop(x):
    return ts.dropout(x, 0.5)


def draws(function, *args, calls=1, seed=5):
    """The results of some calls after one seed, and the number that is drawn next."""
    ts.manual_seed(seed)
    found = [np.asarray(function(*args)) for _ in range(calls)]
    return np.stack([*found]), ts.rand(2).tolist()


def same(a, b):
    np.testing.assert_array_equal(a[0], b[0])
    assert a[1] == b[1]


STEPS = {
    "dropout": lambda x: ts.dropout(x, 0.25),
    "rand": lambda x: x + ts.rand(x.shape),
    "randn": lambda x: x * ts.randn((3,)).sum(),
    "seeded": ts.deterministic(seed=9)(lambda x: x + ts.rand(x.shape)),
    "scope": lambda x: ts.deterministic.scope().__call__(lambda: x + ts.rand(x.shape))() + 0.0 * ts.rand(x.shape),
    "cond": lambda x: ts.cond(x.sum() > 8.0, drop, lambda x: x - ts.rand(x.shape), x),
    "loop": lambda x: ts.fori_loop(0, 3, lambda i, x: x + ts.rand(x.shape), x),
    "restart": lambda x: x + ts.rand(x.shape, generator=ts.manual_seed(4)),
}


@settings(max_examples=15, deadline=None)
@given(st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=3), st.integers(0, 2**63 - 1))
def test_a_jit_function_draws_what_its_calls_draw_eagerly(names, seed):
    def program(x):
        for name in names:
            x = STEPS[name](x)
        return x

    same(draws(ts.jit(program), ts.ones(6), calls=3, seed=seed), draws(program, ts.ones(6), calls=3, seed=seed))


@pytest.mark.parametrize("level", ("schedule", "tile", "llvm", "ptx", "csl"))
def test_every_level_and_target_draws_the_same(level):
    ts.manual_seed(2**63 + 7)
    ts.rand(8)
    traced = ts.jit(drop)
    target = level if level in ("llvm", "ptx", "csl") else "interp"
    found = prepare(traced, (ts.ones(16),), target).run("target" if target == level else level, target)[0]
    np.testing.assert_array_equal(found, drop(ts.ones(16)).numpy())


@pytest.mark.parametrize(
    "wrap", (lambda f: f, ts.jit, lambda f: ts.jit(f, target="llvm")), ids=("eager", "jit", "llvm")
)
def test_transforms_draw_what_a_python_loop_draws(wrap):
    xs = ts.ones((4, 6))
    rows = draws(lambda: np.stack([drop(x).numpy() for x in xs]))
    same(draws(wrap(ts.vmap(drop)), xs), rows)
    same(draws(wrap(lambda xs: ts.scan(lambda s, x: (s, drop(x)), 0.0, xs)[1]), xs), rows)
    same(draws(wrap(lambda xs: ts.map(drop, xs)), xs), rows)
    same(draws(wrap(ts.grad(lambda xs: ts.vmap(drop)(xs).sum())), xs), rows)
    same(draws(wrap(ts.grad(lambda xs: ts.scan(lambda s, x: (s + drop(x).sum(), None), 0.0, xs)[0])), xs), rows)
    backwards = draws(wrap(lambda xs: ts.scan(lambda s, x: (s, drop(x)), 0.0, xs, reverse=True)[1]), xs)
    np.testing.assert_array_equal(backwards[0], rows[0][:, ::-1])
    nested = draws(wrap(ts.vmap(ts.vmap(drop))), ts.ones((2, 2, 6)))
    np.testing.assert_array_equal(nested[0].reshape(1, 4, 6), rows[0])
    value, slope = (lambda: wrap(ts.value_and_grad(lambda x: drop(x).sum()))(ts.ones(6)))()
    assert value.item() == slope.sum().item()


def test_one_mask_for_all_examples_on_request():
    ts.manual_seed(1)
    found = ts.vmap(drop, randomness="same")(ts.ones((3, 32))).numpy()
    assert (found == found[0]).all()
    columns = ts.jacfwd(lambda x: ts.dropout(x * x, 0.5))(ts.ones(32)).numpy()
    assert set(np.diag(columns)) == {0.0, 4.0}
    both = ts.jacfwd(lambda p: ts.dropout(p["a"] * p["b"], 0.5))({"a": ts.ones(32), "b": ts.ones(32)})
    np.testing.assert_array_equal(both["a"].numpy(), both["b"].numpy())
    with pytest.raises(ts.errors.ArgumentError, match="no such randomness"):
        ts.vmap(drop, randomness="none")


def test_a_loaded_artifact_draws_anew(tmp_path):
    ts.build(ts.jit(drop), ts.ones(16), out=tmp_path / "out")
    program = ts.load(tmp_path / "out")
    assert [p["name"] for p in program.parameters] == ["x"]
    same(draws(program, ts.ones(16), calls=2), draws(drop, ts.ones(16), calls=2))


def test_a_build_draws_nothing(tmp_path):
    ts.manual_seed(3)
    expected = ts.rand(2).tolist()
    ts.manual_seed(3)
    ts.build(ts.jit(drop), ts.ones(16), out=tmp_path / "out")
    prepare(ts.jit(drop), (ts.ones(16),), "interp")
    assert ts.rand(2).tolist() == expected


def test_a_function_that_seeds_first_takes_no_state():
    """What it draws depends on its seed alone; the generator goes on after it."""
    traced = ts.jit(lambda x: x + ts.rand(x.shape, generator=ts.manual_seed(4)) + ts.rand(x.shape)).trace(ts.ones(6))
    assert len(traced.function.params) == 1
    assert (traced.random.seed, traced.random.drawn) == (4, False) and traced.random.count > 0
    assert ts.jit(lambda x: x * 2.0).trace(ts.ones(6)).random is None


def test_threads_never_draw_the_same_numbers():
    f, found = ts.jit(lambda x: x + ts.rand((8,))), []
    f(ts.zeros(8))
    threads = [threading.Thread(target=lambda: found.append(tuple(f(ts.zeros(8)).tolist()))) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 16


@pytest.mark.parametrize("target", ["interp", "llvm", "ptx"])
def test_a_loop_with_a_condition_draws_anew_in_every_step(target):
    """Outside of a trace and compiled: the same numbers in the loop and after it, and other ones in the next call."""

    def walk(x):
        path = ts.while_loop(lambda x: x.sum() < 9.0, lambda x: x + ts.rand(3), x)
        return path, ts.rand(3)

    compiled = ts.jit(walk, target=target)
    ts.manual_seed(3)
    found = [np.concatenate([t.numpy() for t in compiled(ts.ones(3))]) for _ in range(2)]
    ts.manual_seed(3)
    wanted = [np.concatenate([t.numpy() for t in walk(ts.ones(3))]) for _ in range(2)]
    np.testing.assert_array_equal(found, wanted)
    assert not np.any(found[0] == found[1])
    ts.manual_seed(3)
    steps = [ts.rand(3).numpy() for _ in range(9)]  # the first loop draws as its steps would one after the other
    sums = 1 + np.cumsum(steps, axis=0, dtype="f4")
    np.testing.assert_allclose(found[0][:3], sums[np.flatnonzero(sums.sum(1) >= 9)[0]], rtol=1e-6)


def test_examples_of_a_batch_draw_their_own_numbers_in_a_loop():
    def walk(x):
        return ts.while_loop(lambda x: x < 3.0, lambda x: x + ts.rand(()), x)

    found = ts.jit(ts.vmap(walk))(ts.zeros(5)).numpy()
    assert len(set(found.tolist())) == 5 and np.all((found >= 3) & (found < 4))


def test_draws_that_would_repeat_are_refused():
    with pytest.raises(EffectError, match="the condition of while_loop has the effect 'random'"):
        ts.jit(lambda x: ts.while_loop(lambda x: x.sum() + ts.rand(()) < 9.0, lambda x: x + 1.0, x))(ts.ones(3))
    with pytest.raises(EffectError, match="a step of while_loop seeds the default generator"):
        seeded = lambda x: x + ts.rand(3, generator=ts.manual_seed(1)) + ts.rand(3)  # noqa: E731
        ts.jit(lambda x: ts.while_loop(lambda x: x.sum() < 9.0, seeded, x))(ts.ones(3))
    shared = ts.Generator(1)
    with pytest.raises(EffectError, match="a step of scan has the effect 'random'"):
        ts.scan(lambda s, x: (s + ts.rand((), generator=shared), None), 0.0, ts.ones(3))
    with pytest.raises(EffectError, match="a step of scan seeds the default generator"):
        ts.scan(lambda s, x: (s + ts.rand((), generator=ts.manual_seed(1)) + ts.rand(()), None), 0.0, ts.ones(3))


def test_the_mask_of_backward_is_that_of_the_call():
    x = ts.Tensor(np.ones(32, np.float32), requires_grad=True)
    f = ts.jit(drop)
    f(x)
    out = f(x)
    out.sum().backward()
    np.testing.assert_array_equal(x.grad.numpy(), out.detach().numpy())


def test_a_permutation_of_nothing():
    assert ts.permutation(0).tolist() == []


@pytest.mark.parametrize("amount", [1, 4 * (1 << 13), 4 * (1 << 13) * 2 + 5])
def test_words_drawn_at_once_are_those_of_a_trace(amount):
    drawn = ts.Generator(-3)
    first, second = drawn.words(amount), drawn.words(7)
    traced = ts.jit(lambda: (lambda g: (g.words(amount), g.words(7)))(ts.Generator(-3)), target="interp")()
    np.testing.assert_array_equal(first, traced[0])
    np.testing.assert_array_equal(second, traced[1])


@pytest.mark.parametrize("generator", [0, 3, "a", np.random.default_rng(0)], ids=["0", "3", "text", "numpy"])
@pytest.mark.parametrize(
    "draw", [ts.rand, ts.randn, ts.permutation, lambda n, generator: ts.dropout(ts.ones(n), generator=generator)]
)
def test_what_is_no_generator_is_refused(draw, generator):
    """A seed of 0 was the default generator."""
    with pytest.raises(ArgumentError, match="generator is"):
        draw(3, generator=generator)

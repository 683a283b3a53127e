"""Associative scans: against a loop over the elements."""

import numpy as np
import pytest

import tessera as ts


def linear(a, b):
    """The composition of h -> a0 h + a1 and h -> b0 h + b1."""
    return a[0] * b[0], a[1] * b[0] + b[1]


def run_loop(decay, x, reverse=False):
    """h[i] = decay[i] h[i - 1] + x[i] along axis 0."""
    h, found = np.zeros_like(x[0]) if len(x) else 0.0, np.empty_like(x)
    for i in range(len(x))[:: -1 if reverse else 1]:
        found[i] = h = decay[i] * h + x[i]
    return found


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 5, 7, 8, 13, 32])
def test_lengths(count, reverse):
    rng = np.random.default_rng(count)
    decay, x = rng.random((2, count, 3))
    found = ts.associative_scan(linear, (ts.tensor(decay), ts.tensor(x)), reverse=reverse)[1]
    np.testing.assert_allclose(found.numpy(), run_loop(decay, x, reverse), rtol=1e-12)


@pytest.mark.parametrize("target", ["interp", "cpu", "ptx"])
def test_targets_and_axes(target):
    decay, x = np.random.default_rng(0).random((2, 2, 11, 3)).astype(np.float32)
    scan = ts.jit(lambda a, x: ts.associative_scan(linear, {"a": (a, x)}["a"], axis=-2)[1], target=target)
    wanted = np.stack([run_loop(a, b) for a, b in zip(decay, x, strict=True)])
    np.testing.assert_allclose(scan(decay, x).numpy(), wanted, rtol=1e-5)


@pytest.mark.parametrize("reverse", [False, True])
def test_products_of_matrices_keep_their_order(reverse):
    m = np.random.default_rng(0).standard_normal((9, 2, 2))
    found = ts.associative_scan(lambda a, b: a @ b, ts.tensor(m), reverse=reverse).numpy()
    for i in range(9):
        factors = m[i:][::-1] if reverse else m[: i + 1]
        wanted = np.linalg.multi_dot(factors) if len(factors) > 1 else factors[0]
        np.testing.assert_allclose(found[i], wanted, rtol=1e-10)


def test_gradients_and_batches_are_those_of_a_loop():
    decay, x, w = np.random.default_rng(0).random((3, 4, 9, 2))

    def by_scan(a, x, w):
        return (ts.associative_scan(linear, (a, x))[1] * w).sum()

    def by_loop(a, x, w):
        step = lambda h, each: (each[0] * h + each[1],) * 2  # noqa: E731
        return (ts.scan(step, ts.zeros(2, dtype=ts.f64), (a, x))[1] * w).sum()

    pairs = [ts.vmap(ts.grad(f, argnums=(0, 1)))(decay, x, w) for f in (by_scan, by_loop)]
    for a, b in zip(*pairs, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-10)


@pytest.mark.parametrize(("call", "kind", "says"), [
    (lambda: ts.associative_scan(linear, (ts.ones(3), ts.ones(4))), ts.errors.ShapeError, "one known length"),
    (lambda: ts.associative_scan(linear, ()), ts.errors.ArgumentError, "no tensors"),
    (lambda: ts.associative_scan(linear, (ts.ones(3), ts.ones(3)), axis=1), ts.errors.ShapeError, "axis 1"),
    (lambda: ts.associative_scan(lambda a, b: a[0], (ts.ones(3), ts.ones(3))), ts.errors.ArgumentError, "container"),
    (lambda: ts.associative_scan(lambda a, b: a.sum(), ts.ones(4)), ts.errors.ShapeError, "changes its operand"),
    (lambda: ts.associative_scan(3, ts.ones(4)), ts.errors.ArgumentError, "associative_scan"),
])  # fmt: skip
def test_calls_that_are_refused(call, kind, says):
    with pytest.raises(kind, match=says) as found:
        call()
    assert "test_associative_scan.py" in str(found.value)

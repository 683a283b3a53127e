"""The names of `ts.linalg` and `ts.random`: norms, ranks and pseudo-inverses against NumPy, draws by their moments."""

import numpy as np
import pytest

import tessera as ts
from tessera.core.errors import ArgumentError, ShapeError

X = np.random.default_rng(0).normal(size=(2, 4, 3))
SYMMETRIC = X @ X.swapaxes(1, 2)  # of rank 3
NORMS = ("fro", "nuc", 1, -1, 2, -2, np.inf, -np.inf)


@pytest.mark.parametrize("ord", NORMS, ids=str)
def test_matrix_norms(ord):
    want = np.array([np.linalg.norm(m, ord) for m in X])
    np.testing.assert_allclose(ts.linalg.matrix_norm(X, ord), want, rtol=1e-12)
    assert ts.linalg.matrix_norm(X, ord, keepdims=True).shape == (2, 1, 1)


def test_what_singular_values_tell():
    for m in (X, X.swapaxes(1, 2), SYMMETRIC):
        np.testing.assert_allclose(ts.linalg.pinv(m), np.linalg.pinv(m, rcond=1e-12), rtol=1e-6, atol=1e-9)
        assert ts.linalg.matrix_rank(m).tolist() == np.linalg.matrix_rank(m).tolist() == [3, 3]
    np.testing.assert_allclose(ts.linalg.eigvalsh(SYMMETRIC), np.linalg.eigvalsh(SYMMETRIC), atol=1e-12)
    np.testing.assert_allclose(ts.linalg.svdvals(X), np.linalg.svd(X, compute_uv=False), rtol=1e-12)
    np.testing.assert_allclose(ts.linalg.vector_norm(X, axis=-1), np.linalg.norm(X, axis=-1), rtol=1e-12)
    assert ts.linalg.matrix_rank(X[0], rtol=2.0).item() == 0
    each = np.array([1e-9, 0.9])
    assert ts.linalg.matrix_rank(X, each).tolist() == np.linalg.matrix_rank(X, rtol=each).tolist() == [3, 1]
    np.testing.assert_allclose(ts.linalg.pinv(X, each), np.linalg.pinv(X, rtol=each), rtol=1e-9)
    slope = ts.grad(lambda m: ts.linalg.pinv(m).sum())(SYMMETRIC[0] + np.eye(4))
    np.testing.assert_allclose(slope, ts.grad(lambda m: ts.inv(m).sum())(SYMMETRIC[0] + np.eye(4)), rtol=1e-6)


def test_bad_input():
    with pytest.raises(ArgumentError, match="unknown matrix norm"):
        ts.linalg.matrix_norm(X, 3)
    with pytest.raises(ShapeError, match=r"takes \[..., M, N\]"):
        ts.linalg.matrix_norm(X[0, 0])


def test_random():
    draws = ts.random.uniform((4000,), -1.0, 3.0, generator=ts.Generator(1)).numpy()
    assert draws.min() >= -1 and draws.max() < 3 and abs(draws.mean() - 1.0) < 0.1
    normal = ts.random.normal((4000,), mean=5.0, std=2.0, generator=ts.Generator(1)).numpy()
    assert abs(normal.mean() - 5.0) < 0.2 and abs(normal.std() - 2.0) < 0.1
    with pytest.raises(AttributeError, match=r"it is ts\.mul"):
        ts.multiply  # noqa: B018
    with pytest.raises(AttributeError, match=r"tessera\.array_api\.concat has"):
        ts.concat  # noqa: B018

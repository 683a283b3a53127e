"""Diagonals, powers, products; solving; derivatives and vmap of decompositions."""

import numpy as np
import pytest

import tessera as ts
from tessera.core.errors import ArgumentError, ExecutionError, ShapeError, UnsupportedOpError

G = np.random.default_rng(0)
A, B = G.normal(size=(2, 3, 4)), G.normal(size=(4, 4))
SPD = B @ B.T + 4 * np.eye(4)
CASES = {
    "diagonal": (lambda x: ts.diagonal(x, 1), lambda x: np.diagonal(x, 1, -2, -1), A),
    "diagonal below": (lambda x: ts.diagonal(x, -2), lambda x: np.diagonal(x, -2, -2, -1), A),
    "diag": (lambda x: ts.diag(x, 1), lambda x: np.diag(x, 1), B[0]),
    "diag below": (lambda x: ts.diag(x, -2), lambda x: np.diag(x, -2), B[0]),
    "trace": (lambda x: x.trace(), lambda x: np.trace(x, axis1=-2, axis2=-1), A),
    "tensordot": (lambda x: ts.tensordot(x, x, ([0, 2], [0, 2])), lambda x: np.tensordot(x, x, ([0, 2], [0, 2])), A),
    "tensordot 1": (lambda x: ts.tensordot(x, x.mT[0], 1), lambda x: np.tensordot(x, x[0].T, 1), A),
    "cross": (lambda x: ts.cross(x, x[:, ::-1], axis=1), lambda x: np.cross(x, x[:, ::-1], axis=1), A),
    "power": (lambda x: ts.matrix_power(x, 5), lambda x: np.linalg.matrix_power(x, 5), B),
    "power 0": (lambda x: ts.matrix_power(x, 0), lambda x: np.linalg.matrix_power(x, 0), B[None]),
    "solve": (lambda x: ts.solve(x, x[:, 0]), lambda x: np.linalg.solve(x, x[:, 0]), B),
    "inv": (lambda x: ts.inv(x), np.linalg.inv, B),
    "det": (lambda x: ts.det(x), np.linalg.det, B),
}


@pytest.mark.parametrize("ours,numpy,x", CASES.values(), ids=CASES)
def test_numpy_agrees(ours, numpy, x):
    np.testing.assert_allclose(ours(ts.Tensor(x)).numpy(), numpy(x), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(ts.jit(ours)(x).numpy(), numpy(x), rtol=1e-12, atol=1e-12)


def loss(parts):
    """A number that all parts move; squares, since signs of vectors are free."""
    return sum((part * part * ts.arange(part.size, dtype=ts.f64).reshape(part.shape)).sum() for part in parts)


FACTORED = {
    "cholesky": (lambda x: [ts.cholesky(x)], SPD),
    "eigh": (ts.eigh, SPD),
    "svd": (ts.svd, B),
    "svd tall": (ts.svd, A[0].T),
    "svd wide": (ts.svd, A[0]),
    "qr": (ts.qr, B),
    "qr tall": (ts.qr, A[0].T),
    "solve": (lambda x: [ts.solve(x, x[:, :2])], B),
    "inv": (lambda x: [ts.inv(x)], B),
    "det": (lambda x: [ts.det(x)], B),
}


@pytest.mark.parametrize("factor,x", FACTORED.values(), ids=FACTORED)
def test_derivatives(factor, x):
    def value(m):
        return loss(factor(m))

    found = ts.grad(value)(ts.Tensor(x)).numpy()
    if x is SPD:  # of a symmetric matrix the lower triangle is read
        found = np.tril(found) + np.triu(found, 1).T
    step, want = 1e-6, np.zeros_like(x)
    for i in np.ndindex(x.shape):
        move = np.zeros_like(x)
        move[i] = step
        want[i] = (value(ts.Tensor(x + move)).item() - value(ts.Tensor(x - move)).item()) / (2 * step)
    np.testing.assert_allclose(found, np.tril(want) if x is SPD else want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("factor", [ts.cholesky, ts.svd, ts.qr, ts.eigh, ts.slogdet, ts.inv])
def test_batched(factor):
    many = np.stack([SPD, SPD + np.eye(4)])
    together, apart = ts.vmap(factor)(ts.Tensor(many)), [factor(ts.Tensor(m)) for m in many]
    listed = together if isinstance(together, tuple) else (together,)
    for i, part in enumerate(listed):
        for row, one in zip(part.numpy(), apart, strict=True):
            np.testing.assert_allclose(row, (one[i] if isinstance(one, tuple) else one).numpy(), rtol=1e-9)


def test_bad_matrices():
    with pytest.raises(ExecutionError, match="[Ss]ingular"):
        ts.inv(np.zeros((2, 2)))
    with pytest.raises(ShapeError, match="not square"):
        ts.matrix_power(A, 2)
    with pytest.raises(ArgumentError, match="exponent -1"):
        ts.matrix_power(B, -1)
    with pytest.raises(ShapeError, match="right side"):
        ts.solve(B, np.ones((3, 1)))
    with pytest.raises(ShapeError, match="sum over differ"):
        ts.tensordot(A, B, ([0], [1]))
    with pytest.raises(ShapeError, match="3 elements"):
        ts.cross(B, B)
    with pytest.raises(UnsupportedOpError, match="eig of general"):
        ts.grad(lambda x: ts.eig(x)[0].sum())(ts.Tensor(SPD))
    with pytest.raises(UnsupportedOpError, match="derivative of qr needs"):
        ts.grad(lambda x: ts.qr(x)[1].sum())(ts.Tensor(A[0]))


@pytest.mark.parametrize("source,destination", [((0, 1), (-1, 0)), ((), ()), (2, 0), ((2, 0), (0, 1))])
def test_moveaxis_of_several(source, destination):
    x = np.arange(24.0).reshape(2, 3, 4)
    np.testing.assert_array_equal(ts.moveaxis(x, source, destination), np.moveaxis(x, source, destination))
    with pytest.raises(ShapeError, match="an axis is named twice"):
        ts.moveaxis(x, (0, 0), (1, 2))


def test_diff_between_ends():
    x = np.array([1, 4, 9])
    np.testing.assert_array_equal(ts.diff(x, prepend=[0], append=[20]), np.diff(x, prepend=[0], append=[20]))


def test_two_axes_are_summed_by_default():
    a, b = np.arange(24.0).reshape(2, 3, 4), np.arange(36.0).reshape(3, 4, 3)
    assert ts.tensordot(ts.tensor(a), ts.tensor(b)).tolist() == np.tensordot(a, b).tolist()

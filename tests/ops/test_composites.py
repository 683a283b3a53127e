"""Composites against NumPy: einsum, order, running sums, reductions, arrangement; eager, interpreted and on llvm."""

import numpy as np
import pytest

import tessera as ts
from tessera.core.errors import ArgumentError, ExecutionError, ShapeError

G = np.random.default_rng(0)
A, B, C = (G.normal(size=s).astype(np.float32) for s in ((3, 4), (4, 5), (3, 5)))
I = G.integers(0, 5, (3, 7))
EQUATIONS = (
    ("ij,jk->ik", A, B), ("ij,jk,ik->", A, B, C), ("ij->ji", A), ("ii->i", B[:, :4]), ("ii", B[:, :4]),
    ("...ij,...jk->...ik", G.normal(size=(2, 1, 3, 4)), G.normal(size=(5, 4, 2))), ("ij,ij->j", A, A),
    ("i,j", A[0], B[0]),
    ("bhqd,bhkd->bhqk", G.normal(size=(2, 3, 4, 5)), G.normal(size=(2, 3, 6, 5))), ("...i->...", A),
    ("iji->j", G.normal(size=(3, 4, 3))), ("ij,k", A, B[0]), ("a,a,a->", A[0], A[1], A[2]), ("ij,j", I, np.arange(7)),
)  # fmt: skip
CASES = {
    "sort": (lambda x: ts.sort(x), lambda x: np.sort(x), A),
    "argsort": (lambda x: ts.argsort(x, axis=0), lambda x: np.argsort(x, axis=0, kind="stable"), I),
    "falling": (lambda x: ts.argsort(x, descending=True), lambda x: np.argsort(-x, kind="stable"), I),
    "topk": (lambda x: ts.topk(x, 2)[0], lambda x: -np.sort(-x)[:, :2], A),
    "prod": (lambda x: ts.prod(x, axis=1), lambda x: x.prod(1), A),
    "prod of ints": (lambda x: ts.prod(x), lambda x: x.prod(), I),
    "prod of none": (lambda x: ts.prod(x, axis=0), lambda x: x.prod(0), A[:0]),
    "any": (lambda x: ts.any(x > 0, axis=0), lambda x: (x > 0).any(0), A),
    "all": (lambda x: ts.all(x, axis=1), lambda x: x.all(1), I),
    "std": (lambda x: x.std(dim=1, correction=1), lambda x: x.std(1, ddof=1), A),
    "norm": (lambda x: ts.norm(x, axis=1), lambda x: np.linalg.norm(x, axis=1), A),
    "norm3": (lambda x: ts.norm(x, 3, axis=1), lambda x: np.linalg.norm(x, 3, axis=1), A),
    "norm inf": (lambda x: ts.norm(x, -np.inf, axis=1), lambda x: np.linalg.norm(x, -np.inf, axis=1), A),
    "logsumexp": (lambda x: ts.logsumexp(x, axis=1), lambda x: np.logaddexp.reduce(x, axis=1), A),
    "cumsum": (lambda x: ts.cumsum(x, axis=1), lambda x: x.cumsum(1), A),
    "cumprod": (lambda x: ts.cumprod(x, axis=0), lambda x: x.cumprod(0), I),
    "cummax": (lambda x: ts.cummax(x, axis=1), lambda x: np.maximum.accumulate(x, axis=1), A),
    "cummin": (lambda x: ts.cummin(x, axis=0), lambda x: np.minimum.accumulate(x, axis=0), I),
    "flip": (lambda x: ts.flip(x, 0), lambda x: np.flip(x, 0), A),
    "roll": (lambda x: ts.roll(x, (1, -2), (0, 1)), lambda x: np.roll(x, (1, -2), (0, 1)), A),
    "tril": (lambda x: ts.tril(x, -1), lambda x: np.tril(x, -1), A),
    "triu": (lambda x: ts.triu(x, 1), lambda x: np.triu(x, 1), I),
    "repeat": (lambda x: ts.repeat(x, [1, 0, 2], 0), lambda x: np.repeat(x, [1, 0, 2], 0), A),
    "tile": (lambda x: x.tile((2, 1, 3)), lambda x: np.tile(x, (2, 1, 3)), A),
    "one_hot": (lambda x: ts.one_hot(x, 5), lambda x: np.eye(5, dtype="f4")[x], I),
    "kron": (lambda x: ts.kron(x, x[0]), lambda x: np.kron(x, x[0]), A),
    "outer": (lambda x: ts.outer(x[0], x[1]), lambda x: np.outer(x[0], x[1]), A),
    "gemm": (lambda x: ts.gemm(x, x, x[:, :3], 2.0, 3.0, trans_b=True), lambda x: 2 * x @ x.T + 3 * x[:, :3], A),
    "take": (lambda x: ts.take_along_axis(x, ts.argsort(x, axis=0), 0), lambda x: np.sort(x, 0), A),
    "moveaxis": (lambda x: ts.moveaxis(x, 0, 1), lambda x: np.moveaxis(x, 0, 1), A),
    "split": (lambda x: ts.split(x, [1, 3], 1)[1], lambda x: np.split(x, [1], 1)[1], A),
}


def everywhere(function, *arrays):
    """The results of a function called eagerly, traced and interpreted, and compiled."""
    eager = function(*map(ts.Tensor, arrays))
    yield eager
    for target in ("interp", "llvm"):
        out = ts.jit(function, target=target)(*arrays)
        assert out.type == eager.type
        yield out


@pytest.mark.parametrize(("equation", "operands"), [(e, o) for e, *o in EQUATIONS])
def test_einsum(equation, operands):
    want = np.einsum(equation, *operands)
    for out in everywhere(lambda *x: ts.einsum(equation, *x), *operands):
        assert out.shape == want.shape
        np.testing.assert_allclose(out.numpy(), want, rtol=1e-5, atol=1e-5)


def test_einsum_joins_in_the_cheapest_order():
    """A matrix, a matrix and a vector: from the right, so that no product of matrices is made."""
    shapes = [(5, 6), (6, 7), (7,)]
    made = ts.jit(lambda *x: ts.einsum("ij,jk,k->i", *x)).trace(*(np.ones(s, "f4") for s in shapes)).function
    assert (5, 7) not in [v.type.shape for n in made.body.nodes for v in n.results]


@pytest.mark.parametrize("name", CASES)
def test_as_numpy(name):
    function, reference, x = CASES[name]
    for out in everywhere(function, x):
        np.testing.assert_allclose(out.numpy(), reference(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", (ts.f16, ts.bf16, ts.fp8_e4m3, ts.fp8_e5m2), ids=str)
def test_small_floats_sort_as_floats(dtype):
    row = np.array([3, np.nan, 1, -2, np.nan, 0, -0.0], np.float32)
    x = ts.Tensor(row).to(dtype)
    for target in ("interp", "llvm"):
        assert ts.jit(ts.argsort, target=target)(x).tolist() == np.argsort(row, kind="stable").tolist()
        np.testing.assert_array_equal(ts.jit(ts.sort, target=target)(x).numpy().astype("f4"), np.sort(row))
        values, places = ts.jit(lambda x: ts.topk(x, 3), target=target)(x)
        assert places.tolist() == [1, 4, 0]
        np.testing.assert_array_equal(values.numpy().astype("f4"), [np.nan, np.nan, 3])


@pytest.mark.parametrize("side", ("left", "right"))
def test_searchsorted_takes_nan_as_the_largest(side):
    wanted = np.array([np.nan, 2, 9, -np.inf, np.inf], np.float32)
    for row in ([1, 2, 3], [1, 2, np.nan], [2, np.inf, np.inf]):
        row = np.array(row, np.float32)
        for out in everywhere(lambda r, w: ts.searchsorted(r, w, side=side), row, wanted):
            if not np.isnan(row).any():
                assert out.tolist() == np.searchsorted(row, wanted, side=side).tolist()
    assert ts.searchsorted([1, 2, 3], [np.nan]).tolist() == [3]


@pytest.mark.parametrize("side", ("left", "right"))
@pytest.mark.parametrize("size", (5, 40))  # all are compared, and by halves
def test_searchsorted_in_rows(side, size, rng):
    rows = np.sort(rng.integers(0, 9, (20, 3, size)).astype("f4"), axis=-1)
    wanted = rng.integers(0, 9, (20, 3, 7)).astype("f4")
    rows[..., -1], wanted[..., 0] = np.nan, np.nan
    want = [np.searchsorted(r, w, side) for r, w in zip(rows.reshape(60, -1), wanted.reshape(60, -1), strict=True)]
    for out in everywhere(lambda r, w: ts.searchsorted(r, w, side=side), rows, wanted):
        assert out.reshape(60, -1).tolist() == np.stack(want).tolist()


def test_sort_puts_nan_last():
    x = np.float32([2, np.nan, -np.inf, np.inf, np.nan, 1])
    for out in everywhere(lambda x: ts.argsort(x), x):
        assert out.tolist() == np.argsort(x, kind="stable").tolist()
    for out in everywhere(lambda x: ts.argsort(x, descending=True), x):
        assert out.tolist() == [1, 4, 3, 0, 5, 2]


def test_decompositions():
    x = G.normal(size=(2, 4, 3))
    u, s, v = ts.svd(x)
    np.testing.assert_allclose((u * s[:, None, :] @ v).numpy(), x, atol=1e-12)
    q, r = ts.qr(x)
    np.testing.assert_allclose((q @ r).numpy(), x, atol=1e-12)
    m = np.swapaxes(x, -1, -2) @ x
    low = ts.jit(lambda m: ts.cholesky(m), target="interp")(m)
    np.testing.assert_allclose((low @ low.T).numpy(), m, atol=1e-12)
    for pair in (ts.eigh(m), ts.eig(m)):
        np.testing.assert_allclose(m @ pair[1].numpy(), (pair[1] * pair[0][:, None, :]).numpy(), atol=1e-10)
    with pytest.raises(ExecutionError, match="complex"):
        ts.eig([[0.0, 1.0], [-1.0, 0.0]])
    with pytest.raises(ExecutionError, match="cholesky"):
        ts.cholesky([[-1.0]])
    singular = ts.jit(lambda x: ts.svd(x)[1], target="llvm")(x)
    np.testing.assert_allclose(singular.numpy(), ts.svd(x)[1].numpy())


def test_bad_input():
    for equation, count in (("ij", 2), ("i1", 1), ("i->j", 1), ("i->ii", 1)):
        with pytest.raises(ArgumentError):
            ts.einsum(equation, *[A[0]] * count)
    for call in (
        lambda: ts.einsum("ij,jk", A, A), lambda: ts.einsum("i", A), lambda: ts.split(A, 2), lambda: ts.outer(A, A),
        lambda: ts.cholesky(A), lambda: ts.tril(A[0]), lambda: ts.repeat(A, [1, 2], 0),
    ):  # fmt: skip
        with pytest.raises(ShapeError):
            call()
    with pytest.raises(ArgumentError):
        ts.topk(A, 9)


@pytest.mark.parametrize(
    "run", (lambda f: f, lambda f: ts.jit(f, target="llvm"), ts.vmap), ids=("eager", "llvm", "vmap")
)
def test_complex_eigenvalues_are_pairs(run):
    x = np.random.default_rng(3).normal(size=(3, 5, 5))
    value, vector = ((a.numpy() + 1j * b.numpy()) for a, b in run(lambda m: ts.complex_eig(m))(x))
    assert np.abs(value.imag).max() > 0.1
    np.testing.assert_allclose(x @ vector, vector * value[:, None, :], atol=1e-12)
    np.testing.assert_allclose(np.sort_complex(value), np.sort_complex(np.linalg.eigvals(x)), atol=1e-12)


def test_real_eig_names_the_complex_one():
    with pytest.raises(ExecutionError, match="complex_eig"):
        ts.eig([[0.0, 1.0], [-1.0, 0.0]])

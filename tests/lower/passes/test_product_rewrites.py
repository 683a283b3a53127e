"""Rewrites of products: turned results, operands that are equal along an axis, sums of rows and columns."""

import ml_dtypes
import numpy as np
import pytest

import tessera as ts
from tessera.codegen.contract import get_backend
from tessera.runtime import driver

X, G = (np.random.default_rng(n).standard_normal((2, 64, n)).astype(np.float16) for n in (32, 48))


def turn(x):
    return ts.swapaxes(x, -1, -2)


FORMS = {
    "one": (lambda x, g: turn(x) @ g, [(2, 64, 48), (2, 64, 32), (2, 48, 32)]),
    "both": (lambda x, g: turn(x) @ turn(turn(g)), [(2, 64, 48), (2, 64, 32), (2, 48, 32)]),
}


@pytest.mark.parametrize("form", FORMS)
def test_the_turned_product_is_stored_as_it_is(form):
    product, shapes = FORMS[form]
    traced = ts.jit(lambda x, g: turn(product(x, g))).trace(X, G).function
    levels = driver.lower(traced, "ptx")
    (kernel,) = (n for n in levels["schedule"].main.body.nodes if n.op.name == "schedule.kernel")
    assert [v.type.shape for v in kernel.args] == shapes
    artifact = get_backend("ptx").emit(levels["tile"], {"arch": "sm_90a"})
    (found,) = get_backend("ptx").interpreter(artifact)([X, G])
    want = np.matmul(G.swapaxes(1, 2).astype("f8"), X.astype("f8"))
    np.testing.assert_allclose(found.astype("f8"), want, rtol=2e-3, atol=2e-3)


def test_a_product_that_is_read_as_it_is_stays():
    def both(x, g):
        found = turn(x) @ g
        return turn(found), found

    traced = ts.jit(both).trace(X, G).function
    kernels = [n for n in driver.lower(traced, "ptx")["schedule"].main.body.nodes if n.op.name == "schedule.kernel"]
    assert [v.type.shape for v in kernels[0].args][-1] == (2, 32, 48)


A = np.random.default_rng(5).standard_normal((5, 8)).astype(np.float32)
UNIFORM = {  # expression in NumPy's terms, and the sizes of the product that is left
    "ones": (lambda x, np: x.T @ np.ones((5, 7), "f4"), (8, 5, 1)),
    "rows": (lambda x, np: np.broadcast_to(x[0], (9, 8)) @ x.T, (1, 8, 5)),
    "turned": (lambda x, np: x.T @ np.broadcast_to(x[:, 0], (6, 5)).T, (8, 5, 1)),
    "scaled": (lambda x, np: (np.broadcast_to(x[:1], (4, 8)) * np.broadcast_to(2 * x[1], (4, 8))) @ x.T, (1, 8, 5)),
    "both": (lambda x, np: np.full((4, 5), 0.5, "f4") @ np.broadcast_to(x[:, :1], (5, 6)), (1, 5, 1)),
    "contracted alone": (lambda x, np: x @ np.broadcast_to(x[0], (8, 8)), (5, 8, 8)),
    "one of two": (lambda x, np: x.T @ (x * np.broadcast_to(x[:, :1], (5, 8))), (8, 5, 8)),
}


@pytest.mark.parametrize("form", UNIFORM)
def test_equal_rows_and_columns_are_multiplied_once(form):
    function, (m, k, n) = UNIFORM[form]
    traced = ts.jit(lambda x: function(x, ts)).trace(A).function
    passes = dict(driver.iterate_passes(traced, driver.find_plan("llvm")))
    (product,) = (node for node in passes["uniform operands"].main.body.walk() if node.op.name == "ts.dot")
    assert [v.type.shape for v in product.args] == [(m, k), (k, n)]
    for target in ("interp", "llvm", "ptx"):
        found = ts.jit(lambda x: function(x, ts), target=target)(A)
        np.testing.assert_allclose(found, function(A.astype("f8"), np), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [np.float32, np.float16], ids=str)
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("number", [1.0, 0.3])
def test_products_with_equal_numbers_are_sums(dtype, turned, number, rng):
    """Also beyond the number of results to which vector products are reductions: 4096 sums of columns."""
    x = rng.standard_normal((40, 4096)).astype(dtype)
    function = lambda x: (x.T if turned else x) @ ts.full((40 if turned else 4096, 3), number, dtype=x.dtype)  # noqa: E731
    levels = driver.lower(ts.jit(function).trace(x).function, "ptx")
    assert not any(n.op.name == "schedule.contract" for n in levels["schedule"].main.body.walk())
    want = (x.T if turned else x).astype("f8").sum(-1, keepdims=True) * float(dtype(number))
    tolerance = 1e-5 if dtype == np.float32 else 1e-2
    for target in ("llvm", "ptx"):
        found = np.asarray(ts.jit(function, target=target)(x))
        assert found.shape == (len(want), 3)
        np.testing.assert_allclose(found.astype("f8"), np.repeat(want, 3, 1), rtol=tolerance, atol=tolerance)


def test_what_the_epilogue_of_a_product_stores_is_read_by_split_sums():
    """The activation is one kernel's result, not computed from the product by each kernel that reads it."""

    def loss(x, w, v):
        return (ts.relu(x @ w) @ v).sum()

    shapes = (8192, 128), (128, 1024), (1024, 64)
    arrays = [np.zeros(s, np.float16) for s in shapes]
    traced = ts.jit(ts.grad(loss, argnums=(1, 2))).trace(*arrays).function
    kernels = [n for n in driver.lower(traced, "ptx")["schedule"].main.body.nodes if n.op.name == "schedule.kernel"]
    relus = [k for k in kernels if any(n.op.name == "ts.maximum" for n in k.regions[0].walk())]
    assert len(relus) == 1 and any(n.op.name == "schedule.contract" for n in relus[0].regions[0].walk())


@pytest.mark.parametrize("compute", ["bf16", "f16"])
def test_windows_of_a_rounded_image(compute, rng):
    """A convolution in mixed precision rounds its image and its weights, not each window."""
    torch = pytest.importorskip("torch")
    x, w = rng.standard_normal((2, 5, 9, 8)).astype("f4"), rng.standard_normal((6, 5, 3, 3)).astype("f4")

    def convolve(x, w):
        with ts.precision(compute=getattr(ts, compute)):
            return ts.conv2d(x, w, padding=1)

    passes = dict(driver.iterate_passes(ts.jit(convolve).trace(x, w).function, driver.find_plan("ptx")))
    casts = [
        n for n in passes["early rounding"].main.body.walk() if n.op.name == "ts.cast" and n.out.type.dtype.bits == 16
    ]
    assert sorted(n.out.type.shape for n in casts) == [(2, 5, 9, 8), (6, 5, 3, 3)]
    narrow = torch.bfloat16 if compute == "bf16" else torch.float16
    rounded = [torch.tensor(a).to(narrow).double() for a in (x, w)]
    want = torch.nn.functional.conv2d(*rounded, padding=1).numpy()
    for target in ("interp", "llvm", "ptx"):
        found = np.asarray(ts.jit(convolve, target=target)(x, w))
        np.testing.assert_allclose(found, want, rtol=1e-2, atol=1e-2)


def test_windows_that_are_rounded_otherwise_stay():
    """Rounding toward zero does not commute with what follows, nor does a cast that rounds twice."""

    def multiply(x, w, between):
        windows = ts.stack([ts.cast(x[i : i + 4], dtype=between) for i in range(3)])
        return ts.cast(windows, dtype=ts.fp8_e4m3) @ w

    x, w = np.zeros((6, 8), np.float32), ts.zeros((8, 2), dtype=ts.fp8_e4m3)
    nearest = ts.f32 @ ts.compute(ts.fp8_e4m3)
    for between, shape in ((nearest, (6, 8)), (nearest @ ts.toward_zero, (3, 4, 8)), (ts.f16, (3, 4, 8))):
        traced = ts.jit(lambda x, w, between=between: multiply(x, w, between)).trace(x, w).function
        module = dict(driver.iterate_passes(traced, driver.find_plan("ptx")))["early rounding"]
        casts = [n for n in module.main.body.walk() if n.op.name == "ts.cast" and n.out.type.dtype == ts.fp8_e4m3]
        assert [n.out.type.shape for n in casts] == [shape], between


def round_operand(x, rounded):
    rows = ts.cast(ts.broadcast_to(x[:1] * 1.0, (8, 64)), dtype=rounded)
    return ts.cast(rows, dtype=ts.f32) @ ts.ones((64, 4))


def round_result(x, rounded):
    return ts.cast(ts.broadcast_to(x[:1], (8, 64)), dtype=rounded) @ ts.cast(ts.ones((64, 4)) * 0.3, dtype=rounded)


@pytest.mark.parametrize("target", ["llvm", "ptx"])
@pytest.mark.parametrize("function", [round_operand, round_result])
def test_equal_rows_that_are_rounded_stochastically_are_not_equal(function, target):
    x, rounded = np.full((3, 64), 1.003, "f4"), ts.bf16 @ ts.stochastic_round
    found, want = (ts.jit(lambda x: function(x, rounded), target=t)(x).to(ts.f32).numpy() for t in (target, "interp"))
    assert len(set(found[:, 0])) > 1
    np.testing.assert_allclose(found, want, rtol=1e-6)


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
def test_outer_products_are_element_wise(dtype):
    random = np.random.default_rng(5)
    x, y, z = (random.standard_normal(s).astype(dtype) for s in ((3, 50, 1), (1, 37), (3, 50, 37)))
    function = ts.jit(lambda x, y, z: x @ y + z)
    levels = driver.lower(function.trace(x, y, z).function, "ptx")
    assert not any(n.op.name == "ts.dot" for f in levels["tile"].functions for n in f.body.walk())
    (kernel,) = (n for n in levels["schedule"].main.body.nodes if n.op.name == "schedule.kernel")
    artifact = get_backend("ptx").emit(levels["tile"], {"arch": "sm_90a"})
    (found,) = get_backend("ptx").interpreter(artifact)([x, y, z])
    want = x.astype("f8") * y.astype("f8") + z.astype("f8")
    tolerance = {2: 2e-2, 4: 1e-6, 8: 1e-14}[np.dtype(dtype).itemsize]
    np.testing.assert_allclose(found.astype("f8"), want, rtol=tolerance, atol=tolerance)

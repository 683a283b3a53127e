"""Row products: products of few rows and a matrix, against NumPy in f64."""

import ml_dtypes
import numpy as np
import pytest

import tessera as ts
from tessera.codegen.ptx import BACKEND
from tessera.core.types import bf16, f32
from tessera.ir.rewrite import UseDef
from tessera.ops.tensor import contractions
from tessera.runtime import driver
from tessera.stdlib import row_products


@pytest.fixture
def small(monkeypatch):
    """Limits that small products exceed."""
    least = {"LEAST_ELEMENTS": 1, "LEAST_TURNED": 1, "LEAST_TURNED_DEPTH": 1, "TURNED_DEPTH": 16}
    for name, value in {**least, "COLUMNS": 32, "DEPTH": 16, "LEAST_DEPTH": 16, "PROGRAMS": 24}.items():
        monkeypatch.setattr(row_products, name, value)


def run(function, *arrays):
    """The kernels of a function for a GPU, and its results in the emulator."""
    levels = driver.lower(ts.jit(function).trace(*arrays).function, "ptx")
    artifact = BACKEND.emit(levels["tile"], {"arch": "sm_90a"})
    return list(artifact.manifest["plan"]["entries"]), BACKEND.interpreter(artifact)(arrays)[0]


def draw(*shape, dtype):
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize(("left", "right"), [
    ((50,), (50, 37)), ((1, 33), (33, 70)), ((2, 129), (129, 99)), ((3, 2, 40), (3, 40, 33)), ((3, 1, 17), (3, 17, 41)),
])  # fmt: skip
def test_products_of_rows(left, right, dtype, small):
    a, b = draw(*left, dtype=dtype), draw(*right, dtype=dtype)
    names, got = run(lambda a, b: a @ b, a, b)
    assert any("multiply_rows" in name for name in names)
    want = np.matmul(a.astype("f8"), b.astype("f8"))
    tolerance = 1e-5 if dtype == np.float32 else 2**-7
    np.testing.assert_allclose(got.astype("f8"), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize(("function", "left", "right", "name"), [
    (lambda a, b: a @ b.mT, (1, 50), (37, 50), "multiply_turned_rows"),
    (lambda a, b: a @ b.mT, (3, 2, 130), (3, 37, 130), "multiply_turned_rows"),
    (lambda a, b: a @ b, (37, 70), (70,), "multiply_turned_rows"),
    (lambda a, b: a @ b, (3, 41, 70), (3, 70, 2), "multiply_turned_rows"),
    (lambda a, b: a.mT @ b, (70, 41), (70, 2), "multiply_rows"),
])  # fmt: skip
def test_matrices_by_rows_and_products_of_columns(function, left, right, name, dtype, small):
    a, b = draw(*left, dtype=dtype), draw(*right, dtype=dtype)
    names, got = run(function, a, b)
    assert any(each.startswith(name) for each in names)
    want = np.asarray(function(a.astype("f8"), b.astype("f8")))
    tolerance = 1e-5 if dtype == np.float32 else 2**-7
    np.testing.assert_allclose(got.astype("f8"), want, rtol=tolerance, atol=tolerance)


def test_special_numbers(small):
    a, b = np.array([1.0, 0.0, 2.0], np.float32), np.ones((3, 40), np.float32)
    b[0, 3], b[1, 5], b[2, 7] = np.inf, np.inf, np.nan
    _, got = run(lambda a, b: a @ b, a, b)
    want = np.ones(40, np.float32) * 3
    want[3], want[5], want[7] = np.inf, np.nan, np.nan
    np.testing.assert_array_equal(got, want)


def match(m, k, n, dtype=np.float32, function=lambda a, b: a @ b):
    traced = ts.jit(function).trace(np.zeros((m, k), dtype), np.zeros((k, n), dtype)).function
    (node,) = [n for n in traced.body.walk() if n.op is contractions.dot]
    found = row_products.match_row_product(UseDef(traced), *node.args)
    return found and found.depth


def test_only_where_it_pays():
    assert match(1, 8192, 8192) == 256 and match(2, 100, 4096) == 128 and match(1, 4096, 9716, bf16.numpy) == 160
    assert match(1, 4096, 4096, bf16.numpy) is None  # tensor maps load such rows
    assert match(1, 5471, 3072, bf16.numpy) == 160  # but not such a vector
    assert match(3, 8192, 8192) is None and match(1, 100, 100) is None
    assert match(1, 1024, 1024, function=lambda a, b: a @ b.T) is None  # a reduction along rows
    assert match(1, 2048, 2048, function=lambda a, b: a @ b.T) == 512 and match(8192, 8192, 1) == 8192
    assert match(1, 2048, 2048, function=lambda a, b: a @ (b + 1)) is None  # computed where it is read
    assert match(1, 512, 8192, f32.numpy) == 128


@pytest.mark.parametrize("of", ["a view", "the result of a product"])
def test_a_matrix_in_memory_in_another_shape(of, small):
    """The gradient of a layer with one output, of the activations of a batch."""
    x, y = draw(4, 16, 41, dtype=np.float32), draw(4, 16, 1, dtype=np.float32)
    w = draw(41, 41, dtype=np.float32)

    def gradient(x, y, w):
        x = ts.reshape(x, (64, 41))
        return (x @ w if of == "the result of a product" else x).mT @ ts.reshape(y, (64, 1))

    names, got = run(gradient, x, y, w)
    assert any(each.startswith("multiply_rows") for each in names)
    x, y, w = (v.astype("f8") for v in (x.reshape(64, 41), y.reshape(64, 1), w))
    np.testing.assert_allclose(got, (x @ w if of == "the result of a product" else x).T @ y, rtol=1e-4, atol=1e-4)

"""Sums of products of matrices: one accumulator for several, against NumPy in f64, in the emulator."""

import ml_dtypes
import numpy as np
import pytest

import tessera as ts
from tessera.codegen.ptx import BACKEND
from tessera.runtime import driver
from tessera.stdlib import summed_products


def run(function, *arrays):
    """The kernels of a function for a GPU, and its results in the emulator."""
    levels = driver.lower(ts.jit(function).trace(*arrays).function, "ptx")
    artifact = BACKEND.emit(levels["tile"], {"arch": "sm_90a"})
    return list(artifact.manifest["plan"]["entries"]), BACKEND.interpreter(artifact)(arrays)[0]


def wide_product(a, b):
    return ts.cast(ts.sum(ts.cast(a, ts.f32) @ ts.cast(b, ts.f32), axis=0), a.dtype)


def weight_gradient(g, x):
    """That of a 1x1 convolution."""
    g, x = (ts.cast(v.reshape(v.shape[0], 1, v.shape[1], -1), ts.f32) for v in (g, x))
    return ts.sum(g @ x.mT, axis=(0, 1))


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(summed_products, "LEAST_OPERATIONS", 0)
    monkeypatch.setattr(summed_products, "BUSY_PROGRAMS", 3)


def draw(*shapes, dtype=np.float16):
    rng = np.random.default_rng(7)
    return [rng.standard_normal(s).astype(dtype) for s in shapes]


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize(("batch", "m", "k", "n"), [(7, 24, 40, 48), (5, 70, 136, 33), (4, 16, 23, 130)])
def test_products_are_summed_in_their_accumulator(batch, m, k, n, dtype, small):
    a, b = draw((batch, m, k), (batch, k, n), dtype=dtype)
    names, got = run(wide_product, a, b)
    assert any("multiply_together" in name for name in names)
    want = np.einsum("zmk,zkn->mn", a.astype("f8"), b.astype("f8"))
    tolerance = 2**-10 if dtype is np.float16 else 2**-7
    np.testing.assert_allclose(got.astype("f8"), want, rtol=tolerance, atol=1e-3)


@pytest.mark.parametrize("size", [8, 7])
def test_the_weight_gradient_of_a_1x1_convolution_is_such_a_sum(size, small):
    g, x = draw((6, 20, size, size), (6, 32, size, size))
    names, got = run(weight_gradient, g, x)
    assert any("multiply_together" in name for name in names)
    want = np.einsum("zmhw,znhw->mn", g.astype("f8"), x.astype("f8"))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-4)


def test_other_sums_stay(small):
    a, b = draw((6, 20, 24), (6, 24, 32))
    for function in (
        lambda a, b: ts.sum(ts.cast(a, ts.f32) @ ts.cast(b, ts.f32), axis=1),
        lambda a, b: ts.sum(ts.cast(a, ts.f32) @ ts.cast(b, ts.f32)[:1], axis=0),
        lambda a, b: ts.sum(a @ b, axis=0),
        lambda a, b: ts.sum(ts.cast(a, ts.f32 @ ts.accum(ts.f64)) @ ts.cast(b, ts.f32), axis=0),
    ):
        names, got = run(function, a, b)
        assert not any("multiply_together" in name for name in names)
        np.testing.assert_allclose(
            got.astype("f8"), function(*map(ts.Tensor, (a, b))).numpy().astype("f8"), rtol=0.02, atol=0.02
        )


@pytest.mark.parametrize(("sizes", "swapped", "columns"), [
    ((208, 512), True, 256), ((512, 208), False, 256), ((64, 64), False, 64), ((256, 512), False, 256),
    ((48, 512), False, 128), ((512, 48), False, 64),
])  # fmt: skip
def test_blocks_are_chosen_for_fewest_loads(sizes, swapped, columns):
    found = summed_products.choose_blocks(*sizes)
    assert (found.swapped, found.columns) == (swapped, columns)


@pytest.mark.parametrize("batch", [4, 7])  # of two together, the last has none
def test_deep_products_are_pipelined(batch, monkeypatch):
    monkeypatch.setattr(summed_products, "BUSY_PROGRAMS", 4)
    monkeypatch.setattr(summed_products, "LEAST_OPERATIONS", 0)
    g, x = draw((batch, 24, 8, 17), (batch, 40, 8, 17))
    levels = driver.lower(ts.jit(weight_gradient).trace(g, x).function, "ptx")
    artifact = BACKEND.emit(levels["tile"], {"arch": "sm_90a"})
    assert any("wgmma.mma_async" in str(text) for text in artifact.files.values())
    want = np.einsum("zmhw,znhw->mn", g.astype("f8"), x.astype("f8"))
    np.testing.assert_allclose(BACKEND.interpreter(artifact)((g, x))[0], want, rtol=1e-5, atol=1e-4)

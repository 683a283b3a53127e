"""Products with block-quantised matrices against NumPy in f64, on every target."""

import numpy as np
import pytest

import tessera as ts
from tessera.core.errors import DTypeError, ShapeError
from tessera.stdlib.quantised import QuantisedMatrix, dequantise, quantised_matmul, use_product_step

RNG = np.random.default_rng(0)


def make_matrix(kind, n, blocks):
    scale, low = (RNG.standard_normal((n, blocks)).astype(np.float16) for _ in range(2))
    if kind == "packed":
        return QuantisedMatrix(RNG.integers(0, 256, (n, 16 * blocks), dtype=np.uint8), scale, low)
    if kind == "packed, no low":
        return QuantisedMatrix(RNG.integers(0, 256, (n, 16 * blocks), dtype=np.uint8), scale)
    if kind == "int8 in 16":
        return QuantisedMatrix(RNG.integers(-128, 128, (n, 16 * blocks), dtype=np.int8), scale.astype(np.float32))
    return QuantisedMatrix(RNG.integers(0, 64, (n, 32 * blocks), dtype=np.uint8), scale, low.astype(np.float32))


def expand(w):
    """The definition, in f64."""
    codes = np.asarray(w.codes, np.float64)
    if w.packed:
        halves = w.codes.reshape(len(w.codes), -1, 1, 16)
        codes = np.concatenate([halves & 15, halves >> 4], axis=2).astype(np.float64)
    codes = codes.reshape(*w.scale.shape, -1)
    low = 0.0 if w.low is None else w.low.astype(np.float64)[..., None]
    return (codes * w.scale.astype(np.float64)[..., None] + low).reshape(len(w.codes), -1)


@pytest.mark.in_turn("target")
@pytest.mark.parametrize("target", ["interp", "llvm", "ptx"])
@pytest.mark.parametrize("kind", ["packed", "packed, no low", "int8 in 16", "uint8 in 32"])
@pytest.mark.parametrize(
    ("rows", "n", "blocks"), [(1, 50, 3), (1, 130, 18), (4, 8, 1), (5, 33, 2), (9, 40, 1), (70, 33, 5)]
)
def test_product(target, kind, rows, n, blocks):
    w = make_matrix(kind, n, blocks)
    x = RNG.standard_normal((rows, w.shape[1])).astype(np.float32)
    want = x.astype(np.float64) @ expand(w).T
    got = ts.jit(lambda x, w: quantised_matmul(x, w), target=target)(x, w).numpy()
    assert got.shape == (rows, n)
    assert np.abs(got - want).max() <= 3e-6 * (np.abs(x) @ np.abs(expand(w)).T).max()
    assert np.allclose(dequantise(w).numpy(), expand(w), rtol=1e-6, atol=1e-5)


@pytest.mark.in_turn("rows")
@pytest.mark.parametrize("target", ["interp", "llvm", "ptx"])
@pytest.mark.parametrize("kind", ["packed", "uint8 in 32"])
@pytest.mark.parametrize("rows", [2, 12])
def test_more_axes_and_the_kernels_of_gpus(target, kind, rows):
    w = make_matrix(kind, 22, 5)
    x = RNG.standard_normal((2, rows, 160)).astype(np.float32)
    with use_product_step(4, 4):  # the kernels of GPUs
        got = ts.jit(quantised_matmul, target=target)(x, w).numpy()
    assert np.allclose(got, x @ expand(w).T, rtol=1e-4, atol=2e-3) and got.shape == (2, rows, 22)
    assert quantised_matmul(x[:0], w).shape == (0, rows, 22)


@pytest.mark.parametrize(("x", "change", "error"), [
    (np.ones((1, 64), np.float64), {}, DTypeError),
    (np.ones((1, 63), np.float32), {}, ShapeError),
    (np.ones((1, 64), np.float32), {"scale": np.ones((4, 2), np.int32)}, DTypeError),
    (np.ones((1, 64), np.float32), {"scale": np.ones((3, 2), np.float16)}, ShapeError),
    (np.ones((1, 64), np.float32), {"low": np.ones((4, 1), np.float16)}, ShapeError),
    (np.ones((1, 64), np.float32), {"codes": np.ones((4, 32), np.int32)}, DTypeError),
])  # fmt: skip
def test_misfits_are_errors(x, change, error):
    w = QuantisedMatrix(np.ones((4, 32), np.uint8), np.ones((4, 2), np.float16))
    with pytest.raises(error):
        quantised_matmul(x, w._replace(**change))

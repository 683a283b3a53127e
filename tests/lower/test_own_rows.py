"""Products of a row whose programs each compute the row: norms, combinations of parts and blocks are no kernels."""

import numpy as np
import pytest

import tessera as ts
from tessera.codegen.contract import get_backend
from tessera.lower.lowering_plan import LoweringPlan
from tessera.lower.schedule_to_tile.lowering import summarise_kernels
from tessera.runtime import driver
from tests.lower.levels import agree, modules, traced

RNG = np.random.default_rng(7)
ROW, GAIN, SHIFT = (RNG.standard_normal(s).astype(np.float32) for s in ((1, 96), (96,), (96,)))
WIDE, DEEP, UP = (RNG.standard_normal(s).astype(np.float32) for s in ((320, 96), (96, 160), (320, 96)))
PARTS, HEIGHTS = (RNG.standard_normal(s).astype(np.float32) for s in ((4, 3, 32), (4, 3)))
CODES = RNG.integers(0, 16, (256, 6, 16)).astype(np.uint8)
SCALES = RNG.random((256, 6)).astype(np.float32)


def norm_and_product(x, w, a):
    return ts.rms_norm(x, weight=w) @ a.T


def layer(x, w, b, up, down):
    """What GPT-2 and Llama have in common: a residual, a norm, a gate in the halves of one product, a residual."""
    h = ts.layer_norm(x, weight=w, bias=b) @ up.T
    half = h.shape[-1] // 2
    return x + (ts.silu(h[..., :half]) * h[..., half:]) @ down.T


def combine(parts, heights, a):
    """Parts of attention, by weights of each head, as the row of a product."""
    weights = ts.exp(heights - ts.max(heights, axis=0))
    total = ts.sum(weights, axis=0)
    mixed = ts.sum(weights[..., None] * parts, axis=0) / total[..., None]
    return mixed.reshape(1, 96) @ a.T


def blocks(x, w, codes, scales):
    """A product with a matrix in blocks, each of which has a scale."""
    row = ts.rms_norm(x, weight=w).reshape(codes.shape[1:])
    return ts.sum(ts.sum(codes.to(ts.f32) * row, axis=2) * scales, axis=1)


def residual(x, w, b, a):
    """The norm of a row to which another product is added, which has a kernel of its own."""
    return ts.rms_norm(x + ts.gelu(x @ b.T), weight=w) @ a.T


PROGRAMS = {
    "norm": (norm_and_product, (ROW, GAIN, WIDE), 1),
    "layer": (layer, (ROW, GAIN, SHIFT, UP, DEEP), 2),
    "residual": (residual, (ROW, GAIN, UP[:96], WIDE), 2),
    "blocks": (blocks, (ROW, GAIN, CODES, SCALES), 1),
    "square blocks": (blocks, (ROW[:, :64], GAIN[:64], np.resize(CODES, (256, 8, 8)), np.resize(SCALES, (256, 8))), 1),
}


def count_kernels(program, arrays, plan):
    return len(summarise_kernels(modules(traced(program, *arrays)[0], plan)["schedule"]))


@pytest.mark.parametrize("name", PROGRAMS)
def test_kernels_and_results(name):
    program, arrays, count = PROGRAMS[name]
    plan = driver.find_plan("ptx")
    assert count_kernels(program, arrays, plan) == count
    assert count_kernels(program, arrays, LoweringPlan(vector_products=1)) > count
    (want,) = agree(program, *arrays, rtol=1e-4)
    levels = driver.lower(ts.jit(program).trace(*arrays).function, "ptx")
    artifact = get_backend("ptx").emit(levels["tile"], {"arch": "sm_90a"})
    (got,) = get_backend("ptx").interpreter(artifact)(list(arrays))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4 * np.abs(want).max())


def test_many_rows_are_normalised_once():
    x = np.zeros((64, 96), np.float32)
    assert count_kernels(norm_and_product, (x, GAIN, WIDE), driver.find_plan("ptx")) == 2


def test_long_rows_are_normalised_once():
    x, w, a = np.zeros((1, 16384), np.float32), np.zeros(16384, np.float32), np.zeros((512, 16384), np.float32)
    assert count_kernels(norm_and_product, (x, w, a), driver.find_plan("ptx")) == 2


def test_activations_of_a_product_are_computed_once():
    """Not by each program of the product that follows."""

    def program(x, a, b):
        return ts.gelu(x @ a.T) @ b.T

    b = np.zeros((512, 320), np.float32)
    assert count_kernels(program, (ROW, WIDE, b), driver.find_plan("ptx")) == 2


def test_few_sums_of_sums_stay_apart():
    """A kernel for both would leave most of a GPU idle."""
    x = np.zeros((8, 128, 64), np.float32)
    assert count_kernels(lambda x: ts.max(ts.sum(x, axis=2), axis=1), (x,), driver.find_plan("ptx")) == 2


def test_a_row_of_sums_is_computed_once():
    """It costs several times the reads of its elements."""
    assert count_kernels(combine, (PARTS, HEIGHTS, WIDE), driver.find_plan("ptx")) > 1
    agree(combine, PARTS, HEIGHTS, WIDE, rtol=1e-4)

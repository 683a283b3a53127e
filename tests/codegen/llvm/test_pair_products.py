"""Products of pairs of 16-bit elements and of quads of bytes: packings, instructions, and subnormal numbers."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from tilekernels import Kernel, agree

import tessera as ts
from tessera.codegen.llvm import BACKEND, generator
from tessera.codegen.llvm.runtime import jit
from tessera.codegen.llvm.text.pair_products import BF16, INT8_UINT8, INT16, NATIVE, UINT8_INT8, select_instructions
from tessera.core.types import bf16, f32, int4, int8, int32, uint8
from tessera.ops.dialects import tile  # noqa: F401  (registers the ops of kernels)
from tessera.ops.tensor import contractions, shape

PAIRS = {"vector_bytes": 64, "pair_products": True, "byte_products": 2}
QUADS = {**PAIRS, "byte_products": 4}
SHAPES = [(13, 20, 37), (33, 32, 48), (1, 2, 16), (16, 33, 96), (5, 1, 20), (14, 7, 65)]
TURNED = [(False, True), (True, False), (True, True)]


def draw(dtype, *size, seed=0):
    rng = np.random.default_rng(seed)
    low, high = {int8: (-128, 128), uint8: (0, 256), int4: (-8, 8)}.get(dtype, (0, 0))
    values = rng.integers(low, high, size) if high else rng.normal(size=size)
    return values.astype(dtype.numpy)


def product(a, b, out, turned=(False, False)):
    given = [np.ascontiguousarray(np.swapaxes(x, -1, -2)) if t else x for x, t in zip((a, b), turned, strict=True)]
    result = np.zeros((*a.shape[:-1], b.shape[-1]), out.numpy)
    k = Kernel(*given, result)
    axes = (*range(a.ndim - 2), a.ndim - 1, a.ndim - 2)
    x, y = (
        k(shape.permute, k.load(p), axes=axes) if t else k.load(p) for p, t in zip(k.params[:2], turned, strict=True)
    )
    k.store(k.params[2], k(contractions.dot, x, y, dtype=out))
    return k.module(), [*given, result]


def run(module, arrays, **options):
    text = BACKEND.emit(module, {**PAIRS, **options})
    BACKEND.runtime(text).run(arrays)
    return arrays[-1]


@pytest.mark.parametrize(("m", "k", "n"), SHAPES)
def test_bf16(m, k, n):
    agree(*product(draw(bf16, m, k), draw(bf16, k, n, seed=1), f32), 1e-5, 1e-5, **PAIRS)


@pytest.mark.parametrize("turned", TURNED, ids=str)
@pytest.mark.parametrize(("m", "k", "n"), [(32, 64, 48), (21, 33, 38)])
def test_transposed_operands(m, k, n, turned):
    agree(*product(draw(bf16, m, k), draw(bf16, k, n, seed=1), f32, turned), 1e-5, 1e-5, **PAIRS)


WAYS = pytest.mark.parametrize("at_once", [2, 4])


@WAYS
@pytest.mark.parametrize("dtype", [int8, uint8, int4], ids=str)
@pytest.mark.parametrize(("m", "k", "n"), SHAPES[:4])
def test_integers_are_exact(m, k, n, dtype, at_once):
    a, b = draw(dtype, m, k), draw(dtype, k, n, seed=1)
    got = run(*product(a, b, int32, (False, n % 2 == 0)), byte_products=at_once)
    np.testing.assert_array_equal(got, a.astype(np.int64) @ b.astype(np.int64))


@WAYS
@pytest.mark.parametrize("value", [-128, 127])
def test_extreme_integers_do_not_overflow(value, at_once):
    a, b = np.full((16, 64), -128, np.int8), np.full((64, 32), value, np.int8)
    got = run(*product(a, b, int32), byte_products=at_once)
    np.testing.assert_array_equal(got, np.full((16, 32), 64 * -128 * value))


@pytest.mark.in_turn("left")
@pytest.mark.parametrize("turned", [(False, False), *TURNED], ids=str)
@pytest.mark.parametrize("right", [int8, uint8], ids=str)
@pytest.mark.parametrize("left", [int8, uint8], ids=str)
def test_quads_of_either_sign(left, right, turned):
    """The instruction takes one signed and one unsigned operand; the emulator runs the plain definition."""
    a, b = draw(left, 21, 70), draw(right, 70, 38, seed=1)
    module, arrays = product(a, b, int32, turned)
    want = a.astype(np.int64) @ b.astype(np.int64)
    emulated = [x.copy() for x in arrays]
    BACKEND.interpreter(BACKEND.emit(module, QUADS))(emulated)
    np.testing.assert_array_equal(emulated[-1], want)
    np.testing.assert_array_equal(run(module, arrays, **QUADS), want)


@pytest.mark.parametrize("dtype", [ts.bf16, ts.int8], ids=str)
def test_rows_that_end_within_a_tile(dtype):
    """Of the last tile only the rows of the operand are copied; what is behind them may be no memory at all."""
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-4, 5, size).astype(dtype.numpy) for size in ((607, 40), (40, 48)))
    wide = ts.int32 if dtype is ts.int8 else ts.f32
    got = ts.jit(lambda a, b: ts.matmul(a, b, dtype=wide), target="llvm")(a, b)
    np.testing.assert_array_equal(np.asarray(got), a.astype(np.float64) @ b.astype(np.float64))


def test_batch():
    agree(*product(draw(bf16, 2, 3, 9, 20), draw(bf16, 2, 3, 20, 37), f32), 1e-5, 1e-5, **PAIRS)


SMALL = [(1e-39, 1e30), (1e-30, 1e-9), (2e-20, 3e-20), (1e-40, 1.0), (2.0**-57, 2.0**-57), (2.0**-60, 2.0**-66)]


@pytest.mark.parametrize(("left", "right"), SMALL)
@pytest.mark.parametrize("swapped", [False, True])
def test_subnormal_operands_and_products_are_kept(left, right, swapped):
    """The instruction takes them as zero; here the only term of each sum has a subnormal operand or product."""
    left, right = (right, left) if swapped else (left, right)
    a, b = np.zeros((16, 32), ml_dtypes.bfloat16), np.zeros((32, 48), ml_dtypes.bfloat16)
    a[:, 5], b[5] = left, right
    got = run(*product(a, b, f32))
    want = a.astype(np.float64) @ b.astype(np.float64)
    assert (want != 0).all()
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1.5e-45)


def test_sums_that_cancel_to_subnormal_numbers_are_kept():
    a, b = np.zeros((16, 2), ml_dtypes.bfloat16), np.ones((2, 16), ml_dtypes.bfloat16)
    a[:, 0], a[:, 1] = 2.0**-125, -(2.0**-125) * (1 - 2.0**-7)
    got = run(*product(a, b, f32))
    np.testing.assert_array_equal(got, np.full((16, 16), 2.0**-132, np.float32))


def test_special_values():
    a, b = draw(bf16, 16, 20), draw(bf16, 20, 32, seed=1)
    a[3, 4], a[5, 6], b[7, 8] = np.nan, np.inf, -np.inf
    with np.errstate(invalid="ignore"):
        want = a.astype(np.float32) @ b.astype(np.float32)
    np.testing.assert_allclose(run(*product(a, b, f32)), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [bf16, int8], ids=str)
def test_processors_without_the_instructions(dtype, monkeypatch, tmp_path):
    """The same text runs with the plain definitions."""
    monkeypatch.setenv("TESSERA_CACHE", str(tmp_path))
    monkeypatch.setattr(jit, "find_pair_products", frozenset)
    a, b = draw(dtype, 33, 41), draw(dtype, 41, 48, seed=1)
    got = run(*product(a, b, f32 if dtype is bf16 else int32), byte_products=4)
    np.testing.assert_allclose(got, a.astype(np.float64) @ b.astype(np.float64), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("dtype", "used"), [(bf16, BF16), (int8, INT8_UINT8), (uint8, UINT8_INT8)], ids=str)
def test_the_instruction_replaces_the_definition(dtype, used):
    to = f32 if dtype is bf16 else int32
    text = BACKEND.emit(product(draw(dtype, 16, 32), draw(dtype, 32, 32), to)[0], QUADS).text("kernels.ll")
    assert used.instruction[-1] not in text
    assert used.instruction[-1] in select_instructions(text, {p.feature for p in NATIVE})
    assert select_instructions(text, ()) == text


@pytest.mark.parametrize(("features", "used"), [
    ({"avx512vnni", "avx512bw"}, INT8_UINT8), ({"avx512bw"}, INT16), ({"avx512bf16"}, None),
])  # fmt: skip
def test_products_of_bytes_need_no_instruction_for_bf16(features, used, monkeypatch):
    monkeypatch.setattr(jit, "find_pair_products", lambda: frozenset(features))
    host = replace(BACKEND.capabilities, vector_bytes=64)
    module, _ = product(draw(int8, 16, 32), draw(int8, 32, 32), int32)
    artifact = generator.emit("llvm", host, module, {})
    called = [p for p in NATIVE if p.function in artifact.text("kernels.ll")]
    assert called == ([used] if used else [])
    assert artifact.manifest["options"]["pair_products"] == ("avx512bf16" in features)

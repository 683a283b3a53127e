"""fp8, fp6, fp4 and storage policies on llvm: every code point and every midpoint, bit for bit."""

import numpy as np
import pytest
from test_loop_fusion import pointwise
from tilekernels import agree

import tessera as ts
from tessera.core.errors import UnsupportedOpError
from tessera.ir.numerics.conversion import round_to_format
from tessera.lower.scalar_functions.small_floats import SMALL_FLOAT_FORMATS
from tessera.ops.tensor import basic
from tessera.ops.tensor import elementwise as e

SMALL = list(SMALL_FLOAT_FORMATS)
NARROW = [*SMALL, ts.f16, ts.bf16]
LIMITS = [np.inf, -np.inf, np.nan, 1e30, -1e30, 1e-40, -1e-45, 0.0, -0.0]


def codes(dtype):
    return np.arange(1 << dtype.bits, dtype=np.uint8).view(dtype.numpy)


def edges(dtype):
    """All numbers of a format (of 16 bits: many), what lies halfway between neighbours, and just beside that."""
    every = np.arange(0, 1 << 16, 37, np.uint16).view(dtype.numpy) if dtype.bits == 16 else codes(dtype)
    known = np.unique(every.astype(np.float32)[np.isfinite(every.astype(np.float32))])
    half = known[1:] / 2 + known[:-1] / 2
    near = [np.nextafter(half, np.float32(side)) for side in (np.inf, -np.inf)]
    scattered = np.random.default_rng(0).normal(size=500) * np.exp(np.random.default_rng(1).normal(size=500) * 5)
    top = known[-1:] * (1.5 if dtype.bits < 16 else 1.0)
    return np.concatenate([known, half, *near, top, scattered, LIMITS]).astype(np.float32)


def same_bits(got, want):
    """Equal bit for bit; one NaN is as good as another."""
    nan = np.isnan(want.astype(np.float64))
    kind = f"u{want.dtype.itemsize}"
    np.testing.assert_array_equal(got.view(kind)[~nan], want.view(kind)[~nan])
    assert np.isnan(got.astype(np.float64)[nan]).all()


@pytest.mark.parametrize("dtype", SMALL, ids=str)
def test_every_code_point(dtype):
    got = ts.jit(lambda x: ts.cast(x, dtype=ts.f32), target="llvm")(codes(dtype)).numpy()
    same_bits(got, codes(dtype).astype(np.float32))
    back = ts.jit(lambda x: ts.cast(ts.cast(x, dtype=ts.f32) * 1.0, dtype=dtype), target="llvm")(codes(dtype)).numpy()
    same_bits(back, codes(dtype))


@pytest.mark.parametrize("wide", [ts.f32, ts.f64], ids=str)
@pytest.mark.parametrize("dtype", SMALL, ids=str)
def test_rounding(dtype, wide):
    x = edges(dtype).astype(wide.numpy)
    x = x[~np.isnan(x)] if dtype.bits < 8 else x
    got = ts.jit(lambda x: ts.cast(x, dtype=dtype), target="llvm")(x).numpy()
    same_bits(got, ts.cast(x, dtype=dtype).numpy())


@pytest.mark.parametrize("clause", [ts.toward_zero, ts.saturate, ts.flush_denormals], ids=lambda c: c.field)
@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_policies(dtype, clause):
    policy = dtype @ clause
    x = edges(dtype)
    x = x[~np.isnan(x)] if dtype.bits < 8 else x
    got = ts.jit(lambda x: ts.cast(x, dtype=policy), target="llvm")(x).numpy()
    want = round_to_format(x, dtype, policy.rounding, policy.saturate, policy.denormals == "flush")
    same_bits(got, want)


@pytest.mark.parametrize("more", [{}, {"saturate": True}, {"denormals": "flush"}], ids=str)
@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_stochastic_rounding_gives_the_bits_of_the_interpreter(dtype, more):
    policy = ts.Policy(dtype, rounding="stochastic", seed=7, **more)
    x = edges(dtype)
    x = x[~np.isnan(x)] if dtype.bits < 8 else x
    got = ts.jit(lambda x: ts.cast(x, dtype=policy), target="llvm")(x).numpy()
    same_bits(got, round_to_format(x, dtype, "stochastic", policy.saturate, policy.denormals == "flush", seed=7))


def test_policies_of_results():
    x = ts.Tensor(np.float32([1e-39, 3e38]), ts.f32 @ ts.flush_denormals)
    assert ts.jit(lambda x: x * 0.5, target="llvm")(x).tolist() == [0.0, float(np.float32(3e38) * np.float32(0.5))]
    total = ts.jit(lambda x: x.sum(), target="llvm")(ts.Tensor(np.full(9, 6e4), ts.f16 @ ts.saturate))
    assert total.item() == 65504.0
    with pytest.raises(UnsupportedOpError, match="from f64"):
        ts.jit(lambda x: ts.cast(x, dtype=ts.bf16 @ ts.toward_zero), target="llvm")(np.float64([1.0]))


@pytest.mark.parametrize("dtype", SMALL, ids=str)
def test_the_text_runs_without_a_compiler(dtype):
    x = codes(dtype)
    x = x[np.isfinite(x.astype(np.float32))]
    agree(*pointwise(e.add, x, x[::-1].copy()))
    agree(*pointwise(basic.cast, edges(dtype)[:-3], dtype=dtype))


@pytest.mark.parametrize("dtype", SMALL, ids=str)
def test_products_and_sums(dtype, rng):
    a, b = (rng.normal(size=s).astype(dtype.numpy) for s in ((9, 33), (33, 7)))
    wide = ts.jit(lambda a, b: ts.matmul(a, b, dtype=ts.f32), target="llvm")(a, b).numpy()
    np.testing.assert_allclose(wide, a.astype(np.float64) @ b.astype(np.float64), rtol=1e-5, atol=1e-5)
    total = ts.jit(lambda a: ts.sum(a, axis=1), target="llvm")(a).numpy()
    same_bits(total, ts.sum(ts.Tensor(a), axis=1).numpy())

"""`nextafter`: every code point of the narrow formats, and the edges of the wide ones, against NumPy and ml_dtypes."""

import math

import numpy as np
import pytest

import tessera as ts
from tessera.core.types import BY_NAME
from tessera.runtime.program import prepare


def numbers(dtype):
    """All of a narrow format; of a wide one numbers at random, powers of two, and what lies near the least ones."""
    element = dtype.numpy.type
    if dtype.bits < 32:
        return np.arange(1 << dtype.bits, dtype=np.uint32).astype(f"u{dtype.numpy.itemsize}").view(element)
    info, word = np.finfo(element), np.dtype(f"u{dtype.numpy.itemsize}")
    drawn = np.random.default_rng(0).integers(0, np.iinfo(word).max, 2000, dtype=word).view(element)
    powers = np.ldexp(element(1), np.arange(info.minexp - 30, info.maxexp)).astype(element)
    edges = np.array([0, info.tiny, info.max, math.inf, math.nan, 1, 0.5, 1 / 3], element)
    least = (np.arange(64) * info.smallest_subnormal).astype(element)
    found = np.concatenate([drawn, powers, edges, least])
    return np.concatenate([found, -found])


def same(got, want):
    """Equal with the signs of zeros; any NaN is one."""
    got, want = got.astype(np.float64), want.astype(np.float64)
    return ((got == want) & (np.signbit(got) == np.signbit(want))) | (np.isnan(got) & np.isnan(want))


@pytest.mark.parametrize("name", ["f64", "f32", "f16", "bf16", "fp8_e5m2", "fp8_e4m3"])
@pytest.mark.parametrize("toward", [math.inf, -math.inf, 0.0, -0.0, 1.0, math.nan])
def test_each_number(name, toward):
    x = numbers(BY_NAME[name])
    y = np.full(x.shape, toward).astype(x.dtype)
    with np.errstate(all="ignore"):
        want = np.where(x == y, y, np.nextafter(x, y))
    program = prepare(ts.jit(lambda x, y: ts.nextafter(x, y)), (x, y), "llvm")
    for level in ("graph", "schedule", "device"):
        got = program.run(level, "llvm")[0]
        assert same(got, want).all(), level
    assert same(ts.nextafter(ts.Tensor(x), ts.Tensor(y)).numpy(), want).all()


def test_beside_numpy_and_integers():
    assert np.nextafter(ts.Tensor([1.0]), 2.0).tolist() == [1.0 + 2.0**-23]
    assert ts.nextafter(ts.Tensor([1], ts.int8), 0).dtype == ts.f32


def test_a_format_that_memory_does_not_tell():
    with pytest.raises(ts.TesseraError, match="nextafter of tf32"):
        ts.nextafter(ts.Tensor([1.0], ts.tf32), 2.0)

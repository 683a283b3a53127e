"""Small floats (fp8, fp6, fp4) on PEs: every code, every midpoint and every overflow, bit for bit."""

import numpy as np
import pytest

import tessera as ts
from tessera.codegen.csl.generator import Csl
from tessera.core.errors import UnsupportedOpError
from tessera.interp import bound, graph
from tessera.lower.scalar_functions.small_floats import SMALL_FLOAT_FORMATS
from tessera.runtime import driver

FAR = [np.inf, -np.inf, np.nan, 1e30, -1e30, 1e-40, 0.0, -0.0]


def codes(dtype):
    return np.arange(1 << dtype.bits, dtype=np.uint8).view(dtype.numpy)


def edges(dtype):
    """The midpoints of adjacent values, their neighbours, and values far beyond the range."""
    known = np.unique(codes(dtype).astype(np.float32)[np.isfinite(codes(dtype).astype(np.float32))])
    half = known[1:] / 2 + known[:-1] / 2
    near = [np.nextafter(half, np.float32(side)) for side in (np.inf, -np.inf)]
    far = (
        FAR if SMALL_FLOAT_FORMATS[dtype].nan is not None else [x for x in FAR if x == x]
    )  # otherwise NaN becomes a zero of either sign
    return np.concatenate([half, *near, known[-1:] * 1.04, known[-1:] * 1.2, far]).astype(np.float32)


def run(function, args, grid=(1, 2)):
    traced = ts.jit(function).trace(*args).function
    generator = Csl(grid)
    artifact = generator.emit(driver.lower(traced, f"csl:{grid[0]}x{grid[1]}")["tile"], {"arch": "wse3"})
    return traced, generator.runtime(artifact).run(args)


@pytest.mark.parametrize("dtype", list(SMALL_FLOAT_FORMATS), ids=str)
def test_small_float_codes_and_rounding(dtype):
    def program(x, y):
        return ts.cast(x, dtype=ts.f32), ts.cast(y, dtype=dtype)

    args = (codes(dtype), edges(dtype))
    traced, found = run(program, args)
    for got, want in zip(found, graph.run(traced, args), strict=True):
        numbers = ~np.isnan(want.astype(np.float32))
        kind = f"u{want.dtype.itemsize}"
        np.testing.assert_array_equal(got.view(kind)[numbers], want.view(kind)[numbers])
        assert np.isnan(got.astype(np.float32)[~numbers]).all()


@pytest.mark.parametrize("dtype", [ts.fp8_e4m3, ts.fp4], ids=str)
def test_small_float_arithmetic(dtype):
    def program(x):
        y = ts.maximum(x, x.max(axis=1, keepdims=True) * 0.5)
        return y @ y.T, y.sum(axis=0), ts.min(y)

    args = (np.random.default_rng(0).standard_normal((5, 7)).astype(dtype.numpy),)
    traced, found = run(program, args, (2, 2))
    for one, reference in zip(found, bound.run(traced, args), strict=True):
        assert bound.compare_with_bound(one, reference).ok


def test_f16_and_bf16_in_one_program_are_an_error():
    with pytest.raises(UnsupportedOpError, match="only one 16-bit float type, which cslc's option --fp16-format"):
        run(lambda x: ts.cast(x, dtype=ts.bf16), (np.ones((2, 2), np.float16),))

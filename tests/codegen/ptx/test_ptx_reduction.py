"""Reductions: every kind, element type and axis, with padding, and NaN before any number."""

import numpy as np
import pytest
from ptxcheck import numbers, run

from tessera.core.types import bf16, bool_, f16, f32, f64, int32, int64
from tessera.ops.tensor import reduce, shape

REDUCTIONS = (reduce.sum, reduce.max, reduce.min, reduce.argmax, reduce.argmin)


@pytest.mark.parametrize("op", REDUCTIONS, ids=lambda op: op.name)
@pytest.mark.parametrize(("size", "axis"), [((5, 300), -1), ((300, 5), -2), ((64, 64), -1), ((3, 1), -1)])
def test_reductions(op, size, axis):
    def build(k, x, out):
        k.store(out, k(op, k.load(x), axis=(axis,) if op in REDUCTIONS[:3] else axis, keepdims=True))

    kind = np.float32 if op in REDUCTIONS[:3] else np.int64
    kept = tuple(1 if a == axis % 2 else n for a, n in enumerate(size))
    run(build, numbers(f32, *size), np.zeros(kept, kind), rtol=1e-5)


@pytest.mark.parametrize("dtype", (f64, f16, bf16, int64, int32, bool_), ids=str)
def test_reductions_of_types(dtype):
    def build(k, x, total, most):
        v = k.load(x)
        if dtype != bool_:
            k.store(total, k(shape.reshape, k(reduce.sum, v, axis=(-2, -1), keepdims=False), shape=(1,)))
        k.store(most, k(shape.reshape, k(reduce.max, v, axis=(-2, -1), keepdims=False), shape=(1,)))

    wide = np.int64 if not dtype.is_float else dtype.numpy
    rtol = 1e-2 if dtype in (bf16, f16) else 1e-12
    run(build, numbers(dtype, 9, 40), np.zeros(1, wide), np.zeros(1, dtype.numpy), rtol=rtol)


def test_nan_comes_first():
    def build(k, x, most, place):
        v = k.load(x)
        k.store(most, k(reduce.max, v, axis=(-1,), keepdims=True))
        k.store(place, k(reduce.argmax, v, axis=-1, keepdims=True))

    x = numbers(f32, 100)
    x[[40, 70]] = np.nan
    run(build, x, np.zeros(1, np.float32), np.zeros(1, np.int64))

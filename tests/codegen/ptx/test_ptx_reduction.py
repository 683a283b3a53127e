"""Reductions: every kind, element type and axis, with padding, and NaN before any number."""

import re

import numpy as np
import pytest
from ptxcheck import emit_checked, numbers, run
from tilekernels import Kernel

import tessera as ts
from tessera.codegen.ptx import BACKEND
from tessera.codegen.ptx.runtime.emulated_program import TEXT_FILE
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


@pytest.mark.parametrize("size", [(4, 4, 512), (16, 512)], ids=str)
def test_threads_sum_whole_columns_that_they_hold(size):
    """What is summed along another axis than the contiguous one neither is shuffled nor passes shared memory."""
    x, out = np.arange(16 * 512, dtype=np.float32).reshape(size) % 257, np.zeros((4, 512), np.float32)
    k = Kernel(x, out)
    block = k(shape.reshape, k.load(k.params[0]), shape=(4, 4, 512))
    k.store(k.params[1], k(reduce.sum, block, axis=(-2,), keepdims=False))
    artifact = emit_checked(k.module((1,)), "sm_90a")
    BACKEND.interpreter(artifact)([x, out])
    np.testing.assert_array_equal(out, x.reshape(4, 4, 512).sum(1))
    assert not {w for w in ("shfl", "st.shared", "bar.sync") if w in artifact.text(TEXT_FILE)}


def test_partial_sums_are_read_four_at_a_time():
    """Rows of sums lie side by side in shared memory, and a thread takes neighbours."""
    x, out = np.arange(1024, dtype=np.float32).reshape(32, 32) % 61, np.zeros((4, 32), np.float32)
    k = Kernel(x, out)
    k.store(
        k.params[1], k(reduce.sum, k(shape.reshape, k.load(k.params[0]), shape=(4, 8, 32)), axis=(-2,), keepdims=False)
    )
    artifact = emit_checked(k.module((1,)))
    BACKEND.interpreter(artifact)([x, out])
    np.testing.assert_array_equal(out, x.reshape(4, 8, 32).sum(1))
    assert set(re.findall(r"ld\.shared\.(\S+) ", artifact.text(TEXT_FILE))) == {"v4.f32"}


@pytest.mark.parametrize("dtype", ["f4", "f8", "f2"])
@pytest.mark.parametrize(
    ("shape", "axis"), [((1, 3, 2), -1), ((4, 8), 0), ((4, 64), 1), ((3, 5), 1), ((64, 1024), None)]
)
def test_sums_of_negative_zeros_are_zero(shape, axis, dtype):
    """A sum starts at +0: an infinity's sign depends on it after a division."""
    x = np.full(shape, -0.0, dtype)
    found = [np.asarray(ts.jit(lambda x: x.sum(axis), target=t)(x)) for t in ("interp", "llvm", "ptx")]
    assert not any(np.signbit(f).any() for f in found)

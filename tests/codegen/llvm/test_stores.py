"""Stores: rows of a few elements, which are interleaved a register of rows at a time."""

import re

import numpy as np
import pytest

import tessera as ts
from tessera.codegen.contract import emit_artifact, get_backend
from tessera.runtime.driver import lower

SPECIAL = np.array([np.nan, np.inf, -np.inf, -0.0], np.float32)


def draw(dtype, *shape):
    rng = np.random.default_rng(0)
    if dtype is ts.bool:
        return rng.random(shape) < 0.5
    return rng.integers(-100, 100, shape).astype(dtype.numpy)


def run(function, *args, vector_bytes=64):
    """The results of the machine code, which equal those of the emulator, and the text."""
    backend, module = get_backend("llvm"), lower(ts.jit(function).trace(*args).function, "llvm")["tile"]
    artifact = emit_artifact(backend, module, {"vector_bytes": vector_bytes})
    found = backend.runtime(artifact).run(args)
    for own, emulated in zip(found, backend.interpreter(artifact)(args), strict=True):
        np.testing.assert_array_equal(own.view(np.uint8), emulated.view(np.uint8))
    return found, re.sub("declare.*", "", artifact.text("kernels.ll"))


@pytest.mark.in_turn("count")
@pytest.mark.parametrize("dtype", [ts.f32, ts.f64, ts.f16, ts.bf16, ts.int8, ts.int64, ts.bool], ids=str)
@pytest.mark.parametrize("count", [2, 3, 4, 5, 8])
def test_stacked_columns(count, dtype):
    xs = [draw(dtype, 13, 50 + count) for _ in range(count)]
    (got,), _ = run(lambda *xs: ts.stack(xs, axis=-1), *xs)
    np.testing.assert_array_equal(got, np.stack(xs, -1))


@pytest.mark.parametrize("vector_bytes", [16, 32, 64])
def test_rows_that_are_left_and_special_values(vector_bytes):
    x, y = draw(ts.f32, 523), draw(ts.f32, 523, 2)
    x[[0, 300, 521, 522]], y[[3, 400, 520, 522], 1] = SPECIAL, SPECIAL
    (got,), _ = run(lambda x, y: ts.concatenate([x[:, None], y], axis=1), x, y, vector_bytes=vector_bytes)
    want = np.concatenate([x[:, None], y], 1)
    np.testing.assert_array_equal(got.view(np.int32), want.view(np.int32))


@pytest.mark.parametrize("rows", [7, 37, 640, 4099])
def test_channels_last(rows):
    """An operand in short rows is read in place, and statistics of the columns are the same for all rows."""
    x, mean, scale = draw(ts.f32, rows, 3), draw(ts.f32, 3), draw(ts.f32, 3)
    (got,), _ = run(lambda x, m, s: (x - m) * s, x, mean, scale)
    np.testing.assert_array_equal(got, (x - mean) * scale)


def test_several_results():
    x, y = draw(ts.f32, 700, 3), draw(ts.f32, 3)
    got, _ = run(lambda x, y: (x + y, x * y), x, y)
    for each, want in zip(got, (x + y, x * y), strict=True):
        np.testing.assert_array_equal(each, want)


def test_rows_have_no_masks():
    x, y = draw(ts.f32, 4096), draw(ts.f32, 4096)
    _, text = run(lambda x, y: ts.stack([x, y, x], axis=-1), x, y)
    assert "store <16 x float>" in text and "masked" not in text

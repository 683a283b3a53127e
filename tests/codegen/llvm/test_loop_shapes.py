"""Shapes of loops: collapsed dims, peeled tiles, lanes along the contiguous axis, windows, scans; against NumPy."""

import numpy as np
import pytest

import tessera as ts
from tessera.codegen.llvm import TILING_PLAN
from tessera.ir.core import Module
from tessera.lower.pipeline import lower
from tessera.ops.dialects import schedule
from tests.lower.levels import traced


def run(function, *arrays):
    return np.asarray(ts.jit(function, target="llvm")(*arrays))


def compare(function, reference, *shapes, rtol=1e-5):
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(s, dtype=np.float32) for s in shapes]
    want = reference(*(a.astype(np.float64) for a in arrays))
    np.testing.assert_allclose(run(function, *arrays), want, rtol=rtol, atol=1e-5)


def softmax(x, axis=-1):
    y = np.exp(x - x.max(axis, keepdims=True))
    return y / y.sum(axis, keepdims=True)


@pytest.mark.parametrize("shape", [(320, 307), (5, 3, 700), (3, 9001), (1, 17), (2, 1)])
def test_reduced_dims_are_not_collapsed(shape):
    compare(lambda x: ts.softmax(x, axis=-1), softmax, shape)
    compare(lambda x: ts.softmax(x, axis=0), lambda x: softmax(x, 0), shape)


@pytest.mark.parametrize("shape", [(45, 83, 5), (1, 300, 16), (8193, 3), (7, 65), (2, 3, 4, 5)])
def test_sums_over_every_axis(shape):
    for axis in (*range(len(shape)), (0, len(shape) - 1), None):
        check_reductions(shape, axis)


def check_reductions(shape, axis):
    compare(lambda x: ts.sum(x, axis=axis), lambda x: x.sum(axis), shape, rtol=1e-4)
    compare(lambda x: ts.max(x * x, axis=axis), lambda x: (x * x).max(axis), shape)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_places_of_maxima_over_every_axis(axis):
    x = np.random.default_rng(1).integers(0, 5, (9, 33, 20)).astype(np.float32)
    np.testing.assert_array_equal(run(lambda x: ts.argmax(x, axis=axis), x), x.argmax(axis))


@pytest.mark.parametrize("size", [8191, 8192, 8193, 20011])
def test_peeled_tiles_of_long_rows(size):
    compare(lambda x: ts.mean(x, axis=1), lambda x: x.mean(1), (3, size))
    compare(lambda x: ts.log_softmax(x), lambda x: np.log(softmax(x)), (2, size))


def list_dims(function, *arrays):
    steps = lower(Module("graph", (traced(function, *arrays)[0],)), TILING_PLAN)
    module = next(m for name, m in steps if name == "schedule")
    return [tuple(n for _, n, _ in k.attrs["dims"]) for k in module.main.body.nodes if k.op is schedule.kernel]


def test_adjacent_dims_collapse():
    x = np.ones((2, 3, 4, 5), np.float32)
    assert list_dims(lambda x: x + 1, x) == [(120,)]
    assert list_dims(lambda x, w: x * w[:, None, None], x, np.ones(3, np.float32)) == [(2, 3, 20)]
    assert list_dims(lambda x: ts.softmax(x), x) == [(24, 5)]
    assert list_dims(lambda x: x + ts.iota(shape=(5,), dtype=ts.f32), x) == [(24, 5)]


@pytest.mark.parametrize("stride", [1, 2, 3])
def test_windows(stride):
    def reference(x):
        cut = np.lib.stride_tricks.sliding_window_view(x, (3, 3), (2, 3))[:, :, ::stride, ::stride]
        return cut.max((-1, -2)) - cut.mean((-1, -2))

    def pools(x):
        return ts.max_pool2d(x, 3, stride) - ts.avg_pool2d(x, 3, stride)

    compare(pools, reference, (2, 3, 11, 37))


def test_strides_and_reversals():
    x = np.arange(7 * 133, dtype=np.float32).reshape(7, 133)
    np.testing.assert_array_equal(run(lambda x: ts.flip(x, 1), x), x[:, ::-1])
    np.testing.assert_array_equal(run(lambda x: ts.flip(x), x), x[::-1, ::-1])
    np.testing.assert_array_equal(run(lambda x: x[:, 1::2] + x[:, ::2][:, :-1], x), x[:, 1::2] + x[:, ::2][:, :-1])
    np.testing.assert_array_equal(run(lambda x: x[::2, 1::3] + 1, x), x[::2, 1::3] + 1)


@pytest.mark.parametrize("shape", [(5, 130), (1, 16), (4, 17, 300), (3, 20, 2)])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_scans(shape, axis):
    compare(lambda x: ts.cumsum(x, axis=axis), lambda x: x.cumsum(axis), shape, rtol=1e-4)
    compare(lambda x: ts.cumprod(1 + x / 50, axis=axis), lambda x: (1 + x / 50).cumprod(axis), shape, rtol=1e-4)
    whole = np.random.default_rng(0).integers(-9, 9, shape).astype(np.int32)
    np.testing.assert_array_equal(run(lambda x: ts.cumsum(x, axis=axis), whole), whole.cumsum(axis))
    zeros = run(lambda x: ts.cumsum(x, axis=axis), np.full(shape, -0.0, np.float32))
    assert np.signbit(zeros).all()


@pytest.mark.parametrize("sizes", [(1, 70, 33), (33, 70, 1), (1, 3, 1), (1, 5000, 2)])
def test_products_with_vectors(sizes):
    m, k, n = sizes
    compare(lambda a, b: a @ b, lambda a, b: a @ b, (m, k), (k, n), rtol=1e-4)
    compare(lambda a, b: a @ b, lambda a, b: a @ b, (3, m, k), (3, k, n), rtol=1e-4)


def test_depthwise_convolution():
    def reference(x, w):
        cut = np.lib.stride_tricks.sliding_window_view(x, (3, 2), (2, 3))
        return np.einsum("bchwij,cij->bchw", cut, w[:, 0])

    compare(lambda x, w: ts.conv2d(x, w, groups=5), reference, (2, 5, 9, 20), (5, 1, 3, 2), rtol=1e-4)

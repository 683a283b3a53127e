"""Numba's CUDA kernels in the emulator, against NumPy; findings at their lines."""

import inspect
import math
import warnings

import numpy as np
import pytest

pytest.importorskip("numba.cuda.dispatcher")
pytest.importorskip("cuda.bindings", reason="numba-cuda is not installed")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from numba import cuda, float32

import tessera as ts  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
TILE = 16


@cuda.jit
def add(x, y, out):
    i = cuda.grid(1)
    if i < out.size:
        out[i] = x[i] + y[i]


@cuda.jit(device=True)
def wave(x):
    return math.sin(x) + math.exp(x)


@cuda.jit
def waves(x, bins):
    i = cuda.grid(1)
    if i < x.size:
        cuda.atomic.add(bins, int(x[i] * 4), 1)
        x[i] = wave(x[i])


@cuda.jit
def matmul(a, b, c):
    left, right = cuda.shared.array((TILE, TILE), float32), cuda.shared.array((TILE, TILE), float32)
    col, row = cuda.grid(2)
    tx, ty, total = cuda.threadIdx.x, cuda.threadIdx.y, float32(0)
    for start in range(0, a.shape[1], TILE):
        left[ty, tx] = a[row, start + tx] if row < a.shape[0] and start + tx < a.shape[1] else 0
        right[ty, tx] = b[start + ty, col] if col < b.shape[1] and start + ty < b.shape[0] else 0
        cuda.syncthreads()
        for j in range(TILE):
            total += left[ty, j] * right[j, tx]
        cuda.syncthreads()
    if row < c.shape[0] and col < c.shape[1]:
        c[row, col] = total


@cuda.jit
def reverse_without_barrier(x, out):
    shared = cuda.shared.array(128, float32)
    i = cuda.threadIdx.x
    shared[i] = x[i]  # other
    out[i] = shared[127 - i]  # bug


@cuda.jit
def store_without_bound(x, out):
    i = cuda.grid(1)
    out[i] = 1  # bug


@cuda.jit
def read_of_empty(x, out):
    i = cuda.grid(1)
    if i < out.size:
        out[i] = cuda.threadIdx.x + x[i]  # bug


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_kernels(arch):
    rng = np.random.default_rng(0)
    x, out = rng.random(300).astype("f4"), None
    values, bins = rng.random(100), np.zeros(4, "i4")
    a, b, c = rng.random((33, 40)).astype("f4"), rng.random((40, 20)).astype("f4"), np.zeros((33, 20), "f4")
    with ts.cuda.interpreted(arch, debug=True) as device:
        out = cuda.device_array(300, np.float32)
        add[3, 128](cuda.to_device(x), x, out)
        before = values.copy()
        waves.forall(100)(values, bins)
        matmul[(2, 3), (TILE, TILE)](a, b.T.copy().T, c)
        assert device.launches == 3
    assert (out.copy_to_host() == x + x).all() and (bins == np.bincount((before * 4).astype(int), minlength=4)).all()
    np.testing.assert_allclose(values, np.sin(before) + np.exp(before), rtol=1e-14)
    np.testing.assert_allclose(c, a @ b, rtol=1e-5)


@pytest.mark.parametrize(
    "kernel,kind",
    [(reverse_without_barrier, "RaceError"), (store_without_bound, "OutOfBoundsError"),
     (read_of_empty, "UninitializedError")],
)  # fmt: skip
def test_bugs_are_found_at_their_lines(kernel, kind):
    lines, first = inspect.getsourcelines(kernel.py_func)
    (line,) = (first + i for i, text in enumerate(lines) if "# bug" in text)
    with pytest.raises(getattr(ts.errors, kind)) as found, ts.cuda.interpreted(debug=True):
        x = cuda.device_array(128, np.float32) if kernel is read_of_empty else np.ones(128, "f4")
        kernel[1, 128](x, np.zeros(100 if kernel is store_without_bound else 128, "f4"))
    assert found.value.location.line == line and found.value.location.file == __file__
    assert "thread" in found.value.message and (kind != "RaceError" or f"{line - 1}" in found.value.message)


def test_an_explicit_signature_converts_arguments():
    with ts.cuda.interpreted():

        @cuda.jit("void(float64[:], float64)")
        def scale(x, factor):
            x[cuda.threadIdx.x] *= factor

        x = np.arange(32.0)
        scale[1, 32](x, 3)
    assert (x == 3 * np.arange(32)).all()

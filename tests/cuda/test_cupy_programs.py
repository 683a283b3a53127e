"""CuPy's raw kernels, compiled by NVRTC, in the emulator; findings at the lines of the CUDA source."""

import numpy as np
import pytest

pytest.importorskip("cuda.bindings.nvrtc")

import tessera as ts  # noqa: E402

SCALE = """extern "C" __global__ void scale(float* x, float factor, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n)
        x[i] *= factor;
}"""
REVERSE = """template <typename T> __global__ void reverse(T* x) {
    __shared__ T all[64];
    all[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    x[threadIdx.x] = all[63 - threadIdx.x];
}"""


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_raw_kernels(arch):
    with ts.cuda.interpreted(arch, debug=True):
        import cupy as cp

        x, y = cp.arange(100, dtype=cp.float32), cp.asarray(np.arange(64.0))
        cp.RawKernel(SCALE, "scale")((4,), (32,), (x, np.float32(3), 100))
        module = cp.RawModule(code=REVERSE, options=("-std=c++17",), name_expressions=["reverse<double>"])
        module.get_function("reverse<double>")((1,), (64,), (y,))
    assert (x.get() == 3 * np.arange(100)).all() and (cp.asnumpy(y) == np.arange(64)[::-1]).all()


def test_findings_name_the_line():
    with ts.cuda.interpreted(debug=True):
        import cupy as cp

        x = cp.zeros(100, dtype=cp.float32)
        with pytest.raises(ts.errors.OutOfBoundsError) as found:
            cp.RawKernel(SCALE.replace("if (i < n)", ""), "scale")((4,), (32,), (x, np.float32(3), 100))
        with pytest.raises(ts.errors.RaceError, match="reverse-[0-9]*.cu:3"):
            cp.RawKernel(REVERSE.replace("__syncthreads();", ""), "reverse<float>")((1,), (64,), (x,))
    assert (
        found.value.location.line == 4
        and "x[i] *= factor" in str(found.value)
        and "block (3, 0, 0)" in str(found.value)
    )


def test_what_is_not_emulated_is_refused():
    with ts.cuda.interpreted():
        import cupy as cp

        with pytest.raises(ts.errors.UnsupportedOpError, match="ElementwiseKernel"):
            cp.ElementwiseKernel("T x", "T y", "y = x", "copy")
        with pytest.raises(ts.errors.ExecutionError, match="does not compile"):
            cp.RawKernel("int x = ;", "scale")((1,), (1,), ())
        with pytest.raises(ts.errors.ArgumentError, match="bytes"):  # a float of Python has 64 bits
            cp.RawKernel(SCALE, "scale")((1,), (1,), (cp.zeros(1, dtype=cp.float32), 3.0, 1))

"""Kernels that Triton compiled (ldmatrix and mma, wgmma, tensor maps, scans), against NumPy; debug finds nothing."""

import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from tessera.interp.target.ptx import PtxModule, TensorMap

HERE = Path(__file__).parent / "triton"
RNG = np.random.default_rng(0)


@pytest.fixture(params=[False, True], ids=["", "debug"])
def debug(request):
    return request.param


def launch(name, grid, args, debug):
    """Triton adds parameters of its own at the end."""
    text = (HERE / f"{name}.ptx").read_text()
    shared, threads = map(int, re.match(r"// shared (\d+) threads (\d+)", text).groups())
    module = PtxModule(text, f"{name}.ptx")
    ((entry, function),) = module.entries.items()
    args = [*args, *[0] * (len(function.params) - len(args))]
    module.launch(entry, grid=grid, block=threads, args=args, shared=shared, debug=debug)


@pytest.mark.parametrize(
    "name,dtype", [("matmul.sm_80", "f2"), ("matmul.sm_90", "f2"), ("fp8_matmul.sm_90", ml_dtypes.float8_e4m3fn)]
)
def test_matmul(name, dtype, debug):
    a, b = RNG.integers(-4, 5, (128, 192)).astype(dtype), RNG.integers(-4, 5, (192, 64)).astype(dtype)
    c = np.zeros((128, 64), "f4")
    launch(name, (2, 2 if "fp8" in name else 1), [a, b, c, 128, 64, 192], debug)
    assert (c == a.astype("f4") @ b.astype("f4")).all()


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_attention(arch, debug):
    q, k, v = RNG.standard_normal((3, 128, 32)).astype("f2")
    o = np.zeros_like(q)
    launch(f"attention.{arch}", 2, [q, k, v, o, 128, 0.25], debug)
    s = q.astype("f8") @ k.astype("f8").T * 0.25
    p = np.exp2(np.where(np.tri(128, dtype=bool), s, -np.inf))
    want = p @ v.astype("f8") / p.sum(1, keepdims=True)
    assert np.abs(o - want).max() < 4e-3


def test_tensor_maps(debug):
    a, b = RNG.integers(-4, 5, (128, 256)).astype("f2"), RNG.integers(-4, 5, (64, 256)).astype("f2")
    c = np.zeros((128, 64), "f2")
    args = []
    for x in (a, b, c):
        args += [TensorMap(x, (64, 64), 128), *x.shape, x.shape[1], 1]
    launch("tensor_matmul.sm_90", (2, 1), [*args, 256], debug)
    assert (c == (a.astype("f4") @ b.astype("f4").T).astype("f2")).all()


def test_maps_that_the_kernel_makes(debug):
    """Of an array of 50 rows and 100 columns; what lies outside is neither read nor written."""
    x, y, scratch = RNG.standard_normal((50, 128)).astype("f2"), np.zeros((50, 128), "f2"), np.zeros(4 * 256, "u1")
    launch("device_maps.sm_90", (2, 2), [x, y, 50, 100, 128, scratch], debug)
    assert (y[:, :100] == 2 * x[:, :100]).all() and not y[:, 100:].any()


def test_softmax(debug):
    x, y = RNG.standard_normal((6, 900)).astype("f4"), np.zeros((6, 900), "f4")
    launch("softmax.sm_90", 6, [x, y, 900], debug)
    e = np.exp(x.astype("f8"))
    assert np.abs(y - e / e.sum(1, keepdims=True)).max() < 1e-7


def test_scan_sort_and_histogram(debug):
    x, y, z = RNG.integers(0, 1000, 256).astype("i4"), np.zeros(256, "i4"), np.zeros(272, "i4")
    launch("scan_and_sort.sm_90", 1, [x, y, z, 256], debug)
    assert (y == np.cumsum(x)).all() and (z[:256] == np.sort(x)).all()
    assert (z[256:] == np.bincount(x % 16, minlength=16)).all()

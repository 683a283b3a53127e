"""Kernels with tensor cores, asynchronous copies and barriers, compiled by nvcc, against NumPy; debug finds nothing."""

from pathlib import Path

import numpy as np
import pytest

from tessera.interp.target.ptx import PtxModule

HERE = Path(__file__).parent / "cuda"
RNG = np.random.default_rng(0)


@pytest.fixture(scope="module", params=["sm_80", "sm_90"])
def kernels(request):
    return PtxModule((HERE / f"advanced.{request.param}.ptx").read_text())


@pytest.fixture(scope="module")
def hopper():
    return PtxModule((HERE / "advanced.sm_90.ptx").read_text())


@pytest.fixture(params=[False, True], ids=["", "debug"])
def debug(request):
    return request.param


def test_wmma(kernels, debug):
    a, b = RNG.integers(-4, 5, (32, 48)).astype("f2"), RNG.integers(-4, 5, (64, 48)).astype("f2")
    c = np.zeros((32, 64), "f4")
    kernels.launch("wmma_gemm", grid=(2, 2), block=64, args=[a, b, c, 32, 64, 48], debug=debug)
    assert (c == 2 * (a.astype("f4") @ b.astype("f4").T)).all()


def test_wmma_bytes(kernels, debug):
    a, b = RNG.integers(-128, 128, (16, 32), "i1"), RNG.integers(-128, 128, (16, 8), "i1")
    c = np.zeros((8, 32), "i4")
    kernels.launch("wmma_bytes", block=32, args=[a, b, c], debug=debug)
    assert (c == b.T.astype("i4") @ a.astype("i4") + 7).all()


def test_pipeline(kernels, debug):
    x = RNG.standard_normal((3, 5, 64, 4)).astype("f4")
    y = np.zeros_like(x)
    kernels.launch("pipelined_scale", grid=3, block=64, args=[x, y, 5], debug=debug)
    assert (y == 2 * x[:, :, ::-1]).all()


def test_warp_specialised_copy(kernels, debug):
    x = RNG.integers(0, 1000, (2, 7, 96)).astype("i4")
    y = np.zeros_like(x)
    kernels.launch("specialised_copy", grid=2, block=128, args=[x, y, 7], debug=debug)
    assert (y == x[:, :, ::-1] + np.arange(7)[:, None]).all()


def test_cluster(hopper, debug):
    x = RNG.integers(0, 1000, (4, 64)).astype("i4")
    y = np.zeros_like(x)
    hopper.launch("cluster_exchange", grid=4, block=64, args=[x, y], debug=debug)
    assert (y == x + 1000 * x[[1, 0, 3, 2], ::-1]).all()


def test_bulk_copy(hopper, debug):
    x = RNG.integers(0, 1000, (3, 256)).astype("i4")
    y = np.zeros_like(x)
    hopper.launch("bulk_reverse", grid=3, block=256, args=[x, y], debug=debug)
    assert (y == 3 * x[:, ::-1]).all()

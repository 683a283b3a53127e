"""Kernels compiled by nvcc, against NumPy."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from tessera.core.errors import OutOfBoundsError, ParseError, UnsupportedOpError
from tessera.interp.target.ptx import PtxModule

HERE = Path(__file__).parent / "cuda"


@pytest.fixture(scope="module", params=["sm_80", "sm_90"])
def kernels(request):
    return PtxModule((HERE / f"kernels.{request.param}.ptx").read_text())


def test_saxpy(kernels):
    x, y = np.random.default_rng(0).integers(-9, 9, (2, 1000)).astype("f4")
    want = 2 * x + y
    kernels.launch("saxpy", grid=4, block=256, args=[2.0, x, y, 1000])
    assert (y == want).all()


def test_out_of_bounds(kernels):
    x, y = np.ones(10, "f4"), np.ones(10, "f4")
    with pytest.raises(OutOfBoundsError, match="argument 1"):
        kernels.launch("saxpy", block=32, args=[2.0, x, y, 11])


def test_reduce(kernels):
    x, out = np.arange(1000, dtype="f4"), np.zeros(1, "f4")
    kernels.launch("reduce", grid=2, block=128, args=[x, out, 1000])
    assert out[0] == x.sum()


def test_scan(kernels):
    x = np.arange(512, dtype="i4")
    y = np.zeros_like(x)
    kernels.launch("scan", grid=2, block=256, args=[x, y], shared=1024)
    assert (y.reshape(2, 256) == x.reshape(2, 256).cumsum(1)).all()


def test_transpose(kernels):
    x = np.arange(40 * 23, dtype="f4").reshape(40, 23)
    y = np.zeros((23, 40), "f4")
    kernels.launch("transpose", grid=(2, 3), block=(16, 16), args=[x, y, 40, 23])
    assert (y == x.T).all()


def test_histogram(kernels):
    x, counts = np.random.default_rng(0).integers(0, 256, 3000, "u1"), np.zeros(256, "u4")
    kernels.launch("histogram", grid=3, block=256, args=[x, counts, 3000])
    assert (counts == np.bincount(x, minlength=256)).all()


def test_bitonic(kernels):
    x = np.random.default_rng(0).integers(-999, 999, (2, 256)).astype("i4")
    want = np.sort(x, 1)
    kernels.launch("bitonic", grid=2, block=256, args=[x])
    assert (x == want).all()


def test_gemm(kernels):
    a, b = np.random.default_rng(0).integers(-5, 5, (2, 32, 32)).astype("f4")
    c, d = np.zeros((2, 32, 32), "f4")
    kernels.launch("gemm_tiled", grid=(2, 2), block=(16, 16), args=[a, b, c, 32])
    kernels.launch("gemm_naive", grid=(2, 2), block=(16, 16), args=[a, b, d, 32, 32, 32])
    assert (c == a @ b).all() and (d == c).all()


def test_collatz(kernels):
    x, steps = np.array([1, 2, 3, 27], "u4"), np.zeros(4, "u4")
    kernels.launch("collatz", block=32, args=[x, steps, 4])
    assert steps.tolist() == [0, 1, 7, 111]


def test_stencil_and_calls(kernels):
    x, y = np.arange(100.0), np.zeros(100)
    kernels.launch("stencil", block=128, args=[x, y, 100])
    assert (y[1:-1] == x[1:-1]).all()
    p, q = np.arange(-50, 50), np.zeros(100, "i8")
    kernels.launch("calls", block=128, args=[p, q, 100])
    want = [_mix(int(v), i) - _mix(i, 7) for i, v in enumerate(p)]
    assert q.tolist() == want


def _mix(a, b):
    return a * b + int(np.fmod(a >> 3, b | 1))


def test_unsupported_names_instruction_and_line():
    text = ".version 8.0\n.target sm_80\n.address_size 64\n.entry k() {\n  tcgen05.wait::ld.sync.aligned;\n}"
    with pytest.raises(UnsupportedOpError, match=r":5:3.*no tcgen05.wait"):
        PtxModule(text).launch("k")


def test_parse_error_has_line_and_column():
    with pytest.raises(ParseError, match=r"<ptx>:2:1"):
        PtxModule(".version 8.0\n?")


def test_halves(kernels):
    x, y = np.random.default_rng(0).standard_normal((2, 128)).astype("f2")
    z = np.zeros_like(x)
    kernels.launch("half_math", block=128, args=[x, y, z, 128])
    assert (z == x * y + (x - y)).all()
    kernels.launch("half_pairs", block=64, args=[x, y, z])
    exact = x.astype("f8") * y.astype("f8") + np.maximum(x, y).astype("f8")
    assert (z == exact.astype("f2")).all()


def test_bfloat(kernels):
    x, y = np.random.default_rng(0).standard_normal((2, 100)).astype("f4")
    x = x.astype(ml_dtypes.bfloat16)
    z = np.zeros_like(x)
    kernels.launch("bfloat_math", block=128, args=[x, y, z, 100])
    assert (z == (x.astype("f4") * y).astype(ml_dtypes.bfloat16)).all()


def test_local_memory_and_constants(kernels):
    x, y = np.random.default_rng(0).integers(-9, 9, 64).astype("i4"), np.zeros(64, "i4")
    kernels.launch("local_table", block=64, args=[x, y, 64])
    weights = [1, -2, 3, -4, 5, -6, 7, -8]
    for i, v in enumerate(x.tolist()):
        table = [0] * 8
        for k in range(8):
            table[k * v & 7] = weights[k] * i + k
        assert y[i] == table[v & 7 & 64]


def test_votes(kernels):
    x, out = np.random.default_rng(0).integers(-3, 5, 64).astype("i4"), np.zeros(64, "u4")
    kernels.launch("votes", block=64, args=[x, out])
    for i, v in enumerate(x.tolist()):
        warp = x[i // 32 * 32 : i // 32 * 32 + 32].tolist()
        ballot = sum((w > 0) << k for k, w in enumerate(warp))
        same = sum((w == v) << k for k, w in enumerate(warp))
        u = v & 2**32 - 1
        counted = bin(u).count("1") ^ int(f"{i:032b}"[::-1], 2) ^ (32 - i.bit_length())
        parts = (i | u << 32).to_bytes(8, "little")
        mixed = sum(parts[n] << 8 * k for k, n in enumerate((1, 3, 5, 2)))
        assert out[i] == ballot ^ same ^ sum(warp) & 2**32 - 1 ^ (3 in warp) ^ counted ^ mixed

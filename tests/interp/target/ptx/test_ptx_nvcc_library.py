"""nvcc's library functions, rarer control flow and atomics, against NumPy and Python."""

from pathlib import Path

import numpy as np
import pytest

from tessera.core.errors import ExecutionError
from tessera.interp.target.ptx import PtxModule

HERE = Path(__file__).parent / "cuda"
RNG = np.random.default_rng(0)


@pytest.fixture(scope="module", params=["sm_80", "sm_90"])
def kernels(request):
    return PtxModule((HERE / f"library.{request.param}.ptx").read_text())


def ulps(got, want, dtype):
    return np.abs(got.astype("f8") - want) / np.spacing(np.abs(want).astype(dtype)).astype("f8")


ERF = [0.1124629160182849, 0.8427007929497149, 0.9953222650189527]


def test_float_functions(kernels):
    """Within the errors that the CUDA C++ manual states (at most 4 ulp here)."""
    x = np.concatenate([[0.1, 1, 2], RNG.uniform(0.05, 8, 61)]).astype("f4")
    out, v = np.zeros((12, 64), "f4"), x.astype("f8")
    kernels.launch("functions", block=64, args=[x, out, 64])
    want = [np.exp(v), np.log(v), np.sin(v), np.cos(v), np.tanh(v), None, v ** np.float64(np.float32(1.7))]
    want += [v / np.float64(np.float32(3.7)), np.sqrt(v), np.cbrt(v), np.arctan2(v, 2)]
    for k, w in enumerate(want):
        assert w is None or ulps(out[k], w, "f4").max() <= (0.5 if k in (7, 8) else 4), k
    assert np.allclose(out[5, :3], ERF, atol=2e-7)
    assert (out[11] == np.fmod(x, np.float32(0.7))).all()


def test_double_functions(kernels):
    x = RNG.uniform(0.05, 8, 64)
    out = np.zeros((8, 64))
    kernels.launch("doubles", block=64, args=[x, out, 64])
    want = [np.exp(x), np.log(x), np.sin(x), x / 3.7, np.sqrt(x), 1 / np.sqrt(x), x**1.7]
    for k, w in enumerate(want):
        assert ulps(out[k], w, "f8").max() <= (0.5 if k in (3, 4) else 3), k


def test_fast_functions(kernels):
    x = RNG.uniform(0.1, 3, 64).astype("f4")
    out, v = np.zeros((6, 64), "f4"), x.astype("f8")
    kernels.launch("fast", block=64, args=[x, out, 64])
    want = [np.exp(v), np.log(v), np.sin(v), v / 3.7, np.clip(v, 0, 1), 1 / np.sqrt(v)]
    assert np.abs(out - want).max() < 2e-5


def signed(v, width=32):
    return (v + (1 << width - 1)) % (1 << width) - (1 << width - 1)


def test_integers(kernels):
    x, y = RNG.integers(-(2**31), 2**31, (2, 64)).astype("i4")
    out = np.zeros((8, 64), "i4")
    kernels.launch("integers", block=64, args=[x, y, out, 64])
    for i, (a, b) in enumerate(zip(x.tolist(), y.tolist(), strict=True)):
        u, w = a & 2**32 - 1, b & 2**32 - 1
        assert out[0, i] == a * b >> 32
        assert out[1, i] == signed(((w << 32 | u) << (a & 31)) >> 32)
        assert out[3, i] == signed(abs(a - b) + 9)
        lowest = (a & -a).bit_length() if a else 0
        assert out[4, i] == lowest + 100 * bin(signed(a * b, 64) & 2**64 - 1).count("1")
        divisor = b >> 20 | 1
        assert out[5, i] == signed(abs(a * b) // abs(divisor) * (1 if (a * b < 0) == (divisor < 0) else -1))
        assert out[6, i] == u % 1000
    bytes_of = [v.view("i1").reshape(-1, 4).astype(int) for v in (x, y)]
    assert (out[2] == (bytes_of[0] * bytes_of[1]).sum(1) + 5).all()
    added = (x.view("u1") + y.view("u1")).view("i4")
    assert (out[7] == added ^ np.maximum(x.view("i2"), y.view("i2")).view("i4")).all()


def jump(v, i):
    r = v
    for k in range(i):
        r = signed(r * 3 + k)
    table = {0: v * 17 + 1, 1: v ^ 0x55, 2: r, 3: -v, 4: bin(i).count("1") << 4, 5: i // 3, 6: 1 << (i & 7)}
    table |= {7: (99 if i & 1 else v) + 5, 8: v + 5}
    return table.get(v, 1000 + i)


def test_indexed_branches(kernels):
    x, out = RNG.integers(0, 10, 64).astype("i4"), np.zeros(64, "i4")
    kernels.launch("jumps", block=64, args=[x, out])
    assert out.tolist() == [jump(v, i) for i, v in enumerate(x.tolist())]


def test_function_pointers(kernels):
    which, out = RNG.integers(0, 3, 64).astype("i4"), np.zeros(64, "i4")
    kernels.launch("pointers", block=64, args=[which, out])
    i = np.arange(1, 65)
    assert (out == np.choose(which, [2 * i, i * i, -i])).all()


def test_messages(kernels, capsys):
    kernels.launch("messages", block=2, args=[2])
    assert capsys.readouterr().out == (
        "thread 0 of 2:  0.00 text 1099511627776 x%\nthread 1 of 2:  1.50 text 1099511627776 x%\n"
    )
    with pytest.raises(ExecutionError, match=r"threadIdx.x < limit.*thread \(1,0,0\)"):
        kernels.launch("messages", block=2, args=[1])


def test_atomics(kernels):
    x, largest, total = RNG.standard_normal(64).astype("f4"), np.zeros(1, "f4"), np.zeros(1)
    count, bits, pair = np.zeros(6, "u4"), np.zeros(1, "u8"), np.zeros(2, "f2")
    kernels.launch("atomics", block=64, args=[x, largest, total, count, bits, pair])
    assert largest[0] == x.max() and abs(total[0] - x.astype("f8").sum()) < 1e-12
    assert count.view("i4").tolist() == [64, 2, 7, -2016, -63, 63]
    assert bits[0] == 2**64 - 1 and pair.tolist() == [64, 32]


def test_voting_barriers(kernels):
    x, out = RNG.integers(-9, 9, 100).astype("i4"), np.zeros(100, "i4")
    kernels.launch("signals", block=100, args=[x, out])
    assert (out == (x > 0).sum() * 4 + 2 + (x == 5).any()).all()


def test_uneven_warps(kernels):
    x, out = RNG.integers(0, 99, 96).astype("i4"), np.zeros(96, "i4")
    kernels.launch("uneven", block=96, args=[x, out])
    v, lane = x.reshape(3, 32).astype("i8"), np.arange(32)
    for w in range(3):
        for r in range(w + 1):
            v[w] += v[w, lane ^ (1 << r)]
        chosen = np.arange(32 * w, 32 * w + 32) % 3 == 0
        v[w, chosen] = v[w, chosen].max()
        v[w] += v[w, lane & 1]
    assert (out == v.reshape(-1)).all()

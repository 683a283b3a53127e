"""C++ as nvcc compiles it: cooperative groups, libcu++, structures, recursion, virtual functions, 128 bits, printf."""

from pathlib import Path

import numpy as np
import pytest

from tessera.interp.target.ptx import PtxModule

HERE = Path(__file__).parent / "cuda"
RNG = np.random.default_rng(0)
SHOWN = (  # by printf of glibc
    "[-37|  -37|-37  |-0037|-37|-37|-37][4294967259|37777777733|037777777733|ffffffdb|FFFFFFDB|0xffffffdb|FFFFFFDB]"
    "[-1234567890123|18446742839141661493|fffffee08e04fb35|-1234567890123|-37|-37|18446742839141661493]"
    "[2.718282|2.718|      2.72|2.72      |2.718282e+00|2.718282E+00|2.71828|2.71828|0x1.5bf0a8b1407d9p+1"
    "|0X1.5BF0A8B1407D9P+1][q|text|      text|text      |te|%|0x1234|    a|b    ][     -37|2.72|2.71828|+2.72e+00"
    "|inf|-inf]\n"
)


@pytest.fixture(params=["sm_80", "sm_90"])
def kernels(request):
    return PtxModule((HERE / f"language.{request.param}.ptx").read_text())


@pytest.fixture(params=[False, True], ids=["", "debug"])
def debug(request):
    return request.param


def test_groups(kernels, debug):
    x, out = RNG.integers(-9, 9, 777).astype("f4"), np.zeros(1, "f4")
    kernels.launch("group_reduce", block=128, args=[x, out, 777], debug=debug)
    assert out[0] == x.sum()
    x = RNG.integers(-9, 99, 64).astype("i4")
    y, z = np.zeros((2, 64), "i4")
    kernels.launch("group_scan", block=64, args=[x, y, z], debug=debug)
    warps = x.reshape(2, 32)
    assert (y.reshape(2, 32) == warps.cumsum(1)).all()
    assert (z.reshape(2, 32)[:, 1:] == np.maximum.accumulate(warps, 1)[:, :-1]).all()


def test_groups_of_lanes_that_took_a_branch(kernels, debug):
    x, y, count = RNG.integers(-9, 9, 128).astype("i4"), np.zeros(128, "i4"), np.zeros(1, "i4")
    kernels.launch("compact", block=128, args=[x, y, count], debug=debug)
    assert count[0] == (x > 0).sum() and sorted(y[: count[0]]) == sorted(x[x > 0])


def test_copies_of_groups(kernels, debug):
    x, y = RNG.integers(0, 99, 512).astype("i4"), np.zeros(512, "i4")
    kernels.launch("group_copy", grid=2, block=256, args=[x, y], debug=debug)
    assert (y.reshape(2, 256) == x.reshape(2, 256)[:, ::-1]).all()


def test_library(kernels, debug):
    x, y, i = RNG.standard_normal(64).astype("f4"), np.zeros((4, 64), "f4"), np.arange(64)
    kernels.launch("library", block=64, args=[x, y, 64], debug=debug)
    c = (x.astype("c16") + 1.5j) ** 2 / (2 - 1j)
    assert np.allclose(y[:3], [3 * x + 7 + np.where(i & 1, i, -7), c.real, c.imag], rtol=1e-5, atol=1e-5)
    assert y[3].tolist() == [
        bin(k * 2654435761 & 2**32 - 1).count("1") + 100 * (32 - k.bit_length()) for k in range(64)
    ]


def test_structures(kernels, debug):
    fields = {
        "names": ["c", "d", "s", "v"],
        "formats": [("i1", 8), "f8", ("i2", 8), ("f4", 4)],
        "offsets": [0, 8, 16, 32],
    }
    record = np.dtype({**fields, "itemsize": 48})
    a, b = np.array(
        [([7] * 8, 1.5, [1, 2, 3] + [5] * 5, [1, 2, 3, 4]), ([0] * 8, 100, [10, 20, 30] + [0] * 5, [9, 8, 7, 6])],
        record,
    )
    out = np.zeros(6, record)
    kernels.launch("structures", block=6, args=[a, out, b], debug=debug)
    assert (out["c"] == 7).all() and out["d"].tolist() == [101.5 + i for i in range(6)]
    assert (out["v"] == [1, 2, 6, 4]).all()
    assert out["s"][:, :3].tolist() == [[20, 2, 3], [1, 30, 3], [1, 2, 10]] * 2


def test_functions(kernels, debug):
    out, areas = np.zeros(10, "i4"), np.zeros(10, "f4")
    kernels.launch("recursion", block=10, args=[out], debug=debug)
    assert out.tolist() == [0, 1, 1, 2, 3, 5, 8, 13, 21, 34]
    kernels.launch("virtuals", block=10, args=[areas], debug=debug)
    assert areas.tolist() == [i * i * (1 if i & 1 else 3) for i in range(10)]
    kernels.launch("as_needed", block=10, args=[out, 4], debug=debug)
    assert out.tolist() == [3 * sum(range(4 + i)) for i in range(10)]


def test_globals_keep_their_values_from_launch_to_launch(kernels):
    out, f, s = np.zeros(8, "i4"), np.zeros(8, "f4"), np.zeros(8, "u1")
    for launch in (1, 2):
        kernels.launch("globals", block=8, args=[out, f, s])
        assert (out == 36 * launch).all()
    assert f.tolist() == [2, 4, 0, 0] * 2 and bytes(s) == b"acbdacbd"


def test_integers_of_128_bits(kernels, debug):
    x, y = RNG.integers(0, 2**63, 128).astype("u8"), np.zeros(128, "u8")
    kernels.launch("wide", block=64, args=[x, y], debug=debug)
    for (high, low), got in zip(x.reshape(-1, 2).tolist(), y.reshape(-1, 2).tolist(), strict=True):
        a = high << 64 | low
        b = (a * (a >> 3) + a // 12345) % 2**128 ^ a % 987654321987
        assert got[0] << 64 | got[1] == b


def test_printf(kernels, capsys):
    kernels.launch("prints", args=[-37, -1234567890123, 2.71828182845])
    assert capsys.readouterr().out == SHOWN

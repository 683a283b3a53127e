"""Conversions: rational arithmetic for the floats, ml_dtypes for the 8-bit ones, Python's integers for the rest."""

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from ptx_exact_rounding import DTYPES, rounded
from ptx_snippets import bits, one, same

INTS = {"u8": "u1", "s8": "i1", "u16": "u2", "s16": "i2", "u32": "u4", "s32": "i4", "u64": "u8", "s64": "i8"}


@pytest.mark.parametrize("source", INTS)
@pytest.mark.parametrize("out", INTS)
def test_between_integers(source, out):
    a, limits = bits(INTS[source], 200), np.iinfo(INTS[out])
    width = max(int(out[1:]), 16)
    raw = f"u{width // 8}"
    got = one(f"cvt.{out}.{source} %d, %a;", a, out=raw)
    assert (got == a.astype(INTS[out]).astype(f"{INTS[out][0]}{width // 8}").view(raw)).all()
    have = np.iinfo(INTS[source])
    if have.min < limits.min or have.max > limits.max:  # ptxas takes .sat only where it can matter
        want = [max(limits.min, min(limits.max, int(x))) & (1 << width) - 1 for x in a]
        assert one(f"cvt.sat.{out}.{source} %d, %a;", a, out=raw).tolist() == want


ROUND = {"rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}


@pytest.mark.parametrize("mode", ROUND)
@pytest.mark.parametrize("source", ["f16", "f32", "f64", "bf16"])
@pytest.mark.parametrize("out", ["s16", "u16", "s32", "u32", "s64", "u64"])
def test_float_to_integer(source, out, mode):
    x = np.array([0, -0.5, 0.5, 1.5, 2.5, -2.5, 1e3, -6e4, 3e9, 1e19, -1e19, np.inf, -np.inf, 126.7])
    with np.errstate(over="ignore"):
        x = x.astype(DTYPES[source])
    limits, width = np.iinfo(INTS[out]), max(int(out[1:]), 16)
    got = one(f"cvt.{mode}.{out}.{source} %d, %a;", x, out=f"u{width // 8}")
    for v, g in zip(x.astype("f8"), got, strict=False):
        whole = ROUND[mode](float(v)) if math.isfinite(v) else (limits.max if v > 0 else limits.min)
        assert g == max(limits.min, min(limits.max, whole)) & (1 << width) - 1, v
    nan = int(
        one(f"cvt.{mode}.{out}.{source} %d, %a;", np.array([np.nan]).astype(DTYPES[source]), out=f"u{width // 8}")[0]
    )
    top = 1 << int(out[1:]) - 1
    assert nan == ((top if out[0] == "u" else -top & (1 << width) - 1) if "64" in source + out else 0)


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize("out", ["f16", "bf16", "f32", "f64"])
@pytest.mark.parametrize("source", ["s16", "u32", "s64", "u64"])
def test_integer_to_float(source, out, mode):
    a = bits(INTS[source], 200)
    got = one(f"cvt.{mode}.{out}.{source} %d, %a;", a, out=DTYPES[out])
    for x, g in zip(a, got, strict=False):
        assert x == 0 or float(g) == rounded(Fraction(int(x)), DTYPES[out], mode), x


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize("pair", ["f32.f64", "f16.f32", "bf16.f32", "f16.f64", "bf16.f64"])
def test_narrowing(pair, mode):
    out, source = pair.split(".")
    rng = np.random.default_rng(0)
    x = (rng.standard_normal(300) * 2.0 ** rng.integers(-30, 20, 300)).astype(DTYPES[source])
    x[:4] = [65519, 65520, 2.0**-25, -(2.0**-24) * 1.5]
    for v, g in zip(x, one(f"cvt.{mode}.{out}.{source} %d, %a;", x, out=DTYPES[out]), strict=False):
        assert float(g) == rounded(Fraction(float(v)), DTYPES[out], mode), v


def test_widening_and_rounding_to_whole_numbers():
    h = bits("f2", 300)
    h = h[~np.isnan(h)]
    same(one("cvt.f32.f16 %d, %a;", h, out="f4"), h.astype("f4"))
    x = np.array([0.5, 1.5, -2.5, 2.7, -0.2], "f4")
    for mode, f in {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}.items():
        same(one(f"cvt.{mode}.f32.f32 %d, %a;", x, out="f4"), f(x))
    same(one("cvt.sat.f32.f32 %d, %a;", np.array([-1, 0.5, 7, np.nan], "f4"), out="f4"), np.array([0, 0.5, 1, 0], "f4"))
    same(one("cvt.ftz.f32.f32 %d, %a;", np.array([1e-40, 2], "f4"), out="f4"), np.array([0, 2], "f4"))


def test_nan_payloads():
    """Doubles and bf16 keep what fits of a NaN, quiet where a double takes part; elsewhere it is the hardware's one."""
    double, single = np.array([0xFFF0_4000_0000_0001], "u8"), np.array([0xFF80_2001], "u4")
    wanted = {"rn.f32.f64": 0xFFC2_0000, "rn.f16.f64": 0xFE10, "rn.bf16.f64": 0xFFC2}
    for kind, want in wanted.items():
        size = int(kind.split(".")[1].lstrip("bf")) // 8
        assert one(f"cvt.{kind} %d, %a;", double, out=f"u{size}")[0] == want, kind
    assert one("cvt.f64.f32 %d, %a;", single, out="u8")[0] == 0xFFF8_0400_2000_0000
    assert one("cvt.f32.bf16 %d, %a;", np.array([0xFF81], "u2"), out="u4")[0] == 0xFF81_0000
    assert one("cvt.f32.f32 %d, %a;", single, out="u4")[0] == single[0]
    assert one("cvt.rn.f16.f32 %d, %a;", single, out="u2")[0] == 0x7FFF
    assert one("cvt.f16.f16 %d, %a;", np.array([0xFC01], "u2"), out="u2")[0] == 0x7FFF
    assert one("cvt.rn.tf32.f32 %d, %a;", single, out="u4")[0] == 0x7FFF_E000
    assert one("cvt.rna.tf32.f32 %d, %a;", single, out="u4")[0] == 0xFF80_2000


def test_tf32():
    largest = np.finfo("f4").max * np.array([1, -1], "f4")
    assert one("cvt.rna.satfinite.tf32.f32 %d, %a;", largest, out="u4").tolist() == [0x7F7FE000, 0xFF7FE000]
    x = np.array([1 + 2**-11, 1 + 2**-10 + 2**-11, 1 + 2**-12, -1 - 2**-11, 3.7], "f4")
    step = 2.0**-10
    got = one("cvt.rna.tf32.f32 %d, %a;", x, out="f4")
    assert got.tolist()[:4] == [1 + step, 1 + 2 * step, 1, -1 - step]
    assert one("cvt.rn.tf32.f32 %d, %a;", x, out="f4").tolist()[:4] == [1, 1 + 2 * step, 1, -1]


FP8 = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}


@pytest.mark.parametrize("t", FP8)
def test_fp8(t):
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((2, 500)) * 2.0 ** rng.integers(-12, 10, (2, 500))).astype("f4")
    largest = float(ml_dtypes.finfo(FP8[t]).max)
    got = one(f"cvt.rn.satfinite.{t}x2.f32 %d, %a, %b;", a, b, out="u2").view(FP8[t]).reshape(-1, 2)
    for column, x in ((1, a), (0, b)):
        same(got[:, column].view("u1"), np.clip(x, -largest, largest).astype(FP8[t]).view("u1"))
    every = np.arange(256, dtype="u1")
    back = one(f"cvt.rn.f16x2.{t}x2 %d, %a;", every.view("u2"), out="u4").view("f2")
    same(back, every.view(FP8[t]).astype("f2"))
    nan = one(f"cvt.rn.satfinite.{t}x2.f32 %d, %a, %a;", np.array([np.nan, np.inf], "f4"), out="u2")
    top = int(np.array(largest).astype(FP8[t]).view("u1"))
    assert nan.tolist() == [0x7F7F, top * 257]


def test_packed_halves():
    a, b = np.array([1, -2, 1e6], "f4"), np.array([0.1, 3, -1e9], "f4")
    for t, dtype in (("f16x2", np.float16), ("bf16x2", ml_dtypes.bfloat16)):
        with np.errstate(over="ignore"):
            want = np.stack([b, a], 1).astype(dtype)
        same(one(f"cvt.rn.{t}.f32 %d, %a, %b;", a, b, out="u4"), want.view("u4").reshape(-1))
        same(one(f"cvt.rn.relu.{t}.f32 %d, %a, %b;", a, b, out="u4"), np.maximum(want, dtype(0)).view("u4").reshape(-1))


def test_packed_integers():
    a, b, c = np.array([70000, -5, 200], "i4"), np.array([1, -70000, -200], "i4"), np.array([1, 2, 3], "u4")
    got = one("cvt.pack.sat.s16.s32 %d, %a, %b;", a, b, out="u4").view("i2").reshape(-1, 2)
    assert got.tolist() == [[1, 32767], [-32768, -5], [-200, 200]]
    got = one("cvt.pack.sat.u8.s32.b32 %d, %a, %b, %c;", a, b, c, out="u4").view("u1").reshape(-1, 4)
    assert got.tolist() == [[1, 255, 1, 0], [0, 0, 2, 0], [0, 200, 3, 0]]

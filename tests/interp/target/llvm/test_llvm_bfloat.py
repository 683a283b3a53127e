"""bfloat, which few processors compute natively: against double arithmetic rounded once."""

import ml_dtypes
import numpy as np
import pytest

from tessera.interp.target.fma import round_to_format
from tessera.interp.target.llvm import LlvmModule

BF16 = np.dtype(ml_dtypes.bfloat16)
MATH = {"fadd": np.add, "fsub": np.subtract, "fmul": np.multiply, "fdiv": np.divide}


def run(body, dtype, *arrays):
    out = np.zeros(64, dtype)
    LlvmModule(f"define void @f(ptr %a, ptr %b, ptr %o) {{\n{body}\n ret void }}").call("f", [*arrays, out])
    return out


RNG = np.random.default_rng(5)


def sample():
    return (RNG.normal(size=64) * 2.0 ** RNG.integers(-30, 30, 64)).astype(BF16)


@pytest.mark.parametrize("op", MATH)
def test_arithmetic(op):
    a, b = sample(), sample()[::-1].copy()
    text = f"""%x = load <64 x bfloat>, ptr %a
  %y = load <64 x bfloat>, ptr %b
  %z = {op} <64 x bfloat> %x, %y
  store <64 x bfloat> %z, ptr %o"""
    want = round_to_format(MATH[op](a.astype("f8"), b.astype("f8")), BF16)
    assert (run(text, BF16, a, b).view("u2") == want.view("u2")).all()


@pytest.mark.parametrize("op,source,dtype,step", [
    ("fptrunc", "double", "f8", 1.0), ("fptrunc", "float", "f4", 2.0**40),
    ("sitofp", "i64", "i8", 1), ("uitofp", "i64", "u8", 1),
])  # fmt: skip
def test_conversion_rounds_once(op, source, dtype, step):
    # Just below, at and just above the middle between two values of eight bits.
    low, middle, high = (n << 52 if isinstance(step, int) else n * 2.0**44 for n in (0x180, 0x181, 0x182))
    a = np.array([middle - step, middle, middle + step] * 22, dtype)[:64]
    text = f"""%x = load <64 x {source}>, ptr %a
  %z = {op} <64 x {source}> %x to <64 x bfloat>
  store <64 x bfloat> %z, ptr %o"""
    assert run(text, BF16, a, a).astype("f8")[:3].tolist() == [low, low, high]


def test_widen():
    a = sample()
    text = """%x = load <64 x bfloat>, ptr %a
  %z = fpext <64 x bfloat> %x to <64 x float>
  store <64 x float> %z, ptr %o"""
    assert (run(text, "f4", a, a) == a.astype("f4")).all()

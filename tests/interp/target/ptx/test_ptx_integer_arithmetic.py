"""Integer instructions against Python's integers."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ptx_snippets import bits, one, same

TYPES = ["u16", "s16", "u32", "s32", "u64", "s64"]


def dtype_of(t):
    return np.dtype(("i" if t[0] == "s" else "u") + str(int(t[1:]) // 8))


def wrapped(values, dtype):
    width = 8 * np.dtype(dtype).itemsize
    return np.array([int(v) & (1 << width) - 1 for v in values], f"u{width // 8}").view(dtype)


def clamp(v, dtype):
    return max(np.iinfo(dtype).min, min(np.iinfo(dtype).max, v))


def truncated(a, b):
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


BINARY = {
    "add.{t}": lambda a, b, w: a + b,
    "sub.{t}": lambda a, b, w: a - b,
    "mul.lo.{t}": lambda a, b, w: a * b,
    "mul.hi.{t}": lambda a, b, w: a * b >> w,
    "min.{t}": lambda a, b, w: min(a, b),
    "max.{t}": lambda a, b, w: max(a, b),
    "div.{t}": lambda a, b, w: truncated(a, b) if b else -1,
    "rem.{t}": lambda a, b, w: a - b * truncated(a, b) if b else -1,
}


@pytest.mark.parametrize("t", TYPES)
@pytest.mark.parametrize("op", BINARY)
def test_binary(op, t):
    dtype = dtype_of(t)
    a, b = bits(dtype), bits(dtype, seed=1)
    got = one(f"{op.format(t=t)} %d, %a, %b;", a, b, out=dtype)
    same(got, wrapped([BINARY[op](int(x), int(y), 8 * dtype.itemsize) for x, y in zip(a, b, strict=False)], dtype))


@pytest.mark.parametrize("t", ["u16", "s16", "u32", "s32"])
def test_wide(t):
    dtype = dtype_of(t)
    out = np.dtype(f"{dtype.kind}{2 * dtype.itemsize}")
    a, b, c = bits(dtype), bits(dtype, seed=1), bits(out, seed=2)
    same(
        one(f"mul.wide.{t} %d, %a, %b;", a, b, out=out),
        wrapped([int(x) * int(y) for x, y in zip(a, b, strict=False)], out),
    )
    want = wrapped([int(x) * int(y) + int(z) for x, y, z in zip(a, b, c, strict=False)], out)
    same(one(f"mad.wide.{t} %d, %a, %b, %c;", a, b, c, out=out), want)


@pytest.mark.parametrize("t", TYPES)
def test_mad_and_sad(t):
    dtype = dtype_of(t)
    w, (a, b, c) = 8 * dtype.itemsize, (bits(dtype, seed=s) for s in range(3))
    rows = [tuple(map(int, row)) for row in zip(a, b, c, strict=False)]
    same(one(f"mad.lo.{t} %d, %a, %b, %c;", a, b, c, out=dtype), wrapped([x * y + z for x, y, z in rows], dtype))
    same(one(f"mad.hi.{t} %d, %a, %b, %c;", a, b, c, out=dtype), wrapped([(x * y >> w) + z for x, y, z in rows], dtype))
    same(one(f"sad.{t} %d, %a, %b, %c;", a, b, c, out=dtype), wrapped([abs(x - y) + z for x, y, z in rows], dtype))


@pytest.mark.parametrize("t", ["u32", "s32"])
def test_24_bits(t):
    dtype = dtype_of(t)
    a, b, c = (bits(dtype, seed=s) for s in range(3))
    half = 1 << 23 if t == "s32" else 0
    rows = [
        (((int(x) + half) % 2**24 - half) * ((int(y) + half) % 2**24 - half), int(z))
        for x, y, z in zip(a, b, c, strict=False)
    ]
    same(one(f"mul24.lo.{t} %d, %a, %b;", a, b, out=dtype), wrapped([p for p, _ in rows], dtype))
    same(one(f"mul24.hi.{t} %d, %a, %b;", a, b, out=dtype), wrapped([p >> 16 for p, _ in rows], dtype))
    same(one(f"mad24.lo.{t} %d, %a, %b, %c;", a, b, c, out=dtype), wrapped([p + z for p, z in rows], dtype))
    same(one(f"mad24.hi.{t} %d, %a, %b, %c;", a, b, c, out=dtype), wrapped([(p >> 16) + z for p, z in rows], dtype))


def test_saturation():
    a, b, c = (bits("i4", seed=s) for s in range(3))
    rows = [tuple(map(int, row)) for row in zip(a, b, c, strict=False)]
    same(one("add.sat.s32 %d, %a, %b;", a, b, out="i4"), np.array([clamp(x + y, "i4") for x, y, _ in rows]))
    same(one("sub.sat.s32 %d, %a, %b;", a, b, out="i4"), np.array([clamp(x - y, "i4") for x, y, _ in rows]))
    want = np.array([clamp((x * y >> 32) + z, "i4") for x, y, z in rows])
    same(one("mad.hi.sat.s32 %d, %a, %b, %c;", a, b, c, out="i4"), want)


U128 = st.integers(0, 2**128 - 1)


def words(x, width=32):
    return [np.array([x >> width * k & 2**width - 1], f"u{width // 8}") for k in range(128 // width)]


@settings(max_examples=25, deadline=None)
@given(U128, U128)
def test_carry_chain(x, y):
    """128-bit sums and differences, four words at a time."""
    operands = [*words(x), *words(y)]
    names = "abcefghj"
    for op in ("add", "sub"):
        chain = [
            f"{op}{'c' if k else ''}{'.cc' if k < 3 else ''}.u32 %s{k}, %{names[k]}, %{names[4 + k]};" for k in range(4)
        ]
        want = words(x + y if op == "add" else x - y)
        for k in range(4):
            same(one(" ".join(chain) + f"mov.b32 %d, %s{k};", *operands, out="u4"), want[k])


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1), U128)
def test_multiply_chain(x, y, z):
    """A product of 64-bit numbers and a sum, with carries between its halves."""
    (a, b), c = ([np.array([v], "u8") for v in (x, y)], words(z, 64))
    lines = "mad.lo.cc.u64 %l0, %a, %b, %c; madc.hi.u64 %l1, %a, %b, %e;"
    want = words(x * y + z, 64)
    same(one(f"{lines} mov.b64 %d, %l0;", a, b, *c, out="u8"), want[0])
    same(one(f"{lines} mov.b64 %d, %l1;", a, b, *c, out="u8"), want[1])


@pytest.mark.parametrize("kinds", ["u32.u32", "s32.s32", "s32.u32", "u32.s32"])
def test_dot_of_bytes(kinds):
    a, b, c = bits("u4"), bits("u4", seed=1), bits("i4", seed=2)
    x, y = (
        v.view("i1" if k == "s32" else "u1").reshape(-1, 4).astype(int)
        for v, k in zip((a, b), kinds.split("."), strict=False)
    )
    want = wrapped((x * y).sum(1) + c.astype(int), "i4")
    same(one(f"dp4a.{kinds} %d, %a, %b, %c;", a, b, c, out="i4"), want)
    pairs = a.view("i2" if kinds[0] == "s" else "u2").reshape(-1, 2).astype(int)
    want = wrapped((pairs * y[:, 2:]).sum(1) + c.astype(int), "i4")
    same(one(f"dp2a.hi.{kinds} %d, %a, %b, %c;", a, b, c, out="i4"), want)


@pytest.mark.parametrize("t", ["s16", "s32", "s64"])
def test_signs(t):
    a = bits(dtype_of(t))
    same(one(f"abs.{t} %d, %a;", a, out=a.dtype), wrapped([abs(int(x)) for x in a], a.dtype))
    same(one(f"neg.{t} %d, %a;", a, out=a.dtype), wrapped([-int(x) for x in a], a.dtype))


def test_pairs():
    a, b = bits("u4"), bits("u4", seed=1)
    x, y = a.view("i2"), b.view("i2")
    same(one("add.s16x2 %d, %a, %b;", a, b, out="u4"), (x + y).view("u4"))
    same(one("max.s16x2 %d, %a, %b;", a, b, out="u4"), np.maximum(x, y).view("u4"))
    same(one("min.u16x2 %d, %a, %b;", a, b, out="u4"), np.minimum(a.view("u2"), b.view("u2")).view("u4"))


def test_the_carry_of_a_subtraction_is_one_where_nothing_is_borrowed():
    """As the hardware's, and as nvcc's division of 128 bits reads it by an addition."""
    a, b = np.array([5, 4, 0, 7], "u4"), np.array([4, 5, 0, 2**32 - 1], "u4")
    got = one("sub.cc.u32 %s0, %a, %b; addc.u32 %d, 0, 0;", a, b, out="u4")
    assert got.tolist() == [1, 0, 1, 0]
    got = one("add.cc.u32 %s0, %a, %b; subc.u32 %d, 10, 0;", a, b, out="u4")
    assert got.tolist() == [9, 9, 9, 10]


@pytest.mark.parametrize("part,least,most", [("u4", 0, 15), ("s4", -8, 7), ("u2", 0, 3), ("s2", -2, 1), ("u8", 0, 255)])
def test_packs(part, least, most):
    a, b, c = bits("i4"), bits("i4", seed=1), bits("u4", seed=2)
    width = int(part[1:])
    x, y = (np.clip(v, least, most).astype("u4") & np.uint32((1 << width) - 1) for v in (a, b))
    same(one(f"cvt.pack.sat.{part}.s32.b32 %d, %a, %b, %c;", a, b, c, out="u4"), c << 2 * width | x << width | y)

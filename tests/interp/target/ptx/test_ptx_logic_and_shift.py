"""Logic, shift and bit-field instructions against Python's integers."""

import numpy as np
import pytest
from ptx_snippets import bits, one, same

U32 = 2**32 - 1


@pytest.mark.parametrize("width", [16, 32, 64])
def test_logic(width):
    a, b = bits(f"u{width // 8}"), bits(f"u{width // 8}", seed=1)
    for op, want in {"and": a & b, "or": a | b, "xor": a ^ b}.items():
        same(one(f"{op}.b{width} %d, %a, %b;", a, b, out=a.dtype), want)
    same(one(f"not.b{width} %d, %a;", a, out=a.dtype), ~a)
    same(one(f"cnot.b{width} %d, %a;", a, out=a.dtype), (a == 0).astype(a.dtype))


@pytest.mark.parametrize("width", [16, 32, 64])
def test_shifts(width):
    a, n = bits(f"i{width // 8}"), bits("u4", seed=1)
    mask = 2**width - 1
    left = [(int(x) << min(int(k), width)) & mask for x, k in zip(a, n, strict=False)]
    same(one(f"shl.b{width} %d, %a, %b;", a, n, out=f"u{width // 8}"), np.array(left, f"u{width // 8}"))
    same(
        one(f"shr.s{width} %d, %a, %b;", a, n, out=a.dtype),
        np.array([int(x) >> min(int(k), width) for x, k in zip(a, n, strict=False)], a.dtype),
    )
    right = [(int(x) & mask) >> min(int(k), width) for x, k in zip(a, n, strict=False)]
    same(one(f"shr.u{width} %d, %a, %b;", a, n, out=f"u{width // 8}"), np.array(right, f"u{width // 8}"))


@pytest.mark.parametrize("mode", ["clamp", "wrap"])
def test_funnel(mode):
    a, b, n = (bits("u4", seed=s) for s in range(3))
    by = [int(k) & 31 if mode == "wrap" else min(int(k), 32) for k in n]
    both = [int(x) | int(y) << 32 for x, y in zip(a, b, strict=False)]
    want = np.array([v << k >> 32 & U32 for v, k in zip(both, by, strict=False)], "u4")
    same(one(f"shf.l.{mode}.b32 %d, %a, %b, %c;", a, b, n, out="u4"), want)
    want = np.array([v >> k & U32 for v, k in zip(both, by, strict=False)], "u4")
    same(one(f"shf.r.{mode}.b32 %d, %a, %b, %c;", a, b, n, out="u4"), want)


@pytest.mark.parametrize("table", [0x80, 0x96, 0xE8, 0xCA, 0x00, 0xFF, 0x1B])
def test_lop3(table):
    a, b, c = (bits("u4", seed=s) for s in range(3))
    place = [np.unpackbits(v.view("u1")) for v in (a, b, c)]
    want = np.packbits(table >> (4 * place[0] + 2 * place[1] + place[2]) & 1).view("u4")
    same(one(f"lop3.b32 %d, %a, %b, %c, {table};", a, b, c, out="u4"), want)


def extracted(a, start, length, width, signed):
    """As the ISA's own program text has it, bit by bit."""
    top = width - 1
    sign = a >> min(start + length - 1, top) & 1 if signed and length else 0
    start = min(start, width)
    return sum((a >> start + i & 1 if i < length and start + i <= top else sign) << i for i in range(width))


FIELD = {32: 255, 64: U32}  # bits of positions and lengths that count: all in the 64-bit forms


@pytest.mark.parametrize("t", ["u32", "s32", "u64", "s64"])
def test_bfe(t):
    width = int(t[1:])
    a, start, length = bits(f"u{width // 8}"), bits("u4", seed=1), bits("u4", seed=2)
    want = [
        extracted(int(x), int(s) & FIELD[width], int(n) & FIELD[width], width, t[0] == "s")
        for x, s, n in zip(a, start, length, strict=False)
    ]
    same(one(f"bfe.{t} %d, %a, %b, %c;", a, start, length, out=a.dtype), np.array(want, a.dtype))


@pytest.mark.parametrize("width", [32, 64])
def test_bfi(width):
    a, b = bits(f"u{width // 8}"), bits(f"u{width // 8}", seed=1)
    start, length, field = bits("u4", seed=2), bits("u4", seed=3), FIELD[width]
    want = []
    for x, y, s, n in zip(*(map(int, v) for v in (a, b, start & field, length & field)), strict=False):
        s, n = min(s, width), min(n, width)
        mask = ((1 << n) - 1) << s & (1 << width) - 1
        want.append(y & ~mask | x << s & mask)
    same(one(f"bfi.b{width} %d, %a, %b, %c, %e;", a, b, start, length, out=a.dtype), np.array(want, a.dtype))


@pytest.mark.parametrize("width", [32, 64])
def test_counting(width):
    a = bits(f"u{width // 8}")
    same(one(f"popc.b{width} %d, %a;", a, out="u4"), np.array([bin(int(x)).count("1") for x in a], "u4"))
    same(one(f"clz.b{width} %d, %a;", a, out="u4"), np.array([width - int(x).bit_length() for x in a], "u4"))
    want = [int(f"{int(x):0{width}b}"[::-1], 2) for x in a]
    same(one(f"brev.b{width} %d, %a;", a, out=a.dtype), np.array(want, a.dtype))


@pytest.mark.parametrize("t", ["u32", "s32", "u64", "s64"])
def test_bfind(t):
    width = int(t[1:])
    a = bits(("i" if t[0] == "s" else "u") + str(width // 8))
    highest = [(~int(x) if x < 0 else int(x)).bit_length() - 1 for x in a]
    same(one(f"bfind.{t} %d, %a;", a, out="u4"), np.array([h & U32 for h in highest], "u4"))
    want = np.array([(width - 1 - h if h >= 0 else U32) for h in highest], "u4")
    same(one(f"bfind.shiftamt.{t} %d, %a;", a, out="u4"), want)


def test_prmt():
    a, b, c = (bits("u4", seed=s) for s in range(3))
    rows = np.concatenate([a.view("u1").reshape(-1, 4), b.view("u1").reshape(-1, 4)], 1)
    nibbles = np.stack([c >> 4 * k & 15 for k in range(4)], 1)
    picked = np.take_along_axis(rows, (nibbles & 7).astype(int), 1)
    want = np.where(nibbles & 8, np.where(picked & 128, 255, 0), picked).astype("u1")
    same(one("prmt.b32 %d, %a, %b, %c;", a, b, c, out="u4"), want.view("u4").reshape(-1))


MODES = {
    "f4e": 0x55443322,
    "b4e": 0x77881122,
    "rc8": 0x22222222,
    "ecl": 0x44332222,
    "ecr": 0x22222211,
    "rc16": 0x44334433,
}


@pytest.mark.parametrize("mode", MODES)
def test_prmt_modes(mode):
    a, b, c = np.array([0x44332211], "u4"), np.array([0x88776655], "u4"), np.array([1], "u4")
    assert one(f"prmt.b32.{mode} %d, %a, %b, %c;", a, b, c, out="u4")[0] == MODES[mode]


def test_fns_and_masks():
    a, base, n = (
        np.array([0b10110, 0b10110, 0b10110, 0], "u4"),
        np.array([0, 2, 31, 0], "u4"),
        np.array([2, 2, -1, 1], "i4"),
    )
    same(one("fns.b32 %d, %a, %b, %c;", a, base, n, out="u4"), np.array([2, 4, 4, U32], "u4"))
    start, many = np.array([0, 4, 31, 30], "u4"), np.array([32, 3, 5, 1], "u4")
    same(one("bmsk.clamp.b32 %d, %a, %b;", start, many, out="u4"), np.array([U32, 0x70, 1 << 31, 1 << 30], "u4"))
    value, place = np.array([0xFF, 0x7F, 0x80, 5], "u4"), np.array([8, 8, 8, 0], "u4")
    same(one("szext.clamp.s32 %d, %a, %b;", value, place, out="u4"), np.array([U32, 127, U32 - 127, 0], "u4"))


@pytest.mark.parametrize("combine", ["and", "or"])
def test_lop3_with_a_predicate(combine):
    a, b = bits("u4"), np.resize([0, 1, 5], 512).astype("u4")
    lines = f"setp.eq.u32 %q, %b, 1; lop3.{combine}.b32 %s0|%p, %a, %b, %b, 0xC0, %q; selp.u32 %d, 1, 0, %p;"
    found, q = (a & b) != 0, b == 1
    same(one(lines, a, b, out="u4"), (found & q if combine == "and" else found | q).astype("u4"))

"""Shuffles, votes, matches and reductions of a warp, against loops over lanes."""

import numpy as np
import pytest
from ptx_snippets import bits, one, same

X = bits("u4", 64)
RNG = np.random.default_rng(0)


@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
@pytest.mark.parametrize("width", [32, 8])
@pytest.mark.parametrize("uniform", [True, False])
def test_shuffle(mode, width, uniform):
    """By the ISA's own program text."""
    by = np.full(64, 3, "u4") if uniform else RNG.integers(0, 32, 64).astype("u4")
    clamp = (32 - width) << 8 | (0 if mode == "up" else 31)
    lines = f"shfl.sync.{mode}.b32 %s0|%p, %a, %b, {clamp}, -1; selp.b32 %s1, 0, 1, %p; xor.b32 %d, %s0, %s1;"
    got = one(lines, X, by, out="u4")
    for i in range(64):
        lane, b = i % 32, int(by[i]) & 31
        segment, c = clamp >> 8 & 31, clamp & 31
        top, low = (lane & segment) | (c & ~segment), lane & segment
        j = {"up": lane - b, "down": lane + b, "bfly": lane ^ b, "idx": low | (b & ~segment)}[mode]
        inside = j >= top if mode == "up" else j <= top
        assert got[i] == X[i - lane + (j if inside else lane)] ^ (not inside)


def test_a_part_of_a_warp():
    """20 lanes branch away; each side votes among its own."""
    lines = """setp.lt.u32 %p, %i, 20; @%p bra A; vote.sync.ballot.b32 %d, 1, 0xfff00000; bra B;
    A: vote.sync.ballot.b32 %d, 1, 0x000fffff; B: activemask.b32 %s0; popc.b32 %s0, %s0; xor.b32 %d, %d, %s0;"""
    assert one(lines, X[:32], out="u4").tolist() == [0xFFFFF ^ 32] * 20 + [0xFFF00000 ^ 32] * 12


@pytest.mark.parametrize("kind,f", [("all", all), ("any", any), ("uni", lambda v: len(set(v)) == 1)])
def test_votes(kind, f):
    x = np.r_[np.zeros(32), np.ones(32), RNG.integers(0, 2, 64)].astype("u4")
    lines = f"setp.ne.u32 %p, %a, 0; vote.sync.{kind}.pred %q, %p, -1; selp.u32 %d, 1, 0, %q;"
    want = [f(bool(v) for v in w) for w in x.reshape(-1, 32)]
    assert (one(lines, x, out="u4").reshape(-1, 32) == np.array(want)[:, None]).all()


def test_match():
    x = RNG.integers(0, 4, 64).astype("u8")
    got = one("match.any.sync.b64 %d, %a, -1;", x, out="u4")
    for i in range(64):
        warp = x[i // 32 * 32 : i // 32 * 32 + 32]
        assert got[i] == sum(1 << k for k in range(32) if warp[k] == x[i])
    x[32:] = 5
    got = one("match.all.sync.b64 %d|%p, %a, -1; @!%p mov.u32 %d, 1;", x, out="u4")
    assert got.tolist() == [1] * 32 + [2**32 - 1] * 32


REDUCE = {"add.u32": np.add, "min.s32": np.minimum, "max.s32": np.maximum, "and.b32": np.bitwise_and}
REDUCE |= {"or.b32": np.bitwise_or, "xor.b32": np.bitwise_xor, "max.u32": np.maximum}


@pytest.mark.parametrize("op", REDUCE)
def test_reductions(op):
    x = X.view("i4") if ".s32" in op else X
    lines = f"redux.sync.{op} %d, %a, -1;"
    want = REDUCE[op].reduce(x.reshape(-1, 32), axis=1, dtype=x.dtype)
    assert (one(lines, x, out=x.dtype).reshape(-1, 32) == want[:, None]).all()


def test_election():
    lines = "elect.sync %s0|%p, -1; selp.u32 %d, 1, 0, %p; add.u32 %d, %d, %s0;"
    assert one(lines, X, out="u4").tolist() == [1, *[0] * 31] * 2
    lines = (
        "setp.lt.u32 %q, %i, 9; mov.u32 %d, 7; @%q bra E; elect.sync %s0|%p, 0xfffffe00; selp.u32 %d, 1, %s0, %p; E:"
    )
    assert one(lines, X[:32], out="u4").tolist() == [7] * 9 + [1] + [9] * 22


def test_masks_of_lanes():
    lines = "mov.u32 %s0, %lanemask_{}; mov.u32 %d, %s0;"
    for word, want in {"eq": lambda i: 1 << i, "lt": lambda i: (1 << i) - 1, "ge": lambda i: 2**32 - (1 << i)}.items():
        assert one(lines.format(word), X[:32], out="u4").tolist() == [want(i) for i in range(32)]


@pytest.mark.parametrize("threads", [1, 20, 45])
def test_blocks_of_no_whole_warps(threads):
    got = one("shfl.sync.idx.b32 %d, %a, 0, 31, -1;", X[:threads], out="u4")
    assert (got == X[np.arange(threads) // 32 * 32]).all()


@pytest.mark.parametrize(
    "words,reduce", [("", np.fmin), (".NaN", np.minimum), (".abs", lambda a, b: np.fmin(abs(a), abs(b)))]
)
def test_reduction_of_floats(words, reduce):
    x = RNG.standard_normal(64).astype("f4")
    x[3] = np.nan
    got = one(f"redux.sync.min{words}.f32 %d, %a, -1;", x, out="f4")
    for w in range(2):
        want = x[32 * w]
        for v in x[32 * w + 1 : 32 * w + 32]:
            want = reduce(want, v)
        same(got[32 * w : 32 * w + 32], np.full(32, want))

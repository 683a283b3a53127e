"""Control flow: divergence, loops, calls, barriers; and the errors of the parser."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ptx_snippets import one

from tessera.core.errors import (
    ArgumentError,
    BarrierError,
    ExecutionError,
    ParseError,
    ResourceError,
    UnknownNameError,
    UnsupportedOpError,
)
from tessera.interp.target.ptx import PtxModule

HEAD = ".version 8.0\n.target sm_90\n.address_size 64\n"


def body(lines, params="", declared=".reg .b32 %r<8>; .reg .b64 %d<4>; .reg .pred %p<4>;"):
    return f"{HEAD}.visible .entry k({params})\n{{\n{declared}\n{lines}\nret;\n}}\n"


def launch(lines, **options):
    PtxModule(body(lines)).launch("k", **options)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=100))
def test_each_lane_loops_as_often_as_it_likes(rounds):
    """3n + 1 with a branch in the loop: fragments split and join."""
    lines = """mov.u32 %d, 0; mov.u32 %s0, %a; add.u32 %s0, %s0, 1;
    L: setp.eq.u32 %p, %s0, 1; @%p bra E; and.b32 %s1, %s0, 1; setp.eq.u32 %q, %s1, 0; @%q bra H;
    mad.lo.u32 %s0, %s0, 3, 1; bra N; H: shr.u32 %s0, %s0, 1; N: add.u32 %d, %d, 1; bra L; E:"""
    want = []
    for n in rounds:
        n, steps = n + 1, 0
        while n != 1:
            n, steps = (3 * n + 1 if n % 2 else n // 2), steps + 1
        want.append(steps)
    assert one(lines, np.array(rounds, "u4"), out="u4").tolist() == want


def test_masked_and_sparse_lanes_keep_their_registers():
    """Writes under masks of every density: each lane sees its own alone."""
    lines = "mov.u32 %d, 0;"
    for k, bound in enumerate((0, 1, 100, 2**31, 2**32 - 5)):
        lines += f"setp.lt.u32 %p, %a, {bound}; @%p add.u32 %d, %d, {10**k}; @!%p xor.b32 %s1, %d, 1;"
    x = np.random.default_rng(0).integers(0, 2**32, 700, "u8").astype("u4")
    x[::97] = 50
    want = sum((x < b) * 10**k for k, b in enumerate((0, 1, 100, 2**31, 2**32 - 5)))
    assert (one(lines, x, out="u4") == want).all()


def test_a_spin_lock_is_fair():
    """Threads of different warps take a lock in turn, though the holder runs at a higher address."""
    lines = """.shared .align 4 .b32 lock; .shared .align 4 .b32 sum; mov.u32 %s0, lock; mov.u32 %s1, sum;
    setp.eq.u32 %p, %i, 0; @%p st.shared.u32 [lock], 0; @%p st.shared.u32 [sum], 0; bar.sync 0;
    A: atom.shared.cas.b32 %s2, [%s0], 0, 1; setp.ne.u32 %q, %s2, 0; @%q bra A;
    ld.shared.u32 %s3, [%s1]; add.u32 %s3, %s3, 1; st.shared.u32 [%s1], %s3; atom.shared.exch.b32 %s2, [%s0], 0;
    bar.sync 0; ld.shared.u32 %d, [%s1];"""
    assert (one(lines, np.zeros(40, "u4"), out="u4") == 40).all()


def test_barriers_of_parts_of_a_block():
    """A producer arrives and goes on; the consumer waits for both warps."""
    lines = """.shared .align 4 .b32 s[64]; mov.u32 %s0, s; mad.lo.u32 %s0, %i, 4, %s0; setp.ge.u32 %p, %i, 32;
    @%p bra C; st.shared.u32 [%s0], %a; bar.arrive 3, 64; mov.u32 %d, 1; bra E;
    C: barrier.cta.sync 3, 64; ld.shared.u32 %d, [%s0+-128]; E:"""
    x = np.arange(100, 164, dtype="u4")
    assert (one(lines, x, out="u4") == np.r_[np.ones(32), x[:32]]).all()


CALLS = """.func (.param .b32 r) inner(.param .b32 x, .param .b32 y)
{ .reg .b32 %a, %b; .reg .pred %p; ld.param.u32 %a, [x]; ld.param.u32 %b, [y]; setp.gt.s32 %p, %a, %b;
  @%p bra L; st.param.b32 [r], %a; ret; L: st.param.b32 [r], %b; ret; }
.func (.reg .b32 %out) twice(.reg .b32 %in) { add.u32 %out, %in, %in; ret; }
"""


def test_calls():
    lines = """.reg .b32 %x; { .param .b32 p; .param .b32 q; .param .b32 r; st.param.b32 [p], %r0; st.param.b32 [q], 10;
    call.uni (r), inner, (p, q); ld.param.b32 %x, [r]; } call (%r1), twice, (%x);
    mad.wide.u32 %d0, %r0, 4, %d0; st.global.u32 [%d0], %r1;"""
    first = "ld.param.u64 %d0, [o]; mov.u32 %r0, %tid.x;"
    text = HEAD + CALLS + body(first + lines, ".param .u64 o").removeprefix(HEAD)
    out = np.zeros(20, "u4")
    PtxModule(text).launch("k", block=20, args=[out])
    assert out.tolist() == [2 * min(i, 10) for i in range(20)]


@pytest.mark.parametrize(
    "lines,error,says",
    [
        ("bra NOWHERE;", ParseError, "unknown name NOWHERE"),
        ("add.u32 %r0, %nope, 1;", ParseError, "unknown name %nope"),
        ("frobnicate.u32 %r0, %r1;", UnsupportedOpError, r":7:1.*no frobnicate\.u32"),
        ("add.weird.u32 %r0, %r1, %r2;", UnsupportedOpError, r"no add\.weird\.u32"),
        ("cvt.f16.f32 %r0, %r1;", UnsupportedOpError, "no cvt.f16.f32"),
        ("trap;", ExecutionError, "the program trapped"),
        ("mov.u32 %r0, %tid.w;", ParseError, "unknown name %tid.w"),
        (
            "mov.u32 %r0, %tid.x; setp.eq.u32 %p0, %r0, 0; @%p0 bar.sync 1, 32;",
            BarrierError,
            "no thread can continue: bar.sync at .*7:",
        ),
        ("bar.sync 16;", ExecutionError, "barrier number is above 15"),
    ],
)
def test_errors(lines, error, says):
    with pytest.raises(error, match=says):
        launch(lines, block=32)


@pytest.mark.parametrize(
    "text,says",
    [
        (".target sm_80", "no .version"),
        (".version 8.0\n.what", r":2:1.*unknown directive"),
        (HEAD + ".entry k() { add.u32 %r0 %r1; }", r":4:26.*expected ';'"),
        (HEAD + ".entry k() { ret;", "expected '}'"),
        (HEAD + ".entry k(.param .zz a) { ret; }", r":4:17.*unknown type"),
        (".version 8.0\n.target sm_80\n.address_size 32", "64-bit addresses"),
        (HEAD + '.entry k() { mov.u32 %r, "x"; }', "expected an operand"),
    ],
)
def test_wrong_text(text, says):
    with pytest.raises(ParseError, match=says):
        PtxModule(text, "f.ptx")


def test_wrong_launches():
    module = PtxModule(body("").replace("()", "() .reqntid 32, 1, 1"))
    with pytest.raises(ArgumentError, match="requires another block size"):
        module.launch("k", block=64)
    with pytest.raises(UnknownNameError, match="no entry other"):
        module.launch("other")
    with pytest.raises(ArgumentError, match="at most 1024"):
        launch("", block=2048)
    with pytest.raises(ResourceError, match="more shared memory"):
        launch("", shared=300000)
    with pytest.raises(ArgumentError, match="not a multiple of the cluster"):
        launch("", grid=3, cluster=2)
    with pytest.raises(ArgumentError, match="positive extents"):
        launch("", grid=(1, 0))

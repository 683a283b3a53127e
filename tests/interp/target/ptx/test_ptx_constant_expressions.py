"""Constant expressions, against Python's."""

import numpy as np
import pytest

from tessera.core.errors import ParseError
from tessera.interp.target.ptx import PtxModule

TEXT = """.version 8.0
.target sm_80
.address_size 64
.const .s64 table[5] = {{ {0}, 1 << 3, -1, 0x10 | 3, ~0 }};
.visible .entry k(.param .u64 p)
{{ .reg .b64 %p, %v; ld.param.u64 %p, [p]; mov.b64 %v, {0}; st.global.u64 [%p], %v; ld.const.b64 %v, [table];
st.global.u64 [%p+8], %v; ld.const.b64 %v, [table+24]; st.global.u64 [%p+8+8], %v; ret; }}
"""


@pytest.mark.parametrize(
    "text,value",
    [
        ("(2 * 3) + 4", 10), ("2 + 3 * 4 - -1", 15), ("7 & 3 | 8 ^ 1", 7 & 3 | 8 ^ 1), ("1 << 4 >> 2", 4),
        ("-7 / 2", -3), ("-7 % 3", 0), ("5 > 3 ? 7 : 9", 7), ("(1 == 2) ? 7 : 3 <= 3 ? 11 : 13", 11), ("!0 + !5", 1),
        ("~5 & 0xFF", 250), ("(.s64)5 - 010", -3), ("3 && 0 || 2", 1), ("1 != 1", 0), ("0b101U * 2", 10),
    ],
)  # fmt: skip
def test_values(text, value):
    out = np.zeros(3, "i8")
    PtxModule(TEXT.format(text)).launch("k", args=[out])
    assert out.tolist() == [value, value, 19]


@pytest.mark.parametrize(
    "text,says", [("1 / 0", "division by zero"), ("(1 + ", "expected an operand"), ("(1", r"'\)'")]
)
def test_mistakes_have_line_and_column(text, says):
    with pytest.raises(ParseError, match=rf"<ptx>:4:\d+.*{says}"):
        PtxModule(TEXT.format(text))


@pytest.mark.parametrize("depth", [60, 100, 400])
def test_parentheses_nest(depth):
    out = np.zeros(3, "i8")
    PtxModule(TEXT.format("(" * depth + "7" + ")" * depth)).launch("k", args=[out])
    assert out.tolist() == [7, 7, 19]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("(" * 9999 + "1", "the text nests too deep"), ("-" * 9999 + "1", "the text nests too deep"),
        ("9" * 5000, "a number of 5,000 characters"), ("0x" + "f" * 5000, "a number of 5,002 characters"),
        ("09", "the digits 0 to 7 of an octal number"),
    ],
)  # fmt: skip
def test_numbers_and_nesting_have_limits(text, says):
    with pytest.raises(ParseError, match=rf"<ptx>:4:\d+.*{says}"):
        PtxModule(TEXT.format(text))


SPELLINGS = [
    ("abs.ftz.f32", "abs.f32.ftz", "%f1, %f2"),
    ("fma.rn.relu.bf16x2", "fma.bf16x2.rn.relu", "%r1, %r2, %r3, %r2"),
    ("ld.global.cg.u32", "ld.u32.global.cg", "%r1, [%rd]"),
    ("cvt.rn.satfinite.f16.f32", "cvt.f16.f32.rn.satfinite", "%h1, %f1"),
    ("set.lt.and.f32.s32", "set.and.f32.s32.lt", "%f1, %r1, %r2, %p1"),
    ("shfl.sync.up.b32", "shfl.b32.up.sync", "%r1|%p1, %r2, 1, 0, -1"),
    ("prmt.b32.f4e", "prmt.f4e.b32", "%r1, %r2, %r3, %r1"),
    ("match.any.sync.b64", "match.sync.b64.any", "%r1, %rd, -1"),
    ("rcp.approx.ftz.f64", "rcp.ftz.f64.approx", "%d1, %d1"),
    ("wmma.load.a.sync.aligned.row.m16n16k16.f16", "wmma.f16.a.row.aligned.m16n16k16.sync.load", "%r1, [%rd]"),
    ("tensormap.replace.tile.rank.b1024.b32", "tensormap.rank.b32.b1024.tile.replace", "[%rd], %r1"),
]


@pytest.mark.parametrize(("usual", "other", "operands"), SPELLINGS)
def test_modifiers_are_taken_in_any_order(usual, other, operands):
    """As ptxas takes them; the order of several types has a meaning and is kept."""
    head = ".version 8.6\n.target sm_90\n.address_size 64\n.visible .entry k() { .reg .b64 %rd; .reg .b32 %r<4>;"
    regs = ".reg .f32 %f<4>; .reg .b16 %h<4>; .reg .f64 %d<2>; .reg .pred %p<2>;"
    one, two = (PtxModule(f"{head} {regs} {op} {operands}; ret; }}").syntax.functions[0].body for op in (usual, other))
    assert one == two

"""Constant expressions, against Python's."""

import numpy as np
import pytest

from tessera.core.errors import ParseError, UnsupportedOpError
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


@pytest.mark.parametrize("kind", ["texref", "samplerref", "surfref"])
def test_textures_and_surfaces_are_refused_by_name(kind):
    with pytest.raises(UnsupportedOpError, match=rf"<ptx>:4:9.*no \.{kind} variables"):
        PtxModule(
            f".version 8.0\n.target sm_80\n.address_size 64\n.global .{kind} t;".replace(".global", "        .global")
        )

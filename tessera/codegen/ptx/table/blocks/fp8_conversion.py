"""fp8 in pairs: the conversions of two numbers by one instruction, where an architecture has them (PTX ISA, "cvt").

The instruction saturates. A code is one more where the number lies beyond the format: the infinity after the largest
number of e5m2, the NaN after that of e4m3.
"""

from __future__ import annotations

from collections.abc import Sequence

from tessera.codegen.ptx.text.builder import PtxBuilder, literal
from tessera.core.types import DType, fp8_e4m3, fp8_e5m2

PAIR_ARCHS = ("sm_90a",)
NAMES = {fp8_e4m3: "e4m3x2", fp8_e5m2: "e5m2x2"}
# From where numbers lie beyond: half a step after the largest number, from which ties go to the even code.
BEYOND = {fp8_e4m3: ("gt", 464.0), fp8_e5m2: ("ge", 61440.0)}
WORD_CODES = 4


def encode_pairs(text: PtxBuilder, dtype: DType, elements: Sequence[str]) -> list[str]:
    """Elements as words of codes, the first in the low bits; what was just rounded to the format is rounded anew."""
    given = [text.rounding_sources.get(x, (None, "")) for x in elements]
    numbers = [source if kind == dtype else x for x, (kind, source) in zip(elements, given, strict=True)]
    return [_encode_word(text, dtype, numbers[i : i + WORD_CODES]) for i in range(0, len(numbers), WORD_CODES)]


def _encode_word(text: PtxBuilder, dtype: DType, numbers: Sequence[str]) -> str:
    """Up to four numbers as one word."""
    form, (compare, least) = f"cvt.rn.satfinite.{NAMES[dtype]}.f32", BEYOND[dtype]
    padded = [*numbers, *[literal("f32", 0.0)] * (len(numbers) % 2)]
    pairs = [text.let(form, "b16", padded[i + 1], padded[i]) for i in range(0, len(padded), 2)]
    word = text.let("mov.b32", "b32", f"{{{', '.join(pairs)}}}") if len(pairs) == 2 else ""
    word = word or text.let("cvt.u32.u16", "b32", pairs[0])
    for place, x in enumerate(numbers):
        beyond = text.let(f"setp.{compare}.f32", "pred", text.let("abs.f32", "f32", x), literal("f32", least))
        text.do("add.u32", word, word, 1 << 8 * place, guard=beyond)
    return word


def decode_pairs(text: PtxBuilder, dtype: DType, words: Sequence[str], count: int) -> list[str]:
    """The first `count` codes of words as f32."""
    found: list[str] = []
    for word in words:
        low, high = text.new("b16"), text.new("b16")
        text.do("mov.b32", f"{{{low}, {high}}}", word)
        for pair in (low, high)[: -((len(found) - count) // 2)]:
            both = text.let(f"cvt.rn.f16x2.{NAMES[dtype]}", "b32", pair)
            halves = text.new("b16"), text.new("b16")
            text.do("mov.b32", f"{{{', '.join(halves)}}}", both)
            found += [text.let("cvt.f32.f16", "f32", half) for half in halves]
    return found[:count]

"""Floats of eight bits or fewer: decoded, encoded and rounded by integer arithmetic and exact multiplications.

In memory each lies in a byte of its own, sign first; in a register it is an f32 that holds its value. The forms are
those of `codegen/small_floats.py`.
"""

from __future__ import annotations

import math

from tessera.codegen.ptx.text import Text
from tessera.codegen.ptx.types import literal
from tessera.codegen.small_floats import BIAS, DIGITS, FORMS, Form
from tessera.types import DType


def _number(value: float) -> str:
    return literal("f32", value)


def decode(text: Text, dtype: DType, word: str, part: int) -> str:
    """A byte of a word: the code as digits of an f32 of small exponent, times a power of two, exactly."""
    form = FORMS[dtype]
    code = text.let("bfe.u32", "b32", word, 8 * part, form.sign)
    sign = text.let("shl.b32", "b32", text.let("bfe.u32", "b32", word, 8 * part + form.sign, 1), 31)
    digits = text.let("mov.b32", "f32", text.let("shl.b32", "b32", code, DIGITS - form.digits))
    size = text.let("mul.rn.f32", "f32", digits, _number(2.0 ** (BIAS - form.bias)))
    if form.nan is not None:
        size = _beyond(text, form, code, size)
    bits = text.let("or.b32", "b32", text.let("mov.b32", "b32", size), sign)
    return text.let("mov.b32", "f32", bits)


def _beyond(text: Text, form: Form, code: str, size: str) -> str:
    """The codes past the largest number: an infinity if there is one, and NaNs."""
    last = form.nan if form.infinity is None else form.infinity
    strange = text.let("setp.gt.u32", "pred", code, last)
    size = text.let("selp.f32", "f32", _number(math.nan), size, strange)
    return text.let("selp.f32", "f32", _number(form.beyond), size, text.let("setp.eq.u32", "pred", code, last))


def encode(text: Text, dtype: DType, x: str) -> str:
    """The code, in the low byte of a word; the value is one of the format's, so that this is exact."""
    form = FORMS[dtype]
    sign = text.let("shr.u32", "b32", text.let("mov.b32", "b32", x), 31)
    sign = text.let("shl.b32", "b32", sign, form.sign)
    size = text.let("abs.f32", "f32", x)
    small = text.let("mul.rn.f32", "f32", size, _number(2.0 ** (form.bias - BIAS)))
    code = text.let("shr.u32", "b32", text.let("mov.b32", "b32", small), DIGITS - form.digits)
    if form.infinity is not None:
        infinite = text.let("setp.eq.f32", "pred", size, _number(math.inf))
        code = text.let("selp.b32", "b32", form.infinity, code, infinite)
    strange = text.let("setp.nan.f32", "pred", x, x)
    if form.nan is None:  # a NaN lies as +0
        return text.let("selp.b32", "b32", 0, text.let("or.b32", "b32", code, sign), strange)
    code = text.let("selp.b32", "b32", form.nan, code, strange)
    return text.let("or.b32", "b32", code, sign)


def rounded(text: Text, dtype: DType, x: str) -> str:
    """An f32 rounded to the nearest value of a format, ties to even; beyond the largest as the format has it."""
    form = FORMS[dtype]
    least, dropped = 1 - form.bias, DIGITS - form.digits
    size = text.let("abs.f32", "f32", x)
    # Below the least normal number the steps are equal: adding a number whose last digit is one step rounds to them.
    shift = _number(2.0 ** (least - form.digits + DIGITS))
    tiny = text.let("sub.rn.f32", "f32", text.let("add.rn.f32", "f32", size, shift), shift)
    bits = text.let("mov.b32", "b32", size)
    odd = text.let("bfe.u32", "b32", bits, dropped, 1)
    up = text.let("add.s32", "b32", text.let("add.s32", "b32", bits, (1 << (dropped - 1)) - 1), odd)
    normal = text.let("mov.b32", "f32", text.let("and.b32", "b32", up, -(1 << dropped)))
    low = text.let("setp.lt.f32", "pred", size, _number(2.0**least))
    near = text.let("selp.f32", "f32", tiny, normal, low)
    high = text.let("setp.gt.f32", "pred", near, _number(form.top))
    near = text.let("selp.f32", "f32", _number(form.beyond), near, high)
    strange = text.let("setp.nan.f32", "pred", x, x)
    if form.nan is None:  # a NaN becomes +0, whatever its sign
        return text.let("selp.f32", "f32", _number(0.0), text.let("copysign.f32", "f32", x, near), strange)
    near = text.let("selp.f32", "f32", _number(math.nan), near, strange)
    return text.let("copysign.f32", "f32", x, near)

"""Conversions in registers: widen, round to a narrow format, and cast."""

from __future__ import annotations

from tessera.codegen.ptx.scalars import small
from tessera.codegen.ptx.text import Text
from tessera.codegen.ptx.types import NARROW, SMALL, register_class, word
from tessera.types import DType, bf16, bool_, f16, f32, f64, int4, int8, int16, tf32, uint8, uint16

KEPT = {tf32: 19, bf16: 16, f16: 0}  # the bits of an f32 that a narrower format of the same exponent keeps


def convert(text: Text, source: DType, to: DType, x: str) -> str:
    """`x` converted: nearest-even; float to integer toward zero, saturating, NaN to 0."""
    if source == to or (to == f32 and source in NARROW):
        return x
    if to == bool_:
        return _truth(text, source, x)
    if source == bool_:
        return _from_bool(text, to, x)
    if to.is_float:
        return _float_to_float(text, source, to, x) if source.is_float else _integer_to_float(text, source, to, x)
    return _float_to_integer(text, source, to, x) if source.is_float else _integer_to_integer(text, source, to, x)


def _truth(text: Text, source: DType, x: str) -> str:
    zero = {"f32": "0f00000000", "f64": "0d0000000000000000"}.get(word(source), "0")
    # Unordered, so that NaN counts as true.
    return text.let(f"setp.{'neu' if source.is_float else 'ne'}.{word(source)}", "pred", x, zero)


def _from_bool(text: Text, to: DType, x: str) -> str:
    one, zero = {"f32": ("0f3F800000", "0f00000000"), "f64": ("0d3FF0000000000000", "0d0000000000000000")}.get(
        word(to), ("1", "0")
    )
    kind = register_class(to)
    return text.let(f"selp.{kind}", kind, one, zero, x)


def _float_to_float(text: Text, source: DType, to: DType, x: str) -> str:
    if to == f64:
        return text.let("cvt.f64.f32", "f64", x)
    if source == f64:
        return text.let("cvt.rn.f32.f64", "f32", x) if to == f32 else rounded(text, to, _to_odd(text, x))
    return rounded(text, to, x)


def rounded(text: Text, dtype: DType, x: str) -> str:
    """An f32 rounded to the nearest value of a narrow format, ties to even."""
    found = _rounded(text, dtype, x)
    text.origins[found] = (dtype, x)
    return found


def _rounded(text: Text, dtype: DType, x: str) -> str:
    if dtype in SMALL:
        return small.rounded(text, dtype, x)
    if dtype == f16:
        return text.let("cvt.f32.f16", "f32", text.let("cvt.rn.f16.f32", "b16", x))
    if dtype == bf16:
        # Packed above a 0 it is an f32 already.
        return text.let("mov.b32", "f32", text.let("cvt.rn.bf16x2.f32", "b32", x, "0f00000000"))
    return _rounded_tf32(text, x)


def _rounded_tf32(text: Text, x: str) -> str:
    """By integer arithmetic: 13 bits fewer, ties to even; infinities stay, and NaN."""
    bits = text.let("mov.b32", "b32", x)
    odd = text.let("bfe.u32", "b32", bits, 13, 1)
    up = text.let("add.s32", "b32", text.let("add.s32", "b32", bits, 0xFFF), odd)
    cut = text.let("mov.b32", "f32", text.let("and.b32", "b32", up, "0xFFFFE000"))
    number = text.let("setp.num.f32", "pred", x, x)
    return text.let("selp.f32", "f32", cut, "0f7FC00000", number)


def _to_odd(text: Text, x: str) -> str:
    """f64 to f32 by rounding to odd, so that a second rounding is exact (Boldo and Melquiond 2008)."""
    near = text.let("cvt.rz.f32.f64", "f32", x)
    back = text.let("cvt.f64.f32", "f64", near)
    off = text.let("setp.lt.f64", "pred", text.let("abs.f64", "f64", back), text.let("abs.f64", "f64", x))
    bits = text.let("mov.b32", "b32", near)
    finite = text.let("setp.lt.f64", "pred", text.let("abs.f64", "f64", x), "0d7FF0000000000000")
    odd = text.let("or.b32", "b32", bits, 1)
    both = text.let("and.pred", "pred", off, finite)
    return text.let("mov.b32", "f32", text.let("selp.b32", "b32", odd, bits, both))


def _integer_to_float(text: Text, source: DType, to: DType, x: str) -> str:
    if to in NARROW and source.bits > 16:
        # Through f64 (exact, or rounded to odd there) the one rounding that counts is the last.
        return rounded(text, to, _to_odd(text, _wide_odd(text, source, x)))
    kind = "f64" if to == f64 else "f32"
    found = text.let(f"cvt.rn.{kind}.{word(source)}", kind, x)
    return rounded(text, to, found) if to in NARROW else found


def _wide_odd(text: Text, source: DType, x: str) -> str:
    """An integer as f64; one of 64 bits rounded to odd."""
    if source.bits < 64:
        return text.let(f"cvt.rn.f64.{word(source)}", "f64", x)
    near = text.let(f"cvt.rz.f64.{word(source)}", "f64", x)
    back = text.let(f"cvt.rzi.{word(source)}.f64", "b64", near)
    off = text.let("setp.ne.s64", "pred", back, x)
    bits = text.let("mov.b64", "b64", near)
    odd = text.let("or.b64", "b64", bits, 1)
    return text.let("mov.b64", "f64", text.let("selp.b64", "b64", odd, bits, off))


LIMITS = {int4: (-8, 7), int8: (-128, 127), int16: (-32768, 32767), uint8: (0, 255), uint16: (0, 65535)}


def _float_to_integer(text: Text, source: DType, to: DType, x: str) -> str:
    kind, form = register_class(to), word(source)
    found = text.let(f"cvt.rzi.{word(to)}.{form}", kind, x)
    if to in LIMITS:
        low, high = LIMITS[to]
        found = text.let("cvt.rzi.s32." + form, "b32", x)
        found = text.let("min.s32", "b32", text.let("max.s32", "b32", found, low), high)
    number = text.let(f"setp.num.{form}", "pred", x, x)
    return text.let(f"selp.{kind}", kind, found, 0, number)


def _integer_to_integer(text: Text, source: DType, to: DType, x: str) -> str:
    if to.bits == source.bits == 64:
        return x
    if to.bits == 64:
        return text.let(f"cvt.s64.{word(source)}", "b64", x)
    if source.bits == 64:
        return wrapped(text, to, text.let("cvt.u32.u64", "b32", x))
    return x if to.bits > source.bits and source.kind != to.kind != "uint" else wrapped(text, to, x)


def wrapped(text: Text, dtype: DType, x: str) -> str:
    """The low bits of 32 as the narrow integer that they are."""
    if dtype not in LIMITS:
        return x
    return text.let(f"bfe.{'u' if dtype.kind == 'uint' else 's'}32", "b32", x, 0, dtype.bits)

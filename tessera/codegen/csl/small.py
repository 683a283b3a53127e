"""Floats of eight bits or fewer: held as their codes, and computed in f32."""

from __future__ import annotations

from tessera.codegen.csl.element import Element
from tessera.codegen.small_floats import BIAS, DIGITS, FORMS, Form
from tessera.types import DType

WIDEN = """fn widen_{name}(code: i16) f32 {{
  const size: u32 = @as(u32, code & {magnitude});
{special}  const value: f32 = @bitcast(f32, size << {dropped}) * {scale};
  return if ((code & {sign}) != 0) -value else value;
}}"""
SPECIAL = """  if (size >= {first}) return @bitcast(f32, @as(u32, {value}) | (@as(u32, code & {sign}) << {up}));
"""
# To nearest, ties to even. Below the least normal number steps are equal: adding a number whose last digit is one step
# rounds to them; above it the code is the upper bits of the f32, with another bias.
NARROW = """fn narrow_{name}(x: f32) i16 {{
  const bits: u32 = @bitcast(u32, x);
  const size: u32 = bits & 0x7FFFFFFF;
  const sign: i16 = if (bits == size) 0 else {sign};
  if (x != x) return sign | {nan};
  if (size < {least}) {{
    return sign | @as(i16, @bitcast(u32, @bitcast(f32, size) + {step}) - {step_bits});
  }}
  const code: u32 = (size - {rebias} + {half} + ((size >> {dropped}) & 1)) >> {dropped};
  return sign | (if (code > {top}) {beyond} else @as(i16, code));
}}"""


def widened(element: Element, dtype: DType, text: str) -> str:
    """The value of a code."""
    form, name = FORMS[dtype], f"widen_{dtype.name}"
    sign, scale = 1 << form.sign, float(2.0 ** (BIAS - form.bias))
    element.functions[name] = WIDEN.format(
        name=dtype.name, magnitude=sign - 1, sign=sign, dropped=DIGITS - form.digits, scale=_number(scale),
        special="".join(_specials(form, sign)),
    )  # fmt: skip
    return f"{name}({text})"


def _specials(form: Form, sign: int) -> list[str]:
    """What stands for no number of its digits: NaN first, which has the largest codes, then infinity."""
    found = [(form.nan, "0x7FC00000")] if form.nan is not None else []
    if form.infinity is not None:
        found = [(form.infinity + 1, "0x7FC00000"), (form.infinity, "0x7F800000")]
    return [SPECIAL.format(first=n, value=v, sign=sign, up=31 - form.sign) for n, v in found]


def narrowed(element: Element, dtype: DType, text: str) -> str:
    """The code of a value."""
    form, name = FORMS[dtype], f"narrow_{dtype.name}"
    dropped, least = DIGITS - form.digits, 1 - form.bias
    place = least - form.digits + DIGITS
    element.functions[name] = NARROW.format(
        name=dtype.name, sign=1 << form.sign, nan=form.nan or 0, least=hex((least + BIAS) << DIGITS),
        step=_number(2.0**place), step_bits=hex((place + BIAS) << DIGITS), dropped=dropped,
        rebias=hex((BIAS - form.bias) << DIGITS), half=(1 << (dropped - 1)) - 1, top=_top(form), beyond=_beyond(form),
    )  # fmt: skip
    return f"{name}({text})"


def _top(form: Form) -> int:
    """The code of the largest number."""
    if form.infinity is not None:
        return form.infinity - 1
    return (1 << form.sign) - 1 if form.nan is None else form.nan - 1


def _beyond(form: Form) -> int:
    """The code of what lies beyond it."""
    found = form.infinity if form.infinity is not None else form.nan
    return _top(form) if found is None else found


def _number(value: float) -> str:
    mantissa, mark, exponent = repr(value).partition("e")
    return f"{mantissa if '.' in mantissa else mantissa + '.0'}{mark}{exponent}"

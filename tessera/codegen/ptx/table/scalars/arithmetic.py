"""Scalar arithmetic and conversions: rows of the emission table for arithmetic, comparison, selection and casts; casts,
rounding to narrow and small floats, and storage under a numerics policy, in registers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tessera.codegen.contract import is_special_policy, make_policy_error
from tessera.codegen.ptx.ops import truncate_bf16
from tessera.codegen.ptx.table.scalars.math_functions import (
    INTEGER_LIMITS,
    ScalarContext,
    ScalarRow,
    emit,
    emit_decomposition,
    floor_divide_floats,
    remainder_of_floats,
    wrap_integer,
)
from tessera.codegen.ptx.text.builder import (
    NARROW_FLOATS,
    SMALL_FLOATS,
    PtxBuilder,
    is_immediate,
    ptx_type,
    register_class,
)
from tessera.core.types import DType, Policy, TensorType, bf16, bool_, f16, f32, f64
from tessera.ir.numerics.conversion import FINITE_ONLY, find_float_grid
from tessera.lower.scalar_functions.small_floats import (
    build_flush,
    build_mantissa_rounding,
    build_rounding,
    build_saturation,
    build_stochastic_rounding,
    build_truncation,
)
from tessera.ops.tensor import basic
from tessera.ops.tensor import elementwise as e
from tessera.ops.tensor.random import round_by_chance

if TYPE_CHECKING:
    from tessera.ir.core import Function, Node

# Conversions in registers: widen, round to a narrow format, and cast.


TF32_DROPPED_BITS = 13  # of the mantissa of an f32


def convert(text: PtxBuilder, source: DType, to: DType, x: str) -> str:
    """`x` converted: nearest-even; float to integer toward zero, saturating, NaN to 0."""
    if source == to or (to == f32 and source in NARROW_FLOATS):
        return x
    if to == bool_:
        return _to_bool(text, source, x)
    if source == bool_:
        return _from_bool(text, to, x)
    if to.is_float:
        return _float_to_float(text, source, to, x) if source.is_float else _integer_to_float(text, source, to, x)
    return _float_to_integer(text, source, to, x) if source.is_float else _integer_to_integer(text, source, to, x)


def _to_bool(text: PtxBuilder, source: DType, x: str) -> str:
    zero = {"f32": "0f00000000", "f64": "0d0000000000000000"}.get(ptx_type(source), "0")
    # Unordered, so that NaN counts as true.
    return text.let(f"setp.{'neu' if source.is_float else 'ne'}.{ptx_type(source)}", "pred", x, zero)


def _from_bool(text: PtxBuilder, to: DType, x: str) -> str:
    one, zero = {"f32": ("0f3F800000", "0f00000000"), "f64": ("0d3FF0000000000000", "0d0000000000000000")}.get(
        ptx_type(to), ("1", "0")
    )
    kind = register_class(to)
    return text.let(f"selp.{kind}", kind, one, zero, x)


def _float_to_float(text: PtxBuilder, source: DType, to: DType, x: str) -> str:
    if to == f64:
        return text.let("cvt.f64.f32", "f64", x)
    if source == f64:
        return text.let("cvt.rn.f32.f64", "f32", x) if to == f32 else round_to_narrow(text, to, _round_to_odd(text, x))
    return round_to_narrow(text, to, x)


def round_to_narrow(text: PtxBuilder, dtype: DType, x: str) -> str:
    """An f32 rounded to the nearest value of a narrow format, ties to even."""
    found = _round_to_format(text, dtype, x)
    text.rounding_sources[found] = (dtype, x)
    return found


def _round_to_format(text: PtxBuilder, dtype: DType, x: str) -> str:
    if dtype in SMALL_FLOATS:
        return emit_decomposition(text, build_rounding(dtype), x)
    if dtype == f16:
        return text.let("cvt.f32.f16", "f32", text.let("cvt.rn.f16.f32", "b16", x))
    if dtype == bf16:
        # Packed above a 0 it is an f32 already.
        return text.let("mov.b32", "f32", text.let("cvt.rn.bf16x2.f32", "b32", x, "0f00000000"))
    return emit_decomposition(text, build_mantissa_rounding(TF32_DROPPED_BITS), x)


def _round_to_odd(text: PtxBuilder, x: str) -> str:
    """f64 to f32 by rounding to odd, so that a second rounding is exact (Boldo and Melquiond 2008)."""
    near = text.let("cvt.rz.f32.f64", "f32", x)
    back = text.let("cvt.f64.f32", "f64", near)
    off = text.let("setp.lt.f64", "pred", text.let("abs.f64", "f64", back), text.let("abs.f64", "f64", x))
    bits = text.let("mov.b32", "b32", near)
    finite = text.let("setp.lt.f64", "pred", text.let("abs.f64", "f64", x), "0d7FF0000000000000")
    odd = text.let("or.b32", "b32", bits, 1)
    both = text.let("and.pred", "pred", off, finite)
    return text.let("mov.b32", "f32", text.let("selp.b32", "b32", odd, bits, both))


def _integer_to_float(text: PtxBuilder, source: DType, to: DType, x: str) -> str:
    if to in NARROW_FLOATS and source.bits > 16:
        # Through f64 (exact, or rounded to odd there) the one rounding that counts is the last.
        return round_to_narrow(text, to, _round_to_odd(text, _widen_to_odd(text, source, x)))
    kind = "f64" if to == f64 else "f32"
    found = text.let(f"cvt.rn.{kind}.{ptx_type(source)}", kind, x)
    return round_to_narrow(text, to, found) if to in NARROW_FLOATS else found


def _widen_by_policy(text: PtxBuilder, source: DType, to: DType, policy: Policy, x: str) -> str:
    """An integer as f64, from which it is rounded to a type by a policy."""
    if to is not f64:
        return _widen_to_odd(text, source, x)
    return _cut_to_double(text, source, x) if policy.rounding == "toward_zero" else convert(text, source, f64, x)


def _cut_to_double(text: PtxBuilder, source: DType, x: str) -> str:
    """An integer or a bool as f64, rounded toward zero."""
    if source.bits < 64:
        return convert(text, source, f64, x)
    return text.let(f"cvt.rz.f64.{ptx_type(source)}", "f64", x)


def _widen_to_odd(text: PtxBuilder, source: DType, x: str) -> str:
    """An integer or a bool as f64; one of 64 bits rounded to odd."""
    near = _cut_to_double(text, source, x)
    if source.bits < 64:
        return near
    back = text.let(f"cvt.rzi.{ptx_type(source)}.f64", "b64", near)
    off = text.let("setp.ne.s64", "pred", back, x)
    bits = text.let("mov.b64", "b64", near)
    odd = text.let("or.b64", "b64", bits, 1)
    return text.let("mov.b64", "f64", text.let("selp.b64", "b64", odd, bits, off))


def _float_to_integer(text: PtxBuilder, source: DType, to: DType, x: str) -> str:
    kind, form = register_class(to), ptx_type(source)
    found = text.let(f"cvt.rzi.{ptx_type(to)}.{form}", kind, x)
    if to in INTEGER_LIMITS:
        low, high = INTEGER_LIMITS[to]
        found = text.let("cvt.rzi.s32." + form, "b32", x)
        found = text.let("min.s32", "b32", text.let("max.s32", "b32", found, low), high)
    number = text.let(f"setp.num.{form}", "pred", x, x)
    return text.let(f"selp.{kind}", kind, found, 0, number)


def _integer_to_integer(text: PtxBuilder, source: DType, to: DType, x: str) -> str:
    if to.bits == source.bits == 64:
        return x
    if to.bits == 64:
        return text.let(f"cvt.s64.{ptx_type(source)}", "b64", x)
    if source.bits == 64:
        return wrap_integer(text, to, narrow_register(text, x))
    return x if to.bits > source.bits and source.kind != to.kind != "uint" else wrap_integer(text, to, x)


# Storing under a policy: toward zero, saturating, subnormals flushed, each from what was computed and rounded once.


F32_DIGITS, F32_MIN_EXPONENT = 23, -126  # of an f32: the digits after its leading one, and its least exponent
F64_MAX, F64_MIN_NORMAL = 2.0**1023 * (2.0 - 2.0**-52), 2.0**-1022  # of an f64: its largest and its least normal number


def check_rounding_policy(node: Node) -> None:
    """Refuse results rounded by chance, which kernels have as an op of its own.

    Raises:
        UnsupportedOpError: it names the policy.
    """
    for v in node.results:
        if v.type.policy is not None and v.type.policy.rounding == "stochastic":
            raise make_policy_error("ptx", "rounding=stochastic", node.loc)


def has_policies(function: Function) -> bool:
    """Whether some result is stored otherwise than to nearest even: each op then stands for itself."""
    return any(is_special_policy(v.type.policy) for node in function.body.walk() for v in node.results)


def convert_for_storage(text: PtxBuilder, wide: DType, type: TensorType, x: str) -> str:
    """What was computed in a wide type as its storage and policy have it."""
    policy, to = type.policy, type.dtype
    if policy is None or not is_special_policy(policy) or not to.is_float:
        return convert(text, wide, to, x)
    if not wide.is_float:
        wide, x = f64, _widen_by_policy(text, wide, to, policy, x)
    if to is f64:
        return _apply_exact_policy(text, f64, policy, F64_MAX, F64_MIN_NORMAL, convert(text, wide, f64, x))
    grid = find_float_grid(to)
    if wide.bits < 32:  # the limits of another narrow type are no numbers of this one
        wide, x = f32, convert(text, wide, f32, x)
    if policy.saturate or to in FINITE_ONLY:
        x = emit_decomposition(text, build_saturation(wide, grid.top), x)
    if policy.rounding == "toward_zero":
        wide, x = f32, _round_toward_zero(text, wide, to, x)
    found = convert(text, wide, to, x)
    return emit_decomposition(text, build_flush(f32, 2.0**grid.least), found) if policy.denormals == "flush" else found


def _apply_exact_policy(text: PtxBuilder, dtype: DType, policy: Policy, top: float, tiny: float, x: str) -> str:
    """A number that needs no rounding."""
    x = emit_decomposition(text, build_saturation(dtype, top), x) if policy.saturate else x
    return emit_decomposition(text, build_flush(dtype, tiny), x) if policy.denormals == "flush" else x


def _round_toward_zero(text: PtxBuilder, wide: DType, to: DType, x: str) -> str:
    """An f32 on the grid of a type, no larger than the number; what is finite stays so."""
    if wide is f64:  # the grid of f32 holds that of every narrower type: truncating twice is truncating once
        x = text.let("cvt.rz.f32.f64", "f32", x)
    return x if to is f32 else emit_decomposition(text, build_truncation(to), x)


def select_register(text: PtxBuilder, dtype: DType, condition: str, x: str, y: str) -> str:
    """`x` where the condition holds, else `y`."""
    kind = register_class(dtype)
    if kind != "pred":
        return text.let(f"selp.{kind}", kind, x, y, condition)
    yes = text.let("and.pred", "pred", x, condition)
    no = text.let("and.pred", "pred", y, text.let("not.pred", "pred", condition))
    return text.let("or.pred", "pred", yes, no)


def narrow_register(text: PtxBuilder, x: str) -> str:
    """The low 32 bits of a 64-bit number, or of an immediate of no more bits."""
    return x if is_immediate(x) else text.low_words.get(x) or text.let("cvt.u32.u64", "b32", x)


def widen_register(text: PtxBuilder, x: str) -> str:
    """A 32-bit number that is 0 or more in 64 bits."""
    wide = text.let("cvt.u64.u32", "b64", x)
    text.low_words[wide] = x
    return wide


def materialise_operand(text: PtxBuilder, kind: str, x: str) -> str:
    """An operand that may be a number as a register."""
    return text.let(f"mov.{kind}", kind, x) if is_immediate(x) else x


# The emission table of the pointwise ops: each row gives the register of one element's result.


def _arithmetic_row(f: str, i: str) -> ScalarRow:
    def row(s: ScalarContext, x: str, y: str) -> str:
        if s.kind == "f":
            return s.do(f"{f}.{s.word}", x, y)
        return s.wrap(s.do(f"{i}.{s.word}", x, y))

    return row


emit(e.add)(_arithmetic_row("add.rn", "add"))
emit(e.sub)(_arithmetic_row("sub.rn", "sub"))
emit(e.mul)(_arithmetic_row("mul.rn", "mul.lo"))
# Within 2 ulp over the whole range (PTX ISA, div.full): the bound is 2.5.
emit(e.div)(lambda s, x, y: s.do("div.full.f32" if s.word == "f32" else "div.rn.f64", x, y))
emit(e.sqrt)(lambda s, x: s.do(f"sqrt.rn.{s.word}", x))


@emit(e.rsqrt)
def _(s, x):
    if s.word == "f32":
        return s.do("rsqrt.approx.f32", x)
    return s.do("div.rn.f64", s.number(1.0), s.do("sqrt.rn.f64", x))


def _compare_row(name: str) -> ScalarRow:
    """A comparison; NaN makes each false but `ne`."""

    def row(s: ScalarContext, x: str, y: str) -> str:
        if s.kind == "b":
            return _compare_bools(s, name, x, y)
        form = "neu" if name == "ne" and s.kind == "f" else name
        return s.text.let(f"setp.{form}.{s.word}", "pred", materialise_operand(s.text, register_class(s.dtype), x), y)

    return row


def _compare_bools(s: ScalarContext, name: str, x: str, y: str) -> str:
    if name in ("eq", "ne"):
        differ = s.text.let("xor.pred", "pred", x, y)
        return differ if name == "ne" else s.text.let("not.pred", "pred", differ)
    first, second = (s.text.let("selp.b32", "b32", 1, 0, each) for each in (x, y))
    return s.text.let(f"setp.{name}.u32", "pred", first, second)


emit(e.less)(_compare_row("lt"))
emit(e.less_equal)(_compare_row("le"))
emit(e.greater)(_compare_row("gt"))
emit(e.greater_equal)(_compare_row("ge"))
emit(e.equal)(_compare_row("eq"))
emit(e.not_equal)(_compare_row("ne"))


def _bitwise_row(name: str) -> ScalarRow:
    return lambda s, x, y: s.do(f"{name}.{register_class(s.dtype)}", x, y)


emit(e.bitwise_and)(_bitwise_row("and"))
emit(e.bitwise_or)(_bitwise_row("or"))
emit(e.bitwise_xor)(_bitwise_row("xor"))
emit(e.bitwise_not)(lambda s, x: s.wrap(s.do(f"not.{register_class(s.dtype)}", x)))


def _shift_row(name: str) -> ScalarRow:
    def row(s: ScalarContext, x: str, y: str) -> str:
        # The amount is 32 bits wide whatever is shifted.
        narrow = register_class(s.dtype) == "b64" and not is_immediate(y)
        amount = s.text.let("cvt.u32.u64", "b32", y) if narrow else y
        form = register_class(s.dtype) if name == "shl" else s.word
        return s.wrap(s.do(f"{name}.{form}", x, amount))

    return row


emit(e.shift_left)(_shift_row("shl"))
emit(e.shift_right)(_shift_row("shr"))


def _minmax_row(name: str, logic: str) -> ScalarRow:
    def row(s: ScalarContext, x: str, y: str) -> str:
        if s.kind == "b":
            return s.do(f"{logic}.pred", x, y)
        if s.word == "f32":
            return s.do(f"{name}.NaN.f32", x, y)
        found = s.do(f"{name}.{s.word}", x, y)
        return _propagate_nan(s, x, y, found) if s.word == "f64" else found

    return row


def _propagate_nan(s: ScalarContext, x: str, y: str, found: str) -> str:
    """NaN where either is, which min and max of f64 leave out."""
    number = s.text.let("setp.num.f64", "pred", materialise_operand(s.text, "f64", x), y)
    return s.do("selp.f64", found, s.number(float("nan")), number)


emit(e.maximum)(_minmax_row("max", "or"))
emit(e.minimum)(_minmax_row("min", "and"))
emit(e.neg)(lambda s, x: s.wrap(s.do(f"neg.{s.word.replace('u', 's')}", x)))


@emit(e.abs)
def _(s, x):
    return x if s.kind in "ub" else s.wrap(s.do(f"abs.{s.word}", x))


@emit(e.where)
def _(s, condition, x, y):
    return select_register(s.text, s.dtype, condition, x, y)


def _rounding_row(mode: str) -> ScalarRow:
    return lambda s, x: s.do(f"cvt.{mode}.{s.word}.{s.word}", x) if s.kind == "f" else x


emit(e.floor)(_rounding_row("rmi"))
emit(e.ceil)(_rounding_row("rpi"))
emit(e.round)(_rounding_row("rni"))


@emit(basic.cast)
def _(s, x):
    return convert_for_storage(s.text, s.dtype, TensorType((), s.out, s.policy), x)


@emit(truncate_bf16)
def _(s, x):
    bits = s.text.let("and.b32", "b32", s.text.let("mov.b32", "b32", x), "0xFFFF0000")
    return s.text.let("mov.b32", "f32", bits)


def _log2_immediate(s: ScalarContext, y: str) -> int:
    """The exponent of an immediate power of two, or -1."""
    known = is_immediate(y) and not y.startswith("0") and int(y) > 0 and int(y) & (int(y) - 1) == 0
    return int(y).bit_length() - 1 if known else -1


def floor_divide_integers(s: ScalarContext, x: str, y: str) -> tuple[str, str]:
    """The quotient of integers rounded down, and what it leaves."""
    if _log2_immediate(s, y) >= 0:
        return s.do(f"shr.{s.word}", x, _log2_immediate(s, y)), s.do(f"and.{register_class(s.dtype)}", x, int(y) - 1)
    quotient = s.do(f"div.{s.word}", x, y)
    rest = s.do(f"sub.{s.word}", x, s.do(f"mul.lo.{s.word}", quotient, y))
    if s.kind == "u":
        return quotient, rest
    cls = register_class(s.dtype)
    apart = s.text.let(f"setp.lt.{s.word}", "pred", s.do(f"xor.{cls}", rest, y), 0)
    some = s.text.let(f"setp.ne.{s.word}", "pred", rest, 0)
    fix = s.text.let("and.pred", "pred", apart, some)
    return (
        s.do(f"selp.{cls}", s.do(f"sub.{s.word}", quotient, 1), quotient, fix),
        s.do(f"selp.{cls}", s.do(f"add.{s.word}", rest, y), rest, fix),
    )


# The division of floats and integers that rounds down.


@emit(e.floor_divide)
def _(s: ScalarContext, x: str, y: str) -> str:
    return floor_divide_floats(s, x, y) if s.kind == "f" else s.wrap(floor_divide_integers(s, x, y)[0])


@emit(e.remainder)
def _(s: ScalarContext, x: str, y: str) -> str:
    return remainder_of_floats(s, x, y) if s.kind == "f" else s.wrap(floor_divide_integers(s, x, y)[1])


@emit(round_by_chance)
def _(s, x, draw):
    policy = s.policy or Policy(s.out)
    return emit_decomposition(s.text, build_stochastic_rounding(policy), x, draw)

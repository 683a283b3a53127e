"""Scalar arithmetic: the emission table of pointwise ops; each row gives the register of one element's result."""

from __future__ import annotations

from tessera.codegen.ptx.ops import truncate_bf16
from tessera.codegen.ptx.table.scalars.conversion import convert_for_storage, materialise_operand, select_register
from tessera.codegen.ptx.table.scalars.math_functions import (
    ScalarContext,
    ScalarRow,
    emit,
    emit_decomposition,
    floor_divide_floats,
    remainder_of_floats,
)
from tessera.codegen.ptx.text.builder import is_immediate, register_class
from tessera.core.types import Policy, TensorType
from tessera.lower.scalar_functions.small_floats import build_stochastic_rounding
from tessera.ops.tensor import basic
from tessera.ops.tensor import elementwise as e
from tessera.ops.tensor.random import round_by_chance

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

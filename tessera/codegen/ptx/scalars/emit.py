"""The emission table of the pointwise ops: each row gives the register of one element's result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tessera.codegen.ptx.ops import upper
from tessera.codegen.ptx.scalars.convert import wrapped
from tessera.codegen.ptx.scalars.policy import stored
from tessera.codegen.ptx.scalars.words import in_register, select
from tessera.codegen.ptx.text import Text
from tessera.codegen.ptx.types import is_immediate, literal, register_class, word
from tessera.op import Rules
from tessera.ops import basic
from tessera.ops import elementwise as e
from tessera.types import DType, Policy, TensorType

emit = Rules("ptx emission")
Row = Callable[..., str]


@dataclass(frozen=True)
class Spot:
    """What a row needs besides operands: where lines go, the type they are computed in, and the result's, which may
    have a policy."""

    text: Text
    dtype: DType
    out: DType
    policy: Policy | None = None

    @property
    def word(self) -> str:
        """The type word of instructions."""
        return word(self.dtype)

    @property
    def kind(self) -> str:
        """f, s, u or b: float, signed, unsigned, bool."""
        return {"float": "f", "int": "s", "uint": "u", "bool": "b"}[self.dtype.kind]

    def do(self, instruction: str, *operands: object) -> str:
        """An instruction on this type; its result's register."""
        return self.text.let(instruction, register_class(self.dtype), *operands)

    def number(self, value: float) -> str:
        """A constant of this type."""
        return literal(self.word, value)

    def wrap(self, x: str) -> str:
        """An integer brought back into its type's range."""
        return wrapped(self.text, self.dtype, x)


def _arithmetic(f: str, i: str) -> Row:
    def row(s: Spot, x: str, y: str) -> str:
        if s.kind == "f":
            return s.do(f"{f}.{s.word}", x, y)
        return s.wrap(s.do(f"{i}.{s.word}", x, y))

    return row


emit(e.add)(_arithmetic("add.rn", "add"))
emit(e.sub)(_arithmetic("sub.rn", "sub"))
emit(e.mul)(_arithmetic("mul.rn", "mul.lo"))
# Within 2 ulp over the whole range (PTX ISA, div.full): the bound is 2.5.
emit(e.div)(lambda s, x, y: s.do("div.full.f32" if s.word == "f32" else "div.rn.f64", x, y))
emit(e.sqrt)(lambda s, x: s.do(f"sqrt.rn.{s.word}", x))


@emit(e.rsqrt)
def _(s, x):
    if s.word == "f32":
        return s.do("rsqrt.approx.f32", x)
    return s.do("div.rn.f64", s.number(1.0), s.do("sqrt.rn.f64", x))


def _compare(name: str) -> Row:
    """A comparison; NaN makes each false but `ne`."""

    def row(s: Spot, x: str, y: str) -> str:
        if s.kind == "b":
            return _compare_bools(s, name, x, y)
        form = "neu" if name == "ne" and s.kind == "f" else name
        return s.text.let(f"setp.{form}.{s.word}", "pred", in_register(s.text, register_class(s.dtype), x), y)

    return row


def _compare_bools(s: Spot, name: str, x: str, y: str) -> str:
    if name in ("eq", "ne"):
        differ = s.text.let("xor.pred", "pred", x, y)
        return differ if name == "ne" else s.text.let("not.pred", "pred", differ)
    first, second = (s.text.let("selp.b32", "b32", 1, 0, each) for each in (x, y))
    return s.text.let(f"setp.{name}.u32", "pred", first, second)


emit(e.less)(_compare("lt"))
emit(e.less_equal)(_compare("le"))
emit(e.greater)(_compare("gt"))
emit(e.greater_equal)(_compare("ge"))
emit(e.equal)(_compare("eq"))
emit(e.not_equal)(_compare("ne"))


def _bitwise(name: str) -> Row:
    return lambda s, x, y: s.do(f"{name}.{register_class(s.dtype)}", x, y)


emit(e.bitwise_and)(_bitwise("and"))
emit(e.bitwise_or)(_bitwise("or"))
emit(e.bitwise_xor)(_bitwise("xor"))
emit(e.bitwise_not)(lambda s, x: s.wrap(s.do(f"not.{register_class(s.dtype)}", x)))


def _shift(name: str) -> Row:
    def row(s: Spot, x: str, y: str) -> str:
        # The amount is 32 bits wide whatever is shifted.
        narrow = register_class(s.dtype) == "b64" and not is_immediate(y)
        amount = s.text.let("cvt.u32.u64", "b32", y) if narrow else y
        form = register_class(s.dtype) if name == "shl" else s.word
        return s.wrap(s.do(f"{name}.{form}", x, amount))

    return row


emit(e.shift_left)(_shift("shl"))
emit(e.shift_right)(_shift("shr"))


def _extreme(name: str, logic: str) -> Row:
    def row(s: Spot, x: str, y: str) -> str:
        if s.kind == "b":
            return s.do(f"{logic}.pred", x, y)
        if s.word == "f32":
            return s.do(f"{name}.NaN.f32", x, y)
        found = s.do(f"{name}.{s.word}", x, y)
        return _or_nan(s, x, y, found) if s.word == "f64" else found

    return row


def _or_nan(s: Spot, x: str, y: str, found: str) -> str:
    """NaN where either is, which min and max of f64 leave out."""
    number = s.text.let("setp.num.f64", "pred", in_register(s.text, "f64", x), y)
    return s.do("selp.f64", found, s.number(float("nan")), number)


emit(e.maximum)(_extreme("max", "or"))
emit(e.minimum)(_extreme("min", "and"))
emit(e.neg)(lambda s, x: s.wrap(s.do(f"neg.{s.word.replace('u', 's')}", x)))


@emit(e.abs)
def _(s, x):
    return x if s.kind in "ub" else s.wrap(s.do(f"abs.{s.word}", x))


@emit(e.where)
def _(s, condition, x, y):
    return select(s.text, s.dtype, condition, x, y)


def _whole(mode: str) -> Row:
    return lambda s, x: s.do(f"cvt.{mode}.{s.word}.{s.word}", x) if s.kind == "f" else x


emit(e.floor)(_whole("rmi"))
emit(e.ceil)(_whole("rpi"))
emit(e.round)(_whole("rni"))


@emit(basic.cast)
def _(s, x):
    return stored(s.text, s.dtype, TensorType((), s.out, s.policy), x)


@emit(upper)
def _(s, x):
    bits = s.text.let("and.b32", "b32", s.text.let("mov.b32", "b32", x), "0xFFFF0000")
    return s.text.let("mov.b32", "f32", bits)


def _power(s: Spot, y: str) -> int:
    """The exponent of an immediate power of two, or -1."""
    known = is_immediate(y) and not y.startswith("0") and int(y) > 0 and int(y) & (int(y) - 1) == 0
    return int(y).bit_length() - 1 if known else -1


def floored(s: Spot, x: str, y: str) -> tuple[str, str]:
    """The quotient of integers rounded down, and what it leaves."""
    if _power(s, y) >= 0:
        return s.do(f"shr.{s.word}", x, _power(s, y)), s.do(f"and.{register_class(s.dtype)}", x, int(y) - 1)
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

"""Scalar rows: the emission table of pointwise ops and its context; math functions: emission of scalar decompositions,
and the decompositions that use instructions of this target."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np

from tessera.codegen.ptx.ops import exp2_ftz
from tessera.codegen.ptx.text.builder import PtxBuilder, literal, ptx_type, register_class, typed_literal
from tessera.core.errors import UnsupportedOpError
from tessera.core.types import DType, Policy, f32, f64, int4, int8, int16, uint8, uint16
from tessera.ir.core import Function, Node, Value
from tessera.ir.rules import Op, Rules
from tessera.ir.tensor import Tensor, bind_op
from tessera.lower.scalar_functions import double_precision
from tessera.lower.scalar_functions.decomposition import SHARED, evaluate_polynomial
from tessera.lower.scalar_functions.quarter_turns import SMALL_ANGLE_F32
from tessera.lower.scalar_functions.single_precision import SMALL_TRIGONOMETRIC_RULES, tanh_near_zero
from tessera.ops.dialects import arith
from tessera.ops.dialects.arith import copysign, define_primitive, fma
from tessera.ops.tensor import basic, bits
from tessera.ops.tensor import elementwise as e
from tessera.ops.tensor.elementwise import infer_same, where

# row(context, *registers) gives the register of one element's result.
emit = Rules("ptx emission")
ScalarRow = Callable[..., str]

INTEGER_LIMITS = {int4: (-8, 7), int8: (-128, 127), int16: (-32768, 32767), uint8: (0, 255), uint16: (0, 65535)}


@dataclass(frozen=True)
class ScalarContext:
    """What a row needs besides operands: where lines go, the type they are computed in, and the result's, which may
    have a policy."""

    text: PtxBuilder
    dtype: DType
    out: DType
    policy: Policy | None = None

    @property
    def word(self) -> str:
        """The type word of instructions."""
        return ptx_type(self.dtype)

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
        return wrap_integer(self.text, self.dtype, x)


def wrap_integer(text: PtxBuilder, dtype: DType, x: str) -> str:
    """The low bits of 32 as the narrow integer that they are."""
    if dtype not in INTEGER_LIMITS:
        return x
    return text.let(f"bfe.{'u' if dtype.kind == 'uint' else 's'}32", "b32", x, 0, dtype.bits)


# Emission of decompositions: an IR function of scalars as instructions on the registers of one element.


def emit_decomposition(text: PtxBuilder, function: Function, *operands: str) -> str:
    """The register of the result of a decomposition."""
    registers: dict[Value, str] = dict(zip(function.params, operands, strict=True))
    constants, steps = _plan(function)
    registers.update(constants)
    for node, rule, dtype, out in steps:
        registers[node.out] = rule(ScalarContext(text, dtype, out), *[registers[v] for v in node.args])
    return registers[function.results[0]]


Step = tuple[Node, ScalarRow, DType, DType]  # a node, its row, and the element types of operands and result
_PLANS: dict[int, tuple[Function, dict[Value, str], list[Step]]] = {}  # by the identity of a function, which it keeps


def _plan(function: Function) -> tuple[dict[Value, str], list[Step]]:
    """The literals and steps of a decomposition, which is emitted once for each element."""
    if id(function) not in _PLANS:
        constants, steps = {}, []
        for node in function.body.nodes:
            out = node.out.type.dtype  # type: ignore[union-attr]
            if node.op is basic.full:
                constants[node.out] = typed_literal(node.attrs["value"], out)
            else:
                steps.append((node, emit.of(node.op), node.types[-1].dtype, out))  # type: ignore[union-attr]
        _PLANS[id(function)] = function, constants, steps
    return _PLANS[id(function)][1:]


# The rows of the ops that occur in decompositions alone.


@emit(arith.bitcast, bits.bitcast_elements)
def _(s, x):
    bits = s.out.bits
    return s.text.let(f"mov.b{bits}", f"{'f' if s.out.is_float else 'b'}{bits}", x)


@emit(arith.fma)
def _(s, x, y, z):
    return s.do(f"fma.rn.{s.word}", x, y, z)


@emit(arith.multiply_high)
def _(s, x, y):
    return s.do("mul.hi.u64", x, y)


@emit(arith.copysign)
def _(s, x, y):
    return s.do(f"copysign.{s.word}", y, x)


@emit(arith.divide)
def _(s, x, y):
    return s.do(f"div.rn.{s.word}", x, y)


@emit(arith.is_nan)
def _(s, x):
    return s.text.let(f"setp.nan.{s.word}", "pred", x, x)


@emit(arith.trunc)
def _(s, x):
    return s.do(f"cvt.rzi.{s.word}.{s.word}", x)


@emit(arith.extract_bit)
def _(s, x, n):
    return s.do("bfe.u32", x, n, 1)


@emit(arith.fmod)
def _(s, x, y):
    if s.dtype != f32:
        return _emit_fmod(s.text, x, y)
    wide = [s.text.let("cvt.f64.f32", "f64", each) for each in (x, y)]
    return s.text.let("cvt.rn.f32.f64", "f32", _emit_fmod(s.text, *wide))


DOUBLE_ZERO, DOUBLE_INFINITY, DOUBLE_NAN = "0d0000000000000000", "0d7FF0000000000000", "0d7FF8000000000000"
DOUBLE_2_TO_537 = "0d6180000000000000"


def _emit_fmod(text: PtxBuilder, x: str, y: str) -> str:
    """What is left of f64 `x` when whole multiples of `y` are taken away: exact.

    Each round takes away a multiple of 26 bits, rounded down, so that the rest is exact as well. It is a multiple of
    `y`, or of `y` by 2^537 or 2^1074 where that is below the rest: so no quotient overflows.
    """
    large, size = text.let("abs.f64", "f64", x), text.let("abs.f64", "f64", y)
    usable = text.let("setp.gt.f64", "pred", size, DOUBLE_ZERO)
    finite = text.let("setp.lt.f64", "pred", large, DOUBLE_INFINITY)
    fine = text.let("and.pred", "pred", usable, finite)
    rest = text.let("selp.f64", "f64", large, DOUBLE_NAN, fine)
    larger = text.let("mul.rn.f64", "f64", size, DOUBLE_2_TO_537)
    largest = text.let("mul.rn.f64", "f64", larger, DOUBLE_2_TO_537)
    again, done = text.new_label("again"), text.new_label("done")
    text.label(again)
    text.do(f"bra {done}", guard=text.let("setp.ltu.f64", "pred", rest, size))
    divisor = size
    for scaled in (larger, largest):
        divisor = text.let("selp.f64", "f64", scaled, divisor, text.let("setp.ge.f64", "pred", rest, scaled))
    quotient = text.let("cvt.rzi.f64.f64", "f64", text.let("div.rz.f64", "f64", rest, divisor))
    bits = text.let("and.b64", "b64", text.let("mov.b64", "b64", quotient), "0xFFFFFFFFF8000000")
    taken = text.let("neg.f64", "f64", text.let("mov.b64", "f64", bits))
    text.do("fma.rn.f64", rest, taken, divisor, rest)
    text.do(f"bra {again}")
    text.label(done)
    return text.let("copysign.f64", "f64", x, rest)


# Math functions: emission rows by decomposition, and the decompositions that use instructions of this target.
#
# Those of f32 are built on the hardware's power of two. Each result lies within the bounds of the OpenCL full profile;
# `tests/codegen/ptx/test_ptx_functions.py` measures them.


POWERS_OF_TWO = (e.exp, e.exp2, e.tanh, e.erf)  # of f32 by the hardware's power of two
DECOMPOSITIONS = SHARED.without(lambda op, dtype: dtype == f32 and op in POWERS_OF_TWO)


@define_primitive(infer_same, dialect="ptx")
def rcp_ftz(x):
    """1 divided by `x` to about 23 bits, where subnormal numbers count as 0."""
    return np.reciprocal(x)


def exp2_ftz_of(x: Tensor) -> Tensor:
    """2^x to about 22 bits, where subnormal numbers count as 0."""
    return bind_op(exp2_ftz, [x], {})


@emit(rcp_ftz)
def _(s, x):
    return s.do("rcp.approx.ftz.f32", x)


@DECOMPOSITIONS(e.exp, f32)
def exp_f32(x: Tensor) -> Tensor:
    """exp(x) = 2^y * (1 + c), y = x * log2(e) rounded, c for its rounding error; 2^y is as good for large y."""
    x = e.maximum(e.minimum(x, 89.0), -110.0)
    y = x * 1.44269504
    rest = fma(x, 1.44269504, -y)
    rest = fma(x, 1.92596303e-8, rest)
    correction = fma(rest, 0.693147181, 1.0)
    return e.exp2(y) * correction


@DECOMPOSITIONS(e.tanh, f32)
def tanh_f32(x: Tensor) -> Tensor:
    """1 - 2 / (exp(2 |x|) + 1) from 0.625 on, where the errors of the approximate instructions count for little."""
    size = e.abs(x)
    power = exp2_ftz_of(size * 2.88539008)
    far = fma(rcp_ftz(power + 1.0), -2.0, 1.0)
    return copysign(where(size < 0.625, tanh_near_zero(x), far), x)


def erf_near_zero(x: Tensor, square: Tensor) -> Tensor:
    """erf(x) for |x| < 0.9277: an odd polynomial."""
    q = evaluate_polynomial(
        square, -5.96761703e-4, 4.99119423e-3, -2.67681349e-2, 1.12819925e-1, -3.76125336e-1, 1.28379166e-1
    )  # fmt: skip
    return fma(q, x, x)


@DECOMPOSITIONS(e.erf, f32)
def erf_f32(x: Tensor) -> Tensor:
    """The fit of N. Juffa, its exponent in powers of two."""
    size = e.abs(x)
    t = e.minimum(size, 4.0)
    square = t * t
    high = fma(-2.49374844e-05, t, 0.000552836593)
    low = fma(-0.00560337615, t, 0.0349920227)
    p = evaluate_polynomial(t, fma(high, square, low), -0.154047914, -0.915890167, -1.62839516)
    power = exp2_ftz_of(p * t)
    far = copysign(1.0 - power, x)
    return where(size > 0.927734375, far, erf_near_zero(x, square))


# Emission rows.


find_decomposition = cache(DECOMPOSITIONS.find)  # asked for each element; the table is complete here


def _make_row(op: Op) -> Callable[..., str]:
    def row(s: ScalarContext, *operands: str) -> str:
        function = find_decomposition(op, f64 if s.word == "f64" else f32)
        if function is None:
            raise UnsupportedOpError(f"the target ptx has no {op.__name__} of {s.word}", suggestion="cast to ts.f32")
        return emit_decomposition(s.text, function, *operands)

    return row


MATH_FUNCTIONS = DECOMPOSITIONS.ops() | {e.exp2}
for _op in MATH_FUNCTIONS - {e.exp2, e.floor_divide, e.remainder, *double_precision.TRIGONOMETRIC_RULES}:
    emit(_op)(_make_row(_op))
_exp2_by_decomposition = _make_row(e.exp2)


@emit(e.exp2)
def _(s, x):
    return s.do("ex2.approx.f32", x) if s.word == "f32" else _exp2_by_decomposition(s, x)


def _make_trigonometric_row(op: Op) -> Callable[..., str]:
    """The row that computes the rule of large angles for threads that have one."""
    near_f64, far_f64, _ = double_precision.TRIGONOMETRIC_RULES[op]
    near_f32 = SMALL_TRIGONOMETRIC_RULES[op]

    def row(s: ScalarContext, x: str) -> str:
        if s.word == "f64":
            word, limit = "f64", double_precision.SMALL_ANGLE
            near, far = (DECOMPOSITIONS.build(rule, f64) for rule in (near_f64, far_f64))
        else:
            word, limit = "f32", SMALL_ANGLE_F32
            near, far = DECOMPOSITIONS.build(near_f32, f32), find_decomposition(op, f32)  # type: ignore[assignment]
        found = s.text.new(word)
        s.text.do(f"mov.{word}", found, emit_decomposition(s.text, near, x))
        done, size = s.text.new_label("done"), s.text.let(f"abs.{word}", word, x)
        s.text.do(f"bra {done}", guard=s.text.let(f"setp.lt.{word}", "pred", size, s.number(limit)))
        s.text.do(f"mov.{word}", found, emit_decomposition(s.text, far, x))
        s.text.label(done)
        return found

    return row


for _op in double_precision.TRIGONOMETRIC_RULES:
    emit(_op)(_make_trigonometric_row(_op))
floor_divide_floats, remainder_of_floats = _make_row(e.floor_divide), _make_row(e.remainder)

"""Scalar functions: definitions for any vector width, emission of their decompositions, and conversions in registers:
memory formats, casts, and rounding by a policy.

Small floats are decoded, encoded and rounded by the codec of tessera/lower/scalar_functions. f64 is narrowed by
rounding to odd (Boldo and Melquiond 2008). Policies round toward zero or stochastically, saturate, and flush denormals.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING

from tessera.codegen.contract import is_special_policy
from tessera.codegen.llvm.table.emission import RowTypes, find_row, format_call, pointwise_row
from tessera.codegen.llvm.text import power_scaling
from tessera.codegen.llvm.text.builder import (
    NARROW_FLOATS,
    RegisterType,
    copy_register,
    get_memory_type,
    get_register_type,
)
from tessera.core.errors import Location, UnsupportedOpError
from tessera.core.types import DType, Policy, TensorType, bf16, bool_, f16, f32, f64, int4, tf32
from tessera.ir.core import Function
from tessera.ir.numerics.conversion import FINITE_ONLY, find_float_grid
from tessera.ir.rules import Op
from tessera.ir.tensor import Tensor
from tessera.lower.scalar_functions import double_precision
from tessera.lower.scalar_functions.decomposition import SHARED
from tessera.lower.scalar_functions.single_precision import make_trigonometric_rule, split_exp, split_exp2
from tessera.lower.scalar_functions.small_floats import (
    SMALL_FLOAT_FORMATS,
    build_decoder,
    build_double_truncation,
    build_exact_encoder,
    build_flush,
    build_mantissa_rounding,
    build_rounding,
    build_rounding_to_odd,
    build_saturation,
    build_stochastic_rounding,
    build_truncation,
    decode_shift,
)
from tessera.ops.dialects import arith
from tessera.ops.tensor import basic
from tessera.ops.tensor import elementwise as e

if TYPE_CHECKING:
    from tessera.core.types import DType
    from tessera.ir.core import Node, Value


# Emission of decompositions: an IR function of scalars as instructions on vector registers of any width.


def inline_function(function: Function, width: int, d: str, *operands: str) -> Iterator[str]:
    """The instructions of a decomposition; `d` holds its result, `d.0`, `d.1`, ... the values before."""
    names: dict[Value, str] = dict(zip(function.params, operands, strict=True))
    (result,) = function.results
    for number, node in enumerate(function.body.nodes):
        if node.op is basic.full:
            names[node.out] = get_register_type(node.attrs["dtype"], width).const(node.attrs["value"])
            continue
        name = d if node.out is result else f"{d}.{number}"
        yield from _emit_node(node, width, name, [names[v] for v in node.args])
        names[node.out] = name


def _emit_node(node: Node, width: int, d: str, operands: Sequence[str]) -> Iterator[str]:
    dtype: DType = node.types[-1].dtype  # type: ignore[union-attr]
    t = get_register_type(dtype, width)
    if node.op in (basic.cast, arith.bitcast):
        to = get_register_type(node.out.type.dtype, width)
        word = "bitcast" if node.op is arith.bitcast else _choose_conversion(t, to)
        yield f"{d} = {word} {t} {operands[0]} to {to}"
    else:
        yield from find_row(node)(RowTypes(t, dtype), d, *operands)


def _choose_conversion(source: RegisterType, to: RegisterType) -> str:
    """The instruction that converts signed integers or floats of 32 and 64 bits, but for floats to integers."""
    if source.is_float:
        return "fpext" if to.bits > source.bits else "fptrunc"
    if to.is_float:
        return "sitofp"
    return "sext" if to.bits > source.bits else "trunc"


# The rows of the ops that occur in decompositions alone.


@pointwise_row(arith.fma)
def _(s, d, x, y, z):
    yield f"{d} = {format_call('llvm.fma', s.t, x, y, z)}"


@pointwise_row(arith.copysign)
def _(s, d, x, y):
    yield f"{d} = {format_call('llvm.copysign', s.t, x, y)}"


@pointwise_row(arith.divide)
def _(s, d, x, y):
    yield f"{d} = fdiv {s.t} {x}, {y}"


@pointwise_row(arith.fmod)
def _(s, d, x, y):
    yield f"{d} = frem {s.t} {x}, {y}"


@pointwise_row(arith.trunc)
def _(s, d, x):
    yield f"{d} = {format_call('llvm.trunc', s.t, x)}"


@pointwise_row(arith.extract_bit)
def _(s, d, x, n):
    yield f"{d}.s = lshr {s.t} {x}, {n}"
    yield f"{d} = and {s.t} {d}.s, {s.t.const(1)}"


@pointwise_row(arith.is_nan)
def _(s, d, x):
    yield f"{d} = fcmp uno {s.t} {x}, {x}"


# Math functions: definitions of the scalar functions that a text calls, for any vector width.
#
# Functions of f32 are decompositions (tessera/lower/scalar_functions); those of f64 call the C library element by
# element. Sine and cosine of very large f32 do the same.


assert double_precision  # fills the table of decompositions

# Up to here two parts of pi/2 reduce the argument of sine and cosine with enough digits.
LARGE_ARGUMENT = 2.0**28
DIVISIONS = {e.floor_divide, e.remainder}
# Of f64: the functions that are LLVM's intrinsics, and those of the C library.
INTRINSICS = (e.exp, e.exp2, e.log, e.log2, e.tanh, e.sin, e.cos, e.pow)
LIBC_FUNCTIONS = (e.erf,)
SCALED = {e.exp: split_exp, e.exp2: split_exp2}  # of f32: other functions call these
DECOMPOSITIONS = SHARED.without(
    lambda op, dtype: op in SCALED if dtype == f32 else dtype == f64 and op in (*INTRINSICS, *LIBC_FUNCTIONS)
)
_OPS = {op.__name__: op for op in SHARED.ops()}
_CALL_PATTERN = re.compile(r"@ts\.(?P<name>[a-z_]\w*)\.(?:v(?P<width>\d+))?f(?P<bits>32|64)\(")


def _make_row(op: Op) -> Callable[..., Iterator[str]]:
    """The row that calls a function defined here."""

    def row(s: RowTypes, d: str, *operands: str) -> Iterator[str]:
        _check_definition(op.__name__, s.t)
        yield f"{d} = {format_call(f'ts.{op.__name__}', s.t, *operands)}"

    return row


for _op in SHARED.ops() - DIVISIONS:
    pointwise_row(_op)(_make_row(_op))


def define_called_functions(lines: Iterable[str]) -> list[str]:
    """The functions that lines call, and those that these call."""
    made: dict[str, tuple[str, ...]] = {}
    waiting = list(lines)
    while waiting:
        line = waiting.pop()
        for found in _CALL_PATTERN.finditer(line) if " call " in line else ():
            whole = found[0][:-1]
            if whole not in made:
                made[whole] = _define(found["name"], _parse_suffix(found["width"], found["bits"]))
                waiting += made[whole]
    return [line for name in sorted(made) for line in [*made[name], ""]]


def _parse_suffix(width: str | None, bits: str) -> RegisterType:
    return RegisterType("float" if bits == "32" else "double", int(width or 1))


def _check_definition(name: str, t: RegisterType) -> None:
    """Refuse a function that has neither a decomposition for the type nor a function of LLVM or the C library.

    Raises:
        UnsupportedOpError: it has none; the caller adds the line.
    """
    op = _OPS[name]
    if DECOMPOSITIONS.find(op, f32 if t.element == "float" else f64) is None and not _is_native(name, t):
        raise UnsupportedOpError(
            f"the target llvm cannot emit {op.name} of {'f32' if t.element == 'float' else 'f64'}: it has no "
            "decomposition for this type, and LLVM and the C library have no such function",
            suggestion="cast to ts.f32, or add a decomposition: docs/adding-an-op.md",
        )


def _is_native(name: str, t: RegisterType) -> bool:
    """Whether a function is special, an intrinsic of LLVM or a function of the C library."""
    return (name, t.element) in SPECIAL_DEFINITIONS or _OPS.get(name) in (*INTRINSICS, *LIBC_FUNCTIONS)


@cache
def _define(name: str, t: RegisterType) -> tuple[str, ...]:
    """The definition of a function, which depends on its name and type alone."""
    special, op = SPECIAL_DEFINITIONS.get((name, t.element)), _OPS.get(name)
    if special is not None:
        return tuple(special(t))
    function = None if op is None else DECOMPOSITIONS.find(op, f32 if t.element == "float" else f64)
    return tuple(_define_by_libc(name, t) if function is None else _define_by_decomposition(name, t, function))


def _define_by_decomposition(name: str, t: RegisterType, function: Function) -> Iterator[str]:
    operands = [f"%{x}" for x in "xy"[: len(function.params)]]
    yield f"define internal {t} @ts.{name}.{t.suffix}({_format_operands(t, operands)}) alwaysinline #0 {{"
    yield "entry:"
    yield from (f"  {line}" for line in inline_function(function, t.width, "%r", *operands))
    yield f"  ret {t} %r"
    yield "}"


def _format_operands(t: RegisterType, operands: Iterable[str]) -> str:
    return ", ".join(f"{t} {x}" for x in operands)


# Functions of the C library, element by element.


def _define_by_libc(name: str, t: RegisterType) -> Iterator[str]:
    one = RegisterType(t.element)
    operands = "xy"[: 1 + (name == "pow")]
    yield f"define internal {t} @ts.{name}.{t.suffix}({_format_operands(t, [f'%{x}' for x in operands])}) #0 {{"
    yield "entry:"
    if t.width == 1:
        yield f"  %r = {_format_libc_call(name, one, [f'%{x}' for x in operands])}"
        yield f"  ret {t} %r"
    else:
        for n in range(t.width):
            for x in operands:
                yield f"  %{x}{n} = extractelement {t} %{x}, i64 {n}"
            yield f"  %r{n} = {_format_libc_call(name, one, [f'%{x}{n}' for x in operands])}"
            yield f"  %v{n} = insertelement {t} {'poison' if n == 0 else f'%v{n - 1}'}, {one} %r{n}, i64 {n}"
        yield f"  ret {t} %v{t.width - 1}"
    yield "}"


def _format_libc_call(name: str, one: RegisterType, operands: Iterable[str]) -> str:
    _check_definition(name, one)
    called = name if _OPS[name] in LIBC_FUNCTIONS else f"llvm.{name}.{one.suffix}"
    return f"call {one} @{called}({_format_operands(one, operands)})"


# Sine and cosine of f32: by decomposition, and by the C library where an element is very large.


def _make_trigonometric_definition(name: str, ahead: int) -> Callable[[RegisterType], Iterator[str]]:
    rule = make_trigonometric_rule(ahead, parts=2)

    def define(t: RegisterType) -> Iterator[str]:
        yield f"define internal {t} @ts.{name}.{t.suffix}({t} %x) alwaysinline #0 {{"
        yield "entry:"
        function = DECOMPOSITIONS.build(rule, f32)
        yield from (f"  {line}" for line in inline_function(function, t.width, "%small", "%x"))
        yield f"  %a = call {t} @llvm.fabs.{t.suffix}({t} %x)"
        yield f"  %large = fcmp oge {t} %a, {t.const(LARGE_ARGUMENT)}"
        yield f"  %any = {_emit_any_lane(t)}"
        yield "  br i1 %any, label %far, label %done"
        yield "far:"
        yield f"  %exact = call {t} @ts.{name}_large.{t.suffix}({t} %x)"
        yield f"  %mixed = select {t.truth} %large, {t} %exact, {t} %small"
        yield "  br label %done"
        yield "done:"
        yield f"  %r = phi {t} [ %small, %entry ], [ %mixed, %far ]"
        yield f"  ret {t} %r"
        yield "}"

    return define


def _emit_any_lane(t: RegisterType) -> str:
    if t.width == 1:
        return "or i1 %large, false"
    return f"call i1 @llvm.vector.reduce.or.{t.truth.suffix}({t.truth} %large)"


def _define_for_large_arguments(name: str) -> Callable[[RegisterType], Iterator[str]]:
    """The function for all elements by the C library's in f64; seldom called, hence never inlined."""

    def define(t: RegisterType) -> Iterator[str]:
        wide = t.of("double")
        yield f"define internal {t} @ts.{name}_large.{t.suffix}({t} %x) noinline #0 {{"
        yield "entry:"
        yield f"  %d = fpext {t} %x to {wide}"
        yield f"  %s = call {wide} @ts.{name}.{wide.suffix}({wide} %d)"
        yield f"  %r = fptrunc {wide} %s to {t}"
        yield f"  ret {t} %r"
        yield "}"

    return define


# Exponential functions of f32: a polynomial, and an instruction of AVX-512 that scales by powers of two.


def _make_scaled_definition(op: Op) -> Callable[[RegisterType], Iterator[str]]:
    """An exponential function: full registers of AVX-512 are scaled by a function that the runtime may replace."""

    def significand(x: Tensor) -> Tensor:
        return SCALED[op](x)[0]

    def exponent(x: Tensor) -> Tensor:
        return SCALED[op](x)[1]

    def define(t: RegisterType) -> Iterator[str]:
        if t.width != power_scaling.WIDTH:
            whole = SHARED.find(op, f32)
            assert whole is not None
            yield from _define_by_decomposition(op.__name__, t, whole)
            return
        yield f"define internal {t} @ts.{op.__name__}.{t.suffix}({t} %x) alwaysinline #0 {{"
        yield "entry:"
        for d, rule in (("%p", significand), ("%n", exponent)):
            yield from (f"  {line}" for line in inline_function(DECOMPOSITIONS.build(rule, f32), t.width, d, "%x"))
        yield f"  %r = call {t} @{power_scaling.SCALE_BY_POWER}({t} %p, {t} %n)"
        yield f"  ret {t} %r"
        yield "}"

    return define


SPECIAL_DEFINITIONS: dict[tuple[str, str], Callable[[RegisterType], Iterator[str]]] = {
    **{(op.__name__, "float"): _make_scaled_definition(op) for op in SCALED},
    ("scale_by_power", "float"): lambda t: iter(power_scaling.DEFINITION),
    ("sin", "float"): _make_trigonometric_definition("sin", 0),
    ("cos", "float"): _make_trigonometric_definition("cos", 1),
    ("sin_large", "float"): _define_for_large_arguments("sin"),
    ("cos_large", "float"): _define_for_large_arguments("cos"),
}


# Conversions in registers: widen, round to a narrow format, cast, and to and from memory's form.


Lines = Iterator[str]
DROPPED_BITS = {bf16: 16, tf32: 13}  # of the mantissa of an f32, which the type lacks


def decode_from_memory(dtype: DType, width: int, d: str, x: str) -> Lines:
    """Memory's form to a register."""
    m, t = get_memory_type(dtype, width), get_register_type(dtype, width)
    if dtype == bool_:
        yield f"{d} = icmp ne {m} {x}, {m.const(0)}"
    elif dtype == f16:
        yield f"{d} = fpext {m} {x} to {t}"
    elif dtype == bf16:
        i = t.integer
        yield f"{d}.w = zext {m} {x} to {i}"
        yield f"{d}.s = shl {i} {d}.w, {i.const(16)}"
        yield f"{d} = bitcast {i} {d}.s to {t}"
    elif dtype == int4:
        yield f"{d}.h = shl {m} {x}, {m.const(4)}"
        yield f"{d}.s = ashr {m} {d}.h, {m.const(4)}"
        yield f"{d} = sext {m} {d}.s to {t}"
    elif dtype in SMALL_FLOAT_FORMATS:
        i = t.integer
        yield f"{d}.w = zext {m} {x} to {i}"
        yield f"{d}.s = shl {i} {d}.w, {i.const(decode_shift(dtype))}"
        yield from inline_function(build_decoder(dtype), width, d, f"{d}.s")


def encode_to_memory(dtype: DType, width: int, d: str, x: str) -> Lines:
    """A register to memory's form; the value is already rounded, so that this is exact."""
    m, t = get_memory_type(dtype, width), get_register_type(dtype, width)
    if dtype == bool_:
        yield f"{d} = zext {t} {x} to {m}"
    elif dtype == f16:
        yield f"{d} = fptrunc {t} {x} to {m}"
    elif dtype == bf16:
        i = t.integer
        yield f"{d}.b = bitcast {t} {x} to {i}"
        yield f"{d}.s = lshr {i} {d}.b, {i.const(16)}"
        yield f"{d} = trunc {i} {d}.s to {m}"
    elif dtype == int4:
        yield f"{d}.c = trunc {t} {x} to {m}"
        yield f"{d} = and {m} {d}.c, {m.const(15)}"
    elif dtype in SMALL_FLOAT_FORMATS:
        yield from inline_function(build_exact_encoder(dtype), width, f"{d}.c", x)
        yield f"{d} = trunc {t.integer} {d}.c to {m}"


def has_memory_format(dtype: DType) -> bool:
    """Whether memory's form differs from the register's."""
    return get_memory_type(dtype).element != get_register_type(dtype).element


def round_to_format(dtype: DType, width: int, d: str, x: str) -> Lines:
    """An f32 rounded to the nearest value of a narrow format, ties to even."""
    t = RegisterType("float", width)
    if dtype == f16:
        h = t.of("half")
        yield f"{d}.h = fptrunc {t} {x} to {h}"
        yield f"{d} = fpext {h} {d}.h to {t}"
    elif dtype in SMALL_FLOAT_FORMATS:
        yield from inline_function(build_rounding(dtype), width, d, x)
    else:
        yield from inline_function(build_mantissa_rounding(DROPPED_BITS[dtype]), width, d, x)


def needs_rounding(dtype: DType) -> bool:
    """Whether a result computed in f32 must be rounded to this type."""
    return dtype in NARROW_FLOATS


def cast_lanes(source: DType, to: DType, width: int, d: str, x: str) -> Lines:
    """`x` converted: nearest-even; float to integer toward zero, saturating, NaN to 0."""
    s, t = get_register_type(source, width), get_register_type(to, width)
    if to == bool_:
        compare = "fcmp une" if source.is_float else "icmp ne"
        yield f"{d} = {compare} {s} {x}, {s.const(0)}"
    elif source.is_float and to.is_float:
        yield from _cast_float_to_float(source, to, width, d, x)
    elif to == int4:
        yield from _cast_to_int4(source, s, t, d, x)
    elif source.is_float:
        sign = "s" if to.kind == "int" else "u"
        yield f"{d} = call {t} @llvm.fpto{sign}i.sat.{t.suffix}.{s.suffix}({s} {x})"
    elif to.is_float:
        yield from _cast_integer_to_float(source, to, width, d, x)
    else:
        yield _cast_integer_to_integer(source, s, t, d, x)


def _cast_to_int4(source: DType, s: RegisterType, t: RegisterType, d: str, x: str) -> Lines:
    """Four bits: floats saturate, integers wrap."""
    if source.is_float:
        yield f"{d}.w = call {t} @llvm.fptosi.sat.{t.suffix}.{s.suffix}({s} {x})"
        yield f"{d}.l = call {t} @llvm.smax.{t.suffix}({t} {d}.w, {t} {t.const(-8)})"
        yield f"{d} = call {t} @llvm.smin.{t.suffix}({t} {d}.l, {t} {t.const(7)})"
        return
    yield _cast_integer_to_integer(source, s, t, f"{d}.w", x)
    yield f"{d}.h = shl {t} {d}.w, {t.const(12)}"
    yield f"{d} = ashr {t} {d}.h, {t.const(12)}"


def _cast_integer_to_integer(source: DType, s: RegisterType, t: RegisterType, d: str, x: str) -> str:
    if s.bits == t.bits:
        return copy_register(s, d, x)
    word = "trunc" if t.bits < s.bits else "sext" if source.kind == "int" else "zext"
    return f"{d} = {word} {s} {x} to {t}"


def _cast_integer_to_float(source: DType, to: DType, width: int, d: str, x: str) -> Lines:
    s, t = get_register_type(source, width), get_register_type(to, width)
    convert = f"{'s' if source.kind == 'int' else 'u'}itofp {s} {x} to {t}"
    if to in DROPPED_BITS and source.bits > 16:
        # Not every one is an f32: only the last rounding counts.
        yield from _widen_to_odd(source, width, f"{d}.o", x)
        yield from _cast_float_to_float(f64, to, width, d, f"{d}.o")
    elif to in NARROW_FLOATS:
        yield f"{d}.c = {convert}"
        yield from round_to_format(to, width, d, f"{d}.c")
    else:
        yield f"{d} = {convert}"


def _widen_to_odd(source: DType, width: int, d: str, x: str) -> Lines:
    """An integer as f64; one beyond 53 bits is rounded to odd, so that a second rounding is exact."""
    s, t, sign = get_register_type(source, width), get_register_type(f64, width), "su"[source.kind != "int"]
    if source.bits == 64:
        b, start = s.of("i1"), 2**53 if sign == "s" else 0  # an offset that makes the numbers of 53 bits the least
        yield f"{d}.p = add {s} {x}, {s.const(start)}"
        yield f"{d}.f = icmp ult {s} {d}.p, {s.const(2**53 + start)}"
        yield f"{d}.l = and {s} {x}, {s.const(2047)}"
        yield f"{d}.n = icmp ne {s} {d}.l, {s.const(0)}"
        yield f"{d}.q = select {b} {d}.n, {s} {s.const(2048)}, {s} {s.const(0)}"
        yield f"{d}.k = and {s} {x}, {s.const(-2048)}"
        yield f"{d}.c = or {s} {d}.k, {d}.q"
        yield f"{d}.i = select {b} {d}.f, {s} {x}, {s} {d}.c"
        x = f"{d}.i"
    yield f"{d} = {sign}itofp {s} {x} to {t}"


def _cast_float_to_float(source: DType, to: DType, width: int, d: str, x: str) -> Lines:
    s, t = get_register_type(source, width), get_register_type(to, width)
    if source == f64 and to in NARROW_FLOATS:
        yield from inline_function(build_rounding_to_odd(), width, f"{d}.t", x)
        yield from round_to_format(to, width, d, f"{d}.t")
    elif s.bits != t.bits:
        yield f"{d} = {'fpext' if t.bits > s.bits else 'fptrunc'} {s} {x} to {t}"
    elif to in NARROW_FLOATS and to != source:
        yield from round_to_format(to, width, d, x)
    else:
        yield copy_register(s, d, x)


def is_register_copy(source: DType, to: DType) -> bool:
    """Whether a register of one type, widened to the other, stays as it is."""
    return source == to or (to == f32 and source in NARROW_FLOATS)


# Storing under a policy: rounding toward zero, saturation and flushed denormals, from the f32 that was computed.


def round_by_policy(wide: DType, type: TensorType, width: int, d: str, x: str) -> Lines:
    """A register of the type that was computed in, as its storage has it."""
    policy, dtype = type.policy, type.dtype
    if policy is None or not is_special_policy(policy) or not dtype.is_float:
        yield from cast_lanes(wide, dtype, width, d, x)
        return
    if wide is not f32:
        yield from _narrow_for_policy(wide, type, width, f"{d}.in", x)
        x = f"{d}.in"
    grid, flush = find_float_grid(dtype), policy.denormals == "flush"
    if policy.rounding == "toward_zero" and dtype is not f32:
        yield from inline_function(build_truncation(dtype), width, f"{d}.tz", x)
        x = f"{d}.tz"
    if policy.saturate or dtype in FINITE_ONLY:
        yield from inline_function(build_saturation(f32, grid.top), width, f"{d}.sa", x)
        x = f"{d}.sa"
    yield from cast_lanes(f32, dtype, width, f"{d}.ro" if flush else d, x)
    if flush:
        yield from inline_function(build_flush(f32, 2.0**grid.least), width, d, f"{d}.ro")


def _narrow_for_policy(wide: DType, type: TensorType, width: int, d: str, x: str) -> Lines:
    """A register as f32 from which it is rounded to its storage: an integer that f32 lacks is rounded there once."""
    if wide.is_float or wide.bits <= 16:
        yield from cast_lanes(wide, f32, width, d, x)
        return
    yield from _widen_to_odd(wide, width, f"{d}.o", x)
    if type.dtype is not f32:
        yield from inline_function(build_rounding_to_odd(), width, d, f"{d}.o")
    elif type.policy is not None and type.policy.rounding == "toward_zero":
        yield from inline_function(build_double_truncation(), width, d, f"{d}.o")
    else:
        yield from _cast_float_to_float(f64, f32, width, d, f"{d}.o")


def round_stochastically(to: Policy, width: int, d: str, x: str, draw: str) -> Lines:
    """A double and 53 random bits as a float on the grid of a policy's storage."""
    yield from inline_function(build_stochastic_rounding(to), width, d, x, draw)


def find_unsupported_policy(type: TensorType, operands: tuple[DType, ...]) -> str | None:
    """What of the policy of a result cannot be emitted, or None."""
    policy = type.policy
    if policy is None or not is_special_policy(policy) or not type.dtype.is_float:
        return None
    if policy.rounding == "stochastic":
        return "rounding=stochastic"
    # A wider source would be rounded twice: to f32 first.
    wider = f64 in (type.dtype, type.compute, type.accumulate, *operands)
    return f"{policy.rounding} rounding from f64" if wider else None


def make_policy_error(text: str, location: Location) -> UnsupportedOpError:
    """The error for a policy that cannot be emitted."""
    return UnsupportedOpError(
        f"the target llvm does not round by the policy {text}", location=location,
        expected="nearest-even or toward zero, from f32; saturating or not; denormals preserved or flushed",
        suggestion="run this in the interpreter, or leave the clause out",
    )  # fmt: skip

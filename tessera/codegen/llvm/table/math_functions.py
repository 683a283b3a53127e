"""Math functions: definitions of the scalar functions that a text calls, for any vector width, and the emission of
their decompositions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING

from tessera.codegen.llvm.table.emission import RowTypes, find_row, format_call, pointwise_row
from tessera.codegen.llvm.text.types import RegisterType, get_register_type
from tessera.core.errors import UnsupportedOpError
from tessera.core.types import f32, f64
from tessera.ir.core import Function
from tessera.ir.rules import Op
from tessera.lower.scalar_functions import double_precision
from tessera.lower.scalar_functions.decomposition import SHARED
from tessera.lower.scalar_functions.single_precision import make_trigonometric_rule
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
DECOMPOSITIONS = SHARED.without(lambda op, dtype: dtype == f64 and op in (*INTRINSICS, *LIBC_FUNCTIONS))
_OPS = {op.__name__: op for op in DECOMPOSITIONS.ops()}
_CALL_PATTERN = re.compile(r"@ts\.(?P<name>[a-z_]\w*)\.(?:v(?P<width>\d+))?f(?P<bits>32|64)\(")


def _make_row(op: Op) -> Callable[..., Iterator[str]]:
    """The row that calls a function defined here."""

    def row(s: RowTypes, d: str, *operands: str) -> Iterator[str]:
        _check_definition(op.__name__, s.t)
        yield f"{d} = {format_call(f'ts.{op.__name__}', s.t, *operands)}"

    return row


for _op in DECOMPOSITIONS.ops() - DIVISIONS:
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


SPECIAL_DEFINITIONS: dict[tuple[str, str], Callable[[RegisterType], Iterator[str]]] = {
    ("sin", "float"): _make_trigonometric_definition("sin", 0),
    ("cos", "float"): _make_trigonometric_definition("cos", 1),
    ("sin_large", "float"): _define_for_large_arguments("sin"),
    ("cos_large", "float"): _define_for_large_arguments("cos"),
}

"""Floats of eight bits or fewer: decoded, encoded and rounded by integer arithmetic and exact multiplications.

In memory each lies in a byte of its own, sign first, as ml_dtypes has them; in a register it is a `float` that holds
its value.
"""

from __future__ import annotations

from collections.abc import Iterator

from tessera.codegen.llvm.types import Vec
from tessera.codegen.small_floats import BIAS, DIGITS, FORMS, NAN
from tessera.types import DType

Lines = Iterator[str]


def decode(dtype: DType, width: int, d: str, x: str) -> Lines:
    """Bytes to registers: the code as digits of an f32 of small exponent, times a power of two, exactly."""
    form, t = FORMS[dtype], Vec("float", width)
    i, b = t.integer, t.of("i8")
    yield f"{d}.w = zext {b} {x} to {i}"
    yield f"{d}.m = and {i} {d}.w, {i.const((1 << form.sign) - 1)}"
    yield f"{d}.s = lshr {i} {d}.w, {i.const(form.sign)}"
    yield f"{d}.g = shl {i} {d}.s, {i.const(31)}"
    yield f"{d}.h = shl {i} {d}.m, {i.const(DIGITS - form.digits)}"
    yield f"{d}.f = bitcast {i} {d}.h to {t}"
    yield f"{d}.v = fmul {t} {d}.f, {t.const(2.0 ** (BIAS - form.bias))}"
    size = f"{d}.v"
    if form.nan is not None:
        size = f"{d}.z"
        yield f"{d}.k = icmp uge {i} {d}.m, {i.const(form.nan if form.infinity is None else form.infinity + 1)}"
        yield f"{d}.y = select {t.truth} {d}.k, {t} {t.const(NAN)}, {t} {d}.v"
        yield f"{d}.j = icmp eq {i} {d}.m, {i.const(form.nan if form.infinity is None else form.infinity)}"
        yield f"{d}.z = select {t.truth} {d}.j, {t} {t.const(form.beyond)}, {t} {d}.y"
    yield f"{d}.b = bitcast {t} {size} to {i}"
    yield f"{d}.o = or {i} {d}.b, {d}.g"
    yield f"{d} = bitcast {i} {d}.o to {t}"


def encode(dtype: DType, width: int, d: str, x: str) -> Lines:
    """Registers to bytes; the value is one of the format's, so that this is exact."""
    form, t = FORMS[dtype], Vec("float", width)
    i, b = t.integer, t.of("i8")
    yield f"{d}.b = bitcast {t} {x} to {i}"
    yield f"{d}.s = lshr {i} {d}.b, {i.const(31)}"
    yield f"{d}.g = shl {i} {d}.s, {i.const(form.sign)}"
    yield f"{d}.a = call {t} @llvm.fabs.{t.suffix}({t} {x})"
    yield f"{d}.v = fmul {t} {d}.a, {t.const(2.0 ** (form.bias - BIAS))}"
    yield f"{d}.c = bitcast {t} {d}.v to {i}"
    yield f"{d}.m = lshr {i} {d}.c, {i.const(DIGITS - form.digits)}"
    code = f"{d}.m"
    if form.infinity is not None:
        yield f"{d}.j = fcmp oeq {t} {d}.a, {t.const(float('inf'))}"
        yield f"{d}.i = select {t.truth} {d}.j, {i} {i.const(form.infinity)}, {i} {code}"
        code = f"{d}.i"
    yield f"{d}.k = fcmp uno {t} {x}, {x}"
    if form.nan is None:  # a NaN lies as +0
        yield f"{d}.n = or {i} {code}, {d}.g"
        yield f"{d}.o = select {t.truth} {d}.k, {i} {i.const(0)}, {i} {d}.n"
    else:
        yield f"{d}.n = select {t.truth} {d}.k, {i} {i.const(form.nan)}, {i} {code}"
        yield f"{d}.o = or {i} {d}.n, {d}.g"
    yield f"{d} = trunc {i} {d}.o to {b}"


def rounded(dtype: DType, width: int, d: str, x: str) -> Lines:
    """An f32 rounded to the nearest value of a format, ties to even; beyond the largest as the format has it."""
    form, t = FORMS[dtype], Vec("float", width)
    i, least = t.integer, 1 - form.bias
    dropped = DIGITS - form.digits
    yield f"{d}.a = call {t} @llvm.fabs.{t.suffix}({t} {x})"
    # Below the least normal number the steps are equal: adding a number whose last digit is one step rounds to them.
    shift = t.const(2.0 ** (least - form.digits + DIGITS))
    yield f"{d}.u = fadd {t} {d}.a, {shift}"
    yield f"{d}.us = fsub {t} {d}.u, {shift}"
    yield f"{d}.b = bitcast {t} {d}.a to {i}"
    yield f"{d}.e = lshr {i} {d}.b, {i.const(dropped)}"
    yield f"{d}.o = and {i} {d}.e, {i.const(1)}"
    yield f"{d}.p = add {i} {d}.b, {i.const((1 << (dropped - 1)) - 1)}"
    yield f"{d}.q = add {i} {d}.p, {d}.o"
    yield f"{d}.m = and {i} {d}.q, {i.const(-(1 << dropped))}"
    yield f"{d}.r = bitcast {i} {d}.m to {t}"
    yield f"{d}.l = fcmp olt {t} {d}.a, {t.const(2.0**least)}"
    yield f"{d}.n = select {t.truth} {d}.l, {t} {d}.us, {t} {d}.r"
    yield f"{d}.h = fcmp ogt {t} {d}.n, {t.const(form.top)}"
    yield f"{d}.c = select {t.truth} {d}.h, {t} {t.const(form.beyond)}, {t} {d}.n"
    yield f"{d}.k = fcmp uno {t} {x}, {x}"
    if form.nan is None:  # a NaN becomes +0, whatever its sign, which processors differ in
        yield f"{d}.z = call {t} @llvm.copysign.{t.suffix}({t} {d}.c, {t} {x})"
        yield f"{d} = select {t.truth} {d}.k, {t} {t.const(0.0)}, {t} {d}.z"
        return
    yield f"{d}.z = select {t.truth} {d}.k, {t} {t.const(NAN)}, {t} {d}.c"
    yield f"{d} = call {t} @llvm.copysign.{t.suffix}({t} {d}.z, {t} {x})"

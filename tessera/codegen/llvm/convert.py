"""Conversions in registers: widen, round to a narrow format, cast, and to and from memory's form."""

from __future__ import annotations

from collections.abc import Iterator

from tessera.codegen.llvm import small
from tessera.codegen.llvm.types import NARROW, Vec, memory, register
from tessera.codegen.small_floats import FORMS
from tessera.types import DType, bf16, bool_, f16, f32, f64, int4, tf32

Lines = Iterator[str]


def decode(dtype: DType, width: int, d: str, x: str) -> Lines:
    """Memory's form to a register."""
    m, t = memory(dtype, width), register(dtype, width)
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
    elif dtype in FORMS:
        yield from small.decode(dtype, width, d, x)


def encode(dtype: DType, width: int, d: str, x: str) -> Lines:
    """A register to memory's form; the value is already rounded, so that this is exact."""
    m, t = memory(dtype, width), register(dtype, width)
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
    elif dtype in FORMS:
        yield from small.encode(dtype, width, d, x)


def has_form(dtype: DType) -> bool:
    """Whether memory's form differs from the register's."""
    return memory(dtype).element != register(dtype).element


def rounded(dtype: DType, width: int, d: str, x: str) -> Lines:
    """An f32 rounded to the nearest value of a narrow format, ties to even."""
    t = Vec("float", width)
    if dtype == f16:
        h = t.of("half")
        yield f"{d}.h = fptrunc {t} {x} to {h}"
        yield f"{d} = fpext {h} {d}.h to {t}"
    elif dtype in FORMS:
        yield from small.rounded(dtype, width, d, x)
    else:
        yield from _round_mantissa({bf16: 16, tf32: 13}[dtype], t, d, x)


def _round_mantissa(dropped: int, t: Vec, d: str, x: str) -> Lines:
    """By integer arithmetic: the hardware's own bf16 conversions flush denormals."""
    i = t.integer
    yield f"{d}.b = bitcast {t} {x} to {i}"
    yield f"{d}.e = lshr {i} {d}.b, {i.const(dropped)}"
    yield f"{d}.o = and {i} {d}.e, {i.const(1)}"
    yield f"{d}.p = add {i} {d}.b, {i.const((1 << (dropped - 1)) - 1)}"
    yield f"{d}.q = add {i} {d}.p, {d}.o"
    yield f"{d}.m = and {i} {d}.q, {i.const(-(1 << dropped))}"
    yield f"{d}.f = bitcast {i} {d}.m to {t}"
    yield f"{d}.n = fcmp uno {t} {x}, {x}"
    yield f"{d} = select {t.truth} {d}.n, {t} {t.const(float('nan'))}, {t} {d}.f"


def needs_rounding(dtype: DType) -> bool:
    """Whether a result computed in f32 must be rounded to this type."""
    return dtype in NARROW


def cast(source: DType, to: DType, width: int, d: str, x: str) -> Lines:
    """`x` converted: nearest-even; float to integer toward zero, saturating, NaN to 0."""
    s, t = register(source, width), register(to, width)
    if to == bool_:
        compare = "fcmp une" if source.is_float else "icmp ne"
        yield f"{d} = {compare} {s} {x}, {s.const(0)}"
    elif source.is_float and to.is_float:
        yield from _float_to_float(source, to, width, d, x)
    elif to == int4:
        yield from _to_int4(source, s, t, d, x)
    elif source.is_float:
        sign = "s" if to.kind == "int" else "u"
        yield f"{d} = call {t} @llvm.fpto{sign}i.sat.{t.suffix}.{s.suffix}({s} {x})"
    elif to.is_float:
        yield from _integer_to_float(source, to, width, d, x)
    else:
        yield _integer_to_integer(source, s, t, d, x)


def _to_int4(source: DType, s: Vec, t: Vec, d: str, x: str) -> Lines:
    """Four bits: floats saturate, integers wrap."""
    if source.is_float:
        yield f"{d}.w = call {t} @llvm.fptosi.sat.{t.suffix}.{s.suffix}({s} {x})"
        yield f"{d}.l = call {t} @llvm.smax.{t.suffix}({t} {d}.w, {t} {t.const(-8)})"
        yield f"{d} = call {t} @llvm.smin.{t.suffix}({t} {d}.l, {t} {t.const(7)})"
        return
    yield _integer_to_integer(source, s, t, f"{d}.w", x)
    yield f"{d}.h = shl {t} {d}.w, {t.const(12)}"
    yield f"{d} = ashr {t} {d}.h, {t.const(12)}"


def _integer_to_integer(source: DType, s: Vec, t: Vec, d: str, x: str) -> str:
    if s.bits == t.bits:
        return copy(s, d, x)
    word = "trunc" if t.bits < s.bits else "sext" if source.kind == "int" else "zext"
    return f"{d} = {word} {s} {x} to {t}"


def _integer_to_float(source: DType, to: DType, width: int, d: str, x: str) -> Lines:
    s, t = register(source, width), register(to, width)
    convert = f"{'s' if source.kind == 'int' else 'u'}itofp {s} {x} to {t}"
    if to in NARROW:
        yield f"{d}.c = {convert}"
        yield from rounded(to, width, d, f"{d}.c")
    else:
        yield f"{d} = {convert}"


def _float_to_float(source: DType, to: DType, width: int, d: str, x: str) -> Lines:
    s, t = register(source, width), register(to, width)
    if source == f64 and to in NARROW:
        yield from _to_odd(width, f"{d}.t", x)
        yield from rounded(to, width, d, f"{d}.t")
    elif s.bits != t.bits:
        yield f"{d} = {'fpext' if t.bits > s.bits else 'fptrunc'} {s} {x} to {t}"
    elif to in NARROW and to != source:
        yield from rounded(to, width, d, x)
    else:
        yield copy(s, d, x)


def copy(t: Vec, d: str, x: str) -> str:
    """A new name for a value."""
    return f"{d} = bitcast {t} {x} to {t}"


def _to_odd(width: int, d: str, x: str) -> Lines:
    """f64 to f32 by rounding to odd, so that a second rounding is exact (Boldo and Melquiond 2008)."""
    s, t = Vec("double", width), Vec("float", width)
    i = t.integer
    yield f"{d}.n = fptrunc {s} {x} to {t}"
    yield f"{d}.b = bitcast {t} {d}.n to {i}"
    yield f"{d}.w = fpext {t} {d}.n to {s}"
    yield f"{d}.wa = call {s} @llvm.fabs.{s.suffix}({s} {d}.w)"
    yield f"{d}.xa = call {s} @llvm.fabs.{s.suffix}({s} {x})"
    yield f"{d}.na = call {t} @llvm.fabs.{t.suffix}({t} {d}.n)"
    yield f"{d}.i0 = fcmp one {s} {d}.w, {x}"
    yield f"{d}.i1 = fcmp olt {t} {d}.na, {t.const(float('inf'))}"
    yield f"{d}.i = and {t.truth} {d}.i0, {d}.i1"
    yield f"{d}.a0 = fcmp ogt {s} {d}.wa, {d}.xa"
    yield f"{d}.a = and {t.truth} {d}.i, {d}.a0"
    yield f"{d}.l = sub {i} {d}.b, {i.const(1)}"
    yield f"{d}.c = select {t.truth} {d}.a, {i} {d}.l, {i} {d}.b"
    yield f"{d}.o = or {i} {d}.c, {i.const(1)}"
    yield f"{d}.r = select {t.truth} {d}.i, {i} {d}.o, {i} {d}.c"
    yield f"{d} = bitcast {i} {d}.r to {t}"


def is_copy(source: DType, to: DType) -> bool:
    """Whether a register of one type, widened to the other, stays as it is."""
    return source == to or (to == f32 and source in NARROW)

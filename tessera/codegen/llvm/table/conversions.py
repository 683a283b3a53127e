"""Conversions in registers: memory formats, casts, and rounding by a policy.

Small floats are decoded, encoded and rounded by the codec of tessera/lower/scalar_functions. f64 is narrowed by
rounding to odd (Boldo and Melquiond 2008). Policies round toward zero or stochastically, saturate, and flush denormals.
"""

from __future__ import annotations

from collections.abc import Iterator

from tessera.codegen.legality import is_special_policy
from tessera.codegen.llvm.table.decomposition_emission import inline_function
from tessera.codegen.llvm.text.types import (
    NARROW_FLOATS,
    RegisterType,
    copy_register,
    get_memory_type,
    get_register_type,
)
from tessera.core.errors import Location, UnsupportedOpError
from tessera.core.types import DType, Policy, TensorType, bf16, bool_, f16, f32, f64, int4, tf32
from tessera.ir.numerics.conversion import FINITE_ONLY, FloatGrid, find_float_grid
from tessera.lower.scalar_functions.small_floats import (
    SMALL_FLOAT_FORMATS,
    build_decoder,
    build_exact_encoder,
    build_rounding,
    decode_shift,
)

# Conversions in registers: widen, round to a narrow format, cast, and to and from memory's form.


Lines = Iterator[str]


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
        yield from _round_mantissa({bf16: 16, tf32: 13}[dtype], t, d, x)


def _round_mantissa(dropped: int, t: RegisterType, d: str, x: str) -> Lines:
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
    if to in NARROW_FLOATS:
        yield f"{d}.c = {convert}"
        yield from round_to_format(to, width, d, f"{d}.c")
    else:
        yield f"{d} = {convert}"


def _cast_float_to_float(source: DType, to: DType, width: int, d: str, x: str) -> Lines:
    s, t = get_register_type(source, width), get_register_type(to, width)
    if source == f64 and to in NARROW_FLOATS:
        yield from _round_to_odd(width, f"{d}.t", x)
        yield from round_to_format(to, width, d, f"{d}.t")
    elif s.bits != t.bits:
        yield f"{d} = {'fpext' if t.bits > s.bits else 'fptrunc'} {s} {x} to {t}"
    elif to in NARROW_FLOATS and to != source:
        yield from round_to_format(to, width, d, x)
    else:
        yield copy_register(s, d, x)


def _round_to_odd(width: int, d: str, x: str) -> Lines:
    """f64 to f32 by rounding to odd, so that a second rounding is exact (Boldo and Melquiond 2008)."""
    s, t = RegisterType("double", width), RegisterType("float", width)
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


def is_register_copy(source: DType, to: DType) -> bool:
    """Whether a register of one type, widened to the other, stays as it is."""
    return source == to or (to == f32 and source in NARROW_FLOATS)


# Storing under a policy: rounding toward zero, saturation and flushed denormals, from the f32 that was computed.


RoundingLines = Iterator[str]
STORED_MANTISSA_BITS = 23


def round_by_policy(wide: DType, type: TensorType, width: int, d: str, x: str) -> RoundingLines:
    """A register of the type that was computed in, as its storage has it."""
    policy = type.policy
    if policy is None or not is_special_policy(policy) or not type.dtype.is_float:
        yield from cast_lanes(wide, type.dtype, width, d, x)
        return
    if wide is not f32:
        yield from cast_lanes(wide, f32, width, f"{d}.in", x)
        x = f"{d}.in"
    grid, t = find_float_grid(type.dtype), RegisterType("float", width)
    if policy.rounding == "toward_zero" and type.dtype is not f32:
        yield from _truncate_toward_zero(grid, t, f"{d}.tz", x)
        x = f"{d}.tz"
        yield from _clamp_finite(grid, t, f"{d}.tl", x)
        x = f"{d}.tl"
    if policy.saturate or type.dtype in FINITE_ONLY:
        yield from _saturate(grid, t, f"{d}.sa", x)
        x = f"{d}.sa"
    if policy.denormals == "flush":
        yield from cast_lanes(f32, type.dtype, width, f"{d}.ro", x)
        yield from _flush_denormals(grid, t, d, f"{d}.ro")
    else:
        yield from cast_lanes(f32, type.dtype, width, d, x)


def round_stochastically(to: Policy, width: int, d: str, x: str, draw: str) -> RoundingLines:
    """A double on the grid of a policy's storage: up where 53 random bits lie below the distance from below."""
    grid, t = find_float_grid(to.storage), RegisterType("double", width)
    yield _emit_magnitude(t, f"{d}.a", x)
    yield from _choose_neighbour(grid, t, f"{d}.r", f"{d}.a", draw)
    yield f"{d}.g = fcmp ogt {t} {d}.r, {t.const(grid.top)}"
    yield f"{d}.k = select {t.truth} {d}.g, {t} {t.const(_choose_overflow_value(to, grid))}, {t} {d}.r"
    if to.denormals == "flush":
        yield f"{d}.fl = fcmp olt {t} {d}.k, {t.const(2.0**grid.least)}"
        yield f"{d}.fz = select {t.truth} {d}.fl, {t} {t.const(0.0)}, {t} {d}.k"
    yield _emit_copysign(t, f"{d}.si", f"{d}.fz" if to.denormals == "flush" else f"{d}.k", x)
    yield f"{d} = fptrunc {t} {d}.si to {RegisterType('float', width)}"


def _choose_overflow_value(policy: Policy, grid: FloatGrid) -> float:
    """What stands for numbers beyond the largest."""
    if policy.saturate or policy.storage in FINITE_ONLY:
        return grid.top
    return float("inf") if grid.infinite else float("nan")


def _choose_neighbour(grid: FloatGrid, t: RegisterType, d: str, size: str, draw: str) -> RoundingLines:
    """Of the two neighbours of a double on a grid, the one that a draw chooses; infinity and NaN stay."""
    i, bias, digits = t.integer, 1023, 52
    yield f"{d}.b = bitcast {t} {size} to {i}"
    yield f"{d}.x = lshr {i} {d}.b, {i.const(digits)}"
    yield f"{d}.e = call {i} @llvm.smax.{i.suffix}({i} {d}.x, {i} {i.const(grid.least + bias)})"
    # The size in steps of the grid: both factors are powers of two, made as bits, and exact.
    yield f"{d}.u = sub {i} {i.const(grid.digits + 2 * bias)}, {d}.e"
    yield f"{d}.ub = shl {i} {d}.u, {i.const(digits)}"
    yield f"{d}.up = bitcast {i} {d}.ub to {t}"
    yield f"{d}.s = fmul {t} {size}, {d}.up"
    yield f"{d}.l = call {t} @llvm.floor.{t.suffix}({t} {d}.s)"
    yield f"{d}.f = fsub {t} {d}.s, {d}.l"
    yield f"{d}.c = fmul {t} {d}.f, {t.const(2.0**53)}"
    yield f"{d}.dr = sitofp {i} {draw} to {t}"
    yield f"{d}.o = fcmp olt {t} {d}.dr, {d}.c"
    yield f"{d}.i = select {t.truth} {d}.o, {t} {t.const(1.0)}, {t} {t.const(0.0)}"
    yield f"{d}.n = fadd {t} {d}.l, {d}.i"
    yield f"{d}.w = sub {i} {d}.e, {i.const(grid.digits)}"
    yield f"{d}.wb = shl {i} {d}.w, {i.const(digits)}"
    yield f"{d}.dn = bitcast {i} {d}.wb to {t}"
    yield f"{d}.m = fmul {t} {d}.n, {d}.dn"
    yield f"{d}.k = fcmp olt {t} {size}, {t.const(float('inf'))}"
    yield f"{d} = select {t.truth} {d}.k, {t} {d}.m, {t} {size}"


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


def _emit_magnitude(t: RegisterType, d: str, x: str) -> str:
    return f"{d} = call {t} @llvm.fabs.{t.suffix}({t} {x})"


def _emit_copysign(t: RegisterType, d: str, size: str, x: str) -> str:
    return f"{d} = call {t} @llvm.copysign.{t.suffix}({t} {size}, {t} {x})"


def _truncate_toward_zero(grid: FloatGrid, t: RegisterType, d: str, x: str) -> RoundingLines:
    """The nearest number of a format toward zero; in steps of one size below its least normal number."""
    i, step = t.integer, 2.0 ** (grid.least - grid.digits)
    yield _emit_magnitude(t, f"{d}.a", x)
    yield f"{d}.b = bitcast {t} {x} to {i}"
    yield f"{d}.c = and {i} {d}.b, {i.const(-(1 << (STORED_MANTISSA_BITS - grid.digits)))}"
    yield f"{d}.m = bitcast {i} {d}.c to {t}"
    if grid.least > -126:
        yield f"{d}.s = fmul {t} {x}, {t.const(1 / step)}"
        yield f"{d}.w = call {t} @llvm.trunc.{t.suffix}({t} {d}.s)"
        yield f"{d}.v = fmul {t} {d}.w, {t.const(step)}"
        yield f"{d}.l = fcmp olt {t} {d}.a, {t.const(2.0**grid.least)}"
        yield f"{d}.o = select {t.truth} {d}.l, {t} {d}.v, {t} {d}.m"
    else:
        yield copy_register(t, f"{d}.o", f"{d}.m")
    # NaN and infinity lose no digits: theirs may be the only ones that tell them apart.
    yield f"{d}.f = fcmp olt {t} {d}.a, {t.const(float('inf'))}"
    yield f"{d} = select {t.truth} {d}.f, {t} {d}.o, {t} {x}"


def _clamp_finite(grid: FloatGrid, t: RegisterType, d: str, x: str) -> RoundingLines:
    """Toward zero no finite number becomes larger than the largest."""
    yield _emit_magnitude(t, f"{d}.a", x)
    yield f"{d}.f = fcmp olt {t} {d}.a, {t.const(float('inf'))}"
    yield f"{d}.g = fcmp ogt {t} {d}.a, {t.const(grid.top)}"
    yield f"{d}.h = and {t.truth} {d}.f, {d}.g"
    yield f"{d}.k = select {t.truth} {d}.h, {t} {t.const(grid.top)}, {t} {d}.a"
    yield _emit_copysign(t, d, f"{d}.k", x)


def _saturate(grid: FloatGrid, t: RegisterType, d: str, x: str) -> RoundingLines:
    yield _emit_magnitude(t, f"{d}.a", x)
    yield f"{d}.g = fcmp ogt {t} {d}.a, {t.const(grid.top)}"
    yield f"{d}.k = select {t.truth} {d}.g, {t} {t.const(grid.top)}, {t} {d}.a"
    yield _emit_copysign(t, d, f"{d}.k", x)


def _flush_denormals(grid: FloatGrid, t: RegisterType, d: str, x: str) -> RoundingLines:
    yield _emit_magnitude(t, f"{d}.fa", x)
    yield f"{d}.fl = fcmp olt {t} {d}.fa, {t.const(2.0**grid.least)}"
    yield f"{d}.fz = select {t.truth} {d}.fl, {t} {t.const(0.0)}, {t} {d}.fa"
    yield _emit_copysign(t, d, f"{d}.fz", x)

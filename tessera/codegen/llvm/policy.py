"""Storing under a policy: rounding toward zero, saturation and flushed denormals, from the f32 that was computed."""

from __future__ import annotations

from collections.abc import Iterator

from tessera.codegen.llvm import convert
from tessera.codegen.llvm.types import Vec
from tessera.codegen.policies import special
from tessera.errors import Location, UnsupportedOpError
from tessera.numerics.rounding import FINITE_ONLY, Grid, grid_of
from tessera.types import DType, Policy, TensorType, f32, f64

Lines = Iterator[str]
DIGITS = 23


def store(wide: DType, type: TensorType, width: int, d: str, x: str) -> Lines:
    """A register of the type that was computed in, as its storage has it."""
    policy = type.policy
    if policy is None or not special(policy) or not type.dtype.is_float:
        yield from convert.cast(wide, type.dtype, width, d, x)
        return
    if wide is not f32:
        yield from convert.cast(wide, f32, width, f"{d}.in", x)
        x = f"{d}.in"
    grid, t = grid_of(type.dtype), Vec("float", width)
    if policy.rounding == "toward_zero" and type.dtype is not f32:
        yield from _truncated(grid, t, f"{d}.tz", x)
        x = f"{d}.tz"
        yield from _limited(grid, t, f"{d}.tl", x)
        x = f"{d}.tl"
    if policy.saturate or type.dtype in FINITE_ONLY:
        yield from _saturated(grid, t, f"{d}.sa", x)
        x = f"{d}.sa"
    if policy.denormals == "flush":
        yield from convert.cast(f32, type.dtype, width, f"{d}.ro", x)
        yield from _flushed(grid, t, d, f"{d}.ro")
    else:
        yield from convert.cast(f32, type.dtype, width, d, x)


def by_chance(to: Policy, width: int, d: str, x: str, draw: str) -> Lines:
    """A double on the grid of a policy's storage: up where 53 random bits lie below the distance from below."""
    grid, t = grid_of(to.storage), Vec("double", width)
    yield _size(t, f"{d}.a", x)
    yield from _neighbour(grid, t, f"{d}.r", f"{d}.a", draw)
    yield f"{d}.g = fcmp ogt {t} {d}.r, {t.const(grid.top)}"
    yield f"{d}.k = select {t.truth} {d}.g, {t} {t.const(_outside(to, grid))}, {t} {d}.r"
    if to.denormals == "flush":
        yield f"{d}.fl = fcmp olt {t} {d}.k, {t.const(2.0**grid.least)}"
        yield f"{d}.fz = select {t.truth} {d}.fl, {t} {t.const(0.0)}, {t} {d}.k"
    yield _signed(t, f"{d}.si", f"{d}.fz" if to.denormals == "flush" else f"{d}.k", x)
    yield f"{d} = fptrunc {t} {d}.si to {Vec('float', width)}"


def _outside(policy: Policy, grid: Grid) -> float:
    """What stands for numbers beyond the largest."""
    if policy.saturate or policy.storage in FINITE_ONLY:
        return grid.top
    return float("inf") if grid.infinite else float("nan")


def _neighbour(grid: Grid, t: Vec, d: str, size: str, draw: str) -> Lines:
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


def lacking(type: TensorType, operands: tuple[DType, ...]) -> str | None:
    """What of the policy of a result cannot be emitted, or None."""
    policy = type.policy
    if policy is None or not special(policy) or not type.dtype.is_float:
        return None
    if policy.rounding == "stochastic":
        return "rounding=stochastic"
    # A wider source would be rounded twice: to f32 first.
    wider = f64 in (type.dtype, type.compute, type.accumulate, *operands)
    return f"{policy.rounding} rounding from f64" if wider else None


def refuse(text: str, location: Location) -> UnsupportedOpError:
    """The error for a policy that cannot be emitted."""
    return UnsupportedOpError(
        f"the target llvm does not round by the policy {text}", location=location,
        expected="nearest-even or toward zero, from f32; saturating or not; denormals preserved or flushed",
        suggestion="run this in the interpreter, or leave the clause out",
    )  # fmt: skip


def _size(t: Vec, d: str, x: str) -> str:
    return f"{d} = call {t} @llvm.fabs.{t.suffix}({t} {x})"


def _signed(t: Vec, d: str, size: str, x: str) -> str:
    return f"{d} = call {t} @llvm.copysign.{t.suffix}({t} {size}, {t} {x})"


def _truncated(grid: Grid, t: Vec, d: str, x: str) -> Lines:
    """The nearest number of a format toward zero; in steps of one size below its least normal number."""
    i, step = t.integer, 2.0 ** (grid.least - grid.digits)
    yield _size(t, f"{d}.a", x)
    yield f"{d}.b = bitcast {t} {x} to {i}"
    yield f"{d}.c = and {i} {d}.b, {i.const(-(1 << (DIGITS - grid.digits)))}"
    yield f"{d}.m = bitcast {i} {d}.c to {t}"
    if grid.least > -126:
        yield f"{d}.s = fmul {t} {x}, {t.const(1 / step)}"
        yield f"{d}.w = call {t} @llvm.trunc.{t.suffix}({t} {d}.s)"
        yield f"{d}.v = fmul {t} {d}.w, {t.const(step)}"
        yield f"{d}.l = fcmp olt {t} {d}.a, {t.const(2.0**grid.least)}"
        yield f"{d}.o = select {t.truth} {d}.l, {t} {d}.v, {t} {d}.m"
    else:
        yield convert.copy(t, f"{d}.o", f"{d}.m")
    # NaN and infinity lose no digits: theirs may be the only ones that tell them apart.
    yield f"{d}.f = fcmp olt {t} {d}.a, {t.const(float('inf'))}"
    yield f"{d} = select {t.truth} {d}.f, {t} {d}.o, {t} {x}"


def _limited(grid: Grid, t: Vec, d: str, x: str) -> Lines:
    """Toward zero no finite number becomes larger than the largest."""
    yield _size(t, f"{d}.a", x)
    yield f"{d}.f = fcmp olt {t} {d}.a, {t.const(float('inf'))}"
    yield f"{d}.g = fcmp ogt {t} {d}.a, {t.const(grid.top)}"
    yield f"{d}.h = and {t.truth} {d}.f, {d}.g"
    yield f"{d}.k = select {t.truth} {d}.h, {t} {t.const(grid.top)}, {t} {d}.a"
    yield _signed(t, d, f"{d}.k", x)


def _saturated(grid: Grid, t: Vec, d: str, x: str) -> Lines:
    yield _size(t, f"{d}.a", x)
    yield f"{d}.g = fcmp ogt {t} {d}.a, {t.const(grid.top)}"
    yield f"{d}.k = select {t.truth} {d}.g, {t} {t.const(grid.top)}, {t} {d}.a"
    yield _signed(t, d, f"{d}.k", x)


def _flushed(grid: Grid, t: Vec, d: str, x: str) -> Lines:
    yield _size(t, f"{d}.fa", x)
    yield f"{d}.fl = fcmp olt {t} {d}.fa, {t.const(2.0**grid.least)}"
    yield f"{d}.fz = select {t.truth} {d}.fl, {t} {t.const(0.0)}, {t} {d}.fa"
    yield _signed(t, d, f"{d}.fz", x)

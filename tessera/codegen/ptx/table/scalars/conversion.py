"""Conversions in registers: casts, rounding to narrow and small floats, storage under a numerics policy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tessera.codegen.legality import is_special_policy, make_policy_error
from tessera.codegen.ptx.table.scalars.math_functions import INTEGER_LIMITS, emit_decomposition, wrap_integer
from tessera.codegen.ptx.text.builder import NARROW_FLOATS, SMALL_FLOATS, PtxBuilder, ptx_type, register_class
from tessera.core.types import (
    DType,
    Policy,
    TensorType,
    bf16,
    bool_,
    f16,
    f32,
    f64,
)
from tessera.ir.numerics.conversion import FINITE_ONLY, find_float_grid
from tessera.lower.scalar_functions.rounding import (
    build_flush,
    build_mantissa_rounding,
    build_saturation,
    build_truncation,
)
from tessera.lower.scalar_functions.small_floats import build_rounding

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
        return wrap_integer(text, to, text.let("cvt.u32.u64", "b32", x))
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

"""Conversions in registers: casts, rounding to narrow and small floats, storage under a numerics policy."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from tessera.codegen.legality import is_special_policy, make_policy_error
from tessera.codegen.ptx.table.scalars.math_functions import INTEGER_LIMITS, emit_decomposition, wrap_integer
from tessera.codegen.ptx.text.builder import (
    NARROW_FLOATS,
    SMALL_FLOATS,
    PtxBuilder,
    element_bytes,
    is_immediate,
    ptx_type,
    register_class,
)
from tessera.core.types import DType, Policy, TensorType, bf16, bool_, f16, f32, f64, int4, int8, int16, uint8, uint16
from tessera.ir.numerics.conversion import FINITE_ONLY, find_float_grid
from tessera.lower.scalar_functions.small_floats import (
    build_decoder,
    build_exact_encoder,
    build_flush,
    build_mantissa_rounding,
    build_rounding,
    build_saturation,
    build_truncation,
    decode_shift,
)

if TYPE_CHECKING:
    from tessera.codegen.ptx.text.memref import VectorAccess
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


# Packing: elements in memory's form, 8 to 64 bits each, loaded and stored in vectors of up to 16 bytes.


WORD_TYPES = {"f32": "f32", "f64": "f64", "b32": "b32", "b64": "b64"}


def load_elements(text: PtxBuilder, space: str, dtype: DType, run: VectorAccess) -> list[str]:
    """A run of elements; those whose guard fails are 0."""
    even = len(set(run.guards)) == 1
    if even or run.count == 1:
        return _load_vector(text, space, dtype, run.operand, run.count, run.guards[0])
    every = _and_guards(text, run.guards)
    elements = _load_vector(text, space, dtype, run.operand, run.count, every)
    return [_load_masked_element(text, space, dtype, run, i, x, every) for i, x in enumerate(elements)]


def _load_masked_element(
    text: PtxBuilder, space: str, dtype: DType, run: VectorAccess, i: int, x: str, every: str
) -> str:
    """An element of a run that could not be loaded whole."""
    if not run.guards[i]:
        alone = text.let("not.pred", "pred", every)
    else:
        none = text.let("not.pred", "pred", every)
        alone = text.let("and.pred", "pred", run.guards[i], none)
    (single,) = _load_vector(text, space, dtype, _element_operand(run, i, dtype), 1, alone)
    return select_register(text, dtype, every, x, single)


def _and_guards(text: PtxBuilder, guards: Sequence[str]) -> str:
    total = ""
    for each in dict.fromkeys(g for g in guards if g):
        total = text.let("and.pred", "pred", total, each) if total else each
    return total


def _element_operand(run: VectorAccess, i: int, dtype: DType) -> str:
    offset = run.offset + i * element_bytes(dtype)
    return f"[{run.address}+{offset}]" if offset else f"[{run.address}]"


def _load_vector(text: PtxBuilder, space: str, dtype: DType, place: str, count: int, guard: str) -> list[str]:
    kind, words = _word_form(dtype, count)
    registers = [text.new(_word_class(kind)) for _ in range(words)]
    if guard:
        for each in registers:
            text.do(f"mov.{_word_class(kind)}", each, zero_literal(kind))
    vector = f".v{words}" if words > 1 else ""
    shown = f"{{{', '.join(registers)}}}" if words > 1 else registers[0]
    text.do(f"ld.{space}{vector}.{kind}", shown, place, guard=guard)
    return [_decode_element(text, dtype, registers, i) for i in range(count)]


def _word_form(dtype: DType, count: int) -> tuple[str, int]:
    """The type of the words that hold `count` elements, and how many words."""
    total = count * element_bytes(dtype)
    kind = register_class(dtype)
    if element_bytes(dtype) >= 4:
        return WORD_TYPES[kind], count
    return {1: ("u8", 1), 2: ("u16", 1)}.get(total, ("b32", total // 4))


def _word_class(kind: str) -> str:
    return {"u8": "b32", "u16": "b32"}.get(kind, kind)


def zero_literal(kind: str) -> str:
    """The immediate 0 of a class of registers."""
    return {"f32": "0f00000000", "f64": "0d0000000000000000"}.get(kind, "0")


def _decode_element(text: PtxBuilder, dtype: DType, registers: Sequence[str], i: int) -> str:
    """Element `i` of what was loaded."""
    if element_bytes(dtype) >= 4:
        return registers[i]
    each = 4 // element_bytes(dtype)
    register, part = registers[i // each], i % each
    found = DECODERS[dtype](text, register, part)
    if each == 2:
        text.halves[found] = (register, part)
    return found


def _decode_bf16(text: PtxBuilder, r: str, part: int) -> str:
    bits = text.let("and.b32", "b32", r, "0xFFFF0000") if part else text.let("shl.b32", "b32", r, 16)
    return text.let("mov.b32", "f32", bits)


def _decode_f16(text: PtxBuilder, r: str, part: int) -> str:
    low, high = text.new("b16"), text.new("b16")
    text.do("mov.b32", f"{{{low}, {high}}}", r)
    return text.let("cvt.f32.f16", "f32", high if part else low)


def _make_field_decoder(sign: str, bits: int):  # type: ignore[no-untyped-def]
    return lambda text, r, part: text.let(f"bfe.{sign}32", "b32", r, part * bits, bits)


def _decode_bool(text: PtxBuilder, r: str, part: int) -> str:
    return text.let("setp.ne.u32", "pred", text.let("bfe.u32", "b32", r, part * 8, 8), 0)


def _decode_small_float(dtype: DType, text: PtxBuilder, r: str, part: int) -> str:
    """A byte of a word as an f32, by the codec's decoder, which reads the sign at bit 31."""
    shift = decode_shift(dtype) - 8 * part
    word = text.let("shl.b32", "b32", r, shift) if shift else r
    return emit_decomposition(text, build_decoder(dtype), word)


DECODERS = {
    bf16: _decode_bf16,
    f16: _decode_f16,
    int16: _make_field_decoder("s", 16),
    int8: _make_field_decoder("s", 8),
    uint8: _make_field_decoder("u", 8),
    uint16: _make_field_decoder("u", 16),
    bool_: _decode_bool,
    int4: lambda text, r, part: text.let("bfe.s32", "b32", r, part * 8, 4),
    **{d: partial(_decode_small_float, d) for d in SMALL_FLOATS},
}


def store_elements(text: PtxBuilder, space: str, dtype: DType, run: VectorAccess, elements: Sequence[str]) -> None:
    """Write a run of elements, those whose guards hold."""
    if len(set(run.guards)) == 1 or run.count == 1:
        _store_vector(text, space, dtype, run.operand, elements, run.guards[0])
        return
    every = _and_guards(text, run.guards)
    _store_vector(text, space, dtype, run.operand, elements, every)
    none = text.let("not.pred", "pred", every)
    for i, (x, guard) in enumerate(zip(elements, run.guards, strict=True)):
        alone = text.let("and.pred", "pred", guard, none) if guard else none
        _store_vector(text, space, dtype, _element_operand(run, i, dtype), [x], alone)


def _store_vector(text: PtxBuilder, space: str, dtype: DType, place: str, elements: Sequence[str], guard: str) -> None:
    kind, words = _word_form(dtype, len(elements))
    registers = list(elements) if element_bytes(dtype) >= 4 else encode_elements(text, dtype, elements)
    registers = [materialise_operand(text, _word_class(kind), r) for r in registers]
    vector = f".v{words}" if words > 1 else ""
    shown = f"{{{', '.join(registers)}}}" if words > 1 else registers[0]
    text.do(f"st.{space}{vector}.{kind}", place, shown, guard=guard)


def encode_elements(text: PtxBuilder, dtype: DType, elements: Sequence[str]) -> list[str]:
    """Narrow elements as words, the first in the low bits."""
    if dtype in (bf16, f16):
        return [pack_halves(text, dtype, *elements[i : i + 2]) for i in range(0, len(elements), 2)]
    plain = list(elements)
    if dtype == bool_:
        plain = [text.let("selp.b32", "b32", 1, 0, x) for x in elements]
    if dtype in SMALL_FLOATS:
        plain = [emit_decomposition(text, build_exact_encoder(dtype), x) for x in elements]
    return _pack_integers(text, plain, 4 // element_bytes(dtype))


def _pack_integers(text: PtxBuilder, parts: Sequence[str], each: int) -> list[str]:
    """Integers of 8 or 16 bits put together."""
    while len(parts) > 1 and each > 1:
        mode = "0x5410" if each == 2 else "0x0040"
        pairs = [
            (materialise_operand(text, "b32", a), materialise_operand(text, "b32", b))
            for a, b in zip(parts[::2], parts[1::2], strict=True)
        ]
        parts = [text.let("prmt.b32", "b32", a, b, mode) for a, b in pairs]
        each //= 2
    return list(parts)


def pack_halves(text: PtxBuilder, dtype: DType, low: str, high: str = "") -> str:
    """One or two narrow floats; two that were just rounded are rounded and packed anew, in one instruction."""
    whole = text.halves.get(low)
    if whole is not None and whole[1] == 0 and text.halves.get(high) == (whole[0], 1):
        return whole[0]
    first, second = text.rounding_sources.get(low), text.rounding_sources.get(high)
    if first is None or second is None or {first[0], second[0]} != {dtype}:
        return ENCODERS[dtype](text, low, high)
    return text.let(f"cvt.rn.{dtype.name}x2.f32", "b32", second[1], first[1])


def encode_bf16(text: PtxBuilder, low: str, high: str = "") -> str:
    """One or two f32 that hold values of bf16 as its bits: exact, they are the upper halves."""
    first = text.let("mov.b32", "b32", low)
    if not high:
        return text.let("shr.u32", "b32", first, 16)
    return text.let("prmt.b32", "b32", first, text.let("mov.b32", "b32", high), "0x7632")


def encode_f16(text: PtxBuilder, low: str, high: str = "") -> str:
    """One or two f32 that hold values of f16 as its bits."""
    first = text.let("cvt.rn.f16.f32", "b16", low)
    second = text.let("cvt.rn.f16.f32", "b16", high) if high else ""
    if not high:
        return text.let("cvt.u32.u16", "b32", first)
    return text.let("mov.b32", "b32", f"{{{first}, {second}}}")


ENCODERS = {bf16: encode_bf16, f16: encode_f16}


def select_register(text: PtxBuilder, dtype: DType, condition: str, x: str, y: str) -> str:
    """`x` where the condition holds, else `y`."""
    kind = register_class(dtype)
    if kind != "pred":
        return text.let(f"selp.{kind}", kind, x, y, condition)
    yes = text.let("and.pred", "pred", x, condition)
    no = text.let("and.pred", "pred", y, text.let("not.pred", "pred", condition))
    return text.let("or.pred", "pred", yes, no)


def materialise_operand(text: PtxBuilder, kind: str, x: str) -> str:
    """An operand that may be a number as a register."""
    return text.let(f"mov.{kind}", kind, x) if is_immediate(x) else x

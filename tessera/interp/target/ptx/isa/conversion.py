"""Type conversion (cvt) in every rounding and saturation mode."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tessera.interp.target.ptx.isa.decoder import PtxDecoder, decode_rule
from tessera.interp.target.ptx.isa.floating_point import (
    add_exactly,
    canonicalise_nan,
    clamp_negative_to_zero,
    flush_subnormals,
    round_once,
    saturate,
)
from tessera.interp.target.ptx.isa.operands import make_elementwise_step
from tessera.interp.target.ptx.machine.simt import LaneStep
from tessera.interp.target.ptx.text.syntax import TYPES, PtxInstruction, PtxType

ConversionFunction = Callable[..., np.ndarray]
_TO_FLOAT = {"rn", "rz", "rm", "rp", "rna"}
_TO_INTEGER: dict[str, ConversionFunction] = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
_CVT_MODIFIERS = {*_TO_FLOAT, *_TO_INTEGER, "ftz", "sat", "satfinite", "relu"}
_LARGEST = {"f16": 65504.0, "bf16": 3.3895313892515355e38, "e4m3": 448.0, "e5m2": 57344.0}
_LARGEST["tf32"] = (2 - 2.0**-10) * 2.0**127
_FP8 = {"e4m3", "e5m2"}
_DIGITS = {"f16": 10, "bf16": 7, "f32": 23, "f64": 52}  # mantissa bits


@decode_rule("cvt")
def _(d: PtxDecoder, inst: PtxInstruction) -> LaneStep:
    if inst.op[1] == "pack":
        return _decode_cvt_pack(d, inst)
    out, source, words = TYPES[inst.op[-2]], TYPES[inst.op[-1]], inst.op[1:-2]
    if not set(words) <= _CVT_MODIFIERS:
        raise d.unsupported(inst)
    function = _make_conversion(out, source, words)
    if out.parts == 2 and source.parts == 1:  # two operands: the first becomes the upper half
        return make_elementwise_step(
            d, inst, lambda a, b: function(np.stack(np.broadcast_arrays(b, a), axis=-1)), out, source, source
        )
    if out.parts != source.parts:
        raise d.unsupported(inst)
    return make_elementwise_step(d, inst, function, out, source)


def _make_conversion(out: PtxType, source: PtxType, words: tuple[str, ...]) -> ConversionFunction:
    """The conversion of a number."""
    if out.kind != "f":
        return (
            _make_float_to_integer(out, source, words) if source.kind == "f" else _make_integer_conversion(out, words)
        )
    to_float = _make_float_to_float if source.kind == "f" else _make_integer_to_float
    return to_float(out, source, words)


def _make_integer_conversion(out: PtxType, words: tuple[str, ...]) -> ConversionFunction:
    if "sat" not in words:
        return lambda a: a.astype(out.dtype)

    def narrow(a: np.ndarray) -> np.ndarray:
        have, want = np.iinfo(a.dtype), np.iinfo(out.dtype)
        return np.clip(a, max(have.min, want.min), min(have.max, want.max)).astype(out.dtype)

    return narrow


def _make_float_to_integer(out: PtxType, source: PtxType, words: tuple[str, ...]) -> ConversionFunction:
    """Values out of range saturate; NaN gives 0, or only the top bit if either type has 64 bits."""
    round_off = next(_TO_INTEGER[w] for w in words if w in _TO_INTEGER)
    limits = np.iinfo(out.dtype)
    low, high = float(limits.min), float(limits.max) + (out.bits < 64)
    missing = np.zeros((), out.dtype)
    if 64 in (out.bits, source.bits):
        missing = np.array(1 << out.bits - 1, f"u{out.bits // 8}").view(out.dtype)

    def convert(a: np.ndarray) -> np.ndarray:
        x = round_off((flush_subnormals(source, a) if "ftz" in words else a).astype(np.float64))
        inside = (x >= low) & (x < high)
        value = np.where(inside, x, 0.0).astype(out.dtype)
        value = np.where(x >= high, limits.max, np.where(x < low, limits.min, value)).astype(out.dtype)
        return np.where(np.isnan(x), missing, value)

    return convert


def _make_integer_to_float(out: PtxType, source: PtxType, words: tuple[str, ...]) -> ConversionFunction:
    mode = next(w for w in words if w in _TO_FLOAT)
    shift, low = (
        source.dtype.type(32 if source.bits == 64 else 0),
        source.dtype.type((1 << 32) - 1 if source.bits == 64 else 0),
    )

    def convert(a: np.ndarray) -> np.ndarray:
        if source.bits < 64:
            total, error = a.astype(np.float64), np.zeros(a.shape)
        else:
            total, error = add_exactly((a >> shift).astype(np.float64) * 2.0**32, (a & low).astype(np.float64))
        value = round_once(total, error, out.dtype, mode)
        return saturate(value) if "sat" in words else value

    return convert


def _make_float_to_float(out: PtxType, source: PtxType, words: tuple[str, ...]) -> ConversionFunction:
    mode = next((w for w in words if w in _TO_FLOAT), "")
    whole = next((_TO_INTEGER[w] for w in words if w in _TO_INTEGER), None)
    part = TYPES[out.name.removesuffix("x2")]
    if part.bits < TYPES[source.name.removesuffix("x2")].bits and not mode and whole is None:
        raise KeyError("a narrowing conversion without rounding")

    if out is source and not words and out.bits >= 32:
        return lambda a: a  # a move: NaNs are unchanged

    def convert(a: np.ndarray) -> np.ndarray:
        if "ftz" in words and source.name == "f32":
            a = flush_subnormals(source, a)
        x = a.astype(np.float64)
        if whole is not None:
            x = whole(x)
        value = _apply_saturation(part, _round_to_format(part, x, mode or "rn", "satfinite" in words), words)
        return _propagate_nan_payloads(part, source, a, value, words)

    return convert


def _propagate_nan_payloads(
    t: PtxType, source: PtxType, a: np.ndarray, value: np.ndarray, words: tuple[str, ...]
) -> np.ndarray:
    """NaNs to and from doubles, and from bf16, keep sign and upper bits of the payload; tf32 has its own."""
    if t.name == "tf32" and "satfinite" not in words:
        nan = a.view(np.uint32) if "rna" in words else np.uint32(0x7FFFFFFF)
        bits = np.where(np.isnan(a), nan & np.uint32(0xFFFFE000), value.view(np.uint32))
        return bits.view(value.dtype)
    pair = {t.name, source.name}
    if "sat" in words or not ("f64" in pair or (t.name, source.name) == ("f32", "bf16")) or not pair <= set(_DIGITS):
        return value
    nan = np.isnan(a)
    return np.where(nan, _convert_nan(t, source, a, quiet="f64" in pair), value) if nan.any() else value


def _convert_nan(t: PtxType, source: PtxType, a: np.ndarray, quiet: bool) -> np.ndarray:
    """A NaN in another format: the sign, and the upper bits of its payload that fit."""
    bits, have, want = a.view(f"u{a.itemsize}").astype(np.uint64), _DIGITS[source.name], _DIGITS[t.name]
    sign = bits >> np.uint64(source.bits - 1) << np.uint64(t.bits - 1)
    payload = (bits & np.uint64((1 << have) - 1)) << np.uint64(52 - have) >> np.uint64(52 - want)
    exponent = ((1 << t.bits - 1) - 1) >> want << want | quiet << want - 1
    return (sign | np.uint64(exponent) | payload).astype(f"u{t.bits // 8}").view(t.dtype)


def _round_to_format(t: PtxType, x: np.ndarray, mode: str, finite: bool) -> np.ndarray:
    """Exact doubles rounded to a format."""
    if finite:
        x = np.where(np.isnan(x), x, np.clip(x, -_LARGEST[t.name], _LARGEST[t.name]))
    if t.name == "tf32":
        return _round_to_tf32(x.astype(np.float32), mode)
    if t.name in _FP8:
        value = x.astype(np.float32).astype(t.dtype)
        bits = np.where(np.isnan(x), np.uint8(0x7F), value.view(np.uint8))
        return bits.view(t.dtype)
    return round_once(x, np.zeros_like(x), t.dtype, mode)


def _round_to_tf32(x: np.ndarray, mode: str) -> np.ndarray:
    """A float rounded to the 10 mantissa bits of tf32."""
    bits, one = x.view(np.uint32), np.uint32(1)
    extra = {"rna": np.uint32(0x1000), "rz": np.uint32(0), "rn": np.uint32(0xFFF) + (bits >> np.uint32(13) & one)}[mode]
    kept = np.where(np.isfinite(x), bits + extra, bits) & np.uint32(0xFFFFE000)
    return kept.view(np.float32)


def _apply_saturation(t: PtxType, value: np.ndarray, words: tuple[str, ...]) -> np.ndarray:
    if t.name in _FP8:
        return clamp_negative_to_zero(value.astype(np.float32)).astype(t.dtype) if "relu" in words else value
    value = canonicalise_nan(t, value)
    if "relu" in words:
        value = clamp_negative_to_zero(value)
    if "ftz" in words and t.name == "f32":
        value = flush_subnormals(t, value)
    return saturate(value) if "sat" in words else value


def _decode_cvt_pack(d: PtxDecoder, inst: PtxInstruction) -> LaneStep:
    """Two saturated integers packed, the first above the second; bytes shift the third operand up."""
    signed, bits, s32, b32 = inst.op[3][0] == "s", int(inst.op[3][1:]), TYPES["s32"], TYPES["b32"]
    if inst.op[2] != "sat" or inst.op[4] != "s32" or bits > 16:
        raise d.unsupported(inst)
    least, most, mask = -signed << bits - 1, (1 << bits - signed) - 1, np.uint32((1 << bits) - 1)

    def low(a: np.ndarray) -> np.ndarray:
        return np.clip(a, least, most).astype(np.uint32) & mask

    def pack(a: np.ndarray, b: np.ndarray, *rest: np.ndarray) -> np.ndarray:
        both = low(a) << np.uint32(bits) | low(b)
        return both | rest[0] << np.uint32(2 * bits) if rest else both

    return make_elementwise_step(d, inst, pack, b32, s32, s32, *[b32] * (len(inst.operands) - 3))

"""Float arithmetic: rounding modes, flushing of subnormals, saturation, and the instructions that approximate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tessera.interp.target.ptx import rounding
from tessera.interp.target.ptx.decode import Decoder, modifiers, rule
from tessera.interp.target.ptx.kinds import FLOAT
from tessera.interp.target.ptx.machine import Step
from tessera.interp.target.ptx.operands import elementwise
from tessera.interp.target.ptx.syntax import Instruction
from tessera.interp.target.ptx.tensor_map import OUTSIDE
from tessera.interp.target.ptx.types import TYPES, Type

Function = Callable[..., np.ndarray]
_NAN = {"f32": 0x7FFFFFFF, "f16": 0x7FFF, "bf16": 0x7FFF, "tf32": 0x7FFFFFFF}
_COARSE_NAN = np.uint64(0x7FFFFFFF << 32)
_TINY = {"f32": 0x00800000, "f16": 0x0400, "bf16": 0x0080}  # the smallest normal number
_QUIET, _INVALID = np.uint64(1 << 51), np.uint64(0xFFF8 << 48)
# Which operand's NaN a double result has, by their number: the last named here that is one.
_PAYLOADS = {1: (0,), 2: (0, 1), 3: (0, 2, 1)}
_ROUNDED: dict[str, Function] = {
    "add": rounding.add, "sub": rounding.sub, "mul": rounding.mul, "fma": rounding.multiply_add,
    "mad": rounding.multiply_add, "div": rounding.div, "sqrt": rounding.sqrt,
}  # fmt: skip


def canonical(t: Type, value: np.ndarray) -> np.ndarray:
    """Float results with the one NaN that the hardware gives, whatever came in; doubles as they are."""
    name = t.name.removesuffix("x2")
    if name in _NAN and (bad := np.isnan(value)).any():
        bits = np.where(bad, np.array(_NAN[name], f"u{value.itemsize}"), value.view(f"u{value.itemsize}"))
        return bits.view(value.dtype)
    return value


def of_operands(value: np.ndarray, args: Sequence[np.ndarray]) -> np.ndarray:
    """Double results whose NaNs are those of the operands, quiet; the last operand that is NaN decides."""
    if not (bad := np.isnan(value)).any():
        return value
    bits = np.broadcast_to(_INVALID, value.shape)
    for a in args:
        bits = np.where(np.isnan(a), np.ascontiguousarray(a).view(np.uint64) | _QUIET, bits)
    return np.where(bad, bits, value.view(np.uint64)).view(np.float64)


def flush(t: Type, value: np.ndarray) -> np.ndarray:
    """Subnormal numbers as zeros of their sign."""
    unsigned = np.dtype(f"u{value.itemsize}")
    bits, sign = value.view(unsigned), unsigned.type(1 << 8 * value.itemsize - 1)
    small = (bits & ~sign) < _TINY[t.name.removesuffix("x2")]
    return np.where(small, bits & sign, bits).view(value.dtype)


def saturate(value: np.ndarray) -> np.ndarray:
    """Values brought into [0, 1]; NaN becomes +0."""
    zero, one = value.dtype.type(0), value.dtype.type(1)
    return np.where(value > zero, np.minimum(value, one), zero)


def positive(value: np.ndarray) -> np.ndarray:
    """Negative values and -0 become +0."""
    return np.where(value <= 0, value.dtype.type(0), value)


def finished(t: Type, words: list[str], function: Function, first: bool = False) -> Function:
    """A function with what the modifiers say happens to its operands and to its result.

    `first`: of the NaNs among double operands the first counts, as in what ptxas makes of several instructions.
    """
    stages: list[Function] = [lambda v: canonical(t, v)]
    if "relu" in words:
        stages.append(positive)
    if "sat" in words:
        stages.append(saturate)
    before: list[Function] = []
    if "ftz" in words:
        before.append(lambda v: flush(t, v))
        stages.append(lambda v: flush(t, v))

    def whole(*args: np.ndarray) -> np.ndarray:
        for stage in before:
            args = tuple(stage(a) for a in args)
        value = function(*args)
        if t.name == "f64":
            value = of_operands(value, args[::-1] if first else [args[k] for k in _PAYLOADS[len(args)]])
        for stage in stages:
            value = stage(value)
        return value

    return whole


@rule("add", "sub", "mul", "fma", "mad", table=FLOAT)
def _(d: Decoder, inst: Instruction) -> Step:
    narrow, mixed = TYPES[inst.op[-1]], inst.op[-2] in TYPES
    t = TYPES[inst.op[-2]] if mixed else narrow
    words = modifiers(d, inst, *rounding.MODES, "ftz", "sat", "relu", "oob", types=1 + mixed)
    mode = next((w for w in words if w in rounding.MODES), "rn")
    function, many = _ROUNDED[inst.op[0]], 3 if inst.op[0] in ("fma", "mad") else 2

    def compute(*x: np.ndarray) -> np.ndarray:
        return function(*(v.astype(t.dtype) for v in x), mode)

    whole = finished(t, words, compute if mixed else lambda *x: function(*x, mode))
    if "oob" in words:
        return elementwise(d, inst, _without(t, whole), t, *[t] * many)
    # Of mixed operands the last is as wide as the result.
    return elementwise(d, inst, whole, t, *[narrow] * (many - 1), t)


def _without(t: Type, whole: Function) -> Function:
    """Products with what a copy put in place of elements outside a tensor are 0, and the sum with them too."""
    bits = np.uint16(OUTSIDE[t.name.removesuffix("x2")])

    def zeroed(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        outside = (a.view(np.uint16) == bits) | (b.view(np.uint16) == bits)
        return np.where(outside, t.dtype.type(0), whole(a, b, c))

    return zeroed


@rule("div", table=FLOAT)
def _(d: Decoder, inst: Instruction) -> Step:
    t = TYPES[inst.op[-1]]
    words = modifiers(d, inst, *rounding.MODES, "approx", "full", "ftz")
    mode = next((w for w in words if w in rounding.MODES), "")
    if not mode and not {"approx", "full"} & set(words):
        raise d.unsupported(inst)

    def divide(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        out = rounding.div(a, b, mode or "rn")
        if "approx" in words:  # a reciprocal of such divisors would be subnormal
            huge = (np.abs(b) > 2.0**126) & np.isfinite(b)
            out = np.where(huge, np.copysign(np.where(np.isfinite(a), t.dtype.type(0), t.dtype.type(np.nan)), out), out)
        return out

    return elementwise(d, inst, finished(t, words, divide, first=True), t, t, t)


@rule("rcp", "sqrt", table=FLOAT)
def _(d: Decoder, inst: Instruction) -> Step:
    t = TYPES[inst.op[-1]]
    words = modifiers(d, inst, *rounding.MODES, "approx", "ftz")
    mode = next((w for w in words if w in rounding.MODES), "rn")
    if t.name == "f64" and {"approx", "ftz"} <= set(words):
        return elementwise(d, inst, _coarse(lambda a: 1 / a), t, t)
    one = np.ones((1, 1), t.dtype)

    def exact(a: np.ndarray) -> np.ndarray:
        return rounding.div(one, a, mode) if inst.op[0] == "rcp" else rounding.sqrt(a, mode)

    return elementwise(d, inst, finished(t, words, exact), t, t)


def _coarse(function: Function) -> Function:
    """The coarse approximations of doubles see and give the upper 32 bits alone, and flush subnormals."""
    upper, tiny = np.uint64(0xFFFFFFFF00000000), np.finfo(np.float64).tiny

    def cut(value: np.ndarray) -> np.ndarray:
        kept = (value.view(np.uint64) & upper).view(np.float64)
        return np.where(np.abs(kept) < tiny, np.copysign(0.0, kept), kept)

    def whole(a: np.ndarray) -> np.ndarray:
        value = cut(function(cut(a)))
        return np.where(np.isnan(value), _COARSE_NAN, value.view(np.uint64)).view(np.float64)

    return whole


# Computed in double and rounded once: within the error that the ISA documents for each.
_APPROXIMATE: dict[str, Function] = {
    "rsqrt": lambda a: 1 / np.sqrt(a),
    "ex2": np.exp2,
    "lg2": np.log2,
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
}


@rule(*_APPROXIMATE, table=FLOAT)
def _(d: Decoder, inst: Instruction) -> Step:
    t, function = TYPES[inst.op[-1]], _APPROXIMATE[inst.op[0]]
    words = modifiers(d, inst, "approx", "ftz")
    if t.name == "f64":
        return elementwise(d, inst, _coarse(function) if "ftz" in words else function, t, t)

    def approximate(a: np.ndarray) -> np.ndarray:
        return function(a.astype(np.float64)).astype(np.float32).astype(t.dtype)

    return elementwise(d, inst, finished(t, words, approximate), t, t)


@rule("min", "max", table=FLOAT)
def _(d: Decoder, inst: Instruction) -> Step:
    """The number where one is NaN, unless `.NaN` is given; -0 is below +0."""
    t = TYPES[inst.op[-1]]
    words = modifiers(d, inst, "ftz", "NaN", "xorsign", "abs")
    choose = chooser(t, words, inst.op[0] == "min")
    whole = finished(t, [w for w in words if w == "ftz"], choose)
    if len(inst.operands) == 4:
        return elementwise(d, inst, lambda a, b, c: whole(whole(a, b), c), t, t, t, t)
    return elementwise(d, inst, whole, t, t, t)


def chooser(t: Type, words: list[str], lower: bool) -> Function:
    """The smaller or the larger of two."""

    def choose(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        signs = np.signbit(a) ^ np.signbit(b)
        if "abs" in words:
            a, b = np.abs(a), np.abs(b)
        out = _least(t, a, b) if lower else -_least(t, -a, -b)
        missing = np.isnan(a) | np.isnan(b)
        if missing.any():
            other = np.where(np.isnan(a), b, a)
            out = np.where(missing, t.dtype.type(np.nan) if "NaN" in words else other, out)
        return np.where(signs, -np.abs(out), np.abs(out)).astype(t.dtype) if "xorsign" in words else out

    return choose


def _least(t: Type, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    smaller = np.where(b < a, b, a)
    return np.where((a == 0) & (b == 0) & np.signbit(b), b, smaller).astype(t.dtype)


@rule("abs", "neg", table=FLOAT)
def _(d: Decoder, inst: Instruction) -> Step:
    """A NaN becomes the one that arithmetic gives; its sign does not count."""
    t = TYPES[inst.op[-1]]
    change = np.abs if inst.op[0] == "abs" else np.negative
    return elementwise(d, inst, finished(t, modifiers(d, inst, "ftz"), change), t, t)


@rule("copysign", table=FLOAT)
def _(d: Decoder, inst: Instruction) -> Step:
    modifiers(d, inst)
    t = TYPES[inst.op[-1]]
    return elementwise(d, inst, lambda a, b: np.copysign(b, a), t, t, t)


_TESTS: dict[str, Any] = {
    "finite": np.isfinite,
    "infinite": np.isinf,
    "number": lambda a: ~np.isnan(a),
    "notanumber": np.isnan,
    "normal": lambda a: np.isfinite(a) & ((np.abs(a) >= np.finfo(a.dtype).tiny) | (a == 0)),
    "subnormal": lambda a: (a != 0) & (np.abs(a) < np.finfo(a.dtype).tiny),
}


@rule("testp", table=FLOAT)
def _(d: Decoder, inst: Instruction) -> Step:
    (word,) = modifiers(d, inst, *_TESTS)
    return elementwise(d, inst, _TESTS[word], TYPES["pred"], TYPES[inst.op[-1]])

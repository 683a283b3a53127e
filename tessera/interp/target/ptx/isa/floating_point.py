"""Floating-point arithmetic: rounding modes, flush to zero, saturation, NaN propagation, approximations.

Directed rounding is by error-free transformation, then one rounding (Knuth, TAOCP 4.2.2, theorem B).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from tessera.core.errors import ParseError
from tessera.interp.target.fma import fma, round_to_format, round_to_odd
from tessera.interp.target.ptx.isa.decoder import FLOAT_RULES, PtxDecoder, check_modifiers, decode_rule
from tessera.interp.target.ptx.isa.operands import make_elementwise_step
from tessera.interp.target.ptx.isa.tensor_map import OUT_OF_BOUNDS_NAN
from tessera.interp.target.ptx.machine.simt import LaneStep
from tessera.interp.target.ptx.text.syntax import TYPES, PtxInstruction, PtxType

# Arithmetic in every rounding mode: an error-free transformation, then one rounding.


ROUNDING_MODES = {"rn", "rz", "rm", "rp"}  # to nearest even, toward zero, toward minus and plus infinity
_F64 = np.dtype(np.float64)


def add_exactly(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A sum of doubles and its rounding error (Knuth, TAOCP 4.2.2, theorem B)."""
    total = a + b
    part = total - a
    error = (a - (total - part)) + (b - part)
    return total, np.where(np.isfinite(total), error, 0.0)


def round_once(total: np.ndarray, error: np.ndarray, dtype: np.dtype, mode: str) -> np.ndarray:
    """A double plus its rounding error, rounded once to a format of at most 64 bits."""
    if dtype == _F64:
        return _step_to_neighbour(total, np.sign(error), mode)
    odd = round_to_odd(total, error)
    near = round_to_format(odd, dtype)
    return _step_to_neighbour(near, np.sign(odd - near.astype(_F64)), mode)


def _step_to_neighbour(near: np.ndarray, rest: np.ndarray, mode: str) -> np.ndarray:
    """The neighbour in the rounding direction; `rest` is the sign of the exact value minus `near`."""
    if mode == "rn":
        return near
    unsigned = np.dtype(f"u{near.dtype.itemsize}")
    bits, one = near.view(unsigned), unsigned.type(1)
    negative = np.signbit(near)
    down = (rest < 0) & (mode == "rm") | (rest < 0) & (mode == "rz") & ~negative
    up = (rest > 0) & (mode == "rp") | (rest > 0) & (mode == "rz") & negative
    bits = np.where(down, np.where(negative, bits + one, bits - one), bits)
    bits = np.where(up, np.where(negative, bits - one, bits + one), bits)
    return bits.view(near.dtype)


def add_rounded(a: np.ndarray, b: np.ndarray, mode: str) -> np.ndarray:
    """a + b."""
    if mode == "rn":
        return a + b
    total, error = add_exactly(a.astype(_F64), b.astype(_F64))
    return _fix_zero_sign(round_once(total, error, a.dtype, mode), a, b, (total == 0) & (error == 0), mode)


def _fix_zero_sign(out: np.ndarray, a: np.ndarray, b: np.ndarray, exact: np.ndarray, mode: str) -> np.ndarray:
    """Operands whose exact sum is 0 give -0 when rounding down; an underflow is not such a sum."""
    if mode != "rm":
        return out
    return np.where(exact & (np.signbit(a) != np.signbit(b)), out.dtype.type(-0.0), out)


def subtract_rounded(a: np.ndarray, b: np.ndarray, mode: str) -> np.ndarray:
    """a - b."""
    return a - b if mode == "rn" else add_rounded(a, -b, mode)


def multiply_rounded(a: np.ndarray, b: np.ndarray, mode: str) -> np.ndarray:
    """a * b."""
    if mode == "rn":
        return a * b
    if a.dtype == _F64:
        return _round_with_fractions(lambda x, y: x * y, a * b, mode, a, b)
    product = a.astype(_F64) * b.astype(_F64)
    return round_once(product, np.zeros_like(product), a.dtype, mode)


def multiply_add_rounded(a: np.ndarray, b: np.ndarray, c: np.ndarray, mode: str) -> np.ndarray:
    """a * b + c."""
    a, b, c = np.broadcast_arrays(a, b, c)
    near = fma(a, b, c)
    if mode == "rn":
        return near
    if a.dtype == _F64:
        rest = _compute_residual_sign(lambda x, y, z: x * y + z, near, a, b, c)
        return _fix_zero_sign(_step_to_neighbour(near, rest, mode), a * b, c, (near == 0) & (rest == 0), mode)
    product = a.astype(_F64) * b.astype(_F64)
    total, error = add_exactly(product, c.astype(_F64))
    return _fix_zero_sign(round_once(total, error, a.dtype, mode), product, c, (total == 0) & (error == 0), mode)


def divide_rounded(a: np.ndarray, b: np.ndarray, mode: str) -> np.ndarray:
    """a / b."""
    if mode == "rn":
        return a / b
    if a.dtype == _F64:
        return _round_with_fractions(lambda x, y: x / y, a / b, mode, a, b)
    # The double quotient of two floats is exact, or far enough from every float that rounding it again is correct.
    quotient = a.astype(_F64) / b.astype(_F64)
    return round_once(quotient, np.zeros_like(quotient), a.dtype, mode)


def compute_sqrt_rounded(a: np.ndarray, mode: str) -> np.ndarray:
    """The square root."""
    if mode == "rn":
        return np.sqrt(a)
    if a.dtype == _F64:
        return _compute_sqrt_directed(a, mode)
    root = np.sqrt(a.astype(_F64))
    return round_once(root, np.zeros_like(root), a.dtype, mode)


def _round_with_fractions(
    function: Callable[..., Fraction], near: np.ndarray, mode: str, *args: np.ndarray
) -> np.ndarray:
    """Doubles rounded in a direction by rational arithmetic, which is slow and exact."""
    return _step_to_neighbour(near, _compute_residual_sign(function, near, *args), mode)


def _compute_residual_sign(function: Callable[..., Fraction], near: np.ndarray, *args: np.ndarray) -> np.ndarray:
    """The sign of the exact values minus the doubles."""
    args = tuple(np.broadcast_arrays(*args))
    rest = np.zeros(near.shape)
    for index in np.ndindex(near.shape):
        numbers = [float(a[index]) for a in args]
        if all(map(math.isfinite, numbers)) and not math.isnan(near[index]):
            rest[index] = _compute_exact_residual(function, float(near[index]), numbers)
    return rest


def _compute_exact_residual(function: Callable[..., Fraction], near: float, numbers: list[float]) -> int:
    try:
        exact = function(*(Fraction(n) for n in numbers))
    except ZeroDivisionError:
        return 0
    if math.isinf(near):
        return -1 if near > 0 else 1
    return (exact > Fraction(near)) - (exact < Fraction(near))


def _compute_sqrt_directed(a: np.ndarray, mode: str) -> np.ndarray:
    near, rest = np.sqrt(a), np.zeros(a.shape)
    for index in np.ndindex(a.shape):
        x = float(a[index])
        if math.isfinite(x) and x > 0:
            square = Fraction(float(near[index])) ** 2
            rest[index] = (Fraction(x) > square) - (Fraction(x) < square)
    return _step_to_neighbour(near, rest, mode)


# Instructions: modifiers, and the operations.


FloatFunction = Callable[..., np.ndarray]
_NAN = {"f32": 0x7FFFFFFF, "f16": 0x7FFF, "bf16": 0x7FFF, "tf32": 0x7FFFFFFF}
_APPROX_F64_NAN = np.uint64(0x7FFFFFFF << 32)
_SMALLEST_NORMAL = {"f32": 0x00800000, "f16": 0x0400, "bf16": 0x0080}  # the smallest normal number
_QUIET, _INVALID = np.uint64(1 << 51), np.uint64(0xFFF8 << 48)
# Which operand's NaN a double result has: the last one listed here that is NaN.
_PAYLOADS = {1: (0,), 2: (0, 1), 3: (0, 2, 1)}
_ROUNDED_OPERATIONS: dict[str, FloatFunction] = {
    "add": add_rounded, "sub": subtract_rounded, "mul": multiply_rounded, "fma": multiply_add_rounded,
    "mad": multiply_add_rounded, "div": divide_rounded, "sqrt": compute_sqrt_rounded,
}  # fmt: skip


def canonicalise_nan(t: PtxType, value: np.ndarray) -> np.ndarray:
    """Float results with the hardware's canonical NaN; doubles are unchanged."""
    name = t.name.removesuffix("x2")
    if name in _NAN and (bad := np.isnan(value)).any():
        bits = np.where(bad, np.array(_NAN[name], f"u{value.itemsize}"), value.view(f"u{value.itemsize}"))
        return bits.view(value.dtype)
    return value


def propagate_operand_nan(value: np.ndarray, args: Sequence[np.ndarray]) -> np.ndarray:
    """Double results whose NaNs are those of the operands, quieted; the last NaN operand decides."""
    if not (bad := np.isnan(value)).any():
        return value
    bits = np.broadcast_to(_INVALID, value.shape)
    for a in args:
        bits = np.where(np.isnan(a), np.ascontiguousarray(a).view(np.uint64) | _QUIET, bits)
    return np.where(bad, bits, value.view(np.uint64)).view(np.float64)


def flush_subnormals(t: PtxType, value: np.ndarray) -> np.ndarray:
    """Subnormal numbers as zeros of their sign."""
    unsigned = np.dtype(f"u{value.itemsize}")
    bits, sign = value.view(unsigned), unsigned.type(1 << 8 * value.itemsize - 1)
    small = (bits & ~sign) < _SMALLEST_NORMAL[t.name.removesuffix("x2")]
    return np.where(small, bits & sign, bits).view(value.dtype)


def saturate(value: np.ndarray) -> np.ndarray:
    """Values clamped to [0, 1]; NaN becomes +0."""
    zero, one = value.dtype.type(0), value.dtype.type(1)
    return np.where(value > zero, np.minimum(value, one), zero)


def clamp_negative_to_zero(value: np.ndarray) -> np.ndarray:
    """Negative values and -0 become +0."""
    return np.where(value <= 0, value.dtype.type(0), value)


def apply_float_modifiers(t: PtxType, words: list[str], function: FloatFunction, first: bool = False) -> FloatFunction:
    """A function with the modifiers applied to its operands and its result.

    `first`: the first NaN among double operands decides, as in ptxas's expansions of one instruction to several.
    """
    stages: list[FloatFunction] = [lambda v: canonicalise_nan(t, v)]
    if "relu" in words:
        stages.append(clamp_negative_to_zero)
    if "sat" in words:
        stages.append(saturate)
    pre_stages: list[FloatFunction] = []
    if "ftz" in words:
        pre_stages.append(lambda v: flush_subnormals(t, v))
        stages.append(lambda v: flush_subnormals(t, v))

    def whole(*args: np.ndarray) -> np.ndarray:
        for stage in pre_stages:
            args = tuple(stage(a) for a in args)
        value = function(*args)
        if t.name == "f64":
            value = propagate_operand_nan(value, args[::-1] if first else [args[k] for k in _PAYLOADS[len(args)]])
        for stage in stages:
            value = stage(value)
        return value

    return whole


@decode_rule("add", "sub", "mul", "fma", "mad", table=FLOAT_RULES)
def _(d: PtxDecoder, inst: PtxInstruction) -> LaneStep:
    narrow, mixed = TYPES[inst.op[-1]], inst.op[-2] in TYPES
    t = TYPES[inst.op[-2]] if mixed else narrow
    words = check_modifiers(d, inst, *ROUNDING_MODES, "ftz", "sat", "relu", "oob", types=1 + mixed)
    mode = next((w for w in words if w in ROUNDING_MODES), "rn")
    function, operands = _ROUNDED_OPERATIONS[inst.op[0]], 3 if inst.op[0] in ("fma", "mad") else 2

    def compute(*x: np.ndarray) -> np.ndarray:
        return function(*(v.astype(t.dtype) for v in x), mode)

    whole = apply_float_modifiers(t, words, compute if mixed else lambda *x: function(*x, mode))
    if "oob" in words:
        return make_elementwise_step(d, inst, _ignore_out_of_bounds(t, whole), t, *[t] * operands)
    # With mixed types the last operand has the type of the result.
    return make_elementwise_step(d, inst, whole, t, *[narrow] * (operands - 1), t)


def _ignore_out_of_bounds(t: PtxType, whole: FloatFunction) -> FloatFunction:
    """fma.oob: with an operand that is the out-of-bounds fill, the result is 0."""
    bits = np.uint16(OUT_OF_BOUNDS_NAN[t.name.removesuffix("x2")])

    def zeroed(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        outside = (a.view(np.uint16) == bits) | (b.view(np.uint16) == bits)
        return np.where(outside, t.dtype.type(0), whole(a, b, c))

    return zeroed


# The forms of the approximate instructions (PTX ISA 8.7, sections 9.7.3 and 9.7.4).
_APPROXIMATE_FORMS: dict[str, tuple[str, ...]] = {
    "div": ("approx.f32", "approx.ftz.f32", "full.f32", "full.ftz.f32"),
    "rcp": ("approx.f32", "approx.ftz.f32", "approx.ftz.f64"),
    "sqrt": ("approx.f32", "approx.ftz.f32"),
    "rsqrt": ("approx.f32", "approx.ftz.f32", "approx.f64", "approx.ftz.f64"),
    "ex2": ("approx.f32", "approx.ftz.f32", "approx.f16", "approx.f16x2", "approx.ftz.bf16", "approx.ftz.bf16x2"),
    "lg2": ("approx.f32", "approx.ftz.f32"),
    "sin": ("approx.f32", "approx.ftz.f32"),
    "cos": ("approx.f32", "approx.ftz.f32"),
    "tanh": ("approx.f32", "approx.f16", "approx.f16x2", "approx.bf16", "approx.bf16x2"),
}


def _check_approximate_form(inst: PtxInstruction) -> None:
    """Refuse an approximate instruction in a form that the ISA does not have."""
    opcode, *modifiers = inst.op
    if ".".join(modifiers) not in _APPROXIMATE_FORMS[opcode]:
        raise ParseError(
            f"the PTX ISA has no {'.'.join(inst.op)}", location=inst.location,
            expected=", ".join(f"{opcode}.{form}" for form in _APPROXIMATE_FORMS[opcode]),
        )  # fmt: skip


@decode_rule("div", table=FLOAT_RULES)
def _(d: PtxDecoder, inst: PtxInstruction) -> LaneStep:
    t = TYPES[inst.op[-1]]
    words = check_modifiers(d, inst, *ROUNDING_MODES, "approx", "full", "ftz")
    mode = next((w for w in words if w in ROUNDING_MODES), "")
    if not mode:
        _check_approximate_form(inst)

    def divide(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        out = divide_rounded(a, b, mode or "rn")
        if "approx" in words:  # the reciprocal of such a divisor is subnormal
            huge = (np.abs(b) > 2.0**126) & np.isfinite(b)
            out = np.where(huge, np.copysign(np.where(np.isfinite(a), t.dtype.type(0), t.dtype.type(np.nan)), out), out)
        return out

    return make_elementwise_step(d, inst, apply_float_modifiers(t, words, divide, first=True), t, t, t)


@decode_rule("rcp", "sqrt", table=FLOAT_RULES)
def _(d: PtxDecoder, inst: PtxInstruction) -> LaneStep:
    t = TYPES[inst.op[-1]]
    words = check_modifiers(d, inst, *ROUNDING_MODES, "approx", "ftz")
    mode = next((w for w in words if w in ROUNDING_MODES), "")
    if not mode:
        _check_approximate_form(inst)
    mode = mode or "rn"
    if t.name == "f64" and "approx" in words:
        return make_elementwise_step(d, inst, _approximate_f64(lambda a: 1 / a), t, t)
    one = np.ones((1, 1), t.dtype)

    def exact(a: np.ndarray) -> np.ndarray:
        return divide_rounded(one, a, mode) if inst.op[0] == "rcp" else compute_sqrt_rounded(a, mode)

    return make_elementwise_step(d, inst, apply_float_modifiers(t, words, exact), t, t)


def _approximate_f64(function: FloatFunction) -> FloatFunction:
    """The coarse approximations of doubles read and write the upper 32 bits, and flush subnormals."""
    upper, tiny = np.uint64(0xFFFFFFFF00000000), np.finfo(np.float64).tiny

    def cut(value: np.ndarray) -> np.ndarray:
        kept = (value.view(np.uint64) & upper).view(np.float64)
        return np.where(np.abs(kept) < tiny, np.copysign(0.0, kept), kept)

    def whole(a: np.ndarray) -> np.ndarray:
        value = cut(function(cut(a)))
        return np.where(np.isnan(value), _APPROX_F64_NAN, value.view(np.uint64)).view(np.float64)

    return whole


# Computed in double and rounded once, which is within the error that the ISA documents.
_APPROXIMATE: dict[str, FloatFunction] = {
    "rsqrt": lambda a: 1 / np.sqrt(a),
    "ex2": np.exp2,
    "lg2": np.log2,
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
}


@decode_rule(*_APPROXIMATE, table=FLOAT_RULES)
def _(d: PtxDecoder, inst: PtxInstruction) -> LaneStep:
    _check_approximate_form(inst)
    t, function = TYPES[inst.op[-1]], _APPROXIMATE[inst.op[0]]
    words = check_modifiers(d, inst, "approx", "ftz")
    if t.name == "f64":
        return make_elementwise_step(d, inst, _approximate_f64(function) if "ftz" in words else function, t, t)

    def approximate(a: np.ndarray) -> np.ndarray:
        return function(a.astype(np.float64)).astype(np.float32).astype(t.dtype)

    return make_elementwise_step(d, inst, apply_float_modifiers(t, words, approximate), t, t)


@decode_rule("min", "max", table=FLOAT_RULES)
def _(d: PtxDecoder, inst: PtxInstruction) -> LaneStep:
    """If one operand is NaN, the other, unless `.NaN` is set; -0 is less than +0."""
    t = TYPES[inst.op[-1]]
    words = check_modifiers(d, inst, "ftz", "NaN", "xorsign", "abs")
    choose = make_min_max(t, words, inst.op[0] == "min")
    whole = apply_float_modifiers(t, [w for w in words if w == "ftz"], choose)
    if len(inst.operands) == 4:
        return make_elementwise_step(d, inst, lambda a, b, c: whole(whole(a, b), c), t, t, t, t)
    return make_elementwise_step(d, inst, whole, t, t, t)


def make_min_max(t: PtxType, words: list[str], lower: bool) -> FloatFunction:
    """The smaller or the larger of two numbers."""

    def choose(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        signs = np.signbit(a) ^ np.signbit(b)
        if "abs" in words:
            a, b = np.abs(a), np.abs(b)
        out = _select_minimum(t, a, b) if lower else -_select_minimum(t, -a, -b)
        has_nan = np.isnan(a) | np.isnan(b)
        if has_nan.any():
            other = np.where(np.isnan(a), b, a)
            out = np.where(has_nan, t.dtype.type(np.nan) if "NaN" in words else other, out)
        return np.where(signs, -np.abs(out), np.abs(out)).astype(t.dtype) if "xorsign" in words else out

    return choose


def _select_minimum(t: PtxType, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    smaller = np.where(b < a, b, a)
    return np.where((a == 0) & (b == 0) & np.signbit(b), b, smaller).astype(t.dtype)


@decode_rule("abs", "neg", table=FLOAT_RULES)
def _(d: PtxDecoder, inst: PtxInstruction) -> LaneStep:
    """A NaN becomes the canonical NaN, whatever its sign."""
    t = TYPES[inst.op[-1]]
    change = np.abs if inst.op[0] == "abs" else np.negative
    return make_elementwise_step(d, inst, apply_float_modifiers(t, check_modifiers(d, inst, "ftz"), change), t, t)


@decode_rule("copysign", table=FLOAT_RULES)
def _(d: PtxDecoder, inst: PtxInstruction) -> LaneStep:
    check_modifiers(d, inst)
    t = TYPES[inst.op[-1]]
    return make_elementwise_step(d, inst, lambda a, b: np.copysign(b, a), t, t, t)


_TESTS: dict[str, Any] = {
    "finite": np.isfinite,
    "infinite": np.isinf,
    "number": lambda a: ~np.isnan(a),
    "notanumber": np.isnan,
    "normal": lambda a: np.isfinite(a) & ((np.abs(a) >= np.finfo(a.dtype).tiny) | (a == 0)),
    "subnormal": lambda a: (a != 0) & (np.abs(a) < np.finfo(a.dtype).tiny),
}


@decode_rule("testp", table=FLOAT_RULES)
def _(d: PtxDecoder, inst: PtxInstruction) -> LaneStep:
    (word,) = check_modifiers(d, inst, *_TESTS)
    return make_elementwise_step(d, inst, _TESTS[word], TYPES["pred"], TYPES[inst.op[-1]])

"""Scalar intrinsics of LLVM, and functions of the C library: the NumPy function of each name and type."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from tessera.interp.target.fma import fma, round_to_format
from tessera.interp.target.llvm.arithmetic import (
    PureFunction,
    as_unsigned,
    clear_sign,
    combine_sign_bits,
    compute_in_format,
    convert_float_to_integer,
)
from tessera.interp.target.llvm.lanes import canonicalise, view_unsigned, wrap_integers
from tessera.interp.target.llvm.text.syntax import LlvmAggregate, LlvmFloat, LlvmInstruction, LlvmInt, LlvmType

# Float intrinsics and functions of the C library.


_F64 = np.dtype(np.float64)


def _apply_elementwise(function: Callable[[float], float]) -> PureFunction:
    """A function of Python floats on arrays."""
    run: PureFunction = np.frompyfunc(function, 1, 1)
    return lambda x: run(x).astype(_F64)


def _compute_gamma(x: float) -> float:
    try:
        return math.gamma(x)
    except OverflowError:
        return math.inf
    except ValueError:  # a pole
        return math.copysign(math.inf, x) if x == 0 else math.nan


# Functions without an exact result are computed in double and rounded.
_DOUBLE_FUNCTIONS: dict[str, PureFunction] = {
    **{name: getattr(np, name) for name in "exp exp2 expm1 log log2 log10 log1p sin cos tan".split()},
    **{name: getattr(np, name) for name in "sinh cosh tanh cbrt hypot".split()},
    **{"a" + name: getattr(np, "arc" + name) for name in "sin cos tan sinh cosh tanh".split()},
    "atan2": np.arctan2,
    "pow": np.power,
    "powi": np.power,
    "ldexp": lambda x, n: np.ldexp(x, n.astype(np.int32)),
    "exp10": lambda x: np.power(10.0, x),
    "erf": _apply_elementwise(math.erf),
    "erfc": _apply_elementwise(math.erfc),
    "tgamma": _apply_elementwise(_compute_gamma),
}


def round_half_away(x: np.ndarray) -> np.ndarray:
    """Round to the nearest integer, ties away from zero."""
    whole = np.trunc(x)
    return np.copysign(np.abs(whole) + (np.abs(x - whole) >= 0.5).astype(x.dtype), x)


def _make_signed_zero_minmax(pick: PureFunction, first_when: PureFunction) -> PureFunction:
    """A minimum or maximum that orders -0 before +0."""

    def run(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        zeros = (a == 0) & (b == 0)
        if not zeros.any():
            return pick(a, b)
        return np.where(zeros, np.where(first_when(np.signbit(a), np.signbit(b)), a, b), pick(a, b))

    return run


def _copy_sign(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    bits = f"u{a.dtype.itemsize}"
    sign = combine_sign_bits(b, np.bitwise_and, -1).view(bits) ^ b.view(bits)
    return (clear_sign(a).view(bits) | sign).view(a.dtype)


# Functions whose result is exact or rounded once in every format.
_EXACT_FUNCTIONS: dict[str, PureFunction] = {
    "sqrt": np.sqrt,
    "floor": np.floor,
    "ceil": np.ceil,
    "trunc": np.trunc,
    **dict.fromkeys(("rint", "nearbyint", "roundeven"), np.rint),
    "round": round_half_away,
    "fmod": np.fmod,
    "fdim": lambda a, b: np.where(a <= b, np.zeros_like(a), a - b),
    **dict.fromkeys(("minnum", "minimumnum", "fmin"), _make_signed_zero_minmax(np.fmin, np.greater)),
    **dict.fromkeys(("maxnum", "maximumnum", "fmax"), _make_signed_zero_minmax(np.fmax, np.less)),
    "minimum": _make_signed_zero_minmax(np.minimum, np.greater),
    "maximum": _make_signed_zero_minmax(np.maximum, np.less),
}

# Functions of bits, or that round themselves.
_BITWISE_FUNCTIONS: dict[str, PureFunction] = {
    **dict.fromkeys(("fma", "fmuladd"), fma),
    "fabs": clear_sign,
    "copysign": _copy_sign,
    "canonicalize": lambda x: x,
}


def get_float_math(name: str, type: LlvmType) -> PureFunction | None:
    """The function of a name on a scalar type; None if the name is unknown."""
    if name in _BITWISE_FUNCTIONS:
        return _BITWISE_FUNCTIONS[name]
    if name in _EXACT_FUNCTIONS:
        return compute_in_format(_EXACT_FUNCTIONS[name], type)
    if name in _DOUBLE_FUNCTIONS:
        return _compute_in_double(_DOUBLE_FUNCTIONS[name], type.dtype)
    return None


def _compute_in_double(function: PureFunction, dtype: np.dtype) -> PureFunction:
    return lambda *values: round_to_format(function(*(v.astype(_F64) for v in values)), dtype)


def get_libc_function(name: str, type: LlvmType) -> PureFunction | None:
    """A function of the C library: its name ends in f for float."""
    if not isinstance(type, LlvmFloat):
        return None
    short = name if type.dtype == _F64 else name.removesuffix("f")
    if type.name == "float" and short == name:
        return None
    return get_float_math(short, type)


def _build_saturating_cast(i: LlvmInstruction) -> PureFunction:
    """llvm.fptosi.sat and llvm.fptoui.sat: NaN gives 0, a value out of range the nearest integer."""
    type, signed = i.type.scalar, ".fptosi." in i.word
    assert isinstance(type, LlvmInt)
    low = -(1 << (type.bits - 1)) if signed else 0
    high = (1 << (type.bits - signed)) - 1
    ends = wrap_integers([low, high], type)

    def run(x: np.ndarray) -> np.ndarray:
        wide = x.astype(_F64)
        inside = convert_float_to_integer(np.where(np.isnan(wide), 0, np.clip(wide, low, high)), type, signed)
        return np.where(wide >= high, ends[1], np.where(wide <= low, ends[0], inside))

    return run


def _classify(x: np.ndarray) -> list[np.ndarray]:
    """The ten classes of llvm.is.fpclass, in the order of its mask bits."""
    size = np.abs(x)
    tiny = _SMALLEST_NORMAL[str(x.dtype)]
    negative = np.signbit(x)
    infinite, none, zero = np.isinf(x), np.isnan(x), x == 0
    subnormal = (size < tiny) & ~zero
    normal = ~(infinite | none | zero | subnormal)
    below = [k & negative for k in (infinite, normal, subnormal, zero)]
    above = [k & ~negative for k in (zero, subnormal, normal, infinite)]
    quiet = none & (x.view(f"u{x.dtype.itemsize}") >> (_QUIET_BIT[x.dtype.itemsize]) & 1).astype(bool)
    return [none & ~quiet, quiet, *below, *above]


_SMALLEST_NORMAL = {"float16": 2.0**-14, "bfloat16": 2.0**-126, "float32": 2.0**-126, "float64": 2.0**-1022}
_QUIET_BIT = {2: 9, 4: 22, 8: 51}


def _build_class_test(i: LlvmInstruction) -> PureFunction:
    def run(x: np.ndarray, mask: np.ndarray) -> np.ndarray:
        wanted = [result for bit, result in enumerate(_classify(x)) if int(mask[0]) >> bit & 1]
        return np.logical_or.reduce([np.zeros(x.shape, bool), *wanted])

    return run


def _make_named_builder(name: str) -> Callable[[LlvmInstruction], PureFunction]:
    def build(i: LlvmInstruction) -> PureFunction:
        result = get_float_math(name, i.type.scalar)
        assert result is not None
        return result

    return build


FLOAT_INTRINSICS: dict[str, Callable[[LlvmInstruction], PureFunction]] = {
    **{name: _make_named_builder(name) for name in (*_BITWISE_FUNCTIONS, *_EXACT_FUNCTIONS, *_DOUBLE_FUNCTIONS)},
    "fptosi.sat": _build_saturating_cast,
    "fptoui.sat": _build_saturating_cast,
    "is.fpclass": _build_class_test,
}


# Integer intrinsics.


_WRAPPING_FUNCTIONS: dict[str, PureFunction] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "shl": np.left_shift,
}


def _get_integer_type(i: LlvmInstruction) -> LlvmInt:
    """The integer type of an intrinsic's operands."""
    type = i.operands[0].type.scalar
    assert isinstance(type, LlvmInt)
    return type


def _get_bounds(type: LlvmInt, signed: bool) -> tuple[int, int]:
    return (-(1 << (type.bits - 1)), (1 << (type.bits - 1)) - 1) if signed else (0, (1 << type.bits) - 1)


def _widen_exactly(x: np.ndarray, type: LlvmInt, signed: bool) -> np.ndarray:
    """The numbers in a dtype in which a sum or product of two does not overflow."""
    if type.bits > 32:
        return (x if signed else view_unsigned(x, type)).astype(object)
    return x.astype(np.int64) if signed else view_unsigned(x, type).astype(np.uint64)


def _wrap(x: np.ndarray, type: LlvmInt) -> np.ndarray:
    if x.dtype != object:
        return canonicalise(x.astype(type.dtype), type)
    return wrap_integers([int(n) for n in x.reshape(-1)], type).reshape(x.shape)


def _build_overflow(i: LlvmInstruction) -> PureFunction:
    """llvm.sadd.with.overflow and similar: the wrapped result, and whether it overflowed."""
    name = i.word.split(".")[1]
    assert isinstance(i.type, LlvmAggregate)
    type, signed, combine = _get_integer_type(i), name[0] == "s", _WRAPPING_FUNCTIONS[name[1:]]
    low, high = _get_bounds(type, signed)

    def run(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        exact = combine(_widen_exactly(a, type, signed), _widen_exactly(b, type, signed))
        return _wrap(exact, type), ((exact < low) | (exact > high)).astype(bool)

    return run


def _build_saturating(i: LlvmInstruction) -> PureFunction:
    """llvm.sadd.sat and similar."""
    name = i.word.split(".")[1]
    type, signed, combine = _get_integer_type(i), name[0] == "s", _WRAPPING_FUNCTIONS[name[1:]]
    low, high = _get_bounds(type, signed)

    def run(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        left, right = _convert_to_python(a, type, signed), _convert_to_python(b, type, signed)
        return _wrap(np.clip(combine(left, right), low, high).astype(object), type)

    return run


def _convert_to_python(x: np.ndarray, type: LlvmInt, signed: bool) -> np.ndarray:
    """Python integers: a difference of unsigned numbers may be negative."""
    return (x if signed else view_unsigned(x, type)).astype(object)


def _build_absolute(i: LlvmInstruction) -> PureFunction:
    type = _get_integer_type(i)
    return lambda x, poison: canonicalise(np.abs(x), type)


def _count_ones(bits: np.ndarray) -> np.ndarray:
    """The number of ones in each unsigned integer."""
    raw = np.ascontiguousarray(bits)[..., None].view(np.uint8)
    return np.unpackbits(raw, axis=-1).sum(axis=-1)


def _build_population_count(i: LlvmInstruction) -> PureFunction:
    type = _get_integer_type(i)
    return lambda x: canonicalise(_count_ones(view_unsigned(x, type)).astype(x.dtype), type)


def _build_leading_zeros(i: LlvmInstruction) -> PureFunction:
    type = _get_integer_type(i)

    def run(x: np.ndarray, poison: np.ndarray) -> np.ndarray:
        bits = view_unsigned(x, type)
        for step in (1, 2, 4, 8, 16, 32):
            bits = bits | (bits >> min(step, type.bits))
        return canonicalise((type.bits - _count_ones(bits)).astype(x.dtype), type)

    return run


def _build_trailing_zeros(i: LlvmInstruction) -> PureFunction:
    type = _get_integer_type(i)

    def run(x: np.ndarray, poison: np.ndarray) -> np.ndarray:
        bits = view_unsigned(x, type)
        below = ~bits & (bits - bits.dtype.type(1))
        return canonicalise(np.minimum(_count_ones(below), type.bits).astype(x.dtype), type)

    return run


def _build_bit_reverse(i: LlvmInstruction) -> PureFunction:
    type = _get_integer_type(i)

    def run(x: np.ndarray) -> np.ndarray:
        raw = np.ascontiguousarray(x)[..., None].view(np.uint8)
        bits = np.unpackbits(raw, axis=-1, bitorder="little")[..., ::-1]
        out = np.packbits(bits, axis=-1, bitorder="little").view(x.dtype)[..., 0]
        return out >> (8 * x.dtype.itemsize - type.bits)

    return run


def _build_funnel_shift(i: LlvmInstruction) -> PureFunction:
    """llvm.fshl, llvm.fshr: a shift of two concatenated integers."""
    type, left = _get_integer_type(i), ".fshl." in i.word

    def run(a: np.ndarray, b: np.ndarray, shift: np.ndarray) -> np.ndarray:
        high, low = view_unsigned(a, type), view_unsigned(b, type)
        width = high.dtype.type(type.bits)
        by = view_unsigned(shift, type) % width
        by = by if left else width - by
        return canonicalise(((high << by) | (low >> (width - by))).view(a.dtype), type)

    return run


def _make_signed_builder(function: PureFunction, for_bits: PureFunction) -> Callable[[LlvmInstruction], PureFunction]:
    """A signed function; for i1 true is -1."""
    return lambda i: for_bits if i.type.dtype == bool else function


def _make_unsigned_builder(function: PureFunction) -> Callable[[LlvmInstruction], PureFunction]:
    def build(i: LlvmInstruction) -> PureFunction:
        type: LlvmType = i.type.scalar
        return function if type.dtype == bool else as_unsigned(function, type)

    return build


INTEGER_INTRINSICS: dict[str, Callable[[LlvmInstruction], PureFunction]] = {
    "smin": _make_signed_builder(np.minimum, np.logical_or),
    "smax": _make_signed_builder(np.maximum, np.logical_and),
    "umin": _make_unsigned_builder(np.minimum),
    "umax": _make_unsigned_builder(np.maximum),
    "abs": _build_absolute,
    "ctpop": _build_population_count,
    "ctlz": _build_leading_zeros,
    "cttz": _build_trailing_zeros,
    "bswap": lambda i: lambda x: x.byteswap(),
    "bitreverse": _build_bit_reverse,
    "fshl": _build_funnel_shift,
    "fshr": _build_funnel_shift,
    **{f"{s}{op}.sat": _build_saturating for s in "su" for op in ("add", "sub")},
    **{f"{s}{op}.with.overflow": _build_overflow for s in "su" for op in ("add", "sub", "mul")},
}

"""Float intrinsics and the C library's functions: for each name, the NumPy function for a type."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from tessera.interp.target.fma import fma, narrow
from tessera.interp.target.llvm.arith import Pure, flip, in_format, magnitude
from tessera.interp.target.llvm.casts import float_to_integer
from tessera.interp.target.llvm.lanes import integers
from tessera.interp.target.llvm.syntax import Instruction
from tessera.interp.target.llvm.types import Float, Int, Type

_F64 = np.dtype(np.float64)


def _elementwise(function: Callable[[float], float]) -> Pure:
    """A function of Python floats on arrays."""
    run: Pure = np.frompyfunc(function, 1, 1)
    return lambda x: run(x).astype(_F64)


def _gamma(x: float) -> float:
    try:
        return math.gamma(x)
    except OverflowError:
        return math.inf
    except ValueError:  # a pole
        return math.copysign(math.inf, x) if x == 0 else math.nan


# Functions without an exact result, computed in double and rounded: as close as one can ask.
_DOUBLE: dict[str, Pure] = {
    **{name: getattr(np, name) for name in "exp exp2 expm1 log log2 log10 log1p sin cos tan".split()},
    **{name: getattr(np, name) for name in "sinh cosh tanh cbrt hypot".split()},
    **{"a" + name: getattr(np, "arc" + name) for name in "sin cos tan sinh cosh tanh".split()},
    "atan2": np.arctan2,
    "pow": np.power,
    "powi": np.power,
    "ldexp": lambda x, n: np.ldexp(x, n.astype(np.int32)),
    "exp10": lambda x: np.power(10.0, x),
    "erf": _elementwise(math.erf),
    "erfc": _elementwise(math.erfc),
    "tgamma": _elementwise(_gamma),
}


def round_away(x: np.ndarray) -> np.ndarray:
    """To the nearest integer, halves away from zero."""
    whole = np.trunc(x)
    return np.copysign(np.abs(whole) + (np.abs(x - whole) >= 0.5).astype(x.dtype), x)


def _ordered(pick: Pure, first_when: Pure) -> Pure:
    """A minimum or maximum that tells -0 from +0."""

    def run(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        zeros = (a == 0) & (b == 0)
        if not zeros.any():
            return pick(a, b)
        return np.where(zeros, np.where(first_when(np.signbit(a), np.signbit(b)), a, b), pick(a, b))

    return run


def _copy_sign(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    bits = f"u{a.dtype.itemsize}"
    sign = flip(b, np.bitwise_and, -1).view(bits) ^ b.view(bits)
    return (magnitude(a).view(bits) | sign).view(a.dtype)


# Functions with an exact or singly rounded result in every format.
_EXACT: dict[str, Pure] = {
    "sqrt": np.sqrt,
    "floor": np.floor,
    "ceil": np.ceil,
    "trunc": np.trunc,
    **dict.fromkeys(("rint", "nearbyint", "roundeven"), np.rint),
    "round": round_away,
    "fmod": np.fmod,
    "fdim": lambda a, b: np.where(a <= b, np.zeros_like(a), a - b),
    **dict.fromkeys(("minnum", "minimumnum", "fmin"), _ordered(np.fmin, np.greater)),
    **dict.fromkeys(("maxnum", "maximumnum", "fmax"), _ordered(np.fmax, np.less)),
    "minimum": _ordered(np.minimum, np.greater),
    "maximum": _ordered(np.maximum, np.less),
}

# Functions of bits, or that round by themselves.
_ANY: dict[str, Pure] = {
    **dict.fromkeys(("fma", "fmuladd"), fma),
    "fabs": magnitude,
    "copysign": _copy_sign,
    "canonicalize": lambda x: x,
}


def float_math(name: str, type: Type) -> Pure | None:
    """The function of a name on a scalar type."""
    if name in _ANY:
        return _ANY[name]
    if name in _EXACT:
        return in_format(_EXACT[name], type)
    if name in _DOUBLE:
        return _through_double(_DOUBLE[name], type.dtype)
    return None


def _through_double(function: Pure, dtype: np.dtype) -> Pure:
    return lambda *values: narrow(function(*(v.astype(_F64) for v in values)), dtype)


def library(name: str, type: Type) -> Pure | None:
    """A function of the C library: plain for double, with a final f for float."""
    if not isinstance(type, Float):
        return None
    short = name if type.dtype == _F64 else name.removesuffix("f")
    if type.name == "float" and short == name:
        return None
    return float_math(short, type)


def _saturating(i: Instruction) -> Pure:
    """llvm.fptosi.sat: NaN gives 0, too much the nearest integer."""
    type, signed = i.type.scalar, ".fptosi." in i.word
    assert isinstance(type, Int)
    low = -(1 << (type.bits - 1)) if signed else 0
    high = (1 << (type.bits - signed)) - 1
    ends = integers([low, high], type)

    def run(x: np.ndarray) -> np.ndarray:
        wide = x.astype(_F64)
        inside = float_to_integer(np.where(np.isnan(wide), 0, np.clip(wide, low, high)), type, signed)
        return np.where(wide >= high, ends[1], np.where(wide <= low, ends[0], inside))

    return run


def _classes(x: np.ndarray) -> list[np.ndarray]:
    """The ten classes of llvm.is.fpclass, in the order of its mask bits."""
    size = np.abs(x)
    tiny = _SMALLEST_NORMAL[str(x.dtype)]
    negative = np.signbit(x)
    infinite, none, zero = np.isinf(x), np.isnan(x), x == 0
    subnormal = (size < tiny) & ~zero
    normal = ~(infinite | none | zero | subnormal)
    below = [k & negative for k in (infinite, normal, subnormal, zero)]
    above = [k & ~negative for k in (zero, subnormal, normal, infinite)]
    quiet = none & (x.view(f"u{x.dtype.itemsize}") >> (_QUIET[x.dtype.itemsize]) & 1).astype(bool)
    return [none & ~quiet, quiet, *below, *above]


_SMALLEST_NORMAL = {"float16": 2.0**-14, "bfloat16": 2.0**-126, "float32": 2.0**-126, "float64": 2.0**-1022}
_QUIET = {2: 9, 4: 22, 8: 51}


def _is_class(i: Instruction) -> Pure:
    def run(x: np.ndarray, mask: np.ndarray) -> np.ndarray:
        wanted = [found for bit, found in enumerate(_classes(x)) if int(mask[0]) >> bit & 1]
        return np.logical_or.reduce([np.zeros(x.shape, bool), *wanted])

    return run


def _by_name(name: str) -> Callable[[Instruction], Pure]:
    def build(i: Instruction) -> Pure:
        found = float_math(name, i.type.scalar)
        assert found is not None
        return found

    return build


TABLE: dict[str, Callable[[Instruction], Pure]] = {
    **{name: _by_name(name) for name in (*_ANY, *_EXACT, *_DOUBLE)},
    "fptosi.sat": _saturating,
    "fptoui.sat": _saturating,
    "is.fpclass": _is_class,
}

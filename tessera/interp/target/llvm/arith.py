"""Integer and float arithmetic and comparisons: for each opcode, the NumPy function for a type."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tessera.errors import UnsupportedOpError
from tessera.interp.target.llvm.fault import Fault
from tessera.interp.target.llvm.lanes import canonical, unsigned
from tessera.interp.target.llvm.syntax import Instruction
from tessera.interp.target.llvm.types import I1, Float, Int, Type

# A function of register values; NumPy's own functions are such.
Pure = Callable[..., Any]
Binary = Callable[[np.ndarray, np.ndarray], np.ndarray]


def _divisor(b: np.ndarray) -> None:
    zero = b == 0
    if zero.any():
        raise Fault("integer division by zero", lane=_lane(zero))


def _lane(found: np.ndarray) -> int | None:
    """The first lane with a finding, unless all lanes are one."""
    return int(np.argwhere(found)[0][0]) if len(found) > 1 else None


def _signed_divide(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    _divisor(b)
    if ((b == -1) & (a == np.iinfo(a.dtype).min)).any():
        raise Fault("integer division overflows")
    return (a - np.fmod(a, b)) // b


def _signed_remainder(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    _divisor(b)
    return np.fmod(a, b)


def _unsigned_divide(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    _divisor(b)
    return a // b


def _unsigned_remainder(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    _divisor(b)
    return a % b


def _first(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """On one bit every shift and division that is defined gives the first operand."""
    return a | np.zeros_like(b)


def _none(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.zeros(np.broadcast_shapes(a.shape, b.shape), bool)


_SIGNED: dict[str, Binary] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "sdiv": _signed_divide,
    "srem": _signed_remainder,
    "shl": np.left_shift,
    "ashr": np.right_shift,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}

_UNSIGNED: dict[str, Binary] = {
    "udiv": _unsigned_divide,
    "urem": _unsigned_remainder,
    "lshr": np.right_shift,
}

_BOOL: dict[str, Binary] = {
    **dict.fromkeys(("add", "sub", "xor"), np.logical_xor),
    **dict.fromkeys(("mul", "and"), np.logical_and),
    **dict.fromkeys(("udiv", "sdiv", "shl", "lshr", "ashr"), _first),
    **dict.fromkeys(("urem", "srem"), _none),
    "or": np.logical_or,
}

_FLOAT: dict[str, Binary] = {
    "fadd": np.add,
    "fsub": np.subtract,
    "fmul": np.multiply,
    "fdiv": np.divide,
    "frem": np.fmod,
}


def as_unsigned(function: Binary, type: Type) -> Binary:
    """A function of unsigned numbers as one of the signed containers."""

    def run(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return canonical(function(unsigned(a, type), unsigned(b, type)).view(a.dtype), type)

    return run


def integer_function(op: str, type: Type) -> Binary:
    """The function of an integer opcode on a scalar type."""
    if type == I1:
        return _BOOL[op]
    if op in _UNSIGNED:
        return as_unsigned(_UNSIGNED[op], type)
    function = _SIGNED[op]
    if isinstance(type, Int) and type.native:
        return function
    return lambda a, b: canonical(function(a, b), type)


def in_format(function: Pure, type: Type) -> Pure:
    """bfloat16 computes in float and rounds: with 24 bits that is one rounding for + - * / and sqrt."""
    if str(type) != "bfloat":
        return function
    return lambda *values: function(*(v.astype(np.float32) for v in values)).astype(type.dtype)


def float_function(op: str, type: Type) -> Binary:
    """The function of a floating-point opcode on a scalar type."""
    return in_format(_FLOAT[op], type)


def negate(x: np.ndarray) -> np.ndarray:
    """The sign bit flipped, of a NaN too."""
    return flip(x, np.bitwise_xor, 1)


def magnitude(x: np.ndarray) -> np.ndarray:
    """The sign bit cleared."""
    return flip(x, np.bitwise_and, -1)


def flip(x: np.ndarray, combine: Binary, sense: int) -> np.ndarray:
    """Combine the bits of a float with the sign bit (1) or with all others (-1)."""
    bits = x.view(f"u{x.dtype.itemsize}")
    sign = 1 << (8 * x.dtype.itemsize - 1)
    mask = sign if sense > 0 else sign - 1
    return combine(bits, bits.dtype.type(mask)).view(x.dtype)  # type: ignore[arg-type]


def _swapped(function: Binary) -> Binary:
    return lambda a, b: function(b, a)


def _unordered(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (a != a) | (b != b)


def _not(function: Binary) -> Binary:
    return lambda a, b: ~function(a, b)


_ORDER = {"eq": np.equal, "ne": np.not_equal, "gt": np.greater, "ge": np.greater_equal}
_ORDER |= {"lt": np.less, "le": np.less_equal}

# The negation of an ordered comparison is the opposite one, or unordered.
_FLOAT_COMPARE: dict[str, Binary] = {
    "oeq": np.equal,
    "ogt": np.greater,
    "oge": np.greater_equal,
    "olt": np.less,
    "ole": np.less_equal,
    "one": lambda a, b: (a < b) | (a > b),
    "ord": _not(_unordered),
    "uno": _unordered,
    "ueq": lambda a, b: ~((a < b) | (a > b)),
    "ugt": _not(np.less_equal),
    "uge": _not(np.less),
    "ult": _not(np.greater_equal),
    "ule": _not(np.greater),
    "une": np.not_equal,
    "true": lambda a, b: ~_none(a, b),
    "false": _none,
}


def integer_compare(word: str, type: Type) -> Binary:
    """The function of an icmp predicate; sign extension keeps the unsigned order of odd widths."""
    if word in ("eq", "ne"):
        return _ORDER[word]
    function = _ORDER.get(word[1:])
    if function is None:
        raise UnsupportedOpError(f"icmp {word} is not a comparison")
    if type == I1:
        return _swapped(function) if word[0] == "s" else function
    if word[0] == "s":
        return function
    return lambda a, b: function(a.view(f"u{a.dtype.itemsize}"), b.view(f"u{b.dtype.itemsize}"))


def binary(i: Instruction) -> Pure:
    """add, fadd and their like."""
    scalar = i.type.scalar
    return float_function(i.op, scalar) if isinstance(scalar, Float) else integer_function(i.op, scalar)


def compare(i: Instruction) -> Pure:
    """icmp, fcmp."""
    if i.op == "icmp":
        return integer_compare(i.word, i.operands[0].type.scalar)
    if i.word not in _FLOAT_COMPARE:
        raise UnsupportedOpError(f"fcmp {i.word} is not a comparison")
    return _FLOAT_COMPARE[i.word]


TABLE: dict[str, Callable[[Instruction], Pure]] = {
    **dict.fromkeys((*_SIGNED, *_UNSIGNED, *_FLOAT), binary),
    "icmp": compare,
    "fcmp": compare,
    "fneg": lambda i: negate,
}

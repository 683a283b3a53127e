"""Arithmetic: the NumPy function of each opcode and type; comparisons, casts and getelementptr included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tessera.core.errors import UnsupportedOpError
from tessera.interp.target.fma import round_to_format
from tessera.interp.target.llvm.lanes import UNSIGNED_DTYPES, LaneFault, canonicalise, spread_scalars, view_unsigned
from tessera.interp.target.llvm.memory import pack_bits, unpack_bits
from tessera.interp.target.llvm.text.syntax import (
    I1,
    LlvmAggregate,
    LlvmFloat,
    LlvmInstruction,
    LlvmInt,
    LlvmOperand,
    LlvmStruct,
    LlvmType,
    LlvmVector,
    NumberConstant,
    Zero,
)

# Integer and float arithmetic, and comparisons.


# A function of register values, such as a NumPy ufunc.
PureFunction = Callable[..., Any]
BinaryFunction = Callable[[np.ndarray, np.ndarray], np.ndarray]


def _check_divisor(b: np.ndarray) -> None:
    zero = b == 0
    if zero.any():
        raise LaneFault("integer division by zero", lane=_find_first_lane(zero))


def _find_first_lane(result: np.ndarray) -> int | None:
    """The first faulting lane; None for a uniform value."""
    return int(np.argwhere(result)[0][0]) if len(result) > 1 else None


def _divide_signed(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    _check_divisor(b)
    if ((b == -1) & (a == np.iinfo(a.dtype).min)).any():
        raise LaneFault("integer division overflows")
    return (a - np.fmod(a, b)) // b


def _compute_remainder_signed(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    _check_divisor(b)
    return np.fmod(a, b)


def _divide_unsigned(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    _check_divisor(b)
    return a // b


def _compute_remainder_unsigned(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    _check_divisor(b)
    return a % b


def _return_first(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Shifts and divisions of one-bit integers: every defined case gives the first operand."""
    return a | np.zeros_like(b)


def _return_false(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.zeros(np.broadcast_shapes(a.shape, b.shape), bool)


_SIGNED: dict[str, BinaryFunction] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "sdiv": _divide_signed,
    "srem": _compute_remainder_signed,
    "shl": np.left_shift,
    "ashr": np.right_shift,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}

_UNSIGNED: dict[str, BinaryFunction] = {
    "udiv": _divide_unsigned,
    "urem": _compute_remainder_unsigned,
    "lshr": np.right_shift,
}

_BOOL: dict[str, BinaryFunction] = {
    **dict.fromkeys(("add", "sub", "xor"), np.logical_xor),
    **dict.fromkeys(("mul", "and"), np.logical_and),
    **dict.fromkeys(("udiv", "sdiv", "shl", "lshr", "ashr"), _return_first),
    **dict.fromkeys(("urem", "srem"), _return_false),
    "or": np.logical_or,
}

_FLOAT: dict[str, BinaryFunction] = {
    "fadd": np.add,
    "fsub": np.subtract,
    "fmul": np.multiply,
    "fdiv": np.divide,
    "frem": np.fmod,
}


def as_unsigned(function: BinaryFunction, type: LlvmType) -> BinaryFunction:
    """A function of unsigned integers, on signed arrays."""

    def run(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return canonicalise(function(view_unsigned(a, type), view_unsigned(b, type)).view(a.dtype), type)

    return run


def get_integer_function(op: str, type: LlvmType) -> BinaryFunction:
    """The function of an integer opcode on a scalar type."""
    if type == I1:
        return _BOOL[op]
    if op in _UNSIGNED:
        return as_unsigned(_UNSIGNED[op], type)
    function = _SIGNED[op]
    if isinstance(type, LlvmInt) and type.native:
        return function
    return lambda a, b: canonicalise(function(a, b), type)


def compute_in_format(function: PureFunction, type: LlvmType) -> PureFunction:
    """bfloat16 is computed in float and rounded: its 24 bits make that one rounding for + - * / and sqrt."""
    if str(type) != "bfloat":
        return function
    return lambda *values: function(*(v.astype(np.float32) for v in values)).astype(type.dtype)


def get_float_function(op: str, type: LlvmType) -> BinaryFunction:
    """The function of a floating-point opcode on a scalar type."""
    return compute_in_format(_FLOAT[op], type)


def negate(x: np.ndarray) -> np.ndarray:
    """The sign bit flipped, also of a NaN."""
    return combine_sign_bits(x, np.bitwise_xor, 1)


def clear_sign(x: np.ndarray) -> np.ndarray:
    """The sign bit cleared."""
    return combine_sign_bits(x, np.bitwise_and, -1)


def combine_sign_bits(x: np.ndarray, combine: BinaryFunction, sense: int) -> np.ndarray:
    """Combine the bits of a float with the mask of the sign bit (1), or of all other bits (-1)."""
    bits = x.view(f"u{x.dtype.itemsize}")
    sign = 1 << (8 * x.dtype.itemsize - 1)
    mask = sign if sense > 0 else sign - 1
    return combine(bits, bits.dtype.type(mask)).view(x.dtype)  # type: ignore[arg-type]


def _swap_operands(function: BinaryFunction) -> BinaryFunction:
    return lambda a, b: function(b, a)


def _is_unordered(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (a != a) | (b != b)


def _complement(function: BinaryFunction) -> BinaryFunction:
    return lambda a, b: ~function(a, b)


_ORDER = {"eq": np.equal, "ne": np.not_equal, "gt": np.greater, "ge": np.greater_equal}
_ORDER |= {"lt": np.less, "le": np.less_equal}

# The negation of an ordered comparison is the opposite comparison or unordered.
_FLOAT_COMPARE: dict[str, BinaryFunction] = {
    "oeq": np.equal,
    "ogt": np.greater,
    "oge": np.greater_equal,
    "olt": np.less,
    "ole": np.less_equal,
    "one": lambda a, b: (a < b) | (a > b),
    "ord": _complement(_is_unordered),
    "uno": _is_unordered,
    "ueq": lambda a, b: ~((a < b) | (a > b)),
    "ugt": _complement(np.less_equal),
    "uge": _complement(np.less),
    "ult": _complement(np.greater_equal),
    "ule": _complement(np.greater),
    "une": np.not_equal,
    "true": lambda a, b: ~_return_false(a, b),
    "false": _return_false,
}


def get_integer_compare(word: str, type: LlvmType) -> BinaryFunction:
    """The function of an icmp predicate; sign extension preserves the unsigned order of unusual widths."""
    if word in ("eq", "ne"):
        return _ORDER[word]
    function = _ORDER.get(word[1:])
    if function is None:
        raise UnsupportedOpError(f"unknown icmp predicate {word}")
    if type == I1:
        return _swap_operands(function) if word[0] == "s" else function
    if word[0] == "s":
        return function
    return lambda a, b: function(a.view(f"u{a.dtype.itemsize}"), b.view(f"u{b.dtype.itemsize}"))


def build_binary(i: LlvmInstruction) -> PureFunction:
    """A binary arithmetic instruction."""
    scalar = i.type.scalar
    return get_float_function(i.op, scalar) if isinstance(scalar, LlvmFloat) else get_integer_function(i.op, scalar)


def build_compare(i: LlvmInstruction) -> PureFunction:
    """An icmp or fcmp."""
    if i.op == "icmp":
        return get_integer_compare(i.word, i.operands[0].type.scalar)
    if i.word not in _FLOAT_COMPARE:
        raise UnsupportedOpError(f"unknown fcmp predicate {i.word}")
    return _FLOAT_COMPARE[i.word]


ARITHMETIC_INSTRUCTIONS: dict[str, Callable[[LlvmInstruction], PureFunction]] = {
    **dict.fromkeys((*_SIGNED, *_UNSIGNED, *_FLOAT), build_binary),
    "icmp": build_compare,
    "fcmp": build_compare,
    "fneg": lambda i: negate,
}


# getelementptr: an address plus a constant and scaled indices.


# The position of an index operand, and its scale in bytes.
_ScaledIndex = tuple[int, int]


def _get_constant_index(operand: LlvmOperand) -> int | None:
    if isinstance(operand.type, LlvmVector):
        return None
    return int(operand.value) if isinstance(operand, NumberConstant) else 0 if isinstance(operand, Zero) else None


def _step_into(type: LlvmType, index: int | None) -> tuple[LlvmType, int, int]:
    """The type that an index selects, the scale of the index in bytes, and a constant offset."""
    if isinstance(type, LlvmStruct):
        assert index is not None, "a struct index is constant"
        offset, member = type.parts[index]
        return member, 0, offset
    if isinstance(type, LlvmAggregate | LlvmVector):
        element: LlvmType = type.element  # type: ignore[union-attr]
        # Elements of a vector have no padding.
        return element, element.size if isinstance(type, LlvmVector) else element.stride, 0
    raise UnsupportedOpError(f"getelementptr cannot index a {type}")


def _split_offset(i: LlvmInstruction) -> tuple[int, list[_ScaledIndex]]:
    """The constant part of an offset, and the indices that are known at run time."""
    fixed, terms, type = 0, [], i.source
    for position, operand in enumerate(i.operands[1:], 1):
        index = _get_constant_index(operand)
        step = type.stride if position == 1 else 0
        if position > 1:
            type, step, offset = _step_into(type, index)
            fixed += offset
        if index is None:
            terms.append((position, step))
        else:
            fixed += index * step
    return fixed, terms


def build_getelementptr(i: LlvmInstruction) -> PureFunction:
    """The function from base and indices to an address."""
    fixed, terms = _split_offset(i)
    if isinstance(i.type, LlvmVector):
        return _build_vector_getelementptr(fixed, terms)
    if not terms:
        return lambda base, *indices: base + fixed
    if len(terms) == 1:
        position, step = terms[0]
        return lambda *v: v[0] + (v[position].astype(np.int64) * step + fixed)

    def run(base: np.ndarray, *indices: np.ndarray) -> np.ndarray:
        total = base + fixed
        for position, step in terms:
            total = total + indices[position - 1].astype(np.int64) * step
        return total

    return run


def _build_vector_getelementptr(fixed: int, terms: list[_ScaledIndex]) -> PureFunction:
    def run(*values: np.ndarray) -> np.ndarray:
        base, *indices = spread_scalars(*values)
        total = base + fixed
        for position, step in terms:
            total = total + indices[position - 1].astype(np.int64) * step
        return total

    return run


ADDRESS_INSTRUCTIONS: dict[str, Callable[[LlvmInstruction], PureFunction]] = {"getelementptr": build_getelementptr}


# Conversions.


_F64 = np.dtype(np.float64)


def _build_truncate(i: LlvmInstruction) -> PureFunction:
    target = i.type.scalar
    if target == I1:
        return lambda x: (x & 1).astype(bool)
    return lambda x: canonicalise(x.astype(target.dtype), target)


def _build_zero_extend(i: LlvmInstruction) -> PureFunction:
    source, dtype = i.operands[0].type.scalar, i.type.dtype
    return lambda x: view_unsigned(x, source).astype(dtype)


def _build_sign_extend(i: LlvmInstruction) -> PureFunction:
    dtype = i.type.dtype
    if i.operands[0].type.scalar == I1:
        return lambda x: -x.astype(dtype)
    return lambda x: x.astype(dtype)


def _build_float_truncate(i: LlvmInstruction) -> PureFunction:
    dtype = i.type.dtype
    if i.operands[0].type.dtype == _F64:
        return lambda x: round_to_format(x, dtype)
    return lambda x: x.astype(dtype)


def _build_float_extend(i: LlvmInstruction) -> PureFunction:
    dtype = i.type.dtype
    return lambda x: x.astype(dtype)


def convert_float_to_integer(x: np.ndarray, type: LlvmType, signed: bool) -> np.ndarray:
    """Round towards zero; a value out of range is poison, so any result will do."""
    if type == I1:
        return x != 0
    if not signed:
        return canonicalise(_widen_to_double(x).astype(UNSIGNED_DTYPES[type.dtype]).view(type.dtype), type)
    return canonicalise(_widen_to_double(x).astype(type.dtype), type)


def _widen_to_double(x: np.ndarray) -> np.ndarray:
    """A float as a double, which is exact for every format."""
    return x if x.dtype == _F64 else x.astype(_F64)


def _build_float_to_integer(i: LlvmInstruction) -> PureFunction:
    type, signed = i.type.scalar, i.op == "fptosi"
    return lambda x: convert_float_to_integer(x, type, signed)


def _build_integer_to_float(i: LlvmInstruction) -> PureFunction:
    source, dtype, signed = i.operands[0].type.scalar, i.type.dtype, i.op == "sitofp"

    def run(x: np.ndarray) -> np.ndarray:
        if x.dtype == bool:
            return -x.astype(dtype) if signed else x.astype(dtype)
        return convert_integer_to_float(x if signed else view_unsigned(x, source), dtype)

    return run


def convert_integer_to_float(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """An integer rounded once."""
    if str(dtype) != "bfloat16":
        return x.astype(dtype)
    # Keep 53 bits and a sticky bit, then round from the exact double.
    low = (x & 0x7FF) != 0
    sticky = ((x >> 11) | low) << 11
    wide = np.where(np.abs(x.astype(_F64)) < 2.0**53, x, sticky)
    return round_to_format(wide.astype(_F64), dtype)


def build_reinterpret(source: LlvmType, target: LlvmType) -> PureFunction:
    """A bitcast, through bytes where NumPy has no view."""
    if target.scalar == I1 or source.scalar == I1:
        return _build_bit_reinterpret(source, target)
    for type in (source.scalar, target.scalar):
        if isinstance(type, LlvmInt) and not type.native:
            return lambda x: x  # the only valid target is the same type
    shape, dtype = target.lanes, target.dtype
    if source.lanes == shape:
        return lambda x: x.view(dtype)
    return lambda x: _flatten_rows(x).view(dtype).reshape(len(x), *shape)


def _flatten_rows(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x.reshape(len(x), -1))


def _build_bit_reinterpret(source: LlvmType, target: LlvmType) -> PureFunction:
    if source.lanes == target.lanes and source.scalar == target.scalar:
        return lambda x: x
    shape, dtype = target.lanes, target.dtype
    count = int(np.prod(shape, initial=1))
    if target.scalar == I1:
        return lambda x: unpack_bits(_flatten_rows(x).view(np.uint8), count).reshape(len(x), *shape)
    if isinstance(target.scalar, LlvmInt) and not target.scalar.native:
        return lambda x: _join_bits(_flatten_rows(x), target)
    return lambda x: pack_bits(_flatten_rows(x)).view(dtype).reshape(len(x), *shape)


def _join_bits(bits: np.ndarray, target: LlvmType) -> np.ndarray:
    """A bitcast such as <4 x i1> to i4."""
    weights = np.left_shift(np.ones((), target.dtype), np.arange(bits.shape[1], dtype=target.dtype))
    return canonicalise((bits * weights).sum(axis=1, dtype=target.dtype), target)


def _build_bitcast(i: LlvmInstruction) -> PureFunction:
    source, target = i.operands[0].type, i.type
    if source.size != target.size:
        raise UnsupportedOpError(f"bitcast from {source} to {target} changes the size")
    return build_reinterpret(source, target)


def _build_pointer_cast(i: LlvmInstruction) -> PureFunction:
    """ptrtoint and inttoptr: an address is a 64-bit integer."""
    source, target = i.operands[0].type.scalar, i.type.scalar
    return lambda x: canonicalise(view_unsigned(x, source).astype(target.dtype), target)


CAST_INSTRUCTIONS: dict[str, Callable[[LlvmInstruction], PureFunction]] = {
    "trunc": _build_truncate,
    "zext": _build_zero_extend,
    "sext": _build_sign_extend,
    "fptrunc": _build_float_truncate,
    "fpext": _build_float_extend,
    "fptosi": _build_float_to_integer,
    "fptoui": _build_float_to_integer,
    "sitofp": _build_integer_to_float,
    "uitofp": _build_integer_to_float,
    "bitcast": _build_bitcast,
    **dict.fromkeys(("ptrtoint", "ptrtoaddr", "inttoptr"), _build_pointer_cast),
    "addrspacecast": lambda i: lambda x: x,
}

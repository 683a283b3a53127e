"""Conversions: for each opcode, the NumPy function from one type to another."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tessera.errors import UnsupportedOpError
from tessera.interp.target.fma import narrow
from tessera.interp.target.llvm.access import pack, unpack
from tessera.interp.target.llvm.arith import Pure
from tessera.interp.target.llvm.lanes import UNSIGNED, canonical, unsigned
from tessera.interp.target.llvm.syntax import Instruction
from tessera.interp.target.llvm.types import I1, Int, Type

_F64 = np.dtype(np.float64)


def _truncate(i: Instruction) -> Pure:
    target = i.type.scalar
    if target == I1:
        return lambda x: (x & 1).astype(bool)
    return lambda x: canonical(x.astype(target.dtype), target)


def _zero_extend(i: Instruction) -> Pure:
    source, dtype = i.operands[0].type.scalar, i.type.dtype
    return lambda x: unsigned(x, source).astype(dtype)


def _sign_extend(i: Instruction) -> Pure:
    dtype = i.type.dtype
    if i.operands[0].type.scalar == I1:
        return lambda x: -x.astype(dtype)
    return lambda x: x.astype(dtype)


def _float_narrow(i: Instruction) -> Pure:
    dtype = i.type.dtype
    if i.operands[0].type.dtype == _F64:
        return lambda x: narrow(x, dtype)
    return lambda x: x.astype(dtype)


def _float_widen(i: Instruction) -> Pure:
    dtype = i.type.dtype
    return lambda x: x.astype(dtype)


def float_to_integer(x: np.ndarray, type: Type, signed: bool) -> np.ndarray:
    """The number without its fraction; out of range any value will do."""
    if type == I1:
        return x != 0
    if not signed:
        return canonical(_wide(x).astype(UNSIGNED[type.dtype]).view(type.dtype), type)
    return canonical(_wide(x).astype(type.dtype), type)


def _wide(x: np.ndarray) -> np.ndarray:
    """A double holds every float of every format."""
    return x if x.dtype == _F64 else x.astype(_F64)


def _to_integer(i: Instruction) -> Pure:
    type, signed = i.type.scalar, i.op == "fptosi"
    return lambda x: float_to_integer(x, type, signed)


def _to_float(i: Instruction) -> Pure:
    source, dtype, signed = i.operands[0].type.scalar, i.type.dtype, i.op == "sitofp"

    def run(x: np.ndarray) -> np.ndarray:
        if x.dtype == bool:
            return -x.astype(dtype) if signed else x.astype(dtype)
        return integer_to_float(x if signed else unsigned(x, source), dtype)

    return run


def integer_to_float(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """An integer rounded once."""
    if str(dtype) != "bfloat16":
        return x.astype(dtype)
    # Leave 53 bits and a trace of the rest, then round from the exact double.
    low = (x & 0x7FF) != 0
    sticky = ((x >> 11) | low) << 11
    wide = np.where(np.abs(x.astype(_F64)) < 2.0**53, x, sticky)
    return narrow(wide.astype(_F64), dtype)


def reinterpret(source: Type, target: Type) -> Pure:
    """The same bits as another type, through bytes where NumPy cannot view them."""
    if target.scalar == I1 or source.scalar == I1:
        return _reinterpret_bits(source, target)
    for type in (source.scalar, target.scalar):
        if isinstance(type, Int) and not type.native:
            return lambda x: x  # only to its own type
    shape, dtype = target.lanes, target.dtype
    if source.lanes == shape:
        return lambda x: x.view(dtype)
    return lambda x: _rows(x).view(dtype).reshape(len(x), *shape)


def _rows(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x.reshape(len(x), -1))


def _reinterpret_bits(source: Type, target: Type) -> Pure:
    if source.lanes == target.lanes and source.scalar == target.scalar:
        return lambda x: x
    shape, dtype = target.lanes, target.dtype
    count = int(np.prod(shape, initial=1))
    if target.scalar == I1:
        return lambda x: unpack(_rows(x).view(np.uint8), count).reshape(len(x), *shape)
    if isinstance(target.scalar, Int) and not target.scalar.native:
        return lambda x: _odd_from_bits(_rows(x), target)
    return lambda x: pack(_rows(x)).view(dtype).reshape(len(x), *shape)


def _odd_from_bits(bits: np.ndarray, target: Type) -> np.ndarray:
    """<4 x i1> as i4."""
    weights = np.left_shift(np.ones((), target.dtype), np.arange(bits.shape[1], dtype=target.dtype))
    return canonical((bits * weights).sum(axis=1, dtype=target.dtype), target)


def _same_bits(i: Instruction) -> Pure:
    source, target = i.operands[0].type, i.type
    if source.size != target.size:
        raise UnsupportedOpError(f"bitcast from {source} to {target} changes the size")
    return reinterpret(source, target)


def _address(i: Instruction) -> Pure:
    """ptrtoint, inttoptr: an address is a 64-bit integer."""
    source, target = i.operands[0].type.scalar, i.type.scalar
    return lambda x: canonical(unsigned(x, source).astype(target.dtype), target)


TABLE: dict[str, Callable[[Instruction], Pure]] = {
    "trunc": _truncate,
    "zext": _zero_extend,
    "sext": _sign_extend,
    "fptrunc": _float_narrow,
    "fpext": _float_widen,
    "fptosi": _to_integer,
    "fptoui": _to_integer,
    "sitofp": _to_float,
    "uitofp": _to_float,
    "bitcast": _same_bits,
    **dict.fromkeys(("ptrtoint", "ptrtoaddr", "inttoptr"), _address),
    "addrspacecast": lambda i: lambda x: x,
}

"""How a type lies in memory: its bytes as an array, and the way between array and register."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np

from tessera.errors import UnsupportedOpError
from tessera.interp.target.llvm.lanes import canonical
from tessera.interp.target.llvm.types import Int, Type, Vector

_Code = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Access:
    """A load or store of one scalar or vector: `count` memory elements side by side."""

    dtype: np.dtype
    count: int
    vector: bool  # whether the memory elements make a trailing axis
    size: int
    align: int
    decode: _Code | None = None
    encode: _Code | None = None

    @property
    def low_bits(self) -> int:
        """The offset bits that must be zero for a typed view to serve."""
        return self.dtype.itemsize - 1

    @property
    def shift(self) -> int:
        """From bytes to elements."""
        return self.dtype.itemsize.bit_length() - 1


@cache
def access(type: Type, align: int = 0) -> Access:
    """The access for a type; without a written alignment its natural one."""
    align = align or type.align
    scalar = type.scalar
    if isinstance(scalar, Int) and not scalar.native:
        return _bits(type, scalar, align)
    count = type.count if isinstance(type, Vector) else 1
    return Access(type.dtype, count, isinstance(type, Vector), type.size, align)


def _bits(type: Type, scalar: Int, align: int) -> Access:
    """Integers that no NumPy type holds: bools, bit vectors and unusual widths."""
    byte = np.dtype(np.uint8)
    if scalar.bits == 1 and isinstance(type, Vector):
        count = type.count
        return Access(byte, type.size, True, type.size, align, lambda raw: unpack(raw, count), pack)
    if isinstance(type, Vector):
        raise UnsupportedOpError(f"a value of type {type} in memory is not supported")
    if scalar.bits == 1:
        return Access(byte, 1, False, 1, align, lambda raw: (raw & 1).astype(bool), lambda v: v.astype(byte))
    size = scalar.size
    return Access(byte, size, True, size, align, lambda raw: _from_bytes(raw, scalar), lambda v: _to_bytes(v, scalar))


def pack(bits: np.ndarray) -> np.ndarray:
    """Bools along the last axis as bytes, the first in the lowest bit."""
    return np.packbits(bits, axis=-1, bitorder="little")


def unpack(raw: np.ndarray, count: int) -> np.ndarray:
    """Bytes along the last axis as bools."""
    return np.unpackbits(raw, axis=-1, count=count, bitorder="little").astype(bool)


def _from_bytes(raw: np.ndarray, type: Int) -> np.ndarray:
    whole = np.zeros((len(raw), type.dtype.itemsize), np.uint8)
    whole[:, : raw.shape[-1]] = raw
    return canonical(whole.view(type.dtype)[:, 0], type)


def _to_bytes(value: np.ndarray, type: Int) -> np.ndarray:
    # The bits above the width are zero in memory.
    mask = value.dtype.type((1 << type.bits) - 1)
    return np.ascontiguousarray((value & mask)[:, None]).view(np.uint8)[:, : type.size]

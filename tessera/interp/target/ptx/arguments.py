"""Launch arguments: arrays become segments of global memory, numbers become bytes of parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tessera.errors import ArgumentError
from tessera.interp.target.ptx.memory import WINDOWS, Arena
from tessera.interp.target.ptx.syntax import Variable
from tessera.interp.target.ptx.tensor_map import TensorMap
from tessera.interp.target.ptx.types import TYPES, size_of


@dataclass
class _Region:
    """Bytes that arrays share: one segment, so that what aliases on the host aliases in the kernel."""

    low: int
    high: int
    name: str
    start: int = 0


class Buffers:
    """The arrays of a launch and where each lies in the arena."""

    def __init__(self, args: Sequence[Any], arena: Arena) -> None:
        self.arrays: list[np.ndarray] = []
        self.regions: list[_Region] = []
        for i, a in enumerate(args):
            array = a.array if isinstance(a, TensorMap) else a
            if isinstance(array, np.ndarray):
                self._add(array, f"argument {i}")
        for region in self.regions:
            region.start = arena.add(region.name, region.high - region.low)
        self.arena = arena

    def _add(self, array: np.ndarray, name: str) -> None:
        low, high = _extent(array)
        self.arrays.append(array)
        new = _Region(low, high, name)
        for old in [r for r in self.regions if r.low < high and low < r.high]:
            new = _Region(min(new.low, old.low), max(new.high, old.high), old.name)
            self.regions.remove(old)
        self.regions.append(new)

    def offset(self, array: np.ndarray) -> int:
        """Where an array begins in the arena."""
        low, high = _extent(array)
        region = next(r for r in self.regions if r.low <= low and high <= r.high)
        return region.start + low - region.low

    def copy_in(self) -> None:
        """Fill the segments."""
        for array in self.arrays:
            start = self.offset(array)
            self.arena.flat.raw[start : start + array.nbytes] = _bytes(array)

    def copy_out(self) -> None:
        """Write results back in place."""
        for array in self.arrays:
            if array.flags.writeable:
                start = self.offset(array)
                found = self.arena.flat.raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
                array[...] = found


def _extent(array: np.ndarray) -> tuple[int, int]:
    """The addresses of an array's bytes; one that is not contiguous is copied, and gets a place of its own."""
    low = array.__array_interface__["data"][0] if array.flags.c_contiguous else -id(array) << 40
    return low, low + array.nbytes


def _bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def parameter(v: Variable, value: Any, buffers: Buffers) -> bytes:
    """The bytes of a parameter."""
    if isinstance(value, np.ndarray):
        if size_of(v) != 8:
            raise ArgumentError(f"parameter {v.name} is no pointer", expected=f".{v.type}", received="an array")
        return int(WINDOWS["global"] + buffers.offset(value)).to_bytes(8, "little")
    if isinstance(value, TensorMap):
        value = value.encode(WINDOWS["global"] + buffers.offset(value.array))
    if isinstance(value, bytes | np.void):
        content = value if isinstance(value, bytes) else value.tobytes()
        if len(content) != size_of(v):
            raise ArgumentError(
                f"parameter {v.name} has {size_of(v)} bytes", expected=size_of(v), received=len(content)
            )
        return content
    if v.count != 1 or v.vector != 1:
        raise ArgumentError(f"parameter {v.name} is a struct", expected=f"{size_of(v)} bytes", received=value)
    return _number(v, value)


def _number(v: Variable, value: Any) -> bytes:
    t = TYPES[v.type]
    if isinstance(value, int | np.integer) and t.kind != "f":
        if not -(1 << t.bits - 1) <= value < 1 << t.bits:
            raise ArgumentError(f"parameter {v.name} has {t.bits} bits", expected=f".{v.type}", received=value)
        return (int(value) & (1 << t.bits) - 1).to_bytes(t.bits // 8, "little")
    if isinstance(value, float | np.floating) and t.kind in "us":
        raise ArgumentError(f"parameter {v.name} is an integer", expected=f".{v.type}", received=value)
    if isinstance(value, np.generic) and value.itemsize * 8 == t.bits and t.kind != "f":
        return value.tobytes()
    if not isinstance(value, float | int | np.generic):
        raise ArgumentError(f"parameter {v.name} cannot be {value!r}", expected="an array or a number")
    dtype = t.dtype if t.kind == "f" else np.dtype(f"f{t.bits // 8}")
    return np.array(value, dtype).tobytes()

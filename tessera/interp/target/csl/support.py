"""The names that generated Python uses: arithmetic of the machine, memory access, descriptors."""

from __future__ import annotations

from collections.abc import Generator
from types import GeneratorType
from typing import Any

import numpy as np

from tessera.interp.target.csl.descriptors import CHANGES
from tessera.interp.target.csl.faults import CslFault
from tessera.interp.target.csl.sema.conversions import bits
from tessera.interp.target.csl.sema.operators import idiv, irem
from tessera.interp.target.csl.streams import compute
from tessera.interp.target.csl.values import Circular, Fabin, Fabout, Mem1d, Mem4d, Pointer


def wrap(value: int, width: int, signed: bool) -> int:
    """An integer modulo 2 to the width."""
    value &= (1 << width) - 1
    return value - (1 << width) if signed and value >> (width - 1) else value


def below(index: int) -> int:
    """What a negative index does."""
    raise CslFault(f"index {index} is out of bounds")


def above(index: int) -> int:
    """An index from a pointer, which must not come before its array."""
    return index if index >= 0 else below(index)


def bounded(index: int, count: int) -> int:
    """An index of one dimension."""
    if 0 <= index < count:
        return index
    raise CslFault(f"index {index} is out of bounds for dimension of length {count}")


def window(array: Any, start: int, count: int) -> Any:
    """A block of an array."""
    if start < 0 or start + count > len(array):
        raise CslFault(f"elements {start} to {start + count - 1} are outside of an array of {len(array)}")
    return array[start : start + count]


def put(array: Any, index: int, value: Any) -> None:
    """Store one value; tuples stay whole in arrays of objects."""
    if array.dtype != object:
        array[index] = value
        return
    cell = np.empty(1, object)
    cell[0] = value
    array[index : index + 1] = cell


def full(count: int, value: Any, dtype: Any) -> Any:
    """An array of one value."""
    array = np.empty(count, dtype)
    array.fill(value)
    return array


def unreachable() -> None:
    """What a failed `@assert` does."""
    raise CslFault("assertion failed")


def invoke(function: Any, *args: Any) -> Generator[Any, Any, Any]:
    """A call through a pointer, of a function that may or may not wait."""
    if not callable(function):
        raise CslFault("call through an uninitialized function pointer")
    found = function(*args)
    if isinstance(found, GeneratorType):
        found = yield from found
    return found


def recast(p: Pointer, dtype: Any) -> Pointer:
    """A pointer to cells of another type; what is left of a last wider cell is out of reach."""
    size, array = p.array.dtype.itemsize, p.array
    whole = len(array) * size // dtype.itemsize * dtype.itemsize // size
    return Pointer((array if whole == len(array) else array[:whole]).view(dtype), p.index * size // dtype.itemsize)


def shifted(p: Pointer, count: int) -> Pointer:
    """A pointer moved by elements."""
    return Pointer(p[0], p[1] + count)


NAMES: dict[str, Any] = {
    f.__name__: f
    for f in (
        *(wrap, below, above, bounded, window, put, full, unreachable, invoke, recast, shifted),
        *(bits, idiv, irem, compute, Pointer, Mem1d, Mem4d, Circular, Fabin, Fabout),
    )
} | {"zeros": np.zeros, "fmod": np.fmod, **CHANGES}

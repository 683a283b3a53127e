"""Execution of DSD operations: at once on memory, or as threads that wait for the fabric."""

from __future__ import annotations

from collections.abc import Generator
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from tessera.interp.target.csl.dsd_ops import DsdOp
from tessera.interp.target.csl.faults import CslFault
from tessera.interp.target.csl.values import Fifo, Mem1d, Mem4d, Pointer

if TYPE_CHECKING:
    from tessera.interp.target.csl.pe import Pe

# Cycles before the first element of an operation on loaded DSRs, and to load one. Fitted to published counts.
START = 14
LOAD = 4
INFINITE = 0x7FFF
FLOATING = "fV"  # how NumPy calls the kinds of floats; bfloat16 is of the second


def vector(d: Mem1d, dtype: np.dtype[Any], start: int, count: int) -> np.ndarray[Any, Any]:
    """Elements `start` to `start + count` of a memory vector, as a view (one element where the stride is 0)."""
    array, byte, stride, _, _ = d
    if array.dtype != dtype:
        array = _viewed(array, dtype)
    first = byte // dtype.itemsize + start * stride
    last = first + (count - 1) * stride
    if count and not (0 <= first < len(array) and 0 <= last < len(array)):
        raise CslFault(f"DSD accesses elements {first} to {last} of an array of {len(array)}")
    if stride == 0:
        return array[first : first + 1]
    stop = last + (1 if stride > 0 else -1)
    return array[first : None if stop < 0 else stop : stride]


def _viewed(array: Any, dtype: np.dtype[Any]) -> Any:
    if array.dtype == object:
        raise CslFault("DSD accesses memory that holds no numbers")
    size = len(array) * array.dtype.itemsize // dtype.itemsize * dtype.itemsize // array.dtype.itemsize
    return array[:size].view(dtype)


def positions(d: Mem4d, size: int) -> np.ndarray[Any, Any]:
    """The flat element of each step of a memory tensor."""
    return _steps(d.extents, d.strides) + d.byte // size


@lru_cache(maxsize=1024)
def _steps(extents: tuple[int, ...], strides: tuple[int, ...]) -> np.ndarray[Any, Any]:
    at = np.zeros(1, np.int64)
    for extent, stride in zip(extents, strides, strict=True):
        at = (at[:, None] + np.arange(extent)[None, :] * stride).reshape(-1)
    return at


@lru_cache(maxsize=1024)
def _visits(extents: tuple[int, ...], strides: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """For each step of a tensor, how often it was at the same element before."""
    at = _steps(extents, strides)
    order = np.argsort(at, kind="stable")
    first = np.r_[True, np.diff(at[order]) != 0]
    begins = np.maximum.accumulate(np.where(first, np.arange(len(at)), 0))
    found = np.empty(len(at), np.int64)
    found[order] = np.arange(len(at)) - begins
    return found


def read(d: Any, dtype: np.dtype[Any], start: int, count: int) -> Any:
    """Elements of a memory descriptor."""
    if type(d) is Mem1d:
        return vector(d, dtype, start, count)
    array = d.array if d.array.dtype == dtype else _viewed(d.array, dtype)
    return array[_checked(d, dtype, start, count, len(array))]


def _checked(d: Mem4d, dtype: np.dtype[Any], start: int, count: int, length: int) -> np.ndarray[Any, Any]:
    at = positions(d, dtype.itemsize)[start : start + count]
    if len(at) and (at.min() < 0 or at.max() >= length):
        raise CslFault(f"DSD accesses elements {at.min()} to {at.max()} of an array of {length}")
    return at


def convert(found: Any, dtype: np.dtype[Any]) -> Any:
    """A result in the type of the destination: floats round once, integers wrap."""
    found = np.asarray(found)
    if found.dtype == dtype:
        return found
    if found.dtype.kind == dtype.kind == "u" or dtype.kind in FLOATING:
        return found.astype(dtype)
    return found.astype(np.int64).astype(dtype)


def write(d: Any, dtype: np.dtype[Any], start: int, count: int, found: Any) -> None:
    """Store a result; with stride 0 the last element stays."""
    found = convert(found, dtype)
    if type(d) is Mem1d:
        where = vector(d, dtype, start, count)
        where[...] = found if len(where) == count or found.ndim == 0 or len(found) == 1 else found[-1:]
        return
    array = d.array if d.array.dtype == dtype else _viewed(d.array, dtype)
    array[_checked(d, dtype, start, count, len(array))] = found


def scalar(value: Any, dtype: np.dtype[Any]) -> Any:
    """A scalar operand in the element type: the same bits where it is an integer or a mov of floats."""
    if isinstance(value, np.ndarray):
        return _scalars(value, dtype)
    if dtype.kind in FLOATING:
        return dtype.type(value)
    if isinstance(value, np.generic) and value.dtype.kind in FLOATING:
        return np.array([value]).view(dtype)[0]
    return np.array(int(value) & ((1 << 8 * dtype.itemsize) - 1), f"u{dtype.itemsize}").astype(dtype)[()]


def _scalars(values: np.ndarray[Any, Any], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """A scalar operand of each PE in the element type."""
    if dtype.kind in FLOATING:
        return values.astype(dtype)
    if values.dtype.kind in FLOATING:
        return values.view(dtype)
    return values.astype(f"u{dtype.itemsize}").astype(dtype)


def _serial(dest: Mem1d, sources: list[Any], dtype: np.dtype[Any]) -> bool:
    """Whether elements depend on the ones before them: the destination runs into a source at another place."""
    for d in sources:
        if type(d) is not Mem1d or not _same_memory(d.array, dest.array):
            continue
        if dest.stride == 0 and d.stride == 0 and d.byte == dest.byte:
            return True
        if (d.byte, d.stride) != (dest.byte, dest.stride) and _meets(dest, d, dtype.itemsize):
            return True
    return False


def _same_memory(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> bool:
    """Whether two arrays are one variable, perhaps seen as cells of another type."""
    if a is b:
        return True
    if (a if a.base is None else a.base) is not (b if b.base is None else b.base):
        return False
    return bool(a.__array_interface__["data"] == b.__array_interface__["data"])


def _meets(a: Mem1d, b: Mem1d, size: int) -> bool:
    low_a, high_a = sorted((a.byte, a.byte + (a.extent - 1) * a.stride * size))
    low_b, high_b = sorted((b.byte, b.byte + (b.extent - 1) * b.stride * size))
    return low_a <= high_b and low_b <= high_a


def length(operands: tuple[Any, ...]) -> int:
    """How many elements an operation walks: the extent of its first source, or of its destination where no source
    has one. The extents of the others do not count; a FIFO has only what was set for it."""
    dest, *sources = operands
    for o in (*sources, dest):
        if isinstance(o, Fifo):
            found = (o.write_length if o is dest else o.read_length) or None
        else:
            found = getattr(o, "extent", None)
        if found is not None:
            return found
    return INFINITE


def apply(op: DsdOp, dest: Any, sources: list[Any], start: int, count: int) -> None:
    """Elements `start` to `start + count` of an operation on memory and scalars."""
    dtype = op.result.dtype
    types = [x.dtype for x in op.sources]
    if type(dest) is Mem1d and count > 1 and _serial(dest, sources, dtype):
        _one_by_one(op, dest, sources, start, count)
        return
    if type(dest) is Mem4d and 0 in dest.strides:
        _by_visits(op, dest, sources, start, count)
        return
    args = [
        read(o, x, start, count) if isinstance(o, (Mem1d, Mem4d)) else scalar(o, x)
        for o, x in zip(sources, types, strict=True)
    ]
    write(dest, dtype, start, count, op.compute(*args))


def _by_visits(op: DsdOp, dest: Mem4d, sources: list[Any], start: int, count: int) -> None:
    """A destination that comes back to its elements: one pass for each visit, since a source may be the same memory."""
    visits = _visits(dest.extents, dest.strides)[start : start + count]
    array = dest.array if dest.array.dtype == op.result.dtype else _viewed(dest.array, op.result.dtype)
    at = _checked(dest, op.result.dtype, start, count, len(array))
    for visit in range(int(visits.max(initial=-1)) + 1):
        chosen = np.flatnonzero(visits == visit)
        args = []
        for o, x in zip(sources, op.sources, strict=True):
            found = read(o, x.dtype, start, count) if isinstance(o, (Mem1d, Mem4d)) else scalar(o, x.dtype)
            args.append(found[chosen] if np.ndim(found) and len(found) > 1 else found)
        array[at[chosen]] = convert(op.compute(*args), op.result.dtype)


def _one_by_one(op: DsdOp, dest: Mem1d, sources: list[Any], start: int, count: int) -> None:
    dtype, types = op.result.dtype, [x.dtype for x in op.sources]
    for i in range(start, start + count):
        args = [
            read(o, x, i, 1) if isinstance(o, (Mem1d, Mem4d)) else scalar(o, x)
            for o, x in zip(sources, types, strict=True)
        ]
        write(dest, dtype, i, 1, op.compute(*args))


def reduce(op: DsdOp, dest: Pointer, sources: list[Any], count: int, read_source: Any) -> None:
    """An operation into a pointer: folded over the elements, in order."""
    dtype = op.result.dtype
    *first, last = sources
    value = scalar(first[0], dtype) if first else None
    for item in read_source(last, op.sources[-1].dtype, 0, count) if count else ():
        found = op.compute(value, item) if first else op.compute(item)
        value = convert(found, dtype)[()]
    if value is not None:
        dest.array[dest.index] = np.array([value], dtype).view(dest.array.dtype)[0]


def compute(pe: Pe, op: DsdOp, operands: tuple[Any, ...]) -> None:
    """An operation whose operands are all in memory."""
    work(op, operands)
    pe.clock += cycles_of(op, operands, pe.wide)


def cycles_of(op: DsdOp, operands: tuple[Any, ...], wide: int) -> int:
    """What an operation in memory costs."""
    dest, *sources = operands
    if type(dest) is not Pointer:
        return START + -(-length(operands) // op.width[wide])
    return START + LOAD + length(operands) if any(isinstance(o, (Mem1d, Mem4d)) for o in sources) else LOAD


def work(op: DsdOp, operands: tuple[Any, ...]) -> None:
    """What an operation in memory does. Arrays may have a second axis, of PEs; scalars are then rows."""
    dest, *sources = operands
    count = length(operands)
    if type(dest) is not Pointer:
        if count:
            apply(op, dest, sources, 0, count)
        return
    descriptors = [o for o in sources if isinstance(o, (Mem1d, Mem4d))]
    if not descriptors:
        found = convert(op.compute(*(scalar(o, x.dtype) for o, x in zip(sources, op.sources, strict=True))), _of(op))
        dest.array[dest.index] = found[0] if found.ndim else found
        return
    sequence = descriptors[-1]
    if type(sequence) is Mem1d and sequence.stride == 0:
        sequence = sequence._replace(extent=count)
    reduce(op, dest, [*sources[:-1], sequence], count, _repeated)


def _of(op: DsdOp) -> np.dtype[Any]:
    return op.result.dtype


def _repeated(d: Any, dtype: np.dtype[Any], start: int, count: int) -> Any:
    found = read(d, dtype, start, count)
    return np.repeat(found, count, 0) if len(found) == 1 else found


Thread = Generator[Any, None, None]

"""Execution of DSD operations in PE memory, and their cycles."""

from __future__ import annotations

import math
from collections.abc import Generator
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from tessera.interp.target.csl.cost_model import COSTS
from tessera.interp.target.csl.pe.dsd_table import DsdOp
from tessera.interp.target.csl.sema.values import Fifo, Mem1d, Mem4d, Pointer
from tessera.interp.target.csl.text.diagnostics import CslFault

if TYPE_CHECKING:
    from tessera.interp.target.csl.pe.pe_state import PeState


INFINITE_LENGTH = 0x7FFF
FLOAT_KINDS = "fV"  # NumPy's kinds of floats; bfloat16 has the second


def view_vector(d: Mem1d, dtype: np.dtype[Any], start: int, count: int) -> np.ndarray[Any, Any]:
    """Elements `start` to `start + count` of a memory vector, as a view (one element if the stride is 0)."""
    array, byte, stride, _, _ = d
    if array.dtype != dtype:
        stride *= count_parts(array, dtype)
        array = _view_as(array, dtype)
    first = byte // dtype.itemsize + start * stride
    last = first + (count - 1) * stride
    if count and not (0 <= first < len(array) and 0 <= last < len(array)):
        raise CslFault(f"DSD accesses elements {first} to {last} of an array of {len(array)}")
    if stride == 0:
        return array[first : first + 1]
    stop = last + (1 if stride > 0 else -1)
    return array[first : None if stop < 0 else stop : stride]


def count_parts(array: Any, dtype: np.dtype[Any]) -> int:
    """The elements of a narrower type in one of an array, which a stride also passes."""
    return max(array.dtype.itemsize // dtype.itemsize, 1)


def _view_as(array: Any, dtype: np.dtype[Any]) -> Any:
    if array.dtype == object:
        raise CslFault("DSD accesses memory of a non-numeric type")
    size = len(array) * array.dtype.itemsize // dtype.itemsize * dtype.itemsize // array.dtype.itemsize
    return array[:size].view(dtype)


MAX_TENSOR_STEPS = 1 << 24  # of one operation: 350 times the bytes of a PE


def element_positions(d: Mem4d, size: int) -> np.ndarray[Any, Any]:
    """The flat element index of each step of a memory tensor."""
    return _walk_positions(d.extents, d.strides) + d.byte // size


@lru_cache(maxsize=1024)
def _walk_positions(extents: tuple[int, ...], strides: tuple[int, ...]) -> np.ndarray[Any, Any]:
    if math.prod(extents) > MAX_TENSOR_STEPS:
        raise CslFault(f"a DSD of {math.prod(extents):,} elements", expected=f"at most {MAX_TENSOR_STEPS:,}")
    at = np.zeros(1, np.int64)
    for extent, stride in zip(extents, strides, strict=True):
        at = (at[:, None] + np.arange(extent)[None, :] * stride).reshape(-1)
    return at


@lru_cache(maxsize=1024)
def _count_visits(extents: tuple[int, ...], strides: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """For each step of a tensor, the number of earlier steps at the same element."""
    at = _walk_positions(extents, strides)
    order = np.argsort(at, kind="stable")
    first = np.r_[True, np.diff(at[order]) != 0]
    begins = np.maximum.accumulate(np.where(first, np.arange(len(at)), 0))
    visits = np.empty(len(at), np.int64)
    visits[order] = np.arange(len(at)) - begins
    return visits


def read_elements(d: Any, dtype: np.dtype[Any], start: int, count: int) -> Any:
    """The elements of a memory DSD."""
    if type(d) is Mem1d:
        return view_vector(d, dtype, start, count)
    array = d.array if d.array.dtype == dtype else _view_as(d.array, dtype)
    return array[_check_positions(d, dtype, start, count, len(array))]


def _check_positions(d: Mem4d, dtype: np.dtype[Any], start: int, count: int, length: int) -> np.ndarray[Any, Any]:
    at = element_positions(d, dtype.itemsize)[start : start + count]
    if len(at) and (at.min() < 0 or at.max() >= length):
        raise CslFault(f"DSD accesses elements {at.min()} to {at.max()} of an array of {length}")
    return at


def convert_result(found: Any, dtype: np.dtype[Any]) -> Any:
    """A result converted to the destination's type: floats round once, integers wrap."""
    found = found if type(found) is np.ndarray else np.asarray(found)
    if found.dtype is dtype or found.dtype == dtype:
        return found
    if found.dtype.kind == dtype.kind == "u" or dtype.kind in FLOAT_KINDS:
        return found.astype(dtype)
    return found.astype(np.int64).astype(dtype)


def write_elements(d: Any, dtype: np.dtype[Any], start: int, count: int, found: Any) -> None:
    """Store a result; with stride 0 the last element remains."""
    found = convert_result(found, dtype)
    if type(d) is Mem1d:
        where = view_vector(d, dtype, start, count)
        where[...] = found if len(where) == count or found.ndim == 0 or len(found) == 1 else found[-1:]
        return
    array = d.array if d.array.dtype == dtype else _view_as(d.array, dtype)
    array[_check_positions(d, dtype, start, count, len(array))] = found


def convert_scalar(value: Any, dtype: np.dtype[Any]) -> Any:
    """A scalar operand in the element type: bits are reinterpreted for integers and for moves of floats."""
    if isinstance(value, np.ndarray):
        return _convert_scalars(value, dtype)
    if dtype.kind in FLOAT_KINDS:
        return dtype.type(value)
    if isinstance(value, np.generic) and value.dtype.kind in FLOAT_KINDS:
        return np.array([value]).view(dtype)[0]
    return np.array(int(value) & ((1 << 8 * dtype.itemsize) - 1), f"u{dtype.itemsize}").astype(dtype)[()]


def _convert_scalars(values: np.ndarray[Any, Any], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """A scalar operand of each PE in the element type."""
    if dtype.kind in FLOAT_KINDS:
        return values.astype(dtype)
    if values.dtype.kind in FLOAT_KINDS:
        return values.view(dtype)
    return values.astype(f"u{dtype.itemsize}").astype(dtype)


def _is_serial(dest: Mem1d, sources: list[Any], dtype: np.dtype[Any]) -> bool:
    """Whether elements depend on earlier ones: the destination overlaps a source at another offset."""
    for d in sources:
        if type(d) is not Mem1d or not _same_memory(d.array, dest.array):
            continue
        if dest.stride == 0 and d.stride == 0 and d.byte == dest.byte:
            return True
        if (d.byte, d.stride) != (dest.byte, dest.stride) and _overlaps(dest, d, dtype):
            return True
    return False


def _same_memory(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> bool:
    """Whether two arrays are views of one variable."""
    if a is b:
        return True
    if (a if a.base is None else a.base) is not (b if b.base is None else b.base):
        return False
    return bool(a.__array_interface__["data"] == b.__array_interface__["data"])


def _overlaps(a: Mem1d, b: Mem1d, dtype: np.dtype[Any]) -> bool:
    (low_a, high_a), (low_b, high_b) = _find_ends(a, dtype), _find_ends(b, dtype)
    return low_a <= high_b and low_b <= high_a


def _find_ends(d: Mem1d, dtype: np.dtype[Any]) -> list[int]:
    """The lowest and the highest byte at which an element begins."""
    step = d.stride * count_parts(d.array, dtype) * dtype.itemsize
    return sorted((d.byte, d.byte + (d.extent - 1) * step))


def operation_length(operands: tuple[Any, ...]) -> int:
    """The number of elements of an operation: the extent of its first source, else of its destination.

    The extents of other operands do not count; a FIFO has only the length that the program set.
    """
    dest, *sources = operands
    if type(sources[0]) is Mem1d:
        return sources[0][3]
    for o in (*sources, dest):
        if isinstance(o, Fifo):
            length = (o.write_length if o is dest else o.read_length) or None
        else:
            length = getattr(o, "extent", None)
        if length is not None:
            return length
    return INFINITE_LENGTH


def apply_operation(op: DsdOp, dest: Any, sources: list[Any], start: int, count: int) -> None:
    """Elements `start` to `start + count` of an operation on memory and scalars."""
    dtype = op.result.dtype
    types = [x.dtype for x in op.sources]
    if type(dest) is Mem1d and count > 1 and _is_serial(dest, sources, dtype):
        _apply_serially(op, dest, sources, start, count)
        return
    if type(dest) is Mem4d and 0 in dest.strides:
        _apply_by_visits(op, dest, sources, start, count)
        return
    args = [
        read_elements(o, x, start, count) if isinstance(o, (Mem1d, Mem4d)) else convert_scalar(o, x)
        for o, x in zip(sources, types, strict=True)
    ]
    write_elements(dest, dtype, start, count, op.compute(*args))


def _apply_to_vectors(op: DsdOp, operands: tuple[Any, ...]) -> int | None:
    """Apply an operation at once if its operands are vectors and scalars of its own types that do not overlap.

    Returns the number of elements; None for all other operands, which `apply_operation` executes.
    """
    dest = operands[0]
    array, byte, stride, count, _ = dest
    result, kinds, _ = op.at_once
    if array.dtype is not result and array.dtype != result or not stride:
        return None
    args: list[Any] = []
    first, where, number = True, None, 0
    for dtype in kinds:
        number += 1
        o = operands[number]
        if type(o) is Mem1d:
            if not (dtype is result if o is dest else _is_source(o, dtype, array, byte, stride)):
                return None
            other, start, step, extent, _ = o
            if first:
                count, first = extent, False
            found = _views.get((id(other), start, step, count))
            view = _view_vector_again(o, dtype, count) if found is None else found[1]
            args.append(view)
            if o is dest:
                where = view
        elif getattr(o, "dtype", None) == dtype:  # a number, or those of many PEs
            args.append(o)
        else:
            return None
    if count:
        _store_at_once(op, args, _view_vector_again(dest, result, count) if where is None else where)
    return count


def _store_at_once(op: DsdOp, args: list[Any], where: np.ndarray[Any, Any]) -> None:
    if op.at_once[2] is not None:
        op.at_once[2](*args, out=where)
    else:
        where[...] = convert_result(op.compute(*args), op.dtype)


def _accumulate_product(
    op: DsdOp, operands: tuple[Any, ...], multiply: np.ufunc = np.multiply, add: np.ufunc = np.add
) -> int | None:
    """`_apply_to_vectors` where a vector accumulates the product of another variable's vector and a number.

    That is the innermost operation of products of matrices. None for all other operands.
    """
    dest, first, factor, number = operands
    if first is not dest or type(factor) is not Mem1d:
        return None
    array, byte, stride, count, _ = dest
    other, start, step, _, _ = factor
    dtype, base, other_base = op.dtype, array.base, other.base
    if array.dtype is not dtype or other.dtype is not dtype or not (stride and count):
        return None
    same = (array if base is None else base) is (other if other_base is None else other_base)
    if same or getattr(number, "dtype", None) is not dtype:
        return None
    found = _views.get((id(array), byte, stride, count))
    where = _view_vector_again(dest, dtype, count) if found is None else found[1]
    found = _views.get((id(other), start, step, count))
    view = _view_vector_again(factor, dtype, count) if found is None else found[1]
    add(where, multiply(view, number), where)
    return count


_views: dict[tuple[int, int, int, int], tuple[Any, np.ndarray[Any, Any]]] = {}  # of a run, by array and descriptor
MAX_VIEWS = 1024


def _view_vector_again(d: Mem1d, dtype: np.dtype[Any], count: int) -> np.ndarray[Any, Any]:
    """`view_vector` of the whole of a vector, which loops ask for again and again."""
    array, byte, stride, _, _ = d
    key = id(array), byte, stride, count
    found = _views.get(key)
    if found is not None:  # of this array: an entry keeps its array, and with it the id
        return found[1]
    view = view_vector(d, dtype, 0, count)
    if array.ndim > 1:  # of one step of many PEs
        return view
    if len(_views) >= MAX_VIEWS:
        _views.clear()
    _views[key] = array, view
    return view


def forget_views() -> None:
    """Release the memory of a run that has ended."""
    _views.clear()


def _is_source(o: Mem1d, dtype: np.dtype[Any], array: Any, byte: int, stride: int) -> bool:
    """Whether a vector has the type of a source, and is the destination itself or another variable."""
    other = o[0]
    kind = other.dtype
    if kind is not dtype and kind != dtype:
        return False
    if other is array:
        return o[1] == byte and o[2] == stride
    base, other_base = array.base, other.base
    return (array if base is None else base) is not (other if other_base is None else other_base)


def _apply_by_visits(op: DsdOp, dest: Mem4d, sources: list[Any], start: int, count: int) -> None:
    """Apply an operation whose destination repeats elements: one pass per visit, since a source may alias it."""
    visits = _count_visits(dest.extents, dest.strides)[start : start + count]
    array = dest.array if dest.array.dtype == op.result.dtype else _view_as(dest.array, op.result.dtype)
    at = _check_positions(dest, op.result.dtype, start, count, len(array))
    for visit in range(int(visits.max(initial=-1)) + 1):
        chosen = np.flatnonzero(visits == visit)
        args = []
        for o, x in zip(sources, op.sources, strict=True):
            found = (
                read_elements(o, x.dtype, start, count) if isinstance(o, (Mem1d, Mem4d)) else convert_scalar(o, x.dtype)
            )
            args.append(found[chosen] if np.ndim(found) and len(found) > 1 else found)
        array[at[chosen]] = convert_result(op.compute(*args), op.result.dtype)


def _apply_serially(op: DsdOp, dest: Mem1d, sources: list[Any], start: int, count: int) -> None:
    dtype, types = op.result.dtype, [x.dtype for x in op.sources]
    for i in range(start, start + count):
        args = [
            read_elements(o, x, i, 1) if isinstance(o, (Mem1d, Mem4d)) else convert_scalar(o, x)
            for o, x in zip(sources, types, strict=True)
        ]
        write_elements(dest, dtype, i, 1, op.compute(*args))


def reduce_into_pointer(op: DsdOp, dest: Pointer, sources: list[Any], count: int, read_source: Any) -> None:
    """Reduce elements into a pointer in order."""
    dtype = op.result.dtype
    *first, last = sources
    value = convert_scalar(first[0], dtype) if first else None
    for item in read_source(last, op.sources[-1].dtype, 0, count) if count else ():
        found = op.compute(value, item) if first else op.compute(item)
        value = convert_result(found, dtype)[()]
    if value is not None:
        dest.array[dest.index] = np.array([value], dtype).view(dest.array.dtype)[0]


def compute(pe: PeState, op: DsdOp, operands: tuple[Any, ...]) -> None:
    """Execute an operation on memory operands, and advance the clock."""
    dest, wide = operands[0], pe.wide
    if type(dest) is Mem1d:
        count = _accumulate_product(op, operands) if op.accumulates else None
        if count is None:
            count = _apply_to_vectors(op, operands)
        if count is not None:
            pe.clock += COSTS.dsd_start[wide] - (-count // op.width[wide])
            if op.accumulates and op.width[wide] == 1:
                pe.clock += count_bank_conflicts(operands[1], operands[2], count)
            return
    execute_operation(op, operands)
    pe.clock += count_cycles(op, operands, wide)


def count_cycles(op: DsdOp, operands: tuple[Any, ...], wide: int) -> int:
    """The cycles of an operation in memory."""
    dest, *sources = operands
    if type(dest) is not Pointer:
        rate, count = op.width[wide], operation_length(operands)
        tensor = next((o for o in operands if type(o) is Mem4d), None)
        if tensor is not None:
            return COSTS.dsd_start[wide] + _count_tensor_cycles(op, operands, tensor, rate, wide)
        conflicts = count_bank_conflicts(operands[1], operands[2], count) if op.name == "fmacs" else 0
        return COSTS.dsd_start[wide] + -(-count // rate) + conflicts
    vector = any(isinstance(o, (Mem1d, Mem4d)) for o in sources)
    return COSTS.dsd_start[wide] + (COSTS.descriptor_load + operation_length(operands) if vector else 1)


def _count_tensor_cycles(op: DsdOp, operands: tuple[Any, ...], tensor: Mem4d, rate: int, wide: int) -> int:
    """The cycles of the elements of an operation on a tensor (`docs/csl-cycles.md`): stencils in tiles."""
    count = math.prod(tensor.extents)
    if op.name == "fmacs":
        return -(-4 * count // 3)
    if not wide:
        return -(-count // (1 if op.dtype.itemsize == 4 else rate))
    # 16 bytes of one operand a cycle, and one more for each row and each scalar in it.
    vectors = sum(isinstance(o, (Mem1d, Mem4d)) for o in operands)
    row = -(-vectors * tensor.extents[-1] * op.dtype.itemsize // 16) + 1 + len(operands) - vectors
    return count // max(tensor.extents[-1], 1) * row


def count_bank_conflicts(first: Any, second: Any, count: int) -> int:
    """The elements of two 32-bit vectors that a cycle cannot read together: of equal address modulo 16 bytes.

    Variables begin at multiples of 16 bytes. `docs/csl-cycles.md` has the evidence.
    """
    if type(first) is not Mem1d or type(second) is not Mem1d:
        return 0
    return count_conflicts((first.byte - second.byte) // 4 % 4, (first.stride - second.stride) % 4, count)


@lru_cache(maxsize=1024)
def count_conflicts(start: int, step: int, count: int) -> int:
    """`count_bank_conflicts` of vectors whose addresses and strides differ by words modulo 4."""
    if not step:
        return 0 if start else count
    if step == 2:
        return 0 if start % 2 else (count + (start == 0)) // 2
    before = -start * step % 4  # elements before the first conflict: 1 and 3 are their own inverses modulo 4
    return max(count - before + 3, 0) // 4


def execute_operation(op: DsdOp, operands: tuple[Any, ...]) -> None:
    """Execute an operation on memory. Arrays may have a second axis of PEs; scalars are then rows."""
    dest, *sources = operands
    if type(dest) is Mem1d and _apply_to_vectors(op, operands) is not None:
        return
    count = operation_length(operands)
    if type(dest) is not Pointer:
        if count:
            apply_operation(op, dest, sources, 0, count)
        return
    descriptors = [o for o in sources if isinstance(o, (Mem1d, Mem4d))]
    if not descriptors:
        result = convert_result(
            op.compute(*(convert_scalar(o, x.dtype) for o, x in zip(sources, op.sources, strict=True))),
            op.dtype,
        )
        dest.array[dest.index] = result[0] if result.ndim else result
        return
    sequence = descriptors[-1]
    if type(sequence) is Mem1d and sequence.stride == 0:
        sequence = sequence._replace(extent=count)
    reduce_into_pointer(op, dest, [*sources[:-1], sequence], count, _read_repeated)


def _read_repeated(d: Any, dtype: np.dtype[Any], start: int, count: int) -> Any:
    elements = read_elements(d, dtype, start, count)
    return np.repeat(elements, count, 0) if len(elements) == 1 else elements


Microthread = Generator[Any, None, None]

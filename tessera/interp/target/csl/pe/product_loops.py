"""Loops of products: all iterations of a loop that accumulates products of vectors and numbers, at once.

`sema/product_loops.py` finds the loops. The elements are computed in the order of the iterations, with the roundings of
each `@fmacs`. The calls of `@map` that accumulate a product of registers are such a loop.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tessera.interp.target.csl.cost_model import COSTS
from tessera.interp.target.csl.pe.dsd_operations import count_conflicts
from tessera.interp.target.csl.pe.dsd_table import DsdOp
from tessera.interp.target.csl.sema.values import DsrContents, Mem1d, increment_dsd_offset

if TYPE_CHECKING:
    from tessera.interp.target.csl.pe.pe_state import PeState

Indices = range | tuple[int, ...]
Offsets = int | list[int]  # the bytes from one iteration to the next, or the offset of each iteration


class VectorRows(NamedTuple):
    """The elements of a vector in each iteration, all in bounds: starts and distances in bytes."""

    start: int
    step: int  # from one iteration to the next
    stride: int  # from one element to the next
    iterations: int
    extent: int

    def view(self, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """The elements in an array of cells, which may have a second axis of PEs: iterations by elements (by PEs)."""
        size, pes = array.itemsize, array.shape[1:]
        wide = pes[0] if pes else 1
        strides = (self.step * wide, self.stride * wide, *([size] if pes else []))
        return np.ndarray((self.iterations, self.extent, *pes), array.dtype, array, self.start * wide, strides)


class ProductLoop(NamedTuple):
    """A loop whose iterations may be computed at once, and its cycles; one row of `dest` means that all add to it.

    `step` is the distance of the indices, all of which are in bounds; 0 if it differs.
    """

    dest: VectorRows
    vector: VectorRows
    indices: Indices
    step: int
    cycles: int

    def run(self, dest: Any, vector: Any, cells: Any) -> None:
        """Execute the iterations on the memory of the destination, the vectors and the numbers."""
        indices, step = self.indices, self.step
        numbers = cells[indices[0] : indices[-1] + 1 : step] if step > 0 else cells[list(indices)]
        where, vectors, factors = self.dest.view(dest), self.vector.view(vector), numbers[:, None]
        if len(where) == len(vectors):
            np.add(where, np.multiply(vectors, factors), where)
        elif vectors.ndim == 2:
            sums = np.empty((len(vectors) + 1, self.dest.extent), dest.dtype)
            sums[0] = where[0]
            np.multiply(vectors, factors, sums[1:])
            where[0] = np.add.accumulate(sums, 0)[-1]  # one after another, unlike `np.sum`
        else:
            row = where[0]
            for product in np.multiply(vectors, factors):
                np.add(row, product, row)


def accumulate_products(
    pe: PeState, op: DsdOp, dest: Any, dest_offsets: Offsets, vector: Any, vector_offsets: Offsets,
    cells: Any, indices: range | list[int] | None, cycles: int,
) -> bool:  # fmt: skip
    """Execute a loop: in each iteration an operation on the destination, a vector and an element of `cells`.

    `cycles` are those of the scalar code of an iteration. Returns False, and does nothing, for a loop without
    iterations, a fault in one of them, and operands whose order could be seen.
    """
    if not indices or not _are_apart(dest, vector, cells):
        return False
    loop = plan_products(op, dest, dest_offsets, vector, vector_offsets, cells, indices, cycles, pe.wide)
    if loop is None:
        return False
    loop.run(dest.array, vector.array, cells)
    pe.clock += loop.cycles
    return True


def map_products(pe: PeState, function: Any, numbers: Any, count: int) -> bool:
    """Execute `@map` of a function that only accumulates the product of registers and one of `count` numbers.

    Returns False, and does nothing, where `accumulate_products` does not compute the loop.
    """
    names = pe.program.register_products.get(getattr(function, "__name__", ""))
    if names is None or type(numbers) is not Mem1d or pe.threads or pe.front is None:
        return False
    op, *registers = [pe.space[name] for name in names]
    dest, same, vector = [pe.dsrs.get(register) for register in registers]
    if dest is None or same is None or vector is None or not _are_alike(dest, same, vector):
        return False
    array, byte, stride, _, _ = numbers
    first = byte // array.itemsize
    indices = range(first, first + count * stride, stride) if stride else [first] * count
    steps = [_find_step(one) for one in (dest, vector)]
    at_once = pe.space[accumulate_products.__name__]
    if not at_once(pe, op, dest.dsd, steps[0], vector.dsd, steps[1], array, indices, COSTS.map_call):
        return False
    for register, step in ((dest, steps[0]), (same, steps[0]), (vector, steps[1])):
        register.dsd = increment_dsd_offset(register.dsd, step * count)
    return True


def _are_alike(dest: DsrContents, same: DsrContents, vector: DsrContents) -> bool:
    """Whether two registers hold vectors, the other one that of the destination, and no load was asynchronous."""
    contents = (dest, same, vector)
    if any([type(one.dsd) is not Mem1d or one.options.get("async") for one in contents]):
        return False
    return dest.save == same.save and dest.dsd[0] is same.dsd[0] and dest.dsd[1:] == same.dsd[1:]


def _find_step(register: DsrContents) -> int:
    """The bytes by which a product moves the vector of a register."""
    array, _, stride, extent, _ = register.dsd
    return extent * stride * array.itemsize if register.save else 0


def refuse_products(space: dict[str, Any]) -> None:
    """Let the generated Python of a PE run the iterations of each loop itself."""
    space[accumulate_products.__name__] = lambda *_: False


def _are_apart(dest: Any, vector: Any, cells: Any) -> bool:
    """Whether the destination is in another variable than the vectors and the numbers."""
    if type(dest) is not Mem1d or type(vector) is not Mem1d:
        return False
    memory = _find_memory(dest.array)
    return _find_memory(vector.array) is not memory and _find_memory(cells) is not memory


def _find_memory(array: np.ndarray[Any, Any]) -> Any:
    return array if array.base is None else array.base


def plan_products(
    op: DsdOp, dest: Mem1d, dest_offsets: Offsets, vector: Mem1d, vector_offsets: Offsets, cells: Any,
    indices: range | list[int], cycles: int, wide: int,
) -> ProductLoop | None:  # fmt: skip
    """The loop on variables of their own, unless destinations overlap or elements are out of bounds."""
    dtype = op.dtype
    kinds = dest.array.dtype, vector.array.dtype, cells.dtype
    if not op.accumulates or kinds[0] is not dtype or kinds[1] is not dtype or kinds[2] is not dtype:
        return None
    rows, factors = _describe_rows(dest, dest_offsets), _describe_rows(vector, vector_offsets)
    given = indices if isinstance(indices, range) else tuple(indices)
    return _plan_rows(op, rows, factors, len(cells), given, cycles, wide)


# The byte, the stride and the extent of a vector, the cells of its variable, and its offsets.
RowsKey = tuple[int, int, int, int, int | tuple[int, ...]]


def _describe_rows(d: Mem1d, offsets: Offsets) -> RowsKey:
    array, byte, stride, extent, _ = d
    return byte, stride, extent, len(array), tuple(offsets) if isinstance(offsets, list) else offsets


@lru_cache(maxsize=4096)
def _plan_rows(
    op: DsdOp, dest: RowsKey, vector: RowsKey, count: int, indices: Indices, cycles: int, wide: int
) -> ProductLoop | None:
    """The loop, which all PEs of a program have in common; `count` is that of the cells with the numbers."""
    extent = dest[2]
    if min(indices) < 0 or max(indices) >= count:
        return None
    rows, factors = (_find_rows(*one, op.dtype.itemsize, len(indices)) for one in (dest, vector))
    if rows is None or factors is None or not rows.stride or not extent or factors.extent != extent:
        return None
    step, stride = abs(rows.step), abs(rows.stride)
    if step and step < extent * stride and step * len(indices) > stride:
        return None
    cycles += COSTS.dsd_start[wide] - (-extent // op.width[wide])
    conflicts = _count_conflicts(rows, factors) if op.width[wide] == 1 else 0
    once = rows if step else rows._replace(iterations=1)
    return ProductLoop(once, factors, indices, _find_distance(indices), len(indices) * cycles + conflicts)


def _find_distance(indices: Indices) -> int:
    """The distance of rising indices; 0 if it is not always the same."""
    if isinstance(indices, range):
        return max(indices.step, 0)
    distances = {later - index for index, later in zip(indices, indices[1:], strict=False)}
    return max(distances.pop(), 0) if len(distances) == 1 else 0


def _find_rows(
    start: int, stride: int, extent: int, length: int, offsets: int | tuple[int, ...], size: int, count: int
) -> VectorRows | None:
    """The elements of a vector in each iteration; None if some are out of bounds or not at regular distances."""
    if isinstance(offsets, tuple):
        start, step = start + offsets[0], offsets[1] - offsets[0] if count > 1 else 0
        if any([later - offset != step for offset, later in zip(offsets, offsets[1:], strict=False)]):
            return None
    else:
        step = offsets
    ends = step * (count - 1), stride * size * (extent - 1)
    low, high = start + sum([min(end, 0) for end in ends]), start + sum([max(end, 0) for end in ends])
    if start % size or step % size or low < 0 or high >= length * size:
        return None
    return VectorRows(start, step, stride * size, count, extent)


def _count_conflicts(rows: VectorRows, factors: VectorRows) -> int:
    """The cycles of all iterations in which a bank has both elements; words of 4 bytes."""
    start, step, strides = rows.start - factors.start, rows.step - factors.step, rows.stride - factors.stride
    found, strides = 0, strides // 4 % 4
    for i in range(4):  # the iterations i, i + 4, … have equal places
        found += (rows.iterations - i + 3) // 4 * count_conflicts((start + i * step) // 4 % 4, strides, rows.extent)
    return found

"""Loops of products: all iterations of a loop that accumulates products of vectors and numbers, at once.

`sema/product_loops.py` finds the loops. The elements are computed in the order of the iterations, with the roundings of
each `@fmacs`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tessera.interp.target.csl.cost_model import COSTS
from tessera.interp.target.csl.pe.dsd_operations import count_conflicts
from tessera.interp.target.csl.pe.dsd_table import DsdOp
from tessera.interp.target.csl.sema.values import Mem1d

if TYPE_CHECKING:
    from tessera.interp.target.csl.pe.pe_state import PeState

Offsets = int | list[int]  # the bytes from one iteration to the next, or the offset of each iteration
Start = tuple[int, int]  # the byte of the first element, and the bytes from one iteration to the next


def accumulate_products(
    pe: PeState, op: DsdOp, dest: Any, dest_offsets: Offsets | None, vector: Any, vector_offsets: Offsets | None,
    cells: Any, indices: list[int] | None, cycles: int,
) -> bool:  # fmt: skip
    """Execute a loop: in each iteration an operation on the destination, a vector and an element of `cells`.

    `cycles` are those of the scalar code of an iteration. Returns False, and does nothing, for a loop without
    iterations, a fault in one of them, and operands whose order could be seen.
    """
    if not indices or not op.accumulates:
        return False
    count, dtype = len(indices), op.dtype
    first, second = _find_start(dest, dest_offsets, count), _find_start(vector, vector_offsets, count)
    if first is None or second is None or cells.dtype is not dtype:
        return False
    views = _view_vectors(dtype, dest, vector, cells, (first, second), count)
    if views is None:
        return False
    try:
        numbers = cells[indices]
    except IndexError:
        return False
    _accumulate(*views, numbers)
    pe.clock += count * (cycles + COSTS.dsd_start[pe.wide] - (-dest.extent // op.width[pe.wide]))
    if op.width[pe.wide] == 1:
        pe.clock += _count_conflicts(dest, vector, first, second, count)
    return True


def _accumulate(where: np.ndarray[Any, Any], factors: np.ndarray[Any, Any], numbers: np.ndarray[Any, Any]) -> None:
    products = np.multiply(factors, numbers[:, None])
    if where.ndim == 2:
        np.add(where, products, where)
        return
    for product in products:
        np.add(where, product, where)


def _find_start(d: Any, offsets: Offsets | None, count: int) -> Start | None:
    """The byte of the first element of a vector, and the bytes from one iteration to the next, if they are constant."""
    if type(d) is not Mem1d or offsets is None:
        return None
    if not isinstance(offsets, list):
        return d.byte, offsets
    step = offsets[1] - offsets[0] if count > 1 else 0
    if step and offsets != list(range(offsets[0], offsets[0] + count * step, step)):
        return None
    if not step and offsets.count(offsets[0]) != count:
        return None
    return d.byte + offsets[0], step


def _view_vectors(
    dtype: np.dtype[Any], dest: Mem1d, vector: Mem1d, cells: Any, starts: tuple[Start, Start], count: int
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]] | None:
    """The destinations and the vectors of all iterations, with an axis of iterations unless all are one vector.

    None if an order of the iterations could be seen: destinations that overlap each other, the vectors or the numbers.
    """
    extent, span = dest.extent, abs(dest.stride) * dtype.itemsize
    step = abs(starts[0][1])
    apart = not step or step >= extent * span or step * count <= span
    if not apart or not span or not extent or vector.extent != extent or dest.indexed or vector.indexed:
        return None
    memory = _find_memory(dest.array)
    if _find_memory(vector.array) is memory or _find_memory(cells) is memory:
        return None
    where = _view_iterations(dest, dtype, starts[0], count if step else 1)
    factors = _view_iterations(vector, dtype, starts[1], count)
    if where is None or factors is None:
        return None
    return where if step else where[0], factors


def _find_memory(array: np.ndarray[Any, Any]) -> Any:
    return array if array.base is None else array.base


def _view_iterations(d: Mem1d, dtype: np.dtype[Any], begin: Start, count: int) -> np.ndarray[Any, Any] | None:
    """The elements of a vector in each iteration; None if some are out of bounds or of another type."""
    size, array, (start, step) = dtype.itemsize, d.array, begin
    if array.dtype is not dtype or start % size or step % size or start < 0:
        return None
    try:
        return np.ndarray((count, d.extent), dtype, array, start, (step, d.stride * size))
    except (ValueError, BufferError):
        return None


def _count_conflicts(dest: Mem1d, vector: Mem1d, first: Start, second: Start, count: int) -> int:
    """The cycles of all iterations in which a bank has both elements."""
    start, step, strides = first[0] - second[0], first[1] - second[1], (dest.stride - vector.stride) % 4
    return sum([count_conflicts((start + i * step) // 4 % 4, strides, dest.extent) for i in range(count)])

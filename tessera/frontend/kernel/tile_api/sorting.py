"""Sorting of blocks by rank, histograms, and interleaving of two blocks."""

from __future__ import annotations

from typing import Any

from tessera.core.errors import DTypeError, ShapeError
from tessera.frontend.kernel.memref import subscript_view
from tessera.frontend.kernel.tile_api.memory import alloc_register
from tessera.frontend.kernel.tile_api.scans import as_block, flip, normalise_axis
from tessera.ir.tensor import Tensor
from tessera.ops.tensor import elementwise as e
from tessera.ops.tensor import reduce, shape
from tessera.ops.tensor.basic import broadcast_to


def sort(x: Any, axis: int = -1, descending: bool = False) -> Tensor:
    """The elements along an axis in rising order, NaNs last; `descending` gives them the other way around.

    Each element is compared with every other: for blocks of some hundred elements.
    """
    return _scatter_by_rank(x, axis, descending, lambda block: block)


def argsort(x: Any, axis: int = -1, descending: bool = False) -> Tensor:
    """Where along an axis the elements of the sorted block stand (int64); equal ones keep their order."""
    return _scatter_by_rank(x, axis, descending, lambda block: _axis_indices(block, block.ndim - 1))


def _scatter_by_rank(x: Any, axis: int, descending: bool, content: Any) -> Tensor:
    """What each element brings along, put where the element belongs."""
    found = as_block(x)
    at = normalise_axis(found, axis)
    block = shape.transpose(found, at, -1) if at != found.ndim - 1 else found
    carried = content(block)
    buffer = alloc_register(block.shape, carried.dtype)
    places = [_axis_indices(block, a) for a in range(block.ndim - 1)]
    subscript_view(buffer, (*places, _compute_ranks(block))).store(carried)
    result = flip(buffer, -1) if descending else buffer.load()
    return shape.transpose(result, at, -1) if at != found.ndim - 1 else result


def _axis_indices(block: Tensor, axis: int) -> Tensor:
    return shape.iota(shape=block.shape, axis=axis)


def _compute_ranks(block: Tensor) -> Tensor:
    """How many elements of the last axis come before each: smaller ones, and equal ones to the left."""
    n = block.shape[-1]
    pairs = (*block.shape, n)
    mine = broadcast_to(shape.reshape(block, shape=(*block.shape, 1)), shape=pairs)
    other = broadcast_to(shape.reshape(block, shape=(*block.shape[:-1], 1, n)), shape=pairs)
    left = e.less(shape.iota(shape=pairs, axis=-1), shape.iota(shape=pairs, axis=-2))
    smaller, same = e.less(other, mine), e.equal(other, mine)
    if block.dtype.is_float:  # NaN stands above every number, beside its like
        unknown, number = e.not_equal(mine, mine), e.equal(other, other)
        smaller = smaller | (number & unknown)
        same = same | (unknown & ~number)
    return reduce.sum(smaller | (same & left), axis=-1)


def histogram(x: Any, bins: int) -> Tensor:
    """How often each number from 0 to before `bins` occurs in a block of integers (int64)."""
    block = as_block(x)
    if not block.dtype.is_integer:
        raise DTypeError("a histogram counts integers", received=str(block.type), suggestion="tile.cast(x, ts.int32)")
    flat = shape.reshape(block, shape=(1, -1))
    numbers = shape.iota(shape=(bins, 1), axis=0, dtype=block.dtype if bins <= 127 else "int64")
    return reduce.sum(e.equal(numbers, flat), axis=-1)


def join(x: Any, y: Any) -> Tensor:
    """Two blocks of one shape as one, with a last axis of size 2."""
    first, second = (as_block(v) for v in (x, y))
    if first.shape != second.shape:
        raise ShapeError("blocks that are joined have one shape", received=f"{first.type} and {second.type}")
    whole = (*first.shape, 2)
    left = e.equal(shape.iota(shape=whole, axis=-1), 0)
    one, other = (shape.reshape(v, shape=(*first.shape, 1)) for v in (first, second))
    return e.where(left, one, other)


def split(x: Any) -> tuple[Tensor, Tensor]:
    """The two halves of a block whose last axis has size 2: what `join` joined."""
    block = as_block(x)
    if block.shape[-1] != 2:
        raise ShapeError("the last axis of a block that is split has size 2", received=str(block.type))
    buffer = alloc_register(block.shape, block.dtype)
    buffer.store(block)
    one, other = (subscript_view(buffer, (..., k)).load() for k in (0, 1))
    return one, other

"""Scans, reductions and sorting of blocks: by any combiner (Hillis and Steele 1986), and by rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tessera.core.errors import ArgumentError, DTypeError, ShapeError
from tessera.core.shapes import normalize_axis
from tessera.core.types import DType, int64
from tessera.frontend.kernel.memref import load_if_memref, subscript_view
from tessera.frontend.kernel.python_ast.calls import call_function
from tessera.frontend.kernel.tile_api.memory import alloc_register
from tessera.frontend.kernel.trace import current_trace
from tessera.ir.tensor import Tensor
from tessera.ops.tensor import elementwise as e
from tessera.ops.tensor import reduce as reductions
from tessera.ops.tensor import reduce as tensor_reduce
from tessera.ops.tensor import shape
from tessera.ops.tensor.basic import broadcast_to, cast
from tessera.ops.tensor.shape import iota, reshape

# Scans and reductions of blocks by any combiner (Hillis and Steele 1986), and their data movement.
#
# A block's elements are moved through registers that can be indexed: its own have no order that a program could name.


Combiner = Callable[..., Any]
NAMED_COMBINERS: dict[str, Combiner] = {
    "sum": e.add, "prod": e.mul, "max": e.maximum, "min": e.minimum,
    "and": e.bitwise_and, "or": e.bitwise_or, "xor": e.bitwise_xor,
}  # fmt: skip
_BUILTIN_REDUCTIONS: dict[str, Combiner] = {"sum": reductions.sum, "max": reductions.max, "min": reductions.min}
_WIDENING_COMBINERS = ("sum", "prod")


def take(x: Any, index: Any, axis: int = -1) -> Tensor:
    """The elements of a block at the places `index` (a block of rank 1) along an axis."""
    block = as_block(x)
    where: list[Any] = [slice(None)] * block.ndim
    where[normalise_axis(block, axis)] = index
    buffer = alloc_register(block.shape, block.dtype)
    buffer.store(block)
    return subscript_view(buffer, tuple(where)).load()


def flip(x: Any, axis: int = -1) -> Tensor:
    """A block with the elements along an axis in the opposite order."""
    block = as_block(x)
    size = block.shape[normalise_axis(block, axis)]
    return take(block, (size - 1) - iota(shape=(size,)), axis)


def scan(x: Any, combine: Any = "sum", axis: int = -1, reverse: bool = False) -> Any:
    """For each element along an axis all elements up to it, combined.

    `combine(earlier, later)` is "sum", "prod", "max", "min", "and", "or", "xor", or a function of blocks: associative,
    and elementwise. For a tuple of blocks it takes those of the earlier elements, then those of the
    later, and gives a tuple. With `reverse` the last element comes first. Partial results are combined
    in a fixed tree. Sums and products accumulate as `tile.sum` does.

    Raises:
        ArgumentError: no combiner has this name.
        ShapeError: the blocks differ in shape, or are scalars.
    """
    parts, rule = _as_sequence(x), _make_combiner(combine)
    axis = normalise_axis(parts[0], axis)
    narrow = _narrow_parts(combine, parts)
    parts = [_widen(combine, p) for p in parts]
    size, step = int(parts[0].shape[axis]), 1
    while step < size:
        place = iota(shape=(size,))
        source, inside = (place + step, place < size - step) if reverse else (place - step, place >= step)
        earlier = [take(p, e.minimum(e.maximum(source, 0), size - 1), axis) for p in parts]
        parts = _select_parts(_broadcast_mask(inside, parts[0], axis), rule(*earlier, *parts), parts)
        step *= 2
    return _pack_like(x, [p if p.dtype == t else cast(p, dtype=t) for p, t in zip(parts, narrow, strict=True)])


def reduce(x: Any, combine: Any = "sum", axis: int = -1, keepdims: bool = False) -> Any:
    """All elements along an axis combined, neighbours first; `combine` is as for `scan`."""
    if isinstance(combine, str) and combine in _BUILTIN_REDUCTIONS:
        return _BUILTIN_REDUCTIONS[combine](as_block(x), axis=axis, keepdims=keepdims)
    parts, rule = _as_sequence(x), _make_combiner(combine)
    axis = normalise_axis(parts[0], axis)
    narrow = _narrow_parts(combine, parts)
    parts = [_widen(combine, p) for p in parts]
    while (size := int(parts[0].shape[axis])) > 1:
        first = iota(shape=((size + 1) // 2,)) * 2
        early = [take(p, first, axis) for p in parts]
        late = [take(p, e.minimum(first + 1, size - 1), axis) for p in parts]
        parts = _select_parts(_broadcast_mask(first + 1 < size, early[0], axis), rule(*early, *late), early)
    left = tuple(n for a, n in enumerate(parts[0].shape) if keepdims or a != axis)
    found = [cast(p, dtype=t) if p.dtype != t else p for p, t in zip(parts, narrow, strict=True)]
    return _pack_like(x, [reshape(p, shape=left) for p in found])


def cumsum(x: Any, axis: int = -1) -> Tensor:
    """The sums of the elements up to each along an axis; narrow integers give int64."""
    return scan(x, "sum", axis)


def cumprod(x: Any, axis: int = -1) -> Tensor:
    """The products of the elements up to each along an axis; narrow integers give int64."""
    return scan(x, "prod", axis)


def cummax(x: Any, axis: int = -1) -> Tensor:
    """The largest of the elements up to each along an axis; NaN from the first one on."""
    return scan(x, "max", axis)


def cummin(x: Any, axis: int = -1) -> Tensor:
    """The smallest of the elements up to each along an axis; NaN from the first one on."""
    return scan(x, "min", axis)


def as_block(x: Any) -> Tensor:
    """A block of at least one axis, without a copy of its memory."""
    current_trace("tile.scan")
    found = load_if_memref(x)
    if not isinstance(found, Tensor) or not found.ndim:
        raise ShapeError("a block of at least one axis is needed", received=str(getattr(found, "type", found)))
    return found


def _as_sequence(x: Any) -> list[Tensor]:
    parts = [as_block(p) for p in (x if isinstance(x, (tuple, list)) else (x,))]
    if len({p.shape for p in parts}) != 1:
        raise ShapeError("blocks that are combined together have one shape", received=str([p.shape for p in parts]))
    return parts


def _pack_like(x: Any, parts: list[Tensor]) -> Any:
    return tuple(parts) if isinstance(x, (tuple, list)) else parts[0]


def normalise_axis(block: Tensor, axis: int) -> int:
    """An axis counted from the front."""
    return normalize_axis(axis, block.ndim) + block.ndim


def _make_combiner(combine: Any) -> Callable[..., Sequence[Any]]:
    """A combiner of blocks that gives a sequence."""
    if isinstance(combine, str) and combine not in NAMED_COMBINERS:
        raise ArgumentError(f'"{combine}" is not a combiner', expected=f"{', '.join(NAMED_COMBINERS)} or a function")
    function = NAMED_COMBINERS[combine] if isinstance(combine, str) else combine
    trace = current_trace()

    def apply(*blocks: Any) -> Sequence[Any]:
        found = call_function(trace, function, list(blocks), {})
        return found if isinstance(found, (tuple, list)) else (found,)

    return apply


def _select_parts(inside: Tensor, joined: Sequence[Any], parts: Sequence[Tensor]) -> list[Tensor]:
    if len(joined) != len(parts):
        raise ArgumentError(f"the combiner gives {len(joined)} values of {len(parts)}")
    return [e.where(inside, new, old) for new, old in zip(joined, parts, strict=True)]


def _broadcast_mask(mask: Tensor, block: Tensor, axis: int) -> Tensor:
    """A mask of rank 1 laid along an axis of a block."""
    lined = reshape(mask, shape=tuple(n if a == axis else 1 for a, n in enumerate(block.shape)))
    return broadcast_to(lined, shape=block.shape)


def _widen(combine: Any, block: Tensor) -> Tensor:
    """A block in the type that its sums are accumulated in."""
    if combine not in _WIDENING_COMBINERS:
        return block
    wide = block.type.accumulate if block.dtype.is_float else int64
    return block if block.dtype == wide else cast(block, dtype=wide)


def _narrow_parts(combine: Any, parts: Sequence[Tensor]) -> list[DType]:
    return [int64 if combine in _WIDENING_COMBINERS and not p.dtype.is_float else p.dtype for p in parts]


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
    return tensor_reduce.sum(smaller | (same & left), axis=-1)


def histogram(x: Any, bins: int) -> Tensor:
    """How often each number from 0 to before `bins` occurs in a block of integers (int64)."""
    block = as_block(x)
    if not block.dtype.is_integer:
        raise DTypeError("a histogram counts integers", received=str(block.type), suggestion="tile.cast(x, ts.int32)")
    flat = shape.reshape(block, shape=(1, -1))
    numbers = shape.iota(shape=(bins, 1), axis=0, dtype=block.dtype if bins <= 127 else "int64")
    return tensor_reduce.sum(e.equal(numbers, flat), axis=-1)


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

"""Access patterns: coalesced, strided, gathered and broadcast loads, and cache-blocked traversal (`tile.split`).

They state a kernel's intent; a load reads what the same subscript would read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tessera.core.errors import ArgumentError, ShapeError
from tessera.core.shapes import format_shape
from tessera.frontend.kernel.memref import MemRefView, load_if_memref, subscript_view, takes_memrefs
from tessera.frontend.kernel.tile_api.ids import WARP_SIZE, TileRange
from tessera.frontend.kernel.tile_api.memory import locate_access
from tessera.frontend.kernel.tile_api.scans import split as split_last
from tessera.frontend.kernel.trace import Index, add_indices
from tessera.ir.tensor import Tensor
from tessera.ops.tensor.shape import iota

# `tile.split` by level: a tensor walked in parts that fit a cache, which are walked in parts that fit the next.


# The bytes of a part: what usually fits beside its neighbours in a share of that memory.
CACHE_LEVEL_BITS = {"L2": 1 << 18, "L1": 1 << 14, "register": 1 << 8}


@takes_memrefs
def split(x: Any, level: str | None = None, shape: Sequence[int] | None = None) -> Any:
    """The parts of a place, for a `for` loop: `for part in tile.split(A, level="L1")`. Each is a place itself.

    All parts have one shape: `shape`, or the whole divided by prime factors, the longest axis first, until a part
    holds at most 256 KiB ("L2"), 16 KiB ("L1") or 256 bytes ("register"). They are walked in row-major order.

    Without a level, the two halves of a block whose last axis has size 2: what `tile.join` joined.

    Raises:
        ArgumentError: there is no such level, or `x` is a value.
        ShapeError: `shape` does not divide the place.
    """
    if level is None and shape is None:
        return split_last(x)
    if level not in (None, *CACHE_LEVEL_BITS):
        raise ArgumentError(f'"{level}" is not a level', expected=", ".join(CACHE_LEVEL_BITS))
    view = locate_access(x, (), None)
    if not isinstance(view, MemRefView):
        raise ArgumentError("only a part of memory is split by level", received=repr(x))
    whole = view.shape
    part = (
        tuple(shape)
        if shape is not None
        else block_shape_for_level(whole, view.dtype.bits, CACHE_LEVEL_BITS[str(level)])
    )
    if len(part) != len(whole) or any(p < 1 or n % p for n, p in zip(whole, part, strict=True)):
        raise ShapeError(
            f"parts of shape {format_shape(part)} do not make up {format_shape(whole)}",
            expected="divisors of each size",
        )
    counts = [n // p for n, p in zip(whole, part, strict=True)]
    return TileRange(0, math.prod(counts), 1, lambda i: _nth_block(view, part, counts, i))


def block_shape_for_level(whole: Sequence[int], bits: int, budget: int) -> tuple[int, ...]:
    """The shape of the parts that fit in so many bytes.

    >>> block_shape_for_level((512, 768), 32, 1 << 14)
    (64, 48)
    """
    sizes = list(whole)
    while math.prod(sizes) * bits > budget * 8 and max(sizes) > 1:
        axis = sizes.index(max(sizes))
        sizes[axis] //= next(p for p in range(2, sizes[axis] + 1) if sizes[axis] % p == 0)
    return tuple(sizes)


def _nth_block(view: MemRefView, part: Sequence[int], counts: Sequence[int], number: Any) -> MemRefView:
    """The part of a view with this number, in row-major order."""
    kept = [axis for axis in range(len(view.sizes)) if axis not in view.dropped]
    starts, sizes = list(view.starts), list(view.sizes)
    for place, axis in enumerate(kept):
        below = math.prod(counts[place + 1 :])
        along: Index = number if below == 1 else number // below
        along = along % counts[place] if place and counts[place] > 1 else along if counts[place] > 1 else 0
        starts[axis] = add_indices(starts[axis], along * part[place] if counts[place] > 1 else 0)
        sizes[axis] = part[place]
    return MemRefView(view.memory, tuple(starts), tuple(sizes), view.dropped)


@takes_memrefs
def load_coalesced(place: Any, threads: int = WARP_SIZE) -> Tensor:
    """The block at a place, whose last axis is read side by side; `threads` says by how many lanes, as a hint."""
    return locate_access(place, (), None).load()


@takes_memrefs
def load_strided(place: Any, stride: int, axis: int = -1) -> Tensor:
    """Every `stride`-th element along an axis of a block, from its first on.

    Raises:
        ArgumentError: the stride is no positive constant.
    """
    if not isinstance(stride, int) or stride < 1:
        raise ArgumentError("a stride is a constant of at least 1", received=repr(stride))
    view = _as_view(place)
    at = axis % len(view.shape)
    places = iota(shape=(-(-view.shape[at] // stride),)) * stride
    return subscript_view(view, (*[slice(None)] * at, places)).load()


@takes_memrefs
def load_gather(place: Any, indices: Any, mask: Any = None, other: Any = None) -> Tensor:
    """The elements (of a matrix: the rows) that a block of indices names; `other` where the mask is false."""
    return subscript_view(_as_view(place), (load_if_memref(indices),)).load(load_if_memref(mask), load_if_memref(other))


@takes_memrefs
def load_broadcast(place: Any) -> Tensor:
    """What lies at a place, read once for all that use it."""
    return locate_access(place, (), None).load()


def _as_view(place: Any) -> MemRefView:
    found = locate_access(place, (), None)
    if not isinstance(found, MemRefView) or not found.shape:
        raise ShapeError("this load reads from a tensor or part of one", expected="at least one axis",
                         received=repr(place))  # fmt: skip
    return found

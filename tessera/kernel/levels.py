"""`tile.split` by level: a tensor walked in parts that fit a cache, which are walked in parts that fit the next."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tessera.errors import ArgumentError, ShapeError
from tessera.kernel.marks import takes_places
from tessera.kernel.place import View
from tessera.kernel.ranges import Range
from tessera.kernel.sorting import split as split_last
from tessera.kernel.trace import Index, plus
from tessera.kernel.transfer import locate
from tessera.shapes.rules import show

# The bytes of a part: what usually fits beside its neighbours in a share of that memory.
LEVELS = {"L2": 1 << 18, "L1": 1 << 14, "register": 1 << 8}


@takes_places
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
    if level not in (None, *LEVELS):
        raise ArgumentError(f'"{level}" is not a level', expected=", ".join(LEVELS))
    view = locate(x, (), None)
    if not isinstance(view, View):
        raise ArgumentError("only a part of memory is split by level", received=repr(x))
    whole = view.shape
    part = tuple(shape) if shape is not None else part_shape(whole, view.dtype.bits, LEVELS[str(level)])
    if len(part) != len(whole) or any(p < 1 or n % p for n, p in zip(whole, part, strict=True)):
        raise ShapeError(f"parts of shape {show(part)} do not make up {show(whole)}", expected="divisors of each size")
    counts = [n // p for n, p in zip(whole, part, strict=True)]
    return Range(0, math.prod(counts), 1, lambda i: _part(view, part, counts, i))


def part_shape(whole: Sequence[int], bits: int, budget: int) -> tuple[int, ...]:
    """The shape of the parts that fit in so many bytes.

    >>> part_shape((512, 768), 32, 1 << 14)
    (64, 48)
    """
    sizes = list(whole)
    while math.prod(sizes) * bits > budget * 8 and max(sizes) > 1:
        axis = sizes.index(max(sizes))
        sizes[axis] //= next(p for p in range(2, sizes[axis] + 1) if sizes[axis] % p == 0)
    return tuple(sizes)


def _part(view: View, part: Sequence[int], counts: Sequence[int], number: Any) -> View:
    """The part of a view with this number, in row-major order."""
    kept = [axis for axis in range(len(view.sizes)) if axis not in view.dropped]
    starts, sizes = list(view.starts), list(view.sizes)
    for place, axis in enumerate(kept):
        below = math.prod(counts[place + 1 :])
        along: Index = number if below == 1 else number // below
        along = along % counts[place] if place and counts[place] > 1 else along if counts[place] > 1 else 0
        starts[axis] = plus(starts[axis], along * part[place] if counts[place] > 1 else 0)
        sizes[axis] = part[place]
    return View(view.memory, tuple(starts), tuple(sizes), view.dropped)

"""Ranges: what a `for` iterates over while the kernel runs, and ranges unrolled while compiling."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tessera.core.errors import ArgumentError, UnsupportedSyntaxError
from tessera.frontend.kernel.memref import load_if_memref
from tessera.frontend.kernel.trace import Index, add_indices, is_traced
from tessera.ir.tensor import Tensor


@dataclass(frozen=True)
class TileRange:
    """From `lower` to before `upper` by `step`; `wrap` makes what the loop variable is of the number."""

    lower: Index
    upper: Index
    step: Index = 1
    wrap: Callable[[Any], Any] = lambda i: i

    def static(self) -> list[Any]:
        """The numbers, where they are known while compiling.

        Raises:
            UnsupportedSyntaxError: they are not.
        """
        bounds = (self.lower, self.upper, self.step)
        if any(is_traced(b) for b in bounds):
            raise UnsupportedSyntaxError(
                "this needs a range known while compiling", suggestion="use a for loop over the range"
            )
        return [self.wrap(i) for i in range(*bounds)]  # type: ignore[arg-type]

    def __iter__(self) -> Any:
        return iter(self.static())

    def __reversed__(self) -> Any:
        """The same numbers, the last one first: they are known while compiling, or one apart."""
        if not any(is_traced(b) for b in (self.lower, self.upper, self.step)):
            numbers = range(self.lower, self.upper, self.step)[::-1]  # type: ignore[arg-type]
            return TileRange(numbers.start, numbers.stop, numbers.step, self.wrap)
        if is_traced(self.step) or self.step != 1:
            raise UnsupportedSyntaxError(
                "a range with a step is reversed where its bounds are known",
                suggestion="count down: tile.range(last, first - 1, -step)",
            )
        return TileRange(self.upper - 1, self.lower - 1, -1, self.wrap)  # type: ignore[operator]

    def __len__(self) -> int:
        return len(self.static())


def cdiv(x: Any, y: Any) -> Any:
    """`x / y` rounded up: the number of blocks of `y` elements that cover `x`; of integers, in kernels and outside.

    >>> cdiv(1000, 128)
    8
    """
    return (load_if_memref(x) + (y - 1)) // y


@dataclass(frozen=True)
class BlockIndex:
    """The number of a block along an axis, and how many elements a block has."""

    index: Index
    size: int

    @property
    def start(self) -> Index:
        """The first element of the block."""
        return self.index * self.size  # type: ignore[operator,return-value]


def tile_range(*bounds: Any) -> TileRange:
    """range(stop), range(start, stop) or range(start, stop, step), walked while the kernel runs."""
    found = [load_if_memref(b) for b in bounds]
    for bound in found:
        if isinstance(bound, float) or (isinstance(bound, Tensor) and (bound.ndim or not bound.dtype.is_integer)):
            raise ArgumentError(
                "the bounds of a range are not integer scalars",
                received=str(bound.type) if isinstance(bound, Tensor) else repr(bound),
            )
    if not 1 <= len(found) <= 3:
        raise ArgumentError(f"a range takes 1 to 3 bounds, not {len(found)}")
    lower, upper, step = (0, *found, 1) if len(found) == 1 else (*found, 1)[:3]
    if not is_traced(step) and step == 0:
        raise ArgumentError("the step of a range is 0")
    return TileRange(lower, upper, step)


def range_n(shape: Any, size: int, *, axis: int = -2, prefetch: int = 0) -> TileRange:
    """The blocks of `size` elements along an axis of a shape (the rows), or of that many elements.

    `prefetch` is a hint: how many blocks to load ahead.
    """
    total = shape if not isinstance(shape, (tuple, list)) else shape[axis] if len(shape) > 1 else shape[0]
    return TileRange(0, add_indices(total, size - 1) // size, 1, lambda i: BlockIndex(i, size))  # type: ignore[operator]


def static_range(*bounds: int) -> range:
    """A range unrolled while compiling."""
    return range(*bounds)

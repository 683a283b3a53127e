"""Block layouts: the access of a tile as one rectangular block of memory, if it is one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tessera.lower.affine import IndexDigit, IndexExpr


@dataclass(frozen=True)
class LayoutMode:
    """(t // divisor) % size for the place t in a dim's tile, which takes `size` values along an axis of memory."""

    axis: int
    dim: int
    divisor: int
    size: int


@dataclass(frozen=True)
class BlockLayout:
    """A block of memory as parts: for each axis from the outermost to the innermost."""

    axes: tuple[tuple[LayoutMode, ...], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the block in memory."""
        return tuple(math.prod(p.size for p in parts) for parts in self.axes)

    @property
    def parts(self) -> tuple[LayoutMode, ...]:
        """All parts in the order of memory."""
        return tuple(p for parts in self.axes for p in parts)

    @property
    def dims(self) -> tuple[int, ...]:
        """The dims whose tiles the block spans, in order."""
        return tuple(sorted({p.dim for p in self.parts}))

    def order(self) -> tuple[int, ...]:
        """How to permute the parts so that dims come in order, the high digits of each first."""
        parts = self.parts
        return tuple(sorted(range(len(parts)), key=lambda i: (parts[i].dim, -parts[i].divisor)))


def find_block_layout(exprs: Sequence[IndexExpr], tile: Sequence[int]) -> BlockLayout | None:
    """The block that indices reach in one tile; None where it is not one."""
    axes = []
    for axis, expr in enumerate(exprs):
        parts = _find_axis_modes(axis, expr, tile)
        if parts is None:
            return None
        axes.append(parts)
    found = BlockLayout(tuple(axes))
    return found if all(_covers_dim(found, d, tile[d]) for d in found.dims) else None


def _find_axis_modes(axis: int, expr: IndexExpr, tile: Sequence[int]) -> tuple[LayoutMode, ...] | None:
    """The parts that make up one axis, if they follow each other without gap."""
    strides: dict[LayoutMode, int] = {}
    for atom, stride in expr.terms:
        size = find_digit_span(atom, tile) if isinstance(atom, IndexDigit) else _find_opaque_span(atom.dims, tile)
        if not size:
            return None
        if size > 1:
            assert isinstance(atom, IndexDigit)
            strides[LayoutMode(axis, atom.dim, atom.divisor, size)] = stride
    parts = sorted(strides, key=strides.__getitem__)
    expected = 1
    for part in parts:
        if strides[part] != expected:
            return None
        expected *= part.size
    return tuple(reversed(parts))


def _find_opaque_span(dims: Iterable[int], tile: Sequence[int]) -> int:
    """One value in the whole tile, or (0) no regular ones."""
    return 1 if all(tile[d] == 1 for d in dims) else 0


def find_digit_span(digit: IndexDigit, tile: Sequence[int]) -> int:
    """How many values a digit takes in a tile, beginning at that of the tile's first index; 0 where not regular."""
    size = tile[digit.dim]
    if digit.divisor % size == 0:
        return 1
    if size % digit.divisor:
        return 0
    inner = size // digit.divisor
    if not digit.modulus or digit.modulus % inner == 0:
        return inner
    return digit.modulus if inner % digit.modulus == 0 else 0


def _covers_dim(found: BlockLayout, dim: int, size: int) -> bool:
    """Whether the parts of a dim are all its digits, each once."""
    expected = 1
    for part in sorted((p for p in found.parts if p.dim == dim), key=lambda p: p.divisor):
        if part.divisor != expected:
            return False
        expected *= part.size
    return expected == size

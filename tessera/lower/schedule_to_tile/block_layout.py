"""Block layouts: the access of a tile as one rectangular block of memory, if it is one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tessera.lower.affine import IndexDigit, IndexExpr


@dataclass(frozen=True)
class LayoutMode:
    """A mode: (t // divisor) % size for the index t in a dim's tile; it has `size` values along an axis of memory."""

    axis: int
    dim: int
    divisor: int
    size: int


@dataclass(frozen=True)
class BlockLayout:
    """A block of memory: the modes of each axis, from the outermost to the innermost."""

    axes: tuple[tuple[LayoutMode, ...], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the block in memory."""
        return tuple(math.prod(p.size for p in parts) for parts in self.axes)

    @property
    def parts(self) -> tuple[LayoutMode, ...]:
        """All modes in memory order."""
        return tuple(p for parts in self.axes for p in parts)

    @property
    def dims(self) -> tuple[int, ...]:
        """The dims whose tiles the block spans, in order."""
        return tuple(sorted({p.dim for p in self.parts}))

    def order(self) -> tuple[int, ...]:
        """The permutation of the modes that sorts them by dim, the high digits of each first."""
        parts = self.parts
        return tuple(sorted(range(len(parts)), key=lambda i: (parts[i].dim, -parts[i].divisor)))


def find_block_layout(exprs: Sequence[IndexExpr], tile: Sequence[int]) -> BlockLayout | None:
    """The block that indices cover in one tile; None where it is not rectangular."""
    axes = []
    for axis, expr in enumerate(exprs):
        parts = _find_axis_modes(axis, expr, tile)
        if parts is None:
            return None
        axes.append(parts)
    found = BlockLayout(tuple(axes))
    return found if all(_covers_dim(found, d, tile[d]) for d in found.dims) else None


def _find_axis_modes(axis: int, expr: IndexExpr, tile: Sequence[int]) -> tuple[LayoutMode, ...] | None:
    """The modes of one axis, if they are contiguous."""
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
    """1 where the index is uniform in the tile; 0 where it is irregular."""
    return 1 if all(tile[d] == 1 for d in dims) else 0


def find_digit_span(digit: IndexDigit, tile: Sequence[int]) -> int:
    """How many consecutive values a digit has in a tile; 0 where it is irregular."""
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
    """Whether the modes of a dim cover all its digits, each once."""
    expected = 1
    for part in sorted((p for p in found.parts if p.dim == dim), key=lambda p: p.divisor):
        if part.divisor != expected:
            return False
        expected *= part.size
    return expected == size

"""Layouts: which thread of a team holds which elements of a block, and in which of its registers.

A block's sizes are rounded up to powers of two; an element's place along each axis is then a number of bits, and
a layout says for each of those bits what gives it: a bit of the register's number, or a bit of the thread's. A bit
of the thread's number that gives nothing (None) means that both threads hold the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

Bit = tuple[int, int]  # an axis, and which bit of the place along it
Sizes = tuple[int, ...]


def width(n: int) -> int:
    """The bits that count to `n`.

    >>> width(1), width(8), width(9)
    (0, 3, 4)
    """
    return max(n - 1, 0).bit_length()


@dataclass(frozen=True)
class Layout:
    """The places of a block of `shape`: what each bit of a register's and of a thread's number stands for."""

    shape: Sizes
    registers: tuple[Bit, ...]
    threads: tuple[Bit | None, ...]

    def __str__(self) -> str:
        def show(bits: Sequence[Bit | None]) -> str:
            return " ".join("-" if b is None else f"{b[0]}.{b[1]}" for b in bits)

        return f"{'x'.join(map(str, self.shape))} registers [{show(self.registers)}] threads [{show(self.threads)}]"

    @property
    def count(self) -> int:
        """The registers that each thread holds."""
        return 1 << len(self.registers)

    @cached_property
    def offsets(self) -> tuple[Sizes, ...]:
        """For each register, its place relative to the thread's first one."""
        found = []
        for number in range(self.count):
            place = [0] * len(self.shape)
            for i, (axis, position) in enumerate(self.registers):
                place[axis] += (number >> i & 1) << position
            found.append(tuple(place))
        return tuple(found)

    @cached_property
    def index(self) -> Mapping[Sizes, int]:
        """The register at each relative place."""
        return {place: i for i, place in enumerate(self.offsets)}

    @property
    def spare(self) -> tuple[int, ...]:
        """The bits of the thread's number that give nothing: threads that differ only there hold the same."""
        return tuple(i for i, bit in enumerate(self.threads) if bit is None)

    def padded(self, axis: int) -> bool:
        """Whether some places along an axis lie past the block's end."""
        return 1 << width(self.shape[axis]) != self.shape[axis]

    def span(self, axis: int) -> int:
        """The greatest place that a thread's number gives along an axis."""
        return sum(1 << bit[1] for bit in self.threads if bit is not None and bit[0] == axis)

    def renamed(self, shape: Sizes, names: Mapping[Bit, Bit]) -> Layout:
        """The layout of a block of another shape whose bits are these, named anew; those without a name are dropped."""
        registers = tuple(names[bit] for bit in self.registers if bit in names)
        return Layout(shape, registers, tuple(names.get(bit) if bit is not None else None for bit in self.threads))

    def permuted(self, axes: Sequence[int]) -> Layout:
        """The layout of the block with its axes in another order."""
        names = {(old, p): (new, p) for new, old in enumerate(axes) for p in range(width(self.shape[old]))}
        return self.renamed(tuple(self.shape[a] for a in axes), names)

    def reduced(self, axes: Sequence[int], keep: bool) -> Layout:
        """The layout of what is left when axes are combined: every thread along them holds the result."""
        rest = [a for a in range(len(self.shape)) if a not in axes]
        shape = tuple(1 if a in axes else n for a, n in enumerate(self.shape) if keep or a not in axes)
        names = {
            (a, p): (a if keep else rest.index(a), p) for a in rest for p in range(width(self.shape[a]))
        }  # fmt: skip
        return self.renamed(shape, names)

    def source(self, shape: Sizes) -> Layout:
        """The layout of a block of `shape` that is broadcast to this one with nothing to move."""
        missing = len(self.shape) - len(shape)
        names = {
            (axis + missing, p): (axis, p)
            for axis, n in enumerate(shape)
            for p in range(width(n))
            if n == self.shape[axis + missing]
        }
        return self.renamed(shape, names)

    def reshaped(self, shape: Sizes) -> Layout | None:
        """The layout in another shape with nothing to move; None if sizes that are no powers of two forbid it."""
        names = same_bits(self.shape, shape)
        return None if names is None else self.renamed(shape, names)


def same_bits(here: Sizes, there: Sizes) -> dict[Bit, Bit] | None:
    """What each bit of a place in one shape is called in another shape of as many elements, in row-major order.

    >>> same_bits((4, 2), (8,))
    {(1, 0): (0, 0), (0, 0): (0, 1), (0, 1): (0, 2)}
    >>> same_bits((6, 2), (12,)) is None
    True
    """
    found: dict[Bit, Bit] = {}
    for ours, theirs in _groups(here, there):
        even = all(1 << width(n) == n for n in (*(here[a] for a in ours), *(there[a] for a in theirs)))
        if not even and [here[a] for a in ours] != [there[a] for a in theirs]:
            return None
        found.update(zip(_bits(ours, here), _bits(theirs, there), strict=True))
    return found


def _bits(axes: Sequence[int], shape: Sizes) -> list[Bit]:
    """The bits of some axes, the fastest first."""
    return [(a, p) for a in reversed(axes) for p in range(width(shape[a]))]


def _groups(here: Sizes, there: Sizes) -> list[tuple[list[int], list[int]]]:
    """The axes of two shapes in the least groups of as many elements; axes of size 1 have no bits and are left out."""
    ours, theirs = ([a for a, n in enumerate(shape) if n != 1] for shape in (here, there))
    found = []
    while ours or theirs:
        left, right = [ours.pop(0)], [theirs.pop(0)]
        sizes = [here[left[0]], there[right[0]]]
        while sizes[0] != sizes[1]:
            if sizes[0] < sizes[1]:
                left.append(ours.pop(0))
                sizes[0] *= here[left[-1]]
            else:
                right.append(theirs.pop(0))
                sizes[1] *= there[right[-1]]
        found.append((left, right))
    return found


def spread(shape: Sizes, threads: int, vector: int) -> Layout:
    """The plain layout: neighbours along the last axes in a thread's registers, up to `vector`, then across threads.

    >>> print(spread((4, 8), 8, 4))
    4x8 registers [1.0 1.1] threads [1.2 0.0 0.1]
    """
    bits = [(a, p) for a in reversed(range(len(shape))) for p in range(width(shape[a]))]
    lanes = width(threads)
    inner = min(width(vector), max(0, len(bits) - lanes), width(shape[-1]) if shape else 0)
    across = bits[inner : inner + lanes]
    held = (*bits[:inner], *bits[inner + lanes :])
    return Layout(shape, held, (*across, *(None,) * (lanes - len(across))))

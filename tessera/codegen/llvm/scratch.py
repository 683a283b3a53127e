"""The scratch arena of one program: buffers, their layout, and where each lies once lifetimes are known."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from tessera.codegen.llvm.text import Text
from tessera.codegen.llvm.types import size
from tessera.types import DType

ALIGN = 64


@dataclass(eq=False)
class Buffer:
    """Room in the arena, from the first time it is touched to the last."""

    name: str
    bytes: int
    touched: list[int] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class Memory:
    """Where elements lie: a pointer, and for each axis its size and its stride in elements."""

    dtype: DType
    base: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    buffer: Buffer | None = None
    trusted: bool = True  # whether every index that comes is known to be inside

    def at(self, base: str, strides: tuple[int, ...], shape: tuple[int, ...]) -> Memory:
        """Part of this memory, seen with other strides."""
        return Memory(self.dtype, base, shape, strides, self.buffer)


class Scratch:
    """The buffers of one kernel."""

    def __init__(self, text: Text) -> None:
        self.text = text
        self.buffers: list[Buffer] = []

    def block(self, dtype: DType, shape: Sequence[int], width: int) -> Memory:
        """A buffer for a block: rows padded so that whole vectors fit."""
        return self.memory(dtype, shape, padded(shape, width))

    def memory(self, dtype: DType, shape: Sequence[int], strides: tuple[int, ...]) -> Memory:
        """A buffer with these strides."""
        count = max((n * s for n, s in zip(shape, strides, strict=True)), default=1) or 1
        buffer = self.room(max(count, 1) * size(dtype))
        return Memory(dtype, buffer.name, tuple(shape), strides, buffer)

    def room(self, count: int) -> Buffer:
        """A buffer of `count` bytes."""
        buffer = Buffer(f"%buf{len(self.buffers)}", math.ceil(count / ALIGN) * ALIGN)
        self.buffers.append(buffer)
        return buffer

    def touch(self, memory: Memory) -> None:
        """Note that a memory is used here."""
        if memory.buffer is not None:
            memory.buffer.touched.append(self.text.clock)

    def place(self) -> tuple[int, list[tuple[str, int]]]:
        """The size of the arena, and each buffer's offset in it; those never alive together share."""
        placed: list[tuple[int, int, int, int]] = []  # first, last, offset, end
        offsets = []
        used = [b for b in self.buffers if b.touched]
        for buffer in sorted(used, key=lambda b: -b.bytes):
            first, last = self._life(buffer)
            taken = sorted((o, e) for f, t, o, e in placed if f <= last and first <= t)
            offset = _gap(taken, buffer.bytes)
            placed.append((first, last, offset, offset + buffer.bytes))
            offsets.append((buffer.name, offset))
        return max((e for *_, e in placed), default=0), offsets

    def _life(self, buffer: Buffer) -> tuple[int, int]:
        """From the first touch to the last; what a loop found alive it needs in every round."""
        first, last = min(buffer.touched), max(buffer.touched)
        for begin, end in self.text.loops:  # inner loops come before outer ones
            if first < begin and any(begin <= t <= end for t in buffer.touched):
                last = max(last, end)
        return first, last


def _gap(taken: list[tuple[int, int]], room: int) -> int:
    at = 0
    for offset, end in taken:
        if offset - at >= room:
            break
        at = max(at, end)
    return at


def padded(shape: Sequence[int], width: int) -> tuple[int, ...]:
    """Row-major strides with the last axis that is not 1 padded to whole vectors."""
    inner = max((a for a, n in enumerate(shape) if n != 1), default=-1)
    strides, step = [0] * len(shape), 1
    for axis in reversed(range(len(shape))):
        strides[axis] = step
        n = shape[axis]
        step *= math.ceil(n / fit(width, n)) * fit(width, n) if axis == inner else n
    return tuple(strides)


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of an array without padding."""
    return tuple(math.prod(shape[a + 1 :]) for a in range(len(shape)))


def fit(width: int, count: int) -> int:
    """The vector width for `count` elements: no wider than needed."""
    return min(width, 1 << max(0, count - 1).bit_length())

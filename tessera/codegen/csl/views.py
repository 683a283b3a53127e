"""Where values lie in an element's memory: arrays, and views of them that cost nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tessera.codegen.small_floats import FORMS
from tessera.types import TensorType, bf16, bool_, f16, f32, int4, int8, int16, int32, int64, uint8

# How element types are spelled; `half` is the 16-bit float that the program is compiled for. Shorter integers are
# held in 16, as are the codes of shorter floats, and int64 that only counts places is a plain number or of 32 bits.
SPELLING = {f32: "f32", f16: "f16", bf16: "half", int32: "i32", int64: "i64", **dict.fromkeys(
    (int16, int8, uint8, int4, bool_, *FORMS), "i16")}  # fmt: skip
FLOATS = ("f32", "f16", "half")
BYTES = {"f32": 4, "f16": 2, "half": 2, "i32": 4, "i16": 2, "i64": 8}


@dataclass(eq=False)
class Buffer:
    """A global array of the program."""

    name: str
    type: str
    size: int

    @property
    def bytes(self) -> int:
        """What it takes of the memory."""
        return max(self.size, 1) * BYTES[self.type]

    @property
    def words(self) -> str:
        """The name of a pointer to its words, which an array of 64 bits has."""
        return f"{self.name}_words"


@dataclass(frozen=True)
class View:
    """Elements of an array: `offset` and, for each axis, a stride; or, with `literal`, one value everywhere.

    `onward` is a text for how many elements further on it begins, which only a run knows.
    """

    type: str
    shape: tuple[int, ...]
    buffer: Buffer | None = None
    offset: int = 0
    strides: tuple[int, ...] = ()
    literal: str = ""
    onward: str = ""

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def contiguous(self) -> bool:
        """Whether the elements lie one after another, in order."""
        return self.buffer is not None and self.moved_strides() == row_major(self.shape)

    def moved_strides(self) -> tuple[int, ...]:
        """The strides as row-major ones have them on axes of size 1, where they do not matter."""
        plain = row_major(self.shape)
        return tuple(p if n == 1 else s for n, s, p in zip(self.shape, self.strides, plain, strict=True))

    def at(self, indices: Sequence[str]) -> str:
        """The element at indices (texts), as an expression."""
        if self.literal:
            return self.literal
        assert self.buffer is not None
        terms = [f"{i} * {s}" if s != 1 else i for i, s in zip(indices, self.strides, strict=True) if s]
        terms += [self.onward] if self.onward else []
        if self.offset or not terms:
            terms.append(str(self.offset))
        return f"{self.buffer.name}[{' + '.join(terms)}]"

    def reshaped(self, shape: tuple[int, ...]) -> View | None:
        """The same elements with another shape, if no copy is needed."""
        if self.literal:
            return replace(self, shape=shape)
        if [n for n in shape if n != 1] == [n for n in self.shape if n != 1]:
            held = iter(s for n, s in zip(self.shape, self.strides, strict=True) if n != 1)
            return replace(self, shape=shape, strides=tuple(next(held) if n != 1 else 0 for n in shape))
        return replace(self, shape=shape, strides=row_major(shape)) if self.contiguous else None

    def permuted(self, axes: Sequence[int]) -> View:
        """The axes in another order."""
        strides = () if self.literal else tuple(self.strides[a] for a in axes)
        return replace(self, shape=tuple(self.shape[a] for a in axes), strides=strides)

    def repeated(self, shape: tuple[int, ...]) -> View:
        """Axes of size 1 repeated, and new ones in front."""
        if self.literal:
            return replace(self, shape=shape)
        extra = len(shape) - len(self.shape)
        kept = (s if n == m else 0 for n, s, m in zip(self.shape, self.strides, shape[extra:], strict=True))
        return replace(self, shape=shape, strides=((0,) * extra + tuple(kept)))


def spelled(type: TensorType) -> str:
    """How a tensor's element type is spelled."""
    return SPELLING[type.dtype]


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of elements that lie one after another."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def merged(views: Sequence[View]) -> tuple[tuple[int, ...], list[View]]:
    """The fewest axes over which all of some views of one shape can be walked, and the views over these."""
    shape = views[0].shape
    axes = [a for a, n in enumerate(shape) if n != 1]
    level = [v if v.literal else replace(v, strides=tuple(v.strides[a] for a in axes)) for v in views]
    sizes = [shape[a] for a in axes]
    groups = list(_groups(level, sizes))
    joined = tuple(math.prod(sizes[a] for a in group) for group in groups)
    return joined, [
        replace(v, shape=joined, strides=() if v.literal else tuple(v.strides[g[-1]] for g in groups)) for v in level
    ]


def _groups(views: Sequence[View], sizes: Sequence[int]) -> Iterator[list[int]]:
    """Neighbouring axes that every view walks as one."""
    group: list[int] = []
    for axis, _ in enumerate(sizes):
        if group and not all(v.literal or _even(v, axis, sizes) for v in views):
            yield group
            group = []
        group.append(axis)
    if group:
        yield group


def _even(view: View, axis: int, sizes: Sequence[int]) -> bool:
    return view.strides[axis - 1] == view.strides[axis] * sizes[axis]

"""Data structure descriptors (DSDs, Cerebras SDK): arrays in the memory of a processing element, strided views of them,
and the text of their DSDs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tessera.core.types import (
    TensorType,
    bf16,
    bool_,
    f16,
    f32,
    int4,
    int8,
    int16,
    int32,
    int64,
    uint8,
    uint16,
    uint32,
    uint64,
)
from tessera.lower.scalar_functions.small_floats import SMALL_FLOAT_FORMATS

# CSL names of element types; `half` is the program's 16-bit float type. Integers and floats of fewer than 16 bits are
# stored in 16 bits. An int64 that is only an index is a literal or has 32 bits.
CSL_TYPES = {
    f32: "f32", f16: "f16", bf16: "half", int32: "i32", int64: "i64", uint16: "u16", uint32: "u32", uint64: "u64",
    **dict.fromkeys((int16, int8, uint8, int4, bool_, *SMALL_FLOAT_FORMATS), "i16"),
}  # fmt: skip
FLOAT_TYPES = ("f32", "f16", "half")
LONG_TYPES = ("i64", "u64")  # of two words, for which CSL has no DSD operations
TYPE_BYTES = {"f32": 4, "f16": 2, "half": 2, "i32": 4, "i16": 2, "i64": 8, "u32": 4, "u16": 2, "u64": 8}


@dataclass(eq=False)
class PeArray:
    """A global array of the program."""

    name: str
    type: str
    size: int

    @property
    def bytes(self) -> int:
        """The size in bytes."""
        return max(self.size, 1) * TYPE_BYTES[self.type]

    @property
    def words(self) -> str:
        """The name of a pointer to the 32-bit words of an array of 64-bit elements."""
        return f"{self.name}_words"


@dataclass(frozen=True)
class PeArrayView:
    """A strided view of an array, or, with `literal`, a scalar broadcast to a shape.

    `dynamic_offset` is an expression for an additional offset in elements that is known only at run time.
    """

    type: str
    shape: tuple[int, ...]
    buffer: PeArray | None = None
    offset: int = 0
    strides: tuple[int, ...] = ()
    literal: str = ""
    dynamic_offset: str = ""

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def contiguous(self) -> bool:
        """Whether the elements are contiguous in row-major order."""
        return self.buffer is not None and self.normalise_strides() == make_row_major_strides(self.shape)

    def normalise_strides(self) -> tuple[int, ...]:
        """The strides with row-major values on axes of size 1, where strides do not matter."""
        row_major = make_row_major_strides(self.shape)
        return tuple(p if n == 1 else s for n, s, p in zip(self.shape, self.strides, row_major, strict=True))

    def at(self, indices: Sequence[str]) -> str:
        """The element at indices, as an expression."""
        if self.literal:
            return self.literal
        assert self.buffer is not None
        terms = [f"{i} * {s}" if s != 1 else i for i, s in zip(indices, self.strides, strict=True) if s]
        terms += [self.dynamic_offset] if self.dynamic_offset else []
        if self.offset or not terms:
            terms.append(str(self.offset))
        return f"{self.buffer.name}[{' + '.join(terms)}]"

    def reshape_view(self, shape: tuple[int, ...]) -> PeArrayView | None:
        """The view with another shape, or None if that needs a copy."""
        if self.literal:
            return replace(self, shape=shape)
        if [n for n in shape if n != 1] == [n for n in self.shape if n != 1]:
            strides = iter(s for n, s in zip(self.shape, self.strides, strict=True) if n != 1)
            return replace(self, shape=shape, strides=tuple(next(strides) if n != 1 else 0 for n in shape))
        return replace(self, shape=shape, strides=make_row_major_strides(shape)) if self.contiguous else None

    def permute_axes(self, axes: Sequence[int]) -> PeArrayView:
        """The view with permuted axes."""
        strides = () if self.literal else tuple(self.strides[a] for a in axes)
        return replace(self, shape=tuple(self.shape[a] for a in axes), strides=strides)

    def broadcast_axes(self, shape: tuple[int, ...]) -> PeArrayView:
        """The view broadcast to a shape."""
        if self.literal:
            return replace(self, shape=shape)
        extra = len(shape) - len(self.shape)
        kept = (s if n == m else 0 for n, s, m in zip(self.shape, self.strides, shape[extra:], strict=True))
        return replace(self, shape=shape, strides=((0,) * extra + tuple(kept)))


def spell_type(type: TensorType) -> str:
    """The CSL name of a tensor's element type."""
    return CSL_TYPES[type.dtype]


def make_row_major_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous row-major array."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def coalesce_axes(views: Sequence[PeArrayView]) -> tuple[tuple[int, ...], list[PeArrayView]]:
    """Merge the axes of views of one shape as far as all views allow; returns the merged shape and views."""
    shape = views[0].shape
    axes = [a for a, n in enumerate(shape) if n != 1]
    level = [v if v.literal else replace(v, strides=tuple(v.strides[a] for a in axes)) for v in views]
    sizes = [shape[a] for a in axes]
    groups = list(_group_axes(level, sizes))
    joined = tuple(math.prod(sizes[a] for a in group) for group in groups)
    return joined, [
        replace(v, shape=joined, strides=() if v.literal else tuple(v.strides[g[-1]] for g in groups)) for v in level
    ]


def _group_axes(views: Sequence[PeArrayView], sizes: Sequence[int]) -> Iterator[list[int]]:
    """Groups of adjacent axes that every view can merge."""
    group: list[int] = []
    for axis, _ in enumerate(sizes):
        if group and not all(v.literal or _is_contiguous_pair(v, axis, sizes) for v in views):
            yield group
            group = []
        group.append(axis)
    if group:
        yield group


def _is_contiguous_pair(view: PeArrayView, axis: int, sizes: Sequence[int]) -> bool:
    return view.strides[axis - 1] == view.strides[axis] * sizes[axis]


# DSDs of views.

# The largest stride of a mem1d DSD, and the rank of a mem4d DSD.
MAX_DSD_STRIDE, MAX_DSD_RANK = 127, 4
DSD_AXIS_NAMES = ("i", "j", "k", "l")


def offset_element(text: str, steps: str) -> str:
    """An array element moved by an offset."""
    name, bracket, index = text.partition("[")
    return f"{name}[@as(i16, {steps}) + {index}" if bracket and steps else text


MOVE_BUILTINS = {"f32": "@fmovs", "f16": "@fmovh", "i32": "@mov32", "i16": "@mov16", "half": "@mov16", "u32": "@mov32",
                 "u16": "@mov16"}  # fmt: skip


def find_move_builtin(target: PeArrayView, source: PeArrayView) -> str | None:
    """The DSD operation that copies a view; None where CSL has none, as for literals of the other 16-bit float type."""
    return None if target.type == "half" and source.literal else MOVE_BUILTINS.get(target.type)


def widen_index_literal(target: PeArrayView, source: PeArrayView) -> PeArrayView:
    """The source of a copy, with a literal index cast to 64 bits where the target has 64 bits."""
    counts = source.literal and target.type == "i64" and not source.literal.lstrip("-").isdigit()
    return replace(source, literal=f"@as(i64, {source.literal})") if counts else source


def count_elements(shape: Sequence[int]) -> int:
    """The number of elements."""
    size = 1
    for n in shape:
        size *= int(n)
    return size


def format_dsd(view: PeArrayView, shape: tuple[int, ...]) -> str | None:
    """The memory DSD of a view, or the value of a literal; None if no DSD can describe the view."""
    if view.literal:
        return view.literal
    assert view.buffer is not None
    if len(shape) > MAX_DSD_RANK:
        return None
    sizes, strides = (shape, view.strides) if shape else ((1,), (1,))
    kind = "mem1d_dsd" if len(sizes) == 1 and abs(strides[0]) <= MAX_DSD_STRIDE else "mem4d_dsd"
    names = DSD_AXIS_NAMES[: len(sizes)]
    place = replace_axes(view, sizes, strides).at(names)
    return f"@get_dsd({kind}, .{{ .tensor_access = |{', '.join(names)}|{{{', '.join(map(str, sizes))}}} -> {place} }})"


def replace_axes(view: PeArrayView, sizes: tuple[int, ...], strides: tuple[int, ...]) -> PeArrayView:
    """The view with other axes."""
    return replace(view, shape=sizes, strides=strides if view.buffer else ())

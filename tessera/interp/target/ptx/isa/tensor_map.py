"""Tensor maps (TMA descriptors): the box of a tensor to copy, as an object and as the 128 bytes in memory."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

import numpy as np

from tessera.core.errors import ArgumentError

# The 128 bytes: field, struct format, and count. (The hardware's layout is not documented.)
_LAYOUT = (
    ("magic", "8s", 1), ("address", "Q", 1), ("sizes", "I", 5), ("strides", "Q", 4), ("box", "H", 5), ("steps", "B", 5),
    ("rank", "B", 1), ("type", "B", 1), ("itemsize", "B", 1), ("swizzle", "B", 1), ("fill", "B", 1),
)  # fmt: skip
_FORMAT = "<" + "".join(letter * count for _, letter, count in _LAYOUT)
MAGIC = b"TESSERA1"
SWIZZLES = (0, 32, 64, 128)
TYPE_NAMES = ("u8", "u16", "u32", "s32", "u64", "s64", "f16", "f32", "f64", "bf16")
# The NaN that fills out-of-bounds elements, as measured on an H200.
OUT_OF_BOUNDS_NAN = {"f16": 0x7FF7, "bf16": 0x7FF7, "f32": 0x7FF77FF7, "f64": 0x7FF77FF77FF77FF7}


def find_field(name: str, index: int = 0) -> tuple[int, str]:
    """The offset and struct format of an entry of a field.

    >>> find_field("sizes", 1)
    (20, '<I')
    """
    offset = 0
    for field_name, letter, count in _LAYOUT:
        if field_name == name:
            return offset + index * struct.calcsize("<" + letter), "<" + letter
        offset += struct.calcsize("<" + letter) * count
    raise KeyError(name)


def _find_element_type(dtype: np.dtype) -> str:
    """The element type of a map for an array; other dtypes are unsigned integers of their size."""
    name = {"float16": "f16", "float32": "f32", "float64": "f64", "bfloat16": "bf16"}.get(dtype.name)
    name = name or {"int32": "s32", "int64": "s64"}.get(dtype.name, f"u{8 * dtype.itemsize}")
    if name not in TYPE_NAMES:
        raise ArgumentError("a tensor map has elements of 1, 2, 4 or 8 bytes", received=dtype)
    return name


@dataclass(frozen=True)
class TensorMap:
    """A tensor map argument: boxes of a row-major array, copied to and from shared memory.

    `box` has an extent for each dimension, in the order of the array's shape (outermost first); `swizzle` is 0, 32, 64
    or 128 bytes; out-of-bounds elements read as zero, or as NaN with `nan_fill`. `shape` and `strides` (extents, and
    byte strides of all dimensions but the last) describe a view of the array's memory; `element_strides` are those of
    the driver's call. In PTX, coordinates are innermost first.

    Raises:
        ArgumentError: the hardware does not support the map.

    >>> TensorMap(np.zeros((64, 64), np.float16), box=(8, 64), swizzle=128).box
    (8, 64)
    """

    array: np.ndarray
    box: tuple[int, ...]
    swizzle: int = 0
    nan_fill: bool = False
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    element_strides: tuple[int, ...] = field(default=())

    def __post_init__(self) -> None:
        shape = self.shape or self.array.shape
        if not self.array.flags.c_contiguous:
            raise ArgumentError("a tensor map needs a C-contiguous array")
        if not 1 <= len(shape) <= 5 or len(self.box) != len(shape):
            raise ArgumentError(
                "a box has an extent for each of one to five dimensions", expected=shape, received=self.box
            )
        if self.swizzle not in SWIZZLES:
            raise ArgumentError("unknown swizzle", expected=SWIZZLES, received=self.swizzle)
        if any(not 1 <= b <= 256 for b in self.box):
            raise ArgumentError("a box has 1 to 256 elements a dimension", received=self.box)
        inner = self.box[-1] * self.array.itemsize
        if inner % 16 or (self.swizzle and inner > self.swizzle):
            raise ArgumentError(
                "the inner extent of a box is a multiple of 16 bytes, and no more than the swizzle", received=inner
            )
        if any(s % 16 for s in self._strides()):
            raise ArgumentError("the strides of a tensor map are multiples of 16 bytes", received=self._strides())

    def _strides(self) -> tuple[int, ...]:
        return self.strides or tuple(self.array.strides[:-1])

    def encode(self, address: int) -> bytes:
        """The 128 bytes, for an array at a generic address."""
        shape, rank = self.shape or self.array.shape, len(self.box)
        inner_first = [tuple(reversed(x)) for x in (shape, self._strides(), self.box)]
        sizes, strides, box = inner_first
        steps = tuple(reversed(self.element_strides)) or (1,) * rank
        packed = struct.pack(
            _FORMAT,
            MAGIC,
            address,
            *_pad_to_rank(sizes, 5, 1),
            *_pad_to_rank(strides, 4, 0),
            *_pad_to_rank(box, 5, 1),
            *_pad_to_rank(steps, 5, 1),
            rank,
            TYPE_NAMES.index(_find_element_type(self.array.dtype)),
            self.array.itemsize,
            self.swizzle,
            self.nan_fill,
        )
        return packed.ljust(128, b"\0")


def _pad_to_rank(x: tuple[int, ...], n: int, rest: int) -> tuple[int, ...]:
    return (*x, *(rest,) * (n - len(x)))


@dataclass(frozen=True)
class TensorMapBox:
    """A decoded map: extents innermost first, strides in bytes including the innermost."""

    address: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    steps: tuple[int, ...]
    type: str
    itemsize: int
    swizzle: int
    fill: int

    @property
    def counts(self) -> tuple[int, ...]:
        """The elements copied in each dimension: every n-th of a box with element strides."""
        return tuple(-(-b // s) for b, s in zip(self.box, self.steps, strict=True))

    @property
    def nbytes(self) -> int:
        """The bytes of a box."""
        return int(np.prod(self.counts)) * self.itemsize


def decode_tensor_map(content: bytes) -> TensorMapBox | None:
    """The map in 128 bytes, or None if they are not a tensor map.

    >>> decode_tensor_map(TensorMap(np.zeros((4, 8), np.float32), (2, 8)).encode(0)).strides
    (4, 32)
    """
    fields = struct.unpack_from(_FORMAT, content)
    if fields[0] != MAGIC:
        return None
    rank, code, itemsize, swizzle, nan = fields[21:]
    fill = OUT_OF_BOUNDS_NAN.get(TYPE_NAMES[code], 0) if nan else 0
    return TensorMapBox(
        fields[1],
        fields[2 : 2 + rank],
        (itemsize, *fields[7 : 7 + rank - 1]),
        fields[11 : 11 + rank],
        fields[16 : 16 + rank],
        TYPE_NAMES[code],
        itemsize,
        swizzle,
        fill,
    )

"""Tensor maps (TMA descriptors): the box of a tensor or the pixels of images to copy, as objects and as 128 bytes."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

import numpy as np

from tessera.core.errors import ArgumentError

# The 128 bytes: field, struct format, and count. (The hardware's layout is not documented.)
_LAYOUT = (
    ("magic", "8s", 1), ("address", "Q", 1), ("sizes", "I", 5), ("strides", "Q", 4), ("box", "H", 5), ("steps", "B", 5),
    ("rank", "B", 1), ("type", "B", 1), ("itemsize", "B", 1), ("swizzle", "B", 1), ("fill", "B", 1),
    ("image", "B", 1), ("lower", "h", 3), ("upper", "h", 3),
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
        if not 1 <= len(shape) <= 5 or len(self.box) != len(shape):
            raise ArgumentError(
                "a box has an extent for each of one to five dimensions", expected=shape, received=self.box
            )
        if any(not 1 <= b <= 256 for b in self.box):
            raise ArgumentError("a box has 1 to 256 elements a dimension", received=self.box)
        self._check_array()

    def _check_array(self) -> None:
        """Check what maps of boxes and of images share."""
        if not self.array.flags.c_contiguous:
            raise ArgumentError("a tensor map needs a C-contiguous array")
        if self.swizzle not in SWIZZLES:
            raise ArgumentError("unknown swizzle", expected=SWIZZLES, received=self.swizzle)
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
        shape = self.shape or self.array.shape
        rank = len(shape)
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
            *self._encode_corners(),
        )
        return packed.ljust(128, b"\0")

    def _encode_corners(self) -> tuple[int, ...]:
        """Whether the map is one of images, and the corners of their bounding box, innermost first."""
        return (0,) * 7


@dataclass(frozen=True)
class ImageTensorMap(TensorMap):
    """A tensor map argument of images (im2col): columns of pixels of an array [N, [[D,] H,] W, C].

    `box` is (pixels, channels): a copy takes so many channels of so many pixels, which it visits along W, then H, D and
    N, in steps of `element_strides`, within a bounding box of each image: from pixel `lower` to pixel `size - 1 +
    upper`, for [[D,] H,] W. The offsets of the copy (the filter's tap) are added to each pixel; those outside the image
    read as zero, or as NaN with `nan_fill`. For a convolution with padding p, dilation d and a filter of k taps,
    `lower` is -p and `upper` is p - d * (k - 1) (cuTensorMapEncodeIm2col).

    Raises:
        ArgumentError: the hardware does not support the map.

    >>> ImageTensorMap(np.zeros((2, 5, 6, 8), np.float32), (16, 8), lower=(-1, -1), upper=(-1, -1)).box
    (16, 8)
    """

    lower: tuple[int, ...] = ()
    upper: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        rank = len(self.shape or self.array.shape)
        if not 3 <= rank <= 5 or len(self.box) != 2:
            raise ArgumentError(
                "a map of images has three to five dimensions, and a box of pixels and channels",
                expected="(pixels, channels)", received=self.box,
            )  # fmt: skip
        pixels, channels = self.box
        if not (1 <= pixels <= 1024 and 1 <= channels <= 256):
            raise ArgumentError("a box has 1 to 1,024 pixels and 1 to 256 channels", received=self.box)
        self._check_array()
        limit = 1 << 16 // (rank - 2) - 1  # the corners share 16 bits
        for name, corner in (("lower", self.lower), ("upper", self.upper)):
            if len(corner) != rank - 2 or any(not -limit <= c < limit for c in corner):
                raise ArgumentError(
                    f"the {name} corner has a number for each dimension of a pixel",
                    expected=f"{rank - 2} of {-limit} to {limit - 1}", received=corner,
                )  # fmt: skip

    def _encode_corners(self) -> tuple[int, ...]:
        corners = (tuple(reversed(c)) for c in (self.lower, self.upper))
        return (1, *(n for corner in corners for n in _pad_to_rank(corner, 3, 0)))


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
    corners: tuple[tuple[int, ...], tuple[int, ...]] | None = None  # of the bounding box of pixels, in a map of images

    @property
    def counts(self) -> tuple[int, ...]:
        """The elements copied in each dimension: every n-th of a box with element strides."""
        if self.corners is not None:
            return self.box
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
    rank, code, itemsize, swizzle, nan, image = fields[21:27]
    fill = OUT_OF_BOUNDS_NAN.get(TYPE_NAMES[code], 0) if nan else 0
    lower, upper = fields[27:30], fields[30:33]
    return TensorMapBox(
        fields[1],
        fields[2 : 2 + rank],
        (itemsize, *fields[7 : 7 + rank - 1]),
        fields[11 : 11 + (2 if image else rank)],
        fields[16 : 16 + rank],
        TYPE_NAMES[code],
        itemsize,
        swizzle,
        fill,
        (lower[: rank - 2], upper[: rank - 2]) if image else None,
    )

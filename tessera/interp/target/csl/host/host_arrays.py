"""Host arrays of memcpy: a tensor `A[h][w][l]` with one row for each PE, 16-bit elements in words, time stamps."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import numpy as np

from tessera.core.errors import ArgumentError, ShapeError
from tessera.interp.target.csl.simulation import PeCoordinate

# The host's tensor of a copy: A[h][w][l], one row of l elements for each PE of a region.


class MemcpyDataType(Enum):
    """The element width of a copy on the PE; on the host each element has 32 bits."""

    MEMCPY_16BIT = 0
    MEMCPY_32BIT = 1


class MemcpyOrder(Enum):
    """The layout of a tensor (h, w, l) in the host's array: whether the last or the first index varies fastest."""

    ROW_MAJOR = 0
    COL_MAJOR = 1


class HostTensor:
    """A host array with the PEs of its parts, in row order.

    Raises:
        ShapeError: the array has too few elements. ArgumentError: its elements do not have 32 bits.
    """

    def __init__(
        self,
        array: np.ndarray,
        places: Sequence[PeCoordinate],
        shape: tuple[int, int, int],
        data_type: MemcpyDataType,
        order: MemcpyOrder,
    ) -> None:
        self.array, self.places, self.shape = np.asarray(array), places, shape
        self.narrow = data_type is MemcpyDataType.MEMCPY_16BIT
        self.order = "F" if order is MemcpyOrder.COL_MAJOR else "C"
        count = shape[0] * shape[1] * shape[2]
        if self.array.size > count:
            self.array = self.array.reshape(-1)[:count]  # the rest of a longer array is not changed
        if self.array.size < count:
            raise ShapeError(
                "the host array is too small for the copy",
                expected=f"{shape[0]} x {shape[1]} x {shape[2]} elements",
                received=f"{self.array.size}",
            )
        if self.array.dtype.itemsize != 4:
            raise ArgumentError(
                "a copy moves elements of 32 bits",
                expected="a uint32, int32 or float32 array (one 16-bit element per word)",
                received=str(self.array.dtype),
            )
        self._parts: dict[PeCoordinate, np.ndarray] = {}

    @property
    def nbytes(self) -> int:
        """The size of the host array in bytes."""
        return self.array.size * 4

    def rows(self, streaming: bool = False) -> dict[PeCoordinate, np.ndarray]:
        """Each PE's elements in the PE's width; a stream has whole wavelets."""
        words = np.ascontiguousarray(self.array).reshape(-1).view(np.uint32)
        cube = words.reshape(self.shape, order=self.order).reshape(-1, self.shape[2])
        kept = np.ascontiguousarray(cube.astype(np.uint16) if self.narrow and not streaming else cube)
        return dict(zip(self.places, kept, strict=True))

    def empty(self, streaming: bool) -> dict[PeCoordinate, np.ndarray]:
        """Rows for the PEs' elements, which `fill` copies into the host array. Elements of a stream have 32 bits."""
        dtype = np.uint16 if self.narrow and not streaming else np.uint32
        self._parts = {place: np.zeros(self.shape[2], dtype) for place in self.places}
        return self._parts

    def fill(self) -> None:
        """Write the rows into the host array."""
        cube = np.stack([self._parts[place] for place in self.places]).astype(np.uint32).reshape(self.shape)
        flat = cube.reshape(-1, order=self.order).view(self.array.dtype)
        self.array[...] = flat.reshape(self.array.shape)


# Helpers of the host's scripts: 16-bit elements in 32-bit words, and time stamps.


def input_array_to_u32(np_arr: np.ndarray, sentinel: int | None, fast_dim_sz: int) -> np.ndarray:
    """A flat array of 16- or 32-bit elements as the 32-bit words of a copy.

    16-bit elements are in the lower halves. With a sentinel the upper half is the element's index in rows of
    `fast_dim_sz`; without (None) it is 0.

    >>> [hex(w) for w in input_array_to_u32(np.array([7, 8, 9], np.int16), 1, 2)]
    ['0x7', '0x10008', '0x9']
    """
    if np_arr.ndim != 1:
        raise ArgumentError("the array is not flat", expected="one dimension", received=str(np_arr.shape))
    if np_arr.dtype.itemsize == 4:
        return np_arr.view(np.uint32)
    words = _view_halves(np_arr).astype(np.uint32)
    if sentinel is None:
        return words
    return words | (np.arange(np_arr.size, dtype=np.uint32) % np.uint32(fast_dim_sz)) << np.uint32(16)


def _view_halves(array: np.ndarray) -> np.ndarray:
    if array.dtype.itemsize != 2:
        raise ArgumentError("elements must have 16 or 32 bits", received=str(array.dtype))
    return array.view(np.uint16)


def memcpy_view(arr: np.ndarray, datatype: np.dtype) -> np.ndarray:
    """A writable view of the elements of `datatype`, 16 or 32 bits wide, in an array of 32-bit words.

    >>> memcpy_view(np.array([0x10007, 8], np.uint32), np.dtype(np.int16)).tolist()
    [7, 8]
    """
    kind = np.dtype(datatype)
    if kind.itemsize == 4:
        return arr.view(kind)
    if kind.itemsize != 2:
        raise ArgumentError("elements must have 16 or 32 bits", received=str(kind))
    return arr.view(kind).reshape(*arr.shape, 2)[..., 0]


def calculate_cycles(timestamp_buf: np.ndarray) -> np.int64:
    """The cycles between two 48-bit time stamps, start and end, in three 32-bit words.

    >>> int(calculate_cycles(np.array([5, 25 << 16, 0], np.uint32)))
    20
    """
    halves = [int(half) for half in np.ascontiguousarray(timestamp_buf).reshape(-1).view(np.uint16)[:6]]
    start, end = (sum(half << 16 * i for i, half in enumerate(part)) for part in (halves[:3], halves[3:]))
    return np.int64(end - start)

"""The host's side of a copy: a tensor A[h][w][l], one row of l elements for each PE of a region."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import numpy as np

from tessera.errors import ArgumentError, ShapeError
from tessera.interp.target.csl.commands import Place


class MemcpyDataType(Enum):
    """How wide the elements of a copy are on the PE; on the host each takes 32 bits."""

    MEMCPY_16BIT = 0
    MEMCPY_32BIT = 1


class MemcpyOrder(Enum):
    """How a tensor (h, w, l) is laid out in the host's array: the last index or the first runs fastest."""

    ROW_MAJOR = 0
    COL_MAJOR = 1


class Tensor:
    """A host array with the PEs that its parts belong to, in row order.

    Raises:
        ShapeError: the array has too few elements. ArgumentError: its elements do not have 32 bits.
    """

    def __init__(
        self,
        array: np.ndarray,
        places: Sequence[Place],
        shape: tuple[int, int, int],
        data_type: MemcpyDataType,
        order: MemcpyOrder,
    ) -> None:
        self.array, self.places, self.shape = np.asarray(array), places, shape
        self.narrow = data_type is MemcpyDataType.MEMCPY_16BIT
        self.order = "F" if order is MemcpyOrder.COL_MAJOR else "C"
        count = shape[0] * shape[1] * shape[2]
        if self.array.size > count:
            self.array = self.array.reshape(-1)[:count]  # what is left of a longer array stays as it is
        if self.array.size < count:
            raise ShapeError(
                "the host array does not fit the copy",
                expected=f"{shape[0]} x {shape[1]} x {shape[2]} elements",
                received=f"{self.array.size}",
            )
        if self.array.dtype.itemsize != 4:
            raise ArgumentError(
                "a copy moves elements of 32 bits",
                expected="a uint32, int32 or float32 array (16-bit elements one in each)",
                received=str(self.array.dtype),
            )
        self._parts: dict[Place, np.ndarray] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the host array."""
        return self.array.size * 4

    def rows(self, streaming: bool = False) -> dict[Place, np.ndarray]:
        """Each PE's elements, as wide as they are on the PE; a stream's are whole wavelets."""
        words = np.ascontiguousarray(self.array).reshape(-1).view(np.uint32)
        cube = words.reshape(self.shape, order=self.order).reshape(-1, self.shape[2])
        kept = np.ascontiguousarray(cube.astype(np.uint16) if self.narrow and not streaming else cube)
        return dict(zip(self.places, kept, strict=True))

    def empty(self, streaming: bool) -> dict[Place, np.ndarray]:
        """Rows for the PEs' elements, which `fill` puts into the host array. A stream's elements have 32 bits."""
        dtype = np.uint16 if self.narrow and not streaming else np.uint32
        self._parts = {place: np.zeros(self.shape[2], dtype) for place in self.places}
        return self._parts

    def fill(self) -> None:
        """Write the rows into the host array."""
        cube = np.stack([self._parts[place] for place in self.places]).astype(np.uint32).reshape(self.shape)
        flat = cube.reshape(-1, order=self.order).view(self.array.dtype)
        self.array[...] = flat.reshape(self.array.shape)

"""Resident: an array in the memory of a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tessera.device import generator_of, on_host
from tessera.errors import ArgumentError, ShapeError, here
from tessera.types import DType, as_dtype


class Resident:
    """An array in a device's own memory; `numpy()` brings its elements back. Other libraries see it in place.

    It has `__cuda_array_interface__` (version 3), so that CuPy, Numba and PyTorch take it without a copy.
    """

    def __init__(self, room: Any, shape: tuple[int, ...], dtype: DType, device: str) -> None:
        self.room, self.shape, self.dtype, self.device = room, shape, dtype, device

    @classmethod
    def empty(cls, shape: Sequence[int], dtype: DType, device: str) -> Resident:
        """Memory on a device; what it holds means nothing.

        Raises:
            DeviceUnavailable: there is no such device. ArgumentError: it has no memory of its own.
            ResourceError: its memory is used up.
        """
        generator_of(device)
        if on_host(device):
            raise ArgumentError(
                f"{device} has no memory of its own", location=here(), expected='a GPU, such as "cuda:0"'
            )
        gpu = _gpu()
        with gpu.active():
            room = gpu.allocate(int(np.prod(shape, dtype=np.int64)) * dtype.numpy.itemsize)
        return cls(room, tuple(shape), dtype, device)

    @property
    def nbytes(self) -> int:
        """The bytes of its elements."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.numpy.itemsize

    def fill(self, array: np.ndarray) -> Resident:
        """Write an array's elements into it; this array, filled.

        Raises:
            ShapeError: the array has another shape or element type.
        """
        if array.shape != self.shape or as_dtype(array.dtype) != self.dtype:
            raise ShapeError(
                "this does not fit the device's array", location=here(), expected=f"{self.shape} {self.dtype}",
                received=f"{array.shape} {array.dtype}",
            )  # fmt: skip
        gpu = _gpu()
        with gpu.active():
            if self.nbytes:
                gpu.driver.memcpy_htod(int(self.room), np.ascontiguousarray(array).view(np.uint8).reshape(-1))
        return self

    def numpy(self) -> np.ndarray:
        """The elements, copied to the host."""
        out = np.empty(self.shape, self.dtype.numpy)
        gpu = _gpu()
        with gpu.active():
            if self.nbytes:
                gpu.driver.memcpy_dtoh(out.view(np.uint8).reshape(-1), int(self.room))
        return out

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        # Element types that NumPy has no letter for (bf16, fp8) go as their bits.
        letter = self.dtype.numpy.str if self.dtype.numpy.isbuiltin == 1 else f"|u{self.dtype.numpy.itemsize}"
        return {"shape": self.shape, "typestr": letter, "data": (int(self.room), False), "version": 3}

    def __repr__(self) -> str:
        return f"Resident({self.shape}, {self.dtype}, {self.device})"


def _gpu() -> Any:
    """This machine's GPU: the one that compiled programs run on, with the same pool of memory."""
    from tessera.codegen.ptx.host.gpu import gpu  # asked for only where there is one

    return gpu()

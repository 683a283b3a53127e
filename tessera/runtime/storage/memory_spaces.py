"""Memory spaces of the host: its own memory, memory-mapped files and a device's memory; arrays made in them."""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from tessera.core.device import default_device, find_generator_name, shares_host_memory
from tessera.core.errors import ArgumentError, FileError, ShapeError, user_location
from tessera.core.io import load_npy
from tessera.core.symbolic_dim import symbol_names
from tessera.core.types import GLOBAL, DType, TensorType, as_dtype, f32
from tessera.ir.tensor import Tensor, wrap_array
from tessera.runtime.storage import DISK, HOST

# Resident: an array in the memory of a device.


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
        find_generator_name(device)
        if shares_host_memory(device):
            raise ArgumentError(
                f"{device} has no memory of its own", location=user_location(), expected='a GPU, such as "cuda:0"'
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
                "this does not fit the device's array", location=user_location(), expected=f"{self.shape} {self.dtype}",
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
    from tessera.codegen.ptx.runtime.driver_api import get_gpu  # asked for only where there is one

    return get_gpu()


def on_disk(path: str | Path, shape: Sequence[int] | None = None, dtype: DType | str = f32) -> Tensor:
    """A tensor whose elements lie in a .npy file: pages are read as they are touched, and written back.

    With a `shape` the file is made anew, of zeros; without one it is opened, and must be there.

    Raises:
        FileError: the file is missing, is no .npy file, cannot be made, or holds elements of another size than `dtype`.

    >>> with tempfile.TemporaryDirectory() as folder:
    ...     x = on_disk(Path(folder) / "x.npy", (2, 2), "bf16")
    ...     x.numpy()[0] = 1.0
    ...     flush(x)
    ...     print(on_disk(Path(folder) / "x.npy", dtype="bf16"))
    Tensor([[1, 1],
            [0, 0]], bf16)
    """
    element = as_dtype(dtype)
    if shape is not None:
        return _map_file(_create_file(Path(path), tuple(shape), element), element)
    if not Path(path).is_file():
        raise FileError(f"there is no file {path}", expected="a .npy file", suggestion="give a shape to make it")
    return _map_file(load_npy(path, "r+"), element)  # type: ignore[arg-type]


def flush(x: Tensor) -> None:
    """Have what was written to a tensor on disk written to its file now."""
    mapped = _find_memmap(x)
    if mapped is not None:
        mapped.flush()


def space_of(x: Any) -> str:
    """The memory where elements lie: "disk", "host" or, of a device's arrays, "global".

    >>> space_of(Tensor([1.0]))
    'host'
    """
    if isinstance(x, Resident):
        return GLOBAL
    return HOST if _find_memmap(x) is None else DISK


def made(space: str, type: TensorType) -> Any:
    """An array of zeros in a memory of the host: a Tensor, or a Resident where "global" is a GPU's.

    Raises:
        ShapeError: a size is known only by name. ResourceError: there is no room.
    """
    if symbol_names(type.shape):
        raise ShapeError(f"memory for {type} has no size", location=user_location(), expected="sizes that are numbers")
    return ALLOCATORS[space](tuple(int(n) for n in type.shape), type.dtype)


def _allocate_host(shape: tuple[int, ...], dtype: DType) -> Tensor:
    return Tensor(np.zeros(shape, dtype.numpy))


def _allocate_global(shape: tuple[int, ...], dtype: DType) -> Any:
    """What the default device calls global memory; the interpreters and llvm share the host's."""
    device = default_device()
    if shares_host_memory(device):
        return _allocate_host(shape, dtype)
    return Resident.empty(shape, dtype, device).fill(np.zeros(shape, dtype.numpy))


def _allocate_disk(shape: tuple[int, ...], dtype: DType) -> Tensor:
    """In a file of its own, which is gone when nothing refers to the tensor's elements."""
    handle, name = tempfile.mkstemp(suffix=".npy", prefix="tessera-")
    os.close(handle)
    tensor = on_disk(name, shape, dtype)
    weakref.finalize(_find_memmap(tensor), Path(name).unlink, missing_ok=True)
    return tensor


ALLOCATORS = {HOST: _allocate_host, DISK: _allocate_disk, GLOBAL: _allocate_global}


def _create_file(path: Path, shape: tuple[int, ...], dtype: DType) -> np.memmap:
    stored = dtype.numpy if dtype.numpy.isbuiltin == 1 else np.dtype(f"V{dtype.numpy.itemsize}")
    try:
        return np.lib.format.open_memmap(path, mode="w+", dtype=stored, shape=shape)
    except (OSError, ValueError) as error:
        raise FileError(f"{path} cannot be made: {error}", expected="a folder with room for it") from None


def _map_file(array: np.memmap, dtype: DType) -> Tensor:
    if array.dtype.kind == "V":  # NumPy stores what it has no letter for (bf16, fp8) as bytes
        if array.dtype.itemsize != dtype.numpy.itemsize:
            raise FileError("the file holds elements of another size", expected=str(dtype), received=str(array.dtype))
        array = cast(np.memmap, array.view(dtype.numpy))
    return wrap_array(array, TensorType(array.shape, as_dtype(array.dtype)))


def _find_memmap(x: Any) -> np.memmap | None:
    """The file's memory under a tensor or one of its views."""
    held = x.data if isinstance(x, Tensor) else x
    while isinstance(held, np.ndarray):
        if isinstance(held, np.memmap):
            return held
        held = held.base
    return None


def as_placed(value: Any, space: str) -> Any:
    """A value that was given for a placed field: a tensor, an array, or for "disk" the path of a file.

    Raises:
        ArgumentError: it lies in another memory.
    """
    if space == DISK and isinstance(value, (str, Path)):
        return on_disk(value)
    tensor = value if isinstance(value, (Tensor, Resident)) else Tensor(value)
    if space in (HOST, DISK) and space_of(tensor) != space:
        raise ArgumentError(
            f"this lies in {space_of(tensor)} memory", location=user_location(), expected=f"{space} memory"
        )
    return tensor

"""The memories of the host: its own, files used as memory, and a device's; tensors made in them."""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from tessera.device import default_device, on_host
from tessera.errors import ArgumentError, FileError, ShapeError, here
from tessera.shapes.dim import symbols
from tessera.storage import DISK, HOST
from tessera.storage.resident import Resident
from tessera.tensor import Tensor, like
from tessera.types import GLOBAL, DType, TensorType, as_dtype, f32


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
        return _mapped(_created(Path(path), tuple(shape), element), element)
    if not Path(path).is_file():
        raise FileError(f"there is no file {path}", expected="a .npy file", suggestion="give a shape to make it")
    try:
        return _mapped(np.load(path, mmap_mode="r+", allow_pickle=False), element)
    except (ValueError, EOFError, OSError) as error:
        raise FileError(f"{path} cannot be used as memory", expected="a .npy file", received=str(error)) from None


def flush(x: Tensor) -> None:
    """Have what was written to a tensor on disk written to its file now."""
    mapped = _map_of(x)
    if mapped is not None:
        mapped.flush()


def space_of(x: Any) -> str:
    """The memory where elements lie: "disk", "host" or, of a device's arrays, "global".

    >>> space_of(Tensor([1.0]))
    'host'
    """
    if isinstance(x, Resident):
        return GLOBAL
    return HOST if _map_of(x) is None else DISK


def made(space: str, type: TensorType) -> Any:
    """An array of zeros in a memory of the host: a Tensor, or a Resident where "global" is a GPU's.

    Raises:
        ShapeError: a size is known only by name. ResourceError: there is no room.
    """
    if symbols(type.shape):
        raise ShapeError(f"memory for {type} has no size", location=here(), expected="sizes that are numbers")
    return MAKERS[space](tuple(int(n) for n in type.shape), type.dtype)


def _host(shape: tuple[int, ...], dtype: DType) -> Tensor:
    return Tensor(np.zeros(shape, dtype.numpy))


def _global(shape: tuple[int, ...], dtype: DType) -> Any:
    """What the default device calls global memory; the interpreters and llvm share the host's."""
    device = default_device()
    if on_host(device):
        return _host(shape, dtype)
    return Resident.empty(shape, dtype, device).fill(np.zeros(shape, dtype.numpy))


def _disk(shape: tuple[int, ...], dtype: DType) -> Tensor:
    """In a file of its own, which is gone when nothing refers to the tensor's elements."""
    handle, name = tempfile.mkstemp(suffix=".npy", prefix="tessera-")
    os.close(handle)
    tensor = on_disk(name, shape, dtype)
    weakref.finalize(_map_of(tensor), Path(name).unlink, missing_ok=True)
    return tensor


MAKERS = {HOST: _host, DISK: _disk, GLOBAL: _global}


def _created(path: Path, shape: tuple[int, ...], dtype: DType) -> np.memmap:
    stored = dtype.numpy if dtype.numpy.isbuiltin == 1 else np.dtype(f"V{dtype.numpy.itemsize}")
    try:
        return np.lib.format.open_memmap(path, mode="w+", dtype=stored, shape=shape)
    except (OSError, ValueError) as error:
        raise FileError(f"{path} cannot be made: {error}", expected="a folder with room for it") from None


def _mapped(array: np.memmap, dtype: DType) -> Tensor:
    if array.dtype.kind == "V":  # NumPy stores what it has no letter for (bf16, fp8) as bytes
        if array.dtype.itemsize != dtype.numpy.itemsize:
            raise FileError("the file holds elements of another size", expected=str(dtype), received=str(array.dtype))
        array = cast(np.memmap, array.view(dtype.numpy))
    return like(array, TensorType(array.shape, as_dtype(array.dtype)))


def _map_of(x: Any) -> np.memmap | None:
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
        raise ArgumentError(f"this lies in {space_of(tensor)} memory", location=here(), expected=f"{space} memory")
    return tensor

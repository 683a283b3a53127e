"""Arrays in files: .npy and .npz read and written with errors that say what is wrong."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import numpy as np

from tessera.errors import FileError
from tessera.types import as_dtype


def read_array(path: str | Path, dtype: object = None) -> np.ndarray:
    """The array in a .npy file; `dtype` restores the types NumPy stores as raw bytes (bf16, fp8).

    Raises:
        FileError: the file is missing, truncated or not a .npy file.
    """
    file = Path(path)
    if not file.is_file():
        raise FileError(f"there is no file {path}", expected="a .npy file", suggestion="check the path")
    try:
        array = np.load(file, allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise FileError(
            f"{path} is not a complete .npy file",
            expected="a file written by numpy.save",
            received=f"{file.stat().st_size} bytes: {error}",
            suggestion="write it again with numpy.save",
        ) from None
    if array.dtype.kind == "V" and dtype is not None:
        return array.view(as_dtype(dtype).numpy)
    return array


def write_array(path: str | Path, array: np.ndarray) -> None:
    """Save an array as .npy, whole or not at all."""

    def fill(handle) -> None:  # type: ignore[no-untyped-def]
        np.save(handle, array)

    write_file(path, fill)


def write_file(path: str | Path, fill) -> None:  # type: ignore[no-untyped-def]
    """Write a file through `fill(handle)`, beside its place and then moved there."""
    target = Path(path)
    if not target.parent.is_dir():
        raise FileError(f"there is no folder {target.parent}", suggestion="make it first, or name another place")
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            fill(file)
        os.chmod(name, 0o644)
        os.replace(name, target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise

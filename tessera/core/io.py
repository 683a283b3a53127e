"""Files: paths of users, the cache folder, stable hashes, file locks, and atomic writing of arrays (.npy)."""

from __future__ import annotations

import io
import math
import os
import sys
import tokenize
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np

from tessera.core.errors import ArgumentError, DeviceUnavailable, FileError, user_location
from tessera.core.types import as_dtype

# Paths of users.


def as_path(value: Any, what: str = "the path") -> Path:
    """A path that the system can have.

    Raises:
        ArgumentError: it is no text or path. FileError: it is too long, or has a character that no path has.
    """
    if not isinstance(value, (str, os.PathLike)) or not isinstance(os.fspath(value), str):
        raise ArgumentError(f"{what} is no path", location=user_location(),
                            received=f"{type(value).__name__} {value!r:.60}")  # fmt: skip
    path = Path(value)
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        pass  # to be written, or for its reader to say
    except (OSError, ValueError) as error:
        raise FileError(f"{str(path)[:60]!r} cannot be a path", location=user_location(),
                        received=getattr(error, "strerror", None) or str(error)) from None  # fmt: skip
    return path


# Tensor files.


def import_safetensors() -> Any:
    """The package safetensors with its module `numpy`.

    Raises:
        DeviceUnavailable: it is not installed.
    """
    try:
        import safetensors.numpy
    except ImportError:
        raise DeviceUnavailable(
            "files of tensors need the package safetensors", location=user_location(),
            suggestion="pip install safetensors",
        ) from None  # fmt: skip
    return safetensors


# Arrays in .npy files.


def read_array(path: str | Path, dtype: object = None) -> np.ndarray:
    """The array in a .npy file; `dtype` restores the types NumPy stores as raw bytes (bf16, fp8).

    Raises:
        FileError: the file is missing, truncated or not a .npy file.
    """
    file = Path(path)
    if not file.is_file():
        what = f"{path} is a folder" if file.is_dir() else f"there is no file {path}"
        raise FileError(what, expected="a .npy file", suggestion="check the path")
    array = load_npy(file)
    if array.dtype.kind == "V" and array.dtype.names is None and dtype is not None:
        return array.view(as_dtype(dtype).numpy)
    return array.astype(array.dtype.newbyteorder("="), copy=False)


# What NumPy raises on a header that is no dictionary, nests too deep, or asks for more memory than there is.
_NPY_ERRORS = (
    ValueError, EOFError, OSError, SyntaxError, TypeError, KeyError, OverflowError, RecursionError, MemoryError,
    tokenize.TokenError,
)  # fmt: skip


def load_npy(path: str | Path, mmap_mode: Literal["r+"] | None = None) -> np.ndarray:
    """The array in a .npy file, or its memory map; nothing is allocated that the file does not hold.

    Raises:
        FileError: the file is truncated or not a .npy file.
    """
    size = Path(path).stat().st_size
    try:
        with open(path, "rb") as handle:
            version = np.lib.format.read_magic(handle)
            header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, _, dtype = header(handle)
            if handle.tell() + math.prod(shape) * dtype.itemsize > size:
                raise ValueError(f"the header describes an array of shape {str(shape)[:80]} and type {dtype}")
        return np.load(path, mmap_mode=mmap_mode, allow_pickle=False)
    except _NPY_ERRORS as error:
        raise FileError(
            f"{path} is not a complete .npy file", expected="a file written by numpy.save",
            received=f"{size} bytes: {error}", suggestion="write it again with numpy.save",
        ) from None  # fmt: skip


def write_array(path: str | Path, array: np.ndarray) -> None:
    """Save an array as .npy, atomically."""

    def fill(handle) -> None:  # type: ignore[no-untyped-def]
        np.save(handle, array)

    write_file(path, fill)


def write_file(path: str | Path, fill) -> None:  # type: ignore[no-untyped-def]
    """Write a file through `fill(handle)` atomically, by a temporary file; a device or a pipe is written directly.

    Raises:
        FileError: there can be no file at the path.
    """
    target = check_writable(path)
    if target.exists() and not target.is_file():  # /dev/null must not be replaced by a file
        held = io.BytesIO()
        fill(held)
        target.write_bytes(held.getbuffer())
        return
    target = target.resolve()  # what a link names is replaced, not the link
    import tempfile  # late: 3 ms of `import tessera`

    try:
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    except OSError as error:
        raise _unwritable_error(target, error) from None
    try:
        with os.fdopen(handle, "wb") as file:
            fill(file)
        os.chmod(name, 0o644)
        os.replace(name, target)
    except OSError as error:
        Path(name).unlink(missing_ok=True)
        raise _unwritable_error(target, error) from None
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def write_text(path: str | Path, text: str) -> None:
    """Write a text file atomically.

    Raises:
        FileError: there can be no file at the path.
    """
    write_file(path, lambda handle: handle.write(text.encode()))


def check_writable(path: str | Path) -> Path:
    """The path, if a file can be written there: a check before a long run.

    Raises:
        FileError: its folder is missing, or it is a folder itself.
    """
    target = Path(path)
    if not target.parent.is_dir():
        raise FileError(f"there is no folder {target.parent}", suggestion="create it first, or use another path")
    if target.is_dir():
        raise FileError(f"{target} is a folder", expected="a file to write", suggestion="name a file in it")
    return target


def _unwritable_error(target: Path, error: OSError) -> FileError:
    return FileError(f"{target} cannot be written", received=error.strerror, suggestion="use another path")


# The cache folder: object code and tuning results, which can be made again.


def find_cache_folder() -> Path:
    """The folder TESSERA_CACHE, or one in the user's cache folder; it may not exist yet."""
    given = os.environ.get("TESSERA_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(given) if given else Path(base) / "tessera"


def is_trusted(path: Path) -> bool:
    """Whether nobody else can have written a file or folder: it is this user's or root's, and no one else may write."""
    found = path.stat()
    return os.name != "posix" or (found.st_uid in (os.geteuid(), 0) and not found.st_mode & 0o022)


# Stable hashes: the same in every run and on every machine.


def hash_text(text: str) -> str:
    """The SHA-256 of a text, in hexadecimal.

    >>> hash_text("tile")[:8]
    '8b668b89'
    """
    import hashlib  # it loads OpenSSL, which takes longer than most of this package

    return hashlib.sha256(text.encode()).hexdigest()


# File locks between processes and between threads.


if sys.platform == "win32":
    import msvcrt

    def _lock(file: IO[bytes]) -> None:
        msvcrt.locking(file.fileno(), msvcrt.LK_LOCK, 1)
else:
    import fcntl

    def _lock(file: IO[bytes]) -> None:
        fcntl.flock(file, fcntl.LOCK_EX)


@contextmanager
def lock_file(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on the file at `path` in the body of a `with`; other callers wait.

    What is locked is a file beside it, since the file itself is replaced as a whole. It stays there, empty; the system
    frees it where a process ends before it is done.

    Raises:
        OSError: the folder cannot be written.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, lock_file(Path(folder) / "a.json"):
    ...     print([p.name for p in Path(folder).iterdir()])
    ['a.json.lock']
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_name(path.name + ".lock"), "wb") as file:
        _lock(file)
        yield


@contextmanager
def lock_folder(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a folder itself, which leaves no file; none where the system cannot."""
    handle = None
    try:
        handle = os.open(path, os.O_RDONLY)
        fcntl.flock(handle, fcntl.LOCK_EX)
    except (OSError, NameError):
        pass
    try:
        yield
    finally:
        if handle is not None:
            os.close(handle)

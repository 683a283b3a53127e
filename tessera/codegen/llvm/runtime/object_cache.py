"""The cache of object code on disk: entries that are sealed, trusted only from this user, and bounded in size."""

from __future__ import annotations

import hashlib
import itertools
import warnings
from functools import cache
from pathlib import Path

from tessera.core.errors import FileError
from tessera.core.io import find_cache_folder, is_trusted, write_file

HASH_BYTES = 32  # a cache entry begins with a hash of this size
OBJECT_FORMAT = 4  # of sealed object code: entries of another format are compiled again
SUFFIX = ".o"
MOST_BYTES = 1 << 30  # of all entries; the oldest are removed
WRITES_PER_CHECK = 256  # of the size, which the first write of a process checks, too
_writes = itertools.count()


def seal_object(key: str, code: bytes) -> bytes:
    """Object code behind a hash that binds it to its key: the code of another text does not pass for it."""
    return hash_object(key, code) + code


def open_object(key: str, content: bytes) -> bytes | None:
    """The object code that `seal_object` sealed with this key; None if it is damaged or of another key."""
    digest, code = content[:HASH_BYTES], content[HASH_BYTES:]
    return code if hash_object(key, code) == digest else None


def hash_object(key: str, code: bytes) -> bytes:
    """The hash of a key and code, of the format below."""
    return hashlib.sha256(f"{OBJECT_FORMAT}\0{key}\0".encode() + code).digest()


def read_entry(key: str) -> bytes | None:
    """What an entry holds, or None if it is missing, damaged, or another user may have written it."""
    path = find_cache_folder() / f"{key}{SUFFIX}"
    try:
        content = path.read_bytes()
        trusted = is_trusted(path.parent) and is_trusted(path)
    except OSError:
        return None
    if not trusted:
        _warn_of_folder(path.parent)
        return None
    return open_object(key, content)


@cache
def _warn_of_folder(folder: Path) -> None:
    text = (
        f"object code in {folder} is not used: another user may write there. "
        f"Run `chmod go-w {folder}` if it is yours, or set TESSERA_CACHE to a folder that is"
    )
    warnings.warn(text, RuntimeWarning, stacklevel=2)


def write_entry(key: str, code: bytes) -> None:
    """Write an entry atomically; failure to write is no error."""
    folder = find_cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_file(folder / f"{key}{SUFFIX}", lambda file: file.write(seal_object(key, code)))
        if next(_writes) % WRITES_PER_CHECK == 0:
            remove_oldest(folder, MOST_BYTES)
    except (OSError, FileError):
        pass


def remove_oldest(folder: Path, most: int) -> None:
    """Remove the entries that were written first, down to three quarters of `most` bytes, where there are more.

    Another process may do the same, or read what goes: it compiles again.
    """
    found = sorted((s.st_mtime_ns, s.st_size, p) for p in folder.glob(f"*{SUFFIX}") for s in [p.stat()])
    total = sum(size for _, size, _ in found)
    if total <= most:
        return
    for _, size, path in found:
        if total <= most * 3 // 4:
            break
        path.unlink(missing_ok=True)
        total -= size

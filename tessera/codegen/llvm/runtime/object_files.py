"""Object files: their symbols, several as one piece of object code, linking them in memory, and the cache on disk.

Entries of the cache are sealed, trusted only from this user, and bounded in size.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import os
import struct
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

import llvmlite.binding as llvm

from tessera.core.errors import ArtifactError, FileError
from tessera.core.io import find_cache_folder, is_trusted, write_file

RUNTIME_PREFIX = "tessera"  # of the functions that the runtime registers before it runs machine code
PACK_MARK = b"tessera objects\0"
ELF_MARK = b"\x7fELF\x02"


def pack_objects(objects: Sequence[bytes]) -> bytes:
    """Object files as one piece of object code: the file itself, if there is only one."""
    if len(objects) == 1:
        return objects[0]
    sizes = struct.pack(f"<Q{len(objects)}Q", len(objects), *map(len, objects))
    return b"".join([PACK_MARK, sizes, *objects])


def unpack_objects(code: bytes) -> list[bytes]:
    """The object files of a piece of object code."""
    if not code.startswith(PACK_MARK):
        return [code]
    (count,) = struct.unpack_from("<Q", code, len(PACK_MARK))
    sizes = struct.unpack_from(f"<{count}Q", code, len(PACK_MARK) + 8)
    ends = [*itertools.accumulate(sizes, initial=len(PACK_MARK) + 8 + 8 * count)]
    return [code[start:end] for start, end in itertools.pairwise(ends)]


# Symbols.

_ELF_SYMBOLS = ("_GLOBAL_OFFSET_TABLE_",)  # defined by whoever links
_ELF_HEADER = struct.Struct("<40xQ10xHHH")  # of 64 bits: the section table's place, entry size, entries, name section
_ELF_SECTION = struct.Struct("<IIQQQQIIQQ")
_ELF_SYMBOL = struct.Struct("<IBBHQQ")
_SYMBOL_TABLE = 2  # the type of a section
_LOCAL = 0  # the binding of a symbol that other objects do not see


def list_symbols(code: bytes) -> tuple[list[str], list[str]]:
    """The symbols that an ELF object defines for others, and those that it refers to; none of another format."""
    defined: list[str] = []
    undefined: list[str] = []
    if not code.startswith(ELF_MARK):
        return defined, undefined
    start, size, count, _ = _ELF_HEADER.unpack_from(code)
    sections = [_ELF_SECTION.unpack_from(code, start + i * size) for i in range(count)]
    for section in (s for s in sections if s[1] == _SYMBOL_TABLE):
        offset, length, link = section[4:7]
        strings = sections[link][4]
        for at in range(offset, offset + length, _ELF_SYMBOL.size):
            name, kind, _, home, _, _ = _ELF_SYMBOL.unpack_from(code, at)
            if name and (home == 0 or kind >> 4 != _LOCAL):
                found = code[strings + name : code.index(b"\0", strings + name)].decode()
                (undefined if home == 0 else defined).append(found)
    return defined, undefined


def list_unresolved_symbols(code: bytes) -> list[str]:
    """The functions that object code calls and this process lacks: a call of one would end the process."""
    return [name for name in _list_free_symbols(unpack_objects(code))[1] if not has_symbol(name)]


def _list_free_symbols(objects: Sequence[bytes]) -> tuple[list[str], list[str]]:
    """The symbols that objects define, and those that they refer to and none of them defines."""
    tables = [list_symbols(part) for part in objects]
    defined = dict.fromkeys(itertools.chain.from_iterable(found for found, _ in tables))
    undefined = dict.fromkeys(itertools.chain.from_iterable(found for _, found in tables))
    return [*defined], [name for name in undefined if name not in defined and name not in _ELF_SYMBOLS]


def has_symbol(name: str) -> bool:
    """Whether the runtime, LLVM or this process has a function."""
    if name.startswith(RUNTIME_PREFIX) or llvm.address_of_symbol(name) is not None:
        return True
    return hasattr(load_process_symbols(), name)


@cache
def load_process_symbols() -> ctypes.CDLL:
    """The symbols of this process, or of the C library where a process has none of its own."""
    return ctypes.CDLL(None if os.name == "posix" else "msvcrt")


# Linking.


@dataclass(frozen=True)
class LinkedCode:
    """Machine code in memory, as long as this lives; `find` gives the address of a symbol, or 0."""

    owner: Any
    find: Callable[[str], int]


LIBRARIES = 64  # of one linker: making one takes as long as ten libraries, and it keeps 11 KB of each that is gone
_LINK_LOCK = Lock()
_linkers: list[tuple[Any, Any]] = []  # the newest linker, and the numbers of its libraries


def link_objects(objects: Sequence[bytes], create_machine: Callable[[], Any]) -> LinkedCode:
    """Objects linked to each other and to this process.

    Raises:
        ArtifactError: a function is missing, or there is no memory for the code.
    """
    if not objects[0].startswith(ELF_MARK):
        return _load_object(objects[0], create_machine)
    defined, undefined = _list_free_symbols(objects)
    library = llvm.JITLibraryBuilder().add_current_process()
    for code in objects:
        library.add_object_img(code)
    for name in defined:
        library.export_symbol(name)
    for name in undefined:
        place = llvm.address_of_symbol(name)
        if place is not None:
            library.import_symbol(name, place)
        elif not hasattr(load_process_symbols(), name):
            raise ArtifactError(
                f"this process lacks the function {name}, which the machine code calls",
                suggestion="build the artifact again",
            )
    with _LINK_LOCK:
        linker, number = _take_linker(create_machine)
        try:
            tracker = library.link(linker, f"code{number}")
        except RuntimeError as error:
            raise ArtifactError(f"the machine code cannot be linked: {error}") from None
    addresses = {name: int(tracker[name]) for name in defined}
    return LinkedCode(tracker, lambda name: addresses.get(name, 0))


def _take_linker(create_machine: Callable[[], Any]) -> tuple[Any, int]:
    """A linker, and the number of the next library; what it linked keeps it alive."""
    linker, numbers = _linkers[0] if _linkers else (None, iter(()))
    number = next(numbers, None)
    if number is None:
        # JITLink places the sections of an object together, within reach of each other on every processor.
        linker = llvm.create_lljit_compiler(create_machine(), use_jit_link=True, suppress_errors=True)
        numbers = iter(range(LIBRARIES))
        _linkers[:] = [(linker, numbers)]
        number = next(numbers)
    return linker, number


def _load_object(code: bytes, create_machine: Callable[[], Any]) -> LinkedCode:
    """An object of another format, whose symbols LLVM looks up by itself."""
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), create_machine())
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    return LinkedCode(
        engine, lambda name: int(engine.get_function_address(name) or engine.get_global_value_address(name))
    )


# The cache on disk.

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
    with os.scandir(folder) as entries:  # a full cache has many thousands
        found = [(s.st_mtime_ns, s.st_size, e.path) for e in entries if e.name.endswith(SUFFIX) for s in [e.stat()]]
    total = sum(size for _, size, _ in found)
    if total <= most:
        return
    for _, size, path in sorted(found):
        if total <= most * 3 // 4:
            break
        Path(path).unlink(missing_ok=True)
        total -= size

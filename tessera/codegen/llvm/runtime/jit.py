"""Just-in-time compilation of LLVM IR through llvmlite, with a cache of object code on disk."""

from __future__ import annotations

import ctypes
import hashlib
import os
import struct
import warnings
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite
import llvmlite.binding as llvm

from tessera.core.errors import ArtifactError, FileError, ParseError, UnsupportedOpError
from tessera.core.io import find_cache_folder, is_trusted, write_file

OPTIMISATION_LEVEL = 3
RUNTIME_PREFIX = "tessera"  # of the functions that the runtime registers before it runs machine code
HASH_BYTES = 32  # a cache entry begins with a hash of this size
OBJECT_FORMAT = 2  # of sealed object code: entries of another format are compiled again


class MachineCode:
    """Machine code in memory, and the addresses of its symbols: of the object code `ready`, or compiled from a text."""

    def __init__(self, text: str, ready: bytes | None = None) -> None:
        code = get_object_code(text) if ready is None or list_unresolved_symbols(ready) else ready
        self._engine = llvm.create_mcjit_compiler(_parse_text(""), _create_target_machine())
        self._engine.add_object_file(llvm.ObjectFileRef.from_data(code))
        self._engine.finalize_object()

    def address(self, name: str) -> int:
        """The address of a function."""
        return _check_address(name, self._engine.get_function_address(name))

    def find_variable(self, name: str) -> int:
        """The address of a global variable, or 0."""
        return int(self._engine.get_global_value_address(name))

    def variable(self, name: str) -> int:
        """The address of a global variable."""
        return _check_address(name, self._engine.get_global_value_address(name))


def _check_address(name: str, address: int) -> int:
    """The address; it is 0 where the code lacks the symbol, and a call would end the process."""
    if not address:
        raise ArtifactError(f"the machine code has no symbol {name}", suggestion="build the artifact again")
    return address


@cache
def _initialise_llvm() -> bool:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return True


@cache
def describe_host() -> tuple[str, str]:
    """The processor's name and features."""
    return llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()


def get_host_vector_bytes() -> int:
    """The width of this processor's vector registers."""
    features = llvm.get_host_cpu_features()
    return 64 if features.get("avx512f") else 32 if features.get("avx2") else 16


def _create_target_machine() -> Any:
    _initialise_llvm()
    cpu, features = describe_host()
    return llvm.Target.from_default_triple().create_target_machine(
        cpu=cpu, features=features, opt=OPTIMISATION_LEVEL, reloc="pic", codemodel="jitdefault", jit=True
    )


def _parse_text(text: str) -> Any:
    _initialise_llvm()
    try:
        return llvm.parse_assembly(text)
    except RuntimeError as error:
        raise ParseError(f"LLVM cannot parse the text: {error}") from None


def _check_symbols(unknown: Sequence[str]) -> None:
    """Refuse functions that nothing defines: unknown intrinsics, and functions that this process does not have."""
    if unknown:
        raise UnsupportedOpError(
            f"the target llvm has no function {', '.join(unknown)}",
            expected="intrinsics of LLVM and functions of the C library",
            suggestion="run this on another target, or in the interpreter",
        )


def _is_defined(function: Any) -> bool:
    """Whether a declaration is of an intrinsic, a function of the runtime, or one of the C library."""
    if function.name.startswith("llvm."):
        return any(function.attributes)  # the parser adds the attributes of every intrinsic that it knows
    return _has_symbol(function.name)


def _has_symbol(name: str) -> bool:
    if name.startswith(RUNTIME_PREFIX) or llvm.address_of_symbol(name) is not None:
        return True
    return hasattr(_load_process_symbols(), name)


def list_unresolved_symbols(code: bytes) -> list[str]:
    """The functions that object code calls and this process lacks: a call of one would end the process."""
    return [name for name in _list_undefined_symbols(code) if name not in _ELF_SYMBOLS and not _has_symbol(name)]


_ELF_SYMBOLS = ("_GLOBAL_OFFSET_TABLE_",)  # defined by whoever links
_ELF_HEADER = struct.Struct("<40xQ10xHHH")  # of 64 bits: the section table's place, entry size, entries, name section
_ELF_SECTION = struct.Struct("<IIQQQQIIQQ")
_ELF_SYMBOL = struct.Struct("<IBBHQQ")
_SYMBOL_TABLE = 2  # the type of a section


def _list_undefined_symbols(code: bytes) -> list[str]:
    """The symbols that an ELF object refers to and does not define; of other formats none are known."""
    if code[:5] != b"\x7fELF\x02":
        return []
    start, size, count, _ = _ELF_HEADER.unpack_from(code)
    sections = [_ELF_SECTION.unpack_from(code, start + i * size) for i in range(count)]
    names = []
    for section in (s for s in sections if s[1] == _SYMBOL_TABLE):
        offset, length, link = section[4:7]
        strings = sections[link][4]
        for at in range(offset, offset + length, _ELF_SYMBOL.size):
            name, _, _, home, _, _ = _ELF_SYMBOL.unpack_from(code, at)
            if home == 0 and name:
                names.append(code[strings + name : code.index(b"\0", strings + name)].decode())
    return names


@cache
def _load_process_symbols() -> ctypes.CDLL:
    """The symbols of this process, or of the C library where a process has none of its own."""
    return ctypes.CDLL(None if os.name == "posix" else "msvcrt")


def get_object_code(text: str) -> bytes:
    """The object file of a text, from the cache if it holds a valid entry."""
    key = compute_cache_key(text)
    path = find_cache_folder() / f"{key}.o"
    code = _read_cache(path, key)
    if code is None or list_unresolved_symbols(code):
        code = compile_object(text)
        _write_cache(path, key, code)
    return code


def compile_object(text: str) -> bytes:
    """The object file of a text: parsed, optimised, compiled.

    Raises:
        UnsupportedOpError: the text declares a function that does not exist; calling it would end the process.
    """
    module, machine = _parse_text(text), _create_target_machine()
    _check_symbols([f.name for f in module.functions if f.is_declaration and not _is_defined(f)])
    module.triple, module.data_layout = machine.triple, str(machine.target_data)
    # Loops are emitted vectorised and microkernels fill the registers: vectorising or unrolling again has no benefit.
    tuning = llvm.create_pipeline_tuning_options(speed_level=2)
    tuning.loop_vectorization = tuning.slp_vectorization = tuning.loop_unrolling = False
    builder = llvm.create_pass_builder(machine, tuning)
    builder.getModulePassManager().run(module, builder)
    code = machine.emit_object(module)
    _check_symbols(list_unresolved_symbols(code))  # code generation adds calls, as of conversions of small floats
    return code


def compute_cache_key(text: str) -> str:
    """The file name of a cache entry: a hash of everything that object code depends on."""
    parts = (text, *describe_host(), llvmlite.__version__, str(llvm.llvm_version_info), str(OPTIMISATION_LEVEL))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


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


def _read_cache(path: Path, key: str) -> bytes | None:
    """A cache entry, or None if it is missing, damaged, or another user may have written it."""
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


def _write_cache(path: Path, key: str, code: bytes) -> None:
    """Write a cache entry atomically; failure to write is no error."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_file(path, lambda file: file.write(seal_object(key, code)))
    except (OSError, FileError):
        pass

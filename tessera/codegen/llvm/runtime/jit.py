"""Just-in-time compilation of LLVM IR through llvmlite, with a cache of object code on disk."""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import os
import re
import struct
import sys
import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

import llvmlite
import llvmlite.binding as llvm

from tessera.codegen.llvm.text import power_scaling
from tessera.codegen.llvm.text.pair_products import NATIVE, PAIR_PRODUCT, PairProduct, select_instructions
from tessera.codegen.llvm.text.panel_kernels import DECLARATIONS, MATRIX_UNITS, PANEL_KERNEL, select_matrix_units
from tessera.core.errors import ArtifactError, FileError, ParseError, UnsupportedOpError
from tessera.core.io import find_cache_folder, is_trusted, write_file
from tessera.core.progress import track

OPTIMISATION_LEVEL = 3
# The functions of a kernel: itself, a range of its programs, and the task that the runtime calls.
RANGE_SUFFIX, TASK_SUFFIX = ".range", ".task"
RUNTIME_PREFIX = "tessera"  # of the functions that the runtime registers before it runs machine code
SHORT_KERNEL = 60  # instructions: LLVM inlines a function of so few where it is called
HASH_BYTES = 32  # a cache entry begins with a hash of this size
OBJECT_FORMAT = 3  # of sealed object code: entries of another format are compiled again


class MachineCode:
    """Machine code in memory, and the addresses of its symbols: of the object code `ready`, or compiled from a text."""

    def __init__(self, text: str, ready: bytes | None = None) -> None:
        code = get_object_code(text) if ready is None or list_unresolved_symbols(ready) else ready
        first, *others = unpack_objects(code)
        self._engines = [_load_object(first)]
        for part in others:
            self._engines.append(_load_object(part, self._engines[0]))

    def address(self, name: str) -> int:
        """The address of a function."""
        found = (engine.get_function_address(name) for engine in self._engines)
        return _check_address(name, next((place for place in found if place), 0))

    def find_variable(self, name: str) -> int:
        """The address of a global variable, or 0."""
        return int(self._engines[0].get_global_value_address(name))

    def variable(self, name: str) -> int:
        """The address of a global variable."""
        return _check_address(name, self.find_variable(name))


_LINK_LOCK = Lock()


def _load_object(code: bytes, owner: Any = None) -> Any:
    """An engine with one object file; variables that it shares with another part are those of the engine `owner`.

    RuntimeDyld loads one object for each engine: with several it takes constants of all relative to the first one's
    table of global offsets.
    """
    engine = llvm.create_mcjit_compiler(_parse_text(""), _create_target_machine())
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    with _LINK_LOCK:  # the names are those of the process, until the engine has looked them up
        shared = _list_undefined_symbols(code) if owner is not None else ()
        for name in (n for n in shared if n.startswith(RUNTIME_PREFIX)):
            if place := owner.get_global_value_address(name):
                llvm.add_symbol(name, place)
        engine.finalize_object()
    return engine


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


@cache
def find_pair_products() -> frozenset[str]:
    """The features of this processor by which LLVM computes products of pairs in one instruction."""
    features = llvm.get_host_cpu_features()
    return frozenset(p.feature for p in NATIVE if features.get(p.feature) and _knows_instruction(p))


def _knows_instruction(product: PairProduct) -> bool:
    """Whether this version of LLVM has the intrinsic with these types."""
    return _knows_functions([*product.define(product.instruction), product.declaration])


@cache
def can_scale_by_power() -> bool:
    """Whether this processor and LLVM have an instruction that multiplies by powers of two."""
    return bool(llvm.get_host_cpu_features().get(power_scaling.FEATURE)) and _knows_functions(power_scaling.NATIVE)


def _knows_functions(lines: Sequence[str]) -> bool:
    """Whether this version of LLVM has the intrinsics that lines of text declare."""
    try:
        module = _parse_text("\n".join([*lines, "attributes #0 = { nounwind }"]))
        return all(_is_defined(f) for f in module.functions if f.is_declaration)
    except ParseError:
        return False


_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18  # of Linux on x86-64: arch_prctl(2)


@cache
def find_matrix_units() -> frozenset[str]:
    """The features of this processor's matrix unit (AMX), which the process asks the system for once; none elsewhere.

    The environment variable TESSERA_LLVM_AMX=0 leaves it unused.
    """
    features = llvm.get_host_cpu_features() if os.environ.get("TESSERA_LLVM_AMX") != "0" else {}
    found = frozenset(f for f in MATRIX_UNITS.values() if features.get(f) and features.get("amx-tile"))
    if not found or not sys.platform.startswith("linux") or not _knows_functions(DECLARATIONS):
        return frozenset()
    return frozenset() if _load_process_symbols().syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) else found


def has_products(products: Sequence[PairProduct]) -> bool:
    """Whether this processor has the instructions for all these products."""
    return {p.feature for p in products} <= find_pair_products()


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
    undefined = dict.fromkeys(name for part in unpack_objects(code) for name in _list_undefined_symbols(part))
    return [name for name in undefined if name not in _ELF_SYMBOLS and not _has_symbol(name)]


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
    """The object code of a text: parsed, optimised, compiled, a large text in parts, between which Ctrl-C takes effect.

    Raises:
        UnsupportedOpError: the text declares a function that does not exist; calling it would end the process.
    """
    return pack_objects([_compile_part(part) for part in track(split_text(text), "compiling machine code")])


def _compile_part(text: str) -> bytes:
    native = select_matrix_units(text, find_matrix_units()) if PANEL_KERNEL in text else text
    native = select_instructions(native, find_pair_products()) if PAIR_PRODUCT in native else native
    native = (
        native.replace("\n".join(power_scaling.DEFINITION), "\n".join(power_scaling.NATIVE))
        if power_scaling.SCALE_BY_POWER in native and can_scale_by_power()
        else native
    )
    code = _optimise_and_emit(native, _create_target_machine())
    _check_symbols(list_unresolved_symbols(code))  # code generation adds calls, as of conversions of small floats
    return code


def compile_for_machine(text: str, triple: str, cpu: str, features: str, public: str | tuple[str, ...]) -> bytes:
    """The object file of a text for another machine, position-independent: it is linked, not loaded here.

    Functions whose names do not end with (one of) `public` are internal, so that they meet no names of other objects.

    Raises:
        UnsupportedOpError: the text declares a function that does not exist.
    """
    _initialise_all_targets()
    machine = llvm.Target.from_triple(triple).create_target_machine(
        cpu=cpu, features=features, opt=OPTIMISATION_LEVEL, reloc="pic", codemodel="default"
    )
    return _optimise_and_emit(text, machine, public)


@cache
def _initialise_all_targets() -> bool:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    return True


def _optimise_and_emit(text: str, machine: Any, public: str | tuple[str, ...] = "") -> bytes:
    module = _parse_text(text)
    defined = [f for f in module.functions if not f.is_declaration]
    _set_linkage(defined, public)
    _inline_first(defined)
    _check_symbols([f.name for f in module.functions if f.is_declaration and not _is_defined(f)])
    module.triple, module.data_layout = machine.triple, str(machine.target_data)
    # Loops are emitted vectorised and microkernels fill the registers: vectorising or unrolling again has no benefit.
    tuning = llvm.create_pipeline_tuning_options(speed_level=2)
    tuning.loop_vectorization = tuning.slp_vectorization = tuning.loop_unrolling = False
    builder = llvm.create_pass_builder(machine, tuning)
    builder.getModulePassManager().run(module, builder)
    return machine.emit_object(module)  # type: ignore[no-any-return]


def _set_linkage(functions: Sequence[Any], public: str | tuple[str, ...]) -> None:
    """Hide the functions that are not `public`, and let LLVM drop a kernel that it has inlined in its task.

    The linkage of a dropped kernel has no effect on what is inlined, unlike that of an internal function.
    """
    names = {f.name for f in functions}
    for function in functions:
        if not function.name.endswith(public):
            function.linkage = llvm.Linkage.internal
        elif function.name.removesuffix(RANGE_SUFFIX) + TASK_SUFFIX in names:
            function.linkage = llvm.Linkage.linkonce_odr


def _inline_first(functions: Sequence[Any]) -> None:
    """Inline the range of programs in its task, and a short kernel in both, before LLVM simplifies any of them.

    LLVM inlines from the callees up: it would simplify the body of a kernel three times. The machine code is the same,
    as LLVM inlines all that is short.
    """
    names = {f.name for f in functions}
    kernels = {name.removesuffix(TASK_SUFFIX) for name in names if name.endswith(TASK_SUFFIX)}
    parts = {name + suffix for name in kernels for suffix in ("", RANGE_SUFFIX, TASK_SUFFIX)}
    for function in functions:
        is_range = function.name.removesuffix(RANGE_SUFFIX) in kernels and function.name not in kernels
        # What the kernel of a module with other functions calls may be long.
        if is_range or (function.name in kernels and names <= parts and _is_short(function)):
            function.add_function_attribute("alwaysinline")


def _is_short(function: Any) -> bool:
    """Whether a function has few instructions."""
    instructions = itertools.chain.from_iterable(block.instructions for block in function.blocks)
    return sum(1 for _ in itertools.islice(instructions, SHORT_KERNEL + 1)) <= SHORT_KERNEL


# Parts: a large text as several, each with some kernels and every internal function that these call.

PART_CHARACTERS = 1 << 17  # LLVM compiles as much in half a second
PACK_MARK = b"tessera objects\0"
_DEFINE = re.compile(r'define (?P<internal>internal )?[^"@]*@(?P<name>[\w.$-]+)\(')
_NAME = re.compile(r"@([\w.$-]+)")
_DEFINED_GLOBAL = re.compile(r"^(@[\w.$-]+ = )(global \w+) .*$", re.MULTILINE)


def split_text(text: str) -> list[str]:
    """A text as parts that LLVM compiles one by one; a small one, or one whose functions do not divide, is one part."""
    if len(text) <= 2 * PART_CHARACTERS or sys.platform != "linux":  # parts are linked by the symbols of ELF files
        return [text]
    head, functions, internal = _take_functions(text)
    families: dict[str, list[str]] = {}
    for name in functions:
        if name not in internal:
            families.setdefault(name.removesuffix(RANGE_SUFFIX).removesuffix(TASK_SUFFIX), []).append(name)
    parts: list[set[str]] = [set()]
    for names in families.values():
        needed = _find_called(names, functions)
        if not internal.issuperset(needed.difference(names)):
            return [text]  # a kernel calls another one
        if sum(len(functions[name]) for name in parts[-1] | needed) > PART_CHARACTERS and parts[-1]:
            parts.append(set())
        parts[-1] |= needed
    heads = [head, *[_DEFINED_GLOBAL.sub(r"\1external \2", head)] * (len(parts) - 1)]
    bodies = [[functions[name] for name in functions if name in part] for part in parts]
    return ["\n".join([first, *body, ""]) for first, body in zip(heads, bodies, strict=True)]


def _take_functions(text: str) -> tuple[str, dict[str, str], set[str]]:
    """The lines of a text outside of functions, the functions by name, and the names of the internal ones."""
    head: list[str] = []
    functions: dict[str, str] = {}
    internal: set[str] = set()
    body: list[str] = []
    for line in text.splitlines():
        if not body and not line.startswith("define "):
            head.append(line)
            continue
        body.append(line)
        if line == "}":
            found = _DEFINE.match(body[0])
            if found is None:
                return text, {}, set()
            functions[found["name"]] = "\n".join(body)
            internal |= {found["name"]} if found["internal"] else set()
            body = []
    return "\n".join(head), functions, internal


def _find_called(names: Sequence[str], functions: Mapping[str, str]) -> set[str]:
    """Functions and those that they refer to, directly or not."""
    found: set[str] = set()
    pending = [*names]
    while pending:
        name = pending.pop()
        if name not in found:
            found.add(name)
            pending += [n for n in _NAME.findall(functions[name]) if n in functions]
    return found


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


def compute_cache_key(text: str) -> str:
    """The file name of a cache entry: a hash of everything that object code depends on."""
    parts = (
        text,
        *describe_host(),
        *sorted(find_matrix_units()),
        llvmlite.__version__,
        str(llvm.llvm_version_info),
        str(OPTIMISATION_LEVEL),
    )
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

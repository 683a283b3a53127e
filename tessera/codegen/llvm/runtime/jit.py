"""Just-in-time compilation of LLVM IR through llvmlite, with a cache of object code on disk."""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cache
from threading import RLock, local
from typing import Any

import llvmlite
import llvmlite.binding as llvm

from tessera.codegen.llvm.runtime.object_files import (
    has_symbol,
    link_objects,
    list_unresolved_symbols,
    load_process_symbols,
    pack_objects,
    read_entry,
    seal_object,
    unpack_objects,
    write_entry,
)
from tessera.codegen.llvm.text import power_scaling
from tessera.codegen.llvm.text.pair_products import NATIVE, PAIR_PRODUCT, PairProduct, select_instructions
from tessera.codegen.llvm.text.panel_kernels import DECLARATIONS, MATRIX_UNITS, PANEL_KERNEL, select_matrix_units
from tessera.core.errors import ArtifactError, ParseError, UnsupportedOpError
from tessera.core.progress import track

OPTIMISATION_LEVEL = 3
# The functions of a kernel: itself, a range of its programs, and the task that the runtime calls.
RANGE_SUFFIX, TASK_SUFFIX = ".range", ".task"
SHORT_KERNEL = 60  # instructions: LLVM inlines a function of so few where it is called


class MachineCode:
    """Machine code in memory, and the addresses of its symbols: of the object code `ready`, or compiled from a text."""

    def __init__(self, text: str, ready: bytes | None = None) -> None:
        code = get_object_code(text) if ready is None or list_unresolved_symbols(ready) else ready
        _initialise_llvm()
        self._linked = link_objects(unpack_objects(code), _create_target_machine)

    def address(self, name: str) -> int:
        """The address of a function."""
        return _check_address(name, self._linked.find(name))

    def find_variable(self, name: str) -> int:
        """The address of a global variable, or 0."""
        return self._linked.find(name)

    def variable(self, name: str) -> int:
        """The address of a global variable."""
        return _check_address(name, self.find_variable(name))


def compile_once(function: Callable[[], MachineCode]) -> Callable[[], MachineCode]:
    """A function whose code is compiled by the first call, and kept: its addresses are valid in every thread.

    `functools.cache` lets two threads that call it at once compile it twice, and drops what one of them uses.
    """
    held: list[MachineCode] = []
    lock = RLock()

    def get() -> MachineCode:
        if not held:
            with lock:
                if not held:
                    held.append(function())
        return held[0]

    return get


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
    return frozenset() if load_process_symbols().syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) else found


def has_products(products: Sequence[PairProduct]) -> bool:
    """Whether this processor has the instructions for all these products."""
    return {p.feature for p in products} <= find_pair_products()


def _create_target_machine() -> Any:
    _initialise_llvm()
    cpu, features = describe_host()
    return llvm.Target.from_default_triple().create_target_machine(
        cpu=cpu, features=features, opt=OPTIMISATION_LEVEL, reloc="pic", codemodel="jitdefault", jit=True
    )


_thread = local()


def _find_target_machine() -> Any:
    """The target machine of this thread: of a new one LLVM reads the features first, which takes a third of a unit."""
    if not hasattr(_thread, "machine"):
        _thread.machine = _create_target_machine()
    return _thread.machine


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
    return has_symbol(function.name)


# A program's object code: that of its compilation units.


def get_object_code(text: str) -> bytes:
    """The object code of a text: of each unit from the cache, if it holds a valid entry.

    Raises:
        UnsupportedOpError: the text declares a function that does not exist; calling it would end the process.
    """
    code = _build(text, _find_or_compile)
    return _build(text, _compile_and_keep) if list_unresolved_symbols(code) else code


def seal_object_code(text: str) -> bytes:
    """The object code of a text for this processor, sealed with the hash of the text and of the processor."""
    return seal_object(compute_cache_key(text), get_object_code(text))


def compile_object(text: str) -> bytes:
    """The object code of a text, without the cache."""
    return _build(text, compile_unit)


def _build(text: str, compile_one: Callable[[Unit], bytes]) -> bytes:
    """The object code of a text, unit by unit, between which Ctrl-C takes effect."""
    declarations: dict[str, str] = {}
    objects = []
    for unit in track(divide_text(text), "compiling machine code"):
        lines = [declarations[name] for name in unit.calls]
        made = compile_one(replace(unit, text="\n".join([unit.text, *lines, ""])) if lines else unit)
        declaration, _, code = made.partition(b"\0")
        objects.append(code)
        if unit.shared is not None:
            declarations[unit.shared] = declaration.decode()
    return pack_objects(objects)


def _find_or_compile(unit: Unit) -> bytes:
    return read_entry(_compute_unit_key(unit)) or _compile_and_keep(unit)


def _compile_and_keep(unit: Unit) -> bytes:
    made = compile_unit(unit)
    write_entry(_compute_unit_key(unit), made)
    return made


def _compute_unit_key(unit: Unit) -> str:
    return compute_cache_key(unit.text if unit.shared is None else f"{unit.shared}\0{unit.text}")


def compile_unit(unit: Unit) -> bytes:
    """The declaration by which other units call a unit, a zero byte, and its object code."""
    text = unit.text
    native = select_matrix_units(text, find_matrix_units()) if PANEL_KERNEL in text else text
    native = select_instructions(native, find_pair_products()) if PAIR_PRODUCT in native else native
    native = (
        native.replace("\n".join(power_scaling.DEFINITION), "\n".join(power_scaling.NATIVE))
        if power_scaling.SCALE_BY_POWER in native and can_scale_by_power()
        else native
    )
    machine = _find_target_machine()
    module = _optimise(native, machine, linked=unit.calls)
    code = machine.emit_object(module)
    # Code generation adds calls, as of conversions of small floats.
    _check_symbols([name for name in list_unresolved_symbols(code) if name not in unit.calls])
    return (_declare(module, unit.shared) if unit.shared else "").encode() + b"\0" + code


def _declare(module: Any, name: str) -> str:
    """The declaration of an optimised function, with all that LLVM found out about it, as what memory it may write."""
    text = str(module)
    header = re.search(rf"^define ([^\n]*@{re.escape(name)}\([^\n]*?)(?: (#\d+))? \{{$", text, re.MULTILINE)
    if header is None:
        raise ParseError(f"LLVM printed no definition of {name}")
    attributes = re.search(rf"^attributes {header[2]} = \{{(.*)\}}$", text, re.MULTILINE)
    return f"declare {header[1]}{attributes[1] if attributes else ''}"


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
    return machine.emit_object(_optimise(text, machine, public))  # type: ignore[no-any-return]


@cache
def _initialise_all_targets() -> bool:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    return True


def _optimise(text: str, machine: Any, public: str | tuple[str, ...] = "", linked: Sequence[str] = ()) -> Any:
    """The module of a text, optimised; others define the functions `linked`."""
    module = _parse_text(text)
    defined = [f for f in module.functions if not f.is_declaration]
    _set_linkage(defined, public)
    _inline_first(defined)
    declared = [f for f in module.functions if f.is_declaration and f.name not in linked]
    _check_symbols([f.name for f in declared if not _is_defined(f)])
    module.triple, module.data_layout = machine.triple, str(machine.target_data)
    # Loops are emitted vectorised and microkernels fill the registers: vectorising or unrolling again has no benefit.
    tuning = llvm.create_pipeline_tuning_options(speed_level=2)
    tuning.loop_vectorization = tuning.slp_vectorization = tuning.loop_unrolling = False
    builder = llvm.create_pass_builder(machine, tuning)
    builder.getModulePassManager().run(module, builder)
    return module


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


# Compilation units: the text of a program as pieces that become object code, and are kept, one by one.
#
# A unit is a kernel with its range and its task and what is inlined in them, or a function that is never inlined, as a
# microkernel: programs have many of these in common. Its text has all that its machine code depends on, and nothing
# else: no line numbers, and of the functions of other units the declaration that LLVM derived from their definition.

_DEFINE = re.compile(r'define (?P<internal>internal )?[^"@]*@(?P<name>[\w.$-]+)\(')
_NAME = re.compile(r"@([\w.$-]+)")
_VARIABLE = re.compile(r"(@([\w.$-]+) = )(global \w+) .*")
_LINE_NUMBERS = re.compile(r", !dbg !\d+"), re.compile(r" !dbg !\d+")  # of instructions, and then of functions
_HEAD = ("declare ", "attributes ", "!", ";", "source_filename ")  # what else is outside of functions


@dataclass(frozen=True)
class Unit:
    """A text to compile, with the functions of other units that it calls; `shared` is the function that others call."""

    text: str
    calls: tuple[str, ...] = ()
    shared: str | None = None


def divide_text(text: str) -> list[Unit]:
    """The units of a text, callees first; one that does not divide is a single unit."""
    head, functions = _take_functions(text)
    has_kernels = any(name.endswith(TASK_SUFFIX) for name in functions.texts)
    if sys.platform != "linux" or not has_kernels or not all(_is_known(line) for line in head):
        return [Unit(text)]  # units are linked by the symbols of ELF files
    order = _sort_callees_first(functions)
    if order is None:
        return [Unit(text)]
    variables = [line for line in head if line.startswith("@")]
    units = [Unit("\n".join([*variables, ""]))] if variables else []
    rest = [line for line in head if line.startswith(("declare ", "attributes "))]
    head = [*(_VARIABLE.sub(r"\1external \3", line) for line in variables), *rest]
    units += [_make_unit(head, functions, [name], name) for name in order]
    return units + [_make_unit(head, functions, names) for names in _group_kernels(functions)]


def _is_known(line: str) -> bool:
    return not line or line.startswith(_HEAD) or _VARIABLE.fullmatch(line) is not None


class _Functions:
    """The functions of a text by name, which of them are internal, and which of these are never inlined."""

    def __init__(self, texts: Mapping[str, str], internal: Set[str]) -> None:
        self.texts, self.internal = texts, internal
        self.apart = {name for name in internal if " noinline " in texts[name].partition("\n")[0]}
        self.uses = {name: {*_NAME.findall(text)} for name, text in texts.items()}
        self._called = {name: [n for n in uses if n in texts] for name, uses in self.uses.items()}

    def find_called(self, names: Iterable[str]) -> tuple[list[str], list[str]]:
        """Functions and those that they call, directly or not, and the functions of other units that these call."""
        pending = [*names]
        found, others = {*pending}, set()
        while pending:
            for name in self._called[pending.pop()]:
                if name in self.apart and name not in found:
                    others.add(name)
                elif name not in found:
                    found.add(name)
                    pending.append(name)
        return [n for n in self.texts if n in found], [n for n in self.texts if n in others]


def _take_functions(text: str) -> tuple[list[str], _Functions]:
    """The lines of a text outside of functions, and its functions; no functions where they cannot be told apart."""
    head: list[str] = []
    texts: dict[str, str] = {}
    internal: set[str] = set()
    *pieces, rest = f"{text}\n".split("\n}\n")
    for piece in pieces:
        before, _, function = f"\n{piece}".partition("\ndefine ")
        body = f"define {function}\n}}"
        found = _DEFINE.match(body)
        if found is None:
            return [], _Functions({}, set())
        head += before.splitlines()
        texts[found["name"]] = body
        internal |= {found["name"]} if found["internal"] else set()
    return head + rest.splitlines(), _Functions(texts, internal)


def _sort_callees_first(functions: _Functions) -> list[str] | None:
    """The functions that are never inlined, each behind those that it calls; None where they call each other."""
    waiting = {name: functions.find_called([name])[1] for name in functions.texts if name in functions.apart}
    order: list[str] = []
    while waiting:
        ready = [name for name, called in waiting.items() if not any(n in waiting for n in called)]
        if not ready:
            return None
        order += ready
        for name in ready:
            del waiting[name]
    return order


def _group_kernels(functions: _Functions) -> list[list[str]]:
    """The functions that are not internal, in groups that do not call each other."""
    groups: list[set[str]] = []
    for name in functions.texts:
        if name not in functions.internal:
            reached = {n for n in functions.find_called([name])[0] if n not in functions.internal}
            reached = reached.union(*(group for group in groups if not group.isdisjoint(reached)))
            groups = [group for group in groups if group.isdisjoint(reached)] + [reached]
    places = {name: place for place, name in enumerate(functions.texts)}
    return sorted((sorted(group, key=places.__getitem__) for group in groups), key=lambda names: places[names[0]])


def _make_unit(head: Sequence[str], functions: _Functions, names: Sequence[str], shared: str | None = None) -> Unit:
    """The unit of some functions: they and what is inlined in them, and of the head what these use."""
    own, others = functions.find_called(names)
    body = "\n".join(functions.texts[name] for name in own)
    for pattern in _LINE_NUMBERS:
        body = pattern.sub("", body)
    if shared is not None:
        start = functions.texts[shared].partition("(")[0]
        body = body.replace(start, start.replace(" internal", ""), 1)
    used = set().union(*(functions.uses[name] for name in own))
    needed = [line for line in head if line.startswith("attributes ") or _NAME.findall(line)[0] in used]
    return Unit("\n".join([*needed, body, ""]), tuple(others), shared)

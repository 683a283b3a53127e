"""PTX modules: parsed once, launched on NumPy arrays.

Arrays become segments of global memory, numbers become bytes of the parameter space.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np

from tessera.core.errors import ArgumentError, ResourceError, TesseraError, UnknownNameError, UnsupportedOpError
from tessera.interp.target.ptx.isa import families  # noqa: F401  (fills the tables)
from tessera.interp.target.ptx.isa.decoder import PtxDecoder
from tessera.interp.target.ptx.isa.operands import PtxVariableAddress, assign_function_addresses, encode_immediate
from tessera.interp.target.ptx.isa.tensor_map import TensorMap
from tessera.interp.target.ptx.isa.texture import (
    ADDRESS_MODES,
    PtxObject,
    SamplerObject,
    SurfaceObject,
    TextureObject,
    make_handle,
)
from tessera.interp.target.ptx.machine.memory import GENERIC_WINDOWS, GlobalArena, PtxFault
from tessera.interp.target.ptx.machine.scheduler import run_machine
from tessera.interp.target.ptx.machine.simt import PtxMachine, PtxObserver, PtxProgram
from tessera.interp.target.ptx.machine.special_registers import RESERVED, LaunchShape, find_cluster_and_rank
from tessera.interp.target.ptx.sanitizer.global_shadow import GlobalShadow
from tessera.interp.target.ptx.text.parser import parse_module
from tessera.interp.target.ptx.text.syntax import (
    TYPES,
    AddressOperand,
    ImmediateOperand,
    NameOperand,
    PtxFunction,
    PtxInstruction,
    PtxOperand,
    PtxVariable,
    get_variable_size,
)

# The observer of launches in this context that have none of their own.
LAUNCH_OBSERVER: ContextVar[PtxObserver | None] = ContextVar("PTX launch observer", default=None)

# Launch arguments.


@dataclass(frozen=True, eq=False)
class DevicePointer:
    """A pointer argument into an array of bytes, which is its allocation: accesses within the allocation are legal.

    `initialised` has a bool for each byte: debug mode refuses reads of others, and records writes in it.
    """

    array: np.ndarray
    offset: int = 0
    name: str = ""
    initialised: np.ndarray | None = None


@dataclass
class _HostSegment:
    """A range of host memory that arrays share: one segment, so that aliases on the host alias in the kernel."""

    low: int
    high: int
    name: str
    start: int = 0


class ArgumentBuffers:
    """The arrays of a launch, and their segments in the arena."""

    def __init__(self, args: Sequence[Any], arena: GlobalArena, reachable: Sequence[DevicePointer] = ()) -> None:
        self.arrays: list[np.ndarray] = []
        self.regions: list[_HostSegment] = []
        for i, a in enumerate(args):
            array = a.array if isinstance(a, TensorMap | DevicePointer | TextureObject | SurfaceObject) else a
            if isinstance(array, np.ndarray):
                self._add(array, (isinstance(a, DevicePointer) and a.name) or f"argument {i}")
        for pointer in reachable:
            self._add(pointer.array, pointer.name or "an allocation")
        for region in self.regions:
            region.start = arena.add(region.name, region.high - region.low)
        arena.host = [(r.low, r.high, r.start) for r in self.regions if r.low > 0] if reachable else []
        self.arena = arena
        self.partly_initialised = [
            a for a in (*args, *reachable) if isinstance(a, DevicePointer) and a.initialised is not None
        ]

    def read_initialised(self) -> np.ndarray | None:
        """Whether each byte of the arena is initialised; None if all are."""
        if not self.partly_initialised:
            return None
        known = np.ones(self.arena.top, bool)
        for p in self.partly_initialised:
            start = self.offset(p.array)
            known[start : start + p.array.nbytes] = p.initialised
        return known

    def write_initialised(self, known: np.ndarray) -> None:
        """Record which bytes are initialised after a launch."""
        for p in self.partly_initialised:
            start = self.offset(p.array)
            p.initialised[:] = known[start : start + p.array.nbytes]  # type: ignore[index]

    def _add(self, array: np.ndarray, name: str) -> None:
        low, high = _find_host_extent(array)
        self.arrays.append(array)
        new = _HostSegment(low, high, name)
        for old in [r for r in self.regions if r.low < high and low < r.high]:
            new = _HostSegment(min(new.low, old.low), max(new.high, old.high), old.name)
            self.regions.remove(old)
        self.regions.append(new)

    def offset(self, array: np.ndarray) -> int:
        """The offset of an array in the arena."""
        low, high = _find_host_extent(array)
        region = next(r for r in self.regions if r.low <= low and high <= r.high)
        return region.start + low - region.low

    def copy_in(self) -> None:
        """Copy the arrays into their segments."""
        for array in self.arrays:
            start = self.offset(array)
            self.arena.flat.raw[start : start + array.nbytes] = _view_bytes(array)

    def copy_out(self) -> None:
        """Copy the segments back into the arrays."""
        for array in self.arrays:
            if array.flags.writeable:
                start = self.offset(array)
                result = self.arena.flat.raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
                array[...] = result


def _find_host_extent(array: np.ndarray) -> tuple[int, int]:
    """The addresses of an array's bytes; an array that is not contiguous is copied, and has a range of its own."""
    low = array.__array_interface__["data"][0] if array.flags.c_contiguous else -id(array) << 40
    return low, low + array.nbytes


def _view_bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def bind_object(value: PtxObject, buffers: ArgumentBuffers) -> bytes:
    """The handle of a texture, sampler or surface, which the launch's memory then knows."""
    start = 0 if isinstance(value, SamplerObject) else buffers.offset(value.array)
    buffers.arena.objects.append((value, start))
    return make_handle(len(buffers.arena.objects) - 1).to_bytes(8, "little")


def encode_parameter(v: PtxVariable, value: Any, buffers: ArgumentBuffers) -> bytes:
    """The bytes of a parameter."""
    if isinstance(value, PtxObject):
        if get_variable_size(v) != 8:
            raise ArgumentError(f"parameter {v.name} is no handle", expected=f".{v.type}", received="an object")
        return bind_object(value, buffers)
    if isinstance(value, np.ndarray | DevicePointer):
        if get_variable_size(v) != 8:
            raise ArgumentError(f"parameter {v.name} is not a pointer", expected=f".{v.type}", received="an array")
        pointer = value if isinstance(value, DevicePointer) else DevicePointer(value)
        address = GENERIC_WINDOWS["global"] + buffers.offset(pointer.array) + pointer.offset
        return int(address).to_bytes(8, "little")
    if isinstance(value, TensorMap):
        value = value.encode(GENERIC_WINDOWS["global"] + buffers.offset(value.array))
    if isinstance(value, bytes | np.void):
        content = value if isinstance(value, bytes) else value.tobytes()
        if len(content) != get_variable_size(v):
            raise ArgumentError(
                f"parameter {v.name} has {get_variable_size(v)} bytes",
                expected=get_variable_size(v),
                received=len(content),
            )
        return content
    if v.count != 1 or v.vector != 1:
        raise ArgumentError(f"parameter {v.name} is a struct", expected=f"{get_variable_size(v)} bytes", received=value)
    return _encode_number(v, value)


def _encode_number(v: PtxVariable, value: Any) -> bytes:
    t = TYPES[v.type]
    if isinstance(value, int | np.integer) and t.kind != "f":
        if not -(1 << t.bits - 1) <= value < 1 << t.bits:
            raise ArgumentError(f"parameter {v.name} has {t.bits} bits", expected=f".{v.type}", received=value)
        return (int(value) & (1 << t.bits) - 1).to_bytes(t.bits // 8, "little")
    if isinstance(value, float | np.floating) and t.kind in "us":
        raise ArgumentError(f"parameter {v.name} is an integer", expected=f".{v.type}", received=value)
    if isinstance(value, np.generic) and value.itemsize * 8 == t.bits and t.kind != "f":
        return value.tobytes()
    if not isinstance(value, float | int | np.generic):
        raise ArgumentError(
            f"parameter {v.name} has the wrong kind", expected="an array or a number", received=repr(value)
        )
    dtype = t.dtype if t.kind == "f" else np.dtype(f"f{t.bits // 8}")
    return np.array(value, dtype).tobytes()


# PTX modules.


SHARED_LIMIT = 227 << 10  # bytes of shared memory of a CTA on sm_90
_MOST_GRID, _MOST_BLOCK, _MOST_CLUSTER = (2**31 - 1, 2**16 - 1, 2**16 - 1), (1024, 1024, 64), 16
# As many CTAs run at once as have at most these threads, and these bytes of shared and local memory.
LANES, MEMORY = 1 << 16, 1 << 28
COOPERATIVE_THREADS = 132 * 2048  # resident threads of a GPU with 132 multiprocessors
DEBUG_LANES, DEBUG_MEMORY = 1 << 11, 1 << 22


@dataclass
class _DecodedEntry:
    """A decoded entry, and the addresses that are the same for each launch."""

    program: PtxProgram
    params: dict[str, PtxVariableAddress]
    symbols: dict[str, Any]


class PtxModule:
    """A parsed PTX module. Variables in global memory keep their values between launches.

    Code inlined from files whose paths start with one of `library` has the source location of its call.

    >>> text = '''.version 8.0 .target sm_80 .address_size 64
    ... .visible .entry k(.param .u64 p) { .reg .b64 %a; .reg .b32 %v;
    ...   ld.param.u64 %a, [p]; ld.global.u32 %v, [%a]; add.u32 %v, %v, 1; st.global.u32 [%a], %v; ret; }'''
    >>> x = np.array([41], np.uint32)
    >>> PtxModule(text).launch("k", args=[x]); int(x[0])
    42
    """

    def __init__(self, text: str, file: str = "<ptx>", library: tuple[str, ...] = ()) -> None:
        self.syntax = parse_module(text, file, library)
        self.reserved = RESERVED if "%reserved_smem_offset" in text else 0
        self.entries = {f.name: f for f in self.syntax.functions if f.entry and f.body is not None}
        self.variables: dict[str, bytes] = {}
        self.objects: dict[str, PtxObject] = {
            v.name: _make_sampler(v) for v in self.syntax.variables if v.opaque == "samplerref"
        }
        self._decoded_entries: dict[str, _DecodedEntry] = {}
        self.progress: Callable[[str, int, int], None] | None = (
            None  # told the entry, and how many of its CTAs are done
        )

    def bind(self, name: str, value: PtxObject) -> None:
        """Bind a texture, sampler or surface to a variable of the module (texref, samplerref, surfref).

        Raises:
            UnknownNameError: the module has no such variable. ArgumentError: the object is of another kind.
        """
        kinds = {"texref": TextureObject, "samplerref": SamplerObject, "surfref": SurfaceObject}
        known = {v.name: kinds[v.opaque] for v in self.syntax.variables if v.opaque}
        if name not in known:
            raise UnknownNameError(f"no texture, sampler or surface {name}", expected=", ".join(known) or "none")
        if not isinstance(value, known[name]):
            raise ArgumentError(f"the wrong object for {name}", expected=known[name].__name__, received=repr(value))
        self.objects[name] = value

    def launch(
        self,
        entry: str,
        grid: Any = 1,
        block: Any = 1,
        args: Sequence[Any] = (),
        shared: int = 0,
        debug: bool = False,
        cluster: Any = None,
        cooperative: bool = False,
        reachable: Sequence[DevicePointer] = (),
        observer: PtxObserver | None = None,
        replicated: bool = False,
    ) -> None:
        """Run an entry.

        `args`: arrays are pointers and written in place, as are `DevicePointer`s; numbers and `bytes` (structs) are
        passed by value; a `TensorMap` is passed as the 128 bytes that bulk tensor copies read, a texture, sampler or
        surface object as its handle. `reachable` are
        allocations whose host addresses the kernel finds in memory or in integers; `observer` is told of each
        instruction and access. In a `replicated` program threads of a CTA that read an element with one instruction are
        copies of the thread that uses it, and threads that store to one address of shared memory with one instruction
        are copies that may round differently: neither is a race. `shared` is the bytes of dynamic shared
        memory, `cluster` the CTAs of a cluster if the text does not declare them. All CTAs of a `cooperative` launch
        are resident at once, so that they may wait for each other. `debug` runs the sanitizer, which finds
        uninitialised registers, shared and local memory, races in shared and global memory (also between CTAs),
        barriers that a part of a warp or CTA misses, asynchronous copies that are read without a wait or a proxy
        fence, mbarriers used before their initialisation, and registers that wgmma reads without a wgmma.fence.

        Raises:
            ArgumentError, ResourceError, OutOfBoundsError, BarrierError, ExecutionError, UnsupportedOpError: the launch
            is invalid or failed. UninitializedError, RaceError, AsyncCopyError: the sanitizer found an error. Each
            names the instruction, its line, the source line of its `.loc`, and the thread.
        """
        if entry not in self.entries:
            raise UnknownNameError(f"no entry {entry}", expected=", ".join(self.entries))
        function, arena = self.entries[entry], GlobalArena()
        if len(args) != len(function.params):
            raise ArgumentError(f"{entry} has {len(function.params)} parameters", received=f"{len(args)} arguments")
        launch = LaunchShape(
            _convert_extent(grid),
            _convert_extent(block),
            _choose_cluster_extent(function, cluster),
            shared,
            debug,
            cooperative,
            replicated,
        )
        _check_launch_limits(function, launch)
        params, symbols, static_shared_bytes = self._assign_addresses(function, arena)
        buffers = ArgumentBuffers([*args, *self.objects.values()], arena, reachable)
        arena.freeze()
        for v, a in zip(function.params, args, strict=True):
            arena.write_bytes(params[v.name].address, encode_parameter(v, a, buffers))
        self._initialise_variables(arena, symbols)
        for name, value in self.objects.items():
            arena.write_bytes(symbols[name].address - GENERIC_WINDOWS["global"], bind_object(value, buffers))
        buffers.copy_in()
        if entry not in self._decoded_entries:
            self._decoded_entries[entry] = _DecodedEntry(
                self._decode_entry(function, params, symbols, static_shared_bytes), params, symbols
            )
        known = buffers.read_initialised() if debug else None
        try:
            watching = observer or LAUNCH_OBSERVER.get()
            for done in _run_in_waves(self._decoded_entries[entry].program, arena, launch, known, watching):
                if self.progress is not None:
                    self.progress(entry, done, launch.ctas)
        finally:
            buffers.copy_out()
            if known is not None:
                buffers.write_initialised(known)
            self._save_variables(arena, symbols)

    def count_static_shared_bytes(self) -> int:
        """The bytes of the module's variables in shared memory."""
        return self._assign_addresses(next(iter(self.entries.values())), GlobalArena())[2]

    def _decode_entry(
        self,
        function: PtxFunction,
        params: dict[str, PtxVariableAddress],
        symbols: dict[str, Any],
        static_shared_bytes: int,
    ) -> PtxProgram:
        program = PtxDecoder(symbols, static_shared_bytes).decode_entry(function, params)
        program.reserved = self.reserved
        return program

    def _assign_addresses(
        self, function: PtxFunction, arena: GlobalArena
    ) -> tuple[dict[str, PtxVariableAddress], dict[str, Any], int]:
        """Addresses of parameters and of module-level names, and the bytes of static shared memory."""
        each = [(v.name, arena.add(f"parameter {v.name}", get_variable_size(v), "param")) for v in function.params]
        params = {name: PtxVariableAddress("param", offset) for name, offset in each}
        symbols: dict[str, Any] = {f.name: f for f in self.syntax.functions}
        symbols |= {f.name: f for f in self.syntax.functions if f.body is not None}
        shared = self.reserved
        for v in sorted(self.syntax.variables, key=lambda v: v.extern):  # dynamic shared memory comes last
            if v.space == "shared":
                shared = -(-shared // v.align) * v.align
                symbols[v.name] = PtxVariableAddress("shared", shared)
                shared += 0 if v.extern else get_variable_size(v)
            elif v.space in ("global", "const") and not v.extern:
                symbols[v.name] = _make_global_address(arena.add(f"variable {v.name}", get_variable_size(v), v.space))
        return params, symbols, shared

    def _initialise_variables(self, arena: GlobalArena, symbols: dict[str, Any]) -> None:
        """Set variables to their values after the last launch, or to their initial values."""
        for v in self.syntax.variables:
            if v.space not in ("global", "const") or v.extern:
                continue
            content = self.variables.get(v.name)
            if content is None and v.initial:
                content = _encode_initialiser(v, symbols)
            if content is not None:
                arena.write_bytes(symbols[v.name].address - GENERIC_WINDOWS["global"], content)

    def _save_variables(self, arena: GlobalArena, symbols: dict[str, Any]) -> None:
        for v in self.syntax.variables:
            if v.space == "global" and not v.extern:
                start = symbols[v.name].address - GENERIC_WINDOWS["global"]
                self.variables[v.name] = arena.flat.raw[start : start + get_variable_size(v)].tobytes()


@dataclass(frozen=True)
class PtxFaultSite:
    """Where a launch failed: the instruction, the block and thread if known, and what happened there."""

    instruction: PtxInstruction
    what: str
    block: tuple[int, ...] = ()
    thread: tuple[int, ...] = ()


def _run_in_waves(
    program: PtxProgram,
    arena: GlobalArena,
    launch: LaunchShape,
    known: np.ndarray | None = None,
    observer: PtxObserver | None = None,
) -> Iterator[int]:
    """Run as many CTAs at once as fit into memory; yield how many are done, from 0 on."""
    if program.shared + launch.shared > SHARED_LIMIT:
        raise ResourceError(
            "more shared memory than a CTA may have", expected=SHARED_LIMIT, received=program.shared + launch.shared
        )
    lanes, memory = (DEBUG_LANES, DEBUG_MEMORY) if launch.debug else (LANES, MEMORY)
    bytes_of_cta = program.shared + launch.shared + program.local_size * launch.threads
    together = min(lanes // launch.threads, memory // max(bytes_of_cta, 1))
    size = int(np.prod(launch.cluster))
    order = np.argsort(find_cluster_and_rank(launch)[0], kind="stable")  # the CTAs of a cluster run together
    step = max(together // size, 1) * size if not launch.cooperative else _count_cooperative_ctas(launch, bytes_of_cta)
    symbols = GlobalShadow(launch, arena.top, _find_smallest_global_access(program), known) if launch.debug else None
    for first in range(0, launch.ctas, step):
        yield first
        machine = PtxMachine(program, arena, launch, order[first : first + step], symbols, observer)
        try:
            with np.errstate(all="ignore"):
                run_machine(machine)
        except PtxFault as fault:
            raise _make_error(machine, fault) from None
        finally:
            machine.release()


def _make_error(machine: PtxMachine, fault: PtxFault) -> TesseraError:
    """The error of a fault; its `site` says where, for those who show it at the source of the PTX text."""
    inst = machine.program.lines[machine.pc].instruction
    source = f" ({inst.source})" if inst.source else ""
    who = f", {machine.describe_lane(fault.lane)}" if fault.lane is not None else ""
    error = fault.kind(f"{inst.name}{source}: {fault.message}{who}", location=inst.location)
    block, thread = machine.find_indices(fault.lane) if fault.lane is not None else ((), ())
    error.site = PtxFaultSite(inst, fault.message, block, thread)
    return error


def _count_cooperative_ctas(launch: LaunchShape, bytes_of_cta: int) -> int:
    """The CTAs of a launch that must all run at once."""
    most = min(COOPERATIVE_THREADS // launch.threads, MEMORY // max(bytes_of_cta, 1))
    if launch.ctas > most:
        raise ResourceError(
            f"a cooperative launch of {launch.ctas:,} CTAs, which must all run at once",
            expected=f"at most {most:,} of {launch.threads:,} threads and {bytes_of_cta:,} bytes each",
            received=f"{launch.ctas:,}",
        )
    return launch.ctas


def _find_smallest_global_access(program: PtxProgram) -> int:
    """The size of the smallest access to global memory, in bytes."""
    accesses = [x.instruction for x in program.lines if x.instruction.op[0] in ("ld", "ldu", "st", "atom", "red")]
    types = [TYPES[w] for i in accesses for w in i.op if w in TYPES]
    return min((t.bits // 8 for t in types), default=4)


_SAMPLER_MODES = dict(
    zip(("wrap", "mirror", "clamp_ogl", "clamp_to_edge", "clamp_to_border"), ADDRESS_MODES, strict=True)
)


def _make_sampler(v: PtxVariable) -> SamplerObject:
    """The sampler that a declaration describes."""
    given = dict(v.properties)
    modes = tuple(_SAMPLER_MODES.get(given.get(f"addr_mode_{i}", "clamp_to_edge"), "") for i in range(3))
    kind = "linear" if given.get("filter_mode") == "linear" else "point"
    return SamplerObject(modes, kind, given.get("force_unnormalized_coords", "1") == "0")


def _make_global_address(offset: int) -> PtxVariableAddress:
    return PtxVariableAddress("global", GENERIC_WINDOWS["global"] + offset)


def _convert_extent(extent: Any) -> tuple[int, int, int]:
    parts = (extent,) if isinstance(extent, int | np.integer) else tuple(extent)
    if not 1 <= len(parts) <= 3 or min(parts) < 1:
        raise ArgumentError("a grid or block has one to three positive extents", received=extent)
    return (*(int(p) for p in parts), 1, 1)[:3]  # type: ignore[return-value]


def _require_extent_within(extent: tuple[int, int, int], most: tuple[int, int, int], what: str) -> None:
    if any(n > limit for n, limit in zip(extent, most, strict=True)):
        raise ArgumentError(f"{what} is too large", expected=f"at most {most}", received=extent)


def _choose_cluster_extent(function: PtxFunction, given: Any) -> tuple[int, int, int]:
    declared = dict(function.limits).get(".reqnctapercluster")
    if declared:
        return _convert_extent(declared)
    return _convert_extent(given or 1)


def _check_launch_limits(function: PtxFunction, launch: LaunchShape) -> None:
    limits = dict(function.limits)
    required, most = limits.get(".reqntid"), limits.get(".maxntid")
    if required and _convert_extent(required) != launch.block:
        raise ArgumentError(f"{function.name} requires another block size", expected=required, received=launch.block)
    if most and launch.threads > int(np.prod(most)):
        raise ArgumentError(f"{function.name} permits fewer threads in a block", expected=most, received=launch.block)
    if launch.threads > 1024:
        raise ArgumentError("a block has at most 1024 threads", received=launch.block)
    _require_extent_within(launch.grid, _MOST_GRID, "the grid")
    _require_extent_within(launch.block, _MOST_BLOCK, "the block")
    if int(np.prod(launch.cluster)) > _MOST_CLUSTER:
        raise ArgumentError(f"a cluster has at most {_MOST_CLUSTER} CTAs", received=launch.cluster)
    if launch.shared < 0:
        raise ArgumentError("the size of shared memory is negative", received=launch.shared)
    if any(g % c for g, c in zip(launch.grid, launch.cluster, strict=True)):
        raise ArgumentError(
            "the grid is not a multiple of the cluster", expected=f"multiples of {launch.cluster}", received=launch.grid
        )


def _encode_initialiser(v: PtxVariable, symbols: dict[str, Any]) -> bytes:
    t = TYPES[v.type]
    numbers = [
        encode_immediate(x, t) if isinstance(x, ImmediateOperand) else _resolve_initial_address(v, x, symbols)
        for x in v.initial
    ]
    return b"".join((n & (1 << t.bits) - 1).to_bytes(t.bits // 8, "little") for n in numbers)


def _resolve_initial_address(v: PtxVariable, operand: PtxOperand, symbols: dict[str, Any]) -> int:
    """The address of a name in an initial value: of a variable or a function."""
    name, offset, mask = operand, 0, 0
    if isinstance(operand, AddressOperand):
        name, offset, mask = NameOperand(str(operand.base)), operand.offset, operand.mask
    result = symbols.get(name.text) if isinstance(name, NameOperand) else None
    if isinstance(result, PtxFunction) and not result.entry:
        return _select_byte(assign_function_addresses(symbols)[result.name], mask)
    if not isinstance(result, PtxVariableAddress):
        raise UnsupportedOpError(f"the initial value of {v.name} is not supported", location=v.location)
    return _select_byte(result.address + offset, mask)


def _select_byte(address: int, mask: int) -> int:
    """The byte of an address that a mask selects; the whole address where there is no mask."""
    return (address & mask) >> (mask & -mask).bit_length() - 1 if mask else address

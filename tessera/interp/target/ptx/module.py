"""A PTX module: parse once, launch entries on NumPy arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tessera.errors import ArgumentError, ResourceError, UnknownNameError, UnsupportedOpError
from tessera.interp.target.ptx import instructions  # noqa: F401  (fills the tables)
from tessera.interp.target.ptx.arguments import Buffers, parameter
from tessera.interp.target.ptx.decode import Decoder
from tessera.interp.target.ptx.fault import Fault
from tessera.interp.target.ptx.machine import Machine, Program
from tessera.interp.target.ptx.memory import WINDOWS, Arena
from tessera.interp.target.ptx.operands import Place, function_addresses, immediate
from tessera.interp.target.ptx.parser import parse
from tessera.interp.target.ptx.special import RESERVED, Launch, clusters
from tessera.interp.target.ptx.syntax import Address, Function, Name, Number, Operand, Variable
from tessera.interp.target.ptx.types import TYPES, size_of
from tessera.interp.target.ptx.world import World

SHARED_LIMIT = 227 << 10  # of the largest multiprocessor so far
_MOST_GRID, _MOST_BLOCK, _MOST_CLUSTER = (2**31 - 1, 2**16 - 1, 2**16 - 1), (1024, 1024, 64), 16
# CTAs run side by side up to so many threads and bytes of shared and local memory; fewer while accesses are recorded.
LANES, MEMORY = 1 << 16, 1 << 28
RESIDENT = 132 * 2048  # threads of a cooperative launch: as many as a GPU of 132 multiprocessors holds
DEBUG_LANES, DEBUG_MEMORY = 1 << 11, 1 << 22


@dataclass
class _Ready:
    """A decoded entry, and the part of global memory that is the same at each launch."""

    program: Program
    params: dict[str, Place]
    world: dict[str, Any]


class Module:
    """PTX text, ready to launch. Variables in global memory keep their values from launch to launch.

    >>> text = '''.version 8.0 .target sm_80 .address_size 64
    ... .visible .entry k(.param .u64 p) { .reg .b64 %a; .reg .b32 %v;
    ...   ld.param.u64 %a, [p]; ld.global.u32 %v, [%a]; add.u32 %v, %v, 1; st.global.u32 [%a], %v; ret; }'''
    >>> x = np.array([41], np.uint32)
    >>> Module(text).launch("k", args=[x]); int(x[0])
    42
    """

    def __init__(self, text: str, file: str = "<ptx>") -> None:
        self.syntax = parse(text, file)
        self.reserved = RESERVED if "%reserved_smem_offset" in text else 0
        self.entries = {f.name: f for f in self.syntax.functions if f.entry and f.body is not None}
        self.variables: dict[str, bytes] = {}
        self._ready: dict[str, _Ready] = {}

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
    ) -> None:
        """Run an entry.

        `args`: arrays are pointers, written in place; numbers and `bytes` (structs) are passed by value; a
        `TensorMap` is passed as the 128 bytes that bulk tensor copies read. `shared` is the bytes of dynamic shared
        memory, `cluster` the CTAs of a cluster where the text does not say. All CTAs of a `cooperative` launch run at
        once, so that they may wait for each other. `debug` finds registers, shared and local memory used before they
        are written, races in shared and (within and between CTAs) in global memory, barriers that a part of a warp or
        CTA misses, and data of asynchronous copies that is read without its wait or without its proxy fence.

        Raises ArgumentError, ResourceError, OutOfBoundsError, BarrierError, ExecutionError, UnsupportedOpError; under
        `debug` also UninitializedError, RaceError, AsyncCopyError. Each names the instruction, its line, the source
        line that its `.loc` gives, and the thread.
        """
        if entry not in self.entries:
            raise UnknownNameError(f"no entry {entry}", expected=", ".join(self.entries))
        function, arena = self.entries[entry], Arena()
        if len(args) != len(function.params):
            raise ArgumentError(f"{entry} has {len(function.params)} parameters", received=f"{len(args)} arguments")
        launch = Launch(_three(grid), _three(block), _cluster(function, cluster), shared, debug, cooperative)
        _check(function, launch)
        params, world, statics = self._layout(function, arena)
        buffers = Buffers(args, arena)
        arena.freeze()
        for v, a in zip(function.params, args, strict=True):
            arena.put(params[v.name].address, parameter(v, a, buffers))
        self._fill(arena, world)
        buffers.copy_in()
        if entry not in self._ready:
            self._ready[entry] = _Ready(self._decoded(function, params, world, statics), params, world)
        try:
            _run(self._ready[entry].program, arena, launch)
        finally:
            buffers.copy_out()
            self._keep(arena, world)

    def _decoded(self, function: Function, params: dict[str, Place], world: dict[str, Any], statics: int) -> Program:
        program = Decoder(world, statics).entry(function, params)
        program.reserved = self.reserved
        return program

    def _layout(self, function: Function, arena: Arena) -> tuple[dict[str, Place], dict[str, Any], int]:
        """Parameters and module-level names in memory, and the bytes of static shared memory."""
        each = [(v.name, arena.add(f"parameter {v.name}", size_of(v), "param")) for v in function.params]
        params = {name: Place("param", offset) for name, offset in each}
        world: dict[str, Any] = {f.name: f for f in self.syntax.functions}
        world |= {f.name: f for f in self.syntax.functions if f.body is not None}
        shared = self.reserved
        for v in sorted(self.syntax.variables, key=lambda v: v.extern):  # dynamic shared memory comes last
            if v.space == "shared":
                shared = -(-shared // v.align) * v.align
                world[v.name] = Place("shared", shared)
                shared += 0 if v.extern else size_of(v)
            elif v.space in ("global", "const") and not v.extern:
                world[v.name] = _place(arena.add(f"variable {v.name}", size_of(v), v.space))
        return params, world, shared

    def _fill(self, arena: Arena, world: dict[str, Any]) -> None:
        """Variables as the last launch left them, or with their initial values."""
        for v in self.syntax.variables:
            if v.space not in ("global", "const") or v.extern:
                continue
            content = self.variables.get(v.name)
            if content is None and v.initial:
                content = _initial(v, world)
            if content is not None:
                arena.put(world[v.name].address - WINDOWS["global"], content)

    def _keep(self, arena: Arena, world: dict[str, Any]) -> None:
        for v in self.syntax.variables:
            if v.space == "global" and not v.extern:
                start = world[v.name].address - WINDOWS["global"]
                self.variables[v.name] = arena.flat.raw[start : start + size_of(v)].tobytes()


def _run(program: Program, arena: Arena, launch: Launch) -> None:
    if program.shared + launch.shared > SHARED_LIMIT:
        raise ResourceError(
            "more shared memory than a CTA can have", expected=SHARED_LIMIT, received=program.shared + launch.shared
        )
    lanes, memory = (DEBUG_LANES, DEBUG_MEMORY) if launch.debug else (LANES, MEMORY)
    bytes_of_cta = program.shared + launch.shared + program.local_size * launch.threads
    together = min(lanes // launch.threads, memory // max(bytes_of_cta, 1))
    size = int(np.prod(launch.cluster))
    order = np.argsort(clusters(launch)[0], kind="stable")  # the CTAs of a cluster run together
    step = max(together // size, 1) * size if not launch.cooperative else _all(launch, bytes_of_cta)
    world = World(launch, arena.top, _smallest(program)) if launch.debug else None
    for first in range(0, launch.ctas, step):
        machine = Machine(program, arena, launch, order[first : first + step], world)
        try:
            with np.errstate(all="ignore"):
                machine.run()
        except Fault as fault:
            inst = program.lines[machine.pc].instruction
            source = f" ({inst.source})" if inst.source else ""
            who = f", {machine.name_of(fault.lane)}" if fault.lane is not None else ""
            raise fault.kind(f"{inst.name}{source}: {fault.message}{who}", location=inst.location) from None


def _all(launch: Launch, bytes_of_cta: int) -> int:
    """The CTAs of a launch that must all run at once."""
    most = min(RESIDENT // launch.threads, MEMORY // max(bytes_of_cta, 1))
    if launch.ctas > most:
        raise ResourceError(
            f"a cooperative launch of {launch.ctas:,} CTAs, which must all run at once",
            expected=f"at most {most:,} of {launch.threads:,} threads and {bytes_of_cta:,} bytes each",
            received=f"{launch.ctas:,}",
        )
    return launch.ctas


def _smallest(program: Program) -> int:
    """The bytes of the smallest access of global memory."""
    accesses = [x.instruction for x in program.lines if x.instruction.op[0] in ("ld", "ldu", "st", "atom", "red")]
    types = [TYPES[w] for i in accesses for w in i.op if w in TYPES]
    return min((t.bits // 8 for t in types), default=4)


def _place(offset: int) -> Place:
    return Place("global", WINDOWS["global"] + offset)


def _three(extent: Any) -> tuple[int, int, int]:
    parts = (extent,) if isinstance(extent, int | np.integer) else tuple(extent)
    if not 1 <= len(parts) <= 3 or min(parts) < 1:
        raise ArgumentError("a grid or block has one to three positive extents", received=extent)
    return (*(int(p) for p in parts), 1, 1)[:3]  # type: ignore[return-value]


def _within(extent: tuple[int, int, int], most: tuple[int, int, int], what: str) -> None:
    if any(n > limit for n, limit in zip(extent, most, strict=True)):
        raise ArgumentError(f"{what} is too large", expected=f"at most {most}", received=extent)


def _cluster(function: Function, given: Any) -> tuple[int, int, int]:
    declared = dict(function.limits).get(".reqnctapercluster")
    if declared:
        return _three(declared)
    return _three(given or 1)


def _check(function: Function, launch: Launch) -> None:
    limits = dict(function.limits)
    required, most = limits.get(".reqntid"), limits.get(".maxntid")
    if required and _three(required) != launch.block:
        raise ArgumentError(f"{function.name} requires its own block", expected=required, received=launch.block)
    if most and launch.threads > int(np.prod(most)):
        raise ArgumentError(f"{function.name} allows fewer threads", expected=most, received=launch.block)
    if launch.threads > 1024:
        raise ArgumentError("a block has at most 1024 threads", received=launch.block)
    _within(launch.grid, _MOST_GRID, "the grid")
    _within(launch.block, _MOST_BLOCK, "the block")
    if int(np.prod(launch.cluster)) > _MOST_CLUSTER:
        raise ArgumentError(f"a cluster has at most {_MOST_CLUSTER} CTAs", received=launch.cluster)
    if launch.shared < 0:
        raise ArgumentError("the bytes of shared memory are negative", received=launch.shared)
    if any(g % c for g, c in zip(launch.grid, launch.cluster, strict=True)):
        raise ArgumentError("a grid is whole clusters", expected=launch.cluster, received=launch.grid)


def _initial(v: Variable, world: dict[str, Any]) -> bytes:
    t = TYPES[v.type]
    numbers = [immediate(x, t) if isinstance(x, Number) else _address(v, x, world) for x in v.initial]
    return b"".join((n & (1 << t.bits) - 1).to_bytes(t.bits // 8, "little") for n in numbers)


def _address(v: Variable, operand: Operand, world: dict[str, Any]) -> int:
    """A name in an initial value: where a variable or function lies."""
    name, offset = operand, 0
    if isinstance(operand, Address):
        name, offset = Name(str(operand.base)), operand.offset
    found = world.get(name.text) if isinstance(name, Name) else None
    if isinstance(found, Function) and not found.entry:
        return function_addresses(world)[found.name]
    if not isinstance(found, Place):
        raise UnsupportedOpError(f"the initial value of {v.name}", location=v.location)
    return found.address + offset

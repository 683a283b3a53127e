"""A PTX module: parse once, launch entries on NumPy arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tessera.errors import ArgumentError, UnknownNameError, UnsupportedOpError
from tessera.interp.target.ptx import access, arith  # noqa: F401  (they fill the tables)
from tessera.interp.target.ptx.decode import Decoder, Place, size_of
from tessera.interp.target.ptx.fault import Fault
from tessera.interp.target.ptx.machine import Machine
from tessera.interp.target.ptx.memory import WINDOWS, Arena
from tessera.interp.target.ptx.parser import parse
from tessera.interp.target.ptx.syntax import Function, Number, Variable
from tessera.interp.target.ptx.types import TYPES

LANES = 1 << 16  # CTAs run side by side up to this many threads


class Module:
    """PTX text, ready to launch.

    >>> text = '''.version 8.0 .target sm_80 .address_size 64
    ... .visible .entry k(.param .u64 p) { .reg .b64 %a; .reg .b32 %v;
    ...   ld.param.u64 %a, [p]; ld.global.u32 %v, [%a]; add.u32 %v, %v, 1; st.global.u32 [%a], %v; ret; }'''
    >>> x = np.array([41], np.uint32)
    >>> Module(text).launch("k", args=[x]); int(x[0])
    42
    """

    def __init__(self, text: str, file: str = "<ptx>") -> None:
        self.syntax = parse(text, file)
        self.entries = {f.name: f for f in self.syntax.functions if f.entry and f.body is not None}

    def launch(
        self, entry: str, grid: Any = 1, block: Any = 1, args: Sequence[Any] = (), shared: int = 0, debug: bool = False
    ) -> None:
        """Run an entry: arrays are pointers, written in place; scalars are passed by value.

        `debug` reports registers read before they are written and threads that exit past a barrier.
        Raises ArgumentError, OutOfBoundsError, BarrierError, UninitializedError, UnsupportedOpError.
        """
        if entry not in self.entries:
            raise UnknownNameError(f"no entry {entry}", expected=", ".join(self.entries))
        function, arena = self.entries[entry], Arena()
        if len(args) != len(function.params):
            raise ArgumentError(f"{entry} has {len(function.params)} parameters", received=f"{len(args)} arguments")
        starts = [arena.add(f"argument {i}", a.nbytes) if isinstance(a, np.ndarray) else 0 for i, a in enumerate(args)]
        params = {v.name: _place(arena.add(f"parameter {v.name}", size_of(v))) for v in function.params}
        world, statics = self._world(arena)
        arena.freeze()
        raw = arena.flat.raw
        for v, a, start in zip(function.params, args, starts, strict=True):
            _put(raw, params[v.name].address - WINDOWS["global"], _argument(v, a, start))
            if isinstance(a, np.ndarray):
                _put(raw, start, a.tobytes())
        _initialise(self.syntax.variables, world, raw)
        try:
            self._run(Decoder(world, statics), function, params, arena, _three(grid), _three(block), shared, debug)
        finally:
            for a, start in zip(args, starts, strict=True):
                if isinstance(a, np.ndarray) and a.flags.writeable:
                    a[...] = raw[start : start + a.nbytes].view(a.dtype).reshape(a.shape)

    def _world(self, arena: Arena) -> tuple[dict[str, Any], int]:
        """What module-level names stand for, and the bytes of static shared memory."""
        world: dict[str, Any] = {f.name: f for f in self.syntax.functions}
        world |= {f.name: f for f in self.syntax.functions if f.body is not None}
        shared = 0
        for v in sorted(self.syntax.variables, key=lambda v: v.extern):  # dynamic shared memory comes last
            if v.space == "shared":
                shared = -(-shared // v.align) * v.align
                world[v.name] = Place("shared", shared)
                shared += 0 if v.extern else size_of(v)
            elif v.space in ("global", "const") and not v.extern:
                world[v.name] = _place(arena.add(f"variable {v.name}", size_of(v)))
        return world, shared

    @staticmethod
    def _run(
        decoder: Decoder,
        function: Function,
        params: dict[str, Place],
        arena: Arena,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared: int,
        debug: bool,
    ) -> None:
        program = decoder.entry(function, params)
        together = max(1, LANES // int(np.prod(block)))
        ctas = np.arange(int(np.prod(grid)))
        for first in range(0, len(ctas), together):
            chosen = ctas[first : first + together]
            machine = Machine(program, arena, block, grid, chosen, program.shared + shared, debug)
            try:
                with np.errstate(all="ignore"):
                    machine.run()
            except Fault as fault:
                inst = program.lines[machine.pc].instruction
                source = f" ({inst.source})" if inst.source else ""
                who = f", {machine.name_of(fault.lane)}" if fault.lane is not None else ""
                raise fault.kind(f"{inst.name}{source}: {fault.message}{who}", location=inst.location) from None


def _place(offset: int) -> Place:
    return Place("global", WINDOWS["global"] + offset)


def _three(extent: Any) -> tuple[int, int, int]:
    parts = (extent,) if isinstance(extent, int) else tuple(extent)
    if not 1 <= len(parts) <= 3 or min(parts) < 1:
        raise ArgumentError("a grid or block has one to three positive extents", received=extent)
    return (*parts, 1, 1)[:3]  # type: ignore[return-value]


def _put(raw: np.ndarray, start: int, content: bytes) -> None:
    raw[start : start + len(content)] = np.frombuffer(content, np.uint8)


def _argument(v: Variable, value: Any, start: int) -> bytes:
    """The bytes of a parameter."""
    if isinstance(value, np.ndarray):
        if size_of(v) != 8:
            raise ArgumentError(f"parameter {v.name} is no pointer", expected=f".{v.type}", received="an array")
        return int(WINDOWS["global"] + start).to_bytes(8, "little")
    if v.count != 1:
        raise ArgumentError(f"parameter {v.name} is a struct", received=value)
    t = TYPES[v.type]
    if isinstance(value, int | np.integer) and t.kind != "f":
        return (int(value) & (1 << t.bits) - 1).to_bytes(t.bits // 8, "little")
    dtype = t.dtype if t.kind == "f" else np.dtype(f"f{t.bits // 8}")
    return np.array(value, dtype).tobytes()


def _initialise(variables: Sequence[Variable], world: dict[str, Any], raw: np.ndarray) -> None:
    for v in variables:
        if not v.initial:
            continue
        size, start = TYPES[v.type].bits // 8, world[v.name].address - WINDOWS["global"]
        if not all(isinstance(x, Number) for x in v.initial):
            raise UnsupportedOpError(f"an address in the initial value of {v.name}", location=v.location)
        content = b"".join((x.value & (1 << 8 * size) - 1).to_bytes(size, "little") for x in v.initial)  # type: ignore
        _put(raw, start, content)

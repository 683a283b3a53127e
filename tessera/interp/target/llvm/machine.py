"""Running a decoded function: the lowest block that has lanes waiting goes first."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tessera.errors import ExecutionError, Location, TesseraError
from tessera.interp.target.llvm.constants import Addresses
from tessera.interp.target.llvm.debug_info import source_location
from tessera.interp.target.llvm.decode import Decoder, External
from tessera.interp.target.llvm.fault import Fault
from tessera.interp.target.llvm.frame import Block, Code, Edge, Frame, Part
from tessera.interp.target.llvm.lanes import Value
from tessera.interp.target.llvm.memory import Memory
from tessera.interp.target.llvm.syntax import Function, Instruction, Program

_DEPTH = 128  # a call takes five of the thousand frames that Python has


class Library:
    """The decoded functions of a program, each decoded when it is first called."""

    def __init__(self, program: Program, addresses: Addresses, externals: Mapping[str, External]) -> None:
        self.program = program
        self._externals = externals
        self._addresses = addresses
        self._codes: dict[str, Code] = {}

    def code(self, function: Function) -> Code:
        """The decoded function."""
        if function.name not in self._codes:
            self._codes[function.name] = Decoder(self.program, function, self._addresses, self._externals).code()
        return self._codes[function.name]


class Machine:
    """One call from outside: a library and the memory it works on."""

    def __init__(self, library: Library, memory: Memory) -> None:
        self._library = library
        self.memory = memory
        self._depth = 0

    def run(self, function: Function, arguments: list[Value], ids: np.ndarray) -> Value | None:
        """Run a function for lanes with these numbers; what it returns."""
        if self._depth >= _DEPTH:
            raise Fault(f"calls are nested deeper than {_DEPTH}")
        frame = Frame(self, self._library.code(function), arguments, ids)
        self._depth += 1
        try:
            self._schedule(frame)
        finally:
            self._depth -= 1
            for address in frame.allocated:
                self.memory.free(address)
        return frame.result

    def _schedule(self, frame: Frame) -> None:
        blocks = frame.code.blocks
        ready: dict[int, Part] = {0: None}  # None: all lanes
        while ready:
            number = min(ready)
            block = blocks[number]
            frame.enter(block, ready.pop(number))
            for edge, part in self._block(frame, block):
                lanes = frame.follow(edge, part)
                ready[edge.target] = _together(ready, edge, lanes, frame.total)

    def _block(self, frame: Frame, block: Block) -> list[tuple[Edge, Part]]:
        at = 0
        try:
            for at, step in enumerate(block.steps):  # noqa: B007 (read when a step fails)
                step(frame)
            at = -1
            frame.spread(block)
            return block.leave(frame)
        except Fault as fault:
            raise self._report(fault, frame, block.body[at]) from None

    def _report(self, fault: Fault, frame: Frame, i: Instruction) -> TesseraError:
        """The error a user sees: with the source line, else the line of the text."""
        message = fault.message
        running = frame.running()
        if fault.lane is not None or (len(running) == 1 and frame.total > 1):
            message += f", lane {running[fault.lane or 0]}"
        source = source_location(self._library.program, i)
        return fault.kind(f"{message} [{i} at {i.where}]", location=source or i.where)


def _together(ready: dict[int, Part], edge: Edge, lanes: Part, total: int) -> Part:
    """The lanes that wait at a block, with those that have just come."""
    if lanes is None or edge.target not in ready:
        return lanes
    waiting = ready[edge.target]
    if waiting is None:
        raise ExecutionError("a lane waits twice", location=Location())
    both = np.sort(np.concatenate([waiting, lanes]))
    return None if len(both) == total else both

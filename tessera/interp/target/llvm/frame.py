"""One activation of a function: its registers, the lanes that are running and the memory they see."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tessera.interp.target.llvm.lanes import Value, choose, place
from tessera.interp.target.llvm.memory import Memory
from tessera.interp.target.llvm.syntax import Function, Instruction

if TYPE_CHECKING:
    from tessera.interp.target.llvm.machine import Machine

Step = Callable[["Frame"], None]
# The lanes of one outcome, as positions among the running ones; None for all of them.
Part = np.ndarray | None


class Edge(NamedTuple):
    """A way to a block, and the registers that its phis read and write."""

    target: int
    sources: tuple[int, ...]
    sinks: tuple[int, ...]


Leave = Callable[["Frame"], list[tuple[Edge, Part]]]


@dataclass(frozen=True)
class Block:
    """A decoded basic block."""

    body: tuple[Instruction, ...]  # without phis
    steps: tuple[Step, ...]
    leave: Leave
    reads: tuple[int, ...]  # registers from outside
    writes: tuple[int, ...]  # registers that others read


@dataclass(frozen=True)
class Code:
    """A decoded function; `registers` holds its constants already."""

    function: Function
    blocks: tuple[Block, ...]
    registers: tuple[Value | None, ...]


class Frame:
    """The state that steps work on; they see the running lanes only, through `w`."""

    def __init__(self, machine: Machine, code: Code, arguments: list[Value], ids: np.ndarray) -> None:
        self.machine = machine
        self.memory: Memory = machine.memory
        self.code = code
        self.ids = ids  # the caller's numbers of the lanes
        self.total = self.n = len(ids)
        self.registers = [*arguments, *code.registers[len(arguments) :]]
        self.w: list = self.registers
        self.lanes: Part = None
        self.allocated: list[int] = []
        self.result: Value | None = None

    def enter(self, block: Block, lanes: Part) -> None:
        """Bring in the registers of the lanes that are to run; all lanes use the registers themselves."""
        self.lanes = lanes
        if lanes is None:
            self.w, self.n = self.registers, self.total
            return
        self.n = len(lanes)
        self.w = w = list(self.registers)
        for register in block.reads:
            value = w[register]
            assert value is not None
            w[register] = choose(value, lanes)

    def spread(self, block: Block) -> None:
        """Put what the running lanes computed beside the values of the others."""
        if self.lanes is not None:
            for register in block.writes:
                self._put(register, self.w[register], self.lanes)

    def follow(self, edge: Edge, part: Part) -> Part:
        """Evaluate the phis on an edge, all reads before any write; the lanes that take it."""
        values = [self.w[source] for source in edge.sources]
        lanes = self.absolute(part)
        if lanes is None:
            for sink, value in zip(edge.sinks, values, strict=True):
                self.registers[sink] = value
            return None
        for sink, value in zip(edge.sinks, values, strict=True):
            self._put(sink, value if part is None else choose(value, part), lanes)
        return lanes

    def finish(self, value: Value | None) -> None:
        """Return from the running lanes."""
        if self.lanes is None or value is None:
            self.result = value
        else:
            self.result = place(self.result, value, self.lanes, self.total)

    def absolute(self, part: Part) -> Part:
        """Positions among the running lanes as positions among all."""
        if self.lanes is None or part is None:
            return part if self.lanes is None else self.lanes
        return self.lanes[part]

    def running(self) -> np.ndarray:
        """The caller's numbers of the running lanes."""
        return self.ids if self.lanes is None else self.ids[self.lanes]

    def _put(self, register: int, value: Value, lanes: np.ndarray) -> None:
        self.registers[register] = place(self.registers[register], value, lanes, self.total)

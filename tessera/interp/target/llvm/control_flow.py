"""SIMT control flow: frames with divergent lanes, terminators, and the order in which blocks run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tessera.interp.target.llvm.lanes import LaneFault, RegisterValue, scatter_lanes, select_lanes
from tessera.interp.target.llvm.memory import SegmentedMemory
from tessera.interp.target.llvm.text.syntax import LlvmFunction, LlvmInstruction

if TYPE_CHECKING:
    from tessera.interp.target.llvm.machine import LlvmMachine


# One activation of a function: its registers, the lanes that are running and the memory they see.


RegisterStep = Callable[["LlvmFrame"], None]
# The lanes of one outcome, as positions among the running ones; None for all of them.
LaneSubset = np.ndarray | None


class BlockEdge(NamedTuple):
    """A way to a block, and the registers that its phis read and write."""

    target: int
    sources: tuple[int, ...]
    sinks: tuple[int, ...]


LeaveBlock = Callable[["LlvmFrame"], list[tuple[BlockEdge, LaneSubset]]]


@dataclass(frozen=True)
class DecodedBlock:
    """A decoded basic block."""

    body: tuple[LlvmInstruction, ...]  # without phis
    steps: tuple[RegisterStep, ...]
    leave: LeaveBlock
    reads: tuple[int, ...]  # registers from outside
    writes: tuple[int, ...]  # registers that others read


@dataclass(frozen=True)
class DecodedFunction:
    """A decoded function; `registers` holds its constants already."""

    function: LlvmFunction
    blocks: tuple[DecodedBlock, ...]
    registers: tuple[RegisterValue | None, ...]


class LlvmFrame:
    """The state that steps work on; they see the running lanes only, through `w`."""

    def __init__(
        self, machine: LlvmMachine, code: DecodedFunction, arguments: list[RegisterValue], ids: np.ndarray
    ) -> None:
        self.machine = machine
        self.memory: SegmentedMemory = machine.memory
        self.code = code
        self.ids = ids  # the caller's numbers of the lanes
        self.total = self.n = len(ids)
        self.registers = [*arguments, *code.registers[len(arguments) :]]
        self.w: list = self.registers
        self.lanes: LaneSubset = None
        self.allocated: list[int] = []
        self.result: RegisterValue | None = None

    def enter(self, block: DecodedBlock, lanes: LaneSubset) -> None:
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
            w[register] = select_lanes(value, lanes)

    def spread(self, block: DecodedBlock) -> None:
        """Put what the running lanes computed beside the values of the others."""
        if self.lanes is not None:
            for register in block.writes:
                self._put(register, self.w[register], self.lanes)

    def follow(self, edge: BlockEdge, part: LaneSubset) -> LaneSubset:
        """Evaluate the phis on an edge, all reads before any write; the lanes that take it."""
        values = [self.w[source] for source in edge.sources]
        lanes = self.absolute(part)
        if lanes is None:
            for sink, value in zip(edge.sinks, values, strict=True):
                self.registers[sink] = value
            return None
        for sink, value in zip(edge.sinks, values, strict=True):
            self._put(sink, value if part is None else select_lanes(value, part), lanes)
        return lanes

    def finish(self, value: RegisterValue | None) -> None:
        """Return from the running lanes."""
        if self.lanes is None or value is None:
            self.result = value
        else:
            self.result = scatter_lanes(self.result, value, self.lanes, self.total)

    def absolute(self, part: LaneSubset) -> LaneSubset:
        """Positions among the running lanes as positions among all."""
        if self.lanes is None or part is None:
            return part if self.lanes is None else self.lanes
        return self.lanes[part]

    def running(self) -> np.ndarray:
        """The caller's numbers of the running lanes."""
        return self.ids if self.lanes is None else self.ids[self.lanes]

    def _put(self, register: int, value: RegisterValue, lanes: np.ndarray) -> None:
        self.registers[register] = scatter_lanes(self.registers[register], value, lanes, self.total)


# Terminators: which lanes go where, and the order in which blocks are run.


BuildTerminator = Callable[[LlvmInstruction, tuple[int, ...], list[BlockEdge]], LeaveBlock]


def _build_branch(i: LlvmInstruction, args: tuple[int, ...], edges: list[BlockEdge]) -> LeaveBlock:
    if not args:
        always: list[tuple[BlockEdge, LaneSubset]] = [(edges[0], None)]
        return lambda f: always
    (condition,), (yes, no) = args, edges

    def leave(f: LlvmFrame) -> list[tuple[BlockEdge, LaneSubset]]:
        value = f.w[condition]
        if value.all():
            return [(yes, None)]
        if not value.any():
            return [(no, None)]
        return [(yes, np.flatnonzero(value)), (no, np.flatnonzero(~value))]

    return leave


def _build_switch(i: LlvmInstruction, args: tuple[int, ...], edges: list[BlockEdge]) -> LeaveBlock:
    value, *cases = args

    def leave(f: LlvmFrame) -> list[tuple[BlockEdge, LaneSubset]]:
        number = f.w[value]
        out: list[tuple[BlockEdge, LaneSubset]] = []
        left = np.ones(len(number), bool)
        for case, edge in zip(cases, edges[1:], strict=True):
            chosen = left & (number == f.w[case][0])
            if chosen.all():
                return [(edge, None)]
            if chosen.any():
                out.append((edge, np.flatnonzero(chosen)))
                left &= ~chosen
        if left.all():
            return [(edges[0], None)]
        return [*out, (edges[0], np.flatnonzero(left))] if left.any() else out

    return leave


def _build_return(i: LlvmInstruction, args: tuple[int, ...], edges: list[BlockEdge]) -> LeaveBlock:
    def leave(f: LlvmFrame) -> list[tuple[BlockEdge, LaneSubset]]:
        f.finish(f.w[args[0]] if args else None)
        return []

    return leave


def _build_unreachable(i: LlvmInstruction, args: tuple[int, ...], edges: list[BlockEdge]) -> LeaveBlock:
    def leave(f: LlvmFrame) -> list[tuple[BlockEdge, LaneSubset]]:
        raise LaneFault("reached 'unreachable'")

    return leave


TERMINATORS_BY_OPCODE: dict[str, BuildTerminator] = {
    "br": _build_branch,
    "switch": _build_switch,
    "ret": _build_return,
    "unreachable": _build_unreachable,
}

_Graph = dict[str, tuple[str, ...]]


def order_blocks(function: LlvmFunction) -> list[str]:
    """The reachable blocks such that a loop is whole: what follows it comes after all of it.

    Lanes that leave a loop early then wait behind it for the others.
    """
    graph = {block.label: block.body[-1].labels for block in function.blocks}
    entry = function.blocks[0].label
    return _order_components([entry], set(_walk_postorder([entry], graph, set(graph))), graph)


def _order_components(starts: list[str], inside: set[str], graph: _Graph) -> list[str]:
    """Components in topological order, each with its head first and then its own components."""
    backward: dict[str, list[str]] = {label: [] for label in inside}
    for label in inside:
        for successor in set(graph[label]) & inside:
            backward[successor].append(label)
    out, left = [], set(inside)
    for head in reversed(_walk_postorder(starts, graph, inside)):
        if head not in left:
            continue
        component = set(_walk_postorder([head], backward, left))
        left -= component
        out.append(head)
        if rest := component - {head}:
            out += _order_components([s for s in graph[head] if s in rest], rest, graph)
    return out


def _walk_postorder(starts: list[str], graph: dict, inside: set[str]) -> list[str]:
    """Depth first, without recursion: a function may have thousands of blocks in a row."""
    seen: set[str] = set()
    out: list[str] = []
    stack: list[tuple[str, Iterable[str]]] = [("", iter(starts))]
    while stack:
        label, successors = stack[-1]
        for successor in successors:
            if successor in inside and successor not in seen:
                seen.add(successor)
                stack.append((successor, iter(graph[successor])))
                break
        else:
            stack.pop()
            out.append(label)
    return out[:-1]

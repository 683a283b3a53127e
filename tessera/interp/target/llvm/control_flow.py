"""SIMT control flow: frames with divergent lanes, terminators, and the block order that makes lanes reconverge."""

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


# Frames: the state of one call of a function.


RegisterStep = Callable[["LlvmFrame"], None]
# Lanes as indices among the active ones; None for all of them.
LaneSubset = np.ndarray | None


class BlockEdge(NamedTuple):
    """An edge of the control-flow graph, with the registers that the phis of its target read and write."""

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
    reads: tuple[int, ...]  # registers defined in other blocks
    writes: tuple[int, ...]  # registers that other blocks read


@dataclass(frozen=True)
class DecodedFunction:
    """A decoded function; `registers` holds its constants."""

    function: LlvmFunction
    blocks: tuple[DecodedBlock, ...]
    registers: tuple[RegisterValue | None, ...]


class LlvmFrame:
    """The state of one call: `registers` hold the values of all lanes, `active` those of the active lanes.

    Steps see the active lanes alone. `active_lanes` are their indices, None for all lanes; `lane_numbers` are the
    caller's numbers of all lanes.
    """

    def __init__(
        self, machine: LlvmMachine, code: DecodedFunction, arguments: list[RegisterValue], lane_numbers: np.ndarray
    ) -> None:
        self.machine = machine
        self.memory: SegmentedMemory = machine.memory
        self.code = code
        self.lane_numbers = lane_numbers
        self.total = self.active_count = len(lane_numbers)
        self.registers = [*arguments, *code.registers[len(arguments) :]]
        self.active: list = self.registers
        self.active_lanes: LaneSubset = None
        self.allocated: list[int] = []
        self.result: RegisterValue | None = None


def enter_block(frame: LlvmFrame, block: DecodedBlock, lanes: LaneSubset) -> None:
    """Make some lanes active and select their registers; all lanes use the registers themselves."""
    frame.active_lanes = lanes
    if lanes is None:
        frame.active, frame.active_count = frame.registers, frame.total
        return
    frame.active_count = len(lanes)
    frame.active = active = list(frame.registers)
    for register in block.reads:
        value = active[register]
        assert value is not None
        active[register] = select_lanes(value, lanes)


def write_back(frame: LlvmFrame, block: DecodedBlock) -> None:
    """Merge the results of the active lanes into the registers of all lanes."""
    if frame.active_lanes is not None:
        for register in block.writes:
            _write_lanes(frame, register, frame.active[register], frame.active_lanes)


def take_edge(frame: LlvmFrame, edge: BlockEdge, subset: LaneSubset) -> LaneSubset:
    """Evaluate the phis on an edge, all reads before any write; the lanes that take the edge."""
    values = [frame.active[source] for source in edge.sources]
    lanes = find_lanes(frame, subset)
    if lanes is None:
        for sink, value in zip(edge.sinks, values, strict=True):
            frame.registers[sink] = value
        return None
    for sink, value in zip(edge.sinks, values, strict=True):
        _write_lanes(frame, sink, value if subset is None else select_lanes(value, subset), lanes)
    return lanes


def return_value(frame: LlvmFrame, value: RegisterValue | None) -> None:
    """Return from the active lanes."""
    if frame.active_lanes is None or value is None:
        frame.result = value
    else:
        frame.result = scatter_lanes(frame.result, value, frame.active_lanes, frame.total)


def find_lanes(frame: LlvmFrame, subset: LaneSubset) -> LaneSubset:
    """Indices among the active lanes as indices among all lanes."""
    if frame.active_lanes is None or subset is None:
        return subset if frame.active_lanes is None else frame.active_lanes
    return frame.active_lanes[subset]


def number_active_lanes(frame: LlvmFrame) -> np.ndarray:
    """The caller's numbers of the active lanes."""
    return frame.lane_numbers if frame.active_lanes is None else frame.lane_numbers[frame.active_lanes]


def _write_lanes(frame: LlvmFrame, register: int, value: RegisterValue, lanes: np.ndarray) -> None:
    frame.registers[register] = scatter_lanes(frame.registers[register], value, lanes, frame.total)


# Terminators: which lanes take which edge.


BuildTerminator = Callable[[LlvmInstruction, tuple[int, ...], list[BlockEdge]], LeaveBlock]


def _build_branch(i: LlvmInstruction, args: tuple[int, ...], edges: list[BlockEdge]) -> LeaveBlock:
    if not args:
        always: list[tuple[BlockEdge, LaneSubset]] = [(edges[0], None)]
        return lambda f: always
    (condition,), (yes, no) = args, edges

    def leave(f: LlvmFrame) -> list[tuple[BlockEdge, LaneSubset]]:
        value = f.active[condition]
        count = np.count_nonzero(value)
        if count == len(value):
            return [(yes, None)]
        if not count:
            return [(no, None)]
        return [(yes, np.flatnonzero(value)), (no, np.flatnonzero(~value))]

    return leave


def _build_switch(i: LlvmInstruction, args: tuple[int, ...], edges: list[BlockEdge]) -> LeaveBlock:
    value, *cases = args

    def leave(f: LlvmFrame) -> list[tuple[BlockEdge, LaneSubset]]:
        number = f.active[value]
        out: list[tuple[BlockEdge, LaneSubset]] = []
        remaining = np.ones(len(number), bool)
        for case, edge in zip(cases, edges[1:], strict=True):
            chosen = remaining & (number == f.active[case][0])
            if chosen.all():
                return [(edge, None)]
            if chosen.any():
                out.append((edge, np.flatnonzero(chosen)))
                remaining &= ~chosen
        if remaining.all():
            return [(edges[0], None)]
        return [*out, (edges[0], np.flatnonzero(remaining))] if remaining.any() else out

    return leave


def _build_return(i: LlvmInstruction, args: tuple[int, ...], edges: list[BlockEdge]) -> LeaveBlock:
    def leave(f: LlvmFrame) -> list[tuple[BlockEdge, LaneSubset]]:
        return_value(f, f.active[args[0]] if args else None)
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
    """The reachable blocks in an order that keeps loops contiguous: a block after a loop comes after all of it.

    Lanes that leave a loop early then wait behind it until the others reconverge with them.
    """
    graph = {block.label: block.body[-1].labels for block in function.blocks}
    entry = function.blocks[0].label
    return _order_components([entry], set(_walk_postorder([entry], graph, set(graph))), graph)


def _order_components(starts: list[str], inside: set[str], graph: _Graph) -> list[str]:
    """Strongly connected components in topological order, each as its head followed by its own components."""
    backward: dict[str, list[str]] = {label: [] for label in inside}
    for label in inside:
        for successor in set(graph[label]) & inside:
            backward[successor].append(label)
    out, remaining = [], set(inside)
    for head in reversed(_walk_postorder(starts, graph, inside)):
        if head not in remaining:
            continue
        component = set(_walk_postorder([head], backward, remaining))
        remaining -= component
        out.append(head)
        if rest := component - {head}:
            out += _order_components([s for s in graph[head] if s in rest], rest, graph)
    return out


def _walk_postorder(starts: list[str], graph: dict, inside: set[str]) -> list[str]:
    """Depth-first postorder without recursion: a function may have thousands of consecutive blocks."""
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

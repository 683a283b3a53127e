"""Memory accesses in debug mode: which elements each instance touches, and the checks they must pass.

The checks are bounds, alignment, initialisation and races.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tessera.interp.sanitizer.report import Finding
from tessera.interp.sanitizer.shadow_memory import (
    ATOMIC,
    CONFLICTING_KINDS,
    READ,
    WRITE,
    AccessLanes,
    ConflictingLanes,
    ShadowRegion,
)
from tessera.interp.tile.machine import TileMachine
from tessera.interp.tile.memory import EDGE_ADVICE, BlockAccess, InstanceMemory, expand_block_axes
from tessera.ir.core import Node

if TYPE_CHECKING:
    from tessera.interp.sanitizer.grid_chunk import BarrierCounts, GridChunk
    from tessera.interp.sanitizer.monitor import Monitor
    from tessera.interp.sanitizer.shadow_memory import RaceDomain

ACCESS_VERBS = {READ: "reads", WRITE: "writes", ATOMIC: "updates"}


@dataclass
class InstanceAccess:
    """The elements that all instances access at one op: an index array for each axis of the memory."""

    node: Node
    memory: InstanceMemory
    indices: list[np.ndarray]
    shape: tuple[int, ...]  # the instance axes, then the block axes
    keep: np.ndarray | None
    clip: bool = False

    @classmethod
    def of(cls, node: Node, place: BlockAccess, keep: np.ndarray | None, clip: bool = False) -> InstanceAccess:
        """The access of a block at a start index."""
        return cls(node, place.memory, place.indices(), (*place.count, *place.block), keep, clip)

    def lane(self, place: int) -> tuple[int, ...]:
        """The index of a lane along the instance axes and the block axes, from its flat number."""
        return tuple(int(i) for i in np.unravel_index(place, self.shape))

    def element(self, place: int) -> str:
        """Format the element that a lane accesses: its memory and its index."""
        lane = self.lane(place)
        index = [int(np.broadcast_to(i, self.shape)[lane]) for i in self.indices[self.memory.lead :]]
        name = self.memory.name
        return f"{name}{', element ' if ' ' in name else ''}[{', '.join(map(str, index))}]"

    def read_values(self, places: np.ndarray) -> np.ndarray:
        """The values that the memory holds at some lanes."""
        index = tuple(np.broadcast_to(i, self.shape).reshape(-1)[places] for i in self.indices)
        return self.memory.array[index] if index else np.broadcast_to(self.memory.array, places.shape)


def find_active_lanes(
    monitor: Monitor, machine: TileMachine, access: InstanceAccess, region: ShadowRegion
) -> AccessLanes:
    """The lanes of an access that are active and in bounds."""
    chunk = monitor.chunk
    assert chunk is not None
    if region.log is not None:
        monitor.settle(region)
    return find_lanes(chunk, machine, access, region, chunk.epoch + chunk.turn, inner=chunk.inner)


def find_lanes(
    chunk: GridChunk, box: Any, access: InstanceAccess, region: ShadowRegion, epochs: np.ndarray, *,
    columns: np.ndarray | None = None, inner: Sequence[BarrierCounts] = (),
) -> AccessLanes:  # fmt: skip
    """The lanes of an access by the instances of a box (a machine or an affine access), in the epochs passed.

    `columns`: those are clocks of these columns. `inner`: what the stretches within a group have met.
    """
    depth = len(access.shape) - box.rank

    def spread(table: np.ndarray) -> np.ndarray:
        return np.broadcast_to(expand_block_axes(chunk.view(table, box), depth), access.shape).reshape(-1)

    cells = np.broadcast_to(region.cells(access.memory, access.indices), access.shape).reshape(-1)
    within = tuple(spread(m.epochs) for m in inner)
    column = None if columns is None else spread(columns)
    lanes = AccessLanes(cells, spread(chunk.who), spread(epochs), np.arange(cells.size), column, within)
    return lanes if access.keep is None else lanes.part(np.flatnonzero(np.broadcast_to(access.keep, access.shape)))


def clip_access(access: InstanceAccess) -> InstanceAccess:
    """The access without its out-of-bounds lanes."""
    return _drop_outside(access, lambda axis, wrong: None)


def check_bounds(monitor: Monitor, machine: TileMachine, access: InstanceAccess) -> InstanceAccess:
    """The access without its out-of-bounds lanes; unless the access clips, they are a finding."""

    def report(axis: int, wrong: np.ndarray) -> None:
        if not access.clip and wrong.any():
            _report_out_of_bounds(monitor, machine, access, axis, wrong)

    return _drop_outside(access, report)


def _drop_outside(access: InstanceAccess, report: Callable[[int, np.ndarray], None]) -> InstanceAccess:
    keep, array = access.keep, access.memory.array
    for axis in range(access.memory.lead, array.ndim):
        index, size = access.indices[axis], array.shape[axis]
        if not index.size or (index.min() >= 0 and index.max() < size):
            continue
        good = (index >= 0) & (index < size)
        report(axis, ~good if keep is None else ~good & keep)
        keep = good if keep is None else good & keep
    return InstanceAccess(access.node, access.memory, access.indices, access.shape, keep, access.clip)


def _report_out_of_bounds(
    monitor: Monitor, machine: TileMachine, access: InstanceAccess, axis: int, wrong: np.ndarray
) -> None:
    place = int(np.flatnonzero(np.broadcast_to(wrong, access.shape))[0])
    lane, memory = access.lane(place), access.memory
    index, size = int(np.broadcast_to(access.indices[axis], access.shape)[lane]), memory.array.shape[axis]
    assert monitor.chunk is not None
    who = int(monitor.chunk.view(monitor.chunk.who, machine)[lane[: machine.rank]])
    message = (
        f"index {index} is outside axis {axis - memory.lead} of {memory.name}, whose size is {size}: "
        f"{monitor.name(who)}, element {lane[machine.rank :]} of its block"
    )
    monitor.report_finding(
        Finding("bounds", message, access.node.loc, None, EDGE_ADVICE, monitor.instance(who)), last=True
    )


def check_alignment(monitor: Monitor, machine: TileMachine, access: InstanceAccess) -> None:
    """Report a vector access whose address is not a multiple of its width (rule M11)."""
    width, array = access.node.attrs["vector"], access.memory.array
    if width == 1:
        return
    lead = access.memory.lead
    strides = array.strides[lead:]
    offset: Any = sum(i * (s // array.itemsize) for i, s in zip(access.indices[lead:], strides, strict=True))
    index: tuple[Any, ...] = (..., *(0,) * (len(access.shape) - machine.rank))
    first = np.broadcast_to(offset, access.shape)[index]
    keep = True if machine.active is None else machine.active
    wrong = (first % width != 0) & keep
    if wrong.any():
        place = tuple(int(i) for i in np.argwhere(wrong)[0])
        who = monitor.who(machine, place)
        message = (
            f"a vector of {width} elements begins at element {int(first[place])} of {access.memory.name}, which is no "
            f"multiple of {width}: {monitor.name(who)}"
        )
        suggestion = "begin each row at a multiple of the width (pad it), or load without load_vector"
        monitor.report_finding(Finding("alignment", message, access.node.loc, None, suggestion, monitor.instance(who)))


def check_access(
    monitor: Monitor, access: InstanceAccess, kind: str, region: ShadowRegion, lanes: AccessLanes, value: Any = None
) -> None:
    """Report every rule that an access breaks, before it is made; `value` is what a write stores, lane by lane."""
    _check_copies(monitor, access, kind, region, lanes)
    if kind != WRITE and region.ready is not None:
        _check_initialised(monitor, access, region, lanes)
    for opposed in CONFLICTING_KINDS[kind]:
        for domain in region.domains:
            for met in domain.of(opposed, region.size).met(lanes) if opposed in domain.slots else ():
                bad = _drop_benign_races(monitor, access, met, lanes, value, kind == opposed)
                if bad.lanes.size:
                    _report_race(monitor, access, domain, kind, lanes, bad, opposed)
                    break


def _drop_benign_races(
    monitor: Monitor, access: InstanceAccess, met: ConflictingLanes, lanes: AccessLanes, value: Any, writes: bool
) -> ConflictingLanes:
    """The lanes that race: instances that write the same value at the same op do not (rule M6)."""
    if not writes:
        return met
    place = lanes.place[met.lanes]
    return met.part(
        ~((met.node == monitor.number(access.node)) & equal_or_nan(access.read_values(place), value[place]))
    )


def equal_or_nan(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Where values are equal; a NaN equals a NaN."""
    return np.asarray((a == b) | ((a != a) & (b != b)), bool)


def check_write_conflicts(
    monitor: Monitor, access: InstanceAccess, region: ShadowRegion, lanes: AccessLanes, value: np.ndarray
) -> None:
    """Report instances that wrote different values to one element at one op."""
    for domain in region.domains:
        for met in domain.of(WRITE, region.size).met(lanes):
            places = lanes.place[met.lanes]
            bad = met.part(
                (met.node == monitor.number(access.node)) & ~equal_or_nan(access.read_values(places), value[places])
            )
            if bad.lanes.size:
                _report_race(monitor, access, domain, WRITE, lanes, bad, WRITE)
                break


# For each kind of race: the missing ordering, and what to add.
_RACE_ADVICE = {
    "race": ("and no barrier lies between", "put tile.barrier() between the two"),
    "unordered": (
        "and neither a barrier nor a phase of an mbarrier orders them",
        "let the first arrive at an mbarrier after its access, and the second wait for the end of that very phase (the "
        "same stage, the right parity) before its own",
    ),
    "program race": ("and programs of a grid have no order", "write by one program alone, or use an atomic"),
}


def _report_race(
    monitor: Monitor,
    access: InstanceAccess,
    domain: RaceDomain,
    kind: str,
    lanes: AccessLanes,
    met: ConflictingLanes,
    opposed: str,
) -> None:
    """Report the first lane that conflicts with an earlier access."""
    lane = met.lanes[0]
    place, me, other = int(lanes.place[lane]), int(lanes.who[lane]), int(met.who[0])
    node = monitor.nodes[int(met.node[0])]
    if met.copied:
        _report_early_access(monitor, access, (ACCESS_VERBS[kind], place, me), ACCESS_VERBS[opposed], other, node)
        return
    lacks, suggestion = _RACE_ADVICE[domain.kind]
    message = (
        f"a data race on {access.element(place)}: {monitor.name(me)} {ACCESS_VERBS[kind]} it, "
        f"{monitor.name(other)} {ACCESS_VERBS[opposed]} it, {lacks}"
    )
    monitor.report_finding(Finding(domain.kind, message, access.node.loc, node.loc, suggestion, monitor.instance(me)))


def _report_early_access(
    monitor: Monitor, access: InstanceAccess, lane: tuple[str, int, int], does: str, other: int, node: Node
) -> None:
    """Report an access that conflicts with a copy of an mbarrier phase for which its tile has not waited."""
    verb, place, me = lane
    who, element = monitor.name(me), access.element(place)
    suggestion = "wait first for the end of the phase, of the mbarrier, that counts the copy: its stage and its parity"
    if me == other:
        message = f"{who} {verb} {element} while an asynchronous copy that {does} it is under way"
        monitor.report_finding(Finding("async", message, access.node.loc, node.loc, suggestion, monitor.instance(me)))
        return
    message = (
        f"a data race on {element}: {who} {verb} it, a copy that {monitor.name(other)} began {does} it, and no wait at "
        "the mbarrier that counts the copy orders them"
    )
    monitor.report_finding(Finding("unordered", message, access.node.loc, node.loc, suggestion, monitor.instance(me)))


def _check_initialised(monitor: Monitor, access: InstanceAccess, region: ShadowRegion, lanes: AccessLanes) -> None:
    assert region.ready is not None
    bad = np.flatnonzero(~region.ready[lanes.cells])
    if bad.size:
        who = int(lanes.who[bad[0]])
        message = (
            f"{access.element(int(lanes.place[bad[0]]))} is read before anything is written there: {monitor.name(who)}"
        )
        suggestion = "write it first, or mask what is not written"
        monitor.report_finding(
            Finding("uninitialized", message, access.node.loc, None, suggestion, monitor.instance(who))
        )


def _check_copies(
    monitor: Monitor, access: InstanceAccess, kind: str, region: ShadowRegion, lanes: AccessLanes
) -> None:
    if region.copy_writes is None or region.copy_reads is None or region.copy is None:
        return
    under_way = region.copy_writes[lanes.cells] > 0
    if kind != READ:
        under_way |= region.copy_reads[lanes.cells] > 0
    bad = np.flatnonzero(under_way)
    if bad.size:
        what = "to" if region.copy_writes[lanes.cells[bad[0]]] > 0 else "from"
        who = int(lanes.who[bad[0]])
        message = (
            f"{monitor.name(who)} {ACCESS_VERBS[kind]} {access.element(int(lanes.place[bad[0]]))} "
            f"while an asynchronous copy {what} it is under way"
        )
        began = monitor.nodes[region.copy[lanes.cells[bad[0]]]].loc
        suggestion = "wait for the copy first: tile.cp_wait_group(...)"
        monitor.report_finding(Finding("async", message, access.node.loc, began, suggestion, monitor.instance(who)))

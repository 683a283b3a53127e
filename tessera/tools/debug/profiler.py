"""Kernel profiler: operations, bytes, flops, sectors and bank conflicts by launch, from the accesses of each node."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tessera.codegen.contract import ResourceUsage, measure_resources
from tessera.core.types import GLOBAL, SHARED, RefType, TensorType
from tessera.interp.observers import ObservedLaunch
from tessera.interp.sanitizer import memory_transactions
from tessera.interp.sanitizer import op_checks as watched
from tessera.interp.sanitizer.access import InstanceAccess, clip_access
from tessera.interp.sanitizer.shadow_memory import ATOMIC, READ, WRITE
from tessera.interp.tile.machine import TileMachine
from tessera.ir.builder import NodeSemantics
from tessera.ir.core import Node
from tessera.ir.rules import Rules
from tessera.ops.dialects import tile
from tessera.ops.tensor import basic, contractions, shape

# The accesses of a node that touches memory: which elements each instance reads and writes.


AccessRow = tuple[InstanceAccess, str, int]  # an access, its kind, and the operand that names its memory
access_rules = Rules("accesses")


@dataclass(frozen=True)
class NodeAccess:
    """One access of a node, without what is masked off or clipped, its kind, and the type of the memory."""

    access: InstanceAccess
    kind: str
    ref: RefType


def find_accesses(machine: TileMachine, node: Node, args: Sequence[Any]) -> list[NodeAccess]:
    """What a node touches, for all instances that run it; nothing if it touches no memory."""
    rule: Callable[..., list[AccessRow]] | None = access_rules.get(node.op)
    found = rule(machine, node, list(args)) if rule is not None else []
    return [NodeAccess(clip_access(access), kind, _ref_type(node, operand)) for access, kind, operand in found]


def _ref_type(node: Node, operand: int) -> RefType:
    type = node.args[operand].type
    assert isinstance(type, RefType)
    return type


@access_rules(tile.load)
def _(machine, node, args):
    return [
        (
            watched._make_access(
                machine, node, *watched._make_block_access(machine, node, args, node.attrs["shape"], 1)
            ),
            READ,
            0,
        )
    ]


@access_rules(tile.store)
def _(machine, node, args):
    return [
        (
            watched._make_access(
                machine, node, *watched._make_block_access(machine, node, args, node.args[1].type.shape, 2)
            ),
            WRITE,
            0,
        )
    ]


@access_rules(tile.gather)
def _(machine, node, args):
    return [(watched._make_gather_access(machine, node, args, 1), READ, 0)]


@access_rules(tile.scatter)
def _(machine, node, args):
    return [(watched._make_gather_access(machine, node, args, 2), WRITE, 0)]


@access_rules(tile.atomic)
def _(machine, node, args):
    return [(watched._make_gather_access(machine, node, args, 2), ATOMIC, 0)]


@access_rules(tile.compare_exchange)
def _(machine, node, args):
    return [(watched._make_gather_access(machine, node, args, 3), ATOMIC, 0)]


@access_rules(tile.async_copy)
def _(machine, node, args):
    source, target = watched._copy_sides(machine, node, args)
    clip = node.attrs["edge"] == "clip"
    read = InstanceAccess.of(node, source, watched._active_mask(machine, len(source.block)), clip)
    write = InstanceAccess.of(node, target, watched._active_mask(machine, len(target.block)), False)
    return [(read, READ, 1), (write, WRITE, 0)]


MEMORY, COMPUTE, INDEX, CONTROL = "memory", "compute", "index", "control"
# Ops that a target has no instruction for: they name values and change their shape.
_FREE_OPS = {basic.full, basic.broadcast_to, shape.reshape, shape.permute, shape.iota, tile.program_id, tile.local_id,
         tile.grid_size, tile.group_size, tile.alloc}  # fmt: skip
_MAX_EVENTS = 4096  # tiles and events kept of one launch


@dataclass(frozen=True)
class NodeEvent:
    """A node that ran for the instances of a chunk: when it began and how long the interpreter took (seconds)."""

    node: Node
    start: float
    seconds: float
    instances: int


@dataclass(frozen=True)
class AccessedBox:
    """A part of a tensor that a program touched: the bounds along each axis (the last excluded), and in which order."""

    order: int
    program: tuple[int, ...]
    tensor: str
    shape: tuple[int, ...]
    kind: str
    low: tuple[int, ...]
    high: tuple[int, ...]


@dataclass
class LaunchCounts:
    """What one launch did; operations are counted by element, memory by element too."""

    started: ObservedLaunch
    need: ResourceUsage
    operations: Counter[str] = field(default_factory=Counter)
    ops: Counter[str] = field(default_factory=Counter)
    read: Counter[str] = field(default_factory=Counter)  # bytes, by space
    written: Counter[str] = field(default_factory=Counter)
    flops: int = 0
    banks: memory_transactions.WarpTransactions = field(
        default_factory=lambda: memory_transactions.WarpTransactions(0, 0, 0, 0)
    )
    sectors: memory_transactions.WarpTransactions = field(
        default_factory=lambda: memory_transactions.WarpTransactions(0, 0, 0, 0)
    )
    events: list[NodeEvent] = field(default_factory=list)
    touched: list[AccessedBox] = field(default_factory=list)


class KernelProfile:
    """An observer that counts; one `Counts` for each launch, in order."""

    def __init__(self, places: bool = True) -> None:
        self.launches: list[LaunchCounts] = []
        self.places = places
        self.began = time.perf_counter()
        self.swizzles: dict[int, str] = {}

    def enter(self, started: ObservedLaunch) -> None:
        """A launch begins."""
        self.launches.append(LaunchCounts(started, measure_resources(started.function)))

    def leave(self) -> None:
        """The launch has ended."""

    def meaning(self, machine: TileMachine, inner: NodeSemantics) -> NodeSemantics:
        """Nodes as they are, counted and timed."""

        def mean(node: Node, args: list[Any], walk: Any) -> Sequence[Any]:
            start = time.perf_counter()
            results = inner(node, args, walk)
            self._count(machine, node, args, results, start - self.began, time.perf_counter() - start)
            return results

        return mean

    def _count(
        self, machine: TileMachine, node: Node, args: list[Any], results: Sequence[Any], start: float, seconds: float
    ) -> None:
        counts = self.launches[-1]
        present = int(np.prod(machine.count)) if machine.active is None else _active(machine)
        if len(counts.events) < _MAX_EVENTS:
            counts.events.append(NodeEvent(node, start, seconds, present))
        if node.op is tile.alloc:
            self.swizzles[id(results[0].array)] = node.attrs["swizzle"]
        if node.op in _FREE_OPS:
            return
        found = find_accesses(machine, node, args)
        for touch in found:
            self._touch(counts, machine, touch)
        kind, elements = _kind(node, bool(found))
        counts.operations[kind] += elements * present
        counts.ops[node.op.name] += elements * present
        counts.flops += _flops(node) * present

    def _touch(self, counts: LaunchCounts, machine: TileMachine, touch: NodeAccess) -> None:
        access, space = touch.access, touch.ref.space
        offset, active = memory_transactions.find_warp_offsets(machine, access)
        size = access.memory.array.itemsize
        moved = int(active.sum()) * size
        if touch.kind in (READ, ATOMIC):
            counts.read[space] += moved
        if touch.kind != READ:
            counts.written[space] += moved
        if space == SHARED:
            kind = self.swizzles.get(id(access.memory.array), "")
            counts.banks += memory_transactions.count_bank_conflicts(
                memory_transactions.swizzle_offsets(access, offset, kind), active, size
            )
        elif space == GLOBAL:
            counts.sectors += memory_transactions.count_sectors(offset, active, size)
            if self.places and len(counts.touched) < _MAX_EVENTS:
                _record_boxes(counts, machine, touch)


def _active(machine: TileMachine) -> int:
    assert machine.active is not None
    return int(np.broadcast_to(machine.active, machine.count).sum())


def _kind(node: Node, touches_memory: bool) -> tuple[str, int]:
    """What kind of operation a node is, and how many elements it works on."""
    sizes = [_element_count(v.type) for v in (*node.results, *node.args) if isinstance(v.type, TensorType)]
    if touches_memory:
        return MEMORY, _elements_moved(node)
    if not node.op.name.startswith("ts.") or node.regions:
        return CONTROL, 1
    types = [v.type for v in (*node.args, *node.results) if isinstance(v.type, TensorType)]
    floats = any(t.dtype.is_float for t in types)
    return COMPUTE if floats else INDEX, max(sizes, default=1)


def _element_count(type: Any) -> int:
    return math.prod(int(n) for n in type.shape)


def _elements_moved(node: Node) -> int:
    if node.op is tile.async_copy:
        return int(np.prod(node.attrs["shape"]))
    value = node.results[0].type if node.results else node.args[1].type
    return _element_count(value)


def _flops(node: Node) -> int:
    """Floating-point operations of a node for one instance: a product of depth k counts 2k an element."""
    if not node.results or not node.op.name.startswith("ts.") or node.regions:
        return 0
    types = [v.type for v in (*node.args, *node.results) if isinstance(v.type, TensorType)]
    if not any(t.dtype.is_float for t in types) or node.op is basic.cast:
        return 0
    if node.op is contractions.dot:
        return 2 * _element_count(node.out.type) * int(node.args[0].type.shape[-1])
    return max(_element_count(t) for t in types)


def _record_boxes(counts: LaunchCounts, machine: TileMachine, touch: NodeAccess) -> None:
    """The part of a tensor that each program touches, as a box."""
    access = touch.access
    rank, lead = len(machine.grid), access.memory.lead
    active = np.ones(access.shape, bool) if access.keep is None else np.broadcast_to(access.keep, access.shape)
    places = [np.broadcast_to(i, access.shape) for i in access.indices[lead:]]
    axes = tuple(range(rank, len(access.shape)))
    some = active.any(axis=axes)
    lows = [np.where(active, p, np.iinfo(np.int64).max).min(axis=axes) for p in places]
    highs = [np.where(active, p, -1).max(axis=axes) for p in places]
    order = len(counts.touched)
    for place in np.argwhere(some)[: _MAX_EVENTS - order]:
        at = tuple(int(i) for i in place)
        program = tuple(i + f for i, f in zip(at, machine.first[:rank], strict=True))
        low, high = tuple(int(x[at]) for x in lows), tuple(int(x[at]) + 1 for x in highs)
        shape_ = tuple(int(n) for n in touch.ref.shape)
        counts.touched.append(
            AccessedBox(len(counts.touched), program, access.memory.name, shape_, touch.kind, low, high)
        )

"""Kernels counted as they run: operations, bytes, flops, sectors and banks, by launch."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tessera.codegen.resources import Need, needs
from tessera.debug.traffic import Touch, touches
from tessera.evaluate import Meaning
from tessera.interp.checked import lanes
from tessera.interp.checked.observe import Started
from tessera.interp.checked.shadow import ATOMIC, READ
from tessera.interp.machine import Machine
from tessera.ir.core import Node
from tessera.ops import basic, linalg, shape, tile
from tessera.types import GLOBAL, SHARED, TensorType

MEMORY, COMPUTE, INDEX, CONTROL = "memory", "compute", "index", "control"
# Ops that a target has no instruction for: they name values and change their shape.
_FREE = {basic.full, basic.broadcast_to, shape.reshape, shape.permute, shape.iota, tile.program_id, tile.local_id,
         tile.grid_size, tile.group_size, tile.alloc}  # fmt: skip
_MOST = 4096  # tiles and events kept of one launch


@dataclass(frozen=True)
class Event:
    """A node that ran for the instances of a chunk: when it began and how long the interpreter took (seconds)."""

    node: Node
    start: float
    seconds: float
    instances: int


@dataclass(frozen=True)
class Touched:
    """A part of a tensor that a program touched: the bounds along each axis (the last excluded), and in which order."""

    order: int
    program: tuple[int, ...]
    tensor: str
    shape: tuple[int, ...]
    kind: str
    low: tuple[int, ...]
    high: tuple[int, ...]


@dataclass
class Counts:
    """What one launch did; operations are counted by element, memory by element too."""

    started: Started
    need: Need
    operations: Counter[str] = field(default_factory=Counter)
    ops: Counter[str] = field(default_factory=Counter)
    read: Counter[str] = field(default_factory=Counter)  # bytes, by space
    written: Counter[str] = field(default_factory=Counter)
    flops: int = 0
    banks: lanes.Traffic = field(default_factory=lambda: lanes.Traffic(0, 0, 0, 0))
    sectors: lanes.Traffic = field(default_factory=lambda: lanes.Traffic(0, 0, 0, 0))
    events: list[Event] = field(default_factory=list)
    touched: list[Touched] = field(default_factory=list)


class Profile:
    """An observer that counts; one `Counts` for each launch, in order."""

    def __init__(self, places: bool = True) -> None:
        self.launches: list[Counts] = []
        self.places = places
        self.began = time.perf_counter()
        self.swizzles: dict[int, str] = {}

    def enter(self, started: Started) -> None:
        """A launch begins."""
        self.launches.append(Counts(started, needs(started.function)))

    def leave(self) -> None:
        """The launch has ended."""

    def meaning(self, machine: Machine, inner: Meaning) -> Meaning:
        """Nodes as they are, counted and timed."""

        def mean(node: Node, args: list[Any], walk: Any) -> Sequence[Any]:
            start = time.perf_counter()
            results = inner(node, args, walk)
            self._count(machine, node, args, results, start - self.began, time.perf_counter() - start)
            return results

        return mean

    def _count(
        self, machine: Machine, node: Node, args: list[Any], results: Sequence[Any], start: float, seconds: float
    ) -> None:
        counts = self.launches[-1]
        present = int(np.prod(machine.count)) if machine.active is None else _active(machine)
        if len(counts.events) < _MOST:
            counts.events.append(Event(node, start, seconds, present))
        if node.op is tile.alloc:
            self.swizzles[id(results[0].array)] = node.attrs["swizzle"]
        if node.op in _FREE:
            return
        found = touches(machine, node, args)
        for touch in found:
            self._touch(counts, machine, touch)
        kind, elements = _kind(node, bool(found))
        counts.operations[kind] += elements * present
        counts.ops[node.op.name] += elements * present
        counts.flops += _flops(node) * present

    def _touch(self, counts: Counts, machine: Machine, touch: Touch) -> None:
        access, space = touch.access, touch.ref.space
        offset, active = lanes.offsets(machine, access)
        size = access.memory.array.itemsize
        moved = int(active.sum()) * size
        if touch.kind in (READ, ATOMIC):
            counts.read[space] += moved
        if touch.kind != READ:
            counts.written[space] += moved
        if space == SHARED:
            kind = self.swizzles.get(id(access.memory.array), "")
            counts.banks += lanes.banks(lanes.swizzled(access, offset, kind), active, size)
        elif space == GLOBAL:
            counts.sectors += lanes.sectors(offset, active, size)
            if self.places and len(counts.touched) < _MOST:
                _remember(counts, machine, touch)


def _active(machine: Machine) -> int:
    assert machine.active is not None
    return int(np.broadcast_to(machine.active, machine.count).sum())


def _kind(node: Node, touches_memory: bool) -> tuple[str, int]:
    """What kind of operation a node is, and how many elements it works on."""
    sizes = [_size(v.type) for v in (*node.results, *node.args) if isinstance(v.type, TensorType)]
    if touches_memory:
        return MEMORY, _moved(node)
    if not node.op.name.startswith("ts.") or node.regions:
        return CONTROL, 1
    types = [v.type for v in (*node.args, *node.results) if isinstance(v.type, TensorType)]
    floats = any(t.dtype.is_float for t in types)
    return COMPUTE if floats else INDEX, max(sizes, default=1)


def _size(type: Any) -> int:
    return math.prod(int(n) for n in type.shape)


def _moved(node: Node) -> int:
    if node.op is tile.async_copy:
        return int(np.prod(node.attrs["shape"]))
    value = node.results[0].type if node.results else node.args[1].type
    return _size(value)


def _flops(node: Node) -> int:
    """Floating-point operations of a node for one instance: a product of depth k counts 2k an element."""
    if not node.results or not node.op.name.startswith("ts.") or node.regions:
        return 0
    types = [v.type for v in (*node.args, *node.results) if isinstance(v.type, TensorType)]
    if not any(t.dtype.is_float for t in types) or node.op is basic.cast:
        return 0
    if node.op is linalg.dot:
        return 2 * _size(node.out.type) * int(node.args[0].type.shape[-1])
    return max(_size(t) for t in types)


def _remember(counts: Counts, machine: Machine, touch: Touch) -> None:
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
    for place in np.argwhere(some)[: _MOST - order]:
        at = tuple(int(i) for i in place)
        program = tuple(i + f for i, f in zip(at, machine.first[:rank], strict=True))
        low, high = tuple(int(x[at]) for x in lows), tuple(int(x[at]) + 1 for x in highs)
        shape_ = tuple(int(n) for n in touch.ref.shape)
        counts.touched.append(Touched(len(counts.touched), program, access.memory.name, shape_, touch.kind, low, high))

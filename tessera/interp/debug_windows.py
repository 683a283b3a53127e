"""Regular accesses: blocks whose starts are affine in the instance, proven apart without looking at elements.

Most accesses of most kernels are of this kind. Of each region of memory they are kept as a log; the shadow of its
elements is only written once an access comes that cannot be judged so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tessera.interp.affine import Affine
from tessera.interp.debug_shadow import OPPOSED, WRITE, Domain, Region, address
from tessera.interp.machine import Machine
from tessera.interp.memory import Memory, Place, _progression
from tessera.ir.core import Node

if TYPE_CHECKING:
    from tessera.interp.debug_chunk import Chunk
    from tessera.interp.debug_monitor import Monitor

# A region with more different regular accesses than this is watched element by element.
LONGEST = 48


@dataclass(frozen=True)
class Window:
    """What instances of a box touch at one op: along each axis of the memory a start, affine, and a length.

    `lines` are (origin, steps, length): the start of the instance at absolute coordinates i is origin + Σ steps·i.
    """

    node: Node
    kind: str
    lines: tuple[tuple[int, tuple[int, ...], int], ...]
    first: tuple[int, ...]
    count: tuple[int, ...]
    chunk: Chunk
    turn: int
    epoch: np.ndarray | None
    place: Place
    mask: Any
    clip: bool

    @property
    def rank(self) -> int:
        """The number of instance axes."""
        return len(self.count)

    @property
    def epochs(self) -> np.ndarray:
        """The epochs of the chunk's instances when they made it, without `turn`."""
        return self.chunk.base if self.epoch is None else self.epoch

    def like(self, other: Window) -> bool:
        """Whether another window is the same access again, so that keeping one of them is enough."""
        return (
            self.node is other.node and self.lines == other.lines and self.first == other.first
            and self.turn == other.turn and self.count == other.count and self.mask is None and other.mask is None
        )  # fmt: skip


@dataclass(frozen=True)
class Judged:
    """An access that breaks no rule: its region, if that is watched, its window, and what it covers of `ready`."""

    region: Region | None = None
    window: Window | None = None
    ready: np.ndarray | None = None


def harmless(monitor: Monitor, machine: Machine, node: Node, place: Place, kind: str, mask: Any) -> bool:
    """Whether an access, about to be made, is seen at once to break no rule; it is then noted.

    False says nothing: the access has to be looked at element by element.
    """
    found = judge(monitor, machine, node, place, kind, mask, node.attrs["edge"] == "clip")
    if found is not None and found.region is not None:
        note(found)
    return found is not None


def judge(
    monitor: Monitor, machine: Machine, node: Node, place: Place, kind: str, mask: Any, clip: bool
) -> Judged | None:
    """An access, about to be made, that is seen at once to break no rule; None where that is not seen."""
    region, inside = monitor.region(place.memory), place.inside()
    if region is None:
        return Judged() if inside or clip else None
    if region.log is None or region.arriving is not None or machine.active is not None:
        return None
    if not inside and (not clip or region.ready is not None):
        return None
    window = _window(monitor, machine, node, place, kind, mask, clip)
    ready = None if region.ready is None else _ready(region, place)
    if window is None or (region.ready is not None and (ready is None or not _may(ready, kind, mask))):
        return None
    safe = _apart_from_all(monitor, region, window, machine) and _clear_of_flights(monitor, region, window, machine)
    return Judged(region, window, ready) if safe else None


def _clear_of_flights(monitor: Monitor, region: Region, window: Window, machine: Machine) -> bool:
    """Whether an access touches nothing that a copy under way writes, nor writes what one reads (rule M8)."""
    assert monitor.chunk is not None
    flights = (f.window for f in monitor.chunk.flights if f.region is region)
    return all(clear(w, window, machine) for w in flights if WRITE in (w.kind, window.kind))


def _window(
    monitor: Monitor, machine: Machine, node: Node, place: Place, kind: str, mask: Any, clip: bool
) -> Window | None:
    starts = [s if isinstance(s, Affine) else _progression(s) for s in place.starts]
    chunk, first = monitor.chunk, machine.first
    assert chunk is not None
    lines = []
    for start, length in zip(starts, place.block, strict=True):
        if start is None:
            return None
        origin = start.origin - sum(s * f for s, f in zip(start.steps, first, strict=True))
        lines.append((origin, start.steps, length))
    kept = Place(place.memory, list(starts), place.block, place.count)
    return Window(node, kind, tuple(lines), first, machine.count, chunk, chunk.turn, chunk.moved, kept, mask, clip)


def _ready(region: Region, place: Place) -> np.ndarray | None:
    """The part of the region's `ready` that a place covers, as a view; None where it is no regular one."""
    array = place.memory.array
    assert region.ready is not None
    if array.nbytes != region.high - region.low or array.itemsize != region.unit or not array.flags.c_contiguous:
        return None
    return Place(
        Memory(region.ready.reshape(array.shape), "", place.memory.lead), place.starts, place.block, place.count
    ).window()


def _may(ready: np.ndarray, kind: str, mask: Any) -> bool:
    """Whether what is read is there, or what is written can be noted in one piece."""
    if kind != WRITE:
        return bool(ready.all())
    return mask is None or np.broadcast_shapes(ready.shape, mask.shape) == ready.shape


def note(found: Judged) -> None:
    """Keep an access for those that come later."""
    region, window, ready = found.region, found.window, found.ready
    assert region is not None and window is not None and region.log is not None
    if ready is not None and window.kind == WRITE:
        if window.mask is None:
            ready[...] = True
        else:
            np.logical_or(ready, window.mask, out=ready)
    if region.domains and not any(window.like(w) for w in region.log):
        region.log.append(window)


def _apart_from_all(monitor: Monitor, region: Region, window: Window, machine: Machine) -> bool:
    assert region.log is not None
    if len(region.log) >= LONGEST:
        _forget(region, window)
    if len(region.log) >= LONGEST:
        return False
    for domain in region.domains:
        others = [w for w in region.log if w.kind in OPPOSED[window.kind] and _meet(domain, w, window)]
        if window.kind == WRITE:
            others.append(window)
        tile = machine.rank - 1 if machine.group > 1 else None
        if not all(apart(domain, w, window, tile) for w in others):
            return False
    return True


def _meet(domain: Domain, one: Window, other: Window) -> bool:
    """Whether accesses at these times can race at all."""
    return domain.timeless or (one.chunk is other.chunk and one.turn == other.turn)


def _forget(region: Region, window: Window) -> None:
    """Drop what a barrier has since ordered, where only barriers matter."""
    if not any(d.timeless for d in region.domains) and region.log is not None:
        region.log[:] = [w for w in region.log if w.chunk is window.chunk and w.turn == window.turn]


def apart(domain: Domain, one: Window, other: Window, tile: int | None) -> bool:
    """Whether no two instances that the domain tells apart touch one element.

    Two instances i and j touch one if along every axis -n < start(i) - start'(j) < n'. Where both starts have the
    same steps that is a condition on the differences i - j, each of a known range: a difference of large step that the
    others cannot make up for is 0. What is left to show is that all differences the domain looks at are 0.
    """
    if not _same_memory(one.place.memory, other.place.memory):
        return False
    free = {
        a: ends
        for a, ends in enumerate(_differences(one, other))
        if ends != (0, 0) and (a == tile or domain.timeless)  # tiles of one program share its coordinates
    }
    wanted = {a for a in free if (a != tile if domain.timeless else a == tile)}
    pairs = list(zip(one.lines, other.lines, strict=True))
    if any(a[1] != b[1] and _disjoint(one, other, a, b) for a, b in pairs):
        return True
    return _all_zero([(a, b) for a, b in pairs if a[1] == b[1]], free, wanted)


def _all_zero(pairs: Sequence[Any], free: dict[int, tuple[int, int]], wanted: set[int]) -> bool:
    """Whether instances that meet along all these axes, of the same steps each, have all wanted differences 0."""
    changed = True
    while changed and wanted & set(free):
        changed = False
        for (o, steps, n), (p, _, m) in pairs:
            found = _solved(o - p, steps, n, m, free)
            if found is None:
                return True
            changed = changed or bool(found)
            for a in found:
                del free[a]
    return not wanted & set(free)


def clear(one: Window, other: Window, machine: Machine) -> bool:
    """Whether no two instances touch one element, nor any instance the same one in both."""
    if not _same_memory(one.place.memory, other.place.memory):
        return False
    own = one.place.memory.lead > 0  # of a program's own memory only its own tiles matter
    free = {
        a: d for a, d in enumerate(_differences(one, other)) if not own or (machine.group > 1 and a == machine.rank - 1)
    }
    pairs = list(zip(one.lines, other.lines, strict=True))
    if any(a[1] == b[1] and _solved(a[0] - b[0], a[1], a[2], b[2], free) is None for a, b in pairs):
        return True
    return any(a[1] != b[1] and _disjoint(one, other, a, b) for a, b in pairs)


def _same_memory(one: Memory, other: Memory) -> bool:
    """Whether indices mean the same in both: another name for the same memory may begin elsewhere."""
    a, b = one.array, other.array
    return bool(one.lead) or (address(a) == address(b) and a.shape == b.shape and a.strides == b.strides)


def _differences(one: Window, other: Window) -> list[tuple[int, int]]:
    """The least and greatest difference of the instances' coordinates along each axis."""
    axes = zip(one.first, one.count, other.first, other.count, strict=True)
    return [(f - (g + d - 1), f + c - 1 - g) for f, c, g, d in axes]


def _solved(apart_by: int, steps: Sequence[int], n: int, m: int, free: dict[int, tuple[int, int]]) -> list[int] | None:
    """Along one axis: the differences that must be 0 for instances to meet; None if they cannot meet at all."""
    used = sorted((a for a in free if steps[a]), key=lambda a: -abs(steps[a]))
    low, high = apart_by, apart_by
    for a in used:
        ends = (steps[a] * free[a][0], steps[a] * free[a][1])
        low, high = low + min(ends), high + max(ends)
    if low >= m or high <= -n:
        return None
    zero = []
    for a in used:
        ends = (steps[a] * free[a][0], steps[a] * free[a][1])
        rest_low, rest_high = low - min(ends), high - max(ends)
        # start(i) - start'(j) = steps[a]·k + rest must lie strictly between -n and m: for which k can it?
        least, most = _range(steps[a], -n + 1 - rest_high, m - 1 - rest_low)
        least, most = max(least, free[a][0]), min(most, free[a][1])
        if least > most:
            return None
        if least != 0 or most != 0:
            break
        zero.append(a)
        low, high = rest_low, rest_high
    return zero


def _range(step: int, low: int, high: int) -> tuple[int, int]:
    """The whole numbers k with low <= step·k <= high."""
    if step < 0:
        step, low, high = -step, -high, -low
    return -(-low // step), high // step


def _disjoint(one: Window, other: Window, line: Any, last: Any) -> bool:
    """Whether the intervals that two windows cover along an axis, over all instances, lie apart."""
    low, high = _span(one, line)
    least, most = _span(other, last)
    return high <= least or most <= low


def _span(window: Window, line: tuple[int, tuple[int, ...], int]) -> tuple[int, int]:
    origin, steps, length = line
    low = origin + sum(min(s * f, s * (f + c - 1)) for s, f, c in zip(steps, window.first, window.count, strict=True))
    high = origin + sum(max(s * f, s * (f + c - 1)) for s, f, c in zip(steps, window.first, window.count, strict=True))
    return low, high + length

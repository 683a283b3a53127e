"""Disjointness of affine accesses: a dependence test on starts and lengths (Banerjee 1988).

Blocks whose starts are affine in the instance are proven disjoint without looking at elements. Most accesses of most
kernels are of this kind. Each region of memory keeps them as a log; its shadow memory is only written once an access
comes that cannot be judged so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tessera.core.device import array_address
from tessera.interp.sanitizer.shadow_memory import CONFLICTING_KINDS, WRITE, RaceDomain, ShadowRegion
from tessera.interp.tile.affine import AffineScalar
from tessera.interp.tile.machine import TileMachine
from tessera.interp.tile.memory import BlockAccess, InstanceMemory, find_progression
from tessera.ir.core import Node

if TYPE_CHECKING:
    from tessera.interp.sanitizer.grid_chunk import BarrierCounts, GridChunk
    from tessera.interp.sanitizer.monitor import Monitor


# Whether regular accesses lie apart: by their starts and lengths, for all instances at once.


def are_disjoint(domain: RaceDomain, one: AffineAccess, other: AffineAccess, tile: int | None) -> bool:
    """Whether no two instances that the domain tells apart touch one element.

    Two instances i and j touch one if along every axis -n < start(i) - start'(j) < n'. Where both starts have the
    same steps that is a condition on the differences i - j, each of a known range: a difference of large step that the
    others cannot make up for is 0. What is left to show is that all differences the domain looks at are 0.
    """
    if not _share_indexing(one.place.memory, other.place.memory):
        return False
    free = {
        a: ends
        for a, ends in enumerate(_coordinate_differences(one, other))
        if ends != (0, 0) and (a == tile or domain.timeless)  # tiles of one program share its coordinates
    }
    wanted = {a for a in free if (a != tile if domain.timeless else a == tile)}
    pairs = list(zip(one.lines, other.lines, strict=True))
    if any(a[1] != b[1] and _are_intervals_disjoint(one, other, a, b) for a, b in pairs):
        return True
    return _prove_differences_zero([(a, b) for a, b in pairs if a[1] == b[1]], free, wanted)


def _prove_differences_zero(pairs: Sequence[Any], free: dict[int, tuple[int, int]], wanted: set[int]) -> bool:
    """Whether instances that meet along all these axes, of the same steps each, have all wanted differences 0."""
    changed = True
    while changed and wanted & set(free):
        changed = False
        for (o, steps, n), (p, _, m) in pairs:
            found = _solve_axis(o - p, steps, n, m, free)
            if found is None:
                return True
            changed = changed or bool(found)
            for a in found:
                del free[a]
    return not wanted & set(free)


def are_always_disjoint(one: AffineAccess, other: AffineAccess, machine: TileMachine) -> bool:
    """Whether no two instances touch one element, nor any instance the same one in both."""
    if not _share_indexing(one.place.memory, other.place.memory):
        return False
    own = one.place.memory.lead > 0  # of a program's own memory only its own tiles matter
    free = {
        a: d
        for a, d in enumerate(_coordinate_differences(one, other))
        if not own or (machine.group > 1 and a == machine.rank - 1)
    }
    pairs = list(zip(one.lines, other.lines, strict=True))
    if any(a[1] == b[1] and _solve_axis(a[0] - b[0], a[1], a[2], b[2], free) is None for a, b in pairs):
        return True
    return any(a[1] != b[1] and _are_intervals_disjoint(one, other, a, b) for a, b in pairs)


def _share_indexing(one: InstanceMemory, other: InstanceMemory) -> bool:
    """Whether indices mean the same in both: another name for the same memory may begin elsewhere."""
    a, b = one.array, other.array
    return bool(one.lead) or (array_address(a) == array_address(b) and a.shape == b.shape and a.strides == b.strides)


def _coordinate_differences(one: AffineAccess, other: AffineAccess) -> list[tuple[int, int]]:
    """The least and greatest difference of the instances' coordinates along each axis."""
    axes = zip(one.first, one.count, other.first, other.count, strict=True)
    return [(f - (g + d - 1), f + c - 1 - g) for f, c, g, d in axes]


def _solve_axis(
    apart_by: int, steps: Sequence[int], n: int, m: int, free: dict[int, tuple[int, int]]
) -> list[int] | None:
    """Along one axis: the differences that are 0 where the accesses overlap; None if they are disjoint."""
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
        least, most = _multiples_between(steps[a], -n + 1 - rest_high, m - 1 - rest_low)
        least, most = max(least, free[a][0]), min(most, free[a][1])
        if least > most:
            return None
        if least != 0 or most != 0:
            break
        zero.append(a)
        low, high = rest_low, rest_high
    return zero


def _multiples_between(step: int, low: int, high: int) -> tuple[int, int]:
    """The whole numbers k with low <= step·k <= high."""
    if step < 0:
        step, low, high = -step, -high, -low
    return -(-low // step), high // step


def _are_intervals_disjoint(one: AffineAccess, other: AffineAccess, line: Any, last: Any) -> bool:
    """Whether the intervals that two windows cover along an axis, over all instances, lie apart."""
    low, high = _covered_interval(one, line)
    least, most = _covered_interval(other, last)
    return high <= least or most <= low


def _covered_interval(window: AffineAccess, line: tuple[int, tuple[int, ...], int]) -> tuple[int, int]:
    origin, steps, length = line
    low = origin + sum(min(s * f, s * (f + c - 1)) for s, f, c in zip(steps, window.first, window.count, strict=True))
    high = origin + sum(max(s * f, s * (f + c - 1)) for s, f, c in zip(steps, window.first, window.count, strict=True))
    return low, high + length


# Regular accesses: blocks whose starts are affine in the instance, proven apart without looking at elements.
#
# Most accesses of most kernels are of this kind. Of each region of memory they are kept as a log; the shadow of its
# elements is only written once an access comes that cannot be judged so.


# A region with more different regular accesses than this is watched element by element.
MAX_LOG = 48


@dataclass(frozen=True)
class AffineAccess:
    """What instances of a box touch at one op: along each axis of the memory a start, affine, and a length.

    `lines` are (origin, steps, length): the start of the instance at absolute coordinates i is origin + Σ steps·i.
    """

    node: Node
    kind: str
    lines: tuple[tuple[int, tuple[int, ...], int], ...]
    first: tuple[int, ...]
    count: tuple[int, ...]
    chunk: GridChunk
    turn: int
    epoch: np.ndarray | None
    place: BlockAccess
    mask: Any
    clip: bool
    # For copies that an mbarrier counts: of each instance of the chunk the column of clocks, and the clock.
    counted: tuple[np.ndarray, np.ndarray] | None = None
    inner: tuple[BarrierCounts, ...] = ()

    @property
    def rank(self) -> int:
        """The number of instance axes."""
        return len(self.count)

    @property
    def epochs(self) -> np.ndarray:
        """The epochs of the chunk's instances when they made it."""
        return (self.chunk.base if self.epoch is None else self.epoch) + self.turn

    def like(self, other: AffineAccess) -> bool:
        """Whether another window is the same access again, so that keeping one of them is enough."""
        met = zip(self.inner, other.inner, strict=True)
        return (
            self.again(other) and self.turn == other.turn and self.epoch is other.epoch
            and all(a.turn == b.turn and a.counted is b.counted for a, b in met)
        )  # fmt: skip

    def again(self, other: AffineAccess) -> bool:
        """Whether the same instances touch the same elements once more, at the same op."""
        return (
            self.node is other.node and self.lines == other.lines and self.first == other.first
            and self.count == other.count and self.mask is None and other.mask is None
            and _counts_equal(self.counted, other.counted)
        )  # fmt: skip


def _counts_equal(one: Any, other: Any) -> bool:
    if one is None or other is None:
        return one is other
    return bool((one[0] == other[0]).all())


@dataclass(frozen=True)
class SafeAccess:
    """An access that breaks no rule: its region, if that is watched, its window, and what it covers of `ready`."""

    region: ShadowRegion | None = None
    window: AffineAccess | None = None
    ready: np.ndarray | None = None


def check_affine_access(
    monitor: Monitor, machine: TileMachine, node: Node, place: BlockAccess, kind: str, mask: Any
) -> bool:
    """Whether an access, about to be made, is seen at once to break no rule; it is then noted.

    False says nothing: the access has to be looked at element by element.
    """
    found = prove_access_safe(monitor, machine, node, place, kind, mask, node.attrs["edge"] == "clip")
    if found is not None and found.region is not None:
        log_access(found)
    return found is not None


def prove_access_safe(
    monitor: Monitor, machine: TileMachine, node: Node, place: BlockAccess, kind: str, mask: Any, clip: bool
) -> SafeAccess | None:
    """An access, about to be made, that is seen at once to break no rule; None where that is not seen."""
    region, inside = monitor.region(place.memory), place.inside()
    if region is None:
        return SafeAccess() if inside or clip else None
    if region.log is None or region.copy_writes is not None or machine.active is not None:
        return None
    if not inside and (not clip or region.ready is not None):
        return None
    window = _make_affine_access(monitor, machine, node, place, kind, mask, clip)
    ready = None if region.ready is None else _view_initialised(region, place)
    if window is None or (region.ready is not None and (ready is None or not _is_initialised(ready, kind, mask))):
        return None
    safe = _is_disjoint_from_log(monitor, region, window, machine) and _is_disjoint_from_copies(
        monitor, region, window, machine
    )
    return SafeAccess(region, window, ready) if safe else None


def _is_disjoint_from_copies(
    monitor: Monitor, region: ShadowRegion, window: AffineAccess, machine: TileMachine
) -> bool:
    """Whether an access touches nothing that a copy under way writes, nor writes what one reads (rule M8)."""
    assert monitor.chunk is not None
    flights = (f.window for f in monitor.chunk.regular_copies if f.region is region)
    return all(are_always_disjoint(w, window, machine) for w in flights if WRITE in (w.kind, window.kind))


def _make_affine_access(
    monitor: Monitor, machine: TileMachine, node: Node, place: BlockAccess, kind: str, mask: Any, clip: bool
) -> AffineAccess | None:
    starts = [s if isinstance(s, AffineScalar) else find_progression(s) for s in place.starts]
    chunk, first = monitor.chunk, machine.first
    assert chunk is not None
    lines = []
    for start, length in zip(starts, place.block, strict=True):
        if start is None:
            return None
        origin = start.origin - sum(s * f for s, f in zip(start.steps, first, strict=True))
        lines.append((origin, start.steps, length))
    kept = BlockAccess(place.memory, list(starts), place.block, place.count)
    return AffineAccess(
        node, kind, tuple(lines), first, machine.count, chunk, chunk.turn, chunk.divergent_epochs, kept, mask, clip,
        inner=chunk.inner,
    )  # fmt: skip


def _view_initialised(region: ShadowRegion, place: BlockAccess) -> np.ndarray | None:
    """The part of the region's `ready` that a place covers, as a view; None where it is no regular one."""
    array = place.memory.array
    assert region.ready is not None
    if array.nbytes != region.high - region.low or array.itemsize != region.unit or not array.flags.c_contiguous:
        return None
    return BlockAccess(
        InstanceMemory(region.ready.reshape(array.shape), "", place.memory.lead), place.starts, place.block, place.count
    ).window()


def _is_initialised(ready: np.ndarray, kind: str, mask: Any) -> bool:
    """Whether what is read is there, or what is written can be noted in one piece."""
    if kind != WRITE:
        return bool(ready.all())
    return mask is None or np.broadcast_shapes(ready.shape, mask.shape) == ready.shape


def log_access(found: SafeAccess) -> None:
    """Keep an access for those that come later."""
    region, window, ready = found.region, found.window, found.ready
    assert region is not None and window is not None and region.log is not None
    if ready is not None and window.kind == WRITE:
        if window.mask is None:
            ready[...] = True
        else:
            np.logical_or(ready, window.mask, out=ready)
    if any(d.clocks is not None for d in region.domains):
        replace_logged_access(region, window)
    elif region.domains and not any(window.like(w) for w in region.log):
        region.log.append(window)


def replace_logged_access(region: ShadowRegion, window: AffineAccess) -> None:
    """Add a window to a log ordered by clocks; what the same tiles did there before it stands for too."""
    assert region.log is not None
    region.log[:] = [w for w in region.log if w.chunk is not window.chunk or not window.again(w)] + [window]


def _is_disjoint_from_log(monitor: Monitor, region: ShadowRegion, window: AffineAccess, machine: TileMachine) -> bool:
    assert region.log is not None
    if len(region.log) >= MAX_LOG:
        _drop_ordered_accesses(region, window)
    if len(region.log) >= MAX_LOG:
        return False
    for domain in region.domains:
        others = [
            w for w in region.log if w.kind in CONFLICTING_KINDS[window.kind] and _may_race(domain, w, window, machine)
        ]
        if window.kind == WRITE:
            others.append(window)
        tile = machine.rank - 1 if machine.group > 1 else None
        # What an mbarrier's copies touch is no tile's: not of the one that began them either.
        counted = [w for w in others if w.counted is not None]
        if not all(are_always_disjoint(w, window, machine) for w in counted):
            return False
        if not all(are_disjoint(domain, w, window, tile) for w in others if w.counted is None):
            return False
    return True


def _may_race(domain: RaceDomain, one: AffineAccess, other: AffineAccess, machine: TileMachine) -> bool:
    """Whether accesses at these times can race at all; the other one is about to be made, on this machine."""
    if domain.timeless or one.chunk is not other.chunk:
        return domain.timeless
    if domain.clocks is not None:
        return not _happens_before(one, machine)
    inner = domain.level
    return one.turn == other.turn if inner is None else one.inner[inner].turn == other.inner[inner].turn


def _happens_before(past: AffineAccess, machine: TileMachine) -> bool:
    """Whether all instances present know of what all tiles of their programs did at a window."""
    chunk, tiles = past.chunk, past.chunk.group
    assert chunk.clocks is not None
    here = chunk.view(np.arange(chunk.who.size).reshape(chunk.count), machine)
    here = here.reshape(-1, here.shape[-1] if tiles > 1 else 1)
    others = slice(past.first[-1], past.first[-1] + past.count[-1]) if tiles > 1 else slice(None)
    programs = here[:, 0] // tiles
    if past.counted is None:
        column, clock = (
            np.arange(tiles)[None, others],
            past.epochs.reshape(-1, tiles)[programs][:, others],
        )
    else:
        column, clock = (t.reshape(-1, tiles)[programs][:, others] for t in past.counted)
    return bool((chunk.clocks.known[here[:, :, None], column[:, None, :]] >= clock[:, None, :]).all())


def _drop_ordered_accesses(region: ShadowRegion, window: AffineAccess) -> None:
    """Drop what a barrier has since ordered, where only barriers matter."""
    if not any(d.timeless for d in region.domains) and region.log is not None:
        region.log[:] = [w for w in region.log if w.chunk is window.chunk and w.turn == window.turn]

"""Regular accesses: blocks whose starts are affine in the instance, proven apart without looking at elements.

Most accesses of most kernels are of this kind. Of each region of memory they are kept as a log; the shadow of its
elements is only written once an access comes that cannot be judged so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tessera.interp.affine import Affine
from tessera.interp.checked.apart import apart, clear
from tessera.interp.checked.ordered import Domain
from tessera.interp.checked.shadow import OPPOSED, WRITE, Region
from tessera.interp.machine import Machine
from tessera.interp.memory import Memory, Place, _progression
from tessera.ir.core import Node

if TYPE_CHECKING:
    from tessera.interp.checked.chunk import Chunk, Meetings
    from tessera.interp.checked.monitor import Monitor

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
    # For copies that an mbarrier counts: of each instance of the chunk the column of clocks, and the clock.
    counted: tuple[np.ndarray, np.ndarray] | None = None
    inner: tuple[Meetings, ...] = ()

    @property
    def rank(self) -> int:
        """The number of instance axes."""
        return len(self.count)

    @property
    def epochs(self) -> np.ndarray:
        """The epochs of the chunk's instances when they made it."""
        return (self.chunk.base if self.epoch is None else self.epoch) + self.turn

    def like(self, other: Window) -> bool:
        """Whether another window is the same access again, so that keeping one of them is enough."""
        met = zip(self.inner, other.inner, strict=True)
        return (
            self.again(other) and self.turn == other.turn and self.epoch is other.epoch
            and all(a.turn == b.turn and a.counted is b.counted for a, b in met)
        )  # fmt: skip

    def again(self, other: Window) -> bool:
        """Whether the same instances touch the same elements once more, at the same op."""
        return (
            self.node is other.node and self.lines == other.lines and self.first == other.first
            and self.count == other.count and self.mask is None and other.mask is None
            and _same_columns(self.counted, other.counted)
        )  # fmt: skip


def _same_columns(one: Any, other: Any) -> bool:
    if one is None or other is None:
        return one is other
    return bool((one[0] == other[0]).all())


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
    return Window(
        node, kind, tuple(lines), first, machine.count, chunk, chunk.turn, chunk.moved, kept, mask, clip,
        inner=chunk.inner,
    )  # fmt: skip


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
    if any(d.clocks is not None for d in region.domains):
        keep(region, window)
    elif region.domains and not any(window.like(w) for w in region.log):
        region.log.append(window)


def keep(region: Region, window: Window) -> None:
    """Add a window to a log ordered by clocks; what the same tiles did there before it stands for too."""
    assert region.log is not None
    region.log[:] = [w for w in region.log if w.chunk is not window.chunk or not window.again(w)] + [window]


def _apart_from_all(monitor: Monitor, region: Region, window: Window, machine: Machine) -> bool:
    assert region.log is not None
    if len(region.log) >= LONGEST:
        _forget(region, window)
    if len(region.log) >= LONGEST:
        return False
    for domain in region.domains:
        others = [w for w in region.log if w.kind in OPPOSED[window.kind] and _meet(domain, w, window, machine)]
        if window.kind == WRITE:
            others.append(window)
        tile = machine.rank - 1 if machine.group > 1 else None
        # What an mbarrier's copies touch is no tile's: not of the one that began them either.
        counted = [w for w in others if w.counted is not None]
        if not all(clear(w, window, machine) for w in counted):
            return False
        if not all(apart(domain, w, window, tile) for w in others if w.counted is None):
            return False
    return True


def _meet(domain: Domain, one: Window, other: Window, machine: Machine) -> bool:
    """Whether accesses at these times can race at all; the other one is about to be made, on this machine."""
    if domain.timeless or one.chunk is not other.chunk:
        return domain.timeless
    if domain.clocks is not None:
        return not _known(one, machine)
    inner = domain.level
    return one.turn == other.turn if inner is None else one.inner[inner].turn == other.inner[inner].turn


def _known(past: Window, machine: Machine) -> bool:
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


def _forget(region: Region, window: Window) -> None:
    """Drop what a barrier has since ordered, where only barriers matter."""
    if not any(d.timeless for d in region.domains) and region.log is not None:
        region.log[:] = [w for w in region.log if w.chunk is window.chunk and w.turn == window.turn]

"""Memory transactions: bank conflicts, and uncoalesced accesses to global memory, counted per access.

A model of the hardware, not a measurement: 32 lanes a warp, 32 banks of 4 bytes, sectors of 32 bytes. The tiles of a
group are lanes side by side; a tile alone is a whole group whose lanes take the elements of a block in order. Lanes
whose elements are wider than 4 bytes take several transactions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from tessera.core.types import GLOBAL, SHARED, RefType
from tessera.interp.sanitizer.access import InstanceAccess
from tessera.interp.sanitizer.report import Finding
from tessera.interp.tile.machine import TileMachine
from tessera.ir.core import Node

if TYPE_CHECKING:
    from tessera.interp.sanitizer.monitor import Monitor


WARP_LANES, BANKS, BANK_BYTES, SECTOR_BYTES = 32, 32, 4, 32


@dataclass(frozen=True)
class WarpTransactions:
    """The warps of an access: their transactions (or sectors), the fewest possible, and the worst warp's."""

    taken: int
    least: int
    worst: int
    warps: int

    def __add__(self, other: WarpTransactions) -> WarpTransactions:
        return WarpTransactions(
            self.taken + other.taken, self.least + other.least, max(self.worst, other.worst), self.warps + other.warps
        )

    @property
    def excess(self) -> int:
        """The transactions beyond the fewest possible."""
        return self.taken - self.least


def find_warp_offsets(machine: TileMachine, access: InstanceAccess) -> tuple[np.ndarray, np.ndarray]:
    """For each warp and lane its first byte, as an offset in the memory, and whether the lane is active."""
    array, lead = access.memory.array, access.memory.lead
    total = np.zeros((1,) * len(access.shape), np.int64)
    for index, stride in zip(access.indices[lead:], array.strides[lead:], strict=True):
        total = total + index * stride
    keep = np.ones((1,) * len(access.shape), bool) if access.keep is None else access.keep
    return _group_by_warp(machine, access, total), _group_by_warp(machine, access, keep)


def _group_by_warp(machine: TileMachine, access: InstanceAccess, table: np.ndarray) -> np.ndarray:
    """Reshape a table of instances and block elements to warps and lanes; missing lanes are false or 0."""
    full = np.broadcast_to(table, access.shape)
    if machine.group > 1:  # the tiles are the lanes; each element of their blocks is a separate access
        lanes = np.moveaxis(full, machine.rank - 1, -1)
        lanes = lanes.reshape(-1, lanes.shape[-1])
    else:
        lanes = full.reshape(int(np.prod(access.shape[: machine.rank])), -1)
    short = -lanes.shape[1] % WARP_LANES
    return np.pad(lanes, ((0, 0), (0, short))).reshape(-1, WARP_LANES)


def swizzle_offsets(access: InstanceAccess, offset: np.ndarray, kind: str) -> np.ndarray:
    """Byte offsets in a buffer with `swizzle="xor"`: the 16-byte chunks of a row are permuted by the row's number."""
    if kind != "xor" or len(access.memory.shape) < 2:
        return offset
    row_bytes = access.memory.array.strides[-2]
    if row_bytes % 128:  # rows that do not fill all banks are not swizzled
        return offset
    row, within = offset // row_bytes, offset % row_bytes
    chunk = within // 16 ^ row % 8
    return row * row_bytes + chunk * 16 + within % 16


def count_bank_conflicts(offset: np.ndarray, active: np.ndarray, itemsize: int) -> WarpTransactions:
    """The transactions of warps in shared memory: the distinct words in the fullest bank of each."""
    turns = max(1, itemsize // BANK_BYTES)
    if turns > 1:  # lanes of wide elements are served in parts of a warp; each element spans several banks
        offset, active = (t.reshape(-1, WARP_LANES // turns) for t in (offset, active))
        words = (offset[..., None] // BANK_BYTES + np.arange(turns)).reshape(offset.shape[0], -1)
        active = np.repeat(active, turns, axis=1)
    else:
        words = offset // BANK_BYTES
    busy = active.any(axis=1)
    degree = _largest_bank_load(words[busy], active[busy])
    return WarpTransactions(int(degree.sum()), int(busy.sum()), int(degree.max(initial=0)), int(busy.sum()))


def _largest_bank_load(words: np.ndarray, active: np.ndarray) -> np.ndarray:
    """For each warp the most distinct words in one bank."""
    new = _find_first_occurrences(words, active)
    rows = np.broadcast_to(np.arange(len(words))[:, None], words.shape)
    place = (rows * BANKS + np.sort(np.where(active, words, -1), axis=1) % BANKS)[new]
    return np.bincount(place, minlength=len(words) * BANKS).reshape(-1, BANKS).max(axis=1)


def count_sectors(offset: np.ndarray, active: np.ndarray, itemsize: int) -> WarpTransactions:
    """The sectors of global memory that warps access, and the fewest that would hold the bytes."""
    busy = active.any(axis=1)
    offset, active = offset[busy], active[busy]
    touched = _find_first_occurrences(offset // SECTOR_BYTES, active).sum(axis=1)
    used = _find_first_occurrences(offset, active).sum(axis=1) * itemsize
    least = -(-used // SECTOR_BYTES)
    return WarpTransactions(int(touched.sum()), int(least.sum()), int(touched.max(initial=0)), len(offset))


def _find_first_occurrences(values: np.ndarray, active: np.ndarray) -> np.ndarray:
    """In each ascending row, the first occurrence of each value of an active lane."""
    held = np.sort(np.where(active, values, -1), axis=1)
    new = np.ones(held.shape, bool)
    new[:, 1:] = held[:, 1:] != held[:, :-1]
    return new & (held >= 0)


# An access to global memory is reported from this ratio of accessed to needed sectors on.
WASTE_RATIO = 2
_AccessKey = tuple[Node, str]


class TransactionLint:
    """The transactions of each access in a launch, by node and memory space."""

    def __init__(self) -> None:
        self.seen: dict[_AccessKey, WarpTransactions] = {}
        self.names: dict[_AccessKey, str] = {}

    def access(self, machine: TileMachine, access: InstanceAccess, ref: RefType, swizzle: str) -> None:
        """Count an access."""
        if ref.space not in (GLOBAL, SHARED):
            return
        offset, active = find_warp_offsets(machine, access)
        size = access.memory.array.itemsize
        if ref.space == SHARED:
            found = count_bank_conflicts(swizzle_offsets(access, offset, swizzle), active, size)
        else:
            found = count_sectors(offset, active, size)
        key = (access.node, ref.space)
        self.seen[key] = self.seen.get(key, WarpTransactions(0, 0, 0, 0)) + found
        self.names[key] = access.memory.name

    def report(self, monitor: Monitor) -> None:
        """Report advice for each access that wastes transactions or sectors."""
        for (node, space), traffic in self.seen.items():
            make = _report_bank_conflicts if space == SHARED else _report_uncoalesced
            finding = make(node, self.names[node, space], traffic)
            if finding is not None:
                monitor.report_finding(replace(finding, location=node.loc))
        if advice := describe_partial_warp(monitor.group):
            monitor.report_finding(Finding("partial warp", advice[0], monitor.place, suggestion=advice[1]))
        self.__init__()  # type: ignore[misc]


def describe_partial_warp(group: int) -> tuple[str, str] | None:
    """What a group that fills no whole number of warps wastes on a GPU, and what to do; None where nothing is.

    >>> describe_partial_warp(4)[0]
    'a group of 4 tiles is a thread block of 4 threads on ptx: 28 of the 32 threads of its warp are idle'
    >>> describe_partial_warp(64) or describe_partial_warp(1)
    """
    idle = -group % WARP_LANES
    if group == 1 or not idle:
        return None
    warps = "its warp" if group < WARP_LANES else "its last warp"
    what = f"a group of {group} tiles is a thread block of {group} threads on ptx"
    return f"{what}: {idle} of the {WARP_LANES} threads of {warps} are idle", (
        f"launch groups of a multiple of {WARP_LANES} tiles, or one tile for each program (kernel[grid]) with larger "
        "blocks: it gets a thread block of its own"
    )


def _report_bank_conflicts(node: Node, name: str, traffic: WarpTransactions) -> Finding | None:
    if not traffic.excess:
        return None
    message = (
        f"bank conflicts on {name}: up to {traffic.worst} different words in one bank; "
        f"{traffic.taken} cycles for {traffic.warps} warp accesses, at least {traffic.least} needed"
    )
    suggestion = 'pad the rows by one element, or alloc_shared(..., swizzle="xor")'
    return Finding("bank conflict", message, node.loc, suggestion=suggestion)


def _report_uncoalesced(node: Node, name: str, traffic: WarpTransactions) -> Finding | None:
    if traffic.taken < WASTE_RATIO * traffic.least or traffic.taken <= traffic.warps:
        return None
    message = (
        f"accesses to {name} do not coalesce: {traffic.taken} sectors of 32 bytes for {traffic.warps} warps where "
        f"{traffic.least} would hold what is used"
    )
    return Finding("uncoalesced", message, node.loc, suggestion="let neighbouring lanes touch neighbouring elements")

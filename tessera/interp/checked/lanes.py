"""What the lanes of warps touch at one access: banks of shared memory, sectors of global memory.

A model of the hardware, not a measurement: 32 lanes a warp, 32 banks of 4 bytes, sectors of 32 bytes. The tiles of a
group are lanes side by side; a tile alone is a whole group whose lanes take the elements of a block in order. Lanes
whose elements are wider than 4 bytes take turns, as many as it needs for 128 bytes each.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tessera.interp.checked.access import Access
from tessera.interp.machine import Machine

LANES, BANKS, BANK_BYTES, SECTOR = 32, 32, 4, 32


@dataclass(frozen=True)
class Traffic:
    """The warps of an access: how many turns (or sectors) they take, how few would do, and the worst warp's."""

    taken: int
    least: int
    worst: int
    warps: int

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.taken + other.taken, self.least + other.least, max(self.worst, other.worst), self.warps + other.warps
        )

    @property
    def excess(self) -> int:
        """How many more than would do."""
        return self.taken - self.least


def offsets(machine: Machine, access: Access) -> tuple[np.ndarray, np.ndarray]:
    """For each warp and lane the byte that it touches first, counted within one copy of the memory; and which do."""
    array, lead = access.memory.array, access.memory.lead
    total = np.zeros((1,) * len(access.shape), np.int64)
    for index, stride in zip(access.indices[lead:], array.strides[lead:], strict=True):
        total = total + index * stride
    keep = np.ones((1,) * len(access.shape), bool) if access.keep is None else access.keep
    return _by_warp(machine, access, total), _by_warp(machine, access, keep)


def _by_warp(machine: Machine, access: Access, table: np.ndarray) -> np.ndarray:
    """A table of instances and block elements as one of warps and lanes; missing lanes are false or 0."""
    full = np.broadcast_to(table, access.shape)
    if machine.group > 1:  # the tiles are the lanes, and each element of their blocks an access of its own
        lanes = np.moveaxis(full, machine.rank - 1, -1)
        lanes = lanes.reshape(-1, lanes.shape[-1])
    else:
        lanes = full.reshape(int(np.prod(access.shape[: machine.rank])), -1)
    short = -lanes.shape[1] % LANES
    return np.pad(lanes, ((0, 0), (0, short))).reshape(-1, LANES)


def swizzled(access: Access, offset: np.ndarray, kind: str) -> np.ndarray:
    """Where bytes lie in a buffer with `swizzle="xor"`: a row's stretches of 16 bytes change places by its number."""
    if kind != "xor" or len(access.memory.shape) < 2:
        return offset
    row_bytes = access.memory.array.strides[-2]
    if row_bytes % 128:  # rows that do not fill all banks are left as they are
        return offset
    row, within = offset // row_bytes, offset % row_bytes
    chunk = within // 16 ^ row % 8
    return row * row_bytes + chunk * 16 + within % 16


def banks(offset: np.ndarray, active: np.ndarray, itemsize: int) -> Traffic:
    """The turns that warps take at shared memory: as many as the different words in their fullest bank."""
    turns = max(1, itemsize // BANK_BYTES)
    if turns > 1:  # lanes of wide elements go in parts of a warp, each element filling several banks
        offset, active = (t.reshape(-1, LANES // turns) for t in (offset, active))
        words = (offset[..., None] // BANK_BYTES + np.arange(turns)).reshape(offset.shape[0], -1)
        active = np.repeat(active, turns, axis=1)
    else:
        words = offset // BANK_BYTES
    busy = active.any(axis=1)
    degree = _most_alike(words[busy], active[busy])
    return Traffic(int(degree.sum()), int(busy.sum()), int(degree.max(initial=0)), int(busy.sum()))


def _most_alike(words: np.ndarray, active: np.ndarray) -> np.ndarray:
    """For each warp the most different words that fall into one bank."""
    new = _first_of_each(words, active)
    rows = np.broadcast_to(np.arange(len(words))[:, None], words.shape)
    place = (rows * BANKS + np.sort(np.where(active, words, -1), axis=1) % BANKS)[new]
    return np.bincount(place, minlength=len(words) * BANKS).reshape(-1, BANKS).max(axis=1)


def sectors(offset: np.ndarray, active: np.ndarray, itemsize: int) -> Traffic:
    """The sectors of global memory that warps touch, and how few would hold the bytes they use."""
    busy = active.any(axis=1)
    offset, active = offset[busy], active[busy]
    touched = _first_of_each(offset // SECTOR, active).sum(axis=1)
    used = _first_of_each(offset, active).sum(axis=1) * itemsize
    least = -(-used // SECTOR)
    return Traffic(int(touched.sum()), int(least.sum()), int(touched.max(initial=0)), len(offset))


def _first_of_each(values: np.ndarray, active: np.ndarray) -> np.ndarray:
    """In each row, in ascending order, where a value that an active lane has appears for the first time."""
    held = np.sort(np.where(active, values, -1), axis=1)
    new = np.ones(held.shape, bool)
    new[:, 1:] = held[:, 1:] != held[:, :-1]
    return new & (held >= 0)

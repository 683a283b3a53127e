"""Barriers in memory: tiles arrive and wait apart from each other, phase by phase, as producers and consumers do."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from tessera.errors import ArgumentError
from tessera.kernel.copies import alloc_shared
from tessera.kernel.place import Memory, value
from tessera.kernel.trace import as_index, current, emit
from tessera.ops import mbarrier as ops
from tessera.types import int64


@dataclass(frozen=True)
class Barrier:
    """One of `length` barriers in shared memory, or all of them (slot None); `barriers[k]` is one of them."""

    memory: Memory
    slot: Any = None
    length: int = 1

    def __getitem__(self, slot: Any) -> Barrier:
        if isinstance(slot, int) and not 0 <= slot < self.length:
            raise ArgumentError(f"there is no barrier {slot}", expected=f"0 to {self.length - 1}")
        return replace(self, slot=value(slot))

    def __len__(self) -> int:
        return self.length

    def __repr__(self) -> str:
        return f"mbarrier {'' if self.slot is None else self.slot} of {self.length}"

    @property
    def is_whole(self) -> bool:
        """Whether this stands for all that `mbarrier` has made, not for one that was taken of them."""
        return self.slot is None

    def init(self, count: int) -> None:
        """Begin anew with phase 0; each phase takes `count` arrivals."""
        self._do(ops.mbarrier_init, count=_positive(count, "arrivals"))

    def arrive(self, count: int = 1) -> None:
        """Each tile here arrives, `count` times; with the last arrival the phase ends."""
        self._do(ops.mbarrier_arrive, count=_positive(count, "arrivals"))

    def expect(self, count: int) -> None:
        """Keep the phase open until `count` more bytes have come: those of copies with `barrier=` this one."""
        self._do(ops.mbarrier_expect, count=_positive(count, "bytes"))

    def wait(self, parity: Any) -> None:
        """Wait for the end of the latest phase of this parity: 0 for the first phase, then 1, 0, …

        Before the first phase has ended `wait(1)` does not wait: what it would wait for counts as over.
        """
        self._do(ops.mbarrier_wait, as_index(value(parity)))

    def copied(self, count: int) -> None:
        """Count the copies begun since the last commit when they are done, as `count` bytes."""
        self._do(ops.mbarrier_copies, count=_positive(count, "bytes"))

    def _do(self, op: Any, *operands: Any, **attrs: Any) -> None:
        slot = 0 if self.slot is None else self.slot  # where none is taken the first is meant
        emit(op, [self.memory.ref(), as_index(slot), *operands], **attrs)


def mbarrier(count: int, length: int | None = None) -> Barrier:
    """A barrier (or `length` of them, by number) whose phases take `count` arrivals each, ready for use.

    It lies in shared memory and begins in phase 0. The number of tiles, `tile.group_size()`, is a usual count.
    """
    current("tile.mbarrier")
    number = _positive(length or 1, "barriers")
    made = Barrier(alloc_shared((number, ops.FIELDS), int64).memory, None, number)
    for slot in range(number):
        made[slot].init(count)
    return made


def mbarrier_init(barrier: Barrier, count: int) -> None:
    """`barrier.init(count)`."""
    barrier.init(count)


def mbarrier_arrive(barrier: Barrier, count: int = 1) -> None:
    """`barrier.arrive(count)`."""
    barrier.arrive(count)


def mbarrier_expect(barrier: Barrier, count: int) -> None:
    """`barrier.expect(count)`."""
    barrier.expect(count)


def mbarrier_wait(barrier: Barrier, parity: Any) -> None:
    """`barrier.wait(parity)`."""
    barrier.wait(parity)


def _positive(number: Any, what: str) -> int:
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise ArgumentError(f"a number of {what} is a constant of at least 1", received=repr(number))
    return number

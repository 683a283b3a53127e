"""`kernel_trace` and `kernel_report`: what kernels did, in numbers and in words."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tessera.debug import picture, timeline
from tessera.debug.around import Around
from tessera.debug.gpus import GPUS, Occupancy, occupancy
from tessera.debug.profile import COMPUTE, CONTROL, INDEX, MEMORY, Counts, Profile
from tessera.errors import ArgumentError
from tessera.interp.checked.observe import OBSERVERS
from tessera.ops.tile import meets
from tessera.types import GLOBAL, REGISTER, SHARED

F = TypeVar("F", bound=Callable[..., Any])
WARPS = 4  # of a tile that is a whole group of threads, where nothing says otherwise
_OWN = 16  # registers of a thread for addresses and counters, by the model


@dataclass(frozen=True)
class KernelReport:
    """What one launch did. Counts are exact; `occupancy` and `registers` are models."""

    counts: Counts
    gpu: str

    @property
    def name(self) -> str:
        """The kernel's name."""
        return self.counts.started.function.name

    @property
    def mix(self) -> dict[str, float]:
        """The share of each kind of operation: memory, compute (floats), index (integers), control."""
        total = sum(self.counts.operations.values())
        kinds = (MEMORY, COMPUTE, INDEX, CONTROL)
        return {kind: self.counts.operations[kind] / total if total else 0.0 for kind in kinds}

    @property
    def intensity(self) -> float:
        """Floating-point operations for each byte of global memory read or written."""
        moved = self.counts.read[GLOBAL] + self.counts.written[GLOBAL]
        return self.counts.flops / moved if moved else float("inf")

    @property
    def coalescing(self) -> float:
        """The share of the sectors of global memory touched that would have been enough."""
        return self.counts.sectors.least / self.counts.sectors.taken if self.counts.sectors.taken else 1.0

    @property
    def bank_conflicts(self) -> int:
        """The turns at shared memory that different words in one bank have cost."""
        return self.counts.banks.excess

    @property
    def threads(self) -> int:
        """The threads of a group: its tiles, or four warps for a tile that is a group by itself."""
        return self.counts.started.group if self.counts.started.group > 1 else WARPS * 32

    @property
    def registers(self) -> int:
        """Registers of a thread, by a model: the blocks alive at once, shared out, and some for addresses."""
        tiles = self.counts.started.group
        shared_out = self.counts.need.block_bytes * tiles / 4 / self.threads
        return min(255, _OWN + -(-int(shared_out) // 1))

    @property
    def occupancy(self) -> Occupancy:
        """How many groups a multiprocessor of the GPU holds at once, by a model."""
        return occupancy(self.gpu, self.threads, self.counts.need.shared_bytes, self.registers)

    def suggestions(self) -> list[str]:
        """What to look at first, if anything stands out."""
        advice = []
        if self.bank_conflicts:
            advice.append("pad or swizzle shared memory: ts.debug.check(..., lint=True) names the lines")
        if self.coalescing < 0.5:
            advice.append("let neighbouring lanes touch neighbouring elements of global memory")
        if self.occupancy.share < 0.5:
            advice.append(f"use less {self.occupancy.limit}: {self.occupancy.groups} groups fit a multiprocessor")
        started, room = self.counts.started, self.occupancy.groups * GPUS[self.gpu].processors
        if meets(started.function.body) and (groups := math.prod(started.grid)) > room:
            advice.append(f"launch fewer groups: {groups} meet at a grid barrier, and {room} fit a {self.gpu} at once")
        return advice

    def __str__(self) -> str:
        counts, fits = self.counts, self.occupancy
        mix = ", ".join(f"{kind} {share:.1%}" for kind, share in self.mix.items())
        spaces = [s for s in (GLOBAL, SHARED, REGISTER) if counts.read[s] or counts.written[s]]
        moved = [f"  {s} memory: {counts.read[s]} bytes read, {counts.written[s]} written" for s in spaces]
        lines = [
            f"{self.name}, grid {counts.started.grid}, group {counts.started.group}",
            f"  operations (elements): {mix}",
            *moved,
            f"  arithmetic intensity: {self.intensity:.3g} flop/byte ({counts.flops} flop)",
            f"  coalescing: {self.coalescing:.0%} ({counts.sectors.taken} sectors, {counts.sectors.least} needed)",
            f"  bank conflicts: {self.bank_conflicts} extra turns in {counts.banks.warps}",
            f"  shared memory: {counts.need.shared_bytes} bytes a group",
            f"  model of {self.gpu}: {self.threads} threads, {self.registers} registers each; {fits.groups} groups a "
            f"multiprocessor, occupancy {fits.share:.0%} (limited by {fits.limit})",
            *(f"  suggestion: {s}" for s in self.suggestions()),
        ]
        return "\n".join(lines)


@dataclass(frozen=True)
class KernelTrace:
    """What was recorded while kernels ran: a report for each launch, a timeline, and pictures."""

    profile: Profile
    gpu: str

    @property
    def reports(self) -> list[KernelReport]:
        """A report for each launch, in order."""
        return [KernelReport(c, self.gpu) for c in self.profile.launches]

    def timeline(self, path: str | Path) -> Path:
        """Write the ops as they ran as Chrome trace JSON, which Perfetto opens: the interpreter's time, not a GPU's."""
        return timeline.write(Path(path), self.profile.launches)

    def picture(self, path: str | Path, tensor: str | None = None) -> Path:
        """Draw which program touches which part of which tensor, in which order (PNG or SVG).

        Raises:
            DeviceUnavailable: matplotlib is not installed. ArgumentError: no tensor of this name was touched.
        """
        return picture.draw(Path(path), self.profile.launches, tensor)

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.reports)) or "no kernel ran in the interpreter"


_LAST: list[KernelTrace] = []


@contextmanager
def kernel_trace(gpu: str = "H100") -> Iterator[KernelTrace]:
    """Record what every kernel interpreted in this block does; `gpu` is the one that models speak of.

    >>> import numpy as np, tessera as ts
    >>> @ts.kernel
    ... def double(x):
    ...     i = ts.tile.program_id(0) * 32
    ...     x[i : i + 32] *= 2.0
    >>> with ts.debug.kernel_trace() as trace:
    ...     double[(4,)](np.ones(128, np.float32))
    >>> trace.reports[0].counts.flops, trace.reports[0].coalescing
    (128, 1.0)
    """
    occupancy(gpu, 32, 0, 32)  # the name is checked before anything runs
    trace = KernelTrace(Profile(), gpu)
    token = OBSERVERS.set((trace.profile, *OBSERVERS.get()))
    _LAST[:] = [trace]
    try:
        yield trace
    finally:
        OBSERVERS.reset(token)


def kernel_report() -> KernelTrace:
    """Print what the last `kernel_trace` (or `ts.debug.kernel`) recorded, and give it.

    Raises:
        ArgumentError: nothing has been recorded.
    """
    if not _LAST:
        raise ArgumentError("no kernel has been traced", suggestion="with ts.debug.kernel_trace(): ...")
    print(_LAST[0])
    return _LAST[0]


def kernel(function: F) -> F:
    """A function or kernel whose launches are recorded at each call; `kernel_report()` prints the last call's.

    >>> @kernel
    ... def launches():
    ...     return 1
    >>> launches()
    1
    """
    return Around(function, lambda called: kernel_trace())  # type: ignore[return-value]

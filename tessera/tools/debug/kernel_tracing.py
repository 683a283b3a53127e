"""`kernel_trace` and `kernel_report`: profiles of kernels as text, as Chrome trace JSON, and as access pictures."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from tessera.core.errors import ArgumentError, DeviceUnavailable, user_location
from tessera.core.io import write_text
from tessera.core.types import GLOBAL, REGISTER, SHARED
from tessera.interp.observers import OBSERVERS
from tessera.interp.sanitizer.memory_transactions import describe_partial_warp
from tessera.interp.sanitizer.shadow_memory import READ
from tessera.ops.dialects.tile import uses_grid_barrier
from tessera.runtime.occupancy import GPUS, Occupancy, estimate_occupancy
from tessera.tools.debug.profiler import (
    COMPUTE,
    CONTROL,
    INDEX,
    MEMORY,
    KernelProfile,
    LaunchCounts,
)
from tessera.tools.debug.sessions import ContextDecorator

if TYPE_CHECKING:
    from tessera.tools.debug.profiler import AccessedBox


def trace_events(launches: Sequence[LaunchCounts]) -> list[dict[str, Any]]:
    """Each op that ran as a complete event ("X"); times in microseconds, one thread for each launch."""
    found: list[dict[str, Any]] = []
    for number, counts in enumerate(launches):
        name = f"{number}: {counts.started.function.name}{counts.started.grid}"
        found.append({"ph": "M", "pid": 0, "tid": number, "name": "thread_name", "args": {"name": name}})
        found += [
            {
                "ph": "X", "pid": 0, "tid": number, "name": e.node.op.name, "cat": "op",
                "ts": e.start * 1e6, "dur": e.seconds * 1e6,
                "args": {"line": str(e.node.loc), "instances": e.instances},
            }
            for e in counts.events
        ]  # fmt: skip
    return found


def write_timeline(path: Path, launches: Sequence[LaunchCounts]) -> Path:
    """Write the timeline of some launches."""
    write_text(path, json.dumps({"traceEvents": trace_events(launches), "displayTimeUnit": "ns"}))
    return path


_LARGEST = 512  # cells of a picture along each axis: larger tensors are drawn coarser


def draw_access_picture(path: Path, launches: Sequence[LaunchCounts], tensor: str | None) -> Path:
    """One panel for each tensor and direction; a colour for each program, and the order as numbers where there is room.

    Raises:
        DeviceUnavailable: matplotlib is not installed. ArgumentError: no tensor of this name was touched.
    """
    check_picture(path)
    groups = _group_by_tensor(launches, tensor)
    if not groups:
        names = sorted({t.tensor for c in launches for t in c.touched})
        raise ArgumentError("nothing was touched that could be drawn", expected=", ".join(names) or "a kernel that ran")
    figures = _figures()
    figure = figures.Figure(figsize=(4.2 * len(groups), 4.2), layout="constrained")
    for number, ((name, kind), boxes) in enumerate(groups.items()):
        _panel(figure.add_subplot(1, len(groups), number + 1), f"{name} ({kind})", boxes)
    figure.supxlabel(
        "a colour for each program, of those that touch a place the first; a number for the turn", fontsize=8
    )
    figure.savefig(path)
    return path


def check_picture(path: Path) -> Path:
    """The path of a picture, before the run that it shows.

    Raises:
        DeviceUnavailable: matplotlib is not installed. ArgumentError: the name has no ending of a picture.
    """
    if path.suffix not in (".png", ".svg"):
        raise ArgumentError(f"the ending of {path} names no picture", location=user_location(), expected="*.png, *.svg")
    _figures()
    return path


def _figures() -> Any:
    try:
        return import_module("matplotlib.figure")
    except ImportError:
        raise DeviceUnavailable("pictures need matplotlib", suggestion='pip install "tessera[pictures]"') from None


def _group_by_tensor(launches: Sequence[LaunchCounts], tensor: str | None) -> dict[tuple[str, str], list[AccessedBox]]:
    found: dict[tuple[str, str], list[AccessedBox]] = {}
    for each in (t for c in launches for t in c.touched if tensor in (None, t.tensor)):
        found.setdefault((each.tensor, "read" if each.kind == READ else "written"), []).append(each)
    return found


def first_access_cells(boxes: Sequence[AccessedBox]) -> tuple[np.ndarray, tuple[int, int]]:
    """For each cell of a tensor seen as a matrix the first program that touched it (-1: none), and the cells' size."""
    rows, columns = _as_matrix_shape(boxes[0].shape)
    scale = (-(-rows // _LARGEST), -(-columns // _LARGEST))
    table = np.full((-(-rows // scale[0]), -(-columns // scale[1])), -1)
    programs = {p: n for n, p in enumerate(dict.fromkeys(b.program for b in boxes))}
    for box in reversed(boxes):
        top, bottom, left, right = _box_span(box)
        table[top // scale[0] : -(-bottom // scale[0]), left // scale[1] : -(-right // scale[1])] = programs[
            box.program
        ]
    return table, scale


def _as_matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """The rows and columns of a tensor: leading axes one below the other."""
    return int(np.prod(shape[:-1], dtype=int)), shape[-1] if shape else 1


def _box_span(box: AccessedBox) -> tuple[int, int, int, int]:
    top = bottom = 0
    for size, low, high in zip(box.shape[:-1], box.low[:-1], box.high[:-1], strict=True):
        top, bottom = top * size + low, bottom * size + high - 1
    left, right = (box.low[-1], box.high[-1]) if box.shape else (0, 1)
    return top, bottom + 1, left, right


def _panel(axes: Any, title: str, boxes: Sequence[AccessedBox]) -> None:
    table, scale = first_access_cells(boxes)
    axes.imshow(np.ma.masked_less(table, 0), aspect="auto", interpolation="nearest", cmap="turbo")
    axes.set_title(title)
    axes.set_xlabel(f"column{f' / {scale[1]}' if scale[1] > 1 else ''}")
    axes.set_ylabel(f"row{f' / {scale[0]}' if scale[0] > 1 else ''}")
    first = {(b.low, b.high): n for n, b in reversed(list(enumerate(boxes)))}
    if len(first) <= 64:
        for order in first.values():
            box = boxes[order]
            top, bottom, left, right = _box_span(box)
            place = ((left + right) / 2 / scale[1] - 0.5, (top + bottom) / 2 / scale[0] - 0.5)
            around = {"boxstyle": "round,pad=0.2", "facecolor": "white", "edgecolor": "none", "alpha": 0.8}
            axes.text(*place, str(order), ha="center", va="center", fontsize=7, bbox=around)


F = TypeVar("F", bound=Callable[..., Any])
WARPS = 4  # of a tile that is a whole group of threads, where nothing says otherwise
_ADDRESS_REGISTERS = 16  # registers of a thread for addresses and counters, by the model


@dataclass(frozen=True)
class KernelReport:
    """What one launch did. Counts are exact; `occupancy` and `registers` are models."""

    counts: LaunchCounts
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
        """The extra cycles of shared memory that different words in one bank cost."""
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
        return min(255, _ADDRESS_REGISTERS + -(-int(shared_out) // 1))

    @property
    def occupancy(self) -> Occupancy:
        """How many groups a multiprocessor of the GPU holds at once, by a model."""
        return estimate_occupancy(self.gpu, self.threads, self.counts.need.shared_bytes, self.registers)

    def suggestions(self) -> list[str]:
        """What to look at first, if anything stands out."""
        advice = []
        if self.bank_conflicts:
            advice.append("pad or swizzle shared memory: ts.debug.check(..., lint=True) names the lines")
        if self.coalescing < 0.5:
            advice.append("let neighbouring lanes touch neighbouring elements of global memory")
        group = describe_partial_warp(self.counts.started.group)
        if group is not None:
            advice.append(f"{group[0]}; {group[1]}")
        elif self.occupancy.share < 0.5:
            fewer = "less" if self.occupancy.limit == "shared memory" else "fewer"
            advice.append(f"use {fewer} {self.occupancy.limit}: {self.occupancy.groups} groups fit a multiprocessor")
        started, room = self.counts.started, self.occupancy.groups * GPUS[self.gpu].processors
        if uses_grid_barrier(started.function.body) and (groups := math.prod(started.grid)) > room:
            fit = f"{room} fit a {self.gpu} at once"
            advice.append(f"launch fewer groups: {groups} synchronise at a grid barrier, and {fit}")
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
            f"  bank conflicts: {self.bank_conflicts} extra cycles in {counts.banks.warps} warp accesses",
            f"  shared memory: {counts.need.shared_bytes} bytes a group",
            f"  model of {self.gpu}: {self.threads} threads, {self.registers} registers each; {fits.groups} groups a "
            f"multiprocessor, occupancy {fits.share:.0%} (limited by {fits.limit})",
            *(f"  suggestion: {s}" for s in self.suggestions()),
        ]
        return "\n".join(lines)


@dataclass(frozen=True)
class KernelTrace:
    """What was recorded while kernels ran: a report for each launch, a timeline, and pictures."""

    profile: KernelProfile
    gpu: str

    @property
    def reports(self) -> list[KernelReport]:
        """A report for each launch, in order."""
        return [KernelReport(c, self.gpu) for c in self.profile.launches]

    def timeline(self, path: str | Path) -> Path:
        """Write the ops as they ran as Chrome trace JSON, which Perfetto opens: the interpreter's time, not a GPU's."""
        return write_timeline(Path(path), self.profile.launches)

    def picture(self, path: str | Path, tensor: str | None = None) -> Path:
        """Draw which program touches which part of which tensor, in which order (PNG or SVG).

        Raises:
            DeviceUnavailable: matplotlib is not installed. ArgumentError: no tensor of this name was touched.
        """
        return draw_access_picture(Path(path), self.profile.launches, tensor)

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.reports)) or "no kernel ran in the interpreter"


_LAST: list[KernelTrace] = []


@contextmanager
def kernel_trace(gpu: str = "H100") -> Iterator[KernelTrace]:
    """Record what every kernel interpreted in this block does; `gpu` is the GPU that the report models.

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
    estimate_occupancy(gpu, 32, 0, 32)  # the name is checked before anything runs
    trace = KernelTrace(KernelProfile(), gpu)
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
    return ContextDecorator(function, lambda called: kernel_trace())  # type: ignore[return-value]

"""Profile report: kernels by cost under the user's functions and lines, their share of the roofline, what bounds them,
and advice that follows from what was measured or counted. Formats: table, JSON, Chrome trace, flame graphs.
"""

from __future__ import annotations

import ast
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tessera.codegen.contract import get_backend
from tessera.core.errors import ArgumentError, Location, read_source_line, user_location
from tessera.core.io import write_text
from tessera.runtime.launch.tuner import has_device
from tessera.tools.performance.cost_models import Device, device_of, find_data_sheet
from tessera.tools.profile.replay import CYCLES, DEVICE_EVENTS, HOST_CLOCK, INSTRUCTIONS, SECONDS, KernelMeasurement

MEMORY, COMPUTE, OVERHEAD = "memory", "compute", "overhead"
LOW_SHARE = 0.1  # of the roofline: less is neither bandwidth nor arithmetic
SMALL_SECONDS = 2e-5  # what a launch may take for itself
UNITS = {SECONDS: (1e6, "µs"), CYCLES: (1.0, "cycles"), INSTRUCTIONS: (1.0, "warp instructions")}
DEFAULT_GPU = "H100"  # where there is no GPU
WIDTH = 140  # of a report that no terminal shows


def make_console() -> Console:
    """The console of a report: as wide as its table where the output is no terminal."""
    console = Console(soft_wrap=True)
    return console if console.is_terminal else Console(soft_wrap=True, width=WIDTH)


@lru_cache(maxsize=64)
def _read_functions(file: str, stamp: float) -> list[tuple[int, int, str]]:
    """The first and last line of each function of a file, with its qualified name, the inner ones last."""
    try:
        tree = ast.parse(Path(file).read_text())
    except (OSError, SyntaxError, ValueError):
        return []
    found: list[tuple[int, int, str]] = []

    def visit(node: ast.AST, names: tuple[str, ...]) -> None:
        for child in ast.iter_child_nodes(node):
            inner = names
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                inner = (*names, child.name)
                if not isinstance(child, ast.ClassDef):
                    found.append((child.lineno, child.end_lineno or child.lineno, ".".join(inner)))
            visit(child, inner)

    visit(tree, ())
    return found


def find_function(location: Location) -> str:
    """The name of the function that holds a line of source; "<module>" outside of any."""
    try:
        stamp = os.stat(location.file).st_mtime
    except OSError:
        return "<module>"
    holding = [f for f in _read_functions(location.file, stamp) if f[0] <= location.line <= f[1]]
    return holding[-1][2] if holding else "<module>"


@dataclass(frozen=True)
class KernelRow:
    """A kernel of a report: what was measured, and what follows from it."""

    measured: KernelMeasurement
    share: float  # of the cost of all
    device: Device | None

    @property
    def function(self) -> str:
        """The user's function."""
        return find_function(self.measured.location)

    @property
    def place(self) -> str:
        """The user's file and line."""
        location = self.measured.location
        return f"{os.path.basename(location.file)}:{location.line}" if location.line else ""

    @property
    def source(self) -> str:
        """The user's source line."""
        return read_source_line(self.measured.location.file, self.measured.location.line).strip()

    @property
    def limit_seconds(self) -> float | None:
        """The least time by the roofline of the device: the longer of arithmetic and memory at their peaks."""
        if self.device is None or not self.measured.bytes:
            return None
        return max(self._compute_seconds, self._memory_seconds)

    @property
    def _compute_seconds(self) -> float:
        assert self.device is not None
        return self.measured.flops / self.device.peak_flops(matrix=self.measured.narrow)

    @property
    def _memory_seconds(self) -> float:
        assert self.device is not None
        return self.measured.bytes / self.device.peak_bandwidth()

    @property
    def roofline(self) -> float | None:
        """The share of the roofline that it reaches; None where no time was measured."""
        limit = self.limit_seconds
        if limit is None or self.measured.unit != SECONDS or not self.measured.cost:
            return None
        return limit / self.measured.cost

    @property
    def bound(self) -> str:
        """What bounds it: memory or compute by the roofline, or the overhead of the launch."""
        if self.device is None or not self.measured.bytes:
            return ""
        reached = self.roofline
        if reached is not None and reached < LOW_SHARE and self.measured.cost < SMALL_SECONDS:
            return OVERHEAD
        return COMPUTE if self._compute_seconds > self._memory_seconds else MEMORY

    def as_json(self) -> dict[str, Any]:
        """The row as plain data."""
        one = self.measured
        return {
            "kernel": one.name, "function": self.function, "file": one.location.file, "line": one.location.line,
            "source": self.source, "ops": list(one.ops), one.unit: one.cost, "share": self.share, "flops": one.flops,
            "bytes": one.bytes, "moved": one.moved, "intensity": one.intensity, "programs": one.programs,
            "roofline": self.roofline, "limit_seconds": self.limit_seconds, "bound": self.bound,
            "resources": [dict(r) for r in one.resources],
            "lines": {str(k): v for k, v in one.lines.items()},
        }  # fmt: skip


@dataclass
class ProfileReport:
    """The kernels of a program on a target, with the time of the whole program where it was measured."""

    name: str
    target: str
    kernels: Sequence[KernelMeasurement]
    whole: float | None = None
    device: Device | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def unit(self) -> str:
        """What costs are counted in."""
        return self.kernels[0].unit if self.kernels else SECONDS

    @property
    def clock(self) -> str | None:
        """What seconds were measured by: "device events" or "host clock"; None where none were."""
        if self.unit != SECONDS or not self.kernels:
            return None
        return DEVICE_EVENTS if all(k.clock == DEVICE_EVENTS for k in self.kernels) else HOST_CLOCK

    @property
    def total(self) -> float:
        """The cost of all kernels."""
        return sum(k.cost for k in self.kernels)

    @cached_property
    def rows(self) -> list[KernelRow]:
        """The kernels, in the order of the program."""
        total = self.total
        return [KernelRow(k, k.cost / total if total else 0.0, self.device) for k in self.kernels]

    @property
    def bottleneck(self) -> KernelRow | None:
        """The kernel that costs the most."""
        return max(self.rows, key=lambda r: r.share, default=None)

    def suggestions(self) -> list[str]:
        """Advice that follows from the counts; the gains named are bounds, not promises."""
        from tessera.tools.profile.advice import find_advice

        return find_advice(self)

    @property
    def limit_seconds(self) -> float | None:
        """The least time of all kernels by the roofline."""
        limits = [r.limit_seconds for r in self.rows]
        return sum(x for x in limits if x is not None) if any(x is not None for x in limits) else None

    # Formats.

    def render(self, console: Console | None = None) -> None:
        """Print the tables."""
        console = console or make_console()
        factor, unit = UNITS[self.unit]
        console.print(f"{self.name} on {self.target}: {self.total * factor:,.1f} {unit} in {len(self.rows)} kernels")
        if self.whole is not None:
            whole = "the whole program, by device events" if self.clock == DEVICE_EVENTS else "the whole call"
            console.print(f"{whole}: {self.whole * factor:,.1f} {unit}")
        console.print(self._make_table(unit, factor))
        for title, lines in (("Bottleneck", self._describe_bottleneck()), ("Suggestions", self.suggestions())):
            if lines:
                console.print(f"[bold]{title}[/bold]")
                for line in lines:
                    console.print(f"  {line}", markup=False)
        for note in (*self.notes, *self._find_caveats()):
            console.print(note, markup=False, style="dim")

    def _make_table(self, unit: str, factor: float) -> Table:
        table = Table(box=None, padding=(0, 2, 0, 0))
        titles = ("function", "line", "kernel", unit, "share", "flop/byte", "roofline", "bound by")
        for title in titles:
            table.add_column(title, justify="right" if title in (unit, "share", "flop/byte", "roofline") else "left")
        for function, rows in self._group_by_function():
            cost = sum(r.measured.cost for r in rows)
            table.add_row(function, "", "", f"{cost * factor:,.1f}", f"{sum(r.share for r in rows):.1%}", "", "", "",
                          style="bold")  # fmt: skip
            for row in sorted(rows, key=lambda r: -r.share):
                reached = "" if row.roofline is None else f"{row.roofline:.0%}"
                table.add_row("", row.place, row.measured.name, f"{row.measured.cost * factor:,.1f}",
                              f"{row.share:.1%}", f"{row.measured.intensity:.2f}", reached, row.bound)  # fmt: skip
        return table

    def _group_by_function(self) -> Iterator[tuple[str, list[KernelRow]]]:
        groups: dict[str, list[KernelRow]] = {}
        for row in self.rows:
            groups.setdefault(row.function, []).append(row)
        yield from sorted(groups.items(), key=lambda g: -sum(r.share for r in g[1]))

    def _describe_bottleneck(self) -> list[str]:
        row = self.bottleneck
        if row is None or not row.share:
            return []
        one, (factor, unit) = row.measured, UNITS[self.unit]
        lines = [
            f"{one.name} ({row.place}, {row.source}): {row.share:.0%} of the cost, {one.cost * factor:,.1f} {unit}"
        ]
        if row.bound == OVERHEAD:
            lines.append("bound by the launch: neither arithmetic nor memory explains its time")
        elif row.bound:
            lines.append(
                f"bound by {row.bound}: {one.intensity:.2f} flop/byte, where {self.device.name} balances at "  # type: ignore[union-attr]
                f"{self._ridge(row):.1f}"
            )
        return lines

    def _find_caveats(self) -> list[str]:
        if all(r.roofline is None or r.roofline <= 1.05 for r in self.rows):
            return []
        return ["above 100%: the peaks of this machine were measured while it was busy, or the data stay in its caches"]

    def _ridge(self, row: KernelRow) -> float:
        assert self.device is not None
        return self.device.peak_flops(matrix=row.measured.narrow) / self.device.peak_bandwidth()

    def __str__(self) -> str:
        console = Console(width=WIDTH, soft_wrap=True, no_color=True, highlight=False)
        with console.capture() as captured:
            self.render(console)
        return captured.get()

    def as_json(self) -> dict[str, Any]:
        """The report as plain data."""
        return {
            "name": self.name, "target": self.target, "unit": self.unit, "total": self.total, "whole": self.whole,
            "clock": self.clock,
            "device": None if self.device is None else self.device.name, "limit_seconds": self.limit_seconds,
            "kernels": [r.as_json() for r in self.rows],
            "bottleneck": self.bottleneck.measured.name if self.bottleneck else None,
            "suggestions": self.suggestions(), "notes": self.notes,
        }  # fmt: skip

    def trace_events(self) -> list[dict[str, Any]]:
        """The kernels as complete events ("X") of the Chrome trace format; a cycle or instruction is a microsecond."""
        found: list[dict[str, Any]] = [
            {"ph": "M", "pid": 0, "tid": 0, "name": "process_name", "args": {"name": f"{self.name} on {self.target}"}}
        ]
        now, factor = 0.0, UNITS[self.unit][0]
        for row in self.rows:
            length = row.measured.cost * factor
            found.append({
                "ph": "X", "pid": 0, "tid": 0, "ts": now, "dur": length, "name": row.measured.name, "cat": "kernel",
                "args": {
                    "function": row.function, "line": row.place, "source": row.source, "bound": row.bound,
                    "flops": row.measured.flops, "bytes": row.measured.bytes, "roofline": row.roofline,
                },
            })  # fmt: skip
            now += length
        return found

    def folded_stacks(self) -> str:
        """Collapsed stacks (B. Gregg): file; function; line; kernel and the cost, for flamegraph.pl and speedscope."""
        factor = 1e9 if self.unit == SECONDS else 1.0
        lines = [f"{';'.join(stack)} {round(cost * factor)}" for stack, cost in self._stacks()]
        return "\n".join(lines) + ("\n" if lines else "")

    def _stacks(self) -> Iterator[tuple[tuple[str, ...], float]]:
        for row in self.rows:
            frames = (os.path.basename(row.measured.location.file) or "?", row.function, f"{row.place} {row.source}")
            frame = tuple(f.replace(";", ",").replace("\n", " ") for f in frames)
            yield (*frame, row.measured.name), row.measured.cost

    def as_speedscope(self) -> dict[str, Any]:
        """The same as a file of speedscope (https://www.speedscope.app/file-format-schema.json)."""
        names: dict[str, int] = {}
        samples, weights = [], []
        for stack, cost in self._stacks():
            samples.append([names.setdefault(f, len(names)) for f in stack])
            weights.append(cost * (1e9 if self.unit == SECONDS else 1.0))
        profile = {
            "type": "sampled", "name": f"{self.name} on {self.target}", "startValue": 0, "endValue": sum(weights),
            "unit": "nanoseconds" if self.unit == SECONDS else "none", "samples": samples, "weights": weights,
        }  # fmt: skip
        frames = [{"name": n} for n in names]
        schema = "https://www.speedscope.app/file-format-schema.json"
        return {"$schema": schema, "shared": {"frames": frames}, "profiles": [profile], "exporter": "tessera"}

    def save(self, path: str | Path) -> Path:
        """Write the report: *.folded (collapsed stacks), *.speedscope.json, *.trace.json (Chrome), *.json or *.txt.

        Raises:
            ArgumentError: the name has none of these endings.
            FileError: there can be no file at the path.
        """
        make = find_format(path)
        write_text(path, make(self))
        return Path(path)


FORMATS: dict[str, Callable[[ProfileReport], str]] = {
    ".folded": ProfileReport.folded_stacks,
    ".speedscope.json": lambda r: json.dumps(r.as_speedscope()),
    ".trace.json": lambda r: json.dumps({"traceEvents": r.trace_events(), "displayTimeUnit": "ns"}),
    ".json": lambda r: json.dumps(r.as_json(), indent=1),
    ".txt": str,
}


def find_format(path: str | Path) -> Callable[[ProfileReport], str]:
    """What makes the text of a report for a file, by the file's ending.

    Raises:
        ArgumentError: the name has none of the endings.
    """
    for ending, make in FORMATS.items():
        if str(path).endswith(ending):
            return make
    raise ArgumentError(
        f"the ending of {path} names no format", location=user_location(),
        expected=", ".join(f"*{e}" for e in FORMATS),
    )  # fmt: skip


def find_gpu_name(target: str) -> str:
    """The data sheet of the GPU that a target runs on, or its own name where there is none; H100 without a GPU."""
    if target.partition(":")[0] != "ptx" or not has_device(target):
        return DEFAULT_GPU
    name = get_backend(target).where()  # type: ignore[attr-defined]
    return find_data_sheet(name) or str(name)


def find_device(target: str, gpu: str = DEFAULT_GPU) -> Device | None:
    """The device whose peaks bound a target: this processor, or a GPU by its data sheet; None for a mesh.

    None, too, for a GPU of this machine that has no data sheet here.
    """
    plain = target.partition(":")[0]
    if plain == "ptx" and gpu == find_gpu_name(target) and find_data_sheet(gpu) is None:
        return None
    return device_of(gpu) if plain == "ptx" else None if plain == "csl" else device_of("cpu")

"""Visualisation of a run: the grid with memory and wavelet traffic, and the tasks of each PE over time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tessera.core.errors import ArgumentError, DeviceUnavailable
from tessera.interp.target.csl.fabric.routing import DIRECTION_NAMES, DIRECTION_STEPS

if TYPE_CHECKING:
    from tessera.interp.target.csl.simulation import Simulation

PE_MEMORY = 48 * 1024
MAX_TIMELINE_ROWS = 48  # the number of PEs in the timeline


def summarise_run(run: Simulation) -> dict[str, Any]:
    """The data of a picture: for each PE its memory, the cycles of its tasks and the number of wavelets it sent.

    `{"cycles": n, "launches": [{"name", "start", "end"}, …], "pes": [{"x", "y", "memory", "busy", "launched", "sent"},
    …]}`, where `launched` are the busy cycles during launches, and `sent` counts wavelets by direction.
    """
    busy: dict[tuple[int, int], int] = {}
    launched: dict[tuple[int, int], int] = {}
    for place, _, start, end in run.timeline:
        busy[place] = busy.get(place, 0) + end - start
        inside = (min(end, one.ended) - max(start, one.started or 0) for one in run.launches)
        launched[place] = launched.get(place, 0) + sum(max(0, cycles) for cycles in inside)
    pes = [
        {
            "x": x,
            "y": y,
            "memory": pe.memory_used,
            "busy": busy.get((x, y), 0),
            "launched": launched.get((x, y), 0),
            "sent": dict(zip(DIRECTION_NAMES, run.fabric.nodes[x, y].traffic, strict=True)),
        }
        for (x, y), pe in sorted(run.pes.items())
    ]
    launches = [{"name": one.name, "start": one.started, "end": one.ended} for one in run.launches]
    return {"cycles": run.cycles, "launches": launches, "pes": pes}


def make_chrome_trace(run: Simulation) -> dict[str, Any]:
    """The tasks as a trace for Chrome's viewer and Perfetto: a row is a process, a PE a thread, and a cycle 1 µs."""
    events: list[dict[str, Any]] = [
        {"name": name, "ph": "X", "ts": start, "dur": max(end - start, 1), "pid": y, "tid": x, "cat": "task"}
        for (x, y), name, start, end in run.timeline
    ]
    names = [
        {"name": "thread_name", "ph": "M", "pid": y, "tid": x, "args": {"name": f"PE ({x}, {y})"}} for x, y in run.pes
    ]
    return {"traceEvents": names + events, "otherData": summarise_run(run)}


def write_trace(run: Simulation, path: str | Path) -> None:
    """Write the Chrome trace as JSON."""
    Path(path).write_text(json.dumps(make_chrome_trace(run)))


def draw_run(run: Simulation, path: str | Path) -> None:
    """Draw the grid and the timeline into a .png or .svg file.

    Raises:
        DeviceUnavailable: matplotlib is not installed. ArgumentError: the file has another extension.
    """
    if Path(path).suffix not in (".png", ".svg"):
        raise ArgumentError("a picture is a .png or .svg file", received=str(path))
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise DeviceUnavailable(
            "pictures need matplotlib", suggestion="pip install 'tessera[pictures]', or write a trace instead"
        ) from None
    width, height = run.layout.width, run.layout.height
    rows = min(len(run.pes), MAX_TIMELINE_ROWS)
    figure = Figure(figsize=(max(6.0, 0.6 * width + 2), max(4.0, 0.6 * height + 1.5) + 0.14 * rows + 1.5))
    grid, timeline = figure.subplots(2, 1, height_ratios=[max(4.0, 0.6 * height + 1.5), 0.14 * rows + 1.5])
    _draw_grid(run, figure, grid)
    _draw_timeline(run, timeline, rows)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def _draw_grid(run: Simulation, figure: Any, axes: Any) -> None:
    """Draw memory as the color of a PE, and traffic as the width of the outgoing links."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.patches import Rectangle

    scale = ScalarMappable(Normalize(0, PE_MEMORY / 1024), "Blues")
    most = max((sent for node in run.fabric.nodes.values() for sent in node.traffic[:4]), default=0) or 1
    for (x, y), pe in run.pes.items():
        color = scale.to_rgba(pe.memory_used / 1024)
        axes.add_patch(Rectangle((x - 0.3, y - 0.3), 0.6, 0.6, facecolor=color, edgecolor="black", linewidth=0.5))
        for direction, sent in enumerate(run.fabric.nodes[x, y].traffic[:4]):
            if sent:
                _draw_link(axes, x, y, direction, sent / most)
    axes.set(xlim=(-0.6, run.layout.width - 0.4), ylim=(run.layout.height - 0.4, -0.6), aspect="equal")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.set(xlabel="column", ylabel="row", title=f"{run.cycles:,} cycles; widest link: {most:,} wavelets")
    figure.colorbar(scale, ax=axes, label="memory (KB of 48)")


def _draw_link(axes: Any, x: int, y: int, direction: int, share: float) -> None:
    dx, dy = DIRECTION_STEPS[direction]
    side = 0.08  # draws the two directions of a link side by side
    start = (x + 0.3 * dx + side * dy, y + 0.3 * dy + side * dx)
    end = (x + 0.7 * dx + side * dy, y + 0.7 * dy + side * dx)
    style = {"arrowstyle": "-|>", "linewidth": 0.4 + 3 * share, "color": "tab:red", "alpha": 0.75}
    axes.annotate("", end, start, arrowprops=style)


def _draw_timeline(run: Simulation, axes: Any, rows: int) -> None:
    """Draw the tasks of the first PEs; each task name has its own color."""
    places = sorted(run.pes)[:rows]
    line = {place: index for index, place in enumerate(places)}
    spans: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for place, name, start, end in run.timeline:
        if place in line:
            spans.setdefault((name, line[place]), []).append((start, max(end - start, 1)))
    names = sorted({name for name, _ in spans})
    colors = {name: f"C{number % 10}" for number, name in enumerate(names)}
    for (name, row), bars in spans.items():
        axes.broken_barh(bars, (row - 0.4, 0.8), facecolor=colors[name])
    for name in names:
        axes.broken_barh([], (0, 0), facecolor=colors[name], label=name)
    axes.set(ylim=(rows - 0.5, -0.5), xlim=(0, run.cycles or 1), xlabel="cycle", title="tasks")
    axes.set_yticks(range(rows), [f"({x}, {y})" for x, y in places], fontsize=6)
    if names:
        axes.legend(fontsize=6, loc="upper right", ncols=2)

"""Mesh timeline: what each processing element and each link of a simulated mesh does, frame by frame."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tessera.codegen.contract import emit_artifact, get_backend, load_interpreter
from tessera.core.errors import TesseraError
from tessera.interp.target.csl.fabric.router_grid import TRAFFIC_LOG
from tessera.interp.target.csl.fabric.routing import DIRECTION_NAMES, DIRECTION_STEPS
from tessera.interp.target.csl.host.visualisation import PE_MEMORY
from tessera.ir.core import Module

MOST_FRAMES = 240
MOST_PES = 1024  # of a picture with frames
MOST_TASKS = 6000  # spans of the list of tasks
LINKS = 4  # directions that leave a PE towards a neighbour


def record_mesh(module: Module, arrays: Sequence[Any], target: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Simulate a program and describe its run; with "note" alone where there is nothing to show."""
    bursts: list[tuple[int, int, int, int, int, int]] = []
    generator = get_backend(target)
    run = load_interpreter(generator, emit_artifact(generator, module, options))
    simulator = getattr(run, "__self__", None)
    token = TRAFFIC_LOG.set(lambda *burst: bursts.append(burst))
    try:
        run([np.array(a) if isinstance(a, np.ndarray) else a for a in arrays])
    except TesseraError as error:
        return {"note": f"the simulated run ended with {type(error).__name__}: {error.message}"}
    finally:
        TRAFFIC_LOG.reset(token)
    simulation = getattr(simulator, "last_run", None)
    if simulation is None:
        return {"note": "the generator's emulator keeps no timeline"}
    return describe_mesh(simulation, bursts)


def describe_mesh(run: Any, bursts: Sequence[tuple[int, ...]]) -> dict[str, Any]:
    """The picture of a run: its frames, the busy share of each PE and the wavelets of each link in each frame."""
    places = sorted(run.pes)
    width, height = 1 + max(x for x, _ in places), 1 + max(y for _, y in places)
    cycles = max([run.cycles, 1])
    if len(places) > MOST_PES:
        return {"note": f"the mesh has {len(places):,} elements: pictures are of at most {MOST_PES:,}"}
    frames = min(MOST_FRAMES, cycles)
    number = {place: i for i, place in enumerate(places)}
    names = [name for name, _ in Counter(name for _, name, _, _ in run.timeline).most_common()]
    kinds = {name: i for i, name in enumerate(sorted(names))}
    spans = [(number[p], kinds[name], start, max(end, start + 1)) for p, name, start, end in run.timeline]
    kept = spans[:MOST_TASKS]
    return {
        "directions": list(DIRECTION_NAMES[:LINKS]), "steps": [list(DIRECTION_STEPS[d]) for d in range(LINKS)],
        "width": width, "height": height, "cycles": cycles, "frames": frames,
        "places": [list(p) for p in places], "memory": [run.pes[p].memory_used for p in places], "limit": PE_MEMORY,
        "busy": _spread_busy(spans, len(places), frames, cycles),
        "traffic": _spread_traffic(bursts, number, frames, cycles),
        "tasks": sorted(names), "spans": [list(s) for s in kept], "omitted": len(spans) - len(kept),
        "launches": [[one.name, one.started or 0, one.ended] for one in run.launches],
    }  # fmt: skip


def _spread_busy(spans: Sequence[tuple[int, ...]], count: int, frames: int, cycles: int) -> list[list[int]]:
    """For each frame and PE the share of its cycles in which a task ran, in percent."""
    table = np.zeros((frames, count))
    for place, _, start, end in spans:
        _add_span(table[:, place], start, end, frames, cycles, end - start)
    share = 100 * table * frames / cycles
    return np.minimum(np.rint(share), 100).astype(int).tolist()


def _spread_traffic(
    bursts: Sequence[tuple[int, ...]], number: Mapping[tuple[int, int], int], frames: int, cycles: int
) -> list[list[list[int]]]:
    """For each frame the links that carry wavelets: the PE, the direction, and how many."""
    table = np.zeros((frames, len(number), LINKS))
    for x, y, direction, first, last, words in bursts:
        if direction < LINKS and (x, y) in number:
            _add_span(table[:, number[x, y], direction], first, last + 1, frames, cycles, words)
    found = np.rint(table)
    return [[[int(p), int(d), int(frame[p, d])] for p, d in np.argwhere(frame > 0)] for frame in found]


def _add_span(column: np.ndarray, start: int, end: int, frames: int, cycles: int, amount: float) -> None:
    """Spread an amount evenly over the frames that a span of cycles covers."""
    low, high = start * frames / cycles, max(end, start + 1) * frames / cycles
    first, last = int(low), min(int(np.ceil(high)), frames)
    if first >= frames:
        return
    edges = np.clip(np.arange(first, last + 1), low, high)
    column[first:last] += np.diff(edges) * (amount / (high - low))

"""`tessera run`: execute an entry point or an artifact, check it, and say how it went."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from tessera.arrays import read_array, write_array
from tessera.artifacts import Loaded, load
from tessera.cli.entries import Entry, find, inputs_of, program_of
from tessera.codegen.registry import backend
from tessera.debug import as_target, checked, kernel_trace
from tessera.device import INTERP, generator_of
from tessera.errors import ArgumentError
from tessera.interp.bound import compare
from tessera.program import Program
from tessera.types import TensorType, as_dtype


def main(options: argparse.Namespace) -> int:
    """Run what the command line names; status 1 where the result lies outside its bound."""
    if Path(options.entry).is_dir() and (Path(options.entry) / "manifest.json").exists():
        if any(getattr(options, name) for name in INTERPRETED):
            raise ArgumentError(
                "an artifact holds no kernels to interpret", expected="a file.py, or none of these options"
            )
        return _run_artifact(load(options.entry), options)
    entry = find(options.entry)
    arguments = inputs_of(entry, options.seed, options.input)
    way = next((name for name in INTERPRETED if getattr(options, name)), None)
    if way is not None:
        if options.level not in (None, "tile") or options.target not in (None, INTERP):
            raise ArgumentError(
                f"{INTERPRETED[way]} the Tile interpreter's", expected="--level tile, or no level and no target"
            )
        return WAYS[way](entry, program_of(entry, arguments, INTERP), arguments, options)
    level, target = _where(options)
    program = program_of(entry, arguments, target if level in ("device", "target") else INTERP)
    level = level or program.top
    start = time.perf_counter()
    results = program.run(level, target)
    seconds = time.perf_counter() - start
    good = _report(entry, program, arguments, results, _name(level, target), seconds)
    _save(results, options.output)
    return 0 if good else 1


def _as_target(entry: Entry, program: Program, arguments: Any, options: argparse.Namespace) -> int:
    """Interpret the Tile level with a target's numbers; status 1 where the result lies outside its bound."""
    start = time.perf_counter()
    with as_target(options.as_target):
        results = program.run("tile")
    seconds = time.perf_counter() - start
    good = _report(entry, program, arguments, results, f"tile (interpreted, numbers of {options.as_target})", seconds)
    _save(results, options.output)
    return 0 if good else 1


def _traced(entry: Entry, program: Program, arguments: Any, options: argparse.Namespace) -> int:
    """Interpret the Tile level and say what each kernel did; draw it, too, where a file for that is named."""
    with kernel_trace(gpu=options.gpu) as trace:
        results = program.run("tile")
    print(trace)
    if options.timeline:
        trace.timeline(options.timeline)
    if options.picture:
        trace.picture(options.picture)
    _save(results, options.output)
    return 0


def _debugged(entry: Entry, program: Program, arguments: Any, options: argparse.Namespace) -> int:
    """Run the Tile level in debug mode and print what it finds; status 1 if anything but advice."""
    start = time.perf_counter()
    with checked(collect=True, nan=True, lint=options.lint) as report:
        results = program.run("tile")
    seconds = time.perf_counter() - start
    print(report)
    wrong = sum(not f.is_advice for f in report)
    advice = f" and {len(report) - wrong} pieces of advice" if options.lint else ""
    print(f"{program.name}: {wrong} finding{'s' if wrong != 1 else ''}{advice} in {seconds * 1e3:.2f} ms")
    if not wrong:
        _save(results, options.output)
    return 1 if wrong else 0


# Options that have kernels interpreted in a way of their own: what they are, and what runs them.
INTERPRETED = {
    "debug": "debug mode is",
    "lint": "advice is",
    "as_target": "a target's numbers are",
    "report": "a report of kernels is",
    "timeline": "a timeline is",
    "picture": "a picture of accesses is",
}
WAYS = {"debug": _debugged, "lint": _debugged, "as_target": _as_target,
        "report": _traced, "timeline": _traced, "picture": _traced}  # fmt: skip


def _where(options: argparse.Namespace) -> tuple[str | None, str]:
    """The level, and the target if code for one is to run."""
    target = generator_of(options.target) if options.target else None
    if options.level == "target":
        return "target", target or "llvm"
    if options.level or target in (None, INTERP):
        return options.level, INTERP
    return "device", str(target)


def _name(level: str, target: str) -> str:
    where = getattr(backend(target), "where", None) if level == "device" else None
    names = {
        "device": f"{target} on {where()}" if where else f"{target} (compiled)",
        "target": f"target: {target} text, interpreted",
    }
    return names.get(level, f"{level} (interpreted)")


def _report(
    entry: Entry, program: Program, arguments: Any, results: list[np.ndarray], where: str, seconds: float
) -> bool:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_row("entry", f"[bold]{program.name}[/]")
    shown = list(zip(program.names, program.arrays, strict=True))
    for name, array in shown[:6]:
        table.add_row("input", f"{name}: {_type(array)}")
    if len(shown) > 6:
        table.add_row("", f"and {len(shown) - 6} more")
    for result in results:
        table.add_row("output", _type(result))
    table.add_row("level", where)
    table.add_row("time", f"{seconds * 1e3:.2f} ms")
    good = _check_bounds(table, program, results)
    good = _check_reference(table, entry, arguments, results) and good
    Console().print(table)
    return good


def _check_bounds(table: Table, program: Program, results: list[np.ndarray]) -> bool:
    agreements = [compare(r, b) for r, b in zip(results, program.bounds(), strict=True)]
    worst = max((a.worst_share for a in agreements), default=0.0)
    good = all(a.ok for a in agreements)
    mark = "[green]within the bound[/]" if good else "[red]outside the bound[/]"
    wide = " (a bound too wide to say much)" if any(a.useless for a in agreements) else ""
    table.add_row("error", f"{worst:.1%} of the bound: {mark}{wide}")
    return good


def _check_reference(table: Table, entry: Entry, arguments: Any, results: list[np.ndarray]) -> bool:
    if entry.example is None or entry.example.reference is None:
        return True
    named = isinstance(arguments, dict)
    want = entry.example.reference(**arguments) if named else entry.example.reference(*arguments)
    wanted = list(want) if isinstance(want, (tuple, list)) else [want]
    worst = max(_difference(r, w) for r, w in zip(results, wanted, strict=True))
    # The bound above is the judge; this says that both compute the same thing at all.
    good = bool(worst <= 0.02)
    table.add_row("reference", f"largest difference {worst:.2e} of its scale" + ("" if good else " [red](differs)[/]"))
    return good


def _difference(result: np.ndarray, want: Any) -> float:
    a, b = np.asarray(result, np.float64), np.asarray(want, np.float64)
    if a.shape != b.shape:
        raise ArgumentError("the reference has another shape than the result", expected=b.shape, received=a.shape)
    scale = max(float(np.max(np.abs(b), initial=0.0)), 1e-30)
    return float(np.max(np.abs(a - b), initial=0.0)) / scale


def _type(array: np.ndarray) -> str:
    return str(TensorType(np.shape(array), as_dtype(np.asarray(array).dtype)))


def _run_artifact(artifact: Loaded, options: argparse.Namespace) -> int:
    parameters = artifact.parameters
    if options.input and len(options.input) != len(parameters):
        raise ArgumentError(f"{len(options.input)} inputs were given, the artifact takes {len(parameters)}")
    generator = np.random.default_rng(options.seed)
    arrays = [read_array(f, p["dtype"]) for f, p in zip(options.input, parameters, strict=False)]
    arrays += [_random(generator, p) for p in parameters[len(arrays) :]]
    start = time.perf_counter()
    results = artifact.run(arrays)
    seconds = time.perf_counter() - start
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_row("artifact", f"[bold]{artifact.interface['entry']}[/] for {artifact.artifact.manifest['target']}")
    for parameter, array in list(zip(parameters, arrays, strict=True))[:6]:
        table.add_row("input", f"{parameter['name']}: {_type(array)}" + ("" if options.input else " (random)"))
    for result in results:
        table.add_row("output", _type(result))
    if hasattr(artifact.runtime, "where"):
        table.add_row("ran on", artifact.runtime.where)
    table.add_row("time", f"{seconds * 1e3:.2f} ms")
    Console().print(table)
    _save(results, options.output)
    return 0


def _random(generator: np.random.Generator, parameter: dict[str, Any]) -> np.ndarray:
    dtype, shape = as_dtype(parameter["dtype"]), tuple(parameter["shape"])
    values = generator.standard_normal(shape) if dtype.is_float else generator.integers(0, 2, shape)
    return np.asarray(values).astype(dtype.numpy)


def _save(results: Sequence[np.ndarray], files: Sequence[str]) -> None:
    if len(files) > len(results):
        raise ArgumentError(f"{len(files)} output files were named, there are {len(results)} outputs")
    for file, result in zip(files, results, strict=False):
        write_array(file, result)

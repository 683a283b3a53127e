"""`tessera run`: execute an entry point or an artifact, check its results, and report."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from tessera.codegen.contract import get_backend
from tessera.core.device import INTERP, default_device, device, find_generator_name
from tessera.core.errors import ArgumentError, UnsupportedOpError
from tessera.core.io import check_writable, read_array, write_array
from tessera.core.progress import operation
from tessera.core.shapes import bind_shapes
from tessera.core.symbolic_dim import Size, evaluate_shape
from tessera.core.types import TensorType, as_dtype
from tessera.interp.bound import BoundAgreement, BoundSample, compare_with_bound, describe_non_finite
from tessera.ir.analysis import find_index_inputs
from tessera.ir.parser import parse_module
from tessera.runtime.bundle_files import is_bundle_path
from tessera.runtime.bundles import load_bundle
from tessera.runtime.loading import LoadedArtifact, get_parameter_shape, load
from tessera.runtime.program import ExecutableProgram, PreparedProgram
from tessera.tools.cli.entry_points import (
    EntryPoint,
    describe_configuration,
    find_entry_point,
    is_program,
    make_inputs,
    parse_sizes,
    prepare_program,
)
from tessera.tools.cli.scripts import run_script
from tessera.tools.debug import as_target, checked, kernel_trace
from tessera.tools.debug.kernel_tracing import check_picture

LONG_CALL = 5.0  # seconds: a call this long is not repeated to get a warm one
CHECK_SHARE, CHECK_SECONDS = 2.0, 1.0  # a check takes about this many times the run, or this many seconds
CHECK_PATIENCE = 20.0  # seconds for a check that is all or nothing
ZEROS = " (zeros: it selects elements; --input gives others)"
FULL_CHECK = "--full-check checks everything"


def main(options: argparse.Namespace) -> int:
    """Run what the command line names; exit status 1 where a result is outside its bound."""
    for file in (*options.output, options.timeline, options.picture):
        if file is not None:
            check_writable(file)
    if Path(options.entry).is_dir() and (Path(options.entry) / "manifest.json").exists():
        return _run_artifact(_load_artifact(options), options)
    if is_bundle_path(options.entry):
        return _run_bundle(options)
    if is_program(options.entry):
        return _run_program(options)
    if options.full_check and not options.check:
        raise ArgumentError("--full-check and --no-check exclude each other", suggestion="leave one of them out")
    way = _interpretation_of(options)
    entry = find_entry_point(options.entry, options.size)
    arguments = make_inputs(entry, options.seed, options.input)
    if way is not None:
        return way(entry, _prepare(entry, arguments, INTERP, options), arguments, options)
    level, target = _level_and_target(options)
    if options.arch and level not in ("device", "target"):
        raise ArgumentError(
            "--arch selects the architecture of a generator", expected="--target ptx, csl, … or --level target with it"
        )
    program = _prepare(entry, arguments, target, options)
    level = level or program.top
    run = _run_timed(program, level, target, options)
    good = _report(entry, program, arguments, run, _name(level, target), options)
    if options.picture and run.compiled:
        run.compiled.runtime.draw_run(options.picture)
    _save(run.results, options.output)
    return 0 if good else 1


def _run_program(options: argparse.Namespace) -> int:
    """Run a file that defines no entry point but has a main part; `--target` is then the default device."""
    if options.level or options.size or _interpretation_of(options) is not None:
        raise ArgumentError(
            f"{options.entry} is a program without an entry point: it runs as Python runs it",
            expected="tessera run FILE.py [--target T]",
        )
    with device(options.target or default_device()):
        run_script(options.entry)
    return 0


@dataclass
class TimedRun:
    """The results of a program and the seconds of each of its calls, with those of the other parts of a command."""

    results: list[np.ndarray]
    calls: list[float]
    parts: dict[str, float] = field(default_factory=dict)
    compiled: ExecutableProgram | None = None

    @property
    def seconds(self) -> float:
        """The time of all the program's own work, to which that of a check is compared."""
        return sum(self.calls) + self.parts.get("compilation", 0.0)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Add the time of a block of statements to that of a part."""
        start = time.perf_counter()
        yield
        self.parts[name] = self.parts.get(name, 0.0) + time.perf_counter() - start

    def describe(self) -> str:
        """The time of a call: of a warm one where there is one."""
        warm = self.calls[1:]
        if not warm:
            return f"{_duration(self.calls[0])}, the first call" if self.parts else _duration(self.calls[0])
        if len(warm) == 1:
            return f"{_duration(warm[0])}, a warm call"
        return f"{_duration(min(warm))} min, {_duration(median(warm))} median of {len(warm)} warm calls"


def _run_timed(program: PreparedProgram, level: str, target: str, options: argparse.Namespace) -> TimedRun:
    """Compile and call a program: `--repeat` times more after the first; on a device once more unless that is long."""
    run = TimedRun([], [])
    with operation(f"compiling {program.name}"), run.part("compilation"):
        run.compiled = program.compile(level, target, _emission_options(options))
    if options.picture and not hasattr(run.compiled.runtime, "draw_run"):
        raise ArgumentError(
            f"the target {target} draws no picture of a run", expected="--target csl:4x4, or no target",
            suggestion="without a target, the picture shows which program accesses what",
        )  # fmt: skip
    with operation(f"running {program.name}"):
        run.results, seconds = run.compiled.timed()
    run.calls.append(seconds)
    simulated = hasattr(run.compiled.runtime, "describe_run")
    wanted = options.repeat or int(level == "device" and seconds < LONG_CALL and not simulated)
    run.calls += [run.compiled.timed()[1] for _ in range(wanted)]
    if level not in ("device", "target"):
        del run.parts["compilation"]
    return run


def _duration(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.2f} s"


def _load_artifact(options: argparse.Namespace) -> LoadedArtifact:
    """Load the named artifact; refuse options that artifacts do not have."""
    _refuse_options(options)
    return load(options.entry)


def _refuse_options(options: argparse.Namespace) -> None:
    for name in (*INTERPRETED, "gpu", "level", "target", "arch", "full_check"):
        if getattr(options, name):
            raise ArgumentError(
                f"an artifact runs its own code for its own target, without --{name.replace('_', '-')}",
                expected="a file.py, or none of these options",
            )


def _interpretation_of(options: argparse.Namespace) -> InterpretationRun | None:
    """The special interpretation mode that the options choose, if any."""
    asked = [name for name in INTERPRETED if getattr(options, name)]
    if options.gpu and not {"report", "timeline"} & set(asked):
        raise ArgumentError("--gpu is the GPU that a report models", expected="--report or --timeline with it",
                            received=f"--gpu {options.gpu}")  # fmt: skip
    if asked == ["picture"] and options.target not in (None, INTERP):  # of the target's own
        return None
    ways = {INTERPRETATIONS[name] for name in asked}
    if len(ways) > 1:
        raise ArgumentError(
            "one run interprets kernels in one way",
            expected="--debug and --lint, or --as-target, or --report, --timeline and --picture",
            received=", ".join(f"--{name.replace('_', '-')}" for name in asked), suggestion="run it once for each",
        )  # fmt: skip
    measured = [name for name in ("repeat", "full_check") if getattr(options, name)]
    if ways and measured and asked != ["as_target"]:
        raise ArgumentError(
            f"--{measured[0].replace('_', '-')} measures or checks a plain run", received=f"--{asked[0]} beside it",
            suggestion="leave one of them out",
        )  # fmt: skip
    if ways and (options.level not in (None, "tile") or options.target not in (None, INTERP)):
        raise ArgumentError(
            f"{INTERPRETED[asked[0]]} the Tile interpreter's", expected="--level tile, or no level and no target"
        )
    return next(iter(ways), None)


def _prepare(entry: EntryPoint, arguments: Any, target: str, options: argparse.Namespace) -> PreparedProgram:
    """Prepare the entry, tuned unless the command line forbids it, and print its configuration."""
    program = prepare_program(entry, arguments, target, options.tune, _emission_options(options))
    if chosen := describe_configuration(entry, program):
        print(f"configuration: {chosen}")
    return program


def _run_with_target_numerics(
    entry: EntryPoint, program: PreparedProgram, arguments: Any, options: argparse.Namespace
) -> int:
    """Interpret the Tile level with a target's numerics; exit status 1 where a result is outside its bound."""
    with as_target(options.as_target):
        run = _run_timed(program, "tile", INTERP, options)
    good = _report(entry, program, arguments, run, f"tile (interpreted, numbers of {options.as_target})", options)
    _save(run.results, options.output)
    return 0 if good else 1


def _run_traced(entry: EntryPoint, program: PreparedProgram, arguments: Any, options: argparse.Namespace) -> int:
    """Interpret the Tile level and report on each kernel; draw it where a file is named."""
    if options.picture:
        check_picture(Path(options.picture))
    with kernel_trace(**({"gpu": options.gpu} if options.gpu else {})) as trace:
        results = program.run("tile")
    print(trace)
    if options.timeline:
        trace.timeline(options.timeline)
    if options.picture:
        trace.picture(options.picture)
    _save(results, options.output)
    return 0


def _run_sanitized(entry: EntryPoint, program: PreparedProgram, arguments: Any, options: argparse.Namespace) -> int:
    """Run the Tile level in debug mode and print the findings; exit status 1 unless all are advice."""
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


# Options that choose an interpretation mode: their description and what runs them.
INTERPRETED = {
    "debug": "debug mode is",
    "lint": "advice is",
    "as_target": "a target's numbers are",
    "report": "a report of kernels is",
    "timeline": "a timeline is",
    "picture": "a picture of accesses is",
}
InterpretationRun = Callable[[EntryPoint, PreparedProgram, Any, argparse.Namespace], int]
INTERPRETATIONS: dict[str, InterpretationRun] = {
    "debug": _run_sanitized,
    "lint": _run_sanitized,
    "as_target": _run_with_target_numerics,
    "report": _run_traced,
    "timeline": _run_traced,
    "picture": _run_traced,
}


def _emission_options(options: argparse.Namespace) -> dict[str, Any]:
    """The generator's options that the command line gives."""
    return {"arch": options.arch} if options.arch else {}


def _level_and_target(options: argparse.Namespace) -> tuple[str | None, str]:
    """The level and the target to lower for; with only a target, its device."""
    target = find_generator_name(options.target) if options.target is not None else None
    if options.level == "target":
        return "target", target or "llvm"
    if options.level or target in (None, INTERP):
        return options.level, target or INTERP
    return "device", str(target)


def _name(level: str, target: str) -> str:
    where = getattr(get_backend(target), "where", None) if level == "device" else None
    names = {
        "device": f"{target} on {where()}" if where else f"{target} (compiled)",
        "target": f"target: {target} text, {'simulated' if target.startswith('csl') else 'emulated'}",
    }
    lowered = "" if target == INTERP else f", as lowered for {target}"
    return names.get(level, f"{level} (interpreted{lowered})")


def _report(
    entry: EntryPoint, program: PreparedProgram, arguments: Any, run: TimedRun, where: str, options: argparse.Namespace
) -> bool:
    table = Table(Column(), Column(overflow="fold"), show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_row("entry", f"[bold]{program.name}[/]")
    shown = list(zip(program.names, program.arrays, strict=True))
    for name, array in shown[:6]:
        table.add_row("input", f"{name}: {_type(array)}")
    if len(shown) > 6:
        table.add_row("", f"and {len(shown) - 6} more")
    for result in run.results:
        table.add_row("output", _type(result))
    table.add_row("level", where)
    table.add_row("time", run.describe())
    for title, text in getattr(run.compiled.runtime, "describe_run", list)() if run.compiled else ():
        table.add_row(title, text)
    good = _check(table, entry, program, arguments, run, options)
    if run.parts:
        table.add_row("spent", ", ".join(f"{name} {_duration(seconds)}" for name, seconds in run.parts.items()))
    Console().print(table)
    return good


def _check(
    table: Table,
    entry: EntryPoint,
    program: PreparedProgram,
    arguments: Any,
    run: TimedRun,
    options: argparse.Namespace,
) -> bool:
    """Add the rows of the comparisons with error bounds and with the example's reference: whether both agree."""
    if not options.check:
        table.add_row("error", "[yellow]not checked[/] (--no-check)")
        return True
    with operation("checking the results against their error bounds"), run.part("bounds"):
        good = _check_bounds(table, program, run, options.full_check)
    with run.part("reference"):
        agrees = _check_reference(table, entry, program, arguments, run.results)
    if entry.example is None or entry.example.reference is None:
        del run.parts["reference"]
    return good and agrees


def _check_bounds(table: Table, program: PreparedProgram, run: TimedRun, full: bool) -> bool:
    limit = max(CHECK_SHARE * run.seconds, CHECK_SECONDS)
    try:
        sample = BoundSample(program.bounds(), 1, 1) if full else program.sample_bounds(limit, CHECK_PATIENCE)
    except UnsupportedOpError as error:
        table.add_row("error", f"[yellow]without a bound[/]: {error.message}")
        return True
    if sample is None:
        table.add_row(
            "error",
            f"[yellow]not checked[/]: its bounds take over {_duration(max(limit, CHECK_PATIENCE))}; {FULL_CHECK}",
        )
        return True
    pairs = sample.select(run.results)
    if sample.programs < sample.total and not any(r.size for r, _ in pairs):
        tried = f"{sample.programs} of {sample.total} programs were tried, and wrote nothing"
        table.add_row("error", f"[yellow]not checked[/]: {tried}; {FULL_CHECK}")
        return True
    agreements = [compare_with_bound(r, b) for r, b in pairs]
    table.add_row("error", _describe_error(agreements))
    if sample.programs < sample.total:
        checked = f"{sample.programs} of {sample.total} programs, spread over the grid"
        table.add_row("", f"[yellow]checked in a sample[/]: {checked}; {FULL_CHECK}")
    for number, agreement in enumerate(agreements):
        if held := agreement.describe_non_finite():
            table.add_row("", f"[{'red' if agreement.unlike else 'yellow'}]output {number}[/]: {held}")
    if any(a.nans or a.infinities for a in agreements):
        table.add_row("", _find_non_finite_origin(program, sample))
    if not all(a.ok for a in agreements):
        table.add_row("", "`tessera bisect` names the first step of the lowering that goes wrong")
    return all(a.ok and a.unlike is None and a.nans < max(a.size, 1) for a in agreements)


def _describe_error(agreements: Sequence[BoundAgreement]) -> str:
    """The largest error and what it says; an element without a finite bound is not within it."""
    worst = max((a.worst_share for a in agreements), default=0.0)
    size, unbounded = sum(a.size for a in agreements), sum(a.unbounded for a in agreements)
    share = f"{worst:.1%} of the bound" if worst < 10 else f"{worst:.3g} times the bound"
    if not all(a.ok for a in agreements):
        return f"{share}: [red]outside the bound[/]"
    if not any(a.compared for a in agreements) and size:
        return f"[yellow]not checked[/]: none of {size} elements is a number with a finite bound"
    if unbounded:
        return f"{share}, where it is finite; [yellow]{unbounded} of {size} elements have no finite bound[/]"
    wide = " (a bound too wide to say much)" if any(a.useless for a in agreements) else ""
    return f"{share}: [green]within the bound[/]{wide}"


def _find_non_finite_origin(program: PreparedProgram, sample: BoundSample) -> str:
    """Where NaNs and infinities arise: in the inputs, or at the first op that makes one of finite operands."""
    for name, array in zip(program.names, program.arrays, strict=True):
        if (held := describe_non_finite(array)) and name not in {program.names[i] for i in program.written}:
            return f"the input {name} holds {held}"
    if sample.programs < sample.total:
        return "`tessera run --debug` names the op that makes the first"
    with checked(collect=True, nan=True) as report:
        program.run(program.top)
    first = next((f for f in report if f.kind == "non-finite"), None)
    if first is None:
        return "no op makes one of finite operands"
    return escape(f"{first.message}\n{first.location}\n{first.location.excerpt()}".rstrip())


def _check_reference(
    table: Table, entry: EntryPoint, program: PreparedProgram, arguments: Any, results: list[np.ndarray]
) -> bool:
    if entry.example is None or entry.example.reference is None:
        return True
    named = isinstance(arguments, dict)
    want = entry.example.reference(**arguments) if named else entry.example.reference(*arguments)
    pairs = _pair_results(entry, program, results, want)
    worst = max(_difference(entry, r, w) for r, w in pairs)
    # The bound decides; this only checks that both compute the same function.
    good = bool(worst <= 0.02)
    table.add_row(
        "reference",
        f"largest difference {worst:.2e} of the largest reference value" + ("" if good else " [red](differs)[/]"),
    )
    return good


def _pair_results(
    entry: EntryPoint, program: PreparedProgram, results: list[np.ndarray], want: Any
) -> list[tuple[np.ndarray, Any]]:
    """Pair each result with its reference: all of them, those that a dict names, or only the last."""
    if isinstance(want, Mapping):
        written = [program.names[i] for i in program.written]
        named = dict(zip(written, results[len(results) - len(written) :], strict=True))
        if unknown := [name for name in want if name not in named]:
            raise ArgumentError(
                f"the reference has {unknown[0]}, which {program.name} does not write", location=entry.location,
                expected=", ".join(named) or "what the function returns",
            )  # fmt: skip
        return [(named[name], value) for name, value in want.items()]
    wanted = list(want) if isinstance(want, (tuple, list)) else [want]
    if program.written and len(wanted) == 1:
        return [(results[-1], wanted[0])]
    if len(wanted) != len(results):
        raise ArgumentError(
            f"the reference has another number of values than {program.name} has results", location=entry.location,
            expected=len(results), received=len(wanted),
        )  # fmt: skip
    return list(zip(results, wanted, strict=True))


def _difference(entry: EntryPoint, result: np.ndarray, want: Any) -> float:
    a, b = np.asarray(result, np.float64), np.asarray(want, np.float64)
    if a.shape != b.shape:
        raise ArgumentError(
            "the reference has another shape than the result", location=entry.location, expected=b.shape,
            received=a.shape,
        )  # fmt: skip
    scale = max(float(np.max(np.abs(b), initial=0.0)), 1e-30)
    return float(np.max(np.abs(a - b), initial=0.0)) / scale


def _type(array: np.ndarray) -> str:
    return str(TensorType(np.shape(array), as_dtype(np.asarray(array).dtype)))


def _run_artifact(artifact: LoadedArtifact, options: argparse.Namespace) -> int:
    parameters = artifact.parameters
    if options.input and len(options.input) != len(parameters):
        raise ArgumentError(f"{len(options.input)} inputs were given, the artifact takes {len(parameters)}")
    generator = np.random.default_rng(options.seed)
    arrays = [read_array(f, p["dtype"]) for f, p in zip(options.input, parameters, strict=False)]
    selecting = set() if options.input else _find_index_inputs(artifact)
    shapes = _choose_shapes(artifact, options)
    missing = list(zip(parameters, shapes, strict=True))[len(arrays) :]
    arrays += [_make_input(generator, p, shape, p["name"] in selecting) for p, shape in missing]
    run = _call_artifact(artifact, arrays, options.repeat)
    table = Table(Column(), Column(overflow="fold"), show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_row("artifact", f"[bold]{artifact.interface['entry']}[/] for {artifact.artifact.manifest['target']}")
    for parameter, array in list(zip(parameters, arrays, strict=True))[:6]:
        made = "" if options.input else ZEROS if parameter["name"] in selecting else " (random)"
        table.add_row("input", f"{parameter['name']}: {_type(array)}{made}")
    for result in run.results:
        held = describe_non_finite(result)
        table.add_row("output", _type(result) + (f": [yellow]{held}[/]" if held else ""))
    if hasattr(artifact.runtime, "where"):
        table.add_row("ran on", artifact.runtime.where)
    table.add_row("time", run.describe())
    for title, text in getattr(artifact.runtime, "describe_run", list)():
        table.add_row(title, text)
    Console().print(table)
    _save(run.results, options.output)
    return 0


def _run_bundle(options: argparse.Namespace) -> int:
    """Run a variant of a bundle: the one for the inputs, else the first, or one for --target."""
    target, options.target = options.target, None
    _refuse_options(options)
    loaded = load_bundle(options.entry, target)
    arrays = [read_array(f, p["dtype"]) for f, p in zip(options.input, loaded.parameters, strict=False)]
    whole = len(arrays) == len(loaded.parameters) == len(options.input) and arrays
    return _run_artifact(loaded.load_variant(loaded.find_variant(arrays) if whole else loaded.first), options)


def _call_artifact(artifact: LoadedArtifact, arrays: Sequence[np.ndarray], repeat: int | None) -> TimedRun:
    """Call an artifact on copies of the arrays, once more than `repeat`; by default twice, unless that takes long."""
    run = TimedRun([], [])

    def call() -> list[np.ndarray]:
        copies = [a.copy() for a in arrays]
        start = time.perf_counter()
        results = artifact.run(copies)
        run.calls.append(time.perf_counter() - start)
        return results

    run.results = call()
    again = run.calls[0] < LONG_CALL and not hasattr(artifact.runtime, "describe_run")
    for _ in range(repeat or int(again)):
        call()
    return run


def _find_index_inputs(artifact: LoadedArtifact) -> set[str]:
    """The names of the integer inputs that select elements; of a program without its IR, of all integer inputs."""
    parameters = artifact.interface["parameters"]
    whole = [n for n, p in enumerate(parameters) if not as_dtype(p["dtype"]).is_float]
    if whole and "tile.mlir" in artifact.artifact.files:
        found = find_index_inputs(parse_module(artifact.artifact.text("tile.mlir")))
        whole = [n for n in whole if n in found]
    return {parameters[n]["name"] for n in whole}


def _choose_shapes(artifact: LoadedArtifact, options: argparse.Namespace) -> list[tuple[Size, ...]]:
    """The shapes of an artifact's inputs: the example's, with the sizes that `--size` names."""
    patterns = [get_parameter_shape(p) for p in artifact.parameters]
    sizes: dict[str, Any] = {}
    bind_shapes([(p, tuple(q["shape"])) for p, q in zip(patterns, artifact.parameters, strict=True)], sizes)
    given = parse_sizes(options.size)
    if unknown := [name for name in given if name not in sizes]:
        raise ArgumentError(
            f"the artifact has no open size {unknown[0]}", expected=", ".join(sizes) or "none: its sizes are fixed",
            received=f"--size {unknown[0]}={given[unknown[0]]}",
            suggestion=None if sizes else "build it with --dynamic",
        )  # fmt: skip
    if given and options.input:
        raise ArgumentError("--size is for inputs that the command makes", received="--size and --input",
                            suggestion="leave one of them out")  # fmt: skip
    return [evaluate_shape(p, sizes | given) for p in patterns]


def _make_input(
    generator: np.random.Generator, parameter: dict[str, Any], shape: tuple[Any, ...], selects: bool
) -> np.ndarray:
    """Random elements; of an input that selects elements zeros, which compiled kernels need not check."""
    dtype = as_dtype(parameter["dtype"])
    if selects:
        return np.zeros(shape, dtype.numpy)
    values = generator.standard_normal(shape) if dtype.is_float else generator.integers(0, 2, shape)
    return np.asarray(values).astype(dtype.numpy)


def _save(results: Sequence[np.ndarray], files: Sequence[str]) -> None:
    if len(files) > len(results):
        many = "1 result" if len(results) == 1 else f"{len(results)} results"
        raise ArgumentError(f"{len(files)} output files were named, the program has {many}")
    for file, result in zip(files, results, strict=False):
        write_array(file, result)

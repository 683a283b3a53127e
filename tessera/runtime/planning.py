"""Schedule planning: the legal schedules of a whole function for a target, ranked by a cost model, measured, and kept
in a file.

A schedule is a choice of fields of the target's lowering plan (`Capabilities.plan_choices`). Every field is varied
alone, and the fields of a group that matter to the function then in pairs. Two choices that lower to the same Tile
module are one; one that exceeds the target's resource model is refused before anything is emitted. Where this machine
does not have the target's device nothing is measured: the model's choice is taken.
"""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tessera.codegen.contract import check_resources, get_backend
from tessera.codegen.llvm.runtime.thread_pool import choose_thread_count
from tessera.core.device import INTERP, find_generator_name
from tessera.core.errors import ArgumentError, ResourceError, TesseraError, user_location
from tessera.core.io import hash_text
from tessera.core.progress import operation, report_progress
from tessera.core.symbolic_dim import estimate_size
from tessera.core.types import TensorType
from tessera.frontend.kernel.autotuning import Trial, Tuned
from tessera.ir.core import Block, Function, Module, Node, Value, structural_hash
from tessera.lower.lowering_plan import LoweringPlan
from tessera.ops.dialects import control_flow, host, tile
from tessera.ops.tensor import basic, contractions
from tessera.runtime import driver
from tessera.runtime.launch.tuner import TuningCache, describe_machine, has_device

# Schedule cost: the time of a Tile module by a roofline over what each program of its launches executes.
#
# The launches of a module are dealt out to a device's processors in rounds. A program takes the longer of its
# arithmetic and its loads and stores, plus a fixed price for each op; a launch takes at least what it costs to move
# each byte of its arrays once (Williams et al. 2009).


UNKNOWN_ROUNDS = 4  # of a loop whose bounds depend on the program
TRANSCENDENTAL_FLOPS = 12  # of an element of exp, tanh, …: a polynomial with its argument reduction
MATRIX_BITS = 16  # at most, of the elements that matrix units multiply


@dataclass(frozen=True)
class MachineModel:
    """The rates of a device, per second: of all its processors, but for `cache`, the bytes that one has from a cache.

    `op` and `launch` are the seconds that an op on a block and a launch cost beside their work.
    """

    name: str
    flops: float
    matrix: float
    bandwidth: float
    processors: int
    cache: float
    op: float
    launch: float


@dataclass(frozen=True)
class ProgramWork:
    """What one program executes: operations, those of matrix units among them, bytes loaded and stored, and ops."""

    flops: float = 0.0
    matrix_flops: float = 0.0
    bytes: float = 0.0
    ops: float = 0.0

    def __add__(self, other: ProgramWork) -> ProgramWork:
        return ProgramWork(
            self.flops + other.flops, self.matrix_flops + other.matrix_flops,
            self.bytes + other.bytes, self.ops + other.ops,
        )  # fmt: skip

    def repeated(self, rounds: float) -> ProgramWork:
        """The work of so many rounds."""
        return ProgramWork(*(n * rounds for n in (self.flops, self.matrix_flops, self.bytes, self.ops)))


def estimate_seconds(module: Module, machine: MachineModel) -> float:
    """The time of a Tile module's launches on a machine, one after the other; loops of the host count one round."""
    work = {f.name: count_work(f.body) for f in module.functions[1:]}
    return sum((_estimate_launch(n, work[n.attrs["kernel"]], machine) for n in _find_launches(module.main)), 0.0)


def _find_launches(function: Function) -> Iterator[Node]:
    return (n for n in function.body.walk() if n.op is host.launch)


def _estimate_launch(node: Node, work: ProgramWork, machine: MachineModel) -> float:
    programs = math.prod(int(estimate_size(n)) for n in node.attrs["grid"])
    rounds = -(-programs // machine.processors)
    ordinary, matrix = work.flops / machine.flops, work.matrix_flops / machine.matrix
    arithmetic = (ordinary + matrix) * machine.processors
    program = max(arithmetic, work.bytes / machine.cache) + work.ops * machine.op
    least = sum(_count_bytes(v) for v in {v: None for v in node.args}) / machine.bandwidth
    return machine.launch + max(least, rounds * program)


def count_work(block: Block, producers: Mapping[Value, Node] | None = None) -> ProgramWork:
    """The work of one execution of a block of a tile function, its loops unrolled by their bounds."""
    known = {**(producers or {}), **{v: n for n in block.nodes for v in n.results}}
    return sum((_count_node(n, known) for n in block.nodes), ProgramWork())


def _count_node(node: Node, producers: Mapping[Value, Node]) -> ProgramWork:
    if node.regions:
        inside = sum((count_work(r, producers) for r in node.regions), ProgramWork())
        return inside.repeated(_count_rounds(node, producers))
    elements = max((_count_elements(v) for v in (*node.args, *node.results)), default=0)
    if elements <= 1 or node.op is basic.full:  # index arithmetic
        return ProgramWork()
    if node.op in (tile.load, tile.store):
        block = node.results[0] if node.op is tile.load else node.args[1]
        return ProgramWork(bytes=_count_bytes(block), ops=1)
    if node.op is contractions.dot:
        return _count_product(node)
    return ProgramWork(elements * (TRANSCENDENTAL_FLOPS if node.op.is_transcendental else 1), ops=1)


def _count_product(node: Node) -> ProgramWork:
    left = node.args[0].type
    assert isinstance(left, TensorType)
    flops = 2.0 * _count_elements(node.out) * int(estimate_size(left.shape[-1]))
    narrow = left.dtype.bits <= MATRIX_BITS
    return ProgramWork(0.0 if narrow else flops, flops if narrow else 0.0, ops=1)


def _count_rounds(node: Node, producers: Mapping[Value, Node]) -> float:
    if node.op is control_flow.if_:
        return 0.5  # one of two regions
    if node.op is not control_flow.for_:
        return UNKNOWN_ROUNDS
    bounds = [producers.get(v) for v in node.args[:3]]
    if any(n is None or n.op is not basic.full for n in bounds):
        return UNKNOWN_ROUNDS
    lower, upper, step = (int(n.attrs["value"]) for n in bounds if n is not None)
    return len(range(lower, upper, step))


def _count_elements(value: Value) -> int:
    type: Any = value.type
    return math.prod(int(estimate_size(n)) for n in type.shape) if isinstance(type, TensorType) else 0


def _count_bytes(value: Value) -> float:
    type: Any = value.type
    return math.prod(int(estimate_size(n)) for n in type.shape) * type.dtype.bits / 8


# Planner: enumerates the schedules of a function, refuses those that the target cannot run, and ranks the others.


# By target: a GPU of the newest architecture from its data sheet; a processor with vectors of 512 bits for each thread.
GPU_MODEL = MachineModel("H200", 67e12, 989e12, 4.8e12, 132, 100e9, 50e-9, 4e-6)
PROCESSOR_RATES = {"flops": 50e9, "bandwidth": 12e9, "cache": 60e9}  # of one thread


@dataclass(frozen=True)
class ScheduleCandidate:
    """A schedule of a function: the fields of the plan that it changes, and the seconds that the model predicts.

    `refused` says why the target cannot run it; "" where it can. `tile` is the module that would be emitted, `group`
    the number of the fields' group.
    """

    choice: Mapping[str, Any]
    tile: Module | None = field(repr=False, default=None)
    seconds: float = float("inf")
    refused: str = ""
    group: int = -1


def find_machine_model(target: str) -> MachineModel:
    """The machine that the cost model assumes for a target: fixed rates, so that a ranking is the same everywhere."""
    if get_backend(target).capabilities.lockstep > 1:
        return GPU_MODEL
    threads = choose_thread_count()
    flops, bandwidth = PROCESSOR_RATES["flops"] * threads, PROCESSOR_RATES["bandwidth"] * threads
    return MachineModel("processor", flops, 2 * flops, bandwidth, threads, PROCESSOR_RATES["cache"], 20e-9, 1e-6)


def list_schedules(function: Function, target: str) -> list[ScheduleCandidate]:
    """The distinct schedules of a Graph function for a target: the compiler's own first, the others by rank.

    Those that the target refuses come last. A target without choices, and the interpreter, have one schedule.
    """
    search = _ScheduleSearch(function, target)
    with operation(f"planning {function.name}"):
        own, *others = search.run()
    others.sort(key=lambda c: (bool(c.refused), c.seconds))
    return [own, *others]


class _ScheduleSearch:
    """One enumeration: what was lowered so far, by the hash of the Tile module."""

    def __init__(self, function: Function, target: str) -> None:
        self.function, self.target = function, target
        self.groups = () if target == INTERP else get_backend(target).capabilities.plan_choices
        self.machine = None if target == INTERP else find_machine_model(target)
        self.seen: set[str] = set()
        self.found: list[ScheduleCandidate] = []

    def run(self) -> list[ScheduleCandidate]:
        """Every distinct candidate, the compiler's own first."""
        self.add({})
        for number, choices in enumerate(self.groups):
            report_progress(f"planning {self.function.name}", number, len(self.groups))
            relevant = [n for n, values in choices.items() if any([self.add({n: v}, number) for v in values])]
            for pair in _list_pairs(relevant, choices):
                self.add(pair, number)
        return self.found

    def add(self, choice: Mapping[str, Any], group: int = -1) -> bool:
        """Add a candidate; False where it is one that was seen."""
        plan = driver.find_plan(self.target, choice)
        try:
            module = driver.lower(self.function, self.target, choice)["tile"]
        except TesseraError as error:
            if not choice:
                raise
            self.found.append(ScheduleCandidate(choice, refused=error.message, group=group))
            return True
        key = structural_hash(module)
        if key in self.seen:
            return False
        self.seen.add(key)
        refused = find_refusal(module, self.target, plan)
        seconds = estimate_seconds(module, self.machine) if self.machine and not refused else float("inf")
        self.found.append(ScheduleCandidate(choice, module, seconds, refused, group))
        return True


def _list_pairs(names: Sequence[str], choices: Mapping[str, tuple[Any, ...]]) -> Iterator[dict[str, Any]]:
    for a, b in itertools.combinations(names, 2):
        for x, y in itertools.product(choices[a], choices[b]):
            yield {a: x, b: y}


def find_refusal(module: Module, target: str, plan: LoweringPlan) -> str:
    """Why the target's own resource model refuses a Tile module; "" where it does not."""
    if target == INTERP:
        return ""
    try:
        check_resources(module, target, get_backend(target).capabilities)
    except ResourceError as error:
        return error.message
    refused = sorted(plan.find_refused(module)) if plan.find_refused is not None else []
    return f"{refused[0]} needs more shared memory or registers than the target has" if refused else ""


def spread_over_groups(candidates: Sequence[ScheduleCandidate], keep: int) -> list[ScheduleCandidate]:
    """The first `keep` of ranked candidates, from all groups in round-robin order: ranks between groups may err."""
    groups: dict[int, list[ScheduleCandidate]] = {}
    for each in candidates:
        groups.setdefault(each.group, []).append(each)
    rounds = itertools.zip_longest(*groups.values())
    return [c for each in rounds for c in each if c is not None][:keep]


# Tuning: measures the schedules that the planner ranks best, and keeps the fastest in a file.


GAIN = 0.97  # a schedule replaces the compiler's own where it takes at most this part of the time: less is noise
MODEL_GAIN = 0.9  # the same where only the model says so
SHORTEST = 1e-3  # seconds that one sample takes at least
BUDGET = 1.5  # seconds of samples beyond the least number, and how many at most: a busy machine needs more of them
MOST_SAMPLES = 60
FORMAT = 1  # of the cache's keys: a new one where the meaning of a choice changes


@dataclass(frozen=True)
class ScheduleSearch:
    """How schedules are searched: the `keep` best by rank are measured beside the compiler's own, `samples` times each.

    `measure=False` takes the model's first. `cache` is a file, None for the user's own, or False for none.

    Raises:
        ArgumentError: a number is not positive.
    """

    keep: int = 8
    samples: int = 5
    measure: bool = True
    cache: str | Path | bool | None = None

    def __post_init__(self) -> None:
        for name in ("keep", "samples"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ArgumentError(
                    f"{name}={value!r} is no count of schedules", location=user_location(), expected="an int from 1"
                )


_RESULTS: dict[str, Tuned] = {}  # what this process has found, by the keys of the file


def tune_schedule(
    function: Function, device: str, arrays: Sequence[Any], search: ScheduleSearch = ScheduleSearch()
) -> Tuned:
    """The best schedule of a Graph function for a device: from the cache, by measurement on `arrays`, or by the model.

    `config` has the fields of the lowering plan that it changes; {} is the compiler's own.
    """
    target = find_generator_name(device)
    measures = search.measure and target != INTERP and has_device(target)
    cache = None if search.cache is False or not measures else TuningCache(_find_path(search.cache))
    key, about = _make_key(function, target, search)
    place = f"{cache.path if cache else ''}#{key}#{measures}"
    if place not in _RESULTS:
        held = cache.get(key) if cache else None
        _RESULTS[place] = _decode(held) if held else _search(function, target, arrays, search, measures)
        if cache is not None and not held:
            cache.put(key, _encode(_RESULTS[place], about))
    return _RESULTS[place]


def _find_path(cache: str | Path | bool | None) -> str | Path | None:
    return None if isinstance(cache, bool) else cache


def compile_tuned_graph(
    function: Function, device: str, arrays: Sequence[Any], constants: range = range(0), donated: Sequence[int] = ()
) -> tuple[driver.RunFunction, Tuned]:
    """Compile a Graph function in its best schedule (as `compile_graph`), and say how that was found."""
    found = tune_schedule(function, device, arrays)
    return driver.compile_graph(function, device, constants, donated, found.config), found


def _search(function: Function, target: str, arrays: Sequence[Any], search: ScheduleSearch, measures: bool) -> Tuned:
    candidates = list_schedules(function, target)
    if not measures:
        return _choose_by_model(candidates, target)
    wanted = [candidates[0], *spread_over_groups([c for c in candidates[1:] if not c.refused], search.keep)]
    with operation(f"tuning {function.name}"):
        tried = _measure(function, target, arrays, wanted, search.samples)
        if combined := _combine(wanted, tried):
            tried += _measure(function, target, arrays, [candidates[0], combined], search.samples)[1:]
    own, best = tried[0], min(tried, key=_latency)
    chosen = best if _latency(best) <= GAIN * _latency(own) else own
    measured = {id(c) for c in wanted}
    return Tuned(chosen.config, _latency(chosen), (*tried, *(_predict(c) for c in candidates if id(c) not in measured)))


def _combine(wanted: Sequence[ScheduleCandidate], tried: Sequence[Trial]) -> ScheduleCandidate | None:
    """The fastest choice of each group that gains, together; None where there are not two."""
    least = GAIN * _latency(tried[0])
    best: dict[int, Trial] = {}
    for candidate, trial in zip(wanted[1:], tried[1:], strict=True):
        if _latency(trial) <= min(least, _latency(best[candidate.group]) if candidate.group in best else least):
            best[candidate.group] = trial
    choice = {k: v for trial in best.values() for k, v in trial.config.items()}
    return ScheduleCandidate(choice) if len(best) > 1 else None


def _choose_by_model(candidates: Sequence[ScheduleCandidate], target: str) -> Tuned:
    best = min(candidates, key=lambda c: c.seconds)
    if best.seconds > MODEL_GAIN * candidates[0].seconds:
        best = candidates[0]
    model = "no schedules to choose from" if len(candidates) == 1 else _describe_model(target)
    return Tuned(best.choice, 1e3 * best.seconds, tuple(map(_predict, candidates)), model=model)


def _describe_model(target: str) -> str:
    return f"the roofline of {find_machine_model(target).name}"


def _predict(candidate: ScheduleCandidate) -> Trial:
    predicted = None if candidate.refused else 1e3 * candidate.seconds
    return Trial(candidate.choice, refused=candidate.refused, predicted_ms=predicted)


def _latency(trial: Trial) -> float:
    return float("inf") if trial.latency_ms is None else trial.latency_ms


def _measure(
    function: Function, target: str, arrays: Sequence[Any], wanted: Sequence[ScheduleCandidate], samples: int
) -> list[Trial]:
    """The trials of some schedules, measured in alternation; one that the target refuses has its error."""
    runs: dict[int, Callable[[Sequence[Any]], Any]] = {}
    refused: dict[int, str] = {}
    for number, candidate in enumerate(wanted):
        report_progress(f"tuning {function.name}", number, len(wanted))
        try:
            runs[number] = driver.compile_graph(function, target, choice=candidate.choice)
        except TesseraError as error:
            if not candidate.choice:  # the compiler's own: the program itself is wrong
                raise
            refused[number] = error.message
    for run in runs.values():
        run(arrays)  # an error is the program's own
    times = _alternate(runs, arrays, samples)
    return [_make_trial(c, times.get(i, ()), refused.get(i, "")) for i, c in enumerate(wanted)]


def _make_trial(candidate: ScheduleCandidate, times: Sequence[float], refused: str) -> Trial:
    """The least time counts: what else the machine does only adds to a call."""
    predicted = 1e3 * candidate.seconds if math.isfinite(candidate.seconds) else None
    return Trial(candidate.choice, 1e3 * min(times) if times else None, refused, 1e3 * sum(times), predicted)


def _alternate(
    runs: Mapping[int, Callable[[Sequence[Any]], Any]], arrays: Sequence[Any], samples: int
) -> dict[int, list[float]]:
    """Seconds of a call of each, in alternation: what else the machine does meets all of them."""
    repeats = {i: max(1, int(SHORTEST / max(_time(run, arrays, 1), 1e-7))) for i, run in runs.items()}
    times: dict[int, list[float]] = {i: [] for i in runs}
    end = time.perf_counter() + BUDGET
    for number in range(max(samples, MOST_SAMPLES)):
        if number >= samples and time.perf_counter() > end:
            break
        for i, run in runs.items():
            times[i].append(_time(run, arrays, repeats[i]))
    return times


def _time(run: Callable[[Sequence[Any]], Any], arrays: Sequence[Any], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        run(arrays)
    return (time.perf_counter() - start) / repeats


def _make_key(function: Function, target: str, search: ScheduleSearch) -> tuple[str, dict[str, Any]]:
    """The hash of all that the best schedule depends on, and what it stands for in words."""
    threads = 1 if target == INTERP else find_machine_model(target).processors
    about = {
        "function": function.name, "graph": structural_hash(function), "target": target,
        "machine": describe_machine(target), "threads": threads,
        "plan": hash_text(_describe_plan(target)), "search": f"keep={search.keep}, samples={search.samples}",
    }  # fmt: skip
    return hash_text(json.dumps([FORMAT, about], sort_keys=True)), about


def _describe_plan(target: str) -> str:
    """The plan and the choices of a target as text; functions by their names, so that it is the same in every run."""
    if target == INTERP:
        return ""
    choices = [sorted(group.items()) for group in get_backend(target).capabilities.plan_choices]
    plan = {k: getattr(v, "__qualname__", v) for k, v in vars(driver.find_plan(target)).items()}
    return repr((sorted(plan.items()), choices))


def _encode(found: Tuned, about: Mapping[str, Any]) -> dict[str, Any]:
    trials = [asdict(t) for t in found.trials]
    return {"config": dict(found.config), "latency_ms": found.latency_ms, "trials": trials, "about": dict(about)}


def _decode(entry: Mapping[str, Any]) -> Tuned:
    trials = tuple(Trial(**t) for t in entry.get("trials", ()))
    return Tuned(entry["config"], entry["latency_ms"], trials, cached=True)


def describe_trials(found: Tuned) -> list[tuple[str, str, str, str]]:
    """A row for each schedule: a mark at the chosen one, its fields, the predicted and the measured milliseconds."""
    return [_describe_trial(t, found) for t in found.trials]


def _describe_trial(trial: Trial, found: Tuned) -> tuple[str, str, str, str]:
    mark = "*" if dict(trial.config) == dict(found.config) else ""
    predicted = "" if trial.predicted_ms is None else f"{trial.predicted_ms:.4g}"
    measured = trial.refused or ("" if trial.latency_ms is None else f"{trial.latency_ms:.4g}")
    return mark, format_choice(trial.config), predicted, measured


def format_choice(choice: Mapping[str, Any]) -> str:
    """A schedule in words: its fields, or that it is the compiler's own.

    >>> format_choice({"m": 64, "k": 128}), format_choice({})
    ('k=128, m=64', "the compiler's own")
    """
    return ", ".join(f"{k}={v!r}" for k, v in sorted(choice.items())) or "the compiler's own"

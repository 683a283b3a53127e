"""Schedule tuning: measures the schedules that the planner ranks best, and keeps the fastest in a file.

Where this machine does not have the target's device nothing is measured: the model's choice is taken.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tessera.codegen.contract import get_backend
from tessera.core.device import INTERP, find_generator_name
from tessera.core.errors import ArgumentError, TesseraError, user_location
from tessera.core.io import hash_text
from tessera.core.progress import operation, report_progress
from tessera.frontend.kernel.autotuning import Trial, Tuned
from tessera.ir.core import Function, structural_hash
from tessera.runtime import driver
from tessera.runtime.launch.tuner import TuningCache, describe_machine, has_device
from tessera.runtime.planning.planner import (
    ScheduleCandidate,
    find_machine_model,
    list_schedules,
    spread_over_groups,
)

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

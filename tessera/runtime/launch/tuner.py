"""Autotuner: measures a kernel's configurations, or ranks them by a roofline model, and caches the best."""

from __future__ import annotations

import ast
import json
import math
import platform
import statistics
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from tessera.core.device import INTERP, default_device, find_generator_name
from tessera.core.errors import ArgumentError, FileError, TesseraError
from tessera.core.hooks import list_candidates, make_roofline_model
from tessera.core.io import find_cache_folder, hash_text, lock_file
from tessera.core.progress import operation, report_progress
from tessera.core.schedule import read_json, write_json
from tessera.frontend.kernel.autotuning import Configuration, Trial, Tuned, TuningSettings
from tessera.frontend.kernel.python_ast.source import read_source
from tessera.runtime.launch import streams as launches

# The cache is a JSON file: processes read it at any time and write it one at a time, under a file lock.


def default_cache_file() -> Path:
    """autotune.json in the folder TESSERA_CACHE, or in the user's cache folder."""
    return find_cache_folder() / "autotune.json"


class TuningCache:
    """Tuning results by key, in a file. A missing file is an empty cache; an unreadable one is an error.

    The schema of an entry: `config`, `latency_ms`, `trials`, and `about`, what the key stands for in words.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self.path = Path(path).expanduser() if path else default_cache_file()

    def get(self, key: str) -> dict[str, Any] | None:
        """The entry of a key, or None.

        Raises:
            FileError: the file is corrupt or of another schema.
        """
        found = self._entries().get(key)
        return found if isinstance(found, dict) else None

    def put(self, key: str, entry: Mapping[str, Any]) -> None:
        """Add or replace an entry. A file that cannot be written is a warning: the result holds without the cache."""
        try:
            with lock_file(self.path):
                entries = {**self._entries(), key: dict(entry)}
                with _unwritable_as_warning(self.path):
                    write_json(self.path, {"entries": entries})
        except OSError as error:
            _warn_unwritable(self.path, error.strerror)

    def export(self, path: str | Path) -> Path:
        """Write every entry as a file that another machine can `merge`."""
        return write_json(path, {"entries": self._entries()})

    def merge(self, path: str | Path) -> int:
        """Merge the entries of another file, the faster of two for one key; return how many were taken.

        Raises:
            FileError: the file is missing, corrupt or of another schema, or this one cannot be written.
        """
        given = TuningCache(path)
        if not given.path.exists():
            raise FileError(f"{path} cannot be read", received="no such file")
        found = given._entries()
        try:
            with lock_file(self.path):
                held = self._entries()
                taken = {k: e for k, e in found.items() if k not in held or e["latency_ms"] < held[k]["latency_ms"]}
                write_json(self.path, {"entries": {**held, **taken}})
        except OSError as error:
            raise FileError(f"{self.path} cannot be written", received=error.strerror) from None
        return len(taken)

    def _entries(self) -> dict[str, Any]:
        if not self.path.exists():
            return {}
        entries = read_json(self.path, "entries")["entries"]
        if not isinstance(entries, dict):
            raise FileError(f"{self.path} holds no tuning entries", received=type(entries).__name__)
        wrong = next((e for e in entries.values() if not _is_entry(e)), None)
        if wrong is not None:
            raise FileError(
                f"{self.path} holds an entry that is no tuning result", received=repr(wrong)[:200],
                expected="config, latency_ms and trials", suggestion="delete the file: kernels are then tuned again",
            )  # fmt: skip
        return entries


def _is_entry(entry: Any) -> bool:
    """Whether JSON data is a tuning result: a configuration, its time, and the trials."""
    return (
        isinstance(entry, dict)
        and isinstance(entry.get("config", {}), dict)
        and isinstance(entry.get("latency_ms"), int | float)
        and isinstance(entry.get("trials", []), list)
        and all(isinstance(t, dict) and {"config"} <= t.keys() <= _TRIAL_FIELDS for t in entry.get("trials", []))
    )


@contextmanager
def _unwritable_as_warning(path: Path) -> Iterator[None]:
    """A full disk is no error of a launch: the result holds without the cache."""
    try:
        yield
    except FileError as error:
        _warn_unwritable(path, error.received)


def _warn_unwritable(path: Path, reason: Any) -> None:
    text = f"what tuning found is not kept: {path} cannot be written ({reason})"
    warnings.warn(text, RuntimeWarning, stacklevel=4)


_TRIAL_FIELDS = {f.name for f in fields(Trial)}


_RESULTS: dict[str, Tuned] = {}  # results that this process has measured or read, by the keys of the file


def tune_launch(launch: Any, args: Sequence[Any], named: Mapping[str, Any], arch: str = "") -> Tuned:
    """Find the best configuration for a launch with these arguments: from the cache, or by measurement.

    Without the target's device nothing is measured: a roofline model of `arch` ranks the configurations.

    Raises:
        ArgumentError: no configuration can run; the first one's error follows.
    """
    settings: TuningSettings = launch.kernel.options.tuning
    key, about = _make_cache_key(launch, args, named)
    cache = None if settings.cache is False else TuningCache(None if settings.cache is True else settings.cache)
    here = has_device(about["target"])
    place = f"{cache.path if cache else ''}#{key}" + ("" if here else f"#{arch}")
    if place not in _RESULTS:
        held = cache.get(key) if cache else None
        held = held if held and "config" in held else None
        _RESULTS[place] = (
            _decode_entry(held)
            if held
            else (_search_configurations if here else _make_predictor(arch))(launch, args, named)
        )
        if cache is not None and held is None and here:
            cache.put(key, _encode_entry(_RESULTS[place], about))
    return _RESULTS[place]


def has_device(target: str) -> bool:
    """Whether this machine can measure the target's times."""
    if target == INTERP:
        return True
    from tessera.codegen.contract import get_backend  # imported late: only asked whether the device is present

    return bool(getattr(get_backend(target), "has_device", True))


def _decode_entry(entry: Mapping[str, Any]) -> Tuned:
    trials = tuple(Trial(**t) for t in entry.get("trials", ()))
    return Tuned(entry["config"], entry["latency_ms"], trials, cached=True)


def _encode_entry(found: Tuned, about: Mapping[str, Any]) -> dict[str, Any]:
    trials = [asdict(t) for t in found.trials]
    return {"config": dict(found.config), "latency_ms": found.latency_ms, "trials": trials, "about": dict(about)}


def _search_configurations(launch: Any, args: Sequence[Any], named: Mapping[str, Any]) -> Tuned:
    settings: TuningSettings = launch.kernel.options.tuning
    kernel, search = list_candidates(launch, args, named, settings.configs), settings.search
    shapes = kernel.shapes
    trials: dict[str, Trial] = {}
    errors: list[TesseraError] = []
    search.begin(kernel, shapes)
    with operation(f"tuning {kernel.name}"):
        _try_suggestions(search, kernel, settings, trials, errors)
    return _choose_best(launch, list(trials.values()), errors)


def _try_suggestions(
    search: Any, kernel: Any, settings: TuningSettings, trials: dict[str, Trial], errors: list[TesseraError]
) -> None:
    """Measure what a search suggests until it suggests nothing new or the budget is spent."""
    while not _exceeds_budget(settings, trials):
        new = {repr(sorted(c.items())): kernel.at(c) for c in search.suggest_configs(kernel, kernel.shapes)}
        new = {k: v for k, v in new.items() if k not in trials}
        if not new:
            break
        for key, candidate in new.items():
            if _exceeds_budget(settings, trials):
                return
            report_progress(f"tuning {kernel.name}", len(trials), max(len(settings.configs), len(trials)))
            trials[key] = _try_candidate(candidate, settings.samples, errors)
            search.update(candidate.config, _trial_latency(trials[key]))


def _try_candidate(candidate: Any, samples: int, errors: list[TesseraError]) -> Trial:
    """Measure one configuration; one that exceeds the target's resources or does not fit the shapes is refused."""
    owner = candidate.owner
    try:
        times = _measure(candidate.launch, owner.args, owner.named, samples)
    except TesseraError as error:
        errors.append(error)
        return Trial(candidate.config, refused=error.message)
    return Trial(candidate.config, statistics.median(times), spent_ms=sum(times))


def _exceeds_budget(settings: TuningSettings, trials: Mapping[str, Trial]) -> bool:
    return settings.budget_ms is not None and sum(t.spent_ms for t in trials.values()) >= settings.budget_ms


def _trial_latency(trial: Trial) -> float:
    return math.inf if trial.latency_ms is None else trial.latency_ms


def _choose_best(launch: Any, trials: Sequence[Trial], errors: Sequence[TesseraError]) -> Tuned:
    best = min(trials, key=_trial_latency, default=None)
    if best is None or best.latency_ms is None:
        tried = str(dict(trials[0].config)) if trials else "no configuration was suggested"
        first = next(iter(errors), None)
        reason = f": {first.message}" if first else ""
        raise ArgumentError(
            f"no configuration of {launch.kernel.__name__} can run{reason}",
            location=first.location if first else None, received=tried, suggestion=first.suggestion if first else None,
        ) from first  # fmt: skip
    return Tuned(best.config, best.latency_ms, tuple(trials))


# The GPU whose peak figures the model uses for an architecture; the last row is the default.
MODEL_GPUS = {"sm_80": "A100", "sm_90a": "H100", "": "H100"}


def _make_predictor(arch: str) -> Any:
    """Make a predictor: it picks the configuration that an architecture's model ranks fastest."""
    model = make_roofline_model(MODEL_GPUS.get(arch, MODEL_GPUS[""]))

    def predict(launch: Any, args: Sequence[Any], named: Mapping[str, Any]) -> Tuned:
        ranked = list_candidates(launch, args, named, launch.kernel.options.tuning.configs).ranked(model)
        trials = tuple(Trial(p.config, None if p.refused else p.latency_ms, p.refused) for p in ranked)
        if ranked[0].refused:
            raise ArgumentError(f"no configuration of {launch.kernel.__name__} can run", received=ranked[0].refused)
        return Tuned(ranked[0].config, ranked[0].latency_ms, trials, model=repr(model))

    return predict


def apply_configuration(launch: Any, config: Configuration) -> Any:
    """Return a launch whose kernel has one configuration applied."""
    return replace(launch, kernel=launch.kernel.configured(config))


def _measure(launch: Any, args: Sequence[Any], named: Mapping[str, Any], samples: int) -> list[float]:
    """Measure some runs, in milliseconds, on copies of the arrays, after one run that compiles."""
    found = launch.kernel.bind(args, named)
    module = launch.module(*args, **named)
    arrays = [a.copy() if isinstance(a, np.ndarray) else a for a in found.arrays]
    times = []
    for _ in range(samples + 1):
        start = time.perf_counter()
        launches.run_module(module, arrays, launch.kernel.options.target)
        times.append((time.perf_counter() - start) * 1e3)
    return times[1:]


def _make_cache_key(launch: Any, args: Sequence[Any], named: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Make the key of everything that the best configuration depends on: its hash, and its parts in words."""
    kernel = launch.kernel
    found = kernel.bind(args, named)
    free = {n for c in kernel.options.tuning.configs for n in c} - {*named}
    target = find_generator_name(kernel.options.target or default_device())
    about = {
        "kernel": f"{kernel.kernel_function.__module__}.{kernel.kernel_function.__qualname__}",
        "types": {k: str(t) for k, t in found.types.items()},
        "constants": {k: repr(v) for k, v in found.constants.items() if k not in free},
        "launch": "a function of the constants" if callable(launch.grid) else repr((launch.grid, launch.group)),
        "target": target,
        "machine": describe_machine(target),
        "search": kernel.options.tuning.search.about,
    }
    source = [hash_text(_source_text(kernel)), [sorted(c.items()) for c in _list_configurations(kernel)]]
    return hash_text(json.dumps([about, source], sort_keys=True, default=repr)), about


def _list_configurations(kernel: Any) -> tuple[Configuration, ...]:
    return kernel.options.tuning.configs  # type: ignore[no-any-return]


def _source_text(kernel: Any) -> str:
    return "\n".join(ast.unparse(s) for s in read_source(kernel.kernel_function).body)


def describe_machine(target: str) -> str:
    """Describe the processor as the target sees it."""
    if target == INTERP:
        return f"{platform.machine()} numpy {np.__version__}"
    from tessera.codegen.contract import get_backend  # imported late: only asked what the machine supports

    words = f"{platform.machine()} {platform.processor()} {get_backend(target).capabilities!r}"
    return hash_text(words)[:16]

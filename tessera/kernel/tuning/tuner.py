"""Autotuning: `@kernel.autotune`, `@kernel.auto`, and the measurements behind them."""

from __future__ import annotations

import ast
import json
import math
import platform
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from tessera.device import INTERP, default_device, generator_of
from tessera.digest import digest
from tessera.errors import ArgumentError, TesseraError
from tessera.kernel import launch as launches
from tessera.kernel.source import read
from tessera.kernel.tuning.cache import TuningCache
from tessera.kernel.tuning.configurations import Config, Trial, Tuned, Tuning

_FOUND: dict[str, Tuned] = {}  # what this process has measured or read, by the same keys as the file


def tune(launch: Any, args: Sequence[Any], named: Mapping[str, Any], arch: str = "") -> Tuned:
    """The best configuration for a launch with these arguments: from the cache, or measured now.

    Where this machine lacks the target's device nothing is measured: a roofline model of `arch` ranks them.

    Raises:
        ArgumentError: no configuration can run; the first one's error follows.
    """
    settings: Tuning = launch.kernel.options.tuning
    key, about = _key(launch, args, named)
    cache = None if settings.cache is False else TuningCache(None if settings.cache is True else settings.cache)
    here = _has_device(about["target"])
    place = f"{cache.path if cache else ''}#{key}" + ("" if here else f"#{arch}")
    if place not in _FOUND:
        held = cache.get(key) if cache else None
        _FOUND[place] = _read(held) if held else (_search if here else _predicted(arch))(launch, args, named)
        if cache is not None and held is None and here:
            cache.put(key, _written(_FOUND[place], about))
    return _FOUND[place]


def _has_device(target: str) -> bool:
    """Whether a target's times can be measured here."""
    if target == INTERP:
        return True
    from tessera.codegen.registry import backend  # the layer above: only asked what the machine has

    return bool(getattr(backend(target), "has_device", True))


def _read(entry: Mapping[str, Any]) -> Tuned:
    trials = tuple(Trial(**t) for t in entry.get("trials", ()))
    return Tuned(entry["config"], entry["latency_ms"], trials, cached=True)


def _written(found: Tuned, about: Mapping[str, Any]) -> dict[str, Any]:
    trials = [asdict(t) for t in found.trials]
    return {"config": dict(found.config), "latency_ms": found.latency_ms, "trials": trials, "about": dict(about)}


def _search(launch: Any, args: Sequence[Any], named: Mapping[str, Any]) -> Tuned:
    from tessera.performance.candidate import Candidates  # the layer above: what searches may ask of a kernel

    settings: Tuning = launch.kernel.options.tuning
    kernel, search = Candidates(launch, args, named, settings.configs), settings.search
    shapes = kernel.shapes
    trials: dict[str, Trial] = {}
    errors: list[TesseraError] = []
    search.begin(kernel, shapes)
    while not _over(settings, trials):
        new = {repr(sorted(c.items())): kernel.at(c) for c in search.suggest_configs(kernel, shapes)}
        new = {k: v for k, v in new.items() if k not in trials}
        if not new:
            break
        for key, candidate in new.items():
            if _over(settings, trials):
                break
            trials[key] = _tried(candidate, settings.samples, errors)
            search.update(candidate.config, _latency(trials[key]))
    return _best(launch, list(trials.values()), errors)


def _tried(candidate: Any, samples: int, errors: list[TesseraError]) -> Trial:
    """One configuration measured; one that is too large for the target, or not made for these shapes, is refused."""
    owner = candidate.owner
    try:
        times = _measure(candidate.launch, owner.args, owner.named, samples)
    except TesseraError as error:
        errors.append(error)
        return Trial(candidate.config, refused=error.message)
    return Trial(candidate.config, statistics.median(times), spent_ms=sum(times))


def _over(settings: Tuning, trials: Mapping[str, Trial]) -> bool:
    return settings.budget_ms is not None and sum(t.spent_ms for t in trials.values()) >= settings.budget_ms


def _latency(trial: Trial) -> float:
    return math.inf if trial.latency_ms is None else trial.latency_ms


def _best(launch: Any, trials: Sequence[Trial], errors: Sequence[TesseraError]) -> Tuned:
    best = min(trials, key=_latency, default=None)
    if best is None or best.latency_ms is None:
        tried = str(dict(trials[0].config)) if trials else "no configuration was suggested"
        raise ArgumentError(f"no configuration of {launch.kernel.__name__} can run", received=tried) from next(
            iter(errors), None
        )
    return Tuned(best.config, best.latency_ms, tuple(trials))


# The GPU whose peaks a model takes for an architecture; the last is for any other.
ARCHITECTURES = {"sm_80": "A100", "sm_90a": "H100", "": "H100"}


def _predicted(arch: str) -> Any:
    """The configuration that a model of an architecture takes for the fastest, with nothing measured."""
    from tessera.performance.candidate import Candidates  # the layer above, as in _search
    from tessera.performance.models import RooflineModel

    model = RooflineModel(ARCHITECTURES.get(arch, ARCHITECTURES[""]))

    def predict(launch: Any, args: Sequence[Any], named: Mapping[str, Any]) -> Tuned:
        ranked = Candidates(launch, args, named, launch.kernel.options.tuning.configs).ranked(model)
        trials = tuple(Trial(p.config, None if p.refused else p.latency_ms, p.refused) for p in ranked)
        if ranked[0].refused:
            raise ArgumentError(f"no configuration of {launch.kernel.__name__} can run", received=ranked[0].refused)
        return Tuned(ranked[0].config, ranked[0].latency_ms, trials, model=repr(model))

    return predict


def chosen(launch: Any, config: Config) -> Any:
    """A launch with its kernel in one configuration."""
    return replace(launch, kernel=launch.kernel.configured(config))


def _measure(launch: Any, args: Sequence[Any], named: Mapping[str, Any], samples: int) -> list[float]:
    """The times of some runs in milliseconds, on copies of the arrays, after one run that compiles."""
    found = launch.kernel.bind(args, named)
    module = launch.module(*args, **named)
    arrays = [a.copy() if isinstance(a, np.ndarray) else a for a in found.arrays]
    times = []
    for _ in range(samples + 1):
        start = time.perf_counter()
        launches.run(module, arrays, launch.kernel.options.target)
        times.append((time.perf_counter() - start) * 1e3)
    return times[1:]


def _key(launch: Any, args: Sequence[Any], named: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """What the best configuration depends on, hashed, and in words."""
    kernel = launch.kernel
    found = kernel.bind(args, named)
    free = {n for c in kernel.options.tuning.configs for n in c} - {*named}
    target = generator_of(kernel.options.target or default_device())
    about = {
        "kernel": f"{kernel.kernel_function.__module__}.{kernel.kernel_function.__qualname__}",
        "types": {k: str(t) for k, t in found.types.items()},
        "constants": {k: repr(v) for k, v in found.constants.items() if k not in free},
        "launch": "a function of the constants" if callable(launch.grid) else repr((launch.grid, launch.group)),
        "target": target,
        "machine": _machine(target),
        "search": kernel.options.tuning.search.about,
    }
    source = [digest(_text(kernel)), [sorted(c.items()) for c in _configs(kernel)]]
    return digest(json.dumps([about, source], sort_keys=True, default=repr)), about


def _configs(kernel: Any) -> tuple[Config, ...]:
    return kernel.options.tuning.configs  # type: ignore[no-any-return]


def _text(kernel: Any) -> str:
    return "\n".join(ast.unparse(s) for s in read(kernel.kernel_function).body)


def _machine(target: str) -> str:
    """The processor as far as the target sees it."""
    if target == INTERP:
        return f"{platform.machine()} numpy {np.__version__}"
    from tessera.codegen.registry import backend  # the layer above: only asked what the machine can do

    words = f"{platform.machine()} {platform.processor()} {backend(target).capabilities!r}"
    return digest(words)[:16]

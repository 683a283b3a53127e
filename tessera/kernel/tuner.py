"""Autotuning: `@kernel.autotune`, `@kernel.auto`, and the measurements behind them."""

from __future__ import annotations

import ast
import hashlib
import json
import platform
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from tessera.device import INTERP, default_device, generator_of
from tessera.errors import ArgumentError, TesseraError
from tessera.kernel import launch as launches
from tessera.kernel.source import read
from tessera.kernel.tuning import Config, Trial, Tuned, Tuning
from tessera.kernel.tuning_cache import TuningCache

_FOUND: dict[str, Tuned] = {}  # what this process has measured or read, by the same keys as the file


def tune(launch: Any, args: Sequence[Any], named: Mapping[str, Any]) -> Tuned:
    """The best configuration for a launch with these arguments: from the cache, or measured now.

    Raises:
        ArgumentError: no configuration can run; the first one's error follows.
    """
    settings: Tuning = launch.kernel.options.tuning
    key, about = _key(launch, args, named)
    cache = None if settings.cache is False else TuningCache(None if settings.cache is True else settings.cache)
    place = f"{cache.path if cache else ''}#{key}"
    if place not in _FOUND:
        held = cache.get(key) if cache else None
        _FOUND[place] = _read(held) if held else _search(launch, args, named)
        if cache is not None and held is None:
            cache.put(key, _written(_FOUND[place], about))
    return _FOUND[place]


def _read(entry: Mapping[str, Any]) -> Tuned:
    trials = tuple(Trial(**t) for t in entry.get("trials", ()))
    return Tuned(entry["config"], entry["latency_ms"], trials, cached=True)


def _written(found: Tuned, about: Mapping[str, Any]) -> dict[str, Any]:
    trials = [asdict(t) for t in found.trials]
    return {"config": dict(found.config), "latency_ms": found.latency_ms, "trials": trials, "about": dict(about)}


def _search(launch: Any, args: Sequence[Any], named: Mapping[str, Any]) -> Tuned:
    settings: Tuning = launch.kernel.options.tuning
    trials: list[Trial] = []
    spent, first = 0.0, None
    for config in settings.configs:
        if settings.budget_ms is not None and spent >= settings.budget_ms:
            break
        try:
            times = _measure(chosen(launch, config), args, named, settings.samples)
        except TesseraError as error:  # too large for the target, or not made for these shapes
            trials.append(Trial(config, refused=error.message))
            first = first or error
            continue
        spent += sum(times)
        trials.append(Trial(config, statistics.median(times)))
    measured = [t for t in trials if t.latency_ms is not None]
    if not measured:
        raise ArgumentError(
            f"no configuration of {launch.kernel.__name__} can run", received=str(dict(settings.configs[0]))
        ) from first
    best = min(measured, key=lambda t: t.latency_ms)  # type: ignore[arg-type,return-value]
    assert best.latency_ms is not None
    return Tuned(best.config, best.latency_ms, tuple(trials))


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
    }
    source = [hashlib.sha256(_text(kernel).encode()).hexdigest(), [sorted(c.items()) for c in _configs(kernel)]]
    return hashlib.sha256(json.dumps([about, source], sort_keys=True, default=repr).encode()).hexdigest(), about


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
    return hashlib.sha256(words.encode()).hexdigest()[:16]

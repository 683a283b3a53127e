"""Autotuned kernels given to `run`, `build` and `inspect`: tuned for the target, or predicted where it is not here."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tessera.kernel.kernel import Launch
from tessera.kernel.tuning import tuner
from tessera.kernel.tuning.configurations import Tuned


def tuned(
    launch: Launch, args: Sequence[Any], named: Mapping[str, Any], target: str, options: Mapping[str, Any]
) -> Tuned | None:
    """The configuration of a launch for a target; None for a kernel that is not autotuned.

    Measured, or read from the cache, where this machine has the target's device; predicted by a model where not.

    Raises:
        ArgumentError: no configuration can run.
    """
    if launch.kernel.options.tuning is None:
        return None
    wanted = replace(launch, kernel=launch.kernel.like(replace(launch.kernel.options, target=target)))
    return tuner.tune(wanted, args, named, str(options.get("arch", "")))


def in_words(found: Tuned) -> str:
    """The configuration, and how it was found: "BM=64, BN=32 (fastest of 8, measured now: 0.41 ms)"."""
    chosen = ", ".join(f"{k}={v!r}" for k, v in sorted(found.config.items()))
    ran = sum(t.latency_ms is not None for t in found.trials)
    refused = f", {len(found.trials) - ran} could not run" if ran < len(found.trials) else ""
    if found.model:
        return f"{chosen} (of {ran}, by {found.model}{refused}; nothing was measured)"
    when = "measured before" if found.cached else "measured now"
    return f"{chosen} (fastest of {ran}{refused}, {when}: {found.latency_ms:.3g} ms)"


def of_constants(grid: Any, args: Sequence[Any], named: Mapping[str, Any]) -> Any:
    """A grid given as a function of the inputs, as one of the kernel's constants, which it may take by name too."""
    if not callable(grid):
        return grid
    parameters = inspect.signature(grid).parameters
    taken = {*_positional(grid, len(args)), *named}
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())

    def of(constants: Mapping[str, Any]) -> Any:
        given = {k: v for k, v in constants.items() if k not in taken and (takes_all or k in parameters)}
        return grid(*args, **named, **given)

    return of


def _positional(function: Callable[..., Any], count: int) -> list[str]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [k for k, p in inspect.signature(function).parameters.items() if p.kind in kinds][:count]

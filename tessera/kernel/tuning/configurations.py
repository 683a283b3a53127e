"""Tuning: the configurations of a kernel to try, how to measure them, and what was found."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tessera.errors import ArgumentError, here
from tessera.kernel.tuning.search import Autotuner
from tessera.schedule import MEANINGS
from tessera.schedule_space import ScheduleSpace

Config = Mapping[str, Any]
Constraint = Callable[[Any], bool]
METRICS = ("latency_ms", "latency")
# What `auto` tries for a constant that a schedule means as a block size.
AUTO_SIZES = (16, 32, 64, 128)


@dataclass(frozen=True)
class Tuning:
    """What an autotuned kernel tries: configurations in order, each measured `samples` times.

    `budget_ms` is the time that measured runs may take in all; at least one configuration is measured. `cache`
    is a file, None for the user's own, or False for none. `search` chooses which are measured, and in which order.
    """

    configs: tuple[Config, ...]
    metric: str = "latency_ms"
    budget_ms: float | None = None
    cache: str | Path | bool | None = None
    samples: int = 5
    search: Autotuner = field(default_factory=Autotuner)


@dataclass(frozen=True)
class Trial:
    """One configuration tried: its median latency (or a model's), or why it cannot run; what all its runs took."""

    config: Config
    latency_ms: float | None = None
    refused: str = ""
    spent_ms: float = 0.0


@dataclass(frozen=True)
class Tuned:
    """The best configuration, its latency, every trial, whether it came from the cache, and the model that chose it.

    `model` is "" where the latency is the median of what was measured.
    """

    config: Config
    latency_ms: float
    trials: tuple[Trial, ...] = field(default=(), repr=False)
    cached: bool = False
    model: str = ""


def tuning(
    space: Mapping[str, Sequence[Any]] | ScheduleSpace | None = None, configs: Iterable[Config] | None = None,
    constraints: Sequence[Constraint] = (), metric: str = "latency_ms", budget_ms: float | None = None,
    cache: str | Path | bool | None = None, samples: int = 5, search: Autotuner | None = None,
) -> Tuning:  # fmt: skip
    """What to try: `configs` one by one, or every combination of a `space` for which the constraints hold.

    A constraint takes a configuration whose entries are attributes: `lambda c: c.BM * c.BN <= 8192`. `search`
    chooses which are measured (tessera/kernel/tuning/search.py); by default all are, in order.

    Raises:
        ArgumentError: neither or both are given, nothing is left to try, or the metric is unknown.
    """
    if (space is None) == (configs is None):
        raise ArgumentError("autotuning takes a space or configs", location=here(), expected="one of the two")
    if metric not in METRICS:
        raise ArgumentError(f'"{metric}" is not a metric', location=here(), expected=" or ".join(METRICS))
    if samples < 1 or (budget_ms is not None and budget_ms <= 0):
        raise ArgumentError("nothing can be measured", location=here(), received=f"{samples=}, {budget_ms=}")
    if space is not None and not isinstance(space, ScheduleSpace) and not space:
        raise ArgumentError("the space has no axis", location=here(), expected="a list of values for each constant")
    listed = [dict(c) for c in configs] if configs is not None else _combinations(space)  # type: ignore[arg-type]
    left = tuple(c for c in listed if all(holds(SimpleNamespace(**c)) for holds in constraints))
    if not left:
        raise ArgumentError("no configuration is left to try", location=here(), received=f"{len(listed)} before")
    return Tuning(left, metric, budget_ms, cache, samples, search or Autotuner())


def _combinations(space: Mapping[str, Sequence[Any]] | ScheduleSpace) -> list[dict[str, Any]]:
    if isinstance(space, ScheduleSpace):
        return [schedule.given for schedule in space]
    values = [v if isinstance(v, (list, tuple, range)) else (v,) for v in space.values()]
    return [dict(zip(space, chosen, strict=True)) for chosen in itertools.product(*values)]


def parted(config: Config, constants: Iterable[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A configuration as constants of the kernel, and fields of a schedule for what it has no constant for.

    Raises:
        ArgumentError: an entry is neither.
    """
    own = {k: v for k, v in config.items() if k in constants}
    fields = {}
    for name, value in config.items():
        if name in own:
            continue
        meant = MEANINGS.get(name) or MEANINGS.get(name.lower())
        if meant is None:
            raise ArgumentError(
                f"the kernel has no constant `{name}`, and a schedule no such field", location=here(),
                expected=", ".join(sorted(constants)) or "a field of ts.Schedule",
            )  # fmt: skip
        fields[meant[-1]] = value
    return own, fields


def automatic_space(constants: Iterable[str]) -> dict[str, Sequence[int]]:
    """A few sizes for each constant that means a block."""
    blocks = sorted(c for c in constants if any(f.startswith(("block", "tile")) for f in MEANINGS.get(c, ())))
    return {name: AUTO_SIZES for name in blocks}


def automatic(constants: Iterable[str]) -> Tuning | None:
    """What `kernel.auto` tries; None where no constant means a block."""
    space = automatic_space(constants)
    return tuning(space=space) if space else None

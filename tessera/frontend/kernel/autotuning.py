"""Autotuning spaces and searches: configurations to try, and in which order.

Searches are exhaustive, model-guided or evolutionary; a search of your own derives Autotuner.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tessera.core.errors import ArgumentError, user_location
from tessera.core.schedule import CONSTANT_FIELDS, ScheduleSpace

# Searches of autotuning: which configurations are measured, in which order. A search of your own derives Autotuner.


SearchConfiguration = Mapping[str, Any]
ShapeMap = Mapping[str, tuple[int, ...]]
_MAX_DRAWS = 4  # children generated for each one needed


class Autotuner:
    """A search: it chooses the configurations to measure. The base class takes all, in order.

    The tuner calls `begin` once, then `suggest_configs` again and again, until it suggests nothing that has
    not been measured, and `update` after each measurement. A search of your own overrides `suggest_configs`, and
    `update` if it learns. `kernel` is a `tessera.frontend.kernel.candidate.Candidates`: every configuration that meets
    the constraints, and what can be counted about each.

    >>> class Cautious(Autotuner):
    ...     def suggest_configs(self, kernel, input_shapes):
    ...         return kernel.configs[:1]
    """

    def begin(self, kernel: Any, input_shapes: ShapeMap) -> None:
        """Begin a search."""

    def suggest_configs(self, kernel: Any, input_shapes: ShapeMap) -> Iterable[SearchConfiguration]:
        """Suggest the configurations to measure next; measured ones are skipped."""
        return kernel.configs  # type: ignore[no-any-return]

    def update(self, config: SearchConfiguration, performance: float) -> None:
        """Report that a configuration took `performance` milliseconds; infinity where it cannot run."""

    def extract_features(self, kernel: Any, input_shapes: ShapeMap) -> Any:
        """What a model can learn from: a row of numbers for each configuration (see tessera/kernel/features.py)."""
        return kernel.features()

    @property
    def about(self) -> str:
        """Describe the search; results are cached by this description."""
        return f"{type(self).__module__}.{type(self).__qualname__}"


class Guided(Autotuner):
    """Measure only the `keep` configurations that a model of performance predicts to be the fastest.

    >>> from tessera.tools.performance import RooflineModel
    >>> Guided(RooflineModel("H100"), keep=4).about
    'Guided(RooflineModel(H100), keep=4)'
    """

    def __init__(self, model: Any, keep: int = 8) -> None:
        self.model, self.keep = model, _check_int("keep", keep, 1)

    def suggest_configs(self, kernel: Any, input_shapes: ShapeMap) -> Iterable[SearchConfiguration]:
        """Suggest the configurations that the model ranks best; ties keep their order."""
        return [each.config for each in kernel.ranked(self.model)[: self.keep]]

    @property
    def about(self) -> str:
        return f"Guided({self.model!r}, keep={self.keep})"


class Evolutionary(Autotuner):
    """A genetic search: the fastest of each generation are crossed and mutated, each entry of a configuration a gene.

    A child takes each entry from one of two parents with probability `crossover_rate` (else it is its first parent);
    each entry then becomes another value of the space with probability `mutation_rate`. Children that the
    constraints forbid become the nearest configuration that they allow. The same `seed` searches the same way.

    Raises:
        ArgumentError: a size is no positive int, or a rate is not in [0, 1].
    """

    def __init__(
        self, population_size: int = 50, generations: int = 20, mutation_rate: float = 0.1,
        crossover_rate: float = 0.7, seed: int = 0,
    ) -> None:  # fmt: skip
        self.population_size = _check_int("population_size", population_size, 2)
        self.generations = _check_int("generations", generations, 1)
        self.mutation_rate, self.crossover_rate = (
            _check_probability("mutation_rate", mutation_rate),
            _check_probability("crossover_rate", crossover_rate),
        )
        self.seed = seed
        self.begin(None, {})

    def begin(self, kernel: Any, input_shapes: ShapeMap) -> None:
        from random import Random  # imported late: few programs search

        self._chance = Random(self.seed)
        self._generation = 0
        self._times: dict[Any, float] = {}

    def suggest_configs(self, kernel: Any, input_shapes: ShapeMap) -> Iterable[SearchConfiguration]:
        """Suggest a generation: the first is random, later ones are the children of the fastest so far."""
        configs: Sequence[SearchConfiguration] = kernel.configs
        while self._generation < self.generations:
            self._generation += 1
            born = self._first(configs) if self._generation == 1 else self._born(configs)
            if born:
                return born
        return ()

    def update(self, config: SearchConfiguration, performance: float) -> None:
        self._times[_configuration_key(config)] = performance

    def _first(self, configs: Sequence[SearchConfiguration]) -> list[SearchConfiguration]:
        return self._chance.sample(list(configs), min(self.population_size, len(configs)))

    def _born(self, configs: Sequence[SearchConfiguration]) -> list[SearchConfiguration]:
        ran = [c for c in configs if math.isfinite(self._times.get(_configuration_key(c), math.inf))]
        parents = sorted(ran, key=lambda c: self._times[_configuration_key(c)])[: max(2, self.population_size // 2)]
        if not parents:  # no configuration of the last generation could run
            return self._first([c for c in configs if _configuration_key(c) not in self._times])
        born: dict[Any, SearchConfiguration] = {}
        for _ in range(_MAX_DRAWS * self.population_size):  # many children have been measured already
            child = self._child(parents, configs)
            if _configuration_key(child) not in self._times and len(born) < self.population_size:
                born[_configuration_key(child)] = child
        return list(born.values())

    def _child(
        self, parents: Sequence[SearchConfiguration], configs: Sequence[SearchConfiguration]
    ) -> SearchConfiguration:
        first, second = self._chance.choice(parents), self._chance.choice(parents)
        crossed = self._chance.random() < self.crossover_rate
        child = {k: self._chance.choice((first, second)).get(k, v) if crossed else v for k, v in first.items()}
        for name in child:
            if self._chance.random() < self.mutation_rate:
                child[name] = self._chance.choice(configs).get(name, child[name])
        return min(configs, key=lambda c: _configuration_distance(c, child))

    @property
    def about(self) -> str:
        rates = f"mutation_rate={self.mutation_rate}, crossover_rate={self.crossover_rate}, seed={self.seed}"
        return f"Evolutionary({self.population_size}, {self.generations}, {rates})"


def _configuration_key(config: SearchConfiguration) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((k, repr(v)) for k, v in config.items()))


def _configuration_distance(config: SearchConfiguration, other: SearchConfiguration) -> tuple[int, float]:
    """The number of differing entries, then their distance in powers of two."""
    parted = [(config.get(k), v) for k, v in other.items() if config.get(k) != v]
    far = sum(abs(math.log2(a / b)) for a, b in parted if _is_positive_number(a) and _is_positive_number(b))
    return len(parted) + len(config.keys() - other.keys()), far


def _is_positive_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and value > 0


def _check_int(name: str, value: Any, least: int) -> int:
    if type(value) is not int or value < least:
        raise ArgumentError(
            f"{name}={value!r} is not a search size", location=user_location(), expected=f"an int from {least}"
        )
    return value


def _check_probability(name: str, value: float) -> float:
    if not 0.0 <= value <= 1.0:
        raise ArgumentError(f"{name}={value!r} is not a rate", location=user_location(), expected="a number in [0, 1]")
    return float(value)


Configuration = Mapping[str, Any]
Constraint = Callable[[Any], bool]
METRICS = ("latency_ms", "latency")
# The sizes that `auto` tries for a constant that is a block size.
AUTO_SIZES = (16, 32, 64, 128)


@dataclass(frozen=True)
class TuningSettings:
    """What an autotuned kernel tries: configurations in order, each measured `samples` times.

    `budget_ms` is the time that measured runs may take in all; at least one configuration is measured. `cache`
    is a file, None for the user's own, or False for none. `search` chooses which are measured, and in which order.
    """

    configs: tuple[Configuration, ...]
    metric: str = "latency_ms"
    budget_ms: float | None = None
    cache: str | Path | bool | None = None
    samples: int = 5
    search: Autotuner = field(default_factory=Autotuner)


@dataclass(frozen=True)
class Trial:
    """One configuration tried: its median latency (or a model's), or why it cannot run; what all its runs took.

    `predicted_ms` is what a model predicted of it, where one ranked what is measured.
    """

    config: Configuration
    latency_ms: float | None = None
    refused: str = ""
    spent_ms: float = 0.0
    predicted_ms: float | None = None


@dataclass(frozen=True)
class Tuned:
    """The best configuration, its latency, the trials, whether it came from the cache, and the model that chose it.

    `model` is "" where the latency is the median of what was measured.
    """

    config: Configuration
    latency_ms: float
    trials: tuple[Trial, ...] = field(default=(), repr=False)
    cached: bool = False
    model: str = ""


def make_settings(
    space: Mapping[str, Sequence[Any]] | ScheduleSpace | Sequence[Configuration] | None = None,
    configs: Iterable[Configuration] | None = None, constraints: Sequence[Constraint] = (),
    metric: str = "latency_ms", budget_ms: float | None = None, cache: str | Path | bool | None = None,
    samples: int = 5, search: Autotuner | None = None,
) -> TuningSettings:  # fmt: skip
    """What to try: `configs` one by one, or every combination of a `space` for which the constraints hold.

    A list of configurations in the place of `space` is `configs`.

    A constraint takes a configuration whose entries are attributes: `lambda c: c.BM * c.BN <= 8192`. `search`
    chooses which are measured (tessera/frontend/kernel/autotuning.py); by default all are, in order.

    Raises:
        ArgumentError: neither or both are given, one is of another type, nothing is left to try, or the metric is
            unknown.
    """
    if (space is None) == (configs is None):
        raise ArgumentError("autotuning takes a space or configs", location=user_location(), expected="one of the two")
    if metric not in METRICS:
        raise ArgumentError(f'"{metric}" is not a metric', location=user_location(), expected=" or ".join(METRICS))
    if samples < 1 or (budget_ms is not None and budget_ms <= 0):
        raise ArgumentError("nothing can be measured", location=user_location(), received=f"{samples=}, {budget_ms=}")
    if space is not None and not isinstance(space, ScheduleSpace) and not space:
        raise ArgumentError(
            "the space has no axis", location=user_location(), expected="a list of values for each constant"
        )
    listed = _list_configurations(space if configs is None else configs)
    left = tuple(c for c in listed if all(holds(SimpleNamespace(**c)) for holds in constraints))
    if not left:
        raise ArgumentError(
            "no configuration is left to try", location=user_location(), received=f"{len(listed)} before"
        )
    return TuningSettings(left, metric, budget_ms, cache, samples, search or Autotuner())


def _list_configurations(space: Any) -> list[dict[str, Any]]:
    """The configurations of a space, or of a list of them."""
    if isinstance(space, ScheduleSpace):
        return [schedule.given for schedule in space]
    if isinstance(space, Iterable) and not isinstance(space, (Mapping, str)):
        space = tuple(space)
        if all(isinstance(c, Mapping) for c in space):
            return [dict(c) for c in space]
    if not isinstance(space, Mapping):
        raise ArgumentError(
            "this is neither a space nor configurations", location=user_location(), received=repr(space),
            expected='a space {"BLOCK": [64, 128]} or configurations [{"BLOCK": 64}, {"BLOCK": 128}]',
        )  # fmt: skip
    values = [v if isinstance(v, (list, tuple, range)) else (v,) for v in space.values()]
    return [dict(zip(space, chosen, strict=True)) for chosen in itertools.product(*values)]


def split_configuration(config: Configuration, constants: Iterable[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A configuration as constants of the kernel, and fields of a schedule for what it has no constant for.

    Raises:
        ArgumentError: an entry is neither.
    """
    own = {k: v for k, v in config.items() if k in constants}
    fields = {}
    for name, value in config.items():
        if name in own:
            continue
        meant = CONSTANT_FIELDS.get(name) or CONSTANT_FIELDS.get(name.lower())
        if meant is None:
            raise ArgumentError(
                f"the kernel has no constant `{name}`, and a schedule no such field", location=user_location(),
                expected=", ".join(sorted(constants)) or "a field of ts.Schedule",
            )  # fmt: skip
        fields[meant[-1]] = value
    return own, fields


def default_space(constants: Iterable[str]) -> dict[str, Sequence[int]]:
    """A few sizes for each block-size constant."""
    blocks = sorted(c for c in constants if any(f.startswith(("block", "tile")) for f in CONSTANT_FIELDS.get(c, ())))
    return {name: AUTO_SIZES for name in blocks}


def default_settings(constants: Iterable[str]) -> TuningSettings | None:
    """The settings of `kernel.auto`; None where no constant is a block size."""
    space = default_space(constants)
    return make_settings(space=space) if space else None

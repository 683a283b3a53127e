"""Searches of autotuning: which configurations are measured, in which order. A search of your own derives Autotuner."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tessera.errors import ArgumentError, here

Config = Mapping[str, Any]
Shapes = Mapping[str, tuple[int, ...]]
_TRIES = 4  # children made for each one wanted


class Autotuner:
    """What chooses the configurations that are measured; this one takes all, in order.

    The tuner calls `begin` once, then `suggest_configs` again and again, until it suggests nothing that has
    not been measured, and `update` after each measurement. A search of your own overrides `suggest_configs`, and
    `update` if it learns. `kernel` is a `tessera.kernel.candidate.Candidates`: every configuration that meets
    the constraints, and what can be counted about each.

    >>> class Cautious(Autotuner):
    ...     def suggest_configs(self, kernel, input_shapes):
    ...         return kernel.configs[:1]
    """

    def begin(self, kernel: Any, input_shapes: Shapes) -> None:
        """A new search begins."""

    def suggest_configs(self, kernel: Any, input_shapes: Shapes) -> Iterable[Config]:
        """The configurations to measure next; those measured already are passed over."""
        return kernel.configs  # type: ignore[no-any-return]

    def update(self, config: Config, performance: float) -> None:
        """A configuration took `performance` milliseconds; infinity where it cannot run."""

    def extract_features(self, kernel: Any, input_shapes: Shapes) -> Any:
        """What a model can learn from: a row of numbers for each configuration (see tessera/kernel/features.py)."""
        return kernel.features()

    @property
    def about(self) -> str:
        """What this search is, in words: results of different searches are kept apart."""
        return f"{type(self).__module__}.{type(self).__qualname__}"


class Guided(Autotuner):
    """Measure only the `keep` configurations that a model of performance predicts to be the fastest.

    >>> from tessera.performance import RooflineModel
    >>> Guided(RooflineModel("H100"), keep=4).about
    'Guided(RooflineModel(H100), keep=4)'
    """

    def __init__(self, model: Any, keep: int = 8) -> None:
        self.model, self.keep = model, _whole("keep", keep, 1)

    def suggest_configs(self, kernel: Any, input_shapes: Shapes) -> Iterable[Config]:
        """The best by the model; of two that are predicted alike the first given."""
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
        self.population_size = _whole("population_size", population_size, 2)
        self.generations = _whole("generations", generations, 1)
        self.mutation_rate, self.crossover_rate = (
            _rate("mutation_rate", mutation_rate),
            _rate("crossover_rate", crossover_rate),
        )
        self.seed = seed
        self.begin(None, {})

    def begin(self, kernel: Any, input_shapes: Shapes) -> None:
        from random import Random  # few programs search

        self._chance = Random(self.seed)
        self._generation = 0
        self._times: dict[Any, float] = {}

    def suggest_configs(self, kernel: Any, input_shapes: Shapes) -> Iterable[Config]:
        """A generation: at first chosen at random, then the children of the fastest so far."""
        configs: Sequence[Config] = kernel.configs
        while self._generation < self.generations:
            self._generation += 1
            born = self._first(configs) if self._generation == 1 else self._born(configs)
            if born:
                return born
        return ()

    def update(self, config: Config, performance: float) -> None:
        self._times[_key(config)] = performance

    def _first(self, configs: Sequence[Config]) -> list[Config]:
        return self._chance.sample(list(configs), min(self.population_size, len(configs)))

    def _born(self, configs: Sequence[Config]) -> list[Config]:
        ran = [c for c in configs if math.isfinite(self._times.get(_key(c), math.inf))]
        parents = sorted(ran, key=lambda c: self._times[_key(c)])[: max(2, self.population_size // 2)]
        if not parents:  # nothing of the last generation could run
            return self._first([c for c in configs if _key(c) not in self._times])
        born: dict[Any, Config] = {}
        for _ in range(_TRIES * self.population_size):  # children often are what was measured already
            child = self._child(parents, configs)
            if _key(child) not in self._times and len(born) < self.population_size:
                born[_key(child)] = child
        return list(born.values())

    def _child(self, parents: Sequence[Config], configs: Sequence[Config]) -> Config:
        first, second = self._chance.choice(parents), self._chance.choice(parents)
        crossed = self._chance.random() < self.crossover_rate
        child = {k: self._chance.choice((first, second)).get(k, v) if crossed else v for k, v in first.items()}
        for name in child:
            if self._chance.random() < self.mutation_rate:
                child[name] = self._chance.choice(configs).get(name, child[name])
        return min(configs, key=lambda c: _distance(c, child))

    @property
    def about(self) -> str:
        rates = f"mutation_rate={self.mutation_rate}, crossover_rate={self.crossover_rate}, seed={self.seed}"
        return f"Evolutionary({self.population_size}, {self.generations}, {rates})"


def _key(config: Config) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((k, repr(v)) for k, v in config.items()))


def _distance(config: Config, other: Config) -> tuple[int, float]:
    """How many entries differ, then by how much: powers of two for numbers."""
    parted = [(config.get(k), v) for k, v in other.items() if config.get(k) != v]
    far = sum(abs(math.log2(a / b)) for a, b in parted if _positive(a) and _positive(b))
    return len(parted) + len(config.keys() - other.keys()), far


def _positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and value > 0


def _whole(name: str, value: Any, least: int) -> int:
    if type(value) is not int or value < least:
        raise ArgumentError(
            f"{name}={value!r} is no size of a search", location=here(), expected=f"an int from {least}"
        )
    return value


def _rate(name: str, value: float) -> float:
    if not 0.0 <= value <= 1.0:
        raise ArgumentError(f"{name}={value!r} is no rate", location=here(), expected="a number in [0, 1]")
    return float(value)

"""Neural architecture search: a controller that learns by reinforcement which ops to choose (Zoph and Le, ICLR 2017).

The controller holds a table of logits, a row for each layer. It is updated by REINFORCE with a moving average of the
rewards as the baseline, and an entropy term that keeps it from deciding too early.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from tessera.core.errors import ArgumentError, user_location

DEFAULT_SPACE = ("conv3x3", "conv5x5", "maxpool")
DEFAULT_LAYERS = 4


@dataclass(frozen=True)
class Architecture:
    """A choice for each decision of a search space; `operations` are the choices in order."""

    choices: tuple[tuple[str, Any], ...]

    @property
    def operations(self) -> tuple[Any, ...]:
        """The choices, in the order of the decisions."""
        return tuple(value for _, value in self.choices)

    def __getitem__(self, name: str) -> Any:
        return dict(self.choices)[name]


class Controller:
    """Samples architectures, and learns from the reward of each.

    `space` maps decisions to their choices, or lists the ops that each of `layers` layers may have. The same seed gives
    the same samples.

    Raises:
        ArgumentError: a decision without choices.

    >>> controller = Controller({"op": ["a", "b"]}, seed=1)
    >>> for _ in range(100):
    ...     architecture = controller.sample()
    ...     controller.update(architecture, 1.0 if architecture["op"] == "b" else 0.0)
    >>> controller.best_architecture()["op"], controller.probabilities()["op"]["b"] > 0.9
    ('b', True)
    """

    def __init__(
        self, space: Mapping[str, Sequence[Any]] | Sequence[Any] = DEFAULT_SPACE, layers: int = DEFAULT_LAYERS,
        learning_rate: float = 0.3, baseline_decay: float = 0.8, entropy: float = 0.01, seed: int = 0,
    ) -> None:  # fmt: skip
        if not isinstance(space, Mapping):
            space = {f"layer{i}": space for i in range(layers)}
        lists = all(isinstance(choices, Iterable) for choices in space.values())
        self.space = {name: tuple(choices) for name, choices in space.items()} if lists else {}
        if not self.space or not all(self.space.values()):
            raise ArgumentError(
                "the search space has a decision without choices", location=user_location(),
                expected='{"op": ["conv3x3", "maxpool"]}', received=repr(space)[:80],
            )  # fmt: skip
        self.learning_rate, self.baseline_decay, self.entropy = learning_rate, baseline_decay, entropy
        self._logits = {name: np.zeros(len(choices)) for name, choices in self.space.items()}
        self._rng = np.random.default_rng(seed)
        self._baseline: float | None = None
        self._best: tuple[float, Architecture] | None = None
        self.history: list[tuple[Architecture, float]] = []

    def probabilities(self) -> dict[str, dict[Any, float]]:
        """The probability of each choice."""
        return {n: dict(zip(self.space[n], _softmax(z).tolist(), strict=True)) for n, z in self._logits.items()}

    def sample(self) -> Architecture:
        """An architecture, drawn from the probabilities."""
        drawn = {n: int(self._rng.choice(len(z), p=_softmax(z))) for n, z in self._logits.items()}
        return Architecture(tuple((n, self.space[n][i]) for n, i in drawn.items()))

    def update(self, architecture: Architecture, reward: float) -> None:
        """Learn from the reward of an architecture, such as its validation accuracy.

        Raises:
            ArgumentError: the reward is not finite, or the architecture is not of this space.
        """
        reward = float(reward)
        if not math.isfinite(reward) or not self._holds(architecture):
            raise ArgumentError(
                "there is nothing to learn", location=user_location(),
                expected="an architecture of this space, and a finite reward", received=f"{architecture!r}, {reward}",
            )  # fmt: skip
        before = reward if self._baseline is None else self._baseline
        self._baseline = self.baseline_decay * before + (1 - self.baseline_decay) * reward
        for name, value in architecture.choices:
            self._step(name, self.space[name].index(value), reward - before)
        self.history.append((architecture, reward))
        if self._best is None or reward > self._best[0]:
            self._best = reward, architecture

    def _holds(self, architecture: Architecture) -> bool:
        names = [n for n, _ in architecture.choices] if isinstance(architecture, Architecture) else []
        return names == list(self.space) and all(v in self.space[n] for n, v in architecture.choices)

    def _step(self, name: str, chosen: int, advantage: float) -> None:
        p = _softmax(self._logits[name])
        gradient = -p * advantage
        gradient[chosen] += advantage
        logs = np.log(np.maximum(p, 1e-12))
        gradient += self.entropy * -p * (logs - (p * logs).sum())  # of the entropy, by the logits
        self._logits[name] = self._logits[name] + self.learning_rate * gradient

    def best_architecture(self) -> Architecture:
        """The architecture with the highest reward so far.

        Raises:
            ArgumentError: nothing was updated yet.
        """
        if self._best is None:
            raise ArgumentError("no architecture has a reward yet", location=user_location(), suggestion="update(...)")
        return self._best[1]


def _softmax(z: np.ndarray) -> np.ndarray:
    e = np.exp(z - z.max())
    return np.asarray(e / e.sum())


def nas(kind: type) -> type:
    """A class with `search(...)`, which gives the best architecture that it finds.

    Raises:
        ArgumentError: it has no `search`.
    """
    if not callable(getattr(kind, "search", None)):
        raise ArgumentError(
            "@ts.nas decorates a class with search(...)", location=user_location(), received=repr(kind)[:80]
        )
    return kind


class _Search(ModuleType):
    """The module, which also decorates classes: `@ts.nas`."""

    def __call__(self, kind: type) -> type:
        """A class of the user."""
        return nas(kind)


sys.modules[__name__].__class__ = _Search

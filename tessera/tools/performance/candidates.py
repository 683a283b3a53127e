"""Tuning candidates: configurations of a kernel with its arguments, and what can be counted, measured and predicted
of each."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from tessera.core.errors import ArgumentError, TesseraError, user_location
from tessera.core.types import GLOBAL, TensorType
from tessera.frontend.kernel.autotuning import SearchConfiguration
from tessera.interp.observers import OBSERVERS
from tessera.ir.core import Module
from tessera.ops.tensor import contractions
from tessera.runtime.launch import streams as launches
from tessera.tools.debug.kernel_tracing import KernelReport
from tessera.tools.debug.profiler import KernelProfile, LaunchCounts

SECTOR = 32  # bytes that global memory moves at once


@dataclass(frozen=True)
class LatencyPrediction:
    """A configuration and the milliseconds that a model predicts; infinity, with why, where it cannot run."""

    config: SearchConfiguration
    latency_ms: float
    refused: str = ""


class Candidate:
    """A kernel in one configuration, with the arguments of one call; nothing is run before it is asked for.

    What is counted comes from running the Tile interpreter once, on copies of the arguments.
    """

    def __init__(self, owner: Candidates, config: SearchConfiguration) -> None:
        self.owner, self.config = owner, config

    @cached_property
    def launch(self) -> Any:
        """The launch in this configuration."""
        held = self.owner.launch
        return replace(held, kernel=held.kernel.configured(self.config))

    @cached_property
    def module(self) -> Module:
        """The Tile module.

        Raises:
            TesseraError: the kernel cannot be compiled so.
        """
        return self.launch.module(*self.owner.args, **self.owner.named)  # type: ignore[no-any-return]

    def _arrays(self) -> list[Any]:
        found = self.launch.kernel.bind(self.owner.args, self.owner.named)
        return [a.copy() if isinstance(a, np.ndarray) else a for a in found.arrays]

    @cached_property
    def report(self) -> KernelReport:
        """What the interpreter counts while it runs the launch once."""
        profile = KernelProfile(places=False)
        token = OBSERVERS.set((profile,))
        try:
            launches.run_module(self.module, self._arrays(), "interp")
        finally:
            OBSERVERS.reset(token)
        return KernelReport(profile.launches[0], "H100")

    @property
    def counts(self) -> LaunchCounts:
        """Operations, bytes, sectors and bank turns of the launch."""
        return self.report.counts

    def count_flops(self) -> int:
        """Floating-point operations of the launch."""
        return self.counts.flops

    def count_memory_bytes(self) -> int:
        """Bytes of global memory that the launch reads and writes."""
        return self.counts.read[GLOBAL] + self.counts.written[GLOBAL]

    def count_moved_bytes(self) -> int:
        """Bytes of the sectors of global memory that are moved for those: more where accesses do not coalesce."""
        return max(self.counts.sectors.taken * SECTOR, self.count_memory_bytes())

    @property
    def groups(self) -> int:
        """The programs of the grid."""
        return math.prod(self.counts.started.grid)

    @property
    def multiplies_matrices(self) -> bool:
        """Whether it has products of 16-bit (or narrower) floats, which matrix units compute."""
        dots = [n for n in self.module.functions[1].body.walk() if n.op is contractions.dot]
        types = [v.type for n in dots for v in n.args[:2] if isinstance(v.type, TensorType)]
        return bool(types) and all(t.dtype.is_float and t.dtype.bits <= 16 for t in types)

    def run(self, config: SearchConfiguration | None = None) -> float:
        """The milliseconds of one run on its target, on copies of the arguments; or of its sibling with `config`."""
        if config is not None and config is not self.config:
            return self.owner.at(config).run()
        arrays, module, target = self._arrays(), self.module, self.launch.kernel.options.target
        start = time.perf_counter()
        launches.run_module(module, arrays, target)
        return (time.perf_counter() - start) * 1e3

    def __repr__(self) -> str:
        return f"<{self.owner.name} with {dict(self.config)}>"


@dataclass(eq=False)
class Candidates:
    """Every configuration of a launch that meets its constraints; `kernel` to searches and models."""

    launch: Any
    args: Sequence[Any]
    named: Mapping[str, Any]
    configs: Sequence[SearchConfiguration]
    _made: dict[Any, Candidate] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The kernel's name."""
        return str(self.launch.kernel.__name__)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the array arguments, by parameter."""
        types = self.launch.kernel.bind(self.args, self.named).types
        return {k: tuple(int(n) for n in t.shape) for k, t in types.items() if getattr(t, "shape", ())}

    def at(self, config: SearchConfiguration) -> Candidate:
        """One configuration.

        Raises:
            ArgumentError: it is none of those to try.
        """
        if config not in self.configs:
            raise ArgumentError(
                f"{dict(config)} is no configuration of {self.name}", location=user_location(),
                expected=f"one of the {len(self.configs)} that meet the constraints, such as {dict(self.configs[0])}",
            )  # fmt: skip
        key = tuple(sorted((k, repr(v)) for k, v in config.items()))
        return self._made.setdefault(key, Candidate(self, config))

    def run(self, config: SearchConfiguration) -> float:
        """Run one configuration once: milliseconds."""
        return self.at(config).run()

    def ranked(self, model: Any) -> list[LatencyPrediction]:
        """Every configuration with what a model predicts, the fastest first; those that cannot run come last."""
        return sorted((self._predicted(model, c) for c in self.configs), key=lambda p: p.latency_ms)

    def _predicted(self, model: Any, config: SearchConfiguration) -> LatencyPrediction:
        try:
            return LatencyPrediction(config, model.latency_ms(self.at(config)))
        except TesseraError as error:
            return LatencyPrediction(config, math.inf, error.message)

    def features(self) -> Features:
        """A row of numbers for each configuration: logarithms of its numbers, and 0 or 1 for each other value."""
        names = sorted({k for c in self.configs for k in c})
        columns = [c for name in names for c in _encode_columns([config.get(name) for config in self.configs])]
        return Features(self.configs, np.array(columns, np.float64).T.reshape(len(self.configs), -1))


@dataclass(frozen=True)
class Features:
    """Configurations and what a model sees of each: one row of `rows` for each."""

    configs: Sequence[SearchConfiguration]
    rows: np.ndarray


def _encode_columns(values: Sequence[Any]) -> list[list[float]]:
    if all(type(v) in (int, float) and v > 0 for v in values):
        return [[math.log2(v) for v in values]]
    kinds = sorted({repr(v) for v in values})
    return [[float(repr(v) == kind) for v in values] for kind in kinds[1:]]

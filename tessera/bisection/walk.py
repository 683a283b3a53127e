"""A program taken through every step of its lowering; what each step gives runs and is held against the bound."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tessera import driver
from tessera.codegen.registry import backend
from tessera.device import INTERP
from tessera.errors import UnsupportedOpError
from tessera.interp.bound import Agreement, compare
from tessera.ir.core import Module
from tessera.ir.verifier import verify
from tessera.lower.pipeline import steps
from tessera.numerics.bounded import Bounded
from tessera.program import Program

WITHIN, OUTSIDE, FAILED, UNCHANGED = "within", "outside", "failed", "unchanged"


@dataclass(frozen=True)
class Step:
    """One step: `make` takes what the step before gave, `run` runs what it made.

    `doubted` is a slow step before it that is taken only where this one goes wrong.
    """

    name: str
    level: str
    make: Callable[[Any], Any]
    run: Callable[[Any, Sequence[Any]], list[np.ndarray]]
    doubted: Step | None = None


@dataclass(frozen=True)
class Given:
    """What is lowered, its arrays, which of those it writes, and where its results must lie."""

    module: Module
    arrays: Sequence[Any]
    written: Sequence[int]
    bounds: Sequence[Bounded]

    @classmethod
    def of(cls, program: Program) -> Given:
        """A program with its bounds.

        Raises:
            UnsupportedOpError: an op has no bound, so that nothing can be judged.
        """
        try:
            bounds = program.bounds()
        except UnsupportedOpError as error:
            error.suggestion = (
                error.suggestion or "without a bound nothing can be judged: bisect a part without this op"
            )
            raise
        return cls(program.levels[program.top], program.arrays, program.written, bounds)


@dataclass(frozen=True)
class Verdict:
    """How a step's results stand against the bound.

    `status` is "within", "outside", "failed" (an error, in `error`) or "unchanged" (the step did nothing). `agreement`
    is of the output that lies worst. `before` and `after` are what the step took and gave.
    """

    step: str
    level: str
    status: str
    output: int = 0
    agreement: Agreement | None = None
    found: float = 0.0
    reference: float = 0.0
    radius: float = 0.0
    error: Exception | None = None
    before: Any = field(default=None, repr=False)
    after: Any = field(default=None, repr=False)

    @property
    def bad(self) -> bool:
        """Whether the step is to blame."""
        return self.status in (OUTSIDE, FAILED)


def walk(program: Program, target: str) -> Iterator[Verdict]:
    """The verdict on each step from the entry point to a target, up to the first that is to blame."""
    given = Given.of(program)
    state: Any = given.module
    for step in way(program.top, target):
        verdict = judged(step, state, given)
        earlier = judged(step.doubted, state, given) if verdict.bad and step.doubted is not None else None
        if earlier is not None:
            yield earlier
        if earlier is None or not earlier.bad:
            yield verdict
        if verdict.bad:
            return
        state = verdict.after


def way(top: str, target: str) -> Iterator[Step]:
    """Every step from the first level of a program to a target's device."""
    yield Step("trace" if top == "graph" else "kernel", top, lambda module: module, _run_module)
    if top == "graph":
        for name, rewrite in steps(driver.plan_for(target)):
            yield Step(name, "", rewrite, _run_module)
    if target != INTERP:
        yield from _of_target(target)


def _run_module(module: Module, arrays: Sequence[Any]) -> list[np.ndarray]:
    return driver.run_level({module.level: module}, module.level, arrays)


def _of_target(target: str) -> Iterator[Step]:
    """The runtime, doubting the text; without the device the text alone, in its interpreter."""
    generator = backend(target)
    text = None
    if hasattr(generator, "interpreter"):
        text = Step(
            f"{target} text", "target", lambda module: generator.emit(module, {}),
            lambda artifact, arrays: generator.interpreter(artifact)(arrays),
        )  # fmt: skip
    if hasattr(generator, "runtime") and getattr(generator, "has_device", True):
        yield Step(
            f"{target} runtime", "device", lambda module: generator.emit(module, {}),
            lambda artifact, arrays: generator.runtime(artifact).run(arrays), doubted=text,
        )  # fmt: skip
    elif text is not None:
        yield text


def judged(step: Step, state: Any, given: Given) -> Verdict:
    """One step, made, verified, run and compared."""
    try:
        made = step.make(state)
        level = step.level or made.level
        if isinstance(made, Module):
            if made is not state and made == state:
                return Verdict(step.name, level, UNCHANGED, before=state, after=made)
            verify(made)
        arrays = [a.copy() if i in given.written else a for i, a in enumerate(given.arrays)]
        results = [*step.run(made, arrays), *(arrays[i] for i in given.written)]
        return _compared(step.name, level, results, given.bounds, state, made)
    except Exception as error:  # a pass under suspicion may fail in any way: that is the finding
        return Verdict(step.name, step.level or state.level, FAILED, error=error, before=state)


def _compared(
    name: str, level: str, results: Sequence[np.ndarray], bounds: Sequence[Bounded], before: Any, after: Any
) -> Verdict:
    found = [compare(r, b) for r, b in zip(results, bounds, strict=True)]
    if not found:
        return Verdict(name, level, WITHIN, before=before, after=after)
    worst = max(range(len(found)), key=lambda i: (not found[i].ok, found[i].worst_share))
    at, status = found[worst].where, WITHIN if found[worst].ok else OUTSIDE
    values = (results[worst], bounds[worst].value, bounds[worst].radius) if bounds[worst].size else (0.0, 0.0, 0.0)
    result, reference, radius = (float(np.asarray(v)[at] if np.ndim(v) else v) for v in values)
    return Verdict(name, level, status, worst, found[worst], result, reference, radius, None, before, after)

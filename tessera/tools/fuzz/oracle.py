"""The oracle of fuzzing: runs a program on every engine and in a variant, within the error bounds of the reference."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np

from conformance.run import Engine, find_checked_engines, find_guarded_engine, judge, list_engines
from tessera.core.errors import ExecutionError, OutOfBoundsError, ResourceError, TesseraError, UnsupportedOpError
from tessera.ir.core import Module
from tessera.runtime.program import PreparedProgram, prepare
from tessera.tools.debug import checked
from tessera.tools.fuzz.programs import PlantedFault, RandomProgram
from tessera.tools.fuzz.variants import NotComparableError, list_variants

UNDECIDED = "a decision rests on a value that rounding may change"


@dataclass(frozen=True)
class Failure:
    """A program that is wrong on one engine: `key` is the same for failures of probably the same cause."""

    engine: str
    detail: str

    @property
    def key(self) -> str:
        """The engine and the failure without numbers, addresses and names of values."""
        said = "wrong values" if self.detail.startswith("output ") else self.detail.splitlines()[0]
        return f"{self.engine}: {re.sub(r'<fuzz[^>]*>:?|0x[0-9a-f]+|[0-9]+', '', said)[:100]}"


@dataclass
class Verdict:
    """What became of one program: its failures, and the outcomes by status."""

    failures: list[Failure] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    modules: tuple[Module, ...] = ()


def list_fuzz_engines(targets: Sequence[str]) -> list[Engine]:
    """The interpreters of all levels, and each target: with guard bytes, or its device, or the emulator of its text."""
    engines = list_engines((), ("graph", "schedule", "tile"))
    for target in targets:
        if target == "interp":
            continue
        guarded = find_guarded_engine(target)
        found = list_engines((target,))
        devices = [guarded] if guarded else [e for e in found if e.level == "device"]
        engines += devices or [e for e in found if e.level == "target"]
    return engines


def examine(program: RandomProgram, engines: Sequence[Engine], seed: int = 0, targets: Sequence[str] = ()) -> Verdict:
    """Run a program on the engines and in variants, some of which run on a target; `seed` draws them."""
    verdict = Verdict()
    try:
        with np.errstate(all="ignore"):
            prepared = prepare(program.load(), program.arguments(), "interp", program.grid, program.group)
            bounds = prepared.bounds()
            if program.is_kernel:
                _run_checked(prepared)
    except Exception as error:  # any exception of the reference is a failure, but one
        status = "undecided" if isinstance(error, TesseraError) and UNDECIDED in str(error) else "fail"
        verdict.outcomes[status] += 1
        if status == "fail":
            verdict.failures.append(Failure("reference", describe_error(error)))
        return verdict
    verdict.modules = tuple(prepared.levels.values())
    for engine in engines:
        if engine.level in prepared.levels or engine.level in ("target", "device"):
            _try(verdict, program, engine.name, lambda e=engine: e.run(prepared), bounds)  # type: ignore[misc]
    for name, run in list_variants(program, prepared, Random(seed), targets):
        _try(verdict, program, name, run, bounds)
    if program.faults:
        _look_for_fault(verdict, program, Random(seed).choice(program.faults), targets)
    return verdict


def _look_for_fault(verdict: Verdict, program: RandomProgram, fault: PlantedFault, targets: Sequence[str]) -> None:
    """A kernel with a fault must be refused, or reported by debug mode; so must its text by that of an emulator."""
    broken = program.break_by(fault)
    engines = [e for t in targets if t.startswith("ptx") for e in find_checked_engines(t)]
    for name, run in [("debug mode", _raise_finding), *((e.name, e.run) for e in engines)]:
        try:
            with np.errstate(all="ignore"):
                run(prepare(broken.load(), broken.arguments(), "interp", broken.grid, broken.group))
            verdict.failures.append(Failure(name, f"does not find {fault.what}:\n{broken.source}"))
        except TesseraError as error:
            found = not isinstance(error, (UnsupportedOpError, ResourceError))
            verdict.outcomes[f"faults found by {name}"] += found
        except Exception as error:
            verdict.failures.append(Failure(name, f"{describe_error(error)}\nfor {fault.what}:\n{broken.source}"))


def _run_checked(prepared: PreparedProgram) -> None:
    """Debug mode must report nothing: generated kernels keep the rules of the memory model."""
    with checked():
        prepared.run("tile")


def _raise_finding(prepared: PreparedProgram) -> None:
    """Raise the first finding of debug mode, which must report what is outside before the interpreter refuses it."""
    try:
        with checked(collect=True) as report:
            prepared.run("tile")
    except OutOfBoundsError as error:
        raise AssertionError(f"debug mode did not report: {error.message}") from error
    for finding in report:
        raise ExecutionError(finding.message, location=finding.location)


def _try(
    verdict: Verdict, program: RandomProgram, name: str, run: Callable[[], list[np.ndarray]], bounds: list[Any]
) -> None:
    try:
        with np.errstate(all="ignore"):
            outcome = judge(program.case("fuzz"), name, run(), bounds)
    except (UnsupportedOpError, ResourceError, NotComparableError):
        verdict.outcomes[f"{name}: unsupported"] += 1
        return
    except Exception as error:  # any exception of an engine under test is a failure
        verdict.outcomes[f"{name}: fail"] += 1
        verdict.failures.append(Failure(name, describe_error(error)))
        return
    verdict.outcomes[f"{name}: {outcome.status}"] += 1
    verdict.outcomes["with elements that have no bound"] += bool(outcome.unbounded) and name == "tile"
    verdict.outcomes["useless bounds"] += outcome.useless and name == "tile"
    if outcome.status == "fail":
        verdict.failures.append(Failure(name, outcome.detail))


def describe_error(error: Exception) -> str:
    """An exception as the detail of a failure."""
    said = error.message if isinstance(error, TesseraError) else str(error)
    return f"{type(error).__name__}: {said}"

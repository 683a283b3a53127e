"""The oracle of fuzzing: runs a program on every engine and in every variant, within the error bounds of the reference.

Variants must not change results (metamorphic relations): the passes of the lowering in a random selection and order,
other tile sizes, a batch of the program, and other schedules of a kernel.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random
from typing import Any

import numpy as np

from conformance.run import Engine, find_guarded_engine, judge, list_engines
from tessera.core.errors import ResourceError, TesseraError, UnsupportedOpError
from tessera.frontend.jit.tracing import Jit
from tessera.interp.tile import interpreter as tile_interpreter
from tessera.ir.core import Module
from tessera.ir.rewrite import eliminate_common_subexpressions, eliminate_dead_code
from tessera.ir.verify import verify
from tessera.lower.lowering_plan import LoweringPlan
from tessera.lower.passes.canonicalisation import canonicalise, sink_widening
from tessera.lower.pipeline import list_steps
from tessera.runtime.program import PreparedProgram, prepare
from tessera.tools.debug import checked
from tessera.tools.fuzz.programs import TESSERA, RandomProgram

UNDECIDED = "a decision rests on a value that rounding may change"
# Passes that may be left out, repeated and reordered before the lowering to Schedule.
OPTIONAL = (canonicalise, eliminate_common_subexpressions, eliminate_dead_code, sink_widening)


@dataclass(frozen=True)
class Failure:
    """A program that is wrong on one engine: `key` is the same for failures of probably the same cause."""

    engine: str
    detail: str

    @property
    def key(self) -> str:
        """The engine and the failure without numbers and names of values."""
        said = "wrong values" if self.detail.startswith("output ") else self.detail.splitlines()[0]
        return f"{self.engine}: {re.sub(r'<fuzz[^>]*>:?|[0-9]+', '', said)[:100]}"


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


def examine(program: RandomProgram, engines: Sequence[Engine], seed: int = 0) -> Verdict:
    """Run a program everywhere; `seed` draws the variants."""
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
            verdict.failures.append(Failure("reference", _describe(error)))
        return verdict
    verdict.modules = tuple(prepared.levels.values())
    for engine in engines:
        if engine.level in prepared.levels or engine.level in ("target", "device"):
            _try(verdict, program, engine.name, lambda e=engine: e.run(prepared), bounds)  # type: ignore[misc]
    for name, run in list_variants(program, prepared, Random(seed)):
        _try(verdict, program, name, run, bounds)
    return verdict


def _run_checked(prepared: PreparedProgram) -> None:
    """Debug mode must report nothing: generated kernels keep the rules of the memory model."""
    with checked():
        prepared.run("tile")


def _try(
    verdict: Verdict, program: RandomProgram, name: str, run: Callable[[], list[np.ndarray]], bounds: list[Any]
) -> None:
    try:
        with np.errstate(all="ignore"):
            outcome = judge(program.case("fuzz"), name, run(), bounds)
    except (UnsupportedOpError, ResourceError):
        verdict.outcomes[f"{name}: unsupported"] += 1
        return
    except Exception as error:  # any exception of an engine under test is a failure
        verdict.outcomes[f"{name}: fail"] += 1
        verdict.failures.append(Failure(name, _describe(error)))
        return
    verdict.outcomes[f"{name}: {outcome.status}"] += 1
    verdict.outcomes["with elements that have no bound"] += bool(outcome.unbounded) and name == "tile"
    verdict.outcomes["useless bounds"] += outcome.useless and name == "tile"
    if outcome.status == "fail":
        verdict.failures.append(Failure(name, outcome.detail))


def _describe(error: Exception) -> str:
    said = error.message if isinstance(error, TesseraError) else str(error)
    return f"{type(error).__name__}: {said}"


Variant = tuple[str, Callable[[], list[np.ndarray]]]


def list_variants(program: RandomProgram, prepared: PreparedProgram, random: Random) -> list[Variant]:
    """Variants of a program whose results must be those of the program: of a function, one drawn at random."""
    if program.is_kernel:
        return [("other constants", partial(_run_other_constants, program, c)) for c in program.variants]
    module = prepared.levels["graph"]
    arrays = list(prepared.arrays)
    # The lowering relies on `canonicalise` to fold reductions of empty axes: it is always one of them.
    passes = [*(random.choice(OPTIONAL) for _ in range(random.randint(0, 4))), canonicalise]
    tiles = LoweringPlan(
        m=random.choice((1, 8, 128)), n=random.choice((2, 16, 128)), k=random.choice((3, 32, 512)),
        whole_k=random.choice((4, 64, 512)), multiple=random.choice((1, 4, 16)), rows=random.choice((1, 64, 8192)),
        row_limit=random.choice((4, 64, 8192)), pointwise=random.choice((4, 64, 8192)), lanes=random.choice((1, 8, 64)),
        result_lanes=random.choice((None, 4, 256)), collapse=random.random() < 0.5, peel=random.random() < 0.5,
        stack_views=random.random() < 0.5, vector_products=random.choice((0, 1, 4)), own_row=random.choice((0, 4096)),
        serial_scans=random.random() < 0.5, parallel=random.choice((None, 528)),
    )  # fmt: skip
    planned = random.random() < 0.5
    found: list[Variant] = [
        ("random passes", lambda: _run_with_passes(module, passes, planned, arrays)),
        ("other tiles", lambda: _run_with_plan(module, tiles, arrays)),
        ("batch", lambda: _run_batch(program)),
    ]
    return [random.choice(found)]


def _run_with_passes(module: Module, passes: Sequence[Any], plan_memory: bool, arrays: list[Any]) -> list[np.ndarray]:
    """Lower with other passes of the Graph level, and without the memory plan if `plan_memory` is false."""
    own = {"simplify", "common subexpressions", "dead code", "sink casts", *(() if plan_memory else ("memory plan",))}
    for name, step in list_steps(LoweringPlan()):
        if name == "simplify":
            for rewrite in passes:
                module = verify(module.replace(rewrite(module.main), *module.functions[1:]))
        if name not in own:
            module = verify(step(module))
    return tile_interpreter.run(module, arrays)


def _run_with_plan(module: Module, plan: LoweringPlan, arrays: list[Any]) -> list[np.ndarray]:
    for _, step in list_steps(plan):
        module = verify(step(module))
    return tile_interpreter.run(module, arrays)


def _run_batch(program: RandomProgram) -> list[np.ndarray]:
    """The program under vmap on two equal lanes: the results of the second."""
    entry = Jit(TESSERA.vmap(program.load().function))
    arguments = {name: np.stack([x, x]) for name, x in program.arguments().items()}
    return [r[1] for r in prepare(entry, arguments).run("graph")]


def _run_other_constants(program: RandomProgram, changed: Any) -> list[np.ndarray]:
    grid, constants = changed
    other = replace(program, grid=grid, constants={**program.constants, **constants})
    return prepare(other.load(), other.arguments(), "interp", other.grid, other.group).run("tile")

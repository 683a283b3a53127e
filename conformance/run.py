"""Run cases on engines: every interpreter level, and every generator's text and runtime."""

from __future__ import annotations

import ast
import io
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from conformance.case import Case, Outcome
from tessera.codegen.contract import find_broken_backends, get_backend, list_backends
from tessera.codegen.coverage import OpCoverage, list_mesh_ops, list_required_ops
from tessera.core.device import INTERP
from tessera.core.errors import ArgumentError, ResourceError, TesseraError, UnsupportedOpError
from tessera.dist.engines import run_ranks
from tessera.dist.ranks import get_rank
from tessera.interp.bound import compare_with_bound
from tessera.runtime.program import ExecutableProgram, PreparedProgram, prepare
from tessera.tools.debug import checked

INTERPRETED = ("graph", "schedule", "tile")


@dataclass(frozen=True)
class Engine:
    """One column: a level's interpreter, a target's text in its emulator, or its runtime."""

    name: str
    level: str
    target: str

    def run(self, program: PreparedProgram) -> list[np.ndarray]:
        """The results of a program on this engine."""
        return program.run(self.level, self.target)


@dataclass(frozen=True)
class GuardedEngine(Engine):
    """A target's runtime with guard bytes around every buffer (the hook `guarded` of its generator)."""

    def run(self, program: PreparedProgram) -> list[np.ndarray]:
        """The results; a write outside a buffer is an OutOfBoundsError."""
        function = get_backend(self.target).guarded(program.emit(self.target))  # type: ignore[attr-defined]
        return ExecutableProgram(program, function)()


@dataclass(frozen=True)
class SanitizedEngine(Engine):
    """A target's text in its emulator's debug mode (the hook `sanitized` of its generator)."""

    def run(self, program: PreparedProgram) -> list[np.ndarray]:
        """The results; a race, a missing wait, barrier or fence, or an access outside a buffer is an error."""
        function = get_backend(self.target).sanitized(program.emit(self.target))  # type: ignore[attr-defined]
        return ExecutableProgram(program, function)()


@dataclass(frozen=True)
class RankEngine(Engine):
    """An engine of which each rank of a case's mesh has one, side by side in this process."""

    inner: Engine
    case: Case

    def run(self, program: PreparedProgram) -> list[np.ndarray]:
        """The results of all ranks, stacked; `program` is that of the whole arguments, which only gives the bounds."""
        if not getattr(self.inner, "communicates", True):
            raise UnsupportedOpError(f"{self.name} runs one rank alone")
        entry, arguments = self.case.entry()

        def run_rank() -> list[np.ndarray]:
            return self.inner.run(prepare(entry, [x[get_rank()] for x in arguments]))

        found = run_ranks(self.case.mesh, run_rank)
        return [np.stack(each) for each in zip(*(found[rank] for rank in sorted(found)), strict=True)]


@runtime_checkable
class ValidatingEngine(Protocol):
    """A column that judges the passes of a lowering itself (`conformance/passes.py`)."""

    name: str

    def validate(self, case: Case, program: PreparedProgram, bounds: Sequence[Any]) -> Outcome:
        """The outcome of a case."""
        ...


def find_guarded_engine(target: str) -> Engine | None:
    """The engine with guard bytes of a target, if its generator has one."""
    generator = get_backend(target)
    return GuardedEngine(f"{target} guarded", "device", target) if hasattr(generator, "guarded") else None


def find_checked_engines(target: str) -> list[Engine]:
    """The engines of a target that check every access: with guard bytes, and in its emulator's debug mode."""
    guarded = find_guarded_engine(target)
    sanitized = hasattr(get_backend(target), "sanitized")
    return [
        *([guarded] if guarded else []),
        *([SanitizedEngine(f"{target} sanitized", "device", target)] if sanitized else []),
    ]


def list_engines(targets: Sequence[str] = (), levels: Sequence[str] = ()) -> list[Engine]:
    """The selected columns; by default all that this machine has."""
    broken = {} if targets else find_broken_backends()
    for name, error in broken.items():
        print(f"left out: the generator {name}\n{error}", file=sys.stderr)
    chosen = list(targets) or sorted(n for n in list_backends() if n not in broken)
    found = [] if targets and not levels else [Engine(n, n, "interp") for n in INTERPRETED if not levels or n in levels]
    for target in chosen:
        generator = get_backend(target)
        if (not levels or "target" in levels) and hasattr(generator, "interpreter"):
            found.append(Engine(f"{target} text", "target", target))
        # Without its device, the runtime of a generator would interpret the text once more.
        device = getattr(generator, "has_device", True)
        if (not levels or targets) and hasattr(generator, "runtime") and device:
            found.append(Engine(target, "device", target))
    return found


def run_case(case: Case, columns: Sequence[Engine]) -> Iterator[Outcome]:
    """One case on every engine."""
    if case.rejects is not None:
        yield from _run_rejected(case, columns)
        return
    try:
        entry, arguments = case.entry()
        entry = entry if case.mesh is None else case.whole
        program = prepare(entry, arguments, "interp", case.grid, case.group, dynamic=case.dynamic)
        with _capture_output(case):
            bounds = program.bounds()
        alike = program.run(program.top) if case.alike else None
        if case.debug:
            with _enable_debug_mode(case):
                program.run("tile")
    except TesseraError as error:
        yield from (Outcome(case.name, e.name, "fail", detail=str(error)) for e in columns)
        return
    for engine in columns:
        if isinstance(engine, ValidatingEngine):
            yield engine.validate(case, program, bounds)
        elif engine.level in program.levels or engine.level in ("target", "device"):
            ranked = engine if case.mesh is None else RankEngine(engine.name, engine.level, engine.target, engine, case)
            yield _run_on_engine(case, ranked, program, bounds, alike)


def _run_on_engine(
    case: Case, engine: Engine, program: PreparedProgram, bounds: list[Any], alike: list[Any] | None
) -> Outcome:
    try:
        with _capture_output(case) as said:
            results = engine.run(program)
        if said is not None and (lines := tuple(said.getvalue().splitlines())) != case.lines:
            return Outcome(case.name, engine.name, "fail", detail="the lines differ: " + "\n".join(lines))
        if alike is not None and [r.tobytes() for r in results] != [w.tobytes() for w in alike]:
            return Outcome(case.name, engine.name, "fail", detail="the bits differ from those of the interpreter")
        return judge(case, engine.name, results, bounds)
    except (UnsupportedOpError, ResourceError) as error:
        missing = _find_missing_ops(engine.target, program, error)
        return Outcome(case.name, engine.name, "unsupported", detail=str(error), missing=missing)
    except Exception as error:  # any exception of an engine under test is an outcome
        return Outcome(case.name, engine.name, "fail", detail=f"{type(error).__name__}: {error}")


def _find_missing_ops(target: str, program: PreparedProgram, error: TesseraError) -> tuple[str, ...]:
    """The ops of a program for which a target has no row: by its coverage where it has one, else by its error."""
    coverage = None if target == INTERP else getattr(get_backend(target), "coverage", None)
    if not isinstance(coverage, OpCoverage):
        return tuple(re.findall(r"cannot emit ([\w.]+)", error.message))
    required = set(list_required_ops()) - set(list_mesh_ops())
    used = {n.op for f in program.levels["tile"].functions[1:] for n in f.body.walk()} & required
    rewritten = {op for op in used for table in coverage.rewritten if op in table}
    return tuple(sorted(op.name for op in used - rewritten if not coverage.emits(op)))


@dataclass(frozen=True)
class MissingOp:
    """An op that a target lacks: the unsupported cases that its row turns green, after those before it in a ranking,
    and those that have it at all."""

    name: str
    green: int
    cases: int


def rank_missing_ops(outcomes: Iterable[Outcome]) -> list[MissingOp]:
    """Rank the missing ops of one engine: each next op turns the most cases green, given the ones before it."""
    wanted = [set(o.missing) for o in outcomes if o.status == "unsupported" and o.missing]
    held = Counter(name for missing in wanted for name in missing)
    ranked: list[MissingOp] = []
    while wanted:
        alone = Counter(name for missing in wanted if len(missing) == 1 for name in missing)
        left = {name for missing in wanted for name in missing}
        best = min(left, key=lambda name: (-alone[name], -held[name], name))
        ranked.append(MissingOp(best, alone[best], held[best]))
        wanted = [missing - {best} for missing in wanted if missing != {best}]
    return ranked


def judge(case: Case, engine: str, results: Sequence[np.ndarray], bounds: Sequence[Any]) -> Outcome:
    """The outcome of the results of an engine: NaNs and infinities must be where the reference has or allows them."""
    detail = ""
    agreements = [compare_with_bound(r, b) for r, b in zip(results, bounds, strict=True)]
    for number, (agreement, result, bound) in enumerate(zip(agreements, results, bounds, strict=True)):
        if not agreement.ok or (agreement.unlike is not None and not case.unknown):
            detail = f"output {number} {agreement}"
        if case.exact and not np.array_equal(np.asarray(result, np.float64), bound.value, equal_nan=True):
            detail = f"output {number} is not equal to the reference"
    return Outcome(
        case.name,
        engine,
        "fail" if detail else "pass",
        max((a.worst_share for a in agreements), default=0.0),
        detail,
        any(a.useless for a in agreements) and not (case.exact or case.alike),  # these are compared for equality
        nans=sum(a.nans for a in agreements),
        infinities=sum(a.infinities for a in agreements),
        unbounded=sum(a.unbounded for a in agreements),
    )


def _capture_output(case: Case) -> AbstractContextManager[io.StringIO | None]:
    """Capture the output of a case that prints."""
    return redirect_stdout(io.StringIO()) if case.lines else nullcontext()


def _enable_debug_mode(case: Case) -> AbstractContextManager[Any]:
    """Debug mode for the cases that need it."""
    return checked() if case.debug else nullcontext()


def _run_rejected(case: Case, columns: Sequence[Engine]) -> Iterator[Outcome]:
    """Run a case that must be refused: when it is made or debugged, for which one engine stands, or on each engine."""
    try:
        entry, arguments = case.entry()
        program = prepare(entry, arguments, "interp", case.grid, case.group, dynamic=case.dynamic)
        if case.debug:
            with _enable_debug_mode(case):
                program.run(program.top)
    except TesseraError as error:
        yield from (_judge_error(case, e, error) for e in columns[:1])
        return
    # A kernel's accesses are checked by interpreters alone: on a target one that lies outside has no meaning.
    levels = (*program.levels, *(("target", "device") if program.top == "graph" else ()))
    for engine in columns[:1] if case.debug else columns:
        if not isinstance(engine, ValidatingEngine) and engine.level in levels:
            yield _run_refused(case, engine, program)


def _run_refused(case: Case, engine: Engine, program: PreparedProgram) -> Outcome:
    try:
        if not case.debug:
            engine.run(program)
    except (UnsupportedOpError, ResourceError) as error:
        return Outcome(case.name, engine.name, "unsupported", detail=str(error))
    except TesseraError as error:
        return _judge_error(case, engine, error)
    return Outcome(case.name, engine.name, "fail", detail=f"no {case.rejects.__name__} was raised")  # type: ignore[union-attr]


def _judge_error(case: Case, engine: Engine, error: TesseraError) -> Outcome:
    wrong = [w for w in case.says if w not in str(error)]
    if isinstance(error, case.rejects or ()) and not wrong:
        return Outcome(case.name, engine.name, "pass")
    return Outcome(case.name, engine.name, "fail", detail=f"the error does not match (without {wrong}):\n{error}")


_WORDS: dict[type, Callable[[Iterable[bool]], bool]] = {ast.And: all, ast.Or: any}


def select_cases(expression: str, cases: Iterable[Case]) -> list[Case]:
    """The cases whose names match: words joined by `and`, `or`, `not`, as in pytest -k."""
    if not expression.strip():
        return list(cases)
    # Case names are not all Python identifiers: quote each word.
    words = [
        w if w in ("and", "or", "not", "(", ")") else repr(w)
        for w in expression.replace("(", " ( ").replace(")", " ) ").split()
    ]
    try:
        tree = ast.parse(" ".join(words), mode="eval").body
    except SyntaxError:
        raise ArgumentError(
            f"-k {expression!r} is not an expression", suggestion='write words with and, or, not: "f32 and not softmax"'
        ) from None
    return [c for c in cases if _holds(tree, c.name)]


def _holds(node: ast.expr, name: str) -> bool:
    if isinstance(node, ast.BoolOp):
        return _WORDS[type(node.op)](_holds(v, name) for v in node.values)
    if isinstance(node, ast.UnaryOp):
        return not _holds(node.operand, name)
    assert isinstance(node, ast.Constant)
    return str(node.value) in name

"""Bisection of a lowering: the first step whose results exceed their bound, and the fewest ops that reproduce it.

The steps are the passes of the lowering, the passes of the target's generator, its text and its runtime. The slice is
found by delta debugging (Zeller and Hildebrandt 2002) over the ops of the Graph program.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from tessera.codegen.contract import get_backend, list_target_passes
from tessera.core.device import INTERP
from tessera.core.errors import UnsupportedOpError
from tessera.interp import bound
from tessera.interp import graph as graph_interpreter
from tessera.interp.bound import BoundAgreement, compare_with_bound
from tessera.interp.tile import interpreter as tile_interpreter
from tessera.ir.core import Block, Function, Module, Node, Value
from tessera.ir.numerics.interval_arithmetic import IntervalArray
from tessera.ir.verify import verify
from tessera.lower.pipeline import list_steps
from tessera.ops.dialects import tile
from tessera.runtime import driver
from tessera.runtime.program import PreparedProgram

# Steps: each gives a module or an artifact, which is verified, run and compared with the bound.


WITHIN, OUTSIDE, FAILED, UNCHANGED = "within", "outside", "failed", "unchanged"


@dataclass(frozen=True)
class LoweringStep:
    """One step: `make` takes what the step before gave, `run` runs what it made.

    `fallback` is a slower step that is taken only where this one fails.
    """

    name: str
    level: str
    make: Callable[[Any], Any]
    run: Callable[[Any, Sequence[Any]], list[np.ndarray]]
    fallback: LoweringStep | None = None


@dataclass(frozen=True)
class BisectInput:
    """The program to lower, its arrays, which of those it writes, and the bounds of its results."""

    module: Module
    arrays: Sequence[Any]
    written: Sequence[int]
    bounds: Sequence[IntervalArray]

    @classmethod
    def of(cls, program: PreparedProgram) -> BisectInput:
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
class StepVerdict:
    """A step's results compared with the bound.

    `status` is "within", "outside", "failed" (an error, in `error`) or "unchanged" (the step did nothing). `agreement`
    is of the worst output. `before` and `after` are what the step took and gave, `path` the steps up to this one, and
    `results` what it computed.
    """

    step: str
    level: str
    status: str
    output: int = 0
    agreement: BoundAgreement | None = None
    found: float = 0.0
    reference: float = 0.0
    radius: float = 0.0
    error: Exception | None = None
    before: Any = field(default=None, repr=False)
    after: Any = field(default=None, repr=False)
    path: tuple[LoweringStep, ...] = field(default=(), repr=False)
    results: tuple[np.ndarray, ...] = field(default=(), repr=False)

    @property
    def bad(self) -> bool:
        """Whether the step is to blame."""
        return self.status in (OUTSIDE, FAILED)


def judge_steps(
    program: PreparedProgram, target: str, options: Mapping[str, Any] = MappingProxyType({})
) -> Iterator[StepVerdict]:
    """The verdict on each step from the entry point to a target, up to the first that is to blame.

    `options` are the generator's.
    """
    given, path = BisectInput.of(program), list[LoweringStep]()
    state: Any = given.module

    def current() -> Any:
        return state

    steps = itertools.chain(
        lowering_steps(program.top, target, options, current, program.choice),
        () if target == INTERP else _target_steps(target, options),
    )
    for step in steps:
        verdict = replace(judge_step(step, state, given), path=(*path, step))
        earlier = None
        if verdict.bad and step.fallback is not None:
            earlier = replace(judge_step(step.fallback, state, given), path=(*path, step.fallback))
        if earlier is not None:
            yield earlier
        if earlier is None or not earlier.bad:
            yield verdict
        if verdict.bad:
            return
        path.append(step)
        state = verdict.after


def judge_passes(
    program: PreparedProgram, target: str, options: Mapping[str, Any], bounds: Sequence[IntervalArray]
) -> Iterator[StepVerdict]:
    """Translation validation (Pnueli, Siegel and Singerman 1998): the verdict on each pass from the entry point to the
    module that a target's text is written from, up to the first that is to blame.

    Each module that differs from the one before is verified and interpreted; `bounds` are those of the results.
    """
    state: Any = program.levels[program.top]
    given, path = BisectInput(state, program.arrays, program.written, bounds), list[LoweringStep]()

    def current() -> Any:
        return state

    for step in lowering_steps(program.top, target, options, current, program.choice):
        verdict = replace(judge_step(step, state, given), path=(*path, step))
        yield verdict
        if verdict.bad:
            return
        path.append(step)
        state = verdict.after


def lowering_steps(
    top: str,
    target: str,
    options: Mapping[str, Any],
    current: Callable[[], Module],
    choice: Mapping[str, Any] = MappingProxyType({}),
) -> Iterator[LoweringStep]:
    """Every pass from the first level of a program to the module that a target's text is written from.

    `current` gives the module that the steps so far have made: once they are done, the one that the generator takes.
    `choice` is the schedule of a tuned function.
    """
    yield LoweringStep("trace" if top == "graph" else "kernel", top, lambda module: module, _run_module)
    if top == "graph":
        for name, rewrite in list_steps(driver.find_plan(target, choice), current().main):
            yield LoweringStep(name, "", rewrite, _run_module)
    if target != INTERP:
        yield from _pass_steps(target, options, current())


def _run_module(module: Module, arrays: Sequence[Any]) -> list[np.ndarray]:
    return driver.run_level({module.level: module}, module.level, arrays)


def _pass_steps(target: str, options: Mapping[str, Any], module: Module) -> Iterator[LoweringStep]:
    """The generator's passes over a Tile module.

    What each gives runs in the Tile interpreter; in debug mode first, where the passes have added asynchronous copies.
    """
    held = _count_copies(module)

    def run(made: Module, arrays: Sequence[Any]) -> list[np.ndarray]:
        if _count_copies(made) > held:
            tile_interpreter.run(made, [np.copy(a) if isinstance(a, np.ndarray) else a for a in arrays], debug=True)
        return tile_interpreter.run(made, arrays)

    for each in list_target_passes(target, module, options):
        yield LoweringStep(each.name, "", each.run, run)


def _count_copies(module: Module) -> int:
    return sum(n.op is tile.async_copy for f in module.functions[1:] for n in f.body.walk())


def _target_steps(target: str, options: Mapping[str, Any]) -> Iterator[LoweringStep]:
    """The runtime, with the text as its fallback; without the device the text alone, in its emulator."""
    generator = get_backend(target)
    text = None
    if hasattr(generator, "interpreter"):
        text = LoweringStep(
            f"{target} text", "target", lambda module: generator.emit(module, options),
            lambda artifact, arrays: generator.interpreter(artifact)(arrays),
        )  # fmt: skip
    if hasattr(generator, "runtime") and getattr(generator, "has_device", True):
        yield LoweringStep(
            f"{target} runtime", "device", lambda module: generator.emit(module, options),
            lambda artifact, arrays: generator.runtime(artifact).run(arrays), fallback=text,
        )  # fmt: skip
    elif text is not None:
        yield text


def judge_step(step: LoweringStep, state: Any, given: BisectInput) -> StepVerdict:
    """One step, made, verified, run and compared."""
    made: Any = None
    try:
        made = step.make(state)
        level = step.level or made.level
        if isinstance(made, Module):
            if not step.level and (made is state or made == state):
                return StepVerdict(step.name, level, UNCHANGED, before=state, after=made)
            verify(made)
        arrays = [a.copy() if i in given.written else a for i, a in enumerate(given.arrays)]
        results = [*step.run(made, arrays), *(arrays[i] for i in given.written)]
        verdict = _compare_with_bounds(step.name, level, results, given.bounds, state, made)
        return replace(verdict, results=tuple(results))
    except Exception as error:  # a faulty pass may fail in any way, and that is the finding
        return StepVerdict(step.name, step.level or state.level, FAILED, error=error, before=state, after=made)


def _compare_with_bounds(
    name: str, level: str, results: Sequence[np.ndarray], bounds: Sequence[IntervalArray], before: Any, after: Any
) -> StepVerdict:
    found = [compare_with_bound(r, b) for r, b in zip(results, bounds, strict=True)]
    if not found:
        return StepVerdict(name, level, WITHIN, before=before, after=after)
    worst = max(range(len(found)), key=lambda i: (not found[i].ok, found[i].worst_share))
    at, status = found[worst].where, WITHIN if found[worst].ok else OUTSIDE
    values = (results[worst], bounds[worst].value, bounds[worst].radius) if bounds[worst].size else (0.0, 0.0, 0.0)
    result, reference, radius = (float(np.asarray(v)[at] if np.ndim(v) else v) for v in values)
    return StepVerdict(name, level, status, worst, found[worst], result, reference, radius, None, before, after)


@dataclass(frozen=True)
class FailingSlice:
    """Ops of a Graph program, their input arrays, and the verdict on the faulty step."""

    function: Function
    arrays: Sequence[Any]
    of: int
    verdict: StepVerdict

    @property
    def ops(self) -> int:
        """The number of ops."""
        return len(self.function.body.nodes)


FailurePredicate = Callable[[Function, Sequence[Any]], "StepVerdict | None"]


def reduce_program(program: PreparedProgram, blamed: StepVerdict) -> FailingSlice | None:
    """The smallest part of a program that a step still gets wrong; None for a kernel, which has no Graph level.

    The search is over the ops of the traced program first, then over the primitives of those that remain.
    """
    if program.top != "graph":
        return None
    steps = blamed.path

    def fails(function: Function, arrays: Sequence[Any]) -> StepVerdict | None:
        verdict = _judge_slice(function, arrays, steps)
        if verdict is None or verdict.status != blamed.status or type(verdict.error) is not type(blamed.error):
            return None
        return verdict

    part = _find_smallest_slice(program.levels["graph"].main, program.arrays, fails)
    if part is None:
        return None
    inner = _find_smallest_slice(_last_graph(part.function, steps), part.arrays, fails)
    return part if inner is None or inner.ops > part.ops else replace(inner, of=part.of)


def _judge_slice(function: Function, arrays: Sequence[Any], steps: Sequence[LoweringStep]) -> StepVerdict | None:
    """The verdict on the last step for a function; None if it has no bound, or if an earlier step fails."""
    try:
        state: Any = Module("graph", (function,))
        given = BisectInput(state, arrays, (), bound.run(function, arrays))
        for step in steps[:-1]:
            state = step.make(state)
    except Exception:  # a slice may show other faults of the steps than the one that is searched
        return None
    return judge_step(steps[-1], state, given)


def _last_graph(function: Function, steps: Sequence[LoweringStep]) -> Function:
    """A function before the first step below the Graph level, or before the last step."""
    module = Module("graph", (function,))
    for step in steps[:-1]:  # the slice has passed all of them before
        made = step.make(module)
        if made.level != "graph":
            break
        module = made
    return module.main


def _find_smallest_slice(function: Function, arrays: Sequence[Any], fails: FailurePredicate) -> FailingSlice | None:
    """Bisect for the last op that is needed, then for the first; None if no slice shows the fault."""
    count = len(function.body.nodes)

    def trial(begin: int, end: int, alone: bool) -> FailingSlice | None:
        taken, given = _extract_slice(function, arrays, begin, end, alone)
        verdict = fails(taken, given)
        return None if verdict is None else FailingSlice(taken, given, count, verdict)

    if count == 0 or trial(0, count, False) is None:
        return None
    low, end = 0, count
    while end - low > 1:
        middle = (low + end) // 2
        low, end = (low, middle) if trial(0, middle, False) is not None else (middle, end)
    alone = trial(0, end, True) is not None
    first, beyond = 0, end
    while beyond - first > 1:
        middle = end - 1 if beyond == end else (first + beyond) // 2  # one op by itself is the likeliest
        first, beyond = (middle, beyond) if trial(middle, end, alone) is not None else (first, middle)
    return trial(first, end, alone)


def _extract_slice(
    function: Function, arrays: Sequence[Any], begin: int, end: int, alone: bool
) -> tuple[Function, list[Any]]:
    """Some nodes as a function of the values that they take from outside; its results are the values used later.

    With `alone` they are the results of the last node.
    """
    nodes = function.body.nodes
    results = nodes[end - 1].results if alone else _used_later(function, begin, end)
    kept = _live_nodes(nodes[begin:end], results)
    made = {v for n in kept for v in n.results}
    wanted = {v for n in kept for v in _values_read(n)} | set(results)
    # Constants are copied, not passed in: a rewrite may depend on them.
    constants = [n for n in nodes[:begin] if not _values_read(n) and not n.op.effects and wanted & set(n.results)]
    made |= {v for n in constants for v in n.results}
    order = [*function.params, *(v for n in nodes[:begin] for v in n.results)]
    params = tuple(v for v in order if v in wanted and v not in made)
    before = Function(function.name, Block(function.params, nodes[:begin], params), function.attrs, function.loc)
    body = Block(params, (*constants, *kept), tuple(results))
    return replace(function, body=body), list(graph_interpreter.run(before, list(arrays)))


def _values_read(node: Node) -> set[Value]:
    return set(node.args).union(*(r.free for r in node.regions))


def _used_later(function: Function, begin: int, end: int) -> list[Value]:
    nodes = function.body.nodes
    later = set(function.results).union(*(_values_read(n) for n in nodes[end:]))
    found = [v for n in nodes[begin:end] for v in n.results if v in later]
    return found or list(nodes[end - 1].results)


def _live_nodes(nodes: Sequence[Node], results: Sequence[Value]) -> list[Node]:
    """Dead-code elimination of a slice; written anew here, since the pass of that name may be the faulty one."""
    live, kept = set(results), []
    for node in reversed(nodes):
        if node.op.effects or not live.isdisjoint(node.results):
            live |= _values_read(node)
            kept.append(node)
    return kept[::-1]


__all__ = ["FailingSlice", "StepVerdict", "reduce_program", "judge_steps"]

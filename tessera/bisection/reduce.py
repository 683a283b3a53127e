"""The smallest run of a program's ops that still shows what a step does wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tessera.bisection.walk import Given, Step, Verdict, judged, way
from tessera.interp import bound
from tessera.interp import graph as graph_interpreter
from tessera.ir.core import Block, Function, Module, Node, Value
from tessera.program import Program


@dataclass(frozen=True)
class Part:
    """Some ops of a Graph program, the arrays that they take, and the verdict on the step that gets them wrong."""

    function: Function
    arrays: Sequence[Any]
    of: int
    verdict: Verdict

    @property
    def ops(self) -> int:
        """How many ops there are."""
        return len(self.function.body.nodes)


Fails = Callable[[Function, Sequence[Any]], "Verdict | None"]


def reduced(program: Program, target: str, blamed: Verdict) -> Part | None:
    """The smallest part of a program that a step still gets wrong; None for a kernel, which has no Graph level.

    The ops of the traced program are searched first; then, in what is left, those that its composites are made of.
    """
    if program.top != "graph":
        return None
    steps = _until(way(program.top, target), blamed.step)

    def fails(function: Function, arrays: Sequence[Any]) -> Verdict | None:
        verdict = _verdict(function, arrays, steps)
        if verdict is None or verdict.status != blamed.status or type(verdict.error) is not type(blamed.error):
            return None
        return verdict

    part = _smallest(program.levels["graph"].main, program.arrays, fails)
    if part is None:
        return None
    inner = _smallest(_last_graph(part.function, steps), part.arrays, fails)
    return part if inner is None or inner.ops > part.ops else replace(inner, of=part.of)


def _until(path: Iterable[Step], name: str) -> list[Step]:
    """The steps up to the one of this name."""
    steps: list[Step] = []
    for step in path:
        steps.append(step.doubted if step.doubted is not None and step.doubted.name == name else step)
        if steps[-1].name == name:
            break
    return steps


def _verdict(function: Function, arrays: Sequence[Any], steps: Sequence[Step]) -> Verdict | None:
    """What the last of the steps makes of a function; None if it cannot be told, or if an earlier one fails."""
    try:
        state: Any = Module("graph", (function,))
        given = Given(state, arrays, (), bound.run(function, arrays))
        for step in steps[:-1]:
            state = step.make(state)
    except Exception:  # a program cut out may meet other faults of steps: not the one that is looked for
        return None
    return judged(steps[-1], state, given)


def _last_graph(function: Function, steps: Sequence[Step]) -> Function:
    """A function as it stands before the first step below Graph, or before the last step."""
    module = Module("graph", (function,))
    for step in steps[:-1]:  # the part has been through all of them before
        made = step.make(module)
        if made.level != "graph":
            break
        module = made
    return module.main


def _smallest(function: Function, arrays: Sequence[Any], fails: Fails) -> Part | None:
    """The last op that is needed by halving, then the first; None if taking the program apart hides what is wrong."""
    count = len(function.body.nodes)

    def trial(begin: int, end: int, alone: bool) -> Part | None:
        taken, given = _cut(function, arrays, begin, end, alone)
        verdict = fails(taken, given)
        return None if verdict is None else Part(taken, given, count, verdict)

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


def _cut(function: Function, arrays: Sequence[Any], begin: int, end: int, alone: bool) -> tuple[Function, list[Any]]:
    """Some nodes as a function of what comes in from outside; its results are what is used later, or the last's."""
    nodes = function.body.nodes
    results = nodes[end - 1].results if alone else _used_later(function, begin, end)
    kept = _needed(nodes[begin:end], results)
    made = {v for n in kept for v in n.results}
    wanted = {v for n in kept for v in _reads(n)} | set(results)
    # Constants are no input: a rewrite may look at them.
    constants = [n for n in nodes[:begin] if not _reads(n) and not n.op.effects and wanted & set(n.results)]
    made |= {v for n in constants for v in n.results}
    order = [*function.params, *(v for n in nodes[:begin] for v in n.results)]
    params = tuple(v for v in order if v in wanted and v not in made)
    before = Function(function.name, Block(function.params, nodes[:begin], params), function.attrs, function.loc)
    body = Block(params, (*constants, *kept), tuple(results))
    return replace(function, body=body), list(graph_interpreter.run(before, list(arrays)))


def _reads(node: Node) -> set[Value]:
    return set(node.args).union(*(r.free for r in node.regions))


def _used_later(function: Function, begin: int, end: int) -> list[Value]:
    nodes = function.body.nodes
    later = set(function.results).union(*(_reads(n) for n in nodes[end:]))
    found = [v for n in nodes[begin:end] for v in n.results if v in later]
    return found or list(nodes[end - 1].results)


def _needed(nodes: Sequence[Node], results: Sequence[Value]) -> list[Node]:
    """The nodes that results rest on, in order; found here, since the pass that does so may be the one at fault."""
    live, kept = set(results), []
    for node in reversed(nodes):
        if node.op.effects or not live.isdisjoint(node.results):
            live |= _reads(node)
            kept.append(node)
    return kept[::-1]

"""`if`: by what is known while compiling, or a ts.if that hands on what its branches assign."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tessera.errors import UnknownNameError, UnsupportedSyntaxError
from tessera.ir.core import Block, Node, Value
from tessera.kernel.expressions import condition
from tessera.kernel.frame import Frame, Unset
from tessera.kernel.join import as_type, join_types
from tessera.kernel.liveness import writes
from tessera.kernel.mutation import fixed
from tessera.kernel.statements import Flow, run, statement
from tessera.ops import control
from tessera.tensor import Tensor

# A name that the node gives a result for, with its value in each branch.
Results = list[tuple[str, list[Tensor]]]
_RESULT = "the returned value"


@dataclass(frozen=True)
class Branch:
    """What one branch recorded and what its names hold at its end."""

    nodes: Sequence[Node]
    names: dict[str, Any]
    flow: Flow


@statement(ast.If)
def _(frame: Frame, node: ast.If) -> Flow | None:
    test = condition(frame, node.test)
    if not isinstance(test, Tensor):
        return run(frame, node.body if test else node.orelse)
    branches = [_branch(frame, node, node.body), _branch(frame, node, node.orelse)]
    returns = any(b.flow is Flow.RETURN for b in branches)
    assigned = (writes(node.body) | writes(node.orelse)) & frame.source.live.after.get(node, frozenset())
    results = _joined(frame, node, [_RESULT] if returns else sorted(assigned), branches)
    _emit(frame, test, branches, results)
    if returns:
        frame.result = frame.names.pop(_RESULT)
        return Flow.RETURN
    return None


def _branch(frame: Frame, node: ast.If, body: Sequence[ast.stmt]) -> Branch:
    before = dict(frame.names)
    with frame.trace.builder.region() as nodes, fixed(frame):
        flow = run(frame, body)
    names, frame.names = frame.names, before
    if flow is Flow.RETURN or node in frame.source.tails:
        names[_RESULT] = frame.result if flow is Flow.RETURN else None
        frame.result = None
    allowed = flow is Flow.NEXT or (flow is Flow.RETURN and node in frame.source.tails)
    if not allowed:
        raise UnsupportedSyntaxError(
            f"{flow.name.lower()} under a condition known only at run time",
            location=frame.place(_leaving(body, flow)),
            suggestion=_INSTEAD[flow],
        )
    return Branch(nodes, names, flow)


_LEAVE = {Flow.BREAK: ast.Break, Flow.CONTINUE: ast.Continue, Flow.RETURN: ast.Return}
_INSTEAD = {
    Flow.BREAK: "use `while` with the condition, or make the rest of the body an `if`",
    Flow.CONTINUE: "make the rest of the body an `if`",
    Flow.RETURN: "set a variable in the branches and return it at the end",
}


def _leaving(body: Sequence[ast.stmt], flow: Flow) -> ast.AST:
    return next(n for s in body for n in ast.walk(s) if isinstance(n, _LEAVE[flow]))


def _joined(frame: Frame, node: ast.If, names: Sequence[str], branches: Sequence[Branch]) -> Results:
    """The names that need a result of the node; the others are settled here."""
    found: Results = []
    for name in names:
        held = [b.names.get(name, _ABSENT) for b in branches]
        if any(h is _ABSENT or isinstance(h, Unset) for h in held):
            frame.names[name] = _unset(frame, node, name, held)
            continue
        sides = held if node.orelse else held[::-1]  # what it was before is what it is expected to be
        type = join_types(name if name == _RESULT else f"`{name}`", *sides)
        if type is None or held[0] is held[1]:
            frame.names[name] = held[0]
        else:
            found.append((name, [as_type(h, type) for h in held]))
    return found


_ABSENT = object()


def _unset(frame: Frame, node: ast.If, name: str, held: list[Any]) -> Unset:
    line = frame.place(node).line
    return Unset(
        UnknownNameError(
            f"`{name}` may have no value here",
            expected=f"a value on both ways through the `if` of line {line}",
            received="a value on one way only" if held[0] is not held[1] else "none",
            suggestion=f"give `{name}` a value before the `if`",
        )
    )


def _emit(frame: Frame, test: Tensor, branches: Sequence[Branch], results: Results) -> None:
    if not results and not any(b.nodes for b in branches):
        return
    regions = []
    for number, branch in enumerate(branches):
        values: tuple[Value, ...] = tuple(pair[number].data for _, pair in results)
        regions.append(Block((), tuple(branch.nodes), values))
    types = tuple(pair[0].type for _, pair in results)
    node = frame.trace.builder.add(control.if_, [test.data], types=types, regions=tuple(regions))
    for (name, _), out in zip(results, node.results, strict=True):
        frame.names[name] = Tensor(out)

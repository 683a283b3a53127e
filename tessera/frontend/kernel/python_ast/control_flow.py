"""Control flow: `if`, `for` and `while`, unrolled while compiling or made structured ops.

Loops and branches on traced values become ts.for, ts.while and ts.if with loop-carried variables (SSA construction).
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tessera.core.errors import DTypeError, TesseraError, UnknownNameError, UnsupportedSyntaxError
from tessera.core.types import TensorType, Type, int64, scalar
from tessera.frontend.kernel.conversions import convert_to_type, is_same_value, join_types
from tessera.frontend.kernel.python_ast import expressions
from tessera.frontend.kernel.python_ast.expressions import bind_target, evaluate_condition, evaluate_operand
from tessera.frontend.kernel.python_ast.scope import KernelFrame, UnboundName, freeze_containers
from tessera.frontend.kernel.python_ast.source import find_writes
from tessera.frontend.kernel.python_ast.statements import ControlFlow, run_statements, statement
from tessera.frontend.kernel.python_ast.unsupported_syntax import unsupported_error
from tessera.frontend.kernel.tile_api.ids import TileRange
from tessera.frontend.kernel.trace import as_index, is_number, is_traced
from tessera.ir.core import Block, Node, Value
from tessera.ir.tensor import Tensor
from tessera.ops.dialects import control_flow

# `if`: a branch at compile time, or a ts.if whose results are the variables that its branches assign.


# A name that the node gives a result for, with its value in each branch.
BranchResults = list[tuple[str, list[Tensor]]]
_RETURN_NAME = "the returned value"


@dataclass(frozen=True)
class TracedBranch:
    """What one branch recorded and what its names hold at its end."""

    nodes: Sequence[Node]
    names: dict[str, Any]
    flow: ControlFlow


@statement(ast.If)
def _(frame: KernelFrame, node: ast.If) -> ControlFlow | None:
    test = evaluate_condition(frame, node.test)
    if not isinstance(test, Tensor):
        return run_statements(frame, node.body if test else node.orelse)
    branches = [_trace_branch(frame, node, node.body), _trace_branch(frame, node, node.orelse)]
    returns = any(b.flow is ControlFlow.RETURN for b in branches)
    assigned = (find_writes(node.body) | find_writes(node.orelse)) & frame.source.live.after.get(node, frozenset())
    results = _join_names(frame, node, [_RETURN_NAME] if returns else sorted(assigned), branches)
    _emit_if(frame, test, branches, results)
    if returns:
        frame.result = frame.names.pop(_RETURN_NAME)
        return ControlFlow.RETURN
    return None


def _trace_branch(frame: KernelFrame, node: ast.If, body: Sequence[ast.stmt]) -> TracedBranch:
    before = dict(frame.names)
    with frame.trace.builder.region() as nodes, freeze_containers(frame):
        flow = run_statements(frame, body)
    names, frame.names = frame.names, before
    if flow is ControlFlow.RETURN or node in frame.source.tails:
        names[_RETURN_NAME] = frame.result if flow is ControlFlow.RETURN else None
        frame.result = None
    allowed = flow is ControlFlow.NEXT or (flow is ControlFlow.RETURN and node in frame.source.tails)
    if not allowed:
        raise UnsupportedSyntaxError(
            f"{flow.name.lower()} under a condition known only at run time",
            location=frame.place(_find_leaving_statement(body, flow)),
            suggestion=_LEAVING_ALTERNATIVES[flow],
        )
    return TracedBranch(nodes, names, flow)


_LEAVING_STATEMENTS = {ControlFlow.BREAK: ast.Break, ControlFlow.CONTINUE: ast.Continue, ControlFlow.RETURN: ast.Return}
_LEAVING_ALTERNATIVES = {
    ControlFlow.BREAK: "use `while` with the condition, or make the rest of the body an `if`",
    ControlFlow.CONTINUE: "make the rest of the body an `if`",
    ControlFlow.RETURN: "set a variable in the branches and return it at the end",
}


def _find_leaving_statement(body: Sequence[ast.stmt], flow: ControlFlow) -> ast.AST:
    return next(n for s in body for n in ast.walk(s) if isinstance(n, _LEAVING_STATEMENTS[flow]))


def _join_names(
    frame: KernelFrame, node: ast.If, names: Sequence[str], branches: Sequence[TracedBranch]
) -> BranchResults:
    """The names that need a result of the node; the others are settled here."""
    found: BranchResults = []
    for name in names:
        held = [b.names.get(name, _MISSING_NAME) for b in branches]
        if any(h is _MISSING_NAME or isinstance(h, UnboundName) for h in held):
            frame.names[name] = _unbound_after_branch(frame, node, name, held)
            continue
        sides = held if node.orelse else held[::-1]  # what it was before is what it is expected to be
        type = join_types(name if name == _RETURN_NAME else f"`{name}`", *sides)
        if type is None or held[0] is held[1]:
            frame.names[name] = held[0]
        else:
            found.append((name, [convert_to_type(h, type) for h in held]))
    return found


_MISSING_NAME = object()


def _unbound_after_branch(frame: KernelFrame, node: ast.If, name: str, held: list[Any]) -> UnboundName:
    line = frame.place(node).line
    return UnboundName(
        UnknownNameError(
            f"`{name}` may have no value here",
            expected=f"a value on both ways through the `if` of line {line}",
            received="a value on one way only" if held[0] is not held[1] else "none",
            suggestion=f"give `{name}` a value before the `if`",
        )
    )


def _emit_if(frame: KernelFrame, test: Tensor, branches: Sequence[TracedBranch], results: BranchResults) -> None:
    if not results and not any(b.nodes for b in branches):
        return
    regions = []
    for number, branch in enumerate(branches):
        values: tuple[Value, ...] = tuple(pair[number].data for _, pair in results)
        regions.append(Block((), tuple(branch.nodes), values))
    types = tuple(pair[0].type for _, pair in results)
    node = frame.trace.builder.add(control_flow.if_, [test.data], types=types, regions=tuple(regions))
    for (name, _), out in zip(results, node.results, strict=True):
        frame.names[name] = Tensor(out)


class LoopCarriedVariables:
    """Names assigned in a loop and read in a later iteration or after it.

    A tensor is carried at its type. A Python number stays a constant of the compiler until an
    iteration changes it; then it takes the type of what it became, and the body is read again.
    Of a list or tuple of tensors each item is carried, as `name[i]`.
    """

    def __init__(self, frame: KernelFrame, node: ast.stmt, names: Sequence[str]) -> None:
        bound = {n: frame.names[n] for n in names if n in frame.names}
        held = {n: v for n, v in bound.items() if not isinstance(v, UnboundName)}
        self.sequences = {n: v for n, v in held.items() if _holds_tensors_alone(v)}
        self.before = self._take_apart(held)
        self.learned: dict[str, TensorType] = frame.trace.learned.setdefault((node, frame.trace.depth), {})
        self.types: dict[str, TensorType] = {n: v.type for n, v in self.before.items() if is_traced(v)}
        self.types |= {n: t for n, t in self.learned.items() if is_number(self.before.get(n))}
        self.settled = False
        self.places = {n.id: frame.place(n) for n in ast.walk(node) if isinstance(n, ast.Name) and _is_stored(n)}

    def _take_apart(self, held: Mapping[str, Any]) -> dict[str, Any]:
        """Values by name, with the items of sequences that have as many of them as before by themselves."""
        found: dict[str, Any] = {}
        for name, value in held.items():
            old = self.sequences.get(name)
            alike = old is not None and type(value) is type(old) and len(value) == len(old)
            found |= {f"{name}[{i}]": v for i, v in enumerate(value)} if alike else {name: value}
        return found

    def _bind(self, frame: KernelFrame, values: Iterable[Value]) -> None:
        """Give the names values, in the order of `types`."""
        found = {n: Tensor(v) for n, v in zip(self.types, values, strict=True)}
        for name, old in self.sequences.items():
            frame.names[name] = type(old)(found.pop(f"{name}[{i}]") for i in range(len(old)))
        frame.names |= found

    def enter(self, frame: KernelFrame) -> tuple[Value, ...]:
        """Fresh parameters, bound to the names, with which an attempt begins."""
        params = tuple(Value(t, n.replace("[", "_").rstrip("]")) for n, t in self.types.items())
        self._bind(frame, params)
        return params

    def leave(self, frame: KernelFrame) -> tuple[Value, ...]:
        """What the names hold after the body; settled if that is what they were taken for."""
        names = dict.fromkeys(n.split("[")[0] for n in self.before)
        now = self._take_apart({n: frame.names.get(n) for n in names})
        found = {n: self._after(n, now) for n in self.before}
        wanted = {n: t for n, t in found.items() if t is not None}
        self.settled = wanted == self.types
        if not self.settled:
            self.types = wanted
            self.learned.update({n: t for n, t in wanted.items() if is_number(self.before[n])})
            return ()
        return tuple(convert_to_type(now[n], t).data for n, t in self.types.items())

    def _after(self, name: str, now: Mapping[str, Any]) -> TensorType | None:
        variable = name.split("[")[0]
        before, after = self.before[name], now.get(name, now.get(variable))
        if isinstance(after, UnboundName):
            raise after.error
        if name not in now:
            raise _sequence_change_error(variable, self.sequences[variable], after).at(self.places[variable])
        if name not in self.types and is_same_value(before, after):
            return None
        if is_number(before) and is_number(after) and name in self.types:
            return self.types[name]
        try:
            return join_types(f"the loop variable `{name}`", before, after)
        except TesseraError as error:
            raise error.at(self.places[variable]) from None

    def initial(self) -> list[Value]:
        """What the names hold before the loop, as operands."""
        return [convert_to_type(self.before[n], t).data for n, t in self.types.items()]

    def result_types(self) -> tuple[Type, ...]:
        """The types of the node's results."""
        return tuple(self.types.values())

    def finish(self, frame: KernelFrame, results: Sequence[Value]) -> None:
        """Bind the names to the node's results."""
        self._bind(frame, results)


def _holds_tensors_alone(value: Any) -> bool:
    return type(value) in (list, tuple) and bool(value) and all(is_traced(v) for v in value)


def _sequence_change_error(name: str, before: Sequence[Any], after: Any) -> DTypeError:
    return DTypeError(
        f"the loop variable `{name}` changes its kind or length",
        expected=f"a {type(before).__name__} of {len(before)}",
        received=f"a {type(after).__name__} of {len(after)}" if isinstance(after, (list, tuple)) else repr(after),
        suggestion="make it as long as it becomes before the loop, or unroll the loop: tile.static_range",
    )


def _is_stored(name: ast.Name) -> bool:
    return isinstance(name.ctx, ast.Store)


UNROLL_LIMIT = 4096
MAX_TYPE_ITERATIONS = 16


@statement(ast.For)
def _(frame: KernelFrame, node: ast.For) -> ControlFlow | None:
    if node.orelse:
        raise unsupported_error(frame, node, "for … else", "set a variable in the loop and test it after")
    items = evaluate_operand(frame, node.iter)
    if isinstance(items, TileRange):
        _trace_for(frame, node, items)
        return None
    if is_traced(items):
        raise UnsupportedSyntaxError(
            "a for loop cannot walk over a block", location=frame.place(node.iter), received=str(items.type),
            suggestion="compute on the whole block at once, or walk over tile.range(n)",
        )  # fmt: skip
    return _unroll(frame, node, iter(items), lambda each: bind_target(frame, node.target, each))


def _unroll(
    frame: KernelFrame, node: ast.For | ast.While, items: Any, bind: Callable[[Any], None]
) -> ControlFlow | None:
    for count, each in enumerate(items):
        if count >= UNROLL_LIMIT:
            raise UnsupportedSyntaxError(
                f"this loop is unrolled while compiling and does not end within {UNROLL_LIMIT} steps",
                location=frame.place(node),
                suggestion="walk over tile.range(n): such a loop runs on the device",
            )
        bind(each)
        flow = run_statements(frame, node.body)
        if flow is ControlFlow.BREAK:
            break
        if flow is ControlFlow.RETURN:
            return flow
    return None


def _trace_for(frame: KernelFrame, node: ast.For, items: TileRange) -> None:
    bounds = [as_index(b).data for b in (items.lower, items.upper, items.step)]
    targets = find_writes([node.target])

    def body(carried: LoopCarriedVariables) -> Block:
        number = Value(scalar(int64), node.target.id if isinstance(node.target, ast.Name) else "i")
        params = carried.enter(frame)
        with frame.trace.builder.region() as nodes:
            bind_target(frame, node.target, items.wrap(Tensor(number)))
            with freeze_containers(frame):
                _run_body(frame, node)
        return Block((number, *params), tuple(nodes), carried.leave(frame))

    carried, block = _find_type_fixpoint(frame, node, targets, body)
    loop = frame.trace.builder.add(
        control_flow.for_, [*bounds, *carried.initial()], types=carried.result_types(), regions=(block,)
    )
    carried.finish(frame, loop.results)
    _unbind_loop_names(frame, node, targets)


@statement(ast.While)
def _(frame: KernelFrame, node: ast.While) -> ControlFlow | None:
    if node.orelse:
        raise unsupported_error(frame, node, "while … else", "test the condition after the loop")
    return _unroll(frame, node, _unroll_while(frame, node), lambda _: None)


def _unroll_while(frame: KernelFrame, node: ast.While) -> Any:
    """A step for each time the condition is known to hold; once it is not known, the rest is one node."""
    builder = frame.trace.builder
    while True:
        with builder.region() as nodes:
            test = evaluate_condition(frame, node.test)
        if is_traced(test):
            _trace_while(frame, node)
            return
        for each in nodes:
            builder.append(each)
        if not test:
            return
        yield None


def _trace_while(frame: KernelFrame, node: ast.While) -> None:
    def test(carried: LoopCarriedVariables) -> Block:
        params = carried.enter(frame)
        with frame.trace.builder.region() as nodes:
            found = evaluate_condition(frame, node.test)
            found = found if isinstance(found, Tensor) else expressions.as_bool_tensor(found)
        return Block(params, tuple(nodes), (found.data,))

    def body(carried: LoopCarriedVariables) -> tuple[Block, Block]:
        condition = test(carried)
        params = carried.enter(frame)
        with frame.trace.builder.region() as nodes, freeze_containers(frame):
            _run_body(frame, node)
        return condition, Block(params, tuple(nodes), carried.leave(frame))

    carried, regions = _find_type_fixpoint(frame, node, frozenset(), body)
    loop = frame.trace.builder.add(
        control_flow.while_, carried.initial(), types=carried.result_types(), regions=regions
    )
    carried.finish(frame, loop.results)
    _unbind_loop_names(frame, node, frozenset())


def _run_body(frame: KernelFrame, node: ast.For | ast.While) -> None:
    """The body, which must not leave the loop."""
    flow = run_statements(frame, node.body)
    if flow in (ControlFlow.BREAK, ControlFlow.RETURN):
        raise UnsupportedSyntaxError(
            f"{flow.name.lower()} out of a loop that runs on the device", location=frame.place(node),
            suggestion="use `while` with the condition, or tile.static_range to unroll",
        )  # fmt: skip


def _find_type_fixpoint(
    frame: KernelFrame, node: ast.For | ast.While, targets: frozenset[str], body: Callable[[LoopCarriedVariables], Any]
) -> Any:
    """The body recorded with types that no iteration changes: again and again until they stay.

    What an attempt recorded is dropped with its region.
    """
    live = frame.source.live.head[node]
    names = sorted((find_writes(node.body) & live) - targets)
    carried = LoopCarriedVariables(frame, node, names)
    before, uncommitted = dict(frame.names), frame.trace.uncommitted
    for _ in range(MAX_TYPE_ITERATIONS):
        regions = body(carried)
        frame.names = dict(before)
        if carried.settled:
            return carried, regions
        frame.trace.uncommitted = uncommitted
    raise AssertionError("the types of a loop's variables do not settle")


def _unbind_loop_names(frame: KernelFrame, node: ast.For | ast.While, targets: frozenset[str]) -> None:
    """After the loop, names it alone assigns may have no value."""
    live = frame.source.live.after.get(node, frozenset())
    for name in (find_writes(node.body) | targets) & live:
        if name in targets or name not in frame.names:
            frame.names[name] = UnboundName(_unbound_after_loop(frame, node, name))


def _unbound_after_loop(frame: KernelFrame, node: ast.For | ast.While, name: str) -> UnknownNameError:
    return UnknownNameError(
        f"`{name}` may have no value here",
        expected="a value also where the loop does not run",
        received=f"one only inside the loop of line {frame.place(node).line}",
        suggestion=f"give `{name}` a value before the loop",
    )

"""`for` and `while`: unrolled by what is known while compiling, or one node with carried variables."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

from tessera.errors import UnknownNameError, UnsupportedSyntaxError
from tessera.ir.core import Block, Value
from tessera.kernel import logic
from tessera.kernel.carried import Carried
from tessera.kernel.expressions import bind_target, condition, operand
from tessera.kernel.frame import Frame, Unset
from tessera.kernel.liveness import writes
from tessera.kernel.mutation import fixed
from tessera.kernel.ranges import Range
from tessera.kernel.statements import Flow, run, statement
from tessera.kernel.trace import as_index, is_traced
from tessera.kernel.unsupported import unsupported
from tessera.ops import control
from tessera.tensor import Tensor
from tessera.types import int64, scalar

UNROLL_LIMIT = 4096
ATTEMPTS = 16


@statement(ast.For)
def _(frame: Frame, node: ast.For) -> Flow | None:
    if node.orelse:
        raise unsupported(frame, node, "for … else", "set a variable in the loop and test it after")
    items = operand(frame, node.iter)
    if isinstance(items, Range):
        _range(frame, node, items)
        return None
    if is_traced(items):
        raise UnsupportedSyntaxError(
            "a for loop cannot walk over a block", location=frame.place(node.iter), received=str(items.type),
            suggestion="compute on the whole block at once, or walk over tile.range(n)",
        )  # fmt: skip
    return _unrolled(frame, node, iter(items), lambda each: bind_target(frame, node.target, each))


def _unrolled(frame: Frame, node: ast.For | ast.While, items: Any, bind: Callable[[Any], None]) -> Flow | None:
    for count, each in enumerate(items):
        if count >= UNROLL_LIMIT:
            raise UnsupportedSyntaxError(
                f"this loop is unrolled while compiling and does not end within {UNROLL_LIMIT} steps",
                location=frame.place(node),
                suggestion="walk over tile.range(n): such a loop runs on the device",
            )
        bind(each)
        flow = run(frame, node.body)
        if flow is Flow.BREAK:
            break
        if flow is Flow.RETURN:
            return flow
    return None


def _range(frame: Frame, node: ast.For, items: Range) -> None:
    bounds = [as_index(b).data for b in (items.lower, items.upper, items.step)]
    targets = writes([node.target])

    def body(carried: Carried) -> Block:
        number = Value(scalar(int64), node.target.id if isinstance(node.target, ast.Name) else "i")
        params = carried.enter(frame)
        with frame.trace.builder.region() as nodes:
            bind_target(frame, node.target, items.wrap(Tensor(number)))
            with fixed(frame):
                _whole(frame, node)
        return Block((number, *params), tuple(nodes), carried.leave(frame))

    carried, block = _settled(frame, node, targets, body)
    loop = frame.trace.builder.add(
        control.for_, [*bounds, *carried.initial()], types=carried.result_types(), regions=(block,)
    )
    carried.finish(frame, loop.results)
    _forget(frame, node, targets)


@statement(ast.While)
def _(frame: Frame, node: ast.While) -> Flow | None:
    if node.orelse:
        raise unsupported(frame, node, "while … else", "test the condition after the loop")
    return _unrolled(frame, node, _steps(frame, node), lambda _: None)


def _steps(frame: Frame, node: ast.While) -> Any:
    """A step for each time the condition is known to hold; once it is not known, the rest is one node."""
    builder = frame.trace.builder
    while True:
        with builder.region() as nodes:
            test = condition(frame, node.test)
        if is_traced(test):
            _while(frame, node)
            return
        for each in nodes:
            builder.append(each)
        if not test:
            return
        yield None


def _while(frame: Frame, node: ast.While) -> None:
    def test(carried: Carried) -> Block:
        params = carried.enter(frame)
        with frame.trace.builder.region() as nodes:
            found = condition(frame, node.test)
            found = found if isinstance(found, Tensor) else logic.constant(found)
        return Block(params, tuple(nodes), (found.data,))

    def body(carried: Carried) -> tuple[Block, Block]:
        condition = test(carried)
        params = carried.enter(frame)
        with frame.trace.builder.region() as nodes, fixed(frame):
            _whole(frame, node)
        return condition, Block(params, tuple(nodes), carried.leave(frame))

    carried, regions = _settled(frame, node, frozenset(), body)
    loop = frame.trace.builder.add(control.while_, carried.initial(), types=carried.result_types(), regions=regions)
    carried.finish(frame, loop.results)
    _forget(frame, node, frozenset())


def _whole(frame: Frame, node: ast.For | ast.While) -> None:
    """The body, which must not leave the loop."""
    flow = run(frame, node.body)
    if flow in (Flow.BREAK, Flow.RETURN):
        raise UnsupportedSyntaxError(
            f"{flow.name.lower()} out of a loop that runs on the device", location=frame.place(node),
            suggestion="use `while` with the condition, or tile.static_range to unroll",
        )  # fmt: skip


def _settled(frame: Frame, node: ast.For | ast.While, targets: frozenset[str], body: Callable[[Carried], Any]) -> Any:
    """The body recorded with types that no iteration changes: again and again until they stay.

    What an attempt recorded is dropped with its region.
    """
    live = frame.source.live.head[node]
    names = sorted((writes(node.body) & live) - targets)
    carried = Carried(frame, node, names)
    before, uncommitted = dict(frame.names), frame.trace.uncommitted
    for _ in range(ATTEMPTS):
        regions = body(carried)
        frame.names = dict(before)
        if carried.settled:
            return carried, regions
        frame.trace.uncommitted = uncommitted
    raise AssertionError("the types of a loop's variables do not settle")


def _forget(frame: Frame, node: ast.For | ast.While, targets: frozenset[str]) -> None:
    """After the loop, names it alone assigns may have no value."""
    live = frame.source.live.after.get(node, frozenset())
    for name in (writes(node.body) | targets) & live:
        if name in targets or name not in frame.names:
            frame.names[name] = Unset(_unset(frame, node, name))


def _unset(frame: Frame, node: ast.For | ast.While, name: str) -> UnknownNameError:
    return UnknownNameError(
        f"`{name}` may have no value here",
        expected="a value also where the loop does not run",
        received=f"one only inside the loop of line {frame.place(node).line}",
        suggestion=f"give `{name}` a value before the loop",
    )

"""Loops, run at compile time, unrolled, or written as Python loops."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from tessera.errors import Location
from tessera.interp.target.csl import syntax as s
from tessera.interp.target.csl import types as t
from tessera.interp.target.csl.faults import fail
from tessera.interp.target.csl.sema.access import dereferenced, element
from tessera.interp.target.csl.sema.coerce import code
from tessera.interp.target.csl.sema.control import body
from tessera.interp.target.csl.sema.frame import ComptimeJump, Frame, Loop, meaning
from tessera.interp.target.csl.sema.operand import VOID, Operand, known, runtime
from tessera.interp.target.csl.sema.operators import boolean

_LOOP_CYCLES = 5


@meaning(s.While)
def _while(f: Frame, node: s.While) -> Operand:
    if f.comptime:
        _while_now(f, node, None)
    elif node.inline:
        _unrolled(f, node.label, node.body, _steps(f, node), node.loc)
    else:
        _while_later(f, node)
    return VOID


def _holds(f: Frame, node: s.While) -> bool:
    with f.evaluating():
        return bool(boolean(f, node.condition).const)


def _while_now(f: Frame, node: s.While, limit: int | None) -> None:
    while _holds(f, node):
        if once(f, node.label, node.body):
            return
        if node.step is not None:
            f.run(node.step)


def once(f: Frame, label: str, node: s.Syntax) -> bool:
    """One iteration at compile time; true if it breaks the loop."""
    try:
        with f.scope():
            f.run(node)
    except ComptimeJump as jump:
        if jump.kind == "return" or (jump.label and jump.label != label):
            raise
        return jump.kind == "break"
    return False


def _steps(f: Frame, node: s.While) -> Iterator[dict[str, Operand]]:
    while _holds(f, node):
        yield {}
        if node.step is not None:
            with f.evaluating():
                f.run(node.step)


def jumps(node: Any) -> bool:
    """Whether a body contains a break or continue."""
    if isinstance(node, s.Jump):
        return True
    if isinstance(node, tuple):
        return any(jumps(item) for item in node)
    if hasattr(node, "__dataclass_fields__") and not isinstance(node, Location):
        return any(jumps(getattr(node, name)) for name in node.__dataclass_fields__)
    return False


def _unrolled(f: Frame, label: str, node: s.Syntax, steps: Iterable[dict[str, Operand]], loc: Location) -> None:
    """An inline loop: its body once for each iteration."""
    if jumps(node):
        outer = Loop(label, "whole")
        body(f, outer, lambda: _iterations(f, label, node, steps, loc, True), loc, "while True:", "break")
    else:
        _iterations(f, label, node, steps, loc, False)


def _iterations(
    f: Frame, label: str, node: s.Syntax, steps: Iterable[dict[str, Operand]], loc: Location, jumping: bool
) -> None:
    for count, names in enumerate(steps, 1):
        if count > f.unit.options.max_inlined_iterations:
            fail(loc, f"exceeded the maximum of {f.unit.options.max_inlined_iterations} inlined iterations")
        with f.scope() as scope:
            scope.update(names)
            if jumping:
                inner = Loop(label, "iteration")
                body(f, inner, lambda: f.run(node), loc, "while True:", "break")
            else:
                f.run(node)


def _while_later(f: Frame, node: s.While) -> None:
    loop = Loop(node.label, "loop")
    step = node.step
    if step is not None:

        def advance() -> None:
            f.run(step)
            f.flush(step.loc)

        loop.step = advance

    def write() -> None:
        f.cost += _LOOP_CYCLES
        condition = boolean(f, node.condition)
        if not (condition.known and condition.const):
            f.emit(f"if not {code(f, condition)}: break", node.loc)
        with f.scope():
            f.run(node.body)
        f.flush(node.loc)
        if loop.step is not None:
            loop.step()

    body(f, loop, write, node.loc, "while True:")


@meaning(s.For)
def _for(f: Frame, node: s.For) -> Operand:
    items = f.operand(node.items)
    if len(node.names) > 2:
        fail(node.loc, f"for loop expects at most 2 names, {len(node.names)} provided")
    if items.type is t.RANGE:
        _for_range(f, node, items)
        return VOID
    if isinstance(items.type, t.Pointee) and isinstance(items.type.element, t.Array):
        items = dereferenced(f, items, node.loc)
    if not isinstance(items.type, t.Array) or len(items.type.dims) != 1:
        fail(node.items.loc, f"type '{items.type}' cannot be iterated")
    _for_array(f, node, items)
    return VOID


def _names(node: s.For, item: Operand, index: Operand) -> dict[str, Operand]:
    return dict(zip(node.names, (item, index), strict=False))


def _for_range(f: Frame, node: s.For, items: Operand) -> None:
    assert items.fields is not None
    type_, bounds = items.fields["type"].const, [items.fields[n] for n in ("start", "stop", "step")]
    if f.comptime or node.inline:
        if not all(o.known for o in bounds):
            fail(node.items.loc, "range is not known at compile time")
        values = range(*(int(o.const) for o in bounds))
        steps = (_names(node, known(type_, v), known(t.U16, i)) for i, v in enumerate(values))
        _now_or_unrolled(f, node, steps)
        return
    name, index = f.fresh(node.names[0]), f.fresh("i")
    names = _names(node, runtime(type_, name), runtime(t.U16, index))
    text = f"range({', '.join(code(f, o) for o in bounds)})"
    _later(f, node, names, f"for {name} in {text}:" if len(names) < 2 else f"for {index}, {name} in enumerate({text}):")


def _now_or_unrolled(f: Frame, node: s.For, steps: Iterable[dict[str, Operand]]) -> None:
    if not f.comptime:
        _unrolled(f, node.label, node.body, steps, node.loc)
        return
    for names in steps:
        with f.scope() as scope:
            scope.update(names)
            if once(f, node.label, node.body):
                return


def _for_array(f: Frame, node: s.For, items: Operand) -> None:
    type_ = items.type
    assert isinstance(type_, t.Array)
    if f.comptime or node.inline:
        steps = (
            _names(node, element(f, items, [known(t.U16, i)], node.loc), known(t.U16, i)) for i in range(type_.count)
        )
        _now_or_unrolled(f, node, steps)
        return
    index = f.fresh("i")
    at = runtime(t.U16, index)
    _later(f, node, _names(node, element(f, items, [at], node.loc), at), f"for {index} in range({type_.count}):")


def _later(f: Frame, node: s.For, names: dict[str, Operand], head: str) -> None:
    def write() -> None:
        f.cost += _LOOP_CYCLES
        with f.scope() as scope:
            scope.update(names)
            f.run(node.body)

    body(f, Loop(node.label, "loop"), write, node.loc, head)

"""Blocks, conditions, switches and jumps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tessera.errors import Location
from tessera.interp.target.csl import syntax as s
from tessera.interp.target.csl import types as t
from tessera.interp.target.csl.faults import fail
from tessera.interp.target.csl.sema.coerce import code, coerce
from tessera.interp.target.csl.sema.frame import ComptimeJump, Frame, Line, Loop, meaning
from tessera.interp.target.csl.sema.operand import VOID, Operand, known, runtime
from tessera.interp.target.csl.sema.operators import boolean, peers

_STATEMENTS = (s.Block, s.Return, s.Assign, s.Jump, s.While, s.For, s.Declare)


@meaning(s.Block)
def _block(f: Frame, node: s.Block) -> Operand:
    if node.label:
        return _labelled_now(f, node) if f.comptime else _labelled(f, node)
    with f.scope():
        for statement in node.body:
            f.run(statement)
    return VOID


def _labelled_now(f: Frame, node: s.Block) -> Operand:
    try:
        with f.scope():
            for statement in node.body:
                f.run(statement)
    except ComptimeJump as jump:
        if jump.kind != "break" or jump.label != node.label:
            raise
        return jump.value or VOID
    return VOID


def _labelled(f: Frame, node: s.Block) -> Operand:
    loop = Loop(node.label, "block")
    loop.result = f.fresh("r")
    body(f, loop, lambda: _statements(f, node.body), node.loc, "while True:", "break")
    if not loop.types:
        return VOID
    type_ = loop.types[0].type
    return runtime(t.F32 if type_ is t.COMPTIME_FLOAT else type_, loop.result, node.loc)


def _statements(f: Frame, nodes: tuple[s.Syntax, ...]) -> None:
    with f.scope():
        for statement in nodes:
            f.run(statement)


def body(f: Frame, loop: Loop, write: Callable[[], None], loc: Location, head: str, tail: str = "") -> None:
    """A Python loop around what `write` writes, and what outer loops need for jumps past this one."""
    f.flush(loc)
    f.loops.append(loop)
    with f.captured() as lines:
        f.emit(head, loc)
        with f.indented():
            write()
            f.flush(loc)
            if tail:
                f.emit(tail, loc)
    f.loops.pop()
    if loop.flag:
        f.emit(f"{loop.flag} = 0", loc)
    f.lines.extend(lines)
    for outer in reversed(f.loops):
        if outer.flag:
            _pass_on(f, outer, loc)


def _pass_on(f: Frame, outer: Loop, loc: Location) -> None:
    """After an inner loop: carry out a jump that it was left for."""
    if outer is not f.loops[-1]:
        f.emit(f"if {outer.flag}: break", loc)
        return
    f.emit(f"if {outer.flag} == 1: break", loc)
    f.emit(f"if {outer.flag} == 2:", loc)
    with f.indented():
        f.emit(f"{outer.flag} = 0", loc)
        _continue(f, outer, loc)


def _continue(f: Frame, loop: Loop, loc: Location) -> None:
    if loop.step is not None:
        loop.step()
    f.emit("continue" if loop.kind == "loop" else "break", loc)


@meaning(s.Jump)
def _jump(f: Frame, node: s.Jump) -> Operand:
    value = f.operand(node.value) if node.value is not None else None
    if f.comptime:
        raise ComptimeJump(node.kind, node.label, value)
    target = _target(f, node)
    if value is not None and value is not VOID:
        if target.types:
            value = coerce(f, value, target.types[0].type, node.loc)
        target.types.append(value)
        f.emit(f"{target.result} = {code(f, value)}", node.loc)
    f.flush(node.loc)
    if target is f.loops[-1]:
        if node.kind == "continue":
            _continue(f, target, node.loc)
        else:
            f.emit("break", node.loc)
        return VOID
    target.flag = target.flag or f.fresh("jump")
    f.emit(f"{target.flag} = {1 if node.kind == 'break' else 2}", node.loc)
    f.emit("break", node.loc)
    return VOID


def _target(f: Frame, node: s.Jump) -> Loop:
    for loop in reversed(f.loops):
        if node.label == loop.label if node.label else loop.kind != "block":
            return loop
    fail(node.loc, f"{node.kind} outside of a loop" if not node.label else f"use of undeclared label '{node.label}'")


@meaning(s.If)
def _if(f: Frame, node: s.If) -> Operand:
    condition = boolean(f, node.condition)
    if condition.known:
        taken = node.then if condition.const else node.other
        return VOID if taken is None else branch(f, taken)
    then = _captured(f, node.then)
    other = _captured(f, node.other) if node.other is not None else (VOID, [], node.loc)
    return choose(f, [(condition.code, *then), ("", *other)], node.loc)


Arm = tuple[str, Operand, list[Line], Location]


def branch(f: Frame, node: s.Syntax) -> Operand:
    """One arm of a condition: a statement gives no value."""
    if isinstance(node, _STATEMENTS) and not (isinstance(node, s.Block) and node.label):
        f.run(node)
        return VOID
    return f.operand(node)


def _captured(f: Frame, node: s.Syntax) -> tuple[Operand, list[Line], Location]:
    cost, f.cost = f.cost, 0
    with f.captured() as lines, f.scope():
        f.depth += 1
        o = branch(f, node)
        if o.type is t.VOID and not o.known:
            f.emit(o.code, node.loc)
            o = VOID
        f.flush(node.loc)
        f.depth -= 1
    f.cost = cost
    return o, lines, node.loc


def choose(f: Frame, arms: list[Arm], loc: Location) -> Operand:
    """Write a chain of conditions; the last has none. Gives the value where the arms have one."""
    valued = [o for _, o, _, _ in arms if o is not VOID]
    f.cost += 3
    if valued:
        type_ = _common(f, valued, loc)
        arms = [(c, o if o is VOID else coerce(f, o, type_, at), lines, at) for c, o, lines, at in arms]
        if not any(lines for _, _, lines, _ in arms) and len(valued) == len(arms):
            return runtime(type_, _conditional(f, arms), loc)
    f.flush(loc)
    name = f.fresh("v") if valued else ""
    for i, (condition, o, lines, at) in enumerate(arms):
        if not condition and not lines and o is VOID:
            continue
        f.emit(f"{'el' if i and condition else ''}{'if ' + condition if condition else 'else'}:", at)
        with f.indented():
            f.lines.extend(lines)
            if o is not VOID:
                f.emit(f"{name} = {code(f, o)}", at)
    return runtime(_common(f, valued, loc), name, loc) if valued else VOID


def _common(f: Frame, valued: list[Operand], loc: Location) -> t.Type:
    first = valued[0]
    for o in valued[1:]:
        first = peers(f, first, o, loc)[0]
    return first.type


def _conditional(f: Frame, arms: list[Arm]) -> str:
    text = code(f, arms[-1][1])
    for condition, o, _, _ in reversed(arms[:-1]):
        text = f"({code(f, o)} if {condition} else {text})"
    return text


@meaning(s.Switch)
def _switch(f: Frame, node: s.Switch) -> Operand:
    subject = f.value(node.subject)
    if subject.known:
        return _switch_now(f, node, subject)
    name = subject.code
    if not name.isidentifier():
        name = f.fresh("v")
        f.emit(f"{name} = {subject.code}", node.loc)
    if all(case.values for case in node.cases) and not _covers(f, node, subject):
        fail(node.loc, "switch must handle all possibilities")
    cases = sorted(node.cases, key=lambda case: not case.values)
    arms: list[Arm] = []
    for case in cases:
        tests = " or ".join(_test(f, name, subject, v) for v in case.values)
        arms.append((tests, *_captured(f, case.body)))
    if arms[-1][0]:
        arms.append(("", VOID, [], node.loc))
    return choose(f, arms, node.loc)


def _covers(f: Frame, node: s.Switch, subject: Operand) -> bool:
    values = [v for case in node.cases for v in case.values]
    kinds: dict[Any, int] = {t.BOOL: 2}
    wanted = len(subject.type.members) if isinstance(subject.type, t.Enum) else kinds.get(subject.type, 0)
    return bool(wanted) and len(values) == wanted


def _label(f: Frame, subject: Operand, node: s.Syntax) -> Operand:
    with f.evaluating():
        return coerce(f, f.value(node), subject.type, node.loc)


def _test(f: Frame, name: str, subject: Operand, value: s.Syntax) -> str:
    if isinstance(value, s.Range):
        first, last = _label(f, subject, value.first), _label(f, subject, value.last)
        return f"{code(f, first)} <= {name} <= {code(f, last)}"
    return f"{name} == {code(f, _label(f, subject, value))}"


def _switch_now(f: Frame, node: s.Switch, subject: Operand) -> Operand:
    other = None
    for case in node.cases:
        if not case.values:
            other = case
        if any(_matches(f, subject, v) for v in case.values):
            return branch(f, case.body)
    if other is None:
        fail(node.loc, "switch must handle all possibilities")
    return branch(f, other.body)


def _matches(f: Frame, subject: Operand, value: s.Syntax) -> bool:
    if isinstance(value, s.Range):
        return bool(_label(f, subject, value.first).const <= subject.const <= _label(f, subject, value.last).const)
    return bool(_label(f, subject, value).const == subject.const)


@meaning(s.TopBlock)
def _comptime_block(f: Frame, node: s.TopBlock) -> Operand:
    with f.evaluating():
        f.run(node.body)
    return VOID


__all__ = ["known"]

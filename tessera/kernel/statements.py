"""Statements: each kind of syntax with its meaning."""

from __future__ import annotations

import ast
import enum
from collections.abc import Callable, Sequence
from typing import Any

from tessera.errors import ArgumentError, UnsupportedSyntaxError
from tessera.kernel import lines
from tessera.kernel.calls import call_statement, closure
from tessera.kernel.checks import assert_
from tessera.kernel.expressions import OPERATORS, evaluate, item, located, operand
from tessera.kernel.frame import Frame
from tessera.kernel.mutation import check_change
from tessera.kernel.place import Place, value
from tessera.kernel.trace import is_traced
from tessera.kernel.unsupported import INSTEAD_OF_ATTRIBUTE, unsupported


class Flow(enum.Enum):
    """What happens after a statement."""

    NEXT = enum.auto()
    BREAK = enum.auto()
    CONTINUE = enum.auto()
    RETURN = enum.auto()


Rule = Callable[[Frame, Any], Flow | None]
RULES: dict[type, Rule] = {}


def statement(*kinds: type) -> Callable[[Rule], Rule]:
    """Give kinds of statement their meaning; None means that the next one follows."""

    def add(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(kinds, rule))
        return rule

    return add


def run(frame: Frame, statements: Sequence[ast.stmt]) -> Flow:
    """Statements in order, until one leaves.

    Raises:
        UnsupportedSyntaxError: the kernel language has no such statement.
    """
    for each in statements:
        rule = RULES.get(type(each))
        if rule is None:
            raise unsupported(frame, each)
        located(frame, each, lines.before)
        flow = located(frame, each, rule)
        lines.after(frame, each)
        if flow not in (None, Flow.NEXT):
            return flow
    return Flow.NEXT


@statement(ast.Pass)
def _(frame: Frame, node: ast.Pass) -> None:
    return None


@statement(ast.Expr)
def _(frame: Frame, node: ast.Expr) -> None:
    if isinstance(node.value, ast.Call):
        located(frame, node.value, call_statement)
    else:
        evaluate(frame, node.value)


@statement(ast.Break)
def _(frame: Frame, node: ast.Break) -> Flow:
    return Flow.BREAK


@statement(ast.Continue)
def _(frame: Frame, node: ast.Continue) -> Flow:
    return Flow.CONTINUE


@statement(ast.Return)
def _(frame: Frame, node: ast.Return) -> Flow:
    found = None if node.value is None else evaluate(frame, node.value)
    # What is returned is the value now, not the place it came from.
    frame.result = tuple(value(v) for v in found) if isinstance(found, tuple) else value(found)
    frame.returned = frame.place(node)
    return Flow.RETURN


@statement(ast.Assert)
def _(frame: Frame, node: ast.Assert) -> None:
    test = operand(frame, node.test)
    if is_traced(test):
        assert_(test, str(evaluate(frame, node.msg)) if node.msg else ast.unparse(node.test))
    elif not test:
        message = evaluate(frame, node.msg) if node.msg else ast.unparse(node.test)
        raise ArgumentError(f"assertion failed: {message}", location=frame.place(node))


@statement(ast.Assign)
def _(frame: Frame, node: ast.Assign) -> None:
    plain = all(isinstance(t, ast.Name) for t in node.targets)
    found = (evaluate if plain else operand)(frame, node.value)
    for target in node.targets:
        assign(frame, target, found)


@statement(ast.AnnAssign)
def _(frame: Frame, node: ast.AnnAssign) -> None:
    if node.value is not None:
        assign(frame, node.target, evaluate(frame, node.value))


@statement(ast.AugAssign)
def _(frame: Frame, node: ast.AugAssign) -> None:
    place = _augmented(frame, node.target)
    before = located(frame, node.target, lambda f, n: value(place))
    found = OPERATORS[type(node.op)](before, operand(frame, node.value))
    if isinstance(place, Place):
        place.store(found)
    else:
        assign(frame, node.target, found)


def _augmented(frame: Frame, target: ast.expr) -> Any:
    if isinstance(target, ast.Name):
        return located(frame, target, lambda f, n: f.find(n.id))
    if isinstance(target, ast.Subscript):
        return located(frame, target, _subscripted)
    raise unsupported(frame, target, "assignment to " + ast.unparse(target), INSTEAD_OF_ATTRIBUTE)


def _subscripted(frame: Frame, target: ast.Subscript) -> Any:
    return item(evaluate(frame, target.value), evaluate(frame, target.slice))


@statement(ast.FunctionDef)
def _(frame: Frame, node: ast.FunctionDef) -> None:
    if node.decorator_list:
        raise unsupported(frame, node.decorator_list[0], "a decorator on an inner function", "decorate it outside")
    frame.names[node.name] = closure(frame, node)


def assign(frame: Frame, target: ast.expr, found: Any) -> None:
    """Give a target its value.

    Raises:
        UnsupportedSyntaxError: it is no name, tuple of names or place in memory.
    """
    rule = _TARGETS.get(type(target))
    if rule is None:
        raise unsupported(frame, target, "assignment to " + ast.unparse(target), INSTEAD_OF_ATTRIBUTE)
    located(frame, target, lambda f, t: rule(f, t, found))


def _name(frame: Frame, target: ast.Name, found: Any) -> None:
    if isinstance(found, Place):
        found.memory.named(target.id)
    # As in NumPy, one element is a value and a slice is a view.
    frame.names[target.id] = value(found) if isinstance(found, Place) and found.is_element else found


def _several(frame: Frame, target: ast.Tuple | ast.List, found: Any) -> None:
    if is_traced(found) or isinstance(found, Place):
        raise UnsupportedSyntaxError(
            "a block cannot be unpacked into names", received=str(found.type), suggestion="load the parts one by one"
        )
    for each in target.elts:
        if isinstance(each, ast.Starred):
            raise unsupported(frame, each)
    parts = list(found)
    if len(parts) != len(target.elts):
        raise ArgumentError(f"{len(parts)} values cannot be given to {len(target.elts)} names")
    for each, part in zip(target.elts, parts, strict=True):
        assign(frame, each, part)


def _place(frame: Frame, target: ast.Subscript, found: Any) -> None:
    base, index = evaluate(frame, target.value), evaluate(frame, target.slice)
    if isinstance(base, (list, dict)) and not is_traced(value(index)):
        check_change(frame.trace, base)
        base[value(index)] = found
        return
    place = item(base, index)
    if not isinstance(place, Place):
        raise UnsupportedSyntaxError(
            "a block of values cannot be assigned to", received=str(getattr(base, "type", type(base).__name__)),
            suggestion="choose elements with tile.where(mask, new, old), or keep them in tile.alloc_register",
        )  # fmt: skip
    place.store(value(found))


_TARGETS: dict[type, Callable[[Frame, Any, Any], None]] = {
    ast.Name: _name,
    ast.Tuple: _several,
    ast.List: _several,
    ast.Subscript: _place,
}

"""Statements: a rule for each kind of Python statement, from assignment to `with`."""

from __future__ import annotations

import ast
import enum
from collections.abc import Callable, Sequence
from typing import Any

from tessera.core.errors import ArgumentError, UnsupportedSyntaxError
from tessera.frontend.kernel.memory_spaces import PrefetchedCopy
from tessera.frontend.kernel.memref import MemRefAccess, load_if_memref
from tessera.frontend.kernel.python_ast import scope
from tessera.frontend.kernel.python_ast.calls import call_statement, make_closure
from tessera.frontend.kernel.python_ast.expressions import (
    OPERATORS,
    apply_at_location,
    evaluate_expression,
    evaluate_operand,
    get_item,
    refuse_pointer_arithmetic,
)
from tessera.frontend.kernel.python_ast.scope import KernelFrame, check_mutation
from tessera.frontend.kernel.python_ast.unsupported_syntax import ATTRIBUTE_ALTERNATIVE, unsupported_error
from tessera.frontend.kernel.tile_api.assertions import assert_
from tessera.frontend.kernel.trace import is_traced

# Statements: each kind of syntax with its meaning.


class ControlFlow(enum.Enum):
    """What happens after a statement."""

    NEXT = enum.auto()
    BREAK = enum.auto()
    CONTINUE = enum.auto()
    RETURN = enum.auto()


StatementRule = Callable[[KernelFrame, Any], ControlFlow | None]
STATEMENT_RULES: dict[type, StatementRule] = {}


def statement(*kinds: type) -> Callable[[StatementRule], StatementRule]:
    """Give kinds of statement their meaning; None means that the next one follows."""

    def add(rule: StatementRule) -> StatementRule:
        STATEMENT_RULES.update(dict.fromkeys(kinds, rule))
        return rule

    return add


def run_statements(frame: KernelFrame, statements: Sequence[ast.stmt]) -> ControlFlow:
    """Statements in order, until one leaves.

    Raises:
        UnsupportedSyntaxError: the kernel language has no such statement.
    """
    for each in statements:
        rule = STATEMENT_RULES.get(type(each))
        if rule is None:
            raise unsupported_error(frame, each)
        apply_at_location(frame, each, scope.mark_statement)
        flow = apply_at_location(frame, each, rule)
        scope.drop_dead_names(frame, each)
        if flow not in (None, ControlFlow.NEXT):
            return flow
    return ControlFlow.NEXT


@statement(ast.Pass)
def _(frame: KernelFrame, node: ast.Pass) -> None:
    return None


@statement(ast.Expr)
def _(frame: KernelFrame, node: ast.Expr) -> None:
    if isinstance(node.value, ast.Call):
        apply_at_location(frame, node.value, call_statement)
    else:
        evaluate_expression(frame, node.value)


@statement(ast.Break)
def _(frame: KernelFrame, node: ast.Break) -> ControlFlow:
    return ControlFlow.BREAK


@statement(ast.Continue)
def _(frame: KernelFrame, node: ast.Continue) -> ControlFlow:
    return ControlFlow.CONTINUE


@statement(ast.Return)
def _(frame: KernelFrame, node: ast.Return) -> ControlFlow:
    found = None if node.value is None else evaluate_expression(frame, node.value)
    # What is returned is the value now, not the place it came from.
    frame.result = tuple(load_if_memref(v) for v in found) if isinstance(found, tuple) else load_if_memref(found)
    frame.returned = frame.place(node)
    return ControlFlow.RETURN


@statement(ast.Assert)
def _(frame: KernelFrame, node: ast.Assert) -> None:
    test = evaluate_operand(frame, node.test)
    if is_traced(test):
        assert_(test, str(evaluate_expression(frame, node.msg)) if node.msg else ast.unparse(node.test))
    elif not test:
        message = evaluate_expression(frame, node.msg) if node.msg else ast.unparse(node.test)
        raise ArgumentError(f"assertion failed: {message}", location=frame.place(node))


@statement(ast.Assign)
def _(frame: KernelFrame, node: ast.Assign) -> None:
    plain = all(isinstance(t, ast.Name) for t in node.targets)
    found = (evaluate_expression if plain else evaluate_operand)(frame, node.value)
    for target in node.targets:
        assign_target(frame, target, found)


@statement(ast.AnnAssign)
def _(frame: KernelFrame, node: ast.AnnAssign) -> None:
    if node.value is not None:
        assign_target(frame, node.target, evaluate_expression(frame, node.value))


@statement(ast.AugAssign)
def _(frame: KernelFrame, node: ast.AugAssign) -> None:
    place = _read_target(frame, node.target)
    before = apply_at_location(frame, node.target, lambda f, n: load_if_memref(place))
    value = evaluate_operand(frame, node.value)
    if isinstance(node.target, ast.Name) and isinstance(place, MemRefAccess) and not place.dtype.is_integer:
        apply_at_location(frame, node, lambda f, n: refuse_pointer_arithmetic(f, n, n.target, value))
    found = OPERATORS[type(node.op)](before, value)
    if isinstance(place, MemRefAccess):
        place.store(found)
    else:
        assign_target(frame, node.target, found)


def _read_target(frame: KernelFrame, target: ast.expr) -> Any:
    if isinstance(target, ast.Name):
        return apply_at_location(frame, target, lambda f, n: f.find(n.id))
    if isinstance(target, ast.Subscript):
        return apply_at_location(frame, target, _read_subscript)
    raise unsupported_error(frame, target, "assignment to " + ast.unparse(target), ATTRIBUTE_ALTERNATIVE)


def _read_subscript(frame: KernelFrame, target: ast.Subscript) -> Any:
    return get_item(evaluate_expression(frame, target.value), evaluate_expression(frame, target.slice))


@statement(ast.FunctionDef)
def _(frame: KernelFrame, node: ast.FunctionDef) -> None:
    if node.decorator_list:
        raise unsupported_error(
            frame, node.decorator_list[0], "a decorator on an inner function", "decorate it outside"
        )
    frame.names[node.name] = make_closure(frame, node)


def assign_target(frame: KernelFrame, target: ast.expr, found: Any) -> None:
    """Give a target its value.

    Raises:
        UnsupportedSyntaxError: it is no name, tuple of names or place in memory.
    """
    rule = _TARGET_RULES.get(type(target))
    if rule is None:
        raise unsupported_error(frame, target, "assignment to " + ast.unparse(target), ATTRIBUTE_ALTERNATIVE)
    apply_at_location(frame, target, lambda f, t: rule(f, t, found))


def _assign_name(frame: KernelFrame, target: ast.Name, found: Any) -> None:
    if isinstance(found, MemRefAccess):
        found.memory.named(target.id)
    # As in NumPy, one element is a value and a slice is a view.
    frame.names[target.id] = load_if_memref(found) if isinstance(found, MemRefAccess) and found.is_element else found


def _unpack(frame: KernelFrame, target: ast.Tuple | ast.List, found: Any) -> None:
    if is_traced(found) or isinstance(found, MemRefAccess):
        raise UnsupportedSyntaxError(
            "a block cannot be unpacked into names", received=str(found.type), suggestion="load the parts one by one"
        )
    for each in target.elts:
        if isinstance(each, ast.Starred):
            raise unsupported_error(frame, each)
    parts = list(found)
    if len(parts) != len(target.elts):
        raise ArgumentError(f"{len(parts)} values cannot be given to {len(target.elts)} names")
    for each, part in zip(target.elts, parts, strict=True):
        assign_target(frame, each, part)


def _assign_subscript(frame: KernelFrame, target: ast.Subscript, found: Any) -> None:
    base, index = evaluate_expression(frame, target.value), evaluate_expression(frame, target.slice)
    if isinstance(base, (list, dict)) and not is_traced(load_if_memref(index)):
        check_mutation(frame.trace, base)
        base[load_if_memref(index)] = found
        return
    place = get_item(base, index)
    if not isinstance(place, MemRefAccess):
        raise UnsupportedSyntaxError(
            "a block of values cannot be assigned to", received=str(getattr(base, "type", type(base).__name__)),
            suggestion="choose elements with tile.where(mask, new, old), or keep them in tile.alloc_register",
        )  # fmt: skip
    place.store(load_if_memref(found))


_TARGET_RULES: dict[type, Callable[[KernelFrame, Any, Any], None]] = {
    ast.Name: _assign_name,
    ast.Tuple: _unpack,
    ast.List: _unpack,
    ast.Subscript: _assign_subscript,
}


@statement(ast.With)
def _(frame: KernelFrame, node: ast.With) -> None:
    before, opened = dict(frame.names), []
    for item in node.items:
        found = evaluate_expression(frame, item.context_expr)
        if not isinstance(found, PrefetchedCopy):
            raise unsupported_error(frame, node)
        opened.append(found)
        frame.names[_with_target_name(frame, item)] = found.view
    if run_statements(frame, node.body) is not ControlFlow.NEXT:
        raise UnsupportedSyntaxError("a `with` is left before its end", location=frame.place(node),
                                     suggestion="make the rest of the body an `if`")  # fmt: skip
    for item, found in zip(node.items, opened, strict=True):
        found.close()
        name = _with_target_name(frame, item)
        frame.names.pop(name, None)
        if name in before:
            frame.names[name] = before[name]


def _with_target_name(frame: KernelFrame, item: ast.withitem) -> str:
    """The name of the copy: as given, or that of what is copied."""
    if isinstance(item.optional_vars, ast.Name):
        return item.optional_vars.id
    call = item.context_expr
    first = call.args[0] if isinstance(call, ast.Call) and call.args else None
    if item.optional_vars is None and isinstance(first, ast.Name):
        return first.id
    raise UnsupportedSyntaxError(
        "the copy has no name", location=frame.place(item.context_expr),
        suggestion="with ts.memory.prefetch(A[m : m + BM, :]) as a:",
    )  # fmt: skip

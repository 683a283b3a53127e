"""Expressions: each kind of syntax with its meaning, applied by running Python's own operators on traced values."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Any

from tessera.errors import ArgumentError, TesseraError, UnsupportedSyntaxError, here
from tessera.kernel import logic
from tessera.kernel.buffers import indexed, shared_list
from tessera.kernel.checks import Text, as_text
from tessera.kernel.frame import Frame, attribute
from tessera.kernel.parts import is_part, part_of
from tessera.kernel.place import Place, View, value
from tessera.kernel.products import product
from tessera.kernel.ranges import Range
from tessera.kernel.subscript import subscript
from tessera.kernel.trace import is_traced
from tessera.kernel.unsupported import unsupported
from tessera.tensor import Tensor

Rule = Callable[[Frame, Any], Any]
RULES: dict[type, Rule] = {}
PYTHON_ERRORS = (TypeError, ValueError, AttributeError, LookupError, ArithmeticError, RecursionError, OSError)


def expression(kind: type) -> Callable[[Rule], Rule]:
    """Give a kind of expression its meaning."""

    def add(rule: Rule) -> Rule:
        RULES[kind] = rule
        return rule

    return add


def evaluate(frame: Frame, node: ast.expr) -> Any:
    """The value of an expression; every node recorded meanwhile carries its place.

    Raises:
        UnsupportedSyntaxError: the kernel language has no such expression.
    """
    rule = RULES.get(type(node))
    if rule is None:
        raise unsupported(frame, node)
    return located(frame, node, rule)


def operand(frame: Frame, node: ast.expr) -> Any:
    """The value of an expression, read from memory if it names a place there."""
    found = evaluate(frame, node)
    return located(frame, node, lambda f, n: value(found)) if isinstance(found, Place) else found


def condition(frame: Frame, node: ast.expr) -> Any:
    """The truth of an expression: a Python bool, or a traced bool scalar."""
    found = operand(frame, node)
    return located(frame, node, lambda f, n: logic.truth(found))


def located(frame: Frame, node: Any, rule: Rule) -> Any:
    """A rule applied with its piece of syntax as the place of nodes and errors."""
    builder = frame.trace.builder
    before, builder.location = builder.location, frame.place(node)
    try:
        return rule(frame, node)
    except TesseraError as error:
        # Ops know only the Python line that is running: the launch.
        if error.location is None or error.location == here():
            error.location = builder.location
        raise
    except PYTHON_ERRORS as error:
        raise ArgumentError(f"{type(error).__name__}: {error}", location=builder.location) from error
    finally:
        builder.location = before


@expression(ast.Constant)
def _(frame: Frame, node: ast.Constant) -> Any:
    return node.value


@expression(ast.Name)
def _(frame: Frame, node: ast.Name) -> Any:
    return frame.find(node.id)


@expression(ast.Attribute)
def _(frame: Frame, node: ast.Attribute) -> Any:
    return attribute(frame, evaluate(frame, node.value), node.attr)


@expression(ast.Tuple)
def _(frame: Frame, node: ast.Tuple) -> Any:
    return tuple(evaluate(frame, e) for e in node.elts)


@expression(ast.List)
def _(frame: Frame, node: ast.List) -> Any:
    return shared_list([evaluate(frame, e) for e in node.elts])


@expression(ast.Dict)
def _(frame: Frame, node: ast.Dict) -> Any:
    if None in node.keys:
        raise unsupported(frame, node, "a dict unpacked with **")
    return {evaluate(frame, k): evaluate(frame, v) for k, v in zip(node.keys, node.values, strict=True) if k}


@expression(ast.Slice)
def _(frame: Frame, node: ast.Slice) -> Any:
    return slice(*(None if part is None else evaluate(frame, part) for part in (node.lower, node.upper, node.step)))


@expression(ast.Subscript)
def _(frame: Frame, node: ast.Subscript) -> Any:
    return item(evaluate(frame, node.value), evaluate(frame, node.slice))


def item(base: Any, index: Any) -> Any:
    """`base[index]`."""
    if isinstance(base, View):
        return subscript(base, index)
    index = value(index)
    if isinstance(base, (list, tuple)) and is_traced(index):
        return indexed(base, index)
    if isinstance(base, (list, tuple, str)) and isinstance(index, slice) and any(map(is_traced, _bounds(index))):
        raise UnsupportedSyntaxError(
            f"a {type(base).__name__} is cut at a place known only at run time", received=repr(base)[:60],
            suggestion="pass an array: np.asarray(...)",
        )  # fmt: skip
    held = value(base)
    return part_of(held, index) if is_part(held, index) else held[index]


def _bounds(index: slice) -> tuple[Any, Any, Any]:
    return value(index.start), value(index.stop), value(index.step)


OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.MatMult: product,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
    ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
}
COMPARISONS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: logic.among,
    ast.NotIn: lambda a, b: logic.negation(logic.among(a, b)),
}
UNARY: dict[type, Callable[[Any], Any]] = {
    ast.USub: operator.neg,
    ast.UAdd: lambda x: x,
    ast.Invert: operator.invert,
    ast.Not: logic.negation,
}


@expression(ast.BinOp)
def _(frame: Frame, node: ast.BinOp) -> Any:
    left, right = operand(frame, node.left), operand(frame, node.right)
    return OPERATORS[type(node.op)](left, right)


@expression(ast.UnaryOp)
def _(frame: Frame, node: ast.UnaryOp) -> Any:
    return UNARY[type(node.op)](operand(frame, node.operand))


@expression(ast.Compare)
def _(frame: Frame, node: ast.Compare) -> Any:
    left = _compared(frame, node.ops[0], node.left)
    result: Any = True
    for kind, each in zip(node.ops, node.comparators, strict=True):
        right = _compared(frame, kind, each)
        found = COMPARISONS[type(kind)](left, right)
        result = found if result is True else logic.both(result, found)
        left = right
    return result


def _compared(frame: Frame, kind: ast.cmpop, node: ast.expr) -> Any:
    # `is` asks about the name itself: a place is never None.
    return (evaluate if isinstance(kind, (ast.Is, ast.IsNot)) else operand)(frame, node)


@expression(ast.BoolOp)
def _(frame: Frame, node: ast.BoolOp) -> Any:
    join = logic.conjunction if isinstance(node.op, ast.And) else logic.disjunction
    result = operand(frame, node.values[0])
    for each in node.values[1:]:
        result = join(frame.trace, result, lambda each=each: operand(frame, each))  # type: ignore[misc]
    return result


@expression(ast.IfExp)
def _(frame: Frame, node: ast.IfExp) -> Any:
    test = condition(frame, node.test)
    if not isinstance(test, Tensor):
        return evaluate(frame, node.body if test else node.orelse)
    branches = (lambda: operand(frame, node.body), lambda: operand(frame, node.orelse))
    return logic.choice(frame.trace, test, *branches)


@expression(ast.JoinedStr)
def _(frame: Frame, node: ast.JoinedStr) -> str | Text:
    parts = [as_text(evaluate(frame, part)) for part in node.values]
    values = tuple(v for p in parts for v in p.values)
    template = "".join(p.template for p in parts)
    return Text(template, values) if values else template.format()


@expression(ast.FormattedValue)
def _(frame: Frame, node: ast.FormattedValue) -> Any:
    found = operand(frame, node.value)
    if is_traced(found):
        if node.format_spec is None and node.conversion == -1:
            return found
        raise UnsupportedSyntaxError(
            "a value of the running program is printed as it is, without a format", received=str(found.type),
            suggestion="leave what follows the `:` or `!` out",
        )  # fmt: skip
    convert: Any = {ord("r"): repr, ord("s"): str, ord("a"): ascii}.get(node.conversion)
    spec = evaluate(frame, node.format_spec) if node.format_spec else ""
    return format(found if convert is None else convert(found), spec)


def _comprehension(frame: Frame, node: ast.ListComp | ast.GeneratorExp) -> list[Any]:
    found: list[Any] = []

    def walk(inner: Frame, rest: list[ast.comprehension]) -> None:
        if not rest:
            found.append(evaluate(inner, node.elt))
            return
        for each in _items(evaluate(inner, rest[0].iter)):
            step = inner.child({})
            bind_target(step, rest[0].target, each)
            if all(evaluate(step, test) for test in rest[0].ifs):
                walk(step, rest[1:])

    walk(frame, node.generators)
    return shared_list(found)


def _items(values: Any) -> Any:
    if isinstance(values, Place) or is_traced(values):
        raise UnsupportedSyntaxError(
            "a comprehension cannot walk over a block", received=str(values.type),
            suggestion="compute on the whole block at once, or walk over tile.static_range(n)",
        )  # fmt: skip
    return values.static() if isinstance(values, Range) else values


def bind_target(frame: Frame, target: ast.expr, found: Any) -> None:
    """Give the names of a target (a name, or a tuple of them) their values."""
    if isinstance(target, ast.Name):
        frame.names[target.id] = found
        return
    if not isinstance(target, (ast.Tuple, ast.List)):
        raise unsupported(frame, target, "this target")
    parts = list(found)
    if len(parts) != len(target.elts):
        raise ArgumentError(f"{len(parts)} values cannot be given to {len(target.elts)} names")
    for name, part in zip(target.elts, parts, strict=True):
        bind_target(frame, name, part)


RULES[ast.ListComp] = RULES[ast.GeneratorExp] = _comprehension

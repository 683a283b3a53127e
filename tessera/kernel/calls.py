"""Calls in a kernel: tile functions, ops, Python's builtins, and the user's functions, read like the kernel."""

from __future__ import annotations

import ast
import inspect
from types import FunctionType
from typing import Any

from tessera.errors import ArgumentError, UnsupportedSyntaxError
from tessera.ir.builder import CURRENT
from tessera.kernel import builtin
from tessera.kernel.expressions import evaluate, expression
from tessera.kernel.frame import Frame, Outer
from tessera.kernel.marks import TAKES_PLACES, UPDATES_FIRST, interpreted
from tessera.kernel.mutation import check_call
from tessera.kernel.place import Place, value
from tessera.kernel.source import Source, read, source_of
from tessera.kernel.trace import Trace, current, is_number, is_traced, known
from tessera.kernel.unsupported import refuse, unsupported
from tessera.op import Op
from tessera.ops import arithmetic, elementwise, functions, numpy_protocol

DEPTH_LIMIT = 50
_OUTSIDE = ("math", "numpy")
_OTHERWISE = {"fabs": "abs"}  # functions of `math` whose ops have another name


@expression(ast.Call)
def _(frame: Frame, node: ast.Call) -> Any:
    return _called(frame, node)[2]


def call_statement(frame: Frame, node: ast.Call) -> None:
    """A call whose value is not used; some functions then update the variable given first."""
    function, args, result = _called(frame, node)
    first = node.args[0] if node.args else None
    if _among(function, UPDATES_FIRST) and isinstance(first, ast.Name) and UPDATES_FIRST[function] in (None, len(args)):
        frame.names[first.id] = result


def _called(frame: Frame, node: ast.Call) -> tuple[Any, list[Any], Any]:
    for arg in node.args:
        if isinstance(arg, ast.Starred):
            raise unsupported(frame, arg)
    if any(k.arg is None for k in node.keywords):
        raise unsupported(frame, node, "** in a call", "name the arguments one by one")
    function = evaluate(frame, node.func)
    args = [evaluate(frame, a) for a in node.args]
    named = {k.arg: evaluate(frame, k.value) for k in node.keywords if k.arg}
    return function, args, call(frame.trace, function, args, named)


def call(trace: Trace, function: Any, args: list[Any], named: dict[str, Any]) -> Any:
    """A function applied as a kernel applies it."""
    if _among(function, TAKES_PLACES):
        return function(*args, **named)
    if isinstance(function, Closure):
        return function(*args, **named)
    body = interpreted(function, [*args, *named.values()])
    if body is not None:
        return inline(trace, body, args, named)
    args, named = [_read(a) for a in args], {k: _read(v) for k, v in named.items()}
    if _among(function, builtin.RULES):
        return builtin.RULES[function](*args, **named)
    if isinstance(function, Op) and all(is_number(a) for a in args) and args:
        return _number(function, args, named)
    return _native(function, args, named)


def _among(function: Any, table: Any) -> bool:
    try:
        return function in table
    except TypeError:  # not hashable
        return False


def _read(argument: Any) -> Any:
    if isinstance(argument, (list, tuple)) and any(isinstance(a, Place) for a in argument):
        return type(argument)(value(a) for a in argument)
    return value(argument)


def _number(op: Op, args: list[Any], named: dict[str, Any]) -> Any:
    """An op of Python numbers is a Python number: it takes the type of what it meets later."""
    token = CURRENT.set(None)
    try:
        return op(*args, **named).item()
    finally:
        CURRENT.reset(token)


def _native(function: Any, args: list[Any], named: dict[str, Any]) -> Any:
    refuse(function)
    check_call(current(), function)
    module = (getattr(function, "__module__", None) or "").partition(".")[0]
    if isinstance(function, Op) or module not in _OUTSIDE or not any(is_traced(a) for a in (*args, *named.values())):
        return known(function(*args, **named))
    name = getattr(function, "__name__", repr(function))
    op = _counterpart(function, name)
    if op is not None:
        return op(*args, **named)
    raise UnsupportedSyntaxError(
        f"{name} cannot run on a value known only at run time",
        expected="a ts or tile function",
        received=next(str(a.type) for a in (*args, *named.values()) if is_traced(a)),
    )


def _counterpart(function: Any, name: str) -> Any:
    """The op that does on values of the run what a function of NumPy or `math` does on numbers; None: there is none."""
    for table in (numpy_protocol.UFUNCS, numpy_protocol.FUNCTIONS):
        if _among(function, table):
            return table[function]
    own = [getattr(module, _OTHERWISE.get(name, name), None) for module in (elementwise, functions, arithmetic)]
    return next((op for op in own if isinstance(op, Op)), None)


def inline(trace: Trace, function: FunctionType, args: list[Any], named: dict[str, Any]) -> Any:
    """A user's function, read into the kernel that calls it."""
    args, named = [_element(a) for a in args], {k: _element(v) for k, v in named.items()}
    names = _bound(inspect.signature(function), function.__name__, args, named)
    return _run(trace, Frame(trace, read(function), names, Outer(function, trace)))


def _element(argument: Any) -> Any:
    """One element of memory is handed over as the value it has now."""
    return argument.load() if isinstance(argument, Place) and argument.is_element else argument


def _bound(signature: inspect.Signature, name: str, args: list[Any], named: dict[str, Any]) -> dict[str, Any]:
    try:
        bound = signature.bind(*args, **named)
    except TypeError as error:
        raise ArgumentError(f"{name}: {error}", expected=f"{name}{signature}") from None
    bound.apply_defaults()
    return dict(bound.arguments)


def _run(trace: Trace, frame: Frame) -> Any:
    from tessera.kernel.statements import run

    if trace.depth >= DEPTH_LIMIT:
        raise UnsupportedSyntaxError(f"{frame.source.name} calls itself without end", location=frame.source.place)
    trace.depth += 1
    try:
        run(frame, frame.source.body)
    finally:
        trace.depth -= 1
    return frame.result


class Closure:
    """A lambda or inner function of a kernel."""

    def __init__(self, frame: Frame, source: Source, signature: inspect.Signature) -> None:
        self.frame = frame
        self.source = source
        self.signature = signature

    def __call__(self, *args: Any, **named: Any) -> Any:
        names = _bound(self.signature, self.source.name, list(args), named)
        return _run(current(), self.frame.child(names, self.source))


@expression(ast.Lambda)
def _(frame: Frame, node: ast.Lambda) -> Closure:
    body = ast.copy_location(ast.Return(node.body), node.body)
    definition = ast.FunctionDef("lambda", node.args, [body], [], lineno=node.lineno, col_offset=node.col_offset)
    return closure(frame, definition)


def closure(frame: Frame, node: ast.FunctionDef) -> Closure:
    """The value of an inner definition."""
    source = source_of(node, frame.source.file, frame.source.shift)
    return Closure(frame, source, _signature(frame, node))


def _signature(frame: Frame, node: ast.FunctionDef) -> inspect.Signature:
    arguments = node.args
    if arguments.vararg or arguments.kwarg:
        raise UnsupportedSyntaxError(
            "an inner function takes no *args or **kwargs", location=frame.place(node),
            suggestion="name each parameter, or take a tuple",
        )  # fmt: skip
    kinds = inspect.Parameter
    positional = (*arguments.posonlyargs, *arguments.args)
    listed: list[tuple[str, Any]] = [(a.arg, kinds.POSITIONAL_OR_KEYWORD) for a in positional]
    defaults: list[ast.expr | None] = [None] * (len(listed) - len(arguments.defaults)) + list(arguments.defaults)
    listed += [(a.arg, kinds.KEYWORD_ONLY) for a in arguments.kwonlyargs]
    return inspect.Signature(
        [
            kinds(name, kind, default=kinds.empty if default is None else evaluate(frame, default))
            for (name, kind), default in zip(listed, [*defaults, *arguments.kw_defaults], strict=True)
        ]
    )

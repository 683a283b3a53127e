"""Calls: tile functions, ops, Python's builtins, and the user's functions, which are inlined from source."""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Callable
from contextlib import nullcontext
from types import FunctionType
from typing import Any

from tessera.core.errors import ArgumentError, UnsupportedSyntaxError
from tessera.core.symbolic_dim import compare_for_program
from tessera.core.types import DType, bool_, f32, int64
from tessera.frontend.kernel.memref import TAKES_MEMREFS, UPDATES_FIRST, MemRefAccess, find_inlinable, load_if_memref
from tessera.frontend.kernel.python_ast.expressions import evaluate_expression, expression
from tessera.frontend.kernel.python_ast.scope import KernelFrame, OuterScope, check_mutating_call, pause
from tessera.frontend.kernel.python_ast.source import FunctionSource, make_inner_source, read_source
from tessera.frontend.kernel.python_ast.unsupported_syntax import refuse_function, unsupported_error
from tessera.frontend.kernel.tile_api.assertions import print_
from tessera.frontend.kernel.tile_api.ids import tile_range
from tessera.frontend.kernel.trace import TraceState, current_trace, is_number, is_traced, normalise_constant
from tessera.ir.builder import CURRENT_BUILDER
from tessera.ir.rules import Op
from tessera.ops.api import numpy_protocol
from tessera.ops.tensor import elementwise, reduce, scalar_functions
from tessera.ops.tensor.basic import cast

# Python's builtin functions on values known only at run time.


AnyFunction = Callable[..., Any]


def _make_extremum(python: AnyFunction, pair: AnyFunction, along: AnyFunction) -> AnyFunction:
    """min or max: of several values elementwise, of one block over its elements."""

    def apply(*args: Any, **named: Any) -> Any:
        values = list(args[0]) if len(args) == 1 and isinstance(args[0], (list, tuple)) else list(args)
        if not any(is_traced(v) for v in values):
            return python(*args, **named)
        return along(values[0]) if len(values) == 1 else functools.reduce(pair, values)

    return apply


def _make_conversion(python: AnyFunction, dtype: DType) -> AnyFunction:
    return lambda x=0: cast(x, dtype=dtype) if is_traced(x) else python(x)


def _sum_values(values: Any, start: Any = 0) -> Any:
    if is_traced(values):
        return reduce.sum(values)
    return functools.reduce(lambda a, b: a + b, values, start)


def _make_quantifier(python: AnyFunction, along: AnyFunction, join: AnyFunction) -> AnyFunction:
    """all or any: of a sequence of values, or of the elements of a block."""

    def apply(values: Any) -> Any:
        if is_traced(values):
            return along(values)
        listed = list(values)
        return functools.reduce(join, listed) if any(is_traced(v) for v in listed) else python(listed)

    return apply


def _convert_bool(x: Any = False) -> Any:
    return x != 0 if is_traced(x) and x.dtype != bool_ else x if is_traced(x) else bool(x)


def _make_formatter(python: AnyFunction) -> AnyFunction:
    def apply(x: Any = "", *rest: Any) -> Any:
        if is_traced(x):
            raise UnsupportedSyntaxError(
                f"{python.__name__} needs a value known while compiling", received=str(x.type),
                suggestion='print the value itself: print("x =", x)',
            )  # fmt: skip
        return python(x, *rest)

    return apply


BUILTIN_RULES: dict[Any, AnyFunction] = {
    min: _make_extremum(min, elementwise.minimum, reduce.min),
    max: _make_extremum(max, elementwise.maximum, reduce.max),
    float: _make_conversion(float, f32),
    int: _make_conversion(int, int64),
    bool: _convert_bool,
    sum: _sum_values,
    all: _make_quantifier(all, reduce.min, lambda a, b: a & b),
    any: _make_quantifier(any, reduce.max, lambda a, b: a | b),
    range: tile_range,
    abs: lambda x: elementwise.abs(x) if is_traced(x) else abs(x),
    round: lambda x, *digits: elementwise.round(x) if is_traced(x) else round(x, *digits),
    pow: lambda x, y: x**y,
    str: _make_formatter(str),
    repr: _make_formatter(repr),
    format: _make_formatter(format),
    print: print_,
    breakpoint: pause,
}


MAX_CALL_DEPTH = 50
_HOST_MATH_MODULES = ("math", "numpy")
_RENAMED_FUNCTIONS = {"fabs": "abs"}  # functions of `math` whose ops have another name


@expression(ast.Call)
def _(frame: KernelFrame, node: ast.Call) -> Any:
    return _evaluate_call(frame, node)[2]


def call_statement(frame: KernelFrame, node: ast.Call) -> None:
    """A call whose value is not used; some functions then update the variable given first."""
    function, args, result = _evaluate_call(frame, node)
    first = node.args[0] if node.args else None
    if (
        _is_in_table(function, UPDATES_FIRST)
        and isinstance(first, ast.Name)
        and UPDATES_FIRST[function] in (None, len(args))
    ):
        frame.names[first.id] = result


def _evaluate_call(frame: KernelFrame, node: ast.Call) -> tuple[Any, list[Any], Any]:
    for arg in node.args:
        if isinstance(arg, ast.Starred):
            raise unsupported_error(frame, arg)
    if any(k.arg is None for k in node.keywords):
        raise unsupported_error(frame, node, "** in a call", "name the arguments one by one")
    function = evaluate_expression(frame, node.func)
    args = [evaluate_expression(frame, a) for a in node.args]
    named = {k.arg: evaluate_expression(frame, k.value) for k in node.keywords if k.arg}
    try:
        return function, args, call_function(frame.trace, function, args, named)
    except TypeError:
        if isinstance(function, DType):
            name = ast.unparse(node.func)
            raise ArgumentError(
                f"{name} is an element type, not a function",
                expected=f"a conversion: x.to({name}), or tile.cast(x, {name})",
            ) from None
        _check_signature(ast.unparse(node.func), function, args, named)
        raise


# Parameters of Triton's functions, and what a kernel has for them.
_FOREIGN_PARAMETERS = {
    **dict.fromkeys(("cache_modifier", "eviction_policy", "volatile"), "leave it out: the compiler chooses it"),
    **dict.fromkeys(("allow_tf32", "input_precision"), "cast the operands: tile.cast(a, ts.tf32)"),
    **dict.fromkeys(("boundary_check", "padding_option"), "other=0.0 reads zeros beyond the edge; edge='clip' stores"),
    "keep_dims": "write keepdims",
    "num_stages": "write ts.Schedule(stages=n) at the kernel: @ts.kernel.with_schedule(...)",
    "num_warps": "write ts.Schedule(warps=n) at the kernel: @ts.kernel.with_schedule(...)",
}


def _check_signature(name: str, function: Any, args: list[Any], named: dict[str, Any]) -> None:
    """Explain a TypeError of a call by the signature of the function.

    Raises:
        ArgumentError: the arguments do not fit it.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*args, **named)
    except TypeError as error:
        hints = [_FOREIGN_PARAMETERS[n] for n in named if n in _FOREIGN_PARAMETERS and n not in signature.parameters]
        shown = ", ".join(p.name if p.default is p.empty else f"{p.name}=" for p in signature.parameters.values())
        raise ArgumentError(
            f"{name}: {error}", expected=f"{name}({shown})", suggestion=hints[0] if hints else None
        ) from None


def call_function(trace: TraceState, function: Any, args: list[Any], named: dict[str, Any]) -> Any:
    """A function applied as a kernel applies it."""
    if _is_in_table(function, TAKES_MEMREFS):
        return function(*args, **named)
    if isinstance(function, KernelClosure):
        return function(*args, **named)
    body = find_inlinable(function, [*args, *named.values()])
    if body is not None:
        return inline_call(trace, body, args, named)
    args, named = [_load_argument(a) for a in args], {k: _load_argument(v) for k, v in named.items()}
    if _is_in_table(function, BUILTIN_RULES):
        return BUILTIN_RULES[function](*args, **named)
    if isinstance(function, Op) and all(is_number(a) for a in args) and args:
        return _call_on_numbers(function, args, named)
    return _call_while_compiling(function, args, named)


def _is_in_table(function: Any, table: Any) -> bool:
    try:
        return function in table
    except TypeError:  # not hashable
        return False


def _load_argument(argument: Any) -> Any:
    if isinstance(argument, (list, tuple)) and any(isinstance(a, MemRefAccess) for a in argument):
        return type(argument)(load_if_memref(a) for a in argument)
    return load_if_memref(argument)


def _call_on_numbers(op: Op, args: list[Any], named: dict[str, Any]) -> Any:
    """An op of Python numbers is a Python number: it takes the type of what it meets later."""
    token = CURRENT_BUILDER.set(None)
    try:
        return op(*args, **named).item()
    finally:
        CURRENT_BUILDER.reset(token)


def _call_while_compiling(function: Any, args: list[Any], named: dict[str, Any]) -> Any:
    refuse_function(function)
    check_mutating_call(current_trace(), function)
    module = (getattr(function, "__module__", None) or "").partition(".")[0]
    if (
        isinstance(function, Op)
        or module not in _HOST_MATH_MODULES
        or not any(is_traced(a) for a in (*args, *named.values()))
    ):
        with nullcontext() if module == "tessera" else compare_for_program(current_trace().builder.location):
            return normalise_constant(function(*args, **named))
    name = getattr(function, "__name__", repr(function))
    op = _find_counterpart(function, name)
    if op is not None:
        return op(*args, **named)
    raise UnsupportedSyntaxError(
        f"{name} cannot run on a value known only at run time",
        expected="a ts or tile function",
        received=next(str(a.type) for a in (*args, *named.values()) if is_traced(a)),
    )


def _find_counterpart(function: Any, name: str) -> Any:
    """The op that does on values of the run what a function of NumPy or `math` does on numbers; None: there is none."""
    for table in (numpy_protocol.UFUNCS, numpy_protocol.FUNCTIONS):
        if _is_in_table(function, table):
            return table[function]
    own = [
        getattr(module, _RENAMED_FUNCTIONS.get(name, name), None)
        for module in (elementwise, scalar_functions, scalar_functions)
    ]
    return next((op for op in own if isinstance(op, Op)), None)


def inline_call(trace: TraceState, function: FunctionType, args: list[Any], named: dict[str, Any]) -> Any:
    """A user's function, read into the kernel that calls it."""
    args, named = [_load_element(a) for a in args], {k: _load_element(v) for k, v in named.items()}
    names = _bind_arguments(inspect.signature(function), function.__name__, args, named)
    return _run_frame(trace, KernelFrame(trace, read_source(function), names, OuterScope(function, trace)))


def _load_element(argument: Any) -> Any:
    """One element of memory is passed by value."""
    return argument.load() if isinstance(argument, MemRefAccess) and argument.is_element else argument


def _bind_arguments(signature: inspect.Signature, name: str, args: list[Any], named: dict[str, Any]) -> dict[str, Any]:
    try:
        bound = signature.bind(*args, **named)
    except TypeError as error:
        raise ArgumentError(f"{name}: {error}", expected=f"{name}{signature}") from None
    bound.apply_defaults()
    return dict(bound.arguments)


def _run_frame(trace: TraceState, frame: KernelFrame) -> Any:
    from tessera.frontend.kernel.python_ast.statements import run_statements

    if trace.depth >= MAX_CALL_DEPTH:
        raise UnsupportedSyntaxError(f"{frame.source.name} calls itself without end", location=frame.source.place)
    trace.depth += 1
    try:
        run_statements(frame, frame.source.body)
    finally:
        trace.depth -= 1
    return frame.result


class KernelClosure:
    """A lambda or inner function of a kernel."""

    def __init__(self, frame: KernelFrame, source: FunctionSource, signature: inspect.Signature) -> None:
        self.frame = frame
        self.source = source
        self.signature = signature

    def __call__(self, *args: Any, **named: Any) -> Any:
        names = _bind_arguments(self.signature, self.source.name, list(args), named)
        return _run_frame(current_trace(), self.frame.child(names, self.source))


@expression(ast.Lambda)
def _(frame: KernelFrame, node: ast.Lambda) -> KernelClosure:
    body = ast.copy_location(ast.Return(node.body), node.body)
    definition = ast.FunctionDef("lambda", node.args, [body], [], lineno=node.lineno, col_offset=node.col_offset)
    return make_closure(frame, definition)


def make_closure(frame: KernelFrame, node: ast.FunctionDef) -> KernelClosure:
    """The value of an inner definition."""
    source = make_inner_source(node, frame.source.file, frame.source.shift)
    return KernelClosure(frame, source, _closure_signature(frame, node))


def _closure_signature(frame: KernelFrame, node: ast.FunctionDef) -> inspect.Signature:
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
            kinds(name, kind, default=kinds.empty if default is None else evaluate_expression(frame, default))
            for (name, kind), default in zip(listed, [*defaults, *arguments.kw_defaults], strict=True)
        ]
    )

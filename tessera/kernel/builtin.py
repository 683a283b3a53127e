"""Python's builtin functions on values known only at run time."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tessera.errors import UnsupportedSyntaxError
from tessera.kernel.checks import print_
from tessera.kernel.lines import pause
from tessera.kernel.ranges import tile_range
from tessera.kernel.trace import is_traced
from tessera.ops import elementwise, reduce
from tessera.ops.basic import cast
from tessera.types import DType, bool_, f32, int64

Function = Callable[..., Any]


def _extreme(python: Function, pair: Function, along: Function) -> Function:
    """min or max: of several values elementwise, of one block over its elements."""

    def apply(*args: Any, **named: Any) -> Any:
        values = list(args[0]) if len(args) == 1 and isinstance(args[0], (list, tuple)) else list(args)
        if not any(is_traced(v) for v in values):
            return python(*args, **named)
        return along(values[0]) if len(values) == 1 else functools.reduce(pair, values)

    return apply


def _convert(python: Function, dtype: DType) -> Function:
    return lambda x=0: cast(x, dtype=dtype) if is_traced(x) else python(x)


def _sum(values: Any, start: Any = 0) -> Any:
    if is_traced(values):
        return reduce.sum(values)
    return functools.reduce(lambda a, b: a + b, values, start)


def _every(python: Function, along: Function, join: Function) -> Function:
    """all or any: of a sequence of values, or of the elements of a block."""

    def apply(values: Any) -> Any:
        if is_traced(values):
            return along(values)
        listed = list(values)
        return functools.reduce(join, listed) if any(is_traced(v) for v in listed) else python(listed)

    return apply


def _bool(x: Any = False) -> Any:
    return x != 0 if is_traced(x) and x.dtype != bool_ else x if is_traced(x) else bool(x)


def _text(python: Function) -> Function:
    def apply(x: Any = "", *rest: Any) -> Any:
        if is_traced(x):
            raise UnsupportedSyntaxError(
                f"{python.__name__} needs a value known while compiling", received=str(x.type),
                suggestion='print the value itself: print("x =", x)',
            )  # fmt: skip
        return python(x, *rest)

    return apply


RULES: dict[Any, Function] = {
    min: _extreme(min, elementwise.minimum, reduce.min),
    max: _extreme(max, elementwise.maximum, reduce.max),
    float: _convert(float, f32),
    int: _convert(int, int64),
    bool: _bool,
    sum: _sum,
    all: _every(all, reduce.min, lambda a, b: a & b),
    any: _every(any, reduce.max, lambda a, b: a | b),
    range: tile_range,
    abs: lambda x: elementwise.abs(x) if is_traced(x) else abs(x),
    round: lambda x, *digits: elementwise.round(x) if is_traced(x) else round(x, *digits),
    pow: lambda x, y: x**y,
    str: _text(str),
    repr: _text(repr),
    format: _text(format),
    print: print_,
    breakpoint: pause,
}

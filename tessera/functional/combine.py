"""Functions made of functions: compose, pipe, curry. Transforms and effects see through them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from tessera.errors import ArgumentError, here

Function = Callable[..., Any]


def _checked(functions: tuple[Any, ...], owner: str) -> None:
    for each in functions:
        if not callable(each):
            raise ArgumentError(
                f"{owner} takes functions", location=here(), expected="functions", received=type(each).__name__
            )


def pipe(*functions: Function) -> Function:
    """The functions one after the other, the first one first; it takes any arguments.

    >>> pipe(abs, float)(-3)
    3.0

    Raises:
        ArgumentError: one of them is no function.
    """
    _checked(functions, "pipe")
    parts = tuple(functions)

    def piped(*args: Any, **keywords: Any) -> Any:
        if not parts:
            return args[0]
        found = parts[0](*args, **keywords)
        for each in parts[1:]:
            found = each(found)
        return found

    piped.__name__ = "_".join(getattr(f, "__name__", "part") for f in parts).replace("<lambda>", "part") or "same"
    return piped


def compose(*functions: Function) -> Function:
    """The functions as in mathematics, the last one first: compose(f, g)(x) = f(g(x)).

    >>> compose(float, abs)(-3)
    3.0

    Raises:
        ArgumentError: one of them is no function.
    """
    _checked(functions, "compose")
    return pipe(*reversed(functions))


def curry(function: Function, *args: Any, **keywords: Any) -> Function:
    """`function` with some arguments given now; the others when it is called.

    >>> curry(round, ndigits=1)(2.345)
    2.3

    Raises:
        ArgumentError: it does not take these arguments.
    """
    _checked((function,), "curry")
    try:
        inspect.signature(function).bind_partial(*args, **keywords)
    except TypeError as error:
        name = getattr(function, "__name__", "the function")
        raise ArgumentError(f"{name}: {error}", location=here(), received=", ".join(keywords)) from None
    except ValueError:  # it tells nobody what it takes
        pass
    return functools.update_wrapper(functools.partial(function, *args, **keywords), function)

"""What a call got wrong: arguments held against annotations once Python has stumbled over one of them."""

from __future__ import annotations

import functools
import inspect
import numbers
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from tessera.errors import ArgumentError, TesseraError, here
from tessera.op import ALIASES
from tessera.shapes import Dim
from tessera.shapes.dim import known

F = TypeVar("F", bound=Callable[..., Any])
STUMBLES = (TypeError, ValueError, IndexError, AttributeError, StopIteration)


def _whole(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _wholes(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(_whole(v) for v in value)


def _number(value: Any) -> bool:
    return isinstance(value, numbers.Real)


# For each annotation, what fits it and how that is told.
KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "int": (_whole, "an integer"),
    "Size": (lambda v: _whole(v) or isinstance(v, Dim), "a size"),
    "Size | None": (lambda v: v is None or _whole(v) or isinstance(v, Dim), "a size"),
    "int | None": (lambda v: v is None or _whole(v), "an integer or None"),
    "Sequence[int]": (_wholes, "integers"),
    "int | Sequence[int]": (lambda v: _whole(v) or _wholes(v), "an integer, or some"),
    "int | Sequence[int] | None": (lambda v: v is None or _whole(v) or _wholes(v), "an integer, some, or None"),
    "int | tuple[int, int]": (lambda v: _whole(v) or (_wholes(v) and len(v) == 2), "an integer or two"),
    "tuple[int, int]": (lambda v: _wholes(v) and len(v) == 2, "two integers"),
    "float": (_number, "a number"),
    "float | None": (lambda v: v is None or _number(v), "a number or None"),
    "str": (lambda v: isinstance(v, str), "a string"),
    "bool": (lambda v: isinstance(v, (bool, np.bool_)), "True or False"),
}


def misfit(annotations: Mapping[str, str], name: str, arguments: Mapping[str, Any]) -> ArgumentError | None:
    """The error for the first argument that is not what its annotation says, or None.

    >>> misfit({"n": "int"}, "twice", {"n": "a"}).expected
    'an integer'
    """
    for key, value in arguments.items():
        fits, words = KINDS.get(annotations.get(key, ""), (None, ""))
        if fits is not None and not fits(value):
            return ArgumentError(
                f"{name} does not take this for {key}", location=here(), expected=words,
                received=f"{type(value).__name__} {_short(value)}",
            )  # fmt: skip
    return None


def _short(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) < 60 else text[:57] + "..."


def typed(function: F) -> F:
    """A function whose wrong arguments are told as ours; where all are right this costs nothing but a call."""
    signature = inspect.signature(function)
    annotations = {k: str(p.annotation) for k, p in signature.parameters.items()}
    spellings = {k: n for k, n in ALIASES.items() if n in annotations and k not in annotations}  # dim is axis

    @functools.wraps(function)
    def told(*args: Any, **named: Any) -> Any:
        if named and spellings:
            named = {spellings.get(k, k): v for k, v in named.items()}
        try:
            return function(*args, **named)
        except TesseraError as error:
            raise error.at(here()) from None
        except STUMBLES as error:
            arguments = _bound(signature, args, named)
            if arguments is None:
                raise ArgumentError(str(error), location=here(), expected=f"{function.__name__}{signature}") from None
            found = misfit(annotations, function.__name__, arguments)
            if found is None:
                raise
            raise found from error

    return told  # type: ignore[return-value]


def _bound(signature: inspect.Signature, args: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any] | None:
    try:
        return dict(signature.bind(*args, **named).arguments)
    except TypeError:
        return None


def check_function(function: Any, by: str) -> None:
    """Refuse what is no function where one is to be transformed.

    Raises:
        ArgumentError: `function` cannot be called.
    """
    if not callable(function):
        raise ArgumentError(
            f"{by} takes a function", location=here(), expected="a function", received=_short(function),
            suggestion=f"write {by}(f)(x), not {by}(f(x))" if hasattr(function, "dtype") else None,
        )  # fmt: skip


NAMED = (str, Dim, TypeVar)  # what names a size: the last as `def f[B]` does


def shape_of(value: Any, sizes: Callable[[Any], Any], least: int = 0) -> tuple[Any, ...]:
    """A shape from a size, a name or a sequence of them, each made a size by `sizes`, none below `least`.

    Raises:
        ArgumentError: it is none.
    """
    element = getattr(value, "dtype", None)
    if getattr(element, "is_float", False) or getattr(element, "kind", "") == "f":
        raise ArgumentError("this is no shape", location=here(), expected="sizes, as in (2, 3)", received=_short(value))
    listed: Sequence[Any] = (value,) if _whole(value) or isinstance(value, NAMED) else value
    try:
        found = tuple(known(sizes(s if isinstance(s, NAMED) else operator.index(s))) for s in listed)
    except TesseraError:
        raise
    except STUMBLES:
        raise ArgumentError("this is no shape", expected="sizes, as in (2, 3)", received=_short(value)) from None
    wrong = [n for n in found if isinstance(n, int) and n < least]
    if wrong:
        raise ArgumentError(f"a size of {wrong[0]}", expected="sizes from 0 on", received=_short(value))
    return found

"""Argument checks: a call that failed in Python is checked against its annotations and reported as an ArgumentError."""

from __future__ import annotations

import functools
import inspect
import numbers
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np

from tessera.core.errors import ArgumentError, TesseraError, user_location
from tessera.core.symbolic_dim import Dim
from tessera.core.types import to_python_numbers
from tessera.ir.array_interchange import shorten_repr
from tessera.ir.rules import ATTRIBUTE_ALIASES

F = TypeVar("F", bound=Callable[..., Any])
TENSOR_ANNOTATIONS = ("Any", "Tensor", "Sequence[Any]", "Sequence[Tensor]")
PYTHON_ERRORS = (TypeError, ValueError, IndexError, AttributeError, StopIteration)


def _is_integer(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _are_integers(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(_is_integer(v) for v in value)


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real)


# For each annotation, the values that match it, and its description in errors.
ANNOTATION_CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "int": (_is_integer, "an integer"),
    "Size": (lambda v: _is_integer(v) or isinstance(v, Dim), "a size"),
    "Size | None": (lambda v: v is None or _is_integer(v) or isinstance(v, Dim), "a size"),
    "int | None": (lambda v: v is None or _is_integer(v), "an integer or None"),
    "Sequence[int]": (_are_integers, "integers"),
    "int | Sequence[int]": (lambda v: _is_integer(v) or _are_integers(v), "an integer, or some"),
    "int | Sequence[int] | None": (
        lambda v: v is None or _is_integer(v) or _are_integers(v),
        "an integer, some, or None",
    ),
    "int | tuple[int, int]": (lambda v: _is_integer(v) or (_are_integers(v) and len(v) == 2), "an integer or two"),
    "tuple[int, int]": (lambda v: _are_integers(v) and len(v) == 2, "two integers"),
    "float": (_is_number, "a number"),
    "float | None": (lambda v: v is None or _is_number(v), "a number or None"),
    "str": (lambda v: isinstance(v, str), "a string"),
    "bool": (lambda v: isinstance(v, (bool, np.bool_)), "True or False"),
}


def find_argument_error(
    annotations: Mapping[str, str], name: str, arguments: Mapping[str, Any]
) -> ArgumentError | None:
    """The error for the first argument that does not match its annotation, or None.

    >>> find_argument_error({"n": "int"}, "twice", {"n": "a"}).expected
    'an integer'
    """
    for key, value in arguments.items():
        fits, words = ANNOTATION_CHECKS.get(annotations.get(key, ""), (None, ""))
        if fits is not None and not fits(value):
            return ArgumentError(
                f"{name} does not take this for {key}", location=user_location(), expected=words,
                received=f"{type(value).__name__} {shorten_repr(value)}",
            )  # fmt: skip
    return None


def check_arguments(function: F) -> F:
    """Decorate a function: a call that fails raises an ArgumentError if an argument does not match its annotation.

    If a call fails that has NumPy's numbers where no tensors are expected, it is made again with Python's.
    """
    signature = inspect.signature(function)
    annotations = {k: str(p.annotation) for k, p in signature.parameters.items()}
    spellings = {k: n for k, n in ATTRIBUTE_ALIASES.items() if n in annotations and k not in annotations}  # dim is axis

    @functools.wraps(function)
    def told(*args: Any, **named: Any) -> Any:
        if named and spellings:
            named = {spellings.get(k, k): v for k, v in named.items()}
        try:
            return function(*args, **named)
        except (TesseraError, *PYTHON_ERRORS) as error:
            bound = _bind_arguments(signature, args, named)
            if bound is not None and _convert_numbers(bound.arguments, annotations):
                return told(*bound.args, **bound.kwargs)
            if isinstance(error, TesseraError):
                raise error.at(user_location()) from None
            if bound is None:
                raise ArgumentError(
                    str(error), location=user_location(), expected=f"{function.__name__}{signature}"
                ) from None
            found = find_argument_error(annotations, function.__name__, bound.arguments)
            if found is None:
                raise
            raise found from error

    told.fixed_closure = told  # type: ignore[attr-defined]  # calls under jit need not look at it
    return told  # type: ignore[return-value]


def _bind_arguments(
    signature: inspect.Signature, args: tuple[Any, ...], named: dict[str, Any]
) -> inspect.BoundArguments | None:
    try:
        return signature.bind(*args, **named)
    except TypeError:
        return None


def _convert_numbers(arguments: dict[str, Any], annotations: Mapping[str, str]) -> bool:
    """Put Python's numbers in place of NumPy's where the annotation has no tensors; whether there were any."""
    found = {k: v for k, v in arguments.items() if annotations[k] not in TENSOR_ANNOTATIONS and _has_numpy_number(v)}
    arguments.update((k, to_python_numbers(v)) for k, v in found.items())
    return bool(found)


def _has_numpy_number(value: Any) -> bool:
    return isinstance(value, np.generic) or (type(value) in (list, tuple) and any(map(_has_numpy_number, value)))


def collect_sizes(function: F) -> F:
    """Decorate a function whose first parameter is a shape: sizes that are arguments of their own become one.

    `full(2, 3, 1.0)` means `full((2, 3), 1.0)`: if `fill_value` is the second parameter and is not passed by name, it
    is the last of the numbers.

    >>> collect_sizes(lambda shape, dtype=None: (shape, dtype))(2, 3, "f32")
    ((2, 3), 'f32')
    """
    has_value = list(inspect.signature(function).parameters)[1:2] == ["fill_value"]

    @functools.wraps(function)
    def collected(*args: Any, **named: Any) -> Any:
        count = next((i for i, x in enumerate(args) if not _is_size(x)), len(args))
        if has_value and not named.keys() & {"fill_value", "value"}:
            count = min(count, sum(isinstance(x, numbers.Real) for x in args) - 1)
        return function(*args, **named) if count < 2 else function(tuple(args[:count]), *args[count:], **named)

    return collected  # type: ignore[return-value]


def _is_size(value: Any) -> bool:
    return _is_integer(value) or isinstance(value, Dim)


def check_function(function: Any, by: str) -> None:
    """Check that the argument of a transform is a function.

    Raises:
        ArgumentError: `function` cannot be called.
    """
    if not callable(function):
        raise ArgumentError(
            f"{by} takes a function", location=user_location(), expected="a function", received=shorten_repr(function),
            suggestion=f"write {by}(f)(x), not {by}(f(x))" if hasattr(function, "dtype") else None,
        )  # fmt: skip

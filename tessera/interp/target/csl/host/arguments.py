"""Arguments of the host's calls: checks that name what a call expects and what it was given."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from tessera.core.errors import ArgumentError


def describe_value(value: Any) -> str:
    """A value and its type for a message, in a few words.

    >>> describe_value("x"), describe_value(None)
    ("'x' (str)", 'None (NoneType)')
    """
    text = repr(value)
    return f"{text if len(text) <= 40 else text[:37] + '…'} ({type(value).__name__})"


def require_integer(what: str, value: Any, low: int | None = None, high: int | None = None) -> int:
    """A whole number of at least `low` and at most `high`.

    >>> require_integer("the width", np.int16(3))
    3

    Raises:
        ArgumentError: it is no whole number, or out of these bounds.
    """
    bounds = [f" {word} {end}" for word, end in (("from", low), ("to", high)) if end is not None]
    expected = "a whole number" + "".join(bounds)
    if isinstance(value, (bool, np.bool_)) or not hasattr(value, "__index__") or np.ndim(value):
        raise ArgumentError(f"{what} is no whole number", expected=expected, received=describe_value(value))
    number = operator.index(value)
    if (low is not None and number < low) or (high is not None and number > high):
        raise ArgumentError(f"{what} is out of range", expected=expected, received=str(number))
    return number


def require_flag(what: str, value: Any) -> bool:
    """A truth value.

    Raises:
        ArgumentError: it is none.
    """
    if not isinstance(value, (bool, np.bool_, int)):
        raise ArgumentError(f"{what} is no truth value", expected="True or False", received=describe_value(value))
    return bool(value)


def require_text(what: str, value: Any) -> str:
    """A string.

    Raises:
        ArgumentError: it is none.
    """
    if not isinstance(value, str):
        raise ArgumentError(f"{what} is no string", expected="a string", received=describe_value(value))
    return value


def require_member(what: str, value: Any, kind: type) -> Any:
    """A member of an enumeration or another class of the vendor's API.

    Raises:
        ArgumentError: it is none.
    """
    if not isinstance(value, kind):
        raise ArgumentError(f"{what} has the wrong type", expected=kind.__name__, received=describe_value(value))
    return value


def require_array(what: str, value: Any) -> np.ndarray:
    """A NumPy array.

    Raises:
        ArgumentError: it is none.
    """
    if not isinstance(value, np.ndarray):
        raise ArgumentError(f"{what} is no array", expected="a NumPy array", received=describe_value(value))
    return value


def require_dtype(value: Any) -> np.dtype[Any]:
    """The element type that a value names.

    Raises:
        ArgumentError: it names none.
    """
    try:
        return np.dtype(value)
    except (TypeError, ValueError) as error:
        raise ArgumentError(
            "this names no element type", expected="a NumPy type, such as np.float32", received=describe_value(value)
        ) from error

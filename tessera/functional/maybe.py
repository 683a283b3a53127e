"""Values that may be missing: Just one, or Nothing."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from tessera.errors import ArgumentError, here

T = TypeVar("T")


class Maybe(Generic[T]):
    """`Just(value)` or `Nothing()`.

    >>> Just(2).map(lambda x: x + 1).unwrap_or(0), Nothing().map(lambda x: x + 1).unwrap_or(0)
    (3, 0)
    """

    def map(self, function: Callable[[T], Any]) -> Maybe[Any]:
        """`function` of the value, if there is one."""
        raise NotImplementedError

    def bind(self, function: Callable[[T], Maybe[Any]]) -> Maybe[Any]:
        """What `function` gives for the value, itself a Maybe."""
        raise NotImplementedError

    def unwrap(self) -> T:
        """The value.

        Raises:
            ArgumentError: there is none.
        """
        raise NotImplementedError

    def unwrap_or(self, default: Any) -> Any:
        """The value, or `default`."""
        raise NotImplementedError

    @property
    def is_just(self) -> bool:
        """Whether there is a value."""
        return isinstance(self, Just)

    def __bool__(self) -> bool:
        return self.is_just


class Just(Maybe[T]):
    """A value that is there."""

    __slots__ = ("value",)

    def __init__(self, value: T) -> None:
        self.value = value

    def map(self, function: Callable[[T], Any]) -> Maybe[Any]:
        """`function` of the value."""
        return Just(function(self.value))

    def bind(self, function: Callable[[T], Maybe[Any]]) -> Maybe[Any]:
        """What `function` gives for the value."""
        return _maybe(function(self.value), "the function given to bind")

    def unwrap(self) -> T:
        """The value."""
        return self.value

    def unwrap_or(self, default: Any) -> Any:
        """The value."""
        return self.value

    def __repr__(self) -> str:
        return f"Just({self.value!r})"


class Nothing(Maybe[Any]):
    """No value."""

    __slots__ = ()

    def map(self, function: Callable[[Any], Any]) -> Maybe[Any]:
        """Nothing."""
        return self

    def bind(self, function: Callable[[Any], Maybe[Any]]) -> Maybe[Any]:
        """Nothing."""
        return self

    def unwrap(self) -> Any:
        """An error.

        Raises:
            ArgumentError: always.
        """
        raise ArgumentError("unwrap() of Nothing", location=here(), suggestion="use unwrap_or(default)")

    def unwrap_or(self, default: Any) -> Any:
        """The default."""
        return default

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Nothing)

    def __hash__(self) -> int:
        return hash(Nothing)

    def __repr__(self) -> str:
        return "Nothing()"


def _maybe(value: Any, owner: str) -> Maybe[Any]:
    if not isinstance(value, Maybe):
        raise ArgumentError(
            f"{owner} does not give a Maybe", location=here(), expected="Just(value) or Nothing()",
            received=type(value).__name__,
        )  # fmt: skip
    return value


def maybe(function: Callable[..., Any]) -> Callable[..., Maybe[Any]]:
    """A function that gives Just(value) or Nothing(); given a Nothing as an argument, it gives Nothing.

    A Just among the arguments is unwrapped. Whether there is a value is known when the function is
    called: where that depends on elements of tensors it runs eagerly, not under jit.

    >>> @maybe
    ... def half(x):
    ...     return Just(x // 2) if x % 2 == 0 else Nothing()
    >>> half(half(12)), half(half(6))
    (Just(3), Nothing())

    Raises:
        ArgumentError: it gives something else.
    """

    @functools.wraps(function)
    def wrapper(*args: Any, **keywords: Any) -> Maybe[Any]:
        if any(isinstance(x, Nothing) for x in (*args, *keywords.values())):
            return Nothing()
        bare = [x.value if isinstance(x, Just) else x for x in args]
        named = {k: x.value if isinstance(x, Just) else x for k, x in keywords.items()}
        return _maybe(function(*bare, **named), getattr(function, "__name__", "the function"))

    return wrapper

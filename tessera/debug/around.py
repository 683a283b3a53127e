"""What the debugger's decorators make: a function, kernel or launch of which each call runs in a context."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any


class Around:
    """Something callable, each call of which runs in `context(it)`; else it is as it was, grids and methods too.

    >>> from contextlib import nullcontext
    >>> Around(abs, lambda function: nullcontext())(-2)
    2
    """

    def __init__(self, function: Any, context: Callable[[Any], AbstractContextManager[Any]]) -> None:
        if hasattr(function, "__name__"):
            functools.update_wrapper(self, function, updated=())
        self.function, self.context = function, context

    def __call__(self, *args: Any, **named: Any) -> Any:
        with self.context(self.function):
            return self.function(*args, **named)

    def __getitem__(self, item: Any) -> Around:
        """A kernel with its grid."""
        return Around(self.function[item], self.context)

    def __getattr__(self, name: str) -> Any:
        if name == "function":  # not made yet
            raise AttributeError(name)
        return getattr(self.function, name)

    def __get__(self, owner: Any, kind: Any = None) -> Any:
        """A method, in a class."""
        return self if owner is None else functools.partial(self, owner)

"""Marks on functions: which take places unread, which update their first argument, which are read as source."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import FunctionType, ModuleType
from typing import Any, TypeVar

from tessera.kernel.liveness import UPDATERS
from tessera.kernel.place import Place
from tessera.kernel.trace import is_traced

Function = TypeVar("Function", bound=Callable[..., Any])
TAKES_PLACES: set[Any] = {len, isinstance, type}
# A function here, called as a statement with so many arguments (None: any number), gives its first
# argument, a variable, the result: blocks are values, and the call would otherwise do nothing.
UPDATES_FIRST: dict[Any, int | None] = {}


def takes_places(function: Function) -> Function:
    """Hand the function views of memory as they are, not what lies there."""
    TAKES_PLACES.add(function)
    return function


def updates_first(function: Function, arguments: int | None = None) -> Function:
    """Let the function, called as a statement, update its first argument."""
    assert function.__name__ in UPDATERS, "liveness must know that this updates a variable"
    UPDATES_FIRST[function] = arguments
    return function


def interpreted(function: Any, args: Sequence[Any]) -> FunctionType | None:
    """The Python function to read as source; None for what simply runs while compiling."""
    found = getattr(function, "kernel_function", function)  # a kernel called by a kernel
    if not isinstance(found, FunctionType) or not _ours(found):
        return None
    if found is not function or any(_runs_later(a) for a in args) or _speaks_tile(found):
        return found
    return None


def _ours(function: FunctionType) -> bool:
    """Whether this is user code: not the package itself, whose functions record what they mean."""
    module = function.__module__ or ""
    package = module.partition(".")[0]
    return (package != "tessera" or module.startswith("tessera.stdlib")) and package != "numpy"


def _runs_later(argument: Any) -> bool:
    if isinstance(argument, (list, tuple)):
        return any(_runs_later(a) for a in argument)
    return isinstance(argument, Place) or is_traced(argument)


def _speaks_tile(function: FunctionType) -> bool:
    """Whether a function names something of this package: it may ask for ids or memory."""
    named = (function.__globals__.get(name) for name in function.__code__.co_names)
    return any(_package(x) == "tessera" for x in named)


def _package(x: Any) -> str:
    name = x.__name__ if isinstance(x, ModuleType) else getattr(x, "__module__", None)
    return name.partition(".")[0] if isinstance(name, str) else ""

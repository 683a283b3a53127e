"""Calling conventions of kernel functions: memrefs passed unloaded, updated first arguments, inlining."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import FunctionType, ModuleType
from typing import Any, TypeVar

from tessera.frontend.kernel.memref import MemRefAccess
from tessera.frontend.kernel.python_ast.source import UPDATING_FUNCTIONS
from tessera.frontend.kernel.trace import is_traced

AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])
TAKES_MEMREFS: set[Any] = {len, isinstance, type}
# A function here, called as a statement with so many arguments (None: any number), gives its first
# argument, a variable, the result: blocks are values, and the call would otherwise do nothing.
UPDATES_FIRST: dict[Any, int | None] = {}


def takes_memrefs(function: AnyFunction) -> AnyFunction:
    """Pass memory views to the function unloaded."""
    TAKES_MEMREFS.add(function)
    return function


def updates_first(function: AnyFunction, arguments: int | None = None) -> AnyFunction:
    """Let the function, called as a statement, update its first argument."""
    assert function.__name__ in UPDATING_FUNCTIONS, "liveness must know that this updates a variable"
    UPDATES_FIRST[function] = arguments
    return function


def find_inlinable(function: Any, args: Sequence[Any]) -> FunctionType | None:
    """Find the Python function to inline from source; None for a function that runs at compile time."""
    found = getattr(function, "kernel_function", function)  # a kernel that a kernel calls
    if not isinstance(found, FunctionType) or not _is_user_code(found):
        return None
    if found is not function or any(_is_runtime_value(a) for a in args) or _uses_tile_names(found):
        return found
    return None


# Modules of this package that are written in the kernel language: they are read as source, as a user's are.
_KERNEL_LANGUAGE = ("tessera.stdlib", "tessera.frontend.kernel.tile_api.online_softmax")


def _is_user_code(function: FunctionType) -> bool:
    """Whether this is user code, not a function of this package, which records ops itself."""
    module = function.__module__ or ""
    package = module.partition(".")[0]
    return (package != "tessera" or module.startswith(_KERNEL_LANGUAGE)) and package != "numpy"


def _is_runtime_value(argument: Any) -> bool:
    if isinstance(argument, (list, tuple)):
        return any(_is_runtime_value(a) for a in argument)
    return isinstance(argument, MemRefAccess) or is_traced(argument)


def _uses_tile_names(function: FunctionType) -> bool:
    """Whether a function names something of this package: it may use ids or memory."""
    named = (function.__globals__.get(name) for name in function.__code__.co_names)
    return any(_package_of(x) == "tessera" for x in named)


def _package_of(x: Any) -> str:
    name = x.__name__ if isinstance(x, ModuleType) else getattr(x, "__module__", None)
    return name.partition(".")[0] if isinstance(name, str) else ""

"""What a Python function holds: its annotations, where it stands, and what it closes over."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable
from types import FunctionType
from typing import Any

import numpy as np

from tessera.errors import Location
from tessera.pytree import flatten
from tessera.tensor import Tensor
from tessera.types import Policy


def closure_key(function: Callable[..., Any], seen: tuple[int, ...] = ()) -> Hashable:
    """Closed-over values, and those of closed-over functions: arrays by identity, the rest by value if they can be."""
    cells = getattr(function, "__closure__", None) or ()
    inner = (*seen, id(function))  # a function may close over itself
    return tuple(hashable(c.cell_contents, inner) for c in cells if _filled(c))


def _filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def hashable(value: Any, seen: tuple[int, ...] = ()) -> Hashable:
    """A value as part of a key: by value if it can be, else by identity."""
    if isinstance(value, (np.ndarray, Tensor)):
        return ("object", id(value))
    if isinstance(value, (bool, int, float, str, bytes, Policy, type(None))):
        return (type(value).__name__, repr(value))
    function = getattr(value, "function", value)  # what is behind a jit function
    if isinstance(function, FunctionType):
        return ("function", id(function), () if id(function) in seen else closure_key(function, seen))
    try:
        hash(value)
        return value
    except TypeError:
        leaves, tree = flatten(value)
        if tree.kind is None:
            return ("object", id(value))
        return tree, tuple(hashable(leaf, seen) for _, leaf in leaves)


def hints_of(function: Callable[..., Any]) -> dict[str, Any]:
    """A function's annotations, evaluated where they can be."""
    try:
        return inspect.get_annotations(function, eval_str=True)
    except (NameError, SyntaxError, TypeError, AttributeError):  # made for another tool: it says nothing of tensors
        return dict(getattr(function, "__annotations__", {}))


def definition_of(function: Callable[..., Any]) -> Location:
    """Where a function is defined."""
    code = getattr(function, "__code__", None)
    return Location(code.co_filename, code.co_firstlineno) if code else Location()

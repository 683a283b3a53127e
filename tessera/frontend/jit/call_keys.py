"""Call keys: what a call of a traced function depends on, found fast: a call like one before is not bound again.

A key has the types of tensors and arrays, the structure of containers, and the values of what is static.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from types import FunctionType
from typing import Any

import numpy as np

from tessera.core.device_array import DeviceArray
from tessera.core.pytree import REGISTERED, flatten
from tessera.core.types import Policy, as_dtype
from tessera.ir.array_interchange import READERS
from tessera.ir.tensor import Tensor

# What a Python function holds: its annotations, where it stands, and what it closes over.


def make_closure_key(function: Callable[..., Any], seen: tuple[int, ...] = ()) -> Hashable:
    """Make a key of closed-over values, recursively: arrays by identity, the rest by value where hashable.

    What a function of the library closes over (`fixed_closure`) never changes.
    """
    if getattr(function, "fixed_closure", None) is function:  # and no wrapper that copied its attributes
        return ()
    cells = getattr(function, "__closure__", None) or ()
    inner = (*seen, id(function))  # a function may capture itself
    return tuple(make_hashable_key(c.cell_contents, inner) for c in cells if _is_filled(c))


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def make_hashable_key(value: Any, seen: tuple[int, ...] = ()) -> Hashable:
    """Make a hashable key of a value: by value where hashable, else by identity."""
    if isinstance(value, (np.ndarray, Tensor)):
        return ("object", id(value))
    if isinstance(value, (bool, int, float, str, bytes, Policy, type(None))):
        return (type(value).__name__, repr(value))
    if value.__class__ in REGISTERED:  # captured as its tensors are
        leaves, tree = flatten(value)
        return tree, tuple(make_hashable_key(leaf, seen) for _, leaf in leaves)
    function = getattr(value, "function", value)  # the function under a jit function
    if isinstance(function, FunctionType):
        return ("function", id(function), () if id(function) in seen else make_closure_key(function, seen))
    try:
        hash(value)
        return value  # type: ignore[no-any-return]
    except TypeError:
        leaves, tree = flatten(value)
        if tree.kind is None:
            return ("object", id(value))
        return tree, tuple(make_hashable_key(leaf, seen) for _, leaf in leaves)


# The walk over the arguments of a call.


_NUMBERS = {float: as_dtype(float).numpy, int: as_dtype(int).numpy}
_ELEMENTS = frozenset((np.ndarray, DeviceArray))
_STATIC = frozenset((bool, str, type(None)))


def walk_call(
    args: Sequence[Any], named: Mapping[str, Any], static_places: frozenset[int], static_names: frozenset[str]
) -> tuple[tuple[Hashable, ...] | None, list[Any]]:
    """The key of a call, and its traced leaves as a program takes them.

    The key is None where an argument takes the general way: it needs gradients, or is of another kind.
    """
    kinds: list[Hashable] = []
    leaves: list[Any] = []
    if named or static_places:
        return _walk_rest(args, named, static_places, static_names)
    for x in args:
        if x.__class__ is Tensor and not x.requires_grad and x.data.__class__ in _ELEMENTS:  # as most are
            kinds.append(x.type)
            leaves.append(x.data)
        elif not _add(x, kinds, leaves):
            return None, leaves
    return tuple(kinds), leaves


def _walk_rest(
    args: Sequence[Any], named: Mapping[str, Any], static_places: frozenset[int], static_names: frozenset[str]
) -> tuple[tuple[Hashable, ...] | None, list[Any]]:
    """As `walk_call`, with static arguments and names."""
    kinds: list[Hashable] = []
    leaves: list[Any] = []
    for i, x in enumerate(args):
        if not (_add_static(x, kinds) if i in static_places else _add(x, kinds, leaves)):
            return None, leaves
    for name, x in named.items():
        kinds.append(name)
        if not (_add_static(x, kinds) if name in static_names else _add(x, kinds, leaves)):
            return None, leaves
    return tuple(kinds), leaves


def _add_static(x: Any, kinds: list[Hashable]) -> bool:
    kinds.append(make_hashable_key(x))
    return x.__class__ in _STATIC or x.__class__ in _NUMBERS


def _add(x: Any, kinds: list[Hashable], leaves: list[Any]) -> bool:
    """Add an argument; False for one that takes the general way."""
    cls = x.__class__
    if cls is Tensor:
        kinds.append(x.type)
        leaves.append(x.data)
        return not x.requires_grad and x.data.__class__ in _ELEMENTS
    if cls is np.ndarray:
        kinds.append((x.shape, x.dtype))
        leaves.append(x)
        return True
    if cls is float or (cls is int and -(2**63) <= x < 2**63):
        kinds.append(cls)
        leaves.append(np.array(x, _NUMBERS[cls]))
        return True
    return _add_other(x, cls, kinds, leaves)


def _add_other(x: Any, cls: type, kinds: list[Hashable], leaves: list[Any]) -> bool:
    """Add a container, a static value, or an array of another library."""
    if cls is dict:
        keys = tuple(sorted(x))
        kinds.append((cls, keys))
        return all([_add(x[k], kinds, leaves) for k in keys])
    if cls is list or cls is tuple:
        kinds.append((cls, len(x)))
        return all([_add(each, kinds, leaves) for each in x])
    if cls in REGISTERED:
        parts = REGISTERED[cls].take_apart(x)
        kinds.append((cls, parts.keys, parts.aux, parts.fixed))
        return all([_add(each, kinds, leaves) for each in parts.children])
    if cls in _STATIC:
        kinds.append((cls, x))
        return True
    if issubclass(cls, tuple) and hasattr(cls, "_fields"):  # a named tuple
        kinds.append((cls, len(x)))
        return all([_add(each, kinds, leaves) for each in x])
    reader = READERS.get(cls)
    kind = None if reader is None else reader.kind(x)
    kinds.append(kind)
    leaves.append(x)
    return kind is not None

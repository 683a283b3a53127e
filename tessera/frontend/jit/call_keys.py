"""Call keys: what a call of a traced function depends on, found fast: a call like one before is not bound again.

A key has the types of tensors and arrays, the structure of containers, and the values of what is static.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from types import FunctionType
from typing import Any

import numpy as np

from tessera.core.device_array import DeviceArray
from tessera.core.pytree import flatten
from tessera.core.types import Policy, as_dtype
from tessera.ir.device_interchange import READERS
from tessera.ir.tensor import Tensor

# What a Python function holds: its annotations, where it stands, and what it closes over.


def make_closure_key(function: Callable[..., Any], seen: tuple[int, ...] = ()) -> Hashable:
    """Make a key of closed-over values, recursively: arrays by identity, the rest by value where hashable."""
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
_STATIC = frozenset((bool, str, type(None)))


class CallWalk:
    """One walk over the arguments of a call: its key, and its traced leaves as a program takes them.

    `plain` is False where an argument takes the general way: it needs gradients, or is of another kind.
    """

    __slots__ = ("_places", "_static", "kinds", "leaves", "plain")

    def __init__(self, static_places: frozenset[int], static_names: frozenset[str]) -> None:
        self.kinds: list[Hashable] = []
        self.leaves: list[Any] = []
        self.plain = True
        self._places, self._static = static_places, static_names

    def key(self, args: Sequence[Any], named: Mapping[str, Any]) -> Hashable:
        """The key of the call; it means nothing where the call is not `plain`."""
        if self._places:
            for i, x in enumerate(args):
                self._add_static(x) if i in self._places else self._add(x)
        else:
            for x in args:
                self._add(x)
        for name, x in named.items():
            self.kinds.append(name)
            self._add_static(x) if name in self._static else self._add(x)
        return tuple(self.kinds)

    def _add_static(self, x: Any) -> None:
        if x.__class__ in _STATIC or x.__class__ in _NUMBERS:
            self.kinds.append(make_hashable_key(x))
        else:
            self.plain = False

    def _add(self, x: Any) -> None:
        cls = x.__class__
        if cls is Tensor:
            data = x.data
            if x.requires_grad or (data.__class__ is not np.ndarray and data.__class__ is not DeviceArray):
                self.plain = False
            self.kinds.append(x.type)
            self.leaves.append(data)
        elif cls is np.ndarray:
            self.kinds.append((x.shape, x.dtype))
            self.leaves.append(x)
        elif cls is float:
            self.kinds.append(cls)
            self.leaves.append(np.array(x, _NUMBERS[cls]))
        else:
            self._add_other(x, cls)

    def _add_other(self, x: Any, cls: type) -> None:
        if cls in _STATIC:
            self.kinds.append((cls, x))
        elif cls is dict:
            keys = tuple(sorted(x))
            self.kinds.append((cls, keys))
            for k in keys:
                self._add(x[k])
        elif cls is list or cls is tuple:
            self.kinds.append((cls, len(x)))
            for each in x:
                self._add(each)
        elif cls is int and -(2**63) <= x < 2**63:
            self.kinds.append(cls)
            self.leaves.append(np.array(x, _NUMBERS[cls]))
        elif (reader := READERS.get(cls)) is not None and (kind := reader.kind(x)) is not None:
            self.kinds.append(kind)
            self.leaves.append(x)
        else:
            self.plain = False

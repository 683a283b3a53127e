"""Call keys: what a call of a traced function depends on, found fast: a call like one before is not bound again.

A key has the types of tensors and arrays, the structure of containers, and the values of what is static.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from operator import itemgetter
from types import FunctionType
from typing import Any

import numpy as np

from tessera.core.device_array import DeviceArray
from tessera.core.pytree import REGISTERED, flatten, sort_keys
from tessera.core.types import Policy, as_dtype
from tessera.ir.array_interchange import READERS
from tessera.ir.frozen_tree import FrozenDict
from tessera.ir.tensor import Tensor

MAX_DEPTH = 4  # of containers in containers whose objects are compared
MAX_OBJECT_DEPTH = 1  # of objects in objects whose attributes are compared

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


def list_cells(function: Callable[..., Any], seen: tuple[int, ...] = ()) -> list[tuple[Any, Any]] | None:
    """The cells that a function closes over, recursively, with their contents.

    As long as each cell holds the same object, the closure key is the same: what a dict or list holds is a cell, too
    (`HeldObjects`). None where the key may change without that.
    """
    if getattr(function, "fixed_closure", None) is function:
        return []
    found: list[tuple[Any, Any]] = []
    for cell in getattr(function, "__closure__", None) or ():
        if not _is_filled(cell):
            return None
        value = cell.cell_contents
        inner = getattr(value, "function", value)
        found.append((cell, value))
        if isinstance(inner, FunctionType):
            held = [] if id(inner) in seen else list_cells(inner, (*seen, id(function)))
            if held is None:
                return None
            found += held
        elif not _add_held(value, found):
            return None
    return found


class HeldObjects:
    """The objects that a dict or list holds: as a cell, its content is `SAME` as long as they are the same objects."""

    __slots__ = ("container", "ids", "names", "objects")
    SAME = object()

    def __init__(self, container: dict[str, Any] | list[Any]) -> None:
        self.container, self.names = container, tuple(container) if isinstance(container, dict) else ()
        self.objects = tuple(container.values() if isinstance(container, dict) else container)
        self.ids = tuple(map(id, self.objects))  # of objects that are kept, so that no other one takes their place

    @property
    def cell_contents(self) -> object:
        """`SAME`, or None where it holds other objects or names."""
        held: Any = self.container
        if self.names:
            if tuple(held) != self.names:
                return None
            held = held.values()
        return self.SAME if tuple(map(id, held)) == self.ids else None


def _add_held(value: Any, found: list[tuple[Any, Any]], depth: int = 0) -> bool:
    """Add the cells of what a dict or list holds; whether no key of the value changes without one of its cells."""
    if type(value) not in (dict, list):
        closes_over = depth and isinstance(getattr(value, "function", value), FunctionType)
        return not closes_over and _is_keyed_by_identity(value)
    if depth > MAX_DEPTH or (type(value) is dict and not all(type(name) is str for name in value)):
        return False
    held = HeldObjects(value)
    found.append((held, HeldObjects.SAME))
    return all(_add_held(each, found, depth + 1) for each in held.objects)


def _is_keyed_by_identity(value: Any) -> bool:
    """Whether one object has the same key at all times."""
    if isinstance(value, (np.ndarray, Tensor)):
        return True
    try:
        hash(value)
    except TypeError:
        return False
    return value.__class__ not in REGISTERED


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


class ObjectKey:
    """A key of one object, which it keeps: no other object takes its place in memory."""

    __slots__ = ("held",)

    def __init__(self, held: object) -> None:
        self.held = held

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ObjectKey) and self.held is other.held

    def __hash__(self) -> int:
        return id(self.held)


def make_hashable_key(value: Any, seen: tuple[int, ...] = ()) -> Hashable:
    """Make a hashable key of a value: by value where hashable, else by identity."""
    if isinstance(value, (np.ndarray, Tensor)):
        return ObjectKey(value)
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
        if dataclasses.is_dataclass(value):  # unhashable, so that it may change in place
            fields = [getattr(value, field.name) for field in dataclasses.fields(value)]
            return type(value), tuple(make_hashable_key(each, seen) for each in fields)
        leaves, tree = flatten(value)
        if tree.kind is None:
            return ObjectKey(value)
        return tree, tuple(make_hashable_key(leaf, seen) for _, leaf in leaves)


def make_static_key(value: Any, depth: int = 0) -> Hashable:
    """The key of an argument that is not traced.

    A user's object that compares by identity counts with its attributes. A generator made outside of a function, which
    gives the same numbers in each call, does not.
    """
    key, kind = make_hashable_key(value), type(value)
    if key is not value or depth > MAX_OBJECT_DEPTH or kind.__hash__ is not object.__hash__:
        return key
    held = getattr(value, "__dict__", None)
    if isinstance(value, type) or not isinstance(held, dict) or kind.__module__.startswith("tessera."):
        return key
    return ObjectKey(value), tuple((name, make_static_key(each, depth + 1)) for name, each in held.items())


# The walk over the arguments of a call.


_NUMBERS = {float: as_dtype(float).numpy, int: as_dtype(int).numpy}
_ELEMENTS = frozenset((np.ndarray, DeviceArray))
_STATIC = frozenset((bool, str, type(None)))
# By the names of a dict in its own order: what a key says of it, and what gives its values in the order of the key.
_DICTS: dict[tuple[Any, ...], tuple[Hashable, Callable[[Any], Sequence[Any]]]] = {}
_MAX_DICTS = 4096


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
    return (tuple(kinds) if _add_all(args, kinds, leaves) else None), leaves


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
    kinds.append(make_static_key(x))
    return x.__class__ in _STATIC or x.__class__ in _NUMBERS


def _add_all(values: Iterable[Any], kinds: list[Hashable], leaves: list[Any]) -> bool:
    """Add arguments or what a container holds; False if one takes the general way."""
    known = True
    for x in values:
        if x.__class__ is Tensor and not x.requires_grad and x.data.__class__ in _ELEMENTS:  # as most are
            kinds.append(x.type)
            leaves.append(x.data)
        elif not _add(x, kinds, leaves):
            known = False
    return known


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


def _note_dict(names: tuple[Any, ...]) -> tuple[Hashable, Callable[[Any], Sequence[Any]]]:
    keys = sort_keys(names)
    get = itemgetter(*keys) if len(keys) > 1 else lambda x: [x[k] for k in keys]
    if len(_DICTS) >= _MAX_DICTS:
        _DICTS.clear()
    found = _DICTS[names] = (dict, keys), get
    return found


# The structures of frozen trees, each with an object that stands for it in keys.
_STRUCTURES: dict[tuple[Hashable, ...], object] = {}


def _add_frozen(x: FrozenDict, kinds: list[Hashable], leaves: list[Any]) -> bool:
    """Add a frozen tree: its leaves are looked at once, and one object is the key of all of them."""
    if x.walked is None:
        own: list[Hashable] = []
        found: list[Any] = []
        if not _add_other(x.held, dict, own, found):
            return False
        if len(_STRUCTURES) >= _MAX_DICTS:
            _STRUCTURES.clear()
        x.walked = _STRUCTURES.setdefault(tuple(own), object()), tuple(found)
    key, arrays = x.walked
    kinds.append(key)
    leaves += arrays
    return True


def _add_other(x: Any, cls: type, kinds: list[Hashable], leaves: list[Any]) -> bool:
    """Add a container, a static value, or an array of another library."""
    if cls is FrozenDict:
        return _add_frozen(x, kinds, leaves)
    if cls is dict:
        kind, get = _DICTS.get(names := tuple(x)) or _note_dict(names)
        kinds.append(kind)
        return _add_all(get(x), kinds, leaves)
    if cls is list or cls is tuple:
        kinds.append((cls, len(x)))
        return _add_all(x, kinds, leaves)
    if cls in REGISTERED:
        parts = REGISTERED[cls].take_apart(x)
        kinds.append((cls, parts.keys, parts.aux, parts.fixed))
        return _add_all(parts.children, kinds, leaves)
    if cls in _STATIC:
        kinds.append((cls, x))
        return True
    if issubclass(cls, tuple) and hasattr(cls, "_fields"):  # a named tuple
        kinds.append((cls, len(x)))
        return _add_all(x, kinds, leaves)
    reader = READERS.get(cls)
    kind = None if reader is None else reader.kind(x)
    kinds.append(kind)
    leaves.append(x)
    return kind is not None

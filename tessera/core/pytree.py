"""Pytrees: nested containers of tensors are flattened to leaves and rebuilt (as in JAX); what becomes of buffers in
them that a traced function replaces; and name scopes, the paths of the objects whose methods run.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from tessera.core.errors import CURRENT_SCOPE, ArgumentError, LostUpdateWarning, user_location

# Registered classes: how their instances are taken apart and put together.


class Parts(NamedTuple):
    """An instance taken apart: its children with their keys, and what else it holds (`aux`, hashable).

    `fixed` says for each child whether derivatives leave it alone, as they do a buffer of a module; `renewed` whether a
    call of the instance may give it another value all the same, as it may a buffer.
    """

    keys: tuple[str, ...]
    children: Sequence[Any]
    aux: Hashable = None
    fixed: tuple[bool, ...] = ()
    renewed: tuple[bool, ...] = ()


class Registration(NamedTuple):
    """How a class is flattened and rebuilt; `list_children` gives the children alone, in any order, at less cost."""

    take_apart: Callable[[Any], Parts]
    build: Callable[[type, Hashable, tuple[str, ...], list[Any]], Any]
    list_children: Callable[[Any], Sequence[Any]]


REGISTERED: dict[type, Registration] = {}


def register_class(
    cls: type,
    take_apart: Callable[[Any], Parts],
    build: Callable[..., Any],
    list_children: Callable[[Any], Sequence[Any]] | None = None,
) -> None:
    """Make the instances of a class containers: `build(cls, aux, keys, children)` makes one."""
    REGISTERED[cls] = Registration(take_apart, build, list_children or (lambda x: take_apart(x).children))


class StaticFields:
    """Named values that are no tensors: equal by value, hashable even where a value is not.

    `immutable` says that none of the values can change in place. Of lists, dicts and sets the elements of this moment
    are compared: who changes one in place has another value.
    """

    __slots__ = ("_hash", "_held", "immutable", "values")

    def __init__(self, values: Mapping[str, Any], immutable: bool = False) -> None:
        self.values, self.immutable = dict(values), immutable
        self._held = self.values if immutable else {name: _copy_containers(x) for name, x in self.values.items()}
        self._hash = hash(tuple((name, _hash_value(value)) for name, value in self.values.items()))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, StaticFields) or self._hash != other._hash or [*self.values] != [*other.values]:
            return False
        return all(_is_same(a, other._held[name]) for name, a in self._held.items())

    def __repr__(self) -> str:
        return f"StaticFields({self.values})"


def _copy_containers(value: Any, outer: tuple[int, ...] = ()) -> Any:
    """Lists, dicts, sets and tuples of Python with their elements, and what else they hold itself."""
    kind = type(value)
    if kind not in (dict, list, tuple, set) or id(value) in outer:
        return value
    outer = (*outer, id(value))
    if kind is dict:
        return {key: _copy_containers(x, outer) for key, x in value.items()}
    return kind(_copy_containers(x, outer) for x in value)


def _hash_value(value: Any) -> int:
    try:
        return hash((type(value), value))
    except TypeError:
        return hash(type(value))


def _is_same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    try:
        return type(a) is type(b) and bool(a == b)
    except (TypeError, ValueError):  # arrays compare by element
        return False


def register(cls: type | None = None, *, static: Sequence[str] = ()) -> Any:
    """A decorator that makes a dataclass a container: its fields are children, those named in `static` are constants.

    Static fields decide which program a call gets, as strings and bools do: a new value compiles anew.

    >>> @register(static=("name",))
    ... @dataclass(frozen=True)
    ... class State:
    ...     step: int
    ...     name: str = ""
    >>> map_leaves(lambda x: x + 1, State(1, "a"))
    State(step=2, name='a')

    Raises:
        ArgumentError: it is no dataclass, or has no such field.
    """
    if cls is None:
        return lambda each: register(each, static=static)
    if not (isinstance(cls, type) and dataclasses.is_dataclass(cls)):
        raise ArgumentError(
            f"{getattr(cls, '__name__', cls)} is no dataclass", location=user_location(),
            expected="a class that @dataclass decorates", suggestion="write @ts.tree.register above @dataclass",
        )  # fmt: skip
    names = [f.name for f in dataclasses.fields(cls)]
    if unknown := [n for n in static if n not in names]:
        raise ArgumentError(
            f"{cls.__name__} has no field {unknown[0]}", location=user_location(), expected=", ".join(names)
        )
    moving = tuple(n for n in names if n not in static)

    def take_apart(value: Any) -> Parts:
        constants = StaticFields({n: getattr(value, n) for n in static})
        return Parts(moving, [getattr(value, n) for n in moving], constants)

    register_class(cls, take_apart, _build_dataclass)
    return cls


def _build_dataclass(cls: type, aux: Any, keys: tuple[str, ...], children: list[Any]) -> Any:
    made: Any = object.__new__(cls)  # no __init__: it may check or change what it gets
    for name, value in (*aux.values.items(), *zip(keys, children, strict=True)):
        object.__setattr__(made, name, value)
    return made


# Trees.


@dataclass(frozen=True)
class TreeDef:
    """The shape of a nested container: its kind, its keys and its children; a leaf has kind None.

    Where None counts as a container that holds nothing, its kind is NoneType. A registered class has `aux`, and
    derivatives leave a `fixed` leaf alone. What a traced function gives a `renewed` leaf is kept.
    """

    kind: Any = None
    keys: tuple[Any, ...] = ()
    children: tuple[TreeDef, ...] = ()
    aux: Hashable = None
    fixed: bool = False
    renewed: bool = False

    def build(self, leaves: Iterator[Any]) -> Any:
        """The container with these leaves."""
        if self.kind is None:
            return next(leaves)
        if self.kind is type(None):
            return None
        parts = [child.build(leaves) for child in self.children]
        if self.kind is dict:
            return dict(zip(self.keys, parts, strict=True))
        if self.kind in REGISTERED:
            return REGISTERED[self.kind].build(self.kind, self.aux, self.keys, parts)
        return self.kind(*parts) if hasattr(self.kind, "_fields") else self.kind(parts)

    def list_fixed(self) -> list[bool]:
        """For each leaf, in order, whether derivatives leave it alone."""
        if self.kind is None:
            return [self.fixed]
        return [fixed for child in self.children for fixed in child.list_fixed()]

    def list_renewed(self) -> list[bool]:
        """For each leaf, in order, whether a new value that a traced function gives it is kept."""
        if self.kind is None:
            return [self.fixed or self.renewed]
        return [renewed for child in self.children for renewed in child.list_renewed()]


LEAF, FIXED_LEAF, RENEWED_LEAF = TreeDef(), TreeDef(fixed=True), TreeDef(renewed=True)


def sort_keys(names: Iterable[Any]) -> tuple[Any, ...]:
    """The keys of a dict in the order of its leaves.

    Raises:
        ArgumentError: they have no order, as a string and a number have none.
    """
    keys = tuple(names)
    try:
        return tuple(sorted(keys))
    except TypeError:
        raise ArgumentError(
            "the keys of a dict have no order", location=user_location(), expected="keys of one type, such as strings",
            received=", ".join(sorted({type(key).__name__ for key in keys})),
        ) from None  # fmt: skip


def flatten(value: Any, path: str = "", empty: bool = False) -> tuple[list[tuple[str, Any]], TreeDef]:
    """The leaves, each with its path ("layers.0.weight"), and the tree that holds them.

    Dicts (in the order of their keys, sorted), lists, tuples, named tuples and registered classes (`ts.nn.Module`,
    dataclasses with `ts.tree.register`) are containers; all else is a leaf, but for None where it counts as `empty`.

    >>> flatten({"b": [1, 2], "a": 3}, "p")[0]
    [('p.a', 3), ('p.b.0', 1), ('p.b.1', 2)]
    """
    if value is None and empty:
        return [], TreeDef(type(None))
    if isinstance(value, Mapping):
        keys = sort_keys(value)
        items = [(k, value[k]) for k in keys]
        kind: Any = dict
    elif isinstance(value, (list, tuple)):
        keys, kind = (), type(value)
        items = list(enumerate(value))
    elif value.__class__ in REGISTERED:
        return _flatten_registered(value, path, empty)
    else:
        return [(path, value)], LEAF
    leaves: list[tuple[str, Any]] = []
    children = []
    for key, item in items:
        inner, child = flatten(item, f"{path}.{key}" if path else str(key), empty)
        leaves += inner
        children.append(child)
    return leaves, TreeDef(kind, keys, tuple(children))


def _flatten_registered(value: Any, path: str, empty: bool) -> tuple[list[tuple[str, Any]], TreeDef]:
    parts = REGISTERED[value.__class__].take_apart(value)
    leaves: list[tuple[str, Any]] = []
    children = []
    for i, (key, item) in enumerate(zip(parts.keys, parts.children, strict=True)):
        inner, child = flatten(item, f"{path}.{key}" if path else str(key), empty)
        leaves += inner
        if child == LEAF and parts.fixed and parts.fixed[i]:
            child = FIXED_LEAF
        elif child == LEAF and parts.renewed and parts.renewed[i]:
            child = RENEWED_LEAF
        children.append(child)
    return leaves, TreeDef(value.__class__, parts.keys, tuple(children), parts.aux)


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """The same container with `function` applied to every leaf."""
    leaves, tree = flatten(value)
    return tree.build(iter([function(leaf) for _, leaf in leaves]))


def leaf_paths(tree: TreeDef, path: str = "") -> Iterator[str]:
    """The paths of a tree's leaves, in order.

    >>> list(leaf_paths(flatten({"a": [1, 2]})[1]))
    ['a.0', 'a.1']
    """
    if tree.kind is None:
        yield path
        return
    for key, child in zip(tree.keys or range(len(tree.children)), tree.children, strict=True):
        yield from leaf_paths(child, f"{path}.{key}" if path else str(key))


# Buffer updates: what becomes of buffers of a module that a traced function replaces and does not return (Flax).
#
# `ts.jit`, `ts.value_and_grad` and `ts.grad` put them into the module that they were given; others warn.


_TOLD: dict[Any, Any] = {}  # Python's registry of warnings: each line of a user is told once


def call_and_collect(function: Callable[..., Any], *given: Any, **named: Any) -> tuple[Any, dict[str, Any]]:
    """The result of a function that is traced with containers of its own, and what else it leaves in them.

    These are the buffers that it replaced and does not return, by path ("0.norm.running_mean" in the first container).
    """
    before = _list_buffers(given)
    outcome = function(*given, **named)
    if not before:
        return outcome, {}
    held = {id(leaf) for _, leaf in (*before, *flatten(outcome, empty=True)[0])}
    return outcome, {path: leaf for path, leaf in _list_buffers(given) if id(leaf) not in held}


def call_and_warn(function: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """The result of a function that is traced with containers of its own, so that only what it returns is kept.

    It warns of buffers of these containers that the function replaces and does not return.
    """
    outcome, lost = call_and_collect(function, *given, **named)
    if lost:
        place = user_location()
        text = describe_lost([path.partition(".")[2] for path in lost])
        warnings.warn_explicit(text, LostUpdateWarning, place.file, place.line, registry=_TOLD)
    return outcome


def store_updates(value: Any, updates: Mapping[str, Any], path: str = "") -> None:
    """Put new buffers, by path, into the modules of a container.

    Raises:
        TraceError: a module does not belong to the trace that is under way.
    """
    inside = f"{path}." if path else ""
    if isinstance(value, Mapping):
        for key, item in value.items():
            store_updates(item, updates, f"{inside}{key}")
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            store_updates(item, updates, f"{inside}{i}")
    elif value.__class__ in REGISTERED:
        owner: Any = value
        parts = REGISTERED[value.__class__].take_apart(value)
        for key, item in zip(parts.keys, parts.children, strict=True):
            if f"{inside}{key}" in updates:
                owner.set_tensor(key, updates[f"{inside}{key}"])
            else:
                store_updates(item, updates, f"{inside}{key}")


def _list_buffers(given: tuple[Any, ...]) -> list[tuple[str, Any]]:
    """The buffers of modules, and the parameters that a call may renew, with their paths."""
    found = [flatten(value, str(i), empty=True) for i, value in enumerate(given)]
    return [pair for leaves, tree in found for pair, kept in zip(leaves, tree.list_renewed(), strict=True) if kept]


def describe_lost(paths: list[str]) -> str:
    """The text of the warning: the buffers of the first module, and how many more modules there are.

    >>> describe_lost(["norm.mean", "norm.var"]).partition(".")[0]
    'new buffers are lost, because the function does not return the module: mean and var of norm'
    """
    owners: dict[str, list[str]] = {}
    for path in paths:
        owner, _, name = path.rpartition(".")
        owners.setdefault(owner, []).append(name)
    first, names = next(iter(owners.items()))
    listed = " and ".join(part for part in (", ".join(names[:-1]), names[-1]) if part)
    more = f" (and those of {len(owners) - 1} more)" if len(owners) > 1 else ""
    return (
        f"new buffers are lost, because the function does not return the module: {listed} of {first or 'the module'}"
        f"{more}. Return the module too, under ts.value_and_grad as (loss, model) with has_aux=True; "
        "or call model.eval() first"
    )


# Name scopes: what errors of compiled programs say of the place at which their op was traced.


class CallScope:
    """An object whose method runs, and the scope of the method that called it (JAX's named_scope).

    Its name, the path of the object in the one that holds it and its class, is found when it is asked for.

    The object has a method `__parts__`, which gives the objects that it holds with their names; or it is a dict of the
    arguments of a function, in which only state objects (`is_state`) are looked for: a module's path begins at the
    outermost module, as in its state dict.
    """

    __slots__ = ("name", "outer", "owner", "path")

    def __init__(self, owner: Any, outer: CallScope | None) -> None:
        self.owner, self.outer = owner, outer
        self.path: str | None = None
        self.name = ""

    def __str__(self) -> str:
        if not self.name and not isinstance(self.owner, Mapping):
            path, kind = self.find_path(), type(self.owner).__name__
            self.name = f"{path}: {kind}" if path else kind
        return self.name

    def find_path(self) -> str:
        """The path of the object in the outermost object that holds it; "" if none does."""
        if self.path is None:
            found = next(self._iterate_paths(), ("",))
            self.path = ".".join(part for part in found if part)
        return self.path

    def _iterate_paths(self) -> Iterator[tuple[str, ...]]:
        outer, is_state = self.outer, getattr(type(self.owner), "is_state", False)
        while outer is not None:
            named = is_state or not isinstance(outer.owner, Mapping)
            below = "" if outer.owner is self.owner else find_part(outer.owner, self.owner) if named else None
            if below is not None:
                yield outer.find_path(), below
            outer = outer.outer


@contextmanager
def in_scope(owner: Any, outermost: bool = False) -> Iterator[None]:
    """A context in which a method of an object runs; `outermost`: whatever called it is no scope of it."""
    token = CURRENT_SCOPE.set(CallScope(owner, None if outermost else CURRENT_SCOPE.get()))
    try:
        yield
    finally:
        CURRENT_SCOPE.reset(token)


def find_part(whole: Any, wanted: Any) -> str | None:
    """The path of an object in one that holds it, the shortest first; None if it does not."""
    work, seen = [("", whole)], set()
    for prefix, each in work:
        for name, part in _list_parts(each):
            path = f"{prefix}.{name}" if prefix else str(name)
            if part is wanted:
                return path
            if id(part) not in seen:
                seen.add(id(part))
                work.append((path, part))
    return None


def _list_parts(value: Any) -> Any:
    if isinstance(value, Mapping):
        return value.items()
    if isinstance(value, (list, tuple)):
        return enumerate(value)
    parts = getattr(type(value), "__parts__", None)
    return () if parts is None else parts(value)

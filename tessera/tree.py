"""Trees: functions of pytrees, the nested containers of tensors that transforms and modules use (JAX's `jax.tree`)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tessera.core.errors import ArgumentError, user_location
from tessera.core.pytree import TreeDef, leaf_paths, register
from tessera.core.pytree import flatten as _flatten
from tessera.ir.frozen_tree import FrozenDict

__all__ = ["all", "flatten", "freeze", "leaves", "leaves_with_path", "map", "map_with_path", "reduce", "register",
           "structure", "transpose", "unflatten"]  # fmt: skip


def flatten(tree: Any) -> tuple[list[Any], TreeDef]:
    """The leaves of a tree in order, and its structure.

    >>> flatten({"b": [1, 2], "a": 3})[0]
    [3, 1, 2]
    """
    found, structure = _flatten(tree, empty=True)
    return [leaf for _, leaf in found], structure


def freeze(tree: Mapping[str, Any]) -> FrozenDict:
    """A dict of tensors, nested in any way, that never changes: calls of traced functions look at its leaves once.

    What it gives out are new containers and tensors of the same arrays. A traced function takes it as a dict.

    >>> import tessera as ts
    >>> weights = freeze({"w": ts.tensor([2.0]), "b": ts.tensor([1.0])})
    >>> ts.jit(lambda p, x: p["w"] * x + p["b"])(weights, ts.tensor([3.0]))
    Tensor([7.], f32)

    Raises:
        ArgumentError: it is no dict.
    """
    if not isinstance(tree, Mapping):
        raise ArgumentError(
            "only a dict can be frozen", location=user_location(), received=type(tree).__name__,
            expected="a dict of tensors and containers",
        )  # fmt: skip
    return FrozenDict(tree)


def unflatten(structure: TreeDef, leaves: Iterable[Any]) -> Any:
    """The tree of a structure with these leaves.

    >>> unflatten(structure({"b": [1, 2], "a": 3}), [30, 10, 20])
    {'a': 30, 'b': [10, 20]}

    Raises:
        ArgumentError: the number of leaves is another.
    """
    listed = list(leaves)
    wanted = len(list(leaf_paths(structure)))
    if len(listed) != wanted:
        raise ArgumentError(
            "the number of leaves is wrong", location=user_location(), expected=str(wanted), received=str(len(listed))
        )
    return structure.build(iter(listed))


def leaves(tree: Any) -> list[Any]:
    """The leaves of a tree in order; None holds nothing."""
    return flatten(tree)[0]


def leaves_with_path(tree: Any) -> list[tuple[str, Any]]:
    """The leaves of a tree with their paths.

    >>> leaves_with_path({"layers": [{"w": 1}]})
    [('layers.0.w', 1)]
    """
    return _flatten(tree, empty=True)[0]


def structure(tree: Any) -> TreeDef:
    """The structure of a tree: its containers without the leaves."""
    return flatten(tree)[1]


def map(function: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """The tree with `function` applied to each leaf, and to the leaves at the same places of other trees.

    A leaf that derivatives leave alone (a buffer of a module) stays as it is where another tree, such as that of
    gradients, has None in its place.

    >>> map(lambda p, g: p - g, {"w": 3, "b": [1]}, {"w": 1, "b": [2]})
    {'b': [-1], 'w': 2}

    Raises:
        ArgumentError: the trees differ in structure; it names the first path.
    """
    return map_with_path(lambda _, *found: function(*found), tree, *rest)


def map_with_path(function: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """As `map`, for a function whose first argument is the path of the leaf.

    >>> map_with_path(lambda path, x: f"{path}={x}", {"a": [1, 2]})
    {'a': ['a.0=1', 'a.1=2']}
    """
    found, structure = _flatten(tree, empty=True)
    fixed = structure.list_fixed()
    columns = [_align(found, fixed, other) for other in rest]
    made = []
    for i, (path, leaf) in enumerate(found):
        others = [column[i] for column in columns]
        kept = fixed[i] and None in [o if o is None else 0 for o in others]
        made.append(leaf if kept else function(path, leaf, *others))
    return structure.build(iter(made))


def _align(found: list[tuple[str, Any]], fixed: list[bool], other: Any) -> list[Any]:
    """The leaves of another tree by the paths of the first; None for a fixed leaf that it lacks."""
    given = dict(_flatten(other, empty=True)[0])
    known = {path for path, _ in found}
    missing = [path for (path, _), keep in zip(found, fixed, strict=True) if path not in given and not keep]
    if missing or given.keys() - known:
        path = missing[0] if missing else sorted(given.keys() - known)[0]
        raise ArgumentError(
            f"the trees differ: {path or 'the leaf'} is only in the {'first' if missing else 'other'}",
            location=user_location(), expected="trees of one structure",
        )  # fmt: skip
    return [given.get(path) for path, _ in found]


def reduce(function: Callable[[Any, Any], Any], tree: Any, *initial: Any) -> Any:
    """The leaves of a tree combined from the left.

    >>> reduce(lambda a, b: a + b, {"a": 1, "b": [2, 3]})
    6
    """
    return functools.reduce(function, leaves(tree), *initial)


def all(tree: Any) -> bool:
    """Whether all leaves are true."""
    return False not in [bool(leaf) for leaf in leaves(tree)]


def transpose(trees: Any) -> Any:
    """A list of trees of one structure as one tree of lists.

    >>> transpose([{"a": 1}, {"a": 2}])
    {'a': [1, 2]}
    """
    listed = list(trees)
    if not listed:
        raise ArgumentError("transpose of no trees", location=user_location(), expected="one or more")
    return map(lambda *found: list(found), *listed)

"""Pytrees: nested containers of tensors are flattened to leaves and rebuilt (as in JAX)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class TreeDef:
    """The shape of a nested container: its kind, its keys and its children; a leaf has kind None.

    Where None counts as a container that holds nothing, its kind is NoneType.
    """

    kind: Any = None
    keys: tuple[Any, ...] = ()
    children: tuple[TreeDef, ...] = ()

    def build(self, leaves: Iterator[Any]) -> Any:
        """The container with these leaves."""
        if self.kind is None:
            return next(leaves)
        if self.kind is type(None):
            return None
        parts = [child.build(leaves) for child in self.children]
        if self.kind is dict:
            return dict(zip(self.keys, parts, strict=True))
        return self.kind(*parts) if hasattr(self.kind, "_fields") else self.kind(parts)


def flatten(value: Any, path: str = "", empty: bool = False) -> tuple[list[tuple[str, Any]], TreeDef]:
    """The leaves, each with its path ("layers.0.weight"), and the tree that holds them.

    Dicts (in the order of their keys, sorted), lists, tuples and named tuples are containers; all else is a leaf,
    but for None where it counts as `empty`.

    >>> flatten({"b": [1, 2], "a": 3}, "p")[0]
    [('p.a', 3), ('p.b.0', 1), ('p.b.1', 2)]
    """
    if value is None and empty:
        return [], TreeDef(type(None))
    if isinstance(value, Mapping):
        keys = tuple(sorted(value))
        items = [(k, value[k]) for k in keys]
        kind: Any = dict
    elif isinstance(value, (list, tuple)):
        keys, kind = (), type(value)
        items = list(enumerate(value))
    else:
        return [(path, value)], TreeDef()
    leaves: list[tuple[str, Any]] = []
    children = []
    for key, item in items:
        inner, child = flatten(item, f"{path}.{key}" if path else str(key), empty)
        leaves += inner
        children.append(child)
    return leaves, TreeDef(kind, keys, tuple(children))


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

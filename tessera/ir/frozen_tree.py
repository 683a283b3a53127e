"""Frozen trees: dicts of tensors that never change, such as a model's weights; a call looks at their leaves once."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from typing import Any

from tessera.core.pytree import map_leaves
from tessera.ir.tensor import Tensor


class FrozenDict(Mapping[str, Any]):
    """A dict of tensors and containers of them, as it was when it was made; what it gives out are copies of these.

    A traced function takes it as a dict. The elements of arrays are not copied: a kernel that writes into an array
    writes into it.

    >>> weights = FrozenDict({"w": Tensor([1.0, 2.0]), "layers": [{"b": Tensor([3.0])}]})
    >>> weights["layers"][0]["b"], list(weights)
    (Tensor([3.], f32), ['w', 'layers'])
    """

    __slots__ = ("_held", "walked")

    def __init__(self, tree: Mapping[str, Any]) -> None:
        self._held = {name: _copy(x) for name, x in tree.items()}
        # What a call needs to know, once one has looked: a key of the types, and the arrays; None: not yet.
        self.walked: tuple[Hashable, tuple[Any, ...]] | None = None

    def __getitem__(self, name: str) -> Any:
        return _copy(self._held[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)

    def __repr__(self) -> str:
        return f"FrozenDict({self._held!r})"

    @property
    def held(self) -> Mapping[str, Any]:
        """The containers and tensors themselves, which nothing else refers to."""
        return self._held


def _copy(tree: Any) -> Any:
    """The tree with new containers and tensors, of the same arrays."""
    return map_leaves(_share, tree)


def _share(leaf: Any) -> Any:
    if leaf.__class__ is not Tensor or leaf.requires_grad:  # a gradient belongs to its tensor
        return leaf
    made = Tensor.__new__(Tensor)
    made.data, made.type, made.grad, made.requires_grad = leaf.data, leaf.type, None, False
    return made

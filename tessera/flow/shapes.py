"""What loops carry and walk over: containers of tensors of fixed types, and stacks of one length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tessera.effect import ALL, watched
from tessera.errors import ArgumentError, ShapeError, here
from tessera.pytree import Tree, flatten
from tessera.tensor import Tensor, as_tensor


def repeated(owner: str) -> Any:
    """A stretch that is traced once and run many times: draws from a generator outside would all be the same."""
    advice = "make a generator of each step's own: ts.Generator(seed), with the seeds among xs or in the state"
    return watched(ALL - {"random"}, f"a step of {owner}", "the same numbers in every step are no random ones", advice)


@dataclass(frozen=True)
class Carried:
    """A state as tensors, and the container that holds them; `owner` is what errors name."""

    tensors: list[Tensor]
    names: list[str]
    tree: Tree
    owner: str

    @staticmethod
    def of(value: Any, owner: str) -> Carried:
        """A first state; Python numbers become f32 or int64 scalars."""
        leaves, tree = flatten(value, "state")
        return Carried([as_tensor(x) for _, x in leaves], [n for n, _ in leaves], tree, owner)

    @property
    def value(self) -> Any:
        """The first state."""
        return self.build(self.tensors)

    def build(self, tensors: Sequence[Tensor]) -> Any:
        """The container with these tensors."""
        return self.tree.build(iter(tensors))

    def next(self, value: Any) -> list[Tensor]:
        """A later state as tensors.

        Raises:
            ArgumentError: its container is another.
            ShapeError: a leaf is of another type than at first.
        """
        leaves, tree = flatten(value, "state")
        if tree != self.tree:
            raise ArgumentError(
                f"the state of {self.owner} changes its container", location=here(),
                expected=", ".join(self.names), received=", ".join(n for n, _ in leaves),
            )  # fmt: skip
        found = [as_tensor(x, t.type) for (_, x), t in zip(leaves, self.tensors, strict=True)]
        for name, new, old in zip(self.names, found, self.tensors, strict=True):
            if new.type != old.type:
                raise ShapeError(
                    f"{name} changes its type in {self.owner}", location=here(), expected=str(old.type),
                    received=str(new.type), suggestion="begin with what a step gives, or cast",
                )  # fmt: skip
        return found


@dataclass(frozen=True)
class Stacked:
    """Inputs of a loop: tensors whose first axis counts the steps."""

    tensors: list[Tensor]
    tree: Tree | None
    length: Any

    def build(self, slices: Sequence[Tensor]) -> Any:
        """The container of one step."""
        return None if self.tree is None else self.tree.build(iter(slices))


def stacked(value: Any, length: int | None) -> Stacked:
    """The inputs of a loop.

    Raises:
        ShapeError: they differ in length, or one is a scalar.
        ArgumentError: there are none, and no length.
    """
    leaves, tree = ([], None) if value is None else flatten(value, "xs")
    found = [as_tensor(x) for _, x in leaves]
    for (name, _), x in zip(leaves, found, strict=True):
        if not x.shape:
            raise ShapeError(f"{name} is a scalar, which has no axis to walk over", location=here())
    sizes = {x.shape[0]: None for x in found} | ({} if length is None else {length: None})
    if not sizes:
        raise ArgumentError("a loop over nothing needs its length", location=here(), suggestion="give length=")
    if len(sizes) > 1:
        raise ShapeError(
            "what is walked over differs in length", location=here(), expected="one size of the first axis",
            received=" and ".join(str(s) for s in sizes),
        )  # fmt: skip
    return Stacked(found, tree, next(iter(sizes)))

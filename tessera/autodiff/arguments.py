"""What users pass to transforms: containers of tensors, taken apart and checked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tessera.autodiff.record import Recorded, record
from tessera.errors import ArgumentError, DTypeError, ShapeError, here
from tessera.pytree import Tree, flatten, map_leaves
from tessera.tensor import Tensor, as_tensor
from tessera.types import TensorType


@dataclass(frozen=True)
class Arguments:
    """Arguments as float tensors with their names, and the container that holds them."""

    names: tuple[str, ...]
    tensors: tuple[Tensor, ...]
    tree: Tree

    @property
    def types(self) -> list[TensorType]:
        """The types of the tensors."""
        return [t.type for t in self.tensors]

    def build(self, leaves: Sequence[Any]) -> Any:
        """The container with these leaves."""
        return self.tree.build(iter(leaves))


def floats(value: Any, name: str) -> Arguments:
    """A container of tensors that derivatives are taken with respect to; None in it stays None.

    Raises:
        DTypeError: a leaf is not of a float type.
    """
    leaves, tree = flatten(value, name, empty=True)
    return Arguments(tuple(n for n, _ in leaves), tuple(_float(n, x) for n, x in leaves), tree)


def _float(name: str, value: Any) -> Tensor:
    tensor = as_tensor(value)
    if not tensor.dtype.is_float:
        raise DTypeError(
            f"no derivative with respect to {name}: its elements are not floats", location=here(),
            expected="a float tensor", received=str(tensor.type),
            suggestion=f"cast it first: {name}.to(ts.f32), or name another argument in argnums",
        )  # fmt: skip
    return tensor


def tensors(value: Any) -> Any:
    """A container with its arrays made tensors."""
    return map_leaves(lambda x: Tensor(x) if isinstance(x, np.ndarray) else x, value)


def places(argnums: int | Sequence[int], count: int) -> tuple[int, ...]:
    """The positions that `argnums` names."""
    listed = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    for number in listed:
        if not -count <= number < count:
            raise ArgumentError(
                f"argument {number} was not passed by position", location=here(),
                expected=f"argnums from 0 to {count - 1}", received=str(argnums),
            )  # fmt: skip
    return tuple(n % count for n in listed)


def recorded(function: Callable[..., Any], chosen: Arguments, insert: Callable[[Any], Any]) -> tuple[Recorded, Any]:
    """A function recorded with respect to some arguments; `insert` puts them among the others and calls."""
    outcome: list[Any] = []

    def run(given: list[Tensor]) -> Any:
        outcome.append(insert(chosen.build(given)))
        return outcome[0]

    return record(run, chosen.types), outcome[0]


def scalar(value: Any, name: str) -> None:
    """Refuse a function whose result has no gradient.

    Raises:
        ArgumentError: the result is no tensor, so that it depends on no argument.
        ShapeError: it is not a scalar.
        DTypeError: it is not of a float type.
    """
    if not isinstance(value, Tensor):
        raise ArgumentError(
            f"the result of {name} does not depend on its arguments", location=here(),
            expected="a scalar tensor computed from them", received=type(value).__name__,
            suggestion="return (loss, aux) with has_aux=True to return more than the loss",
        )  # fmt: skip
    if value.shape:
        raise ShapeError(
            f"the gradient of {name} needs a scalar result", location=here(), expected="shape ()",
            received=str(value.type), suggestion="reduce it: ts.mean(loss); or use ts.jacrev or ts.vjp",
        )  # fmt: skip
    if not value.dtype.is_float:
        raise DTypeError(
            f"the result of {name} is not a float", location=here(), expected="a float scalar", received=str(value.type)
        )


def insert_at(args: Sequence[Any], where: Sequence[int], new: Sequence[Any]) -> Iterator[Any]:
    """Positional arguments with some replaced."""
    replaced = dict(zip(where, new, strict=True))
    return (replaced.get(i, a) for i, a in enumerate(args))

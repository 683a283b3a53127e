"""Donated arguments: tensors that a call gives up, so that results may take their memory (JAX: buffer donation)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tessera.core.device_array import DeviceArray, Donated, count_holders
from tessera.core.errors import ArgumentError, user_location
from tessera.core.kept_memory import has_own_memory
from tessera.core.pytree import REGISTERED, flatten
from tessera.ir.tensor import Tensor


class Donation:
    """The parameters of a function whose tensors each call gives up.

    Raises:
        ArgumentError: there is no such parameter, or it is static.
    """

    def __init__(
        self, function: Callable[..., Any], parameters: Sequence[str], donated: Sequence[str], static: frozenset[str]
    ) -> None:
        self.name, self.donated = getattr(function, "__name__", "function"), tuple(donated)
        self._places = {name: i for i, name in enumerate(parameters)}
        for name in self.donated:
            if name not in self._places or name in static:
                raise ArgumentError(
                    f"{self.name} has no argument {name} to donate", location=user_location(), received=name,
                    expected=", ".join(n for n in parameters if n not in static) or "no donation",
                )  # fmt: skip

    def find_places(self, names: Sequence[str]) -> tuple[int, ...]:
        """The places of the leaves of donated arguments among all leaves, by their paths."""
        return tuple(
            i for i, name in enumerate(names) if any(name == d or name.startswith(f"{d}.") for d in self.donated)
        )

    def give(self, arrays: list[Any], places: Sequence[int], args: Sequence[Any], named: Mapping[str, Any]) -> None:
        """Take the elements of the donated tensors, which are unusable from now on.

        The arrays at these places are then used by nothing else: one that something else refers to is copied.

        Raises:
            ArgumentError: a donated argument is an array of another library, or requires gradients.
        """
        tensors = self._find_tensors(args, named)
        given = Donated(self.name, user_location())
        for tensor in tensors:
            tensor.data = given
        for i in places:
            if not _is_sole(arrays, i):
                arrays[i] = _copy(arrays[i])

    def _find_tensors(self, args: Sequence[Any], named: Mapping[str, Any]) -> list[Tensor]:
        found: list[Tensor] = []
        for name in self.donated:
            place = self._places[name]
            value = args[place] if place < len(args) else named.get(name)
            if not _collect_tensors(value, found):
                raise self._make_error(name, value)
        return found

    def _make_error(self, name: str, value: Any) -> ArgumentError:
        path, leaf = next((p, x) for p, x in flatten(value, name)[0] if not _collect_tensors(x, []))
        return ArgumentError(
            f"argument {path} of {self.name} cannot be donated", location=user_location(),
            expected="a ts.Tensor that does not require gradients", received=type(leaf).__name__,
            suggestion="pass ts.tensor(array), which has memory of its own",
        )  # fmt: skip


def _collect_tensors(value: Any, found: list[Tensor]) -> bool:
    """Collect the tensors of a donated argument; False if a leaf cannot be donated."""
    cls = value.__class__
    if cls is Tensor:
        found.append(value)
        return not value.requires_grad
    if cls is dict:
        return all([_collect_tensors(x, found) for x in value.values()])
    if cls is list or cls is tuple:
        return all([_collect_tensors(x, found) for x in value])
    if cls in REGISTERED:
        return all([_collect_tensors(x, found) for x in REGISTERED[cls].list_children(value)])
    leaves = flatten(value)[0]
    if len(leaves) != 1 or leaves[0][1] is not value:
        return all([_collect_tensors(x, found) for _, x in leaves])
    return isinstance(value, (bool, int, float, str, type(None)))


def _is_sole(arrays: list[Any], place: int) -> bool:
    """Whether the array at a place alone uses its memory, and nothing but the list refers to it."""
    if count_holders(arrays, place):
        return False
    array = arrays[place]
    if array.__class__ is DeviceArray:
        return bool(array.memory.owns(array))
    flags = array.flags
    return array.__class__ is np.ndarray and has_own_memory(array) and flags.writeable and flags.c_contiguous


def _copy(array: Any) -> Any:
    return array.memory.clone(array, array.stream) if array.__class__ is DeviceArray else np.array(array, order="C")

"""The arguments of a program: what arrays fit its parameters, and which must lie apart."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tessera.errors import ArgumentError, DTypeError, ShapeError
from tessera.types import as_dtype


class Parameter:
    """A parameter of the program: an input, an output or a scalar."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.name = given["name"]
        self.shape, self.dtype = tuple(given["shape"]), as_dtype(given["dtype"])
        self.output, self.scalar = given["role"] == "output", given["role"] == "scalar"

    def made(self, read: bool) -> np.ndarray:
        """A new array; of zeros where a kernel reads it before it is written, as atomics do."""
        return (np.zeros if read else np.empty)(self.shape, self.dtype.numpy)

    def checked(self, value: Any) -> np.ndarray:
        """An argument as an array of the right shape and type."""
        number = self.scalar and not hasattr(value, "dtype")
        array = np.asarray(value, self.dtype.numpy) if number else np.asarray(value)
        if array.shape != self.shape:
            raise ShapeError(f"argument {self.name} has another shape", expected=self.shape, received=array.shape)
        if array.dtype != self.dtype.numpy:
            raise DTypeError(f"argument {self.name} has another type", expected=self.dtype, received=array.dtype)
        return array


class Arguments:
    """The parameters of a launch plan."""

    def __init__(self, plan: Mapping[str, Any]) -> None:
        self.params = [Parameter(p) for p in plan["params"]]
        self.written, self.read = set(plan["written"]), set(plan["read"])
        self.inputs = [i for i, p in enumerate(self.params) if not p.output]
        self._changed = [i for i in self.inputs if i in self.written]

    def bind(self, arrays: Sequence[Any]) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """An array for each parameter: the user's or a new one, and that with its elements in row-major order.

        Raises:
            ShapeError, DTypeError, ArgumentError: the arrays are not what the program takes.
        """
        if len(arrays) != len(self.inputs):
            raise ArgumentError(f"{len(self.inputs)} arguments are needed, {len(arrays)} came")
        given = iter(arrays)
        users = [p.made(i in self.read) if p.output else p.checked(next(given)) for i, p in enumerate(self.params)]
        held = [ready(a) for a in users]
        return users, apart(held, self.written) if self._changed else held

    def finish(self, users: list[np.ndarray], held: list[np.ndarray]) -> list[np.ndarray]:
        """Write back what was written to copies; the outputs."""
        for i in self._changed:
            if held[i] is not users[i]:
                users[i][...] = held[i]
        return [a for a, p in zip(users, self.params, strict=True) if p.output]


def ready(array: np.ndarray) -> np.ndarray:
    """The array itself if its elements lie in row-major order, else a copy in which they do."""
    flags = array.flags
    return array if flags.c_contiguous and flags.aligned else np.array(array, order="C")


def apart(arrays: list[np.ndarray], written: set[int]) -> list[np.ndarray]:
    """Arrays of which no written one shares memory with another: what is only read is copied first.

    Raises:
        ArgumentError: two arrays that are written share memory.
    """
    found = list(arrays)
    for i, j in itertools.product(written, range(len(arrays))):
        if i == j or not np.may_share_memory(arrays[i], arrays[j]):
            continue
        if j in written:
            raise ArgumentError(
                f"arguments {i} and {j} are both written and share memory", suggestion="pass a copy of one of them"
            )
        found[j] = arrays[j].copy()
    return found

"""Inference requests: named arrays with an identifier, and the hash of their content."""

from __future__ import annotations

import hashlib
import uuid as _uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tessera.core.errors import ArgumentError, ShapeError, user_location
from tessera.ir.tensor import Tensor

ALONE = "input"  # the name of the only input of a request that names none


def uuid() -> str:
    """A random identifier (UUID 4) as text.

    >>> len(uuid())
    36
    """
    return str(_uuid.uuid4())


@dataclass(eq=False)
class InferenceRequest:
    """A request: its inputs, an array or a dict of arrays whose first axis is the batch, and an identifier.

    `model` is the function of the inputs that replicas without a model of their own call; `user_id` chooses the
    variant in an A/B test.

    >>> InferenceRequest([[1.0, 2.0]]).arrays["input"].shape
    (1, 2)

    Raises:
        ArgumentError: there is no input, or one that holds no numbers.
        ShapeError: an input has no first axis, or the inputs have different numbers of rows.
    """

    inputs: Any
    id: str = field(default_factory=uuid)
    model: Any = None
    user_id: str = ""
    arrays: dict[str, np.ndarray] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        named = self.inputs if isinstance(self.inputs, Mapping) else {ALONE: self.inputs}
        self.arrays = {str(name): _to_array(x, str(name)) for name, x in named.items()}
        if not self.arrays:
            raise ArgumentError("a request has no input", location=user_location())
        shapes = {name: a.shape for name, a in self.arrays.items()}
        if len({s[0] if s else 0 for s in shapes.values()}) != 1 or not all(s and s[0] for s in shapes.values()):
            raise ShapeError("the inputs of a request have no common first axis", location=user_location(),
                             expected="one row or more, as many in each input", received=str(shapes))  # fmt: skip

    @property
    def alone(self) -> bool:
        """Whether the inputs are one array without a name."""
        return not isinstance(self.inputs, Mapping)

    @property
    def rows(self) -> int:
        """The size of the first axis."""
        return next(iter(self.arrays.values())).shape[0]

    def hash(self) -> str:
        """The SHA-256 of names, types, shapes and values."""
        return hash_arrays(self.arrays)


def _to_array(value: Any, name: str) -> np.ndarray:
    try:
        held = np.asarray(value.numpy() if isinstance(value, Tensor) else value)
    except ValueError:  # lists of different lengths
        held = np.asarray(None)
    if held.dtype.kind in "OUSMm":
        raise ArgumentError(f"input {name} holds no numbers", location=user_location(), received=repr(value)[:80])
    return held


def hash_arrays(arrays: Mapping[str, np.ndarray], *more: str) -> str:
    """The SHA-256 of named arrays and texts: equal for equal names, types, shapes and bytes alone."""
    found = hashlib.sha256()
    for text in more:
        found.update(f"{len(text)}:{text}".encode())
    for name in sorted(arrays):
        array = arrays[name]
        found.update(f"{len(name)}:{name}|{array.dtype}|{array.shape}|".encode())
        found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()

"""Batches of arrays in a fixed random order for each epoch, and batches of other libraries as tensors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tessera.core.errors import ArgumentError, ShapeError, user_location
from tessera.core.pytree import map_leaves
from tessera.core.types import to_python_numbers
from tessera.ir.tensor import Tensor


class Batches:
    """Batches of rows of arrays (NumPy arrays, memory maps, tensors), shuffled anew in each epoch by its number.

    The same seed gives the same batches in every run, so that a loop that was interrupted goes on with the next. The
    last batch may be smaller, unless `drop_last`.

    >>> [x.tolist() for (x,) in Batches(np.arange(5), size=2)]
    [[0, 3], [4, 2], [1]]

    Raises:
        ShapeError: the arrays have different lengths, or no rows.
        ArgumentError: `size` is no positive integer.
    """

    def __init__(self, *arrays: Any, size: int, shuffle: bool = True, seed: int = 0, drop_last: bool = False) -> None:
        size, seed = to_python_numbers(size), to_python_numbers(seed)
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ArgumentError(f"a batch of {size!r}", location=user_location(), expected="a positive integer")
        self.arrays = [a.numpy() if isinstance(a, Tensor) else a for a in arrays]
        lengths = [len(a) for a in self.arrays]
        if not lengths or len(set(lengths)) != 1 or not lengths[0]:
            raise ShapeError(
                "the arrays have no common number of rows", location=user_location(), received=str(lengths),
                expected="one or more arrays of one length",
            )  # fmt: skip
        self.size, self.shuffle, self.seed, self.drop_last, self.epoch = size, shuffle, seed, drop_last, 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of an epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        rows = len(self.arrays[0])
        return rows // self.size if self.drop_last else -(-rows // self.size)

    def __iter__(self) -> Iterator[tuple[np.ndarray, ...]]:
        rows = len(self.arrays[0])
        order = np.random.Generator(np.random.Philox((self.seed, self.epoch))).permutation(rows)
        order = order if self.shuffle else np.arange(rows)
        for i in range(len(self)):
            chosen = order[i * self.size : (i + 1) * self.size]
            yield tuple(np.asarray(a[chosen]) for a in self.arrays)


def read_batch(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A batch as the arguments of a loss: a tuple or list by position, a dict by name, anything else alone.

    >>> read_batch({"x": np.float32(1.0)})
    ((), {'x': Tensor(1., f32)})
    """
    if isinstance(batch, Mapping):
        return (), {str(name): to_tensors(value) for name, value in batch.items()}
    return tuple(to_tensors(x) for x in (batch if isinstance(batch, (tuple, list)) else (batch,))), {}


def to_tensors(value: Any) -> Any:
    """A container with its arrays, of any library, as tensors; numbers become tensors, strings stay."""
    return map_leaves(lambda x: x if isinstance(x, (str, Tensor)) or x is None else Tensor(x), value)


def count_examples(batch: Any) -> int:
    """The number of examples of a batch: the size of the first axis of its first array."""
    args, named = batch
    for value in (*args, *named.values()):
        if isinstance(value, Tensor) and value.ndim:
            return int(value.shape[0])
    return 1


def check_batch(function: Callable[..., Any], model: Any, args: Sequence[Any], named: Mapping[str, Any]) -> None:
    """Raise the error of a batch that does not fit the parameters of `function(model, *args, **named)`.

    >>> check_batch(lambda model, x, y: x, None, (1, 2), {})

    Raises:
        ArgumentError: the batch has too few or too many arrays, or other names.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a function of C has none
        return
    try:
        signature.bind(model, *args, **named)
    except TypeError as error:
        held = f"{len(args)} arrays by position" if args else "arrays named " + ", ".join(named)
        raise ArgumentError(
            f"a batch does not fit the function {getattr(function, '__name__', '')}{signature}: {error}",
            location=user_location(), expected="the model, then the arrays of a batch", received=held,
            suggestion="a batch is a tuple (by position) or a dict (by name)",
        ) from None  # fmt: skip

"""Buffers: memory of a fixed size whose parts are handed out, and given again to other tensors by name."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np

from tessera.errors import ArgumentError, ShapeError, here
from tessera.storage.pool import Pool, use_pool
from tessera.storage.sizes import as_bytes
from tessera.tensor import Tensor
from tessera.types import DType, as_dtype, f32

F = TypeVar("F", bound=Callable[..., Any])
_FIRST = "1MB"  # what a function's own pool begins with


class Buffer:
    """Memory of a fixed size: `allocate` gives tensors in it, `reuse` another tensor in the place of one."""

    def __init__(self, size: int | str) -> None:
        self.pool = Pool(size, growth_factor=1.0)

    def allocate(self, shape: int | Sequence[int], dtype: DType | str = f32) -> Tensor:
        """A tensor of zeros in this buffer.

        Raises:
            ResourceError: the buffer is full.
        """
        held = self.pool.empty(shape, dtype)
        held[...] = 0
        return Tensor(held)

    def reuse(self, x: Tensor, shape: int | Sequence[int] | None = None, dtype: DType | str | None = None) -> Tensor:
        """A tensor in the place of `x`, by default of its shape and type: what one holds the other holds.

        Raises:
            ArgumentError: `x` does not lie in this buffer, or not in one piece.
            ShapeError: there is not as much room.
        """
        held = x.numpy()
        if not self.pool.has(held) or not held.flags.c_contiguous:
            raise ArgumentError(
                "this tensor lies in no piece of the buffer", location=here(), expected="one it allocated"
            )
        element = as_dtype(x.dtype if dtype is None else dtype)
        sizes = x.shape if shape is None else (shape,) if isinstance(shape, int) else tuple(shape)
        count = math.prod(int(n) for n in sizes) * element.numpy.itemsize
        if count > held.nbytes:
            raise ShapeError(
                "the tensor in whose place this is to lie is smaller", location=here(),
                expected=f"{held.nbytes:,} bytes", received=f"{count:,} bytes",
            )  # fmt: skip
        return Tensor(held.reshape(-1).view(np.uint8)[:count].view(element.numpy).reshape(sizes))


@contextmanager
def buffer(size: int | str) -> Iterator[Buffer]:
    """A buffer for the body of a `with`; its memory goes when its last tensor does.

    >>> with buffer("1KB") as buf:
    ...     first = buf.allocate((4,))
    ...     second = buf.reuse(first)
    >>> second.numpy()[:] = 3.0
    >>> first
    Tensor([3., 3., 3., 3.], f32)
    """
    as_bytes(size)
    yield Buffer(size)


def reuse(function: F) -> F:
    """A function whose tensors lie in a pool of its own, so that each call uses the memory that the last one left.

    >>> @reuse
    ... def doubled(x):
    ...     return x + x
    >>> doubled(Tensor([1.0, 2.0]))
    Tensor([2., 4.], f32)
    """
    pool: list[Pool] = []

    @functools.wraps(function)
    def pooled(*args: Any, **named: Any) -> Any:
        if not pool:
            pool.append(Pool(_FIRST))
        with use_pool(pool[0]):
            return function(*args, **named)

    return pooled  # type: ignore[return-value]

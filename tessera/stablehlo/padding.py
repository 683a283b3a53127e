"""Padding with any value, also between elements and with negative counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tessera.ir.tensor import Tensor
from tessera.ops.tensor import elementwise as e
from tessera.ops.tensor import shape as s
from tessera.ops.tensor.basic import cast, full


def pad_with(x: Tensor, value: Tensor, number: Any, sides: Sequence[tuple[int, int, int]]) -> Tensor:
    """`x` with `value` before, after and between the elements of each axis; a negative count removes elements.

    `number` is the value where it is a constant; else a mask selects it.
    """
    if not any(n for side in sides for n in side):
        return x
    if number is not None and _is_finite(number):
        return _pad_constant(x, number, sides)
    inside = _pad_constant(full(shape=x.shape, value=True, dtype="bool"), False, sides)
    return e.where(inside, _pad_constant(x, False if x.dtype.kind == "bool" else 0, sides), cast(value, dtype=x.dtype))


def _is_finite(number: Any) -> bool:
    return isinstance(number, (int, float)) and number - number == 0


def _pad_constant(x: Tensor, number: Any, sides: Sequence[tuple[int, int, int]]) -> Tensor:
    for axis, (_, _, between) in enumerate(sides):
        if between and x.shape[axis] > 0:
            x = _spread(x, axis, between, number)
    low, high = ([max(side[i], 0) for side in sides] for i in (0, 1))
    start = [max(-side[0], 0) for side in sides]
    if any(low) or any(high):
        x = s.pad(x, low=tuple(low), high=tuple(high), value=number)
    stop = [n + min(side[1], 0) for n, side in zip(x.shape, sides, strict=True)]
    if tuple(stop) == x.shape and not any(start):
        return x
    return s.slice_(x, start=tuple(start), stop=tuple(max(a, b) for a, b in zip(start, stop, strict=True)))


def _spread(x: Tensor, axis: int, between: int, number: Any) -> Tensor:
    """`x` with numbers between its elements along an axis."""
    size = x.shape[axis]
    wide = s.reshape(x, shape=(*x.shape[: axis + 1], 1, *x.shape[axis + 1 :]))
    high = tuple(between if i == axis + 1 else 0 for i in range(wide.ndim))
    wide = s.pad(wide, low=(0,) * wide.ndim, high=high, value=number)
    long = s.reshape(wide, shape=(*x.shape[:axis], size * (between + 1), *x.shape[axis + 1 :]))
    stop = tuple((size - 1) * (between + 1) + 1 if i == axis else n for i, n in enumerate(long.shape))
    return s.slice_(long, start=(0,) * x.ndim, stop=stop)

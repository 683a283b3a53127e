"""Shape rules shared by many ops: broadcasting and axes."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from tessera.errors import ArgumentError, ShapeError
from tessera.shapes.dim import Size


def broadcast(*shapes: Sequence[Size]) -> tuple[Size, ...]:
    """The shape that NumPy broadcasting gives; symbolic sizes agree only with themselves and 1.

    >>> broadcast((8, 1, 6), (7, 1))
    (8, 7, 6)
    """
    rank = max((len(s) for s in shapes), default=0)
    out: list[Size] = [1] * rank
    for shape in shapes:
        for back, size in enumerate(reversed(shape), start=1):
            if out[-back] == 1:
                out[-back] = size
            elif size != 1 and size != out[-back]:
                raise ShapeError(
                    f"cannot broadcast {out[-back]} with {size} in dimension {rank - back}",
                    expected=f"sizes that are equal or 1 in dimension {rank - back}",
                    received=" and ".join(show(s) for s in shapes),
                )
    return tuple(out)


def show(shape: Sequence[Size]) -> str:
    """A shape as people write it: (8, D)."""
    return "(" + ", ".join(str(s) for s in shape) + ("," if len(shape) == 1 else "") + ")"


def normalize_axis(axis: int, rank: int) -> int:
    """An axis counted from the end (negative), so that leading batch axes do not move it."""
    if axis.__class__ is not int:
        axis = _index(axis)
    if not -rank <= axis < rank:
        raise ShapeError(
            f"axis {axis} is out of range for a tensor of rank {rank}",
            expected=f"an axis from {-rank} to {rank - 1}" if rank else "no axis: the tensor is a scalar",
            received=str(axis),
        )
    return axis - rank if axis >= 0 else axis


def _index(axis: Any) -> int:
    """What stands for an axis as an int."""
    try:
        if not isinstance(axis, bool):
            return operator.index(axis)
    except TypeError:
        pass
    raise ArgumentError("this is no axis", expected="an integer", received=f"{type(axis).__name__} {axis!r}")


def normalize_axes(axes: int | Sequence[int] | None, rank: int) -> tuple[int, ...]:
    """Sorted negative axes; None means all of them."""
    if axes is None:
        return tuple(range(-rank, 0))
    listed: list[Any] = list(axes) if isinstance(axes, (list, tuple)) else [axes]
    found = sorted(normalize_axis(a, rank) for a in listed)
    if len(set(found)) != len(found):
        raise ShapeError(f"an axis is named twice: {tuple(listed)}")
    return tuple(found)

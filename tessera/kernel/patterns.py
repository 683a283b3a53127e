"""Loads by what they touch: neighbours, every n-th element, elements named one by one, one element for all.

They say what a kernel means to do; what is read is what the same subscript would read.
"""

from __future__ import annotations

from typing import Any

from tessera.errors import ArgumentError, ShapeError
from tessera.kernel.ids import LANES
from tessera.kernel.marks import takes_places
from tessera.kernel.place import View, value
from tessera.kernel.subscript import subscript
from tessera.kernel.transfer import locate
from tessera.ops.shape import iota
from tessera.tensor import Tensor


@takes_places
def load_coalesced(place: Any, threads: int = LANES) -> Tensor:
    """The block at a place, whose last axis is read side by side; `threads` says by how many lanes, as a hint."""
    return locate(place, (), None).load()


@takes_places
def load_strided(place: Any, stride: int, axis: int = -1) -> Tensor:
    """Every `stride`-th element along an axis of a block, from its first on.

    Raises:
        ArgumentError: the stride is no positive constant.
    """
    if not isinstance(stride, int) or stride < 1:
        raise ArgumentError("a stride is a constant of at least 1", received=repr(stride))
    view = _view(place)
    at = axis % len(view.shape)
    places = iota(shape=(-(-view.shape[at] // stride),)) * stride
    return subscript(view, (*[slice(None)] * at, places)).load()


@takes_places
def load_gather(place: Any, indices: Any, mask: Any = None, other: Any = None) -> Tensor:
    """The elements (of a matrix: the rows) that a block of indices names; `other` where the mask is false."""
    return subscript(_view(place), (value(indices),)).load(value(mask), value(other))


@takes_places
def load_broadcast(place: Any) -> Tensor:
    """What lies at a place, read once for all that use it."""
    return locate(place, (), None).load()


def _view(place: Any) -> View:
    found = locate(place, (), None)
    if not isinstance(found, View) or not found.shape:
        raise ShapeError("this load reads from a tensor or part of one", expected="at least one axis",
                         received=repr(place))  # fmt: skip
    return found

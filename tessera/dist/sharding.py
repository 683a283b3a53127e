"""Sharding specs: which mesh axes cut which axes of a tensor (JAX's PartitionSpec, DTensor's placements)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tessera.core.errors import ArgumentError, ShapeError, user_location
from tessera.dist.mesh import Mesh

# For each axis of a tensor the mesh axes that cut it; the first changes slowest.
Dims = tuple[tuple[str, ...], ...]
AXIS_NAMES = {"row": 0, "col": -1}


@dataclass(frozen=True)
class ShardSpec:
    """The sharding of a tensor: `partition[i]` is cut along the mesh axis, or axes, `mesh_axes[i]`.

    `partition` holds axes of the tensor: numbers, "row" (the first) and "col" (the last). A tensor that is cut along no
    axis is replicated. `partial` are mesh axes along which the ranks hold terms of a sum.

    >>> ShardSpec(partition=("row", "col"), mesh_axes=("dp", "tp")).dims(2)
    (('dp',), ('tp',))
    >>> ShardSpec.replicate().dims(2)
    ((), ())
    """

    partition: tuple[Any, ...] = ()
    mesh_axes: tuple[Any, ...] = ()
    partial: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len(self.partition) != len(self.mesh_axes):
            raise ArgumentError(
                "a sharding needs one entry of mesh_axes for each of partition", location=user_location(),
                expected=f"{len(self.partition)} mesh axes", received=repr(self.mesh_axes),
            )  # fmt: skip
        for axes in self.mesh_axes:
            if axes is not None and not all(isinstance(n, str) for n in _as_names(axes)):
                raise ArgumentError(
                    f"{axes!r} names no mesh axis", location=user_location(), expected="a name, several, or None"
                )
        used = [n for axes in self.mesh_axes for n in _as_names(axes)] + list(self.partial)
        if len(set(used)) != len(used):
            twice = next(n for n in used if used.count(n) > 1)
            raise ArgumentError(
                f"the mesh axis {twice!r} is used twice", location=user_location(),
                expected="each mesh axis cuts one axis of a tensor", received=repr(self),
            )  # fmt: skip

    @staticmethod
    def replicate() -> ShardSpec:
        """Every rank holds the whole tensor."""
        return ShardSpec()

    @staticmethod
    def row(axis: str) -> ShardSpec:
        """The first axis is cut along a mesh axis."""
        return ShardSpec(("row",), (axis,))

    @staticmethod
    def col(axis: str) -> ShardSpec:
        """The last axis is cut along a mesh axis."""
        return ShardSpec(("col",), (axis,))

    @staticmethod
    def sums(*axes: str) -> ShardSpec:
        """The tensor is the sum of what the ranks along these mesh axes hold."""
        return ShardSpec(partial=axes)

    def dims(self, rank: int) -> Dims:
        """For each axis of a tensor the mesh axes that cut it.

        Raises:
            ShapeError: the tensor has no such axis, or it is named twice.
        """
        found: list[tuple[str, ...]] = [()] * rank
        seen: set[int] = set()
        for part, axes in zip(self.partition, self.mesh_axes, strict=True):
            at = AXIS_NAMES.get(part, part) if isinstance(part, str) else part
            if not isinstance(at, int) or not -rank <= at < rank or at % rank in seen:
                raise ShapeError(
                    f"a tensor of {rank} axes is not cut along {part!r}", location=user_location(),
                    expected=f"axes from {-rank} to {rank - 1}, each once ('row' is the first, 'col' the last)",
                    received=repr(self),
                )  # fmt: skip
            seen.add(at % rank)
            found[at % rank] = _as_names(axes)
        return tuple(found)


def _as_names(axes: Any) -> tuple[str, ...]:
    return () if axes is None else tuple(axes) if isinstance(axes, (tuple, list)) else (axes,)


def P(*entries: Any) -> ShardSpec:
    """A sharding with one entry for each leading axis: a mesh axis, several, or None (JAX's PartitionSpec).

    >>> P("dp", None, ("tp", "pp")).dims(3)
    (('dp',), (), ('tp', 'pp'))
    """
    cut = [(i, e) for i, e in enumerate(entries) if e is not None and e != ()]
    return ShardSpec(tuple(i for i, _ in cut), tuple(e for _, e in cut))


def make_spec(dims: Dims, partial: Sequence[str] = ()) -> ShardSpec:
    """The spec of cuts for each axis of a tensor."""
    cut = [(i, d) for i, d in enumerate(dims) if d]
    return ShardSpec(tuple(i for i, _ in cut), tuple(d for _, d in cut), tuple(partial))


def check_spec(spec: Any, shape: Sequence[int], mesh: Mesh, name: str) -> Dims:
    """The cuts of a tensor on a mesh.

    Raises:
        ArgumentError: it is no spec, or the mesh has no such axis.
        ShapeError: an axis does not divide into equal parts.
    """
    if spec is None:
        spec = ShardSpec()
    if not isinstance(spec, ShardSpec):
        raise ArgumentError(
            f"the sharding of {name} is a {type(spec).__name__}", location=user_location(),
            expected='ts.dist.P("data", None), ts.ShardSpec(...), or None', received=repr(spec),
        )  # fmt: skip
    dims = spec.dims(len(shape))
    for at, (size, axes) in enumerate(zip(shape, dims, strict=True)):
        count = mesh.count(mesh.find_axes(axes) if axes else ())
        if size % count:
            raise ShapeError(
                f"axis {at} of {name} of size {size} has no {count} equal parts", location=user_location(),
                expected=f"a multiple of {count}", received=str(size),
                suggestion=f"pad it, or do not cut it along {' and '.join(axes)}",
            )  # fmt: skip
    return dims


def find_slices(shape: Sequence[int], dims: Dims, mesh: Mesh, rank: int) -> tuple[slice, ...]:
    """The part of a tensor that a rank holds.

    >>> find_slices((8, 6), (("x",), ()), Mesh((2, 2), ("x", "y")), 2)
    (slice(4, 8, None), slice(0, 6, None))
    """
    place: Mapping[str, int] = dict(zip(mesh.axis_names, mesh.coordinate(rank), strict=True))
    found = []
    for size, axes in zip(shape, dims, strict=True):
        number = 0
        for name in axes:
            number = number * mesh.shape[name] + place[name]
        length = size // mesh.count(axes)
        found.append(slice(number * length, (number + 1) * length))
    return tuple(found)


def cut_array(array: np.ndarray, dims: Dims, mesh: Mesh, rank: int) -> np.ndarray:
    """The part of an array that a rank holds, in memory of its own if it is a part."""
    return np.ascontiguousarray(array[find_slices(array.shape, dims, mesh, rank)]) if any(dims) else array


def global_shape(shape: Sequence[int], dims: Dims, mesh: Mesh) -> tuple[int, ...]:
    """The shape of a tensor whose parts have a shape."""
    return tuple(size * mesh.count(axes) for size, axes in zip(shape, dims, strict=True))

"""Device mesh: the devices of a distributed program in an array with named axes (JAX's Mesh, DTensor's DeviceMesh)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from tessera.core.errors import ArgumentError, user_location
from tessera.core.shapes import format_shape

ENGINES = ("simulated", "mpi", "nccl")
Groups = tuple[tuple[int, ...], ...]


@lru_cache(maxsize=1024)
def _list_groups(shape: tuple[int, ...], axes: tuple[int, ...]) -> Groups:
    """The ranks that differ only along these axes of a mesh, for each position along the others."""
    rest = tuple(i for i in range(len(shape)) if i not in axes)
    ranks = np.arange(math.prod(shape)).reshape(shape).transpose((*rest, *axes))
    return tuple(tuple(row) for row in ranks.reshape(-1, math.prod(shape[i] for i in axes)).tolist())


class Mesh:
    """The devices of a program as an array with named axes; rank r is the device number r in row-major order.

    `devices` is an array or nested list of device names or numbers, a shape (a tuple of sizes), or a number of devices.
    `engine` says who runs the ranks: "simulated" (all of them side by side in this process), "mpi" (one process each)
    or "nccl" (one process and one GPU each). By default it is that of the launcher that started the program (`tessera
    launch --engine`, `mpiexec`), else the simulator.
    `debug` adds checks to each collective.

    >>> mesh = Mesh(devices=np.arange(8).reshape(4, 2), axis_names=["data", "model"])
    >>> mesh.shape, mesh.coordinate(5), mesh.groups("data")
    ({'data': 4, 'model': 2}, (2, 1), ((0, 2, 4, 6), (1, 3, 5, 7)))

    Raises:
        ArgumentError: the names do not fit the axes, a device is in it twice, or there is no such engine.
    """

    def __init__(
        self, devices: Any, axis_names: Sequence[str] | str = ("ranks",), engine: str | None = None, debug: bool = False
    ) -> None:
        self.devices = _read_devices(devices)
        self.axis_names = (axis_names,) if isinstance(axis_names, str) else tuple(axis_names)
        self.engine, self.debug = engine, debug
        self._check()

    def _check(self) -> None:
        names, rank = self.axis_names, self.devices.ndim
        if len(names) != rank or len(set(names)) != len(names) or not all(isinstance(n, str) for n in names):
            raise ArgumentError(
                "the names do not fit the axes of the mesh", location=user_location(),
                expected=f"{rank} different names, for devices of shape {format_shape(self.devices.shape)}",
                received=repr(names),
            )  # fmt: skip
        listed = self.devices.ravel().tolist()
        if len(set(listed)) != len(listed) or not listed:
            twice = next((d for d in listed if listed.count(d) > 1), "no device")
            raise ArgumentError(
                "each device is in a mesh once", location=user_location(), expected="different devices, at least one",
                received=str(twice),
            )  # fmt: skip
        if self.engine not in (None, *ENGINES):
            raise ArgumentError(
                f"there is no engine {self.engine!r}", location=user_location(), expected=", ".join(ENGINES)
            )

    @property
    def shape(self) -> dict[str, int]:
        """The size of each axis."""
        return dict(zip(self.axis_names, self.devices.shape, strict=True))

    @property
    def size(self) -> int:
        """The number of ranks."""
        return int(self.devices.size)

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """The position of a rank along each axis.

        Raises:
            ArgumentError: there is no such rank.
        """
        if not 0 <= rank < self.size:
            raise ArgumentError(
                f"the mesh has no rank {rank}", location=user_location(), expected=f"0 to {self.size - 1}"
            )
        return tuple(int(i) for i in np.unravel_index(rank, self.devices.shape))

    def rank(self, coordinate: Sequence[int]) -> int:
        """The rank at a position.

        Raises:
            ArgumentError: it is outside of the mesh.
        """
        sizes = self.devices.shape
        if len(coordinate) != len(sizes) or not all(0 <= i < n for i, n in zip(coordinate, sizes, strict=True)):
            raise ArgumentError(
                f"the mesh has no position {tuple(coordinate)}", location=user_location(), expected=format_shape(sizes)
            )
        return int(np.ravel_multi_index(tuple(coordinate), self.devices.shape))

    def find_axes(self, axes: Any = None) -> tuple[str, ...]:
        """The names of axes that are given as a name, several, a part of a mesh, or None for all.

        Raises:
            ArgumentError: the mesh has no such axis.
        """
        if axes is None or axes is self:
            return self.axis_names
        if isinstance(axes, MeshAxis):
            axes = axes.names
        names = tuple(axes) if isinstance(axes, (tuple, list)) else (axes,)
        unknown = [n for n in names if n not in self.axis_names]
        if unknown or len(set(names)) != len(names) or not names:
            raise ArgumentError(
                f"the mesh has no axis {unknown[0]!r}" if unknown else "the mesh axes are not different names",
                location=user_location(), expected=" or ".join(map(repr, self.axis_names)), received=repr(names),
            )  # fmt: skip
        return names

    def groups(self, axes: Any = None) -> Groups:
        """The groups of ranks that communicate along these axes; the first axis given changes slowest."""
        return _list_groups(self.devices.shape, tuple(self.axis_names.index(n) for n in self.find_axes(axes)))

    def count(self, axes: Any) -> int:
        """The number of ranks along axes; () are none, with one rank."""
        return math.prod(self.shape[n] for n in axes)

    def axis(self, *names: str) -> MeshAxis:
        """A part of the mesh: `with mesh.axis("data"):` makes it the one that collectives use."""
        return MeshAxis(self, self.find_axes(names))

    def __enter__(self) -> Mesh:
        _OPEN.set((*_OPEN.get(), MeshAxis(self, self.axis_names)))
        return self

    def __exit__(self, *_: object) -> None:
        _OPEN.set(_OPEN.get()[:-1])

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{k}={v}' for k, v in self.shape.items())})"


class HierarchicalMesh(Mesh):
    """A mesh of levels, the slowest link first: {"node": 4, "gpu": 4} has 16 ranks, 4 on each node.

    >>> HierarchicalMesh({"node": 2, "gpu": 4}).groups("gpu")
    ((0, 1, 2, 3), (4, 5, 6, 7))
    """

    def __init__(self, levels: Mapping[str, int], engine: str | None = None, debug: bool = False) -> None:
        if not isinstance(levels, Mapping) or not levels:
            raise ArgumentError(
                "a hierarchical mesh has named levels", location=user_location(), received=repr(levels),
                expected='a dict of sizes, the slowest link first: {"node": 4, "gpu": 8}',
            )  # fmt: skip
        super().__init__(tuple(levels.values()), tuple(levels), engine, debug)


@dataclass(frozen=True, eq=False)
class MeshAxis:
    """Some axes of a mesh: what a collective communicates along."""

    mesh: Mesh
    names: tuple[str, ...]

    def __enter__(self) -> MeshAxis:
        _OPEN.set((*_OPEN.get(), self))
        return self

    def __exit__(self, *_: object) -> None:
        _OPEN.set(_OPEN.get()[:-1])

    @property
    def groups(self) -> Groups:
        """The groups of ranks that communicate."""
        return self.mesh.groups(self.names)

    @property
    def size(self) -> int:
        """The number of ranks along these axes."""
        return self.mesh.count(self.names)


# The `with` blocks of meshes around the running code; each rank has its own.
_OPEN: ContextVar[tuple[MeshAxis, ...]] = ContextVar("meshes", default=())


def current_mesh() -> MeshAxis | None:
    """The part of a mesh that collectives use where none is named: that of the innermost `with` block."""
    found = _OPEN.get()
    return found[-1] if found else None


def _read_devices(devices: Any) -> np.ndarray:
    if isinstance(devices, (int, np.integer)) and not isinstance(devices, bool):
        devices = (int(devices),)
    shape = isinstance(devices, tuple) and all(isinstance(n, (int, np.integer)) for n in devices)
    try:
        if shape:
            return np.arange(math.prod(devices)).reshape(devices)
        found = np.asarray(devices)
    except ValueError:
        found = np.array(None)
    if found.dtype.kind not in "iuU" or not found.ndim:
        raise ArgumentError(
            "these are no devices", location=user_location(), received=repr(devices),
            expected="an array of names or numbers, a shape such as (4, 2), or a number of devices",
        )  # fmt: skip
    return found


def make_mesh(
    devices: Any, axes: Sequence[str] | str, shape: Sequence[int] | None = None, engine: str | None = None
) -> Mesh:
    """A mesh of a list of devices, reshaped: `ts.dist.mesh(devices=[...], axes=("dp", "tp"), shape=(4, 2))`.

    Raises:
        ArgumentError: the devices do not fill the shape, or as `Mesh`.
    """
    found = _read_devices(devices)
    wanted = found.shape if shape is None else tuple(shape)
    if math.prod(wanted) != found.size:
        raise ArgumentError(
            "the devices do not fill the mesh", location=user_location(),
            expected=f"{math.prod(wanted)} devices for shape {format_shape(wanted)}", received=f"{found.size} devices",
        )  # fmt: skip
    return Mesh(found.reshape(wanted), axes, engine)

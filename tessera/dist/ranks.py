"""Ranks: which rank of which mesh the running code is, and its exchanges with the others through the mesh's engine."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from tessera.core.errors import ArgumentError, user_location
from tessera.dist.mesh import Mesh, MeshAxis, current_mesh

Attributes = Mapping[str, Any]


class Pending(Protocol):
    """A communication that was started."""

    def wait(self) -> np.ndarray:
        """Its result, when it is complete."""


class World(Protocol):
    """The engine that runs the ranks of a program: the exchanges of each rank.

    `kind` is the name of a collective op, `attrs` are its attributes without `groups`, `members` the ranks of the
    group in order, `site` the user's line ("file:line").
    """

    size: int

    def start(
        self, rank: int, kind: str, x: np.ndarray, members: tuple[int, ...], attrs: Attributes, site: str,
        blocking: bool = False,
    ) -> Pending:  # fmt: skip
        """Start a collective of a group; with `blocking` its result is waited for at once."""

    def send(self, rank: int, x: np.ndarray, to: int, tag: int, site: str) -> None:
        """Send a message, which is buffered: it does not wait for the receiver."""

    def receive(self, rank: int, like: np.ndarray, source: int, tag: int, site: str) -> np.ndarray:
        """Wait for a message of this type."""


@dataclass(frozen=True)
class RankContext:
    """The rank that the running code is."""

    rank: int
    mesh: Mesh
    world: World


CURRENT_RANK: ContextVar[RankContext | None] = ContextVar("rank", default=None)


def require_rank(what: str) -> RankContext:
    """The rank of the running code.

    Raises:
        ArgumentError: it is none: there are no ranks outside of an SPMD function.
    """
    found = CURRENT_RANK.get()
    if found is None:
        raise ArgumentError(
            f"{what} runs in the ranks of a program, and this code is not one of them", location=user_location(),
            expected="a call inside a function that @ts.spmd runs on a mesh",
            suggestion="ts.spmd(function, mesh=ts.Mesh((4,), 'data'))(arguments)",
        )  # fmt: skip
    return found


def find_members(groups: Any, rank: int) -> tuple[int, ...]:
    """The group that a rank is in."""
    found = next((tuple(g) for g in groups if rank in g), None)
    if found is None:
        raise ArgumentError(f"rank {rank} is in no group of this collective", received=str(groups))
    return found


def find_rank_in_groups(groups: Any) -> int:
    """The number of this rank in its group."""
    context = require_rank("a part of a tensor")
    return find_members(groups, context.rank).index(context.rank)


def start_exchange(kind: str, x: np.ndarray, attrs: Attributes, site: str, blocking: bool = False) -> Pending:
    """Start a collective of this rank."""
    context = require_rank(kind)
    rest = {k: v for k, v in attrs.items() if k != "groups"}
    members = find_members(attrs["groups"], context.rank)
    outside = [m for m in members if m >= context.world.size]
    if outside:
        raise ArgumentError(
            f"rank {outside[0]} is not in this program", expected=f"a mesh of at most {context.world.size} ranks",
            received=str(members),
        )  # fmt: skip
    return context.world.start(context.rank, kind, np.asarray(x), members, rest, site, blocking)


def exchange(kind: str, x: np.ndarray, attrs: Attributes, site: str) -> np.ndarray:
    """Run a collective, or send or receive a message, as this rank (the semantics of the ops)."""
    context = require_rank(kind)
    if kind == "send":
        _check_partner(attrs["to"], context)
        context.world.send(context.rank, np.asarray(x), attrs["to"], attrs["tag"], site)
        return np.asarray(x)
    if kind == "receive":
        _check_partner(attrs["source"], context)
        return context.world.receive(context.rank, np.asarray(x), attrs["source"], attrs["tag"], site)
    return start_exchange(kind, x, attrs, site, blocking=True).wait()


def _check_partner(other: int, context: RankContext) -> None:
    if not isinstance(other, int) or not 0 <= other < context.world.size or other == context.rank:
        raise ArgumentError(
            f"rank {context.rank} has no partner {other}", received=str(other),
            expected=f"another rank, from 0 to {context.world.size - 1}",
        )  # fmt: skip


# What a program asks about its rank.


def get_rank(mesh: Mesh | MeshAxis | None = None) -> int:
    """The number of this rank in its program, or along a part of a mesh: `get_rank(mesh.axis("data"))`.

    Raises:
        ArgumentError: the caller is not a rank.
    """
    context = require_rank("get_rank")
    if mesh is None:
        return context.rank
    groups = mesh.groups if isinstance(mesh, MeshAxis) else mesh.groups()
    return find_members(groups, context.rank).index(context.rank)


def get_world_size(mesh: Mesh | MeshAxis | None = None) -> int:
    """The number of ranks of the program, or along a part of a mesh.

    Raises:
        ArgumentError: the caller is not a rank.
    """
    return require_rank("get_world_size").world.size if mesh is None else mesh.size


def mesh_coordinate(mesh: Mesh | None = None) -> tuple[int, ...]:
    """The position of this rank along each axis of the mesh.

    Raises:
        ArgumentError: the caller is not a rank.
    """
    context = require_rank("mesh_coordinate")
    return (mesh or context.mesh).coordinate(context.rank)


def current_axes(mesh: Mesh | MeshAxis | None, over: Any, what: str) -> MeshAxis:
    """The part of a mesh that a collective uses: what it names, else that of the context, else the whole mesh.

    Raises:
        ArgumentError: the mesh has no such axis, or the caller is not a rank and names no mesh.
    """
    if isinstance(over, (Mesh, MeshAxis)):
        mesh, over = over, None
    found = mesh or current_mesh()
    if found is None:
        found = require_rank(what).mesh
    if isinstance(found, Mesh):
        return MeshAxis(found, found.find_axes(over))
    return found if over is None else MeshAxis(found.mesh, found.mesh.find_axes(over))

"""Ranks: which rank of which mesh the running code is, and its exchanges with the others through the mesh's engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import numpy as np

from tessera.core.device_array import DeviceArray
from tessera.core.errors import ArgumentError, CollectiveError, user_location
from tessera.core.types import TensorType
from tessera.dist.mesh import Mesh, MeshAxis, current_mesh
from tessera.dist.parts import cut_device_part, place_device_part
from tessera.dist.peer_copies import WantedChannel

Attributes = Mapping[str, Any]


class Pending(Protocol):
    """A communication that was started."""

    def wait(self) -> np.ndarray:
        """Its result, when it is complete."""


class World(Protocol):
    """The engine that runs the ranks of a program: the exchanges of each rank.

    `kind` is the name of a collective op, `attrs` are its attributes without `groups`, `members` the ranks of the
    group in order, `site` the user's line ("file:line"). An engine that is `on_device` takes arrays of the device, too.
    Calls like one before, on arrays of the class `direct_arrays`, are repeated without the op. With `check` the ranks
    of a group compare each of their calls.
    """

    size: int
    check: bool
    on_device: bool
    direct_arrays: type | None

    def start(
        self, rank: int, kind: str, x: np.ndarray, members: tuple[int, ...], attrs: Attributes, site: str,
        blocking: bool = False,
    ) -> Pending:  # fmt: skip
        """Start a collective of a group; with `blocking` its result is waited for at once."""

    def send(self, rank: int, x: np.ndarray, to: int, tag: int, site: str) -> None:
        """Send a message, which is buffered: it does not wait for the receiver."""

    def receive(self, rank: int, like: np.ndarray, source: int, tag: int, site: str) -> np.ndarray:
        """Wait for a message of this type."""


class PredictedWorld:
    """The ranks of a prediction, which are traced one after the other: nothing is exchanged.

    `types` are those of messages, by sender, receiver and tag, for receivers that must know them.
    """

    check = on_device = False
    direct_arrays = None

    def __init__(self, size: int) -> None:
        self.size = size
        self.types: dict[tuple[int, int, int], TensorType] = {}


class UnknownMessage(Exception):
    """The type of a message is not known until its sender is traced."""


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
    given = x if isinstance(x, DeviceArray) else np.asarray(x)
    return context.world.start(context.rank, kind, given, members, rest, site, blocking)


# Arrays of a device: engines that work in its memory take them in place.

LOCAL_OPS = ("local_part", "place_part")


def takes_device_arrays() -> bool:
    """Whether the engine of this rank works in the memory of a device."""
    context = CURRENT_RANK.get()
    return context is not None and context.world.on_device


def exchange_on_device(kind: str, x: DeviceArray, attrs: Attributes) -> DeviceArray | None:
    """The result of a collective, message or part of an array of a device; None if the host must compute it."""
    if kind in LOCAL_OPS:
        stream = x.memory.find_stream()
        if x.stream != stream:
            x.memory.order(x, stream)
        return _cut_or_place(kind, x, None, attrs, stream)
    if not takes_device_arrays():
        return None
    rest = {k: v for k, v in attrs.items() if k != "site"}
    return exchange(kind, x, rest, attrs["site"])  # type: ignore[arg-type, return-value]


def exchange_in_place(kind: str, x: DeviceArray, out: DeviceArray, attrs: Attributes) -> bool:
    """Queue a collective on the stream of `out`, which receives the result; false if the host must compute it."""
    if kind in LOCAL_OPS:
        _cut_or_place(kind, x, out, attrs, out.stream)
        return True
    if kind in ("send", "receive") or not takes_device_arrays():
        return False
    context = require_rank(kind)
    members = find_members(attrs["groups"], context.rank)
    rest = {k: v for k, v in attrs.items() if k not in ("groups", "site")}
    context.world.run(kind, x, out, members, rest, out.stream)  # type: ignore[attr-defined]
    return True


def start_in_place(calls: Sequence[tuple[str, DeviceArray, DeviceArray, Attributes]], stream: int) -> Any:
    """Start collectives (kind, operand, result, attributes) together behind what is queued on a stream.

    Gives what `DeviceMemory.wait` waits for; None if the host must compute them.
    """
    if not takes_device_arrays():
        return None
    context, found = require_rank("a collective"), []
    for kind, x, out, attrs in calls:
        rest = {k: v for k, v in attrs.items() if k not in ("groups", "site")}
        found.append((kind, x, out, find_members(attrs["groups"], context.rank), rest))
    return context.world.start_together(found, stream)  # type: ignore[attr-defined]


def prepare_recorded(calls: Sequence[tuple[str, Any, Attributes, bool]]) -> bool:
    """Whether all collectives (kind, element type, attributes, beside kernels) can be part of a CUDA graph of this rank.

    Those that can are prepared: what they need of the other ranks is there.
    """
    context = CURRENT_RANK.get()
    if context is None or not context.world.on_device:
        return False
    world: Any = context.world
    return all(
        kind in LOCAL_OPS
        or world.prepare_recorded(kind, dtype, find_members(attrs["groups"], context.rank), attrs, beside)
        for kind, dtype, attrs, beside in calls
    )


def open_channels(permutes: Sequence[tuple[Attributes, int | None, int]]) -> Sequence[Any]:
    """What makes each permutation of a program (attributes, address of the result if it is always the same, bytes).

    A channel is its attribute "channel" in `exchange_in_place` and `start_in_place`; None where it has none. The ranks
    agree on them: all call this once for a program, after they have compared its order.
    """
    context = CURRENT_RANK.get()
    if context is None or not context.world.on_device:
        return [None] * len(permutes)
    requests = [
        WantedChannel(tuple(map(tuple, attrs["pairs"])), find_members(attrs["groups"], context.rank), address, count)
        for attrs, address, count in permutes
    ]
    return context.world.open_channels(requests)  # type: ignore[attr-defined, no-any-return]


def has_copy_engines(where: MeshAxis) -> bool:
    """Whether copy engines permute tensors of compiled programs among this rank's group, beside its kernels."""
    context = CURRENT_RANK.get()
    if context is None or not context.world.on_device:
        return False
    return context.world.copies.serve(find_members(where.groups, context.rank))  # type: ignore[attr-defined, no-any-return]


# The order of a program's collectives.

COMPARISON = "the start of a program with several collectives"
# By world: a rank, the members of a group that it is in, and the digest of an order that they share.
_AGREED: WeakKeyDictionary[Any, set[tuple[int, tuple[int, ...], str]]] = WeakKeyDictionary()


def agree_on_order(orders: Sequence[tuple[Any, str]]) -> None:
    """Compare the order of a compiled program's collectives with that of the other ranks.

    `orders` are pairs (groups, digest). The compiler may change the order, and ranks that exchange other tensors than
    each other believe would compute wrong numbers. Engines of processors compare it before each run. Programs of a GPU
    are bound here, not run, at another time in each rank: they compare an order once.

    Raises:
        CollectiveError: another rank of a group has another order.
    """
    context = require_rank("a program with collectives")
    agreed = _AGREED.setdefault(context.world, set())
    for groups, digest in orders:
        members = find_members(groups, context.rank)
        if (context.rank, members, digest) in agreed and context.world.on_device:
            continue
        own = np.frombuffer(bytes.fromhex(digest), np.uint8)
        attrs = {"axis": 0, "groups": tuple(map(tuple, groups))}
        rows = start_exchange("all_gather", own, attrs, COMPARISON, blocking=True).wait()
        _check_orders(np.asarray(rows).reshape(-1, own.size), members, context.rank)
        agreed.add((context.rank, members, digest))


def _check_orders(rows: np.ndarray, members: tuple[int, ...], rank: int) -> None:
    own = rows[members.index(rank)]
    for member, row in zip(members, rows, strict=True):
        if (row != own).any():
            raise CollectiveError(
                f"the programs of rank {rank} and rank {member} have other collectives, or in another order",
                location=user_location(), expected="the same collectives in each rank of a group",
                received="programs that were compiled from different functions, or for different types",
                suggestion="let all ranks call the same function, and choose what depends on the rank with ts.where; or "
                "run it without jit, in the order in which it is written",
            )  # fmt: skip


def _cut_or_place(kind: str, x: DeviceArray, out: DeviceArray | None, attrs: Attributes, stream: int) -> DeviceArray:
    groups = attrs["groups"]
    run = cut_device_part if kind == "local_part" else place_device_part
    return run(x, out, attrs["axis"], find_rank_in_groups(groups), len(groups[0]), stream)


def exchange(kind: str, x: np.ndarray, attrs: Attributes, site: str) -> np.ndarray:
    """Run a collective, or send or receive a message, as this rank (the semantics of the ops)."""
    context = require_rank(kind)
    if kind == "send":
        _check_partner(attrs["to"], context)
        given = x if isinstance(x, DeviceArray) else np.asarray(x)
        context.world.send(context.rank, given, attrs["to"], attrs["tag"], site)
        return given
    if kind == "receive":
        _check_partner(attrs["source"], context)
        like = x if isinstance(x, DeviceArray) else np.asarray(x)
        return context.world.receive(context.rank, like, attrs["source"], attrs["tag"], site)
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

"""Engines: what runs the ranks of a mesh, by its name."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from tessera.core.device import count_gpus
from tessera.core.errors import DeviceUnavailable, user_location
from tessera.dist.mesh import Mesh
from tessera.dist.mpi import MpiWorld, count_launched
from tessera.dist.nccl import NcclWorld
from tessera.dist.ranks import CURRENT_RANK, RankContext
from tessera.dist.rendezvous import count_processes
from tessera.dist.simulation import SimulatedWorld
from tessera.ir.builder import CURRENT_RANK_NUMBER


def get_devices() -> list[str]:
    """The devices of this program: its GPUs, or one processor for each process that a launcher started.

    A simulated mesh needs none of them: `ts.Mesh(devices=(4, 2), ...)`.
    """
    return [f"gpu:{i}" for i in range(count_gpus())] or [f"cpu:{i}" for i in range(count_launched())]


def choose_engine(mesh: Mesh) -> str:
    """The engine of a mesh: its own, else NCCL or MPI in a program that a launcher started, else the simulator."""
    if mesh.engine:
        return mesh.engine
    return "nccl" if count_processes() else "mpi" if count_launched() > 1 else "simulated"


def run_as_rank(context: RankContext, program: Callable[[], Any]) -> Any:
    """Run a program as one rank."""
    token, number = CURRENT_RANK.set(context), CURRENT_RANK_NUMBER.set(context.rank)
    try:
        return program()
    finally:
        CURRENT_RANK.reset(token)
        CURRENT_RANK_NUMBER.reset(number)


def run_ranks(mesh: Mesh, program: Callable[[], Any]) -> dict[int, Any]:
    """Run a program as the ranks of a mesh: the results of the ranks of this process, by their numbers.

    Raises:
        DeviceUnavailable: the number of processes is not that of the ranks, or the engine is missing.
        CollectiveError, DeadlockError: what the simulator finds.
    """
    name = choose_engine(mesh)
    if name == "simulated":
        world = SimulatedWorld(mesh.size)
        contexts = [RankContext(r, mesh, world) for r in range(mesh.size)]
        return dict(enumerate(world.run([lambda c=c: run_as_rank(c, program) for c in contexts])))  # type: ignore[misc]
    processes = load_world(name, mesh.debug)
    if processes.size != mesh.size:
        flag = "--engine nccl " if name == "nccl" else ""
        raise DeviceUnavailable(
            f"the mesh has {mesh.size} ranks, and the program {processes.size} processes", location=user_location(),
            expected=f"tessera launch {flag}-n {mesh.size} ...",
            received=f"{processes.size} processes, engine {name!r}",
            suggestion='make the mesh as large as the program, or simulate it: ts.Mesh(..., engine="simulated")',
        )  # fmt: skip
    rank: int = processes.rank
    return {rank: run_as_rank(RankContext(rank, mesh, processes), program)}


@cache
def load_world(name: str, check: bool = False, reproducible: bool = False) -> Any:
    """The world of an engine with one process for each rank.

    Raises:
        DeviceUnavailable: a package is missing, or no launcher started the processes.
    """
    if name == "nccl":
        return NcclWorld(check)
    return MpiWorld(check, reproducible)

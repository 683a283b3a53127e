"""Rendezvous: how the processes of a program find each other before they have a communicator: files, or MPI.

`tessera launch --engine nccl` gives each process its rank, their number and a folder that all of them see.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from tessera.core.errors import DeadlockError, DeviceUnavailable
from tessera.dist.mpi import count_launched, load_mpi

RANK, SIZE, FOLDER = "TESSERA_RANK", "TESSERA_WORLD_SIZE", "TESSERA_RENDEZVOUS"
WAIT_SECONDS = 120.0
FIRST_PAUSE, POLL_SECONDS = 5e-5, 0.005
MESSAGE_PATIENCE = 5  # a rank may compute for long before it sends
MESSAGE_TAG = 30001


class Rendezvous(Protocol):
    """The rank of this process, the number of all, and bytes from one rank to others."""

    rank: int
    size: int

    def share(self, name: str, members: tuple[int, ...], make: Callable[[], bytes]) -> bytes:
        """What `make` gave at the first member, for each member of a group."""

    def send(self, to: int, data: bytes) -> None:
        """Send bytes to a rank, without a wait for it."""

    def receive(self, source: int) -> bytes:
        """Wait for the next bytes that a rank sends here."""


class FileRendezvous:
    """Processes that see one folder: bytes are files in it, which get their names when they are complete.

    >>> with tempfile.TemporaryDirectory() as folder:
    ...     [FileRendezvous(folder, r, 2).share("a", (0, 1), lambda: b"an id") for r in (0, 1)]
    [b'an id', b'an id']
    """

    def __init__(self, folder: str | os.PathLike[str], rank: int, size: int, seconds: float = WAIT_SECONDS) -> None:
        self.folder, self.rank, self.size, self.seconds = Path(folder), rank, size, seconds
        self._sent: dict[int, int] = {}
        self._received: dict[int, int] = {}

    def share(self, name: str, members: tuple[int, ...], make: Callable[[], bytes]) -> bytes:
        """What `make` gave at the first member, for each member of a group.

        Raises:
            DeadlockError: the first member does not come in time.
        """
        path = self.folder / name
        if members[0] == self.rank:
            data = make()
            self._write(path, data)
            return data
        return self._read(path, members[0], self.seconds)

    def send(self, to: int, data: bytes) -> None:
        """Send bytes to a rank, without a wait for it."""
        number = self._sent[to] = self._sent.get(to, 0) + 1
        self._write(self.folder / f"message-{self.rank}-{to}-{number}", data)

    def receive(self, source: int) -> bytes:
        """Wait for the next bytes that a rank sends here.

        Raises:
            DeadlockError: they do not come in time.
        """
        number = self._received[source] = self._received.get(source, 0) + 1
        path = self.folder / f"message-{source}-{self.rank}-{number}"
        data = self._read(path, source, MESSAGE_PATIENCE * self.seconds)
        path.unlink()
        return data

    def _write(self, path: Path, data: bytes) -> None:
        with tempfile.NamedTemporaryFile(dir=self.folder, delete=False) as file:
            file.write(data)
        os.replace(file.name, path)

    def _read(self, path: Path, source: int, seconds: float) -> bytes:
        end, pause = time.monotonic() + seconds, FIRST_PAUSE
        while time.monotonic() < end:
            if path.exists():
                return path.read_bytes()
            time.sleep(pause)
            pause = min(2 * pause, POLL_SECONDS)
        raise DeadlockError(
            f"rank {self.rank} waits for rank {source}, which does not come", expected=f"the file {path}",
            received=f"none in {seconds:g} s", suggestion="start all ranks with one folder",
        )  # fmt: skip


class MpiRendezvous:
    """Processes of MPI, which carries the bytes."""

    def __init__(self) -> None:
        self._comm = load_mpi().COMM_WORLD
        self.rank, self.size = self._comm.Get_rank(), self._comm.Get_size()
        self._sent: list[Any] = []

    def share(self, name: str, members: tuple[int, ...], make: Callable[[], bytes]) -> bytes:
        """What `make` gave at the first member, for each member of a group."""
        group = self._comm.Create_group(self._comm.Get_group().Incl(list(members)))
        found: bytes = group.bcast(make() if self.rank == members[0] else None, 0)
        group.Free()
        return found

    def send(self, to: int, data: bytes) -> None:
        """Send bytes to a rank, without a wait for it."""
        self._sent = [each for each in self._sent if not each.Test()]
        self._sent.append(self._comm.isend(data, to, MESSAGE_TAG))

    def receive(self, source: int) -> bytes:
        """Wait for the next bytes that a rank sends here."""
        found: bytes = self._comm.recv(source=source, tag=MESSAGE_TAG)
        return found


def count_processes(environment: Mapping[str, str] = os.environ) -> int:
    """The processes that `tessera launch --engine nccl` started; 0 without it."""
    size = environment.get(SIZE, "")
    return int(size) if size.isdigit() else 0


def find_rendezvous(environment: Mapping[str, str] = os.environ) -> Rendezvous:
    """The rendezvous that the launcher of this process gives it.

    Raises:
        DeviceUnavailable: no launcher started it, or what it says is no rank of a world.
    """
    if not count_processes(environment):
        if count_launched() > 1:
            return MpiRendezvous()
        raise DeviceUnavailable(
            "a mesh of the NCCL engine runs one process for each GPU, and no launcher started this one",
            expected="tessera launch --engine nccl -n 2 program.py",
        )
    rank, size, folder = environment.get(RANK, ""), count_processes(environment), environment.get(FOLDER, "")
    if not rank.isdigit() or int(rank) >= size or not os.path.isdir(folder):
        raise DeviceUnavailable(
            "these variables describe no rank", expected=f"{RANK} below {SIZE}, and {FOLDER} a folder",
            received=f"{RANK}={rank!r}, {SIZE}={size}, {FOLDER}={folder!r}",
        )  # fmt: skip
    return FileRendezvous(folder, int(rank), size)

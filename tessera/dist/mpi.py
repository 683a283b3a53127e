"""MPI engine: one process for each rank, collectives by mpi4py on NumPy buffers (extra `mpi`)."""

from __future__ import annotations

import io
import os
import sys
import traceback
from collections.abc import Mapping
from contextlib import redirect_stderr
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tessera.core.errors import CollectiveError, DeviceUnavailable
from tessera.dist.direct_calls import MAX_KNOWN, Exchanged
from tessera.dist.mpi_plans import Group, Plan, make_plan
from tessera.dist.simulation import describe_call
from tessera.interp.host import keep_heap_pages

# The variables by which launchers tell a process the number of processes: MPICH (hydra), Open MPI, Slurm.
SIZE_VARIABLES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "PMIX_SIZE", "MPI_LOCALNRANKS")
REPORTS = "TESSERA_REPORTS"  # the folder where `tessera launch` looks for what failed ranks say


def count_launched() -> int:
    """The number of processes that a launcher says it started; 1 without one."""
    return next((int(os.environ[v]) for v in SIZE_VARIABLES if os.environ.get(v, "").isdigit()), 1)


@cache
def load_mpi() -> Any:
    """The module mpi4py.MPI.

    Raises:
        DeviceUnavailable: mpi4py or an MPI library is missing, or it is not the one of the launcher.
    """
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise DeviceUnavailable(
            f"the MPI engine needs mpi4py and an MPI library: {error}", suggestion="pip install 'tessera[mpi]'"
        ) from None
    wanted, found = count_launched(), MPI.COMM_WORLD.Get_size()
    if wanted != found:
        raise DeviceUnavailable(
            f"the launcher started {wanted} processes, but mpi4py sees {found}: they are of different MPI libraries",
            expected=f"a launcher of {MPI.Get_library_version().splitlines()[0].strip()}",
            suggestion="start the program with `tessera launch`, which takes the launcher beside this Python",
        )
    if found > 1:
        _abort_on_errors(MPI)
    return MPI


def _abort_on_errors(mpi: Any) -> None:
    """End all ranks when one has an error that nothing catches: the others would wait for it for ever."""
    before = sys.excepthook

    def stop(kind: Any, error: BaseException, step: Any) -> None:
        rank = mpi.COMM_WORLD.Get_rank()
        report = io.StringIO()
        with redirect_stderr(report):
            try:
                before(kind, error, step)
            except Exception:
                traceback.print_exc()
        report.write(f"rank {rank} failed: all {mpi.COMM_WORLD.Get_size()} ranks end\n")
        _deliver(report.getvalue(), rank)
        mpi.COMM_WORLD.Abort(1)

    sys.excepthook = stop


def _deliver(report: str, rank: int) -> None:
    """Say how a rank failed: to `tessera launch` through a file, else on stderr.

    A launcher that stops all ranks may drop what it has not yet read of their output.
    """
    folder = os.environ.get(REPORTS)
    if folder is not None:
        try:
            (Path(folder) / f"{rank:06}").write_text(report, encoding="utf-8")
            return
        except OSError:  # a rank on another machine does not see the folder
            pass
    print(report, end="", file=sys.stderr, flush=True)


class Started:
    """A communication that MPI was asked for: its request, the memory that it uses, and what makes the result of it."""

    def __init__(self, plan: Plan, x: np.ndarray) -> None:
        self._sent: np.ndarray | None = x if plan.pack is None else plan.pack(x)
        self._received: np.ndarray | None = np.empty(plan.shape, plan.dtype)
        self._request, self._unpack = plan.start(self._sent, self._received), plan.unpack
        self._result: np.ndarray | None = None

    def wait(self) -> np.ndarray:
        """The result, when it is complete."""
        if self._received is not None:
            self._request.Wait()
            self._result = self._received if self._unpack is None else self._unpack(self._received)
            self._sent = self._received = None
        return self._result  # type: ignore[return-value]


class _Complete(NamedTuple):
    """A communication that has ended."""

    result: np.ndarray

    def wait(self) -> np.ndarray:
        """The result."""
        return self.result


def _as_bytes(x: np.ndarray) -> np.ndarray:
    return x.reshape(-1).view(np.uint8)


class MpiWorld:
    """The processes of an MPI program. Communicators follow the groups of mesh axes, and are kept.

    With `check` every collective first compares its kind, type and attributes on all ranks of the group. With
    `reproducible` reductions are computed in the order of the ranks, as the simulator does: the same bits.
    """

    on_device = False
    direct_arrays: type | None = np.ndarray
    last: Exchanged | None = None
    recording = False

    def __init__(self, check: bool = False, reproducible: bool = False) -> None:
        keep_heap_pages()  # the memory of results is used again, not asked of the system each time
        self.mpi = load_mpi()
        self.comm = self.mpi.COMM_WORLD
        self.rank, self.size = self.comm.Get_rank(), self.comm.Get_size()
        self.check, self.reproducible = check, reproducible
        self._plans: dict[Any, Plan] = {}
        self._comms: dict[tuple[int, ...], Any] = {tuple(range(self.size)): self.comm}

    def _find_comm(self, members: tuple[int, ...]) -> Any:
        if members not in self._comms:
            group = self.comm.Get_group().Incl(list(members))
            self._comms[members] = self.comm.Create_group(group)
        return self._comms[members]

    def start(
        self, rank: int, kind: str, x: np.ndarray, members: tuple[int, ...], attrs: Mapping[str, Any], site: str,
        blocking: bool = False,
    ) -> Started | _Complete:  # fmt: skip
        """Start a collective of a group; with `blocking` it is complete when the call returns."""
        if self.check:
            _compare_calls(self._find_comm(members), members, describe_call(kind, x, attrs), site)
        plan = self._find_plan(kind, x, members, attrs)
        if not blocking:
            return Started(plan, np.asarray(x, order="C"))
        done = _Complete(plan.run(x))
        if self.recording and not self.check:
            self.last = Exchanged(x, done.result, plan.run)
        return done

    def _find_plan(self, kind: str, x: np.ndarray, members: tuple[int, ...], attrs: Mapping[str, Any]) -> Plan:
        key = (kind, x.shape, x.dtype, members, *attrs.values())
        if key not in self._plans:
            if len(self._plans) >= MAX_KNOWN:
                self._plans.clear()
            group = Group(self.mpi, self._find_comm(members), members, x.shape, x.dtype, attrs)
            self._plans[key] = make_plan(kind, group, self.reproducible)
        return self._plans[key]

    def gather_objects(self, value: Any) -> list[Any]:
        """The values of all ranks, pickled on the way."""
        return self.comm.allgather(value)  # type: ignore[no-any-return]

    def send(self, rank: int, x: np.ndarray, to: int, tag: int, site: str) -> None:
        """Send a message, which is buffered: it does not wait for the receiver."""
        data = np.array(x, order="C")
        _SENT.append((self.comm.Isend([_as_bytes(data), self.mpi.BYTE], to, tag), data))
        _SENT[:] = [(request, kept) for request, kept in _SENT if not request.Test()]

    def receive(self, rank: int, like: np.ndarray, source: int, tag: int, site: str) -> np.ndarray:
        """Wait for a message of this type.

        Raises:
            CollectiveError: the message has another number of bytes.
        """
        status = self.mpi.Status()
        self.comm.Probe(source, tag, status)
        out = np.empty(like.shape, like.dtype)
        if status.Get_count(self.mpi.BYTE) != out.nbytes:
            raise CollectiveError(
                f"rank {rank} receives another type than rank {source} sends",
                expected=f"{describe_call('receive', out, {'source': source, 'tag': tag})} at {site}",
                received=f"{status.Get_count(self.mpi.BYTE)} bytes",
            )
        self.comm.Recv([_as_bytes(out), self.mpi.BYTE], source, tag)
        return out


# Messages under way, with the memory that they are read from.
_SENT: list[tuple[Any, np.ndarray]] = []


def _compare_calls(comm: Any, members: tuple[int, ...], call: str, site: str) -> None:
    calls = comm.allgather((call, site))
    own = calls[comm.Get_rank()]
    for member, other in zip(members, calls, strict=True):
        if other[0] != own[0]:
            raise CollectiveError(
                f"rank {members[comm.Get_rank()]} calls another collective than rank {member}",
                expected=f"rank {member}: {other[0]} at {other[1]}",
                received=f"rank {members[comm.Get_rank()]}: {own[0]} at {own[1]}",
            )

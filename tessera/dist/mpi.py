"""MPI engine: one process for each rank, collectives by mpi4py on NumPy buffers (extra `mpi`)."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import numpy as np

from tessera.core.errors import CollectiveError, DeviceUnavailable
from tessera.dist.direct_calls import Exchanged
from tessera.dist.exchange import REDUCERS, combine, narrow, widen
from tessera.dist.simulation import describe_call
from tessera.interp.host import keep_heap_pages

# The variables by which launchers tell a process the number of processes: MPICH (hydra), Open MPI, Slurm.
SIZE_VARIABLES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "PMIX_SIZE", "MPI_LOCALNRANKS")


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
        try:
            before(kind, error, step)
        except Exception:
            traceback.print_exc()
        print(f"rank {rank} failed: all {mpi.COMM_WORLD.Get_size()} ranks end", file=sys.stderr)
        sys.stderr.flush()
        mpi.COMM_WORLD.Abort(1)

    sys.excepthook = stop


class Started:
    """A communication that MPI was asked for: its request, and how the result is made of the buffer.

    `read` is memory that MPI reads until the request is complete.
    """

    def __init__(self, request: Any, finish: Callable[[], np.ndarray], read: np.ndarray | None = None) -> None:
        self._request, self._finish, self._read = request, finish, read
        self._result: np.ndarray | None = None

    def wait(self) -> np.ndarray:
        """The result, when it is complete."""
        if self._result is None:
            if self._request is not None:
                self._request.Wait()
            self._result, self._read = self._finish(), None
        return self._result


class _Blocking:
    """A communicator whose asynchronous calls are the blocking ones, which take less time where nothing overlaps."""

    def __init__(self, comm: Any) -> None:
        self.Get_size, self.Get_rank = comm.Get_size, comm.Get_rank
        self.Iallreduce, self.Iallgather = comm.Allreduce, comm.Allgather
        self.Ireduce_scatter_block = comm.Reduce_scatter_block


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
        self._comms: dict[tuple[int, ...], Any] = {tuple(range(self.size)): self.comm}

    def _find_comm(self, members: tuple[int, ...]) -> Any:
        if members not in self._comms:
            group = self.comm.Get_group().Incl(list(members))
            self._comms[members] = self.comm.Create_group(group)
        return self._comms[members]

    def start(
        self, rank: int, kind: str, x: np.ndarray, members: tuple[int, ...], attrs: Mapping[str, Any], site: str,
        blocking: bool = False,
    ) -> Started:  # fmt: skip
        """Start a collective of a group; with `blocking` it may also be complete when the call returns."""
        given, comm, x = x, self._find_comm(members), np.ascontiguousarray(x)
        if self.check:
            _compare_calls(comm, members, describe_call(kind, x, attrs), site)
        reduces = kind in ("all_reduce", "reduce_scatter", "reduce_to")
        run = _combine_gathered if kind not in _RUNS or (reduces and self.reproducible) else _RUNS[kind]
        if blocking and run in _BLOCKING:
            comm = _Blocking(comm)
        started = run(self, comm, kind, x, members, attrs)
        if self.recording and blocking and not self.check:
            self.last = Exchanged(kind, given, started.wait(), members, attrs)
        return started

    def repeat(self, done: Exchanged, x: np.ndarray) -> np.ndarray:
        """Run a collective as before, on another array of the same type."""
        return self.start(self.rank, done.kind, x, done.members, done.attrs, "", blocking=True).wait()

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


def _gather_rows(mpi: Any, comm: Any, x: np.ndarray) -> tuple[Any, np.ndarray]:
    out = np.empty((comm.Get_size(), *x.shape), x.dtype)
    return comm.Iallgather([_as_bytes(x), mpi.BYTE], [_as_bytes(out), mpi.BYTE]), out


def _combine_gathered(
    world: MpiWorld, comm: Any, kind: str, x: np.ndarray, members: tuple[int, ...], attrs: Any
) -> Started:
    """The collective by the simulator's rule on the tensors of all ranks."""
    request, rows = _gather_rows(world.mpi, comm, x)
    return Started(request, lambda: combine(kind, list(rows), members, attrs)[comm.Get_rank()], x)


@cache
def _find_reduction(kind: str, dtype: np.dtype) -> Any:
    """The MPI operation of a reduction. MPI's own maximum of floats drops NaN; here it is that of NumPy."""
    mpi = load_mpi()
    if kind not in ("max", "min") or dtype.kind != "f":
        return {"sum": mpi.SUM, "mean": mpi.SUM, "max": mpi.MAX, "min": mpi.MIN, "prod": mpi.PROD}[kind]

    def reduce(given: Any, total: Any, _: Any) -> None:
        out = np.frombuffer(total, dtype)
        REDUCERS[kind](np.frombuffer(given, dtype), out, out=out)

    return mpi.Op.Create(reduce, commute=True)


def _all_reduce(world: MpiWorld, comm: Any, kind: str, x: np.ndarray, members: tuple[int, ...], attrs: Any) -> Started:
    dtype, wide = x.dtype, widen(x)
    wide = wide.view(np.uint8) if wide.dtype == np.bool_ else wide
    if wide.dtype.kind not in "iuf" or wide.dtype.isbuiltin != 1:
        return _combine_gathered(world, comm, kind, x, members, attrs)  # an element type that MPI does not have
    wide, out = np.ascontiguousarray(wide), np.empty_like(wide)
    request = comm.Iallreduce(wide, out, _find_reduction(attrs["kind"], wide.dtype))

    def finish() -> np.ndarray:
        with np.errstate(all="ignore"):
            return out.view(np.bool_) if dtype == np.bool_ else narrow(out, attrs["kind"], len(members), dtype)

    return Started(request, finish, wide)


def _reduce_scatter(
    world: MpiWorld, comm: Any, kind: str, x: np.ndarray, members: tuple[int, ...], attrs: Any
) -> Started:
    wide = widen(x)
    if wide.dtype.kind not in "iuf" or wide.dtype.isbuiltin != 1:
        return _combine_gathered(world, comm, kind, x, members, attrs)
    parts = _join_parts(np.split(wide, len(members), attrs["axis"]))
    out = np.empty(parts.shape[1:], parts.dtype)
    request = comm.Ireduce_scatter_block(parts, out, world.mpi.SUM)

    def finish() -> np.ndarray:
        with np.errstate(all="ignore"):
            return narrow(out, attrs["kind"], len(members), x.dtype)

    return Started(request, finish, parts)


def _join_parts(parts: list[np.ndarray]) -> np.ndarray:
    """Equal parts along a new first axis, each contiguous; without a copy where they already are."""
    whole = parts[0].base
    if whole is not None and whole.flags.c_contiguous and all(p.flags.c_contiguous for p in parts):
        joined = whole.reshape(-1)[: sum(p.size for p in parts)].reshape(len(parts), *parts[0].shape)
        if joined.ctypes.data == parts[0].ctypes.data and joined.size == whole.size:
            return joined
    return np.stack(parts)


def _all_gather(world: MpiWorld, comm: Any, kind: str, x: np.ndarray, members: tuple[int, ...], attrs: Any) -> Started:
    request, rows = _gather_rows(world.mpi, comm, x)
    if attrs["axis"] == -x.ndim:
        return Started(request, lambda: rows.reshape(-1, *x.shape[1:]), x)  # the rows lie as they should
    return Started(request, lambda: np.concatenate(list(rows), attrs["axis"]), x)


def _broadcast(world: MpiWorld, comm: Any, kind: str, x: np.ndarray, members: tuple[int, ...], attrs: Any) -> Started:
    out = np.array(x)
    return Started(comm.Ibcast([_as_bytes(out), world.mpi.BYTE], attrs["root"]), lambda: out)


def _all_to_all(world: MpiWorld, comm: Any, kind: str, x: np.ndarray, members: tuple[int, ...], attrs: Any) -> Started:
    parts = np.ascontiguousarray(np.stack(np.split(x, len(members), attrs["split"])))
    out, byte = np.empty_like(parts), world.mpi.BYTE
    request = comm.Ialltoall([_as_bytes(parts), byte], [_as_bytes(out), byte])
    return Started(request, lambda: np.concatenate(list(out), attrs["join"]), parts)


def _permute(world: MpiWorld, comm: Any, kind: str, x: np.ndarray, members: tuple[int, ...], attrs: Any) -> Started:
    out, requests, byte = np.zeros_like(x), [], world.mpi.BYTE
    for here, there in attrs["pairs"]:
        if there == world.rank and here in members:
            requests.append(comm.Irecv([_as_bytes(out), byte], members.index(here), _PERMUTE_TAG))
        if here == world.rank and there in members:
            requests.append(comm.Isend([_as_bytes(x), byte], members.index(there), _PERMUTE_TAG))

    def finish() -> np.ndarray:
        world.mpi.Request.Waitall(requests)
        return out

    return Started(None, finish, x)


_PERMUTE_TAG = 30000
_BLOCKING = (_all_reduce, _all_gather, _reduce_scatter)
_RUNS: dict[str, Callable[..., Started]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "broadcast_from": _broadcast,
    "all_to_all": _all_to_all,
    "collective_permute": _permute,
}

"""NCCL engine: one process for each GPU, collectives by NCCL on the memory of the GPU (extra `nccl`: nccl4py, pycuda).

A collective whose result is needed at once is queued on the stream of the computation. Asynchronous collectives and
permutations are queued on a stream of their own, and events order the two: computation goes on until the result is
used. Permutations of compiled programs are made by copy engines where these reach the other rank (`PeerCopies`).
"""

from __future__ import annotations

import atexit
import importlib
import itertools
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np

from tessera.core.device_array import COMMUNICATION_BLOCKS, DeviceArray, DeviceMemory, Rows
from tessera.core.errors import CollectiveError, DeviceUnavailable, TesseraError
from tessera.core.hooks import find_device_memory
from tessera.core.types import TensorType, as_dtype
from tessera.dist.direct_calls import Exchanged
from tessera.dist.exchange import combine
from tessera.dist.messages import Mailbox
from tessera.dist.parts import PartsOfAxis, find_shape
from tessera.dist.peer_copies import Channel, PeerCopies, WantedChannel
from tessera.dist.rendezvous import Rendezvous, find_rendezvous
from tessera.dist.simulation import describe_call
from tessera.ir.tensor import wrap_array
from tessera.ops.tensor import reduce as reductions

# ncclDataType_t of the element types that NCCL reduces; everything else travels as bytes.
BYTES = 1
TYPES: dict[Any, int] = {
    np.dtype(np.int8): 0, np.dtype(np.uint8): 1, np.dtype(np.bool_): 1, np.dtype(np.int32): 2, np.dtype(np.uint32): 3,
    np.dtype(np.int64): 4, np.dtype(np.uint64): 5, np.dtype(np.float16): 6, np.dtype(np.float32): 7,
    np.dtype(np.float64): 8, np.dtype(ml_dtypes.bfloat16): 9,
}  # fmt: skip
FLOATS = frozenset((6, 7, 8, 9))
OPS = {"sum": 0, "prod": 1, "max": 2, "min": 3, "mean": 4}  # ncclRedOp_t
LAZY = frozenset(("collective_permute",))  # their results are waited for where they are used
BINDINGS = "nccl.bindings.nccl"
GROUP, BESIDE = "group", "beside"  # communicators of collectives alone on the GPU, and of those beside kernels
_WORLDS = itertools.count()


@cache
def load_nccl() -> Any:
    """The functions of NCCL by their names in C (nccl4py's bindings, which take addresses).

    Raises:
        DeviceUnavailable: nccl4py or NCCL is missing.
    """
    try:
        bindings = importlib.import_module(BINDINGS)
        bindings.get_version()
    except (ImportError, RuntimeError, OSError) as error:
        raise DeviceUnavailable(
            f"the NCCL engine needs nccl4py and NCCL: {str(error).splitlines()[0]}",
            suggestion="pip install 'tessera[nccl]'",
        ) from None
    return bindings


class Queued:
    """A collective that is queued: `wait` makes the stream of the computation wait for it, not this process.

    An operand of the host gives a result of the host.
    """

    def __init__(self, world: NcclWorld, result: DeviceArray, mark: Any, stream: int, to_host: bool) -> None:
        self._world, self._result, self._mark = world, result, mark
        self._stream, self._to_host = stream, to_host

    def wait(self) -> Any:
        """The result, on the device of the operand."""
        if self._mark is not None:
            self._world.memory.wait(self._stream, self._mark)
            self._mark, self._result.stream = None, self._stream
        return self._result.numpy() if self._to_host else self._result


class NcclWorld:
    """The processes of a program on GPUs. Communicators follow the groups of mesh axes, and are kept.

    With `check` every collective first compares its kind, type and attributes on all ranks of the group.
    """

    on_device = True
    direct_arrays: type | None = DeviceArray

    def __init__(
        self, check: bool = False, library: Any = None, memory: DeviceMemory | None = None,
        rendezvous: Rendezvous | None = None,
    ) -> None:  # fmt: skip
        self.rendezvous = rendezvous or find_rendezvous()
        self.rank, self.size, self.check = self.rendezvous.rank, self.rendezvous.size, check
        self.library = library or load_nccl()
        self.memory: DeviceMemory = memory or find_device_memory("cuda:0")
        self._comms: dict[tuple[Any, ...], Any] = {}
        self.name = f"world{next(_WORLDS)}"  # ranks make their worlds in the same order
        self._side: int | None = None
        self.mailbox, self.copies = Mailbox(self), PeerCopies(self)
        self.last: Exchanged | None = None
        self.recording = False
        if library is None:
            _close_at_exit(self)

    def find_comm(self, members: tuple[int, ...], name: str = GROUP) -> Any:
        """The communicator of a group, which all its members ask for."""
        key = (name, *members)
        comm = self._comms.get(key)
        if comm is None:
            where = "-".join(map(str, (self.name, *key)))
            data = self.rendezvous.share(where, members, lambda: bytes(self.library.get_unique_id()))
            self.memory.find_stream()  # the GPU's context is current from here on
            with self.errors(None, f"to join {where}"):
                found = self.library.UniqueId.from_buffer(data)
                comm = self._join(len(members), found, members.index(self.rank), name)
            self._comms[key] = comm
        return comm

    def _join(self, count: int, id: Any, number: int, name: str) -> Any:
        """A new communicator; that of collectives beside kernels leaves them most multiprocessors."""
        if name != BESIDE or not hasattr(self.library, "comm_init_rank_config"):
            return self.library.comm_init_rank(count, id, number)
        config = self.library.Config()
        config.max_ctas = COMMUNICATION_BLOCKS
        return self.library.comm_init_rank_config(count, id, number, config.ptr)

    @contextmanager
    def errors(self, comm: Any, call: str) -> Iterator[None]:
        """Errors of NCCL as Tessera's."""
        try:
            yield
        except TesseraError:
            raise
        except Exception as error:
            if type(error).__name__ != "NCCLError":
                raise
            last = self.library.get_last_error(0 if comm is None else comm)
            raise CollectiveError(
                f"NCCL failed {call} at rank {self.rank}: {error}", received=str(last) or None,
                suggestion="NCCL_DEBUG=INFO prints what it does; one process uses one GPU",
            ) from None  # fmt: skip

    # Collectives.

    def start(
        self, rank: int, kind: str, x: Any, members: tuple[int, ...], attrs: Mapping[str, Any], site: str,
        blocking: bool = False,
    ) -> Queued:  # fmt: skip
        """Start a collective of a group on an array of the GPU, or of the host, which is copied there and back."""
        to_host = not isinstance(x, DeviceArray)
        stream = self.memory.find_stream()
        given: DeviceArray = self.memory.copy_in(np.asarray(x, order="C"), stream) if to_host else x
        if self.check:
            self.compare(members, describe_call(kind, given, attrs), site)  # type: ignore[arg-type]
        if blocking and (to_host or kind not in LAZY):
            if given.stream != stream:
                self.memory.order(given, stream)
            out = self.run(kind, given, None, members, attrs, stream)
            if self.recording and not (to_host or self.check):
                self.last = Exchanged(given, out, lambda x: self._repeat(kind, x, members, attrs))
            return Queued(self, out, None, stream, to_host)
        return self._start_aside(kind, given, members, attrs, (stream, to_host, blocking))

    def _start_aside(self, kind: str, x: DeviceArray, members: Any, attrs: Any, how: tuple[int, bool, bool]) -> Queued:
        """Queue a collective on the stream of communication, behind what makes its operand."""
        stream, to_host, lazy = how
        if self._side is None:
            self._side = self.memory.make_stream()
        out = self.memory.empty(find_shape(kind, x.shape, len(members), attrs), x.dtype, stream)
        self.memory.wait(self._side, self.memory.mark(stream))
        if x.stream not in (stream, self._side):
            self.memory.wait(self._side, self.memory.mark(x.stream))
        self.run(kind, x, out, members, attrs, self._side)
        mark = self.memory.mark(self._side)
        for each in (x, out):  # their memory is used again behind the collective
            if each.free is not None:
                each.others = {*(each.others or ()), self._side}
        if x.free is None:
            self.memory.keep_until_done([x], self._side)
        out.stream = self._side
        return Queued(self, out, None if lazy else mark, stream, to_host)

    def run(
        self, kind: str, x: DeviceArray, out: DeviceArray | None, members: tuple[int, ...], attrs: Mapping[str, Any],
        stream: int, name: str = GROUP,
    ) -> DeviceArray:  # fmt: skip
        """Queue a collective on a stream; `out`, or a new array, receives its result. `name` is of the communicators."""
        if out is None:
            out = self.memory.empty(find_shape(kind, x.shape, len(members), attrs), x.dtype, stream)
        alone = len(members) == 1 and kind not in LAZY
        comm = None if alone else self._comms.get((name, *members)) or self.find_comm(members, name)
        if alone:
            self.memory.copy_rows(Rows(out.address, x.nbytes), Rows(x.address, x.nbytes), x.nbytes, 1, stream)
        elif x.nbytes:
            call = _Call(self, comm, x, out, members, attrs, stream)
            try:
                _RUNS[kind](call)
            except Exception:
                with self.errors(comm, f"in {kind}"):
                    raise
        elif out.nbytes:
            self.memory.clear(out, stream)
        return out

    # Collectives of a program: beside what its kernels compute, and recorded in its CUDA graph.

    def start_together(
        self, calls: Sequence[tuple[str, DeviceArray, DeviceArray, tuple[int, ...], Mapping[str, Any]]], stream: int
    ) -> Any:
        """Queue collectives on the stream of communication, behind what is queued on a stream: what to wait for."""
        if self._side is None:
            self._side = self.memory.make_stream()
        self.memory.wait(self._side, self.memory.mark(stream))
        alike = [c for c in calls if _is_one_call(c[0], c[2], len(c[3]), c[4])]
        for _, _, _, members, _ in alike:
            self._find_beside(members)
        with self.group():
            for call in alike:
                self._run_beside(*call)
        for call in calls:
            if call not in alike:
                self._run_beside(*call)
        return self.memory.mark(self._side)

    def _run_beside(
        self, kind: str, x: DeviceArray, out: DeviceArray, members: tuple[int, ...], attrs: Mapping[str, Any]
    ) -> None:
        assert self._side is not None
        self.run(kind, x, out, members, attrs, self._side, BESIDE)

    def _find_beside(self, members: tuple[int, ...]) -> None:
        if len(members) > 1:
            self.find_comm(members, BESIDE)

    def prepare_recorded(
        self, kind: str, dtype: np.dtype, members: tuple[int, ...], attrs: Mapping[str, Any], beside: bool
    ) -> bool:
        """Whether a collective can be part of a CUDA graph, as where neither the host nor another program computes.

        If it can, its communicator is there afterwards.
        """
        reduces = kind in ("all_reduce", "reduce_scatter", "reduce_to")
        if kind not in _RUNS or (reduces and not _is_native(dtype, attrs.get("kind", "sum"))):
            return False
        if len(members) > 1 or kind in LAZY:
            self.find_comm(members, BESIDE if beside else GROUP)
        return True

    def open_channels(self, requests: Sequence[WantedChannel]) -> list[Channel | None]:
        """Channels of copy engines for the permutations of a program; none where NCCL makes them.

        A collective takes its channel from the attribute "channel".
        """
        return self.copies.open(requests)

    @contextmanager
    def group(self) -> Iterator[None]:
        """Calls of NCCL that run at the same time."""
        self.library.group_start()
        try:
            yield
        finally:
            self.library.group_end()

    def _repeat(self, kind: str, x: DeviceArray, members: tuple[int, ...], attrs: Mapping[str, Any]) -> DeviceArray:
        stream = self.memory.find_stream()
        if x.stream != stream:
            self.memory.order(x, stream)
        return self.run(kind, x, None, members, attrs, stream)

    def compare(self, members: tuple[int, ...], call: str, site: str) -> None:
        """Compare a call with those of all ranks of a group.

        Raises:
            CollectiveError: another rank calls another collective, or one of another type.
        """
        for member, other in zip(members, self.gather_objects((call, site), members), strict=True):
            if other[0] != call:
                raise CollectiveError(
                    f"rank {self.rank} calls another collective than rank {member}",
                    expected=f"rank {member}: {other[0]} at {other[1]}",
                    received=f"rank {self.rank}: {call} at {site}",
                )

    def gather_objects(self, value: Any, members: tuple[int, ...] | None = None) -> list[Any]:
        """The values of all ranks, pickled on the way."""
        members = members or tuple(range(self.size))
        data = np.frombuffer(pickle.dumps(value), np.uint8)
        sizes = self._gather_host(np.array([data.size], np.int64), members)
        rows = self._gather_host(np.pad(data, (0, int(sizes.max()) - data.size)), members).reshape(len(members), -1)
        return [pickle.loads(row[:n].tobytes()) for row, n in zip(rows, sizes, strict=True)]

    def _gather_host(self, x: np.ndarray, members: tuple[int, ...]) -> np.ndarray:
        stream = self.memory.find_stream()
        return self.run("all_gather", self.memory.copy_in(x, stream), None, members, {"axis": -1}, stream).numpy()

    # Messages.

    def send(self, rank: int, x: Any, to: int, tag: int, site: str) -> None:
        """Send a message, which is buffered: it does not wait for the receiver."""
        self.mailbox.send(x, to, tag)

    def receive(self, rank: int, like: Any, source: int, tag: int, site: str) -> Any:
        """Wait for a message of this type.

        Raises:
            CollectiveError: the message has another shape or element type.
        """
        return self.mailbox.receive(like, source, tag, site)

    def close(self) -> None:
        """Wait for what is queued, and leave the communicators: NCCL waits for their other members.

        CUDA graphs with collectives are freed first: programs that are called afterwards fail.
        """
        for graph in list(self.memory.exchanging_graphs):
            graph.free()
        self.copies.close()
        for comm in self._comms.values():
            self.library.comm_destroy(comm)
        self._comms.clear()


def _close_at_exit(world: NcclWorld) -> None:
    """Leave the communicators at the end of a program that has not failed: other ranks may still read this GPU."""
    failed: list[Any] = []
    before = sys.excepthook

    def note(*error: Any) -> None:
        failed.append(error[1])
        before(*error)

    sys.excepthook = note
    atexit.register(lambda: None if failed else world.close())


@dataclass
class _Call:
    """A collective with its operand and its result, and what it is queued on."""

    world: NcclWorld
    comm: Any
    x: DeviceArray
    out: DeviceArray
    members: tuple[int, ...]
    attrs: Mapping[str, Any]
    stream: int

    @property
    def library(self) -> Any:
        """The functions of NCCL."""
        return self.world.library

    @property
    def memory(self) -> DeviceMemory:
        """The memory of this rank's GPU."""
        return self.world.memory

    @property
    def me(self) -> int:
        """The number of this rank in the group."""
        return self.members.index(self.world.rank)

    def make(self, shape: tuple[int, ...]) -> DeviceArray:
        """A new array for this call, in memory that no other stream uses."""
        home = self.memory.find_stream()
        made = self.memory.empty(shape, self.x.dtype, home)
        if self.memory.recorded is not None:  # a CUDA graph runs behind what is queued at home
            self.memory.recorded.append(made)
        elif home != self.stream:  # the call began behind what is queued at home, and its end is marked afterwards
            self.memory.wait(self.stream, self.memory.mark(home))
            made.others = {self.stream}
        return made

    def pack(self, x: DeviceArray, axis: int) -> DeviceArray:
        """Equal parts along an axis, one after the other."""
        count, split = len(self.members), PartsOfAxis(x, axis, len(self.members))
        if split.outer == 1:
            return x
        packed = self.make(x.shape)
        for i in range(count):
            self.memory.copy_rows(split.rows(packed, i), split.columns(x, i), split.width, split.outer, self.stream)
        return packed

    def unpack(self, packed: DeviceArray, out: DeviceArray, axis: int) -> None:
        """Parts that lie one after the other, joined along an axis of `out`."""
        split = PartsOfAxis(out, axis, len(self.members))
        for i in range(len(self.members)):
            self.memory.copy_rows(split.columns(out, i), split.rows(packed, i), split.width, split.outer, self.stream)

    def copy(self, source: DeviceArray, target: DeviceArray) -> None:
        """Copy an array into another of its size."""
        rows = Rows(target.address, target.nbytes), Rows(source.address, source.nbytes)
        self.memory.copy_rows(*rows, target.nbytes, 1, self.stream)

    def group(self) -> Any:
        """Sends and receives that run at the same time."""
        return self.world.group()

    def send(self, address: int, count: int, to: int) -> None:
        """Send bytes to a member."""
        self.library.send(address, count, BYTES, to, self.comm, self.stream)

    def receive(self, address: int, count: int, source: int) -> None:
        """Receive bytes of a member."""
        self.library.recv(address, count, BYTES, source, self.comm, self.stream)

    def gather(self) -> DeviceArray:
        """The operands of all members, one after the other."""
        rows = self.make((len(self.members), *self.x.shape))
        self.library.all_gather(self.x.address, rows.address, self.x.nbytes, BYTES, self.comm, self.stream)
        return rows


def _is_native(dtype: np.dtype, kind: str) -> bool:
    """Whether NCCL has a reduction; its maximum of floats drops NaN."""
    type = TYPES.get(dtype)
    return type is not None and not (type in FLOATS and kind in ("max", "min"))


def _is_one_call(kind: str, out: DeviceArray, count: int, attrs: Mapping[str, Any]) -> bool:
    """Whether a collective is a call of NCCL after which nothing is queued: such calls may be grouped."""
    if kind == "all_gather":
        return PartsOfAxis(out, attrs["axis"], count).outer == 1
    return kind in ("all_reduce", "reduce_scatter") and _is_native(out.dtype, attrs["kind"])


def _all_reduce(c: _Call) -> None:
    kind = c.attrs["kind"]
    if not _is_native(c.x.dtype, kind):
        _combine(c, kind)
        return
    size = c.x.nbytes // c.x.dtype.itemsize
    c.library.all_reduce(c.x.address, c.out.address, size, TYPES[c.x.dtype], OPS[kind], c.comm, c.stream)


def _combine(c: _Call, kind: str) -> None:
    """A reduction that NCCL lacks. It has no maximum of floats that keeps NaN: the GPU reduces the gathered operands.
    Of element types that it does not know, the host does."""
    rows = c.gather()
    if c.x.dtype in TYPES:
        rows.stream = c.stream
        whole = wrap_array(rows, TensorType(rows.shape, as_dtype(rows.dtype)))
        found: DeviceArray = getattr(reductions, kind)(whole, axis=0).data
        if found.stream != c.stream:
            c.memory.order(found, c.stream)
    else:
        rows.stream = c.stream
        total = combine("all_reduce", list(rows.numpy()), c.members, {"kind": kind})[0]
        found = c.memory.copy_in(total, c.stream)
    c.copy(found, c.out)


def _reduce_scatter(c: _Call) -> None:
    kind, type = c.attrs["kind"], TYPES.get(c.x.dtype)
    packed = c.pack(c.x, c.attrs["axis"])
    if type is None:
        whole = c.make(c.x.shape)
        _combine(_Call(c.world, c.comm, packed, whole, c.members, c.attrs, c.stream), kind)
        place = Rows(whole.address + c.me * c.out.nbytes, c.out.nbytes)
        c.memory.copy_rows(Rows(c.out.address, c.out.nbytes), place, c.out.nbytes, 1, c.stream)
        return
    size = c.out.nbytes // c.out.dtype.itemsize
    c.library.reduce_scatter(packed.address, c.out.address, size, type, OPS[kind], c.comm, c.stream)


def _reduce_to(c: _Call) -> None:
    _all_reduce(_Call(c.world, c.comm, c.x, c.out, c.members, {"kind": "sum"}, c.stream))
    if c.me != c.attrs["root"]:
        c.memory.clear(c.out, c.stream)


def _broadcast(c: _Call) -> None:
    c.library.broadcast(c.x.address, c.out.address, c.x.nbytes, BYTES, c.attrs["root"], c.comm, c.stream)


def _all_gather(c: _Call) -> None:
    if PartsOfAxis(c.out, c.attrs["axis"], len(c.members)).outer == 1:
        c.library.all_gather(c.x.address, c.out.address, c.x.nbytes, BYTES, c.comm, c.stream)
    else:
        c.unpack(c.gather(), c.out, c.attrs["axis"])


def _scatter(c: _Call) -> None:
    root, part = c.attrs["root"], c.out.nbytes
    packed = c.pack(c.x, c.attrs["axis"]) if c.me == root else c.x
    with c.group():
        for i in range(len(c.members) if c.me == root else 0):
            c.send(packed.address + i * part, part, i)
        c.receive(c.out.address, part, root)


def _gather(c: _Call) -> None:
    root, part, mine = c.attrs["root"], c.x.nbytes, c.me == c.attrs["root"]
    rows = c.make((len(c.members), *c.x.shape)) if mine else c.out
    with c.group():
        c.send(c.x.address, part, root)
        for i in range(len(c.members) if mine else 0):
            c.receive(rows.address + i * part, part, i)
    if mine:
        c.unpack(rows, c.out, c.attrs["axis"])
    else:
        c.memory.clear(c.out, c.stream)


def _all_to_all(c: _Call) -> None:
    split, join, part = c.attrs["split"], c.attrs["join"], c.x.nbytes // len(c.members)
    packed = c.pack(c.x, split)
    direct = PartsOfAxis(c.out, join, len(c.members)).outer == 1
    rows = c.out if direct else c.make(c.out.shape)
    with c.group():
        for i in range(len(c.members)):
            c.send(packed.address + i * part, part, i)
            c.receive(rows.address + i * part, part, i)
    if not direct:
        c.unpack(rows, c.out, join)


def _permute(c: _Call) -> None:
    me, channel = c.world.rank, c.attrs.get("channel")
    if channel is not None:
        channel.exchange(c.memory, c.x, c.out, c.stream)
        return
    to = [there for here, there in c.attrs["pairs"] if here == me and there in c.members]
    sources = [here for here, there in c.attrs["pairs"] if there == me and here in c.members]
    with c.group():
        for there in to:
            c.send(c.x.address, c.x.nbytes, c.members.index(there))
        for here in sources:
            c.receive(c.out.address, c.x.nbytes, c.members.index(here))
    if not sources:
        c.memory.clear(c.out, c.stream)


_RUNS: dict[str, Callable[[_Call], None]] = {
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
    "reduce_to": _reduce_to,
    "broadcast_from": _broadcast,
    "all_gather": _all_gather,
    "scatter_from": _scatter,
    "gather_to": _gather,
    "all_to_all": _all_to_all,
    "collective_permute": _permute,
}

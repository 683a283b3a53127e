"""A library with the functions of nccl4py's bindings that the engine calls: ranks are threads, memory is the host's."""

import ctypes
import functools
import tempfile
import threading
import types
from collections import defaultdict
from queue import Queue

import ml_dtypes
import numpy as np

from tessera.codegen.ptx.runtime.device_memory import get_device_memory
from tessera.dist.engines import run_as_rank
from tessera.dist.nccl import NcclWorld
from tessera.dist.ranks import RankContext
from tessera.dist.rendezvous import FileRendezvous

# nccl.h: ncclDataType_t and ncclRedOp_t.
TYPES = ("int8 uint8 int32 uint32 int64 uint64 float16 float32 float64").split()
OPS = (np.add, np.multiply, np.maximum, np.minimum, np.add)
SECONDS = 60


class NCCLError(Exception):
    """What the bindings raise."""


def view(address, count, type):
    dtype = np.dtype(ml_dtypes.bfloat16) if type == 9 else np.dtype(TYPES[type])
    memory = (ctypes.c_uint8 * (count * dtype.itemsize)).from_address(address)
    return np.frombuffer(memory, dtype)


class Hub:
    """What the processes of a world share in reality by wire."""

    def __init__(self):
        self.lock, self.barriers, self.posted = threading.Lock(), {}, defaultdict(dict)
        self.mail, self.made = defaultdict(Queue), 0

    def find_mail(self, *key):
        """The queue of a pair of ranks: two that ask for it first at once get the same one."""
        with self.lock:
            return self.mail[key]


class Comm:
    def __init__(self, hub, name, rank, size):
        self.hub, self.name, self.rank, self.size, self.count = hub, name, rank, size, 0
        with hub.lock:
            self.barrier = hub.barriers.setdefault(name, threading.Barrier(size))

    def exchange(self, call, array):
        """The arrays of all ranks, which must make the same call."""
        self.count += 1
        posted = self.hub.posted[self.name, self.count]
        posted[self.rank] = call, array.copy()
        self.barrier.wait(SECONDS)
        if len({c for c, _ in posted.values()}) > 1:
            raise NCCLError(f"ranks disagree: {sorted(posted.items())}")
        return [posted[r][1] for r in range(self.size)]


class UniqueId:
    def __init__(self, data):
        self.data = data

    def __bytes__(self):
        return self.data

    @staticmethod
    def from_buffer(buffer):
        assert len(buffer) == 128
        return UniqueId(bytes(buffer))


def in_order(call):
    """A call that runs at the end of its group, after those before it."""

    @functools.wraps(call)
    def queue(self, *args):
        self._queue(0, lambda: call(self, *args))

    return queue


class FakeNccl:
    """The functions with the parameters of nccl4py 0.6 (test_nccl.py compares them where it is installed)."""

    UniqueId = UniqueId

    def __init__(self, hub):
        self.hub, self.here, self.calls = hub, threading.local(), []
        self.configs, self.limits, self.groups = [], [], []

    def get_unique_id(self):
        with self.hub.lock:
            self.hub.made += 1
            return UniqueId(str(self.hub.made).encode().ljust(128, b"\0"))

    def comm_init_rank(self, nranks, comm_id, rank):
        comm = Comm(self.hub, bytes(comm_id), rank, nranks)
        comm.barrier.wait(SECONDS)
        return comm

    def comm_destroy(self, comm):
        comm.barrier.wait(SECONDS)

    def get_last_error(self, comm):
        return "the last error"

    def comm_init_rank_config(self, nranks, comm_id, rank, config):
        self.limits.append(self.configs[config].max_ctas)
        return self.comm_init_rank(nranks, comm_id, rank)

    def Config(self):  # noqa: N802  # the name of the bindings
        made = types.SimpleNamespace(max_ctas=0, ptr=len(self.configs))
        self.configs.append(made)
        return made

    @in_order
    def all_reduce(self, sendbuff, recvbuff, count, datatype, op, comm, stream):
        rows = comm.exchange(("all_reduce", count, datatype, op), view(sendbuff, count, datatype))
        with np.errstate(all="ignore"):
            total = functools.reduce(OPS[op], rows)
            view(recvbuff, count, datatype)[...] = total / total.dtype.type(comm.size) if op == 4 else total
        self.calls.append(("all_reduce", count, datatype, op))

    @in_order
    def reduce_scatter(self, sendbuff, recvbuff, recvcount, datatype, op, comm, stream):
        whole = view(sendbuff, recvcount * comm.size, datatype)
        total = functools.reduce(OPS[op], comm.exchange(("reduce_scatter", recvcount, datatype, op), whole))
        total = total / total.dtype.type(comm.size) if op == 4 else total
        view(recvbuff, recvcount, datatype)[...] = total.reshape(comm.size, -1)[comm.rank]
        self.calls.append(("reduce_scatter", recvcount, datatype, op))

    @in_order
    def all_gather(self, sendbuff, recvbuff, sendcount, datatype, comm, stream):
        rows = comm.exchange(("all_gather", sendcount, datatype), view(sendbuff, sendcount, datatype))
        view(recvbuff, sendcount * comm.size, datatype)[...] = np.concatenate(rows)
        self.calls.append(("all_gather", sendcount, datatype))

    @in_order
    def broadcast(self, sendbuff, recvbuff, count, datatype, root, comm, stream):
        rows = comm.exchange(("broadcast", count, datatype, root), view(sendbuff, count, datatype))
        view(recvbuff, count, datatype)[...] = rows[root]

    def group_start(self):
        self.here.queued = []

    def group_end(self):
        queued, self.here.queued = self.here.queued, None
        self.groups.append(len(queued))
        for run in sorted(queued, key=lambda pair: pair[0]):
            run[1]()

    def _queue(self, order, run):
        if getattr(self.here, "queued", None) is None:
            run()
        else:
            self.here.queued.append((order, run))

    def send(self, sendbuff, count, datatype, peer, comm, stream):
        data = view(sendbuff, count, datatype).copy()
        mail = self.hub.find_mail(comm.name, comm.rank, peer)
        self._queue(0, lambda: mail.put(data))

    def recv(self, recvbuff, count, datatype, peer, comm, stream):
        mail = self.hub.find_mail(comm.name, peer, comm.rank)

        def run():
            data = mail.get(timeout=SECONDS)
            assert data.size == count, "NCCL would hang, or write past the end"
            view(recvbuff, count, datatype)[...] = data

        self._queue(1, run)


def run_on_fake(mesh, program, check=False, wrap=None, memory=None):
    """The results of all ranks; the first error of one is raised. `memory` makes the memory of a rank's GPU."""
    hub, found, errors = Hub(), [None] * mesh.size, []

    def run(rank, folder):
        library = FakeNccl(hub)
        try:
            rendezvous = FileRendezvous(folder, rank, mesh.size, seconds=SECONDS)
            held = get_device_memory() if memory is None else memory(rank)
            world = NcclWorld(check, library if wrap is None else wrap(library), held, rendezvous)
            world.name = "world"
            found[rank] = run_as_rank(RankContext(rank, mesh, world), program)
            world.close()
        except BaseException as error:
            errors.append(error)
            for barrier in hub.barriers.values():
                barrier.abort()

    with tempfile.TemporaryDirectory() as folder:
        threads = [threading.Thread(target=run, args=(r, folder), daemon=True) for r in range(mesh.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SECONDS)
    if errors:
        raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
    assert not any(t.is_alive() for t in threads), "a rank hangs"
    return found

"""Permutations of GPU programs by copy engines: two ranks whose drivers are fake and map each other's memory.

Programs, their CUDA graphs, the memory of the GPU and the engine are the real ones.
"""

import ctypes
import gc
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from fake_gpu import FakeGpu

import tessera as ts
from tessera.codegen.ptx import BACKEND
from tessera.codegen.ptx.runtime import device_memory, driver_api, gpu_program, queued_plan
from tessera.codegen.ptx.runtime.device_memory import GpuMemory
from tessera.codegen.ptx.runtime.gpu_program import GpuProgram
from tessera.dist import peer_copies
from tessera.dist.ranks import CURRENT_RANK
from tessera.runtime import driver

sys.path.insert(0, str(Path(__file__).parents[2] / "dist"))
from fake_nccl import run_on_fake  # noqa: E402

MAPPED = 1 << 56  # what is added to addresses of another process
SECONDS = 20
SIDE = 5


class Block(int):
    """The address of memory, as the pool gives it."""

    @property
    def address(self):
        return int(self)

    def free(self):
        pass


class PeerGpu(FakeGpu):
    """A GPU whose driver shares memory; what is queued while it records runs when the graph is launched."""

    def __init__(self, rank):
        super().__init__(lambda name: 0.0)
        self.rank, self.here, self.records, self.mapped, self.calls = rank, SimpleNamespace(active=True), False, {}, []

    def enter(self):
        pass

    def allocate(self, size, collected=True):
        return Block(super().allocate(size))

    def _find(self, address):
        return address.value - MAPPED if address.value >= MAPPED else address.value

    def _do(self, name, run):
        self.calls.append((name, self.records))
        if self.records:
            self._recording.append(run)
        else:
            run()
        return 0

    # Memory, streams and events.

    def _copy(self, target, source, count, stream):
        return self._do("copy", lambda: ctypes.memmove(self._find(target), self._find(source), count.value) and None)

    cuMemcpyHtoDAsync_v2 = cuMemcpyDtoHAsync_v2 = cuMemcpyDtoDAsync_v2 = _copy

    def cuMemsetD8Async(self, address, value, count, stream):
        return self._do("clear", lambda: ctypes.memset(self._find(address), value.value, count.value) and None)

    def cuCtxGetStreamPriorityRange(self, least, greatest):
        return 0

    def cuStreamCreateWithPriority(self, out, flags, priority):
        out._obj.value = SIDE
        return 0

    def cuCtxSynchronize(self):
        return 0

    cuEventCreate = cuEventRecord = cuStreamWaitEvent = cuEventDestroy_v2 = lambda self, *given: 0

    # Memory of other processes.

    def cuMemGetAddressRange_v2(self, base, size, address):
        base._obj.value = max(a for a in self._blocks if a <= address.value)
        return 0

    def cuIpcGetMemHandle(self, out, base):
        assert not self.records, "a stream that is captured"
        ctypes.memmove(out._obj.content, f"{self.rank} {base.value}".encode().ljust(64, b"\0"), 64)
        return 0

    def cuIpcOpenMemHandle_v2(self, out, handle, flags):
        owner, base = map(int, bytes(handle).rstrip(b"\0").split())
        assert not self.records and owner != self.rank and bytes(handle) not in self.mapped and flags.value == 1
        out._obj.value = self.mapped[bytes(handle)] = base + MAPPED
        return 0

    def cuIpcCloseMemHandle(self, address):
        self.mapped = {handle: at for handle, at in self.mapped.items() if at != address.value}
        return 0

    def cuStreamWriteValue32_v2(self, stream, address, value, flags):
        def run():
            ctypes.c_uint32.from_address(self._find(address)).value = value.value

        return self._do("write there" if address.value >= MAPPED else "write", run)

    def cuStreamWaitValue32_v2(self, stream, address, value, flags):
        assert address.value < MAPPED and flags.value == 1
        word = ctypes.c_uint32.from_address(address.value)

        def run():
            end = time.monotonic() + SECONDS
            while word.value != value.value:
                assert time.monotonic() < end, "a stream waits for ever"
                time.sleep(1e-5)

        return self._do("wait", run)

    # Kernels and graphs.

    def cuStreamBeginCapture_v2(self, stream, mode):
        self.records = True
        return super().cuStreamBeginCapture_v2(stream, mode)

    def cuStreamEndCapture(self, stream, out):
        self.records = False
        return super().cuStreamEndCapture(stream, out)

    def cuGraphLaunch(self, graph, stream):
        for run in self._graphs[graph.value - 1]:
            run()
        return 0

    def cuLaunchKernelEx(self, config, function, arguments, extra):
        name, source = self._names[function.value - 1]  # the driver copies the arguments
        values = [ctypes.create_string_buffer(ctypes.string_at(at, 8), 8) for at in arguments]
        facts = SimpleNamespace(grid=[*config._obj.grid], block=[*config._obj.block], shared=config._obj.shared)
        return self._do("kernel", lambda: self._run(name, source, facts, [ctypes.addressof(v) for v in values]))


@pytest.fixture
def gpus(monkeypatch):
    """A GPU for each rank: the driver that a thread calls is that of its rank."""
    here, made = threading.local(), {}

    class Dispatch:
        def __getattr__(self, name):
            gpu = here.memory.gpu if hasattr(here, "memory") else made[0]  # what is left is freed by the main thread
            return getattr(gpu, name)

    def enter(rank):
        here.memory = GpuMemory(made.setdefault(rank, PeerGpu(rank)))
        return here.memory

    monkeypatch.setattr(driver_api, "load_driver_library", Dispatch)
    for module in (device_memory, gpu_program, queued_plan):
        monkeypatch.setattr(module, "get_device_memory", lambda: here.memory)
    monkeypatch.setattr(peer_copies, "LEAST_BYTES", 1)
    yield SimpleNamespace(enter=enter, made=made)
    gc.collect()  # while there is a driver


def shift(x):
    return ts.dist.collective_permute(x * 2.0, [(0, 1), (1, 0)]) + 1.0


@pytest.mark.parametrize("moving", [False, True])
def test_calls_and_replays(moving, gpus):
    """The first call opens the channel, the second records a graph, and the others replay it.

    A rank whose result has another address in each call never records: ranks need not do it at the same call.
    """
    x = np.arange(40, dtype="f4").reshape(8, 5)

    def program():
        world, rank = CURRENT_RANK.get().world, ts.get_rank()
        memory = world.memory
        artifact = BACKEND.emit(driver.lower(ts.jit(shift).trace(x).function, "ptx")["tile"], {"arch": "sm_90a"})
        made, found, kept = GpuProgram(artifact, memory.gpu), [], []
        given = memory.copy_in(x, 0)
        for number in range(5):
            now = x + 100 * rank + number
            ctypes.memmove(given.address, now.ctypes.data, now.nbytes)
            (result,) = made.call([given])
            found.append(result.numpy())
            if moving and rank:
                kept.append(result)
            del result  # the next one has the same address
        return found, [call for call in memory.gpu.calls if call[0] != "copy" or call[1]], len(memory.gpu._graphs)

    libraries = []
    results = run_on_fake(
        ts.Mesh(2), program, memory=gpus.enter, wrap=lambda library: libraries.append(library) or library
    )
    for rank, (found, calls, graphs) in enumerate(results):
        for number, array in enumerate(found):
            np.testing.assert_array_equal(array, 2 * (x + 100 * (1 - rank) + number) + 1)
        assert graphs == (0 if moving and rank else 1)
        names = [name for name, _ in calls]
        assert names.count("wait") == (2 * 5 if not graphs else 2 * 2)
        if graphs:
            recorded = [name for name, records in calls if records]
            handshake = ["write there", "wait", "write", "copy", "write there", "wait", "write"]
            assert recorded == ["kernel", *handshake, "kernel"]
    assert not any(library.calls for library in libraries)
    assert not any(gpu.mapped for gpu in gpus.made.values())


def multiply(x, w):
    return ts.dist.row_parallel(x, w, scatter=True, parts="ranks")


def test_products_that_are_sent_beside_the_next(gpus):
    """What is received has come when it is added, in the order of the ranks, in calls and in replays."""
    rng = np.random.default_rng(0)
    xs, ws = (rng.integers(-9, 9, (2, *s)).astype("f4") for s in ((8, 4), (4, 6)))

    def program():
        rank, memory = ts.get_rank(), CURRENT_RANK.get().world.memory
        graph = ts.jit(multiply).trace(xs[rank], ws[rank]).function
        made, found = GpuProgram(BACKEND.emit(driver.lower(graph, "ptx")["tile"], {"arch": "sm_80"}), memory.gpu), []
        given = [memory.copy_in(a[rank], 0) for a in (xs, ws)]
        for number in range(4):
            now = xs[rank] + number
            ctypes.memmove(given[0].address, now.ctypes.data, now.nbytes)
            found.append(made.call(given)[0].numpy())
        return found, [name for name, records in memory.gpu.calls if records]

    for rank, (found, recorded) in enumerate(run_on_fake(ts.Mesh(2), program, memory=gpus.enter)):
        for number, array in enumerate(found):
            whole = sum((x + number) @ w for x, w in zip(xs, ws, strict=True))
            np.testing.assert_array_equal(array, whole[4 * rank : 4 * rank + 4])
        handshake = ["write there", "wait", "write", "copy", "write there", "wait", "write"]
        assert recorded == ["kernel", *handshake, "kernel", "kernel"]


def test_keys_that_travel_around_a_ring(gpus):
    """Several permutations that start together, some of them of a parameter."""
    rng = np.random.default_rng(1)
    q, k, v = rng.standard_normal((3, 12, 4)).astype("f4")

    def attend(q, k, v):
        return ts.dist.ring_attention(q, k, v, causal=True)

    def program():
        rank, memory = ts.get_rank(), CURRENT_RANK.get().world.memory
        parts = [np.split(a, 3)[rank] for a in (q, k, v)]
        graph = ts.jit(attend).trace(*parts).function
        made = GpuProgram(BACKEND.emit(driver.lower(graph, "ptx")["tile"], {"arch": "sm_80"}), memory.gpu)
        given = [memory.copy_in(part, 0) for part in parts]
        found = [made.call(given)[0].numpy() for _ in range(3)]
        return found, [name for name, records in memory.gpu.calls if records].count("copy")

    simulated = ts.spmd(
        attend, mesh=ts.Mesh(3, engine="simulated"), in_specs=ts.dist.P("ranks"), out_specs=ts.dist.P("ranks")
    )
    wanted = np.split(simulated(q, k, v).numpy(), 3)
    for rank, (found, copies) in enumerate(run_on_fake(ts.Mesh(3), program, memory=gpus.enter)):
        for array in found:
            np.testing.assert_allclose(array, wanted[rank], atol=1e-6)
        assert copies and copies % 4 == 0  # as many graphs as carve-outs are tried

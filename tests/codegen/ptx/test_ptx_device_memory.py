"""The memory of a GPU: blocks of arrays that nothing refers to, with a pool in place of the driver's."""

import gc
from collections import deque
from types import SimpleNamespace
from weakref import WeakSet

import numpy as np
import pytest

from tessera.codegen.ptx.runtime import device_memory, driver_api
from tessera.codegen.ptx.runtime.device_memory import GpuMemory
from tessera.codegen.ptx.runtime.driver_api import GPU

F32 = np.dtype("f4")


class Pool:
    """A pool that counts what it has given away."""

    def __init__(self):
        self.taken, self.end = {}, 0

    def allocate(self, size):
        self.end = address = self.end + 4096
        self.taken[address] = size
        return Part(self, address)


class Part(int):
    def __new__(cls, pool, address):
        made = int.__new__(cls, address)
        made.pool = pool
        return made

    def free(self):
        del self.pool.taken[int(self)]


@pytest.fixture
def gpu(monkeypatch):
    made = object.__new__(GPU)
    errors = SimpleNamespace(MemoryError=MemoryError, LaunchError=OSError, Error=OSError)
    made.driver, made.here, made._pool, made._held = errors, SimpleNamespace(active=True), Pool(), WeakSet()
    made._retired, made.calls = deque(), []
    for module in (device_memory, driver_api):
        monkeypatch.setattr(module, "call_driver", lambda *words: made.calls.append(words))
    return made


def test_blocks_are_taken_again(gpu):
    memory = GpuMemory(gpu)
    first, other = memory.empty((4,), F32, 0), memory.empty((4,), F32, 0)
    address = first.address
    assert address != other.address
    del first
    assert memory.empty((7,), F32, 0).address == address
    assert len(gpu._pool.taken) == 2


def test_a_block_of_a_collected_cycle_stays_allocated(gpu):
    """The finaliser of the array keeps the block, and that of the block is called all the same."""
    memory = GpuMemory(gpu)
    array = memory.empty((4,), F32, 0)
    address, cycle = array.address, [array]
    cycle.append(cycle)
    del array, cycle
    gc.collect()
    assert address in gpu._pool.taken
    assert memory.empty((4,), F32, 0).address == address != memory.empty((4,), F32, 0).address


def test_memory_that_nothing_keeps_returns_to_the_pool_after_what_is_queued(gpu):
    workspace, kept = gpu.allocate(100), gpu.allocate(100, collected=False)
    addresses = int(workspace), int(kept)
    del workspace, kept
    assert tuple(gpu._pool.taken) == addresses and not gpu.calls
    gpu.allocate(8, collected=False)
    assert addresses[0] not in gpu._pool.taken and addresses[1] in gpu._pool.taken
    assert gpu.calls == [("cuCtxSynchronize",)]


def test_free_blocks_return_to_the_pool_where_memory_is_short(gpu):
    memory = GpuMemory(gpu)
    kept = memory.empty((4,), F32, 0)
    memory.empty((4,), F32, 0)
    memory.release()
    assert list(gpu._pool.taken) == [kept.address]

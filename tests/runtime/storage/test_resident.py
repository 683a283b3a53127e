"""Arrays in a GPU's memory, against a GPU whose memory is a dictionary: what is allocated, copied, given back."""

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

import tessera as ts
from tessera.codegen import contract
from tessera.core import device
from tessera.core.errors import ArgumentError, ResourceError, ShapeError
from tessera.runtime.storage import memory_pool, memory_spaces


@pytest.fixture
def gpu(monkeypatch):
    """A machine with a GPU, as far as this package sees one."""
    memory = {}

    def allocate(size):
        memory[(place := 4096 * (len(memory) + 1))] = np.zeros(size, np.uint8)
        return place

    driver = SimpleNamespace(
        memcpy_htod=lambda place, data: memory[place].__setitem__(slice(None), data),
        memcpy_dtoh=lambda data, place: data.__setitem__(slice(None), memory[place]),
    )
    fake = SimpleNamespace(active=nullcontext, allocate=allocate, driver=driver, memory=memory)
    monkeypatch.setattr(device, "count_gpus", lambda: 1)
    monkeypatch.setattr(memory_spaces, "_gpu", lambda: fake)
    return fake


@pytest.mark.parametrize("dtype", [np.float32, ts.bf16.numpy, np.int8])
def test_there_and_back(gpu, dtype):
    x = ts.Tensor(np.arange(6).reshape(2, 3).astype(dtype))
    there = ts.memory.async_copy(x, to="cuda:0").wait()
    assert ts.memory.space_of(there) == "global" and there.shape == (2, 3) and len(gpu.memory) == 1
    back = ts.memory.async_copy(there, to="host").wait()
    assert back.dtype == x.dtype and np.array_equal(back.numpy(), x.numpy())
    face = there.__cuda_array_interface__
    assert (
        face["shape"] == (2, 3)
        and face["data"] == (4096, False)
        and np.dtype(face["typestr"]).itemsize == np.dtype(dtype).itemsize
    )


def test_a_pool_of_a_gpu(gpu):
    found = memory_pool.Pool("1K", device="gpu:0", growth_factor=1.0)
    x = found.empty((8, 16))
    assert found.report().used == 512 and isinstance(x, memory_spaces.Resident)
    with pytest.raises(ResourceError, match="the pool of 1,024 bytes is full"):
        found.empty(1024)
    with pytest.raises(ArgumentError, match="tensors lie in host memory"), ts.memory.use_pool(found):
        pass
    del x
    assert found.report().used == 0


def test_what_does_not_fit(gpu):
    there = memory_spaces.Resident.empty((2,), ts.f32, "cuda:0")
    with pytest.raises(ShapeError, match="does not fit"):
        there.fill(np.ones(3, "f4"))
    with pytest.raises(ArgumentError, match="no memory of its own"):
        memory_spaces.Resident.empty((2,), ts.f32, "cpu")


def test_other_libraries_see_it_in_place():
    """Version 3 of the interface; bf16, which NumPy has no letter for, as its bits."""
    for dtype, letter in ((ts.f32, "<f4"), (ts.int8, "|i1"), (ts.bf16, "|u2")):
        found = memory_spaces.Resident(4096, (2, 3), dtype, "cuda:0").__cuda_array_interface__
        assert found == {"shape": (2, 3), "typestr": letter, "data": (4096, False), "version": 3}


@pytest.mark.parametrize("name", ["ptx", "csl:2x2", "cpu"])
def test_generators_of_this_package_need_no_search_of_what_is_installed(monkeypatch, name):
    """A search reads the metadata of every installed package: 10 ms for each tensor."""

    def search(group):
        raise AssertionError("the installed packages were searched")

    monkeypatch.setattr(contract, "entry_points", search)
    device.check_device(name)
    with pytest.raises(AssertionError, match="searched"):
        device.check_device("another")

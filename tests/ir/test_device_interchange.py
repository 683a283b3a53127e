"""Arrays of other libraries on a device, in place: DLPack and the CUDA array interface.

Stand-ins where there is no GPU: arrays in host memory that say that they are a GPU's.
"""

import ctypes

import numpy as np
import pytest

import tessera as ts
from tessera.core.device import count_gpus
from tessera.core.errors import ArgumentError, DeviceUnavailable, DTypeError, ShapeError
from tessera.core.hooks import find_device_memory
from tessera.ir.array_interchange import READERS, ArrayReader, _DLTensor, find_capsule, import_device_array

pytestmark = pytest.mark.skipif(count_gpus() > 0, reason="the stand-ins' memory is the host's")
X = np.arange(12, dtype=np.float32).reshape(3, 4)


class Foreign:
    """An array of another library: its capsules say that they are on a GPU."""

    def __init__(self, array, device=(2, 0), requires_grad=False):
        self.array, self.device, self.requires_grad, self.streams = array, device, requires_grad, []

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, stream=None):  # of before the versions
        self.streams.append(stream)
        capsule = self.array.__dlpack__()
        _DLTensor.from_address(find_capsule(capsule)[0]).device_type = self.device[0]
        return capsule

    def contiguous(self):
        return Foreign(np.ascontiguousarray(self.array))


class Interface:
    """An array with the CUDA array interface."""

    def __init__(self, array, stream=1):
        self.array, described = array, array.__array_interface__
        self.__cuda_array_interface__ = {
            "shape": array.shape, "typestr": array.dtype.str, "data": described["data"],
            "strides": described["strides"], "version": 3, "stream": stream,
        }  # fmt: skip


def aligned(array):
    """A copy at a multiple of 64 bytes."""
    room = np.empty(array.nbytes + 64, np.uint8)
    first = -room.ctypes.data % 64
    out = room[first : first + array.nbytes].view(array.dtype).reshape(array.shape)
    out[...] = array
    return out


@pytest.mark.parametrize("wrap", [Foreign, Interface])
def test_arguments_are_used_in_place(wrap):
    memory, array = find_device_memory("ptx"), aligned(X)
    double = ts.jit(lambda x: x * 2.0, target="ptx")
    before = memory.copies_in
    foreign = wrap(array)
    assert np.array_equal(double(foreign).numpy(), X * 2)
    array += 1  # seen by the next call: nothing was copied
    assert np.array_equal(double(foreign).numpy(), (X + 1) * 2) and memory.copies_in == before
    assert wrap is Interface or set(foreign.streams) == {1}
    assert ts.Tensor(foreign).device == memory.name and ts.Tensor(foreign).data.address == array.ctypes.data
    assert ts.jit(lambda x: x + 0.5, target="interp")(foreign).device == "cpu"


@pytest.mark.parametrize("target", ["ptx", "llvm", "interp"])
def test_arrays_of_a_known_class_are_read_without_a_protocol(target, monkeypatch):
    reader = ArrayReader(lambda x: (x.array.dtype, x.array.shape), lambda x: x.array.ctypes.data)
    monkeypatch.setitem(READERS, Foreign, reader)
    memory, foreign = find_device_memory("ptx"), Foreign(aligned(X))
    scale = ts.jit(lambda x, s: x * s, target=target)
    for k in range(3):  # bound, then known
        before, seen = memory.copies_in, len(foreign.streams)
        y = scale(foreign, float(k))
        assert np.array_equal(y.numpy(), X * np.float32(k))
        assert target != "ptx" or k < 2 or (memory.copies_in - before, len(foreign.streams)) == (1, seen)
    with pytest.raises(ShapeError):
        ts.jit(lambda x: x @ x, target=target)(foreign)


def test_strided_and_misaligned_arrays_are_copied_within_the_device():
    for array in (aligned(X).T, aligned(X).reshape(-1)[1:]):
        found = import_device_array(Foreign(array))
        assert found.address != array.ctypes.data and np.array_equal(found.numpy(), array)
    with pytest.raises(ArgumentError, match="not contiguous"):
        import_device_array(Interface(aligned(X).T))


def test_what_is_refused():
    with pytest.raises(ArgumentError, match="requires gradients"):
        ts.jit(lambda x: x, target="ptx")(Foreign(X, requires_grad=True))
    with pytest.raises(DeviceUnavailable, match="type 7"):
        ts.Tensor(Foreign(X, (7, 0)))
    with pytest.raises(ArgumentError, match="device 1"):
        ts.from_dlpack(Foreign(X, (2, 1)))
    with pytest.raises(DTypeError):
        ts.Tensor(Foreign(np.zeros(4, np.complex64)))


def test_results_go_to_other_libraries_in_place():
    torch = pytest.importorskip("torch")
    y = ts.jit(lambda x: x + 1.0, target="ptx")(X)
    assert np.array_equal(torch.from_dlpack(y).numpy(), X + 1)
    seen = np.from_dlpack(y)
    assert seen.ctypes.data == y.data.address and y.__dlpack_device__() == (1, 0)
    del y
    assert np.array_equal(seen, X + 1)  # it keeps the memory
    half = ts.Tensor(X, ts.bf16).to("ptx")
    assert torch.from_dlpack(half).dtype == torch.bfloat16 and np.array_equal(
        torch.from_dlpack(half).float().numpy(), X
    )
    assert not hasattr(half, "__cuda_array_interface__")  # the emulated GPU's memory is none of CUDA's
    with pytest.raises(BufferError):
        half.__dlpack__(dl_device=(2, 0))


def test_copies_on_request():
    y = ts.Tensor(X).to("ptx")
    assert np.from_dlpack(y, copy=True).ctypes.data != y.data.address
    assert ctypes.c_float.from_address(y.data.address + 4).value == X[0, 1]

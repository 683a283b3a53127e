"""Device memory of the target ptx: a GPU's, shared with other libraries on their streams, or the emulator's.

A GPU's memory is stream-ordered: freed memory is used again on the stream that it was allocated for, behind the work
that is queued there, without a wait.
"""

from __future__ import annotations

import ctypes
import math
import sys
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import numpy as np

from tessera.codegen.ptx.runtime.driver_api import GPU, DeviceAllocation, call_driver, find_driver_call, get_gpu
from tessera.core.device import array_address, count_gpus
from tessera.core.device_array import LEGACY_STREAM, DeviceArray, DeviceMemory, Rows, count_holders
from tessera.core.errors import ResourceError
from tessera.core.queued_failures import examine

SMALL_UNIT, LARGE_UNIT = 512, 1 << 20  # bytes: sizes of blocks are multiples, so that freed ones are found again
MAX_KNOWN = 4096
NO_TIMING = 2  # CU_EVENT_DISABLE_TIMING
NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
ON_DEVICE = 2  # CU_MEMORYTYPE_DEVICE
NOT_READY = 600  # CUDA_ERROR_NOT_READY
LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
WAIT_EQUAL = 1  # CU_STREAM_WAIT_VALUE_EQ
POISON = 0xFF  # NaN in every float format


@cache
def get_device_memory() -> DeviceMemory:
    """The memory of this machine's GPU, or the emulator's where there is none."""
    return GpuMemory(get_gpu()) if count_gpus() else EmulatedMemory()


def find_allocation(address: int) -> tuple[int, int]:
    """The address and the bytes of the allocation of a GPU that an address lies in, whoever made it.

    Raises:
        ExecutionError: it lies in none.
    """
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    call_driver("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
    return base.value, size.value


class EmulatedMemory(DeviceMemory):
    """The memory of the emulated GPU: memory of the host that nothing else shares. New memory holds NaN."""

    name, generator, dlpack_device = "ptx", "ptx", (1, 0)
    _streams = 0

    def find_stream(self) -> int:
        """The default stream: the emulator runs everything at once."""
        return LEGACY_STREAM

    def empty(self, shape: tuple[int, ...], dtype: np.dtype, stream: int) -> DeviceArray:
        """A new array; what it holds means nothing."""
        memory = _allocate_aligned(math.prod(shape) * dtype.itemsize)
        return DeviceArray(array_address(memory), tuple(shape), dtype, memory, self, stream)

    def copy_in(self, array: np.ndarray, stream: int) -> DeviceArray:
        """A new array with the elements of an array of the host."""
        made = self.empty(array.shape, array.dtype, stream)
        view_emulated(made)[...] = array
        self.copies_in += 1
        return made

    def copy_out(self, array: DeviceArray) -> np.ndarray:
        """The elements in a new array of the host."""
        self.copies_out += 1
        return view_emulated(array).copy()

    def clone(self, array: DeviceArray, stream: int) -> DeviceArray:
        """A copy within the device."""
        made = self.empty(array.shape, array.dtype, stream)
        view_emulated(made)[...] = view_emulated(array)
        return made

    def clear(self, array: DeviceArray, stream: int) -> None:
        """Set all bytes of an array to zero."""
        view_emulated(array)[...] = 0

    def owns(self, array: DeviceArray) -> bool:
        """Whether an array has memory that was allocated here, and no other array has it."""
        return isinstance(array.owner, np.ndarray) and count_holders([array.owner], 0) == 1

    def keep_until_done(self, arrays: list[DeviceArray], stream: int) -> None:
        """Nothing to keep: the emulator runs everything at once."""

    def settle(self, array: DeviceArray) -> None:
        """Nothing to wait for: the emulator runs everything at once."""

    def order(self, array: DeviceArray, stream: int) -> None:
        """Nothing to wait for: the emulator runs everything at once."""
        array.stream = stream

    def make_stream(self) -> int:
        """A number that stands for a stream."""
        self._streams += 1
        return LEGACY_STREAM + self._streams

    def mark(self, stream: int) -> Any:
        """Nothing to remember: the emulator runs everything at once."""

    def wait(self, stream: int, mark: Any) -> None:
        """Nothing to wait for: the emulator runs everything at once."""

    def copy_rows(self, target: Rows, source: Rows, width: int, count: int, stream: int) -> None:
        """Copy rows of bytes."""
        if width and count:
            _view_rows(target, width, count)[...] = _view_rows(source, width, count)


def _allocate_aligned(size: int) -> np.ndarray:
    """Poisoned memory that begins at a multiple of the unit, as a GPU's does."""
    room = np.full(size + SMALL_UNIT, POISON, np.uint8)
    first = -array_address(room) % SMALL_UNIT
    return room[first : first + size]


def view_emulated(array: DeviceArray) -> np.ndarray:
    """The elements of an array of the emulated GPU, in place."""
    if not array.nbytes:
        return np.empty(array.shape, array.dtype)
    memory = (ctypes.c_uint8 * array.nbytes).from_address(array.address)
    return np.frombuffer(memory, array.dtype).reshape(array.shape)


def _view_rows(rows: Rows, width: int, count: int) -> np.ndarray:
    whole = (ctypes.c_uint8 * (rows.pitch * (count - 1) + width)).from_address(rows.address)
    return np.lib.stride_tricks.as_strided(np.frombuffer(whole, np.uint8), (count, width), (rows.pitch, 1))


# The memory of a GPU.


class CopiedRows(ctypes.Structure):
    """CUDA_MEMCPY2D: a copy of rows of bytes."""

    _fields_ = tuple(
        field
        for side in ("source", "target")
        for field in (
            (f"{side}_x", ctypes.c_size_t), (f"{side}_y", ctypes.c_size_t), (f"{side}_kind", ctypes.c_int),
            (f"{side}_host", ctypes.c_void_p), (f"{side}_address", ctypes.c_uint64), (f"{side}_array", ctypes.c_void_p),
            (f"{side}_pitch", ctypes.c_size_t),
        )
    ) + (("width", ctypes.c_size_t), ("height", ctypes.c_size_t))  # fmt: skip


class IpcHandle(ctypes.Structure):
    """CUipcMemHandle, which the driver takes by value."""

    _fields_ = (("content", ctypes.c_ubyte * 64),)


class GpuMemory(DeviceMemory):
    """The memory of a GPU."""

    name, generator, dlpack_device = "cuda:0", "ptx", (2, 0)

    def __init__(self, gpu: GPU) -> None:
        self.gpu = gpu
        self._free: dict[tuple[int, int], list[DeviceAllocation]] = {}
        self._known: dict[tuple[Any, ...], tuple[int, list[DeviceAllocation]]] = {}  # by shape, dtype and stream
        self._stream_finder: Callable[[], int] | None = None
        self._kept: deque[tuple[StreamEvent, list[DeviceArray]]] = deque()

    def find_stream(self) -> int:
        """The current stream of PyTorch, else that of CuPy, where they have chosen one; else the default stream."""
        if not getattr(self.gpu.here, "active", False):
            self.gpu.enter()
        if (find := self._stream_finder) is not None:
            return find()
        self._stream_finder = _make_stream_finder()
        return LEGACY_STREAM if self._stream_finder is None else self._stream_finder()

    def empty(self, shape: tuple[int, ...], dtype: np.dtype, stream: int) -> DeviceArray:
        """A new array that is used on a stream; what it holds means nothing.

        Raises:
            ResourceError: the GPU's memory is exhausted.
        """
        found = self._known.get((shape, dtype, stream))
        size, free = found or self._find_free(shape, dtype, stream)
        try:
            block = free.pop()
        except IndexError:
            block = self._allocate(size)
        return DeviceArray(block.address, shape, dtype, block, self, stream, free)

    def prepare(self, shape: tuple[int, ...], dtype: np.dtype, stream: int) -> Callable[[], DeviceArray]:
        """What makes new arrays of one kind, as `empty` does: their free blocks are found once."""
        size, free = self._find_free(shape, dtype, stream)

        def make() -> DeviceArray:
            try:
                block = free.pop()
            except IndexError:
                block = self._allocate(size)
            return DeviceArray(block.address, shape, dtype, block, self, stream, free)

        return make

    def _find_free(self, shape: tuple[int, ...], dtype: np.dtype, stream: int) -> tuple[int, list[DeviceAllocation]]:
        """The size of a block for an array, and the free blocks of this size."""
        unit = SMALL_UNIT if (count := math.prod(shape) * dtype.itemsize) < LARGE_UNIT else LARGE_UNIT
        size = max(-(-count // unit), 1) * unit
        if len(self._known) >= MAX_KNOWN:
            self._known.clear()
        found = self._known[shape, dtype, stream] = size, self._free.setdefault((stream, size), [])
        return found

    def _allocate(self, size: int) -> DeviceAllocation:
        try:
            with self.gpu.active():
                return self.gpu.allocate(size, collected=False)
        except ResourceError:
            self.release()
            with self.gpu.active():
                return self.gpu.allocate(size, collected=False)

    def release(self) -> None:
        """Give the free blocks back to the driver, after all that uses them."""
        with self.gpu.active():
            call_driver("cuCtxSynchronize")
            for free in self._free.values():
                while free:
                    free.pop().free()

    def copy_in(self, array: np.ndarray, stream: int) -> DeviceArray:
        """A new array with the elements of an array of the host, which may change after the call."""
        source = np.ascontiguousarray(array)
        made = self.empty(array.shape, array.dtype, stream)
        if made.nbytes:
            self._copy("cuMemcpyHtoDAsync_v2", made.address, array_address(source), made.nbytes, stream)
        self.copies_in += 1
        return made

    def copy_out(self, array: DeviceArray) -> np.ndarray:
        """The elements in a new array of the host.

        Raises:
            TesseraError: a launch before it failed.
        """
        self.gpu.enter()
        out = np.empty(array.shape, array.dtype)
        if out.nbytes:
            self._copy("cuMemcpyDtoHAsync_v2", array_address(out), array.address, out.nbytes, array.stream)
        synchronize_stream(array.stream)
        self.copies_out += 1
        examine(array.stream)
        return out

    def clone(self, array: DeviceArray, stream: int) -> DeviceArray:
        """A copy within the device."""
        if array.stream != stream:
            self.order(array, stream)
        made = self.empty(array.shape, array.dtype, stream)
        if made.nbytes:
            self._copy("cuMemcpyDtoDAsync_v2", made.address, array.address, made.nbytes, stream)
        return made

    def clear(self, array: DeviceArray, stream: int) -> None:
        """Set all bytes of an array to zero."""
        if array.nbytes:
            size, handle = ctypes.c_size_t(array.nbytes), ctypes.c_void_p(stream)
            call_driver("cuMemsetD8Async", ctypes.c_uint64(array.address), ctypes.c_ubyte(0), size, handle)

    def owns(self, array: DeviceArray) -> bool:
        """Whether an array has memory that was allocated here, and no other array has it."""
        return array.free is not None

    def keep_until_done(self, arrays: list[DeviceArray], stream: int) -> None:
        """Keep arrays of other libraries alive until what is queued on a stream has ended."""
        while self._kept and self._kept[0][0].done():
            self._kept.popleft()
        self._kept.append((StreamEvent(stream), arrays))

    def order(self, array: DeviceArray, stream: int) -> None:
        """Make a stream wait for what writes an array; the memory is reused after what the stream does from now on."""
        self.make_wait(stream, array.stream)
        array.stream = stream
        block = array.owner if isinstance(array.owner, DeviceArray) else array  # results may share a block
        if block.free is not None and stream != block.home:
            block.others = {*(block.others or ()), stream}

    def settle(self, array: DeviceArray) -> None:
        """Make the stream that an array was allocated for wait for the other streams that used it."""
        for other in array.others or ():
            self.make_wait(array.home, other)

    def make_wait(self, stream: int, other: int) -> None:
        """Make what a stream does from now on wait for what is queued on another."""
        self.gpu.enter()
        event = StreamEvent(other)
        call_driver("cuStreamWaitEvent", ctypes.c_void_p(stream), event.handle, 0)

    def make_stream(self) -> int:
        """A new stream, which runs beside all others, the default stream too, and before them where room is scarce."""
        self.gpu.enter()
        handle, least, greatest = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
        call_driver("cuCtxGetStreamPriorityRange", ctypes.byref(least), ctypes.byref(greatest))
        call_driver("cuStreamCreateWithPriority", ctypes.byref(handle), NON_BLOCKING, greatest)
        return int(handle.value or 0)

    def mark(self, stream: int) -> Any:
        """The end of what is queued on a stream by now."""
        self.gpu.enter()
        return StreamEvent(stream)

    def wait(self, stream: int, mark: Any) -> None:
        """Make what a stream does from now on wait for a mark."""
        call_driver("cuStreamWaitEvent", ctypes.c_void_p(stream), mark.handle, 0)

    def copy_rows(self, target: Rows, source: Rows, width: int, count: int, stream: int) -> None:
        """Copy rows of bytes within the device."""
        if not width or not count:
            return
        self.gpu.enter()
        if count == 1 or width == source.pitch == target.pitch:
            self._copy("cuMemcpyDtoDAsync_v2", target.address, source.address, width * count, stream)
            return
        rows = CopiedRows(
            source_kind=ON_DEVICE, source_address=source.address, source_pitch=source.pitch, target_kind=ON_DEVICE,
            target_address=target.address, target_pitch=target.pitch, width=width, height=count,
        )  # fmt: skip
        call_driver("cuMemcpy2DAsync_v2", ctypes.byref(rows), ctypes.c_void_p(stream))

    # Memory of other processes of this host (CUDA IPC), and the words by which streams of both wait for each other.

    def share(self, address: int) -> tuple[bytes, int]:
        """The IPC handle of the allocation that an address lies in, and the offset in it."""
        self.gpu.enter()
        base, handle = find_allocation(address)[0], IpcHandle()
        call_driver("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(base))
        return bytes(handle), address - base

    def map_shared(self, handle: bytes) -> int:
        """The address, in this process, of an allocation of another process."""
        self.gpu.enter()
        found = ctypes.c_uint64()
        given = IpcHandle.from_buffer_copy(handle)
        call_driver("cuIpcOpenMemHandle_v2", ctypes.byref(found), given, ctypes.c_uint(LAZY_PEER_ACCESS))
        return found.value

    def unmap_shared(self, addresses: Sequence[int]) -> None:
        """Wait for all that is queued, and give up mapped allocations."""
        self.gpu.enter()
        call_driver("cuCtxSynchronize")
        for each in addresses:
            call_driver("cuIpcCloseMemHandle", ctypes.c_uint64(each))

    def write_word(self, address: int, value: int, stream: int) -> None:
        """Write 32 bits behind a fence: what the stream did before is seen by whoever sees the word."""
        words = ctypes.c_void_p(stream), ctypes.c_uint64(address), ctypes.c_uint32(value)
        call_driver("cuStreamWriteValue32_v2", *words, ctypes.c_uint(0))

    def wait_for_word(self, address: int, value: int, stream: int) -> None:
        """Make a stream wait until 32 bits have a value; no multiprocessor is occupied."""
        words = ctypes.c_void_p(stream), ctypes.c_uint64(address), ctypes.c_uint32(value)
        call_driver("cuStreamWaitValue32_v2", *words, ctypes.c_uint(WAIT_EQUAL))

    def _copy(self, name: str, target: int, source: int, count: int, stream: int) -> None:
        self.gpu.enter()
        words = [ctypes.c_uint64(n) for n in (target, source, count)]
        call_driver(name, *words, ctypes.c_void_p(stream))


class StreamEvent:
    """An event: the end of what was queued on a stream when it was made; a `timed` one says when that was."""

    def __init__(self, stream: int, timed: bool = False) -> None:
        self.handle = ctypes.c_void_p()
        call_driver("cuEventCreate", ctypes.byref(self.handle), 0 if timed else NO_TIMING)
        call_driver("cuEventRecord", self.handle, ctypes.c_void_p(stream))

    def done(self) -> bool:
        """Whether all that has ended."""
        return find_driver_call("cuEventQuery")(self.handle) != NOT_READY

    def measure_since(self, first: StreamEvent) -> float:
        """The milliseconds since another timed event; infinite where they say nothing (a stream under capture)."""
        found = ctypes.c_float()
        failed = find_driver_call("cuEventElapsedTime")(ctypes.byref(found), first.handle, self.handle)
        return math.inf if failed else found.value

    def __del__(self) -> None:
        find_driver_call("cuEventDestroy_v2")(self.handle)


def synchronize_stream(stream: int) -> None:
    """Wait for what is queued on a stream.

    Raises:
        ExecutionError: a kernel failed.
    """
    call_driver("cuStreamSynchronize", ctypes.c_void_p(stream))


def _make_stream_finder() -> Callable[[], int] | None:
    """What asks the libraries that this program has loaded for their current stream; None where there is none."""
    torch: Any = sys.modules.get("torch")
    cupy: Any = sys.modules.get("cupy")
    if torch is not None and torch.cuda.is_initialized():
        raw = torch._C._cuda_getCurrentRawStream
        if cupy is None:
            return partial(raw, 0)  # type: ignore[no-any-return]
        return lambda: raw(0) or cupy.cuda.get_current_stream().ptr
    return None if cupy is None else lambda: cupy.cuda.get_current_stream().ptr

"""CUDA driver calls that pycuda lacks, by ctypes: cooperative launches, CUDA graphs, tensor maps, cluster occupancy."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from tessera.core.errors import DeviceUnavailable, ExecutionError, ResourceError
from tessera.core.types import as_dtype

if TYPE_CHECKING:
    from tessera.codegen.ptx.runtime.gpu import GPU


DRIVER_LIBRARY = "libcuda.so.1"
OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY


@cache
def load_driver_library() -> Any:
    """The driver's library.

    Raises:
        DeviceUnavailable: the library is missing.
    """
    try:
        return ctypes.CDLL(DRIVER_LIBRARY)
    except OSError as error:
        raise DeviceUnavailable(
            f"NVIDIA's driver is not here: {error}", suggestion='install the driver, or run on the processor with "cpu"'
        ) from None


def call_driver(name: str, *arguments: Any) -> None:
    """Call the driver.

    Raises:
        DeviceUnavailable: the driver is missing, or has no such call.
        ResourceError: the GPU's memory is exhausted.
        ExecutionError: the call fails.
    """
    found = getattr(load_driver_library(), name, None)
    if found is None:
        raise DeviceUnavailable(
            f"the driver has no call {name}", expected="CUDA 12 or newer", suggestion="update the driver"
        )
    status = found(*arguments)
    if status == OUT_OF_MEMORY:
        raise ResourceError(f"the GPU's memory is exhausted ({name})", suggestion="smaller inputs")
    if status:
        raise ExecutionError(f"the driver call {name} failed: {_error_name(status)}")


def _error_name(status: int) -> str:
    """The driver's name of an error."""
    text = ctypes.c_char_p()
    if getattr(load_driver_library(), "cuGetErrorName", lambda *_: 1)(status, ctypes.byref(text)) or text.value is None:
        return f"error {status}"
    return text.value.decode()


# The memory types of the format letters of a prepared launch.
ARGUMENT_TYPES: dict[str, Any] = {
    "P": ctypes.c_uint64, "d": ctypes.c_double, "f": ctypes.c_float, "q": ctypes.c_int64, "i": ctypes.c_int32,
    "h": ctypes.c_int16, "b": ctypes.c_int8, "B": ctypes.c_uint8, "H": ctypes.c_uint16,
    "I": ctypes.c_uint32, "Q": ctypes.c_uint64,
}  # fmt: skip
MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


class CooperativeKernel:
    """A kernel for cooperative launches, called like a prepared function of pycuda; `letters` are its argument formats.

    Raises:
        ExecutionError: the driver refuses the text.
    """

    def __init__(self, device: GPU, text: str, name: str, letters: str, shared: int) -> None:
        self._device, self.name, self._types = device, name, [ARGUMENT_TYPES[letter] for letter in letters]
        self._module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        call_driver("cuModuleLoadData", ctypes.byref(self._module), ctypes.c_char_p(text.encode()))
        device.keep(self)
        call_driver("cuModuleGetFunction", ctypes.byref(self._function), self._module, ctypes.c_char_p(name.encode()))
        call_driver("cuFuncSetAttribute", self._function, MAX_DYNAMIC_SHARED, ctypes.c_int(shared))

    def check(self, blocks: int, threads: int, shared: int) -> None:
        """Check that all blocks of a grid are resident at once, as a cooperative launch requires.

        Raises:
            ResourceError: they are not; it names the number that is.
        """
        each = ctypes.c_int()
        call_driver(
            "cuOccupancyMaxActiveBlocksPerMultiprocessor", ctypes.byref(each), self._function, ctypes.c_int(threads),
            ctypes.c_size_t(shared),
        )  # fmt: skip
        most = each.value * self._device.processors
        if blocks > most:
            raise ResourceError(
                f"{self.name} has {blocks:,} programs that synchronise at a grid barrier",
                expected=f"at most {most:,} on {self._device.name}: all must be resident at once",
                received=f"{blocks:,}",
                suggestion="fewer programs that do more each: for i in tile.range(tile.group_id(), n, programs)",
            )  # fmt: skip

    def prepared_async_call(
        self, grid: Sequence[int], block: Sequence[int], stream: Any, *values: Any, shared_size: int
    ) -> None:
        """Queue a launch."""
        held = [kind(value) for kind, value in zip(self._types, values, strict=True)]
        addresses = (ctypes.c_void_p * len(held))(*(ctypes.addressof(each) for each in held))
        handle = ctypes.c_void_p(stream.handle if stream is not None else 0)
        sizes = [ctypes.c_uint(n) for n in (*grid, *block, shared_size)]
        call_driver("cuLaunchCooperativeKernel", self._function, *sizes, handle, addresses)

    def free(self) -> None:
        """Release the driver's resources."""
        if self._module:
            module, self._module = self._module, ctypes.c_void_p()
            call_driver("cuModuleUnload", module)

    def __del__(self) -> None:
        self.free()


THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL: other threads may call the driver during the capture


class CudaGraph:
    """A CUDA graph of the launches that `record` queues on its stream, with their arguments at that time.

    Raises:
        ExecutionError: the capture fails, as it does where `record` waits for the GPU.
    """

    def __init__(self, device: GPU, record: Callable[[Any], None]) -> None:
        self._graph = ctypes.c_void_p()
        stream = device.driver.Stream()
        template = ctypes.c_void_p()
        call_driver("cuStreamBeginCapture_v2", ctypes.c_void_p(stream.handle), THREAD_LOCAL)
        try:
            record(stream)
        finally:  # a stream under capture is unusable
            call_driver("cuStreamEndCapture", ctypes.c_void_p(stream.handle), ctypes.byref(template))
        try:
            call_driver("cuGraphInstantiateWithFlags", ctypes.byref(self._graph), template, ctypes.c_uint64(0))
        finally:
            call_driver("cuGraphDestroy", template)
        device.keep(self)

    def launch(self, stream: Any = None) -> None:
        """Queue the recorded launches."""
        call_driver("cuGraphLaunch", self._graph, ctypes.c_void_p(stream.handle if stream is not None else 0))

    def free(self) -> None:
        """Release the driver's resources."""
        if self._graph:
            graph, self._graph = self._graph, ctypes.c_void_p()
            call_driver("cuGraphExecDestroy", graph)

    def __del__(self) -> None:
        self.free()


# The offset of the first parameter with an alignment of 64 bytes: on compute capability 9.0 the parameter bank begins
# at byte 528, and the next multiple is 576. pycuda does not align parameters in the bank.
MAP_OFFSET = 48
MAP_BYTES, MAP_ALIGN = 128, 64
# CUtensorMapDataType; an 8-bit float is copied as an integer.
MAP_TYPES = {"f16": 6, "f32": 7, "bf16": 9, "int8": 0, "uint8": 0, "fp8_e4m3": 0, "fp8_e5m2": 0}
SWIZZLE_128, PROMOTE_128, MAP_DISABLED = 3, 2, 0


def encode_tensor_map(described: Mapping[str, Any], address: int) -> bytes:
    """The 128 bytes of a TMA descriptor of row-major memory, with the 128-byte swizzle; out of bounds reads as 0.

    Raises:
        ExecutionError: the driver refuses the descriptor.
    """
    shape, box = list(described["shape"])[::-1], list(described["box"])[::-1]
    size, rank = as_dtype(described["dtype"]).numpy.itemsize, len(shape)
    strides = [math.prod(shape[: axis + 1]) * size for axis in range(rank - 1)]
    memory = ctypes.create_string_buffer(MAP_BYTES + MAP_ALIGN)
    target = (ctypes.addressof(memory) + MAP_ALIGN - 1) & -MAP_ALIGN
    wide, narrow = ctypes.c_uint64, ctypes.c_uint32
    call_driver(
        "cuTensorMapEncodeTiled", ctypes.c_void_p(target), MAP_TYPES[described["dtype"]], narrow(rank),
        ctypes.c_void_p(address),
        (wide * rank)(*shape), (wide * max(rank - 1, 1))(*strides), (narrow * rank)(*box),
        (narrow * rank)(*([1] * rank)), MAP_DISABLED, SWIZZLE_128, PROMOTE_128, MAP_DISABLED,
    )  # fmt: skip
    return ctypes.string_at(target, MAP_BYTES)


def tensor_map_format(count: int) -> str:
    """The format of a prepared launch's first parameters, TMA descriptors."""
    return f"{MAP_OFFSET}x" + f"{MAP_BYTES}s" * count if count else ""


CLUSTER_DIMENSION = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION


class _LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute: the first three words of its 64-byte value are a cluster's dimensions."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint * 16))


class _LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.POINTER(_LaunchAttribute)), ("count", ctypes.c_uint),
    )  # fmt: skip


def count_resident_cluster_blocks(text: str, name: str, entry: Mapping[str, Any]) -> int:
    """The blocks of an entry that are resident at once in whole clusters; the context must be active.

    Raises:
        ExecutionError: the call fails.
    """
    size, found = int(entry["cluster"]), ctypes.c_int()
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    call_driver("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(text.encode()))
    try:
        call_driver("cuModuleGetFunction", ctypes.byref(function), module, ctypes.c_char_p(name.encode()))
        call_driver("cuFuncSetAttribute", function, MAX_DYNAMIC_SHARED, ctypes.c_int(entry["shared"]))
        attribute = _LaunchAttribute(CLUSTER_DIMENSION, 0, (ctypes.c_uint * 16)(size, 1, 1))
        sizes = [(ctypes.c_uint * 3)(n, 1, 1) for n in (size, entry["threads"])]
        config = _LaunchConfig(*sizes, entry["shared"], None, ctypes.pointer(attribute), 1)
        call_driver("cuOccupancyMaxActiveClusters", ctypes.byref(found), function, ctypes.byref(config))
    finally:
        call_driver("cuModuleUnload", module)
    return max(found.value, 1) * size

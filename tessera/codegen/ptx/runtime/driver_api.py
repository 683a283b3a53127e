"""Driver calls that pycuda lacks, by ctypes: cooperative launches, CUDA graphs, tensor maps, cluster occupancy."""

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


# Calls of NVIDIA's driver that pycuda has none for, through ctypes; what they refuse is an error of ours.


DRIVER_LIBRARY = "libcuda.so.1"
OUT_OF_MEMORY = 2


@cache
def load_driver_library() -> Any:
    """The driver's library.

    Raises:
        DeviceUnavailable: there is none.
    """
    try:
        return ctypes.CDLL(DRIVER_LIBRARY)
    except OSError as error:
        raise DeviceUnavailable(
            f"NVIDIA's driver is not here: {error}", suggestion='run on the processor with "cpu"'
        ) from None


def call_driver(name: str, *arguments: Any) -> None:
    """Make a call of the driver.

    Raises:
        DeviceUnavailable: the driver is missing, or has no such call.
        ResourceError: the GPU's memory is used up.
        ExecutionError: the driver refuses.
    """
    found = getattr(load_driver_library(), name, None)
    if found is None:
        raise DeviceUnavailable(f"the driver has no {name}", expected="CUDA 12 or newer")
    status = found(*arguments)
    if status == OUT_OF_MEMORY:
        raise ResourceError(f"the GPU's memory is used up ({name})", suggestion="smaller inputs")
    if status:
        raise ExecutionError(f"the driver refuses {name}: {_error_name(status)}")


def _error_name(status: int) -> str:
    """What the driver calls an error."""
    text = ctypes.c_char_p()
    if getattr(load_driver_library(), "cuGetErrorName", lambda *_: 1)(status, ctypes.byref(text)) or text.value is None:
        return f"error {status}"
    return text.value.decode()


# Kernels whose blocks all run at once, so that they may wait for each other: by the driver's own call for that.


# What a letter of a prepared launch is in memory.
ARGUMENT_TYPES: dict[str, Any] = {
    "P": ctypes.c_uint64, "d": ctypes.c_double, "f": ctypes.c_float, "q": ctypes.c_int64, "i": ctypes.c_int32,
    "h": ctypes.c_int16, "b": ctypes.c_int8, "B": ctypes.c_uint8, "H": ctypes.c_uint16,
    "I": ctypes.c_uint32, "Q": ctypes.c_uint64,
}  # fmt: skip
MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


class CooperativeKernel:
    """A kernel of a text, called as pycuda's prepared functions are; `letters` say what its arguments are.

    Raises:
        ExecutionError: the driver refuses the text.
    """

    def __init__(self, device: GPU, text: str, name: str, letters: str, shared: int) -> None:
        self._device, self.name, self._kinds = device, name, [ARGUMENT_TYPES[letter] for letter in letters]
        self._module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        call_driver("cuModuleLoadData", ctypes.byref(self._module), ctypes.c_char_p(text.encode()))
        device.keep(self)
        call_driver("cuModuleGetFunction", ctypes.byref(self._function), self._module, ctypes.c_char_p(name.encode()))
        call_driver("cuFuncSetAttribute", self._function, MAX_DYNAMIC_SHARED, ctypes.c_int(shared))

    def check(self, blocks: int, threads: int, shared: int) -> None:
        """Refuse a grid that does not fit the GPU all at once.

        Raises:
            ResourceError: it says how many blocks do.
        """
        each = ctypes.c_int()
        call_driver(
            "cuOccupancyMaxActiveBlocksPerMultiprocessor", ctypes.byref(each), self._function, ctypes.c_int(threads),
            ctypes.c_size_t(shared),
        )  # fmt: skip
        most = each.value * self._device.processors
        if blocks > most:
            raise ResourceError(
                f"{self.name} has {blocks:,} programs that meet at a grid barrier",
                expected=f"at most {most:,} on {self._device.name}: they must all run at once", received=f"{blocks:,}",
                suggestion="fewer programs that do more each: for i in tile.range(tile.group_id(), n, programs)",
            )  # fmt: skip

    def prepared_async_call(
        self, grid: Sequence[int], block: Sequence[int], stream: Any, *values: Any, shared_size: int
    ) -> None:
        """Queue a launch."""
        held = [kind(value) for kind, value in zip(self._kinds, values, strict=True)]
        places = (ctypes.c_void_p * len(held))(*(ctypes.addressof(each) for each in held))
        handle = ctypes.c_void_p(stream.handle if stream is not None else 0)
        sizes = [ctypes.c_uint(n) for n in (*grid, *block, shared_size)]
        call_driver("cuLaunchCooperativeKernel", self._function, *sizes, handle, places)

    def free(self) -> None:
        """Give back what the driver holds of it."""
        if self._module:
            module, self._module = self._module, ctypes.c_void_p()
            call_driver("cuModuleUnload", module)

    def __del__(self) -> None:
        self.free()


# Launches that the driver has recorded as a CUDA graph: one call queues all of them again.


THREAD_LOCAL = 1  # what other threads do meanwhile is not recorded, and may be anything


class CudaGraph:
    """What `record` queues on the stream it is given; the arguments of those launches stay as they were.

    Raises:
        ExecutionError: the driver refuses to record, as it does where something is waited for.
    """

    def __init__(self, device: GPU, record: Callable[[Any], None]) -> None:
        self._graph = ctypes.c_void_p()
        stream = device.driver.Stream()
        template = ctypes.c_void_p()
        call_driver("cuStreamBeginCapture_v2", ctypes.c_void_p(stream.handle), THREAD_LOCAL)
        try:
            record(stream)
        finally:  # the stream is of no use while it records
            call_driver("cuStreamEndCapture", ctypes.c_void_p(stream.handle), ctypes.byref(template))
        try:
            call_driver("cuGraphInstantiateWithFlags", ctypes.byref(self._graph), template, ctypes.c_uint64(0))
        finally:
            call_driver("cuGraphDestroy", template)
        device.keep(self)

    def launch(self, stream: Any = None) -> None:
        """Queue the launches again."""
        call_driver("cuGraphLaunch", self._graph, ctypes.c_void_p(stream.handle if stream is not None else 0))

    def free(self) -> None:
        """Give back what the driver holds of it."""
        if self._graph:
            graph, self._graph = self._graph, ctypes.c_void_p()
            call_driver("cuGraphExecDestroy", graph)

    def __del__(self) -> None:
        self.free()


# Tensor maps for the GPU: pycuda has no call for them, so the driver's own is made through `calls`.


# Where the driver puts the first parameter that is aligned to 64 bytes: the bank of parameters begins at byte 528 on
# compute capability 9.0, and 576 is the next multiple. pycuda packs parameters without regard to that.
MAP_OFFSET = 48
MAP_BYTES, MAP_ALIGN = 128, 64
# CUtensorMapDataType; a copy moves the bits of an 8-bit element as an integer's.
MAP_TYPES = {"f16": 6, "f32": 7, "bf16": 9, "int8": 0, "uint8": 0, "fp8_e4m3": 0, "fp8_e5m2": 0}
SWIZZLE_128, PROMOTE_128, MAP_DISABLED = 3, 2, 0


def encode_tensor_map(described: Mapping[str, Any], address: int) -> bytes:
    """The 128 bytes of a map of row-major memory at an address, with the 128-byte swizzle; outside reads as 0.

    Raises:
        ExecutionError: the driver does not take such a map.
    """
    shape, box = list(described["shape"])[::-1], list(described["box"])[::-1]
    each, rank = as_dtype(described["dtype"]).numpy.itemsize, len(shape)
    strides = [math.prod(shape[: axis + 1]) * each for axis in range(rank - 1)]
    room = ctypes.create_string_buffer(MAP_BYTES + MAP_ALIGN)
    place = (ctypes.addressof(room) + MAP_ALIGN - 1) & -MAP_ALIGN
    wide, narrow = ctypes.c_uint64, ctypes.c_uint32
    call_driver(
        "cuTensorMapEncodeTiled", ctypes.c_void_p(place), MAP_TYPES[described["dtype"]], narrow(rank),
        ctypes.c_void_p(address),
        (wide * rank)(*shape), (wide * max(rank - 1, 1))(*strides), (narrow * rank)(*box),
        (narrow * rank)(*([1] * rank)), MAP_DISABLED, SWIZZLE_128, PROMOTE_128, MAP_DISABLED,
    )  # fmt: skip
    return ctypes.string_at(place, MAP_BYTES)


def tensor_map_format(count: int) -> str:
    """How that many maps begin the parameters of a prepared launch."""
    return f"{MAP_OFFSET}x" + f"{MAP_BYTES}s" * count if count else ""


# How many clusters of a kernel a GPU runs at once: its multiprocessors come in groups that clusters stay within.


OCCUPANCY_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
CLUSTER_DIMENSION = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION


class _LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute: of its value, 64 bytes, the sizes of a cluster are the first three words."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint * 16))


class _LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.POINTER(_LaunchAttribute)), ("count", ctypes.c_uint),
    )  # fmt: skip


def count_resident_cluster_blocks(text: str, name: str, entry: Mapping[str, Any]) -> int:
    """The blocks of an entry that run at once, all of their clusters whole; its context must be active.

    Raises:
        ExecutionError: the driver refuses.
    """
    size, found = int(entry["cluster"]), ctypes.c_int()
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    call_driver("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(text.encode()))
    try:
        call_driver("cuModuleGetFunction", ctypes.byref(function), module, ctypes.c_char_p(name.encode()))
        call_driver("cuFuncSetAttribute", function, OCCUPANCY_DYNAMIC_SHARED, ctypes.c_int(entry["shared"]))
        attribute = _LaunchAttribute(CLUSTER_DIMENSION, 0, (ctypes.c_uint * 16)(size, 1, 1))
        sizes = [(ctypes.c_uint * 3)(n, 1, 1) for n in (size, entry["threads"])]
        config = _LaunchConfig(*sizes, entry["shared"], None, ctypes.pointer(attribute), 1)
        call_driver("cuOccupancyMaxActiveClusters", ctypes.byref(found), function, ctypes.byref(config))
    finally:
        call_driver("cuModuleUnload", module)
    return max(found.value, 1) * size

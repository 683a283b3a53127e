"""CUDA driver: context, module cache, memory pool, and the calls that pycuda lacks (modules, graphs, tensor maps);
failures become Tessera errors.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib
import math
import re
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from tessera.codegen.artifact import hash_content
from tessera.core.device import THREAD_ENDINGS, count_gpus
from tessera.core.errors import ArtifactError, DeviceUnavailable, ExecutionError, ResourceError, TesseraError
from tessera.core.queued_failures import wait_and_examine
from tessera.core.types import as_dtype

# CUDA driver calls that pycuda lacks, by ctypes: cooperative launches, CUDA graphs, tensor maps, cluster occupancy.


DRIVER_LIBRARY = "libcuda.so.1"
OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY
LOST_CONTEXT = frozenset((700, 702, 715, 716, 717, 718, 719))  # from CUDA_ERROR_ILLEGAL_ADDRESS to LAUNCH_FAILED
LOST_HINT = (
    "this process cannot use the GPU any more: start a new one, and debug with "
    "`tessera run --level target --target ptx`, which runs the same text in the emulator"
)


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
    check_status(name, find_driver_call(name)(*arguments))


def find_driver_call(name: str) -> Callable[..., int]:
    """A call of the driver, which gives its status (`check_status`).

    Raises:
        DeviceUnavailable: the driver is missing, or has no such call.
    """
    found = getattr(load_driver_library(), name, None)
    if found is None:
        raise DeviceUnavailable(
            f"the driver has no call {name}", expected="CUDA 12 or newer", suggestion="update the driver"
        )
    return found  # type: ignore[no-any-return]


def check_status(name: str, status: int) -> None:
    """Raise the error of a driver call that failed.

    Raises:
        ResourceError: the GPU's memory is exhausted.
        ExecutionError: any other failure.
    """
    if status == OUT_OF_MEMORY:
        raise ResourceError(f"the GPU's memory is exhausted ({name})", suggestion="smaller inputs")
    if status in LOST_CONTEXT:
        raise ExecutionError(f"a kernel failed ({name}: {_error_name(status)})", suggestion=LOST_HINT)
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
MAX_BLOCK_THREADS = 0  # CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK
MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
JIT_ERROR_LOG, JIT_ERROR_LOG_SIZE, JIT_LOG_BYTES = 5, 6, 1 << 16  # of CUjit_option; bytes


class LoadedModule:
    """A PTX text that the driver has assembled and loaded.

    Raises:
        ArtifactError: the driver's assembler refuses the text; the error shows its log and the line.
    """

    def __init__(self, text: str) -> None:
        self.handle = ctypes.c_void_p()
        log = ctypes.create_string_buffer(JIT_LOG_BYTES)
        options = (ctypes.c_int * 2)(JIT_ERROR_LOG, JIT_ERROR_LOG_SIZE)
        values = (ctypes.c_void_p * 2)(ctypes.addressof(log), JIT_LOG_BYTES)
        try:
            call_driver(
                "cuModuleLoadDataEx", ctypes.byref(self.handle), ctypes.c_char_p(text.encode()), ctypes.c_uint(2),
                options, values,
            )  # fmt: skip
        except ExecutionError as error:
            raise _assembly_error(text, f"{error.message}\n{log.value.decode(errors='replace')}") from None

    def free(self) -> None:
        """Release the driver's resources."""
        if self.handle:
            handle, self.handle = self.handle, ctypes.c_void_p()
            call_driver("cuModuleUnload", handle)

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

    def bind(self, stream: int = 0) -> Callable[[], None]:
        """What queues the recorded launches on a stream."""
        call, graph, handle = find_driver_call("cuGraphLaunch"), self._graph, ctypes.c_void_p(stream)

        def launch() -> None:
            status = call(graph, handle)
            if status:
                check_status("cuGraphLaunch", status)

        launch.graph = self  # type: ignore[attr-defined]  # it lives as long
        return launch

    def free(self) -> None:
        """Release the driver's resources."""
        if self._graph:
            graph, self._graph = self._graph, ctypes.c_void_p()
            call_driver("cuGraphExecDestroy", graph)

    def __del__(self) -> None:
        self.free()


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


CLUSTER_DIMENSION = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute: the first three words of its 64-byte value are a cluster's dimensions."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint * 16))


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.POINTER(LaunchAttribute)), ("count", ctypes.c_uint),
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
        attribute = LaunchAttribute(CLUSTER_DIMENSION, 0, (ctypes.c_uint * 16)(size, 1, 1))
        sizes = [(ctypes.c_uint * 3)(n, 1, 1) for n in (size, entry["threads"])]
        config = LaunchConfig(*sizes, entry["shared"], None, ctypes.pointer(attribute), 1)
        call_driver("cuOccupancyMaxActiveClusters", ctypes.byref(found), function, ctypes.byref(config))
    finally:
        call_driver("cuModuleUnload", module)
    return max(found.value, 1) * size


# The GPU: its context, a cache of loaded modules, a memory pool; driver failures become Tessera errors.


MIN_CAPABILITY = (8, 0)  # compute capability
ARCH_PATTERN = re.compile(r"sm_(\d+)(\d)(a?)")
LOG_LINE = re.compile(r"line (\d+)")
ALLOCATION_UNIT = 4  # bytes
MAPPED_BYTES, MAPPED_UNIT = 1 << 16, 64  # of page-locked memory; parts of it begin at multiples
PORTABLE, MAPPED = 1, 2  # CU_MEMHOSTALLOC_PORTABLE, CU_MEMHOSTALLOC_DEVICEMAP


class DeviceAllocation:
    """Memory on the GPU; `int` gives its address. Without a `gpu` it stays allocated until `free`."""

    def __init__(self, allocation: Any, gpu: GPU | None = None) -> None:
        self._allocation, self._gpu = allocation, gpu
        self.address = int(allocation)

    def __int__(self) -> int:
        return self.address

    def free(self) -> None:
        """Return the memory to the pool."""
        if self._allocation is not None:
            self._allocation.free()
            self._allocation = None

    def __del__(self) -> None:
        if self._allocation is not None and self._gpu is not None:
            self._gpu.retire(self._allocation)


class PageLockedMemory:
    """Memory of the host that kernels access too, at the same address; parts of it are given away in order.

    Raises:
        ResourceError: the memory is exhausted.
    """

    def __init__(self, size: int) -> None:
        self._address, self._size, self._taken = None, size, 0
        found = ctypes.c_void_p()
        call_driver("cuMemHostAlloc", ctypes.byref(found), ctypes.c_size_t(size), ctypes.c_uint(PORTABLE | MAPPED))
        self._address = int(found.value or 0)
        ctypes.memset(self._address, 0, size)

    def take(self, size: int) -> MappedMemory | None:
        """The next part of this size, or None if the rest is too small."""
        if self._address is None or self._taken + size > self._size:
            return None
        address = self._address + self._taken
        self._taken += -(-size // MAPPED_UNIT) * MAPPED_UNIT
        return MappedMemory(address, np.frombuffer((ctypes.c_uint8 * size).from_address(address), np.uint8), self)

    def free(self) -> None:
        """Give the memory back: nothing accesses its parts afterwards."""
        if self._address is not None:
            held, self._address = self._address, None
            find_driver_call("cuMemFreeHost")(ctypes.c_void_p(held))

    def __del__(self) -> None:
        self.free()


@dataclass(frozen=True, eq=False)
class MappedMemory:
    """A part of page-locked memory: its address, for kernels and the host, and its bytes."""

    address: int
    array: np.ndarray
    whole: PageLockedMemory | None = None  # lives as long as its parts

    def __int__(self) -> int:
        return self.address


class GPU:
    """The first GPU of this machine, through pycuda; its primary context is shared with other libraries.

    Raises:
        DeviceUnavailable: pycuda, the driver or a supported GPU is missing.
    """

    def __init__(self) -> None:
        self.driver = _import_pycuda()
        try:
            self.driver.init()
            self.device = self.driver.Device(0)
        except self.driver.Error as error:
            raise DeviceUnavailable(
                f"the driver cannot be initialised: {error}", suggestion="check nvidia-smi"
            ) from None
        self.capability: tuple[int, int] = self.device.compute_capability()
        if self.capability < MIN_CAPABILITY:
            raise DeviceUnavailable(
                f"{self.device.name()} has compute capability {_format_capability(self.capability)}",
                expected=f"{_format_capability(MIN_CAPABILITY)} or more", suggestion='run on the processor with "cpu"',
            )  # fmt: skip
        self.processors = int(self.device.get_attribute(self.driver.device_attribute.MULTIPROCESSOR_COUNT))
        self.context = self.device.retain_primary_context()
        self.here = threading.local()
        self._modules: dict[str, LoadedModule] = {}
        self._held: weakref.WeakSet[Any] = weakref.WeakSet()
        self._mapped: PageLockedMemory | None = None
        self._retired: deque[Any] = deque()
        with self.active():
            self._pool = importlib.import_module("pycuda.tools").DeviceMemoryPool()
        atexit.register(self._leave)

    def allocate(self, size: int, collected: bool = True) -> DeviceAllocation:
        """Memory from the pool, which it returns to when nothing refers to it.

        Memory that a finaliser keeps for others is not `collected`: garbage collection calls all finalisers of a cycle,
        and so also that of memory which another one of them has saved.
        """
        self._free_retired()
        # In whole words: an atomic update of a smaller element accesses the word that contains it.
        part = self._pool.allocate(-(-max(size, 1) // ALLOCATION_UNIT) * ALLOCATION_UNIT)
        memory = DeviceAllocation(part, self if collected else None)
        self.keep(memory)
        return memory

    def retire(self, part: Any) -> None:
        """Return memory to the pool before the next allocation: kernels that are queued on any stream may use it.

        It is called by finalisers, in any thread and at any time, and so calls nothing of the driver.
        """
        self._retired.append(part)

    def _free_retired(self) -> None:
        count = len(self._retired)  # what is retired from now on is not waited for
        if count:
            call_driver("cuCtxSynchronize")
            with suppress(IndexError):  # another thread was here, too
                for _ in range(count):
                    self._retired.popleft().free()

    def allocate_mapped(self, size: int) -> MappedMemory:
        """Memory of the host that kernels access."""
        found = self._mapped.take(size) if self._mapped is not None else None
        if found is None:
            self._mapped = PageLockedMemory(max(size, MAPPED_BYTES))
            self.keep(self._mapped)
            found = self._mapped.take(size)
        assert found is not None
        return found

    def keep(self, resource: Any) -> None:
        """Call the resource's `free` before the context is destroyed."""
        self._held.add(resource)

    def _leave(self) -> None:
        """Release everything while the context exists; otherwise pycuda aborts the process."""
        self.enter()
        try:
            wait_and_examine()  # the context is gone when its own exit handler runs
        finally:
            for each in [*self._held, *self._retired]:
                each.free()
            self._retired.clear()
            self._modules.clear()
            self._pool.stop_holding()
            self.driver.Context.pop()

    @property
    def name(self) -> str:
        """The GPU's name."""
        return str(self.device.name())

    def enter(self) -> None:
        """Make the context current, for the lifetime of this thread."""
        if not getattr(self.here, "active", False):
            self.context.push()
            self.here.active = True

    def leave_thread(self) -> None:
        """Remove the context from this thread: pycuda aborts the process when a thread ends that has one.

        For threads of other libraries, which end without notice. The main thread keeps its context to the end.
        """
        if threading.current_thread() is not threading.main_thread() and getattr(self.here, "active", False):
            self.driver.Context.pop()
            self.here.active = False

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make the context current, for the lifetime of this thread: GPU memory may be freed at any time.

        Driver errors in the `with` block become Tessera errors.

        Raises:
            ResourceError: the GPU's memory is exhausted.
            ExecutionError: a kernel failed. The context, with all memory in it, may be lost.
        """
        drv = self.driver
        self.enter()
        try:
            yield
        except drv.MemoryError as error:
            raise ResourceError(
                f"the memory of {self.name} is exhausted: {error}",
                suggestion="smaller inputs",
            ) from None
        except drv.LaunchError as error:
            raise self._make_kernel_error(error) from None
        except drv.Error as error:
            raise ExecutionError(f"a driver call failed on {self.name}: {error}") from None

    def _make_kernel_error(self, error: Exception) -> ExecutionError:
        """The error of a failed kernel; its suggestion depends on whether the context is still usable."""
        try:
            self.driver.Context.synchronize()
        except self.driver.Error:
            hint = LOST_HINT
        else:
            hint = "this process can still use the GPU; the outputs of this program are invalid"
        return ExecutionError(f"a kernel failed on {self.name}: {error}", suggestion=hint)

    def check_resources(self, name: str, function: Any, threads: int, shared: int) -> None:
        """Check that a block of a kernel fits a multiprocessor.

        Raises:
            ResourceError: its registers or its shared memory exceed the limit.
        """
        drv = self.driver
        max_threads = function.get_attribute(MAX_BLOCK_THREADS)
        max_shared = self.device.get_attribute(drv.device_attribute.MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)
        if threads > max_threads:
            raise ResourceError(
                f"a block of {name} needs more registers than {self.name} has",
                expected=f"at most {max_threads} threads", received=f"{threads}",
                suggestion="smaller tiles, or fewer warps",
            )  # fmt: skip
        if shared > max_shared:
            raise ResourceError(
                f"{name} needs {shared:,} bytes of shared memory", expected=f"at most {max_shared:,} on {self.name}",
                received=f"{shared:,}", suggestion="smaller tiles, or fewer stages",
            )  # fmt: skip

    def check_architecture(self, arch: str) -> None:
        """Check that this GPU runs text for an architecture.

        Raises:
            DeviceUnavailable: the GPU is older, or the text (such as sm_90a) is for one generation only.
        """
        major, minor, exact = ARCH_PATTERN.fullmatch(arch).groups()  # type: ignore[union-attr]
        wanted = (int(major), int(minor))
        if self.capability < wanted or (exact and self.capability != wanted):
            raise DeviceUnavailable(
                f"the artifact is for {arch}, {self.name} has compute capability {_format_capability(self.capability)}",
                expected=f"{_format_capability(wanted)}{'' if exact else ' or more'}",
                suggestion="build it again with --arch sm_80",
            )

    def module(self, text: str) -> LoadedModule:
        """The module of a PTX text, loaded once.

        Raises:
            ArtifactError: the driver's assembler refuses the text; the error shows its log and the line.
        """
        key = hash_content(text)
        if key not in self._modules:
            self._modules[key] = loaded = LoadedModule(text)
            self.keep(loaded)
        return self._modules[key]


def _assembly_error(text: str, log: str) -> TesseraError:
    """The assembler's error with the line of text that it names."""
    found = LOG_LINE.search(log)
    lines = text.splitlines()
    shown = f"line {found[1]}: {lines[int(found[1]) - 1].strip()}" if found and int(found[1]) <= len(lines) else ""
    return ArtifactError(f"the driver cannot assemble this text: {log.strip()}", received=shown)


def _format_capability(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"


def _import_pycuda() -> Any:
    try:
        return importlib.import_module("pycuda.driver")
    except ImportError as error:
        raise DeviceUnavailable(
            f"running on a GPU needs the package pycuda: {error}", suggestion='pip install "tessera[ptx]"'
        ) from None


@cache
def get_gpu() -> GPU:
    """The GPU of this machine."""
    if not count_gpus():
        raise DeviceUnavailable("this machine has no NVIDIA GPU", suggestion='run on the processor with "cpu"')
    return GPU()


def leave_thread() -> None:
    """Remove the GPU's context, if there is one, from a thread that ends."""
    if get_gpu.cache_info().currsize:
        get_gpu().leave_thread()


THREAD_ENDINGS.append(leave_thread)

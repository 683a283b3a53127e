"""The GPU: its context, a cache of loaded modules, a memory pool; driver failures become Tessera errors."""

from __future__ import annotations

import atexit
import importlib
import re
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from tessera.codegen.artifact import hash_content
from tessera.core.device import count_gpus
from tessera.core.errors import ArtifactError, DeviceUnavailable, ExecutionError, ResourceError, TesseraError

MIN_CAPABILITY = (8, 0)  # compute capability
ARCH_PATTERN = re.compile(r"sm_(\d+)(\d)(a?)")
LOG_LINE = re.compile(r"line (\d+)")
ALLOCATION_UNIT = 4  # bytes


class DeviceAllocation:
    """Memory on the GPU; `int` gives its address."""

    def __init__(self, allocation: Any) -> None:
        self._allocation = allocation
        self._address = int(allocation)

    def __int__(self) -> int:
        return self._address

    def free(self) -> None:
        """Return the memory to the pool."""
        if self._allocation is not None:
            self._allocation.free()
            self._allocation = None


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
        self._here = threading.local()
        self._modules: dict[str, Any] = {}
        self._held: weakref.WeakSet[Any] = weakref.WeakSet()
        with self.active():
            self._pool = importlib.import_module("pycuda.tools").DeviceMemoryPool()
        atexit.register(self._leave)

    def allocate(self, size: int) -> DeviceAllocation:
        """Memory from the pool, which it returns to when nothing refers to it."""
        # In whole words: an atomic update of a smaller element accesses the word that contains it.
        memory = DeviceAllocation(self._pool.allocate(-(-max(size, 1) // ALLOCATION_UNIT) * ALLOCATION_UNIT))
        self.keep(memory)
        return memory

    def keep(self, resource: Any) -> None:
        """Call the resource's `free` before the context is destroyed."""
        self._held.add(resource)

    def _leave(self) -> None:
        """Release everything while the context exists; otherwise pycuda aborts the process."""
        for each in list(self._held):
            each.free()
        self._modules.clear()
        self._pool.stop_holding()
        if getattr(self._here, "active", False):
            self.driver.Context.pop()

    @property
    def name(self) -> str:
        """The GPU's name."""
        return str(self.device.name())

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make the context current, for the lifetime of this thread: GPU memory may be freed at any time.

        Driver errors in the `with` block become Tessera errors.

        Raises:
            ResourceError: the GPU's memory is exhausted.
            ExecutionError: a kernel failed. The context, with all memory in it, may be lost.
        """
        drv = self.driver
        if not getattr(self._here, "active", False):
            self.context.push()
            self._here.active = True
        try:
            yield
        except drv.MemoryError as error:
            raise ResourceError(
                f"the memory of {self.name} is exhausted: {error}",
                suggestion="smaller inputs",
            ) from None
        except drv.LaunchError as error:
            raise self._failed(error) from None
        except drv.Error as error:
            raise ExecutionError(f"a driver call failed on {self.name}: {error}") from None

    def _failed(self, error: Exception) -> ExecutionError:
        """The error of a failed kernel; its suggestion depends on whether the context is still usable."""
        try:
            self.driver.Context.synchronize()
        except self.driver.Error:
            hint = "this process cannot use the GPU any more: start a new one, and debug with "
            hint += "`tessera run --level target --target ptx`, which runs the same text in the emulator"
        else:
            hint = "this process can still use the GPU; the outputs of this program are invalid"
        return ExecutionError(f"a kernel failed on {self.name}: {error}", suggestion=hint)

    def check_resources(self, name: str, function: Any, threads: int, shared: int) -> None:
        """Check that a block of a kernel fits a multiprocessor.

        Raises:
            ResourceError: its registers or its shared memory exceed the limit.
        """
        drv = self.driver
        max_threads = function.get_attribute(drv.function_attribute.MAX_THREADS_PER_BLOCK)
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

    def module(self, text: str) -> Any:
        """The module of a PTX text, loaded once.

        Raises:
            ArtifactError: the driver's assembler refuses the text; the error shows its log and the line.
        """
        key = hash_content(text)
        if key not in self._modules:
            self._modules[key] = self._load(text)
        return self._modules[key]

    def _load(self, text: str) -> Any:
        log: list[str] = []
        try:
            return self.driver.module_from_buffer(
                text.encode() + b"\0", message_handler=lambda done, info, error: log.append(error or info)
            )
        except self.driver.Error as error:
            raise _assembly_error(text, f"{error}\n" + "\n".join(log)) from None


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

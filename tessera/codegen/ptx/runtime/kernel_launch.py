"""Kernel launches: modules that the driver assembles, their kernels, and launches with fixed arguments.

A launch is one call of `cuLaunchKernelEx` with memory that was laid out before, so that it costs little.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tessera.codegen.ptx.runtime.driver_api import (
    ARGUMENT_TYPES,
    MAP_ALIGN,
    MAP_BYTES,
    MAX_DYNAMIC_SHARED,
    LaunchAttribute,
    LaunchConfig,
    call_driver,
    check_status,
    find_driver_call,
)
from tessera.core.errors import ResourceError

if TYPE_CHECKING:
    from tessera.codegen.ptx.runtime.driver_api import GPU, LoadedModule

COOPERATIVE = 2  # CU_LAUNCH_ATTRIBUTE_COOPERATIVE


class DriverKernel:
    """A kernel of a loaded module; `letters` are its argument formats, after `maps` TMA descriptors.

    The blocks of a cooperative kernel synchronise at a grid barrier.
    """

    def __init__(self, module: LoadedModule, name: str, letters: str, maps: int = 0, cooperative: bool = False) -> None:
        self.name, self.maps, self.cooperative = name, maps, cooperative
        self.types = [ARGUMENT_TYPES[letter] for letter in letters]
        self.module, self.handle = module, ctypes.c_void_p()
        call_driver("cuModuleGetFunction", ctypes.byref(self.handle), module.handle, ctypes.c_char_p(name.encode()))

    def get_attribute(self, which: int) -> int:
        """An attribute of the kernel (CUfunction_attribute)."""
        found = ctypes.c_int()
        call_driver("cuFuncGetAttribute", ctypes.byref(found), ctypes.c_int(int(which)), self.handle)
        return found.value

    def allow_shared(self, count: int) -> None:
        """Allow a launch this many bytes of shared memory."""
        call_driver("cuFuncSetAttribute", self.handle, MAX_DYNAMIC_SHARED, ctypes.c_int(count))

    def check_residency(self, device: GPU, blocks: int, threads: int, shared: int) -> None:
        """Check that all blocks of a grid are resident at once, as a cooperative launch requires.

        Raises:
            ResourceError: they are not; it names the number that is.
        """
        each = ctypes.c_int()
        call_driver(
            "cuOccupancyMaxActiveBlocksPerMultiprocessor", ctypes.byref(each), self.handle, ctypes.c_int(threads),
            ctypes.c_size_t(shared),
        )  # fmt: skip
        most = each.value * device.processors
        if blocks > most:
            raise ResourceError(
                f"{self.name} has {blocks:,} programs that synchronise at a grid barrier",
                expected=f"at most {most:,} on {device.name}: all must be resident at once",
                received=f"{blocks:,}",
                suggestion="fewer programs that do more each: for i in tile.range(tile.group_id(), n, programs)",
            )  # fmt: skip


class BoundLaunch:
    """A launch with fixed arguments on a stream: TMA descriptors as bytes, then addresses and numbers.

    Raises:
        ValueError: the number of arguments is not the kernel's.
    """

    def __init__(
        self, kernel: DriverKernel, grid: Sequence[int], threads: int, shared: int, values: Sequence[Any], stream: int
    ) -> None:
        self.kernel = kernel
        self._held = [_align_map(each) for each in values[: kernel.maps]]
        self._held += [kind(value) for kind, value in zip(kernel.types, values[kernel.maps :], strict=True)]
        addresses = [each if isinstance(each, _AlignedMap) else ctypes.addressof(each) for each in self._held]
        self._arguments = (ctypes.c_void_p * len(addresses))(*addresses)
        attribute = LaunchAttribute(COOPERATIVE, 0, (ctypes.c_uint * 16)(1))
        self._config = LaunchConfig(
            (ctypes.c_uint * 3)(*grid), (ctypes.c_uint * 3)(threads, 1, 1), shared, stream or None,
            ctypes.pointer(attribute), int(kernel.cooperative),
        )  # fmt: skip
        self._call = functools.partial(
            find_driver_call("cuLaunchKernelEx"), ctypes.byref(self._config), kernel.handle, self._arguments, None
        )

    def __call__(self) -> None:
        """Queue the launch.

        Raises:
            ExecutionError: the driver refuses it, or a kernel before it failed.
        """
        if status := self._call():
            check_status("cuLaunchKernelEx", status)


class _AlignedMap(int):
    """The address of a TMA descriptor, aligned as the driver wants it, with the memory that holds it."""

    memory: Any


def _align_map(content: bytes) -> _AlignedMap:
    memory = ctypes.create_string_buffer(MAP_BYTES + MAP_ALIGN)
    found = _AlignedMap((ctypes.addressof(memory) + MAP_ALIGN - 1) & -MAP_ALIGN)
    found.memory = memory
    ctypes.memmove(found, content, MAP_BYTES)
    return found

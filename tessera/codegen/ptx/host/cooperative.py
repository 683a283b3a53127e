"""Kernels whose blocks all run at once, so that they may wait for each other: by the driver's own call for that."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tessera.codegen.ptx.host.calls import call
from tessera.errors import ResourceError

if TYPE_CHECKING:
    from tessera.codegen.ptx.host.gpu import GPU

# What a letter of a prepared launch is in memory.
KINDS: dict[str, Any] = {
    "P": ctypes.c_uint64, "d": ctypes.c_double, "f": ctypes.c_float, "q": ctypes.c_int64, "i": ctypes.c_int32,
    "h": ctypes.c_int16, "b": ctypes.c_int8, "B": ctypes.c_uint8, "H": ctypes.c_uint16,
    "I": ctypes.c_uint32, "Q": ctypes.c_uint64,
}  # fmt: skip
MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


class Cooperative:
    """A kernel of a text, called as pycuda's prepared functions are; `letters` say what its arguments are.

    Raises:
        ExecutionError: the driver refuses the text.
    """

    def __init__(self, device: GPU, text: str, name: str, letters: str, shared: int) -> None:
        self._device, self.name, self._kinds = device, name, [KINDS[letter] for letter in letters]
        self._module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        call("cuModuleLoadData", ctypes.byref(self._module), ctypes.c_char_p(text.encode()))
        device.keep(self)
        call("cuModuleGetFunction", ctypes.byref(self._function), self._module, ctypes.c_char_p(name.encode()))
        call("cuFuncSetAttribute", self._function, MAX_DYNAMIC_SHARED, ctypes.c_int(shared))

    def check(self, blocks: int, threads: int, shared: int) -> None:
        """Refuse a grid that does not fit the GPU all at once.

        Raises:
            ResourceError: it says how many blocks do.
        """
        each = ctypes.c_int()
        call(
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
        call("cuLaunchCooperativeKernel", self._function, *sizes, handle, places)

    def free(self) -> None:
        """Give back what the driver holds of it."""
        if self._module:
            module, self._module = self._module, ctypes.c_void_p()
            call("cuModuleUnload", module)

    def __del__(self) -> None:
        self.free()

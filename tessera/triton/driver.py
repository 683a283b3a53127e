"""Triton driver: Triton's launcher compiles a kernel for an emulated GPU, and this driver runs its PTX.

A driver (`triton.runtime.driver.set_active`) says which GPU to compile for, loads what was compiled, and launches it.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime import _allocation
from triton.runtime.cache import get_cache_manager

from tessera.core.errors import ArgumentError, ArtifactError
from tessera.cuda.allocations import Allocations
from tessera.cuda.device import EmulatedDevice, EmulatedLaunch
from tessera.cuda.torch_device import StreamStandIn, is_tensor, without_redirection
from tessera.interp.target.ptx import DevicePointer, PtxModule
from tessera.triton.arguments import ArgumentEncoder, NumpyArgument

TRITON_FOLDER = os.path.dirname(triton.__file__) + os.sep
_REGISTER_COUNT = b"\x04\x2f\x08\x00"  # EIATTR_REGCOUNT in the section .nv.info of a cubin


class DriverUtils:
    """What Triton asks of a driver's native module: properties of the device, and loading a binary."""

    def __init__(self, device: EmulatedDevice) -> None:
        self.device = device

    def get_device_properties(self, _: Any = None) -> dict[str, int]:
        """The figures of the emulated GPU, in Triton's names."""
        limits = self.device.limits
        return {
            "max_shared_mem": limits.group_shared,
            "max_num_regs": limits.registers,
            "multiprocessor_count": limits.processors,
            "warpSize": 32,
            "sm_clock_rate": 1_500_000,
            "mem_clock_rate": 2_000_000,
            "mem_bus_width": 5120,
        }

    def load_binary(self, name: str, binary: bytes, shared: int, _: Any) -> tuple[object, object, int, int, int]:
        """A handle, the registers of a thread, spilled bytes, and the most threads of a block."""
        return object(), binary, count_registers(binary), 0, 1024

    def unload_module(self, _: object) -> None:
        """Nothing was loaded."""

    def set_printf_fifo_size(self, _: int) -> None:
        """The emulator prints at once."""


def count_registers(binary: bytes) -> int:
    """The registers of a thread that ptxas assigned, from a cubin.

    >>> count_registers(b"..." + b"\\x04\\x2f\\x08\\x00" + struct.pack("<II", 10, 24))
    24
    """
    start = binary.find(_REGISTER_COUNT)
    return struct.unpack_from("<I", binary, start + 8)[0] if start >= 0 else 0


def drop_assembly_locations(text: str) -> str:
    """PTX text in which all lines of an inline assembly have the location of its call.

    LLVM gives each the sum of the line of the source and the line within the assembly.

    >>> text = ".loc 1 7 9\\n// begin inline asm\\n.loc 1 8 9\\nld\\n// end inline asm\\n.loc 1 9 9"
    >>> drop_assembly_locations(text).splitlines()[2:]
    ['', 'ld', '// end inline asm', '.loc 1 9 9']
    """
    lines, inside = text.split("\n"), False
    for i, line in enumerate(lines):
        words = line.strip()
        if words.endswith("inline asm"):
            inside = words == "// begin inline asm"
        elif inside and words.startswith(".loc"):
            lines[i] = ""
    return "\n".join(lines)


class EmulatorLauncher:
    """Launches one compiled kernel. Triton keeps it: it may run in a later session, with that session's driver."""

    def __init__(self, source: Any, metadata: Any) -> None:
        self.metadata = metadata
        self.signature = list(source.signature.values())
        self.names = list(source.fn.arg_names) if hasattr(source, "fn") else []
        path = _find_ptx(source, metadata)
        text = drop_assembly_locations(path.read_text())
        self.module = PtxModule(text, path.name, (TRITON_FOLDER,))

    def __call__(
        self,
        grid_x: int,
        grid_y: int,
        grid_z: int,
        stream: Any,
        function: Any,
        kernel_metadata: Any,
        launch_metadata: Any,
        enter_hook: Any,
        exit_hook: Any,
        *values: Any,
    ) -> None:
        """Run the kernel, between Triton's hooks; an empty grid runs nothing."""
        grid = (grid_x, grid_y, grid_z)
        if min(grid) < 1:
            return
        if enter_hook is not None:
            enter_hook(launch_metadata)
        driver, scratch = _get_active_driver(), self._allocate_scratch(grid)
        with without_redirection():
            launch = self._make_launch(driver.allocations, grid, function, values, scratch)
            driver.device.launch(self.module, launch)
        if exit_hook is not None:
            exit_hook(launch_metadata)

    def _allocate_scratch(self, grid: tuple[int, int, int]) -> Any:
        """The memory that the kernel asks for, from the program's allocator (`triton.set_allocator`)."""
        m = self.metadata
        if not m.global_scratch_size:
            return None
        programs = grid[0] * grid[1] * grid[2] * m.num_ctas
        return _allocation._allocator.get()(programs * m.global_scratch_size, m.global_scratch_align, 0)

    def _make_launch(
        self, allocations: Allocations, grid: tuple[int, ...], function: Any, values: Sequence[Any], scratch: Any
    ) -> EmulatedLaunch:
        m = self.metadata
        ((entry, code),) = self.module.entries.items()
        encoder = ArgumentEncoder(allocations, getattr(m, "tensordesc_meta", None) or (), self.names)
        args = encoder.encode(self.signature, values)
        args.append(encoder.make_pointer(scratch, "the global scratch memory"))
        args += [0] * (len(code.params) - len(args))
        pointers = [a for a in args if isinstance(a, DevicePointer)]
        threads = dict(code.limits).get(".reqntid", (32 * m.num_warps,))
        return EmulatedLaunch(
            entry,
            (grid[0] * m.num_ctas, grid[1], grid[2]),
            (*threads, 1, 1)[:3],  # type: ignore[arg-type]
            args,
            m.shared,
            (m.num_ctas, 1, 1),
            m.launch_cooperative_grid,
            [*encoder.described, *allocations.find_reachable(pointers)],
            count_registers(function) or None,
        )


def _get_active_driver() -> EmulatorDriver:
    driver = triton.runtime.driver.active
    if not isinstance(driver, EmulatorDriver):
        raise ArgumentError(
            "this kernel was compiled for the emulator", suggestion="launch it in ts.triton.interpreted"
        )
    return driver


def _find_ptx(source: Any, metadata: Any) -> Path:
    """The PTX text that Triton's compiler wrote into its cache."""
    name = source.name[:150]
    group = get_cache_manager(metadata.hash).get_group(f"{name}.json") or {}
    if f"{name}.ptx" not in group:
        raise ArtifactError(
            f"Triton kept no PTX of kernel {name}", suggestion="unset TRITON_STORE_BINARY_ONLY, and compile again"
        )
    return Path(group[f"{name}.ptx"])


class EmulatorDriver(DriverBase):
    """A driver whose device is the PTX emulator."""

    def __init__(self, device: EmulatedDevice, allocations: Allocations) -> None:
        self.device, self.allocations = device, allocations
        self.utils = DriverUtils(device)
        self.launcher_cls = EmulatorLauncher
        self.benchmark_runs = 0

    @classmethod
    def is_active(cls) -> bool:
        """Never by itself: it is made active for a while."""
        return False

    def map_python_to_cpp_type(self, ty: str) -> str:
        """The C++ name of a type, as CUDA's driver gives it."""
        return triton.backends.backends["nvidia"].driver.map_python_to_cpp_type(self, ty)  # type: ignore[arg-type]

    def get_current_target(self) -> GPUTarget:
        """The architecture to compile for."""
        major, minor = self.device.capability
        return GPUTarget("cuda", major * 10 + minor, 32)

    def get_current_device(self) -> str:
        """A key of Triton's caches: kernels compiled for another architecture or GPU are others."""
        return f"emulated {self.device.arch}"

    def set_current_device(self, _: Any) -> None:
        """There is one device."""

    def get_current_stream(self, _: Any = None) -> int:
        """The default stream."""
        return 0

    def get_device_capability(self, _: Any = None) -> tuple[int, int]:
        """The compute capability."""
        return self.device.capability

    def get_active_torch_device(self) -> Any:
        """The CPU: tensors stay there."""
        import torch

        return torch.device("cpu")

    def get_device_interface(self) -> Any:
        """The module of the device, as far as benchmarks use it."""
        import torch

        return torch.cuda

    def get_benchmarker(self) -> Callable[..., Any]:
        """Runs a function once."""
        return self.benchmark

    def get_empty_cache_for_benchmark(self) -> StreamStandIn:
        """No cache is emulated."""
        return StreamStandIn()

    def clear_cache(self, _: Any) -> None:
        """No cache is emulated."""

    def benchmark(self, kernel_call: Callable[[], Any], *_: Any, quantiles: Any = None, **__: Any) -> Any:
        """Run a function once; the emulator's milliseconds, which say nothing of a GPU."""
        start = time.perf_counter()
        kernel_call()
        self.benchmark_runs += 1
        elapsed = 1e3 * (time.perf_counter() - start)
        return [elapsed] * len(quantiles) if quantiles else elapsed


def wrap_arrays(value: Any) -> Any:
    """A NumPy array as an argument of Triton's launcher; other values unchanged."""
    import numpy as np

    return NumpyArgument(value) if isinstance(value, np.ndarray) and not is_tensor(value) else value

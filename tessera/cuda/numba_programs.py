"""Numba programs: kernels of `numba.cuda.jit` run in the PTX emulator, on NumPy arrays that stand for device memory.

Numba compiles the unmodified function through NVVM, which needs no GPU. The functions of `numba.cuda` that programs
call (`to_device`, `device_array`, `synchronize` and the like) are replaced; Numba's driver is not used.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

from tessera.core.errors import ArgumentError, UnsupportedOpError
from tessera.cuda.allocations import find_extent, view_memory
from tessera.cuda.device import EmulatedDevice, EmulatedLaunch
from tessera.cuda.torch_device import StreamStandIn
from tessera.interp.target.ptx import DevicePointer, PtxModule


class EmulatedAllocation:
    """An allocation of the emulated device: its bytes, and which of them are initialised."""

    def __init__(self, address: int, size: int, initialised: bool) -> None:
        self.address, self.bytes = address, view_memory(address, size)
        self.known = np.full(size, initialised)


class EmulatedArray(np.ndarray):
    """A device array: a NumPy array with the methods of Numba's device arrays."""

    memory: EmulatedAllocation | None = None

    def __array_finalize__(self, source: Any) -> None:
        """A view shares the allocation."""
        self.memory = getattr(source, "memory", None)

    def __setitem__(self, index: Any, value: Any) -> None:
        """Write elements; the allocation counts as initialised."""
        self._mark_written()
        super().__setitem__(index, value)

    def _mark_written(self) -> None:
        if self.memory is not None:
            self.memory.known[:] = True

    def copy_to_host(self, ary: np.ndarray | None = None, stream: Any = 0) -> np.ndarray:
        """A copy in host memory."""
        if ary is None:
            return np.array(self)
        ary[...] = self
        return ary

    get = copy_to_host  # CuPy's name

    def copy_to_device(self, ary: Any, stream: Any = 0) -> None:
        """Copy elements into this array."""
        self[...] = ary


def make_device_array(shape: Any, dtype: Any = np.float64, strides: Any = None, order: str = "C",
                      stream: Any = 0) -> EmulatedArray:  # fmt: skip
    """An array without values."""
    plain = np.empty(shape, dtype, order)  # type: ignore[call-overload]
    array = plain.view(EmulatedArray)
    array.memory = EmulatedAllocation(*find_extent(plain), initialised=False)
    return array


def copy_to_device(obj: Any, stream: Any = 0, copy: bool = True, to: EmulatedArray | None = None) -> EmulatedArray:
    """A copy of an array on the device."""
    source = np.asarray(obj)
    if to is None:
        to = make_device_array(source.shape, source.dtype, order="F" if source.flags.fnc else "C")
    if copy:
        to[...] = source
    return to


class NumbaLauncher:
    """`kernel[grid, block]`: compiles the function for the types of its arguments, and runs it."""

    modules: dict[Any, PtxModule] = {}  # by function, types and architecture

    def __init__(self, device: EmulatedDevice, dispatcher: Any, grid: Any, block: Any, shared: int) -> None:
        self.device, self.dispatcher = device, dispatcher
        self.grid, self.block, self.shared = _extend(grid), _extend(block), shared

    def __call__(self, *values: Any) -> None:
        """Run the kernel."""
        args = [v.view(np.ndarray) if isinstance(v, EmulatedArray) else v for v in values]
        types = self._find_types(args)
        module, entry = self._compile(types)
        names = self.dispatcher.py_func.__code__.co_varnames
        encoded = [a for t, v, n in zip(types, values, names, strict=False) for a in _encode(t, v, n)]
        launch = EmulatedLaunch(entry, self.grid, self.block, encoded, self.shared, title=self.dispatcher.__name__)
        self.device.launch(module, launch)

    def _find_types(self, args: Sequence[Any]) -> tuple[Any, ...]:
        declared = self.dispatcher.__dict__.get("emulated_signatures", [])
        if len(declared) == 1 and len(declared[0]) == len(args):
            return declared[0]
        return tuple(self.dispatcher.typeof_pyval(a) for a in args)

    def _compile(self, types: tuple[Any, ...]) -> tuple[PtxModule, str]:
        from numba import cuda

        function, capability = self.dispatcher.py_func, self.device.capability
        key = (function, types, capability)
        if key not in self.modules:
            fast = bool(self.dispatcher.targetoptions.get("fastmath"))
            text, _ = cuda.compile_ptx(function, types, lineinfo=True, cc=capability, fastmath=fast)
            self.modules[key] = PtxModule(text, f"{function.__name__}.ptx")
        module = self.modules[key]
        return module, next(iter(module.entries))


def _extend(extent: Any) -> tuple[int, int, int]:
    parts = tuple(int(n) for n in extent) if isinstance(extent, tuple | list) else (int(extent),)
    return (*parts, 1, 1)[:3]  # type: ignore[return-value]


def _encode(type: Any, value: Any, name: str) -> Iterator[Any]:
    """The parameters of one argument, as Numba passes it: an array is a structure of seven fields and more."""
    from numba import types

    if isinstance(type, types.Array):
        array = np.asarray(value)
        yield from (0, 0, array.size, array.itemsize, make_pointer(value, name))
        yield from (*array.shape, *array.strides)
    elif isinstance(type, types.BaseTuple):
        for i, (t, v) in enumerate(zip(type, value, strict=True)):
            yield from _encode(t, v, f"{name}[{i}]")
    elif isinstance(type, types.Integer | types.Float):
        yield np.array(value, str(type)).tobytes()
    elif isinstance(type, types.Boolean):
        yield bytes([bool(value)])
    else:
        raise UnsupportedOpError(
            f"argument {name} of type {type} cannot be passed to the emulator", expected="arrays, numbers and tuples"
        )


def make_pointer(value: Any, name: str) -> DevicePointer:
    """The pointer to an array's first element, in its allocation."""
    array, memory = np.asarray(value), getattr(value, "memory", None)
    title = f"{name} ({array.dtype}{list(array.shape)})"
    start = array.__array_interface__["data"][0]
    if memory is not None:
        return DevicePointer(memory.bytes, start - memory.address, title, memory.known)
    low, size = find_extent(array)
    return DevicePointer(view_memory(low, size), start - low, title)


def _describe_numba_device(device: EmulatedDevice) -> SimpleNamespace:
    limits = device.limits
    return SimpleNamespace(
        name=f"{limits.name} (emulated)".encode(),
        id=0,
        compute_capability=device.capability,
        MULTIPROCESSOR_COUNT=limits.processors,
        MAX_THREADS_PER_BLOCK=1024,
        MAX_SHARED_MEMORY_PER_BLOCK=48 << 10,
        WARP_SIZE=32,
        reset=lambda: None,
    )


def _list_stand_ins(device: EmulatedDevice) -> dict[str, Any]:
    """What replaces the names of `numba.cuda`."""
    described = _describe_numba_device(device)
    found: dict[str, Any] = dict.fromkeys(("stream", "default_stream", "event", "pinned"), StreamStandIn)
    found |= {
        "to_device": copy_to_device,
        "device_array": make_device_array,
        "device_array_like": lambda a, stream=0: make_device_array(np.shape(a), np.asarray(a).dtype),
        "pinned_array": lambda shape, dtype=np.float64, **_: np.empty(shape, dtype),
        "mapped_array": make_device_array,
        "managed_array": make_device_array,
        "as_cuda_array": lambda a, sync=True: a,
        "is_cuda_array": lambda a: isinstance(a, EmulatedArray),
        "event_elapsed_time": lambda *_: 0.0,
        "is_available": lambda: True,
        "gpus": [described],
    }
    found |= dict.fromkeys(("synchronize", "close", "detect"), lambda *_: None)
    return found | dict.fromkeys(("get_current_device", "select_device"), lambda *_: described)


@contextlib.contextmanager
def redirect_numba(device: EmulatedDevice) -> Iterator[None]:
    """Run Numba's kernels in the emulator; nothing where Numba's CUDA target is not installed."""
    try:
        from numba import cuda
        from numba.cuda import compiler, dispatcher
        from numba.cuda.dispatcher import CUDADispatcher
    except ImportError:
        yield
        return

    def configure(self: Any, griddim: Any, blockdim: Any, stream: Any = 0, sharedmem: int = 0) -> NumbaLauncher:
        return NumbaLauncher(device, self, griddim, blockdim, sharedmem)

    def cover(self: Any, ntasks: int, tpb: int = 0, stream: Any = 0, sharedmem: int = 0) -> NumbaLauncher:
        block = tpb or 128
        return NumbaLauncher(device, self, -(-ntasks // block), block, sharedmem)

    def declare(self: Any, signature: Any) -> None:
        self.__dict__.setdefault("emulated_signatures", []).append(tuple(signature))

    def refuse(self: Any, *_: Any, **__: Any) -> None:
        raise ArgumentError("a kernel is launched without a grid", expected="kernel[blocks, threads](...)")

    methods: dict[str, Callable[..., Any]] = {
        "configure": configure, "forall": cover, "compile": declare, "__call__": refuse,
        "disable_compile": lambda self, val=True: None,
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        for name, method in methods.items():
            stack.enter_context(mock.patch.object(CUDADispatcher, name, method))
        for name, value in _list_stand_ins(device).items():
            for module in (cuda, compiler, dispatcher):
                if hasattr(module, name):
                    stack.enter_context(mock.patch.object(module, name, value))
        yield

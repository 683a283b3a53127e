"""CuPy programs: `RawKernel`s compiled by NVRTC run in the PTX emulator, on NumPy arrays that stand for device memory.

CuPy itself needs NVIDIA's driver for every array. Here a stand-in for the module `cupy` has NumPy's functions, whose
arrays have `get()`, and `RawKernel` and `RawModule`. Other ways to make kernels (`ElementwiseKernel`) are refused.
"""

from __future__ import annotations

import contextlib
import importlib
import linecache
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

from tessera.core.errors import DeviceUnavailable, ExecutionError, UnsupportedOpError
from tessera.cuda.device import EmulatedDevice, EmulatedLaunch
from tessera.cuda.numba_programs import EmulatedArray, copy_to_device, make_device_array, make_pointer
from tessera.cuda.torch_device import StreamStandIn
from tessera.interp.target.ptx import PtxModule

_REFUSED = ("ElementwiseKernel", "ReductionKernel", "fuse")


def compile_cuda(source: str, names: Sequence[str], arch: str, file: str, options: Sequence[str] = ()) -> Any:
    """PTX of CUDA C++ source, and the entry of each name; names may be instances of templates (`scale<float>`).

    Raises:
        DeviceUnavailable: NVRTC is not installed.
        ExecutionError: the source does not compile; the message has the compiler's log.
    """
    try:
        nvrtc = importlib.import_module("cuda.bindings.nvrtc")
    except ImportError as error:
        raise DeviceUnavailable("NVRTC is not installed", suggestion="pip install tessera[nvrtc]") from error
    _, program = nvrtc.nvrtcCreateProgram(source.encode(), file.encode(), 0, None, None)
    for name in names:
        nvrtc.nvrtcAddNameExpression(program, name.encode())
    words = [f"--gpu-architecture={arch.replace('sm_', 'compute_')}", "-lineinfo", *_find_include_options(), *options]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(words), [w.encode() for w in words])
    if int(status):
        log = b" " * nvrtc.nvrtcGetProgramLogSize(program)[1]
        nvrtc.nvrtcGetProgramLog(program, log)
        raise ExecutionError(f"{file} does not compile: {log.decode().strip(chr(0))}")
    text = b" " * nvrtc.nvrtcGetPTXSize(program)[1]
    nvrtc.nvrtcGetPTX(program, text)
    lowered = {n: nvrtc.nvrtcGetLoweredName(program, n.encode())[1].decode() for n in names}
    return text.decode().rstrip("\0"), lowered


def _find_include_options() -> list[str]:
    """The folders of CUDA's headers, where their package is installed."""
    try:
        package = importlib.import_module("nvidia")
    except ImportError:
        return []
    folders = [f for root in package.__path__ for f in Path(root).glob("*/include")]
    return [f"-I{f}" for f in sorted(folders) if (f / "cuda_fp16.h").exists()]


class CudaKernel:
    """A kernel of CUDA C++ source: `kernel(grid, block, args)`, as CuPy's `RawKernel`."""

    count = 0

    def __init__(self, device: EmulatedDevice, code: str, name: str, options: Sequence[str] = (), **_: Any) -> None:
        CudaKernel.count += 1
        self.device, self.code, self.name, self.options = device, code, name, tuple(options)
        self.file = os.path.abspath(f"{name.partition('<')[0]}-{CudaKernel.count}.cu")  # as NVRTC names it
        linecache.cache[self.file] = (len(code), None, code.splitlines(keepends=True), self.file)  # for excerpts
        self.compiled: tuple[PtxModule, str] | None = None

    def compile(self) -> tuple[PtxModule, str]:
        """The module, and the name of its entry."""
        if self.compiled is None:
            text, names = compile_cuda(self.code, [self.name], self.device.arch, self.file, self.options)
            self.compiled = PtxModule(text, f"{self.name}.ptx"), names[self.name]
        return self.compiled

    def __call__(self, grid: Any, block: Any, args: Sequence[Any], *, shared_mem: int = 0, stream: Any = None) -> None:
        """Run the kernel."""
        module, entry = self.compile()
        encoded = [_encode(a, f"argument {i}") for i, a in enumerate(args)]
        shape = [(*(int(n) for n in e), 1, 1)[:3] for e in (grid, block)]
        launch = EmulatedLaunch(entry, shape[0], shape[1], encoded, shared_mem, title=self.name)  # type: ignore[arg-type]
        self.device.launch(module, launch)


def _encode(value: Any, name: str) -> Any:
    """An argument: Python's floats are of 64 bits, as in CuPy."""
    if isinstance(value, np.ndarray):
        return make_pointer(value, name)
    if isinstance(value, bool | int):
        return int(value)
    return np.asarray(value).tobytes()


class CupyStandIn(ModuleType):
    """The module `cupy`: NumPy, with arrays that have `get()`."""

    def __init__(self, device: EmulatedDevice) -> None:
        super().__init__("cupy")
        self.__path__: list[str] = []
        self.ndarray = EmulatedArray
        self.empty = make_device_array
        self.empty_like = lambda a, dtype=None: make_device_array(a.shape, dtype or a.dtype)
        self.array = self.asarray = lambda a, dtype=None, **_: copy_to_device(np.asarray(a, dtype))
        self.asnumpy = lambda a, **_: np.array(a)
        self.get_array_module = lambda *_: self
        self.RawKernel = lambda code, name, *a, **k: CudaKernel(device, code, name, *a, **k)
        self.RawModule = lambda *, code, **k: SimpleNamespace(
            get_function=lambda name: CudaKernel(device, code, name, k.get("options", ()))
        )
        self.cuda = SimpleNamespace(
            Device=lambda *_: StreamStandIn(), Stream=StreamStandIn, Event=StreamStandIn, stream=StreamStandIn,
            runtime=SimpleNamespace(getDeviceCount=lambda: 1, deviceSynchronize=lambda: None),
            get_current_stream=StreamStandIn, is_available=lambda: True,
        )  # fmt: skip
        self.cuda.Stream.null = StreamStandIn()  # type: ignore[attr-defined]

    def __getattr__(self, name: str) -> Any:
        """A function of NumPy whose arrays are those of the device."""
        if name in _REFUSED:
            raise UnsupportedOpError(f"cupy.{name} is not emulated", suggestion="use cupy.RawKernel")
        found = getattr(np, name)
        if isinstance(found, type) or not callable(found):
            return found

        def call(*args: Any, **named: Any) -> Any:
            result = found(*args, **named)
            return copy_to_device(result) if type(result) is np.ndarray else result

        return call


@contextlib.contextmanager
def redirect_cupy(device: EmulatedDevice) -> Iterator[None]:
    """Programs that import cupy get the stand-in."""
    with mock.patch.dict(sys.modules, {"cupy": CupyStandIn(device)}):
        yield

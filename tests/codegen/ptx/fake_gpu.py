"""A GPU made of the PTX emulator and a clock that is told what kernels take: what a program queues there is known."""

import ctypes
import re
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np

from tessera.codegen.ptx.runtime.driver_api import MappedMemory
from tessera.interp.target.ptx.module import PtxModule

CAPTURE = 77  # the stream that records
SCALARS = {"u64": np.uint64, "s64": np.int64, "b64": np.uint64, "f32": np.float32, "b32": np.uint32, "u32": np.uint32}
ATTRIBUTES = {1: 64, 3: 0, 4: 40}  # static shared bytes, local bytes, registers


class FakeGpu:
    """`seconds` gives the time of a kernel by its name, `gap` that between two kernels; `log` lists what was queued."""

    def __init__(self, seconds, gap=0.0, local=0, name="NVIDIA H200"):
        self.seconds, self.gap, self.now, self.log, self.name = seconds, gap, 0.0, [], name
        self.processors, self.capability, self.resident = 132, (9, 0), 2
        self.attributes = {**ATTRIBUTES, 3: local}
        self._blocks, self._names, self._sources, self._recording, self._graphs = {}, [], [], [], []
        context = SimpleNamespace(synchronize=lambda: None)
        self.driver = SimpleNamespace(
            Event=lambda: FakeEvent(self), Stream=lambda: SimpleNamespace(handle=CAPTURE), Context=context,
            memcpy_htod=self._write, memcpy_dtoh=self._read,
        )  # fmt: skip

    # The device.

    def active(self):
        return nullcontext()

    def check_architecture(self, arch):
        pass

    def check_resources(self, *facts):
        pass

    def keep(self, resource):
        pass

    def module(self, text):
        self._sources.append((text, PtxModule(text, "kernels.ptx")))
        return SimpleNamespace(handle=ctypes.c_void_p(len(self._sources)))

    def allocate(self, size, collected=True):
        memory = np.zeros(max(size, 1) + 256, np.uint8)
        start = -memory.ctypes.data % 256
        held = memory[start : start + max(size, 1)]
        self._blocks[held.ctypes.data] = held
        return held.ctypes.data

    def allocate_mapped(self, size):
        address = self.allocate(size)
        return MappedMemory(address, self._blocks[address])

    def _at(self, address):
        start = max(a for a in self._blocks if a <= address)
        return self._blocks[start][address - start :]

    def _write(self, address, array):
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self._at(int(address))[: flat.size] = flat

    def _read(self, array, address):
        flat = array.reshape(-1).view(np.uint8)
        flat[...] = self._at(int(address))[: flat.size]

    # The driver's calls.

    def cuModuleGetFunction(self, out, module, name):
        self._names.append((name.value.decode(), self._sources[module.value - 1]))
        out._obj.value = len(self._names)
        return 0

    def cuFuncSetAttribute(self, *facts):
        return 0

    def cuFuncGetAttribute(self, out, which, function):
        out._obj.value = self.attributes[which.value]
        return 0

    def cuOccupancyMaxActiveBlocksPerMultiprocessor(self, out, function, threads, shared):
        out._obj.value = self.resident
        return 0

    def cuMemHostAlloc(self, out, size, flags):
        out._obj.value = self.allocate(size.value)
        return 0

    def cuMemFreeHost(self, address):
        return 0

    def cuStreamSynchronize(self, stream):
        return 0

    def cuStreamBeginCapture_v2(self, stream, mode):
        self._recording = []
        return 0

    def cuStreamEndCapture(self, stream, out):
        self._graphs.append(self._recording)
        out._obj.value = len(self._graphs)
        return 0

    def cuGraphInstantiateWithFlags(self, out, template, flags):
        out._obj.value = template.value
        return 0

    def cuGraphDestroy(self, template):
        return 0

    def cuGraphExecDestroy(self, graph):
        return 0

    def cuGraphLaunch(self, graph, stream):
        """Takes the time of its kernels; what they compute is left to single launches."""
        names = self._graphs[graph.value - 1]
        self.log.append(("graph", tuple(names)))
        self.now += sum(self.seconds(name) + self.gap for name in names)
        return 0

    def cuLaunchKernelEx(self, config, function, arguments, extra):
        config, (name, source) = config._obj, self._names[function.value - 1]
        if config.stream == CAPTURE:
            self._recording.append(name)
            return 0
        self.log.append(("kernel", name))
        self.now += self.seconds(name) + self.gap
        self._run(name, source, config, arguments)
        return 0

    def _run(self, name, source, config, arguments):
        text, module = source
        head = re.search(rf"\.entry {re.escape(name)}\s*\((.*?)\)", text, re.DOTALL)[1]
        kinds = re.findall(r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)", head)
        values = []
        for kind, at in zip(kinds, arguments, strict=True):
            dtype = np.dtype(SCALARS[kind])
            value = np.frombuffer((ctypes.c_uint8 * dtype.itemsize).from_address(at), dtype)[0]
            values.append(self._at(int(value)) if kind in ("u64", "b64") else value)
        launch = name, tuple(config.grid), tuple(config.block), values, config.shared
        self._execute(lambda: module.launch(*launch))

    def _execute(self, launch):
        launch()


class FakeEvent:
    """An event that notes the time at which the stream passes it."""

    def __init__(self, gpu):
        self.gpu = gpu

    def record(self):
        self.at = self.gpu.now

    def synchronize(self):
        pass

    def time_since(self, other):
        """Milliseconds."""
        return (self.at - other.at) * 1e3

"""Runtime: the launches of a program on a GPU through wgpu (WebGPU)."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tessera.codegen.artifact import Artifact
from tessera.codegen.diagnostics import make_index_site_error
from tessera.codegen.plan_execution import (
    ArgumentBinder,
    PlanEngine,
    execute_plan,
    find_steps,
    run_host_call,
    view_as_array,
)
from tessera.core.errors import DeviceUnavailable, ResourceError, user_location
from tessera.core.types import as_dtype
from tessera_wgsl.generator import pad_grid
from tessera_wgsl.kernel import CUT_SITE
from tessera_wgsl.statements import WIDE_SITE

ALIGN = 256
BACKENDS = ("Vulkan", "Metal", "D3D12")  # shaders of OpenGL lose NaN
KINDS = ("DiscreteGPU", "IntegratedGPU", "VirtualGPU", "CPU")  # the first is preferred
MAX_GROUPS = 32768  # along one axis of a dispatch
MAX_ARENA_BYTES = 1 << 26  # of blocks of the programs that run at once


@functools.cache
def find_device() -> Any:
    """The first adapter's device, with its greatest buffers.

    Raises:
        DeviceUnavailable: wgpu is not installed, or finds no adapter.
    """
    try:
        import wgpu
    except ImportError as error:
        raise DeviceUnavailable(
            f"wgpu cannot be imported: {error}", location=user_location(), suggestion="pip install wgpu"
        ) from None
    try:
        found = [a for a in wgpu.gpu.enumerate_adapters_sync() if a.info["backend_type"] in BACKENDS]
    except Exception as error:  # wgpu raises RuntimeError and errors of its own
        raise _make_missing_error(str(error)) from None
    if not found:
        raise _make_missing_error("no adapter of Vulkan, Metal or Direct3D 12")
    adapter = min(found, key=lambda a: KINDS.index(a.info["adapter_type"]) if a.info["adapter_type"] in KINDS else 9)
    limits = {k: adapter.limits[k] for k in ("max-storage-buffer-binding-size", "max-buffer-size")}
    return adapter.request_device_sync(required_limits=limits)


def _make_missing_error(said: str) -> DeviceUnavailable:
    return DeviceUnavailable(
        "wgpu finds no GPU", location=user_location(), received=said,
        suggestion="install a Vulkan driver; in software: apt install mesa-vulkan-drivers",
    )  # fmt: skip


def describe_adapter() -> str:
    """The adapter's name."""
    return str(find_device().adapter.info["device"])


class WgslProgram:
    """A program on the device: its shaders, and one buffer for all its memory."""

    def __init__(self, artifact: Artifact) -> None:
        self.plan = plan = artifact.manifest["plan"]
        self.device = find_device()
        self.binder = ArgumentBinder(plan)
        self.offsets: list[int] = []
        end = ALIGN
        for p in plan["params"]:
            self.offsets.append(end)
            end += _round_up(math.prod(p["shape"]) * as_dtype(p["dtype"]).numpy.itemsize)
        self.workspace, end = end, end + _round_up(plan["workspace"])
        self.arena = end
        self.batches = {name: _find_batch(name, count) for name, count in plan["scratch"].items()}
        largest = max((plan["scratch"][e["kernel"]] * min(math.prod(e["grid"]), self.batches[e["kernel"]])
                       for e in plan["launches"]), default=0)  # fmt: skip
        self.bytes = end + _round_up(largest)
        most = self.device.limits["max-storage-buffer-binding-size"]
        if self.bytes > most:
            raise ResourceError(
                f"the program needs {self.bytes:,} bytes of memory", location=user_location(),
                expected=f"at most {most:,} on this device", received=f"{self.bytes:,}",
            )  # fmt: skip
        self.pipelines = {name: self._make_pipeline(artifact.text(f"{name}.wgsl")) for name in self.batches}

    def _make_pipeline(self, text: str) -> Any:
        module = self.device.create_shader_module(code=text)
        return self.device.create_compute_pipeline(layout="auto", compute={"module": module, "entry_point": "main"})

    def run(self, arrays: Sequence[Any]) -> list[np.ndarray]:
        """Run the program.

        Raises:
            OutOfBoundsError: an index is outside its axis. ResourceError: an integer does not fit in 32 bits.
        """
        import wgpu

        users, bound = self.binder.bind(arrays)
        usage = wgpu.BufferUsage.STORAGE | wgpu.BufferUsage.COPY_SRC | wgpu.BufferUsage.COPY_DST
        memory = self.device.create_buffer(size=self.bytes, usage=usage)
        for offset, array in zip(self.offsets, bound, strict=True):
            self._write(memory, offset, array)
        engine = DeviceEngine(self, memory)
        engine.read_scalars(bound)
        execute_plan(find_steps(self.plan), engine)
        self._check_status(int(self._read(memory, 0, 4).view(np.uint32)[0]))
        for i in self.binder.written:
            data = self._read(memory, self.offsets[i], bound[i].nbytes)
            bound[i].reshape(-1).view(np.uint8)[...] = data
        return self.binder.finish(users, bound)

    def _write(self, memory: Any, offset: int, array: np.ndarray) -> None:
        data = array.tobytes()
        if data:
            self.device.queue.write_buffer(memory, offset, data + bytes(-len(data) % 4))

    def _read(self, memory: Any, offset: int, count: int) -> np.ndarray:
        if not count:
            return np.empty(0, np.uint8)
        first = offset // 4 * 4
        data = self.device.queue.read_buffer(memory, first, _round_up(offset + count - first, 4))
        return np.frombuffer(data, np.uint8)[offset - first : offset - first + count]

    def _check_status(self, status: int) -> None:
        if status == WIDE_SITE:
            raise ResourceError(
                "an integer of 64 bits that a kernel loads does not fit in 32 bits, which is all that WGSL has",
                expected="from -2**31 to 2**31 - 1", suggestion="run this on another target",
            )  # fmt: skip
        if status == CUT_SITE:
            raise ResourceError(
                f"{self.device.adapter.info['device'] or 'the driver'} ended the loops of a kernel before their end",
                expected="fewer than 65,535 rounds in each program: what Mesa's driver for processors allows",
                suggestion="run this on a GPU, or on another target",
            )  # fmt: skip
        if status:
            raise make_index_site_error(self.plan["reports"][status - 1], None)


def _round_up(count: int, align: int = ALIGN) -> int:
    return -(-int(count) // align) * align


def _find_batch(name: str, scratch: int) -> int:
    return max(1, MAX_ARENA_BYTES // scratch) if scratch else 1 << 31


class DeviceEngine(PlanEngine):
    """Executes a plan's steps on the device."""

    def __init__(self, program: WgslProgram, memory: Any) -> None:
        super().__init__()
        self.program, self.memory = program, memory
        self.scalars: dict[int, int] = {}

    def read_scalars(self, arrays: Sequence[np.ndarray]) -> None:
        """The words of the scalar parameters."""
        for i, p in enumerate(self.program.plan["params"]):
            if p["role"] == "scalar":
                data = arrays[i].tobytes()
                self.scalars[i] = int.from_bytes(data[:4].ljust(4, b"\0"), "little")

    def locate(self, argument: Mapping[str, Any]) -> int:
        """The byte of an argument in the buffer."""
        home = self.program.offsets[argument["param"]] if "param" in argument else self.program.workspace
        return home + self.find_offset(argument)

    def launch(self, first: int, last: int) -> None:
        """Run launches one after the other."""
        for entry in self.program.plan["launches"][first:last]:
            total, batch = math.prod(entry["grid"]), self.program.batches[entry["kernel"]]
            for start in range(0, total, batch):
                self._dispatch(entry, start, min(batch, total - start))

    def _word(self, argument: Mapping[str, Any]) -> int:
        if "value" in argument:
            return int(argument["value"])
        if argument.get("param", -1) in self.scalars:
            return self.scalars[argument["param"]]
        return self.locate(argument)

    def _dispatch(self, entry: Mapping[str, Any], start: int, count: int) -> None:
        import wgpu

        device, pipeline = self.program.device, self.program.pipelines[entry["kernel"]]
        grid = pad_grid(entry["grid"])
        words = [*grid[:3], start, count, self.program.arena // 4, 0, *grid[3:], *map(self._word, entry["args"])]
        data = np.array(words, np.uint32).tobytes()
        usage = wgpu.BufferUsage.UNIFORM | wgpu.BufferUsage.COPY_DST
        uniform = device.create_buffer_with_data(data=data + bytes(-len(data) % 16), usage=usage)
        bindings = [
            {"binding": 0, "resource": {"buffer": self.memory, "offset": 0, "size": self.memory.size}},
            {"binding": 1, "resource": {"buffer": uniform, "offset": 0, "size": uniform.size}},
        ]
        group = device.create_bind_group(layout=pipeline.get_bind_group_layout(0), entries=bindings)
        encoder = device.create_command_encoder()
        compute = encoder.begin_compute_pass()
        compute.set_pipeline(pipeline)
        compute.set_bind_group(0, group)
        groups = -(-count // self.program.plan["workgroup"])
        compute.dispatch_workgroups(min(groups, MAX_GROUPS), -(-groups // MAX_GROUPS), 1)
        compute.end()
        device.queue.submit([encoder.finish()])

    def holds(self, flag: int) -> bool:
        """Whether a flag is true."""
        found = self.program._read(self.memory, self.locate(self.program.plan["flags"][flag]), 1)
        return bool(found[0])

    def call(self, number: int) -> None:
        """Run an op on the host, on copies of its arguments."""
        call = self.program.plan["calls"][number]
        arrays = []
        for a in call["args"]:
            count = math.prod(a["shape"]) * as_dtype(a["dtype"]).numpy.itemsize
            arrays.append(view_as_array(self.program._read(self.memory, self.locate(a), count).copy(), a))
        run_host_call(call, arrays)
        for a, array in list(zip(call["args"], arrays, strict=True))[call["operands"] :]:
            self.program._write(self.memory, self.locate(a), array)

"""GPU programs: an artifact ready to run on the GPU, or emulated where there is none; kernel times by events."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tessera.codegen.artifact import Artifact
from tessera.codegen.host_plan import ArgumentBinder, PlanEngine, execute_plan, run_host_call
from tessera.codegen.ptx.runtime.driver_api import (
    CooperativeKernel,
    CudaGraph,
    count_resident_cluster_blocks,
    encode_tensor_map,
    tensor_map_format,
)
from tessera.codegen.ptx.runtime.emulated_program import TEXT_FILE, choose_hardware_grid, make_interpreter
from tessera.codegen.ptx.runtime.gpu import GPU, get_gpu
from tessera.codegen.ptx.runtime.launch_buffers import LaunchBuffers
from tessera.core.device import count_gpus
from tessera.core.errors import ArgumentError
from tessera.core.types import as_dtype

# An artifact ready to run: on the GPU where there is one, else by the PTX interpreter, and it says which.


EMULATOR_NAME = "the PTX interpreter (no GPU here)"
# struct's letters for scalars, as prepared launches take them.
SCALAR_FORMATS = {
    "f64": "d", "f32": "f", "tf32": "f", "int64": "q", "int32": "i", "int16": "h", "int8": "b", "uint64": "Q",
    "uint32": "I", "uint16": "H", "uint8": "B",
}  # fmt: skip
BIT_FORMATS = {"bool": "B", "f16": "H", "bf16": "H"}  # scalars that travel as their bits
POINTER_ALIGN = 16  # the bytes that one instruction moves at most
STATIC_SHARED_BYTES = 48 * 1024  # bytes of shared memory that a kernel has without asking


def describe_device() -> str:
    """What runs artifacts on this machine."""
    return get_gpu().name if count_gpus() else EMULATOR_NAME


def make_runtime(artifact: Artifact) -> EmulatedProgram | GpuProgram:
    """The artifact on this machine's GPU, or interpreted where there is none."""
    return GpuProgram(artifact, get_gpu()) if count_gpus() else EmulatedProgram(artifact)


class EmulatedProgram:
    """An artifact's text run by the interpreter."""

    def __init__(self, artifact: Artifact) -> None:
        self.where = EMULATOR_NAME
        self._run = make_interpreter(artifact)

    def run(self, arrays: Sequence[Any]) -> list[np.ndarray]:
        """The outputs; arrays that the program writes are written."""
        return self._run(arrays)


class GpuProgram:
    """An artifact loaded on a GPU: its functions, its workspace, its launch plan."""

    def __init__(self, artifact: Artifact, device: GPU) -> None:
        self.where = device.name
        self.device, plan = device, artifact.manifest["plan"]
        device.check_architecture(artifact.manifest["options"]["arch"])
        self.params = plan["params"]
        self._arguments = ArgumentBinder(plan)
        self._written = set(plan["written"])
        self._steps, self.flags = plan.get("steps", ()), plan.get("flags", ())
        self.calls = plan.get("calls", ())
        with device.active():
            self._text = artifact.text(TEXT_FILE)
            module = device.module(self._text)
            self._room = device.allocate(plan["workspace"])
            self.workspace = int(self._room)
            self.launches = [self._prepared(module, plan, each) for each in plan["launches"]]

    def _prepared(self, module: Any, plan: Mapping[str, Any], launch: Mapping[str, Any]) -> EntryLaunch | None:
        if 0 in launch["grid"]:
            return None
        entry = plan["entries"][launch["kernel"]]
        function = module.get_function(launch["kernel"])
        maps = entry.get("maps", ())
        extras = LaunchBuffers(entry, launch["grid"][: launch["rank"]])
        kinds = "".join(self._letter(a) for a in launch["args"]) + "P" * len(extras.rooms)
        function.prepare(tensor_map_format(len(maps)) + kinds)
        self.device.check_room(launch["kernel"], function, entry["threads"], entry["shared"])
        if entry["shared"] > STATIC_SHARED_BYTES:
            attribute = self.device.driver.function_attribute.MAX_DYNAMIC_SHARED_SIZE_BYTES
            function.set_attribute(attribute, entry["shared"])
        alone = "cluster" not in entry
        most = self.device.processors if alone else count_resident_cluster_blocks(self._text, launch["kernel"], entry)
        grid = choose_hardware_grid(launch, entry, most)
        if "meeting" in entry:
            function = self._meeting(launch["kernel"], entry, kinds, math.prod(grid))
        rooms = {kind: self.device.allocate(count) for kind, count in extras.rooms.items()}
        prepared = EntryLaunch(function, grid, launch, entry, extras, rooms)
        prepared.clear(self.device.driver)
        return prepared

    def _meeting(self, name: str, entry: Mapping[str, Any], kinds: str, blocks: int) -> CooperativeKernel:
        """A kernel whose programs all run at once."""
        found = CooperativeKernel(self.device, self._text, name, kinds, entry["shared"])
        found.check(blocks, entry["threads"], entry["shared"])
        return found

    def _letter(self, arg: Mapping[str, Any]) -> str:
        param = self.params[arg["param"]] if "param" in arg else None
        if param is None or param["role"] != "scalar":
            return "P"
        return SCALAR_FORMATS.get(param["dtype"]) or BIT_FORMATS[param["dtype"]]

    def launch(self, given: Sequence[Any], stream: Any = None) -> None:
        """Queue the program's kernels: `given` holds an address (or a number) for each parameter.

        The GPU must be active; what kernels print and assert is looked at by `run` alone. Nothing is waited for, unless
        a loop, branch or call of the host asks what a kernel found.
        """
        self._check(given)
        self._queue(given, stream)

    def bound(self, given: Sequence[Any], stream: Any = None) -> Callable[[], None]:
        """A launch with its arguments fixed; more than one kernel is recorded as a CUDA graph.

        Raises:
            ArgumentError: an address is no multiple of 16 bytes.
            ExecutionError: the driver refuses to record.
        """
        self._check(given)
        if not _is_recordable(self._steps):
            return lambda: self._queue(given, stream)
        if len(self.launches) == 1 and self.launches[0] and not self._steps:
            return self.launches[0].bound(_QueuedPlan(self, given, stream).argument, stream)
        graph = CudaGraph(self.device, lambda recording: self._queue(given, recording))
        return lambda: graph.launch(stream)

    def kernels(self, given: Sequence[Any]) -> Iterator[tuple[str, Callable[[], None]]]:
        """Each kernel of a program without loops or branches by its name, with what launches it alone."""
        argument = _QueuedPlan(self, given, None).argument
        for each in self.launches:
            if each:
                yield each.name, each.bound(argument, None)

    def _queue(self, given: Sequence[Any], stream: Any) -> None:
        engine = _QueuedPlan(self, given, stream)
        execute_plan(self._steps or [{"run": [0, len(self.launches)]}], engine)

    def _check(self, given: Sequence[Any]) -> None:
        for place, param in zip(given, self.params, strict=True):
            if param["role"] != "scalar" and place % POINTER_ALIGN:
                raise ArgumentError(f"the memory of {param['name']} begins at no multiple of {POINTER_ALIGN} bytes")

    def run(self, arrays: Sequence[Any]) -> list[np.ndarray]:
        """The outputs; arrays that the program writes are written. Arrays on the processor are copied to and fro.

        Raises:
            ShapeError, DTypeError, ArgumentError: the arrays are not what the program takes.
            ResourceError, ExecutionError: the GPU's memory is used up, or a kernel failed.
        """
        users, held = self._arguments.bind(arrays)
        drv = self.device.driver
        with self.device.active():
            places = [self._sent(i, a) for i, a in enumerate(held)]
            reporting = [each for each in self.launches if each is not None and each.rooms]
            for each in reporting:
                each.clear(drv)
            self.launch([p if isinstance(p, (int, float)) else int(p) for p in places])
            for each in reporting:
                each.check(drv)
            for i, (array, place) in enumerate(zip(held, places, strict=True)):
                if array.nbytes and (i in self._written or self.params[i]["role"] == "output"):
                    drv.memcpy_dtoh(array, int(place))
            drv.Context.synchronize()
        return self._arguments.finish(users, held)

    def _sent(self, i: int, array: np.ndarray) -> Any:
        """A parameter on the GPU: memory of its own with the array's content, or the number itself."""
        if self.params[i]["role"] == "scalar":
            return pack_scalar(array, self.params[i]["dtype"])
        place = self.device.allocate(array.nbytes)
        if array.nbytes:
            self.device.driver.memcpy_htod(int(place), np.ascontiguousarray(array).view(np.uint8).reshape(-1))
        return place


def pack_scalar(array: Any, dtype: str) -> int | float:
    """A scalar parameter as a prepared launch takes it."""
    value = np.asarray(array, as_dtype(dtype).numpy)
    if dtype in BIT_FORMATS:
        return int(value.view(f"u{value.dtype.itemsize}")[()])
    return value.item()


class EntryLaunch:
    """One kernel of the plan, with where its arguments come from; `rooms` are memory for its extras."""

    def __init__(
        self,
        function: Any,
        grid: Sequence[int],
        launch: Mapping[str, Any],
        entry: Mapping[str, Any],
        extras: LaunchBuffers,
        rooms: Mapping[str, Any],
    ) -> None:
        self.name = launch["kernel"]
        self.function, self.grid, self.block = function, grid, (entry["threads"], 1, 1)
        self.args, self.shared, self.maps = launch["args"], entry["shared"], entry.get("maps", ())
        self.entry, self.extras, self.rooms = entry, extras, rooms

    def clear(self, drv: Any) -> None:
        """Nothing has been said yet."""
        for kind, room in self.rooms.items():
            drv.memcpy_htod(int(room), self.extras.begin(kind))

    def check(self, drv: Any) -> None:
        """Print what was printed, and raise what went wrong."""
        found = {}
        for kind, room in self.rooms.items():
            begin = self.extras.begin(kind)
            drv.memcpy_dtoh(begin, int(room))
            found[kind] = np.empty(self.extras.used(kind, begin), np.uint8)
            drv.memcpy_dtoh(found[kind], int(room))
        self.extras.finish(found)

    def bound(self, argument: Callable[[Mapping[str, Any]], Any], stream: Any) -> Callable[[], None]:
        """The launch with its arguments fixed."""
        values = [argument(a) for a in self.args]
        values = [*(encode_tensor_map(m, values[m["param"]]) for m in self.maps), *values]
        values += [int(room) for room in self.rooms.values()]
        call, grid, block, shared = self.function.prepared_async_call, tuple(self.grid), self.block, self.shared
        return lambda: call(grid, block, stream, *values, shared_size=shared)


@dataclass
class _QueuedPlan(PlanEngine):
    """An engine that queues launches on a stream; `given` holds an address or a number for each parameter."""

    program: GpuProgram
    given: Sequence[Any]
    stream: Any

    def launch(self, first: int, last: int) -> None:
        """Queue launches in order."""
        for each in self.program.launches[first:last]:
            if each:
                each.bound(self.argument, self.stream)()

    def holds(self, flag: int) -> bool:
        """Whether a flag is set, once all that was queued is done."""
        drv, found = self.program.device.driver, np.zeros(1, np.uint8)
        if self.stream is not None:
            self.stream.synchronize()
        drv.memcpy_dtoh(found, self.argument(self.program.flags[flag]))
        return bool(found[0])

    def call(self, number: int) -> None:
        """Run an op on the host, once all that was queued is done."""
        drv, call = self.program.device.driver, self.program.calls[number]
        if self.stream is not None:
            self.stream.synchronize()
        arrays = [np.empty(arg["shape"], as_dtype(arg["dtype"]).numpy) for arg in call["args"]]
        places = [self.argument(arg) for arg in call["args"]]
        for array, place in zip(arrays[: call["operands"]], places, strict=False):
            if array.nbytes:
                drv.memcpy_dtoh(array.reshape(-1).view(np.uint8), place)
        run_host_call(call, arrays)
        for array, place in zip(arrays[call["operands"] :], places[call["operands"] :], strict=True):
            if array.nbytes:
                drv.memcpy_htod(place, array.reshape(-1).view(np.uint8))

    def argument(self, arg: Mapping[str, Any]) -> Any:
        """The address, or number, of an argument."""
        start = self.given[arg["param"]] if "param" in arg else self.program.workspace
        offset = self.find_offset(arg)
        return start + offset if offset else start


def _is_recordable(steps: Sequence[Mapping[str, Any]]) -> bool:
    """Whether steps are the same each time: launches, and loops of them."""
    return all("run" in step or ("loop" in step and _is_recordable(step["body"])) for step in steps)


# How long each kernel of a program takes on the GPU, by events around it.


def measure_kernel_times(
    program: GpuProgram, given: Sequence[Any], rounds: int = 5, each: int = 20
) -> list[tuple[str, float]]:
    """The kernels of a program without loops, in order, each with its milliseconds: the median of `rounds`.

    `given` holds an address (or a number) for each parameter. A kernel is queued `each` times between two events, so
    that its time does not hide in that of a launch; what it writes is as if the program had run.
    """
    drv = program.device.driver
    found = []
    with program.device.active():
        for name, run in program.kernels(given):
            times = []
            for _ in range(rounds):
                first, last = drv.Event(), drv.Event()
                first.record()
                for _ in range(each):
                    run()
                last.record()
                last.synchronize()
                times.append(last.time_since(first) / each)
            found.append((name, statistics.median(times)))
    return found

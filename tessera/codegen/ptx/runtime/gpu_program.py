"""GPU programs: an artifact loaded on a GPU, its kernels and launches (single, or recorded as a CUDA graph), and kernel
times.

A launch is one call of `cuLaunchKernelEx` with memory that was laid out before, so that it costs little.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tessera.codegen.artifact import Artifact, BoundPlans
from tessera.codegen.plan_execution import (
    ArgumentBinder,
    PlanSteps,
    execute_plan,
    find_overlapped_launches,
    find_steps,
    list_steps,
)
from tessera.codegen.ptx.runtime.carveout_trial import CarveoutTrial, TrialLaunch, is_worth_a_trial
from tessera.codegen.ptx.runtime.device_memory import get_device_memory, synchronize_stream
from tessera.codegen.ptx.runtime.driver_api import (
    ARGUMENT_TYPES,
    GPU,
    MAP_ALIGN,
    MAP_BYTES,
    MAX_DYNAMIC_SHARED,
    CudaGraph,
    LaunchAttribute,
    LaunchConfig,
    MappedMemory,
    call_driver,
    check_status,
    count_resident_cluster_blocks,
    encode_tensor_map,
    find_driver_call,
    get_gpu,
)
from tessera.codegen.ptx.runtime.emulated_program import (
    EMULATOR_NAME,
    TEXT_FILE,
    EmulatedProgram,
    LaunchBuffers,
    choose_hardware_grid,
)
from tessera.codegen.ptx.runtime.event_timing import (
    MOST,
    DeviceClock,
    EventClock,
    measure_alone,
    measure_repeated,
)
from tessera.codegen.ptx.runtime.launch_watch import LaunchWatch, examine
from tessera.codegen.ptx.runtime.queued_plan import QueuedPlan, open_plan_channels
from tessera.codegen.ptx.runtime.resident_program import BIT_FORMATS, ResidentProgram, pack_scalar
from tessera.core.device import count_gpus
from tessera.core.device_array import COMMUNICATION_BLOCKS, LEGACY_STREAM
from tessera.core.errors import ArgumentError, ResourceError
from tessera.core.hooks import prepare_recorded
from tessera.core.types import as_dtype
from tessera.ir.builder import CURRENT_RANK_NUMBER
from tessera.ops.tensor.collectives import EXCHANGES

if TYPE_CHECKING:
    from tessera.codegen.ptx.runtime.driver_api import GPU, LoadedModule


COOPERATIVE, PROGRAMMATIC = 2, 6  # CU_LAUNCH_ATTRIBUTE_COOPERATIVE, _PROGRAMMATIC_STREAM_SERIALIZATION
DEPENDENT_WAIT = "griddepcontrol.wait"  # what a kernel does before its first access to memory of kernels before
STATIC_SHARED, THREAD_LOCAL_BYTES, THREAD_REGISTERS, PREFERRED_CARVEOUT = 1, 3, 4, 9  # of CUfunction_attribute
MOST_DIRECT = 4  # kernels of a program that are launched one by one
MOST_NODES = 4096  # kernels of a CUDA graph that repeats a program to measure it


class DriverKernel:
    """A kernel of a loaded module; `letters` are its argument formats, after `maps` TMA descriptors.

    The blocks of a cooperative kernel synchronise at a grid barrier. Those of a `dependent` kernel wait for the kernel
    before, and may be placed while it ends (programmatic dependent launch).
    """

    def __init__(
        self, module: LoadedModule, name: str, letters: str, maps: int = 0, cooperative: bool = False,
        dependent: bool = False,
    ) -> None:  # fmt: skip
        self.name, self.maps, self.cooperative = name, maps, cooperative
        self.launch_attribute = COOPERATIVE if cooperative else PROGRAMMATIC if dependent else 0
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

    def prefer_carveout(self, percent: int) -> None:
        """Prefer so much of the largest carve-out for shared memory in launches from now on; -1: as the driver does."""
        call_driver("cuFuncSetAttribute", self.handle, PREFERRED_CARVEOUT, ctypes.c_int(percent))

    def count_resident_blocks(self, threads: int, shared: int) -> int:
        """The blocks that a multiprocessor holds at once, of so many threads and bytes of dynamic shared memory."""
        found = ctypes.c_int()
        call_driver(
            "cuOccupancyMaxActiveBlocksPerMultiprocessor", ctypes.byref(found), self.handle, ctypes.c_int(threads),
            ctypes.c_size_t(shared),
        )  # fmt: skip
        return found.value

    def check_residency(self, device: GPU, blocks: int, threads: int, shared: int) -> None:
        """Check that all blocks of a grid are resident at once, as a cooperative launch requires.

        Raises:
            ResourceError: they are not; it names the number that is.
        """
        most = self.count_resident_blocks(threads, shared) * device.processors
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
        attribute = LaunchAttribute(kernel.launch_attribute, 0, (ctypes.c_uint * 16)(1))
        self._config = LaunchConfig(
            (ctypes.c_uint * 3)(*grid), (ctypes.c_uint * 3)(threads, 1, 1), shared, stream or None,
            ctypes.pointer(attribute), int(kernel.launch_attribute > 0),
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


# Programs.


# Format letters of the struct module for scalars of prepared launches; pointers are "P".
SCALAR_FORMATS = {
    "f64": "d", "f32": "f", "tf32": "f", "int64": "q", "int32": "i", "int16": "h", "int8": "b", "uint64": "Q",
    "uint32": "I", "uint16": "H", "uint8": "B",
}  # fmt: skip
POINTER_ALIGN = 16  # bytes of the widest access
STATIC_SHARED_BYTES = 48 * 1024  # more shared memory needs an opt-in
# Only a failure writes the reports and the values beside them. The reports are memory of the host: to see that nothing
# failed costs no copy.
MAPPED_BUFFER, VALUE_BUFFER = "reports", "values"


def describe_device() -> str:
    """The name of what runs artifacts on this machine."""
    return get_gpu().name if count_gpus() else EMULATOR_NAME


def make_runtime(artifact: Artifact) -> EmulatedProgram | GpuProgram | SizedGpuProgram:
    """The artifact on this machine's GPU, or in the emulator where there is none."""
    if not count_gpus():
        return EmulatedProgram(artifact)
    kind = SizedGpuProgram if "sizes" in artifact.manifest["plan"] else GpuProgram
    return kind(artifact, get_gpu())


class SizedGpuProgram:
    """An artifact of symbolic sizes on a GPU: a program, with its workspace and CUDA graphs, for the latest sizes."""

    def __init__(self, artifact: Artifact, device: GPU) -> None:
        self.where = device.name
        manifest = artifact.manifest
        self._measured: GpuProgram | None = None
        self._programs = BoundPlans(
            manifest["plan"],
            lambda plan: GpuProgram(dataclasses.replace(artifact, manifest={**manifest, "plan": plan}), device),
        )

    def run(self, arrays: Sequence[Any]) -> list[np.ndarray]:
        """As `GpuProgram.run`, for the sizes of these arrays."""
        return self._programs.find(arrays).run(arrays)

    def call(self, arrays: Sequence[Any], constants: range = range(0)) -> list[Any]:
        """As `ResidentProgram.call`, for the sizes of these arrays."""
        return self._programs.find(arrays).call(arrays, constants)

    def find_resident(self, arrays: Sequence[Any]) -> ResidentProgram:
        """The program for the sizes of these arrays or tensors."""
        return self._programs.find(arrays).resident

    def measure(self, arrays: Sequence[Any]) -> float:
        """As `GpuProgram.measure`, for the sizes of these arrays."""
        program = self._programs.find(arrays)
        self._measured = program
        return program.measure(arrays)

    def describe_kernels(self) -> list[dict[str, Any]]:
        """As `GpuProgram.describe_kernels`, for the sizes that were measured last; nothing before."""
        return self._measured.describe_kernels() if self._measured else []


class GpuProgram:
    """An artifact loaded on a GPU: its functions, its workspace, its launch plan."""

    def __init__(self, artifact: Artifact, device: GPU) -> None:
        self.where = device.name
        self.device, plan = device, artifact.manifest["plan"]
        device.check_architecture(artifact.manifest["options"]["arch"])
        self.params = plan["params"]
        self.arguments = ArgumentBinder(plan)
        self._written = set(plan["written"])
        self._steps = find_steps(plan)
        self.flags = plan.get("flags", ())
        self.calls = plan.get("calls", ())
        with device.active():
            self._text = artifact.text(TEXT_FILE)
            module = device.module(self._text)
            self._workspace_bytes = plan["workspace"]
            self._workspaces: dict[tuple[int, int | None], Any] = {}
            self._channels: dict[int, Mapping[int, Any]] = {}
            # Plans for other sizes are made when such arrays come, which may be at another time in each rank.
            self._has_channels = "sizes" not in plan
            beside = find_overlapped_launches(self._steps)
            self.launches: list[EntryLaunch | None] = []
            for number, each in enumerate(plan["launches"]):
                occupied = COMMUNICATION_BLOCKS if number in beside else 0
                self.launches.append(self._prepare_launch(module, plan, each, occupied))
        self._watch = LaunchWatch(self._find_reporting(), device.driver)
        self._carveout = CarveoutTrial()
        self.resident = ResidentProgram(plan, get_device_memory(), self._bind_resident)
        self.call = self.resident.call

    def _prepare_launch(
        self, module: Any, plan: Mapping[str, Any], launch: Mapping[str, Any], occupied: int
    ) -> EntryLaunch | None:
        """A launch; so many multiprocessors are occupied by what runs beside it."""
        if 0 in launch["grid"]:
            return None
        name, entry = launch["kernel"], plan["entries"][launch["kernel"]]
        launch_buffers = LaunchBuffers(entry, launch["grid"][: launch["rank"]])
        letters = "".join(self._format_letter(a) for a in launch["args"]) + "P" * len(launch_buffers.sizes)
        # The first kernel begins when all before it is done: the inputs that kernels load early are in memory then, and
        # blocks that wait take no place from the kernels of the program before.
        waits = DEPENDENT_WAIT in self._text and any(self.launches)
        kernel = DriverKernel(module, name, letters, len(entry.get("maps", ())), "meeting" in entry, waits)
        self.device.check_resources(name, kernel, entry["threads"], entry["shared"])
        if entry["shared"] > STATIC_SHARED_BYTES:
            kernel.allow_shared(entry["shared"])
        clustered = "cluster" in entry
        blocks = count_resident_cluster_blocks(self._text, name, entry) if clustered else self.device.processors
        grid = choose_hardware_grid(launch, entry, max(blocks - occupied, 1))
        if kernel.cooperative:
            kernel.check_residency(self.device, math.prod(grid), entry["threads"], entry["shared"])
        buffers = {
            kind: self.device.allocate_mapped(size) if kind == MAPPED_BUFFER else self.device.allocate(size)
            for kind, size in launch_buffers.sizes.items()
        }
        prepared = EntryLaunch(kernel, grid, launch, entry, launch_buffers, buffers)
        prepared.reset_buffers(self.device.driver)
        return prepared

    def find_workspace(self, stream: int) -> int:
        """The address of the workspace of calls on a stream: calls on different streams run at the same time.

        So do those of the ranks of one process, which wait for each other within a call.
        """
        key = stream, CURRENT_RANK_NUMBER.get() if self.calls else None
        if key not in self._workspaces:
            self._workspaces[key] = self.device.allocate(self._workspace_bytes)
        return int(self._workspaces[key])

    def find_channels(self, workspace: int) -> Mapping[int, Any]:
        """What permutes tensors beside the kernels without NCCL, by the number of the call, for a workspace.

        The ranks agree on it when they run the program first, and must not record a graph meanwhile.
        """
        if workspace not in self._channels:
            self._channels[workspace] = open_plan_channels(self.calls, workspace) if self._has_channels else {}
        return self._channels[workspace]

    def _format_letter(self, arg: Mapping[str, Any]) -> str:
        if "value" in arg:
            return SCALAR_FORMATS["int64"]
        param = self.params[arg["param"]] if "param" in arg else None
        if param is None or param["role"] != "scalar":
            return "P"
        return SCALAR_FORMATS.get(param["dtype"]) or BIT_FORMATS[param["dtype"]]

    def launch(self, given: Sequence[Any], stream: Any = None) -> None:
        """Queue the program's kernels: `given` holds an address (or a number) for each parameter.

        The GPU's context must be active. Prints, assertions and checked indices are examined by `run` and `call` only.
        The call does not wait, unless a loop, branch or host call of the plan depends on a kernel's result.
        """
        self._check_alignment(given)
        self._queue(given, _handle_of(stream))

    def bind(self, given: Sequence[Any], stream: Any = None, times: int = 1) -> Callable[[], None]:
        """A launch with fixed arguments, recorded as a CUDA graph: to launch one costs less than to launch a kernel.

        The graph holds the program's kernels so many `times`.

        Raises:
            ArgumentError: an address is not a multiple of 16 bytes.
            ExecutionError: the driver refuses to record.
        """
        self._check_alignment(given)
        handle = _handle_of(stream)

        def queue(steps: PlanSteps, handle: int, workspace: int | None = None) -> None:
            for _ in range(times):
                self._queue(given, handle, workspace, steps)

        if not self._is_recordable():
            return lambda: queue(self._steps, handle)
        workspace, memory = self.find_workspace(handle), get_device_memory()
        steps = [step for step in self._steps if "agree" not in step]
        if len(steps) < len(self._steps):
            execute_plan(self._steps[:1], QueuedPlan(self, given, handle, workspace))
        self.find_channels(workspace)

        def record(steps: PlanSteps) -> Callable[[], None]:
            with memory.record() as kept:
                launch = CudaGraph(self.device, lambda recording: queue(steps, recording.handle, workspace)).bind(
                    handle
                )
            launch.kept = kept  # type: ignore[attr-defined]  # as long as the graph
            if self.calls:
                memory.exchanging_graphs.add(launch.graph)  # type: ignore[attr-defined]
            return launch

        graphs = [record(part) for part in (_split_steps(steps) if times == 1 else [steps])]
        return graphs[0] if len(graphs) == 1 else functools.partial(_launch_all, graphs)

    def _is_recordable(self) -> bool:
        """Whether a CUDA graph can record the program: no step depends on a result, and calls are collectives."""
        if not _is_recordable(self._steps) or any(c["op"] not in EXCHANGES for c in self.calls):
            return False
        beside = {n for step in list_steps(self._steps) if "start" in step for n in range(*step["start"])}
        calls = [
            (c["op"].removeprefix("ts."), as_dtype(c["args"][0]["dtype"]).numpy, c["attrs"], number in beside)
            for number, c in enumerate(self.calls)
        ]
        return not calls or prepare_recorded(calls)

    def _bind_launches(self, given: Sequence[Any], stream: int) -> list[BoundLaunch]:
        """The launches of a program without loops or branches, with fixed arguments."""
        argument = QueuedPlan(self, given, stream, self.find_workspace(stream)).argument
        return [each.bind(argument, stream) for each in self.launches if each]

    def bind_kernels(self, given: Sequence[Any]) -> Iterator[tuple[str, Callable[[], None]]]:
        """The name, and a launch with fixed arguments, of each kernel of a program without loops or branches."""
        launches = self._bind_launches(given, LEGACY_STREAM)
        yield from zip((each.name for each in self.launches if each), launches, strict=True)

    def _queue(self, given: Sequence[Any], stream: int, workspace: int | None = None, steps: PlanSteps = ()) -> None:
        workspace = self.find_workspace(stream) if workspace is None else workspace
        execute_plan(steps or self._steps, QueuedPlan(self, given, stream, workspace))

    def _bind_resident(self, given: Sequence[Any], stream: int, repeated: bool) -> Callable[[], None]:
        """What runs the program on arrays of the device; arguments that come again are recorded as a CUDA graph.

        Programs with prints or grid barriers wait for their kernels, and examine them; failed assertions and indices
        are raised later (`LaunchWatch`).
        """
        given = tuple(given)
        reporting = self._find_reporting()
        if not all(each.is_mapped for each in reporting):
            return lambda: self._run_examined(given, stream, reporting)
        run = self._bind_repeated(given, stream) if repeated else lambda: self._queue(given, stream)
        return functools.partial(self._watch.run, run, stream) if reporting else run

    def _bind_repeated(self, given: Sequence[Any], stream: int) -> Callable[[], None]:
        """As `bind`, with the carve-out that the program's first calls show to be fastest; few kernels are no graph.

        To launch a graph costs more than to launch a kernel, and its first kernel may begin 5 to 30 us late.
        """
        launches = [each for each in self.launches if each is not None]
        if len(launches) <= MOST_DIRECT and not self.calls and all(step.keys() == {"run"} for step in self._steps):
            few = self._bind_launches(given, stream)
            return few[0] if len(few) == 1 else functools.partial(_launch_all, few)
        if not (self._is_recordable() and is_worth_a_trial([each.shared for each in launches])):
            return self.bind(given, stream)
        kernels = [each.kernel for each in launches]
        return TrialLaunch(self._carveout, kernels, lambda: self.bind(given, stream), stream)

    def _run_examined(self, given: Sequence[Any], stream: int, reporting: Sequence[EntryLaunch]) -> None:
        drv = self.device.driver
        with self.device.active():
            for each in reporting:
                each.reset_buffers(drv)
            self._queue(given, stream)
            synchronize_stream(stream)
            examine(reporting, drv)

    def find_resident(self, arrays: Sequence[Any]) -> ResidentProgram:
        """The program for arrays of the GPU."""
        return self.resident

    def _check_alignment(self, given: Sequence[Any]) -> None:
        for address, param in zip(given, self.params, strict=True):
            if param["role"] != "scalar" and address % POINTER_ALIGN:
                raise ArgumentError(
                    f"the memory of {param['name']} is misaligned", expected=f"a multiple of {POINTER_ALIGN} bytes",
                    received=f"address {address:#x}", suggestion="copy the array",
                )  # fmt: skip

    def run(self, arrays: Sequence[Any]) -> list[np.ndarray]:
        """The outputs; arrays that the program writes are written. Host arrays are copied to the GPU and back.

        Raises:
            ShapeError, DTypeError, ArgumentError: the arrays do not match the parameters.
            ResourceError, ExecutionError: the GPU's memory is exhausted, or a kernel failed.
        """
        users, bound = self.arguments.bind(arrays)
        drv = self.device.driver
        with self.device.active():
            given = [self._send(i, a) for i, a in enumerate(bound)]
            reporting = self._find_reporting()
            self._watch.wait()
            self._watch.raise_seen()
            for each in reporting:
                each.reset_buffers(drv)
            self.launch([x if isinstance(x, (int, float)) else int(x) for x in given])
            if reporting:
                drv.Context.synchronize()  # the host sees mapped buffers at any time
            examine(reporting, drv)
            for i, (array, sent) in enumerate(zip(bound, given, strict=True)):
                if array.nbytes and (i in self._written or self.params[i]["role"] == "output"):
                    drv.memcpy_dtoh(array, int(sent))
            drv.Context.synchronize()
        return self.arguments.finish(users, bound)

    def measure(self, arrays: Sequence[Any], clock: DeviceClock | None = None) -> float:
        """The seconds of one run on the GPU, by events: without copies, and without the call where a graph holds it.

        The program runs many times on copies of the arrays.

        Raises:
            ShapeError, DTypeError, ArgumentError: the arrays do not match the parameters.
            ResourceError, ExecutionError: the GPU's memory is exhausted, or a kernel failed.
        """
        _, bound = self.arguments.bind(arrays)
        with self.device.active():
            held = [self._send(i, a) for i, a in enumerate(bound)]
            given = [x if isinstance(x, (int, float)) else int(x) for x in held]
            clock = clock or EventClock(self.device)
            reporting = self._find_reporting()
            if not all(each.is_mapped for each in reporting) or not self._is_recordable():
                return self._measure_alone(bound, given, clock)
            if reporting:
                self._watch.run(lambda: self.launch(given), LEGACY_STREAM)
                self._watch.wait()
                self._watch.raise_seen()
            most = MOST_NODES // max(len(self.launches), 1)
            return measure_repeated(lambda times: self.bind(given, times=times), clock, min(MOST, most))

    def _measure_alone(self, bound: Sequence[np.ndarray], given: Sequence[Any], clock: DeviceClock) -> float:
        """The seconds of a run that depends on what its memory holds: a loop that ends by it, a kernel that reports."""
        drv, reporting = self.device.driver, self._find_reporting()

        def prepare() -> None:
            for each in reporting:
                each.reset_buffers(drv)
            for i in self._written:
                if bound[i].nbytes:
                    drv.memcpy_htod(given[i], np.ascontiguousarray(bound[i]).view(np.uint8).reshape(-1))

        def check() -> None:
            for each in reporting:
                each.check_buffers(drv)

        return measure_alone(prepare, lambda: self.launch(given), check, clock)

    def _find_reporting(self) -> list[EntryLaunch]:
        """The launches whose buffers are examined after a run: prints, assertions, checked indices, grid barriers."""
        return [each for each in self.launches if each is not None and each.buffers]

    def describe_kernels(self) -> list[dict[str, Any]]:
        """What each launch takes of the GPU, as its driver tells: threads, registers, memory, resident blocks."""
        with self.device.active():
            return [each.describe(self.device) for each in self.launches if each is not None]

    def _send(self, i: int, array: np.ndarray) -> Any:
        """A new allocation with the array's content, or the number of a scalar parameter."""
        if self.params[i]["role"] == "scalar":
            return pack_scalar(array, self.params[i]["dtype"])
        allocation = self.device.allocate(array.nbytes)
        if array.nbytes:
            self.device.driver.memcpy_htod(int(allocation), np.ascontiguousarray(array).view(np.uint8).reshape(-1))
        return allocation


class EntryLaunch:
    """One launch of the plan: the function, where its arguments come from, and the device memory of its buffers."""

    def __init__(
        self,
        kernel: DriverKernel,
        grid: Sequence[int],
        launch: Mapping[str, Any],
        entry: Mapping[str, Any],
        launch_buffers: LaunchBuffers,
        buffers: Mapping[str, Any],
    ) -> None:
        self.name = launch["kernel"]
        self.kernel, self.grid, self.threads = kernel, tuple(grid), entry["threads"]
        self.args, self.shared, self.maps = launch["args"], entry["shared"], entry.get("maps", ())
        self.entry, self.launch_buffers, self.buffers = entry, launch_buffers, buffers
        reports = buffers.get(MAPPED_BUFFER)
        self._reports = reports.array if isinstance(reports, MappedMemory) else None
        self._no_failure = b"" if self._reports is None else launch_buffers.initial(MAPPED_BUFFER).tobytes()
        # Whether only failures are to be examined, which the host sees.
        self.is_mapped = self._reports is not None and set(buffers) <= {MAPPED_BUFFER, VALUE_BUFFER}

    def has_failed(self) -> bool:
        """Whether a buffer that the host sees has changed: an assertion failed, or an index is out of bounds."""
        return self._reports is not None and self._reports.tobytes() != self._no_failure

    def reset_buffers(self, drv: Any) -> None:
        """Initialise the launch buffers."""
        for kind, buffer in self.buffers.items():
            if isinstance(buffer, MappedMemory):
                buffer.array[...] = self.launch_buffers.initial(kind)
            else:
                drv.memcpy_htod(int(buffer), self.launch_buffers.initial(kind))

    def check_buffers(self, drv: Any) -> None:
        """Examine the launch buffers: show the prints, raise the first error."""
        found = {}
        for kind, buffer in self.buffers.items():
            head = self.launch_buffers.initial(kind)
            if isinstance(buffer, MappedMemory):
                head[...] = buffer.array[: len(head)]
                found[kind] = buffer.array[: self.launch_buffers.used(kind, head)].copy()
                continue
            drv.memcpy_dtoh(head, int(buffer))
            found[kind] = np.empty(self.launch_buffers.used(kind, head), np.uint8)
            drv.memcpy_dtoh(found[kind], int(buffer))
        self.launch_buffers.check(found)

    def describe(self, device: GPU) -> dict[str, Any]:
        """What the launch takes of a GPU, as its driver tells; `local` bytes a thread are spilled registers."""
        kernel = self.kernel
        return {
            "kernel": self.name, "blocks": math.prod(self.grid), "threads": self.threads,
            "registers": kernel.get_attribute(THREAD_REGISTERS), "local": kernel.get_attribute(THREAD_LOCAL_BYTES),
            "shared": kernel.get_attribute(STATIC_SHARED) + self.shared,
            "resident": kernel.count_resident_blocks(self.threads, self.shared), "processors": device.processors,
        }  # fmt: skip

    def bind(self, argument: Callable[[Mapping[str, Any]], Any], stream: int) -> BoundLaunch:
        """The launch with fixed arguments on a stream."""
        values = [argument(a) for a in self.args]
        values = [*(encode_tensor_map(m, values[m["param"]]) for m in self.maps), *values]
        values += [int(buffer) for buffer in self.buffers.values()]
        return BoundLaunch(self.kernel, self.grid, self.threads, self.shared, values, stream)


def _handle_of(stream: Any) -> int:
    """The handle of a stream, or the handle itself; None is the default stream."""
    return LEGACY_STREAM if stream is None else int(getattr(stream, "handle", stream))


def _launch_all(launches: Sequence[Callable[[], None]]) -> None:
    for launch in launches:
        launch()


# A CUDA graph starts once the driver has queued all of it. The first launches of a long program are a graph of their
# own: the GPU runs them meanwhile.
HEAD_LAUNCHES, MIN_SPLIT_LAUNCHES = 24, 160


def _split_steps(steps: PlanSteps) -> list[PlanSteps]:
    """The steps of a program as those of one graph, or of two where many launches come first."""
    begin, end = steps[0].get("run", (0, 0))
    if end - begin < MIN_SPLIT_LAUNCHES:
        return [steps]
    cut = begin + HEAD_LAUNCHES
    return [[{"run": [begin, cut]}], [{"run": [cut, end]}, *steps[1:]]]


def _is_recordable(steps: PlanSteps) -> bool:
    """Whether steps do not depend on results: launches, calls, and loops of them."""
    return not any("while" in step or "if" in step for step in list_steps(steps))

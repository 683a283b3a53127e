"""Emulated programs: launch buffers, and the PTX emulator as the device that runs an artifact's text."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tessera.codegen.artifact import Artifact, BoundPlans
from tessera.codegen.diagnostics import (
    ASSERT_BUFFER_BYTES,
    CAPACITY_AT,
    END_AT,
    HEADER_BYTES,
    NO_FAILURE,
    WANTED_AT,
    WORD_BYTES,
    count_print_bytes,
    decode_first_failure,
    format_tile_name,
    read_word,
    show_print_records,
)
from tessera.codegen.plan_execution import (
    ArgumentBinder,
    ArrayPlanEngine,
    execute_plan,
    find_steps,
    view_as_array,
    view_memory,
)
from tessera.codegen.ptx.runtime.device_memory import get_device_memory
from tessera.codegen.ptx.runtime.resident_program import BIT_FORMATS, ResidentProgram
from tessera.codegen.ptx.table.blocks.program_grid import DEADLOCK_AT, FIRST_EXIT_AT, GRID_BARRIER_BYTES, SITE_BIT
from tessera.codegen.ptx.text.builder import HIDDEN_PARAMETERS
from tessera.core.errors import BarrierError, Location, ResourceError
from tessera.core.progress import operation, report_progress
from tessera.core.types import as_dtype
from tessera.interp.target.ptx import PtxModule
from tessera.interp.target.ptx.isa.tensor_map import TensorMap

# Launch buffers: device memory behind an entry's hidden parameters, initialised before and examined after a launch.
#
# Prints are shown in the order of programs, the first failed assertion is raised, and a grid barrier that some programs
# never reached is an error.


EntryManifest = Mapping[str, Any]
MIN_PRINT_BYTES, MAX_PRINT_BYTES = 1 << 20, 1 << 28
ASSUMED_ITERATIONS = 64  # of a loop that prints
NO_PROGRAM = np.uint64(2**64 - 1)
COUNTER_BYTES = NO_PROGRAM.nbytes


def assertion_buffer_bytes(entry: EntryManifest, programs: int) -> int:
    """The size of an entry's assertion buffer: one key for each assertion."""
    return NO_FAILURE.nbytes * len(entry["reports"])


def initial_assertions(entry: EntryManifest, size: int) -> np.ndarray:
    """An assertion buffer without failures."""
    return np.full(size // NO_FAILURE.nbytes, NO_FAILURE, np.uint64).view(np.uint8)


def whole_buffer_bytes(head: np.ndarray, size: int) -> int:
    """The size of a buffer that is always read whole."""
    return size


def value_buffer_bytes(entry: EntryManifest, programs: int) -> int:
    """The size of the buffer for the values beside failed conditions."""
    return WORD_BYTES + ASSERT_BUFFER_BYTES


def initial_values(entry: EntryManifest, size: int) -> np.ndarray:
    """The head of a value buffer without records."""
    return np.zeros(WORD_BYTES, np.uint8)


def value_bytes_used(head: np.ndarray, size: int) -> int:
    """The bytes of a value buffer that hold records."""
    return min(WORD_BYTES + int(head.view(np.uint64)[0]), size)


def check_assertions(entry: EntryManifest, grid: Sequence[int], buffers: Mapping[str, np.ndarray]) -> None:
    """Raise the first failed assertion of a launch, or its first index out of bounds.

    Raises:
        OutOfBoundsError: an index is outside its axis.
        ExecutionError: an assertion failed; it names the program, the tile, the element and the values there.
    """
    error = decode_first_failure(entry["reports"], grid, buffers["reports"].view(np.uint64), buffers.get("values"))
    if error is not None:
        raise error


def print_buffer_bytes(entry: EntryManifest, programs: int) -> int:
    """The size of an entry's print buffer: prints in loops are assumed to run ASSUMED_ITERATIONS times."""
    tiles = programs * max(site["group"] for site in entry["prints"])
    wanted = sum(site["bytes"] * ASSUMED_ITERATIONS ** site["path"].count(None) for site in entry["prints"])
    return HEADER_BYTES + min(max(tiles * wanted, MIN_PRINT_BYTES), MAX_PRINT_BYTES)


def initial_prints(entry: EntryManifest, size: int) -> np.ndarray:
    """The head of a print buffer without records."""
    head = np.zeros(HEADER_BYTES, np.uint8)
    for offset, number in ((WANTED_AT, HEADER_BYTES), (CAPACITY_AT, size), (END_AT, size)):
        head[offset : offset + WORD_BYTES].view(np.uint64)[0] = number
    return head


def print_bytes_used(head: np.ndarray, size: int) -> int:
    """The bytes of a print buffer that hold records."""
    return count_print_bytes(head)


def show_prints(entry: EntryManifest, grid: Sequence[int], buffers: Mapping[str, np.ndarray]) -> None:
    """Print the records of a launch.

    Raises:
        ResourceError: the buffer was too small; the records that it holds have been printed.
    """
    found = buffers["prints"]
    show_print_records(entry["prints"], grid, found)
    wanted, capacity = read_word(found, WANTED_AT), read_word(found, CAPACITY_AT)
    if wanted > capacity:
        raise ResourceError(
            "the output of tile.print exceeds the launch's print buffer",
            expected=f"at most {capacity:,} bytes",
            received=f"{wanted:,} bytes",
            suggestion="print in fewer programs, or less often in loops",
        )


def barrier_buffer_bytes(entry: EntryManifest, programs: int) -> int:
    """The size of the grid barrier's state."""
    return GRID_BARRIER_BYTES


def initial_barrier_state(entry: EntryManifest, size: int) -> np.ndarray:
    """The grid barrier's state before a launch: no arrivals, no exits, no deadlock."""
    words = np.zeros(size // COUNTER_BYTES, np.uint64)
    words[DEADLOCK_AT // COUNTER_BYTES] = NO_PROGRAM
    return words.view(np.uint8)


def check_grid_barrier(entry: EntryManifest, grid: Sequence[int], buffers: Mapping[str, np.ndarray]) -> None:
    """Raise the deadlock that a launch recorded, if any.

    Raises:
        BarrierError: a program waited at a grid barrier that another never reached; it names both.
    """
    words = buffers["meeting"].view(np.uint64)
    if words[DEADLOCK_AT // COUNTER_BYTES] == NO_PROGRAM:
        return
    site, arrived = divmod(int(words[DEADLOCK_AT // COUNTER_BYTES]), 1 << SITE_BIT)
    missing = int(words[FIRST_EXIT_AT // COUNTER_BYTES]) - 1
    raise BarrierError(
        f"a grid barrier is reached by {format_tile_name(grid, 1, arrived, 0)} "
        f"and not by {format_tile_name(grid, 1, missing, 0)}",
        location=Location(*entry["meeting"][site]["place"]),
        expected="all programs of the launch, with all their tiles, at the same barrier",
        suggestion="move it out of the `if` or loop whose condition differs between programs",
    )


@dataclass(frozen=True)
class BufferKind:
    """One kind of launch buffer."""

    size: Callable[[EntryManifest, int], int]  # from the entry and the number of programs
    initial: Callable[[EntryManifest, int], np.ndarray]  # the head's content, from the entry and the size
    used: Callable[[np.ndarray, int], int]  # the bytes to examine, from the head after a launch and the size
    check: Callable[[EntryManifest, Sequence[int], Mapping[str, np.ndarray]], None] | None


# In the order of examination: first all prints, then the first failure.
BUFFER_KINDS = {
    "prints": BufferKind(print_buffer_bytes, initial_prints, print_bytes_used, show_prints),
    "reports": BufferKind(assertion_buffer_bytes, initial_assertions, whole_buffer_bytes, check_assertions),
    "values": BufferKind(value_buffer_bytes, initial_values, value_bytes_used, None),
    "meeting": BufferKind(barrier_buffer_bytes, initial_barrier_state, whole_buffer_bytes, check_grid_barrier),
}


class LaunchBuffers:
    """The buffers of one launch of an entry over a grid of programs; `sizes` are in the order of the parameters."""

    def __init__(self, entry: EntryManifest, grid: Sequence[int]) -> None:
        self._entry, self._grid = entry, tuple(grid)
        programs = math.prod(self._grid)
        self.sizes = {kind: BUFFER_KINDS[kind].size(entry, programs) for kind in HIDDEN_PARAMETERS if kind in entry}

    def initial(self, kind: str) -> np.ndarray:
        """The content of a buffer's head before the launch."""
        return BUFFER_KINDS[kind].initial(self._entry, self.sizes[kind])

    def used(self, kind: str, head: np.ndarray) -> int:
        """The bytes of a buffer to examine, by its head after the launch."""
        return BUFFER_KINDS[kind].used(head, self.sizes[kind])

    def allocate(self) -> dict[str, np.ndarray]:
        """New initialised buffers on the host."""
        found = {}
        for kind, size in self.sizes.items():
            head = self.initial(kind)
            found[kind] = np.zeros(size, np.uint8)
            found[kind][: len(head)] = head
        return found

    def check(self, buffers: Mapping[str, np.ndarray]) -> None:
        """Examine the buffers after a launch: show the prints, raise the first error.

        Raises:
            ExecutionError: an assertion failed.
            OutOfBoundsError: an index is outside its axis.
            ResourceError: the prints exceed their buffer.
            BarrierError: some programs never reached a grid barrier.
        """
        for kind, each in BUFFER_KINDS.items():
            if kind in buffers and each.check is not None:
                each.check(self._entry, self._grid, buffers)


# Emulated programs: the PTX emulator runs an artifact's text on any machine.


TEXT_FILE = "kernels.ptx"
EMULATOR_NAME = "the PTX emulator (no GPU here)"
SWIZZLE_BYTES = 128
EMULATED_PROCESSORS = 3  # multiprocessors of the emulated GPU: so few that persistent kernels loop


class EmulatedProgram:
    """An artifact whose text the emulator runs."""

    def __init__(self, artifact: Artifact) -> None:
        self.where = EMULATOR_NAME
        plan, module = artifact.manifest["plan"], _load_module(artifact)
        self._run = _make_host_emulator(plan, module)
        self._resident = BoundPlans(plan, lambda bound: _make_resident_emulator(bound, module))

    def run(self, arrays: Sequence[Any]) -> list[np.ndarray]:
        """The outputs; arrays that the program writes are written."""
        return self._run(arrays)

    def call(self, arrays: Sequence[Any], constants: range = range(0)) -> list[Any]:
        """As `ResidentProgram.call`, with the plan for these sizes."""
        return self._resident.find(arrays).call(arrays, constants)


def make_emulator(artifact: Artifact, debug: bool = False) -> Callable[[Sequence[Any]], list[np.ndarray]]:
    """A function from arrays to outputs; it writes the arrays that the program writes. `debug` runs the sanitizer."""
    return _make_host_emulator(artifact.manifest["plan"], _load_module(artifact), debug)


def _load_module(artifact: Artifact) -> PtxModule:
    module = PtxModule(artifact.text(TEXT_FILE), TEXT_FILE)
    module.progress = lambda entry, done, total: report_progress(f"emulating {entry}", done, total)
    return module


def _make_host_emulator(
    plan: Mapping[str, Any], module: PtxModule, debug: bool = False
) -> Callable[[Sequence[Any]], list[np.ndarray]]:
    plans = BoundPlans(plan, lambda bound: (bound, ArgumentBinder(bound)))
    scalars = {i for i, p in enumerate(plan["params"]) if p["role"] == "scalar"}

    def run(arrays: Sequence[Any]) -> list[np.ndarray]:
        plan, arguments = plans.find(arrays)
        users, bound = arguments.bind(arrays)
        values = [_scalar_argument(a) if i in scalars else a for i, a in enumerate(bound)]
        workspace = np.zeros(plan["workspace"], np.uint8)
        execute_plan(find_steps(plan), _EmulatedPlanEngine(plan, values, workspace, module, debug))
        return arguments.finish(users, bound)

    return run


def _make_resident_emulator(plan: Mapping[str, Any], module: PtxModule) -> ResidentProgram:
    """A program whose arguments and results lie in the memory of the emulated GPU."""
    params = plan["params"]

    def bind(given: Sequence[Any], stream: int, repeated: bool) -> Callable[[], None]:
        return lambda: run(given)

    def run(given: Sequence[Any]) -> None:
        values = [
            view_as_array(view_memory(x, p), p) if p["role"] != "scalar" else _unpack_scalar(x, p["dtype"])
            for p, x in zip(params, given, strict=True)
        ]
        workspace = np.zeros(plan["workspace"], np.uint8)
        execute_plan(find_steps(plan), _EmulatedPlanEngine(plan, values, workspace, module))

    return ResidentProgram(plan, get_device_memory(), bind)


@dataclass
class _EmulatedPlanEngine(ArrayPlanEngine):
    """An engine whose launches run in the PTX emulator."""

    module: PtxModule
    debug: bool = False

    def launch(self, first: int, last: int) -> None:
        """Run launches in order."""
        for each in self.plan["launches"][first:last]:
            entry = self.plan["entries"][each["kernel"]]
            if 0 not in each["grid"]:
                args = [self.argument(a) for a in each["args"]]
                padded = {i: _pad_byte(args[i]) for i in entry.get("halves", ())}
                maps = [make_tensor_map(m, args[m["param"]]) for m in entry.get("maps", ())]
                grid = choose_hardware_grid(each, entry, EMULATED_PROCESSORS)
                launch_buffers = LaunchBuffers(entry, each["grid"][: each["rank"]])
                buffers = launch_buffers.allocate()
                values = [*maps, *(padded.get(i, a) for i, a in enumerate(args)), *buffers.values()]
                cooperative = "meeting" in entry
                with operation(f"emulating {each['kernel']}"):
                    self.module.launch(
                        each["kernel"], grid, entry["threads"], values, entry["shared"], self.debug,
                        cooperative=cooperative,
                    )  # fmt: skip
                for i, array in padded.items():
                    args[i].reshape(-1).view(np.uint8)[...] = array[: args[i].nbytes]
                launch_buffers.check(buffers)


def choose_hardware_grid(launch: Mapping[str, Any], entry: Mapping[str, Any], processors: int) -> tuple[int, int, int]:
    """The hardware grid: its first axis is the program grid's last, which varies fastest.

    A persistent kernel launches one block for each multiprocessor.
    """
    if entry.get("programs"):
        cluster = entry.get("cluster", 1)
        return (min(entry["programs"], max(processors // cluster, 1) * cluster), 1, 1)
    if entry.get("folded"):
        return (math.prod(launch["grid"]), 1, 1)
    grid = list(launch["grid"])[: launch["rank"]][::-1]
    return (*grid, 1, 1, 1)[:3]  # type: ignore[return-value]


def _pad_byte(array: np.ndarray) -> np.ndarray:
    """A copy of an array with one byte more, as allocations on a GPU have: 16-bit atomics access the last byte."""
    return np.append(array.reshape(-1).view(np.uint8), np.uint8(0))


def make_tensor_map(described: Mapping[str, Any], array: np.ndarray) -> TensorMap:
    """The TMA descriptor of a parameter's memory, with the 128-byte swizzle."""
    typed = array.reshape(-1).view(as_dtype(described["dtype"]).numpy).reshape(described["shape"])
    return TensorMap(typed, tuple(described["box"]), SWIZZLE_BYTES)


def _unpack_scalar(value: int | float, dtype: str) -> Any:
    """A scalar argument for the emulator, of that of a prepared launch."""
    return value if dtype in BIT_FORMATS else np.asarray(value, as_dtype(dtype).numpy)[()]


def _scalar_argument(array: np.ndarray) -> Any:
    """A scalar argument for the emulator: small floats and bools as their bits."""
    if array.dtype.itemsize < 4 and array.dtype.kind not in "iu":
        return int(array.view(f"u{array.dtype.itemsize}")[()])
    return array[()]

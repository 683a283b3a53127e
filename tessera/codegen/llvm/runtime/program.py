"""Compiled program: machine code, workspace and host plan of an artifact, ready to run without IR."""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from threading import Lock, get_ident
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from tessera.codegen.artifact import Artifact, BoundPlans, hash_json
from tessera.codegen.diagnostics import Site
from tessera.codegen.llvm.runtime import interrupts, thread_pool
from tessera.codegen.llvm.runtime.jit import MachineCode, compute_cache_key
from tessera.codegen.llvm.runtime.native_calls import (
    DONE,
    OTHER_ARRAYS,
    NativeBinding,
    NativeCall,
    NativeLaunch,
    has_known_layout,
    make_native_binding,
)
from tessera.codegen.llvm.runtime.object_files import open_object
from tessera.codegen.llvm.runtime.reports import ReportCollector, register_report_symbol
from tessera.codegen.llvm.runtime.tensor_calls import AddressCall, TensorCall, make_tensor_call
from tessera.codegen.llvm.runtime.thread_pool import (
    TASK_FIELDS,
    WorkerPool,
    allocate_aligned,
    choose_thread_count,
)
from tessera.codegen.llvm.text.protocol import (
    FIRST_KEY,
    INTERRUPTED,
    NO_FAILURE,
    PLAN_SEAL,
    POLL_FUNCTION,
    REPORT_CONTEXT,
)
from tessera.codegen.plan_execution import (
    ArgumentBinder,
    PlanEngine,
    execute_plan,
    run_host_call,
    start_host_call,
    view_as_array,
    view_memory,
)
from tessera.core.device import array_address
from tessera.core.errors import ArtifactError, BarrierError

if TYPE_CHECKING:
    from tessera.codegen.llvm.runtime.cooperative_launches import CooperativeLaunches

# Executing a plan with control flow: machine code finds its arguments in slots, which move with the indices of loops.

LaunchFunction = Callable[[int, int], None]


class NativePlanEngine(PlanEngine):
    """The engine of one program on `slots`, which hold the argument addresses of machine code.

    `uses` are pairs (slot, argument) for every argument of the plan's launches, flags and host calls. The slots of the
    flags begin at `first_flag`, and those of the host calls follow.
    """

    def __init__(
        self,
        plan: Mapping[str, Any],
        slots: np.ndarray,
        first_flag: int,
        uses: Iterable[tuple[int, Any]],
        launch: LaunchFunction,
    ) -> None:
        super().__init__()
        self._steps, self._slots, self._first_flag, self._launch = plan["steps"], slots, first_flag, launch
        self._pending: dict[int, Callable[[], None]] = {}
        self._calls, start = [], first_flag + len(plan["flags"])
        for call in plan.get("calls", ()):
            self._calls.append((call, start))
            start += len(call["args"])
        moving: dict[int, list[tuple[int, int]]] = {}
        for slot, argument in uses:
            for loop, count in argument.get("moves", ()):
                moving.setdefault(loop, []).append((slot, count))
        self._moves = {loop: np.array(pairs, np.intp).T for loop, pairs in moving.items()}
        self.loop_indices = dict.fromkeys(moving, 0)

    def run(self) -> None:
        """Execute the plan; the slots are those of index 0 again afterwards."""
        try:
            execute_plan(self._steps, self)
        finally:
            for loop in self.loop_indices:
                self.set_loop_index(loop, 0)

    def launch(self, first: int, last: int) -> None:
        """Run the launches from `first` to before `last`."""
        self._launch(first, last)

    def set_loop_index(self, loop: int, index: int) -> None:
        """Move the slots that depend on a loop."""
        if loop in self._moves:
            slots, counts = self._moves[loop]
            self._slots[slots] += (index - self.loop_indices[loop]) * counts
            self.loop_indices[loop] = index

    def call(self, number: int) -> None:
        """Run an op on the host, on the memory at the addresses in its slots."""
        run_host_call(*self._find_call(number))

    def start(self, first: int, last: int) -> None:
        """Start collectives."""
        for number in range(first, last):
            self._pending[number] = start_host_call(*self._find_call(number))

    def wait(self, number: int) -> None:
        """Wait for a collective that was started."""
        self._pending.pop(number)()

    def _find_call(self, number: int) -> tuple[Mapping[str, Any], list[np.ndarray]]:
        call, start = self._calls[number]
        addresses = (int(address) for address in self._slots[start : start + len(call["args"])])
        return call, [view_as_array(view_memory(at, a), a) for at, a in zip(addresses, call["args"], strict=True)]

    def holds(self, flag: int) -> bool:
        """Whether a flag is true."""
        return bool(ctypes.c_uint8.from_address(int(self._slots[self._first_flag + flag])).value)


# Running a compiled artifact.

TEXT_FILE = "kernels.ll"
OBJECT_FILE = "kernels.o"  # machine code for the processor that the artifact was built on
MAX_SHORT_PROGRAMS = 32  # without long loops, that run before Ctrl-C takes effect
CHUNKS_PER_THREAD = 8  # small chunks, so that threads finish a launch at about the same time


def import_cooperative_launches() -> ModuleType:
    from tessera.codegen.llvm.runtime import cooperative_launches  # most programs have none

    return cooperative_launches


def check_plan_seal(text: str, plan: Mapping[str, Any]) -> None:
    """Check that a text was emitted with this plan.

    Raises:
        ArtifactError: the text names another plan.
    """
    _, found, named = text.rpartition(PLAN_SEAL)
    if found and named.strip() != hash_json(plan):
        raise ArtifactError(
            f"the plan in the manifest is not that of {TEXT_FILE}", expected=f"sha256 {named.strip()[:64]}",
            received=f"sha256 {hash_json(plan)}", suggestion="build the artifact again",
        )  # fmt: skip


def _find_object(artifact: Artifact, text: str) -> bytes | None:
    """The machine code in an artifact, or None where its text must be compiled.

    It is used where it was compiled from this text, for this processor, by this version of LLVM, and no one but this
    user or root can have written it.
    """
    content = artifact.files.get(OBJECT_FILE)
    if not isinstance(content, bytes) or not artifact.is_owned(OBJECT_FILE):
        return None
    return open_object(compute_cache_key(text), content)


@dataclass(eq=False)
class BoundProgram:
    """The tasks, slots and workspace of a plan of known sizes; `param_slots` are those that each parameter fills."""

    arguments: ArgumentBinder
    tasks: np.ndarray
    slots: np.ndarray
    param_slots: list[Any]
    workspace: np.ndarray
    job: np.ndarray | None  # None: one thread runs the tasks
    cooperative: CooperativeLaunches | None
    sites: Sequence[Site]  # of reports, with the grids of these sizes
    engine: NativePlanEngine | None = None
    binding: NativeBinding | None = None
    direct: NativeLaunch | None = None
    native: NativeCall | None = None


class LlvmProgram:
    """Machine code and launch plan of an artifact, with a workspace for each set of sizes that it is called with."""

    def __init__(self, artifact: Artifact, threads: int | None = None) -> None:
        plan, text = artifact.manifest["plan"], artifact.text(TEXT_FILE)
        check_plan_seal(text, plan)
        self.threads = choose_thread_count(threads)
        register_report_symbol()
        if "meeting" in plan:
            import_cooperative_launches().register_barrier_symbol()
        interrupts.register_poll_symbol()
        self._code = MachineCode(text, _find_object(artifact, text))
        # Each task checks the stop word between two programs; programs of long loops check it, too.
        tasks = sum(".task(" in line for line in text.splitlines() if line.startswith("define"))
        self._has_checks = text.count(f"call void @{POLL_FUNCTION}(") > tasks
        self._stop = thread_pool.StopWord(self._code)
        self._pool = WorkerPool(self.threads, max(plan["scratch"].values(), default=0), self._stop)
        self._lock = Lock()
        self._reports = ReportCollector(plan.get("reports", ()))
        self._connect_reports()
        self._plans = BoundPlans(plan, self._bind)

    def _bind(self, plan: Mapping[str, Any]) -> BoundProgram:
        """One task for each launch, and the slots that each parameter fills; flags and host calls have the last."""
        launches = plan["launches"]
        host_args = [*plan.get("flags", ()), *(a for c in plan.get("calls", ()) for a in c["args"])]
        sizes = [len(launch["args"]) + 3 for launch in launches]
        starts = [0, *itertools.accumulate(sizes)]
        slots = np.zeros(starts[-1] + len(host_args), np.int64)
        slot_uses: list[tuple[int, Any]] = [*enumerate(host_args, starts[-1])]
        tasks = np.zeros((len(launches), TASK_FIELDS), np.int64)
        for row, (start, launch) in enumerate(zip(starts, launches, strict=False)):
            slot_uses += enumerate(launch["args"], start)
            slots[start + len(launch["args"]) : starts[row + 1]] = launch["grid"]
            total = math.prod(launch["grid"])
            chunk = max(1, total // (self.threads * CHUNKS_PER_THREAD))
            function = self._code.address(f"{launch['kernel']}.task")
            tasks[row] = (function, array_address(slots) + 8 * start, total, chunk)
        arguments, workspace = ArgumentBinder(plan), allocate_aligned(plan["workspace"])
        param_slots = _fill_slots(slots, slot_uses, workspace, len(arguments.params))
        job, cooperative = self._pool.make_job(tasks, even=not self._has_checks), None
        if any(e["kernel"] in plan.get("meeting", ()) for e in launches):
            cooperative = import_cooperative_launches().CooperativeLaunches(plan, self._code, self._stop)
        sites = plan.get("reports", ())
        bound = BoundProgram(arguments, tasks, slots, param_slots, workspace, job, cooperative, sites)
        bound.binding = make_native_binding(arguments, param_slots, slots)
        if "steps" in plan:
            bound.engine = self._make_engine(plan, bound, starts[-1], slot_uses)
        elif cooperative is None and launches:
            short = not self._has_checks and sum(math.prod(e["grid"]) for e in launches) <= MAX_SHORT_PROGRAMS
            details = (tasks, job, self._pool.scratch, self._stop.address, short)
            bound.direct = NativeLaunch(*details)
            bound.native = None if bound.binding is None else NativeCall(bound.binding, *details)
        return bound

    def _make_engine(
        self, plan: Mapping[str, Any], bound: BoundProgram, first_flag: int, slot_uses: Sequence[tuple[int, Any]]
    ) -> NativePlanEngine:
        parallel = [math.prod(e["grid"]) > 1 for e in plan["launches"]]

        def launch(first: int, last: int) -> None:
            self._launch(bound, first, last, bound.job if any(parallel[first:last]) else None)
            if self._stop.value >= FIRST_KEY:
                self._reports.finish(bound.sites)

        return NativePlanEngine(plan, bound.slots, first_flag, slot_uses, launch)

    def run(self, arrays: Sequence[Any]) -> list[np.ndarray]:
        """The outputs; arrays that the program writes are written.

        Raises:
            ShapeError, DTypeError, ArgumentError: the arrays do not match the parameters.
            ExecutionError: an assertion of the program failed.
            OutOfBoundsError: an index is outside its axis.
            BarrierError: programs wait at a grid barrier for others that have ended.
            KeyboardInterrupt: the handler of a signal raised it; the program has stopped.
        """
        program = self._plans.only or self.find_bound(arrays)
        binding = program.binding
        if binding is not None and len(arrays) == binding.inputs:
            given = binding.complete(arrays)
            if self._run_native(program, given):
                return given[len(arrays) :]
            given.clear()  # the general way allocates results of its own
        users, bound = program.arguments.bind(arrays)
        params = program.arguments.params
        self._fill_and_execute(
            program, [encode_scalar(a) if p.scalar else array_address(a) for p, a in zip(params, bound, strict=True)]
        )
        outputs = program.arguments.finish(users, bound)
        self._reports.finish(program.sites)
        return outputs

    def repeat(self, types: Sequence[Any], results: Sequence[Any], other: object) -> TensorCall | None:
        """What runs on tensors of these types and gives tensors, or `other` for arguments that it does not take.

        `results` are the types of the results. None where only the general way runs the program.
        """
        program = self.find_bound(types)
        if program.native is None or _prints(program.sites) or len(types) != program.native.binding.inputs:
            return None
        outputs = [p for p in program.arguments.params if p.output]
        sized = [t if t.shape == p.shape else t.with_shape(p.shape) for t, p in zip(results, outputs, strict=True)]
        fail = partial(self._fail, program)
        return make_tensor_call(program.native, [*types, *sized], self._lock, fail, other)

    def launch_directly(self, program: BoundProgram, other: object) -> AddressCall | None:
        """What runs on memory of the caller, as `launch` does, or gives `other` where only `launch` can.

        None where it never can.
        """
        if program.direct is None or _prints(program.sites) or not has_known_layout():
            return None
        fail = partial(self._fail, program)
        return AddressCall(program.direct, program.param_slots, program.slots, self._lock, fail, other)

    def _fail(self, program: BoundProgram) -> None:
        """Raise what a launch of machine code has failed with; its caller has the lock."""
        interrupted = self._stop.value == INTERRUPTED
        if interrupted:
            self._reports.discard()
        self._lock.release()
        if interrupted:
            interrupts.raise_interrupt()
        self._reports.finish(program.sites)

    def _run_native(self, program: BoundProgram, given: list[Any]) -> bool:
        """Run on completed arrays; False where some must be converted or refused."""
        with self._lock:
            native = program.native
            if native is not None and get_ident() == interrupts.MainThread.number:
                code = native.run(given)
                if code == OTHER_ARRAYS:
                    return False
                if code != DONE and self._stop.value == INTERRUPTED:
                    self._reports.discard()
                    interrupts.raise_interrupt()
            elif program.binding.fill(given):  # type: ignore[union-attr]
                self._execute(program)
            else:
                return False
        self._reports.finish(program.sites)
        return True

    def find_bound(self, arrays: Sequence[Any]) -> BoundProgram:
        """The program for the sizes of these arrays or tensors; anything that has a shape will do."""
        if self._plans.only is not None:
            return self._plans.only
        with self._lock:
            return self._plans.find(arrays)

    def launch(self, program: BoundProgram, given: Sequence[int]) -> None:
        """Run on memory of the caller: `given` holds an address for each parameter, outputs included.

        The memory is row-major contiguous; outputs share memory with no other parameter, and hold zeros where
        `program.arguments.zeroed` says so. Nothing of this is checked.

        Raises:
            ExecutionError, OutOfBoundsError, BarrierError, KeyboardInterrupt: as `run`.
        """
        self._fill_and_execute(program, given)
        self._reports.finish(program.sites)

    def _fill_and_execute(self, program: BoundProgram, words: Sequence[int]) -> None:
        """Run with an address (or a scalar) for each parameter."""
        with self._lock:
            for slots, word in zip(program.param_slots, words, strict=True):
                program.slots[slots] = word
            self._execute(program)

    def _execute(self, program: BoundProgram) -> None:
        """Run with what is in the slots; the caller has the lock."""
        self._stop.value = NO_FAILURE
        try:
            if program.engine is None:
                self._launch(program, 0, len(program.tasks), program.job)
            else:
                program.engine.run()
        except BarrierError:
            self._reports.finish(program.sites)  # a program that failed an assertion reaches no barrier
            raise
        except BaseException:
            self._reports.discard()
            raise

    def _launch(self, program: BoundProgram, first: int, last: int, job: np.ndarray | None) -> None:
        if program.cooperative is None:
            self._pool.run(program.tasks[first:last], job)
            return
        for start, stop, cooperative in program.cooperative.split(first, last):
            if cooperative:
                program.cooperative.run(start, program.tasks[start])
            else:
                self._pool.run(program.tasks[start:stop], job)

    def _connect_reports(self) -> None:
        """Store in the machine code the number of the collector that receives its reports."""
        if self._reports.sites:
            ctypes.c_int64.from_address(self._code.variable(REPORT_CONTEXT)).value = self._reports.context


def _prints(sites: Sequence[Site]) -> bool:
    return any(site["kind"] == "print" for site in sites)


def _fill_slots(
    slots: np.ndarray, uses: Sequence[tuple[int, Mapping[str, Any]]], workspace: np.ndarray, params: int
) -> list[Any]:
    """Fill the slots of sizes and of the workspace; for each parameter its slots, which a call fills."""
    found: list[list[int]] = [[] for _ in range(params)]
    for slot, argument in uses:
        if "value" in argument:
            slots[slot] = argument["value"]
        elif "param" in argument:
            found[argument["param"]].append(slot)
        else:
            slots[slot] = array_address(workspace) + argument["offset"]
    return [s[0] if len(s) == 1 else np.array(s, np.intp) for s in found]


def encode_scalar(array: np.ndarray) -> int:
    """The eight bytes in which a kernel receives a scalar."""
    return int.from_bytes(array.tobytes().ljust(8, b"\0"), "little", signed=True)

"""`ts.profile`: a session that notes the programs that run in it, and measures each of them by replay."""

from __future__ import annotations

import functools
import io
import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tessera.codegen.contract import TimedRuntime
from tessera.core.device import INTERP, find_generator_name
from tessera.core.errors import ArgumentError, user_location
from tessera.interp.graph import bind_sizes
from tessera.ir.core import Function, find_size_names
from tessera.ir.tensor import RESULT_OBSERVERS, Tensor
from tessera.lower.lowering_plan import RUN_OBSERVER
from tessera.lower.passes.type_conversion import specialise_shapes
from tessera.runtime import driver
from tessera.runtime.program import PreparedProgram
from tessera.tools.profile.replay import (
    COUNT_SECONDS,
    SECONDS,
    KernelMeasurement,
    count_mesh_cycles,
    replay,
    time_graph,
)
from tessera.tools.profile.report import ProfileReport, find_device, find_gpu_name, make_console

LEVELS = ("summary", "detailed")


@dataclass
class _NotedProgram:
    """A compiled program that ran in the session, with the arguments of its first call."""

    function: Function
    device: str
    arrays: list[Any]
    calls: int = 0
    seconds: float = 0.0


@dataclass(eq=False)
class ProfileSession(AbstractContextManager["ProfileSession"]):
    """What ran since the session began; `report()` measures it.

    >>> import tessera as ts
    >>> with ProfileSession() as session:
    ...     _ = ts.jit(lambda x: ts.exp(x) * 2.0)(ts.ones((8,)))
    >>> [k.name for k in session.reports()[0].kernels]
    ['exp', 'mul']
    """

    level: str = "summary"
    gpu: str | None = None
    name: str = "profile"
    _programs: dict[int, _NotedProgram] = field(default_factory=dict)
    _eager: dict[tuple[str, Any], KernelMeasurement] = field(default_factory=dict)
    _last: float = 0.0
    _tokens: list[Any] = field(default_factory=list)

    def __enter__(self) -> ProfileSession:
        self._tokens.append(RUN_OBSERVER.set(self))
        RESULT_OBSERVERS.append(self._note_op)
        self._last = time.perf_counter()
        return self

    def __exit__(self, *error: Any) -> None:
        RESULT_OBSERVERS.remove(self._note_op)
        RUN_OBSERVER.reset(self._tokens.pop())

    def note(self, function: Function, device: str, run: Callable[..., Any], arrays: Sequence[Any]) -> Any:
        """Run a compiled program, and note it with the arguments of its first call."""
        noted = self._programs.get(id(function))
        if noted is None:
            held = [np.array(a.numpy() if hasattr(a, "numpy") else a) for a in arrays]
            noted = self._programs[id(function)] = _NotedProgram(function, device, held)
        start = time.perf_counter()
        results = run(arrays)
        self._last = time.perf_counter()
        noted.calls += 1
        noted.seconds += self._last - start
        return results

    def _note_op(self, op: Any, operands: Sequence[Tensor], results: Sequence[Tensor]) -> None:
        """An op that ran at once: the time since the op before it, Python included."""
        now, location, name = time.perf_counter(), user_location(), op.name.removeprefix("ts.")
        one = self._eager.setdefault(
            (name, location), KernelMeasurement(name, (name,), location, 0.0, SECONDS, matrix=name == "dot")
        )
        tensors = (*operands, *results)
        sizes = [math.prod(int(n) for n in t.shape) for t in tensors]
        one.cost += now - self._last
        one.bytes += sum(n * t.dtype.bits // 8 for n, t in zip(sizes, tensors, strict=True))
        depth = int(operands[0].shape[-1]) if name == "dot" else 0
        one.flops += 2 * depth * sizes[-1] if depth else max(sizes, default=0)
        self._last = time.perf_counter()

    def reports(self) -> list[ProfileReport]:
        """A report for each program that was compiled, and one for the ops that ran at once."""
        token = RUN_OBSERVER.set(None)
        try:
            found = [self._measure(noted) for noted in self._programs.values()]
        finally:
            RUN_OBSERVER.reset(token)
        if self._eager:
            notes = ["ops outside of ts.jit: the time of each includes the Python before it"]
            found.append(ProfileReport(f"{self.name}, op by op", INTERP, list(self._eager.values()),
                                       device=find_device(INTERP), notes=notes))  # fmt: skip
        return found

    def _measure(self, noted: _NotedProgram) -> ProfileReport:
        report = profile_function(noted.function, noted.arrays, noted.device, self.level == "detailed", self.gpu)
        report.notes.append(f"{noted.calls} calls, {noted.seconds / max(noted.calls, 1) * 1e6:,.1f} µs each on average")
        return report

    def report(self) -> list[ProfileReport]:
        """Print the reports, and give them back."""
        found, console = self.reports(), make_console()
        if not found:
            console.print("nothing has run")
        for each in found:
            each.render(console)
        return found

    def save(self, path: str | Path) -> Path:
        """Write the report of what cost the most, in the format of the file's ending.

        Raises:
            ArgumentError: nothing has run, or the ending names no format.
        """
        found = self.reports()
        if not found:
            raise ArgumentError("nothing has run that could be saved", location=user_location())
        return max(found, key=lambda r: r.total).save(path)


# Programs.


def profile_function(
    function: Function, arrays: Sequence[Any], device: str, detailed: bool = False, gpu: str | None = None
) -> ProfileReport:
    """The report of a Graph function of concrete shapes on a device; `gpu` names a data sheet."""
    target = find_generator_name(device)
    if find_size_names(function):
        function = specialise_shapes(function, bind_sizes(function, arrays))
    if target == INTERP:
        return ProfileReport(function.name, INTERP, time_graph(function, arrays), device=find_device(INTERP))
    if target.partition(":")[0] == "csl":
        return _profile_mesh(function, arrays, target)
    return _profile_levels(function.name, driver.lower(function, target), arrays, target, detailed, gpu)


def _profile_levels(
    name: str, levels: Any, arrays: Sequence[Any], target: str, detailed: bool, gpu: str | None
) -> ProfileReport:
    kernels = replay(levels, arrays, target, detailed)
    gpu = gpu or find_gpu_name(target)
    report = ProfileReport(name, target, kernels, device=find_device(target, gpu))
    if late := [k.name for k in kernels if k.estimated]:
        report.notes.append(
            f"not counted, because the interpreter would take longer than {COUNT_SECONDS:g} s: {', '.join(late)}; "
            "where nothing else is known, bytes are those of the arrays, and operations count as 0"
        )
    if report.unit == SECONDS:
        report.whole = _time_whole(driver.make_runtime(levels["tile"], target), arrays)
        if report.device is None:
            report.notes.append(f"the peaks of {gpu} are not known, so that there is no roofline: name a GPU by --gpu")
    else:
        report.notes.append(
            f"no GPU here: instructions, operations and bytes were counted in the emulator; bounds are those of "
            f"{gpu}'s data sheet, and no time was measured"
        )
    return report


def _time_whole(runtime: Any, arrays: Sequence[Any]) -> float:
    """The seconds of the whole program: by the clock of its device, or of the call by that of the host."""
    with redirect_stdout(io.StringIO()):  # what its kernels print
        if isinstance(runtime, TimedRuntime):
            return runtime.measure(arrays)
        times = []
        for _ in range(5):
            given, start = [np.array(a) for a in arrays], time.perf_counter()
            runtime.run(given)
            times.append(time.perf_counter() - start)
    return min(times)


def _profile_mesh(function: Function, arrays: Sequence[Any], target: str) -> ProfileReport:
    runtime = driver.make_runtime(driver.lower(function, target)["tile"], target)
    runtime.run([np.array(a) for a in arrays])
    report = ProfileReport(function.name, target, count_mesh_cycles(function, arrays, target))
    report.whole = float(runtime.cycles)  # type: ignore[attr-defined]
    report.notes.append("cycles of the simulator: each op compiled alone; the whole program overlaps and fuses them")
    return report


def profile_program(
    program: PreparedProgram, target: str, level: str = "summary", gpu: str | None = None
) -> ProfileReport:
    """The report of a prepared program (a jit function or a kernel) on a target."""
    detailed = check_level(level) == "detailed"
    if program.top == "graph":
        return profile_function(program.levels["graph"].main, program.arrays, target, detailed, gpu)
    levels = program.lower_for_target(target)
    return _profile_levels(program.name, levels, program.arrays, target, detailed, gpu)


def check_level(level: str) -> str:
    """A level of detail.

    Raises:
        ArgumentError: there is no such level.
    """
    if level not in LEVELS:
        raise ArgumentError(
            f"{level!r} is no level of a profile", location=user_location(), expected=" or ".join(LEVELS)
        )
    return level


# The decorator.

_LATEST: list[ProfileSession] = []


def profile(function: Callable[..., Any] | None = None, *, level: str = "summary", gpu: str | None = None) -> Any:
    """Profile what a function runs: `ts.profile.report()`, in it or after it, prints kernels, bottleneck and advice.

    Without a function it is a context. `level="detailed"` also counts the accesses of each kernel in the interpreter,
    which is slower. Programs are measured by replay when the report is made, not while they run: on a GPU by CUDA
    events. `gpu` names the data sheet whose peaks bound kernels of ptx: by default that of this machine's GPU, or of
    an H100 where there is none.

    Raises:
        ArgumentError: there is no such level.
    """
    check_level(level)
    if function is None:
        return _Profiler(level, gpu)
    return _Profiler(level, gpu)(function)


class _Profiler(ProfileSession):
    """A session that is also a decorator: each call of the function is a session of its own."""

    def __init__(self, level: str, gpu: str | None) -> None:
        super().__init__(level, gpu)

    def __enter__(self) -> ProfileSession:
        _LATEST[:] = [self]
        return super().__enter__()

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        level, gpu, name = self.level, self.gpu, getattr(function, "__name__", "profile")
        run = function

        @functools.wraps(run, updated=())
        def profiled(*args: Any, **named: Any) -> Any:
            session = _Profiler(level, gpu)
            session.name = name
            with session:
                return run(*args, **named)

        return profiled


def report() -> list[ProfileReport]:
    """Print what the running session, or the last one, has noted.

    Raises:
        ArgumentError: no session has begun.
    """
    return latest().report()


def latest() -> ProfileSession:
    """The running session, or the last one.

    Raises:
        ArgumentError: no session has begun.
    """
    if not _LATEST:
        raise ArgumentError(
            "nothing is profiled", location=user_location(), suggestion="decorate the function with @ts.profile"
        )
    return _LATEST[0]

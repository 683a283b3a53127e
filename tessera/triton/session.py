"""Sessions: Triton programs run in the PTX emulator while a session is open."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import triton
import triton.testing
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction

from tessera.core.errors import ArgumentError
from tessera.cuda.allocations import Allocations
from tessera.cuda.counters import LaunchReport
from tessera.cuda.device import EmulatedDevice
from tessera.cuda.torch_device import redirect_torch
from tessera.triton.driver import EmulatorDriver, wrap_arrays

_ARCHITECTURES = {"sm_90": "sm_90a"}  # what Triton compiles for
TUNING = ("first", "all")


@dataclass
class TritonSession:
    """What ran in a session: `launches` counts, `reports` describe each launch where `report=True`."""

    device: EmulatedDevice

    @property
    def launches(self) -> int:
        """The number of launches."""
        return self.device.launches

    @property
    def reports(self) -> list[LaunchReport]:
        """A report for each launch."""
        return self.device.reports


@contextlib.contextmanager
def interpreted(
    arch: str = "sm_90a", *, debug: bool = False, report: bool = False, tune: str = "first", benchmarks: bool = False
) -> Iterator[TritonSession]:
    """Run Triton kernels in the PTX emulator: `kernel[grid](...)` on CPU tensors of PyTorch or on NumPy arrays.

    Triton compiles the unmodified kernel for `arch` (sm_80, sm_86, sm_89, sm_90a). Programs that ask PyTorch for the
    device "cuda" get CPU tensors. `debug` finds races, uninitialised reads and missed waits; accesses outside a
    tensor and misaligned ones are always errors. `report` counts what each launch executes. `tune` says which
    configurations an autotuned kernel tries: the "first" that can run, or "all". `triton.testing.perf_report` runs
    nothing unless `benchmarks` is true.

    Raises:
        TesseraError: a finding, with the line of the Triton source, the program and the thread.
    """
    if tune not in TUNING:
        raise ArgumentError("unknown way to tune", expected=", ".join(TUNING), received=tune)
    device = EmulatedDevice(_ARCHITECTURES.get(arch, arch), debug, report, block_word="program", replicated=True)
    allocations = Allocations()
    driver, before = EmulatorDriver(device, allocations), triton.runtime.driver._active
    with contextlib.ExitStack() as stack:
        stack.enter_context(redirect_torch(device, allocations))
        for owner, name, value in _list_stand_ins(driver, tune, benchmarks):
            stack.enter_context(mock.patch.object(owner, name, value))
        stack.callback(setattr, triton.runtime.driver, "_active", before)
        triton.runtime.driver.set_active(driver)
        yield TritonSession(device)


def _list_stand_ins(driver: EmulatorDriver, tune: str, benchmarks: bool) -> Iterator[tuple[Any, str, Any]]:
    """What a session replaces in Triton: arrays become arguments, and nothing is measured."""
    yield JITFunction, "run", _accept_arrays(JITFunction.run)
    for name in ("do_bench", "do_bench_cudagraph", "do_bench_proton", "do_bench_cudagraph_proton"):
        if hasattr(triton.testing, name):
            yield triton.testing, name, driver.benchmark
    yield Autotuner, "do_bench", property(lambda self: driver.benchmark)
    if tune == "first":
        yield Autotuner, "prune_configs", _choose_first(driver, Autotuner.prune_configs)
    if not benchmarks:
        yield triton.testing.Mark, "run", _skip_benchmark


def _accept_arrays(run: Callable[..., Any]) -> Callable[..., Any]:
    def accept(self: Any, *args: Any, **named: Any) -> Any:
        return run(self, *map(wrap_arrays, args), **{k: wrap_arrays(v) for k, v in named.items()})

    return accept


class FirstThatRuns(list):
    """Configurations of an autotuner, up to the first that could be compiled and run."""

    driver: EmulatorDriver

    def __iter__(self) -> Iterator[Any]:
        before = self.driver.benchmark_runs
        for config in super().__iter__():
            yield config
            if self.driver.benchmark_runs > before:
                return


def _choose_first(driver: EmulatorDriver, prune: Callable[..., Any]) -> Callable[..., Any]:
    def choose(self: Any, kwargs: dict[str, Any]) -> Any:
        configs = FirstThatRuns(prune(self, kwargs))
        configs.driver = driver
        return configs

    return choose


def _skip_benchmark(self: Any, *_: Any, **__: Any) -> None:
    marks = self.benchmarks if isinstance(self.benchmarks, list) else [self.benchmarks]
    names = ", ".join(m.plot_name for m in marks)
    print(f"benchmark {names} is skipped: the emulator's times say nothing of a GPU", file=sys.stderr)

"""Emulation: runs an artifact's text in the LLVM emulator by the same host plan, without a compiler."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tessera.codegen.artifact import Artifact, BoundPlans
from tessera.codegen.llvm.runtime.reports import ReportCollector
from tessera.codegen.llvm.text import protocol
from tessera.codegen.llvm.text.protocol import REPORT_FUNCTION
from tessera.codegen.plan_execution import ArgumentBinder, ArrayPlanEngine, execute_plan, find_steps
from tessera.core.progress import track
from tessera.interp.target.llvm import LlvmModule, PerLane
from tessera.interp.target.llvm.decoder import HostFunction
from tessera.interp.target.llvm.memory import SegmentedMemory

TEXT_FILE = "kernels.ll"
# As many programs run as lanes of one call as have their scratch memory within this.
MAX_SCRATCH_BYTES = 1 << 26


def make_emulator(artifact: Artifact) -> Callable[[Sequence[Any]], list[np.ndarray]]:
    """A function from arrays to outputs; it writes the arrays that the program writes."""
    plan, text = artifact.manifest["plan"], artifact.text(TEXT_FILE)
    plans = BoundPlans(plan, lambda bound: (bound, ArgumentBinder(bound)))
    wrappers = [_make_lane_wrapper(text, kernel, scratch) for kernel, scratch in plan["scratch"].items()]
    reports = ReportCollector(plan.get("reports", ()))
    checked = any(site["kind"] == "index" for site in reports.sites)
    module = LlvmModule(
        "\n".join([text, *wrappers]),
        TEXT_FILE,
        {
            REPORT_FUNCTION: _make_report_function(reports),
            protocol.BARRIER_FUNCTION: _pass_grid_barrier,
            protocol.POLL_FUNCTION: _pass_poll,
        },
    )

    def run(arrays: Sequence[Any]) -> list[np.ndarray]:
        plan, arguments = plans.find(arrays)
        users, bound = arguments.bind(arrays)
        workspace = np.zeros(plan["workspace"], np.uint8)
        if checked:
            module.variable(protocol.FAILURE_WORD).view(np.int64)[...] = protocol.NO_FAILURE
        execute_plan(find_steps(plan), _EmulatedPlanEngine(plan, bound, workspace, module, reports))
        outputs = arguments.finish(users, bound)
        reports.finish(plan.get("reports", ()))
        return outputs

    return run


def _pass_grid_barrier(memory: SegmentedMemory, context: int) -> None:
    """The grid barrier does nothing: the programs of a cooperative launch are lanes in lockstep."""


def _pass_poll(memory: SegmentedMemory, word: int) -> None:
    """Nothing stops a program from outside: the emulator is Python code, in which Ctrl-C takes effect at once."""


def _make_report_function(reports: ReportCollector) -> HostFunction:
    """The host function that receives reports; the text runs for one artifact, so `context` is not looked up."""

    def report(memory: SegmentedMemory, context: int, site: int, program: int, table: int) -> None:
        reports.add(site, program, table, memory.bytes)

    return report


@dataclass
class _EmulatedPlanEngine(ArrayPlanEngine):
    """An engine whose launches run in the LLVM emulator."""

    module: LlvmModule
    reports: ReportCollector

    def launch(self, first: int, last: int) -> None:
        """Run launches in order, up to the first that fails."""
        for launch in self.plan["launches"][first:last]:
            args = [self.argument(a) for a in launch["args"]]
            cooperative = launch["kernel"] in self.plan.get("meeting", ())
            _launch_lanes(self.module, launch, self.plan["scratch"][launch["kernel"]], args, cooperative)
            if self.reports.has_bad_index:
                self.reports.finish(self.plan["reports"])


def _launch_lanes(
    module: LlvmModule, launch: Mapping[str, Any], scratch: int, args: list[Any], cooperative: bool
) -> None:
    """Run every program of a launch, as lanes of one call, or of several calls unless it is cooperative."""
    total = math.prod(launch["grid"])
    most = total if cooperative else max(1, MAX_SCRATCH_BYTES // max(scratch, 1))
    for first in track(range(0, total, most), f"emulating {launch['kernel']}"):
        count = min(most, total - first)
        programs = PerLane(np.arange(first, first + count, dtype=np.int64))
        offsets = PerLane(np.arange(count, dtype=np.int64) * scratch)
        arena = np.zeros(max(1, count * scratch), np.uint8)
        module.call(f"{launch['kernel']}.lane", [*args, programs, offsets, *launch["grid"], arena], count)


def _make_lane_wrapper(text: str, kernel: str, scratch: int) -> str:
    """The LLVM text of a function that runs one program on its own slice of the scratch memory."""
    result = re.search(rf"^define void @{re.escape(kernel)}\.range\((.*?)i64 %begin", text, re.MULTILINE)
    assert result is not None, f"the text lacks @{kernel}.range"
    params = result[1].replace(" noalias", "")
    grid = "i64 %grid0, i64 %grid1, i64 %grid2"
    return f"""
define void @{kernel}.lane({params}i64 %n, i64 %place, {grid}, ptr %scratch) {{
  %next = add i64 %n, 1
  %own = getelementptr i8, ptr %scratch, i64 %place
  call void @{kernel}.range({params}i64 %n, i64 %next, {grid}, ptr %own)
  ret void
}}"""

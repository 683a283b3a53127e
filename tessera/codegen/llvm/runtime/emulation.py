"""Emulation: an artifact's text run in the LLVM interpreter by the same host plan, with no compiler."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tessera.codegen.artifact import Artifact
from tessera.codegen.host_plan import ArgumentBinder, execute_plan, run_host_call, view_as_array
from tessera.codegen.llvm.runtime.reports import ReportCollector
from tessera.codegen.llvm.table import program_ops
from tessera.codegen.llvm.table.program_ops import REPORT_FUNCTION
from tessera.interp.target.llvm import LlvmModule, PerLane
from tessera.interp.target.llvm.decoder import HostFunction
from tessera.interp.target.llvm.memory import SegmentedMemory

TEXT_FILE = "kernels.ll"
# Programs run side by side as long as their scratch memory fits in this.
MAX_SCRATCH_BYTES = 1 << 26


def make_interpreter(artifact: Artifact) -> Callable[[Sequence[Any]], list[np.ndarray]]:
    """A function from arrays to outputs; arrays that the program writes are written."""
    plan, text = artifact.manifest["plan"], artifact.text(TEXT_FILE)
    arguments = ArgumentBinder(plan)
    wrappers = [_make_lane_wrapper(text, kernel, scratch) for kernel, scratch in plan["scratch"].items()]
    reports = ReportCollector(plan.get("reports", ()))
    module = LlvmModule(
        "\n".join([text, *wrappers]),
        TEXT_FILE,
        {REPORT_FUNCTION: _make_report_function(reports), program_ops.BARRIER_FUNCTION: _meet_at_grid_barrier},
    )

    def run(arrays: Sequence[Any]) -> list[np.ndarray]:
        users, held = arguments.bind(arrays)
        workspace = np.zeros(plan["workspace"], np.uint8)
        execute_plan(
            plan.get("steps") or [{"run": [0, len(plan["launches"])]}],
            _EmulatedPlanEngine(plan, module, held, workspace),
        )
        outputs = arguments.finish(users, held)
        reports.finish()
        return outputs

    return run


def _meet_at_grid_barrier(memory: SegmentedMemory, context: int) -> None:
    """Nothing: the programs of a launch that meets run side by side, in step."""


def _make_report_function(reports: ReportCollector) -> HostFunction:
    """What the text calls to report; it knows one artifact only, whose context is the text's 0."""

    def report(memory: SegmentedMemory, context: int, site: int, program: int, table: int) -> None:
        reports.add(site, program, table, memory.bytes)

    return report


@dataclass
class _EmulatedPlanEngine:
    """A plan on one call's memory; `at` are the indices of the loops."""

    plan: Mapping[str, Any]
    module: LlvmModule
    held: list[np.ndarray]
    workspace: np.ndarray
    at: dict[int, int] = field(default_factory=dict)

    def launch(self, first: int, last: int) -> None:
        """Run launches in order."""
        for each in self.plan["launches"][first:last]:
            args = [self.argument(a) for a in each["args"]]
            meets = each["kernel"] in self.plan.get("meeting", ())
            _launch_lanes(self.module, each, self.plan["scratch"][each["kernel"]], args, meets)

    def holds(self, flag: int) -> bool:
        """Whether a flag is set."""
        return bool(np.ravel(self.argument(self.plan["flags"][flag])).view(np.uint8)[0])

    def turn(self, loop: int, index: int) -> None:
        """A loop has come to an index."""
        self.at[loop] = index

    def call(self, number: int) -> None:
        """Run an op on the host."""
        found = self.plan["calls"][number]
        run_host_call(found, [view_as_array(np.ravel(self.argument(a)).view(np.uint8), a) for a in found["args"]])

    def argument(self, arg: Mapping[str, Any]) -> Any:
        """The memory of an argument: a parameter, bytes of the workspace, or the slice of either that loops are at."""
        whole = self.workspace if "param" not in arg else self.held[arg["param"]]
        if "param" in arg and "moves" not in arg:
            return whole
        start = arg.get("offset", 0) + sum(self.at[loop] * count for loop, count in arg.get("moves", ()))
        return whole.reshape(-1).view(np.uint8)[start : start + arg["bytes"]]


def _launch_lanes(module: LlvmModule, launch: Mapping[str, Any], scratch: int, args: list[Any], meets: bool) -> None:
    """Every program of a launch, as lanes of one call or (unless they meet) of several."""
    total = math.prod(launch["grid"])
    most = total if meets else max(1, MAX_SCRATCH_BYTES // max(scratch, 1))
    for first in range(0, total, most):
        count = min(most, total - first)
        numbers = PerLane(np.arange(first, first + count, dtype=np.int64))
        places = PerLane(np.arange(count, dtype=np.int64) * scratch)
        arena = np.zeros(max(1, count * scratch), np.uint8)
        module.call(f"{launch['kernel']}.lane", [*args, numbers, places, *launch["grid"], arena], count)


def _make_lane_wrapper(text: str, kernel: str, scratch: int) -> str:
    """A function that runs one program in its own part of the scratch memory."""
    found = re.search(rf"^define void @{re.escape(kernel)}\.range\((.*?)i64 %begin", text, re.MULTILINE)
    assert found is not None, f"the text lacks @{kernel}.range"
    params = found[1].replace(" noalias", "")
    grid = "i64 %grid0, i64 %grid1, i64 %grid2"
    return f"""
define void @{kernel}.lane({params}i64 %n, i64 %place, {grid}, ptr %scratch) {{
  %next = add i64 %n, 1
  %own = getelementptr i8, ptr %scratch, i64 %place
  call void @{kernel}.range({params}i64 %n, i64 %next, {grid}, ptr %own)
  ret void
}}"""

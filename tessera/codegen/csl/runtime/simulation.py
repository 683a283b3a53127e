"""Simulated runs: execute an artifact in the CSL simulator with the program's own host script."""

from __future__ import annotations

import itertools
import math
import tempfile
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from tessera.codegen.artifact import Artifact, check_fields, has_fields, is_count, is_list, is_text
from tessera.codegen.csl.runtime import host_script
from tessera.codegen.csl.text.program_files import SIMULATOR, make_compile_options
from tessera.codegen.csl.text.statements import make_fault_error
from tessera.core.progress import operation, report_progress
from tessera.interp.target.csl.compiler import CompiledLayout
from tessera.interp.target.csl.host import cslc
from tessera.interp.target.csl.host.runtime import RUNS, MemcpyDataType, MemcpyOrder, SdkRuntime
from tessera.interp.target.csl.host.sdk_layout import CompiledProgram
from tessera.interp.target.csl.host.visualisation import PE_MEMORY, draw_run, summarise_run
from tessera.interp.target.csl.simulation import Simulation


class TimedSdkRuntime(SdkRuntime):
    """An `SdkRuntime` that records the cycles of the computation without the copies."""

    computed = 0

    def launch(self, symbol: str, *args: Any, nonblock: bool = False) -> Any:
        """As `SdkRuntime.launch`."""
        before = self._simulation.cycles
        command = super().launch(symbol, *args, nonblock=nonblock)
        self.computed += self._simulation.cycles - before
        return command


MAX_SIDE, MAX_PIECE_BYTES = 1 << 10, 1 << 20  # of a grid, and of an array on one PE: more than the machines have


_is_index = lambda v: isinstance(v, int) and not isinstance(v, bool)  # noqa: E731
_WINDOW_FIELDS = {"first": is_list(_is_index), "steps": is_list(is_list(_is_index)), "tiles": is_list(is_count)}
_IS_WINDOW = has_fields(**_WINDOW_FIELDS)


def _is_piece(entry: Mapping[str, Any]) -> bool:
    """Whether an array of the plan is split into pieces that fit on a PE."""
    ranks = {len(entry[k]) for k in ("piece", "shape", "split")}
    if not _IS_WINDOW(entry) and any(k in entry for k in _WINDOW_FIELDS):
        return False
    if "steps" in entry:
        ranks |= {len(entry["first"]), len(entry["steps"])}
        if any(len(step) != len(entry["tiles"]) for step in entry["steps"]):
            return False
    return len(ranks) == 1 and math.prod(entry["piece"]) * entry["bytes"] <= MAX_PIECE_BYTES


_is_array = has_fields(
    bytes=lambda v: v in (1, 2, 4, 8), dtype=is_text, piece=is_list(is_count), shape=is_list(is_count),
    split=is_list(lambda v: v in (-1, 0, 1)), symbol=is_text,
)  # fmt: skip
_is_array_list = is_list(lambda v: _is_array(v) and _is_piece(v))
_PLAN_FIELDS = {
    "faults": is_list(has_fields()),
    "given": is_list(is_count),
    "grid": lambda v: is_list(is_count)(v) and len(v) == 2 and 0 < min(v) and max(v) <= MAX_SIDE,
    "inputs": _is_array_list,
    "outputs": _is_array_list,
    "rounds": lambda v: is_count(v) and v > 0,
}
_OPTION_FIELDS = {"arch": lambda v: v in ("wse2", "wse3"), "bfloat": lambda v: isinstance(v, bool)}


def _format_use(busy: np.ndarray) -> str:
    """The share of cycles in which each PE ran tasks: of a small grid by row and column, of a large one in sum."""
    if max(busy.shape) <= SHOWN_PES:
        rows = "\n".join(" ".join(f"{share:3.0f}" for share in row) for row in busy)
        return f"% of these cycles, by row and column of PEs:\n{rows}"
    y, x = np.unravel_index(int(busy.argmax()), busy.shape)
    return (
        f"{busy.min():.0f}% to {busy.max():.0f}% of these cycles, mean {busy.mean():.0f}%; most in row {y}, column {x}"
    )


SIMULATION = "cycles simulated"  # the operation in reports of progress
SHOWN_PES = 16  # rows and columns of the largest grid whose PEs are shown one by one
SOURCE_FILES = ("layout.csl", "pe_program.csl")
_RUN_NUMBERS = itertools.count(1)  # numbers the runs: each has a unique name


class CslSimulation:
    """A program that is compiled once; each call runs it in a new simulation."""

    where = SIMULATOR

    def __init__(self, artifact: Artifact) -> None:
        self._artifact = artifact
        self._plan: dict[str, Any] = artifact.manifest["plan"]
        check_fields(self._plan, _PLAN_FIELDS, "the plan")
        check_fields(artifact.manifest["options"], _OPTION_FIELDS, "the manifest's options")
        self.cycles = 0  # of the last run, without copies
        self._last: Simulation | None = None

    def run(self, arrays: Sequence[Any]) -> list[np.ndarray]:
        """The outputs of the program.

        Raises:
            CslError, CslFault: the program does not compile, or faults.
            OutOfBoundsError, DeadlockError, ExecutionError: a PE reported a fault.
        """
        with operation(SIMULATION):
            return self._select_results(self._execute([arrays[i] for i in self._plan["given"]]), arrays)

    @cached_property
    def _layout(self) -> CompiledLayout:
        """The compiled program."""
        options = self._artifact.manifest["options"]
        with tempfile.TemporaryDirectory(prefix="tessera-csl-") as folder:
            for name in SOURCE_FILES:
                (Path(folder) / name).write_text(self._artifact.text(name))
            flags = make_compile_options(options["arch"], tuple(self._plan["grid"]), options["bfloat"])
            flags[1] = str(Path(folder) / "layout.csl")
            given = cslc.make_parser().parse_args([*flags, "-o", str(Path(folder) / "out")])
            return cslc.compile_settings({**cslc.collect_settings(given), "confined": True})

    def _execute(self, arrays: Sequence[Any]) -> list[np.ndarray]:
        name = f"run {next(_RUN_NUMBERS)}"
        runner = TimedSdkRuntime(CompiledProgram(name, self._layout, {}, {}))
        self._last = RUNS[name]
        self._last.events.progress = lambda cycle: report_progress(SIMULATION, cycle)
        runner.load()
        runner.run()
        kinds = MemcpyDataType.MEMCPY_16BIT, MemcpyDataType.MEMCPY_32BIT
        results = host_script.execute(runner, self._plan, arrays, *kinds, MemcpyOrder.ROW_MAJOR)
        wrong = host_script.find_fault(runner, self._plan, kinds[1], MemcpyOrder.ROW_MAJOR)
        runner.stop()
        RUNS.pop(name, None)
        self.cycles = runner.computed
        if wrong:
            raise make_fault_error(self._plan["faults"], *wrong)
        return results

    def describe_run(self) -> list[tuple[str, str]]:
        """What the last run took, as titles and texts: its cycles, and how busy each PE was."""
        if self._last is None:
            return []
        found = summarise_run(self._last)
        busy = np.zeros(self._plan["grid"])
        for pe in found["pes"]:
            if pe["y"] < busy.shape[0] and pe["x"] < busy.shape[1]:
                busy[pe["y"], pe["x"]] = 100 * pe["launched"] / max(self.cycles, 1)
        memory = max(pe["memory"] for pe in found["pes"])
        return [
            ("cycles", f"{self.cycles:,} of the computation, {found['cycles']:,} with the copies of the host"),
            ("busy", _format_use(busy)),
            ("memory", f"up to {memory:,} of {PE_MEMORY:,} bytes of a PE"),
        ]

    @property
    def last_run(self) -> Simulation | None:
        """The simulation of the last run, with its timeline; None before the first."""
        return self._last

    def draw_run(self, path: str | Path) -> None:
        """Draw the last run: memory and traffic of the grid, and the tasks of each PE over time."""
        assert self._last is not None, "nothing has run"
        draw_run(self._last, path)

    def _select_results(self, results: Sequence[np.ndarray], arrays: Sequence[Any]) -> list[np.ndarray]:
        """The results without the arrays that a kernel writes in place."""
        selected = []
        for entry, result in zip(self._plan["outputs"], results, strict=True):
            if "into" in entry:
                arrays[entry["into"]][...] = result
            else:
                selected.append(result)
        return selected

"""An artifact run in the CSL simulator, as the program's own host script runs it."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tessera.codegen.artifact import Artifact
from tessera.codegen.csl import host
from tessera.codegen.csl.text import SIMULATOR, compile_options
from tessera.interp.target.csl.host import cslc
from tessera.interp.target.csl.host.paths import Compiled
from tessera.interp.target.csl.host.runtime import RUNS, SdkRuntime
from tessera.interp.target.csl.host.tensors import MemcpyDataType, MemcpyOrder


class Timed(SdkRuntime):
    """A run that knows how many cycles its computation took, copies apart."""

    computed = 0

    def launch(self, symbol: str, *args: Any, nonblock: bool = False) -> Any:
        """As SdkRuntime.launch."""
        before = self._simulation.cycles
        command = super().launch(symbol, *args, nonblock=nonblock)
        self.computed += self._simulation.cycles - before
        return command


CSL = ("layout.csl", "pe_program.csl")


class Simulated:
    """A program compiled once, and run afresh for each call."""

    where = SIMULATOR

    def __init__(self, artifact: Artifact) -> None:
        self._artifact = artifact
        self._plan: dict[str, Any] = artifact.manifest["plan"]
        self.cycles = 0  # that the last run computed, copies apart

    def run(self, arrays: Sequence[Any]) -> list[np.ndarray]:
        """The outputs.

        Raises:
            CslError, CslFault: the program does not compile, or goes wrong.
        """
        options = self._artifact.manifest["options"]
        with tempfile.TemporaryDirectory(prefix="tessera-csl-") as folder:
            for name in CSL:
                (Path(folder) / name).write_text(self._artifact.text(name))
            flags = compile_options(options["arch"], tuple(self._plan["grid"]), options["bfloat"])
            flags[1] = str(Path(folder) / "layout.csl")
            given = [arrays[i] for i in self._plan["given"]]
            return self._returned(self._executed([*flags, "-o", str(Path(folder) / "out")], given), arrays)

    def _executed(self, flags: list[str], arrays: Sequence[Any]) -> list[np.ndarray]:
        layout = cslc.build(cslc.settings_of(cslc.parser().parse_args(flags)))
        runner = Timed(Compiled(flags[-1], layout, {}, {}))
        runner.load()
        runner.run()
        kinds = MemcpyDataType.MEMCPY_16BIT, MemcpyDataType.MEMCPY_32BIT
        results = host.execute(runner, self._plan, arrays, *kinds, MemcpyOrder.ROW_MAJOR)
        runner.stop()
        RUNS.pop(flags[-1], None)
        self.cycles = runner.computed
        return results

    def _returned(self, results: Sequence[np.ndarray], arrays: Sequence[Any]) -> list[np.ndarray]:
        """The results that are not arrays which a kernel writes in place."""
        found = []
        for entry, result in zip(self._plan["outputs"], results, strict=True):
            if "into" in entry:
                arrays[entry["into"]][...] = result
            else:
                found.append(result)
        return found

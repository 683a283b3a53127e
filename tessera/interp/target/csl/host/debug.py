"""A look into the PEs after a run: variables, and what the `<debug>` library recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tessera.errors import ArgumentError, FileError
from tessera.interp.target.csl.host.runtime import RUNS


class debug_util:  # noqa: N801  the vendor's name
    """The memory of the last run of a compiled program in this process.

    Args:
        bindir: the folder that `cslc -o` wrote.
        cmaddr: of a real machine; without effect.

    Raises:
        FileError: nothing ran from that folder in this process.
    """

    def __init__(self, bindir: str | Path, cmaddr: str | None = None) -> None:
        folder = str(Path(bindir).resolve())
        if folder not in RUNS:
            raise FileError(f"no program of {bindir} ran in this process", suggestion="run it with SdkRuntime first")
        self._run = RUNS[folder]

    def _pe(self, col: int, row: int) -> Any:
        dx, dy = self._run.layout.fabric_offsets or (0, 0)
        place = (col - dx, row - dy)
        if place not in self._run.pes:
            raise ArgumentError(
                f"the program has no PE at column {col}, row {row} of the fabric",
                expected=f"{dx} to {dx + self._run.layout.width - 1}, {dy} to {dy + self._run.layout.height - 1}",
            )
        return self._run.pes[place]

    def get_symbol(self, col: int, row: int, symbol: str, dtype: Any) -> np.ndarray:
        """A variable of the PE at a place of the fabric, as elements of `dtype`."""
        return np.ascontiguousarray(self._pe(col, row).variable(symbol)).reshape(-1).view(dtype).copy()

    def get_symbol_rect(self, rectangle: Any, symbol: str, dtype: Any) -> np.ndarray:
        """The same for a rectangle ((col, row), (width, height)): an array (width, height, elements)."""
        (col, row), (width, height) = rectangle
        return np.array(
            [[self.get_symbol(x, y, symbol, dtype) for y in range(row, row + height)] for x in range(col, col + width)]
        )

    def read_trace(self, col: int, row: int, trace: str) -> list[Any]:
        """What the PE recorded under a key."""
        return list(self._pe(col, row).traces.get(trace, []))

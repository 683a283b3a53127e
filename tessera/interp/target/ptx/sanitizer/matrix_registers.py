"""Registers of wgmma: which an instruction in flight writes, and which were written without a wgmma.fence since."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tessera.core.errors import AsyncCopyError
from tessera.interp.target.ptx.machine.lane_set import LaneSet
from tessera.interp.target.ptx.machine.memory import PtxFault

if TYPE_CHECKING:
    from tessera.interp.target.ptx.machine.simt import PtxMachine
    from tessera.interp.target.ptx.sanitizer.race_detector import PtxVectorClocks


class MatrixRegisterShadow:
    """The registers that wgmma instructions of a program read and write (PTX ISA, "wgmma.fence")."""

    def __init__(self, m: PtxMachine, clocks: PtxVectorClocks) -> None:
        self.m, self.clocks = m, clocks
        self.rows = {index: row for row, index in enumerate(sorted(m.program.matrix_registers))}
        self.unfenced = np.zeros((len(self.rows), m.ctas * m.threads), bool)
        self.groups: dict[int, np.ndarray] = {}  # of a register in flight: the group by lane
        self.in_matrix_instruction = False

    def record_write(self, index: int, lanes: LaneSet) -> None:
        """Lanes write a register, by another instruction than wgmma."""
        if not self.in_matrix_instruction:
            self.unfenced[self.rows[index], lanes.flat] = True

    def fence(self, lanes: LaneSet) -> None:
        """A wgmma.fence of lanes."""
        self.unfenced[:, lanes.flat] = False

    def check_operands(self, lanes: LaneSet, registers: list[int]) -> None:
        """A wgmma reads registers: a fence must follow their last writes."""
        rows = [self.rows[index] for index in registers]
        late = self.unfenced[np.ix_(np.asarray(rows, np.int64), lanes.flat)]
        if late.any():
            row, lane = np.argwhere(late)[0].tolist()
            raise PtxFault(
                f"register {self.m.program.names[registers[row]]} is read by a wgmma without a wgmma.fence after it "
                "was written",
                AsyncCopyError, int(lanes.flat[lane]),
            )  # fmt: skip

    def record_issue(self, lanes: LaneSet, registers: list[int]) -> None:
        """A wgmma in flight writes these accumulators."""
        groups = self.clocks.current_group("matrix", lanes.flat)
        for index in registers:
            pending = self.groups.setdefault(index, np.zeros(self.m.ctas * self.m.threads, np.int32))
            pending[lanes.flat] = groups

    def check_read(self, index: int, lanes: LaneSet) -> None:
        """A register must not be read while a wgmma in flight writes it."""
        pending = self.groups.get(index)
        if pending is None or self.in_matrix_instruction:
            return
        columns = self.clocks.find_engine_columns("matrix", lanes.flat)
        seen = self.clocks.vectors[lanes.flat, columns] >= pending[lanes.flat]
        if not seen.all():
            name, lane = self.m.program.names[index], int(lanes.flat[np.argmin(seen)])
            raise PtxFault(
                f"register {name} is read before the wgmma that writes it was waited for", AsyncCopyError, lane
            )

"""Registers of wgmma: which an instruction in flight uses, and which were written without a wgmma.fence since."""

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
        # Of a register that an instruction in flight writes, and of one that it reads: the group by lane.
        self.written: dict[int, np.ndarray] = {}
        self.read: dict[int, np.ndarray] = {}
        self.in_matrix_instruction = False

    def record_write(self, index: int, lanes: LaneSet) -> None:
        """Lanes write a register, by another instruction than wgmma: none in flight may use it."""
        if not self.in_matrix_instruction:
            self._check_ended(self.written, index, lanes, "written", "writes")
            self._check_ended(self.read, index, lanes, "written", "reads")
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

    def record_issue(self, lanes: LaneSet, accumulators: list[int], fragment: list[int]) -> None:
        """A wgmma in flight writes its accumulators, and reads its fragment of A."""
        groups = self.clocks.current_group("matrix", lanes.flat)
        for held, registers in ((self.written, accumulators), (self.read, fragment)):
            for index in registers:
                pending = held.setdefault(index, np.zeros(self.m.ctas * self.m.threads, np.int32))
                pending[lanes.flat] = groups

    def check_read(self, index: int, lanes: LaneSet) -> None:
        """A register must not be read while a wgmma in flight writes it."""
        if not self.in_matrix_instruction:
            self._check_ended(self.written, index, lanes, "read", "writes")

    def _check_ended(self, held: dict[int, np.ndarray], index: int, lanes: LaneSet, ours: str, theirs: str) -> None:
        """The instructions that hold a register were waited for."""
        pending = held.get(index)
        if pending is None:
            return
        columns = self.clocks.find_engine_columns("matrix", lanes.flat)
        seen = self.clocks.vectors[lanes.flat, columns] >= pending[lanes.flat]
        if not seen.all():
            name, lane = self.m.program.names[index], int(lanes.flat[np.argmin(seen)])
            raise PtxFault(
                f"register {name} is {ours} before the wgmma that {theirs} it was waited for", AsyncCopyError, lane
            )

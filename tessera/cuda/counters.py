"""Launch counters: the instructions, operations, bytes, sectors and bank conflicts of a launch in the PTX emulator.

Bank conflicts and sectors are the model of `interp/sanitizer/memory_transactions.py`; occupancy is that of
`runtime/occupancy.py`. Nothing here is a measurement of a GPU.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from tessera.core.errors import Location
from tessera.interp.sanitizer.memory_transactions import WarpTransactions, count_bank_conflicts, count_sectors
from tessera.interp.target.ptx.machine.lane_set import LaneSet
from tessera.interp.target.ptx.machine.simt import PtxMachine
from tessera.interp.target.ptx.text.syntax import PtxInstruction
from tessera.runtime.occupancy import Occupancy

_WARP, _WARPGROUP = 32, 128
_SHAPE = re.compile(r"m(\d+)n(\d+)k(\d+)")
_FLOAT_TYPES = {"f16": 1, "bf16": 1, "f32": 1, "f64": 1, "f16x2": 2, "bf16x2": 2, "f32x2": 2}
_FLOPS = {"add": 1, "sub": 1, "mul": 1, "div": 1, "min": 1, "max": 1, "fma": 2, "mad": 2, "ex2": 1, "rcp": 1, "sqrt": 1,
          "rsqrt": 1, "lg2": 1, "tanh": 1, "sin": 1, "cos": 1}  # fmt: skip
_KINDS = {"ld": "read", "ldu": "read", "ldmatrix": "read", "wmma": "read", "st": "written", "stmatrix": "written",
          "atom": "atomic", "red": "atomic"}  # fmt: skip
_NO_TRANSACTIONS = WarpTransactions(0, 0, 0, 0)
MAX_LINES = 12  # source lines that a report lists


@dataclass
class LineCounts:
    """What one source line executes."""

    instructions: int = 0
    global_bytes: int = 0
    conflicts: int = 0


@dataclass
class LaunchCounters:
    """An observer of the emulator that counts; instructions are those of warps, bytes those of active threads."""

    instructions: Counter[str] = field(default_factory=Counter)
    flops: int = 0
    matrix_flops: int = 0
    bytes: Counter[str] = field(default_factory=Counter)
    sectors: WarpTransactions = _NO_TRANSACTIONS
    banks: WarpTransactions = _NO_TRANSACTIONS
    lines: dict[Location, LineCounts] = field(default_factory=dict)

    def execute(self, machine: PtxMachine, instruction: PtxInstruction, lanes: LaneSet) -> None:
        """Count an instruction."""
        warps = _count_warps(lanes)
        self.instructions[instruction.op[0]] += warps
        self._line(instruction).instructions += warps
        if shape := next((m for w in instruction.op if (m := _SHAPE.fullmatch(w))), None):
            self._count_matrix(instruction, shape, lanes.count)
        elif instruction.op[0] in _FLOPS:
            self.flops += _FLOPS[instruction.op[0]] * _FLOAT_TYPES.get(instruction.op[-1], 0) * lanes.count

    def _count_matrix(self, instruction: PtxInstruction, shape: re.Match[str], threads: int) -> None:
        if instruction.op[0] == "mma" or "mma_async" in instruction.op or instruction.op[:2] == ("wmma", "mma"):
            group = _WARPGROUP if instruction.op[0] == "wgmma" else _WARP
            m, n, k = map(int, shape.groups())
            self.matrix_flops += 2 * m * n * k * (threads // group)

    def access(self, machine: PtxMachine, space: str, lanes: LaneSet, offset: np.ndarray, size: int) -> None:
        """Count an access."""
        instruction = machine.program.lines[machine.pc].instruction
        if space == "local" or instruction.op[0] == "mbarrier" or "param" in instruction.op:
            return
        kind = _KINDS.get(instruction.op[0]) or ("read" if space == "global" else "written")
        self.bytes[f"{space} {kind}"] += size * lanes.count
        first, active = _group_by_warp(machine, lanes, offset)
        if space == "shared":
            traffic = count_bank_conflicts(first, active, size)
            self.banks += traffic
            self._line(instruction).conflicts += traffic.excess
        else:
            self.sectors += count_sectors(first, active, size)
            self._line(instruction).global_bytes += size * lanes.count

    def transfer(self, machine: PtxMachine, read: int, written: int) -> None:
        """Count a bulk copy."""
        self.bytes["global read"] += read
        self.bytes["global written"] += written
        self._line(machine.program.lines[machine.pc].instruction).global_bytes += read + written

    def _line(self, instruction: PtxInstruction) -> LineCounts:
        source = instruction.source if instruction.source and instruction.source.line else instruction.location
        return self.lines.setdefault(Location(source.file, source.line), LineCounts())


def _count_warps(lanes: LaneSet) -> int:
    if lanes.plain:
        columns, rows = lanes.columns, lanes.rows
        return (rows.stop - rows.start) * (-(-columns.stop // _WARP) - columns.start // _WARP)
    warps = lanes.ctas * (lanes.extent[1] // _WARP + 1) + lanes.flat % lanes.extent[1] // _WARP
    return len(np.unique(warps))


def _group_by_warp(machine: PtxMachine, lanes: LaneSet, offset: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each warp and lane its first byte, and whether the lane is active."""
    width = -(-machine.threads // _WARP) * _WARP
    place = lanes.ctas * width + lanes.flat % machine.threads
    warps, row = np.unique(place // _WARP, return_inverse=True)
    first, active = np.zeros((len(warps), _WARP), np.int64), np.zeros((len(warps), _WARP), bool)
    first[row, place % _WARP] = lanes.compress(offset)
    active[row, place % _WARP] = True
    return first, active


@dataclass
class LaunchReport:
    """One launch of a kernel: its shape, its resources, and what it executed."""

    kernel: str
    grid: tuple[int, ...]
    threads: int
    shared: int
    registers: int | None
    occupancy: Occupancy | None
    counters: LaunchCounters
    block_word: str = "block"

    def __str__(self) -> str:
        c = self.counters
        rows = [
            ("grid", f"{'x'.join(map(str, self.grid))} {self.block_word}s of {self.threads} threads"),
            ("instructions", f"{sum(c.instructions.values()):,} of warps: {_list_counts(c.instructions, 8)}"),
            ("operations", f"{c.flops:,} floating-point, {c.matrix_flops:,} in matrix instructions"),
            ("global memory", f"{_list_bytes(c.bytes, 'global')}; {_describe_sectors(c.sectors)}"),
            ("shared memory", f"{_list_bytes(c.bytes, 'shared')}; {_describe_banks(c.banks)}"),
            ("resources", f"{self.shared:,} bytes of shared memory, {self.registers or '?'} registers a thread"),
            ("occupancy", _describe_occupancy(self.occupancy, self.block_word)),
        ]
        head = [f"{self.kernel}", *(f"  {name:<14} {text}" for name, text in rows)]
        return "\n".join([*head, *self._list_lines()])

    def _list_lines(self) -> list[str]:
        ranked = sorted(self.counters.lines.items(), key=lambda item: -item[1].instructions)
        lines = [f"  {'instructions':>14} {'global bytes':>14} {'conflicts':>10}  line"]
        for place, n in ranked[:MAX_LINES]:
            text = place.excerpt().partition("|")[2].strip()
            lines.append(f"  {n.instructions:>14,} {n.global_bytes:>14,} {n.conflicts:>10,}  {place}  {text}")
        return lines


def _list_counts(counts: Counter[str], most: int) -> str:
    found = [f"{name} {n:,}" for name, n in counts.most_common(most)]
    return ", ".join(found) + (" …" if len(counts) > most else "")


def _list_bytes(counts: Counter[str], space: str) -> str:
    found = [f"{n:,} bytes {key.split()[1]}" for key, n in sorted(counts.items()) if key.startswith(space) and n]
    return ", ".join(found) or "not accessed"


def _describe_sectors(s: WarpTransactions) -> str:
    return f"{s.taken:,} sectors of 32 bytes by threads, at least {s.least:,} needed"


def _describe_banks(b: WarpTransactions) -> str:
    if not b.excess:
        return "no bank conflicts"
    return f"bank conflicts: {b.taken:,} cycles for {b.warps:,} accesses, at least {b.least:,} needed"


def _describe_occupancy(o: Occupancy | None, word: str) -> str:
    if o is None:
        return "unknown: the registers of the kernel are not known"
    return f"{o.groups} {word}s a multiprocessor of {o.gpu}, {o.share:.0%} of its threads (limited by {o.limit})"

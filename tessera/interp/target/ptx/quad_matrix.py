"""The oldest shape of mma, m8n8k4 of halves: four products a warp, each of eight lanes."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from tessera.interp.target.ptx.decode import Decoder
from tessera.interp.target.ptx.fragments import accumulate, collect, distribute, matrix
from tessera.interp.target.ptx.lanes import Lanes
from tessera.interp.target.ptx.machine import Line, Machine
from tessera.interp.target.ptx.operands import parts_of
from tessera.interp.target.ptx.syntax import Instruction
from tessera.interp.target.ptx.types import TYPES, Type

# Eight lanes multiply together: 4q to 4q + 3, and those 16 above.
_TEAMS = np.array([[4 * q + lane % 4 + 16 * (lane // 4) for lane in range(8)] for q in range(4)])


@lru_cache(maxsize=8)
def _sides(transposed: bool) -> np.ndarray:
    """For each element [8, 4] of A (of B turned round) its slot among eight lanes of four elements.

    (PTX ISA, "Matrix fragments for mma.m8n8k4 with .f16": a lane has a line along the depth, or one across.)
    """
    line, k = np.meshgrid(np.arange(8), np.arange(4), indexing="ij")
    half, across = np.divmod(line, 4)
    lane, element = (4 * half + k, across) if transposed else (4 * half + across, k)
    return (4 * lane + element).reshape(-1)


@lru_cache(maxsize=8)
def _result(name: str) -> np.ndarray:
    """For each of eight lanes' eight slots the element [8, 8] it holds."""
    lane, i = np.meshgrid(np.arange(8), np.arange(8), indexing="ij")
    if name == "f16":
        return (8 * lane + i).reshape(-1)
    row = 4 * (lane // 4) + (lane & 1) + (i & 2)
    return (8 * row + (i & 4) + (lane & 2) + (i & 1)).reshape(-1)


def decode_quads(d: Decoder, inst: Instruction, line: Line) -> None:
    """`mma.sync.aligned.m8n8k4.alayout.blayout.dtype.f16.f16.ctype`."""
    out, a, _, c = (TYPES[w] for w in inst.op[-4:])
    turned = [inst.op[4] == "col", inst.op[5] == "row"]
    b32 = TYPES["b32"]
    writers = [d.writer(o, b32) for o in parts_of(inst.operands[0])]
    sources = [[d.reader(o, b32) for o in parts_of(x)] for x in inst.operands[1:4]]
    line.team = 32

    def step(m: Machine, lanes: Lanes) -> None:
        x, y, z = (_quads(collect(m, lanes, s)) for s in sources)
        left, right = (matrix(v, a, _sides(t), 8, 4) for v, t in zip((x, y), turned, strict=True))
        product = (left @ np.swapaxes(right, 1, 2)).reshape(-1, 64)
        addend = np.empty((len(z), 64), c.dtype)
        addend[:, _result(c.name)] = np.ascontiguousarray(z).view(c.dtype).reshape(len(z), -1)
        distribute(m, lanes, writers, _warps(accumulate(product, addend, out, False), out))

    line.step = step


def _quads(registers: np.ndarray) -> np.ndarray:
    """Registers of warps [warps, 32, n] by teams of eight lanes."""
    return np.ascontiguousarray(registers[:, _TEAMS]).reshape(-1, 8, registers.shape[2])


def _warps(elements: np.ndarray, t: Type) -> np.ndarray:
    """Matrices [teams, 64] as registers of warps."""
    held = np.ascontiguousarray(elements[:, _result(t.name)]).view(np.uint32).reshape(-1, 32, 8 * t.bits // 32)
    found = np.empty_like(held)
    found[:, _TEAMS.reshape(-1)] = held
    return found

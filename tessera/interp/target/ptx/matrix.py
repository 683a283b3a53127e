"""Tensor cores of a warp: mma, and the loads and stores of 8 by 8 matrices."""

from __future__ import annotations

import re

import numpy as np

from tessera.interp.target.ptx.address import known_words, spots, target
from tessera.interp.target.ptx.decode import CONTROL, Decoder, rule
from tessera.interp.target.ptx.fragments import accumulate, collect, distribute, left, matrix, result, right
from tessera.interp.target.ptx.lanes import Lanes
from tessera.interp.target.ptx.machine import Line, Machine
from tessera.interp.target.ptx.moves import observe
from tessera.interp.target.ptx.operands import parts_of
from tessera.interp.target.ptx.quad_matrix import decode_quads
from tessera.interp.target.ptx.syntax import Instruction, Operand
from tessera.interp.target.ptx.types import TYPES, Type

_LEFT = {"f16", "bf16", "tf32", "e4m3", "e5m2", "s8", "u8", "f64"}


def extents(word: str) -> tuple[int, int, int]:
    """The numbers of `m16n8k16`."""
    found = re.fullmatch(r"m(\d+)n(\d+)k(\d+)", word)
    assert found is not None
    return int(found[1]), int(found[2]), int(found[3])


def register_type(t: Type) -> Type:
    """The type of the registers that hold fragments of a type."""
    return TYPES["b64" if t.bits == 64 else "b32"]


def counted(d: Decoder, inst: Instruction, operand: Operand, many: int) -> tuple[Operand, ...]:
    """The registers of an operand, which must be so many."""
    parts = parts_of(operand)
    if len(parts) != many:
        raise d.unsupported(inst)
    return parts


@rule("mma", table=CONTROL)
def _(d: Decoder, inst: Instruction, line: Line) -> None:
    rows, columns, depth = extents(inst.op[3])
    words = set(inst.op[4:-4])
    out, a, b, c = (TYPES[w] for w in inst.op[-4:])
    allowed = {"row", "col", "satfinite"} | ({"rn"} if a.name == "f64" else set())
    if inst.op[1:3] != ("sync", "aligned") or not words <= allowed or columns != 8:
        raise d.unsupported(inst)
    if a.name not in _LEFT or b.name not in _LEFT or a.bits != b.bits:
        raise d.unsupported(inst)
    if (rows, a.name) == (8, "f16"):
        decode_quads(d, inst, line)
        return
    per = register_type(a).bits // a.bits
    register = [register_type(t) for t in (out, a, b, c)]
    sides = ((rows * 8, out), (rows * depth, a), (depth * 8, b), (rows * 8, c))
    for operand, (many, t) in zip(inst.operands, sides, strict=True):
        counted(d, inst, operand, many * t.bits // 32 // register_type(t).bits)
    writers = [d.writer(o, register[0]) for o in parts_of(inst.operands[0])]
    sources = [[d.reader(o, r) for o in parts_of(x)] for x, r in zip(inst.operands[1:4], register[1:], strict=True)]
    order_a, order_b, order_c = left(rows, depth, per), right(depth, per), result(rows, 8)
    line.team = 32

    def step(m: Machine, lanes: Lanes) -> None:
        x, y, z = (collect(m, lanes, s) for s in sources)
        product = matrix(x, a, order_a, rows, depth) @ matrix(y, b, order_b, depth, 8)
        addend = np.ascontiguousarray(z).view(c.dtype).reshape(len(z), -1)
        total = accumulate(product.reshape(len(z), -1)[:, order_c], addend, out, "satfinite" in words)
        distribute(m, lanes, writers, np.ascontiguousarray(total).view(register[0].dtype))

    line.step = step


def _matrices(d: Decoder, inst: Instruction) -> tuple[int, bool]:
    """How many matrices of 8 by 8 an instruction moves, and whether transposed."""
    words = [w for w in inst.op[4:-1] if w not in ("trans", "shared", "shared::cta")]
    if inst.op[1:4] != ("sync", "aligned", "m8n8") or inst.op[-1] != "b16":
        raise d.unsupported(inst)
    known_words(d, inst, "sync", "aligned", "m8n8", "x1", "x2", "x4", "trans")
    return int(words[0][1:]), "trans" in inst.op


@rule("ldmatrix", table=CONTROL)
def _(d: Decoder, inst: Instruction, line: Line) -> None:
    """Lanes 8i to 8i + 7 give the rows of matrix i; each lane gets two neighbours of row lane / 4."""
    many, transposed = _matrices(d, inst)
    writers = [d.writer(o, TYPES["b32"]) for o in counted(d, inst, inst.operands[0], many)]
    where = target(d, inst, inst.operands[1])
    line.team = 32

    def step(m: Machine, lanes: Lanes) -> None:
        rows = _row_offsets(m, lanes, where, many, "read")
        cells = m.flat["shared"].views[2][rows[..., None] // 2 + np.arange(8)]
        if transposed:
            cells = np.swapaxes(cells, -1, -2)
        pairs = np.ascontiguousarray(cells).view(np.uint32).reshape(-1, many, 32)
        distribute(m, lanes, writers, np.swapaxes(pairs, 1, 2))

    line.step = step


@rule("stmatrix", table=CONTROL)
def _(d: Decoder, inst: Instruction, line: Line) -> None:
    many, transposed = _matrices(d, inst)
    where = target(d, inst, inst.operands[0])
    readers = [d.reader(o, TYPES["b32"]) for o in counted(d, inst, inst.operands[1], many)]
    line.team = 32

    def step(m: Machine, lanes: Lanes) -> None:
        pairs = np.ascontiguousarray(np.swapaxes(collect(m, lanes, readers), 1, 2))
        cells = pairs.view(np.uint16).reshape(-1, many, 8, 8)
        if transposed:
            cells = np.swapaxes(cells, -1, -2)
        rows = _row_offsets(m, lanes, where, many, "write")
        m.flat["shared"].views[2][rows[..., None] // 2 + np.arange(8)] = cells

    line.step = step


def _row_offsets(m: Machine, lanes: Lanes, where: object, many: int, kind: str) -> np.ndarray:
    """Where the rows [warps, matrices, 8] lie; other lanes' addresses do not count."""
    leading = lanes.select(lanes.thread % 32 < 8 * many) if many < 4 else lanes
    (spot,) = spots(m, leading, where, 16)  # type: ignore[arg-type]
    observe(m, spot, 16, kind)
    return spot.lanes.compress(spot.offset).reshape(-1, many, 8)


@rule("movmatrix", table=CONTROL)
def _(d: Decoder, inst: Instruction, line: Line) -> None:
    if inst.op[1:] != ("sync", "aligned", "m8n8", "trans", "b16"):
        raise d.unsupported(inst)
    write, read = d.writer(inst.operands[0], TYPES["b32"]), d.reader(inst.operands[1], TYPES["b32"])
    line.team = 32

    def step(m: Machine, lanes: Lanes) -> None:
        cells = collect(m, lanes, [read]).view(np.uint16).reshape(-1, 8, 8)
        turned = np.ascontiguousarray(np.swapaxes(cells, 1, 2)).view(np.uint32)
        distribute(m, lanes, [write], turned.reshape(-1, 32, 1))

    line.step = step

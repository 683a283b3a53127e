"""The older warp matrices (wmma), whose fragments are opaque: an order of our own."""

from __future__ import annotations

import numpy as np

from tessera.interp.target.ptx.address import Target, known_words, spots, target
from tessera.interp.target.ptx.decode import CONTROL, Decoder, rule
from tessera.interp.target.ptx.fragments import accumulate, collect, distribute, raw_of, widened
from tessera.interp.target.ptx.lanes import Lanes
from tessera.interp.target.ptx.machine import Line, Machine
from tessera.interp.target.ptx.matrix import extents, register_type
from tessera.interp.target.ptx.moves import observe
from tessera.interp.target.ptx.operands import Reader, constant, parts_of
from tessera.interp.target.ptx.syntax import Instruction
from tessera.interp.target.ptx.types import TYPES, Type


def _shape(inst: Instruction, which: str) -> tuple[int, int]:
    """Rows and columns of a fragment."""
    word = next(w for w in inst.op if w.startswith("m") and w[1:2].isdigit())
    m, n, k = extents(word)
    return {"a": (m, k), "b": (k, n), "c": (m, n), "d": (m, n)}[which]


@rule("wmma", table=CONTROL)
def _(d: Decoder, inst: Instruction, line: Line) -> None:
    if any(w in inst.op for w in ("s4", "u4", "b1")):
        raise d.unsupported(inst)
    line.team = 32
    {"load": _load, "store": _store, "mma": _mma}[inst.op[1]](d, inst, line)


def _places(
    d: Decoder, inst: Instruction, which: str, t: Type, stride_at: int
) -> tuple[np.ndarray, np.ndarray, Reader]:
    """Row and column factors of each element's address, and what reads the stride between lines."""
    known_words(d, inst, which, inst.op[1], "sync", "aligned", "row", "col", *(w for w in inst.op if w[:1] == "m"))
    rows, columns = _shape(inst, which)
    r, c = np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij")
    lines, along = (r, c) if "row" in inst.op else (c, r)
    if len(inst.operands) > stride_at:
        return lines, along, d.reader(inst.operands[stride_at], TYPES["u32"])
    return lines, along, constant(np.array([[columns if "row" in inst.op else rows]], np.uint32))


def _offsets(
    m: Machine, lanes: Lanes, where: Target, size: int, stride: Reader, kind: str
) -> tuple[str, np.ndarray, np.ndarray]:
    """The space, and for each warp where its matrix begins and its stride, in elements."""
    first = lanes.select(lanes.thread % 32 == 0)
    (spot,) = spots(m, first, where, size)
    observe(m, spot, size, kind)
    return spot.space, first.compress(spot.offset) // size, first.compress(stride(m, first)).astype(np.int64)


def _load(d: Decoder, inst: Instruction, line: Line) -> None:
    """Slots beyond the matrix hold it once more, as the shape of the registers asks."""
    t, which = TYPES[inst.op[-1]], inst.op[2]
    where = target(d, inst, inst.operands[1])
    lines, along, stride = _places(d, inst, which, t, 2)
    register = register_type(t)
    writers = [d.writer(o, register) for o in parts_of(inst.operands[0])]
    per = register.bits // t.bits

    def step(m: Machine, lanes: Lanes) -> None:
        space, base, by = _offsets(m, lanes, where, t.bits // 8, stride, "read")
        cells = m.flat[space].views[t.bits // 8]
        flat = cells[base[:, None] + (by[:, None] * lines.reshape(-1) + along.reshape(-1))]
        slots = np.resize(np.arange(flat.shape[1]), 32 * len(writers) * per).reshape(-1, 32, per)
        values = np.ascontiguousarray(np.moveaxis(flat[:, slots], 1, 2)).view(register.dtype)
        distribute(m, lanes, writers, values)

    line.step = step


def _flat(registers: np.ndarray, t: Type, size: int) -> np.ndarray:
    """The elements of fragments in the order of memory."""
    raw = np.ascontiguousarray(registers).view(raw_of(t)).reshape(len(registers), 32, registers.shape[2], -1)
    return np.swapaxes(raw, 1, 2).reshape(len(registers), -1)[:, :size]


def _store(d: Decoder, inst: Instruction, line: Line) -> None:
    t = TYPES[inst.op[-1]]
    where = target(d, inst, inst.operands[0])
    lines, along, stride = _places(d, inst, "d", t, 2)
    readers = [d.reader(o, register_type(t)) for o in parts_of(inst.operands[1])]

    def step(m: Machine, lanes: Lanes) -> None:
        values = _flat(collect(m, lanes, readers), t, lines.size)
        space, base, by = _offsets(m, lanes, where, t.bits // 8, stride, "write")
        index = base[:, None] + (by[:, None] * lines.reshape(-1) + along.reshape(-1))
        m.flat[space].views[t.bits // 8][index] = values

    line.step = step


def _mma(d: Decoder, inst: Instruction, line: Line) -> None:
    types = [TYPES[w] for w in inst.op[6:] if w in TYPES]
    out, a, b, c = types if len(types) == 4 else (types[0], TYPES["f16"], TYPES["f16"], types[-1])
    shapes = [_shape(inst, w) for w in "abc"]
    writers = [d.writer(o, register_type(out)) for o in parts_of(inst.operands[0])]
    sources = [
        [d.reader(o, register_type(t)) for o in parts_of(x)] for x, t in zip(inst.operands[1:4], (a, b, c), strict=True)
    ]

    def step(m: Machine, lanes: Lanes) -> None:
        x, y, z = (
            _flat(collect(m, lanes, s), t, rows * columns)
            for s, t, (rows, columns) in zip(sources, (a, b, c), shapes, strict=True)
        )
        product = widened(x, a).reshape(-1, *shapes[0]) @ widened(y, b).reshape(-1, *shapes[1])
        total = accumulate(product.reshape(len(x), -1), z.view(c.dtype), out, "satfinite" in inst.op)
        per = register_type(out).bits // out.bits
        slots = np.swapaxes(total.reshape(len(x), -1, 32, per), 1, 2)
        distribute(m, lanes, writers, np.ascontiguousarray(slots).view(register_type(out).dtype))

    line.step = step

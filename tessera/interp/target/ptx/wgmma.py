"""Tensor cores of a warpgroup: matrices in shared memory named by descriptors."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from tessera.errors import ExecutionError, OutOfBoundsError
from tessera.interp.target.ptx.decode import CONTROL, Decoder, rule
from tessera.interp.target.ptx.fault import Fault
from tessera.interp.target.ptx.fragments import accumulate, collect, distribute, left, matrix, raw_of, result, widened
from tessera.interp.target.ptx.lanes import Lanes
from tessera.interp.target.ptx.machine import Line, Machine
from tessera.interp.target.ptx.matrix import counted, extents
from tessera.interp.target.ptx.operands import Reader, Writer, parts_of
from tessera.interp.target.ptx.syntax import Group, Instruction, Name, Number, Operand
from tessera.interp.target.ptx.tensor_copy import swizzled
from tessera.interp.target.ptx.types import TYPES, Type

TEAM = 128
_CHUNK = 16  # bytes that no swizzle divides
_SWIZZLES = {0: 0, 1: 128, 2: 64, 3: 32}


class Descriptor(NamedTuple):
    """A matrix in shared memory: leading and stride offsets in bytes, and the swizzle."""

    leading: int
    stride: int
    swizzle: int


def decoded(bits: int) -> tuple[int, Descriptor]:
    """The start of a matrix in its CTA's shared memory, and the rest of its descriptor.

    >>> decoded(1 << 62 | (1024 >> 4) << 32 | 1 << 16 | 2048 >> 4)
    (2048, Descriptor(leading=16, stride=1024, swizzle=128))
    """
    if bits >> 49 & 7:
        raise Fault("a matrix descriptor with a base offset", ExecutionError)
    start, leading, stride = ((bits >> at & 0x3FFF) << 4 for at in (0, 16, 32))
    return start, Descriptor(leading, stride, _SWIZZLES[bits >> 62])


@lru_cache(maxsize=256)
def chunks(shape: Descriptor, rows: int, depth: int, size: int, transposed: bool) -> np.ndarray:
    """Offsets of the 16-byte chunks of a matrix of `rows` (M or N) by `depth` (K) elements, before the swizzle.

    [rows, chunks of a row] where K lies side by side in memory, else [depth, chunks of a column]. The canonical layouts
    of the PTX ISA ("Shared Memory Matrix Layout" of wgmma): groups of 8 lines, `stride` or `leading` bytes apart.
    """
    lines, along = (depth, rows) if transposed else (rows, depth)
    line, chunk = np.meshgrid(np.arange(lines), np.arange(along * size // _CHUNK), indexing="ij")
    group, line = line // 8, line % 8
    if not shape.swizzle:  # 8 lines of one chunk lie together
        outer, inner = (shape.leading, shape.stride) if transposed else (shape.stride, shape.leading)
        return group * outer + line * _CHUNK + chunk * inner
    per = shape.swizzle // _CHUNK
    return group * shape.stride + line * shape.swizzle + chunk // per * shape.leading + chunk % per * _CHUNK


def load(m: Machine, lanes: Lanes, read: Reader, rows: int, depth: int, t: Type, transposed: bool) -> np.ndarray:
    """The matrices [teams, rows, depth] that each warpgroup's descriptor names, as float32."""
    teams = lanes.flat[::TEAM]
    bits = lanes.compress(read(m, lanes))[::TEAM].tolist()
    raw = m.flat["shared"].views[8].reshape(-1, 2)
    shapes = [decoded(b) for b in bits]
    shape = shapes[0][1]
    if any(s[1] != shape for s in shapes):
        raise Fault("descriptors of one instruction differ in more than their start", ExecutionError, int(teams[0]))
    start = np.array([s[0] for s in shapes])
    table = chunks(shape, rows, depth, t.dtype.itemsize, transposed)
    if int(start.max()) + int(table.max()) + _CHUNK > m.shared_bytes:
        raise Fault("a matrix descriptor reaches beyond shared memory", OutOfBoundsError, int(teams[0]))
    within = swizzled(start[:, None, None] + table, shape.swizzle)
    place = within + (teams // m.threads * m.shared_size)[:, None, None]
    if m.debug:
        m.shadow.matrix_read(lanes, place.reshape(len(teams), -1), TEAM)
    content = raw[place // _CHUNK].reshape(len(teams), table.shape[0], -1).view(raw_of(t))
    found = widened(np.ascontiguousarray(content), t)
    return np.swapaxes(found, 1, 2) if transposed else found


@rule("wgmma", table=CONTROL)
def _(d: Decoder, inst: Instruction, line: Line) -> None:
    if inst.op[1] == "mma_async" and inst.op[2:4] == ("sync", "aligned"):
        _multiply(d, inst, line)
        return
    kind = {"fence": "fence", "commit_group": "commit", "wait_group": "wait"}[inst.op[1]]
    left_over = inst.operands[0].value if inst.operands and isinstance(inst.operands[0], Number) else 0
    line.team = 32
    line.step = lambda m, lanes: m.shadow.matrix_group(lanes, kind, left_over) if m.debug else None


def _number(operand: Operand) -> int:
    assert isinstance(operand, Number)
    return operand.value


@dataclass(frozen=True)
class _Product:
    """One mma_async: D = A B, or D += A B where `keep` says so; `held` are the accumulators' registers."""

    columns: int
    depth: int
    types: tuple[Type, Type, Type]
    left: Reader | list[Reader]  # a descriptor, or the registers of A
    right: Reader
    keep: Reader
    sign: int
    turned: tuple[bool, bool]
    saturate: bool
    readers: list[Reader]
    writers: list[Writer]
    held: list[int]

    def __call__(self, m: Machine, lanes: Lanes) -> None:
        if not m.debug:
            self._run(m, lanes)
            return
        # Accumulators may be those of an instruction still under way: it alone may read them.
        m.shadow.multiplying = True
        self._run(m, lanes)
        m.shadow.multiplying = False
        m.shadow.matrix_issued(lanes, self.held)

    def _run(self, m: Machine, lanes: Lanes) -> None:
        out, a, b = self.types
        x = self._left(m, lanes, a)
        y = np.swapaxes(load(m, lanes, self.right, self.columns, self.depth, b, self.turned[1]), 1, 2)
        order = result(64, self.columns)
        product = (x @ y if self.sign > 0 else -(x @ y)).reshape(len(y), -1)[:, order]
        total = accumulate(product, self._addend(m, lanes, out), out, self.saturate)
        distribute(m, lanes, self.writers, np.ascontiguousarray(total).view(np.uint32))

    def _left(self, m: Machine, lanes: Lanes, t: Type) -> np.ndarray:
        if not isinstance(self.left, list):
            return load(m, lanes, self.left, 64, self.depth, t, self.turned[0])
        return matrix(collect(m, lanes, self.left, TEAM), t, left(64, self.depth, 32 // t.bits), 64, self.depth)

    def _addend(self, m: Machine, lanes: Lanes, out: Type) -> np.ndarray:
        kept = lanes.compress(self.keep(m, lanes))[::TEAM]
        if not kept.any():
            return np.zeros((1, 1), out.dtype)
        held = np.ascontiguousarray(collect(m, lanes, self.readers, TEAM)).view(out.dtype).reshape(len(kept), -1)
        return held if kept.all() else np.where(kept[:, None], held, out.dtype.type(0))


def _multiply(d: Decoder, inst: Instruction, line: Line) -> None:
    rows, columns, depth = extents(inst.op[4])
    out, a, b = (TYPES[w] for w in inst.op[5:] if w != "satfinite")
    results, b32 = parts_of(inst.operands[0]), TYPES["b32"]
    fits = rows == 64 and columns % 8 == 0 and a.bits == b.bits and depth * a.bits == 256
    if not fits or len(results) * 32 != columns // 2 * out.bits:
        raise d.unsupported(inst)
    in_registers = isinstance(inst.operands[1], Group)
    sources = [d.reader(o, b32) for o in counted(d, inst, inst.operands[1], 4)] if in_registers else []
    sign, turned = _immediates(inst.operands[4:], in_registers)
    line.team = TEAM
    line.step = _Product(
        columns,
        depth,
        (out, a, b),
        sources if in_registers else d.reader(inst.operands[1], TYPES["b64"]),
        d.reader(inst.operands[2], TYPES["b64"]),
        d.reader(inst.operands[3], TYPES["pred"]),
        sign,
        turned,
        "satfinite" in inst.op,
        [d.reader(o, b32) for o in results],
        [d.writer(o, b32) for o in results],
        [d.resolve(o.text) for o in results if isinstance(o, Name)],
    )


def _immediates(rest: tuple[Operand, ...], in_registers: bool) -> tuple[int, tuple[bool, bool]]:
    """The product of the signs, and whether A and B lie transposed."""
    numbers = [_number(o) for o in rest]
    sign = numbers[0] * numbers[1] if len(numbers) >= 2 else 1
    turned = [bool(n) for n in numbers[2:]]
    if in_registers:
        return sign, (False, turned[0] if turned else False)
    return sign, (turned[0], turned[1]) if len(turned) == 2 else (False, False)

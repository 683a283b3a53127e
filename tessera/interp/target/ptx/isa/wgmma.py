"""Warpgroup matrix instructions (wgmma): operands in shared memory given by matrix descriptors."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from tessera.core.errors import ExecutionError, OutOfBoundsError
from tessera.interp.target.ptx.isa.decoder import CONTROL_RULES, PtxDecoder, decode_rule
from tessera.interp.target.ptx.isa.mma import (
    add_to_accumulator,
    convert_fragment_to_matrix,
    gather_registers,
    get_storage_dtype,
    make_a_fragment_layout,
    make_accumulator_layout,
    parse_mma_shape,
    require_register_count,
    scatter_registers,
    widen_elements,
)
from tessera.interp.target.ptx.isa.operands import Reader, Writer, get_vector_parts
from tessera.interp.target.ptx.isa.tensor_copy import swizzle_offsets
from tessera.interp.target.ptx.machine.lane_set import LaneSet
from tessera.interp.target.ptx.machine.memory import PtxFault
from tessera.interp.target.ptx.machine.simt import DecodedInstruction, PtxMachine
from tessera.interp.target.ptx.text.syntax import (
    TYPES,
    ImmediateOperand,
    NameOperand,
    PtxInstruction,
    PtxOperand,
    PtxType,
    VectorOperand,
)

WARPGROUP_THREADS = 128
_CHUNK = 16  # bytes; the unit that swizzles permute
_SWIZZLES = {0: 0, 1: 128, 2: 64, 3: 32}


class MatrixDescriptor(NamedTuple):
    """A matrix in shared memory: leading and stride byte offsets, and the swizzle."""

    leading: int
    stride: int
    swizzle: int


def decode_matrix_descriptor(bits: int) -> tuple[int, MatrixDescriptor]:
    """The start of a matrix in its CTA's shared memory, and the rest of its descriptor.

    >>> decode_matrix_descriptor(1 << 62 | (1024 >> 4) << 32 | 1 << 16 | 2048 >> 4)
    (2048, MatrixDescriptor(leading=16, stride=1024, swizzle=128))
    """
    if bits >> 49 & 7:
        raise PtxFault("a matrix descriptor with a base offset is not supported", ExecutionError)
    start, leading, stride = ((bits >> at & 0x3FFF) << 4 for at in (0, 16, 32))
    return start, MatrixDescriptor(leading, stride, _SWIZZLES[bits >> 62])


@lru_cache(maxsize=256)
def compute_chunk_offsets(shape: MatrixDescriptor, rows: int, depth: int, size: int, transposed: bool) -> np.ndarray:
    """Offsets of the 16-byte chunks of a matrix of `rows` (M or N) by `depth` (K) elements, before the swizzle.

    [rows, chunks of a row] if K is contiguous in memory, else [depth, chunks of a column]. The canonical layouts of the
    PTX ISA ("Shared Memory Matrix Layout" of wgmma): groups of 8 lines, `stride` or `leading` bytes apart.
    """
    lines, along = (depth, rows) if transposed else (rows, depth)
    line, chunk = np.meshgrid(np.arange(lines), np.arange(along * size // _CHUNK), indexing="ij")
    group, line = line // 8, line % 8
    if not shape.swizzle:  # 8 lines of one chunk are contiguous
        outer, inner = (shape.leading, shape.stride) if transposed else (shape.stride, shape.leading)
        return group * outer + line * _CHUNK + chunk * inner
    chunks_per_row = shape.swizzle // _CHUNK
    return (
        group * shape.stride
        + line * shape.swizzle
        + chunk // chunks_per_row * shape.leading
        + chunk % chunks_per_row * _CHUNK
    )


def load_shared_matrix(
    m: PtxMachine, lanes: LaneSet, read: Reader, rows: int, depth: int, t: PtxType, transposed: bool
) -> np.ndarray:
    """The matrices [warpgroups, rows, depth] of each warpgroup's descriptor, as float32."""
    leaders = lanes.flat[::WARPGROUP_THREADS]
    bits = lanes.compress(read(m, lanes))[::WARPGROUP_THREADS].tolist()
    raw = m.flat["shared"].views[8].reshape(-1, 2)
    shapes = [decode_matrix_descriptor(b) for b in bits]
    shape = shapes[0][1]
    if any(s[1] != shape for s in shapes):
        raise PtxFault(
            "the matrix descriptors of an instruction differ in more than their start", ExecutionError, int(leaders[0])
        )
    start = np.array([s[0] for s in shapes])
    table = compute_chunk_offsets(shape, rows, depth, t.dtype.itemsize, transposed)
    if int(start.max()) + int(table.max()) + _CHUNK > m.shared_bytes:
        raise PtxFault("a matrix descriptor reaches beyond shared memory", OutOfBoundsError, int(leaders[0]))
    within = swizzle_offsets(start[:, None, None] + table, shape.swizzle)
    positions = within + (leaders // m.threads * m.shared_size)[:, None, None]
    if m.debug:
        m.shadow.record_matrix_read(lanes, positions.reshape(len(leaders), -1), WARPGROUP_THREADS)
    content = raw[positions // _CHUNK].reshape(len(leaders), table.shape[0], -1).view(get_storage_dtype(t))
    result = widen_elements(np.ascontiguousarray(content), t)
    return np.swapaxes(result, 1, 2) if transposed else result


@decode_rule("wgmma", table=CONTROL_RULES)
def _(d: PtxDecoder, inst: PtxInstruction, line: DecodedInstruction) -> None:
    if inst.op[1] == "mma_async" and inst.op[2:4] == ("sync", "aligned"):
        _decode_mma_async(d, inst, line)
        return
    kind = {"fence": "fence", "commit_group": "commit", "wait_group": "wait"}[inst.op[1]]
    pending_groups = inst.operands[0].value if inst.operands and isinstance(inst.operands[0], ImmediateOperand) else 0
    line.group_size = 32
    line.step = lambda m, lanes: m.shadow.record_matrix_group(lanes, kind, pending_groups) if m.debug else None


def _immediate_value(operand: PtxOperand) -> int:
    assert isinstance(operand, ImmediateOperand)
    return operand.value


@dataclass(frozen=True)
class _WgmmaStep:
    """One mma_async: D = A B, or D += A B if `scale_d` is true; `accumulators` are the registers of D."""

    columns: int
    depth: int
    types: tuple[PtxType, PtxType, PtxType]
    operand_a: Reader | list[Reader]  # a descriptor, or the registers of A
    operand_b: Reader
    scale_d: Reader
    sign: int
    transposed: tuple[bool, bool]
    saturate: bool
    readers: list[Reader]
    writers: list[Writer]
    accumulators: list[int]
    fragment: list[int]  # the registers of A, if it is in registers

    def __call__(self, m: PtxMachine, lanes: LaneSet) -> None:
        if not m.debug:
            self._run(m, lanes)
            return
        # The accumulators may be in flight: only a wgmma may use them.
        registers = m.shadow.registers
        registers.in_matrix_instruction = True
        keeps = bool(lanes.compress(self.scale_d(m, lanes)).any())
        registers.check_operands(lanes, [*self.fragment, *(self.accumulators if keeps else ())])
        self._run(m, lanes)
        registers.in_matrix_instruction = False
        registers.record_issue(lanes, self.accumulators, self.fragment)

    def _run(self, m: PtxMachine, lanes: LaneSet) -> None:
        out, a, b = self.types
        x = self._load_a(m, lanes, a)
        y = np.swapaxes(
            load_shared_matrix(m, lanes, self.operand_b, self.columns, self.depth, b, self.transposed[1]), 1, 2
        )
        order = make_accumulator_layout(64, self.columns)
        product = (x @ y if self.sign > 0 else -(x @ y)).reshape(len(y), -1)[:, order]
        total = add_to_accumulator(product, self._load_accumulators(m, lanes, out), out, self.saturate)
        scatter_registers(m, lanes, self.writers, np.ascontiguousarray(total).view(np.uint32))

    def _load_a(self, m: PtxMachine, lanes: LaneSet, t: PtxType) -> np.ndarray:
        if not isinstance(self.operand_a, list):
            return load_shared_matrix(m, lanes, self.operand_a, 64, self.depth, t, self.transposed[0])
        return convert_fragment_to_matrix(
            gather_registers(m, lanes, self.operand_a, WARPGROUP_THREADS),
            t,
            make_a_fragment_layout(64, self.depth, 32 // t.bits),
            64,
            self.depth,
        )

    def _load_accumulators(self, m: PtxMachine, lanes: LaneSet, out: PtxType) -> np.ndarray:
        keeps = lanes.compress(self.scale_d(m, lanes))[::WARPGROUP_THREADS]
        if not keeps.any():
            return np.zeros((1, 1), out.dtype)
        accumulators = (
            np.ascontiguousarray(gather_registers(m, lanes, self.readers, WARPGROUP_THREADS))
            .view(out.dtype)
            .reshape(len(keeps), -1)
        )
        return accumulators if keeps.all() else np.where(keeps[:, None], accumulators, out.dtype.type(0))


def _decode_mma_async(d: PtxDecoder, inst: PtxInstruction, line: DecodedInstruction) -> None:
    rows, columns, depth = parse_mma_shape(inst.op[4])
    out, a, b = (TYPES[w] for w in inst.op[5:] if w != "satfinite")
    results, b32 = get_vector_parts(inst.operands[0]), TYPES["b32"]
    fits = rows == 64 and columns % 8 == 0 and a.bits == b.bits and depth * a.bits == 256
    if not fits or len(results) * 32 != columns // 2 * out.bits:
        raise d.unsupported(inst)
    in_registers = isinstance(inst.operands[1], VectorOperand)
    sources = [d.reader(o, b32) for o in require_register_count(d, inst, inst.operands[1], 4)] if in_registers else []
    sign, transposed = _decode_scale_and_transpose(inst.operands[4:], in_registers)
    named = [get_vector_parts(inst.operands[1]) if in_registers else [], results]
    fragment, accumulators = ([d.resolve(o.text) for o in each if isinstance(o, NameOperand)] for each in named)
    d.program.matrix_registers |= {*fragment, *accumulators}
    line.group_size = WARPGROUP_THREADS
    line.step = _WgmmaStep(
        columns,
        depth,
        (out, a, b),
        sources if in_registers else d.reader(inst.operands[1], TYPES["b64"]),
        d.reader(inst.operands[2], TYPES["b64"]),
        d.reader(inst.operands[3], TYPES["pred"]),
        sign,
        transposed,
        "satfinite" in inst.op,
        [d.reader(o, b32) for o in results],
        [d.writer(o, b32) for o in results],
        accumulators,
        fragment,
    )


def _decode_scale_and_transpose(rest: tuple[PtxOperand, ...], in_registers: bool) -> tuple[int, tuple[bool, bool]]:
    """The product of the scales, and whether A and B are transposed."""
    numbers = [_immediate_value(o) for o in rest]
    sign = numbers[0] * numbers[1] if len(numbers) >= 2 else 1
    transposed = [bool(n) for n in numbers[2:]]
    if in_registers:
        return sign, (False, transposed[0] if transposed else False)
    return sign, (transposed[0], transposed[1]) if len(transposed) == 2 else (False, False)

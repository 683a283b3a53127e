"""Tensor cores: the products that mma.sync computes, and the types of its operands.

(PTX ISA, "Matrix multiply-accumulate operation using mma instruction".)
"""

from __future__ import annotations

import math

from tessera.codegen.ptx.ops import matmul_accumulate
from tessera.codegen.ptx.text.builder import SMALL_FLOATS, element_bytes
from tessera.core.types import DType, bf16, f16, f32, f64, fp8_e4m3, fp8_e5m2, int4, int8, int32, uint8
from tessera.ir.core import Node
from tessera.ops.tensor import contractions

MMA_K_BYTES = 32  # bytes of the k axis of one instruction of the tensor cores
# The operand type of mma.sync for each element type: floats of 8 bits or fewer become f16, accumulated in f32.
MMA_OPERAND_TYPES = {
    bf16: bf16, f16: f16, **dict.fromkeys(SMALL_FLOATS, f16), int4: int8, int8: int8, uint8: uint8,
}  # fmt: skip
# Operand types as PTX instructions spell them.
MMA_TYPE_NAMES = {bf16: "bf16", f16: "f16", fp8_e4m3: "e4m3", fp8_e5m2: "e5m2", int8: "s8", uint8: "u8"}
MIN_MMA_EXTENT = 8  # rows and columns from which tensor cores pay


def uses_tensor_cores(node: Node) -> bool:
    """Whether tensor cores compute a product: their operand and accumulator types, and large enough axes."""
    if node.op not in (contractions.dot, matmul_accumulate):
        return False
    a, b = (v.type for v in node.args[-2:])
    rows, depth, columns = (int(n) for n in (a.shape[-2], a.shape[-1], b.shape[-1]))  # type: ignore[union-attr]
    held, other = (MMA_OPERAND_TYPES.get(x.dtype) for x in (a, b))  # type: ignore[union-attr]
    if held is None or other is None or not are_mma_compatible(held, other):
        return False
    fits = a.rank == 2 and depth * element_bytes(held) % MMA_K_BYTES == 0 and min(rows, columns) >= MIN_MMA_EXTENT  # type: ignore[union-attr]
    return fits and a.accumulate == (f32 if held.is_float else int32)  # type: ignore[union-attr]


DOUBLE_MMA = (16, 8, 8)  # rows, columns and depth of one instruction on doubles


def uses_double_mma(node: Node) -> bool:
    """Whether tensor cores compute a product of doubles: axes that whole instructions cover."""
    if node.op not in (contractions.dot, matmul_accumulate):
        return False
    a, b = (v.type for v in node.args[-2:])
    if a.rank != 2 or {a.dtype, b.dtype, a.accumulate} != {f64}:  # type: ignore[union-attr]
        return False
    rows, depth, columns = (int(n) for n in (a.shape[-2], a.shape[-1], b.shape[-1]))  # type: ignore[union-attr]
    return rows >= DOUBLE_MMA[0] and columns >= DOUBLE_MMA[1] and depth % DOUBLE_MMA[2] == 0


# Bytes after a row of operands whose fragments are read element by element, so that the lanes of an access use all
# banks: where rows are along the contraction (f32: pairs of a row), or across it (f32: every other row).
FRAGMENT_PADDINGS = {f64: (32, 32), f32: (32, 16)}
LEAST_SPLIT = 1 << 14  # multiply-adds of an f32 product from which on its parts of tf32 pay


def uses_split_mma(node: Node) -> bool:
    """Whether tensor cores compute a product of f32 in parts of tf32: axes that whole instructions cover."""
    if node.op not in (contractions.dot, matmul_accumulate):
        return False
    a, b = (v.type for v in node.args[-2:])
    if a.rank != 2 or {a.dtype, b.dtype, a.accumulate} != {f32}:  # type: ignore[union-attr]
        return False
    sizes = rows, depth, columns = tuple(int(n) for n in (a.shape[-2], a.shape[-1], b.shape[-1]))  # type: ignore[union-attr]
    whole = rows >= DOUBLE_MMA[0] and columns >= DOUBLE_MMA[1] and depth % DOUBLE_MMA[2] == 0
    return whole and columns % DOUBLE_MMA[1] == rows & (rows - 1) == 0 and math.prod(sizes) >= LEAST_SPLIT


def uses_any_mma(node: Node) -> bool:
    """Whether tensor cores compute a product, also of doubles, or of f32 in parts."""
    return uses_tensor_cores(node) or uses_double_mma(node) or uses_split_mma(node)


def are_mma_compatible(a: DType, b: DType) -> bool:
    """Whether one instruction takes these operand types: equal ones, or two 8-bit ones that are both floats or not."""
    return a == b or (a.bits == b.bits == 8 and a.is_float == b.is_float)


def mma_type_suffix(a: DType, b: DType) -> str:
    """The suffix of an MMA instruction: its k, the accumulator type and the operand types.

    >>> mma_type_suffix(bf16, bf16), mma_type_suffix(int8, uint8)
    ('k16.f32.bf16.bf16', 'k32.s32.s8.u8')
    """
    return (
        f"k{MMA_K_BYTES // element_bytes(a)}.{'f32' if a.is_float else 's32'}.{MMA_TYPE_NAMES[a]}.{MMA_TYPE_NAMES[b]}"
    )

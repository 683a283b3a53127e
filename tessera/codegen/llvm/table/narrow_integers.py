"""Casts, and the bits of narrow integers that become floats.

These are widened before the bitwise ops, so that the fields of one byte are taken from one register.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tessera.codegen.contract import get_tensor_type
from tessera.codegen.llvm.table.emission import RowTypes, find_row
from tessera.codegen.llvm.table.loop_fusion import (
    element_rule,
    emit_element,
    emit_operation,
    round_to_storage,
    widen_lane,
)
from tessera.codegen.llvm.text.builder import LaneIndex, LaneValue, LoopBody, get_register_type
from tessera.core.types import int32
from tessera.ir.core import Value
from tessera.ops.tensor import basic, elementwise

if TYPE_CHECKING:
    from tessera.codegen.llvm.text.kernel_context import LlvmKernelContext


@element_rule(basic.cast)
def _(body, node, index):
    x, to = node.args[0], get_tensor_type(node.out)
    if to.dtype.is_float and _is_bitwise(body.kernel, x):
        return round_to_storage(body, to, int32, _emit_widened(body, x, index))
    return round_to_storage(body, to, x.type.dtype, emit_element(body, x, index))


_WIDENED = (elementwise.bitwise_and, elementwise.bitwise_or, elementwise.bitwise_xor, elementwise.shift_right)


def _is_bitwise(kernel: LlvmKernelContext, v: Value) -> bool:
    """Whether a value of narrow integers is a fused bitwise op, which gives the same of widened operands."""
    node, dtype = kernel.producers.get(v), get_tensor_type(v).dtype
    narrow = dtype.kind in ("int", "uint") and dtype.bits in (8, 16)
    return narrow and node is not None and node.op in _WIDENED and v not in kernel.buffers and v not in kernel.scalars


def _emit_widened(body: LoopBody, v: Value, index: LaneIndex) -> LaneValue:
    """The elements of a value of narrow integers as int32."""
    memo = body.find_memo(*index)
    if (int32, v, index) not in memo:
        with body.hoist(*index):
            memo[int32, v, index] = _compute_widened(body, v, index)
    return memo[int32, v, index]


def _compute_widened(body: LoopBody, v: Value, index: LaneIndex) -> LaneValue:
    if not _is_bitwise(body.kernel, v):
        return widen_lane(body, get_tensor_type(v).dtype, int32, emit_element(body, v, index))
    node = body.kernel.producers[v]
    emission, operands = find_row(node), [(_emit_widened(body, a, index), int32) for a in node.args]
    with body.kernel.at_node(node):
        return emit_operation(
            body, lambda width, d, *x: emission(RowTypes(get_register_type(int32, width), int32), d, *x), operands
        )

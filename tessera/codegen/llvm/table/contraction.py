"""Contraction: a product that is added to a sum is rounded with it, where the processor has fused multiply-adds.

`llvm.fmuladd` is fused where that is fast, and else rounds the product.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tessera.codegen.contract import get_tensor_type, is_special_policy
from tessera.codegen.llvm.table.emission import format_call
from tessera.codegen.llvm.table.loop_fusion import element_rule, emit_element, emit_operation, emit_pointwise
from tessera.codegen.llvm.text.builder import LaneIndex, LaneValue, LoopBody, get_register_type
from tessera.core.types import f32, f64
from tessera.ir.core import Node, Value
from tessera.ops.tensor import elementwise

if TYPE_CHECKING:
    from tessera.codegen.llvm.text.kernel_context import LlvmKernelContext


def find_product(kernel: LlvmKernelContext, v: Value) -> Node | None:
    """The fused product of floats that a value is, which nothing rounds but itself; None for any other value."""
    node, type = kernel.producers.get(v), get_tensor_type(v)
    if node is None or node.op is not elementwise.mul or v in kernel.buffers or v in kernel.scalars:
        return None
    return node if type.dtype in (f32, f64) and not is_special_policy(type.policy) else None


def emit_contracted(body: LoopBody, product: Node, addend: LaneValue, index: LaneIndex) -> LaneValue:
    """A product at an index plus an addend of its type."""
    dtype = get_tensor_type(product.out).dtype
    factors = [(emit_element(body, v, index), dtype) for v in product.args]

    def lines(width: int, d: str, *operands: str) -> list[str]:
        return [f"{d} = {format_call('llvm.fmuladd', get_register_type(dtype, width), *operands)}"]

    return emit_operation(body, lines, [*factors, (addend, dtype)])


@element_rule(elementwise.add)
def _(body, node, index):
    """A sum within a summed value, of which an operand is a product."""
    if node.out in body.hints.contractible and not is_special_policy(node.out.type.policy):
        for v, other in (node.args, reversed(node.args)):
            product = find_product(body.kernel, v)
            if product is not None:
                return emit_contracted(body, product, emit_element(body, other, index), index)
    return emit_pointwise(body, node, index)

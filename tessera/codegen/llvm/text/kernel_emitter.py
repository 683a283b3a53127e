"""Kernel emitter: the walk over a tile function; each node is a statement, a fused dot, a scalar, or a block."""

from __future__ import annotations

from tessera.codegen.coverage import make_refusal_error
from tessera.codegen.llvm.passes.bufferisation import is_block, is_fusible
from tessera.codegen.llvm.table import REFUSED, scalar_functions
from tessera.codegen.llvm.table.emission import statement_rule
from tessera.codegen.llvm.table.loop_fusion import allocate_block, emit_element, materialise_block
from tessera.codegen.llvm.table.matmul import accumulate_product
from tessera.codegen.llvm.text.builder import LoopBody
from tessera.codegen.llvm.text.kernel_context import LlvmKernelContext
from tessera.core.types import TensorType
from tessera.ir.core import Block, Node
from tessera.ops.tensor.random import round_by_chance


def emit_block(kernel: LlvmKernelContext, block: Block) -> None:
    """Emit the nodes of a block in order."""
    for node in block.nodes:
        for v in node.results:
            kernel.producers[v] = node
        with kernel.at_node(node):
            _emit_node(kernel, node)


def _emit_node(kernel: LlvmKernelContext, node: Node) -> None:
    _check_policy(node)
    rule = statement_rule.get(node.op)
    if node.results and node.results[0] in kernel.plan.fused_dots:
        accumulate_product(kernel, node, kernel.plan.fused_dots[node.out])
    elif rule is not None:
        rule(kernel, node)
    elif not is_fusible(node.op):
        raise make_refusal_error("llvm", node, REFUSED)
    elif not is_block(node.out):
        kernel.scalars[node.out] = emit_element(LoopBody(kernel), node.out, ()).name
    elif node.out in kernel.plan.stored:
        target = allocate_block(kernel, node.out)
        materialise_block(kernel, node.out, target)
        kernel.buffers[node.out] = target


def _check_policy(node: Node) -> None:
    if node.op is round_by_chance:
        return  # its own row rounds from f64, once
    operands = tuple(t.dtype for t in node.types)
    for v in node.results:
        if isinstance(v.type, TensorType) and (value := scalar_functions.find_unsupported_policy(v.type, operands)):
            raise scalar_functions.make_policy_error(value, node.loc)

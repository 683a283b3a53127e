"""Matrix products: by the tensor cores where they take them, else by multiply-add."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tessera.codegen.ptx.blocks.fragments import Fragments
from tessera.codegen.ptx.blocks.multiply import Product
from tessera.codegen.ptx.ops import multiply_add
from tessera.codegen.ptx.passes.products import tensor_cores
from tessera.codegen.ptx.scalars.convert import wrapped
from tessera.codegen.ptx.scalars.policy import stored
from tessera.codegen.ptx.visit import visit
from tessera.ir.core import Node
from tessera.ops import linalg
from tessera.types import TensorType

if TYPE_CHECKING:
    from tessera.codegen.ptx.kernel import Kernel


@visit(linalg.dot, multiply_add)
def _(kernel: Kernel, node: Node) -> None:
    product = (Fragments if kernel.team.threads > 1 and tensor_cores(node) else Product)(kernel, node)
    product.put()
    product.run()
    out = node.out.type
    assert isinstance(out, TensorType)
    sums = [wrapped(kernel.text, product.wide, x) for x in product.sums]
    kernel.values[node.out] = tuple(stored(kernel.text, product.wide, out, x) for x in sums)

"""Index analysis: for comparisons of affine index blocks, the form that is negative where they hold."""

from __future__ import annotations

from collections.abc import Mapping

from tessera.ir.analysis.affine import AffineAnalysis, AffineForm
from tessera.ir.analysis.intervals import IntervalAnalysis
from tessera.ir.core import Node, Value
from tessera.ops.tensor import elementwise

# A comparison holds where the first of its operands, less the second, is below a number; or with operands exchanged.
COMPARISON_OPS = {elementwise.less: (False, 0), elementwise.less_equal: (False, 1), elementwise.greater: (True, 0),
         elementwise.greater_equal: (True, 1)}  # fmt: skip


def find_excess(producers: Mapping[Value, Node], node: Node) -> AffineForm | None:
    """The affine form that is negative exactly where a comparison of indices holds; None for any other node."""
    if node.op not in COMPARISON_OPS:
        return None
    exchanged, offset = COMPARISON_OPS[node.op]
    analysis = AffineAnalysis(producers)
    x, y = (analysis.find_form(v) for v in (reversed(node.args) if exchanged else node.args))
    return None if x is None or y is None else x.plus(y, -1).plus(AffineForm(-offset))


def is_always_negative(ranges: IntervalAnalysis, form: AffineForm, block: tuple[int, ...]) -> bool:
    """Whether a form is negative everywhere in a block, for all programs and iterations."""
    ends = (max(c * end for end in ranges.of(v)) for v, c in form.scalars.items())
    return form.upper_bound_of_block(block) + sum(ends) < 0

"""Shared reductions: one of a value over the same axes that some uses keep and others drop.

`x.mean(1)` beside `x - x.mean(1, keepdims=True)`, as in a variance that is returned with its mean, would read `x`
twice: the nodes differ, so common subexpressions do not see them as one.
"""

from __future__ import annotations

from collections.abc import Hashable

from tessera.ir.core import Function, Node, Value
from tessera.ir.rewrite import RewritePatterns, Rewriter, eliminate_common_subexpressions, rewrite_function
from tessera.lower.indexing_maps import get_shape, get_tensor_type
from tessera.lower.passes.canonicalisation import make_reshape
from tessera.ops.tensor import reduce

REDUCTIONS = (reduce.sum, reduce.max, reduce.min, reduce.argmax, reduce.argmin)


def share_reductions(function: Function) -> Function:
    """A reduction that differs from an earlier one in `keepdims` alone becomes a reshape of it."""
    first: dict[Hashable, Node] = {}
    earlier = {n: first.setdefault(_make_key(n), n) for n in function.body.nodes if n.op in REDUCTIONS}
    if len(earlier) == len(first):
        return function
    patterns = RewritePatterns("shared reductions", same_types=True)

    @patterns(*REDUCTIONS)
    def _(rewriter: Rewriter, node: Node, args: list[Value]) -> Value | None:
        same = earlier.get(node, node)
        return None if same is node else make_reshape(rewriter, rewriter.new(same.out), get_shape(node.out))

    return eliminate_common_subexpressions(rewrite_function(function, patterns, remove_dead=True))


def _make_key(node: Node) -> Hashable:
    """What reductions have in common that differ in `keepdims` alone."""
    rest = {name: value for name, value in node.attrs.items() if name != "keepdims"}
    return node.op, node.args, repr(rest), get_tensor_type(node.out).with_shape(())

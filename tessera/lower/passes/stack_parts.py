"""Parts of stacks: one part of what is computed from stacked tensors is computed from the parts of the stacks.

A stack is a concatenation of tensors of size 1 along its axis, as the windows of a pool are. Where reductions of such a
value combine its parts, and slices take them, the stack needs no memory, and kernels that read it no selections.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tessera.ir.core import Node, Value
from tessera.ir.rewrite import Rewriter
from tessera.ops.tensor import basic, shape

MAX_NODES = 16  # between a part and its stacks; more are computed once, for all parts


@dataclass
class PartFinder:
    """Computes the parts of values along an axis, which is counted from the end (negative)."""

    rewriter: Rewriter
    axis: int
    found: dict[tuple[Value, int], Value] = field(default_factory=dict)

    def is_stacked(self, value: Value) -> bool:
        """Whether a value is computed by elementwise ops from stacks along the axis, and from what does not change."""
        nodes: dict[Value, None] = {}
        return self._walk(value, nodes) and any(self._find_stack(v) is not None for v in nodes)

    def _walk(self, value: Value, nodes: dict[Value, None]) -> bool:
        if value in nodes:
            return True
        nodes[value] = None
        node = self._find(value)
        if node is None or value.type.policy is not None or len(nodes) > MAX_NODES:  # type: ignore[union-attr]
            return False
        if self._find_stack(value) is not None or self._is_spread(node) or node.op is basic.full:
            return True
        return node.op.pointwise and node.op is not shape.check_index and all(self._walk(v, nodes) for v in node.args)

    def _find(self, value: Value) -> Node | None:
        return self.rewriter.builder.producers.get(value)

    def _find_stack(self, value: Value) -> Node | None:
        """The concatenation that stacks a value along the axis."""
        node = self._find(value)
        if node is None or node.op is not shape.concatenate or self._from_end(node.attrs["axis"], value) != self.axis:
            return None
        return node if all(v.type.shape[self.axis] == 1 for v in node.args) else None  # type: ignore[union-attr]

    def _from_end(self, axis: int, value: Value) -> int:
        return axis if axis < 0 else axis - value.type.rank  # type: ignore[union-attr]

    def _is_spread(self, node: Node) -> bool:
        """Whether a value is the same all along the axis."""
        if node.op is not basic.broadcast_to:
            return False
        sizes = node.args[0].type.shape  # type: ignore[union-attr]
        return len(sizes) < -self.axis or sizes[self.axis] == 1

    def take(self, value: Value, place: int) -> Value:
        """The part of a stacked value at a place, of size 1 along the axis."""
        key = value, place
        if key not in self.found:
            self.found[key] = self._take(value, place)
        return self.found[key]

    def _take(self, value: Value, place: int) -> Value:
        node = self._find(value)
        assert node is not None, "a stacked value is computed"
        if (stack := self._find_stack(value)) is not None:
            return stack.args[place]
        sizes = list(value.type.shape)  # type: ignore[union-attr]
        sizes[self.axis] = 1
        if node.op in (basic.broadcast_to, basic.full):
            return self.rewriter.add(node.op, *node.args, **{**node.attrs, "shape": tuple(sizes)})
        return self.rewriter.add(node.op, *(self.take(v, place) for v in node.args), **node.attrs)
